"""Training that is killed, told to end, or out of room goes on as if nothing had happened."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sable.training import checkpoint
from sable.training.logging import read_rows

VICTIM = Path(__file__).with_name("victim.py")


def arrays(directory: Path) -> dict[str, np.ndarray]:
    return checkpoint.read(directory, "")


def timeless(directory: Path) -> list[dict]:
    return [
        {name: value for name, value in row.items() if name != "wall_seconds"}
        for row in read_rows(directory / "metrics.jsonl")
    ]


def assert_same_end(a: Path, b: Path) -> None:
    """Both runs ended with the same bits: parameters, all else that a checkpoint holds, metrics, returns."""
    ours, theirs = arrays(a), arrays(b)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.tobytes() == theirs[name].tobytes(), name
    assert timeless(a) == timeless(b)
    returns = [json.loads((run / "summary.json").read_text())["absolute_return"] for run in (a, b)]
    assert returns[0] == returns[1]


@pytest.mark.parametrize(
    ("system", "evaluations", "kills"),
    [
        ("ippo", 6, 3),
        pytest.param("sable", 24, 36, marks=pytest.mark.slow),
        pytest.param("hasac", 16, 14, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_and_resumed_it_ends_the_same(tmp_path, capsys, system, evaluations, kills):
    """kill -9, most of them while a checkpoint is being written; after each, no checkpoint that was committed
    is lost, and the run goes on to the same bits."""
    command = [sys.executable, str(VICTIM), str(tmp_path), system, str(evaluations), str(kills), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lives) == kills
    assert not any(life["lost"] for life in lives)
    assert all(life["committed"] == life["whole"] for life in lives), "a torn checkpoint has a number"
    inside = sum(life["inside"] for life in lives)
    assert 2 * inside >= kills, f"only {inside} of {kills} were inside a save"
    whole, *killed = sorted((path.parent for path in tmp_path.rglob("summary.json")), reverse=True)
    assert whole.name == "whole" and killed
    for run in killed:
        assert_same_end(run, whole)
    with capsys.disabled():
        print(f"\n{system}: {kills} kills, {inside} inside a save, {len(killed)} runs, all to the same bits")
