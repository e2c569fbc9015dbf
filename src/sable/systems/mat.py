"""MAT: the multi-agent transformer as a PPO policy."""

from sable.config.schema import MATConfig
from sable.nets.mat import MAT
from sable.systems import autoregressive, ppo
from sable.systems.base import System
from sable.types import EnvSpec


def make(spec: EnvSpec, config: MATConfig) -> System:
    """Return MAT for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


def make_policy(spec: EnvSpec, config: MATConfig) -> ppo.Policy:
    """Return the network's side of it."""
    return autoregressive.make_policy(MAT(config, spec), lambda num_envs: (), chunk=1)
