"""What a checkpoint knows of the files beside it: altered, cut and missing ones are noticed, and the
evaluations so far are written anew."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import sable
from sable.errors import SableError
from sable.runs import directory as runs
from sable.training import checkpoint, loop, records
from sable.training.loggers.logger import METRICS, Logger, MetricsFile, read_rows

STATE = {"x": jnp.arange(3.0)}
LIKE = jax.eval_shape(lambda: STATE)


def row(steps: int) -> bytes:
    return json.dumps({"seed": 0, "env_steps": steps, "wall_seconds": 0.25, "x": steps / 3}).encode() + b"\n"


SERIES = row(100) + row(200)


def make(directory: Path, metrics: bytes | None = SERIES) -> Logger:
    return Logger(
        directory, title="", seeds=(0,), total_steps=400, resume_steps=200, metrics=metrics, quiet=True
    )


@pytest.fixture
def saved(tmp_path):
    """A run's folder with a checkpoint."""
    runs.write_json(
        tmp_path / "config.json", {"format": 1, "run": {"devices": 1, "seeds": [0, 2]}, "config": {}}
    )
    runs.write_json(tmp_path / "spec.json", {"num_agents": 2})
    (tmp_path / METRICS).write_bytes(SERIES)
    checkpoint.save(tmp_path, 3, STATE, {}, None, records.fingerprints(tmp_path), SERIES)
    return tmp_path


def test_a_manifest_holds_length_and_sum_of_metrics_and_sums_of_config_and_spec(saved):
    manifest = json.loads((saved / "checkpoints" / "0000000003" / "manifest.json").read_text())
    assert manifest["records"][METRICS] == {"bytes": len(SERIES), "sha256": sha256(SERIES).hexdigest()}
    assert manifest["records"]["spec.json"] == sha256((saved / "spec.json").read_bytes()).hexdigest()
    assert len(manifest["records"]["config.json"]) == 64
    assert checkpoint.restore(saved, LIKE).metrics == SERIES


@pytest.mark.parametrize("name", ["config.json", "spec.json"])
@pytest.mark.parametrize("how", ["altered", "removed"])
def test_other_settings_or_another_environment_are_refused_in_one_line(saved, name, how):
    path = saved / name
    if how == "altered":
        path.write_text(path.read_text().replace("2", "3"))
    else:
        path.unlink()
    for read in (lambda: checkpoint.restore(saved, LIKE), lambda: checkpoint.read(saved, "")):
        with pytest.raises(
            SableError, match=rf"{name} (is not|was there and is not).*when .*0000000003"
        ) as error:
            read()
        assert "\n" not in str(error.value)


def test_another_number_of_devices_and_other_white_space_are_the_same_settings(saved):
    data = json.loads((saved / "config.json").read_text())
    data["run"]["devices"] = 4
    (saved / "config.json").write_text(json.dumps(data))
    checkpoint.restore(saved, LIKE)


@pytest.mark.parametrize(
    ("there", "words", "kept"),
    [
        (None, "was missing: written anew from the checkpoint", False),
        (SERIES[:-7], "was cut short", False),
        (b"", "was cut short", False),
        (SERIES.replace(b"0.25", b"0.26"), "is not what was written", True),
        (SERIES[len(row(100)) :] + row(300), "is not what was written", True),
        (SERIES, "", False),
        (SERIES + row(300) + row(400)[:9], "", False),
    ],
    ids=["missing", "cut", "empty", "altered", "first row gone", "whole", "longer"],
)
def test_metrics_are_what_they_were_at_the_checkpoint(tmp_path, capsys, there, words, kept):
    if there is not None:
        (tmp_path / METRICS).write_bytes(there)
    with make(tmp_path) as logger:
        assert (tmp_path / METRICS).read_bytes() == SERIES == logger.metrics()
        logger.evaluation(300, {"x": [1.0]})
    said = capsys.readouterr().err
    assert said.count("\n") == bool(words) and words in said
    aside = tmp_path / f".damaged-{METRICS}"
    assert aside.exists() == kept and (not kept or aside.read_bytes() == there)
    assert [one["env_steps"] for one in read_rows(tmp_path / METRICS)] == [100, 200, 300]


