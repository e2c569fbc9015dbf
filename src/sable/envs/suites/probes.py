"""Tiny environments with known optimal returns, one ability each, and one of no work to time algorithms."""

import typing as tp
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from sable.envs.base import Env, first_timestep, next_timestep
from sable.envs.tasks import Task
from sable.types import EnvSpec, Observation, TimeStep, struct


@struct
class ProbeState:
    """How far the episode is, what it turns on, and what was done in it."""

    time: Array  # int32
    secret: Array | tuple
    actions: Array  # [time_limit, N, ...]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """An environment of a few steps that truly ends, random only in what it draws at the start."""

    spec: EnvSpec
    optimal_return: float
    """Return of the best policy."""
    memoryless_return: float
    """Return of the best policy that sees the current observation only."""
    random_return: float
    """Return of playing legal actions uniformly."""
    pay: tp.Callable[[tp.Any, Array, Array], Array]
    """(secret, time, actions so far) -> each agent's reward for the step just taken at `time`."""
    truncates: bool = False
    """Whether the end is a time limit rather than a true end."""
    draw: tp.Callable[[Array], tp.Any] = lambda key: ()
    """key -> the secret of an episode."""
    view: tp.Callable[[tp.Any, Array], Array] | None = None
    """(secret, time) -> what the agents see; nothing of interest by default."""
    action_mask: tp.Callable[[tp.Any], Array] | None = None
    """secret -> the legal actions; all by default."""

    def reset(self, key: Array) -> tuple[ProbeState, TimeStep]:
        spec = self.spec
        shape, dtype = ((), jnp.int32) if spec.discrete else ((spec.action_size,), jnp.float32)
        actions = jnp.zeros((spec.time_limit, spec.num_agents, *shape), dtype)
        state = ProbeState(time=jnp.zeros((), jnp.int32), secret=self.draw(key), actions=actions)
        return state, first_timestep(self._observe(state), {})

    def step(self, state: ProbeState, action: Array) -> tuple[ProbeState, TimeStep]:
        actions = state.actions.at[state.time].set(action)
        reward = self.pay(state.secret, state.time, actions)
        state = ProbeState(time=state.time + 1, secret=state.secret, actions=actions)
        over = state.time >= self.spec.time_limit
        terminated, truncated = over & (not self.truncates), over & self.truncates
        return state, next_timestep(
            self._observe(state), reward, terminated=terminated, truncated=truncated, stats={}
        )

    def rekey(self, state: ProbeState, key: Array) -> ProbeState:
        return state

    def _observe(self, state: ProbeState) -> Observation:
        spec = self.spec
        view = (
            self.view(state.secret, state.time) if self.view else jnp.ones((spec.num_agents, spec.view_size))
        )
        action_mask = (
            self.action_mask(state.secret)
            if self.action_mask
            else jnp.ones((spec.num_agents, max(spec.num_actions, 1)), bool)
        )
        return Observation(
            view=view.astype(jnp.float32), action_mask=action_mask, step_count=state.time, state=()
        )


def _recall_view(cue: Array, time: Array) -> Array:
    """Return the cue (one-hot) at the start only, then whether it is time to answer, then a constant."""
    shown = jax.nn.one_hot(cue, 2) * (time == 0)
    answer_due = jnp.broadcast_to(time == 3, (2, 1))
    return jnp.concatenate([shown, answer_due, jnp.ones((2, 1))], axis=-1)


def _masked_pay(illegal: Array, time: Array, actions: Array) -> Array:
    """Return 2 for the illegal action, else 1 for the larger of the two legal ones."""
    best = jnp.where(illegal == 2, 1, 2)
    return jnp.where(actions[0] == illegal, 2.0, actions[0] == best)


