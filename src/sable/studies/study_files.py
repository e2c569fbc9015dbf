"""What a tuning study found, as files: recipe.toml, trials.csv, study.png."""

import csv
import io
import json
import typing as tp
from collections.abc import Sequence
from pathlib import Path

from sable.files import write_atomically
from sable.studies.trials import Space, TrialRecord, Values

_COLOUR, _PALE = "#0b7285", "#a9c9d0"


def write(
    directory: Path, task: str, system: str, constants: Values, space: Space, records: list[TrialRecord]
) -> None:
    """Write all three for the trials there are; `constants` are values that all trials had, other than
    usual."""
    write_atomically(directory / "trials.csv", _table(space, records).encode())
    if (winner := best(records)) is not None:
        write_atomically(directory / "recipe.toml", recipe(task, system, constants, winner, records).encode())
        write_atomically(directory / "study.png", _picture(f"{system} on {task}", space, records))


def best(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the completed trial of the highest value, the first of equals."""
    completed = [trial for trial in records if trial.state == "complete"]
    return max(completed, key=lambda trial: trial.value or 0.0, default=None)


def recipe(
    task: str, system: str, constants: Values, winner: TrialRecord, records: Sequence[TrialRecord]
) -> str:
    """Return the winner's values as a table that `recipe=` and recipes/*.toml read."""
    finished = sum(trial.finished for trial in records)
    lines = [
        f"# {system} on {task}: trial {winner.number}, the best of {finished}, with {winner.value:.6g}",
        f"# Use it: sable train {task} --system {system} --recipe recipe.toml",
        "",
        f"[{json.dumps(task)}]",
        *(f"{name} = {json.dumps(value)}" for name, value in {**constants, **winner.values}.items()),
    ]
    return "\n".join(lines) + "\n"


def _table(space: Space, records: Sequence[TrialRecord]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", "value", "batch", *space, "note"])
    for trial in records:
        value = "" if trial.value is None else trial.value
        values = [trial.values.get(name, "") for name in space]
        writer.writerow([trial.number, trial.state, value, trial.batch, *values, trial.note])
    return text.getvalue()


def _picture(title: str, space: Space, records: Sequence[TrialRecord]) -> bytes:
    """Return the best so far over trials, and below it the values of trials against each dimension."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dots = [trial for trial in records if trial.finished and trial.value is not None]
    columns = 4
    rows = -(-len(space) // columns)
    figure = Figure(figsize=(11, 3.2 + 2.2 * rows), layout="constrained")
    grid = figure.add_gridspec(1 + rows, columns, height_ratios=[1.5, *([1] * rows)])
    axes = figure.add_subplot(grid[0, :])
    _draw_progress(axes, dots)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    for index, (name, choices) in enumerate(space.items()):
        axes = figure.add_subplot(grid[1 + index // columns, index % columns])
        _draw_dimension(axes, name, choices, dots)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": "sable"})
    return buffer.getvalue()


def _draw_progress(axes: tp.Any, dots: Sequence[TrialRecord]) -> None:
    """Draw every trial as a dot, and the best completed one so far as a line."""
    _draw_dots(axes, [(trial.number, trial) for trial in dots])
    completed = [trial for trial in dots if trial.state == "complete"]
    highest = [max(t.value or 0.0 for t in completed[: i + 1]) for i in range(len(completed))]
    axes.step([t.number for t in completed], highest, where="post", color=_COLOUR, label="best so far")
    axes.set(xlabel="trial", ylabel="absolute return")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    _tidy(axes)


def _draw_dimension(axes: tp.Any, name: str, choices: Sequence[tp.Any], dots: Sequence[TrialRecord]) -> None:
    """Draw the values of trials above each choice, in order, side by side where they would cover each
    other."""
    ordered = sorted(choices)
    jitter = [(i % 5 - 2) * 0.06 for i in range(len(dots))]
    places = [ordered.index(trial.values[name]) + offset for trial, offset in zip(dots, jitter, strict=True)]
    _draw_dots(axes, list(zip(places, dots, strict=True)))
    axes.set_xticks(range(len(ordered)), [_format_value(choice) for choice in ordered])
    axes.set_xlim(-0.5, len(ordered) - 0.5)
    axes.set_title(name, loc="left", fontsize=10)
    _tidy(axes)


def _draw_dots(axes: tp.Any, dots: Sequence[tuple[float, TrialRecord]]) -> None:
    for state, colour, label in (
        ("pruned", _PALE, "pruned, at its last evaluation"),
        ("complete", _COLOUR, ""),
    ):
        some = [(place, trial.value) for place, trial in dots if trial.state == state]
        if some:
            axes.plot(*zip(*some, strict=True), "o", color=colour, markersize=4.5, label=label or None)


def _format_value(choice: tp.Any) -> str:
    return f"{choice:g}" if isinstance(choice, float) else str(choice)


def _tidy(axes: tp.Any) -> None:
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
