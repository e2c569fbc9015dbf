"""MAPPO: IPPO with a critic of the global state."""

from functools import partial

from sable.config.schema import ActorCriticConfig
from sable.systems import ippo, ppo
from sable.systems.base import System
from sable.types import EnvSpec

make_policy = partial(ippo.make_policy, centralised=True)
"""(spec, config) -> the networks' side of it"""


def make(spec: EnvSpec, config: ActorCriticConfig) -> System:
    """Return MAPPO for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)
