"""What is built and what the hints say are one: names, extras, version."""

import importlib
import re
import subprocess
import sys
import tomllib
import types
import typing as tp
from pathlib import Path

import pytest
import yaml

import sable
from sable import installation
from sable.errors import SableError

REPOSITORY = Path(__file__).parents[1]
ENVS = importlib.import_module("sable.envs.make")
SETUP = (REPOSITORY / "setup.py").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("benchmarks/*.md")]


def test_the_metadata_agree_with_the_constants():
    assert PROJECT["name"] == installation.DISTRIBUTION
    assert set(PROJECT["dynamic"]) == {"version", "readme"} and PROJECT["scripts"] == {
        "sable": "sable.cli.main:main"
    }
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


@pytest.fixture
def description(monkeypatch) -> tp.Callable[[str], str]:
    """text of a README -> what setup.py makes of it, setup() itself left out."""

    def make(text: str) -> str:
        given: dict[str, str] = {}
        setuptools, command = types.ModuleType("setuptools"), types.ModuleType("setuptools.command.build_py")
        vars(setuptools)["setup"], vars(command)["build_py"] = given.update, object
        monkeypatch.setitem(sys.modules, "setuptools", setuptools)
        monkeypatch.setitem(sys.modules, "setuptools.command.build_py", command)
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
        exec(SETUP, {"__name__": "setup"})
        monkeypatch.undo()
        return given["long_description"]

    return make


def test_links_of_the_description_work_without_a_repository(description):
    text = "[a](docs/a.md), [b](https://b.org), [c](#c), ![d](docs/d.png), x[0](y z), `[e]`"
    assert description(text) == "a, [b](https://b.org), [c](#c), d, x[0](y z), `[e]`"
    readme = (REPOSITORY / "README.md").read_text()
    left = re.findall(r"\]\(([^)]*)\)", description(readme))
    assert all(link.startswith(("https://", "#")) for link in left)
    assert len(re.findall(r"\]\(", readme)) > len(left)


def test_a_file_the_readme_links_to_is_in_the_repository():
    links = re.findall(r"\]\(([^)]*)\)", (REPOSITORY / "README.md").read_text())
    files = [link for link in links if not link.startswith(("https://", "#"))]
    assert files and all((REPOSITORY / file.partition("#")[0]).exists() for file in files)


def test_rules_are_those_of_the_versions_the_metadata_pin():
    required = [*PROJECT["dependencies"], *EXTRAS["jaxmarl"]]
    pinned = dict(text.split("==") for text in required if "==" in text)
    assert pinned == ENVS.RULES


@pytest.mark.parametrize(
    ("task", "package"),
    [("lbf/8x8-2p-2f-coop", "jumanji"), ("mabrax/ant_4x2", "brax"), ("smax/2s3z", "jaxmarl")],
)
def test_an_untested_version_of_a_suite_is_refused_in_a_line(task, package, monkeypatch):
    versions = ENVS.RULES | {package: "9.9.9"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    with pytest.raises(SableError, match=f"{package} {ENVS.RULES[package]}, and 9.9.9") as refused:
        ENVS.make(task)
    assert "\n" not in str(refused.value) and f"pip install '{package}==" in str(refused.value)
    assert ENVS.make("probe/bandit").spec.num_agents == 2


def test_every_python_we_name_has_its_lanes():
    """Pinned, and with the newest versions where the newest jax takes it; later ones are not refused."""
    pythons = [
        version for kind in PROJECT["classifiers"] if (version := kind.rpartition(" :: 3.")[2]).isdigit()
    ]
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())["jobs"]
    pinned, newest = (jobs[name]["strategy"]["matrix"]["python"] for name in ("pinned", "next"))
    assert pinned == [f"3.{version}" for version in pythons] and pinned[0] == "3.11"
    assert PROJECT["requires-python"] == ">=3.11" and set(newest) == set(pinned) - {"3.11"}
    assert jobs["next"]["steps"][-1]["run"].startswith("make test-next ")


def test_the_newest_python_found_is_one_that_works(tmp_path):
    """Not a shim that only says where the real one is."""
    for name, code in (("python3.14", "exit 127"), ("python3.13", "exit 0"), ("uv", "exit 2")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    found = subprocess.run(
        [REPOSITORY / ".ci/newest-python"], capture_output=True, text=True, env=environment
    )
    assert (found.returncode, found.stdout.strip()) == (0, str(tmp_path / "python3.13"))


def test_what_installs_elsewhere_is_well_formed():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())["jobs"]
    lanes = [
        lane for job in jobs.values() for lane in job.get("strategy", {}).get("matrix", {}).get("include", [])
    ]
    assert {"oldest", "newest"} <= {lane.get("lane") for lane in lanes}
    for lane in lanes:
        assert lane.get("extra", "tune") in EXTRAS
        assert all((REPOSITORY / path).is_file() for path in lane.get("tests", "").split())
