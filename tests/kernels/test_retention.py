"""The GPU kernels of retention, interpreted where there is no GPU: outputs, memory and gradients are those of
the definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.kernels import retention as kernel
from sable.nets.retention import CrossQueries, CrossRetention, SelfRetention
from sable.ops import retention


def defined(num_agents, causal, sources, memory, scale, bias, kappa, first):
    """The layer's core by `recurrent`, the norm and the gate as they are defined."""
    num_heads, head = memory.shape[1:3]
    parts = jnp.split(jnp.concatenate(sources, axis=-1), 4, axis=-1)
    num_envs, num_tokens, width = parts[0].shape
    shape = (num_envs, num_tokens // num_agents, num_agents, num_heads, head)
    q, k, v = (x.reshape(shape).swapaxes(0, 1) for x in parts[:3])
    out, after = retention.recurrent(q, k, v, memory, kappa, first.T, causal=causal)
    out = out.swapaxes(0, 1)
    out = (out - out.mean(-1, keepdims=True)) / jnp.sqrt(out.var(-1, keepdims=True) + 1e-6)
    return jax.nn.silu(parts[3]) * (out.reshape(num_envs, num_tokens, width) * scale + bias), after


def everything(form, cross, given):
    """Output, memory after, and the gradients of an uneven sum of both."""

    def total(sources, memory, scale, bias, kappa, first):
        out, after = form(sources, memory, scale, bias, kappa, first)
        weights = [jnp.cos(jnp.arange(x.size)).reshape(x.shape) for x in (out, after)]
        return (weights[0] * out).sum() + (weights[1] * after).sum(), (out, after)

    (_, found), gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True))(*given)
    return found, gradients


def make(num_agents, num_steps, num_heads, head, cross, num_envs=2, resets=0.15, scaling=0.8):
    keys = jax.random.split(jax.random.key(1), 6)
    width, num_tokens = num_heads * head, num_agents * num_steps
    sizes = (width, 3 * width) if cross else (4 * width,)
    sources = tuple(jax.random.normal(keys[0], (num_envs, num_tokens, size)) for size in sizes)
    memory = jax.random.normal(keys[1], (num_envs, num_heads, head, head))
    scale, bias = 1 + 0.1 * jax.random.normal(keys[2], (width,)), 0.1 * jax.random.normal(keys[3], (width,))
    first = jax.random.bernoulli(keys[4], resets, (num_envs, num_steps))
    return sources, memory, scale, bias, retention.kappas(num_heads, scaling), first


slow = pytest.mark.slow
CASES = {
    "one chunk": (3, 9, 2, 16, True, False),
    "chunks within timesteps": (5, 14, 2, 16, True, True),
    "seeing all agents": (3, 23, 1, 16, False, False),
    "a chunk for each timestep": (33, 3, 1, 16, False, False),
    "a large team in turn": (70, 4, 1, 16, True, True),
    "a large team seeing all": (70, 4, 2, 16, False, False),
    "wide heads": (4, 40, 1, 64, True, True),
    "the widest heads": (4, 20, 2, 128, False, False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "in segments"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if k in (1, 2, 5) else slow) for k, n in enumerate(CASES)]
)
def test_the_kernels_are_the_definition(monkeypatch, name, cut):
    monkeypatch.setattr(kernel, "MIN_PROGRAMS", 64 if cut else 1)
    monkeypatch.setattr(kernel, "MIN_TOKENS", CASES[name][0])
    assert_defined(name)


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "in segments"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if k in (1, 5) else slow) for k, n in enumerate(CASES)]
)
def test_heads_that_forget_all_are_the_definition(monkeypatch, name, cut):
    """A decay of 0: what a timestep says itself is whole, 0 ** 0, and of all before it nothing is left."""
    monkeypatch.setattr(kernel, "MIN_PROGRAMS", 64 if cut else 1)
    monkeypatch.setattr(kernel, "MIN_TOKENS", CASES[name][0])
    assert_defined(name, scaling=0.0)


def assert_defined(name, scaling=0.8):
    num_agents, num_steps, num_heads, head, causal, cross = CASES[name]
    given = make(num_agents, num_steps, num_heads, head, cross, scaling=scaling)
    with jax.default_matmul_precision("highest"):
        truth = everything(partial(defined, num_agents, causal), cross, given)
        found = everything(partial(kernel.gated_retention, num_agents, causal), cross, given)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


class Desktop:
    """Stands in for a GPU whose programs have little memory to share."""

    compute_capability = "8.9"


@pytest.mark.parametrize("name", ["wide heads", pytest.param("seeing all agents", marks=slow)])
def test_the_kernels_are_the_definition_where_there_is_little_room(monkeypatch, name):
    monkeypatch.setattr(jax, "devices", lambda: [Desktop()])
    assert_defined(name)


def test_what_finds_no_room_does_not_go_through_the_kernels(monkeypatch):
    float32, bfloat16 = map(jnp.dtype, ("float32", "bfloat16"))
    assert kernel.fits_shared_memory(128, 40, False, float32)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Desktop()])
    assert kernel.fits_shared_memory(128, 40, False, bfloat16) and kernel.fits_shared_memory(
        64, 40, True, float32
    )
    assert not kernel.fits_shared_memory(128, 4, True, float32) and not kernel.fits_shared_memory(
        64, 40, False, float32
    )
    assert kernel.fits_shared_memory(64, 32, False, float32) and kernel.fits_shared_memory(
        64, 65, False, float32
    )
    assert kernel.use_timestep_kernel(64, 32, False) and not kernel.use_timestep_kernel(64, 33, False)
    layer = SelfRetention(128, 1, 0.8, causal=True)
    x, memory = jax.ShapeDtypeStruct((2, 4, 3, 128), "float32"), jnp.zeros((2, 1, 128, 128))
    for dtype, by_kernel in ((float32, False), (bfloat16, True)):

        def sequence(x, dtype=dtype):
            x, first = x.astype(dtype), jnp.zeros((4, 2), bool)
            params = layer.init(jax.random.key(0), x, memory, first, method=layer.sequence)
            params = jax.tree.map(lambda weight: weight.astype(dtype), params)
            return layer.apply(params, x, memory, first, method=layer.sequence)[0]

        assert ("name=retention" in str(jax.make_jaxpr(sequence)(x))) == by_kernel


