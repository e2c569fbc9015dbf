"""What a suite's tasks say together: normalised scores, chances of improvement, profiles, efficiency."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sable.reports import series, stats
from sable.reports.series import Series
from sable.reports.stats import Estimate, Scores
from sable.reports.variants import System

POINTS = 60
"""Places along a curve."""
THRESHOLDS = np.linspace(0, 1, 51)


@dataclass(frozen=True, kw_only=True)
class Aggregates:
    """By system, over the tasks `compared`; all empty where there is nothing to compare."""

    compared: list[str] = field(default_factory=list)
    iqm: dict[str, Estimate] = field(default_factory=dict)  # of normalised scores
    improvement: dict[str, dict[str, Estimate]] = field(
        default_factory=dict
    )  # {system: {over another: chance}}
    profiles: dict[str, Estimate] = field(default_factory=dict)  # at THRESHOLDS
    efficiency: dict[str, Estimate] = field(default_factory=dict)  # at POINTS even places of training
    steps: tuple[float, float] | None = None  # of the first place and the last, where all tasks agree

    def leader(self) -> str:
        """Return the system with the highest score, of those that are compared with others."""
        return max(self.improvement, key=lambda name: self.iqm[name].value)


def aggregate(
    runs: Mapping[str, list[Series]], scores: Mapping[str, Scores], systems: Sequence[System]
) -> tuple[Aggregates, list[str]]:
    """Return the aggregates over the tasks of `runs` that all systems have which have at least half of them,
    and lines on what that leaves out."""
    have = {system.name: [task for task in runs if task in scores[system.name]] for system in systems}
    if sum(bool(have[system.name]) for system in systems if not system.best) < 2:
        return Aggregates(), ["one system only, so there are no aggregates"]
    chosen = [system for system in systems if 2 * len(have[system.name]) >= len(runs)]
    compared = [task for task in runs if all(task in have[system.name] for system in chosen)]
    if sum(not system.best for system in chosen) < 2 or not compared:
        return Aggregates(), ["its systems have too few tasks in common, so there are no aggregates"]
    same = all(shared(runs[task]) == POINTS for task in compared)
    absolute = {name: {task: scores[name][task] for task in compared} for name, _, _ in chosen}
    scaled = stats.normalise(absolute)
    here = {task: runs[task] for task in compared} if same else {}
    result = Aggregates(
        compared=compared,
        iqm={name: stats.estimate(x) for name, x in scaled.items()},
        improvement=_improvement(absolute, chosen),
        profiles={name: stats.profile(x, THRESHOLDS) for name, x in scaled.items()},
        efficiency=_efficiency(absolute, scores, here) if same else {},
        steps=_steps(list(here.values())),
    )
    return result, _remarks(have, result, list(runs))


def shared(runs: Sequence[Series]) -> int:
    """Return how many places to look at along the steps that all runs have."""
    begin, end = _span(runs)
    return 0 if begin > end else 1 if begin == end else POINTS


def _span(runs: Sequence[Series]) -> tuple[float, float]:
    return max(one.steps[0] for one in runs), min(one.steps[-1] for one in runs)


def _steps(tasks: Sequence[Sequence[Series]]) -> tuple[float, float] | None:
    """Return the steps that the runs of every task have; None where tasks differ by more than rounding to
    whole updates explains."""
    if not tasks:
        return None
    begins, ends = (np.array(part) for part in zip(*map(_span, tasks), strict=True))
    alike = ends.max() <= 1.05 * ends.min() and np.ptp(begins) <= 0.05 * ends.min()
    return (float(begins.mean()), float(ends.mean())) if alike else None


def _improvement(scores: Mapping[str, Scores], systems: Sequence[System]) -> dict[str, dict[str, Estimate]]:
    """Return the chance of every system against every other, but of no best against those it was taken from;
    one way round is one less the other."""
    chances = defaultdict(dict)
    for k, one in enumerate(systems):
        for other in systems[k + 1 :]:
            if one.family == other.family and (one.best or other.best):
                continue
            value, low, high = chance = stats.improvement(scores[one.name], scores[other.name])
            chances[one.name][other.name] = chance
            chances[other.name][one.name] = Estimate(1 - value, 1 - high, 1 - low)
    return dict(chances)


def _efficiency(
    compared: Mapping[str, Scores], scores: Mapping[str, Scores], runs: Mapping[str, list[Series]]
) -> dict[str, Estimate]:
    """Sample efficiency: along the steps that all runs of a task share, its returns scaled from the lowest to
    the highest of any run."""
    drawn: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for task, here in runs.items():
        curves = {name: x[task] for name, x in series.curves(here, POINTS)[1].items()}
        low, high = min(x.min() for x in curves.values()), max(x.max() for x in curves.values())
        for name in compared:
            # A best has no runs of its own: it is drawn as the variant whose scores it has.
            own = next(x for other, x in curves.items() if scores[other][task] is scores[name][task])
            drawn[name][task] = (own - low) / (high - low) if high > low else np.full_like(own, 0.5)
    return {name: stats.curve(tasks) for name, tasks in drawn.items()}


def _remarks(have: Mapping[str, Sequence[str]], result: Aggregates, tasks: Sequence[str]) -> list[str]:
    """Return lines on systems and tasks that are left out, and on what could not be made."""
    remarks = []
    few = [name for name, theirs in have.items() if theirs and name not in result.iqm]
    if few:
        counted = ", ".join(f"{name} ({len(have[name])} of {len(tasks)} tasks)" for name in few)
        remarks.append(f"aggregates are without {counted}")
    if missing := [task.partition("/")[2] or task for task in tasks if task not in result.compared]:
        count = f"{len(result.compared)} of {len(tasks)} tasks"
        remarks.append(f"aggregates are over {count}; not all have {', '.join(missing)}")
    if not result.efficiency:
        remarks.append("runs of a task have no steps in common, so there is no sample efficiency")
    return remarks
