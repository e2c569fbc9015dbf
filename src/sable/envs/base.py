"""The one interface every environment has, ours and the suites' alike."""

import typing as tp

from jax import Array

from sable.types import EnvSpec, PyTree, TimeStep


class Env(tp.Protocol):
    """One environment, not a batch: `vmap` makes the batch, `envs.wrappers` resets it.

    All randomness lives in the state, so `step` takes no key; `rekey` gives a copied state randomness of its own.
    A bare environment never resets itself: its last step has `first` true, `discount` 0 only if the episode truly ended
    rather than ran out of time, and `observation` at the true last observation.
    """

    spec: EnvSpec

    def reset(self, key: Array) -> tuple[PyTree, TimeStep]:
        """A fresh episode: zero reward, discount 1, first true, observation.time 0."""
        ...

    def step(self, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        """The state and time step that follow `action` ([N] int32, or [N, action_size] within the spec's bounds)."""
        ...

    def rekey(self, state: PyTree, key: Array) -> PyTree:
        """The same situation with the randomness of `key` from here on."""
        ...
