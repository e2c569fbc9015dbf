"""Sable's decoder over all agents of a timestep as one GPU kernel (Pallas, Triton).

An XLA scan launches some thirty small kernels per agent and mostly waits for their launches. Here a program
takes 16 environments and decodes their agents one after another, sampling included. Whatever does not depend
on what is decided, the queries of cross-retention and what they recall of the past, is computed for all
agents beforehand, by XLA; and so is, afterwards, the memory that is left.

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

from sable.types import struct

ROWS = 16
"""Environments per program: the fewest rows a tensor core takes."""
WARPS = 4
ON_CHIP = 2**16
"""Weights that stay on the chip, all agents through."""
AGENTS, CHANNELS = 8, 8
"""Of how many agents, and channels, a program holds the keys and values, and the memory, at a time."""


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
    """What a program is told of its environments."""

    encoded: Array  # [B, N, E]
    clock: Array  # [B, E]
    legal: Array  # [B, N, A] float32
    noise: Array  # [B, N, A]
    opening: Array  # [B, 1 + A, 5 E]: the first block's queries, keys, values, gates and what it recalls, for
    # every token there is
    queries: tuple[Array, ...]  # [B, N, E] of cross-retention, by block
    recalled: tuple[Array, ...]  # [B, N, E] what they recall of the past
    past: tuple[Array, ...]  # [B, H, d, d] of self-retention


@struct
class Kept:
    """What a program leaves."""

    raw: Array  # [B, N]
    log_prob: Array  # [B, N]
    self_keys: tuple[Array, ...]  # [B, N, E] by block
    self_values: tuple[Array, ...]
    cross_keys: tuple[Array, ...]
    cross_values: tuple[Array, ...]
    asked: Array  # [B, E], where queries are put down for a moment


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
    interpret: bool = False,
) -> Decoded:
    """Decide for every agent of a timestep, in the order given."""
    num_envs, num_agents, width = encoded.shape
    _, num_heads, head, _ = self_memory[0].shape

    def recall(queries, memory):
        queries = queries.reshape(num_envs, -1, num_heads, head)
        return jnp.einsum("bnhi,bhij->bnhj", queries, memory).reshape(num_envs, -1, width)

    opening = (weights.tokens[None] + clock[:, None]) @ weights.blocks[0].self_in
    opening = jnp.concatenate([opening, recall(opening[..., :width], self_memory[0])], axis=-1)
    here = encoded + clock[:, None]
    queries = tuple(here @ block.queries for block in weights.blocks)
    told = Told(
        encoded=encoded,
        clock=clock,
        legal=legal.astype(jnp.float32),
        noise=noise,
        opening=opening,
        queries=queries,
        recalled=tuple(recall(*each) for each in zip(queries, cross_memory, strict=True)),
        past=self_memory,
    )
    total = pl.cdiv(num_envs, ROWS) * ROWS
    if total > num_envs:
        told = jax.tree.map(lambda x: jnp.pad(x, [(0, total - num_envs)] + [(0, 0)] * (x.ndim - 1)), told)

    def left(*shape, dtype=jnp.float32):
        return tp.cast(Array, jax.ShapeDtypeStruct((total, *shape), dtype))

    by_block = (left(num_agents, width),) * len(weights.blocks)
    kept = Kept(
        raw=left(num_agents, dtype=jnp.int32),
        log_prob=left(num_agents),
        self_keys=by_block,
        self_values=by_block,
        cross_keys=by_block,
        cross_values=by_block,
        asked=left(width),
    )
    given, tree = jax.tree.flatten((told, weights, kept))
    body = functools.partial(
        _kernel, tree=tree, num_actions=weights.tokens.shape[0] - 1, num_heads=num_heads, shared=not interpret
    )
    leaves, out = jax.tree.flatten(kept)
    found = pl.pallas_call(
        body,
        grid=(total // ROWS,),
        in_specs=[_rows(x) for x in jax.tree.leaves(told)] + [_whole(x) for x in jax.tree.leaves(weights)],
        out_specs=[_rows(x) for x in leaves],
        out_shape=leaves,
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=WARPS, num_stages=1),
        name="sable_decode",
    )(*given[: len(given) - len(leaves)])
    kept = jax.tree.map(lambda x: x[:num_envs], jax.tree.unflatten(out, found))

    def after(memory, keys, values):
        keys, values = (x.reshape(num_envs, num_agents, num_heads, head) for x in (keys, values))
        return memory + jnp.einsum("bnhi,bnhj->bhij", keys, values)

    return Decoded(
        kept.raw,
        kept.log_prob,
        tuple(map(after, self_memory, kept.self_keys, kept.self_values)),
        tuple(map(after, cross_memory, kept.cross_keys, kept.cross_values)),
    )


def _kernel(*refs, tree, num_actions, num_heads, shared):
    told, weights, kept = jax.tree.unflatten(tree, refs)
    num_agents, width = told.encoded.shape[1:]
    head, columns = width // num_heads, max(16, pl.next_power_of_2(num_actions))
    held = _held(sum(x.size for x in jax.tree.leaves(weights)))
    row, column = jax.lax.iota(jnp.int32, ROWS), jax.lax.broadcasted_iota(jnp.int32, (ROWS, columns), 1)
    possible = jax.lax.iota(jnp.int32, columns) < num_actions
    now = told.clock[...]

    def part(ref, number, h):
        """The columns of one head in one of the matrices that stand side by side."""
        return held(ref, slice(None), pl.ds(number * width + h * head, head))

    def own_rows(ref, h):
        return held(ref, pl.ds(h * head, head), slice(None))

    def channels(ref, h):
        return held(ref, pl.ds(h * head, head))

    every = range(num_heads)
    blocks = [
        dict(
            self_in=[[part(block.self_in, k, h) for k in range(4)] for h in every] if number else (),
            self_norm=[[channels(x, h) for x in (block.self_scale, block.self_bias)] for h in every],
            self_out=[own_rows(block.self_out, h) for h in every],
            cross_in=[[part(block.cross_in, k, h) for k in range(3)] for h in every],
            cross_norm=[[channels(x, h) for x in (block.cross_scale, block.cross_bias)] for h in every],
            cross_out=[own_rows(block.cross_out, h) for h in every],
            norms=[held(x, slice(None)) for x in block.norms],
            ff_gate=held(block.ff_in, slice(None), pl.ds(0, width)),
            ff_in=held(block.ff_in, slice(None), pl.ds(width, width)),
            ff_out=held(block.ff_out, slice(None), slice(None)),
        )
        for number, block in enumerate(weights.blocks)
    ]
    head_in, head_bias, head_norm = (
        held(x, *[slice(None)] * len(x.shape))
        for x in (weights.head_in, weights.head_bias, weights.head_norm)
    )
    wide = jnp.broadcast_to(possible[None], (width, columns))
    head_out = triton.load(weights.head_out.at[:, pl.ds(0, columns)], mask=wide, other=0.0)
    head_out_bias = triton.load(weights.head_out_bias.at[pl.ds(0, columns)], mask=possible, other=0.0)

    def published():
        """All threads of the program see what any of them stored."""
        if shared:
            triton.debug_barrier()

    def sofar(query, keys, values, agent, cols):
        """sum_j (query k_j) v_j over the agents up to this one, some at a time."""

        def add(j, out):
            there = j * AGENTS + jax.lax.iota(jnp.int32, AGENTS) <= agent
            there = jnp.broadcast_to(there[None, :, None], (ROWS, AGENTS, head))
            some = pl.ds(j * AGENTS, AGENTS)
            key = triton.load(keys.at[:, some, cols], mask=there, other=0.0)
            value = triton.load(values.at[:, some, cols], mask=there, other=0.0)
            score = (query[:, None, :] * key).sum(axis=2)
            return out + (score[:, :, None] * value).sum(axis=1)

        rounds = jax.lax.div(agent, AGENTS) + 1
        return jax.lax.fori_loop(0, rounds, add, jnp.zeros((ROWS, head), jnp.float32))

    def recall(past, h):
        """query P, some rows of P at a time."""

        def add(c, out):
            query = kept.asked[:, pl.ds(h * head + c * CHANNELS, CHANNELS)]
            return out + (query[:, :, None] * past[:, h, pl.ds(c * CHANNELS, CHANNELS), :]).sum(axis=1)

        return jax.lax.fori_loop(0, head // CHANNELS, add, jnp.zeros((ROWS, head), jnp.float32))

    def gated(out, gate, norm):
        scale, bias = norm
        out = out - out.mean(axis=1, keepdims=True)
        out = out * jax.lax.rsqrt((out * out).mean(axis=1, keepdims=True) + 1e-6)
        return gate * jax.nn.sigmoid(gate) * (out * scale()[None] + bias()[None])

    def agent(i, token):
        x, own = weights.tokens[token, :], told.encoded[:, i, :]
        for number, block in enumerate(blocks):
            here, out = x + now, jnp.zeros((ROWS, width), jnp.float32)
            keys, values = kept.self_keys[number], kept.self_values[number]
            for h in every:
                cols = pl.ds(h * head, head)
                if number == 0:
                    at = [pl.ds(k * width + h * head, head) for k in range(5)]
                    query, key, value, gate, seen = (told.opening[row, token, cols] for cols in at)
                else:
                    query, key, value, gate = (jnp.dot(here, weight()) for weight in block["self_in"][h])
                    kept.asked[:, cols] = query
                keys[:, i, cols], values[:, i, cols] = key, value
                published()
                if number:
                    seen = recall(told.past[number], h)
                seen += sofar(query, keys, values, i, cols)
                out += jnp.dot(gated(seen, gate, block["self_norm"][h]), block["self_out"][h]())
            r = _rms(x + out, block["norms"][0]())
            here, out = r + now, jnp.zeros((ROWS, width), jnp.float32)
            keys, values = kept.cross_keys[number], kept.cross_values[number]
            for h in every:
                cols = pl.ds(h * head, head)
                key, value, gate = (jnp.dot(here, weight()) for weight in block["cross_in"][h])
                keys[:, i, cols], values[:, i, cols] = key, value
                published()
                query = told.queries[number][:, i, cols]
                seen = told.recalled[number][:, i, cols] + sofar(query, keys, values, i, cols)
                out += jnp.dot(gated(seen, gate, block["cross_norm"][h]), block["cross_out"][h]())
            y = _rms(own + out, block["norms"][1]())
            gate = jnp.dot(y, block["ff_gate"]())
            inner = gate * jax.nn.sigmoid(gate) * jnp.dot(y, block["ff_in"]())
            x = _rms(y + jnp.dot(inner, block["ff_out"]()), block["norms"][2]())
        hidden = jnp.dot(x, head_in()) + head_bias()[None]
        hidden = _rms(jax.nn.gelu(hidden), head_norm())
        logits = jnp.dot(hidden, head_out) + head_out_bias[None]
        there = column < num_actions
        legal = triton.load(told.legal.at[:, i, pl.ds(0, columns)], mask=there, other=0.0)
        noise = triton.load(told.noise.at[:, i, pl.ds(0, columns)], mask=there, other=0.0)
        logits = jnp.where(legal > 0, logits, jnp.finfo(jnp.float32).min)
        logits = jnp.where(there, logits, -jnp.inf)
        action = jnp.argmax(logits + noise, axis=1).astype(jnp.int32)
        top = logits.max(axis=1)
        chosen = jnp.where(column == action[:, None], logits, 0.0).sum(axis=1)
        kept.raw[:, i] = action
        kept.log_prob[:, i] = chosen - top - jnp.log(jnp.exp(logits - top[:, None]).sum(axis=1))
        return action + 1

    jax.lax.fori_loop(0, num_agents, agent, jnp.zeros((ROWS,), jnp.int32))


def _held(num_weights: int) -> tp.Callable[..., tp.Callable[[], Array]]:
    """A way of reading weights: once, before any agent, where all stay on the chip; else whenever needed."""

    def held(ref, *at):
        value = ref[at] if num_weights <= ON_CHIP else None
        return lambda: ref[at] if value is None else value

    return held


def _rms(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * scale[None]


def _rows(x: tp.Any) -> pl.BlockSpec:
    """A program's environments, along the first axis."""
    return pl.BlockSpec((ROWS, *x.shape[1:]), lambda b: (b,) + (0,) * (len(x.shape) - 1))


def _whole(x: tp.Any) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda b: (0,) * len(x.shape))
