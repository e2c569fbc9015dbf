"""Experience: a system acting in a batch of environments."""

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

STEPS_PER_START = 16
"""For so many steps an environment has one start waiting. Where a rollout's episodes open in a few ways only,
those are learnt by heart."""


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
) -> tuple[tuple[PyTree, TimeStep], Array]:
    """(Rounds of starts [rounds, B], one for each environment; which round is waiting at each step)."""
    num_rounds = max(1, pool_size // num_envs if pool_size else length // STEPS_PER_START)
    pool = wrappers.starts(env, key, num_rounds * num_envs)
    pool = jax.tree.map(lambda leaf: leaf.reshape(num_rounds, num_envs, *leaf.shape[1:]), pool)
    return sharding.shared(pool, axis=1), jnp.arange(length) * num_rounds // length


def collect(
    env: Env, system: System, learner: PyTree, situation: Situation, key: Array, length: int, pool_size: int
) -> tuple[Situation, Rollout, Metrics]:
    """`length` steps of exploration: (where it ended, what happened, sums over the episodes that ended)."""
    pool_key, steps_key = jax.random.split(key)
    pool, rounds = pool_of_starts(env, pool_key, situation.timestep.first.shape[0], length, pool_size)

    def step(now: Situation, given: tuple[Array, Array]) -> tuple[Situation, tuple[Transition, Metrics]]:
        key, current = given
        decision_key, reset_key = jax.random.split(key)
        waiting = jax.tree.map(lambda leaf: leaf[current], pool)
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
        return Situation(env_state=env_state, timestep=timestep, memory=memory), (transition, ended)

    situation = replace(situation, memory=tree.reset(situation.memory, situation.timestep.first))
    end, (steps, ended) = jax.lax.scan(step, situation, (jax.random.split(steps_key, length), rounds))
    rollout = Rollout(steps=steps, start_memory=situation.memory, last=end.timestep, last_memory=end.memory)
    return end, rollout, jax.tree.map(lambda x: x.sum(0).sum().astype("float32"), ended)
