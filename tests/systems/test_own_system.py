"""The system of docs/guides/own-system.md, as a user would run it."""

import json
import re
import sys
from pathlib import Path

import jax
import pytest

from sable.cli.main import main
from sable.runs import directory as runs
from sable.trust import Trust
from tests.learning.cases import required


@pytest.fixture
def reinforce(tmp_path, monkeypatch):
    """The documented module, in the current folder."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / "own-system.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    (tmp_path / "reinforce.py").write_text(block[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "reinforce"
    sys.modules.pop("reinforce", None)


def test_the_documented_system_learns_resumes_and_is_evaluated(reinforce, tmp_path, capsys):
    argv = "train probe/delayed --system reinforce --learning-rate 0.05 --num-seeds 6 --name mine --quiet"
    budget = "--total-steps 160_000 --num-evaluations 4 --evaluation-episodes 64 --absolute-episodes 64"
    with jax.numpy_rank_promotion("allow"):
        assert main([*argv.split(), *budget.split()]) == 0
        directory = tmp_path / "runs" / "probe" / "delayed" / "reinforce" / "mine"
        returns = json.loads((directory / "summary.json").read_text())["final_return"]
        assert sum(value > 0.9 for value in returns) >= required(6, 0, 64)  # of 64 measured none failed
        assert runs.read_config(directory, Trust(system=reinforce)).system.learning_rate == 0.05
        capsys.readouterr()
        assert main(["train", "--resume", str(directory)]) == 2
        assert "its system 'reinforce' is not part of sable" in capsys.readouterr().err
        assert main(["train", "--resume", str(directory), "--system", "reinforce", "--quiet"]) == 0
        assert main(["evaluate", str(directory), "--episodes", "8", "--trust"]) == 0
        assert main(["evaluate", str(directory), "--system", "sable"]) == 2
        assert "its system is 'reinforce', not 'sable'" in capsys.readouterr().err


def test_its_fields_are_flags_with_help_and_its_mistakes_are_refused(reinforce, capsys):
    assert main(["train", "--system", "reinforce", "--help"]) == 0
    assert "--learning-rate" in capsys.readouterr().out
    assert main(["train", "mpe/simple_spread_3ag", "--system", "reinforce", "--learning-rate", "fast"]) == 2
    assert "learning_rate='fast'" in capsys.readouterr().err
    assert main(["train", "--system", "json"]) == 2
    assert "holds no system" in capsys.readouterr().err
