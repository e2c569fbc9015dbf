"""The MAT network is built from its layers, and acts as it is evaluated."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.config.schema import MATConfig
from sable.kernels import block
from sable.nets.embeddings import ActionEmbedding
from sable.nets.layers import Head, LayerNorm, RMSNorm
from sable.nets.mat import MAT, Attention
from sable.systems import autoregressive, mat
from sable.types import EnvSpec, Observation, Transition

SPEC = EnvSpec(num_agents=4, view_size=6, num_actions=5, time_limit=9)
CONTINUOUS = replace(SPEC, num_actions=0, action_size=2)
CONFIG = MATConfig(embed_dim=8, num_heads=2, num_blocks=2)
KEY = jax.random.key(0)
T, B, N = 3, 2, 4
CASES = {
    "discrete": (SPEC, CONFIG),
    "continuous": (CONTINUOUS, CONFIG),
    "switched": (SPEC, replace(CONFIG, rms_norm=True, swiglu=True)),
}


def start(net):
    return jax.jit(partial(autoregressive.init, net))(KEY)


def grown(params, key=KEY):
    """Parameters of some size: attention starts so near to nothing that its mistakes would not show."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    leaves = [leaf + 0.5 * jax.random.normal(k, leaf.shape) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def names(params):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(params)
    }


@pytest.fixture(scope="module")
def observation():
    legal = jax.random.bernoulli(KEY, 0.7, (T, B, N, 5)).at[..., 0].set(True)
    view = jax.random.normal(KEY, (T, B, N, 6))
    return Observation(view=view, action_mask=legal, step_count=jnp.zeros((T, B), jnp.int32), state=())


@pytest.fixture(scope="module")
def scores(observation):
    """A jitted function of the views and the actions: (logits, values), by a network of some size."""
    net = MAT(CONFIG, SPEC)
    params = grown(start(net))

    @jax.jit
    def score(view, action):
        first = jnp.zeros((T, B), bool)
        legal = jnp.ones((T, B, N, 5), bool)
        distribution, values = net.apply(
            params, net.normalise_view(view), legal, observation.step_count, action, jnp.arange(N), (), first,
            method=net.evaluate_actions,
        )  # fmt: skip
        return distribution.logits, values

    return score


@pytest.mark.parametrize("case", CASES)
def test_acting_with_a_cache_equals_evaluating_in_parallel(case, observation):
    spec, config = CASES[case]
    policy = mat.make_policy(spec, config)
    params, order = grown(start(MAT(config, spec))), jnp.array([2, 0, 3, 1])
    if not spec.discrete:
        observation = replace(observation, action_mask=jnp.ones((T, B, N, 1), bool))
    keys = jax.random.split(KEY, T)

    def act(now):
        return policy.act(params, now[0], policy.initial_memory(B), order, now[1])

    decision = jax.jit(lambda: jax.lax.map(act, (observation, keys)))()
    steps = Transition(
        observation=observation, action=decision.action, extras=decision.extras, next_extras=(),
        reward=jnp.zeros((T, B, N)), discount=jnp.ones((T, B)), first=jnp.zeros((T, B), bool),
    )  # fmt: skip
    evaluate = jax.jit(
        lambda params, steps, *given: policy.evaluate_actions(params, policy.prepare(steps), *given)
    )
    found = evaluate(params, steps, (), order, KEY)
    np.testing.assert_allclose(found.log_prob, decision.extras.log_prob, atol=1e-5)
    np.testing.assert_allclose(found.value, decision.extras.value, atol=1e-5)
    turned = evaluate(params, steps, (), order[::-1], KEY)
    assert jnp.abs(turned.log_prob - decision.extras.log_prob).max() > 1e-2, "the order matters"
    assert decision.memory == ()


@pytest.mark.parametrize("agent", range(N))
def test_an_action_is_told_to_later_agents_of_its_timestep_and_to_no_other_to_the_last_bit(
    agent, scores, observation
):
    action = jnp.zeros((T, B, N), jnp.int32)
    before, _ = scores(observation.view, action)
    after, _ = scores(observation.view, action.at[1, :, agent].set(3))
    changed = (before != after).any(axis=(1, 3))
    assert changed[1].tolist() == [other > agent for other in range(N)]
    assert not changed[0].any() and not changed[2].any()


@pytest.mark.parametrize("agent", [0, N - 1])
def test_every_agent_sees_the_views_of_all_in_its_timestep(agent, scores, observation):
    action = jnp.zeros((T, B, N), jnp.int32)
    _, before = scores(observation.view, action)
    _, after = scores(observation.view.at[1, 0, agent].multiply(-1), action)
    changed = np.abs(before - after) > 1e-4
    assert changed[1, 0].all()
    np.testing.assert_array_equal(np.argwhere(changed.any(axis=-1)), [[1, 0]])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_attention_is_a_softmax_of_scaled_products_in_every_head(causal, cross):
    E, H = 8, 2
    key, other = jax.random.normal(KEY, (2, N, E))
    query = other if cross else key
    layer = Attention(E, H, causal, cross)
    params = grown(layer.init(KEY, query, key))

    weights = params["params"]
    parts = jnp.split(key @ weights["projections"]["kernel"], 2 if cross else 3, axis=-1)
    q, k, v = (query @ weights["query"]["kernel"], *parts) if cross else parts
    q, v = q + weights["query_bias"][None], v + weights["value_bias"][None]
    rows = []
    for i in range(N):
        seen = slice(i + 1 if causal else N)
        for head in np.split(np.arange(E), H):
            rows.append(jax.nn.softmax(k[seen, head] @ q[i, head] / (E / H) ** 0.5) @ v[seen, head])
    expected = jnp.concatenate(rows).reshape(N, E) @ weights["output"]["kernel"]
    expected = expected + weights["output"]["bias"][None]
    np.testing.assert_allclose(jnp.asarray(layer.apply(params, query, key)), expected, atol=1e-4)


