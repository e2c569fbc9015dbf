"""Episodes as the evaluator plays them, with everything kept: states, views, actions, rewards."""

import typing as tp
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sable.config.schema import RunConfig
from sable.envs import wrappers
from sable.envs.base import Env
from sable.errors import SableError
from sable.systems.base import System
from sable.training.best import OTHER_EPISODES
from sable.training.compile import Compiler
from sable.training.rollout import RolloutState, init_rollout_state
from sable.types import Observation, PyTree


@dataclass(frozen=True)
class Recording:
    """Episodes side by side, numpy [T, B, ..]; what follows an episode's end means nothing."""

    states: PyTree  # [T + 1, B, ..] the environments' own
    observation: Observation
    action: np.ndarray
    extras: PyTree  # as the system's decisions left them
    reward: np.ndarray  # [T, B, N]
    returns: np.ndarray  # [T, B] of the episode so far, this step's reward included
    stats: dict[str, np.ndarray]  # [T, B] each
    lengths: np.ndarray  # [B]; all of T where it was cut short

    @property
    def num_episodes(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class Episode:
    """One episode of T steps, numpy; frame t shows the situation that step t was decided in."""

    states: PyTree  # [T + 1, ..]
    observation: Observation  # [T, ..]
    action: np.ndarray  # [T, N, ..]
    reward: np.ndarray  # [T, N]
    returns: np.ndarray  # [T]
    stats: dict[str, float]  # at its end

    @property
    def length(self) -> int:
        return len(self.action)

    @property
    def num_agents(self) -> int:
        return self.action.shape[1]

    def state(self, t: int) -> tp.Any:
        """Return the environment's state at frame t."""
        return jax.tree.map(lambda x: x[t], self.states)


def episode_key(run: RunConfig, trained_seed: int | None, seed: int | None) -> Array:
    """Return the key that `sable evaluate` plays the episodes of `seed` with, for one of the run's own
    seeds."""
    keys = jax.random.split(jax.random.key(OTHER_EPISODES if seed is None else seed), len(run.seeds))
    return keys[run.seeds.index(trained_seed) if trained_seed in run.seeds else 0]


def record(
    env: Env,
    system: System,
    params: PyTree,
    key: Array,
    num_episodes: int,
    run: RunConfig,
    *,
    greedy: bool = False,
    most_steps: int | None = None,
) -> Recording:
    """Play the episodes that `sable evaluate` plays for the same arguments, or with the most probable actions
    if `greedy`; no longer than `most_steps`."""
    if not hasattr(env, "rekey"):  # what every environment has that can be played inside a program
        raise SableError(f"{run.task} is stepped in processes of its own: it cannot be watched yet")
    length = min(env.spec.time_limit, most_steps or env.spec.time_limit)

    def play(params: PyTree, key: Array) -> tuple[PyTree, tuple]:
        start_key, play_key = jax.random.split(key)

        def step(now: RolloutState, time: Array) -> tuple[RolloutState, tuple]:
            observation = now.timestep.observation
            noise_key = None if greedy else jax.random.fold_in(play_key, time)
            decision = system.act(params, observation, now.memory, noise_key)
            env_state, timestep = wrappers.step(env, None, now.env_state, decision.action, play_key)
            step_record = (now.env_state.env, observation, decision.action, decision.extras)
            after = (timestep.reward, env_state.returns, timestep.stats, timestep.first)
            return RolloutState(env_state=env_state, timestep=timestep, memory=decision.memory), (
                step_record,
                after,
            )

        start = init_rollout_state(env, system, start_key, num_episodes)
        end, steps = jax.lax.scan(step, start, jnp.arange(length))
        return _plain(end.env_state.env), _plain(steps)

    last, (step_record, after) = jax.device_get(Compiler(run)(play, params, key)(params, key))
    states, observation, action, extras = step_record
    reward, returns, stats, over = after
    return Recording(
        states=jax.tree.map(lambda many, one: np.concatenate([many, one[None]]), states, last),
        observation=observation,
        action=action,
        extras=extras,
        reward=reward,
        returns=returns,
        stats=stats,
        lengths=np.where(over.any(0), over.argmax(0) + 1, length),
    )


def episode(recording: Recording, index: int) -> Episode:
    """Return one of the recorded episodes, from its start to its end."""
    length = int(recording.lengths[index])

    def own(tree: PyTree, steps: int) -> PyTree:
        return jax.tree.map(lambda x: x[:steps, index], tree)

    return Episode(
        states=own(recording.states, length + 1),
        observation=own(recording.observation, length),
        action=own(recording.action, length),
        reward=own(recording.reward, length),
        returns=own(recording.returns, length),
        stats={name: float(values[length - 1, index]) for name, values in recording.stats.items()},
    )


def _plain(tree: PyTree) -> PyTree:
    """Drop keys, which numpy cannot hold and nobody wants to see."""
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree
    )
