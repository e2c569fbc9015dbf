"""Sable's decoder over all agents of a timestep as one fused GPU kernel (Pallas, Triton).

An XLA scan launches some thirty small kernels per agent and mostly waits for their launches. Here a program
takes one environment and decodes its agents one after another, sampling included. Networks for which this
pays are small: their weights stay in the cache, and a product with one row needs no tensor core. Whatever
does not depend on what is decided, the queries of cross-retention, what they recall of the past, and all
that the first block makes of each token there is, is computed beforehand, by XLA; and so is, afterwards, the
memory that is left.

Within a timestep nothing decays, so an agent's self-retention is what it recalls of the past, q P, and
sum_j (q k_j) v_j over the agents up to it: a key/value cache is kept, memories are not.
`systems.sable.decode_sequential` is the truth.
"""

import functools
import typing as tp

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from sable.kernels.cached_decoder import attend_cache
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
class DecoderInputs:
    """Inputs of the fused kernel; a program takes those of one environment."""

    encoded: Array  # [B, N, E]
    time_encoding: Array  # [B, E]
    action_mask: Array  # [B, N, A] float32
    noise: Array  # [B, N, A]
    # [B, 1 + A, 5 E] the first block's queries, keys, values, gates and what it reads, for every token there
    # is
    token_table: Array
    queries: tuple[Array, ...]  # [B, N, E] of cross-retention, by block
    readouts: tuple[Array, ...]  # [B, N, E] what they recall of the past
    past: tuple[Array, ...]  # [B, H, d, d] of self-retention


@struct
class KernelOutputs:
    """Outputs of the fused kernel."""

    raw: Array  # [B, N]
    log_prob: Array  # [B, N]
    self_keys: tuple[Array, ...]  # [B, N, E] by block
    self_values: tuple[Array, ...]
    cross_keys: tuple[Array, ...]
    cross_values: tuple[Array, ...]


class DecoderOutputs(tp.NamedTuple):
    """The team's actions [B, N], and the memories after them, [B, H, d, d] by block."""

    raw: Array
    log_prob: Array
    self_memory: tuple[Array, ...]
    cross_memory: tuple[Array, ...]


def supported(width: int, num_heads: int) -> bool:
    """Return whether a network has sizes the kernel can handle: powers of two, and heads of 16 channels at
    least."""
    return width & (width - 1) == 0 and width % num_heads == 0 and width // num_heads >= 16


def decode(
    weights: DecoderWeights,
    encoded: Array,  # [B, N, E]
    time_encoding: Array,  # [B, E]
    action_mask: Array,  # [B, N, A]
    noise: Array,  # [B, N, A]
    self_memory: tuple[Array, ...],  # [B, H, d, d] by block, as the first agent finds it
    cross_memory: tuple[Array, ...],
) -> DecoderOutputs:
    """Decide for every agent of a timestep, in the order given; interpreted without a GPU."""
    interpret = jax.default_backend() != "gpu"
    num_envs, num_agents, width = encoded.shape
    _, num_heads, head_dim, _ = self_memory[0].shape

    def read_memory(queries, memory):
        queries = queries.reshape(num_envs, -1, num_heads, head_dim)
        return jnp.einsum("bnhi,bhij->bnhj", queries, memory).reshape(num_envs, -1, width)

    token_table = (weights.tokens[None] + time_encoding[:, None]) @ weights.blocks[0].self_in
    token_table = jnp.concatenate(
        [token_table, read_memory(token_table[..., :width], self_memory[0])], axis=-1
    )
    here = encoded + time_encoding[:, None]
    queries = tuple(here @ block.queries for block in weights.blocks)
    inputs = DecoderInputs(
        encoded=encoded,
        time_encoding=time_encoding,
        action_mask=action_mask.astype(jnp.float32),
        noise=noise,
        token_table=token_table,
        queries=queries,
        readouts=tuple(read_memory(*each) for each in zip(queries, cross_memory, strict=True)),
        past=self_memory,
    )

    def out_struct(*shape, dtype=jnp.float32):
        return tp.cast(Array, jax.ShapeDtypeStruct((num_envs, *shape), dtype))

    by_block = (out_struct(num_agents, width),) * len(weights.blocks)
    outputs = KernelOutputs(
        raw=out_struct(num_agents, dtype=jnp.int32),
        log_prob=out_struct(num_agents),
        self_keys=by_block,
        self_values=by_block,
        cross_keys=by_block,
        cross_values=by_block,
    )
    leaves, out_tree = jax.tree.flatten(outputs)
    flat_inputs, in_tree = jax.tree.flatten((inputs, weights))
    sizes = {
        "num_actions": weights.tokens.shape[0] - 1,
        "num_heads": num_heads,
        "needs_barrier": not interpret,
    }
    flat_outputs = pl.pallas_call(
        functools.partial(_kernel, in_tree=in_tree, out_tree=out_tree, **sizes),
        grid=(num_envs,),
        in_specs=[*map(_env_spec, jax.tree.leaves(inputs)), *map(_full_spec, jax.tree.leaves(weights))],
        out_specs=[*map(_env_spec, leaves)],
        out_shape=leaves,
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=WARPS, num_stages=1),
        name="sable_decode",
    )(*flat_inputs)
    outputs = jax.tree.unflatten(out_tree, flat_outputs)

    def memory_after(memory, keys, values):
        keys, values = (x.reshape(num_envs, num_agents, num_heads, head_dim) for x in (keys, values))
        return retention.add_key_values(memory, keys, values)

    return DecoderOutputs(
        outputs.raw,
        outputs.log_prob,
        tuple(map(memory_after, self_memory, outputs.self_keys, outputs.self_values)),
        tuple(map(memory_after, cross_memory, outputs.cross_keys, outputs.cross_values)),
    )


