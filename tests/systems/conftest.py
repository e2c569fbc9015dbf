"""Small rollouts of every mode of every system, each compiled once."""

import typing as tp
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import pytest

from sable.config import SableConfig
from sable.envs.probes import PROBES
from sable.systems import ppo, sable
from sable.training.rollout import collect, open_situation
from sable.types import EnvSpec, PyTree, Rollout

SMALL = {
    "num_envs": 4,
    "rollout_length": 6,
    "num_epochs": 3,
    "num_minibatches": 2,
    "embed_dim": 8,
    "num_heads": 2,
}
MODES = {
    "memory": SableConfig(**SMALL, num_blocks=2),
    "memoryless": SableConfig(**SMALL, memory=False),
    "per_epoch": SableConfig(**SMALL, agent_order="per_epoch"),
    "time_limits": SableConfig(**SMALL, bootstrap_time_limits=True),
    "continuous": SableConfig(**SMALL),
    "continuous_memoryless": SableConfig(**SMALL, memory=False),
}


@dataclass(frozen=True)
class Played:
    """A system that has played a little: short episodes, so that boundaries lie inside the rollout."""

    config: SableConfig
    spec: EnvSpec
    policy: ppo.Policy
    learn: tp.Callable
    learner: PyTree
    rollout: Rollout


@cache
def play(name: str) -> Played:
    config = MODES[name]
    env = PROBES["recall"]
    if name == "time_limits":
        env = replace(env, times_out=True)
    if name.startswith("continuous"):
        env = replace(PROBES["continuous"], spec=replace(PROBES["continuous"].spec, time_limit=4))
    policy = sable.make_policy(env.spec, config)
    system = ppo.make(policy, config, env.spec)

    @jax.jit
    def rollout(key):
        learner_key, env_key, first_key, second_key = jax.random.split(key, 4)
        learner = system.init(learner_key, system.hyper)
        # Another pace than the episodes': after five steps the second rollout starts in the middle of one.
        gather = partial(collect, env, system, learner, pool_size=4)
        situation = open_situation(env, system, env_key, config.num_envs)
        situation, _, _ = gather(situation, first_key, length=5)
        return learner, gather(situation, second_key, length=config.rollout_length)[1]

    with jax.numpy_rank_promotion("allow"):  # environments are not ours to hold to it
        learner, played = rollout(jax.random.key(7))
    return Played(config, env.spec, policy, jax.jit(system.learn), learner, played)


@pytest.fixture(params=MODES)
def played(request) -> Played:
    return play(request.param)
