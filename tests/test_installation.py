"""What is built and what the hints say are one: names, extras, version."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import sable
from sable import installation

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("benchmarks/*.md")]


def test_the_metadata_agree_with_the_constants():
    assert PROJECT["name"] == installation.DISTRIBUTION
    assert PROJECT["dynamic"] == ["version"] and PROJECT["scripts"] == {"sable": "sable.cli.main:main"}
    assert EXTRAS["cuda"] == [f"{installation.DISTRIBUTION}[cuda12]"]
    assert f"version: {installation.VERSION}\n" in (REPOSITORY / "CITATION.cff").read_text()
    assert f"## {installation.VERSION}" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_the_version_is_known_without_jax_and_without_being_installed():
    code = "import sys, sable; print(sable.__version__, 'jax' in sys.modules)"
    environment = {"PYTHONPATH": str(Path(sable.__file__).parents[1])}
    command = [sys.executable, "-S", "-c", code]  # no site-packages
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == [installation.VERSION, "False"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_hints_of_a_page_install_this_distribution(page):
    for line in re.findall(r"pip install[^`\n#]*", page.read_text()):
        assert not re.search(r"\bsable(?!-marl)\b", line), line
        assert set(re.findall(r"(?:sable-marl|\.)\[(\w+)\]", line)) <= set(EXTRAS), line


def test_the_hints_of_the_code_follow_the_constant():
    extras = set()
    for path in Path(sable.__file__).parent.rglob("*.py"):
        code = path.read_text()
        assert not re.search(r"sable(-marl)?\[|pip install '?sable", code), path
        extras |= set(re.findall(r"pip_install\(\"(\w+)\"\)|pip_install\('(\w+)'\)", code))
    assert {one or other for one, other in extras} <= set(EXTRAS) and len(extras) > 3
    assert installation.pip_install("tune") == "pip install 'sable-marl[tune]'"


def test_what_installs_elsewhere_is_well_formed():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())["jobs"]
    lanes = [
        lane for job in jobs.values() for lane in job.get("strategy", {}).get("matrix", {}).get("include", [])
    ]
    assert {"oldest", "newest"} <= {lane.get("lane") for lane in lanes}
    for lane in lanes:
        assert lane.get("extra", "tune") in EXTRAS
        assert all((REPOSITORY / path).is_file() for path in lane.get("tests", "").split())
