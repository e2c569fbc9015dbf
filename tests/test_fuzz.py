"""Files of all kinds, damaged in all ways: our own error or a correct load; nothing executed, nothing
overwritten."""

import ast
import gzip
import json
import random
import shutil
import typing as tp
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

import sable
from sable import tensors
from sable.config import resolve as settings
from sable.errors import SableError
from sable.reports import ledger, marl_eval, results_page
from sable.reports import read as results
from sable.runs import directory as runs
from sable.runs import policy
from sable.studies import reproduce
from sable.training.loggers.logger import read_rows

ROOT = Path(sable.__file__).parent
SIZES = {
    "video": False,
    "total_steps": 32,
    "num_evaluations": 2,
    "evaluation_episodes": 2,
    "absolute_episodes": 2,
}
SIZES |= {"num_envs": 4, "rollout_length": 4, "num_minibatches": 1, "policy_layers": (8,)}
NASTY: tuple[tp.Any, ...] = (
    None, True, -1, 0, 10**30, 1e300, "", "x", "sable", "../../etc", "a\0b", "é" * 300, [], [[]], {},
    0.5, {"a": 1}, ["x", None], float("nan"), float("inf"),
)  # fmt: skip
TOKENS = (
    b"NaN",
    b"1e999",
    b"-",
    b"null",
    b"{}",
    b"[",
    b'"',
    b"\xff\xfe",
    b"\0",
    b"\n",
    b"9" * 5000,
    b"[" * 5000,
)


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """The content with bytes flipped, cut out, doubled, or strange ones put in."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.randrange(1, 40))
        kind = rng.randrange(5)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place:end]
        elif kind == 2:
            data[place:place] = data[place:end] * rng.randrange(1, 4)
        elif kind == 3:
            data[place:place] = rng.choice(TOKENS)
        elif rng.random() < 0.3:
            del data[place:]
    return bytes(data)


def mutated_json(rng: random.Random, content: bytes) -> bytes:
    """The content, a JSON value, with some part of it replaced, left out, renamed or added."""
    data = json.loads(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        node = data
        while isinstance(node, (dict, list)) and node:
            keys = list(node) if isinstance(node, dict) else range(len(node))
            key = rng.choice(list(keys))
            inner = node[key]
            if isinstance(inner, (dict, list)) and inner and rng.random() < 0.8:
                node = inner
                continue
            what = rng.randrange(4)
            if what == 0:
                del node[key]
            elif what == 1 and isinstance(node, dict):
                node[str(rng.choice(NASTY))] = node.pop(key)
            elif what == 2 and isinstance(node, dict):
                node[f"new {rng.randrange(3)}"] = deepcopy(rng.choice(NASTY))
            else:
                node[key] = deepcopy(rng.choice(NASTY))
            break
    return json.dumps(data).encode()


def mutated(rng: random.Random, path: Path, content: bytes) -> bytes:
    structured = path.suffix in (".json", ".jsonl") and b"}\n{" not in content and rng.random() < 0.6
    return (mutated_json if structured else mutated_bytes)(rng, content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run, its exported team and a recipe."""
    place = tmp_path_factory.mktemp("fuzz")
    result = sable.train("probe/bandit", system="ippo", out=place, name="r", quiet=True, **SIZES)
    result.directory.rename(place / "run")
    (place / "run" / "sums.json").unlink()  # or it would notice first
    sable.export(place / "run", place / "team")
    recipe = ROOT / "config" / "recipes" / "sable.toml"
    shutil.copyfile(recipe, place / "recipe.toml")
    (place / "kept").mkdir()
    (place / "kept" / "metrics.jsonl.gz").write_bytes(
        gzip.compress((place / "run/metrics.jsonl").read_bytes())
    )
    (place / "results").mkdir()
    row = ledger.make_row(place / "run", "probe/bandit:ippo") | {"commit": "c", "command": "sable train"}
    ledger.write(place / "results", [row | {"paper": {"mean": 1.0, "interval": [1.0, 1.0]}}])
    return place


def team(path: Path) -> list[np.ndarray]:
    loaded = sable.load(path)
    return [np.asarray(leaf) for leaf in policy.jax.tree.leaves(loaded.params)]


def report(path: Path) -> None:
    """What `sable report` reads; it turns refusals into notes itself."""
    assert isinstance(results.read([path]).notes, list)


READERS: dict[str, list[tp.Callable[[Path], tp.Any]]] = {
    "run/config.json": [runs.read_config, report],
    "run/meta.json": [runs.read_meta, report],
    "run/summary.json": [report, team],
    "run/spec.json": [team],
    "run/metrics.jsonl": [lambda run: read_rows(run / "metrics.jsonl"), report],
    "run/marl_eval.json": [lambda run: marl_eval.read(run / "marl_eval.json")],
    "kept/metrics.jsonl.gz": [lambda kept: read_rows(kept / "metrics.jsonl")],
    "results/ledger.jsonl": [
        lambda place: results_page.section(ledger.read(place)),
        lambda place: [reproduce.cell(row, place, None) for row in ledger.read(place)],
    ],
    "team/policy.json": [team],
    "team/weights.safetensors": [team, lambda team: tensors.read(team / "weights.safetensors")],
    "recipe.toml": [
        lambda place: settings.read_recipe(place / "recipe.toml", "sable", "rware/tiny-4ag"),
        lambda place: sable.configure("rware/tiny-4ag", recipe=place / "recipe.toml"),
    ],
}
RARELY = {"run/summary.json", "run/spec.json"}  # loading a run's team reads its checkpoint, which takes time


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_what_is_read_from_damaged_files_is_right_or_refused(folder, capfd, count):
    rng, truth = random.Random(count), team(folder / "team")
    whole, refused = contents(folder), 0
    for number in range(count):
        names = [name for name in READERS if name not in RARELY or rng.random() < 0.3]
        name = rng.choice(names)
        path = folder / name
        damaged = mutated(rng, path, whole[path])
        path.write_bytes(damaged)
        try:
            for reader in READERS[name]:
                try:
                    found = reader(path.parent)
                except SableError as error:
                    refused += 1
                    assert "\n" not in str(error).strip(), (number, name)
                    continue
                if reader is team:
                    for ours, theirs in zip(found, truth, strict=True):
                        assert ours.tobytes() == theirs.tobytes(), (number, name)
        except Exception as error:
            raise AssertionError(f"mutation {number} of {name}: {error!r}: {damaged[:2000]!r}") from error
        assert path.read_bytes() == damaged
        path.write_bytes(whole[path])
    assert contents(folder) == whole, "reading must not write"
    assert refused > count / 4
    capfd.readouterr()
    with capfd.disabled():
        print(f"\n{count} damaged files: {refused} refusals, the rest read as far as they say anything")


FORBIDDEN = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml"}


def test_no_code_of_ours_could_execute_a_file():
    """No pickle in any form, no eval or exec, no numpy file that may hold objects."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in FORBIDDEN, where
            elif isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                assert called not in {"eval", "exec", "compile", "__import__"}, where
                assert not any(word.arg == "allow_pickle" for word in node.keywords), where
                if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                    assert (node.func.value.id, node.func.attr) not in {("np", "load"), ("jnp", "load")}, (
                        where
                    )
