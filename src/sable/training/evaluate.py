"""Measuring parameters: whole episodes, fresh starts, nothing learned."""

import typing as tp

import jax
import jax.numpy as jnp
from jax import Array

from sable.envs import wrappers
from sable.envs.base import Env
from sable.ops import sharding
from sable.ops import trees as tree
from sable.systems.base import System
from sable.training.rollout import RolloutState, init_rollout_state
from sable.types import Metrics, PyTree


def evaluate_policy(env: Env, system: System, params: PyTree, key: Array, num_episodes: int) -> Metrics:
    """Return the statistics [num_episodes] of as many episodes played side by side with fixed parameters."""
    start_key, play_key = jax.random.split(key)
    start = sharding.shard(init_rollout_state(env, system, start_key, num_episodes))
    done = jnp.zeros(num_episodes, bool)

    def any_running(carry: tuple) -> Array:
        step_count, _, done, _ = carry
        return (step_count < env.spec.time_limit) & ~done.all()

    def step(carry: tuple) -> tuple:
        step_count, state, done, stats = carry
        decision = system.act(
            params, state.timestep.observation, state.memory, jax.random.fold_in(play_key, step_count)
        )
        env_state, timestep = wrappers.step(env, None, state.env_state, decision.action, play_key)
        stats = tree.select(timestep.first & ~done, timestep.stats, stats)
        state = RolloutState(env_state=env_state, timestep=timestep, memory=decision.memory)
        return step_count + 1, state, done | timestep.first, stats

    carry = (jnp.zeros((), jnp.int32), start, done, start.timestep.stats)
    return jax.lax.while_loop(any_running, step, carry)[-1]


def summarise(stats: tp.Mapping[str, Array]) -> Metrics:
    """Return means over the episodes of `evaluate_policy`, one scalar each."""
    return {f"evaluation/{name}": values.mean().astype(jnp.float32) for name, values in stats.items()}
