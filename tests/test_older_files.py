"""What older versions wrote, in tests/fixtures, is read as it was."""

import json
import shutil
import sys
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sable
from sable.cli.main import main
from sable.config import meaning
from sable.reports import ledger
from sable.reports import read as results
from sable.studies import trials
from sable.training import checkpoint

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


def test_a_checkpoint_of_orbax_holds_what_was_exported(old):
    """To the last bit, and the newest alone."""
    pytest.importorskip("orbax.checkpoint")
    exported = sable.load(old / "team")
    found = sable.load(old / "finished" / "probe" / "recall" / "sable" / "sable", seed=exported.seed)
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), found.params, exported.params
    )
    assert all(jax.tree.leaves(same)) and jax.tree.structure(found.params) == jax.tree.structure(
        exported.params
    )


RUNS = {"sable": "probe/recall/sable/sable", "mat": "probe/masked/mat/mat", "qmix": "probe/recall/qmix/qmix"}


@pytest.mark.slow
@pytest.mark.parametrize("system", RUNS)
def test_a_run_of_orbax_is_evaluated_and_gone_on_with(old, system, monkeypatch, capsys):
    """Every array has the place in today's state that it had then; meanings are not what is tested."""
    pytest.importorskip("orbax.checkpoint")
    run = old / "finished" / RUNS[system]
    if not run.is_dir():
        pytest.skip("this version's has none")
    assert len(sable.evaluate(run, episodes=2)["return"]) == (2 if system == "sable" else 1)
    if (old.name, system) == ("b5b24c0", "mat"):
        return  # its network is only that of its meaning
    monkeypatch.setattr(meaning, "CHANGES", ())
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    said = capsys.readouterr().err
    assert "damaged" not in said and "does not fit" not in said and "one before it" not in said


def test_a_checkpoint_of_today_lies_beside_one_of_orbax(old, capsys):
    """The newer is read, and where that is damaged the older."""
    pytest.importorskip("orbax.checkpoint")
    run = old / "finished" / RUNS["sable"]
    before = checkpoint.read(run, "best.")
    newest = checkpoint.save(
        run, 13, {"best": {"score": jnp.asarray(before["best.score"]) + 1}}, {"updates": 9}
    )
    assert checkpoint.steps(run / checkpoint.FOLDER) == [12, 13]
    np.testing.assert_array_equal(checkpoint.read(run, "best.")["best.score"], before["best.score"] + 1)
    (newest / checkpoint.ARRAYS).unlink()
    again = checkpoint.read(run, "best.")
    assert all(np.array_equal(again[name], before[name]) for name in before.keys() | again.keys())
    assert "0000000013 is damaged: arrays.safetensors is missing; using the one" in capsys.readouterr().err


def contents(run: str) -> dict[Path, bytes]:
    files = [path for path in Path(run).rglob("*") if path.is_file() and path.name != ".claim"]
    return {path: path.read_bytes() for path in files}


def test_without_orbax_its_checkpoints_are_one_line(old, monkeypatch, tmp_path, capsys):
    """And nothing is begun anew or written; what needs no checkpoint is read as before."""
    monkeypatch.setitem(sys.modules, "orbax", None)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    monkeypatch.setattr(meaning, "CHANGES", ())
    run = str(old / "finished" / RUNS["sable"])
    before = contents(run)
    for command in (
        ["evaluate", run],
        ["export", run, "-o", str(tmp_path / "t")],
        ["train", "--resume", run],
    ):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.splitlines()[-1].endswith("pip install 'sable-marl[orbax]'"), said
        assert "Traceback" not in said and "0000000012 is of an older version" in said
    assert contents(run) == before and not (tmp_path / "t").exists()
    assert sable.load(old / "team").params


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


@pytest.fixture
def as_meant_then(monkeypatch):
    """Training means what it always meant: older runs are refused for nothing but their names."""
    monkeypatch.setattr(meaning, "CHANGES", ())


def test_a_study_is_read(old, as_meant_then):
    pytest.importorskip("optuna")
    directory = old / "tuning" / "probe" / "bandit" / "ippo"
    about = json.loads((directory / "study.json").read_text())
    del about["name"]
    study = trials.Study(directory, {"meaning": 0} | about, None, 0)
    assert [trial.state for trial in study.records()] == ["complete", "complete"]
    assert [len(batch.points) for batch in study.batches()] == [2]
