"""Memories written, and forgotten, as GPU kernels (Pallas, Triton).

XLA slices every agent's key and value out, a kernel for each, and reads and writes all memories once more
where a few episodes opened. Here a program takes one environment and one head: it adds what its agents tell,
from where the matrix product left it; and where no episode opened it does nothing.

`ops.retention.told` and `ops.tree.reset` are the truth.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import PyTree

from sable.kernels import retention
from sable.ops import sharding, tree
from sable.ops.retention import FEW


def chosen(head: int, num_agents: int) -> bool:
    """Whether memories of such heads are written by the kernel: on a GPU, if both can."""
    return retention.chosen(head) and num_agents <= FEW


def remember(memory: Array, told: Array, kappa: Array, columns: tuple[int, int]) -> Array:
    """The memory [B, H, d, d] that a timestep leaves, from that of the timestep before and what its agents
    told [B, N, _], where keys and values begin at `columns`."""

    def kernel(memory, told, kappa, after):
        number, head = pl.program_id(1), after.shape[0]
        state = memory[...] * kappa[number]
        for agent in range(told.shape[0]):
            key, value = (told[agent, pl.ds(at + number * head, head)] for at in columns)
            state = state + key[:, None] * value[None, :]
        after[...] = state

    given = memory, told, kappa
    return _in_place(kernel, "remember", memory.shape[:2], given, [memory], {0: 0})[0]


def forget(memory: PyTree, first: Array) -> PyTree:
    """`tree.reset`, by the kernel where it can: nothing where `first`, else `memory`."""
    leaves, structure = jax.tree.flatten(memory)
    if not leaves or not all(x.ndim == 4 and retention.chosen(x.shape[-1]) for x in leaves):
        return tree.reset(memory, first)

    def kernel(first, *refs):
        @pl.when(first[pl.program_id(0)])
        def _():
            for after in refs[len(leaves) :]:
                after[...] = jnp.zeros(after.shape, after.dtype)

    def here(_, first, leaves):
        aliases = {k + 1: k for k in range(len(leaves))}
        grid = leaves[0].shape[:2]
        return _in_place(kernel, "forget", grid, (first, *leaves), leaves, aliases)

    return structure.unflatten(sharding.apart(here, (), first, leaves))


def _in_place(kernel, name, grid, given, states, aliases):
    """A program for every environment and head; what is written takes the place of what was there."""
    interpret = jax.default_backend() != "gpu"
    warps = min(8, max(1, states[0].shape[-1] ** 2 // 1024))
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[*map(retention.block_spec, given)],
        out_specs=[*map(retention.block_spec, states)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in states],
        input_output_aliases=aliases,
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=warps),
        name=name,
    )(*given)
