"""Everything that knows an environment. Read `base`, then `wrappers` (auto-reset), `tasks`, `make`."""

from sable.envs.make import make
from sable.envs.tasks import Task, list_tasks, parse, with_options

__all__ = ["Task", "list_tasks", "make", "parse", "with_options"]
