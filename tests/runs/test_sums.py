"""The sums of a finished run: what was altered, cut or lost since is noticed by whoever reads it."""

import gzip
import json
import shutil
import signal
from pathlib import Path

import pytest

import sable
from sable.cli.main import main
from sable.errors import SableError
from sable.reports import read as results
from sable.runs import provenance, sums
from sable.studies import reproduce
from sable.training import loop
from sable.training.loggers.logger import Logger

FILES = {"config.json", "spec.json", "meta.json", "metrics.jsonl", "marl_eval.json", "summary.json"}
ANEW = {"metrics.jsonl", "marl_eval.json", "summary.json"}


@pytest.fixture
def run(finished_run, tmp_path):
    return shutil.copytree(finished_run, tmp_path / "run")


def flip(path: Path) -> None:
    """Another digit: still a file of its kind."""
    content = path.read_bytes()
    place = next(k for k in range(len(content) // 2, len(content)) if 48 <= content[k] < 56)
    path.write_bytes(content[:place] + bytes([content[place] + 1]) + content[place + 1 :])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def remove(path: Path) -> None:
    path.unlink()


def add(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def content(directory: Path) -> dict[Path, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".claim")
    return {path.relative_to(directory): path.read_bytes() for path in files}


def test_sums_are_written_last_and_cover_all_that_is_read(run):
    data = json.loads((run / "sums.json").read_text())
    assert set(data["sha256"]) == FILES == set(sums.COVERED)
    newest = max(path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file())
    assert (run / "sums.json").stat().st_mtime_ns == newest
    sums.verify(run)


@pytest.mark.parametrize("how", [flip, cut, remove, add])
@pytest.mark.parametrize("name", sorted(FILES))
def test_report_publish_and_reproduce_refuse_what_was_altered(run, monkeypatch, capsys, tmp_path, name, how):
    """And each in one line that names it; a report leaves the run out. Without a summary it is no finished
    run."""
    monkeypatch.setattr(provenance, "commit_of", lambda source: "c")
    how(run / name)
    gone = (name, how) == ("summary.json", remove)
    if (run / "config.json").exists():
        found = results.read([run])
        assert not found.series and len(found.notes) == 1
        assert ("not finished" if gone else name) in found.notes[0]
    if not gone:
        with pytest.raises(SableError) as error:
            reproduce.compare({"seeds": [0, 1], "absolute_return": [1.0, 0.0]}, run)
        assert name in str(error.value) and "\n" not in str(error.value)
        assert name not in ANEW or f"--resume {run}" in str(error.value)
    assert main(["publish", str(run), "--allow-deviations", "--results", str(tmp_path / "results")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and name in said, said
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("how", [flip, remove])
@pytest.mark.parametrize("name", ["config.json", "spec.json", "meta.json", "summary.json"])
def test_export_refuses_what_was_altered(run, tmp_path, capsys, name, how):
    how(run / name)
    assert main(["export", str(run), "-o", str(tmp_path / "team")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and name in said
    assert not (tmp_path / "team").exists()


def test_a_marl_eval_file_given_to_a_report_is_checked(run):
    assert not results.read([run / "marl_eval.json"]).notes
    flip(run / "marl_eval.json")
    (note,) = results.read([run / "marl_eval.json"]).notes
    assert "left out" in note and "sums.json" in note


def test_damaged_sums_are_one_line_that_says_what_to_do(run):
    for damage in (cut, add, lambda path: path.write_text("[]"), flip):
        shutil.copyfile(run / "sums.json", run / "kept")
        damage(run / "sums.json")
        if damage is add:  # white space
            sums.verify(run)
        else:
            with pytest.raises(SableError, match=r"sums.json is damaged; remove it"):
                sums.verify(run)
        (run / "kept").rename(run / "sums.json")


def test_runs_without_sums_are_read_with_one_line(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(provenance, "commit_of", lambda source: "c")
    (run / "sums.json").unlink()
    again = shutil.copytree(run, tmp_path / "again")
    words = f"{again} has no sums.json: nobody can tell whether its files are what was written"
    found = results.read([again])
    assert len(found.series) == 2 and found.notes == [words]
    notes = results.read([again, run]).notes
    assert [note for note in notes if "sums.json" in note] == [f"{words} (and 1 more runs)"]
    capsys.readouterr()
    reproduce.compare({"seeds": [0, 1], "absolute_return": [1.0, 0.0]}, again)
    assert capsys.readouterr().err == f"sable: {words}\n"
    assert main(["publish", str(again), "--allow-deviations", "--results", str(tmp_path / "results")]) == 0
    assert capsys.readouterr().err == f"sable: {words}\n"
    assert main(["train", "--quiet", "--resume", str(again)]) == 0
    assert capsys.readouterr().err == f"sable: {words}\n"
    sums.verify(again)
    assert results.read([again]).notes == results.read([tmp_path / "results"]).notes == []


def test_metrics_may_be_compressed(run):
    (run / "metrics.jsonl.gz").write_bytes(gzip.compress((run / "metrics.jsonl").read_bytes()))
    (run / "metrics.jsonl").unlink()
    assert results.read([run]).notes == []


def test_a_resume_writes_altered_results_anew_and_says_so(run, capsys):
    """From the newest checkpoint, to the same bits; a line each."""
    before = content(run)
    for name in ANEW:
        flip(run / name)
    assert main(["train", "--quiet", "--resume", str(run)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(ANEW) and all("anew" in line for line in said)
    assert all(any(name in line for line in said) for name in ANEW)
    after = content(run)
    assert after[Path("metrics.jsonl")] == before[Path("metrics.jsonl")]
    assert after[Path("marl_eval.json")] == before[Path("marl_eval.json")]
    returns = [json.loads(files[Path("summary.json")])["absolute_return"] for files in (before, after)]
    assert returns[0] == returns[1]
    sums.verify(run)


@pytest.mark.parametrize("name", ["config.json", "spec.json", "meta.json"])
def test_a_resume_refuses_altered_settings(run, capsys, name):
    flip(run / name)
    before = content(run)
    assert main(["train", "--quiet", "--resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and name in said
    assert content(run) == before


class Stopping(Logger):
    def phase(self, text):
        super().phase(text)
        if text == "compiling":
            signal.raise_signal(signal.SIGTERM)


def test_a_finished_run_whose_resume_is_stopped_stays_as_it_is(run, monkeypatch):
    before = content(run)
    monkeypatch.setattr(loop, "Logger", Stopping)
    assert sable.train(resume=run, quiet=True).interrupted == signal.SIGTERM
    after = content(run)
    assert {path: after[path] for path in before if path.parts[0] != "tensorboard"} == {
        path: before[path] for path in before if path.parts[0] != "tensorboard"
    }
    sums.verify(run)


@pytest.mark.slow
def test_a_finished_run_that_falls_back_is_not_finished_until_it_is(run, monkeypatch, capsys):
    """Its newest checkpoint is damaged, and what follows the one before it is trained again."""
    before = content(run)
    newest = max((run / "checkpoints").iterdir())
    flip(newest / "manifest.json")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Logger", Stopping)
        assert sable.train(resume=run, quiet=True).interrupted == signal.SIGTERM
    assert not {"sums.json", "summary.json", "marl_eval.json"} & {path.name for path in run.iterdir()}
    assert "not finished, at 48 of 64" in results.read([run]).notes[0]
    assert main(["train", "--quiet", "--resume", str(run)]) == 0
    ours, theirs = (json.loads(files[Path("summary.json")]) for files in (content(run), before))
    assert ours["absolute_return"] == theirs["absolute_return"]
    sums.verify(run)
