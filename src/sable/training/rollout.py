"""Experience: a system acting in a batch of environments."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from sable.envs import wrappers
from sable.envs.base import Env
from sable.kernels.memory_update import forget
from sable.ops import sharding
from sable.ops import trees as tree
from sable.systems.base import System
from sable.types import Metrics, PyTree, Rollout, TimeStep, Transition, struct


def num_rounds(num_envs: int, length: int, pool_size: int, time_limit: int) -> int:
    """Return how many starts an environment has for a rollout, all of them `pool_size` if that is not 0.

    A good team crosses a grid whose limit is its number of cells in about the square root of that. With two
    starts for such a time hardly any episode repeats one, which would be learnt by heart.
    """
    steps_per_start = max(1, math.isqrt(time_limit) // 2)
    return max(1, pool_size // num_envs if pool_size else length // steps_per_start)


@struct
class Situation:
    """Where a batch of environments stands between two decisions."""

    env_state: PyTree
    timestep: TimeStep  # [B]
    memory: PyTree  # [B], as the last decision left it; forgotten or not where an episode opens


def open_situation(env: Env, system: System, key: Array, num_envs: int) -> Situation:
    """Fresh episodes in every environment, nothing remembered."""
    env_state, timestep = wrappers.reset(env, key, num_envs)
    return Situation(env_state=env_state, timestep=timestep, memory=system.initial_memory(num_envs))


def pool_of_starts(
    env: Env, key: Array, num_envs: int, length: int, pool_size: int
) -> tuple[PyTree, TimeStep]:
    """Return the starts of a rollout [B, rounds]: as many for each environment, which takes them in turn."""
    rounds = num_rounds(num_envs, length, pool_size, env.spec.time_limit)
    pool = wrappers.starts(env, key, num_envs * rounds)
    return sharding.shared(jax.tree.map(lambda x: x.reshape(num_envs, rounds, *x.shape[1:]), pool))


def collect(
    env: Env, system: System, learner: PyTree, situation: Situation, key: Array, length: int, pool_size: int
) -> tuple[Situation, Rollout, Metrics]:
    """`length` steps of exploration: (where it ended, what happened, sums over the episodes that ended)."""
    pool_key, steps_key = jax.random.split(key)
    pool = pool_of_starts(env, pool_key, situation.timestep.first.shape[0], length, pool_size)

    def step(carry: tuple[Situation, Array], key: Array) -> tuple[tuple, tuple[Transition, Metrics]]:
        now, taken = carry
        decision_key, reset_key = jax.random.split(key)
        waiting = wrappers.next_starts(pool, taken)
        observation, first = now.timestep.observation, now.timestep.first
        decision = system.explore(learner, observation, now.memory, decision_key)
        env_state, timestep = wrappers.step(env, waiting, now.env_state, decision.action, reset_key)
        transition = Transition(
            observation=observation,
            action=decision.action,
            reward=timestep.reward,
            discount=timestep.discount,
            first=first,
            extras=decision.extras,
            final=system.final(learner, timestep.final, decision.memory),
        )
        ended = jax.tree.map(
            lambda x: sharding.sums(x * timestep.first), timestep.stats | {"episodes": timestep.first}
        )
        # Forgotten here, where the memory is written anyway or in place, not where it is read again.
        memory = forget(decision.memory, timestep.first)
        now = Situation(env_state=env_state, timestep=timestep, memory=memory)
        return (now, taken + timestep.first), (transition, ended)

    situation = replace(situation, memory=tree.reset(situation.memory, situation.timestep.first))
    taken = jnp.zeros_like(situation.timestep.first, jnp.int32)
    (end, _), (steps, ended) = jax.lax.scan(step, (situation, taken), jax.random.split(steps_key, length))
    rollout = Rollout(steps=steps, start_memory=situation.memory, last=end.timestep, last_memory=end.memory)
    return end, rollout, jax.tree.map(lambda x: x.sum(0).sum().astype("float32"), ended)
