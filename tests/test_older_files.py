"""What older versions wrote, in tests/fixtures, is read as it was."""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

import sable
from sable.reports import ledger
from sable.reports import read as results
from sable.studies import trials

FIXTURES = Path(__file__).with_name("fixtures")
COMMITS = ("b5b24c0", "504780e")


@pytest.fixture(params=COMMITS)
def old(request, tmp_path):
    """A copy of the files of one commit, the checkpoints of its runs unpacked."""
    place = shutil.copytree(FIXTURES / request.param, tmp_path / request.param)
    for packed in place.rglob("checkpoints.tar.xz"):
        with tarfile.open(packed) as archive:
            archive.extractall(packed.parent, filter="data")
        packed.unlink()
    return place


def test_an_exported_team_loads_and_acts(old):
    team = sable.load(old / "team")
    team.reset(batch=2)
    views = np.zeros((2, team.spec.num_agents, team.spec.view_size), np.float32)
    assert team.act(views, greedy=True).shape == (2, team.spec.num_agents)


def test_runs_cells_and_the_row_are_read(old):
    """Runs of before sums.json say so; nothing else is odd."""
    found = results.read([old / "finished", old / "benchmark"])
    expected = ("sums.json", "side by side")  # the runs are of different lengths
    assert [note for note in found.notes if not any(words in note for words in expected)] == []
    assert {series.task for series in found.series} == {"probe/recall", "probe/masked", "probe/bandit"}
    (row,) = ledger.read(old / "results")
    assert row["row"] == "probe/recall:sable" and row["seeds"] == [3, 5]
    kept = results.read([old / "results" / row["data"]]).series
    assert [series.absolute for series in kept] == row["absolute_return"]


def test_a_study_is_read(old):
    directory = old / "tuning" / "probe" / "bandit" / "ippo"
    about = json.loads((directory / "study.json").read_text())
    del about["name"]
    study = trials.Study(directory, {"meaning": 0} | about, None, 0)
    assert [trial.state for trial in study.tried()] == ["complete", "complete"]
    assert [len(batch.points) for batch in study.batches()] == [2]
