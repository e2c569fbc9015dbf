"""The mixer's joint value rises with every agent's own and depends on the state; the agents' network acts as
it learns."""

import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.config.schema import QMIXConfig
from sable.nets.qmix import Mixer, agent_q
from sable.types import EnvSpec

KEY = jax.random.key(0)
NUM_AGENTS, STATE_SIZE = 3, 5
MIXER = Mixer(NUM_AGENTS, 4)
SPEC = EnvSpec(num_agents=NUM_AGENTS, view_size=4, num_actions=5, time_limit=9)
CONFIG = QMIXConfig(q_layers=(8, 6), recurrent_size=7)


def with_slope(mixer, params, q, state):
    """(Q_tot, dQ_tot/dQ_i)."""

    def value(q) -> tp.Any:
        return mixer.apply(params, q, state)

    return value(q), jax.grad(lambda q: value(q).sum())(q)


@jax.jit
def mixed(key, q, state):
    """The same, of a mixer whose parameters are random, far from those it starts with."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(MIXER.init, key, q, state))
    keys = jax.random.split(key, len(leaves))
    noise = [0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    params = jax.tree.unflatten(structure, noise)
    return with_slope(MIXER, params, q, state)


def drawn(seed, num_samples=100):
    rng = np.random.default_rng(seed)
    q, state = rng.normal(size=(num_samples, NUM_AGENTS)), rng.normal(size=(num_samples, STATE_SIZE))
    return q.astype(np.float32), state.astype(np.float32)


def test_the_joint_value_never_falls_where_an_agents_own_rises():
    slopes = np.stack([mixed(jax.random.key(seed), *drawn(seed))[1] for seed in range(20)])
    assert (slopes >= 0).all()
    assert (slopes > 0).mean() > 0.95


def test_the_joint_value_depends_on_the_state_and_bends():
    q, state = drawn(0)
    ones = np.ones_like(q)
    above, at, below = (np.asarray(mixed(KEY, scale * ones, state)[0]) for scale in (1, 0, -1))
    assert above.shape == (100,)
    assert above.std() > 0.1
    assert np.abs(above + below - 2 * at).max() > 0.1


def test_time_steps_and_environments_are_mixed_apart():
    q, state = drawn(0)
    rows, _ = mixed(KEY, q, state)
    grid, _ = mixed(KEY, q.reshape(20, 5, -1), state.reshape(20, 5, -1))
    np.testing.assert_allclose(grid.reshape(-1), rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [8, 64])
def test_at_first_the_joint_value_is_about_the_sum_even_in_a_state_that_says_nothing(width):
    """The norm of a constant state is zero, which must not silence the mixer."""
    mixer = Mixer(NUM_AGENTS, width)
    state = jnp.stack([jnp.ones(STATE_SIZE), jnp.arange(STATE_SIZE, dtype=jnp.float32)])

    @jax.jit
    def start(key, q):
        params = mixer.init(key, q, state)
        return with_slope(mixer, params, q, state)

    value, slope = start(KEY, jnp.zeros((2, NUM_AGENTS)))
    assert (np.abs(value) < 0.1).all()
    assert (slope > 0.2).all() and (slope < 3).all()


@pytest.mark.parametrize("agent_id", [True, False])
def test_agents_who_see_the_same_differ_only_by_their_identity(agent_id):
    net = agent_q(QMIXConfig(q_layers=(8, 6), recurrent_size=7, agent_id=agent_id), SPEC)
    view, first = np.ones((2, 1, NUM_AGENTS, 4), np.float32), np.zeros((2, 1), bool)
    carry = np.zeros((1, NUM_AGENTS, 7), np.float32)
    q = np.asarray(jax.jit(net.init_with_output)(KEY, view, carry, first)[0][0])
    assert q.shape == (2, 1, NUM_AGENTS, 5)
    assert (np.abs(q[..., :1, :] - q[..., 1:, :]).max() > 1e-5) == agent_id


def test_acting_step_by_step_equals_the_sequence_across_episodes():
    net, rng = agent_q(CONFIG, SPEC), np.random.default_rng(0)
    view = rng.normal(size=(6, 2, NUM_AGENTS, 4)).astype(np.float32)
    first = np.zeros((6, 2), bool)
    first[0] = first[3, 1] = True
    carry = np.zeros((2, NUM_AGENTS, 7), np.float32)
    (expected, last), params = jax.jit(net.init_with_output)(KEY, view, carry, first)
    step = jax.jit(net.apply)
    for t in range(6):
        carry = np.where(first[t][:, None, None], np.float32(0), carry)
        q, carry = step(params, view[t][None], carry, np.zeros((1, 2), bool))
        np.testing.assert_allclose(q[0], expected[t], atol=1e-6)
    np.testing.assert_allclose(carry, last, atol=1e-6)
