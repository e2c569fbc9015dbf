"""Retention for the next agent of a timestep, with a key/value cache, as one GPU kernel (Pallas, Triton).

A scan that carries memories reads and writes all of them for every agent. Within a timestep nothing decays,
so what an agent recalls is what the memory of the timestep before says, q kappa M, and sum_j (q k_j) v_j over
the agents up to it: their keys and values are put down, and the memory is written once, when all have
decided.

`SelfRetention.token` and `CrossRetention.token` of `nets.retention` are the truth.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from sable.kernels.retention import EPSILON, block_spec

AGENTS_PER_LOAD = 8
"""Of how many agents a program reads the keys and values at a time."""


def next_agent(
    agent: Array,  # [1] how many decided before
    projections: Array,  # [B, 4 E]: query, key, value, gate; or without the query
    # The memory [B, H, d, d] as the timestep before left it; or all agents' queries and what it says to them,
    # [B, N, E] each:
    past: Array | tuple[Array, Array],
    cache: Array,  # [B, N, 2 E] keys and values of those before
    scale: Array,  # [E] of the norm of what is recalled, one group per head
    bias: Array,  # [E]
    kappa: Array,  # [H] decays
) -> tuple[Array, Array]:
    """Return (swish(gate) * norm(retention) [B, E], `cache` with this agent's)."""
    num_envs, num_heads, head_dim = cache.shape[0], kappa.shape[0], scale.shape[0] // kappa.shape[0]
    inputs = (agent, projections, *jax.tree.leaves(past), scale, bias, kappa, cache)
    out_shape = [jax.ShapeDtypeStruct((num_envs, scale.shape[0]), jnp.float32), cache]
    interpret = jax.default_backend() != "gpu"
    out, cache = pl.pallas_call(
        functools.partial(_kernel, head_dim=head_dim),
        grid=(num_envs, num_heads),
        in_specs=[*map(block_spec, inputs)],
        out_specs=[*map(block_spec, out_shape)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_shape],
        input_output_aliases={len(inputs) - 1: 1},
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=2 if head_dim > 64 else 1),
        name="retention_next_agent",
    )(*inputs)
    return out, cache


def _kernel(agent, projections, *refs, head_dim):
    *past, scale, bias, kappa, cache_in, out, cache = refs
    width, head_index, index = out.shape[0], pl.program_id(1), agent[0]
    start = head_index * head_dim
    cols = pl.ds(start, head_dim)
    reads_memory = len(past) == 1  # else the query is in `past`, with what it read
    *query, key, value, gate = (
        projections[pl.ds(k * width + start, head_dim)] for k in range(4 if reads_memory else 3)
    )
    if reads_memory:
        query = query[0]
        readout = (query[:, None] * past[0][...]).sum(axis=0) * kappa[head_index]
    else:
        query, readout = (ref[index, cols] for ref in past)
    value_cols = pl.ds(width + start, head_dim)
    cache[index, cols], cache[index, value_cols] = key, value
    readout = (
        readout
        + (query * key).sum() * value
        + attend_cache(query, (cache_in, cols), (cache_in, value_cols), index)
    )
    readout = readout - readout.mean()
    readout = readout * jax.lax.rsqrt((readout * readout).mean() + EPSILON)
    out[cols] = gate * jax.nn.sigmoid(gate) * (readout * scale[cols] + bias[cols])


def attend_cache(query, keys, values, num):
    """Return sum_j (query k_j) v_j over the first `num` agents, some at a time; both are (array,
    channels)."""
    head_dim = query.shape[0]

    def add(j, readout):
        valid = j * AGENTS_PER_LOAD + jax.lax.iota(jnp.int32, AGENTS_PER_LOAD) < num
        valid = jnp.broadcast_to(valid[:, None], (AGENTS_PER_LOAD, head_dim))
        key, value = (
            triton.load(ref.at[pl.ds(j * AGENTS_PER_LOAD, AGENTS_PER_LOAD), cols], mask=valid, other=0.0)
            for ref, cols in (keys, values)
        )
        return readout + ((query[None] * key).sum(axis=1)[:, None] * value).sum(axis=0)

    num_loads = jax.lax.div(num + AGENTS_PER_LOAD - 1, AGENTS_PER_LOAD)
    return jax.lax.fori_loop(0, num_loads, add, jnp.zeros((head_dim,), jnp.float32))
