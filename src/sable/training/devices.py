"""Several devices: the seeds of a run, and each seed's environments, shared among them by `jit` alone.

The state is placed on a mesh of two axes, seeds and environments, and compiled programs keep it there; XLA
divides the work and adds the communication. See also `ops.sharding`.
"""

import contextlib
import typing as tp
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sable.config.schema import Config, split_devices
from sable.errors import SableError
from sable.ops.sharding import ENVS, LEARNERS, SEEDS
from sable.training.update import State
from sable.types import PyTree


def make_mesh(config: Config) -> Mesh | None:
    """Return the devices that share the run, seeds along one axis and environments along the other; None for
    one."""
    available = jax.devices()
    if jax.process_count() > 1 and config.run.devices:
        raise SableError(
            f"devices={config.run.devices}: several processes share all devices; give --devices all"
        )
    num = config.run.devices or len(available)
    if num > len(available):
        raise SableError(
            f"devices={num}: there {'is' if len(available) == 1 else 'are'} {len(available)} here "
            f"({available[0].platform}); --devices all takes what there is"
        )
    if num == 1:
        return None
    shape = split_devices(num, len(config.run.seeds), config.system)
    return jax.make_mesh(shape, (SEEDS, ENVS), devices=available[:num], axis_types=(AxisType.Auto,) * 2)


def use_mesh(mesh: Mesh | None) -> tp.ContextManager:
    """Return the context in which programs are traced for these devices."""
    return jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext()


def vmap_seeds(mesh: Mesh | None, function: tp.Callable, in_axes: tp.Any = 0) -> tp.Callable:
    """Return `function` of one seed, mapped over all of them."""
    return jax.vmap(function, in_axes, axis_name=LEARNERS, spmd_axis_name=None if mesh is None else SEEDS)


def put_state(state: State, state_shardings: State | None) -> State:
    """Return the state, each device holding its share."""
    return state if state_shardings is None else jax.tree.map(_put, state, state_shardings)


def state_shardings(mesh: Mesh | None, state: State) -> State | None:
    """Return where each array of a state belongs: environments are divided like seeds, what is learnt is the
    same on all devices of a seed, and what the host looks at is the same everywhere."""
    if mesh is None:
        return None

    def at(tree: PyTree, *axes: str) -> tp.Any:
        return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec(*axes)), tree)

    run = state.run
    num_envs = run.rollout_state.timestep.first.shape[1]
    replay = jax.tree.map(
        lambda x: at(x, SEEDS, ENVS) if x.shape[1:2] == (num_envs,) else at(x, SEEDS), run.learner.replay
    )
    return State(
        run=replace(
            at(run, SEEDS),
            learner=replace(at(run.learner, SEEDS), replay=replay),
            rollout_state=at(run.rollout_state, SEEDS, ENVS),
            num_updates=replicated_sharding(mesh),
            halted=replicated_sharding(mesh),
        ),
        best=at(state.best, SEEDS),
    )


def replicated_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """Return the place of what every device, and so every process, holds whole."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())


def _put(x: Array, where: NamedSharding) -> Array:
    """Return `x`, which every process has whole, as one array over all devices."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(jax.random.key_data(x), where))
    host = np.asarray(x)
    return jax.make_array_from_callback(x.shape, where, lambda index: host[index])
