"""Sums over the future: advantages and the targets of a critic."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Shaped

Scalar = Float[Array, ""] | float


def discounted_sum(reward: Float[Array, "T *r"], discount: Float[Array, "T ..."]) -> Float[Array, "T *r"]:
    """Return G[t] = reward[t] + discount[t] * G[t+1], with G[T] = 0."""

    def step(future_sum: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, discount = inputs
        future_sum = reward + discount * future_sum
        return future_sum, future_sum

    return jax.lax.scan(step, jnp.zeros_like(reward[0]), (reward, discount), reverse=True)[1]


def gae(
    reward: Float[Array, "T B N"],
    value: Float[Array, "T B N"],
    next_value: Float[Array, "T B N"],
    bootstrap: Shaped[Array, "T B"],
    trace: Shaped[Array, "T B"],
    discount: Scalar,
    lam: Scalar,
) -> tuple[Float[Array, "T B N"], Float[Array, "T B N"]]:
    """Return generalised advantage estimates A, and the targets A + value, as (advantage, target).

    delta[t] = reward[t] + discount * bootstrap[t] * next_value[t] - value[t]
    A[t] = delta[t] + discount * lam * trace[t] * A[t+1], with A[T] = 0

    `trace` is 0 where step t was the last of an episode, for whatever reason: nothing flows back over it.
    `bootstrap` says whether `next_value` counts: the same as `trace` where a time limit is treated as an end;
    else 0 only where the episode truly ended, and `next_value` is then that of the true last observation.
    """
    delta = reward + discount * bootstrap[..., None] * next_value - value
    advantage = discounted_sum(delta, discount * lam * trace[..., None].astype(delta.dtype))
    return advantage, advantage + value
