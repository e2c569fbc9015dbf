"""Which drawing an environment gets.

All are our own: the suites' viewers take from 0.1 to 17 seconds a step where they work without a screen at
all, and what they draw cannot be themed, or put into a page of a few hundred kilobytes.
"""

import typing as tp

from sable.envs.base import Env
from sable.viewer.drawings import fields, grids, tables
from sable.viewer.record import Episode
from sable.viewer.scene import Scene

_DRAWINGS: dict[str, tp.Callable[[tp.Any, Episode], Scene]] = {
    "rware": grids.rware,
    "lbf": grids.lbf,
    "connector": grids.connector,
    "smax": fields.smax,
    "mpe": fields.mpe,
    "mabrax": fields.mabrax,
    "neom": tables.neom,
}


def draw(task: str, env: Env, episode: Episode) -> Scene:
    """Return the episode's drawing: that of the task's suite, or a table of what is seen and done."""
    return _DRAWINGS.get(task.partition("/")[0], tables.table)(env, episode)
