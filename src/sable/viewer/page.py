"""Episodes to one page that replays them: a file of its own that loads nothing."""

import base64
import datetime
import importlib.resources
import json
import re
import typing as tp
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sable.config.schema import SableConfig
from sable.installation import VERSION
from sable.runs import directory as runs
from sable.runs.policy import Policy
from sable.viewer import attribution, colours, video
from sable.viewer.attribution import LAGS
from sable.viewer.explain import Explanation
from sable.viewer.record import Episode, Recording
from sable.viewer.scene import Scene, encode

MOST_AGENTS = 32
"""Agents whose actions and memories a page lists."""
MOST_BYTES = 1_200_000
"""Of the memory's data of one page; heads are shown together where apart they would take more."""
TOP = 4
"""Largest parts of what is recalled that are kept."""
_REPORT = ("svg.js", "theme.js")
_SCRIPTS = ("decode.js", "scene.js", "panels.js", "timeline.js", "replay.js")


@dataclass(frozen=True)
class EpisodeView:
    """One episode for the page."""

    episode: Episode
    scene: Scene
    index: int
    """Which of the recorded ones it is."""


def page(
    policy: Policy,
    recording: Recording,
    explanation: Explanation,
    episodes: Sequence[EpisodeView],
    *,
    how: str,
    progress: tp.Callable[[int], None] = lambda count: None,
) -> str:
    """Return the page: a template with its style, its scripts and the data in it."""
    content = _data(policy, recording, explanation, episodes, how, progress)
    text = json.dumps(runs.to_plain(content), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    scripts = [_asset("reports", name) for name in _REPORT] + [_asset("viewer", name) for name in _SCRIPTS]
    parts = {
        "palette": colours.style(),
        "style": _asset("viewer", "style.css"),
        "scripts": "\n".join(scripts),
        "data": base64.b64encode(zlib.compress(text.encode(), 9)).decode(),
    }
    return re.sub(r"@(\w+)@", lambda match: parts[match[1]], _asset("viewer", "page.html"))


def content_of(page: str) -> dict[str, tp.Any]:
    """Return the data in a page."""
    match = re.search(r'<script type="text/plain" id="data">([^<]*)<', page)
    assert match is not None
    return json.loads(zlib.decompress(base64.b64decode(match[1])))


def _asset(folder: str, name: str) -> str:
    return importlib.resources.files(f"sable.{folder}").joinpath("web", name).read_text(encoding="utf-8")


def _data(
    policy: Policy,
    recording: Recording,
    explanation: Explanation,
    episodes: Sequence[EpisodeView],
    how: str,
    progress: tp.Callable[[int], None],
) -> dict[str, tp.Any]:
    spec, run = policy.spec, policy.config.run
    shown = min(spec.num_agents, MOST_AGENTS)
    clips = [video.Clip(one.scene, "", [""] * len(one.scene.frames)) for one in episodes]
    kinds = {"probability": explanation.probability, "q": explanation.q_value, "spread": explanation.spread}
    budget = MOST_BYTES // len(episodes)
    return {
        "made": f"Made by sable {VERSION} on {datetime.date.today():%d %B %Y}.",
        "task": run.task,
        "system": run.system,
        "how": how,
        "agents": spec.num_agents,
        "shown": shown,
        "placed": min((len(one.scene.anchors[0]) for one in episodes), default=0),
        "discrete": spec.discrete,
        "inTurn": explanation.in_turn,
        "actions": episodes[0].scene.actions,
        "odds": next((name for name, values in kinds.items() if values is not None), None),
        "pace": video.frame_rate(clips),
        "episodes": [
            _episode(policy, recording, explanation, one, shown, budget)
            for one in _with_progress(episodes, progress)
        ],
    }


def _with_progress(
    items: Sequence[EpisodeView], progress: tp.Callable[[int], None]
) -> tp.Iterator[EpisodeView]:
    for count, item in enumerate(items):
        yield item
        progress(count + 1)


def _episode(
    policy: Policy, recording: Recording, explanation: Explanation, one: EpisodeView, shown: int, budget: int
) -> dict[str, tp.Any]:
    episode, scene = one.episode, one.scene
    length = episode.length

    def own(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[:length, one.index, :shown]

    same = np.ptp(episode.reward, axis=1).max() == 0  # one reward for all
    rewards = episode.reward[:, :1] if same else episode.reward[:, :shown]
    shapes, changes = encode(scene.frames)
    action = episode.action[:, :shown]
    value, q_value = own(explanation.value), own(explanation.q_value)
    data = {
        "length": length,
        "stats": {name: round(x, 4) for name, x in episode.stats.items()},
        "returns": _rounded(episode.returns),
        "rewards": _rounded(rewards),
        "scene": {
            "width": scene.width,
            "height": scene.height,
            "shapes": shapes,
            "changes": changes,
            "legend": scene.legend,
        },
        "anchors": _encode_array(np.array(scene.anchors), "f4")
        if scene.anchors and scene.anchors[0]
        else None,
        "action": _encode_array(action, "u2")
        if policy.spec.discrete
        else _encode_array(_unit(policy, action) * 100, "i1"),
        "values": None if value is None else _encode_array(value, "f4"),
        "odds": None,
        "memory": None,
    }
    legal = episode.observation.action_mask[:, :shown]
    if (probability := own(explanation.probability)) is not None:
        data["odds"] = _encode_array(np.where(legal, np.round(probability * 200), 255), "u1")
    elif q_value is not None:
        low, high = float(q_value[legal].min()), float(q_value[legal].max())
        level = (q_value - low) / (high - low or 1.0) * 254
        data |= {"odds": _encode_array(np.where(legal, np.clip(np.round(level), 0, 254), 255), "u1")}
        data |= {"oddsLow": round(low, 4), "oddsHigh": round(high, 4)}
    elif (spread := own(explanation.spread)) is not None:
        data["odds"] = _encode_array(_unit(policy, spread) * 100, "i1")
    if explanation.retention is not None:
        data["memory"] = _memory(policy, explanation.retention, one, shown, budget)
    return data


def _memory(
    policy: Policy, retention: dict[str, tuple], one: EpisodeView, shown: int, budget: int
) -> dict[str, tp.Any]:
    """Return what each listed agent recalls through each layer at each step: largest parts, and how all
    divide."""
    config = tp.cast(SableConfig, policy.config.system)
    length, team = one.episode.length, policy.spec.num_agents
    layers = attribution.layers(retention, one.index, length)
    whom = team <= MOST_AGENTS
    size = length * ((team if whom else 0) + len(LAGS) + TOP * 5)  # bytes of one agent and layer
    agents = min(shown, max(1, budget // (size * len(layers))))
    apart = config.num_heads > 1 and size * agents * len(layers) * (1 + config.num_heads) <= budget
    options = []
    for layer in layers:
        name = layer.kind if config.num_blocks == 1 else f"{layer.kind}, block {layer.block}"
        for head in [None, *range(config.num_heads)] if apart else [None]:
            recalled = attribution.recall(layer, head=head, num_agents=agents, top=TOP)
            heads = "" if config.num_heads == 1 else ", all heads" if head is None else f", head {head + 1}"
            options.append(
                {
                    "name": name + heads,
                    "kind": layer.kind,
                    "byAgent": _encode_array(np.round(recalled.by_agent * 200), "u1") if whom else None,
                    "byLag": _encode_array(np.round(recalled.by_lag * 200), "u1"),
                    "topLag": _encode_array(recalled.top_lag, "u2"),
                    "topAgent": _encode_array(recalled.top_agent, "u2"),
                    "topShare": _encode_array(np.round(recalled.top_share * 100), "i1"),
                }
            )
    decay = ", ".join(f"{kappa:.3g}" for kappa in layers[0].kappa)
    note = [
        f"Kept on this page: the {TOP} largest parts of each step, to one percent, and how all parts divide, "
        f"to half a percent; each step back multiplies a part by {decay}"
        + (" (one number per head)." if config.num_heads > 1 else ".")
    ]
    if config.num_heads > 1 and not apart:
        note.append("Heads are shown together, to keep the page small.")
    if agents < team:
        note.append(f"The first {agents} of {team} agents are explained.")
    balance = " (over all heads: on balance)" if config.num_heads > 1 else ""
    return {
        "lags": list(LAGS),
        "top": TOP,
        "agents": agents,
        "options": options,
        "about": "Retention is linear: what a layer recalls, before its norm and gate, is a weighted sum "
        "over every agent at every step of the episode so far, and these are the sizes of its parts. Hatched "
        f"parts are subtracted{balance}; dashed rings on the map show where those agents were then.",
        "note": " ".join(note),
    }


def _unit(policy: Policy, action: np.ndarray) -> np.ndarray:
    """Scale continuous actions from their bounds to [-1, 1]."""
    low, high = policy.spec.action_low, policy.spec.action_high
    return np.clip((action - low) / (high - low) * 2 - 1, -1, 1)


def _encode_array(values: np.ndarray, kind: str) -> list[str]:
    """Encode numbers as [kind, base64]."""
    if kind != "f4":
        values = np.round(values)
    return [kind, base64.b64encode(np.ascontiguousarray(values, f"<{kind}").tobytes()).decode()]


def _rounded(values: np.ndarray) -> list:
    return np.round(values.astype(float), 4).tolist()
