"""Imports point one way: each layer may use those before it, never those after."""

import ast
import re
from pathlib import Path

import pytest

import sable

ROOT = Path(sable.__file__).parent
ALLOWED = {
    "errors": set(),
    "types": set(),
    "installation": set(),
    "parent": set(),
    "quiet": set(),
    "old_names": set(),
    "files": {"errors"},
    "trust": {"errors", "old_names"},
    "tensors": {"config", "errors", "files"},
    "config": {"errors", "trust"},
    "ops": {"types"},
    "kernels": {"types", "ops"},
    "nets": {"types", "config", "ops", "kernels"},
    "systems": {"types", "config", "errors", "ops", "nets", "kernels"},
    "envs": {"types", "config", "errors", "installation", "old_names", "quiet", "trust"},
    "training": {"types", "config", "errors", "files", "tensors", "ops", "kernels", "envs", "systems"},
}
ALLOWED["training"] |= {"installation"}
ALLOWED["runs"] = ALLOWED["training"] | {
    "installation",
    "quiet",
    "tensors",
    "training",
    "trust",
    "reports",
    "viewer",
}
ALLOWED["reports"] = {
    "config",
    "envs",
    "errors",
    "files",
    "installation",
    "runs",
    "tensors",
    "training",
    "trust",
}
ALLOWED["viewer"] = ALLOWED["runs"] | {"nets", "runs"}
ALLOWED["studies"] = ALLOWED["runs"] | {"parent", "runs"}
ALLOWED["cli"] = {
    "config",
    "envs",
    "errors",
    "installation",
    "parent",
    "reports",
    "runs",
    "studies",
    "training",
    "trust",
}
HEAVY = {"jumanji": {"envs/suites/jumanji.py", "envs/suites/rware.py"}}
HEAVY |= {"jaxmarl": {"envs/suites/jaxmarl.py", "envs/suites/smax.py"}, "brax": {"envs/suites/jaxmarl.py"}}
HEAVY |= {
    "matplotlib": {"runs/curve.py", "reports/figures.py", "studies/study_files.py"},
    "tensorboardX": {"training/loggers/logger.py"},
}
HEAVY |= {"ray": {"studies/benchmark.py"}, "optuna": {"studies/trials.py"}}
HEAVY |= {
    "rich": {
        "training/console.py",
        "viewer/show.py",
        *(f"studies/{name}.py" for name in ("live_table", "tune_view")),
    }
}
HEAVY |= {"gymnasium": {"envs/python/pettingzoo.py"}, "pettingzoo": set()}
HEAVY |= {"PIL": {"viewer/video.py"}, "imageio_ffmpeg": {"viewer/video.py"}}
HEAVY |= {"orbax": {"training/orbax_files.py"}, "safetensors": {"tensors.py"}}
HEAVY |= {"jax2onnx": {"runs/export.py"}}
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The dotted names of everything a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_from_the_layers_below_it(path):
    place = path.relative_to(ROOT)
    layer = place.parts[0].removesuffix(".py")
    for name in imported(path):
        top, *rest = name.split(".")
        if top == "sable" and layer in ALLOWED and rest:
            assert rest[0] in ALLOWED[layer] | {layer}, f"{place} imports {name}"
        if top in HEAVY:
            assert str(place) in HEAVY[top], f"{place} imports {name}"


def test_the_training_layer_knows_no_concrete_system_or_suite():
    concrete = {"sable.systems.sable", "sable.systems.ppo", "sable.envs.suites"}
    for path in (ROOT / "training").glob("*.py"):
        assert not {name for name in imported(path) if any(name.startswith(bad) for bad in concrete)}, path


def test_only_trust_imports_what_no_table_of_ours_names():
    """A name out of a file can reach neither `find_spec`, which imports packages, nor `import_module`, except
    through a `Trust`."""
    tables = {"envs/make.py": "_MODULES[", "systems/make.py": "SYSTEMS["}
    for path in FILES:
        place = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and place != "trust.py":
                called = ast.unparse(node.func)
                assert called not in ("__import__", "importlib.util.find_spec", "runpy.run_module"), place
                if called == "importlib.import_module":
                    assert tables[place] in ast.unparse(node.args[0]), place


def exceptions() -> set[str]:
    """Return what the architecture's table names in its first column."""
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    table = page.partition("### What is larger than it should be")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    return set(re.findall(r"`([^`]+)`", "".join(cells)))


def test_what_is_large_is_what_the_page_names():
    large = {place.name for place in ROOT.iterdir() if place.is_dir() and len([*place.glob("[!_]*.py")]) > 14}
    for path in FILES:
        source = path.read_text()
        if len(source.splitlines()) > 300:
            large.add(str(path.relative_to(ROOT)))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60:
                large |= {node.name, str(path.relative_to(ROOT))}
    assert large == exceptions()
