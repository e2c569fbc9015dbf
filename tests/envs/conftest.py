"""Compiled environments, shared by all tests of a session: compiling is nearly all that these tests cost."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable import envs
from sable.envs import parse
from sable.envs.wrappers import _strip_weak_types

NUM_ENVS = 2


def _batched(function):
    """jit and vmap, given no weak types: each mixture of weak and strong would compile anew."""
    compiled = jax.jit(jax.vmap(function))
    return lambda *arguments: compiled(*_strip_weak_types(jax.tree.map(jnp.asarray, arguments)))


@functools.cache
def _compiled(name: str) -> SimpleNamespace:
    env = envs.make(name)

    def seen(function):  # time steps as numpy: every operation on a jax array would compile for its shape
        batched = _batched(function)

        def call(*arguments):
            state, timestep = batched(*arguments)
            return state, jax.device_get(timestep)

        return call

    return SimpleNamespace(env=env, task=parse(name), reset=seen(env.reset), step=seen(env.step))


@pytest.fixture(scope="session")
def batched():
    """function -> its compiled form over a batch."""
    return _batched


@pytest.fixture(scope="session")
def compiled():
    """name -> the task, its environment, and reset and step over a batch of two."""
    return _compiled


@pytest.fixture(scope="session")
def keys():
    """seed -> keys for a batch."""
    return lambda seed=0: jax.random.split(jax.random.key(seed), NUM_ENVS)


@pytest.fixture(scope="session")
def act():
    """(spec, observation, time, policy, generator) -> actions of the batch, random or scripted."""

    def choose(spec, observation, time, policy, rng):
        shape = observation.view.shape[:-1]
        if not spec.discrete:
            if policy == "random":
                return rng.uniform(-1, 1, (*shape, spec.action_size)).astype(np.float32)
            return np.full((*shape, spec.action_size), np.sin(time), np.float32)
        if policy == "random":
            noise = np.where(observation.action_mask, rng.random(observation.action_mask.shape), -1)
            return noise.argmax(-1).astype(np.int32)
        action = (np.arange(shape[-1]) + time) % spec.num_actions  # whether legal or not
        return np.broadcast_to(action, shape).astype(np.int32)

    return choose
