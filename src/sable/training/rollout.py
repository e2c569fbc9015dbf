"""Experience: a system acting in a batch of environments."""

from dataclasses import replace

import jax
from jax import Array

from sable.envs import wrappers
from sable.envs.base import Env
from sable.ops import sharding, tree
from sable.systems.base import System
from sable.types import Metrics, PyTree, Rollout, TimeStep, Transition, struct


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


def collect(
    env: Env, system: System, learner: PyTree, situation: Situation, key: Array, length: int, pool_size: int
) -> tuple[Situation, Rollout, Metrics]:
    """`length` steps of exploration: (where it ended, what happened, sums over the episodes that ended)."""
    pool_key, steps_key = jax.random.split(key)
    # Made by all devices together; then each holds it whole, and drawing from it costs no communication.
    pool = sharding.whole(sharding.shared(wrappers.starts(env, pool_key, pool_size)))

    def step(now: Situation, key: Array) -> tuple[Situation, tuple[Transition, Metrics]]:
        decision_key, reset_key = jax.random.split(key)
        observation, first = now.timestep.observation, now.timestep.first
        decision = system.explore(learner, observation, now.memory, decision_key)
        env_state, timestep = wrappers.step(env, pool, now.env_state, decision.action, reset_key)
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
        # Forgotten here, where the memory is written anyway, not where it is read again.
        memory = tree.reset(decision.memory, timestep.first)
        return Situation(env_state=env_state, timestep=timestep, memory=memory), (transition, ended)

    situation = replace(situation, memory=tree.reset(situation.memory, situation.timestep.first))
    end, (steps, ended) = jax.lax.scan(step, situation, jax.random.split(steps_key, length))
    rollout = Rollout(steps=steps, start_memory=situation.memory, last=end.timestep, last_memory=end.memory)
    return end, rollout, jax.tree.map(lambda x: x.sum(0).sum().astype("float32"), ended)
