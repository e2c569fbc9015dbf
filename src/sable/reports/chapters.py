"""The paper's figures and tables as chapters of a report: made of our runs, and of what the paper prints."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sable.reports import aggregates, beside, hyperparameters, paper, scaling, series, stats, variants
from sable.reports.aggregates import POINTS, THRESHOLDS, Aggregates
from sable.reports.analysis import MAIN, Analysis
from sable.reports.panels import Bar, Bars, Chapter, Line, Lines, Panel, Points
from sable.reports.read import Results
from sable.reports.series import Series
from sable.reports.stats import Scores
from sable.reports.typeset import Figure, Table
from sable.reports.variants import System

PAPER, ABLATION = "sable benchmark paper", "sable benchmark ablation"
CHANGED = ("mat rms_norm", "mat swiglu", "mat rms_norm swiglu", "sable no memory")
"""What the ablation compares with the plain systems."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the chapters are made of."""

    analysis: Analysis
    runs: Mapping[str, Sequence[Series]]  # {task: its runs}
    scores: Mapping[str, Scores]  # {system: absolute metrics}, the bests among them
    families: Mapping[str, str]  # {system: family}
    contest: list[str]  # one system per family, none with other changes than memory
    suites: Mapping[str, Aggregates]  # of the contest, on the paper's tasks


def make(results: Results, analysis: Analysis) -> list[Chapter]:
    """Return the paper's figures and tables in its order, those of settings last."""
    evidence = _evidence(results, analysis)
    return [
        _won(evidence),
        *scaling.costs(analysis),
        _sample_efficiency(evidence),
        _table_1(evidence),
        scaling.curves(analysis),
        _ablation(evidence),
        scaling.chunks(results, analysis),
        _curves(evidence),
        _profiles(evidence),
        *hyperparameters.chapters(),
    ]


def _evidence(results: Results, analysis: Analysis) -> Evidence:
    systems = variants.group_by_family({one.system for one in results.series})
    scores = variants.with_best(series.scores(results.series, MAIN), systems)
    runs = defaultdict(list)
    for one in results.series:
        runs[one.task].append(one)
    families = {system.name: system.family for system in systems}
    best = {one.family: one.name for one in systems}  # the best comes last in its family
    contest = [name for family, name in best.items() if not variants.is_changed(family)]
    suites = {}
    for suite in paper.suite_names():
        tasks = [task for task in _tasks_of(suite) if task in runs]
        here = {families[name] for name in contest}
        chosen = {task: [one for one in runs[task] if families[one.system] in here] for task in tasks}
        suites[suite] = _aggregate({task: own for task, own in chosen.items() if own}, scores, contest)
    return Evidence(
        analysis=analysis, runs=runs, scores=scores, families=families, contest=contest, suites=suites
    )


def _tasks_of(suite: str) -> list[str]:
    return [task for task in paper.tasks() if task.startswith(f"{suite}/")]


def _aggregate(
    runs: Mapping[str, list[Series]], scores: Mapping[str, Scores], names: Iterable[str]
) -> Aggregates:
    """Return the aggregates of these systems, a best counting as any other."""
    if not runs:
        return Aggregates()
    return aggregates.aggregate(runs, scores, [System(name, name, False) for name in names])[0]


def _won(evidence: Evidence) -> Chapter:
    contest = {name: evidence.scores[name] for name in evidence.contest}
    tasks = [task for task in paper.tasks() if sum(task in own for own in contest.values()) > 1]
    contest = {name: {task: x for task, x in own.items() if task in tasks} for name, own in contest.items()}
    won, bars = stats.task_wins(contest), {}
    for name, own in sorted(contest.items(), key=lambda pair: -len(won[pair[0]])):
        if own:
            bars[name] = _bar(len(won[name]), len(own))
    theirs = {name: _bar(count, len(paper.tasks())) for name, count in paper.WON.items()}
    counts = _highest(evidence)
    return Chapter(
        key="tasks-won",
        title="Tasks won",
        text="Figure 1, left. A task is won where the chance that a run beats a run of another lies above "
        "one half with its whole 95 % interval, against every other system (absolute metric). The paper "
        f"says so of {len(theirs)} of its systems. Right of it, from the means it prints: the tasks on "
        "which a system's mean is the highest of all, ties included.",
        missing=_lacking(len(tasks), len(paper.tasks())),
        command=PAPER,
        panels=[
            Bars(title="Tasks won", x_label="share of tasks", bars=bars | beside.mark_best(theirs)),
            Bars(
                title="Highest mean of all",
                x_label="share of tasks",
                bars={one.system: _bar(one.best, one.tasks) for one in counts if one.tasks},
            ),
        ],
    )


