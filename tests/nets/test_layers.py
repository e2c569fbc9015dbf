"""The layers compute what they say, and none starts dead."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.nets.layers import Head, SwiGLU, sinusoidal_encoding
from sable.nets.retention import CrossRetention, SelfRetention
from sable.ops import retention

KEY = jax.random.key(0)


def test_swiglu_is_the_formula_and_every_matrix_of_it_learns_from_the_start():
    x = jax.random.normal(KEY, (32, 8))
    module = SwiGLU(8)
    params = module.init(KEY, x)
    gate, linear = np.split(params["params"]["gate_and_input"]["kernel"], 2, axis=1)
    np.testing.assert_allclose(gate.T @ gate, 2 * np.eye(8), atol=1e-5)
    expected = (nn.swish(x @ gate) * (x @ linear)) @ params["params"]["output"]["kernel"]
    np.testing.assert_allclose(module.apply(params, x), expected, atol=1e-5)
    gradient = jax.grad(lambda params: jnp.square(module.apply(params, x)).sum())(params)
    assert all((leaf != 0).all() for leaf in jax.tree.leaves(gradient))


def test_heads_start_near_zero():
    x = jax.random.normal(KEY, (4, 8))
    module = Head(8, 3)
    assert 0 < jnp.abs(module.apply(module.init(KEY, x), x)).max() < 0.1


def test_time_is_encoded_as_sines_and_cosines_in_turn():
    code = sinusoidal_encoding(jnp.array([0, 7]), 6)
    np.testing.assert_allclose(code[0], [0, 1, 0, 1, 0, 1], atol=1e-6)
    for i in range(3):
        angle = 7 * 10_000 ** (-2 * i / 6)
        np.testing.assert_allclose(code[1, 2 * i : 2 * i + 2], [np.sin(angle), np.cos(angle)], atol=1e-5)


def ended(layer, *given):
    """A retention layer to its end, which blocks do."""
    out, memory = layer.sequence(*given)
    return layer.output(out), memory


@pytest.mark.parametrize("cross", [False, True])
def test_a_retention_layer_is_projections_retention_a_norm_per_head_and_the_keys_gate(cross):
    T, B, N, E, H = 3, 2, 4, 8, 2
    layer = CrossRetention(E, H, 0.8) if cross else SelfRetention(E, H, 0.8, causal=True)
    keys = jax.random.split(KEY, 4)
    key, query, memory = (
        jax.random.normal(keys[0], (B, T, N, E)),
        jax.random.normal(keys[1], (B, T, N, E)),
        jax.random.normal(keys[2], (B, H, E // H, E // H)),
    )
    streams = (query, key) if cross else (key,)
    query = query if cross else key
    first = jnp.zeros((T, B), bool).at[1, 0].set(True)
    params = layer.init(keys[3], *streams, memory, first, method=ended)["params"]
    params = params | {"scale": jnp.linspace(1, 2, E), "bias": jnp.linspace(-1, 1, E)}
    out, _ = layer.apply({"params": params}, *streams, memory, first, method=ended)

    kernel = params["projections"]["kernel"]
    parts = jnp.split(key @ kernel, kernel.shape[1] // E, axis=-1)
    q, k, v, gate = (query @ params["query"]["kernel"], *parts) if cross else parts
    q, k, v = (x.reshape(B, T, N, H, -1).swapaxes(0, 1) for x in (q, k, v))
    kept, _ = retention.recurrent(q, k, v, memory, retention.kappas(H, 0.8), first, causal=True)
    normed = (kept - kept.mean(-1, keepdims=True)) / jnp.sqrt(kept.var(-1, keepdims=True) + 1e-6)
    normed = normed.swapaxes(0, 1).reshape(-1, E) * params["scale"][None] + params["bias"][None]
    expected = (nn.swish(gate).reshape(-1, E) * normed) @ params["output"]["kernel"]
    np.testing.assert_allclose(out.reshape(-1, E), expected, atol=1e-4)


@pytest.mark.parametrize("layer", [SelfRetention(8, 2, 0.8, causal=True), CrossRetention(8, 2, 0.8)])
def test_projections_and_their_cache_write_the_same_memory(layer):
    """Each layer knows where keys and values begin in what it projects, and in a key/value cache."""
    B, N, E = 2, 4, 8
    parts, start = (4, E) if isinstance(layer, SelfRetention) else (3, 0)
    keys = jax.random.split(KEY, 2)
    projections = jax.random.normal(keys[0], (B, N, parts * E))
    memory = jax.random.normal(keys[1], (B, 2, E // 2, E // 2))
    keys_values = projections[..., start : start + 2 * E]
    k, v = (x.reshape(B, N, 2, -1) for x in jnp.split(keys_values, 2, axis=-1))
    expected = memory * retention.kappas(2, 0.8).reshape(1, 2, 1, 1) + jnp.einsum("bnhi,bnhj->bhij", k, v)
    for method, source in ((layer.write_projections, projections), (layer.write_cache, keys_values)):
        found = layer.apply(
            {"params": dict.fromkeys(("scale", "bias"), jnp.ones(E))}, memory, source, method=method
        )
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_projections_start_with_a_spread_of_one_over_the_width():
    layer = SelfRetention(64, 1, 0.8, causal=False)
    x, memory = jnp.ones((1, 1, 1, 64)), jnp.zeros((1, 1, 64, 64))
    params = layer.init(KEY, x, memory, jnp.ones((1, 1), bool), method=ended)["params"]
    for name in ("projections", "output"):
        assert float(params[name]["kernel"].std()) == pytest.approx(1 / 64, rel=0.05)
        assert "bias" not in params[name]
