"""Retention for the next agent of a timestep as one GPU kernel (Pallas, Triton).

A scan that carries memories reads and writes all of them for every agent. Within a timestep nothing decays,
so what an agent recalls is what the memory of the timestep before says, q kappa M, and sum_j (q k_j) v_j over
the agents up to it: their keys and values are put down, and the memory is written once, when all have
decided.

`MultiScaleRetention.token` is the truth.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from sable.kernels.retention import EPSILON, block_spec

AGENTS = 8
"""Of how many agents a program reads the keys and values at a time."""


def recall(
    agent: Array,  # [1] how many decided before
    told: Array,  # [B, 4 E]: query, key, value, gate; or without the query
    # The memory [B, H, d, d] as the timestep before left it; or all agents' queries and what it says to them,
    # [B, N, E] each:
    past: Array | tuple[Array, Array],
    kept: Array,  # [B, N, 2 E] keys and values of those before
    scale: Array,  # [E] of the norm of what is recalled, one group per head
    bias: Array,  # [E]
    kappa: Array,  # [H] decays
) -> tuple[Array, Array]:
    """(swish(gate) * norm(retention) [B, E], `kept` with this agent's)."""
    num_envs, num_heads, head = kept.shape[0], kappa.shape[0], scale.shape[0] // kappa.shape[0]
    given = (agent, told, *jax.tree.leaves(past), scale, bias, kappa, kept)
    out_shape = [jax.ShapeDtypeStruct((num_envs, scale.shape[0]), jnp.float32), kept]
    interpret = jax.default_backend() != "gpu"
    out, kept = pl.pallas_call(
        functools.partial(_kernel, head=head),
        grid=(num_envs, num_heads),
        in_specs=[*map(block_spec, given)],
        out_specs=[*map(block_spec, out_shape)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_shape],
        input_output_aliases={len(given) - 1: 1},
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=2 if head > 64 else 1),
        name="retention_row",
    )(*given)
    return out, kept


def _kernel(agent, told, *refs, head):
    *past, scale, bias, kappa, before, out, kept = refs
    width, number, own = out.shape[0], pl.program_id(1), agent[0]
    start = number * head
    cols = pl.ds(start, head)
    *query, key, value, gate = (told[pl.ds(k * width + start, head)] for k in range(told.shape[0] // width))
    if query:
        query = query[0]
        found = (query[:, None] * past[0][...]).sum(axis=0) * kappa[number]
    else:
        query, found = (ref[own, cols] for ref in past)
    value_cols = pl.ds(width + start, head)
    kept[own, cols], kept[own, value_cols] = key, value
    found = found + (query * key).sum() * value + so_far(query, (before, cols), (before, value_cols), own)
    found = found - found.mean()
    found = found * jax.lax.rsqrt((found * found).mean() + EPSILON)
    out[cols] = gate * jax.nn.sigmoid(gate) * (found * scale[cols] + bias[cols])


def so_far(query, keys, values, num):
    """sum_j (query k_j) v_j over the first `num` agents, some at a time; both are (array, channels)."""
    head = query.shape[0]

    def add(j, found):
        there = j * AGENTS + jax.lax.iota(jnp.int32, AGENTS) < num
        there = jnp.broadcast_to(there[:, None], (AGENTS, head))
        key, value = (
            triton.load(ref.at[pl.ds(j * AGENTS, AGENTS), cols], mask=there, other=0.0)
            for ref, cols in (keys, values)
        )
        return found + ((query[None] * key).sum(axis=1)[:, None] * value).sum(axis=0)

    rounds = jax.lax.div(num + AGENTS - 1, AGENTS)
    return jax.lax.fori_loop(0, rounds, add, jnp.zeros((head,), jnp.float32))
