import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.ops.losses import clipped_surrogate, clipped_value_error, soft_q_target, standardise, td_target


@pytest.mark.parametrize(
    "ratio, advantage, loss, slope",
    [
        (1.0, 2.0, -2.0, -2.0),  # inside: the plain product
        (1.5, 2.0, -2.4, 0.0),  # a good action already made likelier by more than eps: no further push
        (0.5, 2.0, -1.0, -2.0),  # a good action made less likely: pulled back
        (1.5, -2.0, 3.0, 2.0),  # a bad action made likelier: pushed down
        (0.5, -2.0, 1.6, 0.0),  # a bad action already made unlikelier by more than eps: no further push
    ],
)
def test_clipped_surrogate_in_each_region(ratio, advantage, loss, slope):
    value_and_slope = jax.value_and_grad(lambda ratio: clipped_surrogate(ratio, jnp.array(advantage), 0.2))
    np.testing.assert_allclose(value_and_slope(jnp.array(ratio)), (loss, slope), rtol=1e-6)


@pytest.mark.parametrize(
    "value, old_value, target, error",
    [
        (1.1, 1.0, 2.0, 0.5 * 0.9**2),  # inside: both errors are the same
        (2.0, 1.0, 2.0, 0.5 * 0.8**2),  # moved too far towards the target: the clipped value stands
        (0.0, 1.0, 2.0, 0.5 * 2.0**2),  # moved away: the unclipped error is the larger
    ],
)
def test_clipped_value_error_in_each_region(value, old_value, target, error):
    given = clipped_value_error(jnp.array(value), jnp.array(old_value), jnp.array(target), 0.2)
    np.testing.assert_allclose(given, error, rtol=1e-6)


def test_objectives_take_a_traced_eps_and_keep_the_shape():
    x, y, z = jax.random.normal(jax.random.key(0), (3, 4, 5))
    for objective in (
        lambda eps: clipped_surrogate(x, y, eps),
        lambda eps: clipped_value_error(x, y, z, eps),
        lambda eps: standardise(x, eps),
    ):
        together = jax.jit(jax.vmap(objective))(jnp.array([0.1, 0.3]))
        assert together.shape == (2, 4, 5)
        np.testing.assert_allclose(together[1], objective(0.3), rtol=1e-6)


def test_standardise_has_mean_zero_and_deviation_one_over_all_elements():
    x = standardise(5 + 3 * jax.random.normal(jax.random.key(0), (7, 4, 3)))
    np.testing.assert_allclose([x.mean(), x.std()], [0.0, 1.0], atol=1e-5)
    np.testing.assert_allclose(standardise(jnp.array([1.0, 3.0])), [-1.0, 1.0], rtol=1e-6)


def test_standardise_of_equal_numbers_is_zero():
    assert not standardise(jnp.full((3, 2), 4.0)).any()


def test_standardise_divides_by_no_less_than_it_may():
    x = jnp.array([1.0, 3.0])
    np.testing.assert_allclose(standardise(x, 0.5), [-1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(standardise(x, 4.0), [-0.25, 0.25], rtol=1e-6)
    assert not standardise(x, jnp.inf).any()


def test_targets_equal_the_equation_and_pass_no_gradient():
    reward, discount, log_prob = jnp.array([1.0, 1.0]), jnp.array([0.5, 0.0]), jnp.array([-2.0, -2.0])
    next_q = jnp.array([[4.0, 4.0], [3.0, 9.0]])
    np.testing.assert_allclose(td_target(reward, discount, next_q[0]), [3.0, 1.0])
    # 1 + 0.5 * (min(4, 3) - 0.5 * -2), and the reward alone where the episode ended.
    np.testing.assert_allclose(soft_q_target(reward, discount, next_q, log_prob, 0.5), [3.0, 1.0])
    gradient = jax.grad(lambda q: soft_q_target(reward, discount, q, log_prob, 0.5).sum())(next_q)
    assert not gradient.any()
