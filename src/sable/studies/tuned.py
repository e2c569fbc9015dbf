"""What a tuning study found, as files: recipe.toml, trials.csv, study.png."""

import csv
import io
import json
import typing as tp
from collections.abc import Sequence
from pathlib import Path

from sable.files import write_atomically
from sable.studies.trials import Space, Tried, Values

_COLOUR, _PALE = "#0b7285", "#a9c9d0"


def write(directory: Path, task: str, system: str, kept: Values, space: Space, tried: list[Tried]) -> None:
    """Write all three for the trials there are; `kept` are values that all trials had, other than usual."""
    write_atomically(directory / "trials.csv", _table(space, tried).encode())
    if (winner := best(tried)) is not None:
        write_atomically(directory / "recipe.toml", recipe(task, system, kept, winner, tried).encode())
        write_atomically(directory / "study.png", _picture(f"{system} on {task}", space, tried))


def best(tried: Sequence[Tried]) -> Tried | None:
    """The completed trial of the highest value, the first of equals."""
    completed = [trial for trial in tried if trial.state == "complete"]
    return max(completed, key=lambda trial: trial.value or 0.0, default=None)


def recipe(task: str, system: str, kept: Values, winner: Tried, tried: Sequence[Tried]) -> str:
    """The winner's values as a table that `recipe=` and recipes/*.toml read."""
    finished = sum(trial.finished for trial in tried)
    lines = [
        f"# {system} on {task}: trial {winner.number}, the best of {finished}, with {winner.value:.6g}",
        f"# Use it: sable train {task} --system {system} --recipe recipe.toml",
        "",
        f"[{json.dumps(task)}]",
        *(f"{name} = {json.dumps(value)}" for name, value in {**kept, **winner.values}.items()),
    ]
    return "\n".join(lines) + "\n"


def _table(space: Space, tried: Sequence[Tried]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", "value", "batch", *space, "note"])
    for trial in tried:
        value = "" if trial.value is None else trial.value
        values = [trial.values.get(name, "") for name in space]
        writer.writerow([trial.number, trial.state, value, trial.batch, *values, trial.note])
    return text.getvalue()


def _picture(title: str, space: Space, tried: Sequence[Tried]) -> bytes:
    """The best so far over trials, and below it the values of trials against each dimension."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [trial for trial in tried if trial.finished and trial.value is not None]
    columns = 4
    rows = -(-len(space) // columns)
    figure = Figure(figsize=(11, 3.2 + 2.2 * rows), layout="constrained")
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[1.5, *([1] * rows)])
    axes = figure.add_subplot(grid[0, :])
    _draw_progress(axes, shown)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    for index, (name, choices) in enumerate(space.items()):
        axes = figure.add_subplot(grid[1 + index // columns, index % columns])
        _draw_dimension(axes, name, choices, shown)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": "sable"})
    return buffer.getvalue()


def _draw_progress(axes: tp.Any, shown: Sequence[Tried]) -> None:
    """Every trial a dot, and the best completed one so far a line."""
    _draw_dots(axes, [(trial.number, trial) for trial in shown])
    completed = [trial for trial in shown if trial.state == "complete"]
    highest = [max(t.value or 0.0 for t in completed[: i + 1]) for i in range(len(completed))]
    axes.step([t.number for t in completed], highest, where="post", color=_COLOUR, label="best so far")
    axes.set(xlabel="trial", ylabel="absolute return")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    _tidy(axes)


def _draw_dimension(axes: tp.Any, name: str, choices: Sequence[tp.Any], shown: Sequence[Tried]) -> None:
    """The values of trials above each choice, in order, side by side where they would cover each other."""
    ordered = sorted(choices)
    spread = [(i % 5 - 2) * 0.06 for i in range(len(shown))]
    places = [ordered.index(trial.values[name]) + offset for trial, offset in zip(shown, spread, strict=True)]
    _draw_dots(axes, list(zip(places, shown, strict=True)))
    axes.set_xticks(range(len(ordered)), [_shown(choice) for choice in ordered])
    axes.set_xlim(-0.5, len(ordered) - 0.5)
    axes.set_title(name, loc="left", fontsize=10)
    _tidy(axes)


def _draw_dots(axes: tp.Any, dots: Sequence[tuple[float, Tried]]) -> None:
    for state, colour, label in (
        ("pruned", _PALE, "pruned, at its last evaluation"),
        ("complete", _COLOUR, ""),
    ):
        some = [(place, trial.value) for place, trial in dots if trial.state == state]
        if some:
            axes.plot(*zip(*some, strict=True), "o", color=colour, markersize=4.5, label=label or None)


def _shown(choice: tp.Any) -> str:
    return f"{choice:g}" if isinstance(choice, float) else str(choice)


def _tidy(axes: tp.Any) -> None:
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
