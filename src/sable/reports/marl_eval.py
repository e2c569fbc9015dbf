"""The JSON of marl-eval, which other libraries write and read: the returns of many runs in one file.

`{suite: {task: {system: {run: blocks}}}}`. Blocks are `step_0`, `step_1`, ..: `{step_count, elapsed_time,
return: [..]}`, and `absolute_metrics`: `{return: [..]}`.
"""

import json
import typing as tp
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sable.envs.custom import suite_and_name
from sable.errors import SableError
from sable.reports.series import Series
from sable.runs import sums

RETURNS = ("return", "mean_episode_return", "episode_return")
"""What the metric we compare is called, here and elsewhere."""

SUITES = {"robotwarehouse": "rware", "levelbasedforaging": "lbf", "maconnector": "connector"}
SUITES |= {name: name for name in ("rware", "lbf", "connector", "smax", "mpe", "mabrax", "neom")}
SUITES |= {
    name: "mabrax" for name in ("hopper_3x1", "halfcheetah_6x1", "walker2d_2x3", "ant_4x2", "humanoid_9|8")
}
"""Our names of suites, by what others call them, in small letters."""

MAVA = {"ff_sable": "sable no memory", "rec_sable": "sable", "ff_ippo": "ippo", "rec_ippo": "ippo memory"}
MAVA |= {"ff_mappo": "mappo", "rec_mappo": "mappo memory", "mat": "mat", "rec_qmix": "qmix"}
MAVA |= {"ff_masac": "masac", "ff_hasac": "hasac"}
"""What we call the systems of Mava, which prefixes them with whether they are recurrent or feed-forward."""


def to_dict(series: Iterable[Series]) -> dict[str, tp.Any]:
    """Return the series as the schema wants them."""
    data: dict[str, tp.Any] = {}
    for one in series:
        suite, task = suite_and_name(one.task)
        rows = zip(one.steps, one.seconds, one.returns, strict=True)
        blocks = {
            f"step_{k}": {"step_count": int(step), "elapsed_time": float(second), "return": [float(value)]}
            for k, (step, second, value) in enumerate(rows)
        }
        place = data.setdefault(suite, {}).setdefault(task, {}).setdefault(one.system, {})
        place[f"seed_{one.seed}"] = blocks | {"absolute_metrics": {"return": [one.absolute]}}
    return data


def read(path: Path) -> list[Series]:
    """Return the series in a file, in its order."""
    try:
        content = path.read_bytes()
        sums.check(path, content)
        data = json.loads(content.decode())
        return [
            _series(
                blocks,
                f"{SUITES.get(suite.lower(), suite)}/{task}",
                _system(suite, system),
                seed=run,
                source=path,
            )
            for suite, tasks in data.items()
            for task, systems in tasks.items()
            for system, runs in systems.items()
            for run, blocks in runs.items()
        ]
    except sums.Altered:
        raise
    except (AttributeError, KeyError, OSError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise SableError(f"{path} is not a marl-eval JSON file: {type(error).__name__}: {error}") from None


def _system(suite: str, system: str) -> str:
    """Return what a report calls a system of a file: Mava's by our names, marked as Mava's. Its MAT is called
    as ours, but its suites are not."""
    foreign = system.startswith(("ff_", "rec_")) or suite not in SUITES.values()
    theirs = foreign and suite.lower() in SUITES and system in MAVA
    return f"{MAVA[system]} (mava)" if theirs else system


def _series(blocks: dict[str, tp.Any], task: str, system: str, *, seed: str, source: Path) -> Series:
    steps = sorted(
        (block for name, block in blocks.items() if name.startswith("step_")), key=lambda b: b["step_count"]
    )
    return Series(
        task=task,
        system=system,
        seed=seed.removeprefix("seed_"),
        source=source,
        steps=np.array([block["step_count"] for block in steps], float),
        returns=np.array([_mean(block) for block in steps], float),
        seconds=np.array([block.get("elapsed_time", np.nan) for block in steps], float),
        absolute=_mean(blocks.get("absolute_metrics", {})),
    )


def _mean(block: dict[str, tp.Any]) -> float:
    """Return the mean of a block's returns, one or one of each episode; nan where there is none, or a
    null."""
    values = next((block[name] for name in RETURNS if name in block), np.nan)
    return float(np.mean(np.array(values, float)))