def test_a_checkpoint_from_before_there_were_records_is_used_with_one_line(saved, capsys):
    folder = saved / "checkpoints" / "0000000003"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["records"], manifest["sha256"][METRICS], manifest["sum"]
    (folder / METRICS).unlink()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sum": checkpoint._sum(manifest)}))
    (saved / "config.json").write_text("{}")  # which it cannot know
    restored = checkpoint.restore(saved, LIKE)
    assert restored.metrics is None
    (saved / METRICS).write_bytes(SERIES + row(300))
    make(saved, restored.metrics).close()
    assert (saved / METRICS).read_bytes() == SERIES
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "taken as it is" in said


def removed(directory: Path) -> None:
    shutil.rmtree(directory)


def moved(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def unlinked(directory: Path) -> None:
    (directory / METRICS).unlink()


def replaced(directory: Path) -> None:
    runs.write_atomically(directory / METRICS, (directory / METRICS).read_bytes())


def emptied(directory: Path) -> None:
    (directory / METRICS).write_bytes(b"")


def grown(directory: Path) -> None:
    with (directory / METRICS).open("ab") as file:
        file.write(b"{}\n")


GONE, CHANGED = "was removed or moved while the run worked in it", "was changed while the run wrote to it"


@pytest.mark.parametrize(
    ("accident", "words"),
    [
        (removed, GONE),
        (moved, GONE),
        (unlinked, CHANGED),
        (replaced, CHANGED),
        (emptied, CHANGED),
        (grown, CHANGED),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_metrics_that_another_hand_takes_away_are_missed_at_once(tmp_path, accident, words):
    directory = tmp_path / "run"
    directory.mkdir()
    file = MetricsFile(directory / METRICS, SERIES, compare=False)
    file.append(row(300))
    accident(directory)
    for use in (file.refuse_lost, file.read, lambda: file.append(row(400))):
        with pytest.raises(SableError, match=words) as error:
            use()
        assert "\n" not in str(error.value)


def test_metrics_altered_in_place_are_not_saved(tmp_path):
    file = MetricsFile(tmp_path / METRICS, SERIES, compare=False)
    with (tmp_path / METRICS).open("r+b") as other:
        other.write(SERIES[:1])
        file.read()  # the same bits
        other.write(b"X")
    with pytest.raises(SableError, match=CHANGED):
        file.read()


def timeless(directory: Path) -> list[dict]:
    rows = read_rows(directory / METRICS)
    return [{name: value for name, value in one.items() if name != "wall_seconds"} for one in rows]


def test_a_run_whose_metrics_and_spec_are_gone_ends_as_if_they_were_there(
    stopped_run, finished_run, tmp_path, capsys
):
    directory = shutil.copytree(stopped_run, tmp_path / "run")
    for name in (METRICS, "spec.json"):
        (directory / name).unlink()
    sable.train(resume=directory, quiet=True)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "metrics.jsonl was missing: written anew" in said
    assert (directory / METRICS).read_bytes().startswith((stopped_run / METRICS).read_bytes())
    assert timeless(directory) == timeless(finished_run) and len(timeless(directory)) == 8
    assert (directory / "spec.json").read_bytes() == (finished_run / "spec.json").read_bytes()
    ours, theirs = map(runs.read_summary, (directory, finished_run))
    assert ours["absolute_return"] == theirs["absolute_return"]


SLOW_PHASES = (
    pytest.param(phase, marks=pytest.mark.slow) for phase in ("saving", "measuring the best parameters")
)


@pytest.mark.parametrize("phase", ["training", *SLOW_PHASES])
def test_a_run_whose_folder_is_removed_under_it_stops_with_one_line(
    stopped_run, tmp_path, monkeypatch, phase
):
    """While it trains, saves or measures; and it does not make the folder again."""

    class Removing(Logger):
        def phase(self, text):
            super().phase(text)
            if text == phase:
                shutil.rmtree(tmp_path / "run")

    shutil.copytree(stopped_run, tmp_path / "run")
    monkeypatch.setattr(loop, "Logger", Removing)
    with pytest.raises(SableError, match=GONE) as error:
        sable.train(resume=tmp_path / "run", quiet=True)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
