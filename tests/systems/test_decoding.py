"""Deciding all at once samples what deciding in turn samples, for any team, policy and memory."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.config import SableConfig
from sable.nets.sable import Sable, initial_memory
from sable.nets.tokens import previous_tokens
from sable.ops.distributions import Categorical, TanhNormal
from sable.systems import autoregressive
from sable.types import EnvSpec

KEY = jax.random.key(3)
BATCH = 3


def make(num_agents: int, *, discrete: bool, memory: bool):
    """A network whose agents mind a lot what the others do, and what they are to decide about."""
    spec = EnvSpec(
        num_agents=num_agents,
        view_size=6,
        num_actions=5 if discrete else 0,
        action_size=0 if discrete else 2,
        time_limit=9,
    )
    net = Sable(SableConfig(embed_dim=16, num_heads=2, num_blocks=2, memory=memory), spec)
    params = autoregressive.init(net, KEY)
    leaves, tree = jax.tree.flatten(params)
    noise = jax.random.normal(KEY, (sum(leaf.size for leaf in leaves),))
    splits = np.cumsum([leaf.size for leaf in leaves])[:-1]
    strange = [
        leaf + 0.5 * part.reshape(leaf.shape)
        for leaf, part in zip(leaves, jnp.split(noise, splits), strict=True)
    ]
    params = jax.tree.unflatten(tree, strange)
    view = jax.random.normal(KEY, (BATCH, num_agents, 6))
    time = jnp.arange(BATCH)
    past = jax.tree.map(lambda x: x + 0.3, initial_memory(net.config, BATCH))
    encoded, _, past = net.apply(params, view, time, jnp.arange(num_agents), past, method=net.encode)
    opened = net.apply(params, past, BATCH, method=net.open)
    legal = jax.random.bernoulli(KEY, 0.8, (BATCH, num_agents, 5 if discrete else 1)).at[..., 0].set(True)
    kind, size = (Categorical, 5) if discrete else (TanhNormal, 2)
    drawn = kind.noise(jax.random.key(4), (BATCH, num_agents, size))
    return net, params, encoded, legal, net.apply(params, time, method=net.clock), drawn, opened


CASES = list(itertools.product([1, 5, 40], [True, False], [True, False]))
QUICK = [(40, True, True), (5, False, False)]


# 40 agents are two blocks of retention.
@pytest.mark.parametrize(
    ("num_agents", "discrete", "memory"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_deciding_at_once_gives_what_deciding_in_turn_gives(num_agents, discrete, memory):
    """Agent by agent, each told what the others did when all decided at once: it would have done the same,
    but for rounding. (Left to themselves the two may part at a near-tie and differ from there on.)"""
    net, params, encoded, legal, clock, drawn, opened = make(num_agents, discrete=discrete, memory=memory)

    @jax.jit
    def both(params):
        told, (raw, _, log_prob) = autoregressive.decode_at_once(
            net, params, encoded, legal, clock, drawn, opened
        )
        tokens = previous_tokens(net.spec, (raw if discrete else jnp.tanh(raw))[None])[0]

        def agent(memory, now):
            encoded, legal, token = now
            distribution, memory = net.apply(params, encoded, legal, clock, token, memory, method=net.decode)
            return memory, distribution

        in_turn = tuple(x.swapaxes(0, 1) for x in (encoded, legal, tokens))
        memory, distribution = jax.lax.scan(agent, opened, in_turn)
        distribution = jax.tree.map(lambda x: x.swapaxes(0, 1), distribution)
        return (told, raw, log_prob), (memory, distribution, distribution.log_prob(raw))

    with jax.default_matmul_precision("highest"):
        (told, raw, log_prob), (memory, distribution, alone) = both(params)
    for a, b in zip(jax.tree.leaves(memory), jax.tree.leaves(told), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max())
    np.testing.assert_allclose(log_prob, alone, atol=1e-4, rtol=1e-4)
    if discrete:
        wish = distribution.logits + drawn
        chosen = np.take_along_axis(np.asarray(wish), np.asarray(raw)[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(chosen, wish.max(-1), atol=1e-3)
        assert num_agents == 1 or len(np.unique(raw)) > 1
    else:
        np.testing.assert_allclose(raw, distribution.sample_with(drawn), atol=1e-3)


@pytest.mark.parametrize("discrete", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_agent_sees_a_later_one_to_the_last_bit(discrete):
    net, params, encoded, legal, clock, _, opened = make(40, discrete=discrete, memory=True)
    shape = (BATCH, 40) if discrete else (BATCH, 40, 2)
    action = jax.random.randint(KEY, shape, 0, 5) if discrete else jax.random.uniform(KEY, shape)

    @jax.jit
    def decode(tokens):
        return net.apply(params, encoded, legal, clock, tokens, opened, method=net.decode_all)

    def parameters(action):
        distribution, _ = decode(previous_tokens(net.spec, action[None])[0])
        return np.asarray(distribution.logits if discrete else distribution.mean)

    before = parameters(action)
    for agent in (0, 7, 31, 32, 38):
        after = parameters(action.at[:, agent].add(1 if discrete else 0.5) % 5)
        np.testing.assert_array_equal(before[:, : agent + 1], after[:, : agent + 1])
        assert (before[:, agent + 1 :] != after[:, agent + 1 :]).any()


def test_a_number_that_is_not_finite_ends_the_rounds():
    net, params, encoded, legal, clock, drawn, opened = make(5, discrete=False, memory=True)
    encoded = encoded.at[0, 2].set(jnp.nan)
    _, (raw, _, _) = autoregressive.decode_at_once(net, params, encoded, legal, clock, drawn, opened)
    assert np.isnan(raw[0, 2:]).all() and np.isfinite(raw[1:]).all()


def test_the_switch_switches(monkeypatch):
    net, params, *_ = make(5, discrete=True, memory=True)
    called = []
    real = autoregressive.decode_at_once
    monkeypatch.setattr(autoregressive, "decode_at_once", lambda *args: called.append(1) or real(*args))
    for decoding in ("scan", "parallel"):
        other = Sable(replace(net.config, decoding=decoding), net.spec)
        seen = jax.eval_shape(
            lambda net=other: autoregressive.act(
                net, params, _observation(net.spec), initial_memory(net.config, 2), jnp.arange(5), KEY
            )
        )
        assert seen.action.shape == (2, 5) and len(called) == (decoding == "parallel")


def _observation(spec):
    from sable.types import Observation

    return Observation(
        view=jnp.zeros((2, 5, spec.view_size)),
        legal=jnp.ones((2, 5, 5), bool),
        time=jnp.zeros(2, jnp.int32),
        state=(),
    )
