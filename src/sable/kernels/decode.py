"""Sable's decoder over all agents of a timestep as one GPU kernel (Pallas, Triton).

An XLA scan launches some thirty small kernels per agent and mostly waits for their launches. Here a program
decides for whole teams, sampling included, in one of two ways.

In turn: one environment, its agents one after another. For small networks: their weights stay in the cache,
and a product with one row needs no tensor core.

At once: as many environments as make up a tile of rows for the tensor cores, all their agents together, given
guesses of what the others do, until the guesses come true (`autoregressive.decode_at_once` says why they do).
For wide networks, whose weights are then read once a round for the tile, not once for every agent.

Whatever does not depend on what is decided, the queries of cross-retention, what they recall of the past, and
all that the first block makes of each token there is, is computed beforehand, by XLA; and so is, afterwards,
the memory that is left.

Within a timestep nothing decays, so an agent's self-retention is what it recalls of the past, q P, and
sum_j (q k_j) v_j over the agents up to it: keys and values are kept, memories are not.
`autoregressive.decode_in_turn` is the truth.
"""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from sable.ops import retention
from sable.types import struct

AGENTS = 8
"""Of how many agents a program that decides in turn reads the keys and values at a time."""
ROWS = 64
"""Agents of a program that decides at once."""
STAGES = 1


@struct
class BlockWeights:
    """The parameters of a decoder block."""

    queries: Array  # [E, E] of cross-retention
    self_in: Array  # [E, 4 E] queries, keys, values, gates
    self_scale: Array  # [E]
    self_bias: Array  # [E]
    self_out: Array  # [E, E]
    cross_in: Array  # [E, 3 E] keys, values, gates
    cross_scale: Array  # [E]
    cross_bias: Array  # [E]
    cross_out: Array  # [E, E]
    norms: tuple[Array, Array, Array]  # [E]
    ff_in: Array  # [E, 2 E] gates, inputs
    ff_out: Array  # [E, E]


@struct
class DecoderWeights:
    """The decoder's parameters."""

    blocks: tuple[BlockWeights, ...]
    tokens: Array  # [1 + A, E] embedded
    head_in: Array  # [E, E]
    head_bias: Array  # [E]
    head_norm: Array  # [E]
    head_out: Array  # [E, A]
    head_out_bias: Array  # [A]


@struct
class Told:
    """What programs are told of their environments: G each, with R = G N agents."""

    encoded: Array  # [P, R, E]
    clock: Array  # [P, G, E]
    legal: Array  # [P, R, A] float32
    noise: Array  # [P, R, A]
    opening: (
        Array  # [P, G (1 + A), 5 E]: the first block's queries, keys, values, gates and what it recalls, for
    )
    # every token there is
    queries: tuple[Array, ...]  # [P, R, E] of cross-retention, by block
    recalled: tuple[Array, ...]  # [P, R, E] what they recall of the past
    past: tuple[Array, ...]  # [P, G, H, d, d] of self-retention


@struct
class Kept:
    """What programs leave."""

    raw: Array  # [P, R]
    log_prob: Array  # [P, R]
    self_keys: tuple[Array, ...]  # [P, R, E] by block
    self_values: tuple[Array, ...]
    cross_keys: tuple[Array, ...]
    cross_values: tuple[Array, ...]
    passed: Array  # [P, R, E] from one row of a tile to another, of no use afterwards


class Decoded(tp.NamedTuple):
    """What a team decided, [B, N], and the memories after it, [B, H, d, d] by block."""

    raw: Array
    log_prob: Array
    self_memory: tuple[Array, ...]
    cross_memory: tuple[Array, ...]


def supported(width: int, num_heads: int) -> bool:
    """Whether a network has sizes the kernel can handle: powers of two, and heads of 16 channels at least."""
    return width & (width - 1) == 0 and width % num_heads == 0 and width // num_heads >= 16


