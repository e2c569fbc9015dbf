"""Drawings of the suites in open space: SMAX, MPE, MABrax. Their y goes up, ours down."""

import typing as tp

import numpy as np

from sable.viewer.colours import agent
from sable.viewer.record import Episode
from sable.viewer.scene import AGENTS, GROUND, THINGS, Canvas, Scene, icon


def smax(env: tp.Any, episode: Episode) -> Scene:
    """Draw numbered allies against enemies: health above each, lines from who shoots to who is shot at."""
    units, suite, allies = episode.states.suite.state, env.suite, episode.num_agents
    width, height = float(suite.map_width), float(suite.map_height)
    radii = np.asarray(suite.unit_type_radiuses) * 1.4  # true to scale they could hardly be seen
    full, letters = np.asarray(suite.unit_type_health), list(suite.unit_type_shorthands)
    frames, anchors = [], []
    for t in range(episode.length + 1):
        canvas = Canvas()
        canvas.rect(GROUND, 0, 0, width, height, "floor", line="line", line_width=0.15)
        places = units.unit_positions[t] * (1, -1) + (0, height)
        for k, (x, y) in enumerate(places):
            kind, alive = int(units.unit_types[t, k]), bool(units.unit_alive[t, k])
            if not alive:
                canvas.text(GROUND, x, y, 1.1, "×", "faint")
                continue
            target = _target(int(units.prev_attack_actions[t, k]), k, allies)
            if target is not None and t > 0:
                line = agent(k) if k < allies else "foe"
                canvas.path(THINGS, [x, y, *places[target]], line, 0.12)
            text = str(k + 1) if k < allies else letters[kind]
            health = float(units.unit_health[t, k] / full[kind])
            fill = agent(k) if k < allies else "foe"
            _unit(canvas, AGENTS + k / 1000, x, y, float(radii[kind]), fill, text, health)
        frames.append(canvas.shapes)
        anchors.append([(float(x), float(y)) for x, y in places[:allies]])
    return Scene(
        width=width,
        height=height,
        frames=frames,
        anchors=anchors,
        legend=[
            (icon(lambda c: _unit(c, AGENTS, 0.5, 0.6, 0.36, agent(0), "1", 1.0)), "ally and its health"),
            (icon(lambda c: _unit(c, AGENTS, 0.5, 0.6, 0.36, "foe", "m", 0.5)), "enemy of a kind"),
            (icon(lambda c: c.path(THINGS, [0.1, 0.8, 0.9, 0.2], agent(0), 0.09)), "attack"),
        ],
        actions=["up", "right", "down", "left", "stop"]
        + [f"attack {k + 1}" for k in range(episode.observation.action_mask.shape[-1] - 5)],
    )


def _target(action: int, index: int, num_allies: int) -> int | None:
    """Return whom a unit attacks, as the suite numbers them: enemies see allies in reverse."""
    if action < 5:
        return None
    return num_allies + action - 5 if index < num_allies else num_allies - 1 - (action - 5)


def _unit(
    canvas: Canvas, layer: float, x: float, y: float, radius: float, fill: str, text: str, health: float
) -> None:
    """Draw a unit with all that belongs to it in one layer, so that in a crowd each is seen whole or not."""
    canvas.disc(layer, x, y, radius, fill, line="floor", line_width=radius * 0.12)
    canvas.text(layer, x, y, radius * 1.25, text, "label")
    left, top, long, thick = x - radius, y - radius * 1.55, 2 * radius, radius * 0.3
    canvas.rect(layer, left, top, long, thick, "line")
    if health > 0:
        canvas.rect(layer, left, top, long * min(health, 1.0), thick, "good" if health > 0.35 else "poor")


def mpe(env: tp.Any, episode: Episode) -> Scene:
    """Draw agents to cover the landmarks; the picture holds all they ever come to."""
    places, radii = episode.states.suite.p_pos, np.asarray(env.suite.rad)
    count = episode.num_agents
    reach = max(1.15, float(np.abs(places).max()) + 0.2)
    frames, anchors = [], []
    for t in range(episode.length + 1):
        canvas = Canvas()
        canvas.rect(GROUND, 0, 0, 10, 10, "floor", line="line", line_width=0.05)
        spots = (places[t] * (1, -1) / reach + 1) * 5
        for x, y in spots[count:]:
            _landmark(canvas, x, y, max(float(radii[-1]) / reach * 5, 0.22))
        for k, (x, y) in enumerate(spots[:count]):
            radius = float(radii[k]) / reach * 5
            trail = (places[max(0, t - 6) : t + 1, k] * (1, -1) / reach + 1) * 5
            if len(trail) > 1:
                canvas.path(THINGS, trail.reshape(-1), agent(k), 0.08)
            layer = AGENTS + k / 1000
            canvas.disc(layer, x, y, radius, agent(k), line="paper", line_width=0.05)
            canvas.text(layer, x, y, max(radius, 0.28) * 1.1, str(k + 1), "label")
        frames.append(canvas.shapes)
        anchors.append([(float(x), float(y)) for x, y in spots[:count]])
    return Scene(
        width=10,
        height=10,
        frames=frames,
        anchors=anchors,
        legend=[
            (icon(lambda c: c.disc(AGENTS, 0.5, 0.5, 0.36, agent(0))), "agent and its trail"),
            (icon(lambda c: _landmark(c, 0.5, 0.5, 0.26)), "landmark to cover"),
        ],
        actions=["(unused)", "left", "right", "down", "up"],
    )


