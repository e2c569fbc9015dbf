"""Sable: cooperative multi-agent reinforcement learning with sequence models, in JAX.

>>> import sable
>>> result = sable.train("lbf/2s-8x8-2p-2f-coop", num_seeds=3, total_steps=1_000_000)
>>> sable.evaluate(result.directory)

Importing this package imports no jax, and neither does a call that only finds a mistake. Read `api` first,
then `runs.open_run` and `training.loop`.
"""

from sable.api import (
    benchmark,
    check,
    configure,
    evaluate,
    evaluate_row,
    export,
    grid,
    list_systems,
    list_tasks,
    load,
    make_env,
    plan,
    publish,
    report,
    reproduce,
    train,
    tune,
    watch,
)
from sable.installation import VERSION as __version__

__all__ = [
    "__version__",
    "benchmark",
    "check",
    "configure",
    "evaluate",
    "evaluate_row",
    "export",
    "grid",
    "list_systems",
    "list_tasks",
    "load",
    "make_env",
    "plan",
    "publish",
    "report",
    "reproduce",
    "train",
    "tune",
    "watch",
]
