"""Small verbs over pytrees whose leaves share leading axes; leaves may be typed PRNG keys."""

import jax
import jax.numpy as jnp
from jax import Array

from sable.types import PyTree


def select(mask: Array, new: PyTree, old: PyTree) -> PyTree:
    """Return `new` where `mask`, else `old`, leaf by leaf; the axes of `mask` are the leading ones of every
    leaf."""

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(mask.reshape(mask.shape + (1,) * (jnp.ndim(new) - mask.ndim)), new, old)

    return jax.tree.map(choose, new, old)


def reset_memory(memory: PyTree, first: Array) -> PyTree:
    """Return zeros where `first`, which marks an episode's opening along the leading axes, else `memory`."""
    return select(first, jax.tree.map(jnp.zeros_like, memory), memory)


def take(tree: PyTree, index: Array, axis: int = 0) -> PyTree:
    """Return the entries `index` of every leaf along `axis`; the axes of `index` take that axis's place."""
    return jax.tree.map(lambda x: x[(slice(None),) * axis + (index,)], tree)


def merge(tree: PyTree, axes: int = 2) -> PyTree:
    """Return every leaf with its first `axes` axes merged into one: [T, B, ..] becomes [T * B, ..]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[axes:]), tree)


def split(tree: PyTree, sizes: tuple[int, ...]) -> PyTree:
    """Return every leaf with its first axis split into axes of these `sizes`, the inverse of `merge`."""
    return jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), tree)


def all_finite(tree: PyTree) -> Array:
    """Return whether no floating-point leaf holds a NaN or an infinity, as a boolean scalar."""
    finite = [
        jnp.isfinite(leaf).all()
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    return jnp.stack(finite).all() if finite else jnp.array(True)
