"""Checkpoints hold every bit, and a damaged one is never loaded."""

import importlib.util
import json
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.errors import SableError
from sable.training import checkpoint

_spec = importlib.util.spec_from_file_location("damage", Path(__file__).with_name("damage.py"))
damage = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(damage)


@pytest.fixture
def state():
    """A bit of everything a run state holds: floats, integers, flags, typed and raw keys, nested
    structures."""
    return {
        "params": {"kernel": jnp.linspace(0, 1, 300).reshape(10, 30), "half": jnp.ones(3, jnp.bfloat16)},
        "keys": jax.random.split(jax.random.key(3), 2),
        "raw_key": jax.random.PRNGKey(1),
        "count": jnp.int32(7),
        "flags": jnp.array([True, False]),
        "memory": (),
        "nothing": jnp.zeros((2, 0)),
    }


def bits(tree):
    def leaf(x):
        x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return (str(x.dtype), x.shape, np.asarray(x).tobytes())

    return jax.tree.map(leaf, tree)


def like(state):
    return jax.eval_shape(lambda: state)


def test_what_is_saved_comes_back_to_the_last_bit(tmp_path, state):
    checkpoint.save(tmp_path, 5, state, {"updates": 5})
    restored = checkpoint.restore(tmp_path, like(state))
    assert bits(restored.state) == bits(state)
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert restored.facts == {"updates": 5}


def test_the_newest_is_loaded_and_one_older_is_kept(tmp_path, state):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state | {"count": jnp.int32(step)}, {})
    assert checkpoint.steps(tmp_path / checkpoint.FOLDER) == [2, 3]
    assert int(checkpoint.restore(tmp_path, like(state)).state["count"]) == 3


def test_what_a_killed_save_leaves_is_ignored_and_replaced(tmp_path, state):
    checkpoint.save(tmp_path, 1, state, {})
    for left in (".partial-0000000002", ".partial-0000000007"):
        partial = tmp_path / checkpoint.FOLDER / left
        partial.mkdir()
        (partial / "half").write_bytes(b"written")
    assert int(checkpoint.restore(tmp_path, like(state)).state["count"]) == 7
    checkpoint.save(tmp_path, 2, state, {})
    assert {path.name for path in partial.parent.iterdir()} == {"0000000001", "0000000002"}


def test_one_killed_while_it_removes_an_old_checkpoint_leaves_no_half_of_it(tmp_path, state, monkeypatch):
    checkpoint.save(tmp_path, 1, state, {})
    checkpoint.save(tmp_path, 2, state, {})
    rmtree = shutil.rmtree

    def killed(path, **options):
        if path.exists():
            next(path.rglob("manifest.json")).unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 3, state, {})
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert checkpoint.steps(tmp_path / checkpoint.FOLDER) == [2, 3]
    checkpoint.save(tmp_path, 4, state, {})
    left = sorted(path.name for path in (tmp_path / checkpoint.FOLDER).iterdir())
    assert left == ["0000000003", "0000000004"]


def test_a_flipped_bit_in_any_file_is_noticed_and_the_file_named(tmp_path, state):
    folder = checkpoint.save(tmp_path, 1, state, {}, None, None, b"metrics")
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) == 3
    for path in files:
        intact = path.read_bytes()
        damaged = bytearray(intact)
        damaged[len(damaged) // 2] ^= 4
        path.write_bytes(damaged)
        if path.name == checkpoint.MANIFEST:  # a flip in its white space changes nothing
            path.write_bytes(intact.replace(b'"step": 1', b'"step": 3'))
        with pytest.raises(SableError, match=r"is damaged: .*" + path.name) as error:
            checkpoint.restore(tmp_path, like(state))
        assert "\n" not in str(error.value)
        path.write_bytes(intact)
    checkpoint.restore(tmp_path, like(state))


@pytest.mark.parametrize("damage", ["truncated", "deleted", "added"])
def test_missing_short_and_foreign_files_are_noticed(tmp_path, state, damage):
    folder = checkpoint.save(tmp_path, 1, state, {})
    victim = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    if damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "deleted":
        victim.unlink()
    else:
        (folder / "stranger").write_text("hello")
    with pytest.raises(SableError, match="is damaged"):
        checkpoint.restore(tmp_path, like(state))


def test_a_run_without_a_checkpoint_says_so(tmp_path, state):
    with pytest.raises(SableError, match="holds no checkpoint"):
        checkpoint.restore(tmp_path, like(state))


def test_a_checkpoint_of_another_shape_is_refused(tmp_path, state):
    checkpoint.save(tmp_path, 1, state, {})
    with pytest.raises(SableError, match="does not fit") as error:
        checkpoint.restore(tmp_path, like(state | {"flags": jnp.zeros(5, bool)}))
    assert "\n" not in str(error.value)
    with pytest.raises(SableError, match="does not fit"):
        checkpoint.restore(tmp_path, like(state | {"extra": jnp.zeros(5)}))


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it_which_is_never_lost(tmp_path, state, capsys):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state | {"count": jnp.int32(step)}, {"updates": step})
    folder = tmp_path / checkpoint.FOLDER
    (folder / "0000000002" / checkpoint.MANIFEST).unlink()
    assert checkpoint.restore(tmp_path, like(state)).facts == {"updates": 1}
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "0000000002 is damaged: manifest.json" in said
    assert "using the one before it, 0000000001" in said
    # The run goes on from 1 and comes to 2 again: the damaged one makes way, and is kept aside.
    checkpoint.save(tmp_path, 2, state | {"count": jnp.int32(22)}, {"updates": 2})
    assert checkpoint.steps(folder) == [1, 2] and (folder / ".damaged-0000000002").is_dir()
    assert int(checkpoint.restore(tmp_path, like(state)).state["count"]) == 22
    # A damaged one with a later number than the next save does not count among those that are kept.
    checkpoint.save(tmp_path, 9, state, {"updates": 9})
    (folder / "0000000009" / checkpoint.ARRAYS).unlink()
    checkpoint.save(tmp_path, 3, state, {"updates": 3})
    assert checkpoint.steps(folder) == [2, 3]
    assert not capsys.readouterr().err


