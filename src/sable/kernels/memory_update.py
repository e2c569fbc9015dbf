"""Memories asked, written, and forgotten, as GPU kernels (Pallas, Triton).

XLA slices every agent's key and value out, a kernel for each, turns queries round, and reads and writes all
memories once more where a few episodes opened. Here a program takes one environment and one head: it asks for
its agents, or adds what they tell, where the matrix product left it; and where no episode opened it does
nothing.

The layers of `nets.retention`, `ops.retention.told` and `ops.trees.reset` are the truth.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import PyTree

from sable.kernels import retention
from sable.ops import sharding
from sable.ops import trees as tree
from sable.ops.retention import FEW


def chosen(head: int, num_agents: int) -> bool:
    """Whether memories of such heads are asked and written by the kernels: on a GPU, if both can."""
    return retention.chosen(head) and num_agents <= FEW


def ask(memory: Array, query: Array, kappa: Array) -> Array:
    """What the memory [B, H, d, d] that the last timestep left says to a timestep's queries [B, N, E]."""

    def kernel(memory, query, kappa, found):
        number = pl.program_id(1)
        rows = _Agents(query, memory.shape[0])
        rows.store(found, retention.dot(rows.load(query), memory[...]) * kappa[number])

    def here(kappa, memory, query):
        return _call(kernel, "ask", (memory, query, kappa), [query])[0]

    return sharding.apart(here, kappa, memory, query)


def remember(memory: Array, told: Array, kappa: Array, columns: tuple[int, int]) -> Array:
    """The memory [B, H, d, d] that a timestep leaves, from that of the timestep before and what its agents
    told [B, N, _], where keys and values begin at `columns`."""

    def kernel(memory, told, kappa, after):
        rows = _Agents(told, memory.shape[0])
        key, value = (rows.load(told, at) for at in columns)
        after[...] = memory[...] * kappa[pl.program_id(1)] + retention.dot(key.T, value)

    def here(kappa, memory, told):
        return _call(kernel, "remember", (memory, told, kappa), [memory], {0: 0})[0]

    return sharding.apart(here, kappa, memory, told)


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
        return _call(kernel, "forget", (first, *leaves), leaves, aliases)

    return structure.unflatten(sharding.apart(here, (), first, leaves))


class _Agents:
    """The agents' channels of a program's head, [FEW, d]: past the last agent there are zeros."""

    def __init__(self, ref, head):
        self.start, self.head, self.zero = pl.program_id(1) * head, head, retention.traced_zero()
        there = jax.lax.iota(jnp.int32, FEW) < ref.shape[0]
        self.mask = jnp.broadcast_to(there[:, None], (FEW, head))

    def _at(self, ref, column):
        return ref.at[pl.ds(self.zero, FEW), pl.ds(column + self.start, self.head)]

    def load(self, ref, column=0):
        return triton.load(self._at(ref, column), mask=self.mask, other=0.0)

    def store(self, ref, value):
        triton.store(self._at(ref, 0), value, mask=self.mask)


def _call(kernel, name, given, like, aliases=None):
    """A program for every environment and head. With `aliases`, what is written takes the place of what was
    there."""
    interpret = jax.default_backend() != "gpu"
    *grid, head, _ = next(x.shape for x in given if x.ndim == 4)
    return pl.pallas_call(
        kernel,
        grid=tuple(grid),
        in_specs=[*map(retention.block_spec, given)],
        out_specs=[*map(retention.block_spec, like)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        input_output_aliases=aliases or {},
        interpret=interpret,
        compiler_params=None
        if interpret
        else triton.CompilerParams(num_warps=min(8, max(1, head**2 // 1024))),
        name=name,
    )(*given)
