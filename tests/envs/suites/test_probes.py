"""The probes' known returns: best play reaches them, random play its own, and no memoryless one recalls."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.envs.suites.probes import PROBES


def play(probe, *policies, num_episodes=2000):
    """Mean return over episodes of each `policy(secret, observation, key) -> action`."""

    def episode(policy, key):
        reset_key, *step_keys = jax.random.split(key, probe.spec.time_limit + 1)

        def step(carry, key):
            state, observation = carry
            state, timestep = probe.step(state, policy(state.secret, observation, key))
            return (state, timestep.observation), (timestep.reward.mean(), timestep.discount, timestep.first)

        state, timestep = probe.reset(reset_key)
        _, (reward, discount, first) = jax.lax.scan(step, (state, timestep.observation), jnp.stack(step_keys))
        return reward.sum(), discount, first

    @jax.jit
    def all_episodes(keys):
        return [jax.vmap(partial(episode, policy))(keys) for policy in policies]

    means = []
    for returns, discount, first in all_episodes(jax.random.split(jax.random.key(0), num_episodes)):
        assert (discount[:, -1] == 0).all() and first[:, -1].all() and not first[:, :-1].any()
        means.append(float(returns.mean()))
    return means


def random_policy(probe):
    def act(secret, observation, key):
        if not probe.spec.discrete:
            return jax.random.uniform(key, (2, probe.spec.action_size), minval=-1, maxval=1)
        return jax.random.categorical(key, jnp.where(observation.action_mask, 0.0, -jnp.inf))

    return act


BEST = {
    "bandit": lambda secret, seen, key: jnp.ones(2, jnp.int32),
    "sparse": lambda secret, seen, key: jnp.ones(2, jnp.int32),
    "observation": lambda secret, seen, key: seen.view.argmax(-1),
    "delayed": lambda secret, seen, key: jnp.full(2, seen.step_count == 0, jnp.int32),
    "recall": lambda cue, seen, key: cue,
    "coordination": lambda secret, seen, key: jnp.arange(2),
    "masked": lambda secret, seen, key: jnp.where(seen.action_mask, jnp.arange(3), -1).argmax(-1),
    "continuous": lambda secret, seen, key: seen.view,
}


@pytest.mark.parametrize("name", PROBES)
def test_the_best_policy_returns_the_optimum_and_random_play_what_it_is_said_to(name):
    probe = PROBES[name]
    best, at_random = play(probe, BEST[name], random_policy(probe))
    assert best == pytest.approx(probe.optimal_return, abs=1e-5)
    assert at_random == pytest.approx(probe.random_return, abs=0.06)


def test_no_memoryless_policy_beats_half_on_recall():
    """All of them: what an agent answers at the last step can hang on nothing it then sees."""
    probe = PROBES["recall"]
    policies = [
        lambda secret, seen, key, answers=answers: jnp.asarray(answers)
        for answers in itertools.product((0, 1), repeat=2)
    ]
    assert play(probe, *policies) == pytest.approx([probe.memoryless_return] * 4, abs=0.05)
    state, timestep = probe.reset(jax.random.key(0))
    other = type(state)(time=state.time, secret=1 - state.secret, actions=state.actions)
    for _ in range(3):
        state, timestep = probe.step(state, jnp.zeros(2, jnp.int32))
        other, changed = probe.step(other, jnp.zeros(2, jnp.int32))
        np.testing.assert_array_equal(timestep.observation.view, changed.observation.view)


def test_the_illegal_action_of_masked_pays_more_than_the_optimum():
    probe = PROBES["masked"]
    state, timestep = probe.reset(jax.random.key(0))
    illegal = (~timestep.observation.action_mask).argmax(-1)
    assert (probe.step(state, illegal)[1].reward > probe.optimal_return).all()