def _landmark(canvas: Canvas, x: float, y: float, radius: float) -> None:
    canvas.disc(GROUND, x, y, radius * 2, "", line="goal", line_width=radius * 0.22)
    canvas.disc(THINGS, x, y, radius, "goal")


def mabrax(env: tp.Any, episode: Episode) -> Scene:
    """Draw the body seen from the side, or from above at a slant where it has legs all around; a limb has the
    colour of the agent that moves it. The camera follows."""
    base = env.suite.env
    while hasattr(base, "env"):
        base = base.env
    system, body = base.sys, episode.states.suite.pipeline_state.x
    ends, radii, links = _segments(system, body)
    owner = _agent_of_link(env.suite, system)
    slanted = float(np.ptp(ends[..., 1])) > 0.3
    across = np.array([0.8, -0.6, 0.0]) if slanted else np.array([1.0, 0.0, 0.0])
    upward = np.array([0.3, 0.4, 0.87]) if slanted else np.array([0.0, 0.0, 1.0])
    toward = np.cross(across, upward)
    flat = np.stack([ends @ across, -(ends @ upward)], axis=-1)  # [T, G, 2, xy], y down
    depth = (ends @ toward).mean(-1)
    floor = np.stack([body.pos[:, 0] @ across, -(body.pos[:, 0] * (1, 1, 0)) @ upward], axis=-1)
    offsets, thick = flat - floor[:, None, None], float(radii.max())
    highest, lowest = float(offsets[..., 1].min()) - thick, float(offsets[..., 1].max()) + thick
    scale = min(4.8 / (float(np.abs(offsets[..., 0]).max()) + thick), 6.8 / (lowest - highest))
    ground = 7.4 - lowest * scale if slanted else 7.2
    frames, anchors = [], []
    for t in range(episode.length + 1):
        canvas, place = Canvas(), np.array([5.0, ground]) - floor[t] * scale
        canvas.rect(GROUND, 0, 0, 10, 8.4, "floor")
        _draw_marks(canvas, float(floor[t, 0]), scale)
        if not slanted:
            canvas.rect(GROUND, 0, 7.2, 10, 0.05, "faint")
        points = flat[t] * scale + place
        for g in np.argsort(depth[t], kind="stable"):
            (x, y), (to_x, to_y) = points[g]
            fill = agent(owner[links[g]]) if links[g] in owner else "body"
            canvas.path(AGENTS, [x, y, to_x, to_y], fill, round(float(radii[g]) * 2 * scale, 2))
        frames.append(canvas.shapes)
        moved = {
            k: [g for g, link in enumerate(links) if owner.get(link) == k] for k in range(episode.num_agents)
        }
        centre = points.mean((0, 1))
        anchors.append(
            [tuple(map(float, points[own].mean((0, 1)) if own else centre)) for own in moved.values()]
        )
    return Scene(
        width=10,
        height=8.4,
        frames=frames,
        anchors=anchors,
        legend=[
            (icon(lambda c, k=k: c.path(AGENTS, [0.2, 0.7, 0.8, 0.3], agent(k), 0.3)), f"moved by {k + 1}")
            for k in range(episode.num_agents)
        ]
        + [(icon(lambda c: c.path(AGENTS, [0.2, 0.7, 0.8, 0.3], "body", 0.3)), "body")],
        actions=[f"joint {k + 1}" for k in range(episode.action.shape[-1])],
    )


def _segments(system: tp.Any, body: tp.Any) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return every capsule and sphere of a body: its ends in the world [T, G, 2, 3], its radius [G], its
    link."""
    drawn = [g for g, kind in enumerate(np.asarray(system.geom_type)) if kind in (2, 3)]
    links = [int(system.geom_bodyid[g]) - 1 for g in drawn]
    half = np.array([system.geom_size[g][1] if system.geom_type[g] == 3 else 0.0 for g in drawn])
    axis = _rotate(np.asarray(system.geom_quat)[drawn], np.array([0.0, 0.0, 1.0]))
    centre = np.asarray(system.geom_pos)[drawn]
    own = np.stack([centre - half[:, None] * axis, centre + half[:, None] * axis], axis=1)
    turned = _rotate(body.rot[:, links][:, :, None], own[None])
    return turned + body.pos[:, links][:, :, None], np.asarray(system.geom_size)[drawn, 0], links


def _rotate(quaternion: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Return vectors turned by unit quaternions (w first)."""
    w, axis = quaternion[..., :1], quaternion[..., 1:]
    twice = 2 * np.cross(axis, vector)
    return vector + w * twice + np.cross(axis, twice)


def _agent_of_link(suite: tp.Any, system: tp.Any) -> dict[int, int]:
    """Return the agent that moves its joint, by link."""
    link_of_actuator = np.asarray(system.dof_link())[np.asarray(system.actuator.qd_id)]
    return {
        int(link_of_actuator[int(actuator)]): k
        for k, name in enumerate(suite.agents)
        for actuator in np.asarray(suite.agent_action_mapping[name])
    }


def _draw_marks(canvas: Canvas, position: float, scale: float) -> None:
    """Draw a mark for every unit of length, which pass by as the body moves."""
    for unit in range(int(position - 5 / scale), int(position + 5 / scale) + 2):
        x = 5 + (unit - position) * scale
        if 0 <= x <= 10:
            canvas.path(GROUND, [x, 7.2, x, 7.5], "soft", 0.04)
            canvas.text(GROUND, x, 7.8, 0.3, f"{unit} m", "soft")
