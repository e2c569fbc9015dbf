"""Figures of a report as files: learning curves of every task, aggregates of every suite, and the paper's
figures."""

import io
import typing as tp
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sable.envs.custom import suite_and_name
from sable.reports.aggregates import POINTS, THRESHOLDS
from sable.reports.analysis import Analysis, Suite, Task
from sable.reports.beside import MARK
from sable.reports.looks import PALETTE, Look, chapter_looks, looks
from sable.reports.panels import Bars, Chapter, Lines, Panel, Points
from sable.reports.stats import Estimate

WORDS = {"iqm": "IQM", "mean": "mean"}
_DASHES = ("-", (0, (5, 3)), (0, (1.5, 2)), (0, (7, 2, 1.5, 2)))
_STYLE: tp.Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ebe8e3",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "sable",  # the same report, the same bytes
    "text.parse_math": False,  # names come from files: a $ is a $
}


def draw(analysis: Analysis, names: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    """Return file names and contents; `names` holds a plain file name for every task, suite and chapter."""
    import matplotlib
    from matplotlib.figure import Figure

    look = looks(analysis.systems)
    order = [system.name for system in analysis.systems]
    with matplotlib.rc_context(_STYLE):
        for suite in analysis.suites:
            if suite.aggregates.iqm:
                figure = Figure(figsize=(10, 6.8), dpi=120)
                _aggregates(figure, suite, order, look)
                yield from _files(figure, names[f"suite {suite.name}"])
            for task in suite.tasks:
                figure = Figure(figsize=(6.4, 3.4), dpi=120)
                _curves(figure, task, order, look, WORDS[analysis.curve])
                yield from _files(figure, names[task.name])
        for chapter in analysis.chapters:
            if chapter.panels:
                own = chapter_looks(analysis.systems, chapter.systems())
                yield from _files(_chapter(chapter, own), names[f"paper {chapter.key}"])


def overview(analysis: Analysis, papers: Mapping[str, Mapping[str, tp.Any]]) -> bytes:
    """Return the curves of all tasks as one SVG, small and side by side; `papers` are the paper's absolute
    metrics: by task a mean and an interval, drawn across."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    tasks = [task for suite in analysis.suites for task in suite.tasks]
    look, order = looks(analysis.systems), [system.name for system in analysis.systems]
    columns = min(len(tasks), 4)
    rows = -(-len(tasks) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(2.9 * columns + 0.3, 2.3 * rows + 0.5), layout="constrained")
        for place, task in enumerate(tasks):
            axes: tp.Any = figure.add_subplot(rows, columns, place + 1)
            for name in (name for name in order if name in task.curves):
                _line(axes, task.curves[name].steps, task.curves[name].value, name, look[name])
            if paper := papers.get(task.name):
                axes.axhspan(*paper["interval"], color="0.5", alpha=0.2, linewidth=0)
                axes.axhline(paper["mean"], color="0.4", linestyle=":", linewidth=1, label="paper, absolute")
            axes.set_title(suite_and_name(task.name)[1], fontsize=9)
            axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
            axes.xaxis.get_major_locator().set_params(nbins=4)
        _legend(figure, columns=6)
        return _rendered(figure, "svg", {"Date": None, "Creator": "sable"})


def _legend(figure: tp.Any, columns: int) -> None:
    """Put one legend for all axes below them."""
    labels = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labels.values(), labels.keys(), loc="outside lower left", ncols=columns)


def _chapter(chapter: Chapter, look: dict[str, Look]) -> tp.Any:
    """Return a figure with all panels of a chapter."""
    from matplotlib.figure import Figure

    columns = min(len(chapter.panels), chapter.columns)
    rows = -(-len(chapter.panels) // columns)
    upright = [panel for panel in chapter.panels if not isinstance(panel, Lines)]
    most = max((len(list(panel.systems())) for panel in upright), default=0)
    size = (3.3 * columns + 0.4, max(2.5, 0.9 + 0.24 * most) * rows + 0.7)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    for place, panel in enumerate(chapter.panels):
        axes: tp.Any = figure.add_subplot(rows, columns, place + 1)
        _panel(axes, panel, look)
        if not isinstance(panel, Lines):
            axes.set_ylim(most - 0.4, -0.6)  # rows as wide apart in all panels
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.x_label)
    if any(isinstance(panel, Lines) for panel in chapter.panels):
        _legend(figure, columns=max(1, round(1.5 * columns)))
    return figure


def _panel(axes: tp.Any, panel: Panel, look: dict[str, Look]) -> None:
    match panel:
        case Points():
            if panel.chance:
                axes.axvline(0.5, color="0.5", linestyle=":", linewidth=1)
                axes.set_xlim(-0.03, 1.03)
            _points(axes, dict(panel.points), look)
        case Bars():
            _bars(axes, panel, look)
        case Lines():
            _lines(axes, panel, look)


def _lines(axes: tp.Any, panel: Lines, look: dict[str, Look]) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator

    for name in (name for name in look if name in panel.lines):
        x, y = panel.lines[name]
        _line(axes, x, y, name, look[name], dots=panel.dots)
    _references(axes, panel.references, look)
    axes.set_ylabel(panel.y_label)
    if panel.log:
        axes.set_yscale("log", subs=())  # without minor ticks, which would have labels of their own
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    for axis in (axes.xaxis, axes.yaxis):
        # Large numbers alone: of a share, m would be read as metres.
        if axis.get_scale() == "linear":
            axis.get_major_locator().set_params(nbins=5)
            if max(map(abs, axis.get_view_interval())) >= 1000:
                axis.set_major_formatter(EngFormatter(sep=" "))
    if panel.dots:
        places = sorted({x for line in panel.lines.values() for x in line.x})
        axes.set_xlim(0, 1.06 * max(places, default=1.0))
        axes.set_xticks(places, [f"{x:g}" for x in places])
    if panel.zero:
        axes.set_ylim(bottom=0)


def _references(axes: tp.Any, references: Mapping[str, Estimate], look: dict[str, Look]) -> None:
    """Draw the paper's figures across."""
    for name, (value, low, high) in references.items():
        colour = PALETTE[look[name].colour][0]
        axes.axhspan(low, high, color=colour, alpha=0.1, linewidth=0)
        axes.axhline(value, color=colour, linestyle=(0, (1, 1.5)), linewidth=1.2, label=_cut(name))


def _bars(axes: tp.Any, panel: Bars, look: dict[str, Look]) -> None:
    """A row for each: its bar, and what it says; the paper's are hollow."""
    for row, (name, (share, text)) in enumerate(panel.bars.items()):
        colour = PALETTE[look[name].colour][0]
        fill = "none" if name.endswith(MARK) else colour
        axes.barh(row, share, height=0.62, facecolor=fill, edgecolor=colour, linewidth=1.3)
        axes.text(share + 0.02, row, text, va="center", fontsize=8)
    axes.set_yticks(range(len(panel.bars)), [_cut(name) for name in panel.bars])
    axes.set_xlim(0, 1.28)
    axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _files(figure: tp.Any, name: str) -> Iterator[tuple[str, bytes]]:
    for kind, metadata in (("svg", {"Date": None, "Creator": "sable"}), ("png", {"Software": "sable"})):
        yield f"{name}.{kind}", _rendered(figure, kind, metadata)


def _rendered(figure: tp.Any, kind: str, metadata: dict[str, tp.Any]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


def _curves(figure: tp.Any, task: Task, order: Sequence[str], look: dict[str, Look], over: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes = figure.add_axes((0.105, 0.15, 0.62, 0.74))
    for name in (name for name in order if name in task.curves):
        _line(axes, task.curves[name].steps, task.curves[name].value, name, look[name])
    _references(axes, task.references, look)
    axes.set(title=task.name, xlabel="environment steps", ylabel=f"return ({over} over seeds)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.xaxis.get_major_locator().set_params(nbins=5)
    if task.curves:
        figure.legend(loc="upper left", bbox_to_anchor=(0.735, 0.9))


def _line(axes: tp.Any, x: np.ndarray, y: Estimate, name: str, look: Look, dots: bool = False) -> None:
    colour, marker = PALETTE[look.colour][0], "o" if dots or len(x) == 1 else None
    axes.plot(
        x,
        y.value,
        color=colour,
        linestyle=_DASHES[look.dash],
        marker=marker,
        markersize=4,
        linewidth=1.5,
        label=_cut(name),
    )
    if np.isfinite(y.low).all():
        axes.fill_between(x, y.low, y.high, color=colour, alpha=0.15, linewidth=0)


def _aggregates(figure: tp.Any, suite: Suite, order: Sequence[str], look: dict[str, Look]) -> None:
    from matplotlib.ticker import EngFormatter

    count = len(suite.aggregates.compared)
    title = f"{suite.name}, {count} task{'s' * (count > 1)}"
    figure.suptitle(title, x=0.02, ha="left", fontweight="bold")
    names = [name for name in order if name in suite.aggregates.iqm]
    scores, chances, profiles, curves = (
        figure.add_axes(place)
        for place in (
            (0.16, 0.60, 0.32, 0.30),
            (0.66, 0.60, 0.32, 0.30),
            (0.07, 0.17, 0.41, 0.32),
            (0.57, 0.17, 0.41, 0.32),
        )
    )
    _points(scores, {name: suite.aggregates.iqm[name] for name in names}, look)
    scores.set_title("Normalised score (IQM)")
    ours = suite.aggregates.leader()
    _points(chances, suite.aggregates.improvement[ours], look)
    chances.axvline(0.5, color="0.5", linestyle=":", linewidth=1)
    chances.set(title=f"Chance that {_cut(ours)} beats", xlim=(0, 1))
    steps = suite.aggregates.steps
    for name in names:
        _line(profiles, THRESHOLDS, suite.aggregates.profiles[name], name, look[name])
        if name in suite.aggregates.efficiency:
            _line(
                curves,
                np.linspace(*(steps or (0, 1)), POINTS),
                suite.aggregates.efficiency[name],
                name,
                look[name],
            )
    profiles.set(title="Performance profile", xlabel="normalised score", ylabel="share of runs above")
    over = "environment steps" if steps else "share of training"
    curves.set(title="Sample efficiency", xlabel=over, ylabel="normalised return (IQM)")
    if steps:
        curves.xaxis.set_major_formatter(EngFormatter(sep=" "))
    handles, labels = profiles.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=6)


def _points(axes: tp.Any, estimates: dict[str, Estimate], look: dict[str, Look]) -> None:
    """Draw a row for each: its point, and its interval as a bar."""
    for row, (name, (value, low, high)) in enumerate(estimates.items()):
        colour = PALETTE[look[name].colour][0]
        if np.isfinite(low):
            axes.plot([low, high], [row, row], color=colour, alpha=0.35, linewidth=4, solid_capstyle="butt")
        axes.plot(value, row, color=colour, marker="D" if look[name].best else "o", markersize=5)
    axes.set_yticks(range(len(estimates)), [_cut(name) for name in estimates])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _cut(name: str) -> str:
    """Return as much of a name as there is room for."""
    return name if len(name) <= 24 else f"{name[:23]}…"
