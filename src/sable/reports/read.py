"""What many runs gave, read from their folders, and a line for all that is missing or odd."""

import os
import typing as tp
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from sable.config import renamed
from sable.config.schema import SYSTEM_CONFIGS, RunConfig
from sable.errors import SableError
from sable.reports import marl_eval
from sable.reports.ledger import SUPERSEDED
from sable.reports.series import Series
from sable.runs import directory as runs
from sable.runs import sums
from sable.training.loggers.logger import number

VARIANTS = ("memory", "rms_norm", "swiglu")
"""Switches that make another system of a system; where one is not at its default, the name says so."""


class Cost(tp.NamedTuple):
    """The cost of a run. Memory is the device's, on a CPU the process's."""

    task: str
    system: str
    seeds: int
    device: str
    steps_per_second: float
    peak_memory_bytes: float
    algorithm: str = ""  # the system without its variant
    settings: Mapping[str, tp.Any] = MappingProxyType({})  # the algorithm's, as the run recorded them


class Results(tp.NamedTuple):
    """Series to draw conclusions from, what a reader of the conclusions must know, and what our runs took."""

    series: list[Series]
    notes: list[str]
    costs: Sequence[Cost] = ()


def read(paths: Iterable[str | Path]) -> Results:
    """Return all finished runs in or below these folders, and in these marl-eval JSON files."""
    series_by_seed: dict[tuple[str, str, str], Series] = {}
    notes: list[str] = []
    costs: list[Cost] = []
    unchecked: list[Path] = []
    for top, place in ((Path(path), place) for path in paths for place in _find_runs(Path(path))):
        if SUPERSEDED in place.relative_to(top).parts:
            notes.append(f"{place}: left out: its row gave way to another")
            continue
        try:
            series, said = (marl_eval.read(place), []) if place.is_file() else read_run(place)
        except SableError as error:
            series, said = [], [f"{place}: left out: {error}"]
        notes += said
        costs += [read_cost(place)] if series and place.is_dir() else []
        unchecked += [place] if series and place.is_dir() and sums.unchecked(place) else []
        for one in series:
            whose = f"seed {one.seed} of {one.system} on {one.task}"
            if problem := one.problem():
                notes.append(f"{place}: {whose} left out: {problem}")
                continue
            before = series_by_seed.get(key := (one.task, one.system, one.seed), one)
            series_by_seed[key] = one if one.steps[-1] >= before.steps[-1] else before
            if before is not one:
                both = f"in {before.source} and {place}"
                notes.append(f"{whose} is there twice, {both}; {series_by_seed[key].source} counts")
    if unchecked:
        others = f" (and {len(unchecked) - 1} more runs)" if unchecked[1:] else ""
        notes.append(f"{sums.unchecked(unchecked[0])}{others}")
    return Results(list(series_by_seed.values()), notes + _length_notes(series_by_seed.values()), costs)


def read_run(directory: Path) -> tuple[list[Series], list[str]]:
    """Return the series of one run, whatever is in them, and notes; no series where it has not finished."""
    if (directory / "points.json").is_file():
        return [], [f"{directory}: left out: a batch of a tuning study, whose seeds differ in their settings"]
    run, fields = runs.read_plain_config(directory)
    rows = runs.read_metrics(directory)
    if not (directory / "summary.json").is_file():
        reached = max((int(row["env_steps"]) for row in rows), default=0)
        return [], [
            f"{directory}: left out: not finished, at {reached:,} of {run.total_steps:,} steps; "
            f"go on with sable train {runs.how_to_resume(directory)}"
        ]
    sums.verify(directory)
    summary = runs.read_summary(directory)
    halted = summary.get("halted_seeds")
    halted = halted if isinstance(halted, list) else []
    return _series(directory, run, fields, rows, summary), [
        f"{directory}: seed {seed} halted because a number was no longer finite; it counts as it stood"
        for seed in halted
    ]


def read_cost(directory: Path) -> Cost:
    """Return what a finished run took; nan where it does not say."""
    run, fields = runs.read_plain_config(directory)
    summary, device = runs.read_summary(directory), runs.read_meta(directory).get("device")
    return Cost(
        run.task,
        system_name(run, fields),
        len(run.seeds),
        str(device.get("kind", "")) if isinstance(device, dict) else "",
        number(summary.get("steps_per_second")),
        number(summary.get("peak_memory_bytes")),
        run.system,
        fields,
    )


def export(directory: Path, summary: dict[str, tp.Any]) -> None:
    """Write the marl_eval.json of a run that ended with this summary."""
    series = _series(directory, *runs.read_plain_config(directory), runs.read_metrics(directory), summary)
    runs.write_json(directory / "marl_eval.json", marl_eval.to_dict(series))


def _series(
    directory: Path,
    run: RunConfig,
    fields: Mapping[str, tp.Any],
    rows: list[dict[str, tp.Any]],
    summary: dict[str, tp.Any],
) -> list[Series]:
    absolutes = summary.get("absolute_return")
    if not isinstance(absolutes, list) or len(absolutes) != len(run.seeds):
        raise SableError(f"its summary.json holds no absolute_return for each of its {len(run.seeds)} seeds")
    series = []
    for seed, absolute in zip(run.seeds, absolutes, strict=True):
        own = [row for row in rows if row["seed"] == seed]
        steps, returns, seconds = (
            np.array([number(row.get(name)) for row in own])
            for name in ("env_steps", "evaluation/return", "wall_seconds")
        )
        series.append(
            Series(
                task=run.task,
                system=system_name(run, fields),
                seed=str(seed),
                steps=steps,
                returns=returns,
                seconds=seconds,
                absolute=number(absolute),
                source=directory,
            )
        )
    return series


def system_name(run: RunConfig, fields: Mapping[str, tp.Any]) -> str:
    """Return what a run's system is called in tables: its label, in words of now, or its variant's name."""
    return renamed.label(run.label) or variant(run.system, fields)


def variant(system: str, fields: Mapping[str, tp.Any]) -> str:
    """Return the system's name with those of its switches that are not at their defaults; with all of them
    where the defaults are in a module of the user's own, which nobody who only reads imports."""
    defaults = vars(SYSTEM_CONFIGS[system]()) if system in SYSTEM_CONFIGS else {}
    changed = [name for name in VARIANTS if name in fields and fields[name] != defaults.get(name)]
    return " ".join([system, *(name if fields[name] else f"no {name}" for name in changed)])


def _find_runs(path: Path) -> list[Path]:
    """Return the file, or the run folders in or below the folder."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SableError(f"there is no file or folder {path}")
    places = []
    for place, folders, files in os.walk(path):
        if "config.json" in files:
            folders.clear()  # a run holds no runs
            places.append(Path(place))
    if not places:
        raise SableError(f"no runs in {path}: a run's folder holds a config.json")
    return sorted(places)


def _length_notes(series: Iterable[Series]) -> list[str]:
    """Return a line for each task whose runs differ in length by more than rounding to whole updates
    explains."""
    ends = defaultdict(set)
    for one in series:
        ends[one.task].add(int(one.steps[-1]))
    return [
        f"{task}: runs of {min(steps):,} and of {max(steps):,} steps stand side by side"
        for task, steps in ends.items()
        if max(steps) > 1.05 * min(steps)
    ]
