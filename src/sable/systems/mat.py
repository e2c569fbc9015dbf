"""MAT: the multi-agent transformer as a PPO policy."""

from functools import partial

from sable.config import MATConfig
from sable.nets.mat import MAT
from sable.systems import ppo
from sable.systems.autoregressive import act, evaluate, init, value
from sable.systems.base import System
from sable.types import EnvSpec


def make(spec: EnvSpec, config: MATConfig) -> System:
    """MAT for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


def make_policy(spec: EnvSpec, config: MATConfig) -> ppo.Policy:
    """The network's side of it."""
    net = MAT(config, spec)
    return ppo.Policy(
        init=partial(init, net),
        initial_memory=lambda num_envs: (),
        act=partial(act, net),
        value=partial(value, net),
        evaluate=partial(evaluate, net),
        learning_rate=config.learning_rate,
        chunk=1,
        agent_order=config.agent_order,
    )