def test_sequences_are_cut_until_programs_are_enough():
    assert kernel.num_segments(1000, 128, 4) == 1  # there are enough
    assert kernel.num_segments(64, 128, 32) * 64 == kernel.MIN_PROGRAMS
    assert kernel.num_segments(2, 128, 1024) == 128  # whole timesteps at least
    assert 128 // kernel.num_segments(1, 128, 4) * 4 >= kernel.MIN_TOKENS  # and enough for a program to do
    assert kernel.num_segments(1, 7, 200) == 7


@pytest.mark.gpu
def test_memories_threaded_at_once_are_those_threaded_in_turn():
    keys = jax.random.split(jax.random.key(0), 3)
    added, memory = jax.random.normal(keys[0], (7, 2, 3, 4, 4)), jax.random.normal(keys[1], (2, 3, 4, 4))
    opened, kappa, memories = jax.random.bernoulli(keys[2], 0.3, (7, 2)), retention.kappas(3, 0.9), [memory]
    for now, new in zip(opened, added, strict=True):
        memories.append(retention.decay_memory(memories[-1], kappa, now) + new)
    for form in (
        retention.chunk_recurrence,
        retention.chunk_recurrence_parallel,
    ):  # of which a device has one
        before, last = form(memory, opened, kappa, added)
        np.testing.assert_allclose(before, jnp.stack(memories[:-1]), atol=1e-5)
        np.testing.assert_allclose(last, memories[-1], atol=1e-5)


FORMS = {
    "sequences": ("sequence", True, True),
    "sequences without memory": ("sequence", True, True),
    "a team": ("all_agents", True, False),
    "a team that asks": ("all_agents", True, True),
    "a timestep": ("timestep", False, False),
}
"""By what a layer is called, whether it is causal and whether it is asked by another stream."""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        *(pytest.param(n, 0.8, marks=slow if "without" in n else ()) for n in FORMS),
        *(pytest.param(n, 0.0, marks=() if n in ("a team", "a timestep") else slow) for n in FORMS),
    ],
)
def test_a_layer_gives_the_same_by_the_kernels(monkeypatch, name, scaling):
    form, causal, cross = FORMS[name]
    layer = CrossRetention(32, 2, scaling) if cross else SelfRetention(32, 2, scaling, causal)
    keys = jax.random.split(jax.random.key(1), 5)
    shape = {"sequence": (2, 4, 5, 32), "all_agents": (2, 70, 32), "timestep": (2, 5, 32)}[form]
    query, key = jax.random.normal(keys[0], shape), jax.random.normal(keys[1], shape)
    past = () if "without" in name else jax.random.normal(keys[2], (2, 2, 16, 16))
    given = key, past
    if form == "all_agents" and cross:
        given = key, CrossQueries(query=query, readout=jax.random.normal(keys[2], shape))
    if form == "sequence":
        given = query, key, past, jax.random.bernoulli(keys[3], 0.3, (4, 2))
    method = getattr(layer, form)
    params = layer.init(keys[4], *given, method=method)
    apply = jax.jit(lambda: layer.apply(params, *given, method=method))
    answers = []
    for chosen in (True, False):
        monkeypatch.setattr(kernel, "use_kernel", lambda head, chosen=chosen: chosen)
        jax.clear_caches()
        answers.append(apply())
    for a, b in zip(*map(jax.tree.leaves, answers), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_can_be_built_for_a_gpu(monkeypatch, triton_modules, dtype):
    """As far as a machine without one can tell: Triton takes every operation of them, and its types agree.
    Seeds side by side make other kernels, with an axis more."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for num_agents, causal in ((4, True), (4, False), (128, False)):
        sources, memory, scale, bias, kappa, first = make(num_agents, 8, 2, 32, cross=causal)
        sources, scale, bias = jax.tree.map(lambda x: x.astype(dtype), (sources, scale, bias))

        def total(sources, scale, num_agents=num_agents, causal=causal, rest=(memory, bias, kappa, first)):
            memory, bias, kappa, first = rest
            out, _ = kernel.gated_retention(num_agents, causal, sources, memory, scale, bias, kappa, first)
            return out.astype(jnp.float32).sum()

        both = jax.tree.map(lambda x: jnp.stack([x, x]), (sources, scale))
        jax.jit(jax.vmap(jax.grad(total))).trace(*both).lower(lowering_platforms=("cuda",))
        if kernel.use_timestep_kernel(32, num_agents, causal):
            teams = tuple(x[:, :, :num_agents] for x in both[0])
            for past in (memory, jnp.ones((*teams[0].shape[1:3], scale.shape[0]))):
                rest = past, scale, bias, kappa
                team = jax.vmap(
                    lambda sources, causal=causal, rest=rest: kernel.all_agents(causal, sources, *rest)
                )
                jax.jit(team).trace(teams).lower(lowering_platforms=("cuda",))
            rest = memory, scale, bias, kappa
            step = jax.vmap(lambda sources, causal=causal, rest=rest: kernel.timestep(causal, sources, *rest))
            jax.jit(step).trace(teams).lower(lowering_platforms=("cuda",))
    assert len(triton_modules) >= 12
