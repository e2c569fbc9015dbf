"""Every suite is drawn: all that is in a state is in its picture, where it belongs."""

import numpy as np
import pytest

from sable.viewer import attribution, record, video
from sable.viewer.drawings import choose as drawings
from sable.viewer.explain import explain
from sable.viewer.page import EpisodeView, page

TINY = {"policy_layers": (8,), "critic_layers": (8,)}


def drawn(untrained, task: str, *, steps: int | None = 12):
    team, env = untrained(task, "ippo", **TINY)
    key = record.episode_key(team.config.run, 0, 3)
    recording = record.record(env, team.system, team.params, key, 1, team.config.run, most_steps=steps)
    episode = record.episode(recording, 0)
    return episode, drawings.draw(task, env, episode)


def check(episode, scene) -> None:
    """A frame for every situation, inside its bounds, a place for every agent, and no two frames alike."""
    assert len(scene.frames) == len(scene.anchors) == episode.length + 1
    places = np.array(scene.anchors)
    assert places.shape[1:] == (episode.num_agents, 2)
    assert (places >= 0).all() and (places <= (scene.width, scene.height)).all()
    assert any(frame != scene.frames[0] for frame in scene.frames)
    assert scene.legend and all(shapes for shapes, _ in scene.legend)
    take = video.Clip(scene, "title", [""] * len(scene.frames))
    first = np.asarray(next(video.frames([take])))
    assert first.shape[1] == video.WIDTH and len(np.unique(first.reshape(-1, 3), axis=0)) > 5


@pytest.mark.slow
def test_robots_go_where_they_are_drawn_to_look(untrained):
    episode, scene = drawn(untrained, "rware/tiny-4ag", steps=40)
    check(episode, scene)
    agents, moved = episode.states.agents, 0
    for t in range(episode.length):
        for k in range(4):
            before, after = np.array(scene.anchors[t][k]), np.array(scene.anchors[t + 1][k])
            if (before != after).any():
                ahead = ((0, -1), (1, 0), (0, 1), (-1, 0))[int(agents.direction[t, k])]
                assert tuple(after - before) == ahead and episode.action[t, k] == 1
                moved += 1
    assert moved > 3
    # Everything that stands in the warehouse is drawn: shelves, goals and robots.
    shelves = episode.states.shelves.is_requested.shape[1]
    squares = [s for s in scene.frames[0] if s[0] == "rect" and s[4:6] in ((0.8, 0.8), (0.9, 0.9))]
    assert len(squares) == shelves
    assert sum(s[6] == "wanted" for s in squares) == 4 == episode.states.shelves.is_requested[0].sum()


def test_the_pattern_of_neom_is_right_where_agents_are(untrained):
    episode, scene = drawn(untrained, "neom/quick-flip-70ag", steps=6)
    check(episode, scene)
    for t, frame in enumerate(scene.frames):
        right = sum(shape[0] == "disc" and shape[5] == "good" for shape in frame)
        assert right == round(70 * float(correct(episode, t)))


def correct(episode, t: int) -> float:
    return float((episode.states.value[t] == np.tile([2, 1, 0, 1], 18)[:70]).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        "lbf/2s-8x8-2p-2f-coop",
        "connector/con-5x5x3a",
        "smax/2s3z",
        "mpe/simple_spread_3ag",
        "mabrax/halfcheetah_6x1",
        "mabrax/ant_4x2",
        "probe/continuous",
        "null/32ag",
    ],
)
def test_every_suite_is_drawn(untrained, task):
    episode, scene = drawn(untrained, task)
    if task.startswith("null"):  # a table of the first agents
        assert len(scene.anchors[0]) == 16
    else:
        check(episode, scene)
    if task.startswith("lbf"):
        foods = [shape for shape in scene.frames[0] if shape[0] == "disc" and shape[5] == "good"]
        assert len(foods) == 2
    if task.startswith("mabrax"):  # every limb that is moved has its agent's colour
        colours = {shape[3] for shape in scene.frames[0] if shape[0] == "path" and shape[1] == 2}
        assert colours >= {f"a{k}" for k in range(episode.num_agents)}


@pytest.mark.slow
def test_a_page_of_a_long_episode_stays_small(untrained):
    """500 steps of RWARE by a large Sable; robots that only turn or wait never collide."""
    team, env = untrained("rware/tiny-4ag", embed_dim=64, num_heads=4, num_blocks=3)
    head = team.params["params"]["policy_head"]["head"]["output"]
    head["bias"] = np.array([2.0, -60, 2, 2, -60], np.float32)
    recording = record.record(
        env, team.system, team.params, record.episode_key(team.config.run, 0, 0), 1, team.config.run
    )
    assert recording.lengths.tolist() == [500]
    episode = record.episode(recording, 0)
    shown = [EpisodeView(episode, drawings.draw(team.config.run.task, env, episode), 0)]
    found = explain(team, recording)
    layers = attribution.layers(found.retention, 0, 500)
    assert len(layers) == 3 * 3
    for layer in layers:  # every part of what is recalled, also after hundreds of steps
        weights = attribution.weights(layer, 499)
        recalled = np.einsum("hnsm,smhd->nhd", weights, layer.v)
        size = np.abs(layer.out).max()
        np.testing.assert_allclose(recalled / size, layer.out[499] / size, atol=2e-6)
    text = page(team, recording, found, shown, how="sampled")
    assert len(text) < 2_000_000
