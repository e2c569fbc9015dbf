"""Learning from stored experience: sequences kept on the device, sampled with replacement (flashbax)."""

import typing as tp
from dataclasses import replace

import flashbax
import jax
import jax.numpy as jnp
from jax import Array

from sable.config.schema import ReplayConfig
from sable.ops import trees as tree
from sable.types import Metrics, PyTree, Rollout


class Replay(tp.NamedTuple):
    """Stored transitions of `num_envs` environments, as pure functions."""

    init: tp.Callable[[PyTree], PyTree]
    """one item, without leading axes -> an empty store"""
    add: tp.Callable[[PyTree, PyTree], PyTree]
    """(store, items [T, B]) -> the store with them, the oldest forgotten where it is full"""
    sample: tp.Callable[[PyTree, Array], PyTree]
    """(store, key) -> `batch_size` sequences [length, batch_size] of contiguous time steps, uniformly"""
    size: tp.Callable[[PyTree], Array]
    """store -> time steps it holds of each environment"""


def make(num_envs: int, max_length: int, length: int, batch_size: int) -> Replay:
    """Return replay of `length` contiguous time steps out of the newest `max_length` of each environment."""
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=num_envs,
        sample_batch_size=batch_size,
        sample_sequence_length=length,
        period=1,
        min_length_time_axis=length,
        max_length_time_axis=max_length,
    )

    def add(store: tp.Any, items: PyTree) -> PyTree:
        return buffer.add(store, jax.tree.map(lambda x: x.swapaxes(0, 1), items))

    def sample(store: tp.Any, key: Array) -> PyTree:
        with jax.numpy_rank_promotion("allow"):  # not ours to hold to it
            sampled = buffer.sample(store, key).experience
        return jax.tree.map(lambda x: x.swapaxes(0, 1), sampled)

    def size(store: tp.Any) -> Array:
        return jnp.where(store.is_full, max_length, store.current_index)

    return Replay(init=buffer.init, add=add, sample=sample, size=size)


def make_learn(
    replay: Replay,
    config: ReplayConfig,
    to_items: tp.Callable[[Rollout], PyTree],
    update: tp.Callable[[tp.Any, PyTree, Array], tuple[tp.Any, Metrics]],
    ready: tp.Callable[[tp.Any], Array],
) -> tp.Callable[[tp.Any, Rollout, Array], tuple[tp.Any, Metrics]]:
    """Return `System.learn`: store what `to_items` takes of a rollout, then sample and `update` several
    times.

    It counts the environment steps too. Until the learner is `ready`, updates are computed and thrown away:
    with seeds side by side a branch not taken costs as much.
    """

    def learn(learner: tp.Any, rollout: Rollout, key: Array) -> tuple[tp.Any, Metrics]:
        env_steps = learner.env_steps + config.num_envs * config.rollout_length
        learner = replace(learner, replay=replay.add(learner.replay, to_items(rollout)), env_steps=env_steps)
        store, is_ready = learner.replay, ready(learner)
        sample_keys, update_keys = jax.random.split(key, (2, config.num_updates_per_rollout))
        # Drawn all at once: a gradient step takes little longer than drawing its batch would.
        batches = jax.vmap(replay.sample, (None, 0))(store, sample_keys)

        def update_if_ready(learner: tp.Any, inputs: tuple[PyTree, Array]) -> tuple[tp.Any, Metrics]:
            updated, metrics = update(learner, *inputs)
            return tree.select(is_ready, (updated, metrics), (learner, jax.tree.map(jnp.zeros_like, metrics)))

        learner, metrics = jax.lax.scan(update_if_ready, replace(learner, replay=()), (batches, update_keys))
        return replace(learner, replay=store), jax.tree.map(jnp.mean, metrics)

    return learn
