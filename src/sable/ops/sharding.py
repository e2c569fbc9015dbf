"""Which device holds what, where several share one program. With one device nothing here does anything.

XLA divides a program among devices by itself and puts communication where it needs some. These are the few
places where it would choose badly: it is told what to share, and what to hold whole.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from sable.types import PyTree

SEEDS, ENVS = "seeds", "envs"
"""The axes of a mesh of devices."""

LEARNERS = "learners"
"""The axis of learners that train side by side in one program."""


def num_learners() -> int:
    """Return how many learners the function being traced is mapped over, as `training.devices.vmap_seeds`
    does."""
    try:
        return jax.lax.axis_size(LEARNERS)
    except NameError:
        return 1


def any_learner(flag: jax.Array) -> jax.Array:
    """Return whether `flag` is true of any learner: the same for all, so that a loop over it goes on for all
    and need not keep apart what those have that are done."""
    return jax.lax.pmax(flag.astype(int), LEARNERS) > 0 if num_learners() > 1 else flag


def shard(tree: PyTree, axis: int = 0) -> PyTree:
    """Return the same, with `axis` of every leaf divided among the devices that share a seed's
    environments."""
    size = _num_env_shards()

    def leaf(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(*[None] * axis, ENVS)
        return jax.lax.with_sharding_constraint(x, spec) if x.shape[axis] % size == 0 else x

    return jax.tree.map(leaf, tree) if size > 1 else tree


def replicate(tree: PyTree) -> PyTree:
    """Return the same, with every leaf held whole by each of the devices that share a seed's environments."""
    keep = PartitionSpec()
    return jax.lax.with_sharding_constraint(tree, keep) if _num_env_shards() > 1 else tree


def shard_map_envs(function: Callable[..., PyTree], replicated: PyTree, *per_env: PyTree) -> PyTree:
    """Return `function(replicated, *per_env)`, each device calling it on its own environments, the first axis
    of all else and of the results.

    For what XLA does not divide (kernels), and for loops whose length need not be the same everywhere.
    """
    mesh, size, num_envs = (
        jax.sharding.get_abstract_mesh(),
        _num_env_shards(),
        jax.tree.leaves(per_env)[0].shape[0],
    )
    if mesh.empty or ENVS in mesh.manual_axes or num_envs % size:  # or where they are divided already
        return function(replicated, *per_env)
    specs = (PartitionSpec(), *[PartitionSpec(ENVS)] * len(per_env))
    sharded = jax.shard_map(function, in_specs=specs, out_specs=PartitionSpec(ENVS), check_vma=False)
    return sharded(replicated, *per_env)


def partial_sums(x: jax.Array) -> jax.Array:
    """Return the sum over environments [B], in as many parts as devices share them: no device waits for
    another."""
    return x.reshape(_num_env_shards(), -1).sum(1)


def _num_env_shards() -> int:
    """Return how many devices share the environments of a seed."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(ENVS, 1)
