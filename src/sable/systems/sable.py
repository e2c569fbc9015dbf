"""Sable: the retention network as a PPO policy."""

from functools import partial

from sable.config import SableConfig
from sable.nets.sable import Sable, initial_memory
from sable.systems import ppo
from sable.systems.autoregressive import act, evaluate, init, value
from sable.systems.base import System
from sable.types import EnvSpec


def make(spec: EnvSpec, config: SableConfig) -> System:
    """Sable for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


def make_policy(spec: EnvSpec, config: SableConfig) -> ppo.Policy:
    """The network's side of it."""
    net = Sable(config, spec)
    return ppo.Policy(
        init=partial(init, net),
        initial_memory=partial(initial_memory, config),
        act=partial(act, net),
        value=partial(value, net),
        evaluate=partial(evaluate, net),
        learning_rate=config.learning_rate,
        chunk=config.rollout_length if config.memory else 1,
        agent_order=config.agent_order,
    )
