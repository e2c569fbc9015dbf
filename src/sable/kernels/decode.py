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


@struct
class DecoderWeights:
    """The decoder's parameters, those of blocks stacked; [L, ..]."""

    queries: Array  # [L, E, E] of cross-retention
    self_in: Array  # [L, E, 4 E] queries, keys, values, gates
    self_norm: Array  # [L, 2, E] scale, bias
    self_out: Array  # [L, E, E]
    cross_in: Array  # [L, E, 3 E] keys, values, gates
    cross_norm: Array  # [L, 2, E]
    cross_out: Array  # [L, E, E]
    norms: Array  # [L, 3, E]
    ff_in: Array  # [L, E, 2 E] gates, inputs
    ff_out: Array  # [L, E, E]
    tokens: Array  # [1 + A, E] embedded
    head_in: Array  # [E, E]
    head_bias: Array  # [E]
    head_norm: Array  # [E]
    head_out: Array  # [E, A]
    head_out_bias: Array  # [A]


class Decoded(tp.NamedTuple):
    """What a team decided, [B, N], and the memories after it, [L, B, H, d, d]."""

    raw: Array
    log_prob: Array
    self_memory: Array
    cross_memory: Array


def supported(width: int, num_heads: int) -> bool:
    """Whether a network has sizes the kernel can handle: powers of two, and heads of 16 channels at least."""
    return width & (width - 1) == 0 and width % num_heads == 0 and width // num_heads >= 16


def decode(
    weights: DecoderWeights,
    encoded: Array,  # [B, N, E]
    clock: Array,  # [B, E]
    legal: Array,  # [B, N, A]
    noise: Array,  # [B, N, A]
    self_memory: Array,  # [L, B, H, d, d] as the first agent finds it
    cross_memory: Array,
    *,
    interpret: bool = False,
) -> Decoded:
    """Decide for every agent of a timestep, in the order given."""
    num_envs, num_agents, width = encoded.shape
    num_blocks, _, num_heads, head, _ = self_memory.shape
    num_actions = legal.shape[-1]
    at = (encoded + clock[:, None]).astype(jnp.float32)
    queries = jnp.einsum("bne,lef->lbnf", at, weights.queries)
    split = (num_blocks, num_envs, num_agents, num_heads, head)
    recalled = jnp.einsum("lbnhi,lbhij->lbnhj", queries.reshape(split), cross_memory).reshape(queries.shape)

    rows = -num_envs % ROWS
    columns = max(16, pl.next_power_of_2(num_actions + 1))
    by_env = [
        _padded(encoded, 0, rows),
        _padded(clock, 0, rows),
        _padded(_padded(legal.astype(jnp.float32), 0, rows), 2, columns - num_actions),
        _padded(_padded(noise, 0, rows), 2, columns - num_actions),
    ]
    by_block = [_padded(x, 1, rows) for x in (queries, recalled, self_memory)]
    shared = _shared(weights, columns)
    total = num_envs + rows
    kept = jax.ShapeDtypeStruct((num_blocks, total, num_agents, width), jnp.float32)
    out_shape = [
        jax.ShapeDtypeStruct((total, num_agents), jnp.int32),
        jax.ShapeDtypeStruct((total, num_agents), jnp.float32),
        *[kept] * 4,
        jax.ShapeDtypeStruct((total, width), jnp.float32),  # where queries are put down for a moment
    ]
    body = functools.partial(_kernel, num_actions=num_actions, num_heads=num_heads, barrier=not interpret)
    raw, log_prob, *keys_values, _ = pl.pallas_call(
        body,
        grid=(total // ROWS,),
        in_specs=[_rows(x, 0) for x in by_env]
        + [_rows(x, 1) for x in by_block]
        + [_whole(x) for x in shared],
        out_specs=[_rows(x, 1 if len(x.shape) == 4 else 0) for x in out_shape],
        out_shape=out_shape,
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=4, num_stages=1),
        name="sable_decode",
    )(*by_env, *by_block, *shared)
    self_keys, self_values, cross_keys, cross_values = (x[:, :num_envs].reshape(split) for x in keys_values)
    return Decoded(
        raw[:num_envs],
        log_prob[:num_envs],
        self_memory + jnp.einsum("lbnhi,lbnhj->lbhij", self_keys, self_values),
        cross_memory + jnp.einsum("lbnhi,lbnhj->lbhij", cross_keys, cross_values),
    )


