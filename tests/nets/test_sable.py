"""The Sable network is built from its layers."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.config.schema import SableConfig
from sable.nets.embeddings import ViewEmbedding, normalise_view
from sable.nets.layers import LayerNorm, RMSNorm
from sable.nets.sable import Sable, initial_memory
from sable.systems import autoregressive
from sable.types import EnvSpec

SPEC = EnvSpec(num_agents=4, view_size=66, num_actions=5, time_limit=500)
CONFIG = SableConfig(embed_dim=16, num_heads=2)
KEY = jax.random.key(0)


def encode(config, view, time=0, ids=(0, 1, 2, 3), spec=SPEC):
    net = Sable(config, spec)
    params = autoregressive.init(net, KEY)
    times, ids = jnp.full(view.shape[0], time), jnp.array(ids)
    memory = initial_memory(config, view.shape[0])
    return net.apply(params, view, times, ids, memory, method=Sable.encode)


@pytest.fixture(scope="module")
def view():
    return jax.random.normal(KEY, (2, 4, 66))


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_the_network_has_as_many_parameters_as_its_layers_say(num_blocks):
    """66 features and 2 constants, 5 actions, 4 agents, width 64, one head; no block shares anything."""
    E, F, A, N = 64, 66 + 2, 5, 4
    embedding = F + F * E + N * E
    encoder = 3 * E + (5 * E * E + 2 * E) + 3 * E * E
    decoder = 3 * E + 2 * (5 * E * E + 2 * E) + 3 * E * E
    actions = (A + 1) * E + E
    heads = (E * E + E) + E + (E + 1) + (E * E + E) + E + (A * E + A)
    net = Sable(SableConfig(num_blocks=num_blocks), SPEC)
    params = jax.eval_shape(partial(autoregressive.init, net), KEY)
    expected = embedding + num_blocks * (encoder + decoder) + actions + heads
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm()], ids=["rms", "layer"])
def test_views_are_normed_and_then_projected(view, norm):
    """Though the norm's scale and bias are put into the weights."""
    embedding, ids = ViewEmbedding(16, SPEC.view_size, norm, 0, bias=True), jnp.arange(SPEC.num_agents)
    seen = normalise_view(view, type(norm))
    assert seen.shape[-1] == 72, "filled up to a multiple of eight"
    params = embedding.init(KEY, seen, ids)
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(KEY, x.shape), params)
    own = params["params"]
    whole = jnp.concatenate(
        [view, jnp.ones((*view.shape[:-1], 1)), -jnp.ones((*view.shape[:-1], 1))], axis=-1
    )
    x = norm.apply({"params": own["norm"]}, whole) @ own["projection"]["kernel"]
    expected = nn.gelu(x + jnp.broadcast_to(own["projection"]["bias"], x.shape))
    np.testing.assert_allclose(embedding.apply(params, seen, ids), expected, atol=1e-5)


def test_the_scale_of_a_view_survives_its_norm(view):
    embedding = ViewEmbedding(16, SPEC.view_size, RMSNorm(), SPEC.num_agents)
    ids, small, large = (
        jnp.arange(SPEC.num_agents),
        normalise_view(view, RMSNorm),
        normalise_view(2 * view, RMSNorm),
    )
    params = embedding.init(KEY, small, ids)
    assert jnp.abs(embedding.apply(params, small, ids) - embedding.apply(params, large, ids)).max() > 1e-2


def test_agents_with_equal_views_differ_by_their_embedding_alone(view):
    same = jnp.broadcast_to(view[:, :1], view.shape)
    encoded, _, _ = encode(CONFIG, same)
    assert jnp.abs(encoded[:, 0] - encoded[:, 1]).max() > 1e-3
    for config, spec in (
        (replace(CONFIG, agent_id=False), SPEC),
        (CONFIG, replace(SPEC, views_carry_id=True)),
    ):
        encoded, _, _ = encode(config, same, spec=spec)
        np.testing.assert_allclose(encoded[:, 0], encoded[:, 1], atol=1e-5)


def test_the_encoder_does_not_care_in_which_order_agents_come(view):
    order = np.array([2, 0, 3, 1])
    (encoded, values, _), (shuffled, shuffled_values, _) = (
        encode(CONFIG, view),
        encode(CONFIG, view[:, order], ids=order),
    )
    np.testing.assert_allclose(shuffled, encoded[:, order], atol=1e-5)
    np.testing.assert_allclose(shuffled_values, values[:, order], atol=1e-5)


def test_the_step_count_is_seen_with_memory_and_never_without(view):
    now, later = (encode(CONFIG, view, time)[0] for time in (0, 9))
    assert jnp.abs(now - later).max() > 1e-3
    now, later = (encode(replace(CONFIG, memory=False), view, time)[0] for time in (0, 9))
    np.testing.assert_array_equal(now, later)


