"""What older versions wrote, in tests/fixtures, is read as it was."""

import json
import shutil
import sys
import tarfile
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sable
from sable.cli.main import main
from sable.config import SableConfig, meaning
from sable.config.schema import field_names
from sable.errors import SableError
from sable.reports import ledger
from sable.reports import read as results
from sable.runs import directory as runs
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


def edited(path, part, **fields):
    """Change fields of a config.json, of which its sums then know nothing."""
    data = json.loads(path.read_text())
    data[part] |= fields
    path.write_text(json.dumps(data))
    (path.parent / "sums.json").unlink(missing_ok=True)


def test_settings_are_read_under_the_names_of_now(old):
    paths = sorted(old.rglob("config.json"))
    assert len(paths) >= 6
    for path in paths:
        stored = json.loads(path.read_text())
        config = runs.read_config(path.parent)
        assert config.run.reset_pool_size == stored["run"]["pool_size"]
        assert config.run.env_options == tuple(stored["run"]["options"])
        if isinstance(config.system, SableConfig):
            assert config.system.compute_dtype == stored["config"]["compute"]
            kind = SableConfig.__dataclass_fields__["decoding"].type
            assert config.system.decoding in tp.get_args(kind)
        plain_run, plain = runs.read_plain_config(path.parent)
        assert plain_run == config.run and plain == {name: getattr(config.system, name) for name in plain}
        assert list(plain) == field_names(type(config.system))


def test_a_value_of_before_is_read_by_its_new_name(old):
    folder = old / "finished" / "probe" / "recall" / "sable" / "sable"
    kind = tp.get_args(SableConfig.__dataclass_fields__["decoding"].type)
    for then, now in (("scan", "sequential"), ("kernel", "fused")):
        edited(folder / "config.json", "config", decoding=then)
        expected = then if then in kind else now
        assert runs.read_plain_config(folder)[1]["decoding"] == expected


def test_hashes_are_those_of_the_stored_text(old):
    """Or a number could be published again by a luckier run of the same settings."""
    path = old / "results"
    (row,) = ledger.read(path)
    stored = json.loads((path / "ledger.jsonl").read_text())
    assert ledger.config_hash(row["settings"]) == row["config_hash"] == stored["config_hash"]
    assert row["settings"] == stored["settings"] and ledger.identity(row) == ledger.identity(stored)
    ledger.remake(path)
    (again,) = ledger.read(path)
    assert again["config_hash"] == row["config_hash"] and ledger.identity(again) == ledger.identity(row)
    assert again["settings"] == stored["settings"]


def test_every_row_of_ours_keeps_its_hash():
    rows = ledger.read(Path(__file__).parents[1] / "results")
    assert rows and all(ledger.config_hash(row["settings"]) == row["config_hash"] for row in rows)
    assert not any("compute=" in row["system"] or " --compute " in row["command"] for row in rows)


def test_a_setting_of_a_new_name_is_still_compared(old, capsys):
    """A checkpoint of other settings is another run's, whatever its settings were called then."""
    folder = old / "finished" / "probe" / "recall" / "sable" / "sable"
    edited(folder / "config.json", "run", pool_size=64)
    assert main(["evaluate", str(folder), "--episodes", "4"]) == 2
    assert "is another run's: reset_pool_size is 0 there and 64" in capsys.readouterr().err
    edited(folder / "config.json", "run", pool_size=0)
    edited(folder / "config.json", "config", compute="bfloat16")
    assert main(["evaluate", str(folder), "--episodes", "4"]) == 2
    assert "compute_dtype is 'float32' there and 'bfloat16'" in capsys.readouterr().err


@pytest.mark.parametrize("system", ["sable", "mat", "qmix"])
def test_a_run_of_before_is_evaluated_and_exported(old, system, tmp_path, capsys):
    folder = next(iter((old / "finished").glob(f"probe/*/{system}/{system}")), None)
    if folder is None:
        pytest.skip("none was kept")
    assert main(["evaluate", str(folder), "--episodes", "4"]) == 0
    assert main(["export", str(folder), "-o", str(tmp_path / "out")]) == 0
    assert sable.load(tmp_path / "out").seed in runs.read_config(folder).run.seeds
    capsys.readouterr()


@pytest.mark.parametrize("system", ["sable", pytest.param("qmix", marks=pytest.mark.slow)])
def test_a_run_of_before_goes_on(old, as_meant_then, system, capsys):
    """It has finished: what is done again is its last evaluation, from the checkpoint."""
    folder = old / "finished" / "probe" / "recall" / system / system
    if not folder.is_dir():
        pytest.skip("none was kept")
    before = runs.read_summary(folder)["absolute_return"]
    assert main(["train", "--resume", str(folder), "--quiet"]) == 0
    np.testing.assert_allclose(runs.read_summary(folder)["absolute_return"], before, atol=0.3)
    capsys.readouterr()


