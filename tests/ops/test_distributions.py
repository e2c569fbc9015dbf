from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.ops.distributions import Categorical, TanhNormal, masked_categorical, tanh_normal
from sable.ops.trees import all_finite

LOGITS = jnp.array([[0.3, -1.2, 2.0, 0.0], [5.0, 1.0, -3.0, 0.5]])
LEGAL = jnp.array([[True, False, True, True], [False, True, False, True]])
EITHER = [
    masked_categorical(jnp.zeros((5, 2, 4)), jnp.ones((5, 2, 4), bool)),
    tanh_normal(jnp.zeros((5, 2, 4)), jnp.ones(4), -2.0, 3.0),
]


def softmax_over_legal(logits, legal):
    """Probabilities in double precision, illegal entries exactly zero."""
    weight = np.where(legal, np.exp(np.asarray(logits, np.float64)), 0.0)
    return weight / weight.sum(-1, keepdims=True)


# Both


@pytest.mark.parametrize("distribution", EITHER)
def test_both_answer_the_same_methods_with_the_same_shapes(distribution):
    noise_key, entropy_key = jax.random.split(jax.random.key(0))
    raw = distribution.sample(noise_key)
    assert raw.shape == distribution.mode().shape
    assert raw.dtype == distribution.mode().dtype
    for form in (distribution.squash(raw), distribution.scale(raw)):
        assert form.shape == raw.shape and form.dtype == raw.dtype
    assert distribution.log_prob(raw).shape == distribution.entropy(entropy_key).shape == (5, 2)
    noise = distribution.noise(noise_key, (5, 2, 4))
    np.testing.assert_array_equal(distribution.sample_from_noise(noise), raw)


@pytest.mark.parametrize("distribution", EITHER)
def test_both_pass_through_jit_and_vmap_whole(distribution):
    raw = distribution.sample(jax.random.key(0))
    plain = distribution.log_prob(raw)
    mapped = jax.jit(jax.vmap(lambda distribution, raw: distribution.log_prob(raw)))(distribution, raw)
    np.testing.assert_allclose(mapped, plain, rtol=1e-6)


# Categorical


def test_categorical_equals_the_hand_formulas():
    p = softmax_over_legal(LOGITS, LEGAL)
    distribution = masked_categorical(LOGITS, LEGAL)
    for action in range(4):
        log_prob = distribution.log_prob(jnp.full(2, action))
        np.testing.assert_allclose(jnp.exp(log_prob), p[:, action], rtol=1e-5)
    log_p = np.log(np.where(p > 0, p, 1.0))
    np.testing.assert_allclose(distribution.entropy(), -(p * log_p).sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(distribution.mode(), [2, 1])


def test_masked_actions_are_never_drawn_and_the_others_as_often_as_they_should_be():
    num_samples = 200_000
    noise = Categorical.noise(jax.random.key(1), (num_samples, 2, 4))
    actions = jax.jit(jax.vmap(masked_categorical(LOGITS, LEGAL).sample_from_noise))(noise)
    for row, p in enumerate(softmax_over_legal(LOGITS, LEGAL)):
        counts = np.bincount(actions[:, row], minlength=4)
        assert not counts[~np.asarray(LEGAL[row])].any()
        np.testing.assert_allclose(counts / num_samples, p, atol=5 * np.sqrt(0.25 / num_samples))


def test_a_mask_wins_over_any_logit():
    distribution = masked_categorical(jnp.array([1e30, 0.0, -1e30]), jnp.array([False, False, True]))
    assert distribution.mode() == 2
    noise = distribution.noise(jax.random.key(0), (1000, 3))
    assert (jax.jit(jax.vmap(distribution.sample_from_noise))(noise) == 2).all()
    np.testing.assert_allclose(distribution.log_prob(jnp.array(2)), 0.0)


@jax.jit
@jax.value_and_grad
def categorical_total(logits, legal):
    """Everything a loss takes from a categorical, and the gradient of it."""
    distribution = masked_categorical(logits, legal)
    return (distribution.log_prob(distribution.mode()) + distribution.entropy()).sum()


@pytest.mark.parametrize("legal", [LEGAL, jnp.eye(4, dtype=bool)[:2], jnp.zeros((2, 4), bool)])
@pytest.mark.parametrize("size", [1.0, 100.0, 1e6])
def test_categorical_gradients_stay_finite_with_any_mask(legal, size):
    value, gradient = categorical_total(size * LOGITS, legal)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    assert not np.asarray(gradient)[~np.asarray(legal)].any()


def test_the_log_probability_of_a_masked_action_is_finite():
    def log_prob(logits):
        return masked_categorical(logits, LEGAL[0]).log_prob(jnp.array(1))

    assert all_finite(jax.value_and_grad(log_prob)(LOGITS[0]))


def test_a_single_legal_action_is_certain_and_none_is_uniform():
    certain = masked_categorical(LOGITS, jnp.eye(4, dtype=bool)[:2])
    np.testing.assert_allclose(certain.entropy(), 0.0, atol=1e-7)
    uniform = masked_categorical(LOGITS, jnp.zeros((2, 4), bool))
    np.testing.assert_allclose(uniform.entropy(), np.log(4), rtol=1e-6)


def test_categorical_gradients_equal_those_derived_from_the_formulas():
    rng = np.random.default_rng(0)
    logits, raw = jnp.array(rng.normal(size=(3, 4, 6))), jnp.array(rng.integers(0, 6, (3, 4)))
    weights = rng.normal(size=(2, 3, 4)).astype("float32")

    def own(logits):
        distribution = Categorical(logits=logits)
        return (weights[0] * distribution.log_prob(raw) + weights[1] * distribution.entropy()).sum()

    def plain(logits):
        log_p = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_p, raw[..., None], axis=-1)[..., 0]
        return (weights[0] * chosen - weights[1] * (jnp.exp(log_p) * log_p).sum(-1)).sum()

    np.testing.assert_allclose(jax.grad(own)(logits), jax.grad(plain)(logits), atol=1e-6)


