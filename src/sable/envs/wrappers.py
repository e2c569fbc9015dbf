"""A batch of environments that restart themselves: auto-reset from a pool of starts, and episode statistics.

A generator can cost fifty times a step, and under `vmap` it would run at every step. So starts are generated
ahead, a pool per rollout; an environment that ends copies one of them and is given randomness of its own.
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


def starts(env: Env, key: Array, num: int) -> tuple[PyTree, TimeStep]:
    """That many fresh episodes: a pool for `step` to draw from."""
    return _settled(jax.vmap(env.reset)(jax.random.split(key, num)))


def reset(env: Env, key: Array, num_envs: int) -> tuple[BatchState, TimeStep]:
    """A batch of fresh episodes; its time step's stats have `return` and `length` too, at zero."""
    env_state, timestep = starts(env, key, num_envs)
    state = BatchState(env=env_state, returns=jnp.zeros(num_envs), lengths=jnp.zeros(num_envs, jnp.int32))
    return state, _with_stats(timestep, state)


def step(
    env: Env, pool: tuple[PyTree, TimeStep] | None, state: BatchState, action: Array, key: Array
) -> tuple[BatchState, TimeStep]:
    """The batch after `action` ([B, N, ...]), where episodes that ended have started anew from the pool.

    At an end (`first`), `observation` opens the new episode and `final` is the last of the old one; reward,
    discount and stats are the old one's, `return` and `length` over its whole. Starts are drawn with
    replacement and rekeyed, from `key`. Without a pool nothing restarts: `observation` stays at the
    true last, and steps beyond it mean nothing.
    """
    env_state, timestep = _settled(jax.vmap(env.step)(state.env, action))
    state = BatchState(
        env=env_state, returns=state.returns + timestep.reward.mean(-1), lengths=state.lengths + 1
    )
    timestep = _with_stats(timestep, state)
    if pool is None:
        return state, timestep

    ended = timestep.first
    draw_key, env_key = jax.random.split(key)
    pool_state, pool_step = pool
    entry = jax.random.randint(draw_key, ended.shape, 0, pool_step.first.shape[0])
    fresh_state, observation = jax.tree.map(lambda leaf: leaf[entry], (pool_state, pool_step.observation))
    fresh_state = jax.vmap(env.rekey)(fresh_state, jax.random.split(env_key, ended.shape[0]))
    state = BatchState(
        env=_select(ended, fresh_state, state.env),
        returns=jnp.where(ended, 0.0, state.returns),
        lengths=jnp.where(ended, 0, state.lengths),
    )
    observation = _select(ended, observation, timestep.observation)
    return state, dataclasses.replace(timestep, observation=observation)


def _with_stats(timestep: TimeStep, state: BatchState) -> TimeStep:
    episode = {"return": state.returns, "length": state.lengths.astype(jnp.float32)}
    return dataclasses.replace(timestep, stats=timestep.stats | episode)


def _settled(tree: PyTree) -> PyTree:
    """The same without weak types: a state weakly typed only at first would compile every program twice."""

    def leaf(x: Array) -> Array:
        return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.lax.convert_element_type(x, x.dtype)

    return jax.tree.map(leaf, tree)


def _select(chosen: Array, one: PyTree, other: PyTree) -> PyTree:
    """`one` in the environments where `chosen` ([B]), else `other`."""

    def leaf(one: Array, other: Array) -> Array:
        return jnp.where(chosen.reshape(-1, *[1] * (one.ndim - 1)), one, other)

    return jax.tree.map(leaf, one, other)
