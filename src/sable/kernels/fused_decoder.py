"""Sable's decoder over all agents of a timestep as one GPU kernel (Pallas, Triton).

An XLA scan launches some thirty small kernels per agent and mostly waits for their launches. Here a program
takes one environment and decodes its agents one after another, sampling included. Networks for which this
pays are small: their weights stay in the cache, and a product with one row needs no tensor core. Whatever
does not depend on what is decided, the queries of cross-retention, what they recall of the past, and all
that the first block makes of each token there is, is computed beforehand, by XLA; and so is, afterwards, the
memory that is left.

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

from sable.kernels.cached_decoder import so_far
from sable.kernels.retention import traced_zero
from sable.ops import retention
from sable.types import struct

WARPS = 4


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

    def left(*shape, dtype=jnp.float32):
        return tp.cast(Array, jax.ShapeDtypeStruct((num_envs, *shape), dtype))

    by_block = (left(num_agents, width),) * len(weights.blocks)
    kept = Kept(
        raw=left(num_agents, dtype=jnp.int32),
        log_prob=left(num_agents),
        self_keys=by_block,
        self_values=by_block,
        cross_keys=by_block,
        cross_values=by_block,
    )
    leaves, out = jax.tree.flatten(kept)
    given, tree = jax.tree.flatten((told, weights))
    sizes = {"num_actions": weights.tokens.shape[0] - 1, "num_heads": num_heads, "shared": not interpret}
    found = pl.pallas_call(
        functools.partial(_kernel, given=tree, left=out, **sizes),
        grid=(num_envs,),
        in_specs=[*map(_own, jax.tree.leaves(told)), *map(_whole, jax.tree.leaves(weights))],
        out_specs=[*map(_own, leaves)],
        out_shape=leaves,
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=WARPS, num_stages=1),
        name="sable_decode",
    )(*given)
    kept = jax.tree.unflatten(out, found)

    def after(memory, keys, values):
        keys, values = (x.reshape(num_envs, num_agents, num_heads, head) for x in (keys, values))
        return retention.told(memory, keys, values)

    return Decoded(
        kept.raw,
        kept.log_prob,
        tuple(map(after, self_memory, kept.self_keys, kept.self_values)),
        tuple(map(after, cross_memory, kept.cross_keys, kept.cross_values)),
    )


def _kernel(*refs, given, left, num_actions, num_heads, shared):
    told, weights = jax.tree.unflatten(given, refs[: given.num_leaves])
    kept = jax.tree.unflatten(left, refs[given.num_leaves :])
    num_agents, width = told.encoded.shape
    head, columns = width // num_heads, max(16, pl.next_power_of_2(num_actions))
    heads = [pl.ds(h * head, head) for h in range(num_heads)]
    column = jax.lax.iota(jnp.int32, columns)
    there, actions = column < num_actions, pl.ds(traced_zero(), columns)
    now = told.clock[...]

    def part(number, cols):
        """The columns of one head in one of the matrices that stand side by side."""
        return pl.ds(number * width + cols.start, head)

    def share(keys, values, i, cols, key, value):
        """Put down an agent's key and value where all threads of the program see them."""
        keys[i, cols], values[i, cols] = key, value
        if shared:
            triton.debug_barrier()

    def gated(out, gate, scale, bias):
        out = out - out.mean()
        out = out * jax.lax.rsqrt((out * out).mean() + 1e-6)
        return gate * jax.nn.sigmoid(gate) * (out * scale + bias)

    def agent(i, token):
        x, own = weights.tokens[token, :], told.encoded[i, :]
        for number, block in enumerate(weights.blocks):
            here, out = x + now, jnp.zeros((width,), jnp.float32)
            keys, values = kept.self_keys[number], kept.self_values[number]
            for h, cols in enumerate(heads):
                if number == 0:
                    query, key, value, gate, seen = (told.opening[token, part(k, cols)] for k in range(5))
                else:
                    query, key, value, gate = (
                        _product(here, block.self_in[:, part(k, cols)]) for k in range(4)
                    )
                    seen = _product(query, told.past[number][h, :, :])
                share(keys, values, i, cols, key, value)
                seen += so_far(query, (keys, cols), (values, cols), i + 1)
                mixed = gated(seen, gate, block.self_scale[cols], block.self_bias[cols])
                out += _product(mixed, block.self_out[cols, :])
            r = _rms(x + out, block.norms[0][...])
            here, out = r + now, jnp.zeros((width,), jnp.float32)
            keys, values = kept.cross_keys[number], kept.cross_values[number]
            for cols in heads:
                key, value, gate = (_product(here, block.cross_in[:, part(k, cols)]) for k in range(3))
                share(keys, values, i, cols, key, value)
                query, seen = told.queries[number][i, cols], told.recalled[number][i, cols]
                seen += so_far(query, (keys, cols), (values, cols), i + 1)
                mixed = gated(seen, gate, block.cross_scale[cols], block.cross_bias[cols])
                out += _product(mixed, block.cross_out[cols, :])
            y = _rms(own + out, block.norms[1][...])
            gate = _product(y, block.ff_in[:, pl.ds(0, width)])
            inner = gate * jax.nn.sigmoid(gate) * _product(y, block.ff_in[:, pl.ds(width, width)])
            x = _rms(y + _product(inner, block.ff_out[...]), block.norms[2][...])
        hidden = _product(x, weights.head_in[...]) + weights.head_bias[...]
        hidden = _rms(jax.nn.gelu(hidden), weights.head_norm[...])
        possible = jnp.broadcast_to(there[None], (width, columns))
        logits = _product(hidden, triton.load(weights.head_out.at[:, actions], mask=possible, other=0.0))
        bias, legal, noise = (
            triton.load(ref, mask=there, other=0.0)
            for ref in (
                weights.head_out_bias.at[actions],
                told.legal.at[i, actions],
                told.noise.at[i, actions],
            )
        )
        logits = jnp.where(legal > 0, logits + bias, jnp.finfo(jnp.float32).min)
        logits = jnp.where(there, logits, -jnp.inf)
        action = jnp.argmax(logits + noise).astype(jnp.int32)
        top = logits.max()
        chosen = jnp.where(column == action, logits, 0.0).sum()
        kept.raw[i] = action
        kept.log_prob[i] = chosen - top - jnp.log(jnp.exp(logits - top).sum())
        return action + 1

    jax.lax.fori_loop(0, num_agents, agent, jnp.zeros((), jnp.int32))


def _product(x, matrix):
    return (x[:, None] * matrix).sum(axis=0)


def _rms(x, scale):
    return x * jax.lax.rsqrt((x * x).mean() + 1e-6) * scale


def _own(x: tp.Any) -> pl.BlockSpec:
    """A program's environment, along the first axis."""
    return pl.BlockSpec((None, *x.shape[1:]), lambda b: (b,) + (0,) * (len(x.shape) - 1))


def _whole(x: tp.Any) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda b: (0,) * len(x.shape))
