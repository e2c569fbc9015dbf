"""Sable: the retention network as a PPO policy."""

from functools import partial

import jax

from sable.config.schema import SableConfig
from sable.errors import SableError
from sable.kernels import fused_decoder, gpu
from sable.nets.sable import Sable, initial_memory
from sable.systems import autoregressive, ppo
from sable.systems.base import System
from sable.types import EnvSpec


def make(spec: EnvSpec, config: SableConfig) -> System:
    """Return Sable for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


def make_policy(spec: EnvSpec, config: SableConfig) -> ppo.Policy:
    """Return the network's side of it."""
    decoding, supported = config.decoding, fused_decoder.supported(config.embed_dim, config.num_heads)
    if decoding in ("fused", "cached") and not (supported and (spec.discrete or decoding == "cached")):
        actions = "discrete actions, and " if decoding == "fused" else ""
        raise SableError(
            f"decoding='{decoding}' takes {actions}an embed_dim that is a power of two and at least 16 times "
            f"num_heads={config.num_heads}; decoding='sequential' takes all"
        )
    if decoding in ("fused", "cached") and jax.default_backend() == "gpu" and not gpu.supports_kernels():
        raise SableError(
            f"decoding='{decoding}' takes an NVIDIA GPU of compute capability 8.0 or more; "
            "decoding='sequential' takes any"
        )
    chunk = config.rollout_length if config.memory else 1
    return autoregressive.make_policy(Sable(config, spec), partial(initial_memory, config), chunk)
