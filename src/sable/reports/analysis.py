"""Results as plain conclusions: who wins, by how much, how surely, and what a reader must know.

Scores behind wins and aggregates are absolute metrics. Where a system was run with and without memory, the
better of the two on each task stands beside them as a system of its own, "sable (best)".
"""

import re
import typing as tp
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sable.envs.custom import suite_and_name
from sable.errors import SableError
from sable.reports import aggregates, beside, paper, series, stats, tuning, variants
from sable.reports.aggregates import Aggregates
from sable.reports.beside import Count, SuiteComparison
from sable.reports.panels import Chapter
from sable.reports.paper import Verdict
from sable.reports.read import Cost, Results
from sable.reports.series import Series
from sable.reports.stats import Estimate, Scores
from sable.reports.variants import System

MAIN = "absolute"
"""The summary that wins and aggregates are about."""
CURVES = {"iqm": stats.iqm, "mean": stats.mean}
"""What a learning curve can be over seeds; the paper's are means."""
FEW = 5
"""Below so many seeds a bootstrap interval is too narrow to be believed."""


class Curve(tp.NamedTuple):
    """One system's returns on a task, over the steps that all its runs have."""

    steps: np.ndarray  # [K]
    value: Estimate  # [K]
    seeds: dict[str, np.ndarray]  # {seed: [K]}


@dataclass(frozen=True, kw_only=True)
class Task:
    """The conclusions about one task."""

    name: str
    seeds: dict[str, int]  # {system: how many}
    summaries: dict[str, dict[str, Estimate]]  # {summary: {system: mean over seeds}}
    curves: dict[str, Curve]
    costs: dict[str, Cost]
    winner: str | None
    references: dict[str, Estimate] = field(default_factory=dict)  # the paper's, of systems with a curve


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The conclusions about one suite."""

    name: str
    tasks: list[Task]
    aggregates: Aggregates
    suite_comparison: SuiteComparison | None = None  # with the paper's systems


class PaperComparison(tp.NamedTuple):
    """Our figure beside the paper's."""

    task: str
    system: str  # as the paper calls it
    variant: str  # ours that stands for it
    summary: str
    ours: Estimate
    paper: Estimate
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """All conclusions."""

    systems: list[System]
    contestants: list[str]  # one per family: those that can win
    suites: list[Suite]
    runs: int
    curve: str  # of CURVES, what curves are over seeds
    paper: list[PaperComparison]
    notes: list[str]
    best: list[Count] = field(default_factory=list)  # of ours and the paper's, who is best of all
    chapters: list[Chapter] = field(default_factory=list)  # the paper's figures and tables

    def won(self, system: str) -> list[str]:
        """Return the tasks that a system wins against every other."""
        return [task.name for suite in self.suites for task in suite.tasks if task.winner == system]

    def contested(self, system: str) -> list[str]:
        """Return the tasks on which a system has somebody to win against."""
        return [
            task.name
            for suite in self.suites
            for task in suite.tasks
            if system in task.seeds and len(task.seeds.keys() & set(self.contestants)) > 1
        ]


def analyse(results: Results, *, beside_paper: bool = False, curves: str = "iqm") -> Analysis:
    """Return the conclusions that results allow."""
    if curves not in CURVES:
        raise SableError(f"curves={curves!r} is not one of {', '.join(CURVES)}")
    if not results.series:
        raise SableError(f"there is nothing to report: no finished run{_why(results.notes)}")
    systems = variants.group_by_family({one.system for one in results.series})
    scores = {
        name: variants.with_best(series.scores(results.series, name), systems) for name in stats.SUMMARIES
    }
    contestants = variants.contestants(systems)
    winners = _winners({name: scores[MAIN][name] for name in contestants})
    by_task = {name: [] for name in sorted({one.task for one in results.series}, key=_natural)}
    for one in results.series:
        by_task[one.task].append(one)
    notes = tuning.unequal(results.costs)  # first, so that nobody misses it
    notes += [*_best_notes(systems), *results.notes, *_seed_notes(results.series)]
    by_suite = defaultdict(list)
    for name, runs in by_task.items():
        costs = _costs(cost for cost in results.costs if cost.task == name)
        by_suite[suite_of(name)].append(_task(name, runs, scores, costs, winners.get(name), curves, notes))
    suites = []
    for name, tasks in by_suite.items():
        here = {task.name: by_task[task.name] for task in tasks}
        aggregated, remarks = aggregates.aggregate(here, scores[MAIN], systems)
        suites.append(Suite(name=name, tasks=tasks, aggregates=aggregated))
        notes += [f"{name}: {remark}" for remark in remarks]
    aggregated = Analysis(
        systems=systems,
        contestants=contestants,
        suites=suites,
        runs=len(results.series),
        curve=curves,
        paper=[],
        notes=notes + _absences(systems, by_suite),
    )
    return _with_paper(aggregated, scores) if beside_paper else aggregated


def suite_of(task: str) -> str:
    return suite_and_name(task)[0]


def _natural(name: str) -> list[tuple[str, int]]:
    """Return a key that puts 5x5 before 10x10."""
    return [(word, int(number or 0)) for word, number in re.findall(r"(\D*)(\d*)", name)]


def _winners(contest: Mapping[str, Scores]) -> dict[str, str]:
    return {task: name for name, tasks in stats.task_wins(contest).items() for task in tasks}