PROBES = {
    # Action 1 pays.
    "bandit": Probe(
        spec=EnvSpec(num_agents=2, view_size=1, num_actions=3, time_limit=1),
        optimal_return=1.0,
        memoryless_return=1.0,
        random_return=1 / 3,
        pay=lambda secret, time, actions: actions[0] == 1,
    ),
    # Ten times action 1 pays at the end: at random one episode in a thousand.
    "sparse": Probe(
        spec=EnvSpec(num_agents=2, view_size=10, num_actions=2, time_limit=10),
        optimal_return=1.0,
        memoryless_return=1.0,
        random_return=2**-10,
        view=lambda secret, time: jnp.broadcast_to(jax.nn.one_hot(time, 10), (2, 10)),
        pay=lambda secret, time, actions: (time == 9) & (actions == 1).all(0),
    ),
    # The action an agent is shown pays.
    "observation": Probe(
        spec=EnvSpec(num_agents=2, view_size=2, num_actions=2, time_limit=1),
        optimal_return=1.0,
        memoryless_return=1.0,
        random_return=0.5,
        draw=lambda key: jax.random.randint(key, (2,), 0, 2),
        view=lambda cue, time: jax.nn.one_hot(cue, 2),
        pay=lambda cue, time, actions: actions[0] == cue,
    ),
    # The first action decides, the last step pays; the views show the time.
    "delayed": Probe(
        spec=EnvSpec(num_agents=2, view_size=4, num_actions=2, time_limit=4),
        optimal_return=1.0,
        memoryless_return=1.0,
        random_return=0.5,
        view=lambda secret, time: jnp.broadcast_to(jax.nn.one_hot(time, 4), (2, 4)),
        pay=lambda secret, time, actions: (time == 3) & (actions[0] == 1),
    ),
    # The cue of the first view must be repeated at the last step.
    "recall": Probe(
        spec=EnvSpec(num_agents=2, view_size=4, num_actions=2, time_limit=4),
        optimal_return=1.0,
        memoryless_return=0.5,
        random_return=0.5,
        draw=lambda key: jax.random.randint(key, (2,), 0, 2),
        view=_recall_view,
        pay=lambda cue, time, actions: (time == 3) & (actions[3] == cue),
    ),
    # Pays if the agents, who see the same, do not do the same.
    "coordination": Probe(
        spec=EnvSpec(num_agents=2, view_size=1, num_actions=2, time_limit=1),
        optimal_return=1.0,
        memoryless_return=1.0,
        random_return=0.5,
        pay=lambda secret, time, actions: actions[0, 0] != actions[0, 1],
    ),
    # The illegal action, a random one of three, would pay most: a return above 1 says the mask was not kept.
    "masked": Probe(
        spec=EnvSpec(num_agents=2, view_size=1, num_actions=3, time_limit=1),
        optimal_return=1.0,
        memoryless_return=1.0,
        random_return=0.5,
        draw=lambda key: jax.random.randint(key, (2,), 0, 3),
        action_mask=lambda illegal: jnp.arange(3) != illegal[:, None],
        pay=_masked_pay,
    ),
    # Each agent moves to the point it is shown; 1 less twice the squared distance.
    "continuous": Probe(
        spec=EnvSpec(num_agents=2, view_size=2, action_size=2, time_limit=1),
        optimal_return=1.0,
        memoryless_return=1.0,
        random_return=1 - 4 * (1 / 3 + 3 / 16),
        draw=lambda key: jax.random.uniform(key, (2, 2), minval=-0.75, maxval=0.75),
        view=lambda target, time: target,
        pay=lambda target, time, actions: 1 - 2 * jnp.square(actions[0] - target).sum(-1),
    ),
}


@struct
class NullState:
    time: Array  # int32
    phase: Array  # int32, what tells one episode from another


@dataclass(frozen=True)
class Null:
    """Next to no work per step: views of a few integer operations, a reward for the action they point at."""

    spec: EnvSpec

    def reset(self, key: Array) -> tuple[NullState, TimeStep]:
        state = NullState(time=jnp.zeros((), jnp.int32), phase=jax.random.randint(key, (), 0, 64))
        return state, first_timestep(self._observe(state), {})

    def step(self, state: NullState, action: Array) -> tuple[NullState, TimeStep]:
        reward = (
            action == (jnp.arange(self.spec.num_agents) + state.time + state.phase) % self.spec.num_actions
        )
        state = NullState(time=state.time + 1, phase=state.phase)
        truncated = state.time >= self.spec.time_limit
        return state, next_timestep(
            self._observe(state), reward, terminated=False, truncated=truncated, stats={}
        )

    def rekey(self, state: NullState, key: Array) -> NullState:
        return state

    def _observe(self, state: NullState) -> Observation:
        spec = self.spec
        agent, feature = jnp.arange(spec.num_agents)[:, None], jnp.arange(spec.view_size)
        view = (7 * agent + 13 * feature + 5 * state.time + 3 * state.phase) % 64
        action_mask = jnp.ones((spec.num_agents, spec.num_actions), bool)
        return Observation(
            view=view.astype(jnp.float32) / 32 - 1, action_mask=action_mask, step_count=state.time, state=()
        )


def make(task: Task) -> Env:
    """Return the probe, or the null environment, of that task."""
    if task.suite == "probe":
        return PROBES[task.arguments["name"]]
    num_agents = task.arguments["num_agents"]
    return Null(EnvSpec(num_agents=num_agents, view_size=16, num_actions=5, time_limit=100))