def _kernel(*refs, in_tree, out_tree, num_actions, num_heads, needs_barrier):
    inputs, weights = jax.tree.unflatten(in_tree, refs[: in_tree.num_leaves])
    outputs = jax.tree.unflatten(out_tree, refs[in_tree.num_leaves :])
    num_agents, width = inputs.encoded.shape
    head_dim, columns = width // num_heads, max(16, pl.next_power_of_2(num_actions))
    heads = [pl.ds(h * head_dim, head_dim) for h in range(num_heads)]
    column = jax.lax.iota(jnp.int32, columns)
    valid, actions = column < num_actions, pl.ds(traced_zero(), columns)
    step_encoding = inputs.time_encoding[...]

    def part(number, cols):
        """Return the columns of one head in one of the matrices that stand side by side."""
        return pl.ds(number * width + cols.start, head_dim)

    def share(keys, values, i, cols, key, value):
        """Put down an agent's key and value where all threads of the program see them."""
        keys[i, cols], values[i, cols] = key, value
        if needs_barrier:
            triton.debug_barrier()

    def gated(out, gate, scale, bias):
        out = out - out.mean()
        out = out * jax.lax.rsqrt((out * out).mean() + 1e-6)
        return gate * jax.nn.sigmoid(gate) * (out * scale + bias)

    def agent(i, token):
        x, encoding = weights.tokens[token, :], inputs.encoded[i, :]
        for number, block in enumerate(weights.blocks):
            here, out = x + step_encoding, jnp.zeros((width,), jnp.float32)
            keys, values = outputs.self_keys[number], outputs.self_values[number]
            for h, cols in enumerate(heads):
                if number == 0:
                    query, key, value, gate, readout = (
                        inputs.token_table[token, part(k, cols)] for k in range(5)
                    )
                else:
                    query, key, value, gate = (
                        _product(here, block.self_in[:, part(k, cols)]) for k in range(4)
                    )
                    readout = _product(query, inputs.past[number][h, :, :])
                share(keys, values, i, cols, key, value)
                readout += attend_cache(query, (keys, cols), (values, cols), i + 1)
                gated_readout = gated(readout, gate, block.self_scale[cols], block.self_bias[cols])
                out += _product(gated_readout, block.self_out[cols, :])
            r = _rms(x + out, block.norms[0][...])
            here, out = r + step_encoding, jnp.zeros((width,), jnp.float32)
            keys, values = outputs.cross_keys[number], outputs.cross_values[number]
            for cols in heads:
                key, value, gate = (_product(here, block.cross_in[:, part(k, cols)]) for k in range(3))
                share(keys, values, i, cols, key, value)
                query, readout = inputs.queries[number][i, cols], inputs.readouts[number][i, cols]
                readout += attend_cache(query, (keys, cols), (values, cols), i + 1)
                gated_readout = gated(readout, gate, block.cross_scale[cols], block.cross_bias[cols])
                out += _product(gated_readout, block.cross_out[cols, :])
            y = _rms(encoding + out, block.norms[1][...])
            gate = _product(y, block.ff_in[:, pl.ds(0, width)])
            inner = gate * jax.nn.sigmoid(gate) * _product(y, block.ff_in[:, pl.ds(width, width)])
            x = _rms(y + _product(inner, block.ff_out[...]), block.norms[2][...])
        hidden = _product(x, weights.head_in[...]) + weights.head_bias[...]
        hidden = _rms(jax.nn.gelu(hidden), weights.head_norm[...])
        valid_columns = jnp.broadcast_to(valid[None], (width, columns))
        logits = _product(hidden, triton.load(weights.head_out.at[:, actions], mask=valid_columns, other=0.0))
        bias, action_mask, noise = (
            triton.load(ref, mask=valid, other=0.0)
            for ref in (
                weights.head_out_bias.at[actions],
                inputs.action_mask.at[i, actions],
                inputs.noise.at[i, actions],
            )
        )
        logits = jnp.where(action_mask > 0, logits + bias, jnp.finfo(jnp.float32).min)
        logits = jnp.where(valid, logits, -jnp.inf)
        action = jnp.argmax(logits + noise).astype(jnp.int32)
        top = logits.max()
        logit = jnp.where(column == action, logits, 0.0).sum()
        outputs.raw[i] = action
        outputs.log_prob[i] = logit - top - jnp.log(jnp.exp(logits - top).sum())
        return action + 1

    jax.lax.fori_loop(0, num_agents, agent, jnp.zeros((), jnp.int32))


def _product(x, matrix):
    return (x[:, None] * matrix).sum(axis=0)


def _rms(x, scale):
    return x * jax.lax.rsqrt((x * x).mean() + 1e-6) * scale


def _env_spec(x: tp.Any) -> pl.BlockSpec:
    """Return a program's environment, along the first axis."""
    return pl.BlockSpec((None, *x.shape[1:]), lambda b: (b,) + (0,) * (len(x.shape) - 1))


def _full_spec(x: tp.Any) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda b: (0,) * len(x.shape))
