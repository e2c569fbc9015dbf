"""What commands print of tasks, results and published rows."""

import json
import typing as tp
from collections.abc import Sequence

if tp.TYPE_CHECKING:
    from sable.envs import Task


def format_tasks_json(tasks: "list[Task]") -> str:
    columns = (
        "id",
        "suite",
        "name",
        "num_agents",
        "view_size",
        "num_actions",
        "action_size",
        "time_limit",
        "group",
    )
    return json.dumps([{column: getattr(task, column) for column in columns} for task in tasks], indent=2)


def format_tasks(tasks: "list[Task]") -> str:
    """Return one block of lines per suite, columns aligned over all of them."""
    width = max(len(task.id) for task in tasks)
    lines = [_row(width, "task", "agents", "view", "actions", "time limit")]
    for suite in dict.fromkeys(task.suite for task in tasks):
        lines.append("")
        for task in (task for task in tasks if task.suite == suite):
            actions = task.num_actions or f"{task.action_size}-dim"
            lines.append(_row(width, task.id, task.num_agents, task.view_size, actions, task.time_limit))
    return "\n".join(lines)


def _row(width: int, task: str, *sizes: tp.Any) -> str:
    return f"{task:{width}}" + "".join(f"  {size:>10}" for size in sizes)


def format_results(entries: dict[str, tp.Any]) -> str:
    """Return one aligned line per entry."""
    width = max(map(len, entries), default=0)
    return "\n".join(f"{name:{width}}  {format_value(value)}" for name, value in entries.items())


def format_value(value: tp.Any) -> str:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return " ".join(map(format_value, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {format_value(item)}" for name, item in value.items())
    return (
        f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )


def format_row(row: dict[str, tp.Any]) -> str:
    """Return a row's numbers in few words."""
    from sable.reports.ledger import older_meaning, outside_protocol

    paper, outside = row["paper"], outside_protocol(row)
    others = len(row["deviations"]) - len(outside)
    parts = [format_interval(row["mean"], row["interval"])]
    parts += [f"paper {format_interval(paper['mean'], paper['interval'])}"] if paper else []
    parts += [row["verdict"] + ", by rounding" * bool(row.get("by_rounding"))] if row["verdict"] else []
    parts += ["not the protocol"] if outside else []
    parts += [f"{others} setting{'s' * (others > 1)} not the paper's"] if others else []
    parts += ["of an older meaning"] if older_meaning(row) else []
    parts += ["superseded"] if row.get("superseded") else []
    return "  ".join([*parts, f"{row['device_minutes']:.3g} min on {row['device']}"])


def format_interval(mean: float, interval: Sequence[float] | None) -> str:
    return f"{mean:.4g} [{interval[0]:.4g}, {interval[1]:.4g}]" if interval else f"{mean:.4g}"
