"""The paper's own figures, to stand beside ours: every summary of every task and system, with 95 % intervals.

`data/paper.csv` holds them as printed. For Sable, IPPO and MAPPO they are the better of memory on and off.
"""

import csv
import functools
import importlib.resources
import typing as tp

from sable.experiments.stats import Estimate

DIGITS = 2
"""Decimals the paper prints."""

Verdict = tp.Literal["not below", "overlapping", "below"]


@functools.cache
def figures() -> dict[tuple[str, str, str], Estimate]:
    """`{(summary, task, system): figure}`, the summaries those of `stats.SUMMARIES`."""
    text = importlib.resources.files("sable").joinpath("data", "paper.csv").read_text(encoding="utf-8")
    return {
        (row["metric"], f"{row['suite']}/{row['task']}", row["system"]): Estimate(
            *(float(row[name]) for name in ("value", "ci_low", "ci_high"))
        )
        for row in csv.DictReader(text.splitlines())
    }


def verdict(ours: Estimate, paper: Estimate) -> Verdict:
    """`not below`: our value, rounded as the paper's, is not below its interval; `overlapping`: it is, but
    the intervals share something; else, or without an interval of ours, `below`."""
    if round(ours.value, DIGITS) >= paper.low:
        return "not below"
    return "overlapping" if round(ours.high, DIGITS) >= paper.low else "below"


def by_rounding(ours: Estimate, paper: Estimate) -> bool:
    """Return whether our value is `not below` the paper's interval only because it is rounded."""
    return ours.value < paper.low <= round(ours.value, DIGITS)
