"""The tables of a report as text: Markdown to read, LaTeX to put into a paper."""

import re
import typing as tp
from collections.abc import Callable, Sequence

from sable.experiments import stats
from sable.experiments.analysis import MAIN, Analysis, Suite, Task
from sable.experiments.looks import decimals, interval, number
from sable.experiments.results import Cost
from sable.experiments.stats import Estimate

_LATEX = {
    "\\": r"\textbackslash{}",
    "|": r"\textbar{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}"} | {sign: f"\\{sign}" for sign in "&%$#_{}"}
_PREAMBLE = r"""% Made by sable report. Needs \usepackage{booktabs,graphicx}; then \input this file.
% What is wider than the text is made as wide.
\providecommand{\fitted}[1]{\sbox0{#1}\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi}
"""
LONG = {"mean": "mean over training", "max": "max over training", "final": "final"}
LONG |= {"absolute": "absolute metric", "iqm": "IQM over training"}


class Table(tp.NamedTuple):
    """Cells are text or figures; those of the first column name the rows."""

    caption: str
    head: list[str]
    rows: list[list[tp.Any]]


class Figure(tp.NamedTuple):
    """An estimate as a table shows it, in bold where it is the highest."""

    estimate: Estimate
    digits: int
    highest: bool


def markdown(analysis: Analysis, names: dict[str, str]) -> str:
    """The report in Markdown, with links to the figures in `figures/`."""
    parts = ["# Sable report", _markdown(wins(analysis))]
    if analysis.notes:
        parts += ["## To know about these runs", "\n".join(f"- {_escaped(note)}" for note in analysis.notes)]
    if analysis.paper:
        parts += ["## Beside the paper", *map(_markdown, verdicts(analysis))]
    for suite in analysis.suites:
        parts.append(f"## {_escaped(suite.name)}")
        if suite.aggregates.iqm:
            parts += [
                _markdown(aggregates(suite)),
                f"![{_escaped(suite.name)}](figures/{names[f'suite {suite.name}']}.svg)",
            ]
        parts += [_markdown(scores(suite, summary)) for summary in stats.SUMMARIES]
        parts += [_markdown(table) for table in [*beside(analysis, suite), *costs(suite)]]
        parts += [f"![{_escaped(task.name)}](figures/{names[task.name]}.svg)" for task in suite.tasks]
    return "\n\n".join(parts) + "\n"


def latex(analysis: Analysis) -> str:
    """All tables in LaTeX."""
    parts = [[wins(analysis), *verdicts(analysis)]]
    for suite in analysis.suites:
        own = [scores(suite, s) for s in stats.SUMMARIES] + beside(analysis, suite) + costs(suite)
        parts.append([aggregates(suite), *own] if suite.aggregates.iqm else own)
    # LaTeX holds only so many tables back before it must place them.
    return _PREAMBLE + "\\clearpage\n".join("\n".join(map(_latex, tables)) for tables in parts)


def wins(analysis: Analysis) -> Table:
    """How many tasks each system wins against every other, suite by suite."""
    rows = []
    for name in analysis.contestants:
        own = [sum(task.winner == name for task in suite.tasks) for suite in analysis.suites]
        rows.append([name, f"{len(analysis.won(name))} of {len(analysis.contested(name))}", *map(str, own)])
    caption = "Tasks won against every other system: chance of improvement above one half, 95 % interval"
    return Table(caption, ["system", "won", *(suite.name for suite in analysis.suites)], rows)


def aggregates(suite: Suite) -> Table:
    """A suite's normalised scores, and the chance that the leader beats each."""
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
    """One summary of every task of a suite and every system."""
    systems = list(dict.fromkeys(name for task in suite.tasks for name in task.summaries[summary]))

    def row(task: Task) -> list[tp.Any]:
        found = task.summaries[summary]
        digits, highest = task_digits(task), max(estimate.value for estimate in found.values())
        cells = [
            Figure(found[name], digits, found[name].value == highest) if name in found else ""
            for name in systems
        ]
        return [_short(task.name), *cells]

    caption = f"{suite.name}: {LONG[summary]}, mean over seeds with 95 % bootstrap intervals"
    return Table(caption, ["task", *systems], [row(task) for task in suite.tasks])


