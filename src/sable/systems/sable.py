"""Sable: the retention network as a PPO policy."""

from functools import partial

from sable.config import SableConfig
from sable.errors import SableError
from sable.kernels import decode
from sable.nets.sable import Sable, initial_memory
from sable.systems import autoregressive, ppo
from sable.systems.base import System
from sable.types import EnvSpec


def make(spec: EnvSpec, config: SableConfig) -> System:
    """Sable for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


def make_policy(spec: EnvSpec, config: SableConfig) -> ppo.Policy:
    """The network's side of it."""
    if config.decoding == "kernel" and not (
        spec.discrete and decode.supported(config.embed_dim, config.num_heads)
    ):
        raise SableError(
            "decoding='kernel' takes discrete actions, and an embed_dim that is a power of two and at least "
            f"16 times num_heads={config.num_heads}; decoding='scan' takes all"
        )
    chunk = config.rollout_length if config.memory else 1
    return autoregressive.make_policy(Sable(config, spec), partial(initial_memory, config), chunk)
