"""Neom: a team of any size must spell a periodic pattern, each agent one value of it.

The paper describes it in words and no code is public; what the words leave open is decided here.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sable.envs.base import Env, first_timestep, next_timestep
from sable.envs.tasks import Task
from sable.types import EnvSpec, Metrics, Observation, TimeStep, struct

BONUS = 9.0
"""Extra reward of a team correct at once; it falls linearly to nothing at the time limit."""


@struct
class NeomState:
    key: Array  # not used after the start; kept so that all suites' states are alike
    time: Array  # int32
    value: Array  # [N] int32, index of each agent's current value
    history: Array  # [history, N] int32, the last actions, newest first; -1 where none was taken yet


@dataclass(frozen=True, eq=False)
class Neom:
    """Agent i wants pattern[i mod P]; an action sets its value; all are paid for the mean distance.

    reward = 1 - 2 d / D + [all correct] 9 (1 - t / T): d is the mean distance to the pattern, D the mean of
    the largest distances there can be (`worst_case`) or the values' range (`range`), t the steps before.
    """

    spec: EnvSpec
    values: np.ndarray  # [A] ascending; action a means values[a]
    target: np.ndarray  # [N] int, index of the value each agent wants
    history: int
    scale: float
    """D of the reward."""

    def reset(self, key: Array) -> tuple[NeomState, TimeStep]:
        key, value_key = jax.random.split(key)
        num_agents = self.spec.num_agents
        state = NeomState(
            key=key,
            time=jnp.zeros((), jnp.int32),
            value=jax.random.randint(value_key, (num_agents,), 0, self.spec.num_actions),
            history=jnp.full((self.history, num_agents), -1, jnp.int32),
        )
        return state, first_timestep(self._observe(state), self._stats(state))

    def step(self, state: NeomState, action: Array) -> tuple[NeomState, TimeStep]:
        values = jnp.asarray(self.values, jnp.float32)
        distance = jnp.abs(values[action] - values[self.target]).mean()
        bonus = BONUS * (1 - state.time / self.spec.time_limit)
        solved = (action == self.target).all()
        reward = 1 - 2 * distance / self.scale + jnp.where(solved, bonus, 0.0)
        state = NeomState(
            key=state.key,
            time=state.time + 1,
            value=action.astype(jnp.int32),
            history=jnp.concatenate([action[None].astype(jnp.int32), state.history])[: self.history],
        )
        truncated = state.time >= self.spec.time_limit
        observation, stats = self._observe(state), self._stats(state)
        return state, next_timestep(observation, reward, terminated=False, truncated=truncated, stats=stats)

    def rekey(self, state: NeomState, key: Array) -> NeomState:
        return NeomState(key=key, time=state.time, value=state.value, history=state.history)

    def _observe(self, state: NeomState) -> Observation:
        spec = self.spec
        correct = (state.value == self.target).astype(jnp.float32)[:, None]
        past = jax.nn.one_hot(state.history.T, spec.num_actions).reshape(
            spec.num_agents, -1
        )  # -1 gives zeros
        action_mask = jnp.ones((spec.num_agents, spec.num_actions), bool)
        return Observation(
            view=jnp.concatenate([correct, past], axis=-1),
            action_mask=action_mask,
            step_count=state.time,
            state=(),
        )

    def _stats(self, state: NeomState) -> Metrics:
        correct = state.value == self.target
        return {"fraction_correct": correct.mean(), "solved": correct.all()}


def make(task: Task) -> Env:
    """Return the Neom task, with its history and normalisation."""
    arguments = task.arguments
    num_agents, history, pattern = (
        arguments["num_agents"],
        arguments["history"],
        np.asarray(arguments["pattern"]),
    )
    values, index = np.unique(pattern, return_inverse=True)
    target = index[np.arange(num_agents) % len(pattern)]
    worst = np.abs(values[target][:, None] - values).max(-1).mean()
    return Neom(
        spec=EnvSpec(
            num_agents=num_agents,
            view_size=1 + history * len(values),
            num_actions=len(values),
            time_limit=100,
        ),
        values=values,
        target=target,
        history=history,
        scale=float(worst if arguments["normalisation"] == "worst_case" else np.ptp(values)),
    )
