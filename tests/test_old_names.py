"""Own environments and systems with names of an older version are told the new ones, in one line."""

import re
from pathlib import Path

import pytest

from sable import old_names
from sable.cli.main import main

DOCS = Path(__file__).parents[1] / "docs"


def documented(mark: str) -> str:
    """Return the module of a guide, by something in it."""
    texts = (path.read_text() for path in sorted(DOCS.rglob("*.md")))
    blocks = (block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    return next(block for block in blocks if mark in block)


ENV, SYSTEM = documented("class Meet"), documented("return System(")
OLD = [
    (
        ENV,
        "import first_timestep, next_timestep",
        "import opening, next_timestep",
        "opening is called first_timestep",
    ),
    (ENV, "terminated=", "ended=", "next_timestep(ended=) is called terminated"),
    (ENV, "truncated=", "timed_out=", "next_timestep(timed_out=) is called truncated"),
    (ENV, "action_mask=", "legal=", "Observation(legal=) is called action_mask"),
    (ENV, "step_count=", "time=", "Observation(time=) is called step_count"),
    (SYSTEM, "        act=act", "        exploit=act", "System(exploit=) is called act"),
    (SYSTEM, "next_extras=", "final=", "System(final=) is called next_extras"),
    (SYSTEM, "hyperparameters_from", "configured", "configured is called hyperparameters_from"),
    (SYSTEM, "observation.action_mask", "observation.legal", "observation.legal is called action_mask"),
    (
        ENV,
        "import EnvSpec",
        "import EnvSpec\nfrom sable.systems import ppo\nppo.Acted #",
        "ppo.Acted is called PolicyExtras",
    ),
]


@pytest.mark.parametrize(("source", "new", "old", "words"), OLD, ids=[case[2].strip() for case in OLD])
def test_an_old_name_is_told_with_its_new_one(source, new, old, words):
    assert old_names.in_source(source, "own.py") == ""
    assert source.replace(new, old) != source
    assert f": {words} now" in old_names.in_source(source.replace(new, old), "own.py")


@pytest.mark.parametrize(
    "source",
    [
        "class Observation: pass\nObservation(legal=1).time",  # somebody else's
        "from sable.types import EnvSpec\nstate.time, state.legal, System(final=1)",
        "not Python",
        "",
    ],
)
def test_names_that_are_not_ours_are_left_alone(source):
    assert old_names.in_source(source, "own.py") == ""


def test_own_modules_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "old_meet.py").write_text(ENV.replace("truncated=", "timed_out="))
    (tmp_path / "old_reinforce.py").write_text(SYSTEM.replace("next_extras=", "final="))
    for argv, words in (
        ("check old_meet:Meet", "next_timestep(timed_out=) is called truncated now"),
        ("train old_meet:Meet", "next_timestep(timed_out=) is called truncated now"),
        ("train probe/delayed --system old_reinforce", "System(final=) is called next_extras now"),
    ):
        assert main(argv.split()) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and words in said and "older version" in said
    assert not (tmp_path / "runs").exists()
