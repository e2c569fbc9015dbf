"""The learning systems. Read `base`, `ppo`, `autoregressive` and `sable`; for replay `replay` and `sac`."""

from sable.systems.make import SYSTEMS, make, module_of

__all__ = ["SYSTEMS", "make", "module_of"]
