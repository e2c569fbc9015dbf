"""The GPU kernels that ask and write memories: what they say and leave is what the definition does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.kernels import memory_update as kernel
from sable.kernels import retention as retention_kernel
from sable.ops import retention
from sable.ops import trees as tree

HEADS = [
    (2, 16),
    pytest.param((1, 64), marks=pytest.mark.slow),
    pytest.param((2, 128), marks=pytest.mark.slow),
]


def make(num_envs, num_agents, num_heads, head, parts, key=0):
    keys, width = jax.random.split(jax.random.key(key), 2), num_heads * head
    memory = jax.random.normal(keys[0], (num_envs, num_heads, head, head))
    return memory, jax.random.normal(keys[1], (num_envs, num_agents, parts * width))


@pytest.fixture
def by_kernel(monkeypatch):
    """Let memories go through the kernels, interpreted without a GPU; returns `jax.jit` that sees to it."""
    monkeypatch.setattr(retention_kernel, "use_kernel", retention_kernel.supported)

    def jit(function, name):
        def checked(*args):
            assert name in str(jax.make_jaxpr(function)(*args))
            return jax.jit(function)(*args)

        return checked

    return jit


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", [0.8, 0.0])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_memory_says_what_the_definition_recalls(by_kernel, heads, scaling):
    (num_heads, head), kappa = heads, retention.kappas(heads[0], scaling)
    seeds = jax.tree.map(lambda *x: jnp.stack(x), *(make(3, 5, *heads, 1, key) for key in range(2)))

    def definition(memory, query):
        opened = retention.decay_memory(memory, kappa, jnp.zeros(3, bool))
        query = query.reshape(3, 5, num_heads, head)
        return jnp.einsum("bnhi,bhij->bnhj", query, opened, precision="highest").reshape(3, 5, -1)

    found = by_kernel(jax.vmap(lambda *given: kernel.read_memory(*given, kappa)), "name=read_memory")(*seeds)
    plain = jax.jit(jax.vmap(lambda *given: retention.read_memory(*given, kappa)))(*seeds)
    np.testing.assert_allclose(plain, jax.jit(jax.vmap(definition))(*seeds), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found, jax.jit(jax.vmap(definition))(*seeds), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("parts", "start", "scaling"), [(4, 1, 0.8), (4, 1, 0.0), (3, 0, 0.8), (2, 0, 0.8)])
def test_what_agents_tell_is_added_to_the_decayed_memory(by_kernel, heads, parts, start, scaling):
    """Of all four projections, of those without queries, or of keys and values alone; seeds side by side."""
    (num_heads, head), kappa = heads, retention.kappas(heads[0], scaling)
    width = num_heads * head
    seeds = jax.tree.map(lambda *x: jnp.stack(x), *(make(3, 5, *heads, parts, key) for key in range(2)))

    def definition(memory, told):
        k, v = (
            told[..., k * width : (k + 1) * width].reshape(3, 5, num_heads, head) for k in (start, start + 1)
        )
        opened = retention.decay_memory(memory, kappa, jnp.zeros(3, bool))
        return retention.add_key_values(opened, k, v)

    def write(form, memory, told):
        return form(memory, told, kappa, (start * width, (start + 1) * width))

    found = by_kernel(jax.vmap(partial(write, kernel.write_memory)), "name=write_memory")(*seeds)
    plain = jax.jit(jax.vmap(partial(write, retention.write_memory)))(*seeds)
    truth = jax.jit(jax.vmap(definition))(*seeds)
    np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(plain, truth, rtol=1e-6, atol=1e-6)


def test_without_a_gpu_memories_go_through_no_kernel():
    (memory, told), kappa = make(3, 5, 2, 16, 2), retention.kappas(2, 0.8)
    written = jax.make_jaxpr(lambda *given: kernel.write_memory(*given, kappa, (0, 32)))(memory, told)
    read = jax.make_jaxpr(lambda *given: kernel.read_memory(*given, kappa))(memory, told[..., :32])
    assert jax.default_backend() == "gpu" or "pallas" not in str(written) + str(read)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_memories_are_forgotten_where_an_episode_opens_and_nowhere_else(monkeypatch, heads):
    monkeypatch.setattr(retention_kernel, "use_kernel", retention_kernel.supported)
    memory = {"one": make(5, 1, *heads, 1)[0], "two": [make(5, 1, *heads, 1, 1)[0]]}
    first = jnp.array([True, False, False, True, False])
    assert "reset_memory" in str(jax.make_jaxpr(kernel.reset_memory)(memory, first))
    seeds = jax.tree.map(lambda x: jnp.stack([x, x]), memory), jnp.stack([first, ~first])
    for transform, given in ((lambda f: f, (memory, first)), (jax.vmap, seeds)):
        found, truth = (jax.jit(transform(form))(*given) for form in (kernel.reset_memory, tree.reset_memory))
        jax.tree.map(np.testing.assert_array_equal, found, truth)


@pytest.mark.parametrize("memory", [(), {"hidden": jnp.ones((3, 20))}, jnp.ones((3, 2, 8, 8))], ids=str)
def test_other_memories_are_forgotten_all_the_same(monkeypatch, memory):
    monkeypatch.setattr(retention_kernel, "use_kernel", retention_kernel.supported)
    first = jnp.array([True, False, True])
    jax.tree.map(
        np.testing.assert_array_equal, kernel.reset_memory(memory, first), tree.reset_memory(memory, first)
    )


def test_the_kernels_can_be_built_for_a_gpu(monkeypatch, triton_modules):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(retention_kernel, "use_kernel", retention_kernel.supported)
    (memory, told), kappa = make(3, 5, 2, 32, 4), retention.kappas(2, 0.8)

    def step(memory, told, first):
        found = kernel.read_memory(memory, told[..., :64], kappa)
        return found, kernel.reset_memory(kernel.write_memory(memory, told, kappa, (64, 128)), first)

    given = memory, told, jnp.zeros(3, bool)
    seeds = jax.tree.map(lambda x: jnp.stack([x, x]), given)
    for call, arguments in ((step, given), (jax.vmap(step), seeds)):
        jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert len(triton_modules) == 6
