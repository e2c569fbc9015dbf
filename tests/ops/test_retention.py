"""Contract 1: the forms of retention agree, in outputs, outgoing memory and gradients."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sable.ops import retention


def random_inputs(seed=0, T=6, B=2, N=3, H=2, d=4, resets=()):
    """(q, k, v, memory, first): resets lists (t, b) pairs."""
    keys = jax.random.split(jax.random.key(seed), 4)
    q, k, v = (jax.random.normal(key, (T, B, N, H, d)) for key in keys[:3])
    memory = jax.random.normal(keys[3], (B, H, d, d))
    first = np.zeros((T, B), bool)
    for t, b in resets:
        first[t, b] = True
    return q, k, v, memory, jnp.array(first)


@cache
def everything(form, **options):
    """A function of (q, k, v, memory, kappa, first) giving output, outgoing memory, and the gradients of an
    uneven sum of both; compiled once for all flags and decays."""

    def total(q, k, v, memory, kappa, first):
        out, memory = form(q, k, v, memory, kappa, first, **options)
        weights = [jnp.cos(jnp.arange(x.size)).reshape(x.shape) for x in (out, memory)]
        return (weights[0] * out).sum() + (weights[1] * memory).sum(), (out, memory)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True))


def assert_agree(form, inputs, *, scaling=0.8, causal, **options):
    *tensors, first = inputs
    kappa = retention.kappas(tensors[0].shape[3], scaling)
    inputs = (*tensors, kappa, first)
    (_, truth), truth_gradients = everything(retention.recurrent, causal=causal)(*inputs)
    (_, found), gradients = everything(form, causal=causal, **options)(*inputs)
    for name, a, b in zip(
        ("out", "memory", "dq", "dk", "dv", "dmemory"),
        (*found, *gradients),
        (*truth, *truth_gradients),
        strict=True,
    ):
        scale = np.maximum(1.0, np.abs(b).max())
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-5, err_msg=name)


RESETS = {
    "none": [],
    "at the start": [(0, 0)],
    "inside a chunk": [(3, 1)],
    "at a chunk's edge": [(2, 0), (4, 1)],
    "several in a row": [(1, 0), (2, 0), (3, 0), (5, 1)],
    "everywhere": [(t, b) for t in range(6) for b in range(2)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("resets", RESETS.values(), ids=RESETS.keys())
def test_parallel_equals_recurrent_across_resets(resets, causal):
    assert_agree(retention.parallel, random_inputs(resets=resets), causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6, 7])
def test_chunkwise_equals_recurrent_for_chunks_that_divide_and_that_do_not(chunk, causal):
    inputs = random_inputs(resets=RESETS["several in a row"])
    assert_agree(retention.chunkwise, inputs, causal=causal, chunk=chunk)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [1, 2, 3, 4, 7])
def test_blocks_of_agents_equal_recurrent(block, causal):
    inputs = random_inputs(N=7, resets=RESETS["at a chunk's edge"])
    assert_agree(retention.chunkwise, inputs, causal=causal, block=block)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_agents", [1, 33, 70, 130])
def test_the_sizes_chosen_from_the_shapes_equal_recurrent(num_agents, causal):
    inputs = random_inputs(T=5, B=1, N=num_agents, H=1, d=3, resets=[(2, 0)])
    assert_agree(retention.chunkwise, inputs, causal=causal)


@pytest.mark.parametrize("scaling", [0.0, 0.5, 1.0])
def test_every_decay_scaling_agrees(scaling):
    assert_agree(retention.chunkwise, random_inputs(resets=[(3, 0)]), causal=True, scaling=scaling, chunk=4)


@pytest.mark.gpu
@pytest.mark.parametrize("in_parallel", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [{"chunk": 6}, {"chunk": 2}, {"chunk": 4}, {"block": 2}], ids=str)
def test_every_form_agrees_where_heads_forget_all(monkeypatch, sizes, causal, in_parallel):
    """A decay of 0, whose power of 0 is one, also where memories are threaded as on a GPU."""
    if in_parallel:
        monkeypatch.setattr(retention, "chunk_recurrence", retention.chunk_recurrence_parallel)
    everything.cache_clear()
    assert_agree(retention.chunkwise, random_inputs(resets=[(3, 0)]), causal=causal, scaling=0.0, **sizes)
    everything.cache_clear()


@pytest.mark.parametrize("causal", [False, True])
def test_heads_that_forget_all_see_their_own_timestep(causal):
    q, k, v, memory, first = random_inputs(resets=[(3, 0)])
    truth, after = retention.recurrent(q, k, v, memory, retention.kappas(2, 0.0), first, causal=causal)
    np.testing.assert_allclose(truth, retention.intra_timestep(q, k, v, causal=causal), atol=1e-5)
    np.testing.assert_allclose(after, jnp.einsum("bnhi,bnhj->bhij", k[-1], v[-1]), atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_chunkwise_equals_recurrent_whatever_the_sizes_and_flags(data):
    T, B, N = (data.draw(st.integers(1, most)) for most in (9, 2, 5))
    H, d = data.draw(st.sampled_from([(1, 1), (1, 5), (2, 3)]))
    flags = data.draw(st.lists(st.booleans(), min_size=T * B, max_size=T * B))
    resets = [(i // B, i % B) for i, flag in enumerate(flags) if flag]
    inputs = random_inputs(data.draw(st.integers(0, 99)), T, B, N, H, d, resets)
    sizes = {"chunk": data.draw(st.integers(1, 10)), "block": data.draw(st.integers(1, 6))}
    assert_agree(retention.chunkwise, inputs, causal=data.draw(st.booleans()), **sizes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_agents", "width", "block"), [(3, 4, None), (7, 4, 2), (9, 2, 4)])
def test_intra_timestep_equals_recurrent_with_first_everywhere(num_agents, width, block, causal):
    q, k, v, memory, first = random_inputs(N=num_agents, H=1, d=width, resets=RESETS["everywhere"])
    truth, _ = retention.recurrent(q, k, v, memory, retention.kappas(1, 0.8), first, causal=causal)
    np.testing.assert_allclose(
        retention.intra_timestep(q, k, v, causal=causal, block=block), truth, atol=1e-5
    )


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("width", [4, 9])
def test_chunks_of_agents_see_themselves_and_those_before(width, chunk):
    """Against loops over agents. The last chunk may be smaller."""
    q, k, v, *_ = random_inputs(N=7, d=width)
    found = retention.intra_timestep_chunks(q, k, v, chunk=chunk)
    q, k, v = map(np.asarray, (q, k, v))
    expected = np.zeros_like(v)
    for i, j in itertools.product(range(7), range(7)):
        if j // chunk <= i // chunk:
            score = (q[:, :, i] * k[:, :, j]).sum(-1, keepdims=True)
            expected[:, :, i] += score * v[:, :, j]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [1, 3, 7])
def test_blocks_are_causal_to_the_last_bit(block):
    """A later agent must not reach an earlier one even by rounding."""
    q, k, v, _, _ = random_inputs(N=7)
    form = jax.jit(partial(retention.intra_timestep, causal=True, block=block))
    changed = form(q, k.at[:, :, 4:].mul(1e3), v.at[:, :, 4:].add(7.0))
    np.testing.assert_array_equal(changed[:, :, :4], form(q, k, v)[:, :, :4])


@pytest.mark.gpu
def test_step_by_step_equals_recurrent():
    q, k, v, memory, first = random_inputs(resets=[(2, 1)])
    kappa = retention.kappas(2, 0.8)
    truth, truth_memory = retention.recurrent(q, k, v, memory, kappa, first, causal=True)
    for t in range(6):
        out, memory = retention.step(q[t], k[t], v[t], memory, kappa, first[t], causal=True)
        np.testing.assert_allclose(out, truth[t], atol=1e-5)
    np.testing.assert_allclose(memory, truth_memory, atol=1e-5)


def test_agents_one_by_one_equal_a_causal_step():
    q, k, v, memory, first = random_inputs(T=1)
    kappa = retention.kappas(2, 0.8)
    truth, truth_memory = retention.step(q[0], k[0], v[0], memory, kappa, first[0], causal=True)
    memory = retention.decay_memory(memory, kappa, first[0])
    for i in range(3):
        out, memory = retention.token_step(q[0, :, i], k[0, :, i], v[0, :, i], memory)
        np.testing.assert_allclose(out, truth[:, i], atol=1e-5)
    np.testing.assert_allclose(memory, truth_memory, atol=1e-5)


def test_the_decays_are_the_papers():
    np.testing.assert_allclose(retention.kappas(1, 1.0), [0.96875], rtol=1e-6)
    np.testing.assert_allclose(retention.kappas(4, 1.0), [0.96875, 0.987598, 0.995078, 0.998047], rtol=1e-5)
    np.testing.assert_allclose(retention.kappas(2, 0.5), 0.5 * retention.kappas(2, 1.0), rtol=1e-6)


@pytest.mark.parametrize("sizes", [{"chunk": 0}, {"block": -1}])
def test_sizes_below_one_are_refused(sizes):
    q, k, v, memory, first = random_inputs()
    with pytest.raises(ValueError, match="at least 1"):
        retention.chunkwise(q, k, v, memory, retention.kappas(2, 0.8), first, causal=True, **sizes)
