"""What an environment prints stays away from a command that is to be quiet."""

import re
import sys
from pathlib import Path

import pytest

from sable.cli.main import main

CHATTY = """
import jax
from sable.envs.suites import probes

print("chatter while imported")

class Chatty(probes.Probe):
    def step(self, state, action):
        print("chatter while traced")
        jax.debug.print("chatter while it runs")
        return super().step(state, action)

env = Chatty(**vars(probes.PROBES["bandit"]))
"""
SMALL = "--num-envs 4 --rollout-length 2 --total-steps 16 --num-evaluations 1 --evaluation-episodes 1"


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """An environment that talks, and the small system of docs/guides/own-system.md."""
    text = (Path(__file__).parents[1] / "docs" / "guides" / "own-system.md").read_text()
    (tmp_path / "reinforce.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    (tmp_path / "chatty.py").write_text(CHATTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("reinforce", "chatty"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("quiet", [True, False])
def test_an_environments_prints_do_not_pass_quiet(modules, capfd, quiet):
    argv = f"train chatty:env --system reinforce --absolute-episodes 1 --no-video {SMALL}".split()
    assert main([*argv, *["--quiet"] * quiet]) == 0
    out, err = capfd.readouterr()
    times = [out.count(f"chatter while {what}") for what in ("imported", "traced", "it runs")]
    assert times == [0] * 3 if quiet else min(times) > 0
    assert not quiet or out + err == ""
