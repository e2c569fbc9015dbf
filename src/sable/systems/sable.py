"""Sable: the retention network as a PPO policy."""

from functools import partial

from sable.config import SableConfig
from sable.nets.sable import Sable, initial_memory
from sable.systems import autoregressive, ppo
from sable.systems.base import System
from sable.types import EnvSpec


def make(spec: EnvSpec, config: SableConfig) -> System:
    """Sable for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


def make_policy(spec: EnvSpec, config: SableConfig) -> ppo.Policy:
    """The network's side of it."""
    chunk = config.rollout_length if config.memory else 1
    return autoregressive.make_policy(Sable(config, spec), partial(initial_memory, config), chunk)
