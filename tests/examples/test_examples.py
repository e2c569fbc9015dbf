"""The programs of examples/ as a user starts them, at tiny sizes, and the cells of the notebook."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = {
    "sable_network": (["2"], r"all differ: [01]\.\d\d"),
    "train_and_load": (["2048"], r"return of one episode: \d\.\d\d"),
    "own_jax_environment": (["640"], r"nothing is wrong[\s\S]*return: \["),
    "own_pettingzoo_environment": (["160"], r"return: \["),
    "own_system": (["16384"], r"return: \["),
    "compare_systems": (["512"], r"task .*system[\s\S]*sable[\s\S]*ippo[\s\S]*report\.html"),
}
"""What each is given, and what it prints."""


def run(path: Path, argv: list[str], folder: Path) -> str:
    command = [sys.executable, str(path), *argv]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_example_is_tried_and_short():
    paths = list(EXAMPLES.glob("*.py"))
    assert {path.stem for path in paths} == set(PROGRAMS)
    assert all(len(path.read_text().splitlines()) <= 60 for path in paths)


def quick(name: str):
    return pytest.param(name, marks=[] if name == "own_system" else [pytest.mark.slow])


@pytest.mark.parametrize("name", [quick(name) for name in PROGRAMS])
def test_an_example_runs(name, tmp_path):
    argv, words = PROGRAMS[name]
    assert re.search(words, run(EXAMPLES / f"{name}.py", argv, tmp_path))


@pytest.fixture
def notebook():
    return json.loads((EXAMPLES / "quickstart.ipynb").read_text())


def test_the_notebook_is_whole_and_holds_no_output(notebook):
    assert notebook["nbformat"] == 4 and notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None


@pytest.mark.slow
def test_the_notebook_runs(notebook, tmp_path):
    """Run its cells in order, but for the line that installs, with a hundredth of the steps."""
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n".join(cells)
    assert len(re.findall(r"STEPS = \d+", code)) == 1
    code = re.sub(r"STEPS = \d+", "STEPS = 2048", re.sub(r"^(\s*)%.*$", r"\1pass", code, flags=re.MULTILINE))
    (tmp_path / "cells.py").write_text(code)
    assert re.search(r"met", run(tmp_path / "cells.py", [], tmp_path))
