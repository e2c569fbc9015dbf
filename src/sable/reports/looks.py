"""How systems and numbers look, the same on the page, in tables and in figures."""

import math
import typing as tp
from collections.abc import Iterable, Sequence

from sable.reports import paper
from sable.reports.stats import Estimate
from sable.reports.variants import ELSEWHERE, System, is_changed

# On light paper and on dark, told apart with any of the three kinds of colour blindness (simulated), and 3:1
# from the paper. The first are for the paper's systems, in its order.
PALETTE = (
    ("#1989e8", "#3bbcff"),
    ("#a91b05", "#d96a1c"),
    ("#2c8c4e", "#6affbe"),
    ("#d18400", "#e8bb00"),
    ("#bf21a8", "#c06abb"),
    ("#003c62", "#f5deff"),
    ("#530d1c", "#ee3f70"),
    ("#847b88", "#7aada0"),
)


class Look(tp.NamedTuple):
    """A family's colour, as an index into the palette, and a pattern of dashes for each of its variants; the
    best of them has a mark of its own."""

    colour: int
    dash: int
    best: bool


def looks(systems: Sequence[System]) -> dict[str, Look]:
    """Return each system's look; the paper's systems have the same colours in every report."""
    known = list(dict.fromkeys(system for _, _, system in paper.figures()))
    families = list(dict.fromkeys(system.family for system in systems))
    base = {family: ELSEWHERE.sub("", family) for family in families}
    fixed = {family: known.index(base[family]) for family in families if base[family] in known}
    others = [family for family in families if family not in fixed]
    free = [k for k in range(len(PALETTE)) if k not in fixed.values()]
    # Where colours run out, dashes tell families apart.
    places = fixed | {family: (free + list(range(len(PALETTE))) * 9)[k] for k, family in enumerate(others)}
    looks_by_system = {}
    for family in families:
        again = sum(places[other] == places[family] for other in families[: families.index(family)])
        for k, system in enumerate(s for s in systems if s.family == family):
            dash = 3 if system.best else (k + again) % 3
            looks_by_system[system.name] = Look(places[family], dash, system.best)
    return looks_by_system


def chapter_looks(systems: Sequence[System], names: Sequence[str]) -> dict[str, Look]:
    """Return the looks of a chapter's systems, in the report's order. They are the report's, but for changed
    forms of one system: of these a report may have more than colours, a chapter has not."""
    known = {system.name: system for system in systems}
    order = [name for name in known if name in names] + [name for name in names if name not in known]
    here = [known.get(name, System(name, name, False)) for name in order]
    usual, own = looks([*systems, *(one for one in here if one.name not in known)]), looks(here)
    return {one.name: (own if is_changed(one.family) else usual)[one.name] for one in here}


def decimals(values: Iterable[float]) -> int:
    """Return digits after the point that suit numbers of this size: two, as in the paper, fewer for large
    ones."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return 2 if largest < 100 else 1 if largest < 1000 else 0


def number(value: float, digits: int) -> str:
    """Return the number with so many decimals; nothing is ever minus zero."""
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if not text.strip("-0.") else text


def interval(estimate: Estimate, digits: int) -> str:
    """Return `[low, high]`, or nothing without an interval."""
    if not math.isfinite(estimate.low):
        return ""
    return f"[{number(estimate.low, digits)}, {number(estimate.high, digits)}]"
