"""Imports point one way (HOUSE section 2): each layer may use those before it, never those after."""

import ast
from pathlib import Path

import pytest

import sable

ROOT = Path(sable.__file__).parent
ALLOWED = {
    "errors": set(),
    "files": {"errors"},
    "quiet": set(),
    "types": set(),
    "installation": set(),
    "parent": set(),
    "trust": {"errors"},
    "meaning": {"config", "errors"},  # the former for its types alone
    "config": {"errors", "meaning", "trust"},
    "checks": {"config", "errors", "meaning"},
    "settings": {"config", "checks", "errors", "meaning", "trust"},
    "flags": {"errors"},
    "parsers": {"config", "flags", "trust"},
    "ops": {"types"},
    "envs": {"types", "errors", "quiet", "installation", "trust"},
    "kernels": {"types", "ops"},
    "nets": {"types", "config", "ops", "kernels"},
    "systems": {"types", "config", "errors", "ops", "nets", "kernels"},
    "training": {"types", "config", "errors", "files", "ops", "kernels", "envs", "systems"},
    "experiments": {
        "types",
        "config",
        "checks",
        "files",
        "meaning",
        "quiet",
        "parent",
        "settings",
        "errors",
        "installation",
        "trust",
        "envs",
        "systems",
        "training",
    },
    "watching": {
        "types",
        "config",
        "errors",
        "installation",
        "files",
        "ops",
        "envs",
        "nets",
        "systems",
        "training",
        "experiments",
        "policy",
        "trust",
    },
}
HEAVY = {"jumanji": {"envs/jumanji.py", "envs/rware.py"}}
HEAVY |= {"jaxmarl": {"envs/jaxmarl.py", "envs/smax.py"}, "brax": {"envs/jaxmarl.py"}}
HEAVY |= {
    "matplotlib": {"training/curve.py", "experiments/figures.py", "experiments/tuned.py"},
    "tensorboardX": {"training/logging.py"},
}
HEAVY |= {"ray": {"experiments/benchmark.py"}, "optuna": {"experiments/trials.py"}}
HEAVY |= {
    "rich": {
        "training/view.py",
        "watching/show.py",
        *(f"experiments/{name}.py" for name in ("live", "board", "tune_view")),
    }
}
HEAVY |= {"gymnasium": {"envs/pettingzoo.py"}, "pettingzoo": set()}
HEAVY |= {"PIL": {"watching/film.py"}, "imageio_ffmpeg": {"watching/film.py"}}
HEAVY |= {"orbax": {"training/checkpoint.py"}, "jax2onnx": {"deployment.py"}}
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
    concrete = {"sable.systems.sable", "sable.systems.ppo", "sable.envs.jumanji", "sable.envs.jaxmarl"}
    for path in (ROOT / "training").glob("*.py"):
        assert not {name for name in imported(path) if any(name.startswith(bad) for bad in concrete)}, path


def test_only_trust_imports_what_no_table_of_ours_names():
    """A name out of a file can reach neither `find_spec`, which imports packages, nor `import_module`, except
    through a `Trust`."""
    tables = {"envs/__init__.py": "_MODULES[", "systems/__init__.py": "SYSTEMS["}
    for path in FILES:
        place = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and place != "trust.py":
                called = ast.unparse(node.func)
                assert called not in ("__import__", "importlib.util.find_spec", "runpy.run_module"), place
                if called == "importlib.import_module":
                    assert tables[place] in ast.unparse(node.args[0]), place
