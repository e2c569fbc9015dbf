"""The interface of a system: the functions training calls, and the three conventions everyone relies on.

- `first[t]` is true iff `observation[t]` opens an episode. Memory is reset *before* acting on such an
  observation, by `kernels.memory_update.reset_memory` in `collect`, and by the flags themselves in every
  sequence form of a network; evaluation plays one episode from memories that are zero already.
- `discount[t]` is 0 only where the episode truly ended. A time limit leaves it 1, and the next `first` cuts
  the return.
- A rollout's `start_memory` and `last_memory` are the memories as the last decision left them, such a reset
  done or not: whoever goes on from them does it.
"""

import dataclasses
import typing as tp

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sable.config.schema import SystemConfig
from sable.types import Decision, Metrics, Observation, PyTree, Rollout


class Learner(tp.Protocol):
    """Any struct with these fields; everything else in it is the system's own business."""

    params: PyTree
    hyper: PyTree
    """The numbers that need no recompilation, as array leaves, so that a batch of them can share one
    program."""
    replay: PyTree
    """Stored experience, or (). It alone is not put back when an update is undone because something in it
    stopped being finite: that would cost a copy of it in every update."""


class System(tp.NamedTuple):
    """A learning system for one EnvSpec, as pure functions. Observations and memories have a leading [B]."""

    hyper: PyTree
    """The configured hyper-parameters, to be handed to `init` as they are or changed."""
    init: tp.Callable[[Array, PyTree], tp.Any]
    """(key, hyper) -> Learner"""
    initial_memory: tp.Callable[[int], PyTree]
    """num_envs -> the memory of episodes not yet begun, all zeros; () for a memoryless system"""
    explore: tp.Callable[[tp.Any, Observation, PyTree, Array], Decision]
    """(learner, observation, memory, key) -> the decision while collecting, with whatever exploration there
    is"""
    act: tp.Callable[[PyTree, Observation, PyTree, Array | None], Decision]
    """(params, observation, memory, key) -> the decision while evaluating or deployed: sampled, or without a
    key the most probable one"""
    next_extras: tp.Callable[[tp.Any, Observation, PyTree], PyTree]
    """(learner, the observation that followed, memory) -> what `Transition.next_extras` keeps of it: () for
    nothing, its value for bootstrapping through time limits, the observation itself for replay"""
    learn: tp.Callable[[tp.Any, Rollout, Array], tuple[tp.Any, Metrics]]
    """(learner, rollout, key) -> the learner after it, and scalars about it"""


_Hyperparameters = tp.TypeVar("_Hyperparameters")


def hyperparameters_from(
    hyper: type[_Hyperparameters], config: SystemConfig, **values: PyTree
) -> _Hyperparameters:
    """Return the numbers of a `hyper` struct as array leaves: as given, else from the configuration's fields
    of those names."""
    names = [field.name for field in dataclasses.fields(hyper)]  # pyright: ignore[reportArgumentType]
    from_config = {name: getattr(config, name) for name in names if name not in values}
    return hyper(**jax.tree.map(jnp.float32, from_config | values))


def gradient_step(
    optimiser: optax.GradientTransformation, gradient: PyTree, opt_state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """Return (params, opt_state) after one step of the optimiser."""
    updates, opt_state = optimiser.update(gradient, opt_state)
    return optax.apply_updates(params, updates), opt_state
