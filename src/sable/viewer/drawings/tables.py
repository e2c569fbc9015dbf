"""Drawings of environments without a map: Neom's pattern; a table of what is seen and done for others."""

import typing as tp

import numpy as np

from sable.viewer.colours import agent
from sable.viewer.record import Episode
from sable.viewer.scene import AGENTS, GROUND, LABELS, THINGS, Canvas, Scene, icon

_ROW, _MOST_AGENTS, _MOST_FEATURES = 64, 16, 16


def neom(env: tp.Any, episode: Episode) -> Scene:
    """Draw agents from left to right, in rows of 64: where each is, and the pattern they are to spell."""
    values, target, team = np.asarray(env.values), np.asarray(env.target), episode.num_agents
    columns, rows = min(team, _ROW), -(-team // _ROW)
    high, gap = (8.0, 2.0) if rows == 1 else (3.0, 1.2)
    step = 32 / columns
    levels = (values - values.min()) / (np.ptp(values) or 1.0)

    def place(index: int, value: int) -> tuple[float, float]:
        row, column = divmod(index, _ROW)
        return (column + 0.5) * step, row * (high + gap) + gap / 2 + high * (1 - 0.9 * levels[value] - 0.05)

    places = [[place(index, value) for value in range(len(values))] for index in range(team)]
    radius = min(step * 0.36, 0.42)
    frames, anchors = [], []
    for t in range(episode.length + 1):
        canvas = Canvas()
        for row in range(rows):
            top, count = row * (high + gap) + gap / 2, min(team - row * _ROW, _ROW)
            canvas.rect(GROUND, 0, top, count * step, high, "floor", radius=0.2)
            wanted = [places[k][target[k]] for k in range(row * _ROW, row * _ROW + count)]
            canvas.path(GROUND, [x for point in wanted for x in point], "thing", 0.1)
        for k in range(team):
            value = int(episode.states.value[t, k])
            right = value == target[k]
            if not right:
                canvas.path(THINGS, [*places[k][value], *places[k][target[k]]], "faint", 0.06)
            canvas.disc(AGENTS, *places[k][value], radius, "good" if right else "poor")
        frames.append(canvas.shapes)
        anchors.append([places[k][int(episode.states.value[t, k])] for k in range(team)])
    return Scene(
        width=32,
        height=rows * (high + gap),
        frames=frames,
        anchors=anchors,
        legend=[
            (icon(lambda c: c.disc(AGENTS, 0.5, 0.5, 0.3, "good")), "agent at its value"),
            (icon(lambda c: c.disc(AGENTS, 0.5, 0.5, 0.3, "poor")), "agent elsewhere"),
            (
                icon(lambda c: c.path(GROUND, [0, 0.7, 0.35, 0.3, 0.65, 0.3, 1, 0.7], "thing", 0.1)),
                "the pattern",
            ),
        ],
        actions=[f"{value:g}" for value in values],
    )


def table(env: tp.Any, episode: Episode) -> Scene:
    """Draw a row for each agent: what it sees as shades, what it does, what that brings it."""
    shown, features = min(episode.num_agents, _MOST_AGENTS), episode.observation.view.shape[-1]
    cells = min(features, _MOST_FEATURES)
    views = episode.observation.view
    largest = float(np.abs(views).max()) or 1.0
    cell, left = min(0.9, 9 / cells), 1.6
    does, gets = left + cells * cell + 0.6, left + cells * cell + 4.2
    width = gets + 2.2
    frames, anchors = [], []
    for t in range(episode.length + 1):
        canvas = Canvas()
        heads = ((left, f"sees ({features} numbers)"), (does, "does"), (gets, "gets"))
        for x, text in heads:
            canvas.text(GROUND, x, 0.5, 0.42, text, "soft", "start")
        for k in range(shown):
            y = 1.5 + k * 1.15
            canvas.disc(AGENTS, 0.75, y, 0.42, agent(k))
            canvas.text(LABELS, 0.75, y, 0.5, str(k + 1), "label")
            for feature in range(cells):
                x = left + feature * cell
                canvas.rect(GROUND, x, y - 0.4, cell, 0.8, "floor", line="line", line_width=0.03)
                level = float(views[t, k, feature]) / largest if t < episode.length else 0.0
                side = 0.8 * min(cell, 0.8) * abs(level) ** 0.5
                if side > 0.02:
                    fill = "ink" if level > 0 else "poor"
                    canvas.rect(THINGS, x + (cell - side) / 2, y - side / 2, side, side, fill)
            if t < episode.length:
                canvas.text(LABELS, does, y, 0.48, _done(episode.action[t, k]), "ink", "start")
                reward = float(episode.reward[t, k])
                fill = "good" if reward > 0 else "poor" if reward < 0 else "faint"
                canvas.text(LABELS, gets, y, 0.48, f"{reward:+.3g}" if reward else "0", fill, "start")
        if shown < episode.num_agents:
            text = f"and {episode.num_agents - shown} agents more"
            canvas.text(GROUND, left, 1.5 + shown * 1.15, 0.42, text, "soft", "start")
        frames.append(canvas.shapes)
        anchors.append([(0.75, 1.5 + k * 1.15) for k in range(shown)])
    return Scene(
        width=width,
        height=1.2 + shown * 1.15 + (0.9 if shown < episode.num_agents else 0),
        frames=frames,
        anchors=anchors,
        legend=[
            (icon(lambda c: c.rect(THINGS, 0.15, 0.15, 0.7, 0.7, "ink")), "large number"),
            (icon(lambda c: c.rect(THINGS, 0.35, 0.35, 0.3, 0.3, "ink")), "small number"),
            (icon(lambda c: c.rect(THINGS, 0.2, 0.2, 0.6, 0.6, "poor")), "below zero"),
        ],
        actions=[f"action {k}" for k in range(episode.observation.action_mask.shape[-1])]
        if episode.action.ndim == 2
        else [f"number {k + 1}" for k in range(episode.action.shape[-1])],
    )


def _done(action: np.ndarray) -> str:
    if action.ndim == 0:
        return f"action {int(action)}"
    return " ".join(f"{x:+.2f}" for x in action[:3]) + (" ..." if len(action) > 3 else "")
