"""The GPU kernels that end a block or begin a head: outputs and gradients are those of the layers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.config.schema import SableConfig
from sable.kernels import block as kernel
from sable.nets.layers import RMSNorm, SwiGLU
from sable.nets.sable import Sable, initial_memory
from sable.systems import autoregressive
from sable.types import EnvSpec

slow = pytest.mark.slow
FORMS = {
    "project_add_norm_ffn": kernel.project_add_norm_ffn,
    "project_add_norm": kernel.project_add_norm,
    "dense_gelu_norm": kernel.dense_gelu_norm,
}


def norm(x, scale):
    return RMSNorm().apply({"params": {"scale": scale}}, x)


def project_add_norm(mixed, residual, output, scale):
    """By the layers, as a decoder block has them."""
    return norm(residual + mixed @ output, scale)


def project_add_norm_ffn(mixed, residual, output, first_scale, gate_and_input, ff_output, second_scale):
    a = project_add_norm(mixed, residual, output, first_scale)
    weights = {"gate_and_input": {"kernel": gate_and_input}, "output": {"kernel": ff_output}}
    return norm(a + SwiGLU(a.shape[-1]).apply({"params": weights}, a), second_scale)


def dense_gelu_norm(x, weight, bias):
    return norm(jax.nn.gelu(x @ weight + bias), jnp.ones_like(bias))


LAYERS = {
    "project_add_norm_ffn": project_add_norm_ffn,
    "project_add_norm": project_add_norm,
    "dense_gelu_norm": dense_gelu_norm,
}


def make(name, shape, key=0, dtype="float32"):
    """Tokens and weights, everything as large as in a network that has learnt."""
    width, keys = shape[-1], jax.random.split(jax.random.key(key), 7)

    def weight(key, size=width):
        return jax.random.normal(key, (width, size)) * width**-0.5

    def scale(key):
        return 1 + 0.3 * jax.random.normal(key, (width,))

    given = (
        jax.random.normal(keys[0], shape),
        jax.random.normal(keys[1], shape),
        weight(keys[2]),
        scale(keys[3]),
    )
    if name == "project_add_norm_ffn":
        given += weight(keys[4], 2 * width), weight(keys[5]), scale(keys[6])
    if name == "dense_gelu_norm":
        given = given[0], *given[2:]
    return tuple(x.astype(dtype) for x in given)


def everything(form, given):
    """Output, and the gradients of an uneven sum of it."""

    def total(*given):
        out = form(*given)
        weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return (weights * out.astype(jnp.float32)).sum(), out

    (_, out), gradients = jax.value_and_grad(total, tuple(range(len(given))), has_aux=True)(*given)
    return out, *gradients


def assert_close(found, truth, tolerance):
    """Relative to the largest of each array."""
    for a, b in zip(found, truth, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def both(name, given, transform=lambda f: f):
    """What the kernels give, and what the layers give."""
    return (
        jax.jit(transform(lambda *given, form=forms[name]: everything(form, given)))(*given)
        for forms in (FORMS, LAYERS)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "project_add_norm_ffn",
        *(pytest.param(name, marks=slow) for name in ("project_add_norm", "dense_gelu_norm")),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [(3, 35, 32), pytest.param((1, 64, 64), marks=slow), pytest.param((3, 67, 128), marks=slow)],
    ids=str,
)
@pytest.mark.parametrize(
    "few", [pytest.param(0, id="learning"), pytest.param(1_000, id="acting", marks=slow)]
)
def test_the_kernels_are_the_layers(monkeypatch, name, shape, few):
    """By the launches for many tokens and by those for few."""
    monkeypatch.setattr(kernel, "FEW_TOKENS", few)
    found, truth = both(name, make(name, shape))
    assert_close(found, truth, 1e-5)


@pytest.mark.gpu
@slow
@pytest.mark.parametrize("name", FORMS)
def test_seeds_have_their_own_weights(name):
    seeds = (make(name, (70, 32), key) for key in range(2))
    found, truth = both(name, jax.tree.map(lambda *x: jnp.stack(x), *seeds), jax.vmap)
    assert_close(found, truth, 1e-5)


@pytest.mark.gpu
@slow
@pytest.mark.parametrize("name", FORMS)
def test_bfloat16_is_rounded_where_it_is_written_and_multiplied(name):
    """A number is off by up to 2^-9 of itself each time; a few such times make less than 2^-7 of the largest.
    The layers, which round after every step, come up to 2^-6.7 away."""
    given = make(name, (100, 32), dtype="bfloat16")
    exact = jax.jit(partial(everything, LAYERS[name]))(tuple(x.astype(jnp.float32) for x in given))
    found = jax.jit(partial(everything, FORMS[name]))(given)
    assert_close(found, [x.astype(jnp.bfloat16) for x in exact], 2**-7)


SPEC = EnvSpec(num_agents=3, view_size=4, num_actions=3, time_limit=9)


def network_gradients(config, params):
    """Of all parameters of a network that scores some actions, two seeds side by side."""
    net, shape, keys = Sable(config, SPEC), (5, 2, 3), jax.random.split(jax.random.key(0), 3)
    view, action = jax.random.normal(keys[0], (*shape, 4)), jax.random.randint(keys[1], shape, 0, 3)
    time, first = jnp.arange(5)[:, None] + jnp.zeros((1, 2), int), jax.random.bernoulli(keys[2], 0.3, (5, 2))
    memory = jax.tree.map(lambda x: x + 0.1, initial_memory(config, 2))
    legal, ids = jnp.ones((*shape, 3), bool), jnp.array([2, 0, 1])

    def total(params):
        told = net.normalise_view(view), legal, time, action, ids, memory, first
        distribution, value = net.apply(params, *told, method=net.evaluate_actions)
        return (distribution.log_prob(action) * jnp.cos(jnp.arange(30.0)).reshape(shape)).sum() + value.sum()

    return jax.vmap(jax.grad(total))(params)


@pytest.mark.parametrize("memory", [False, pytest.param(True, marks=slow)])
def test_a_network_learns_the_same_by_the_kernels(monkeypatch, memory):
    config = SableConfig(embed_dim=32, num_heads=2, memory=memory)
    shapes = jax.eval_shape(partial(autoregressive.init, Sable(config, SPEC)), jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.2 * rng.standard_normal((2, *x.shape), np.float32), shapes)
    truth = jax.jit(partial(network_gradients, config))(params)
    asked = []
    monkeypatch.setattr(kernel, "use_kernel", lambda width: not asked.append(width))
    found = jax.jit(partial(network_gradients, config))(params)
    assert asked == [32] * 5  # once by the encoder's block, twice by the decoder's, and by two heads
    assert_close(jax.tree.leaves(found), jax.tree.leaves(truth), 2e-5)
    jax.eval_shape(partial(network_gradients, replace(config, chunk_size=2)), params)
    assert len(asked) == 7  # chunks that are asked for are had, so by the heads only


def test_parameters_are_made_alike_whichever_way_is_taken(monkeypatch):
    """Layers make them when they are called, and the kernels call no layer."""
    net = Sable(SableConfig(embed_dim=32), SPEC)
    truth = jax.eval_shape(partial(autoregressive.init, net), jax.random.key(0))
    monkeypatch.setattr(kernel, "use_kernel", lambda width: True)
    assert jax.eval_shape(partial(autoregressive.init, net), jax.random.key(0)) == truth


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [pytest.param(64, marks=slow), 128])
@pytest.mark.parametrize(
    "few", [pytest.param(0, id="learning"), pytest.param(1_000, id="acting", marks=slow)]
)
def test_the_kernels_can_be_built_for_a_gpu(monkeypatch, triton_modules, width, dtype, few):
    """As far as a machine without one can tell: Triton takes every operation of them, and its types agree.
    Seeds side by side make other kernels, with an axis more."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernel, "FEW_TOKENS", few)
    for name, form in FORMS.items():
        given = make(name, (100, width), dtype=dtype)

        def one(*given, form=form):
            return everything(form, given)

        seeds = tuple(jnp.stack([x, x]) for x in given)
        for call, arguments in ((one, given), (jax.vmap(one), seeds)):
            jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert len(triton_modules) == 12
