"""Gated retention over whole sequences as GPU kernels (Pallas, Triton): forwards one, backwards two.

XLA makes of the same layer some fifty kernels that write every score, decay and memory down, and turns
layouts round between them. Here a program takes one environment and one head through all its tokens, a chunk
after another, the memory in registers: projections are read once, where the matrix product left them, and
only what the layer gives is written. Going back, the memories are computed again, forwards, and then
their gradients, backwards.

`ops.retention.recurrent`, and the norm and gate of `nets.retention`, are the truth.
"""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from sable.ops import retention

EPSILON = 1e-6
LARGEST_CHUNK = 64
PROGRAMS, TOKENS = 512, 128
"""Programs enough for a GPU, and tokens enough for a program: sequences are cut accordingly."""


class Sizes(tp.NamedTuple):
    """What the kernels are compiled for."""

    num_tokens: int
    num_agents: int
    head: int
    rows: int
    """Tokens loaded for a chunk, a power of two."""
    step: int
    """Tokens of a chunk: whole timesteps, unless causal."""
    causal: bool
    settled: bool
    """Whether the memory given already holds all that is seen: a large team's timestep that is not causal."""
    columns: tuple[int, int, int]
    """Where keys, values and gates begin in the source that holds them."""

    @property
    def num_chunks(self) -> int:
        return -(-self.num_tokens // self.step)


def supported(head: int) -> bool:
    """Whether the kernels can handle heads of so many channels."""
    return head in (16, 32, 64, 128)


def chosen(head: int) -> bool:
    """Whether a layer goes through the kernels: on a GPU, if it can."""
    return jax.default_backend() == "gpu" and supported(head)


def gated(
    num_agents: int,
    causal: bool,
    sources: tuple[Array, ...],  # [B, T N, 4 E]: queries, keys, values, gates; or queries, and all else
    memory: Array,  # [B, H, d, d] before the first timestep
    scale: Array,  # [E] of the norm of what is recalled, one group per head
    bias: Array,  # [E]
    kappa: Array,  # [H] decays
    first: Array,  # [B, T]
) -> tuple[Array, Array]:
    """(swish(gate) * norm(retention) [B, T N, E], the memory after the last timestep)."""
    (num_envs, num_steps), num_heads = first.shape, memory.shape[1]
    settled = not causal and num_agents > LARGEST_CHUNK
    num: int = num_steps if settled else num_segments(num_envs * num_heads, num_steps, num_agents)
    first = first.reshape(num_envs, num, -1)
    episode = jnp.cumsum(first.astype(jnp.int32), axis=-1)
    rate = jnp.log2(kappa)
    if num == 1 and not settled:
        return tp.cast(tuple, _gated(num_agents, causal, sources, memory, scale, bias, rate, episode[:, 0]))
    # Segments side by side: what each adds to the memory, and so what each begins with, is found beforehand.
    before, ends = _between(num_agents, sources[-1], memory, kappa, first, episode)
    sources = tuple(x.reshape(num_envs * num, -1, x.shape[-1]) for x in sources)
    known, episode = (x.reshape(-1, *x.shape[2:]) for x in (ends if settled else before, episode))
    out, _ = tp.cast(tuple, _gated(num_agents, causal, sources, known, scale, bias, rate, episode))
    return out.reshape(num_envs, -1, out.shape[-1]), ends[:, -1]


def num_segments(num_rows: int, num_steps: int, num_agents: int) -> int:
    """Into how many equal parts sequences are cut, to make programs of `num_rows` enough."""
    enough = [
        n
        for n in range(1, num_steps + 1)
        if num_steps % n == 0 and (n == 1 or num_steps // n * num_agents >= TOKENS)
    ]
    return next((n for n in enough if n * num_rows >= PROGRAMS), enough[-1])


def _between(num_agents, source, memory, kappa, first, episode):
    """Memories before and after segments, [B, S, H, d, d] each."""
    num_envs, num, length = first.shape
    num_heads, head = memory.shape[1:3]
    keys, values = (
        x.reshape(num_envs, num, length * num_agents, num_heads, head)
        for x in jnp.split(source, source.shape[-1] // (num_heads * head), axis=-1)[-3:-1]
    )
    kept = kappa ** (length - 1 - jnp.arange(length))[:, None] * (episode == episode[..., -1:])[..., None]
    kept = jnp.repeat(kept, num_agents, axis=2)[..., None].astype(keys.dtype)
    added = jnp.einsum("bsnhi,bsnhj->sbhij", keys * kept, values, preferred_element_type=jnp.float32)
    before, last = retention.thread(memory, first.any(axis=-1).T, kappa**length, added)
    before = before.swapaxes(0, 1)
    return before, jnp.concatenate([before[:, 1:], last[:, None]], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated(num_agents, causal, sources, memory, scale, bias, rate, episode):
    """`gated` with programs for environments and heads; rates [H] are log2 of decays, `episode` [B, T] counts
    how many have opened by a timestep."""
    return _forward(num_agents, causal, sources, memory, scale, bias, rate, episode)[0]


def _forward(num_agents, causal, sources, memory, scale, bias, rate, episode):
    sizes = _sizes(sources, memory, num_agents, causal)
    out = jax.ShapeDtypeStruct((*sources[0].shape[:2], scale.shape[0]), sources[0].dtype)
    given = (*sources, memory, scale, bias, rate, episode)
    y, recalled, after = _call(_forward_kernel, sizes, "retention", memory, given, [out, out, _like(memory)])
    return (y, after), (given, recalled)


def _backward(num_agents, causal, residuals, cotangents):
    given, recalled = residuals
    *sources, memory, scale, bias, rate, episode = given
    sizes = _sizes(sources, memory, num_agents, causal)
    dy, dafter = cotangents
    num_envs, num_heads, head, _ = memory.shape
    norm = jax.ShapeDtypeStruct((num_envs, num_heads, 2, head), jnp.float32)
    *dsources, dout, dnorm = _call(
        _queries_kernel,
        sizes,
        "retention_queries",
        memory,
        (sources[-1], *given[-5:], recalled, dy),
        [*map(_like, sources), _like(dy), norm],
    )
    # Keys and values go beside the gates, into the same array.
    inputs = (*sources, rate, episode, dout, dafter, dsources[-1])
    dsources[-1], dmemory = _call(
        _keys_kernel,
        sizes,
        "retention_keys",
        memory,
        inputs,
        [_like(dsources[-1]), _like(memory)],
        aliases={len(inputs) - 1: 0},
    )
    dscale, dbias = dnorm.sum(axis=0).swapaxes(0, 1).reshape(2, -1)
    return tuple(dsources), dmemory, dscale.astype(scale.dtype), dbias.astype(bias.dtype), None, None


_gated.defvjp(_forward, _backward)


def _forward_kernel(sizes, *refs):
    *sources, memory, scale, bias, rate, episode, y, recalled, after = refs
    cols, rate = _columns(sizes), rate[pl.program_id(1)]

    def chunk(c, past):
        rows, decays = _Rows(c, sizes), _Decays(c, sizes, rate, episode)
        q = rows.load(sources[0], cols)
        k, v, gate = (rows.load(sources[-1], cols, at) for at in sizes.columns)
        if sizes.settled:
            found = _dot(q, past)
        else:
            found = _dot(_dot(q, k.T) * decays.within, v) + _dot(q, past) * decays.since[:, None]
        rows.store(recalled, cols, found)
        normal, _ = _normal(found)
        gate = gate.astype(jnp.float32)
        y_ = gate * jax.nn.sigmoid(gate) * (normal * scale[cols][None] + bias[cols][None])
        rows.store(y, cols, y_)
        return past if sizes.settled else _remember(k, v, past, decays)

    after[...] = jax.lax.fori_loop(0, sizes.num_chunks, chunk, memory[...])


def _queries_kernel(sizes, *refs):
    """The gradients of queries, gates, and the norm; and of what is recalled, for the keys' kernel."""
    source, memory, scale, bias, rate, episode, recalled, dy, *dsources, dout, dnorm = refs
    cols, rate = _columns(sizes), rate[pl.program_id(1)]

    def chunk(c, carry):
        past, dscale, dbias = carry
        rows, decays = _Rows(c, sizes), _Decays(c, sizes, rate, episode)
        k, v, gate = (rows.load(source, cols, at) for at in sizes.columns)
        error, gate, found = (
            x.astype(jnp.float32) for x in (rows.load(dy, cols), gate, rows.load(recalled, cols))
        )
        normal, spread = _normal(found)
        sigmoid = jax.nn.sigmoid(gate)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        dgate = error * (normal * scale[cols][None] + bias[cols][None]) * slope
        rows.store(dsources[-1], cols, dgate, sizes.columns[2])
        dscaled = error * gate * sigmoid
        dnormal = dscaled * scale[cols][None]
        inner = (dnormal * normal).mean(axis=1, keepdims=True)
        dfound = (dnormal - dnormal.mean(axis=1, keepdims=True) - normal * inner) * spread
        rows.store(dout, cols, dfound)
        dfound = dfound.astype(v.dtype)
        dq = _dot(dfound, past.T)
        if not sizes.settled:
            dq = _dot(_dot(dfound, v.T) * decays.within, k) + dq * decays.since[:, None]
            past = _remember(k, v, past, decays)
        rows.store(dsources[0], cols, dq)
        return past, dscale + (dscaled * normal).sum(0), dbias + dscaled.sum(0)

    zeros = jnp.zeros((sizes.head,), jnp.float32)
    _, dscale, dbias = jax.lax.fori_loop(0, sizes.num_chunks, chunk, (memory[...], zeros, zeros))
    dnorm[0, :], dnorm[1, :] = dscale, dbias


def _keys_kernel(sizes, *refs):
    """The gradients of keys and values, from the last chunk to the first, and of the memory before it."""
    *sources, rate, episode, dout, dafter, _, dsource, dmemory = refs
    cols, rate = _columns(sizes), rate[pl.program_id(1)]

    def chunk(back, dpast):
        c = sizes.num_chunks - 1 - back
        rows, decays = _Rows(c, sizes), _Decays(c, sizes, rate, episode)
        q, error = rows.load(sources[0], cols), rows.load(dout, cols)
        if sizes.settled:
            for at in sizes.columns[:2]:
                rows.store(dsource, cols, jnp.zeros((sizes.rows, sizes.head), jnp.float32), at)
            return dpast + _dot(q.T, error)
        k, v = (rows.load(sources[-1], cols, at) for at in sizes.columns[:2])
        dv = _dot((_dot(q, k.T) * decays.within).T, error) + _dot(k, dpast) * decays.kept[:, None]
        dk = _dot((_dot(error, v.T) * decays.within).T, q) + _dot(v, dpast.T) * decays.kept[:, None]
        rows.store(dsource, cols, dk, sizes.columns[0])
        rows.store(dsource, cols, dv, sizes.columns[1])
        return dpast * decays.over + _dot((q * decays.since[:, None]).T, error)

    dmemory[...] = jax.lax.fori_loop(0, sizes.num_chunks, chunk, dafter[...])


class _Rows:
    """The tokens of a chunk in arrays of all tokens."""

    def __init__(self, c, sizes):
        row = jax.lax.iota(jnp.int32, sizes.rows)
        self.start, self.sizes = c * sizes.step, sizes
        self.there = (row < sizes.step) & (self.start + row < sizes.num_tokens)

    def _at(self, ref, cols, column):
        return ref.at[pl.ds(self.start, self.sizes.rows), pl.ds(column + cols.start, cols.size)]

    def _mask(self, cols):
        return jnp.broadcast_to(self.there[:, None], (self.sizes.rows, cols.size))

    def load(self, ref, cols, column=0):
        return triton.load(self._at(ref, cols, column), mask=self._mask(cols), other=0.0)

    def store(self, ref, cols, value, column=0):
        triton.store(self._at(ref, cols, column), value.astype(ref.dtype), mask=self._mask(cols))


class _Decays:
    """How much of what a chunk's tokens say is left where: `within` the chunk [rows, rows], `since` the
    memory before it [rows], `kept` for the memory after it [rows], and of the one `over` to the other."""

    def __init__(self, c, sizes, rate, episode):
        row = jax.lax.iota(jnp.int32, sizes.rows)
        time = jax.lax.div(jnp.minimum(c * sizes.step + row, sizes.num_tokens - 1), sizes.num_agents)
        own = episode[time]
        begun = jnp.minimum(c, 1)  # not in the first chunk, before which there is timestep -1 of episode 0
        before = jax.lax.div(jnp.maximum(c * sizes.step - 1, 0), sizes.num_agents)
        own_before = episode[before] * begun
        before = before - (1 - begun)
        last = jax.lax.div(jnp.minimum((c + 1) * sizes.step, sizes.num_tokens) - 1, sizes.num_agents)
        own_last = episode[last]

        def left(lag, same):
            return jnp.where(same, jnp.exp2(rate * jnp.maximum(lag, 0).astype(jnp.float32)), 0.0)

        lag = time[:, None] - time[None, :]
        seen = row[:, None] >= row[None, :] if sizes.causal else lag >= 0
        self.within = left(lag, seen & (own[:, None] == own[None, :]))
        self.since = left(time - before, own == own_before)
        self.kept = left(last - time, own == own_last)
        self.over = left(last - before, own_last == own_before)


def _remember(k, v, past, decays):
    return past * decays.over + _dot((k * decays.kept[:, None]).T, v)


def _normal(x):
    """(x normalised over channels, what it was multiplied with)."""
    x = x - x.mean(axis=1, keepdims=True)
    spread = jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + EPSILON)
    return x * spread, spread


def _dot(a, b):
    """In the precision of the inputs that have less, adding up in float32."""
    dtype = jnp.bfloat16 if jnp.bfloat16 in (a.dtype, b.dtype) else jnp.float32
    return jnp.dot(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def _columns(sizes):
    """The channels of this program's head."""
    return pl.ds(pl.program_id(1) * sizes.head, sizes.head)


def _sizes(sources, memory, num_agents, causal) -> Sizes:
    num_tokens, head = sources[0].shape[1], memory.shape[-1]
    width = memory.shape[1] * head
    first = width * (len(sources) == 1)
    settled = not causal and num_agents > LARGEST_CHUNK
    rows = 32 if causal or 32 % num_agents == 0 else LARGEST_CHUNK
    step = rows if causal or settled else rows // num_agents * num_agents
    columns = (first, first + width, first + 2 * width)
    return Sizes(num_tokens, num_agents, head, rows, step, causal, settled, columns)


def _call(kernel, sizes, name, memory, given, out_shape, aliases=None):
    """A program for every environment and head."""
    num_envs, num_heads = memory.shape[:2]

    def spec(x):
        if len(x.shape) < 2:
            return pl.BlockSpec(x.shape, lambda b, h: (0,) * len(x.shape))
        if len(x.shape) == 4:  # by head
            return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h: (b, h, 0, 0))
        return pl.BlockSpec((None, *x.shape[1:]), lambda b, h: (b,) + (0,) * (len(x.shape) - 1))

    interpret = jax.default_backend() != "gpu"
    warps = 4 if sizes.head <= 64 else 8
    return pl.pallas_call(
        functools.partial(kernel, sizes),
        grid=(num_envs, num_heads),
        in_specs=[spec(x) for x in given],
        out_specs=[spec(x) for x in out_shape],
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=warps, num_stages=1),
        name=name,
    )(*given)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
