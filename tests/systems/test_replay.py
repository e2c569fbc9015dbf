"""Replay hands out contiguous stretches of the newest time steps, and learning waits until it may begin."""

import typing as tp
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.config.schema import ReplayConfig
from sable.systems import replay as replays
from sable.types import struct

NUM_ENVS, NUM_SEEDS, BATCH = 3, 2, 256


def experience(start: int, length: int):
    """[T, B] items that say which seed's, which time step and which environment they are."""
    time, env = np.mgrid[start : start + length, :NUM_ENVS]
    seed = np.arange(NUM_SEEDS).reshape(-1, 1, 1)
    items = {"seed": seed + 0 * time, "time": time + 0 * seed, "env": env + 0 * seed}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), items)


def filled(replay: replays.Replay, length: int, num_rollouts: int):
    """A store per seed, side by side, after that many rollouts."""
    item = jax.tree.map(lambda x: jnp.zeros((), jnp.int32), experience(0, 1))
    store = jax.vmap(lambda seed: replay.init(item))(jnp.arange(NUM_SEEDS))
    add = jax.jit(jax.vmap(replay.add))
    for rollout in range(num_rollouts):
        store = add(store, experience(rollout * length, length))
    return store


# Rollouts of 7 into 50: the store wraps in the middle of one, and again at another place.
@pytest.mark.parametrize("num_rollouts", [3, 8, 23])
@pytest.mark.parametrize("length", [1, 20])
def test_sequences_are_contiguous_and_of_what_is_newest(length, num_rollouts):
    replay = replays.make(NUM_ENVS, 50, length, BATCH)
    store = filled(replay, 7, num_rollouts)
    keys = jax.random.split(jax.random.key(0), (NUM_SEEDS, 8))
    drawn = jax.jit(jax.vmap(jax.vmap(replay.sample, (None, 0))))(store, keys)
    drawn = jax.tree.map(np.asarray, drawn)  # [seeds, draws, length, batch]
    assert drawn["time"].shape == (NUM_SEEDS, 8, length, BATCH)
    assert (np.diff(drawn["time"], axis=2) == 1).all()
    assert (np.diff(drawn["env"], axis=2) == 0).all()
    assert (drawn["seed"] == np.arange(NUM_SEEDS).reshape(-1, 1, 1, 1)).all()

    newest, held = 7 * num_rollouts, min(50, 7 * num_rollouts)
    np.testing.assert_array_equal(jax.vmap(replay.size)(store), held)
    starts = np.arange(newest - held, newest - length + 1)
    for seed in range(NUM_SEEDS):
        counts = np.unique(drawn["time"][seed, :, 0], return_counts=True)
        np.testing.assert_array_equal(counts[0], starts)  # the oldest and the newest are drawn too
        mean = 8 * BATCH / starts.size
        assert (np.abs(counts[1] - mean) < 6 * mean**0.5).all()
        assert set(drawn["env"][seed].ravel()) == set(range(NUM_ENVS))


@struct
class Counter:
    replay: tp.Any
    seen: tp.Any  # sum of the times drawn
    num_updates: tp.Any
    env_steps: tp.Any


@struct
class Played:
    """As much of a rollout as `keep` below takes."""

    steps: tp.Any


def test_learning_waits_until_it_is_ready_but_stores_from_the_start():
    replay = replays.make(NUM_ENVS, 50, 1, 4)
    config = ReplayConfig(num_envs=NUM_ENVS, num_updates_per_rollout=5)

    def update(learner, batch, key):
        assert batch["time"].shape == (1, 4)
        seen = learner.seen + batch["time"].sum()
        updated = replace(learner, seen=seen, num_updates=learner.num_updates + 1)
        return updated, {"met": jnp.ones(())}

    learn = jax.jit(
        replays.make_learn(
            replay,
            config,
            to_items=lambda rollout: rollout.steps,
            update=update,
            ready=lambda learner: replay.size(learner.replay) >= 14,
        )
    )
    item = {"time": jnp.zeros((), jnp.int32)}
    zero = jnp.zeros((), jnp.int32)
    learner = Counter(replay=replay.init(item), seen=zero, num_updates=zero, env_steps=zero)
    found = []
    for rollout in range(3):
        steps = {"time": experience(7 * rollout, 7)["time"][0] + 1}
        learner, metrics = learn(learner, Played(steps=steps), jax.random.key(rollout))
        assert learner.env_steps == (rollout + 1) * NUM_ENVS * config.rollout_length
        found.append((int(learner.num_updates), float(metrics["met"]), bool(learner.seen > 0)))
    assert found == [(0, 0.0, False), (5, 1.0, True), (10, 1.0, True)]
    np.testing.assert_array_equal(learner.replay.experience["time"][:, :21], [np.arange(1, 22)] * NUM_ENVS)
