"""The tables of a report, and the report as Markdown and its tables as LaTeX."""

import math
import typing as tp
from collections.abc import Mapping

from sable.reports import beside as beside_paper
from sable.reports import paper, stats
from sable.reports.analysis import MAIN, Analysis, Suite, Task
from sable.reports.looks import decimals
from sable.reports.read import Cost
from sable.reports.stats import Estimate
from sable.reports.typeset import PREAMBLE, Figure, Table, escape, to_latex, to_markdown

LONG = {"mean": "mean over training", "max": "max over training", "final": "final"}
LONG |= {"absolute": "absolute metric", "iqm": "IQM over training"}


def markdown(analysis: Analysis, names: dict[str, str]) -> str:
    """Return the report in Markdown, with links to the figures in `figures/`."""
    parts = ["# Sable report", to_markdown(wins(analysis))]
    if analysis.notes:
        parts += ["## To know about these runs", "\n".join(f"- {escape(note)}" for note in analysis.notes)]
    if analysis.paper:
        parts += ["## Beside the paper", *map(to_markdown, best_of_all(analysis) + verdicts(analysis))]
    parts += chapters(analysis, names)
    for suite in analysis.suites:
        parts.append(f"## {escape(suite.name)}")
        if suite.aggregates.iqm:
            parts += [
                to_markdown(aggregates(suite)),
                f"![{escape(suite.name)}](figures/{names[f'suite {suite.name}']}.svg)",
            ]
        parts += [to_markdown(scores(suite, summary)) for summary in stats.SUMMARIES]
        own = suite_comparison(suite) + beside(analysis, suite) + costs(suite)
        parts += map(to_markdown, own)
        parts += [f"![{escape(task.name)}](figures/{names[task.name]}.svg)" for task in suite.tasks]
    return "\n\n".join(parts) + "\n"


def chapters(analysis: Analysis, names: dict[str, str]) -> list[str]:
    """Return the paper's figures and tables in Markdown."""
    parts = ["## The paper's figures and tables"] if analysis.chapters else []
    for chapter in analysis.chapters:
        parts += [f"### {escape(chapter.title)}", escape(chapter.text)]
        if chapter.missing:
            parts.append(f"{escape(chapter.missing)}. `{chapter.command}` makes what is missing.")
        if chapter.panels:
            parts.append(f"![{escape(chapter.title)}](figures/{names[f'paper {chapter.key}']}.svg)")
        parts += map(to_markdown, chapter.tables)
    return parts


def latex(analysis: Analysis) -> str:
    """Return all tables in LaTeX."""
    parts = [[wins(analysis), *best_of_all(analysis), *verdicts(analysis)]]
    parts += [chapter.tables for chapter in analysis.chapters if chapter.tables]
    for suite in analysis.suites:
        own = [scores(suite, s) for s in stats.SUMMARIES] + suite_comparison(suite)
        own += beside(analysis, suite) + costs(suite)
        parts.append([aggregates(suite), *own] if suite.aggregates.iqm else own)
    # LaTeX holds only so many tables back before it must place them.
    return PREAMBLE + "\\clearpage\n".join("\n".join(map(to_latex, tables)) for tables in parts)


def wins(analysis: Analysis) -> Table:
    """Return how many tasks each system wins against every other, suite by suite."""
    rows = []
    for name in analysis.contestants:
        own = [sum(task.winner == name for task in suite.tasks) for suite in analysis.suites]
        rows.append([name, f"{len(analysis.won(name))} of {len(analysis.contested(name))}", *map(str, own)])
    caption = "Tasks won against every other system: chance of improvement above one half, 95 % interval"
    return Table(caption, ["system", "won", *(suite.name for suite in analysis.suites)], rows)


def aggregates(suite: Suite) -> Table:
    """Return a suite's normalised scores, and the chance that the leader beats each."""
    leader = suite.aggregates.leader()
    chances = suite.aggregates.improvement[leader]
    rows = [
        [name, Figure(iqm, 2, name == leader), Figure(chances[name], 2, False) if name in chances else ""]
        for name, iqm in suite.aggregates.iqm.items()
    ]
    count = len(suite.aggregates.compared)
    over = f"{suite.name}, {count} task{'s' * (count > 1)}"
    caption = f"{over}: min-max normalised IQM, and probability of improvement"
    return Table(caption, ["system", "normalised IQM", f"{leader} beats it"], rows)


def scores(suite: Suite, summary: str) -> Table:
    """Return one summary of every task of a suite and every system."""
    systems = list(dict.fromkeys(name for task in suite.tasks for name in task.summaries[summary]))

    def row(task: Task) -> list[tp.Any]:
        estimates = task.summaries[summary]
        digits, best, overlapping = task_digits(task), highest(estimates), overlaps(estimates)
        cells = [
            Figure(estimates[name], digits, name in best, name in overlapping) if name in estimates else ""
            for name in systems
        ]
        return [_short(task.name), *cells]

    caption = f"{suite.name}: {LONG[summary]}, mean over seeds with 95 % bootstrap intervals"
    caption += "; bold: the highest; asterisk: its interval overlaps that of the highest"
    return Table(caption, ["task", *systems], [row(task) for task in suite.tasks])


