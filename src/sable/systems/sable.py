"""Sable: the retention network as a PPO policy."""

from functools import partial

import jax

from sable.config.schema import SableConfig
from sable.errors import SableError
from sable.kernels import fused_decoder as decode
from sable.kernels import gpu
from sable.nets.sable import Sable, initial_memory
from sable.systems import autoregressive, ppo
from sable.systems.base import System
from sable.types import EnvSpec


def make(spec: EnvSpec, config: SableConfig) -> System:
    """Sable for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


def make_policy(spec: EnvSpec, config: SableConfig) -> ppo.Policy:
    """The network's side of it."""
    how, fits = config.decoding, decode.supported(config.embed_dim, config.num_heads)
    if how in ("kernel", "rows") and not (fits and (spec.discrete or how == "rows")):
        actions = "discrete actions, and " if how == "kernel" else ""
        raise SableError(
            f"decoding='{how}' takes {actions}an embed_dim that is a power of two and at least 16 times "
            f"num_heads={config.num_heads}; decoding='scan' takes all"
        )
    if how in ("kernel", "rows") and jax.default_backend() == "gpu" and not gpu.capable():
        raise SableError(
            f"decoding='{how}' takes an NVIDIA GPU of compute capability 8.0 or more; "
            "decoding='scan' takes any"
        )
    chunk = config.rollout_length if config.memory else 1
    return autoregressive.make_policy(Sable(config, spec), partial(initial_memory, config), chunk)