def test_projections_start_as_orthogonal_matrices_of_gain_a_hundredth():
    x = jnp.zeros((1, 1, 8))
    params = Attention(8, 2, causal=False).init(KEY, x, x)["params"]
    parts = jnp.split(jnp.asarray(params["projections"]["kernel"]), 3, axis=1)
    for part in parts:
        np.testing.assert_allclose(part.T @ part, 1e-4 * np.eye(8), atol=1e-8)
    assert jnp.abs(parts[0] - parts[1]).max() > 1e-3


def test_each_switch_changes_the_layers_it_names_and_no_other():
    plain, rms, swiglu = (
        names(jax.eval_shape(partial(autoregressive.init, MAT(replace(CONFIG, **switch), SPEC)), KEY))
        for switch in ({}, {"rms_norm": True}, {"swiglu": True})
    )
    norms = {name for name in plain if name.split("/")[-2].split("_")[-1] in ("norm", "0", "1", "2")}
    assert plain - rms == {name for name in norms if name.endswith("bias")} and not rms - plain
    assert {"value_head/norm", "policy_head/head/norm", "embed_action/norm"} <= {
        name.removeprefix("params/").removesuffix("/bias") for name in plain - rms
    }
    assert all("/feed_forward/" in name for name in plain ^ swiglu)
    layers = {name.rpartition("feed_forward/")[2] for name in swiglu - plain}
    assert layers == {"gate_and_input/kernel"}


ENDS = ("value_head", "policy_head", "embed_action")


def test_the_number_of_the_meaning_chooses_the_norm_of_action_embedding_and_heads():
    def shapes(**fields):
        net = MAT(replace(CONFIG, **fields), SPEC)
        return names(jax.eval_shape(partial(autoregressive.init, net), KEY))

    now, old = shapes(), shapes(meaning=2)
    assert now - old == {name for name in now if name.split("/")[1] in ENDS and name.endswith("norm/bias")}
    assert len(now - old) == 3 and not old - now
    assert shapes(rms_norm=True) == shapes(rms_norm=True, meaning=2)


def test_heads_and_action_embedding_are_normalised_as_the_norm_says(monkeypatch):
    """Each by hand, from the statistics that its norm takes; a LayerNorm never by the kernel of the other."""
    x, embed = jax.random.normal(KEY, (5, 8)), jnp.arange(6)
    for norm in (LayerNorm, RMSNorm):
        monkeypatch.setattr(block, "use_kernel", lambda width, norm=norm: norm is LayerNorm)
        head, embedding = Head(8, 3, norm), ActionEmbedding(8, SPEC, norm)
        params, of_actions = grown(head.init(KEY, x)), grown(embedding.init(KEY, embed))

        def by_hand(x, own, norm=norm):
            x = np.asarray(x, np.float64)
            x = x - x.mean(-1, keepdims=True) if norm is LayerNorm else x
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
            return x * own["scale"] + own.get("bias", 0.0)

        own = jax.tree.map(np.asarray, params["params"])
        hidden = nn.gelu(np.asarray(x) @ own["hidden"]["kernel"] + own["hidden"]["bias"])
        expected = by_hand(hidden, own["norm"]) @ own["output"]["kernel"] + own["output"]["bias"]
        np.testing.assert_allclose(np.asarray(head.apply(params, x)), expected, atol=1e-4)
        own = jax.tree.map(np.asarray, of_actions["params"])
        expected = by_hand(nn.gelu(own["projection"]["kernel"]), own["norm"])
        np.testing.assert_allclose(np.asarray(embedding.apply(of_actions, embed)), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_layer_starts_dead(case, observation):
    spec, config = CASES[case]
    net = MAT(config, spec)
    params = start(net)
    first, legal = jnp.zeros((T, B), bool), jnp.ones((T, B, N, 5 if spec.discrete else 1), bool)
    action = (
        jax.random.randint(KEY, (T, B, N), 0, 5)
        if spec.discrete
        else jax.random.uniform(KEY, (T, B, N, 2), minval=-1)
    )

    @jax.jit
    @jax.grad
    def gradient(params):
        distribution, values = net.apply(
            params, net.normalise_view(observation.view), legal, observation.step_count, action,
            jnp.arange(N), (), first,
            method=net.evaluate_actions,
        )  # fmt: skip
        return sum(jnp.sin(leaf + 1).sum() for leaf in jax.tree.leaves((distribution, values)))

    for path, leaf in jax.tree.leaves_with_path(gradient(params)):
        assert (leaf != 0).mean() > 0.9, jax.tree_util.keystr(path)


@pytest.mark.slow
def test_agents_with_equal_views_differ_by_their_embedding_alone(observation):
    view, time = jnp.broadcast_to(observation.view[0, :, :1], (B, N, 6)), jnp.zeros(B, jnp.int32)
    for config, spec, differ in (
        (CONFIG, SPEC, True),
        (replace(CONFIG, agent_id=False), SPEC, False),
        (CONFIG, replace(SPEC, views_carry_id=True), False),
    ):
        net = MAT(config, spec)
        encode = jax.jit(partial(net.apply, method=net.encode))
        encoded, _, _ = encode(start(net), view, time, jnp.arange(N), ())
        assert (jnp.abs(encoded[:, 0] - encoded[:, 1]).max() > 1e-3) == differ
