"""The nouns of the library: what flows between environments, systems and training.

Axes, in this order wherever they are present; leading ones may be absent, none is ever reordered:
S seeds · T time · B environments · N agents · F view features · A actions · E width · H heads · d = E/H · C
chunk
"""

import dataclasses
import typing as tp

import jax
from jax import Array

PyTree = tp.Any
_Class = tp.TypeVar("_Class")
Metrics = dict[str, Array]
"""Scalars under slash paths, such as `loss/actor`."""


@tp.dataclass_transform(frozen_default=True, kw_only_default=True)
def struct(cls: type[_Class]) -> type[_Class]:
    """Return a frozen, keyword-only dataclass that JAX sees as a pytree."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """The sizes and bounds of an environment, all that a system may know of it; never dynamics."""

    num_agents: int
    view_size: int
    time_limit: int
    """The most steps an episode can last."""
    state_size: int = 0
    """Length of the global state, 0 where the suite offers none beyond the joint views."""
    num_actions: int = 0
    """Discrete actions per agent; 0 for a continuous environment."""
    action_size: int = 0
    """Components of one agent's action vector; 0 for a discrete environment."""
    action_low: float = -1.0
    action_high: float = 1.0
    views_carry_id: bool = False
    """Whether the views already say which agent they belong to (MABrax)."""

    @property
    def discrete(self) -> bool:
        return self.num_actions > 0


@struct
class Observation:
    """The team's view of the environment before it acts."""

    view: Array  # [.., N, F] float32
    action_mask: Array  # [.., N, A] bool; [.., N, 1] of ones where actions are continuous
    step_count: Array  # [..] int32, steps taken in this episode
    state: Array | tuple  # [.., state_size], or () where the suite offers none


@struct
class TimeStep:
    """One step as an environment returns it.

    `first` marks a boundary between episodes. Behind auto-reset, `observation` then opens the new episode
    and `final_observation` is the true last
    observation of the old one; everywhere else both are the same. A bare environment, which does
    not reset itself,
    marks its last step the same way and leaves `observation` at the true last.
    """

    observation: Observation
    final_observation: Observation
    reward: Array  # [.., N]
    discount: Array  # [..] 0 only where the episode truly ended; a time limit leaves 1
    first: Array  # [..] bool
    stats: Metrics  # [..] each; what the suite tells of the episode so far (`won`, `percent_eaten`, ...)


@struct
class Decision:
    """A system's answer to an observation: actions, and what goes with them."""

    action: Array  # [.., N] int32, or [.., N, action_size] float32 within the bounds
    memory: PyTree
    extras: PyTree  # for learning: log-probabilities, values, ...


@struct
class Transition:
    """One step as it is stored: what was seen, done and received. Leading [T, B] in a rollout."""

    observation: Observation
    action: Array
    reward: Array
    discount: Array
    first: Array  # whether `observation` opened an episode
    extras: PyTree
    next_extras: (
        PyTree  # of the observation that followed, before any reset (`System.next_extras`); () if none
    )


@struct
class Rollout:
    """A stretch of experience, with the memory before it and the time step that follows it."""

    steps: Transition  # [T, B]
    start_memory: PyTree  # [B], the reset that steps.first[0] may ask for done or not
    last: TimeStep  # [B]
    last_memory: PyTree  # [B], likewise that of last.first
