"""Memories read, written, and reset, as GPU kernels (Pallas, Triton).

XLA slices every agent's key and value out, a kernel for each, turns queries round, and reads and writes all
memories once more where a few episodes opened. Here a program takes one environment and one head: it asks for
its agents, or adds what they tell, where the matrix product left it; and where no episode opened it does
nothing.

`ops.retention.read_memory`, `ops.retention.write_memory` and `ops.trees.reset_memory` are the truth, and what
is done where the kernels cannot.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import PyTree

from sable.kernels import retention
from sable.ops import retention as ops_retention
from sable.ops import sharding
from sable.ops import trees as tree
from sable.ops.retention import MAX_UNROLLED_AGENTS


def _use_kernel(memory: Array, agents: Array) -> bool:
    """Return whether memories of such heads are read and written by the kernels: on a GPU, if both can, for
    few agents."""
    return retention.use_kernel(memory.shape[-1]) and agents.shape[1] <= MAX_UNROLLED_AGENTS


def read_memory(memory: Array, query: Array, kappa: Array) -> Array:
    """Return what a timestep's queries [B, N, E] read from the memory [B, H, d, d] that the last timestep
    left."""
    if not _use_kernel(memory, query):
        return ops_retention.read_memory(memory, query, kappa)

    def kernel(memory, query, kappa, readout):
        head_index = pl.program_id(1)
        rows = _Agents(query, memory.shape[0])
        rows.store(readout, retention.dot(rows.load(query), memory[...]) * kappa[head_index])

    def per_device(kappa, memory, query):
        return _call(kernel, "read_memory", (memory, query, kappa), [query])[0]

    return sharding.shard_map_envs(per_device, kappa, memory, query)


def write_memory(memory: Array, projections: Array, kappa: Array, columns: tuple[int, int]) -> Array:
    """Return the memory [B, H, d, d] that a timestep leaves, from that of the timestep before and its agents'
    projections [B, N, _], where keys and values begin at `columns`."""
    if not _use_kernel(memory, projections):
        return ops_retention.write_memory(memory, projections, kappa, columns)

    def kernel(memory, projections, kappa, new_memory):
        rows = _Agents(projections, memory.shape[0])
        key, value = (rows.load(projections, at) for at in columns)
        new_memory[...] = memory[...] * kappa[pl.program_id(1)] + retention.dot(key.T, value)

    def per_device(kappa, memory, projections):
        return _call(kernel, "write_memory", (memory, projections, kappa), [memory], {0: 0})[0]

    return sharding.shard_map_envs(per_device, kappa, memory, projections)


def reset_memory(memory: PyTree, first: Array) -> PyTree:
    """Return `tree.reset_memory`, by the kernel where it can: nothing where `first`, else `memory`."""
    leaves, structure = jax.tree.flatten(memory)
    if not leaves or not all(x.ndim == 4 and retention.use_kernel(x.shape[-1]) for x in leaves):
        return tree.reset_memory(memory, first)

    def kernel(first, *refs):
        @pl.when(first[pl.program_id(0)])
        def _():
            for new_memory in refs[len(leaves) :]:
                new_memory[...] = jnp.zeros(new_memory.shape, new_memory.dtype)

    def per_device(_, first, leaves):
        aliases = {k + 1: k for k in range(len(leaves))}
        return _call(kernel, "reset_memory", (first, *leaves), leaves, aliases)

    return structure.unflatten(sharding.shard_map_envs(per_device, (), first, leaves))


class _Agents:
    """The agents' channels of a program's head, [MAX_UNROLLED_AGENTS, d]: past the last agent there are
    zeros."""

    def __init__(self, ref, head_dim):
        self.start, self.head_dim, self.zero = pl.program_id(1) * head_dim, head_dim, retention.traced_zero()
        valid = jax.lax.iota(jnp.int32, MAX_UNROLLED_AGENTS) < ref.shape[0]
        self.mask = jnp.broadcast_to(valid[:, None], (MAX_UNROLLED_AGENTS, head_dim))

    def _at(self, ref, column):
        return ref.at[pl.ds(self.zero, MAX_UNROLLED_AGENTS), pl.ds(column + self.start, self.head_dim)]

    def load(self, ref, column=0):
        return triton.load(self._at(ref, column), mask=self.mask, other=0.0)

    def store(self, ref, value):
        triton.store(self._at(ref, 0), value, mask=self.mask)


def _call(kernel, name, inputs, outputs, aliases=None):
    """Run a program for every environment and head. With `aliases`, what is written takes the place of what
    was there."""
    interpret = jax.default_backend() != "gpu"
    *grid, head_dim, _ = next(x.shape for x in inputs if x.ndim == 4)
    return pl.pallas_call(
        kernel,
        grid=tuple(grid),
        in_specs=[*map(retention.block_spec, inputs)],
        out_specs=[*map(retention.block_spec, outputs)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        input_output_aliases=aliases or {},
        interpret=interpret,
        compiler_params=None
        if interpret
        else triton.CompilerParams(num_warps=min(8, max(1, head_dim**2 // 1024))),
        name=name,
    )(*inputs)
