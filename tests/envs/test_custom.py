"""Environments of the user's own, by name: the documented one as its reader would run it, and mistakes."""

import json
import re
import sys
from pathlib import Path

import pytest

from sable.cli.main import main

DOCS = Path(__file__).parents[2] / "docs" / "guides" / "own-environment.md"
BUDGET = "--total-steps 1200 --num-envs 8 --rollout-length 20 --num-evaluations 1 --evaluation-episodes 4"
BUDGET += " --policy-layers 8 --critic-layers 8 --num-epochs 1 --num-minibatches 1"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to keep modules in, as the current one."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def documented() -> str:
    block = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None
    return block[1]


def test_the_documented_environment_is_short_sound_and_learns_by_its_name(here, capsys):
    assert len(documented().splitlines()) < 40
    (here / "meet.py").write_text(documented())
    assert main(["check", "meet:Meet"]) == 0
    assert "nothing wrong" in capsys.readouterr().out
    argv = f"train meet:Meet --system ippo {BUDGET} --absolute-episodes 4 --name mine --quiet"
    assert main(argv.split()) == 0
    run = here / "runs" / "own" / "meet-Meet" / "ippo" / "mine"
    assert set(json.loads((run / "summary.json").read_text())) > {"absolute_return", "absolute_met"}
    assert main(["evaluate", str(run)]) == 2
    assert "its environment 'meet:Meet' is not part of sable" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--env", "meet:Mute"]) == 2
    assert "its environment is 'meet:Meet', not 'meet:Mute'" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--env", "meet:Meet", "--episodes", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "meet:Meet"


MODULE = """
import missing_thing
"""
BROKEN = """
class Empty:
    pass
class Half:
    reset = step = rekey = None
class Needs(Half):
    def __init__(self, size): self.size = size
class Fails(Half):
    def __init__(self): raise RuntimeError("no power")
def called(): raise RuntimeError("called")
there = Half()
there.spec = None
"""


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("nowhere:Env", "there is no module 'nowhere'"),
        ("nowhere.at_all:Env", "there is no module 'nowhere.at_all'"),
        ("broken:", "is named module:Class"),
        ("broken:Needs:more", "is named module:Class"),
        ("pettingzoo:broken", "pettingzoo:module:factory"),
        ("unimportable:Env", "No module named 'missing_thing' (unimportable.py, line 2)"),
        ("broken:Absent", "module 'broken' has no 'Absent'; it has Empty, Half, Needs, Fails, called, there"),
        ("broken:Needs", "missing 1 required positional argument: 'size'"),
        ("broken:Empty", "is no environment: it has no reset"),
        ("broken:Half", "is no environment: it has no spec"),
        ("broken:called", "is no environment: it has no reset"),
        ("os:system", "is no environment: it has no reset"),
        ("broken:Fails", "RuntimeError: no power (broken.py, line 9)"),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_a_mistake_is_one_line_and_nothing_is_written(here, capsys, task, words, command):
    (here / "unimportable.py").write_text(MODULE)
    (here / "broken.py").write_text(BROKEN)
    assert main([command, task]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err
    assert not (here / "runs").exists()


def test_grids_and_plans_refuse_them_in_one_line(here, capsys):
    assert main(["benchmark", "meet:Meet"]) == 2
    assert "environment of your own" in capsys.readouterr().err
    assert main(["plan", "pettingzoo:json:loads"]) == 2
    assert "sable plan cannot foresee" in capsys.readouterr().err


def test_options_reach_the_class_as_values(here, capsys):
    text = documented().replace(
        "    spec = EnvSpec", "    def __init__(self, size): assert size == 3\n    spec = EnvSpec"
    )
    (here / "meet.py").write_text(text)
    assert main(["check", "meet:Meet", "--env-options", "size=4"]) == 2
    assert "AssertionError" in capsys.readouterr().err
    assert (
        main(["train", "meet:Meet", "--env-options", "size=3", "--devices", "99"]) == 2
    )  # made, then refused
    assert "devices=99" in capsys.readouterr().err
