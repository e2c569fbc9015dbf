"""The one interface every environment has, ours and the suites' alike, and its two kinds of time step."""

import typing as tp

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from sable.types import EnvSpec, Metrics, Observation, PyTree, TimeStep


class Env(tp.Protocol):
    """One environment, not a batch: `vmap` makes the batch, `envs.wrappers` resets it.

    All randomness lives in the state, so `step` takes no key; `rekey` gives a copied state randomness of its
    own. A bare environment never resets itself: its last step has `first` true, `discount` 0 only if the
    episode truly ended rather than ran out of time, and `observation` at the true last observation.
    """

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self, key: Array) -> tuple[PyTree, TimeStep]:
        """Return a fresh episode: zero reward, discount 1, first true, observation.step_count 0."""
        ...

    def step(self, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        """Return what follows `action`: [N] int32, or [N, action_size] within the spec's bounds."""
        ...

    def rekey(self, state: PyTree, key: Array) -> PyTree:
        """Return the same situation with the randomness of `key` from here on."""
        ...


def first_timestep(observation: Observation, stats: Metrics) -> TimeStep:
    """Return the time step `reset` returns with this observation."""
    return TimeStep(
        observation=observation,
        final_observation=observation,
        reward=jnp.zeros(observation.view.shape[:1], jnp.float32),
        discount=jnp.ones((), jnp.float32),
        first=jnp.ones((), bool),
        stats=_floats(stats),
    )


def next_timestep(
    observation: Observation,
    reward: ArrayLike,
    *,
    terminated: ArrayLike,
    truncated: ArrayLike,
    stats: Metrics,
) -> TimeStep:
    """Return the time step `step` returns; `reward` is the team's or one per agent; `terminated` beats
    `truncated`."""
    terminated, truncated = jnp.asarray(terminated), jnp.asarray(truncated)
    return TimeStep(
        observation=observation,
        final_observation=observation,
        reward=jnp.broadcast_to(reward, observation.view.shape[:1]).astype(jnp.float32),
        discount=1.0 - terminated.astype(jnp.float32),
        first=terminated | truncated,
        stats=_floats(stats),
    )


def _floats(stats: Metrics) -> Metrics:
    return {name: jnp.asarray(value, jnp.float32) for name, value in stats.items()}