def decode(
    weights: DecoderWeights,
    encoded: Array,  # [B, N, E]
    clock: Array,  # [B, E]
    legal: Array,  # [B, N, A]
    noise: Array,  # [B, N, A]
    self_memory: tuple[Array, ...],  # [B, H, d, d] by block, as the first agent finds it
    cross_memory: tuple[Array, ...],
    *,
    at_once: bool,
    interpret: bool = False,
) -> Decoded:
    """Decide for every agent of a timestep, each knowing those before it in the order given."""
    num_envs, num_agents, width = encoded.shape
    _, num_heads, head, _ = self_memory[0].shape
    slots = pl.next_power_of_2(num_agents) if at_once else num_agents
    group = max(ROWS // slots, 1) if at_once else 1
    num_programs = -(-num_envs // group)

    def recall(queries, memory):
        queries = queries.reshape(num_envs, -1, num_heads, head)
        return jnp.einsum("bnhi,bhij->bnhj", queries, memory).reshape(num_envs, -1, width)

    def deal(x):
        """[B, X, ..] dealt out to programs, [P, G X, ..]; rows of zeros where there is nobody."""
        missing = num_programs * group - num_envs
        x = jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) if missing else x
        return x.reshape(num_programs, group * x.shape[1], *x.shape[2:])

    def agents(x):
        missing = slots - num_agents
        return deal(jnp.pad(x, ((0, 0), (0, missing), (0, 0))) if missing else x)

    opening = (weights.tokens[None] + clock[:, None]) @ weights.blocks[0].self_in
    opening = jnp.concatenate([opening, recall(opening[..., :width], self_memory[0])], axis=-1)
    here = encoded + clock[:, None]
    queries = tuple(here @ block.queries for block in weights.blocks)
    told = Told(
        encoded=agents(encoded),
        clock=deal(clock[:, None]),
        legal=agents(legal.astype(jnp.float32)),
        noise=agents(noise),
        opening=deal(opening),
        queries=tuple(map(agents, queries)),
        recalled=tuple(agents(recall(*each)) for each in zip(queries, cross_memory, strict=True)),
        past=tuple(deal(memory[:, None]) for memory in self_memory),
    )

    def left(*shape, dtype=jnp.float32):
        return tp.cast(Array, jax.ShapeDtypeStruct((num_programs, group * slots, *shape), dtype))

    by_block = (left(width),) * len(weights.blocks)
    kept = Kept(
        raw=left(dtype=jnp.int32),
        log_prob=left(),
        self_keys=by_block,
        self_values=by_block,
        cross_keys=by_block,
        cross_values=by_block,
        passed=left(width),
    )
    leaves, out = jax.tree.flatten(kept)
    given, tree = jax.tree.flatten((told, weights))
    sizes = Sizes(
        num_agents=num_agents,
        slots=slots,
        group=group,
        width=width,
        head=head,
        num_actions=weights.tokens.shape[0] - 1,
        interpret=interpret,
    )
    warps = 8 if at_once and width > 64 else 4
    found = pl.pallas_call(
        functools.partial(_at_once if at_once else _in_turn, sizes=sizes, given=tree, left=out),
        grid=(num_programs,),
        in_specs=[*map(_own, jax.tree.leaves(told)), *map(_whole, jax.tree.leaves(weights))],
        out_specs=[*map(_own, leaves)],
        out_shape=leaves,
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=warps, num_stages=STAGES),
        name="sable_decode",
    )(*given)
    kept = jax.tree.unflatten(out, found)

    def gather(x):
        return x.reshape(num_programs * group, slots, *x.shape[2:])[:num_envs, :num_agents]

    def after(memory, keys, values):
        keys, values = (gather(x).reshape(num_envs, num_agents, num_heads, head) for x in (keys, values))
        return retention.told(memory, keys, values)

    return Decoded(
        gather(kept.raw),
        gather(kept.log_prob),
        tuple(map(after, self_memory, kept.self_keys, kept.self_values)),
        tuple(map(after, cross_memory, kept.cross_keys, kept.cross_values)),
    )


class Sizes(tp.NamedTuple):
    """What the kernel is compiled for."""

    num_agents: int
    slots: int
    """Rows of a tile for each environment."""
    group: int
    """Environments of a program."""
    width: int
    head: int
    num_actions: int
    interpret: bool

    @property
    def columns(self) -> int:
        return max(16, pl.next_power_of_2(self.num_actions))


def _in_turn(*refs, sizes, given, left):
    told, weights = jax.tree.unflatten(given, refs[: given.num_leaves])
    kept = jax.tree.unflatten(left, refs[given.num_leaves :])

    def agent(i, token):
        action, log_prob = _decide(_Agent(i, sizes), told, weights, kept, token, sizes)
        kept.raw[i], kept.log_prob[i] = action, log_prob
        return action + 1

    jax.lax.fori_loop(0, sizes.num_agents, agent, jnp.zeros((), jnp.int32))


