"""Every command that a page shows is one: its flags exist, and its settings are allowed. Nothing runs."""

import inspect
import sys

import pytest

import sable
from sable.cli.main import main
from sable.errors import SableError
from sable.studies import benchmark
from tests.docs.blocks import PAGES, REPOSITORY, blocks, commands, name_of

PLACES = {
    "RUN": "run",
    "FOLDER": "folder",
    "DIR": "dir",
    "TASK": "rware/tiny-4ag",
    "ROW": "rware/tiny-4ag:sable",
}
PLACES |= {
    "SYSTEM": "mat",
    "RUNS...": "runs",
    "TASKS...": "lbf/*",
    "FILE": "recipe.toml",
    "N": "9",
    "SECONDS": "60",
}
"""What the words in capitals stand for."""
RECIPE = '["rware/tiny-4ag"]\nlearning_rate = 1e-3\n'


class Parsed(Exception):
    """The command has come as far as to be run."""


@pytest.fixture
def nothing_runs(tmp_path, monkeypatch):
    """Every public function ends the command instead, after the settings it was given were checked."""
    signatures = {name: inspect.signature(getattr(sable, name)) for name in sable.__all__ if name[0] != "_"}
    configure = sable.configure

    def stub_env(name):
        def called(*args, **fields):
            bound = signatures[name].bind(*args, **fields).arguments
            if name in ("train", "plan", "tune") and bound.get("resume") is None:
                names = ("task", "system", "seeds", "num_seeds", "recipe")
                given = {key: bound[key] for key in names if bound.get(key) is not None}
                configure(**given, **bound.get("fields", {}))
            raise Parsed

        return called

    for name in set(signatures) - {"configure", "grid", "list_tasks", "list_systems"}:
        monkeypatch.setattr(sable, name, stub_env(name))

    def work(*args, **named):
        raise Parsed

    monkeypatch.setattr(benchmark, "work", work)
    guides = REPOSITORY / "docs" / "guides"
    modules = {"own-system": ["reinforce"], "own-environment": ["meet", "teams"]}
    for page, names in modules.items():
        for module, text in zip(names, blocks(guides / f"{page}.md", "python"), strict=True):
            (tmp_path / f"{module}.py").write_text(text)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = tmp_path / "tuning" / "rware" / "tiny-4ag" / "sable" / "recipe.toml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for module in ("reinforce", "meet", "teams"):
        sys.modules.pop(module, None)


def mistake(argv: list[str]) -> str:
    """Return what is wrong with a command, "" if nothing is."""
    try:
        return "" if main(argv) in (0, 1) else "refused"
    except Parsed:
        return ""
    except SableError as error:
        return str(error)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_a_page_are_taken(page, nothing_runs, capsys):
    for argv in commands(page):
        given = [PLACES.get(word, word) for word in argv]
        assert mistake(given) == "", (" ".join(argv), capsys.readouterr().err)


def test_commands_are_found_and_a_wrong_one_is_refused(nothing_runs, capsys):
    assert sum(len(commands(page)) for page in PAGES) > 60
    assert mistake(["train", "rware/tiny-4ag", "--no-such-flag"]) and mistake(["trian"])
    assert mistake(["train", "rware/tiny-4ag", "--clip-eps", "0"])
    assert "unknown flag" in capsys.readouterr().err
