"""Names that are no text, and locales without UTF-8, end in one line or in what was asked for."""

import os
import subprocess
import sys

import pytest

import sable
from sable.cli.main import main

NAME = os.fsdecode(b"n\xff")  # a lone surrogate
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

COMMANDS = [
    [NAME],
    ["train", NAME],
    ["train", f"{NAME}:Env"],
    ["train", f"--{NAME}"],
    ["train", "--system", NAME],
    ["train", "--name", NAME],
    ["train", "--label", NAME],
    ["train", "--out", NAME],
    ["train", "--recipe", NAME],
    ["train", "--resume", NAME],
    ["train", "--env-options", f"{NAME}=1"],
    ["plan", NAME],
    ["list", NAME],
    ["check", NAME],
    ["evaluate", NAME],
    ["watch", NAME],
    ["export", NAME, "-o", NAME],
    ["report", NAME],
    ["report", ".", "-o", NAME],
    ["publish", NAME],
    ["reproduce", NAME],
    ["benchmark", NAME],
    ["benchmark", "probe/bandit", "--out", NAME],
    ["tune", NAME],
    ["tune", "probe/bandit", "--out", NAME],
]


@pytest.mark.parametrize("argv", COMMANDS, ids=[ascii(" ".join(argv)) for argv in COMMANDS])
def test_a_lone_surrogate_in_a_name_is_one_line_and_writes_nothing(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.err.startswith("sable: ") and said.err.count("\n") == 1 and said.out == ""
    assert list(tmp_path.iterdir()) == []


def in_ascii(tmp_path, *argv: str) -> subprocess.CompletedProcess:
    """A command in a locale that knows no UTF-8."""
    command = [os.fsencode(part) for part in (sys.executable, "-m", "sable", *argv)]
    return subprocess.run(command, cwd=tmp_path, env=os.environ | ASCII, capture_output=True)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["benchmark", "probe/bandit", "--list"], 0, b"probe/bandit"),  # its states have a sign beyond ASCII
        (["benchmark", "probe/bandit", "--list", "--out", "é"], 2, b"PYTHONUTF8=1"),
        (["train", "--out", "é"], 2, b"PYTHONUTF8=1"),
        (["report", "é"], 2, b"no file or folder"),
    ],
)
def test_a_locale_without_utf8_gives_no_tracebacks(tmp_path, argv, code, words):
    done = in_ascii(tmp_path, *argv)
    assert done.returncode == code and b"Traceback" not in done.stderr
    assert words in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_in_folders_of_any_name_is_trained_reported_and_exported(tmp_path, monkeypatch):
    """Where the locale is C alone Python uses UTF-8; what is no UTF-8 may be written to, but holds no run."""
    sizes = "--num-envs 4 --rollout-length 2 --num-minibatches 1 --total-steps 16 --num-evaluations 1"
    sizes += " --evaluation-episodes 1 --absolute-episodes 1 --system ippo --no-video --name a --out é"
    c = {name: value for name, value in os.environ.items() if name not in ("LANG", "LC_ALL")} | {
        "LC_ALL": "C"
    }
    train = [sys.executable, "-m", "sable", "train", "probe/bandit", *sizes.split()]
    assert subprocess.run(train, cwd=tmp_path, env=c).returncode == 0
    monkeypatch.chdir(tmp_path)
    run = "é/probe/bandit/ippo/a"
    assert main(["report", run, "-o", NAME]) == 0
    assert main(["export", run, "-o", f"{NAME}.team"]) == 0
    assert sable.load(f"{NAME}.team").config.run.task == "probe/bandit"
    assert in_ascii(tmp_path, "report", run, "-o", "rapport-é").returncode == 0
    (tmp_path / "é").rename(tmp_path / NAME / "runs")
    for command in ("evaluate", "watch"):
        assert main([command, f"{NAME}/runs/probe/bandit/ippo/a"]) == 2
    assert in_ascii(tmp_path, "report", f"{NAME}/runs", "-o", "again").returncode == 0