def _kernel(
    encoded, clock, legal, noise, queries, recalled, past,
    self_in, self_norm, self_out, cross_in, cross_norm, cross_out, norms, ff_in, ff_out,
    tokens, head_in, head_bias, head_norm, head_out, head_out_bias,
    raw, log_prob, self_keys, self_values, cross_keys, cross_values, asked,
    *, num_actions, num_heads, barrier,
):  # fmt: skip
    num_blocks, _, num_agents, width = queries.shape
    head = width // num_heads
    column = jax.lax.broadcasted_iota(jnp.int32, (ROWS, tokens.shape[0]), 1)
    now = clock[...]

    def published():
        """All threads of the program see what any of them stored."""
        if barrier:
            triton.debug_barrier()

    def sofar(query, keys, values, block, agent, cols):
        """sum_j (query k_j) v_j over the agents up to this one."""

        def add(j, out):
            score = (query * keys[block, :, j, cols]).sum(axis=1, keepdims=True)
            return out + score * values[block, :, j, cols]

        return jax.lax.fori_loop(0, agent + 1, add, jnp.zeros((ROWS, head), jnp.float32))

    def recall(block, h):
        """query P, a row of P at a time."""

        def add(c, out):
            return out + asked[:, h * head + c][:, None] * past[block, :, h, c, :]

        return jax.lax.fori_loop(0, head, add, jnp.zeros((ROWS, head), jnp.float32))

    def gated(out, gate, norm, block, cols):
        out = out - out.mean(axis=1, keepdims=True)
        out = out * jax.lax.rsqrt((out * out).mean(axis=1, keepdims=True) + 1e-6)
        return gate * jax.nn.sigmoid(gate) * (out * norm[block, 0, cols][None] + norm[block, 1, cols][None])

    def projected(x, weight, block, part, h):
        return jnp.dot(x, weight[block, :, pl.ds(part * width + h * head, head)])

    def agent(i, token):
        x = jnp.dot((token[:, None] == column).astype(jnp.float32), tokens[...])
        own = encoded[:, i, :]
        for block in range(num_blocks):
            here, out = x + now, jnp.zeros((ROWS, width), jnp.float32)
            for h in range(num_heads):
                cols = pl.ds(h * head, head)
                query, key, value, gate = (projected(here, self_in, block, part, h) for part in range(4))
                self_keys[block, :, i, cols], self_values[block, :, i, cols] = key, value
                asked[:, cols] = query
                published()
                seen = recall(block, h) + sofar(query, self_keys, self_values, block, i, cols)
                out += jnp.dot(gated(seen, gate, self_norm, block, cols), self_out[block, cols, :])
            r = _rms(x + out, norms[block, 0, :])
            here, out = r + now, jnp.zeros((ROWS, width), jnp.float32)
            for h in range(num_heads):
                cols = pl.ds(h * head, head)
                key, value, gate = (projected(here, cross_in, block, part, h) for part in range(3))
                cross_keys[block, :, i, cols], cross_values[block, :, i, cols] = key, value
                published()
                query = queries[block, :, i, cols]
                seen = recalled[block, :, i, cols] + sofar(query, cross_keys, cross_values, block, i, cols)
                out += jnp.dot(gated(seen, gate, cross_norm, block, cols), cross_out[block, cols, :])
            y = _rms(own + out, norms[block, 1, :])
            gate = jnp.dot(y, ff_in[block, :, pl.ds(0, width)])
            inner = gate * jax.nn.sigmoid(gate) * jnp.dot(y, ff_in[block, :, pl.ds(width, width)])
            x = _rms(y + jnp.dot(inner, ff_out[block, :, :]), norms[block, 2, :])
        hidden = jnp.dot(x, head_in[...]) + head_bias[...][None]
        hidden = _rms(jax.nn.gelu(hidden), head_norm[...])
        logits = jnp.dot(hidden, head_out[...]) + head_out_bias[...][None]
        logits = jnp.where(legal[:, i, :] > 0, logits, jnp.finfo(jnp.float32).min)
        logits = jnp.where(column < num_actions, logits, -jnp.inf)
        action = jnp.argmax(logits + noise[:, i, :], axis=1).astype(jnp.int32)
        top = logits.max(axis=1)
        chosen = jnp.where(column == action[:, None], logits, 0.0).sum(axis=1)
        raw[:, i] = action
        log_prob[:, i] = chosen - top - jnp.log(jnp.exp(logits - top[:, None]).sum(axis=1))
        return action + 1

    jax.lax.fori_loop(0, num_agents, agent, jnp.zeros((ROWS,), jnp.int32))


def _rms(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * scale[None]


def _shared(weights: DecoderWeights, columns: int) -> list[Array]:
    """What every program reads, in the kernel's order, the actions padded to columns."""
    missing = columns - weights.head_out.shape[-1]
    return [
        weights.self_in,
        weights.self_norm,
        weights.self_out,
        weights.cross_in,
        weights.cross_norm,
        weights.cross_out,
        weights.norms,
        weights.ff_in,
        weights.ff_out,
        _padded(weights.tokens, 0, columns - weights.tokens.shape[0]),
        weights.head_in,
        weights.head_bias,
        weights.head_norm,
        _padded(weights.head_out, 1, missing),
        _padded(weights.head_out_bias, 0, missing),
    ]


def _padded(x: Array, axis: int, missing: int) -> Array:
    return jnp.pad(x, [(0, missing if k == axis else 0) for k in range(x.ndim)])


def _rows(x: tp.Any, axis: int) -> pl.BlockSpec:
    """A program's environments along an axis."""
    shape = tuple(ROWS if k == axis else size for k, size in enumerate(x.shape))
    return pl.BlockSpec(shape, lambda b: tuple(b if k == axis else 0 for k in range(len(shape))))


def _whole(x: tp.Any) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda b: (0,) * len(x.shape))