def _task(
    name: str,
    runs: Sequence[Series],
    scores: Mapping[str, Mapping[str, Scores]],
    costs: dict[str, Cost],
    winner: str | None,
    curves: str,
    notes: list[str],
) -> Task:
    here = [one.system for one in runs]
    return Task(
        name=name,
        seeds={system: len(tasks[name]) for system, tasks in scores[MAIN].items() if name in tasks},
        summaries={
            summary: {
                system: stats.estimate({name: tasks[name]}, stats.mean)
                for system, tasks in systems.items()
                if name in tasks
            }
            for summary, systems in scores.items()
        },
        curves={
            system: curve
            for system in dict.fromkeys(here)
            if (curve := _curve(name, [one for one in runs if one.system == system], curves, notes))
        },
        costs=costs,
        winner=winner,
    )


def _costs(costs: Iterable[Cost]) -> dict[str, Cost]:
    """Return by system, of several runs the one with the most seeds."""
    known = (cost for cost in costs if np.isfinite(cost.steps_per_second))
    return {cost.system: cost for cost in sorted(known, key=lambda cost: cost.seeds)}


def _curve(task: str, runs: Sequence[Series], curve: str, notes: list[str]) -> Curve | None:
    """Return the curve of one system's runs on a task; a note and none where they have no steps in common."""
    places = aggregates.shared(runs)
    if not places:
        notes.append(f"{task}: the runs of {runs[0].system} have no steps in common, so it has no curve")
        return None
    axes, drawn = series.curves(runs, places)
    seeds = drawn[runs[0].system][task]
    return Curve(
        axes[task],
        stats.curve({task: seeds}, CURVES[curve]),
        dict(zip((r.seed for r in runs), seeds, strict=True)),
    )


def _with_paper(analysis: Analysis, scores: Mapping[str, Mapping[str, Scores]]) -> Analysis:
    """Return the analysis with the paper's systems beside ours in every task and suite."""
    contest = {name: scores[MAIN][name] for name in analysis.contestants}
    families = {system.name: system.family for system in analysis.systems}
    means = {
        name: {task: stats.estimate({task: runs}, stats.mean) for task, runs in own.items()}
        for name, own in contest.items()
    }
    counts = beside.counts(means, families)
    compared = dict.fromkeys(task for name in means for task in means[name] if paper.of_task(task, MAIN))
    suites = [
        replace(
            suite,
            tasks=[_task_with_paper(task, families) for task in suite.tasks],
            suite_comparison=beside.suite_comparison(contest, suite.name),
        )
        for suite in analysis.suites
    ]
    here = [s for s in paper.systems() if any(s in paper.of_task(task, MAIN) for task in compared)]
    missing = [] if compared else ["the paper has no figures for any of these tasks and systems"]
    return replace(
        analysis,
        systems=analysis.systems
        + [System(name, name, False) for name in beside.mark_best(dict.fromkeys(here))],
        suites=suites,
        paper=_compare_with_paper(scores, analysis.systems),
        notes=analysis.notes + missing,
        best=counts + (beside.papers_counts(compared) if compared else []),
    )


def _task_with_paper(task: Task, families: Mapping[str, str]) -> Task:
    theirs = {name: beside.mark_best(paper.of_task(task.name, name)) for name in task.summaries}
    drawn = {families[name] for name in task.curves}
    same = {name: x for name, x in theirs[MAIN].items() if name.removesuffix(beside.MARK) in drawn}
    return replace(
        task,
        seeds=task.seeds | dict.fromkeys(theirs[MAIN], paper.SEEDS),
        summaries={name: own | theirs[name] for name, own in task.summaries.items()},
        references=same,
    )


def _compare_with_paper(
    scores: Mapping[str, Mapping[str, Scores]], systems: Sequence[System]
) -> list[PaperComparison]:
    """Return our figures beside the paper's, ours the best of a family as theirs are."""
    best = {system.family: system.name for system in systems}
    comparisons = []
    for (summary, task, family), theirs in paper.figures().items():
        runs = scores[summary].get(best.get(family, ""), {}).get(task)
        if runs is not None:
            ours = stats.estimate({task: runs}, stats.mean)
            verdict = paper.verdict(ours, theirs)
            comparisons.append(PaperComparison(task, family, best[family], summary, ours, theirs, verdict))
    return comparisons


def _seed_notes(runs: Sequence[Series]) -> list[str]:
    """Return lines on seeds: none to compare, few, or fewer here than elsewhere."""
    counts = Counter((one.task, one.system) for one in runs)
    usual = Counter(counts.values()).most_common(1)[0][0]
    notes = []
    if set(counts.values()) == {1}:
        notes.append("one seed each: there are no intervals, and without an interval no task is won")
    elif min(counts.values()) < FEW:
        notes.append(f"some intervals rest on fewer than {FEW} seeds and are narrower than they should be")
    unlike = defaultdict(list)
    for (task, system), count in counts.items():
        if count != usual:
            unlike[task].append(f"{system} has {count}")
    return notes + [
        f"{task}: seeds differ: {', '.join(x)}, where most have {usual}" for task, x in unlike.items()
    ]


def _best_notes(systems: Sequence[System]) -> list[str]:
    """Return what a best is, where there is one."""
    names = ", ".join(system.name for system in systems if system.best)
    how = "the variant with the higher mean on a task, as the paper reports memory on or off; chosen by"
    return [f"{names}: {how} the same runs it is judged by, which flatters it a little"] if names else []


def _absences(systems: Sequence[System], suites: Mapping[str, list[Task]]) -> list[str]:
    """Return a line for each system that is not on every suite."""
    notes = []
    for name, _, best in systems:
        absent = [suite for suite, tasks in suites.items() if not any(name in task.seeds for task in tasks)]
        if absent and not best:
            notes.append(f"{name}: no runs on {', '.join(absent)}")
    return notes


def _why(notes: Sequence[str]) -> str:
    """Return the first note and how many more, as the end of a line."""
    more = f" (and {len(notes) - 1} more like it)" if len(notes) > 1 else ""
    return f"; {notes[0]}{more}" if notes else ""
