"""Drawings of the suites on grids: RWARE, LBF, Connector. Cells are units of one; rows go down."""

import typing as tp

import numpy as np

from sable.viewer.colours import agent
from sable.viewer.record import Episode
from sable.viewer.scene import AGENTS, GROUND, LABELS, THINGS, Canvas, Scene, icon

_AHEAD = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Up, right, down, left, as (x, y)."""


def rware(env: tp.Any, episode: Episode) -> Scene:
    """Draw robots among shelves: a requested shelf is gold, the goals are at the bottom."""
    states = episode.states
    _, rows, columns = states.grid.shape[1:]
    goals = np.asarray(env.suite.goals)  # (x, y) = (column, row)
    frames, anchors = [], []
    for t in range(episode.length + 1):
        canvas = Canvas()
        _floor(canvas, rows, columns)
        for x, y in goals:
            canvas.rect(GROUND, x + 0.06, y + 0.06, 0.88, 0.88, "goal", radius=0.1)
            canvas.text(GROUND, x + 0.5, y + 0.5, 0.5, "G", "label")
        agents, shelves = states.agents, states.shelves
        carried = set()
        for k in range(episode.num_agents):
            x, y = int(agents.position.y[t, k]), int(agents.position.x[t, k])
            if agents.is_carrying[t, k]:
                carried.add((x, y))
            _robot(canvas, x + 0.5, y + 0.5, k, int(agents.direction[t, k]))
        for row, column, requested in zip(
            shelves.position.x[t], shelves.position.y[t], shelves.is_requested[t], strict=True
        ):
            spot = (int(column), int(row))
            _shelf(canvas, *spot, bool(requested), carried=spot in carried)
        frames.append(canvas.shapes)
        places = zip(agents.position.y[t] + 0.5, agents.position.x[t] + 0.5, strict=True)
        anchors.append([(float(x), float(y)) for x, y in places])
    return Scene(
        width=columns,
        height=rows,
        frames=frames,
        anchors=anchors,
        legend=[
            (icon(lambda c: _robot(c, 0.5, 0.5, 0, 1)), "robot, looking ahead"),
            (icon(lambda c: _shelf(c, 0, 0, False, carried=False)), "shelf"),
            (icon(lambda c: _shelf(c, 0, 0, True, carried=False)), "requested shelf"),
            (icon(lambda c: _loaded(c)), "robot with a shelf"),
            (icon(lambda c: c.rect(GROUND, 0.06, 0.06, 0.88, 0.88, "goal", radius=0.1)), "goal"),
        ],
        actions=["wait", "forward", "turn left", "turn right", "load"],
    )


def _robot(canvas: Canvas, x: float, y: float, index: int, direction: int) -> None:
    ahead = _AHEAD[direction]
    aside = (-ahead[1], ahead[0])
    tip = (x + 0.5 * ahead[0], y + 0.5 * ahead[1])
    corners = [
        (x + 0.2 * ahead[0] + s * 0.26 * aside[0], y + 0.2 * ahead[1] + s * 0.26 * aside[1]) for s in (1, -1)
    ]
    canvas.area(AGENTS, [*tip, *corners[0], *corners[1]], agent(index))
    _numbered(canvas, x, y, 0.33, index)


def _shelf(canvas: Canvas, x: float, y: float, requested: bool, *, carried: bool) -> None:
    fill = "wanted" if requested else "thing"
    if carried:  # a frame around its robot
        canvas.rect(AGENTS, x + 0.05, y + 0.05, 0.9, 0.9, "", line=fill, line_width=0.13, radius=0.08)
    else:
        canvas.rect(THINGS, x + 0.1, y + 0.1, 0.8, 0.8, fill, radius=0.08)


def _loaded(canvas: Canvas) -> None:
    _numbered(canvas, 0.5, 0.5, 0.3, 0)
    _shelf(canvas, 0, 0, True, carried=True)


def lbf(env: tp.Any, episode: Episode) -> Scene:
    """Draw foragers and food, each with its level; those who load are ringed."""
    states = episode.states
    size = int(env.suite.grid_size)
    agents, foods = states.agents, states.food_items
    frames, anchors = [], []
    for t in range(episode.length + 1):
        canvas = Canvas()
        _floor(canvas, size, size)
        for (row, column), level, eaten in zip(
            foods.position[t], foods.level[t], foods.eaten[t], strict=True
        ):
            if not eaten:
                _food(canvas, column + 0.5, row + 0.5, int(level))
        for k in range(episode.num_agents):
            row, column = agents.position[t, k]
            _forager(canvas, column + 0.5, row + 0.5, k, int(agents.level[t, k]), bool(agents.loading[t, k]))
        frames.append(canvas.shapes)
        anchors.append([(float(c) + 0.5, float(r) + 0.5) for r, c in agents.position[t]])
    return Scene(
        width=size,
        height=size,
        frames=frames,
        anchors=anchors,
        legend=[
            (icon(lambda c: _forager(c, 0.5, 0.5, 0, 2, False)), "forager, its level below right"),
            (icon(lambda c: _forager(c, 0.5, 0.5, 0, 2, True)), "loading"),
            (icon(lambda c: _food(c, 0.5, 0.5, 3)), "food, with the level it takes"),
        ],
        actions=["wait", "up", "down", "left", "right", "load"],
    )


def _forager(canvas: Canvas, x: float, y: float, index: int, level: int, loading: bool) -> None:
    if loading:
        canvas.disc(THINGS, x, y, 0.46, "", line="wanted", line_width=0.09)
    _numbered(canvas, x, y, 0.34, index)
    canvas.disc(LABELS, x + 0.3, y + 0.3, 0.17, "ink")
    canvas.text(LABELS, x + 0.3, y + 0.3, 0.26, str(level), "paper")


def _food(canvas: Canvas, x: float, y: float, level: int) -> None:
    canvas.path(THINGS, [x, y - 0.2, x + 0.12, y - 0.42], "good", 0.08)
    canvas.disc(THINGS, x, y + 0.04, 0.33, "good")
    canvas.text(LABELS, x, y + 0.05, 0.4, str(level), "label")


def connector(env: tp.Any, episode: Episode) -> Scene:
    """Draw wires growing from their starts to the squares of their colour."""
    grids, size = episode.states.grid, episode.states.grid.shape[-1]
    frames, anchors = [], []
    for t in range(episode.length + 1):
        canvas = Canvas()
        _floor(canvas, size, size)
        grid, places = grids[t], episode.states.agents.position[t]
        for (row, column), value in np.ndenumerate(grid):
            index, kind = divmod(int(value) - 1, 3)
            if value and kind == 2:
                _target(canvas, column, row, index)
        for k, (row, column) in enumerate(episode.states.agents.start[t]):
            canvas.disc(THINGS, column + 0.5, row + 0.5, 0.24, agent(k))
        for before, after in zip(range(t), range(1, t + 1), strict=True):  # the wire itself, step by step
            moves = zip(
                episode.states.agents.position[before], episode.states.agents.position[after], strict=True
            )
            for k, ((row, column), (to_row, to_column)) in enumerate(moves):
                if (row, column) != (to_row, to_column):
                    points = [column + 0.5, row + 0.5, to_column + 0.5, to_row + 0.5]
                    canvas.path(THINGS, points, agent(k), 0.34)
        for k, (row, column) in enumerate(places):
            _numbered(canvas, column + 0.5, row + 0.5, 0.38, k)
            if (places[k] == episode.states.agents.target[t, k]).all():
                canvas.disc(AGENTS, column + 0.5, row + 0.5, 0.46, "", line="good", line_width=0.07)
        frames.append(canvas.shapes)
        anchors.append([(float(c) + 0.5, float(r) + 0.5) for r, c in places])
    return Scene(
        width=size,
        height=size,
        frames=frames,
        anchors=anchors,
        legend=[
            (icon(lambda c: _numbered(c, 0.5, 0.5, 0.38, 0)), "head of a wire"),
            (icon(lambda c: _target(c, 0, 0, 0)), "where it must go"),
            (
                icon(lambda c: c.disc(AGENTS, 0.5, 0.5, 0.44, agent(0), line="good", line_width=0.09)),
                "connected",
            ),
        ],
        actions=["wait", "up", "right", "down", "left"],
    )


def _target(canvas: Canvas, x: float, y: float, index: int) -> None:
    canvas.rect(
        THINGS, x + 0.16, y + 0.16, 0.68, 0.68, "paper", line=agent(index), line_width=0.12, radius=0.1
    )
    canvas.text(LABELS, x + 0.5, y + 0.51, 0.36, str(index + 1), agent(index))


def _numbered(canvas: Canvas, x: float, y: float, radius: float, index: int) -> None:
    """Draw an agent: its colour and its number."""
    canvas.disc(AGENTS, x, y, radius, agent(index))
    canvas.text(LABELS, x, y, radius * (1.25 if index < 99 else 0.95), str(index + 1), "label")


def _floor(canvas: Canvas, rows: int, columns: int) -> None:
    canvas.rect(GROUND, 0, 0, columns, rows, "floor")
    for x in range(columns + 1):
        canvas.path(GROUND, [x, 0, x, rows], "line", 0.03)
    for y in range(rows + 1):
        canvas.path(GROUND, [0, y, columns, y], "line", 0.03)