def test_a_run_of_before_is_refused_for_its_meaning_alone(old, capsys):
    assert main(["train", "--resume", str(old / "finished" / "probe" / "recall" / "sable" / "sable")]) == 2
    said = capsys.readouterr().err
    assert "was begun when" in said and said.count("\n") == 1


def test_older_rows_and_runs_are_listed_and_reported(old, tmp_path, capsys):
    assert main(["reproduce", "--results", str(old / "results")]) == 0
    assert "probe/recall:sable" in capsys.readouterr().out
    found = [str(old / "finished"), str(old / "benchmark"), str(old / "results")]
    assert main(["report", *found, "-o", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "report.md").is_file()
    capsys.readouterr()


CELL = "num-envs=4:rollout-length=8:num-epochs=1:num-minibatches=1:embed-dim=8:num-heads=1:num-blocks=1"
BUDGET = "--num-seeds 2 --total-steps 128 --num-evaluations 2 --evaluation-episodes 4 --absolute-episodes 8"


@pytest.fixture
def cell(old):
    """A finished cell whose folder and label have words that are no more."""
    name = CELL.replace(":", "+")
    place = old / "benchmark" / "probe" / "bandit" / "sable"
    folder = (place / f"no-memory+{name}").rename(place / f"no-memory+compute=bfloat16+{name}")
    label = f"sable no-memory compute=bfloat16 {CELL.replace(':', ' ')}"
    edited(folder / "config.json", "config", compute="bfloat16")
    edited(folder / "config.json", "run", label=label)
    for path in sorted((old / "benchmark").rglob("config.json")):  # which the older of them do not say
        edited(path, "config", advantage_floor=0.1)
    return folder


def test_a_cell_of_before_is_found_by_its_new_words(old, cell, as_meant_then, capsys):
    systems = ["--systems", f"sable:no-memory:compute-dtype=bfloat16:{CELL}", f"mat:rms-norm:{CELL}"]
    where = ["--out", str(old / "benchmark"), "--no-video"]
    assert main(["benchmark", "probe/bandit", *BUDGET.split(), *where, *systems, "--list"]) == 0
    said = capsys.readouterr().out
    assert said.count("finished") == 2 and "waiting" not in said and "\u00b7" not in said
    again = sable.grid(
        "probe/bandit",
        systems=systems[1:2],
        num_seeds=2,
        out=old / "benchmark",
        total_steps=128,
        num_evaluations=2,
        evaluation_episodes=4,
        absolute_episodes=8,
        video=False,
    )
    assert [one.directory for one in again] == [cell] and again[0].finished


def test_a_cell_of_before_with_other_settings_is_refused(old, cell, as_meant_then, capsys):
    edited(cell / "config.json", "run", pool_size=64)
    where = ["--out", str(old / "benchmark"), "--no-video"]
    systems = ["--systems", f"sable:no-memory:compute-dtype=bfloat16:{CELL}"]
    assert main(["benchmark", "probe/bandit", *BUDGET.split(), *where, *systems, "--list"]) == 2
    assert "was begun with reset_pool_size=64, not 0" in capsys.readouterr().err


def test_labels_of_before_and_of_now_are_one_system(old, cell):
    systems = {series.system for series in results.read([old / "benchmark"]).series}
    assert any("compute-dtype=bfloat16" in system for system in systems)
    assert not any("compute=bfloat16" in system for system in systems)


def test_a_study_is_read(old, as_meant_then):
    pytest.importorskip("optuna")
    directory = old / "tuning" / "probe" / "bandit" / "ippo"
    about = json.loads((directory / "study.json").read_text())
    del about["name"]
    study = trials.Study(directory, {"meaning": 0} | about, None, 0)
    assert [trial.state for trial in study.records()] == ["complete", "complete"]
    assert [len(batch.points) for batch in study.batches()] == [2]


def test_a_study_of_other_settings_is_refused(old, as_meant_then):
    directory = old / "tuning" / "probe" / "bandit" / "ippo"
    about = json.loads((directory / "study.json").read_text())
    del about["name"]
    run = dict(about["run"])
    run["reset_pool_size"], run["env_options"] = run.pop("pool_size"), run.pop("options")
    trials.Study(directory, {"meaning": 0} | about | {"run": run}, None, 0)
    with pytest.raises(SableError, match="begun with reset_pool_size=0, not 64"):
        trials.Study(directory, {"meaning": 0} | about | {"run": run | {"reset_pool_size": 64}}, None, 0)


def test_a_recipe_of_before_is_read(old):
    recipe = old / "tuning" / "probe" / "bandit" / "ippo" / "recipe.toml"
    config = sable.configure("probe/bandit", system="ippo", recipe=recipe).system
    assert f"clip_eps = {config.clip_eps}" in recipe.read_text()  # pyright: ignore[reportAttributeAccessIssue]
