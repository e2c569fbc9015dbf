"""Figures of the paper about size: what large teams cost and learn, and what chunks of time cost."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sable.envs import tasks
from sable.envs.custom import suite_and_name
from sable.errors import SableError
from sable.reports import beside, paper
from sable.reports.analysis import MAIN, Analysis, Task
from sable.reports.panels import Chapter, Line, Lines
from sable.reports.read import Cost, Results
from sable.reports.stats import Estimate
from sable.reports.tables import memory, short
from sable.reports.typeset import Figure, Table

SUITES, LEAST = ("lbf", "neom"), 32
"""Where the paper scales teams, and from how many agents on."""
SCALING, CHUNK = "sable benchmark scaling", "sable benchmark chunk"


def team_size(task: str) -> int | None:
    """Return the number of agents of a task of the scaling study, None of any other."""
    try:
        found = tasks.parse(task) if task.partition("/")[0] in SUITES else None
    except SableError:
        return None
    return found.num_agents if found and found.num_agents >= LEAST else None


def costs(analysis: Analysis) -> list[Chapter]:
    """Return throughput and memory against the number of agents."""
    found = {suite: _by_size(_large(analysis, suite)) for suite in SUITES}
    found = {suite: own for suite, own in found.items() if own}
    lacking = [paper.NAMES[suite] for suite in SUITES if suite not in found]
    measured = _measured(
        [c for own in found.values() for x in own.values() for costs in x.values() for c in costs]
    )
    paces, memories = (
        [
            Lines(
                title=paper.NAMES[suite],
                x_label="agents",
                y_label=label,
                lines={name: means for name, x in own.items() if (means := _means(x, field, unit)).x.size},
                dots=True,
                zero=field == "peak_memory_bytes",
                log=field == "steps_per_second",
            )
            for suite, own in found.items()
        ]
        for field, label, unit in (
            ("steps_per_second", "environment steps a second", 1.0),
            ("peak_memory_bytes", "peak memory, GB", 1e9),
        )
    )
    theirs = f"The paper's: up to {paper.FASTER} times MAT's at 512 agents."
    return [
        Chapter(
            key="throughput",
            title="Throughput by team size",
            text=" ".join(filter(None, ("Figure 1, middle.", measured, _ratio(analysis), theirs))),
            panels=[*paces],
            missing=_missing(lacking),
            command=SCALING,
        ),
        Chapter(
            key="memory",
            title="Memory by team size",
            text=" ".join(filter(None, ("Figure 1, right.", measured))),
            panels=[*memories],
            tables=[_cost_table(suite, own) for suite, own in found.items()],
            missing=_missing(lacking),
            command=SCALING,
        ),
    ]


def _missing(lacking: Sequence[str]) -> str:
    return f"No runs of teams of {LEAST} agents or more on {', '.join(lacking)}" if lacking else ""


def _measured(used: Sequence[Cost]) -> str:
    """Return on what and of how many seeds it was measured."""
    if not used:
        return ""
    seeds, devices = sorted({cost.seeds for cost in used}), dict.fromkeys(cost.device for cost in used)
    text = (
        f"Of whole runs, of {' or '.join(map(str, seeds))} seed{'s' * (seeds != [1])} side by side, on "
        f"{', '.join(devices)}; the mean over a size's tasks."
    )
    unlike = len(seeds) > 1 or len(devices) > 1
    return text + " Runs of other numbers of seeds or on other devices do not compare." * unlike


def _large(analysis: Analysis, suite: str) -> list[Task]:
    """Return the tasks of large teams, small ones first."""
    known = [task for own in analysis.suites if own.name == suite for task in own.tasks]
    sizes = {task.name: team_size(task.name) for task in known}
    return sorted((task for task in known if sizes[task.name]), key=lambda task: sizes[task.name] or 0)


def _by_size(found: Iterable[Task]) -> dict[str, dict[int, list[Cost]]]:
    """Return {system: {agents: what its runs took}}."""
    sizes: dict[str, dict[int, list[Cost]]] = defaultdict(lambda: defaultdict(list))
    for task in found:
        for system, cost in task.costs.items():
            sizes[system][team_size(task.name) or 0].append(cost)
    return sizes


def _means(sizes: Mapping[int, list[Cost]], name: str, scale: float) -> Line:
    """Return the mean over a size's tasks, size by size."""
    return line(
        {size: float(np.mean([getattr(c, name) for c in own])) / scale for size, own in sizes.items()}
    )


def line(values: Mapping[int, float]) -> Line:
    """Return the line through single values, those that are known."""
    x = sorted(place for place, value in values.items() if math.isfinite(value))
    nothing = np.full(len(x), math.nan)
    return Line(np.array(x, float), Estimate(np.array([values[one] for one in x]), nothing, nothing))


