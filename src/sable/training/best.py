"""Evaluation of a run's best parameters on fresh episodes."""

import typing as tp
from pathlib import Path

import jax
import numpy as np

from sable.config.schema import Config
from sable.envs.base import Env
from sable.envs.python.vector_env import PythonVectorEnv
from sable.errors import SableError
from sable.systems.base import System
from sable.training import checkpoint, host_rollout
from sable.training import device_memory as memory
from sable.training.compile import Compiler
from sable.training.evaluate import evaluate_policy
from sable.training.loop import checkpoint_settings
from sable.training.update import make_program, map_seeds
from sable.types import PyTree

OTHER_EPISODES = 2**31 - 1
"""The seed of the episodes where none is given: others than those of training and of the absolute metric."""


@memory.explain_out_of_memory()
def evaluate_best(
    env: Env | PythonVectorEnv,
    system: System,
    config: Config,
    directory: Path,
    *,
    episodes: int,
    seed: int | None = None,
) -> dict[str, tp.Any]:
    """Return how the best parameters of the run in `directory` play fresh episodes, per training seed."""
    traced_env = env.stub_env if isinstance(env, PythonVectorEnv) else env
    init_state = map_seeds(make_program(traced_env, system, config).start)
    shapes = jax.eval_shape(init_state, np.array(config.run.seeds, np.uint32))
    state, facts, _ = checkpoint.restore(directory, shapes, checkpoint_settings(config, env.spec))
    if not facts["evaluations"]:
        raise SableError(
            f"{directory} was stopped before its first evaluation: it has no best parameters yet"
        )
    stats = evaluate_params(env, system, config, state.best.params, episodes=episodes, seed=seed)
    means = stats["return"].mean(axis=1)
    half_widths = 1.96 * stats["return"].std(axis=1) / max(episodes - 1, 1) ** 0.5
    return {
        "task": config.run.task,
        "system": config.run.system,
        "episodes": episodes,
        "seeds": list(config.run.seeds),
        **{name: values.mean(axis=1).tolist() for name, values in stats.items()},
        "return_interval_95": [
            [m - h, m + h] for m, h in zip(means.tolist(), half_widths.tolist(), strict=True)
        ],
    }


@memory.explain_out_of_memory()
def evaluate_params(
    env: Env | PythonVectorEnv,
    system: System,
    config: Config,
    params: PyTree,
    *,
    episodes: int,
    seed: int | None = None,
) -> dict[str, np.ndarray]:
    """Return the statistics [S, episodes] of episodes that the parameters of each seed, [S, ..], play."""
    count = jax.tree.leaves(params)[0].shape[0]
    keys = jax.random.split(jax.random.key(OTHER_EPISODES if seed is None else seed), count)
    if isinstance(env, PythonVectorEnv):
        evaluate_episodes = host_rollout.make_evaluate_policy(
            env, system, Compiler(config.run), min(episodes, config.system.num_envs)
        )
        stats = evaluate_episodes(params, keys, episodes)
    else:
        evaluate_episodes = jax.vmap(lambda params, key: evaluate_policy(env, system, params, key, episodes))
        program = Compiler(config.run)(evaluate_episodes, params, keys)
        memory.refuse_measuring("episodes", episodes, memory.program_bytes(program))
        stats = program(params, keys)
    return {name: np.asarray(values, float) for name, values in jax.device_get(stats).items()}
