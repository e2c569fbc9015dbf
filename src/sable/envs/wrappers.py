"""A batch of environments that restart themselves: auto-reset to starts made ahead, and episode statistics.

A generator can cost fifty times a step, and under `vmap` it would run at every step. So starts are generated
ahead, a pool per rollout; an environment that ends takes the one that is waiting for it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from sable.envs.base import Env
from sable.types import PyTree, TimeStep, struct


@struct
class BatchState:
    """Where a batch of environments stands."""

    env: PyTree  # [B, ...] the environments' own states
    returns: (
        Array  # [B] return of the current episode so far: the sum over time of the mean reward over agents
    )
    lengths: Array  # [B] int32, steps of the current episode so far


def vmap_reset(env: Env, key: Array, num: int) -> tuple[PyTree, TimeStep]:
    """Return that many fresh episodes."""
    return _strip_weak_types(jax.vmap(env.reset)(jax.random.split(key, num)))


def take_resets(pool: tuple[PyTree, TimeStep], num_taken: Array) -> tuple[PyTree, TimeStep]:
    """Return the start that waits for each environment [B], of `pool` [B, rounds], when it has `num_taken` so
    many; after its last comes its first again."""
    return jax.vmap(lambda own, num: jax.tree.map(lambda leaf: leaf[num % leaf.shape[0]], own))(
        pool, num_taken
    )


def reset(env: Env, key: Array, num_envs: int) -> tuple[BatchState, TimeStep]:
    """Return a batch of fresh episodes; its time step's stats have `return` and `length` too, at zero."""
    env_state, timestep = vmap_reset(env, key, num_envs)
    state = BatchState(env=env_state, returns=jnp.zeros(num_envs), lengths=jnp.zeros(num_envs, jnp.int32))
    return state, _with_stats(timestep, state)


def step(
    env: Env, next_reset: tuple[PyTree, TimeStep] | None, state: BatchState, action: Array, key: Array
) -> tuple[BatchState, TimeStep]:
    """Return the batch after `action` ([B, N, ...]), where episodes that ended have started anew: each
    environment from the start that is `next_reset` for it ([B]).

    At an end (`first`), `observation` opens the new episode and `final_observation` is the last of the old
    one; reward, discount and stats are the old one's, `return` and `length` over its whole. A start may be
    taken again soon after, so it is given randomness of its own, from `key`. Where none is waiting nothing
    restarts: `observation` stays at the true last, and steps beyond it mean nothing.
    """
    env_state, timestep = _strip_weak_types(jax.vmap(env.step)(state.env, action))
    state = BatchState(
        env=env_state, returns=state.returns + timestep.reward.mean(-1), lengths=state.lengths + 1
    )
    timestep = _with_stats(timestep, state)
    if next_reset is None:
        return state, timestep

    done = timestep.first
    fresh_state = jax.vmap(env.rekey)(next_reset[0], jax.random.split(key, done.shape[0]))
    state = BatchState(
        env=_select(done, fresh_state, state.env),
        returns=jnp.where(done, 0.0, state.returns),
        lengths=jnp.where(done, 0, state.lengths),
    )
    observation = _select(done, next_reset[1].observation, timestep.observation)
    return state, dataclasses.replace(timestep, observation=observation)


def _with_stats(timestep: TimeStep, state: BatchState) -> TimeStep:
    episode = {"return": state.returns, "length": state.lengths.astype(jnp.float32)}
    return dataclasses.replace(timestep, stats=timestep.stats | episode)


def _strip_weak_types(tree: PyTree) -> PyTree:
    """Return the same without weak types: a state weakly typed only at first would compile every program
    twice."""

    def leaf(x: Array) -> Array:
        return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.lax.convert_element_type(x, x.dtype)

    return jax.tree.map(leaf, tree)


def _select(chosen: Array, one: PyTree, other: PyTree) -> PyTree:
    """Return `one` in the environments where `chosen` ([B]), else `other`."""

    def leaf(one: Array, other: Array) -> Array:
        return jnp.where(chosen.reshape(-1, *[1] * (one.ndim - 1)), one, other)

    return jax.tree.map(leaf, one, other)
