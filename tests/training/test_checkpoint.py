"""Checkpoints hold every bit, and a damaged one is never loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.errors import SableError
from sable.training import checkpoint


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
    partial = tmp_path / checkpoint.FOLDER / ".partial-0000000002"
    partial.mkdir()
    (partial / "half").write_bytes(b"written")
    assert int(checkpoint.restore(tmp_path, like(state)).state["count"]) == 7
    checkpoint.save(tmp_path, 2, state, {})
    assert not partial.exists()


def test_a_flipped_bit_in_any_file_is_noticed_and_the_file_named(tmp_path, state):
    folder = checkpoint.save(tmp_path, 1, state, {})
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) > 3
    for path in files:
        intact = path.read_bytes()
        damaged = bytearray(intact)
        damaged[len(damaged) // 2] ^= 4
        path.write_bytes(damaged)
        if path.name == checkpoint.MANIFEST:  # a flip in its white space changes nothing
            damaged[: len(damaged) // 2] = b""
            path.write_bytes(damaged)
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
