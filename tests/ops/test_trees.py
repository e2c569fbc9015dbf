import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.ops import trees as tree

MASK = jnp.array([True, False, True])


def leaves():
    """Leaves of several ranks and kinds that share a leading axis of 3."""
    return {"x": jnp.arange(3.0), "y": jnp.arange(12, dtype=jnp.int32).reshape(3, 4), "empty": ()}


def test_select_broadcasts_the_mask_over_trailing_axes():
    old = leaves()
    new = jax.tree.map(lambda x: x + 100, old)
    chosen = tree.select(MASK, new, old)
    for name in ("x", "y"):
        expected = np.stack([(new if m else old)[name][i] for i, m in enumerate(MASK)])
        np.testing.assert_array_equal(chosen[name], expected)
        assert chosen[name].dtype == old[name].dtype


@pytest.mark.parametrize("mask", [True, False])
def test_select_takes_a_scalar_mask(mask):
    old = leaves()
    new = jax.tree.map(lambda x: x + 100, old)
    chosen = tree.select(jnp.array(mask), new, old)
    jax.tree.map(np.testing.assert_array_equal, chosen, new if mask else old)


def test_select_and_take_and_merge_work_on_typed_keys():
    new, old = jax.random.split(jax.random.key(0), 3), jax.random.split(jax.random.key(1), 3)
    data = jax.random.key_data
    chosen = jax.jit(tree.select)(MASK, new, old)
    np.testing.assert_array_equal(data(chosen), np.where(MASK[:, None], data(new), data(old)))
    np.testing.assert_array_equal(data(tree.take(new, jnp.array([2, 0]))), data(new)[np.array([2, 0])])
    np.testing.assert_array_equal(data(tree.merge(tree.split(new, (3, 1)))), data(new))


def test_reset_zeroes_exactly_the_first_entries():
    memory = {"a": jnp.ones((3, 2, 2)), "b": jnp.full((3,), 7, jnp.int32)}
    after = tree.reset_memory(memory, MASK)
    np.testing.assert_array_equal(after["a"][:, 0, 0], [0.0, 1.0, 0.0])
    np.testing.assert_array_equal(after["b"], [0, 7, 0])
    assert tree.reset_memory((), MASK) == ()


def test_reset_clears_even_a_memory_that_is_not_finite():
    assert tree.all_finite(tree.reset_memory(jnp.array([jnp.nan, 1.0, jnp.inf]), MASK))


@pytest.mark.parametrize("axis", [0, 1])
def test_take_indexes_one_axis(axis):
    x = jnp.arange(24.0).reshape(3, 4, 2)
    index = jnp.array([[2, 0], [1, 1]])
    np.testing.assert_array_equal(tree.take({"x": x}, index, axis)["x"], np.take(np.asarray(x), index, axis))


def test_split_inverts_merge():
    x = {"x": jnp.arange(24.0).reshape(2, 3, 4), "y": jnp.arange(6).reshape(2, 3)}
    merged = tree.merge(x)
    assert jax.tree.map(jnp.shape, merged) == {"x": (6, 4), "y": (6,)}
    np.testing.assert_array_equal(merged["x"][4], x["x"][1, 1])
    jax.tree.map(np.testing.assert_array_equal, tree.split(merged, (2, 3)), x)
    assert tree.merge(x["x"], axes=3).shape == (24,)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_all_finite_finds_one_bad_number_anywhere(bad):
    good = {"x": jnp.ones((3, 2)), "i": jnp.arange(3), "key": jax.random.key(0), "scalar": 1.0}
    assert tree.all_finite(good) and tree.all_finite(()) and tree.all_finite(jnp.arange(2))
    assert not jax.jit(tree.all_finite)(good | {"y": jnp.zeros(4).at[2].set(bad)})
    assert tree.all_finite(good).shape == ()
