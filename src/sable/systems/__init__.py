"""The learning systems, imported on first use."""

import importlib

from sable.config import SYSTEM_CONFIGS, check_actions, own_system
from sable.systems.base import System
from sable.types import EnvSpec

SYSTEMS = {name: f"sable.systems.{name}" for name in SYSTEM_CONFIGS}
"""Name -> the module whose `make(spec, config)` builds it."""


def make(name: str, spec: EnvSpec, config) -> System:
    """The named system for this kind of environment."""
    check_actions(name, discrete=spec.discrete, task="this environment")
    module = importlib.import_module(SYSTEMS[name]) if name in SYSTEMS else own_system(name)
    return module.make(spec, config)