def test_categorical_entropy_gradient_equals_finite_differences():
    def entropy(logits):
        return masked_categorical(logits, LEGAL[0]).entropy()

    step = 1e-2
    nudged = jnp.stack([LOGITS[0] + sign * step * jnp.eye(4)[i] for i in range(4) for sign in (1, -1)])
    above, below = np.asarray(jax.vmap(entropy)(nudged)).reshape(4, 2).T
    np.testing.assert_allclose(jax.grad(entropy)(LOGITS[0]), (above - below) / (2 * step), atol=1e-4)


# TanhNormal


@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (0.7, 0.3), (-2.0, 0.694)])
def test_tanh_normal_density_integrates_to_one_over_the_squashed_action(mean, std):
    # A density of a = tanh(u): integrated over a in [-1, 1] by the midpoint rule on a grid of a itself.
    num_cells = 200_000
    action = (np.arange(num_cells) + 0.5) * 2 / num_cells - 1
    distribution = tanh_normal(jnp.full((num_cells, 1), mean), jnp.array([std]))
    density = jnp.exp(distribution.log_prob(jnp.arctanh(jnp.asarray(action, jnp.float32))[:, None]))
    np.testing.assert_allclose(density.mean() * 2, 1.0, rtol=2e-3)


def test_tanh_normal_log_prob_equals_the_hand_formula_summed_over_components():
    mean, std, u = np.array([0.5, -1.0]), np.array([0.4, 2.0]), np.array([1.0, 0.3])
    density = np.exp(-0.5 * ((u - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi)) / (1 - np.tanh(u) ** 2)
    distribution = TanhNormal(mean=jnp.asarray(mean), std=jnp.asarray(std))
    np.testing.assert_allclose(distribution.log_prob(jnp.asarray(u)), np.log(density).sum(), rtol=1e-5)


@jax.jit
@partial(jax.value_and_grad, argnums=(0, 1, 2))
def tanh_normal_total(mean, std, u):
    return tanh_normal(mean, std).log_prob(u).sum()


@pytest.mark.parametrize("u", [-50.0, 50.0, 0.0])
@pytest.mark.parametrize("std", [1e-3, 1.0])
def test_tanh_normal_log_prob_and_gradient_are_finite_far_out(u, std):
    value, gradients = tanh_normal_total(jnp.zeros((2, 3)), jnp.full(3, std), jnp.full((2, 3), u))
    assert all_finite((value, gradients))
    # The truth in double precision, where log(1 - tanh(u)^2) = -2 log cosh(u).
    log_cosh = np.logaddexp(u, -u) - np.log(2)
    expected = 6 * (-0.5 * (u / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi) + 2 * log_cosh)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_tanh_normal_entropy_is_unbiased():
    # The truth by integration over u: H = -E[log p(tanh(u))], components independent.
    mean, std = np.array([0.3, -0.8]), np.array([0.7, 1.2])
    u = np.linspace(-12, 12, 20_001)[:, None]
    normal = np.exp(-0.5 * ((u - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    log_p = np.log(normal + 1e-300) - 2 * (np.log(2) - u - np.logaddexp(0, -2 * u))
    truth = -(normal * log_p).sum() * (u[1, 0] - u[0, 0])

    @jax.jit
    def draw(mean, std, entropy_key, sample_key):
        distribution = tanh_normal(jnp.broadcast_to(mean, (400_000, 2)), std)
        return distribution.entropy(entropy_key), -distribution.log_prob(distribution.sample(sample_key))

    for draws in draw(jnp.float32(mean), jnp.float32(std), *jax.random.split(jax.random.key(0))):
        draws = np.asarray(draws, np.float64)
        np.testing.assert_allclose(draws.mean(), truth, atol=5 * draws.std() / np.sqrt(400_000))


def test_tanh_normal_entropy_has_a_finite_gradient():
    def entropy(mean, std):
        return tanh_normal(mean, std).entropy(jax.random.key(0)).sum()

    slope = jax.jit(jax.grad(entropy, argnums=(0, 1)))
    for size in (1.0, 50.0):
        gradients = slope(jnp.full((2, 3), size), jnp.full(3, size))
        assert all_finite(gradients) and all(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("low, high", [(-1.0, 1.0), (-0.4, 0.4), (0.0, 1.0), (-0.3, 1.7)])
def test_scaled_actions_fill_the_bounds_and_never_leave_them(low, high):
    u = jnp.concatenate([jnp.linspace(-100, 100, 999), jnp.linspace(-3, 3, 999), jnp.zeros(1)])[:, None]
    distribution = tanh_normal(jnp.zeros_like(u), jnp.ones(1), low, high)
    action, squashed = distribution.scale(u), distribution.squash(u)
    # Compared in float32, as an environment would.
    assert action.min() == jnp.float32(low) and action.max() == jnp.float32(high)
    assert squashed.min() == -1.0 and squashed.max() == 1.0
    np.testing.assert_allclose(action, low + (high - low) * (np.asarray(squashed) + 1) / 2, atol=1e-6)


def test_tanh_normal_samples_have_the_asked_mean_and_deviation_before_squashing():
    distribution = tanh_normal(jnp.full((100_000, 2), 0.5), jnp.array([0.1, 2.0]))
    u = distribution.sample(jax.random.key(3))
    np.testing.assert_allclose(u.mean(0), 0.5, atol=0.03)
    np.testing.assert_allclose(u.std(0), [0.1, 2.0], rtol=0.02)
    np.testing.assert_array_equal(distribution.mode(), distribution.mean)