def highest(estimates: Mapping[str, Estimate]) -> set[str]:
    """Return who has the highest value; beside the paper's, which are rounded, once rounded alike."""
    if any(name.endswith(beside_paper.MARK) for name in estimates):
        return paper.mark_best(estimates)[0]
    top = max(estimate.value for estimate in estimates.values())
    return {name for name, estimate in estimates.items() if estimate.value == top}


def overlaps(found: Mapping[str, Estimate]) -> set[str]:
    """Return whose interval overlaps that of the highest."""
    if any(name.endswith(beside_paper.MARK) for name in found):
        return paper.mark_best(found)[1]
    best = highest(found)
    floor = min(found[name].low for name in best)
    return {name for name, estimate in found.items() if name not in best and estimate.high >= floor}


def suite_comparison(suite: Suite) -> list[Table]:
    """Return how our systems and the paper's stand over the tasks of a suite that all of ours have."""
    if suite.suite_comparison is None:
        return []
    tasks, _, scores = suite.suite_comparison
    rows = [[name, Figure(one, 2, name in highest(scores))] for name, one in scores.items()]
    count = f"{len(tasks)} task{'s' * (len(tasks) > 1)}"
    caption = (
        f"{suite.name}, {count}, with the paper's systems: mean over tasks of mean absolute returns, from 0 "
        "for a task's lowest system to 1 for its highest; the paper's intervals by what it prints"
    )
    return [Table(caption, ["system", "normalised mean"], rows)]


def best_of_all(analysis: Analysis) -> list[Table]:
    """Return on how many tasks each of our systems is best of all, the paper's others included; and of the
    paper's among themselves on the same tasks."""
    head = ["system", "best of all", "alone", "tied as printed", "with the whole interval", "tasks"]
    rows = [[c.system, *map(str, (c.best, c.alone, c.tied, c.clear, c.tasks))] for c in analysis.best]
    caption = (
        "Best of all: ours among ours and the paper's others, the paper's among themselves on the same "
        "tasks, by the mean absolute return, rounded as printed"
    )
    return [Table(caption, head, rows)] if rows else []


def costs(suite: Suite) -> list[Table]:
    """Return what the runs of a suite took, where they say."""
    systems = list(dict.fromkeys(name for task in suite.tasks for name in task.costs))

    def row(task: Task) -> list[str]:
        costs_by_system = (task.costs.get(name) for name in systems)
        return [
            _short(task.name),
            *(f"{short(c.steps_per_second)}, {memory(c)}" if c else "" for c in costs_by_system),
        ]

    devices = dict.fromkeys(c.device for task in suite.tasks for c in task.costs.values())
    caption = f"{suite.name}: environment steps of all seeds a second, and peak memory ({', '.join(devices)})"
    return [Table(caption, ["task", *systems], [row(t) for t in suite.tasks if t.costs])] if systems else []


def memory(cost: Cost) -> str:
    """Return the most memory in use, in words."""
    if not math.isfinite(cost.peak_memory_bytes):
        return "memory not known"
    return f"{cost.peak_memory_bytes / 1e9:.2f} GB"


def short(value: float) -> str:
    """Return a large number in few signs: 1,234,567 is 1.23M."""
    size = next((k for k in (2, 1) if value >= 1000**k), 0)
    return f"{value / 1000**size:.3g}{('', 'k', 'M')[size]}"


def beside(analysis: Analysis, suite: Suite) -> list[Table]:
    """Return for each system of the paper: our absolute metrics on a suite's tasks, the paper's, and the
    verdict."""
    digits = {task.name: task_digits(task) for task in suite.tasks}
    comparisons = [one for one in analysis.paper if one.task in digits and one.summary == MAIN]
    return [
        Table(
            f"{suite.name}: {system} beside the paper, {LONG[MAIN]}",
            ["task", "ours", "paper", "verdict"],
            [
                [
                    _short(one.task),
                    Figure(one.ours, digits[one.task], False),
                    Figure(one.paper, digits[one.task], False),
                    one.verdict,
                ]
                for one in comparisons
                if one.system == system
            ],
        )
        for system in dict.fromkeys(one.system for one in comparisons)
    ]


def verdicts(analysis: Analysis) -> list[Table]:
    """Return for each summary, how many tasks of each system are not below the paper, overlapping, below."""
    kinds = ("not below", "overlapping", "below")

    def row(summary: str, system: str) -> list[str]:
        own = [one.verdict for one in analysis.paper if (one.summary, one.system) == (summary, system)]
        return [system, *(str(own.count(kind)) for kind in kinds), str(len(own))]

    names = list(dict.fromkeys(one.system for one in analysis.paper))
    return [
        Table(f"Beside the paper: {LONG[s]}", ["system", *kinds, "tasks"], [row(s, name) for name in names])
        for s in stats.SUMMARIES
        if names
    ]


def task_digits(task: Task) -> int:
    """Return decimals that suit a task's scores."""
    return decimals(
        estimate.value for by_system in task.summaries.values() for estimate in by_system.values()
    )


def _short(task: str) -> str:
    return task.partition("/")[2] or task
