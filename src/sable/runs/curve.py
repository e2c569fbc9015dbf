"""The picture of a run: its evaluation returns over environment steps."""

import io
import json
import math
import statistics
import typing as tp
from collections.abc import Sequence
from pathlib import Path

from sable.files import write_atomically
from sable.training.console import mean_and_std
from sable.training.loggers.logger import METRICS, RETURN, Row, number, read_rows

_COLOUR = "#0b7285"


def draw_curve(directory: Path, absolute: Sequence[float] | None = None) -> Path | None:
    """Return the picture curve.png of a run's evaluation returns, drawn from its metrics, with a line at the
    mean of the `absolute` returns; None without any metrics."""
    rows = [row for row in read_rows(directory / METRICS) if math.isfinite(number(row.get(RETURN)))]
    if not rows:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    _draw_returns(axes, rows)
    _draw_absolute(axes, absolute or ())
    axes.set_title(
        _title(_read_object(directory / "config.json")), loc="left", fontsize=12, fontweight="bold", pad=12
    )
    axes.set(xlabel="environment steps per seed", ylabel="evaluation return")
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="best")
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": "sable"})
    write_atomically(directory / "curve.png", buffer.getvalue())
    return directory / "curve.png"


def _draw_returns(axes: tp.Any, rows: list[Row]) -> None:
    """Draw each seed thin, their mean bold, the span between lowest and highest shaded."""
    seeds = sorted({row["seed"] for row in rows})
    by_steps: dict[int, list[float]] = {}
    for row in rows:
        by_steps.setdefault(row["env_steps"], []).append(row[RETURN])
    steps = sorted(by_steps)
    marker = "o" if len(steps) < 3 else None
    if len(seeds) > 1:
        lowest, highest = [min(by_steps[step]) for step in steps], [max(by_steps[step]) for step in steps]
        axes.fill_between(
            steps, lowest, highest, color=_COLOUR, alpha=0.15, linewidth=0, label="lowest to highest"
        )
        for seed in seeds:
            own = [row for row in rows if row["seed"] == seed]
            axes.plot(
                [r["env_steps"] for r in own],
                [r[RETURN] for r in own],
                color=_COLOUR,
                alpha=0.35,
                linewidth=0.8,
            )
    mean = [statistics.fmean(by_steps[step]) for step in steps]
    label = f"mean of {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    axes.plot(steps, mean, color=_COLOUR, linewidth=2, marker=marker, label=label)
    axes.margins(x=0.02)


def _draw_absolute(axes: tp.Any, absolute: Sequence[float]) -> None:
    """Draw a dashed line at the best parameters' return, where the run has finished."""
    mean, _ = mean_and_std(list(absolute))
    if math.isfinite(mean):
        axes.axhline(mean, color="0.35", linestyle="--", linewidth=1.2, label=f"best parameters: {mean:.3g}")


def _title(config: dict[str, tp.Any]) -> str:
    run = config.get("run", {})
    return f"{str(run.get('system', 'unknown system')).capitalize()} on {run.get('task', 'unknown task')}"


def _read_object(path: Path) -> dict[str, tp.Any]:
    """Return the JSON object in `path`, or an empty one where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
