"""The best parameters of a run, measured again on fresh episodes."""

import typing as tp
from pathlib import Path

import jax
import numpy as np

from sable.config.schema import RunConfig, SystemConfig
from sable.envs.base import Env
from sable.envs.python.vector_env import HostedEnv
from sable.errors import SableError
from sable.systems.base import System
from sable.training import checkpoint
from sable.training import device_memory as memory
from sable.training import host_rollout as hosted
from sable.training.compile import Compiler
from sable.training.evaluate import play
from sable.training.loop import asked_for
from sable.training.update import make_program, one_by_one
from sable.types import PyTree

OTHER_EPISODES = 2**31 - 1
"""The seed of the episodes where none is given: others than those of training and of the absolute metric."""


@memory.explained()
def evaluate(
    env: Env | HostedEnv,
    system: System,
    run: RunConfig,
    config: SystemConfig,
    directory: Path,
    *,
    episodes: int,
    seed: int | None = None,
) -> dict[str, tp.Any]:
    """Return how the best parameters of the run in `directory` play fresh episodes, per training seed."""
    shaped = env.stand_in if isinstance(env, HostedEnv) else env
    begin = one_by_one(make_program(shaped, system, run, config).start)
    shapes = jax.eval_shape(begin, np.array(run.seeds, np.uint32))
    state, facts, _ = checkpoint.restore(directory, shapes, asked_for(run, config, env.spec))
    if not facts["evaluations"]:
        raise SableError(
            f"{directory} was stopped before its first evaluation: it has no best parameters yet"
        )
    stats = measure(env, system, run, config, state.best.params, episodes=episodes, seed=seed)
    means = stats["return"].mean(axis=1)
    half_widths = 1.96 * stats["return"].std(axis=1) / max(episodes - 1, 1) ** 0.5
    return {
        "task": run.task,
        "system": run.system,
        "episodes": episodes,
        "seeds": list(run.seeds),
        **{name: values.mean(axis=1).tolist() for name, values in stats.items()},
        "return_interval_95": [
            [m - h, m + h] for m, h in zip(means.tolist(), half_widths.tolist(), strict=True)
        ],
    }


@memory.explained()
def measure(
    env: Env | HostedEnv,
    system: System,
    run: RunConfig,
    config: SystemConfig,
    params: PyTree,
    *,
    episodes: int,
    seed: int | None = None,
) -> dict[str, np.ndarray]:
    """Return the statistics [S, episodes] of episodes that the parameters of each seed, [S, ..], play."""
    count = jax.tree.leaves(params)[0].shape[0]
    keys = jax.random.split(jax.random.key(OTHER_EPISODES if seed is None else seed), count)
    if isinstance(env, HostedEnv):
        played = hosted.make_play(env, system, Compiler(run), min(episodes, config.num_envs))
        stats = played(params, keys, episodes)
    else:
        played = jax.vmap(lambda params, key: play(env, system, params, key, episodes))
        program = Compiler(run)(played, params, keys)
        memory.refuse_measuring("episodes", episodes, memory.count(program))
        stats = program(params, keys)
    return {name: np.asarray(values, float) for name, values in jax.device_get(stats).items()}
