"""The site is whole: every page in its contents, every link within the repository to something there."""

import re

import pytest

from tests.docs.blocks import PAGES, REPOSITORY, name_of

OTHERS = [REPOSITORY / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
OTHERS += [REPOSITORY / folder / "README.md" for folder in ("benchmarks", "tests")]


def test_the_contents_name_every_page():
    docs = REPOSITORY / "docs"
    toctrees = re.findall(r"```\{toctree\}\n(.*?)```", (docs / "index.md").read_text(), re.DOTALL)
    named = [line for text in toctrees for line in text.split() if not line.startswith(":")]
    pages = {page.relative_to(docs).with_suffix("").as_posix() for page in PAGES if docs in page.parents}
    captions = {"Start", "Guides", "Reference", "Sable", "Project"}
    assert set(named) - captions == pages - {"index"}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page):
    """As the repository shows it; `make docs` checks them, and their anchors, as the site does."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for path in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"`[^`\n]*`", "", text)):
        if not re.match(r"\w+:", path):
            assert (page.parent / path).exists(), path


def test_the_readme_is_short():
    lines = (REPOSITORY / "README.md").read_text().splitlines()
    assert len(lines) <= 150


def test_pictures_are_small():
    for path in (REPOSITORY / "docs" / "figures").glob("*.[gp]*"):
        assert path.stat().st_size < 300_000, path


def test_the_readmes_figures_stand_in_the_pages():
    """Its results are rows of the results page, its speeds rows of the performance page."""
    read = {name: (REPOSITORY / name).read_text() for name in ("README.md", "docs/results.md")}
    results = re.findall(
        r"^\| (`\w+/\S+`)(†?) \| (\S+ \[.*?\]) \| (\S+ \[.*?\]) \|$", read["README.md"], re.MULTILINE
    )
    assert len(results) >= 4
    for task, older, ours, papers in results:
        assert f"| {task[:-1]}:sable`{older} | {ours} | {papers} |" in read["docs/results.md"], task
    speeds = re.findall(r"^\| (`\S+`).* \| (.*) \| (\S+ [kM]/s) \|$", read["README.md"], re.MULTILINE)
    pages = [
        (REPOSITORY / name).read_text() for name in ("docs/sable/performance.md", "benchmarks/README.md")
    ]
    assert len(speeds) >= 4
    for _, reference, ours in speeds:
        assert all(ours in page and reference.split(",")[0] in page for page in pages), ours


def test_the_files_of_the_architecture_page_are_there():
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`(src/sable/[\w/.]+)`", text)
    assert len(paths) >= 12
    for path in paths:
        assert (REPOSITORY / path).exists(), path