def _highest(evidence: Evidence) -> list[beside.Count]:
    """Return on how many tasks each system has the highest mean; the paper's among themselves, on the same
    tasks if there are any."""
    known = [task for suite in evidence.analysis.suites for task in suite.tasks]
    means = {
        name: {task.name: task.summaries[MAIN][name] for task in known if name in task.summaries[MAIN]}
        for name in evidence.contest
    }
    tasks = [task.name for task in known if paper.of_task(task.name, MAIN)]
    return beside.counts(means, evidence.families) + beside.papers_counts(tasks or None)


def _bar(count: int, whole: int) -> Bar:
    return Bar(count / whole, f"{count} of {whole}")


def _lacking(count: int, whole: int) -> str:
    """Return what is said where not all of the paper's tasks have runs to compare."""
    if count == whole:
        return ""
    return f"{count or 'None'} of the paper's {whole} tasks ha{'s' if count == 1 else 've'} two systems here"


def _without(evidence: Evidence, suites: Iterable[str]) -> str:
    """Return what is said of those suites of the paper that are not in these, or not whole."""
    have, lines = set(suites), []
    if missing := [_name(suite) for suite in evidence.suites if suite not in have]:
        lines.append(f"no two systems share enough tasks of {', '.join(missing)}")
    counts = {suite: (len(evidence.suites[suite].compared), len(_tasks_of(suite))) for suite in suites}
    if part := [f"{_name(s)} ({count} of {whole})" for s, (count, whole) in counts.items() if count < whole]:
        lines.append(f"of some suites there are not all tasks: {', '.join(part)}")
    text = "; ".join(lines)
    return text[:1].upper() + text[1:]


def _sample_efficiency(evidence: Evidence) -> Chapter:
    panels: list[Panel] = []
    found = {suite: x for suite, x in evidence.suites.items() if x.efficiency}
    for suite, own in found.items():
        panels.append(_efficiency(_name(suite), own))
        ours = next((name for name in own.improvement if evidence.families[name] == "sable"), own.leader())
        chances = own.improvement[ours]
        title = f"{_name(suite)}: {ours} against"
        panels.append(Points(title=title, x_label="probability of improvement", points=chances, chance=True))
    return Chapter(
        key="sample-efficiency",
        title="Sample efficiency and probability of improvement",
        text="Over the paper's tasks of a suite that the systems share: the interquartile mean of returns, "
        "normalised from a task's lowest to its highest, with 95 % stratified bootstrap intervals; and the "
        "chance that Sable beats each other system.",
        missing=_without(evidence, found),
        command=PAPER,
        panels=panels,
    )


def _efficiency(title: str, found: Aggregates) -> Lines:
    """Return curves of normalised returns along the steps of training, or its share where tasks differ."""
    x = np.linspace(*(found.steps or (0.0, 1.0)), POINTS)
    return Lines(
        title=title,
        x_label="environment steps" if found.steps else "share of training",
        y_label="normalised return (IQM)",
        lines={name: Line(x, y) for name, y in found.efficiency.items()},
    )


