"""What is watched is what is evaluated; what is said about it is exact; it is written whole or not at all."""

import base64
import json
import shutil
import sys
from pathlib import Path

import flax.linen as nn
import imageio_ffmpeg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import sable
from sable.cli.main import main
from sable.errors import SableError
from sable.nets.embeddings import next_token, start_token
from sable.nets.sable import Sable, initial_memory
from sable.runs import open_run as running
from sable.training.evaluate import evaluate_policy
from sable.viewer import attribution, record, scene, show, video
from sable.viewer.explain import explain
from sable.viewer.page import content_of

SMALL = {"total_steps": 640, "num_evaluations": 2, "evaluation_episodes": 4, "absolute_episodes": 4}
SIZES = {"num_envs": 4, "rollout_length": 8, "embed_dim": 16, "num_heads": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    return sable.train("probe/recall", seeds=(3, 8), out=out, name="r", quiet=True, **SMALL, **SIZES)


@pytest.fixture(scope="module")
def team(run):
    return sable.load(run.directory, seed=8)


@pytest.fixture(scope="module")
def env():
    return sable.make_env("probe/recall")


@pytest.fixture(scope="module")
def recording(team, env):
    key = record.episode_key(team.config.run, team.seed, 7)
    return record.record(env, team.system, team.params, key, 5, team.config.run)


def test_training_ends_with_a_film_of_the_first_seed(run):
    with Image.open(run.directory / "video.gif") as film_left:
        assert film_left.n_frames == 5 and film_left.info["comment"] == video.MARK
    assert (run.directory / "summary.json").exists()


def test_a_film_that_cannot_be_drawn_is_one_line_and_no_failure(run, env, tmp_path, capsys):
    directory = shutil.copytree(run.directory, tmp_path / "r")
    (directory / "video.gif").unlink()
    shutil.rmtree(directory / "checkpoints")
    config = sable.load(run.directory).config.run
    running.write_video(directory, env, config, quiet=False)
    said = capsys.readouterr().err
    assert said.startswith("sable: no video.gif: ") and said.count("\n") == 1
    assert not (directory / "video.gif").exists()


def test_what_is_watched_is_what_the_evaluator_plays(run, recording):
    episodes = [record.episode(recording, index) for index in range(5)]
    evaluated = sable.evaluate(run.directory, episodes=5, seed=7)["return"][1]  # seed 8 is the second
    assert np.mean([one.stats["return"] for one in episodes]) == pytest.approx(evaluated)
    for one in episodes:
        assert one.returns[-1] == one.reward.mean(-1).sum() == one.stats["return"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["lbf/2s-8x8-2p-2f-coop", "neom/quick-flip-32ag"])
def test_every_episode_is_the_evaluators(untrained, task):
    team, env = untrained(task)
    key = record.episode_key(team.config.run, 0, 3)
    recording = record.record(env, team.system, team.params, key, 8, team.config.run)
    stats = evaluate_policy(env, team.system, team.params, key, 8)
    for index in range(8):
        one = record.episode(recording, index)
        assert one.stats == {name: float(values[index]) for name, values in stats.items()}


def test_greedy_play_is_what_the_loaded_team_does(team, env):
    key = record.episode_key(team.config.run, team.seed, None)
    seen = record.record(env, team.system, team.params, key, 5, team.config.run, greedy=True)
    team.reset(batch=5)
    for view, action in zip(seen.observation.view, seen.action, strict=True):
        np.testing.assert_array_equal(team.act(view, greedy=True), action)


def test_probabilities_are_those_the_actions_were_drawn_from(team, recording):
    found = explain(team, recording)
    np.testing.assert_allclose(found.probability.sum(-1), 1, rtol=1e-5)
    taken = np.take_along_axis(found.probability, recording.action[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.log(taken), recording.extras.log_prob, atol=1e-5)
    assert found.in_turn and np.array_equal(found.value, recording.extras.value)


def recalled(layer: attribution.Layer) -> np.ndarray:
    """The weighted sums of all values, token by token."""
    return np.stack(
        [
            np.einsum("hnsm,smhd->nhd", attribution.weights(layer, t), layer.v[: t + 1])
            for t in range(len(layer.q))
        ]
    )


def test_the_parts_of_what_is_recalled_add_up_to_it(team, recording):
    """In every layer and head: to what the layer itself computes over the whole episode."""
    found = explain(team, recording).retention
    layers = attribution.layers(found, 2, 4)
    names = [(layer.kind, layer.block) for layer in layers]
    assert names == [("encoder", 1), ("decoder, self", 1), ("decoder, cross", 1)]
    for layer in layers:
        size = np.abs(layer.out).max()
        np.testing.assert_allclose(recalled(layer) / size, layer.out / size, atol=2e-6)
        assert len(layer.kappa) == 2 and layer.kappa[0] != layer.kappa[1]


@pytest.mark.slow
def test_the_parts_add_up_to_what_was_recalled_while_acting(team, recording):
    """Where memories are carried from step to step and from agent to agent, and no token is seen again."""
    layers = attribution.layers(explain(team, recording).retention, 2, 4)
    acted = acted_outputs(team, recording, 2)
    assert len(acted) == len(layers) == 3
    for layer in layers:
        size = np.abs(layer.out).max()
        found = acted[layer.kind, layer.block]
        np.testing.assert_allclose(recalled(layer)[:3] / size, found / size, atol=2e-6)


def acted_outputs(team, recording, index) -> dict:
    """What each retention layer hands on while the team acts: encoded at once, decoded agent by agent."""
    net, ids = Sable(team.config.system, team.spec), jnp.arange(2)
    memory, outputs = initial_memory(team.config.system, 1), {}

    def caught(method, *args):
        capture = attribution.Capture()
        with nn.intercept_methods(capture):
            result = net.apply(team.params, *args, method=method)
        for path, found in capture.outputs.items():
            *_, block, name = path.split("/")
            key = (attribution.KINDS[name], int(block[-1]) + 1)
            outputs.setdefault(key, []).append(np.asarray(found[-1]))
        return result

    for t in range(3):
        seen = recording.observation
        view, legal = (jnp.asarray(x[t, index])[None] for x in (seen.view, seen.action_mask))
        time = jnp.array([t])
        encoded, _, memory = caught(net.encode, view, time, ids, memory)
        memory = net.apply(team.params, memory, 1, method=net.decay_memory)
        clock, previous = (
            net.apply(team.params, time, method=net.encode_time)[:, 0],
            start_token(team.spec)[None],
        )
        for agent in range(2):
            _, memory = caught(net.decode_agent, encoded[:, agent], legal[:, agent], clock, previous, memory)
            previous = next_token(team.spec, jnp.asarray(recording.action[t, index, agent])[None])
    return {key: np.concatenate(found).reshape(3, 2, 2, -1) for key, found in outputs.items()}


def test_shares_are_of_everything_recalled(team, recording):
    layer = attribution.layers(explain(team, recording).retention, 0, 4)[0]
    found = attribution.recall(layer, head=None, num_agents=2, top=3)
    np.testing.assert_allclose(found.by_agent.sum(-1), 1)
    np.testing.assert_allclose(found.by_lag.sum(-1), 1)
    t, agent = 3, 1
    parts = np.einsum("hsm,smhd->smhd", attribution.weights(layer, t)[:, agent], layer.v)
    sizes = np.sqrt(np.square(parts).sum((2, 3)))
    shares = sizes / sizes.sum()
    np.testing.assert_allclose(found.by_agent[t, agent], shares.sum(0))
    np.testing.assert_allclose(
        found.by_lag[t, agent, :3], [shares[3].sum(), shares[2].sum(), shares[:2].sum()]
    )
    for lag, of, share in zip(
        *(x[t, agent] for x in (found.top_lag, found.top_agent, found.top_share)), strict=True
    ):
        assert abs(share) == pytest.approx(shares[t - lag, of])
    assert (np.diff(np.abs(found.top_share[t, agent])) <= 0).all()
    one = attribution.recall(layer, head=1, num_agents=1, top=3)
    alone = np.abs(attribution.weights(layer, t)[1, 0]) * np.linalg.norm(layer.v[:, :, 1], axis=-1)
    np.testing.assert_allclose(one.by_agent[t, 0], alone.sum(0) / alone.sum())


def test_tokens_long_decayed_change_no_summary():
    draw = np.random.default_rng(0)
    q, k, v = draw.normal(size=(3, 60, 3, 1, 4))
    layer = attribution.Layer("encoder", 1, False, np.array([0.5]), q, k, v, np.zeros_like(q))
    found = attribution.recall(layer, head=None, num_agents=3, top=2)
    parts = np.abs(attribution.weights(layer, 59)[0]) * np.linalg.norm(v[:, :, 0], axis=-1)
    np.testing.assert_allclose(found.by_agent[59], parts.sum(1) / parts.sum((1, 2))[:, None], atol=1e-7)


def test_changes_between_frames_give_the_frames_back():
    draw = np.random.default_rng(1)
    every = [("disc", int(draw.integers(3)), k, 0.0, 1.0, "ink", "", 0.0) for k in range(12)]
    frames = [[every[k] for k in draw.permutation(12)[: draw.integers(1, 12)]] for _ in range(30)]
    shapes, changes = scene.encode(frames)
    now: set[int] = set()
    for frame, drawn, (gone, came) in zip(frames, scene.in_order(frames), changes, strict=True):
        now = (now - set(gone)) | set(came)
        assert {shapes[k] for k in now} == set(frame) == set(drawn)
        assert [shape[1] for shape in drawn] == sorted(shape[1] for shape in frame)


def test_the_command_writes_films_and_a_page_and_says_so(run, tmp_path, capsys):
    argv = ["watch", str(run.directory), "--episodes", "5", "--seed", "7", "--run-seed", "8"]
    assert main([*argv, "--format", "gif", "mp4", "html", "-o", str(tmp_path / "w")]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == ["replay.gif", "replay.mp4", "replay.html"]
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == sorted(path.name for path in paths)
    with Image.open(paths[0]) as gif:
        assert gif.n_frames == 5 * 5 and gif.width == video.WIDTH
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(paths[1]))
    assert frames >= 25 and 5 < seconds < 60
    data = content_of(paths[2].read_text())
    evaluated = sable.evaluate(run.directory, episodes=5, seed=7)["return"][1]
    assert np.mean([one["returns"][-1] for one in data["episodes"]]) == pytest.approx(evaluated)
    names = [option["name"] for option in data["episodes"][0]["memory"]["options"]]
    assert len(names) == 3 * 3 and names[:2] == ["encoder, all heads", "encoder, head 1"]


def test_an_exported_team_plays_the_same(run, tmp_path):
    folder = sable.export(run.directory, tmp_path / "team", seed=3)
    (page,) = sable.watch(folder, episodes=5, formats="html")
    (other,) = sable.watch(run.directory, run_seed=3, episodes=5, formats=["html"], out=tmp_path / "w")
    assert page == folder / "watch" / "replay.html" and page.read_bytes() == other.read_bytes()


def test_mistakes_are_one_line_and_nothing_is_lost(run, tmp_path, monkeypatch, capsys):
    with pytest.raises(SableError, match="format 'gfi' is not one of gif, mp4, html; did you mean 'gif'"):
        sable.watch(run.directory, formats=["gfi"])
    with pytest.raises(SableError, match="has no seed 5; it has 3, 8"):
        sable.watch(run.directory, run_seed=5)
    with pytest.raises(SableError, match="episodes=0: expected a whole number of at least 1"):
        sable.watch(run.directory, episodes=0)
    (tmp_path / "replay.html").write_text("mine")
    with pytest.raises(SableError, match=r"replay.html is there already and no replay of ours"):
        sable.watch(run.directory, out=tmp_path)
    assert (tmp_path / "replay.html").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(SableError, match=r"cannot write to .*file/w"):
        sable.watch(run.directory, out=tmp_path / "file" / "w", formats="gif")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert main(["watch", str(run.directory), "--format", "mp4"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install 'sable-marl[video]'" in said
    config = json.loads((run.directory / "config.json").read_text())
    assert config["run"]["video"] is True


@pytest.mark.slow
def test_a_page_of_a_team_without_memory_says_nothing_of_it(untrained, tmp_path):
    team, env = untrained("probe/masked", "ippo", policy_layers=(8,), critic_layers=(8,))
    given = {"episodes": 2, "seed": 0, "greedy": False, "formats": ["html"], "quiet": True}
    (path,) = show.watch(team, env, tmp_path, **given)
    data = content_of(path.read_text())
    assert data["odds"] == "probability" and not data["inTurn"]
    assert all(one["memory"] is None and one["values"] for one in data["episodes"])
    key = record.episode_key(team.config.run, 0, 0)
    legal = record.record(env, team.system, team.params, key, 2, team.config.run).observation.action_mask
    packed = data["episodes"][0]["odds"][1]
    odds = np.frombuffer(base64.b64decode(packed), np.uint8).reshape(1, 2, 3)
    np.testing.assert_array_equal(odds == 255, ~legal[:1, 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "task", "odds"),
    [
        ("mat", "probe/recall", "probability"),
        ("mat", "probe/continuous", "spread"),
        ("mappo", "probe/recall", "probability"),
        ("qmix", "probe/recall", "q"),
        ("masac", "probe/continuous", "spread"),
        ("hasac", "probe/continuous", "spread"),
        ("sable", "probe/continuous", "spread"),
    ],
)
def test_every_system_can_be_watched(untrained, system, task, odds, tmp_path):
    team, env = untrained(task, system)
    given = {"episodes": 2, "seed": 0, "greedy": False, "formats": ["html", "gif"], "quiet": True}
    _, path = show.watch(team, env, tmp_path, **given)
    data = content_of(path.read_text())
    assert data["odds"] == odds and data["inTurn"] == (system in ("mat", "sable"))
    assert all((one["memory"] is not None) == (system == "sable") for one in data["episodes"])
    key = record.episode_key(team.config.run, 0, 0)
    recording = record.record(env, team.system, team.params, key, 2, team.config.run)
    found = explain(team, recording)
    if odds == "spread":  # most actions lie within a standard deviation, and all about where they were drawn
        low, middle, high = np.moveaxis(found.spread, -1, 0)
        assert (low < middle).all() and (middle < high).all() and middle.shape == recording.action.shape
    if odds == "q":
        best = np.where(recording.observation.action_mask, found.q_value, -np.inf).argmax(-1)
        length = recording.lengths[0]
        np.testing.assert_array_equal(best[:length], recording.action[:length])
    assert jax.tree.leaves(found.value) == [] or found.value.shape == recording.reward.shape
