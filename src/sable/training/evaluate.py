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
from sable.training.rollout import Situation, open_situation
from sable.types import Metrics, PyTree


def play(env: Env, system: System, params: PyTree, key: Array, num_episodes: int) -> Metrics:
    """The statistics [num_episodes] of as many episodes played side by side with fixed parameters."""
    start_key, play_key = jax.random.split(key)
    start = sharding.shared(open_situation(env, system, start_key, num_episodes))
    over = jnp.zeros(num_episodes, bool)

    def playing(carry: tuple) -> Array:
        time, _, over, _ = carry
        return (time < env.spec.time_limit) & ~over.all()

    def step(carry: tuple) -> tuple:
        time, now, over, stats = carry
        decision = system.exploit(
            params, now.timestep.observation, now.memory, jax.random.fold_in(play_key, time)
        )
        env_state, timestep = wrappers.step(env, None, now.env_state, decision.action, play_key)
        stats = tree.select(timestep.first & ~over, timestep.stats, stats)
        now = Situation(env_state=env_state, timestep=timestep, memory=decision.memory)
        return time + 1, now, over | timestep.first, stats

    carry = (jnp.zeros((), jnp.int32), start, over, start.timestep.stats)
    return jax.lax.while_loop(playing, step, carry)[-1]


def summarise(stats: tp.Mapping[str, Array]) -> Metrics:
    """Means over the episodes of `play`, one scalar each."""
    return {f"evaluation/{name}": values.mean().astype(jnp.float32) for name, values in stats.items()}
