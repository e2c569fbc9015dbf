"""Experience: a system acting in a batch of environments."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from sable.envs import wrappers
from sable.envs.base import Env
from sable.kernels.memory_update import reset_memory
from sable.ops import sharding
from sable.ops import trees as tree
from sable.systems.base import System
from sable.types import Metrics, PyTree, Rollout, TimeStep, Transition, struct


def resets_per_env(num_envs: int, length: int, reset_pool_size: int, time_limit: int) -> int:
    """Return how many starts an environment has for a rollout, all of them `reset_pool_size` if that is not
    0.

    A good team crosses a grid whose limit is its number of cells in about the square root of that. With two
    starts for such a time hardly any episode repeats one, which would be learnt by heart.
    """
    steps_per_start = max(1, math.isqrt(time_limit) // 2)
    return max(1, reset_pool_size // num_envs if reset_pool_size else length // steps_per_start)


@struct
class RolloutState:
    """The state of a rollout between two decisions: environments, time steps and memories."""

    env_state: PyTree
    timestep: TimeStep  # [B]
    memory: PyTree  # [B], as the last decision left it; forgotten or not where an episode opens


def init_rollout_state(env: Env, system: System, key: Array, num_envs: int) -> RolloutState:
    """Return fresh episodes in every environment, nothing remembered."""
    env_state, timestep = wrappers.reset(env, key, num_envs)
    return RolloutState(env_state=env_state, timestep=timestep, memory=system.initial_memory(num_envs))


def make_reset_pool(
    env: Env, key: Array, num_envs: int, length: int, reset_pool_size: int
) -> tuple[PyTree, TimeStep]:
    """Return the reset pool of a rollout [B, resets]: as many starts for each environment, which takes them
    in turn."""
    num_resets = resets_per_env(num_envs, length, reset_pool_size, env.spec.time_limit)
    pool = wrappers.vmap_reset(env, key, num_envs * num_resets)
    return sharding.shard(jax.tree.map(lambda x: x.reshape(num_envs, num_resets, *x.shape[1:]), pool))


def collect(
    env: Env,
    system: System,
    learner: PyTree,
    rollout_state: RolloutState,
    key: Array,
    length: int,
    reset_pool_size: int,
) -> tuple[RolloutState, Rollout, Metrics]:
    """Collect `length` steps of exploration: (where it ended, what happened, sums over the episodes that
    ended)."""
    pool_key, steps_key = jax.random.split(key)
    pool = make_reset_pool(env, pool_key, rollout_state.timestep.first.shape[0], length, reset_pool_size)

    def step(carry: tuple[RolloutState, Array], key: Array) -> tuple[tuple, tuple[Transition, Metrics]]:
        state, num_taken = carry
        decision_key, reset_key = jax.random.split(key)
        next_reset = wrappers.take_resets(pool, num_taken)
        observation, first = state.timestep.observation, state.timestep.first
        decision = system.explore(learner, observation, state.memory, decision_key)
        env_state, timestep = wrappers.step(env, next_reset, state.env_state, decision.action, reset_key)
        transition = Transition(
            observation=observation,
            action=decision.action,
            reward=timestep.reward,
            discount=timestep.discount,
            first=first,
            extras=decision.extras,
            next_extras=system.next_extras(learner, timestep.final_observation, decision.memory),
        )
        episode_sums = jax.tree.map(
            lambda x: sharding.partial_sums(x * timestep.first), timestep.stats | {"episodes": timestep.first}
        )
        # Forgotten here, where the memory is written anyway or in place, not where it is read again.
        memory = reset_memory(decision.memory, timestep.first)
        state = RolloutState(env_state=env_state, timestep=timestep, memory=memory)
        return (state, num_taken + timestep.first), (transition, episode_sums)

    rollout_state = replace(
        rollout_state, memory=tree.reset_memory(rollout_state.memory, rollout_state.timestep.first)
    )
    num_taken = jnp.zeros_like(rollout_state.timestep.first, jnp.int32)
    (end, _), (steps, episode_sums) = jax.lax.scan(
        step, (rollout_state, num_taken), jax.random.split(steps_key, length)
    )
    rollout = Rollout(
        steps=steps, start_memory=rollout_state.memory, last=end.timestep, last_memory=end.memory
    )
    return end, rollout, jax.tree.map(lambda x: x.sum(0).sum().astype("float32"), episode_sums)
