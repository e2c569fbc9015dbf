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
PACKED = 0.85
"""How much of a smaller chunk whole timesteps must fill to be worth it."""
PROGRAMS, TOKENS = 256, 128
"""Programs enough for a GPU, and tokens enough for a program: sequences are cut accordingly."""


class Launch(tp.NamedTuple):
    """Tokens loaded for a chunk, and warps of a program."""

    rows: int
    warps: int


LAUNCHES = {16: Launch(32, 2), 32: Launch(32, 2), 64: Launch(64, 4), 128: Launch(32, 8)}
"""By channels of a head (benchmarks/README.md)."""


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
    return head in LAUNCHES


def chosen(head: int) -> bool:
    """Whether a layer goes through the kernels: on a GPU, if both can."""
    return gpu.capable() and supported(head)


def fits(head: int, num_agents: int, causal: bool, dtype: jnp.dtype) -> bool:
    """Whether a GPU has room for the chunks of a layer, which unless causal are whole timesteps."""
    largest = _largest_chunk(head, dtype)
    return largest > 0 and (causal or num_agents <= largest or num_agents > LARGEST_CHUNK)


def _largest_chunk(head: int, dtype: jnp.dtype) -> int:
    """The most tokens of a chunk, 0 where none fits. In float32 the gradients of keys share 112 KiB for 64
    tokens of 64 channels, and as much for 16 of 128."""
    if dtype != jnp.float32 or gpu.roomy():
        return LARGEST_CHUNK
    return {64: 32, 128: 0}.get(head, LARGEST_CHUNK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
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
    return _forward(num_agents, causal, sources, memory, scale, bias, kappa, first)[0]


def _forward(num_agents, causal, sources, memory, scale, bias, kappa, first):
    cut = _Cut(num_agents, causal, memory, kappa, first)
    sizes, episode = cut.sizes(sources), cut.episode
    parts, before, after = tuple(map(cut.parts, sources)), memory, None
    if cut.num > 1 or sizes.settled:
        # What each segment adds to the memory, and so what each begins with, is found beforehand.
        added = cut.call(
            _memory_kernel, sizes, "retention_memory", (parts[-1], cut.rate, episode), [cut.states]
        )
        before, ends, after = cut.thread(memory, added[0])
        before = ends if sizes.settled else before
    out = jax.ShapeDtypeStruct((*parts[0].shape[:2], scale.shape[0]), sources[0].dtype)
    given = (*parts, before, scale, bias, cut.rate, episode)
    y, recalled, last = cut.call(_forward_kernel, sizes, "retention", given, [out, out, cut.states])
    result = y.reshape(*sources[0].shape[:2], -1), last if after is None else after
    return result, (sources, before, recalled, scale, bias, kappa, first, memory)


def team_chosen(head: int, num_agents: int, causal: bool) -> bool:
    """Whether `team` is the way; a large team that is not causal needs the memory after it."""
    fit = fits(head, num_agents, causal, jnp.dtype(jnp.float32))
    return chosen(head) and fit and (causal or num_agents <= LARGEST_CHUNK)


def team(
    causal: bool,
    sources: tuple[Array, ...],  # [B, N, 4 E] or [B, N, E] and [B, N, 3 E]
    past: Array,  # the memory [B, H, d, d] as the timestep before left it; or what it says [B, N, E]
    scale: Array,
    bias: Array,
    kappa: Array,
) -> Array:
    """`gated` for the agents of one timestep: nothing is remembered, nor kept for going back."""
    return _team(causal, sources, past, scale, bias, kappa)[0]


def timestep(
    causal: bool,
    sources: tuple[Array, ...],
    memory: Array,  # [B, H, d, d] as the timestep before left it
    scale: Array,
    bias: Array,
    kappa: Array,
) -> tuple[Array, Array]:
    """(`team`, the memory after it), which takes the place of the one before: that is read once for both."""
    out, memory = _team(causal, sources, memory, scale, bias, kappa, remember=True)
    return out, memory


def _team(causal, sources, past, scale, bias, kappa, remember=False):
    num_envs, num_agents = sources[0].shape[:2]
    head = scale.shape[0] // kappa.shape[0]
    memory = jax.ShapeDtypeStruct((num_envs, kappa.shape[0], head, head), jnp.float32)
    cut = _Cut(num_agents, causal, memory, kappa, jnp.zeros((num_envs, 1), bool))
    out = jax.ShapeDtypeStruct((num_envs, num_agents, scale.shape[0]), sources[0].dtype)
    given = (*sources, past, scale, bias, cut.rate, cut.episode)
    kernel = _forward_kernel if past.ndim == 4 else functools.partial(_forward_kernel, told=True)
    shapes, aliases = ([out, memory], {len(sources): 1}) if remember else ([out], None)
    name = "retention_timestep" if remember else "retention_team"
    return cut.call(kernel, cut.sizes(sources), name, given, shapes, aliases)


def _backward(num_agents, causal, residuals, cotangents):
    sources, before, recalled, scale, bias, kappa, first, memory = residuals
    dy, dafter = cotangents
    cut = _Cut(num_agents, causal, memory, kappa, first, before.shape[0] // memory.shape[0])
    sizes, episode = cut.sizes(sources), cut.episode
    parts, rate = tuple(map(cut.parts, sources)), cut.rate
    norm = jax.ShapeDtypeStruct((*cut.states.shape[:2], 2, sizes.head), jnp.float32)
    given = (parts[-1], before, scale, bias, rate, episode, recalled, cut.parts(dy))
    shapes = [*map(_like, parts), _like(recalled), norm]
    *dparts, dout, dnorm = cut.call(_queries_kernel, sizes, "retention_queries", given, shapes)
    dends, dmemory = dafter, None
    if cut.num > 1 or sizes.settled:
        # What is recalled pulls at the memory each segment began with, and so at those before.
        pulls = cut.call(_pull_kernel, sizes, "retention_pull", (parts[0], rate, episode, dout), [cut.states])
        dends, dmemory = cut.thread_back(dafter, pulls[0], sizes.settled)
    # Keys and values go beside the gates, into the same array.
    given = (*parts, rate, episode, dout, dends, dparts[-1])
    shapes, aliases = [_like(dparts[-1]), cut.states], {len(given) - 1: 0}
    dparts[-1], dstart = cut.call(_keys_kernel, sizes, "retention_keys", given, shapes, aliases)
    dmemory = dstart if dmemory is None else dmemory
    dscale, dbias = dnorm.sum(axis=0).swapaxes(0, 1).reshape(2, -1)
    dsources = tuple(d.reshape(x.shape) for d, x in zip(dparts, sources, strict=True))
    return dsources, dmemory, dscale.astype(scale.dtype), dbias.astype(bias.dtype), None, None


gated.defvjp(_forward, _backward)


def num_segments(num_rows: int, num_steps: int, num_agents: int) -> int:
    """Into how many equal parts sequences are cut, to make programs of `num_rows` enough."""
    enough = [
        n
        for n in range(1, num_steps + 1)
        if num_steps % n == 0 and (n == 1 or num_steps // n * num_agents >= TOKENS)
    ]
    return next((n for n in enough if n * num_rows >= PROGRAMS), enough[-1])


class _Cut:
    """Sequences cut into segments, side by side as if they were environments."""

    def __init__(self, num_agents, causal, memory, kappa, first, num=None):
        (num_envs, num_steps), num_heads = first.shape, memory.shape[1]
        self.num_agents, self.causal, self.head = num_agents, causal, memory.shape[-1]
        self.settled = not causal and num_agents > LARGEST_CHUNK
        num_rows = num_envs * num_heads * sharding.num_learners()
        self.num = num or (num_steps if self.settled else num_segments(num_rows, num_steps, num_agents))
        self.first = first.reshape(num_envs, self.num, -1)
        self.episode = jnp.cumsum(self.first.astype(jnp.int32), axis=-1).reshape(num_envs * self.num, -1)
        # Finite where a head forgets all: 0 ** 0 is one, but -inf * 0 is not a number.
        self.rate = jnp.maximum(jnp.log2(kappa), jnp.finfo(jnp.float32).min)
        self.over = kappa ** (num_steps // self.num)
        self.states = jax.ShapeDtypeStruct((num_envs * self.num, *memory.shape[1:]), jnp.float32)

    def parts(self, x):
        return x.reshape(self.states.shape[0], -1, x.shape[-1])

    def sizes(self, sources) -> Sizes:
        width = self.states.shape[1] * self.head
        start = width * (len(sources) == 1)
        num_tokens = sources[0].shape[1] // self.num
        rows = LAUNCHES[self.head].rows
        if not self.causal and rows // self.num_agents * self.num_agents < PACKED * rows:
            rows = LARGEST_CHUNK
        if not self.settled:
            rows = min(rows, _largest_chunk(self.head, sources[0].dtype))
        rows = min(rows, max(16, pl.next_power_of_2(num_tokens)))
        return Sizes(
            num_tokens=num_tokens,
            num_agents=self.num_agents,
            head=self.head,
            rows=rows,
            step=rows if self.causal or self.settled else rows // self.num_agents * self.num_agents,
            causal=self.causal,
            settled=self.settled,
            columns=(start, start + width, start + 2 * width),
        )

    def thread(self, memory, added):
        """(memories before, and after, segments, as environments; after the last)."""
        before, last = retention.thread(memory, self._opened(), self.over, self._by_segment(added))
        return self._flat(before), self._flat(jnp.concatenate([before[1:], last[None]])), last

    def thread_back(self, dafter, pulls, settled):
        """(gradients of memories after segments, as environments; of the memory before the first)."""
        opened, pulls = self._opened(), self._by_segment(pulls)
        if settled:  # a segment recalls what it leaves, not what it finds
            opened = jnp.roll(opened, -1, axis=0)
            pulls = pulls.at[-1].add(dafter)
            dafter = jnp.zeros_like(dafter)
        later, earliest = retention.thread(dafter, opened[::-1], self.over, pulls[::-1])
        if not settled:
            return self._flat(later[::-1]), earliest
        own = jnp.concatenate([later[1:], earliest[None]])[::-1]
        return self._flat(own), retention.past(own[0], self.over, self._opened()[0])

    def _opened(self):
        return self.first.any(axis=-1).T

    def _by_segment(self, x):
        return x.reshape(-1, self.num, *x.shape[1:]).swapaxes(0, 1)

    def _flat(self, x):
        return x.swapaxes(0, 1).reshape(self.states.shape)

    def call(self, kernel, sizes, name, given, out_shape, aliases=None):
        """A program for every segment and head."""
        interpret = jax.default_backend() != "gpu"
        return pl.pallas_call(
            functools.partial(kernel, sizes),
            grid=self.states.shape[:2],
            in_specs=[*map(block_spec, given)],
            out_specs=[*map(block_spec, out_shape)],
            out_shape=out_shape,
            input_output_aliases=aliases or {},
            interpret=interpret,
            compiler_params=None
            if interpret
            else triton.CompilerParams(
                num_warps=_warps(sizes), num_stages=_stages(sizes, name, given[0].dtype)
            ),
            name=name,
        )(*given)


def _warps(sizes: Sizes) -> int:
    return LAUNCHES[sizes.head].warps if sizes.num_tokens > 16 else max(1, sizes.head // 32)


def _stages(sizes: Sizes, name: str, dtype: jnp.dtype) -> int:
    """More than 1: the next chunks are read while one is computed, as far as there are registers and memory
    to share for them."""
    if sizes.head > 64 or (sizes.head == 32 and name == "retention_keys"):
        return 1
    return 3 if sizes.head == 64 and dtype == jnp.bfloat16 and gpu.roomy() else 2


def block_spec(x) -> pl.BlockSpec:
    """What a program is given: all of a vector, its own head of a state, else its own segment."""
    if len(x.shape) < 2:
        return pl.BlockSpec(x.shape, lambda b, h: (0,) * len(x.shape))
    if len(x.shape) == 4:
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h: (b, h, 0, 0))
    return pl.BlockSpec((None, *x.shape[1:]), lambda b, h: (b,) + (0,) * (len(x.shape) - 1))


def _memory_kernel(sizes, source, rate, episode, memory):
    """What a segment adds to the memory."""
    cols, rate = _columns(sizes), rate[pl.program_id(1)]

    def chunk(c, past):
        rows, decays = _Rows(c, sizes), _Decays(c, sizes, rate, episode)
        k, v = (rows.load(source, cols, at) for at in sizes.columns[:2])
        return _remember(k, v, past, decays)

    zeros = jnp.zeros((sizes.head, sizes.head), jnp.float32)
    memory[...] = jax.lax.fori_loop(0, sizes.num_chunks, chunk, zeros)


def _pull_kernel(sizes, source, rate, episode, dout, dmemory):
    """The gradient of the memory that a segment is given, from what it recalls of it."""
    cols, rate = _columns(sizes), rate[pl.program_id(1)]

    def chunk(back, dpast):
        c = sizes.num_chunks - 1 - back
        rows, decays = _Rows(c, sizes), _Decays(c, sizes, rate, episode)
        return _pull(rows.load(source, cols), rows.load(dout, cols), dpast, decays, sizes)

    zeros = jnp.zeros((sizes.head, sizes.head), jnp.float32)
    dmemory[...] = jax.lax.fori_loop(0, sizes.num_chunks, chunk, zeros)


def _forward_kernel(sizes, *refs, told=False):
    """What the layer gives; also what was recalled and the memory after it, or the latter alone, where they
    are asked for. `told`: in place of the memory comes what it says."""
    num_sources = 1 if sizes.columns[0] else 2
    sources, (memory, scale, bias, rate, episode, y, *more) = refs[:num_sources], refs[num_sources:]
    cols, rate = _columns(sizes), rate[pl.program_id(1)]

    def chunk(c, past):
        rows, decays = _Rows(c, sizes), _Decays(c, sizes, rate, episode)
        q = rows.load(sources[0], cols)
        k, v, gate = (rows.load(sources[-1], cols, at) for at in sizes.columns)
        if sizes.settled:
            found = dot(q, past)
        else:
            found = dot(dot(q, k.T) * decays.within, v)
            if not (told and sizes.num_chunks == 1):  # else there is nothing before
                found += dot(q, past) * decays.since[:, None]
        if told:
            found += rows.load(memory, cols)
        if len(more) == 2:
            rows.store(more[0], cols, found)
        normal, _ = _normal(found)
        gate = gate.astype(jnp.float32)
        y_ = gate * sigmoid(gate, q.dtype) * (normal * scale[cols][None] + bias[cols][None])
        rows.store(y, cols, y_)
        return past if sizes.settled else _remember(k, v, past, decays)

    past = jnp.zeros((sizes.head, sizes.head), jnp.float32) if told else memory[...]
    # One chunk needs no loop, which would compute a memory after it that nobody asks for.
    after = (
        chunk(traced_zero(), past)
        if sizes.num_chunks == 1
        else jax.lax.fori_loop(0, sizes.num_chunks, chunk, past)
    )
    if more:
        more[-1][...] = after


def _queries_kernel(sizes, *refs):
    """The gradients of queries, gates, and the norm; and of what is recalled, for the keys' kernel."""
    source, memory, scale, bias, rate, episode, recalled, dy, *dsources, dout, dnorm = refs
    cols, rate = _columns(sizes), rate[pl.program_id(1)]

    def chunk(c, carry):
        past, dscale, dbias = carry
        rows, decays = _Rows(c, sizes), _Decays(c, sizes, rate, episode)
        error, gate, found = (
            x.astype(jnp.float32)
            for x in (
                rows.load(dy, cols),
                rows.load(source, cols, sizes.columns[2]),
                rows.load(recalled, cols),
            )
        )
        normal, spread = _normal(found)
        opened = sigmoid(gate, source.dtype)
        swish = gate * opened
        dgate = error * (normal * scale[cols][None] + bias[cols][None]) * (opened + swish * (1 - opened))
        rows.store(dsources[-1], cols, dgate, sizes.columns[2])
        dscaled = error * swish
        dscale, dbias = dscale + (dscaled * normal).sum(0), dbias + dscaled.sum(0)
        dnormal = dscaled * scale[cols][None]
        inner = (dnormal * normal).mean(axis=1, keepdims=True)
        dfound = (dnormal - dnormal.mean(axis=1, keepdims=True) - normal * inner) * spread
        rows.store(dout, cols, dfound)
        k, v = (rows.load(source, cols, at) for at in sizes.columns[:2])  # not before: registers are short
        dfound = dfound.astype(v.dtype)
        dq = dot(dfound, past.T)
        if not sizes.settled:
            dq = dot(dot(dfound, v.T) * decays.within, k) + dq * decays.since[:, None]
            past = _remember(k, v, past, decays)
        rows.store(dsources[0], cols, dq)
        return past, dscale, dbias

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
        k, v = (rows.load(sources[-1], cols, at) for at in sizes.columns[:2])
        dk = dot(v, dpast.T)
        if not sizes.settled:
            dk = dot((dot(error, v.T) * decays.within).T, q) + dk * decays.kept[:, None]
        rows.store(dsource, cols, dk, sizes.columns[0])  # before the other is begun: registers are short
        dv = dot(k, dpast)
        if not sizes.settled:
            dv = dot((dot(q, k.T) * decays.within).T, error) + dv * decays.kept[:, None]
            dpast = _pull(q, error, dpast, decays, sizes)
        rows.store(dsource, cols, dv, sizes.columns[1])
        return dpast

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
    return past * decays.over + dot((k * decays.kept[:, None]).T, v)


def _pull(q, error, dpast, decays, sizes):
    """The gradient of the memory before a chunk, from that after it and what the chunk recalls."""
    if sizes.settled:
        return dpast + dot(q.T, error)
    return dpast * decays.over + dot((q * decays.since[:, None]).T, error)


def _normal(x):
    """(x normalised over channels, what it was multiplied with)."""
    x = x - x.mean(axis=1, keepdims=True)
    spread = jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + EPSILON)
    return x * spread, spread


def traced_zero() -> Array:
    """Return a zero whose value is not known while tracing. JAX 0.12 refuses slices that are known to end
    beyond an array, even where a mask leaves out what is not there."""
    return pl.program_id(0) * 0


def dot(a, b):
    """In the precision of the inputs that have less, adding up in float32."""
    dtype = jnp.bfloat16 if jnp.bfloat16 in (a.dtype, b.dtype) else jnp.float32
    return jnp.dot(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def sigmoid(x, dtype):
    """The sigmoid of x, as exact as `dtype` needs it: a GPU's own tanh is right to 2^-11 and takes a fifth of
    the instructions."""
    if dtype != jnp.bfloat16 or jax.default_backend() != "gpu":
        return jax.nn.sigmoid(x)
    return 0.5 + 0.5 * triton.approx_tanh(0.5 * x)


def _columns(sizes):
    """The channels of this program's head."""
    return pl.ds(pl.program_id(1) * sizes.head, sizes.head)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
