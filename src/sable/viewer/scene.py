"""Drawings as data: a few kinds of shapes, drawn alike by the page (SVG) and by films (Pillow).

A shape is a tuple of plain values; the layer says what lies above what.

    ("rect", layer, x, y, width, height, fill, line, line width, corner radius)
    ("disc", layer, x, y, radius, fill, line, line width)
    ("path", layer, (x, y, x, y, ...), line, line width)         round ends
    ("area", layer, (x, y, x, y, ...), fill)
    ("text", layer, x, y, size, text, fill, place)               place: start, middle or end; y is the middle

Colours are roles of `colours`, or "" for none.
"""

import typing as tp
from collections.abc import Sequence
from dataclasses import dataclass, field

GROUND, THINGS, AGENTS, LABELS = range(4)
Shape = tuple


class Canvas:
    """Shapes in the making."""

    def __init__(self):
        self.shapes: list[Shape] = []

    def rect(
        self, layer: float, x: float, y: float, width: float, height: float, fill: str = "", *,
        line: str = "", line_width: float = 0.0, radius: float = 0.0,
    ) -> None:  # fmt: skip
        numbers = _rounded(x, y, width, height)
        self.shapes.append(("rect", layer, *numbers, fill, line, line_width, radius))

    def disc(
        self, layer: float, x: float, y: float, radius: float, fill: str = "", *,
        line: str = "", line_width: float = 0.0,
    ) -> None:  # fmt: skip
        self.shapes.append(("disc", layer, *_rounded(x, y, radius), fill, line, line_width))

    def path(self, layer: float, points: Sequence[float], line: str, line_width: float) -> None:
        self.shapes.append(("path", layer, _rounded(*points), line, line_width))

    def area(self, layer: float, points: Sequence[float], fill: str) -> None:
        self.shapes.append(("area", layer, _rounded(*points), fill))

    def text(
        self,
        layer: float,
        x: float,
        y: float,
        size: float,
        text: str,
        fill: str = "ink",
        place: str = "middle",
    ) -> None:
        self.shapes.append(("text", layer, *_rounded(x, y), round(size, 2), text, fill, place))


@dataclass(frozen=True)
class Scene:
    """An episode drawn: a frame for every situation, the last one after the last action."""

    width: float
    height: float
    frames: list[list[Shape]]
    anchors: list[list[tuple[float, float]]]
    """Where each agent is in each frame; empty where agents have no place."""
    legend: list[tuple[list[Shape], str]] = field(default_factory=list)
    """Icons, drawn in a square of side 1, and what they mean."""
    actions: list[str] = field(default_factory=list)
    """What discrete actions, or the components of continuous ones, are called."""


class Encoded(tp.NamedTuple):
    """Frames as changes: shapes once each, and for every frame those that go and those that come."""

    shapes: list[Shape]
    changes: list[tuple[list[int], list[int]]]


def encode(frames: Sequence[Sequence[Shape]]) -> Encoded:
    """Return frames whose repeated shapes cost next to nothing; drawn by layer, then by first appearance."""
    numbers: dict[Shape, int] = {}
    changes, before = [], set()
    for frame in frames:
        now = {numbers.setdefault(shape, len(numbers)) for shape in frame}
        changes.append((sorted(before - now), sorted(now - before)))
        before = now
    return Encoded(list(numbers), changes)


def in_order(frames: Sequence[Sequence[Shape]]) -> tp.Iterator[list[Shape]]:
    """Return each frame's shapes as they are drawn, one above the other."""
    numbers: dict[Shape, int] = {}
    for frame in frames:
        for shape in frame:
            numbers.setdefault(shape, len(numbers))
        yield sorted(dict.fromkeys(frame), key=lambda shape: (shape[1], numbers[shape]))


def icon(draw: tp.Callable[[Canvas], None]) -> list[Shape]:
    """Return the shapes that `draw` makes, for a legend."""
    canvas = Canvas()
    draw(canvas)
    return canvas.shapes


def _rounded(*numbers: float) -> tuple[float, ...]:
    return tuple(round(float(x), 2) for x in numbers)
