"""Training that is killed, told to end, or out of room goes on as if nothing had happened."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sable.cli.main import main
from sable.errors import SableError
from sable.training import checkpoint, loop, progress
from sable.training import device_memory as memory
from sable.training.loggers.logger import Logger, read_rows

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
        pytest.param("ippo", 6, 3, marks=pytest.mark.slow),
        pytest.param("sable", 24, 40, marks=pytest.mark.slow),
        pytest.param("gru", 16, 20, marks=pytest.mark.slow),
        pytest.param("qmix", 16, 20, marks=pytest.mark.slow),
        pytest.param("masac", 16, 20, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_and_resumed_it_ends_the_same(tmp_path, capsys, system, evaluations, kills):
    """kill -9, half of them while a checkpoint is being written, others in the absolute evaluation and while
    the film is made; after each, no checkpoint that was committed is lost, and the run goes on to the same
    bits."""
    command = [sys.executable, str(VICTIM), "kill", str(tmp_path), system]
    command += [str(evaluations), str(kills), "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lives) == kills
    assert not any(life["lost"] for life in lives)
    assert all(life["committed"] == life["whole"] for life in lives), "a torn checkpoint has a number"
    moments = Counter(life["moment"] for life in lives)
    if kills >= 20:
        assert 3 * moments["save"] >= kills and moments["absolute"] and moments["video"], moments
    whole, *killed = sorted((path.parent for path in tmp_path.rglob("summary.json")), reverse=True)
    assert whole.name == "whole" and killed
    for run in killed:
        assert_same_end(run, whole)
    with capsys.disabled():
        where = ", ".join(f"{count} in {moment}" for moment, count in sorted(moments.items()))
        print(f"\n{system}: {kills} kills ({where}), {len(killed)} runs, all to the same bits")


@pytest.mark.parametrize(
    ("system", "evaluations", "kills"),
    [
        ("ippo", 4, 2),
        pytest.param("sable", 24, 20, marks=pytest.mark.slow),
        pytest.param("qmix", 16, 20, marks=pytest.mark.slow),
    ],
)
def test_killed_behind_training_that_went_on_it_ends_the_same(tmp_path, capsys, system, evaluations, kills):
    """kill -9 while a checkpoint is written in the background and updates after it are finished: nothing that
    was committed is lost, and what was being written has no number."""
    command = [
        sys.executable,
        str(VICTIM),
        "behind",
        str(tmp_path),
        system,
        str(evaluations),
        str(kills),
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert [life["moment"] for life in lives] == ["behind"] * kills
    assert not any(life["lost"] for life in lives)
    assert all(life["committed"] == life["whole"] for life in lives), "a torn checkpoint has a number"
    whole, *killed = sorted((path.parent for path in tmp_path.rglob("summary.json")), reverse=True)
    assert whole.name == "whole" and killed
    for run in killed:
        assert_same_end(run, whole)
    with capsys.disabled():
        print(f"\n{system}: {kills} kills behind training, {len(killed)} runs, all to the same bits")


@pytest.mark.parametrize("count", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_asked_to_end_behind_a_save_it_loses_nothing(tmp_path, capsys, count):
    """SIGTERM while a checkpoint is written in the background and training has gone on."""
    command = [sys.executable, str(VICTIM), "end", str(tmp_path), "ippo", str(count), "0", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lives) == count
    for life in lives:
        assert life["behind"] and life["code"] == 128 + signal.SIGTERM and life["seconds"] < 10, life
        assert life["saved"] == life["finished"] > 0, life
    with capsys.disabled():
        longest = max(life["seconds"] for life in lives)
        print(f"\n{count} of {count} ended behind a save of a second, the slowest in {longest:.1f} s")


@pytest.mark.parametrize(("count", "blocks"), [(1, 2), pytest.param(20, 6, marks=pytest.mark.slow)])
def test_asked_to_end_it_saves_what_is_finished_and_ends_within_ten_seconds(tmp_path, capsys, count, blocks):
    """SIGTERM, half of them while a program compiles, for longer than that where there are six blocks. (In
    `test_loop.py` it comes while a unit runs.)"""
    command = [sys.executable, str(VICTIM), "end", str(tmp_path), "sable", str(count), str(blocks), "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lives) == count
    for life in lives:
        assert life["seconds"] < 10 and life["code"] == 128 + signal.SIGTERM, life
        assert life["saved"] == life["finished"], life
    assert sum(life["phase"] == "compiling" for life in lives) >= count // 2
    if blocks > 2:
        assert "interrupted; go on with: sable train --resume" in done.stderr  # by one that was compiling
    with capsys.disabled():
        longest = max(life["seconds"] for life in lives)
        print(f"\n{count} of {count} ended, all finished work saved, the slowest in {longest:.1f} s")


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 16 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not shutil.which("mount") or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


def test_a_disk_that_takes_nothing_more_is_one_line_and_older_checkpoints_stay(small_disk, capfd):
    state = {"x": jnp.asarray(np.random.default_rng(0).normal(size=100_000))}
    logger = Logger(small_disk, title="", seeds=(0,), total_steps=10, quiet=True)
    for step in (1, 2):
        checkpoint.save(small_disk, step, state, {"updates": step})
    fill(small_disk)
    with pytest.raises(SableError, match="No space left on device; those before it are untouched"):
        checkpoint.save(small_disk, 3, state, {"updates": 3})
    with pytest.raises(SableError, match=r"metrics.jsonl: No space left on device"):
        for step in range(10_000):
            logger.evaluation(step, {"evaluation/return": [0.5]})
    logger.close()
    assert sorted(path.name for path in (small_disk / checkpoint.FOLDER).iterdir()) == [
        "0000000001", "0000000002",
    ]  # fmt: skip
    assert checkpoint.restore(small_disk, state).facts == {"updates": 2}
    (small_disk / "filler").unlink()
    checkpoint.save(small_disk, 3, state, {"updates": 3})
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(SableError, match="Read-only file system; those before it are untouched"):
        checkpoint.save(small_disk, 4, state, {"updates": 4})
    with pytest.raises(SableError, match="Read-only file system"):
        Logger(small_disk, title="", seeds=(0,), total_steps=10, quiet=True)
    assert checkpoint.restore(small_disk, state).facts == {"updates": 3}
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
def test_a_run_on_a_full_or_read_only_disk_says_so_and_goes_on_later(
    small_disk, tmp_path, monkeypatch, capfd, behind
):
    if behind:  # all is written in the background
        monkeypatch.setattr(progress, "SMALL_STATE", 0)
        monkeypatch.setattr(progress, "MAX_SAVING_SHARE", float("inf"))

    class Filling(Logger):
        """Fills the disk at the third evaluation."""

        evaluations = 0

        def phase(self, text):
            super().phase(text)
            self.evaluations += text == "evaluating"
            if behind and text == "evaluating":
                time.sleep(0.3)  # or a save is left out while one is written
            if text == "saving" and self.evaluations == 3:
                fill(small_disk)

    flags = ["--total-steps", "64", "--num-envs", "4", "--rollout-length", "4", "--num-evaluations", "4"]
    flags += ["--num-minibatches", "1", "--evaluation-episodes", "2", "--absolute-episodes", "2"]
    flags += ["--critic-layers", "64", "64", "--out", str(small_disk), "--name", "r", "--quiet", "--no-video"]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Logger", Filling)
        assert main(["train", "probe/bandit", "--system", "ippo", *flags]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "No space left on device" in said and "--resume" in said
    run = small_disk / "probe" / "bandit" / "ippo" / "r"
    folder = run / checkpoint.FOLDER
    before = checkpoint.steps(folder)
    assert len(before) == 2 and all(checkpoint._is_whole(folder / f"{step:010d}") for step in before)
    assert not list(folder.glob(".partial*"))
    assert main(["train", "--quiet", "--resume", str(run)]) == 2, "the disk is still full"
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "No space left on device" in said
    assert checkpoint.steps(folder) == before
    (small_disk / "filler").unlink()
    assert main(["train", "--quiet", "--resume", str(run)]) == 0
    assert len(timeless(run)) == 4 and (run / "summary.json").is_file()
    capfd.readouterr()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert main(["train", "--quiet", "--resume", str(run)]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "Read-only file system" in said
    assert main(["train", "probe/bandit", "--system", "ippo", "--out", str(small_disk)]) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert main(["export", str(run), "-o", str(small_disk / "team")]) == 2
    assert "Read-only file system" in capfd.readouterr().err
    assert main(["export", str(run), "-o", str(tmp_path / "team")]) == 0, "reading needs no writing"


def test_memory_that_a_device_does_not_have_is_one_line():
    with (
        pytest.raises(SableError, match=r"ran out of memory .* fewer --num-envs") as error,
        memory.explain_out_of_memory(),
    ):
        jnp.zeros(1 << 46).block_until_ready()
    assert "\n" not in str(error.value)
    with pytest.raises(ZeroDivisionError), memory.explain_out_of_memory():
        _ = 1 / 0


@pytest.mark.slow
def test_a_device_that_runs_out_of_memory_while_training_is_one_line(tmp_path):
    """The process may take no more of it once the program is compiled."""
    code = """
import re, resource, sys
from pathlib import Path
from sable.cli.main import main
from sable.training import loop

class Tight(loop.Logger):
    def phase(self, text):
        super().phase(text)
        if text == "training":
            used = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
            resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), used + (32 << 20)))

loop.Logger = Tight
sys.exit(main(sys.argv[1:]))
"""
    flags = ["--num-envs", "2048", "--rollout-length", "128", "--total-steps", "1e6", "--num-epochs", "1"]
    command = [sys.executable, "-c", code, "train", "probe/bandit", "--system", "ippo", "--quiet", *flags]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if line.startswith("sable:")]
    assert len(said) == 1 and "ran out of memory" in said[0] and "--num-envs" in said[0], done.stderr
    assert "Traceback" not in done.stderr
