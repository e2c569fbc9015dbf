"""The Python of the pages runs as it stands, block after block, with tiny budgets in place of its own."""

import pytest

import sable
from tests.docs.blocks import PAGES, TINY, blocks, name_of

QUICK = "docs/guides/own-network.md"
"""The page whose Python is run in `make test`; the other pages' are slow."""


def speed(page):
    name = name_of(page)
    return pytest.param(page, id=name, marks=[] if name == QUICK else [pytest.mark.slow])


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Training and measuring take next to nothing, whatever a page asks for."""

    def small(function, fields):
        return lambda *args, **given: function(*args, **{**given, **fields})

    for name, fields in {"train": TINY, "benchmark": TINY, "tune": TINY, "evaluate": {"episodes": 2}}.items():
        monkeypatch.setattr(sable, name, small(getattr(sable, name), fields))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [speed(page) for page in PAGES if blocks(page, "python")])
def test_the_python_of_a_page_runs(page, tiny):
    names = {"__name__": "page"}
    for number, text in enumerate(blocks(page, "python")):
        exec(compile(text, f"{name_of(page)}, block {number}", "exec"), names)


def test_pages_with_python_are_found():
    found = [name_of(page) for page in PAGES if blocks(page, "python")]
    assert QUICK in found and len(found) >= 7
