"""How experience is cut for learning: time into chunks, columns into minibatches and microbatches."""

from dataclasses import replace

import jax
from jax import Array

from sable.types import PyTree, Transition, struct

MICROBATCH = 2**18
"""Tokens whose activations learning holds at once, where a column does not have more."""


@struct
class Batch:
    """The data minibatches are taken from; environments on axis 1 of the steps, 0 of the memory."""

    steps: Transition
    advantage: Array
    target: Array
    memory: PyTree


def num_microbatches(num_columns: int, tokens: int) -> int:
    """Return into how many equal microbatches columns of so many tokens each are cut: as few as may be."""
    return next(
        n
        for n in range(1, num_columns + 1)
        if (num_columns % n == 0 and num_columns // n * tokens <= MICROBATCH) or n == num_columns
    )


def microbatches(batch: Batch, num: int) -> Batch:
    """Return the batch with its columns dealt out to as many microbatches, along a new first axis."""

    def steps(x: Array) -> Array:
        return x.reshape(x.shape[0], num, -1, *x.shape[2:]).swapaxes(0, 1)

    memory = jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), batch.memory)
    return Batch(
        memory=memory,
        **{name: jax.tree.map(steps, getattr(batch, name)) for name in ("steps", "advantage", "target")},
    )


def split_time(batch: Batch, chunk: int) -> Batch:
    """Return the batch with its time cut into contiguous chunks, each an environment of its own.

    [T, B] becomes [chunk, T / chunk * B], and each chunk begins with the memory it was acted with.
    """

    def column(x: Array) -> Array:
        x = x.reshape(-1, chunk, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(chunk, -1, *x.shape[3:])

    extras = batch.steps.extras
    without_memory = replace(batch.steps, extras=replace(extras, memory=()))
    steps, advantage, target = jax.tree.map(column, (without_memory, batch.advantage, batch.target))
    memory = jax.tree.map(lambda x: column(x)[0], extras.memory)
    return Batch(steps=steps, advantage=advantage, target=target, memory=memory)
