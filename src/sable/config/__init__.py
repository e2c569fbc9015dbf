"""Every setting: read `schema` (what there is), `checks` (which values it may have), `resolve` (where it
comes from), then `meaning` (what the same settings meant before) and `protocol` (where they depart from the
paper). Imports no jax."""

from sable.config.schema import (
    ActorCriticConfig,
    Config,
    HASACConfig,
    MASACConfig,
    MATConfig,
    QMIXConfig,
    RunConfig,
    SableConfig,
    SystemConfig,
)

__all__ = [
    "ActorCriticConfig",
    "Config",
    "HASACConfig",
    "MASACConfig",
    "MATConfig",
    "QMIXConfig",
    "RunConfig",
    "SableConfig",
    "SystemConfig",
]
