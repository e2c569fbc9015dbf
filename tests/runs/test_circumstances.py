"""Where and with what a run goes on: what differs is said in one line, and `strict` refuses it."""

import json
import shutil
import signal

import jax
import pytest

import sable
from sable.cli.main import main
from sable.errors import SableError
from sable.runs import circumstances, provenance
from sable.runs import directory as runs
from sable.training import checkpoint, loop
from sable.training.loggers.logger import METRICS, Logger, read_rows

CPU = {
    "versions": {"jax": "0.10.2", "jaxlib": "0.10.2", "python": "3.11"},
    "device": {"platform": "cpu", "kind": "cpu", "count": 2},
    "devices": 1,
    "cpu": "A",
    "thread_pool": 2,
    "source": "abc",
}
GPU = CPU | {"device": {"platform": "gpu", "kind": "H200", "count": 8}}


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (CPU, CPU, []),
        (CPU, CPU | {"versions": {"jax": "0.11.0"}}, ["jax 0.11.0 instead of 0.10.2"]),
        (CPU, GPU, ["device kind H200 instead of cpu"]),
        (CPU, CPU | {"cpu": "B"}, ["CPU B instead of A"]),
        (CPU, CPU | {"thread_pool": 4}, ["thread pool 4 instead of 2"]),
        (GPU, GPU | {"thread_pool": 4, "cpu": "B"}, []),
        (CPU, CPU | {"devices": 2}, ["number of devices 2 instead of 1"]),
        (
            CPU,
            CPU | {"source": "x", "devices": 2},
            ["number of devices 2 instead of 1", "source x instead of abc"],
        ),
        ({}, CPU, []),
        ({"versions": 3, "device": None, "source": "abc"}, CPU, []),
    ],
)
def test_what_bits_depend_on_is_compared(before, now, words):
    assert circumstances.differences([circumstances.of(before)], circumstances.of(now)) == words


def test_all_that_a_run_went_through_counts():
    here, there, elsewhere = ({"source": name} for name in "abc")
    assert circumstances.differences([here, there, elsewhere], here) == ["source a instead of b and c"]
    meta = CPU | {"resumed": [CPU | {"source": "later"}]}
    assert [one["source"] for one in circumstances.earlier(meta, {})] == ["abc", "later"]
    assert circumstances.earlier(meta, {"circumstances": [here]}) == [circumstances.of(CPU), here]


def test_a_process_describes_itself():
    found = circumstances.of(circumstances.describe(3))
    assert set(found) >= {"jax", "device kind", "CPU", "number of devices", "thread pool", "source"}
    assert (found["jax"], found["number of devices"]) == (jax.__version__, 3)


@pytest.fixture
def begun(stopped_run, tmp_path):
    return shutil.copytree(stopped_run, tmp_path / "run")


def say_jax(directory, monkeypatch) -> str:
    meta = runs.read_meta(directory)
    runs.write_json(directory / "meta.json", meta | {"versions": meta["versions"] | {"jax": "0.4.1"}})
    return f"jax {jax.__version__} instead of 0.4.1"


def say_kind(directory, monkeypatch) -> str:
    meta = runs.read_meta(directory)
    runs.write_json(
        directory / "meta.json", meta | {"device": {"platform": "gpu", "kind": "H200", "count": 1}}
    )
    return "device kind cpu instead of H200"


def say_threads(directory, monkeypatch) -> str:
    monkeypatch.setenv("NPROC", "77")
    return "thread pool 77 instead of"


def say_source(directory, monkeypatch) -> str:
    monkeypatch.setattr(provenance, "source", lambda: "0123456789abcdef")
    return "source 0123456789abcdef instead of"


def say_devices(directory, monkeypatch) -> str:
    meta = runs.read_meta(directory)
    runs.write_json(directory / "meta.json", meta | {"devices": 4})
    return "number of devices 1 instead of 4"


@pytest.mark.parametrize("change", [say_jax, say_kind, say_threads, say_source, say_devices])
def test_a_strict_resume_is_refused_where_it_would_not_be_bit_exact(begun, monkeypatch, capsys, change):
    words = change(begun, monkeypatch)
    before = {
        path: path.read_bytes() for path in begun.rglob("*") if path.is_file() and path.name != ".claim"
    }
    assert main(["train", "--quiet", "--resume", str(begun), "--strict"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and words in said and "it will not be bit-exact" in said
    assert before == {path: path.read_bytes() for path in before}


def test_a_resume_elsewhere_says_so_in_one_line_and_the_checkpoints_know(begun, monkeypatch, capsys):
    """Also when the same machine goes on that said so before; where all is as it was nothing is said."""
    with monkeypatch.context() as patch:
        patch.setenv("NPROC", "77")
        patch.setattr(loop, "Logger", StoppingBefore)
        assert main(["train", "--quiet", "--resume", str(begun)]) == 128 + signal.SIGTERM
        assert "thread pool 77 instead of" in capsys.readouterr().err
    gone_through = checkpoint.newest_facts(begun)["circumstances"]
    assert [one["thread pool"] for one in gone_through][1:] == [77]
    assert main(["train", "--quiet", "--resume", str(begun)]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "instead of 77: it will not be bit-exact" in said
    assert len(runs.read_meta(begun)["resumed"]) == 2 and len(read_rows(begun / METRICS)) == 8


class StoppingBefore(Logger):
    """Asks the run to stop after an update of its second half."""

    def progress(self, steps, seconds_training):
        super().progress(steps, seconds_training)
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
def test_who_stops_at_once_has_not_gone_through_it(begun, monkeypatch, capsys):
    """The wrong machine, noticed by the line: nothing of it is in the run, which goes on elsewhere."""

    class StoppingAtOnce(Logger):
        def phase(self, text):
            super().phase(text)
            if text == "compiling":
                signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setenv("NPROC", "77")
        patch.setattr(loop, "Logger", StoppingAtOnce)
        assert main(["train", "--quiet", "--resume", str(begun)]) == 128 + signal.SIGTERM
    capsys.readouterr()
    assert main(["train", "--quiet", "--resume", str(begun), "--strict"]) == 0
    assert capsys.readouterr().err == ""


def test_a_run_that_does_not_say_where_it_ran_is_resumed_with_one_line(begun, capsys):
    """As old ones may be whose meta.json was lost."""
    (begun / "meta.json").unlink()
    for folder in (begun / "checkpoints").iterdir():
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["facts"]["circumstances"], manifest["sum"]
        (folder / "manifest.json").write_text(json.dumps(manifest | {"sum": checkpoint._sum(manifest)}))
    with pytest.raises(SableError, match="does not say where it ran"):
        sable.train(resume=begun, strict=True, quiet=True)
    assert capsys.readouterr().err == ""
    sable.train(resume=begun, quiet=True)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "does not say where it ran so far: it may not be bit-exact" in said


def test_a_damaged_meta_is_noticed_before_the_work(begun, capsys):
    (begun / "meta.json").write_text((begun / "meta.json").read_text()[:-20])
    before = (begun / METRICS).read_bytes()
    assert main(["train", "--quiet", "--resume", str(begun)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "meta.json cannot be read" in said and "remove it" in said
    assert (begun / METRICS).read_bytes() == before


def test_strict_is_for_a_resume(tmp_path):
    with pytest.raises(SableError, match="give it with resume"):
        sable.train("probe/bandit", out=tmp_path, strict=True)
    assert not list(tmp_path.iterdir())
