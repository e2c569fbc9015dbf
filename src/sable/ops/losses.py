"""Elementwise objectives and targets: one value per element, no reduction, no config."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

Scalar = Float[Array, ""] | float


def clipped_surrogate(
    ratio: Float[Array, "*r"], advantage: Float[Array, "*r"], eps: Scalar
) -> Float[Array, "*r"]:
    """Return PPO's pessimistic objective, to be minimised: -min(ratio * A, clip(ratio, 1 - eps, 1 + eps) *
    A)."""
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - eps, 1 + eps) * advantage)


def clipped_value_error(
    value: Float[Array, "*r"], old_value: Float[Array, "*r"], target: Float[Array, "*r"], eps: Scalar
) -> Float[Array, "*r"]:
    """Return 0.5 * max((value - target)^2, (old_value + clip(value - old_value, -eps, eps) - target)^2)."""
    clipped = old_value + jnp.clip(value - old_value, -eps, eps)
    return 0.5 * jnp.maximum(jnp.square(value - target), jnp.square(clipped - target))


def standardise(x: Float[Array, "*r"], min_std: Scalar = 0.0, eps: Scalar = 1e-8) -> Float[Array, "*r"]:
    """Return (x - mean) / (max(std, least) + eps), the mean and the standard deviation taken over all
    elements."""
    return (x - x.mean()) / (jnp.maximum(x.std(), min_std) + eps)


def td_target(
    reward: Float[Array, "*r"], discount: Float[Array, "*r"], next_value: Float[Array, "*r"]
) -> Float[Array, "*r"]:
    """Return reward + discount * next_value, without gradient; `discount` is 0 where the episode ended."""
    return jax.lax.stop_gradient(reward + discount * next_value)


def soft_q_target(
    reward: Float[Array, "*r"],
    discount: Float[Array, "*r"],
    next_q: Float[Array, "Q *r"],
    next_log_prob: Float[Array, "*r"],
    alpha: Float[Array, "*r"] | Scalar,
) -> Float[Array, "*r"]:
    """Return reward + discount * (min over the Q critics of next_q - alpha * next_log_prob), without
    gradient."""
    return td_target(reward, discount, next_q.min(0) - alpha * next_log_prob)
