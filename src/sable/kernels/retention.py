"""Gated retention over whole sequences as GPU kernels (Pallas, Triton): forwards one, backwards two, and one
more each way where sequences are cut.

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

from sable.kernels import gpu
from sable.ops import retention, sharding

EPSILON = 1e-6
LARGEST_CHUNK = 64
MIN_FILL = 0.85
"""How much of a smaller chunk whole timesteps must fill to be worth it."""
MIN_PROGRAMS, MIN_TOKENS = 256, 128
"""Programs enough for a GPU, and tokens enough for a program: sequences are cut accordingly."""


class Launch(tp.NamedTuple):
    """Tokens loaded for a chunk, and warps of a program."""

    rows: int
    warps: int


LAUNCHES = {16: Launch(32, 2), 32: Launch(32, 2), 64: Launch(64, 4), 128: Launch(32, 8)}
"""By channels of a head (benchmarks/README.md)."""


class Sizes(tp.NamedTuple):
    """The static sizes that the kernels are compiled for."""

    num_tokens: int
    num_agents: int
    head_dim: int
    rows: int
    """Tokens loaded for a chunk, a power of two."""
    step: int
    """Tokens of a chunk: whole timesteps, unless causal."""
    causal: bool
    state_is_final: bool
    """Whether the memory given already holds all that is seen: a large team's timestep that is not causal."""
    columns: tuple[int, int, int]
    """Where keys, values and gates begin in the source that holds them."""

    @property
    def num_chunks(self) -> int:
        return -(-self.num_tokens // self.step)


def supported(head_dim: int) -> bool:
    """Return whether the kernels can handle heads of so many channels."""
    return head_dim in LAUNCHES


def use_kernel(head_dim: int) -> bool:
    """Return whether a layer goes through the kernels: on a GPU, if both can."""
    return gpu.supports_kernels() and supported(head_dim)


def fits_shared_memory(head_dim: int, num_agents: int, causal: bool, dtype: jnp.dtype) -> bool:
    """Return whether a GPU has room for the chunks of a layer, which unless causal are whole timesteps."""
    largest = _largest_chunk(head_dim, dtype)
    return largest > 0 and (causal or num_agents <= largest or num_agents > LARGEST_CHUNK)


def _largest_chunk(head_dim: int, dtype: jnp.dtype) -> int:
    """Return the most tokens of a chunk, 0 where none fits. In float32 the gradients of keys share 112 KiB
    for 64 tokens of 64 channels, and as much for 16 of 128."""
    if dtype != jnp.float32 or gpu.has_large_shared_memory():
        return LARGEST_CHUNK
    return {64: 32, 128: 0}.get(head_dim, LARGEST_CHUNK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gated_retention(
    num_agents: int,
    causal: bool,
    sources: tuple[Array, ...],  # [B, T N, 4 E]: queries, keys, values, gates; or queries, and all else
    memory: Array,  # [B, H, d, d] before the first timestep
    scale: Array,  # [E] of the norm of what is recalled, one group per head
    bias: Array,  # [E]
    kappa: Array,  # [H] decays
    first: Array,  # [B, T]
) -> tuple[Array, Array]:
    """Return (swish(gate) * norm(retention) [B, T N, E], the memory after the last timestep)."""
    return _gated_retention_fwd(num_agents, causal, sources, memory, scale, bias, kappa, first)[0]


def _gated_retention_fwd(num_agents, causal, sources, memory, scale, bias, kappa, first):
    segments = _Segments(num_agents, causal, memory, kappa, first)
    sizes, episode_index = segments.sizes(sources), segments.episode_index
    parts, before, after = tuple(map(segments.parts, sources)), memory, None
    if segments.num > 1 or sizes.state_is_final:
        # What each segment adds to the memory, and so what each begins with, is found beforehand.
        added = segments.call(
            _memory_kernel,
            sizes,
            "retention_memory",
            (parts[-1], segments.log2_kappa, episode_index),
            [segments.state_struct],
        )
        before, ends, after = segments.recurrence(memory, added[0])
        before = ends if sizes.state_is_final else before
    out = jax.ShapeDtypeStruct((*parts[0].shape[:2], scale.shape[0]), sources[0].dtype)
    inputs = (*parts, before, scale, bias, segments.log2_kappa, episode_index)
    y, readouts, last = segments.call(
        _forward_kernel, sizes, "retention", inputs, [out, out, segments.state_struct]
    )
    result = y.reshape(*sources[0].shape[:2], -1), last if after is None else after
    return result, (sources, before, readouts, scale, bias, kappa, first, memory)


def use_timestep_kernel(head_dim: int, num_agents: int, causal: bool) -> bool:
    """Return whether `all_agents` is the way; a large team that is not causal needs the memory after it."""
    fit = fits_shared_memory(head_dim, num_agents, causal, jnp.dtype(jnp.float32))
    return use_kernel(head_dim) and fit and (causal or num_agents <= LARGEST_CHUNK)


def all_agents(
    causal: bool,
    sources: tuple[Array, ...],  # [B, N, 4 E] or [B, N, E] and [B, N, 3 E]
    past: Array,  # the memory [B, H, d, d] as the timestep before left it; or what it says [B, N, E]
    scale: Array,
    bias: Array,
    kappa: Array,
) -> Array:
    """Return `gated_retention` for the agents of one timestep: no memory is written, and there are no
    residuals."""
    return _one_timestep(causal, sources, past, scale, bias, kappa)[0]


def timestep(
    causal: bool,
    sources: tuple[Array, ...],
    memory: Array,  # [B, H, d, d] as the timestep before left it
    scale: Array,
    bias: Array,
    kappa: Array,
) -> tuple[Array, Array]:
    """Return (`all_agents`, the memory after it), which takes the place of the one before: that is read once
    for both."""
    out, memory = _one_timestep(causal, sources, memory, scale, bias, kappa, write_memory=True)
    return out, memory


def _one_timestep(causal, sources, past, scale, bias, kappa, write_memory=False):
    num_envs, num_agents = sources[0].shape[:2]
    head_dim = scale.shape[0] // kappa.shape[0]
    memory = jax.ShapeDtypeStruct((num_envs, kappa.shape[0], head_dim, head_dim), jnp.float32)
    segments = _Segments(num_agents, causal, memory, kappa, jnp.zeros((num_envs, 1), bool))
    out = jax.ShapeDtypeStruct((num_envs, num_agents, scale.shape[0]), sources[0].dtype)
    inputs = (*sources, past, scale, bias, segments.log2_kappa, segments.episode_index)
    kernel = _forward_kernel if past.ndim == 4 else functools.partial(_forward_kernel, has_readout=True)
    shapes, aliases = ([out, memory], {len(sources): 1}) if write_memory else ([out], None)
    name = "retention_timestep" if write_memory else "retention_all_agents"
    return segments.call(kernel, segments.sizes(sources), name, inputs, shapes, aliases)


def _gated_retention_bwd(num_agents, causal, residuals, cotangents):
    sources, before, readouts, scale, bias, kappa, first, memory = residuals
    dy, dafter = cotangents
    segments = _Segments(num_agents, causal, memory, kappa, first, before.shape[0] // memory.shape[0])
    sizes, episode_index = segments.sizes(sources), segments.episode_index
    parts, log2_kappa = tuple(map(segments.parts, sources)), segments.log2_kappa
    norm = jax.ShapeDtypeStruct((*segments.state_struct.shape[:2], 2, sizes.head_dim), jnp.float32)
    inputs = (parts[-1], before, scale, bias, log2_kappa, episode_index, readouts, segments.parts(dy))
    shapes = [*map(_shape_struct, parts), _shape_struct(readouts), norm]
    *dparts, dout, dnorm = segments.call(
        _query_gate_bwd_kernel, sizes, "retention_query_gate_bwd", inputs, shapes
    )
    dends, dmemory = dafter, None
    if segments.num > 1 or sizes.state_is_final:
        # What is recalled pulls at the memory each segment began with, and so at those before.
        memory_cotangents = segments.call(
            _memory_bwd_kernel,
            sizes,
            "retention_memory_bwd",
            (parts[0], log2_kappa, episode_index, dout),
            [segments.state_struct],
        )
        dends, dmemory = segments.recurrence_bwd(dafter, memory_cotangents[0], sizes.state_is_final)
    # Keys and values go beside the gates, into the same array.
    inputs = (*parts, log2_kappa, episode_index, dout, dends, dparts[-1])
    shapes, aliases = [_shape_struct(dparts[-1]), segments.state_struct], {len(inputs) - 1: 0}
    dparts[-1], dstart = segments.call(
        _key_value_bwd_kernel, sizes, "retention_key_value_bwd", inputs, shapes, aliases
    )
    dmemory = dstart if dmemory is None else dmemory
    dscale, dbias = dnorm.sum(axis=0).swapaxes(0, 1).reshape(2, -1)
    dsources = tuple(d.reshape(x.shape) for d, x in zip(dparts, sources, strict=True))
    return dsources, dmemory, dscale.astype(scale.dtype), dbias.astype(bias.dtype), None, None


gated_retention.defvjp(_gated_retention_fwd, _gated_retention_bwd)


def num_segments(num_rows: int, num_steps: int, num_agents: int) -> int:
    """Return into how many equal parts sequences are cut, to make programs of `num_rows` enough."""
    candidates = [
        n
        for n in range(1, num_steps + 1)
        if num_steps % n == 0 and (n == 1 or num_steps // n * num_agents >= MIN_TOKENS)
    ]
    return next((n for n in candidates if n * num_rows >= MIN_PROGRAMS), candidates[-1])


class _Segments:
    """Sequences cut into segments, side by side as if they were environments."""

    def __init__(self, num_agents, causal, memory, kappa, first, num=None):
        (num_envs, num_steps), num_heads = first.shape, memory.shape[1]
        self.num_agents, self.causal, self.head_dim = num_agents, causal, memory.shape[-1]
        self.state_is_final = not causal and num_agents > LARGEST_CHUNK
        num_rows = num_envs * num_heads * sharding.num_learners()
        self.num = num or (
            num_steps if self.state_is_final else num_segments(num_rows, num_steps, num_agents)
        )
        self.first = first.reshape(num_envs, self.num, -1)
        self.episode_index = jnp.cumsum(self.first.astype(jnp.int32), axis=-1).reshape(
            num_envs * self.num, -1
        )
        # Finite where a head forgets all: 0 ** 0 is one, but -inf * 0 is not a number.
        self.log2_kappa = jnp.maximum(jnp.log2(kappa), jnp.finfo(jnp.float32).min)
        self.segment_decay = kappa ** (num_steps // self.num)
        self.state_struct = jax.ShapeDtypeStruct((num_envs * self.num, *memory.shape[1:]), jnp.float32)

    def parts(self, x):
        return x.reshape(self.state_struct.shape[0], -1, x.shape[-1])

    def sizes(self, sources) -> Sizes:
        width = self.state_struct.shape[1] * self.head_dim
        start = width * (len(sources) == 1)
        num_tokens = sources[0].shape[1] // self.num
        rows = LAUNCHES[self.head_dim].rows
        if not self.causal and rows // self.num_agents * self.num_agents < MIN_FILL * rows:
            rows = LARGEST_CHUNK
        if not self.state_is_final:
            rows = min(rows, _largest_chunk(self.head_dim, sources[0].dtype))
        rows = min(rows, max(16, pl.next_power_of_2(num_tokens)))
        return Sizes(
            num_tokens=num_tokens,
            num_agents=self.num_agents,
            head_dim=self.head_dim,
            rows=rows,
            step=rows if self.causal or self.state_is_final else rows // self.num_agents * self.num_agents,
            causal=self.causal,
            state_is_final=self.state_is_final,
            columns=(start, start + width, start + 2 * width),
        )

    def recurrence(self, memory, added):
        """Return (memories before, and after, segments, as environments; after the last)."""
        before, last = retention.chunk_recurrence(
            memory, self._has_reset(), self.segment_decay, self._split_segments(added)
        )
        return (
            self._merge_segments(before),
            self._merge_segments(jnp.concatenate([before[1:], last[None]])),
            last,
        )

    def recurrence_bwd(self, dafter, memory_cotangents, state_is_final):
        """Return (gradients of memories after segments, as environments; of the memory before the first)."""
        has_reset, memory_cotangents = self._has_reset(), self._split_segments(memory_cotangents)
        if state_is_final:  # a segment recalls what it leaves, not what it finds
            has_reset = jnp.roll(has_reset, -1, axis=0)
            memory_cotangents = memory_cotangents.at[-1].add(dafter)
            dafter = jnp.zeros_like(dafter)
        later, earliest = retention.chunk_recurrence(
            dafter, has_reset[::-1], self.segment_decay, memory_cotangents[::-1]
        )
        if not state_is_final:
            return self._merge_segments(later[::-1]), earliest
        after_own = jnp.concatenate([later[1:], earliest[None]])[::-1]
        return self._merge_segments(after_own), retention.decay_memory(
            after_own[0], self.segment_decay, self._has_reset()[0]
        )

    def _has_reset(self):
        return self.first.any(axis=-1).T

    def _split_segments(self, x):
        return x.reshape(-1, self.num, *x.shape[1:]).swapaxes(0, 1)

    def _merge_segments(self, x):
        return x.swapaxes(0, 1).reshape(self.state_struct.shape)

    def call(self, kernel, sizes, name, inputs, out_shape, aliases=None):
        """Run a program for every segment and head."""
        interpret = jax.default_backend() != "gpu"
        return pl.pallas_call(
            functools.partial(kernel, sizes),
            grid=self.state_struct.shape[:2],
            in_specs=[*map(block_spec, inputs)],
            out_specs=[*map(block_spec, out_shape)],
            out_shape=out_shape,
            input_output_aliases=aliases or {},
            interpret=interpret,
            compiler_params=None
            if interpret
            else triton.CompilerParams(
                num_warps=_warps(sizes), num_stages=_stages(sizes, name, inputs[0].dtype)
            ),
            name=name,
        )(*inputs)


def _warps(sizes: Sizes) -> int:
    return LAUNCHES[sizes.head_dim].warps if sizes.num_tokens > 16 else max(1, sizes.head_dim // 32)


def _stages(sizes: Sizes, name: str, dtype: jnp.dtype) -> int:
    """Return the stages of a kernel's pipeline. With more than 1 the next chunks are read while one is
    computed, as far as there are registers and memory to share for them."""
    if sizes.head_dim > 64 or (sizes.head_dim == 32 and name == "retention_key_value_bwd"):
        return 1
    return 3 if sizes.head_dim == 64 and dtype == jnp.bfloat16 and gpu.has_large_shared_memory() else 2


def block_spec(x) -> pl.BlockSpec:
    """Return a program's share of an array: all of a vector, its own head of a state, else its own
    segment."""
    if len(x.shape) < 2:
        return pl.BlockSpec(x.shape, lambda b, h: (0,) * len(x.shape))
    if len(x.shape) == 4:
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h: (b, h, 0, 0))
    return pl.BlockSpec((None, *x.shape[1:]), lambda b, h: (b,) + (0,) * (len(x.shape) - 1))


def _memory_kernel(sizes, source, log2_kappa, episode_index, memory):
    """Write what a segment adds to the memory."""
    cols, log2_kappa = _columns(sizes), log2_kappa[pl.program_id(1)]

    def chunk(c, past):
        rows, decays = _ChunkRows(c, sizes), _Decays(c, sizes, log2_kappa, episode_index)
        k, v = (rows.load(source, cols, at) for at in sizes.columns[:2])
        return _write_memory(k, v, past, decays)

    zeros = jnp.zeros((sizes.head_dim, sizes.head_dim), jnp.float32)
    memory[...] = jax.lax.fori_loop(0, sizes.num_chunks, chunk, zeros)


def _memory_bwd_kernel(sizes, source, log2_kappa, episode_index, dout, dmemory):
    """Write the gradient of the memory that a segment is given, from what it recalls of it."""
    cols, log2_kappa = _columns(sizes), log2_kappa[pl.program_id(1)]

    def chunk(reversed_index, dpast):
        c = sizes.num_chunks - 1 - reversed_index
        rows, decays = _ChunkRows(c, sizes), _Decays(c, sizes, log2_kappa, episode_index)
        return _memory_cotangent(rows.load(source, cols), rows.load(dout, cols), dpast, decays, sizes)

    zeros = jnp.zeros((sizes.head_dim, sizes.head_dim), jnp.float32)
    dmemory[...] = jax.lax.fori_loop(0, sizes.num_chunks, chunk, zeros)


def _forward_kernel(sizes, *refs, has_readout=False):
    """Write what the layer gives; also what was recalled and the memory after it, or the latter alone, where
    they are asked for. `has_readout`: in place of the memory comes what it says."""
    num_sources = 1 if sizes.columns[0] else 2
    sources, (memory, scale, bias, log2_kappa, episode_index, y, *more) = (
        refs[:num_sources],
        refs[num_sources:],
    )
    cols, log2_kappa = _columns(sizes), log2_kappa[pl.program_id(1)]

    def chunk(c, past):
        rows, decays = _ChunkRows(c, sizes), _Decays(c, sizes, log2_kappa, episode_index)
        q = rows.load(sources[0], cols)
        k, v, gate = (rows.load(sources[-1], cols, at) for at in sizes.columns)
        if sizes.state_is_final:
            readout = dot(q, past)
        else:
            readout = dot(dot(q, k.T) * decays.intra_chunk, v)
            if not (has_readout and sizes.num_chunks == 1):  # else there is nothing before
                readout += dot(q, past) * decays.from_memory[:, None]
        if has_readout:
            readout += rows.load(memory, cols)
        if len(more) == 2:
            rows.store(more[0], cols, readout)
        normal, _ = _layer_normalise(readout)
        gate = gate.astype(jnp.float32)
        y_ = gate * sigmoid(gate, q.dtype) * (normal * scale[cols][None] + bias[cols][None])
        rows.store(y, cols, y_)
        return past if sizes.state_is_final else _write_memory(k, v, past, decays)

    past = jnp.zeros((sizes.head_dim, sizes.head_dim), jnp.float32) if has_readout else memory[...]
    # One chunk needs no loop, which would compute a memory after it that nobody asks for.
    after = (
        chunk(traced_zero(), past)
        if sizes.num_chunks == 1
        else jax.lax.fori_loop(0, sizes.num_chunks, chunk, past)
    )
    if more:
        more[-1][...] = after


def _query_gate_bwd_kernel(sizes, *refs):
    """Write the gradients of queries, gates, and the norm; and of what is recalled, for the keys' kernel."""
    source, memory, scale, bias, log2_kappa, episode_index, readouts, dy, *dsources, dout, dnorm = refs
    cols, log2_kappa = _columns(sizes), log2_kappa[pl.program_id(1)]

    def chunk(c, carry):
        past, dscale, dbias = carry
        rows, decays = _ChunkRows(c, sizes), _Decays(c, sizes, log2_kappa, episode_index)
        cotangent, gate, readout = (
            x.astype(jnp.float32)
            for x in (
                rows.load(dy, cols),
                rows.load(source, cols, sizes.columns[2]),
                rows.load(readouts, cols),
            )
        )
        normal, inv_std = _layer_normalise(readout)
        sig = sigmoid(gate, source.dtype)
        swish = gate * sig
        dgate = cotangent * (normal * scale[cols][None] + bias[cols][None]) * (sig + swish * (1 - sig))
        rows.store(dsources[-1], cols, dgate, sizes.columns[2])
        dscaled = cotangent * swish
        dscale, dbias = dscale + (dscaled * normal).sum(0), dbias + dscaled.sum(0)
        dnormal = dscaled * scale[cols][None]
        inner = (dnormal * normal).mean(axis=1, keepdims=True)
        dreadout = (dnormal - dnormal.mean(axis=1, keepdims=True) - normal * inner) * inv_std
        rows.store(dout, cols, dreadout)
        k, v = (rows.load(source, cols, at) for at in sizes.columns[:2])  # not before: registers are short
        dreadout = dreadout.astype(v.dtype)
        dq = dot(dreadout, past.T)
        if not sizes.state_is_final:
            dq = dot(dot(dreadout, v.T) * decays.intra_chunk, k) + dq * decays.from_memory[:, None]
            past = _write_memory(k, v, past, decays)
        rows.store(dsources[0], cols, dq)
        return past, dscale, dbias

    zeros = jnp.zeros((sizes.head_dim,), jnp.float32)
    _, dscale, dbias = jax.lax.fori_loop(0, sizes.num_chunks, chunk, (memory[...], zeros, zeros))
    dnorm[0, :], dnorm[1, :] = dscale, dbias


def _key_value_bwd_kernel(sizes, *refs):
    """Write the gradients of keys and values, from the last chunk to the first, and of the memory before
    it."""
    *sources, log2_kappa, episode_index, dout, dafter, _, dsource, dmemory = refs
    cols, log2_kappa = _columns(sizes), log2_kappa[pl.program_id(1)]

    def chunk(reversed_index, dpast):
        c = sizes.num_chunks - 1 - reversed_index
        rows, decays = _ChunkRows(c, sizes), _Decays(c, sizes, log2_kappa, episode_index)
        q, cotangent = rows.load(sources[0], cols), rows.load(dout, cols)
        k, v = (rows.load(sources[-1], cols, at) for at in sizes.columns[:2])
        dk = dot(v, dpast.T)
        if not sizes.state_is_final:
            dk = dot((dot(cotangent, v.T) * decays.intra_chunk).T, q) + dk * decays.to_memory[:, None]
        rows.store(dsource, cols, dk, sizes.columns[0])  # before the other is begun: registers are short
        dv = dot(k, dpast)
        if not sizes.state_is_final:
            dv = dot((dot(q, k.T) * decays.intra_chunk).T, cotangent) + dv * decays.to_memory[:, None]
            dpast = _memory_cotangent(q, cotangent, dpast, decays, sizes)
        rows.store(dsource, cols, dv, sizes.columns[1])
        return dpast

    dmemory[...] = jax.lax.fori_loop(0, sizes.num_chunks, chunk, dafter[...])


class _ChunkRows:
    """The tokens of a chunk in arrays of all tokens."""

    def __init__(self, c, sizes):
        row = jax.lax.iota(jnp.int32, sizes.rows)
        self.start, self.sizes = c * sizes.step, sizes
        self.valid = (row < sizes.step) & (self.start + row < sizes.num_tokens)

    def _at(self, ref, cols, column):
        return ref.at[pl.ds(self.start, self.sizes.rows), pl.ds(column + cols.start, cols.size)]

    def _mask(self, cols):
        return jnp.broadcast_to(self.valid[:, None], (self.sizes.rows, cols.size))

    def load(self, ref, cols, column=0):
        return triton.load(self._at(ref, cols, column), mask=self._mask(cols), other=0.0)

    def store(self, ref, cols, value, column=0):
        triton.store(self._at(ref, cols, column), value.astype(ref.dtype), mask=self._mask(cols))


class _Decays:
    """Decay factors of a chunk: `intra_chunk` between its tokens [rows, rows], `from_memory` of the memory
    before it to each token [rows], `to_memory` of each token to the memory after it [rows], and `over_chunk`
    of the one memory to the other."""

    def __init__(self, c, sizes, log2_kappa, episode_index):
        row = jax.lax.iota(jnp.int32, sizes.rows)
        timestep = jax.lax.div(jnp.minimum(c * sizes.step + row, sizes.num_tokens - 1), sizes.num_agents)
        own_episode = episode_index[timestep]
        begun = jnp.minimum(c, 1)  # not in the first chunk, before which there is timestep -1 of episode 0
        before = jax.lax.div(jnp.maximum(c * sizes.step - 1, 0), sizes.num_agents)
        own_before = episode_index[before] * begun
        before = before - (1 - begun)
        last = jax.lax.div(jnp.minimum((c + 1) * sizes.step, sizes.num_tokens) - 1, sizes.num_agents)
        own_last = episode_index[last]

        def power(lag, same):
            return jnp.where(same, jnp.exp2(log2_kappa * jnp.maximum(lag, 0).astype(jnp.float32)), 0.0)

        lag = timestep[:, None] - timestep[None, :]
        visible = row[:, None] >= row[None, :] if sizes.causal else lag >= 0
        self.intra_chunk = power(lag, visible & (own_episode[:, None] == own_episode[None, :]))
        self.from_memory = power(timestep - before, own_episode == own_before)
        self.to_memory = power(last - timestep, own_episode == own_last)
        self.over_chunk = power(last - before, own_last == own_before)


def _write_memory(k, v, past, decays):
    return past * decays.over_chunk + dot((k * decays.to_memory[:, None]).T, v)


def _memory_cotangent(q, cotangent, dpast, decays, sizes):
    """Return the gradient of the memory before a chunk, from that after it and what the chunk recalls."""
    if sizes.state_is_final:
        return dpast + dot(q.T, cotangent)
    return dpast * decays.over_chunk + dot((q * decays.from_memory[:, None]).T, cotangent)


def _layer_normalise(x):
    """Return (x normalised over channels, what it was multiplied with)."""
    x = x - x.mean(axis=1, keepdims=True)
    inv_std = jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + EPSILON)
    return x * inv_std, inv_std


def traced_zero() -> Array:
    """Return a zero whose value is not known while tracing. JAX 0.12 refuses slices that are known to end
    beyond an array, even where a mask leaves out what is not there."""
    return pl.program_id(0) * 0


def dot(a, b):
    """Return a @ b in the precision of the one that has less, added up in float32."""
    dtype = jnp.bfloat16 if jnp.bfloat16 in (a.dtype, b.dtype) else jnp.float32
    return jnp.dot(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def sigmoid(x, dtype):
    """Return the sigmoid of x, as exact as `dtype` needs it: a GPU's own tanh is right to 2^-11 and takes a
    fifth of the instructions."""
    if dtype != jnp.bfloat16 or jax.default_backend() != "gpu":
        return jax.nn.sigmoid(x)
    return 0.5 + 0.5 * triton.approx_tanh(0.5 * x)


def _columns(sizes):
    """Return the channels of this program's head."""
    return pl.ds(pl.program_id(1) * sizes.head_dim, sizes.head_dim)


def _shape_struct(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