def _at_once(*refs, sizes, given, left):
    told, weights = jax.tree.unflatten(given, refs[: given.num_leaves])
    kept = jax.tree.unflatten(left, refs[given.num_leaves :])
    tile = _Tile(kept.passed, sizes)
    told_something = jnp.minimum(tile.agent, 1)  # all but the first

    def unsettled(state):
        return state[1] > 0

    def again(state):
        token, _, rounds = state
        action, log_prob = _decide(tile, told, weights, kept, token, sizes)
        _barrier(sizes)  # all have read what they were told
        kept.raw[...], kept.log_prob[...] = action, log_prob
        _barrier(sizes)
        before = kept.raw[jnp.maximum(tile.row - 1, 0)]
        now = (before + 1) * told_something
        changed = jnp.where(tile.agent < sizes.num_agents, now != token, False).astype(jnp.int32).max()
        return now, changed * (rounds < sizes.num_agents).astype(jnp.int32), rounds + 1

    one = jnp.ones((), jnp.int32)
    jax.lax.while_loop(unsettled, again, (told_something, one, one))


def _decide(form, told, weights, kept, token, sizes):
    """(actions, their log-probabilities) of those that `form` takes together, given what they are told."""
    width, head, columns = sizes.width, sizes.head, sizes.columns
    heads = [pl.ds(start, head) for start in range(0, width, head)]

    def part(number, cols):
        """The columns of one head in one of the matrices that stand side by side."""
        return pl.ds(number * width + cols.start, head)

    def gated(out, gate, scale, bias):
        out = out - out.mean(axis=-1, keepdims=True)
        out = out * jax.lax.rsqrt((out * out).mean(axis=-1, keepdims=True) + 1e-6)
        return gate * jax.nn.sigmoid(gate) * (out * form.each(scale) + form.each(bias))

    def rms(x, scale):
        return x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * form.each(scale[...])

    every = pl.ds(0, width)
    x, own, now = (
        form.pick(weights.tokens, token, every),
        form.load(told.encoded, every),
        form.now(told.clock),
    )
    for number, block in enumerate(weights.blocks):
        here, out = x + now, jnp.zeros_like(x)
        for h, cols in enumerate(heads):
            if number == 0:
                row = form.first_token + token
                query, key, value, gate, seen = (
                    form.pick(told.opening, row, part(k, cols)) for k in range(5)
                )
            else:
                query = form.product(here, block.self_in[:, part(0, cols)])
                seen = form.recall(query, told.past[number], h, cols)
                key, value, gate = (form.product(here, block.self_in[:, part(k, cols)]) for k in (1, 2, 3))
            seen += form.among(query, key, value, kept.self_keys[number], kept.self_values[number], cols)
            mixed = gated(seen, gate, block.self_scale[cols], block.self_bias[cols])
            out += form.product(mixed, block.self_out[cols, :])
        r = rms(x + out, block.norms[0])
        here, out = r + now, jnp.zeros_like(x)
        for cols in heads:
            key, value, gate = (form.product(here, block.cross_in[:, part(k, cols)]) for k in range(3))
            query, seen = form.load(told.queries[number], cols), form.load(told.recalled[number], cols)
            seen += form.among(query, key, value, kept.cross_keys[number], kept.cross_values[number], cols)
            mixed = gated(seen, gate, block.cross_scale[cols], block.cross_bias[cols])
            out += form.product(mixed, block.cross_out[cols, :])
        y = rms(own + out, block.norms[1])
        gate = form.product(y, block.ff_in[:, pl.ds(0, width)])
        inner = gate * jax.nn.sigmoid(gate) * form.product(y, block.ff_in[:, pl.ds(width, width)])
        x = rms(y + form.product(inner, block.ff_out[...]), block.norms[2])
    hidden = form.product(x, weights.head_in[...]) + form.each(weights.head_bias[...])
    hidden = rms(jax.nn.gelu(hidden), weights.head_norm)

    column = jax.lax.iota(jnp.int32, columns)
    there, actions = column < sizes.num_actions, pl.ds(0, columns)
    possible = jnp.broadcast_to(there[None], (width, columns))
    logits = form.product(hidden, triton.load(weights.head_out.at[:, actions], mask=possible, other=0.0))
    logits += form.each(triton.load(weights.head_out_bias.at[actions], mask=there, other=0.0))
    legal, noise = form.load_some(told.legal, there), form.load_some(told.noise, there)
    logits = jnp.where(legal > 0, logits, jnp.finfo(jnp.float32).min)
    logits = jnp.where(form.each(there), logits, -jnp.inf)
    action = jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
    top = logits.max(axis=-1)
    chosen = jnp.where(form.each(column) == form.column(action), logits, 0.0).sum(axis=-1)
    return action, chosen - top - jnp.log(jnp.exp(logits - form.column(top)).sum(axis=-1))


