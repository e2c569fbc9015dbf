"""The learning systems, imported on first use."""

import importlib
from types import ModuleType

from sable.config.schema import SYSTEM_CONFIGS, SystemConfig, check_actions, imported_system
from sable.systems.base import System
from sable.types import EnvSpec

SYSTEMS = {name: f"sable.systems.{name}" for name in SYSTEM_CONFIGS}
"""Name -> the module whose `make(spec, config)` builds it."""


def make(name: str, spec: EnvSpec, config) -> System:
    """Return the named system for this kind of environment."""
    check_actions(name, discrete=spec.discrete, task="this environment")
    return module_of(name, config).make(spec, config)


def module_of(name: str, config: SystemConfig) -> ModuleType:
    """Return the module that makes the system of this configuration."""
    if name in SYSTEMS:
        return importlib.import_module(SYSTEMS[name])
    return imported_system(name, config)
