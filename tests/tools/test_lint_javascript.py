"""The linter of the pages' scripts: it passes what is there, and names the file and line of a mistake."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "tools" / "lint_javascript.py"


@pytest.fixture(scope="module")
def linter():
    spec = importlib.util.spec_from_file_location("lint_javascript", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_script_is_in_a_page(linter):
    source = Path(__file__).parents[2] / "src"
    listed = {script.resolve() for scripts in linter.pages().values() for script in scripts}
    assert listed == {path.resolve() for path in source.rglob("*.js")}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("(1).push(2);", "Property 'push' does not exist"),
        ("missing();", "Cannot find name 'missing'"),
        ("debugger;", "no-debugger"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_line(linter, tmp_path, line, words):
    first, second = tmp_path / "first.js", tmp_path / "second.js"
    first.write_text("function add(a, b) {\n  return a + b;\n}\n")
    second.write_text("add(1, 2);\n")
    assert linter.findings([first, second]) == ""
    second.write_text(f"add(1, 2);\n\n{line}\n")
    found = linter.findings([first, second])
    assert words in found and "second.js:3" in found
