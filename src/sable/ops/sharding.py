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
    """How many learners the function being traced is mapped over, as `training.devices.over_seeds` does."""
    try:
        return jax.lax.axis_size(LEARNERS)
    except NameError:
        return 1


def by_any(answer: jax.Array) -> jax.Array:
    """Whether `answer` is true of any learner: the same for all, so that a loop over it goes on for all and
    need not keep apart what those have that are done."""
    return jax.lax.pmax(answer.astype(int), LEARNERS) > 0 if num_learners() > 1 else answer


def shared(tree: PyTree, axis: int = 0) -> PyTree:
    """The same, with `axis` of every leaf divided among the devices that share a seed's environments."""
    size = _sharers()

    def leaf(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(*[None] * axis, ENVS)
        return jax.lax.with_sharding_constraint(x, spec) if x.shape[axis] % size == 0 else x

    return jax.tree.map(leaf, tree) if size > 1 else tree


def whole(tree: PyTree) -> PyTree:
    """The same, with every leaf held whole by each of the devices that share a seed's environments."""
    keep = PartitionSpec()
    return jax.lax.with_sharding_constraint(tree, keep) if _sharers() > 1 else tree


def apart(function: Callable[..., PyTree], common: PyTree, *by_env: PyTree) -> PyTree:
    """`function(common, *by_env)`, each device calling it on its own environments, the first axis of all
    else and of the results.

    For what XLA does not divide (kernels), and for loops whose length need not be the same everywhere.
    """
    mesh, size, num_envs = jax.sharding.get_abstract_mesh(), _sharers(), jax.tree.leaves(by_env)[0].shape[0]
    if mesh.empty or ENVS in mesh.manual_axes or num_envs % size:  # or where they are apart already
        return function(common, *by_env)
    specs = (PartitionSpec(), *[PartitionSpec(ENVS)] * len(by_env))
    apart = jax.shard_map(function, in_specs=specs, out_specs=PartitionSpec(ENVS), check_vma=False)
    return apart(common, *by_env)


def sums(x: jax.Array) -> jax.Array:
    """The sum over environments [B], in as many parts as devices share them: no device waits for another."""
    return x.reshape(_sharers(), -1).sum(1)


def _sharers() -> int:
    """How many devices share the environments of a seed."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(ENVS, 1)