def costs(suite: Suite) -> list[Table]:
    """What the runs of a suite took, where they say."""
    systems = list(dict.fromkeys(name for task in suite.tasks for name in task.costs))

    def row(task: Task) -> list[str]:
        found = (task.costs.get(name) for name in systems)
        return [_short(task.name), *(f"{short(c.steps_per_second)}, {memory(c)}" if c else "" for c in found)]

    devices = dict.fromkeys(c.device for task in suite.tasks for c in task.costs.values())
    caption = f"{suite.name}: environment steps of all seeds a second, and peak memory ({', '.join(devices)})"
    return [Table(caption, ["task", *systems], [row(t) for t in suite.tasks if t.costs])] if systems else []


def memory(cost: Cost) -> str:
    """The most memory in use, in words."""
    return f"{cost.peak_memory_bytes / 1e9:.2f} GB"


def short(value: float) -> str:
    """A large number in few signs: 1,234,567 is 1.23M."""
    size = next((k for k in (2, 1) if value >= 1000**k), 0)
    return f"{value / 1000**size:.3g}{('', 'k', 'M')[size]}"


def beside(analysis: Analysis, suite: Suite) -> list[Table]:
    """For each system of the paper: our absolute metrics on a suite's tasks, the paper's, and the verdict."""
    digits = {task.name: task_digits(task) for task in suite.tasks}
    found = [one for one in analysis.paper if one.task in digits and one.summary == MAIN]
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
                for one in found
                if one.system == system
            ],
        )
        for system in dict.fromkeys(one.system for one in found)
    ]


def verdicts(analysis: Analysis) -> list[Table]:
    """For each summary, how many tasks of each system are not below the paper, overlapping, below."""
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
    """Decimals that suit a task's scores."""
    return decimals(estimate.value for found in task.summaries.values() for estimate in found.values())


def _short(task: str) -> str:
    return task.partition("/")[2] or task


def _markdown(table: Table) -> str:
    def cell(content: str | Figure) -> str:
        if isinstance(content, str):
            return _escaped(content)
        value = number(content.estimate.value, content.digits)
        value = f"**{value}**" if content.highest else value
        return f"{value} {interval(content.estimate, content.digits)}".strip()

    rule = ["---", *["---:"] * (len(table.head) - 1)]
    lines = [[_escaped(text) for text in table.head], rule, *([cell(c) for c in row] for row in table.rows)]
    return f"{_escaped(table.caption)}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    """Text that Markdown and HTML show as it is."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", flat)


def _latex(table: Table) -> str:
    def cell(content: str | Figure) -> str:
        if isinstance(content, str):
            return _tex(content)
        value = number(content.estimate.value, content.digits).replace("-", "$-$")
        value = rf"\textbf{{{value}}}" if content.highest else value
        around = interval(content.estimate, content.digits).replace("-", "$-$")
        # Value over interval: seven systems fit a page's width.
        return rf"\shortstack{{\rule{{0pt}}{{2.6ex}}{value}\\{{\tiny {around}}}}}" if around else value

    def lines(rows: Sequence[Sequence[tp.Any]], cell: Callable[[tp.Any], str]) -> str:
        return "".join("  " + " & ".join(map(cell, row)) + r" \\" + "\n" for row in rows)

    def head(text: str) -> str:
        first, _, rest = _tex(text).partition(" ")
        return rf"\shortstack{{{first}\\{rest}}}" if rest else first

    return (
        "\\begin{table}[htbp]\n\\centering\\footnotesize\\setlength{\\tabcolsep}{3pt}\n"
        f"\\caption{{{_tex(table.caption)}}}\n"
        f"\\fitted{{\\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}\n"
        f"\\toprule\n{lines([table.head], head)}\\midrule\n{lines(table.rows, cell)}"
        "\\bottomrule\n\\end{tabular}}\n\\end{table}\n"
    )


def _tex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
