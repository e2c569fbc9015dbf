"""Our systems together with the paper's, which prints means and intervals and no seeds: who is best of all,
and how all stand over a suite's tasks."""

import math
import typing as tp
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sable.reports import paper, stats
from sable.reports.stats import Estimate, Scores

MARK = " (paper)"
"""How the name of a system of the paper ends where it stands beside ours."""
REPS = stats.REPS


class Count(tp.NamedTuple):
    """On how many of its tasks a system is best of all, by the absolute metric."""

    system: str
    tasks: int
    alone: int  # its mean is the highest, as printed
    tied: int  # others print the same
    clear: int  # its interval lies above all others'

    @property
    def best(self) -> int:
        return self.alone + self.tied


class SuiteComparison(tp.NamedTuple):
    """Our systems and the paper's on those tasks of a suite that all of ours have."""

    tasks: list[str]
    ours: list[str]
    scores: dict[str, Estimate]
    """mean over tasks of the mean absolute return, from 0 for a task's lowest system to 1 for its highest"""


def mark_best(estimates: Mapping[str, tp.Any]) -> dict[str, tp.Any]:
    """Return the paper's figures under the names they have beside ours."""
    return {f"{system}{MARK}": one for system, one in estimates.items()}


def counts(ours: Mapping[str, Mapping[str, Estimate]], families: Mapping[str, str]) -> list[Count]:
    """Return on how many tasks each of our systems is best of all, ours and the paper's others; of those it
    has in common with the paper. `ours` is {system: {task: absolute metric}}; `families` says what the paper
    calls each."""
    counted = []
    for name, figures in ours.items():
        if (family := families[name]) not in paper.systems():
            continue
        tables = []
        for task, theirs in ((task, paper.of_task(task, "absolute")) for task in figures):
            if theirs.pop(family, None):
                others = {n: x[task] for n, x in ours.items() if task in x and families[n] != family}
                tables.append({name: figures[task]} | others | mark_best(theirs))
        counted.append(_count(name, tables))
    return counted


def papers_counts(tasks: Iterable[str] | None = None) -> list[Count]:
    """Return the same of the paper's systems among themselves, on these tasks or on all."""
    tables = [
        mark_best(paper.of_task(task, "absolute")) for task in (paper.tasks() if tasks is None else tasks)
    ]
    counted = [_count(f"{system}{MARK}", tables) for system in paper.systems()]
    return [one for one in counted if one.tasks]


def _count(name: str, tables: Sequence[Mapping[str, Estimate]]) -> Count:
    here = [table for table in tables if name in table]
    best = [counted for table in here if name in (counted := paper.mark_best(table)[0])]
    clear = sum(
        all(table[name].low > other.high for n, other in table.items() if n != name) for table in here
    )
    alone = sum(counted == {name} for counted in best)
    return Count(name, len(here), alone, len(best) - alone, clear)


def suite_comparison(scores: Mapping[str, Scores], suite: str) -> SuiteComparison | None:
    """Return our systems beside the paper's on a suite, those with at least half the tasks of the one with
    most; None without any."""
    have = {name: [task for task in paper.tasks() if task in x] for name, x in scores.items()}
    have = {name: [task for task in x if task.startswith(f"{suite}/")] for name, x in have.items()}
    most = max(map(len, have.values()), default=0)
    ours = [name for name, tasks in have.items() if tasks and 2 * len(tasks) >= most]
    tasks = [task for task in paper.tasks() if ours and all(task in have[name] for name in ours)]
    if not tasks:
        return None
    rng, each = np.random.default_rng(0), []
    for task in tasks:
        own = {name: _ours({task: scores[name][task]}) for name in ours}
        theirs = {name: _theirs(one, rng) for name, one in mark_best(paper.of_task(task, "absolute")).items()}
        each.append(_scaled(own | theirs))
    names = [name for name in each[0] if all(name in one for one in each)]
    return SuiteComparison(tasks, ours, {name: _over([one[name] for one in each]) for name in names})


Drawn = tuple[float, np.ndarray]
"""A mean, and draws of it."""


def _ours(scores: Scores) -> Drawn:
    (x,) = (np.asarray(x, float) for x in scores.values())
    drawn = np.random.default_rng(0).multinomial(x.size, np.full(x.size, 1 / x.size), REPS).astype(float)
    return float(x.mean()), stats.mean(x, drawn) if x.size > 1 else np.full(REPS, np.nan)


def _theirs(figure: Estimate, rng: np.random.Generator) -> Drawn:
    """Draw a mean from what the paper prints of it: normal on either side, wide as its interval."""
    z = rng.standard_normal(REPS)
    width = np.where(z > 0, figure.high - figure.value, figure.value - figure.low)
    return figure.value, figure.value + z * width / 1.96


def _scaled(estimates: Mapping[str, Drawn]) -> dict[str, Drawn]:
    low, high = (end(value for value, _ in estimates.values()) for end in (min, max))
    span = high - low if high > low else math.inf
    return {name: ((value - low) / span, (x - low) / span) for name, (value, x) in estimates.items()}


def _over(tasks: Sequence[Drawn]) -> Estimate:
    value, drawn = (np.mean(part, axis=0) for part in zip(*tasks, strict=True))
    return Estimate(float(value), *map(float, np.percentile(drawn, [2.5, 97.5])))
