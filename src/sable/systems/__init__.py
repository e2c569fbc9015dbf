"""The learning systems, imported on first use."""

import importlib

from sable.errors import SableError, suggest
from sable.systems.base import System
from sable.types import EnvSpec

SYSTEMS = {"sable": "sable.systems.sable"}
"""Name -> the module whose `make(spec, config)` builds it."""


def make(name: str, spec: EnvSpec, config) -> System:
    """The named system for this kind of environment."""
    if name not in SYSTEMS:
        raise SableError(
            f"unknown system {name!r}{suggest(name, SYSTEMS)}; known systems: {', '.join(SYSTEMS)}"
        )
    return importlib.import_module(SYSTEMS[name]).make(spec, config)