def test_where_none_is_whole_the_newest_is_named(tmp_path, state):
    for step in (1, 2):
        folder = checkpoint.save(tmp_path, step, state, {})
        (folder / checkpoint.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(SableError, match=r"0000000002 is damaged: manifest.json .* neither is any other"):
        checkpoint.restore(tmp_path, like(state))


def test_another_runs_checkpoint_is_told_apart_by_its_settings(tmp_path, state, capsys):
    settings = {"learning_rate": 1e-3, "seeds": (1, 2), "devices": 1}
    checkpoint.save(tmp_path, 1, state, {"updates": 1}, settings)
    checkpoint.save(tmp_path, 2, state, {"updates": 2}, settings | {"learning_rate": 3e-4})
    wanted = settings | {"devices": 8, "added_since": 3}
    assert checkpoint.restore(tmp_path, like(state), wanted).facts == {"updates": 1}
    assert "another run's: learning_rate is 0.0003 there and 0.001" in capsys.readouterr().err
    assert checkpoint.read(tmp_path, "count", wanted)["count"] == 7


def test_checkpoints_without_a_sum_of_their_manifest_are_still_read(tmp_path, state):
    folder = checkpoint.save(tmp_path, 1, state, {"updates": 1})
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    del manifest["sum"], manifest["settings"]
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(SableError, match=r"is damaged: manifest\.json"):
        checkpoint.restore(tmp_path, like(state))
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"format": 1}))
    assert bits(checkpoint.restore(tmp_path, like(state)).state) == bits(state)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_no_corruption_of_the_newest_is_loaded_and_the_one_before_it_is(tmp_path, state, capsys, count):
    """Each time the older is loaded and a file that was touched is named, or, where nothing that counts was
    changed (white space of the manifest, two equal files swapped), the newest."""
    states = {step: state | {"count": jnp.int32(step)} for step in (1, 2)}
    for step, content in states.items():
        (tmp_path / "run").mkdir(exist_ok=True)
        checkpoint.save(tmp_path / "run", step, content, {"updates": step})
    expected = {step: bits(content) for step, content in states.items()}
    rng, harmless = random.Random(0), 0
    for number in range(count):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        older, newest = sorted((tmp_path / "copy" / checkpoint.FOLDER).iterdir())
        what = rng.choice(damage.CORRUPTIONS)
        touched = what(rng, newest, older)
        found = checkpoint.restore(tmp_path / "copy", like(state))
        said = capsys.readouterr().err
        step = found.facts["updates"]
        assert bits(found.state) == expected[step], (number, what)
        if step == 1:
            assert said.count("\n") == 1 and f"checkpoint {newest} is damaged: " in said
            assert any(name in said for name in touched), (number, what, touched, said)
        else:
            harmless += 1
            assert not said, (number, what)
        shutil.rmtree(tmp_path / "copy")
    assert harmless < 0.1 * count
    with capsys.disabled():
        print(f"\n{count} corruptions: {count - harmless} named, {harmless} of no consequence, 0 loaded")


def test_leftovers_of_killed_saves_are_gone_at_the_next_start(tmp_path):
    state = {"x": jnp.arange(3)}
    checkpoint.save(tmp_path, 1, state, {})
    folder = tmp_path / checkpoint.FOLDER
    for name in (".partial-0000000002", ".removed-0000000000", ".damaged-0000000000"):
        (folder / name).mkdir()
        (folder / name / "half").write_bytes(b"half")
    checkpoint.remove_leftovers(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [".damaged-0000000000", "0000000001"]
