"""Where a run differs from the paper: from its protocol, and from the settings that it fixed or searched."""

import functools
import importlib.resources
import tomllib
import typing as tp
from collections.abc import Iterable, Mapping

from sable.config import resolve as settings
from sable.config.schema import SYSTEM_CONFIGS, RunConfig

PROTOCOL = (
    "total_steps",
    "num_evaluations",
    "evaluation_episodes",
    "absolute_episodes",
    "env_options",
    "seeds",
)
"""What figures must share to stand side by side."""


def protocol_deviations(run: RunConfig) -> list[str]:
    """Return the run's budget, evaluations, options and seeds that are not the paper's."""
    expected = _tables()["protocol"]
    values = {name: _plain(getattr(run, name)) for name in PROTOCOL}
    return [f"{name} {_text(value)}".strip() for name, value in values.items() if value != expected[name]]


def setting_deviations(run: RunConfig, fields: Mapping[str, tp.Any]) -> list[str]:
    """Return every other setting of a run and its system that the paper did not use. A system of the user's
    own is in no paper."""
    family, values, allowed = settings.family(run.system), vars(run), _fixed("run")
    if run.system in SYSTEM_CONFIGS:
        values, allowed = values | dict(fields), allowed | _fixed(family) | settings.search_space(run.system)
        allowed |= _of_large_teams(run.task, family)
    return [
        f"{name} {_text(_plain(value))} ({_paper_values(family, name, allowed[name])})"
        for name, value in values.items()
        if name in allowed and _plain(value) not in allowed[name]
    ]


def _paper_values(family: str, name: str, values: list[tp.Any]) -> str:
    """Return whose values these are, and the values."""
    tables = _tables()
    silent = name in tables.get(family, {}).get("code", {}) or name in tables["run"]["code"]
    *others, last = map(_text, values)
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"{'the public code' if silent else 'paper'}: {listed}"


def _fixed(table: str) -> dict[str, list[tp.Any]]:
    """Return the one value of each fixed setting, as a list of what is allowed."""
    return {name: [value] for name, (value, _) in fixed(table).items()}


def fixed(table: str) -> dict[str, tuple[tp.Any, bool]]:
    """Return what the paper fixed in a table of protocol.toml, {setting: (value, whether it is the public
    code's, where the paper is silent)}."""
    entries = _tables().get(table, {})
    stated = {name: (value, False) for name, value in entries.items() if name not in ("code", "scaling")}
    return stated | {name: (value, True) for name, value in entries.get("code", {}).items()}


def _of_large_teams(task: str, family: str) -> dict[str, list[tp.Any]]:
    """Return what is fixed for the paper's tasks of large teams, where `task` is one."""
    if not task.startswith(tuple(_tables()["scaling"]["tasks"])):
        return {}
    return {name: [value] for name, value in _tables().get(family, {}).get("scaling", {}).items()}


@functools.cache
def _tables() -> dict[str, tp.Any]:
    file = importlib.resources.files("sable.config").joinpath("protocol.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _plain(value: tp.Any) -> tp.Any:
    return list(value) if isinstance(value, tuple) else value


def _text(value: tp.Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return " ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
