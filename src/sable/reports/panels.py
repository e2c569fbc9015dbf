"""What a chapter of a report holds: plots as data, drawn alike on the page and in its files, and tables.

Plots name systems as the report does; `looks.looks` has their colours.
"""

import typing as tp
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from sable.reports.stats import Estimate
from sable.reports.typeset import Table


class Line(tp.NamedTuple):
    """A system's values at some places; without an interval its ends are nan."""

    x: np.ndarray  # [K]
    y: Estimate  # [K]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines with intervals; `dots` where each place was measured by itself, and x then begins at
    zero."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Line]  # {system: line}
    references: Mapping[str, Estimate] = field(default_factory=dict)  # {system: level across}, the paper's
    dots: bool = False
    zero: bool = False  # y begins at zero
    log: bool = False  # y is logarithmic

    def systems(self) -> Iterator[str]:
        yield from self.lines
        yield from self.references


@dataclass(frozen=True, kw_only=True)
class Points:
    """A point with its interval for each system."""

    title: str
    x_label: str
    points: Mapping[str, Estimate]
    chance: bool = False  # from 0 to 1, with a mark at one half

    def systems(self) -> Iterator[str]:
        yield from self.points


class Bar(tp.NamedTuple):
    """How long a bar is, as a share of the whole, and what is written beside it."""

    share: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A bar for each system, from 0 to 1."""

    title: str
    x_label: str
    bars: Mapping[str, Bar]

    def systems(self) -> Iterator[str]:
        yield from self.bars


Panel = Lines | Points | Bars


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A figure or a table of the paper, made of our runs; `command` makes what is `missing`, if anything."""

    key: str  # of its file
    title: str
    text: str
    missing: str = ""
    command: str = ""
    panels: list[Panel] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    columns: int = 4  # of panels in its file
    elsewhere: bool = False  # the page draws these panels with each suite

    def systems(self) -> list[str]:
        """Return the systems of its panels, each once."""
        return list(dict.fromkeys(name for panel in self.panels for name in panel.systems()))
