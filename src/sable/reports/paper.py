"""The paper's own figures, to stand beside ours: every summary of every task and system, with 95 % intervals.

`paper.csv` holds those of tasks as printed, `paper_suites.csv` those of suites (its first table).
For Sable, IPPO and MAPPO they are the better of memory on and off.
"""

import csv
import functools
import importlib.resources
import math
import typing as tp

from sable.reports.stats import Estimate

SEEDS = 10
DIGITS = 2
"""Decimals the paper prints."""

NAMES = {"sable": "Sable", "mat": "MAT", "mappo": "MAPPO", "ippo": "IPPO", "masac": "MASAC", "hasac": "HASAC"}
NAMES |= {"qmix": "QMIX", "rware": "RWARE", "mabrax": "MABrax", "smax": "SMAX", "connector": "Connector"}
NAMES |= {"lbf": "LBF", "mpe": "MPE", "neom": "Neom"}
"""What the paper calls systems and suites."""

WON = {"sable": 34, "mat": 3}
"""Tasks won, of 45, as its first figure says of these two: by the chance of improvement over every other."""

FASTER = 6.5
"""Up to how many times MAT's steps a second Sable takes, by the first figure, at 512 agents."""

ABLATION = ("rware/tiny-4ag", "rware/medium-4ag", "smax/3s5z", "smax/smacv2_5_units")
"""The tasks of its ablation."""

Verdict = tp.Literal["not below", "overlapping", "below"]


@functools.cache
def figures() -> dict[tuple[str, str, str], Estimate]:
    """Return `{(summary, task, system): figure}`, the summaries those of `stats.SUMMARIES`."""
    text = importlib.resources.files("sable.reports").joinpath("paper.csv").read_text(encoding="utf-8")
    return {
        (row["metric"], f"{row['suite']}/{row['task']}", row["system"]): _estimate(row)
        for row in csv.DictReader(text.splitlines())
    }


def _estimate(row: tp.Mapping[str, str]) -> Estimate:
    return Estimate(*(float(row[name]) for name in ("value", "ci_low", "ci_high")))


def verdict(ours: Estimate, paper: Estimate) -> Verdict:
    """Return `not below`: our value, rounded as the paper's, is not below its interval; `overlapping`: it is,
    but the intervals share something; else, or without an interval of ours, `below`."""
    if round(ours.value, DIGITS) >= paper.low:
        return "not below"
    return "overlapping" if round(ours.high, DIGITS) >= paper.low else "below"


def by_rounding(ours: Estimate, paper: Estimate) -> bool:
    """Return whether our value is `not below` the paper's interval only because it is rounded."""
    return ours.value < paper.low <= round(ours.value, DIGITS)


@functools.cache
def suites() -> dict[tuple[str, str], Estimate]:
    """Return the paper's first table, {(suite, system): figure}: interquartile means of normalised scores."""
    text = importlib.resources.files("sable.reports").joinpath("paper_suites.csv").read_text(encoding="utf-8")
    return {(row["suite"], row["system"]): _estimate(row) for row in csv.DictReader(text.splitlines())}


def suite_names() -> list[str]:
    """Return the suites of its first table, in its order."""
    return list(dict.fromkeys(suite for suite, _ in suites()))


def systems(suite: str | None = None) -> list[str]:
    """Return the paper's systems in its order; of one suite only those it has there."""
    return list(dict.fromkeys(s for _, task, s in figures() if suite in (None, task.partition("/")[0])))


def tasks() -> list[str]:
    """Return the paper's tasks in its order."""
    return list(dict.fromkeys(task for _, task, _ in figures()))


def of_task(task: str, summary: str) -> dict[str, Estimate]:
    """Return the figures of all its systems on a task; none where it has not that task."""
    return {s: figure for s in systems() if (figure := figures().get((summary, task, s)))}


def mark_best(estimates: tp.Mapping[str, Estimate]) -> tuple[set[str], set[str]]:
    """Return who stands in bold and who has an asterisk: the highest, and whose interval overlaps that of the
    highest, by what is printed."""
    rounded = {name: Estimate(*(round(float(x), DIGITS) for x in one)) for name, one in estimates.items()}
    top = max((one.value for one in rounded.values()), default=0.0)
    best = {name for name, one in rounded.items() if one.value == top}
    floor = min((rounded[name].low for name in best if math.isfinite(rounded[name].low)), default=top)
    return best, {name for name, one in rounded.items() if name not in best and one.high >= floor}