def test_positions_count_timesteps_or_tokens():
    """Two timesteps of three agents, by the formula: tokens are numbered one after another."""
    spec, time = replace(SPEC, num_agents=3), jnp.array([[5], [6]])
    for positions, numbers in (("timestep", [[5], [6]]), ("token", [[15, 16, 17], [18, 19, 20]])):
        net = Sable(replace(CONFIG, positions=positions), spec)
        params = autoregressive.init(net, KEY)
        found = net.apply(params, time, method=net.encode_time)
        angle = np.array(numbers)[..., None] / 10_000 ** (np.arange(0, 16, 2) / 16)
        expected = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(*angle.shape[:2], 16)
        np.testing.assert_allclose(found[:, 0], expected, atol=1e-5)


def test_one_agent_has_the_same_position_either_way():
    """A team of one has as many tokens as timesteps."""
    nets = [Sable(replace(CONFIG, positions=p), replace(SPEC, num_agents=1)) for p in ("timestep", "token")]
    params, time = autoregressive.init(nets[0], KEY), jnp.arange(9)
    one, other = (net.apply(params, time, method=net.encode_time) for net in nets)
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("agent_chunk", [1, 2, 3])
def test_a_chunk_of_agents_sees_no_later_chunk(view, agent_chunk):
    config = replace(CONFIG, memory=False, agent_chunk=agent_chunk)
    encoded, values, memory = encode(config, view)
    assert memory == ()
    for agent in range(4):
        other, other_values, _ = encode(config, view.at[:, agent].add(1.0))
        seen = np.abs(other - encoded).max((0, 2)) > 1e-6
        assert seen.tolist() == [i // agent_chunk >= agent // agent_chunk for i in range(4)]
        assert (np.abs(other_values - values).max(0) > 1e-7).tolist() == seen.tolist()


def test_one_chunk_of_all_agents_gives_nothing_up(view):
    config = replace(CONFIG, memory=False)
    for size in (4, 32):
        found = encode(replace(config, agent_chunk=size), view)
        np.testing.assert_array_equal(found[0], encode(config, view)[0])


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 3, 20])
def test_the_chunk_size_changes_nothing_that_is_learnt(chunk_size):
    views, first = jax.random.normal(KEY, (8, 2, 4, 66)), jax.random.bernoulli(KEY, 0.2, (8, 2))
    actions, legal = jnp.ones((8, 2, 4), int), jnp.ones((8, 2, 4, 5), bool)

    def loss(params, config):
        memory, time = initial_memory(config, 2), jnp.zeros((8, 2), int)
        net = Sable(config, SPEC)
        dist, values = net.apply(
            params,
            net.normalise_view(views),
            legal,
            time,
            actions,
            jnp.arange(4),
            memory,
            first,
            method=net.evaluate_actions,
        )
        return (dist.log_prob(actions) * values).sum()

    params = autoregressive.init(Sable(CONFIG, SPEC), KEY)
    whole, parts = (jax.grad(loss)(params, replace(CONFIG, chunk_size=size)) for size in (0, chunk_size))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-3), whole, parts)


def test_an_agent_is_told_the_actions_of_those_before_it_and_of_no_other(view):
    net = Sable(CONFIG, SPEC)
    params = autoregressive.init(net, KEY)
    steps = jnp.stack([view, view])  # two timesteps

    def logits(action):
        distribution, _ = net.apply(
            params, net.normalise_view(steps), jnp.ones((2, 2, 4, 5), bool), jnp.zeros((2, 2), jnp.int32),
            action, jnp.arange(4), initial_memory(CONFIG, 2), jnp.zeros((2, 2), bool),
            method=Sable.evaluate_actions,
        )  # fmt: skip
        return distribution.logits

    base = jnp.zeros((2, 2, 4), jnp.int32)
    changed = jnp.abs(logits(base.at[0, :, 1].set(3)) - logits(base)).max(axis=(1, 3)) > 1e-7
    assert changed[0].tolist() == [False, False, True, True]
    # The next timestep opens with the start token but remembers.
    assert changed[1].all()
    changed = jnp.abs(logits(base.at[:, :, 3].set(3)) - logits(base)).max(axis=(1, 3)) > 1e-7
    assert not changed.any(), "the last agent's action is told to nobody"


def test_illegal_actions_have_no_chance_and_continuous_ones_a_floor_of_spread(view):
    net = Sable(CONFIG, replace(SPEC, num_actions=0, action_size=2, action_low=-2.0, action_high=3.0))
    params = autoregressive.init(net, KEY)
    encoded = jnp.zeros((2, 16))
    memory = net.apply(params, initial_memory(CONFIG, 2), 2, method=Sable.decay_memory)
    params["params"]["policy_head"]["distribution"]["raw_std"] = jnp.full(2, -50.0)
    distribution, _ = net.apply(
        params,
        encoded,
        jnp.ones((2, 1), bool),
        jnp.zeros((2, 16)),
        jnp.zeros((2, 2)),
        memory,
        method=Sable.decode_agent,
    )
    np.testing.assert_allclose(distribution.std, 1e-3, rtol=1e-5)
    assert float(distribution.scale(jnp.full(2, 50.0)).max()) == 3.0