def _table_1(evidence: Evidence) -> Chapter:
    columns = paper.systems()
    place = {name: evidence.families[name] for name in evidence.contest}
    here = {place[name] for own in evidence.suites.values() for name in own.iqm}
    columns += [family for family in place.values() if family in here and family not in columns]

    def row(label: str, found: Mapping[str, stats.Estimate]) -> list[str | Figure]:
        best, overlapping = paper.mark_best(found)
        cells = {name: Figure(one, 2, name in best, name in overlapping) for name, one in found.items()}
        return [label, *(cells.get(name, "/") for name in columns)]

    rows, have = [], []
    for suite, own in evidence.suites.items():
        if own.iqm:
            have.append(suite)
            ours = {place[name]: one for name, one in own.iqm.items()}
            count, whole = len(own.compared), len(_tasks_of(suite))
            part = "" if count == whole else f", {count} of {whole} tasks"
            rows.append(row(f"{_name(suite)}{part}", ours))
        theirs = {name: one for name in columns if (one := paper.suites().get((suite, name)))}
        rows.append(row(f"{_name(suite)}{beside.MARK}", theirs))
    caption = (
        "IQM of min-max normalised absolute returns by suite, with 95 % stratified bootstrap intervals. "
        "Bold: the highest of a row; asterisk: the interval overlaps that of the highest; slash: not run"
    )
    return Chapter(
        key="table-1",
        title="Table 1: every suite",
        text="A row is normalised over its own systems, so ours and the paper's compare by order, not value. "
        "Where a system was run with and without memory, the better of the two counts on each task.",
        missing=_without(evidence, have),
        command=PAPER,
        tables=[Table(caption, ["suite", *(_name(name) for name in columns)], rows)],
    )


def _name(name: str) -> str:
    return paper.NAMES.get(name, name)


def _ablation(evidence: Evidence) -> Chapter:
    names = [name for name in ("mat", *CHANGED[:3], "sable", CHANGED[3]) if name in evidence.scores]
    known = {task.name: task for suite in evidence.analysis.suites for task in suite.tasks}
    tasks = [t for t in paper.ABLATION if any(t in evidence.scores[n] for n in names if n in CHANGED)]
    panels: list[Panel] = []
    for suite in dict.fromkeys(task.partition("/")[0] for task in tasks):
        own = {t: [x for x in evidence.runs[t] if x.system in names] for t in tasks if t.startswith(suite)}
        found = _aggregate(own, evidence.scores, names)
        if found.efficiency:
            count = len(found.compared)
            panels.append(_efficiency(f"{_name(suite)}, {count} task{'s' * (count != 1)}", found))
    columns = [*names, *beside.mark_best(dict.fromkeys(("mat", "sable")))]
    rows = []
    for task in tasks:
        own = {name: x for name, x in known[task].summaries[MAIN].items() if name in columns}
        best, overlapping = paper.mark_best(own)
        cells = {name: Figure(x, 2, name in best, name in overlapping) for name, x in own.items()}
        rows.append([task, *(cells.get(name, "/") for name in columns)])
    caption = "Ablation: absolute metric, mean over seeds with 95 % bootstrap intervals, and the paper's"
    lacking = [task for task in paper.ABLATION if task not in tasks]
    return Chapter(
        key="ablation",
        title="Ablation: from MAT to Sable",
        text="What Sable has and MAT lacks, one by one: RMSNorm, SwiGLU, both; and Sable without memory. "
        "Returns are normalised over these systems.",
        missing=f"No runs of the changed systems on {', '.join(lacking)}" if lacking else "",
        command=ABLATION,
        panels=panels,
        tables=[Table(caption, ["task", *columns], rows)] if rows else [],
    )


def _curves(evidence: Evidence) -> Chapter:
    known = {task.name: task for suite in evidence.analysis.suites for task in suite.tasks}
    drawn = [task for task in paper.tasks() if task in known and known[task].curves]
    over = "mean" if evidence.analysis.curve == "mean" else "interquartile mean"
    return Chapter(
        key="learning-curves",
        title="Learning curves of every task",
        text=f"The {over} over seeds with its 95 % interval; across it the paper's absolute metric of the "
        "same systems.",
        missing="" if len(drawn) == len(paper.tasks()) else f"{len(drawn)} of the paper's 45 tasks have runs",
        command=PAPER,
        panels=[scaling.learning_curves(known[task]) for task in drawn],
        elsewhere=True,
    )


def _profiles(evidence: Evidence) -> Chapter:
    found = {suite: own for suite, own in evidence.suites.items() if own.profiles}
    return Chapter(
        key="performance-profiles",
        title="Performance profiles",
        text="The share of runs whose normalised absolute metric lies above a score.",
        missing=_without(evidence, found),
        command=PAPER,
        panels=[
            Lines(
                title=_name(suite),
                x_label="normalised score",
                y_label="share of runs above",
                lines={name: Line(THRESHOLDS, y) for name, y in own.profiles.items()},
            )
            for suite, own in found.items()
        ],
    )