def _cost_table(suite: str, found: Mapping[str, Mapping[int, list[Cost]]]) -> Table:
    sizes = sorted({size for own in found.values() for size in own})

    def cell(costs: list[Cost]) -> str:
        pace, peak = (
            float(np.mean(part))
            for part in zip(*((c.steps_per_second, c.peak_memory_bytes) for c in costs), strict=True)
        )
        return f"{short(pace)} steps/s, {memory(costs[0]._replace(peak_memory_bytes=peak))}"

    rows = [
        [str(size), *(cell(own[size]) if size in own else "/" for own in found.values())] for size in sizes
    ]
    caption = f"{paper.NAMES[suite]}: environment steps of all seeds a second, and peak memory, by team size"
    return Table(caption, ["agents", *found], rows)


def _ratio(analysis: Analysis) -> str:
    """Return by how much Sable is faster than MAT at best, of teams of one size."""
    found = []
    for suite in SUITES:
        for task in _large(analysis, suite):
            if mat := task.costs.get("mat"):
                found += [
                    (cost.steps_per_second / mat.steps_per_second, team_size(task.name), name)
                    for name, cost in task.costs.items()
                    if cost.algorithm == "sable"
                ]
    if not found:
        return ""
    ratio, agents, name = max(found)
    return f"Here {name} takes up to {ratio:.1f} times MAT's steps a second, at {agents} agents."


def curves(analysis: Analysis) -> Chapter:
    """Return the learning curves of large teams."""
    large = {suite: [task for task in _large(analysis, suite) if task.curves] for suite in SUITES}
    lacking = [paper.NAMES[suite] for suite, own in large.items() if not own]
    return Chapter(
        key="team-sizes",
        title="Learning curves by team size",
        text="Teams of 32 agents and more, by size. The paper had to leave out memory over time here.",
        missing=_missing(lacking),
        command=SCALING,
        panels=[learning_curves(task) for own in large.values() for task in own],
        columns=3,
    )


def learning_curves(task: Task) -> Lines:
    """Return the curves of a task, with the paper's absolute metric of the same systems."""
    return Lines(
        title=_title(task.name),
        x_label="environment steps",
        y_label="return",
        lines={name: Line(curve.steps, curve.value) for name, curve in task.curves.items()},
        references=task.references,
    )


def _title(task: str) -> str:
    suite, name = suite_and_name(task)
    return f"{paper.NAMES.get(suite, suite)} {name}"


def chunks(results: Results, analysis: Analysis) -> Chapter:
    """Return memory and return against the time steps that learning takes at once."""
    known = {task.name: task for suite in analysis.suites for task in suite.tasks}
    found: dict[str, dict[int, Cost]] = defaultdict(dict)
    for cost in results.costs:
        size = cost.settings.get("chunk_size", 0)
        scored = cost.task in known and cost.system in known[cost.task].summaries[MAIN]
        if size and cost.settings.get("memory") and scored:
            found[cost.task][size] = cost
    panels, tables = [], []
    for task, own in found.items():
        scores = {size: known[task].summaries[MAIN][cost.system] for size, cost in sorted(own.items())}
        theirs = paper.of_task(task, MAIN)
        x = np.array(list(scores), float)
        y = Estimate(*(np.array(part) for part in zip(*scores.values(), strict=True)))
        memories = line({size: cost.peak_memory_bytes / 1e9 for size, cost in own.items()})
        name = _title(task)
        panels += [
            Lines(
                title=name,
                y_label="peak memory, GB",
                lines={"sable": memories} if memories.x.size else {},
                x_label="chunk, time steps",
                dots=True,
                zero=True,
            ),
            Lines(
                title=name,
                y_label="absolute return",
                lines={"sable": Line(x, y)},
                references=beside.mark_best({"sable": theirs["sable"]} if theirs else {}),
                x_label="chunk, time steps",
                dots=True,
            ),
        ]
        rows = [
            [str(size), memory(own[size]), short(own[size].steps_per_second), Figure(score, 2, False)]
            for size, score in scores.items()
        ]
        tables.append(Table(f"{task}: chunk size", ["chunk", "memory", "steps/s", "absolute return"], rows))
    return Chapter(
        key="chunk-size",
        title="Memory and return by chunk size",
        text="Time steps that Sable learns from at once, of a rollout of 128. What is learnt does not depend "
        "on it; runs differ by rounding.",
        missing="" if found else "No runs with a chunk size",
        command=CHUNK,
        panels=panels,
        tables=tables,
    )