class _Agent:
    """One agent: vectors."""

    first_token = 0

    def __init__(self, i, sizes):
        self.i, self.sizes = i, sizes

    def pick(self, ref, row, cols):
        return ref[row, cols]

    def load(self, ref, cols):
        return ref[self.i, cols]

    def load_some(self, ref, there):
        return triton.load(ref.at[self.i, pl.ds(0, there.size)], mask=there, other=0.0)

    def now(self, clock):
        return clock[0, :]

    def product(self, x, matrix):
        return (x[:, None] * matrix).sum(axis=0)

    def each(self, x):
        return x

    def column(self, x):
        return x

    def recall(self, query, past, h, cols):
        return self.product(query, past[0, h, :, :])

    def among(self, query, key, value, keys, values, cols):
        """sum_j (query k_j) v_j over the agents up to this one, some at a time."""
        keys[self.i, cols], values[self.i, cols] = key, value
        _barrier(self.sizes)

        def add(j, out):
            before = j * AGENTS + jax.lax.iota(jnp.int32, AGENTS) <= self.i
            before = jnp.broadcast_to(before[:, None], (AGENTS, cols.size))
            some = pl.ds(j * AGENTS, AGENTS)
            key = triton.load(keys.at[some, cols], mask=before, other=0.0)
            value = triton.load(values.at[some, cols], mask=before, other=0.0)
            return out + ((query[None] * key).sum(axis=1)[:, None] * value).sum(axis=0)

        rounds = jax.lax.div(self.i, AGENTS) + 1
        return jax.lax.fori_loop(0, rounds, add, jnp.zeros((cols.size,), jnp.float32))


class _Tile:
    """All agents of a program: a row each."""

    def __init__(self, passed, sizes):
        self.passed, self.sizes = passed, sizes
        self.row = jax.lax.iota(jnp.int32, sizes.group * sizes.slots)
        self.agent = jax.lax.rem(self.row, sizes.slots)
        self.env = jax.lax.div(self.row, sizes.slots)
        self.first_token = self.env * (1 + sizes.num_actions)
        later = self.row[:, None] < self.row[None, :]
        self.seen = (self.env[:, None] == self.env[None, :]) & ~later

    def pick(self, ref, row, cols):
        return ref[row[:, None], (cols.start + jax.lax.iota(jnp.int32, cols.size))[None, :]]

    def load(self, ref, cols):
        return ref[:, cols]

    def load_some(self, ref, there):
        mask = jnp.broadcast_to(there[None], (self.row.size, there.size))
        return triton.load(ref.at[:, pl.ds(0, there.size)], mask=mask, other=0.0)

    def now(self, clock):
        return self.pick(clock, self.env, pl.ds(0, self.sizes.width))

    def product(self, x, matrix):
        return jnp.dot(x, matrix, preferred_element_type=jnp.float32)

    def each(self, x):
        return x[None]

    def column(self, x):
        return x[:, None]

    def recall(self, query, past, h, cols):
        """Each row's product with the memory of its environment: handed over by way of `passed`."""
        sizes, rows = self.sizes, max(self.sizes.slots, 16)
        own = jax.lax.iota(jnp.int32, rows) < sizes.slots
        own = jnp.broadcast_to(own[:, None], (rows, cols.size))
        self.passed[:, cols] = query
        _barrier(sizes)

        def env(g, _):
            at = self.passed.at[pl.ds(g * sizes.slots, rows), cols]
            asked = triton.load(at, mask=own, other=0.0)
            triton.store(at, self.product(asked, past[g, h, :, :]), mask=own)

        jax.lax.fori_loop(0, sizes.group, env, None)
        _barrier(sizes)
        return self.passed[:, cols]

    def among(self, query, key, value, keys, values, cols):
        """sum_j (query k_j) v_j over the agents of the same environment up to each."""
        keys[:, cols], values[:, cols] = key, value
        return self.product(jnp.where(self.seen, self.product(query, key.T), 0.0), value)


def _barrier(sizes):
    """What the program has put down is seen by all its threads."""
    if not sizes.interpret:
        triton.debug_barrier()


def _own(x: tp.Any) -> pl.BlockSpec:
    """A program's share, along the first axis."""
    return pl.BlockSpec((None, *x.shape[1:]), lambda b: (b,) + (0,) * (len(x.shape) - 1))


def _whole(x: tp.Any) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda b: (0,) * len(x.shape))
