"""JaxMARL's suites: SMAX, MPE and MABrax.

Always stepped by `step_env`: the suites' `step` resets by itself and hides the true last observation.
"""

import contextlib
import io
import sys
import typing as tp
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from sable.envs.base import Env, first_timestep, next_timestep
from sable.envs.tasks import Task
from sable.types import EnvSpec, Metrics, Observation, PyTree, TimeStep, struct


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Import jaxmarl without its prints, and without `sys.__stdout__` in place of `sys.stdout` after it."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr", "__stdout__", "__stderr__")}
    sys.__dict__.update(dict.fromkeys(streams, io.StringIO()))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="JAXopt is no longer", category=DeprecationWarning)
            yield
    finally:
        sys.__dict__.update(streams)


@contextlib.contextmanager
def _undeprecated() -> Iterator[None]:
    """Hide what Brax says of its age when made and when traced; the paper's bodies are these."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="MABrax is deprecated", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="Brax System", category=UserWarning)
        warnings.filterwarnings("ignore", message="Accessing", category=DeprecationWarning, module="brax")
        yield


with _quiet():
    import jaxmarl
    from jaxmarl.environments.smax import map_name_to_scenario

    from sable.envs.suites.smax import ScriptedEnemies


@struct
class State:
    """The suite's state and the randomness of the steps to come."""

    suite: PyTree
    key: Array


@dataclass(frozen=True, eq=False)
class Smax:
    """Allies against scripted enemies: one reward, for damage and 1 for a win; over when a side is dead."""

    spec: EnvSpec
    suite: tp.Any

    def reset(self, key: Array) -> tuple[State, TimeStep]:
        key, reset_key = jax.random.split(key)
        observations, suite_state = self.suite.reset(reset_key)
        return State(suite=suite_state, key=key), first_timestep(
            self._observe(observations, suite_state), {"won": jnp.zeros(())}
        )

    def step(self, state: State, action: Array) -> tuple[State, TimeStep]:
        key, step_key = jax.random.split(state.key)
        agents = self.suite.agents
        observations, suite_state, reward, done, _ = self.suite.step_env(
            step_key, state.suite, _by_agent(agents, action)
        )
        alive = suite_state.state.unit_alive
        allies, enemies = alive[: len(agents)].any(), alive[len(agents) :].any()
        timestep = next_timestep(
            self._observe(observations, suite_state),
            reward[agents[0]],
            terminated=~(allies & enemies),
            truncated=done["__all__"],
            stats={"won": allies & ~enemies},
        )
        return State(suite=suite_state, key=key), timestep

    def rekey(self, state: State, key: Array) -> State:
        return State(suite=state.suite, key=key)

    def _observe(self, observations: dict[str, Array], suite_state: PyTree) -> Observation:
        agents = self.suite.agents
        return Observation(
            view=_stack(agents, observations).astype(jnp.float32),
            action_mask=_stack(agents, self.suite.get_avail_actions(suite_state)).astype(bool),
            step_count=suite_state.state.step.astype(jnp.int32),
            state=observations["world_state"].astype(jnp.float32),
        )


@dataclass(frozen=True, eq=False)
class Mpe:
    """Agents spread over landmarks without bumping: each its own reward, or the mean; only time ends it."""

    spec: EnvSpec
    suite: tp.Any
    reward: str

    def reset(self, key: Array) -> tuple[State, TimeStep]:
        key, reset_key = jax.random.split(key)
        observations, suite_state = self.suite.reset(reset_key)
        return State(suite=suite_state, key=key), first_timestep(self._observe(observations, suite_state), {})

    def step(self, state: State, action: Array) -> tuple[State, TimeStep]:
        key, step_key = jax.random.split(state.key)
        agents = self.suite.agents
        # Actions go in as they are, in [-1, 1], though the suite's box is [0, 1]: so were the paper's runs.
        observations, suite_state, reward, done, _ = self.suite.step_env(
            step_key, state.suite, _by_agent(agents, action)
        )
        reward = _stack(agents, reward)
        timestep = next_timestep(
            self._observe(observations, suite_state),
            reward if self.reward == "individual" else reward.mean(),
            terminated=False,
            truncated=done["__all__"],
            stats={},
        )
        return State(suite=suite_state, key=key), timestep

    def rekey(self, state: State, key: Array) -> State:
        return State(suite=state.suite, key=key)

    def _observe(self, observations: dict[str, Array], suite_state: PyTree) -> Observation:
        return Observation(
            view=_stack(self.suite.agents, observations),
            action_mask=jnp.ones((self.spec.num_agents, 1), bool),
            step_count=suite_state.step.astype(jnp.int32),
            state=(),
        )


@dataclass(frozen=True, eq=False)
class Mabrax:
    """Agents move the joints of one Brax body for one reward; a fall ends it (not the half-cheetah's)."""

    spec: EnvSpec
    suite: tp.Any

    def reset(self, key: Array) -> tuple[State, TimeStep]:
        key, reset_key = jax.random.split(key)
        with _undeprecated():
            observations, suite_state = self.suite.reset(reset_key)
        return State(suite=suite_state, key=key), first_timestep(self._observe(observations, suite_state), {})

    def step(self, state: State, action: Array) -> tuple[State, TimeStep]:
        joints = _by_agent(self.suite.agents, action)
        with _undeprecated():
            observations, suite_state, reward, done, info = self.suite.step_env(
                state.key, state.suite, joints
            )
        truncated = info["truncation"] > 0
        timestep = next_timestep(
            self._observe(observations, suite_state),
            reward["__all__"],
            terminated=done["__all__"] & ~truncated,
            truncated=truncated,
            stats={},
        )
        return State(suite=suite_state, key=state.key), timestep

    def rekey(self, state: State, key: Array) -> State:
        return State(suite=state.suite, key=key)

    def _observe(self, observations: dict[str, Array], suite_state: PyTree) -> Observation:
        return Observation(
            view=_stack(self.suite.agents, observations),
            action_mask=jnp.ones((self.spec.num_agents, 1), bool),
            step_count=suite_state.info["steps"].astype(jnp.int32),
            state=suite_state.obs,
        )


def _stack(agents: list[str], values: Metrics) -> Array:
    """Return [N, ...] from the suite's one entry per agent."""
    return jnp.stack([values[agent] for agent in agents])


def _by_agent(agents: list[str], values: Array) -> dict[str, Array]:
    return dict(zip(agents, values, strict=True))


def make(task: Task) -> Env:
    """Return the SMAX, MPE or MABrax task."""
    arguments, time_limit = task.arguments, task.time_limit
    if task.suite == "smax":
        scenario = map_name_to_scenario(arguments["map_name"])
        suite: tp.Any = ScriptedEnemies(
            scenario=scenario,
            see_enemy_actions=True,
            walls_cause_death=True,
            max_steps=time_limit - 1,
        )
        return Smax(
            _spec(suite, time_limit, num_actions=suite.num_ally_actions, state_size=suite.state_size), suite
        )
    if task.suite == "mpe":
        num_agents = arguments["num_agents"]
        suite = jaxmarl.make(
            "MPE_simple_spread_v3",
            num_agents=num_agents,
            num_landmarks=num_agents,
            local_ratio=0.5,
            action_type="Continuous",
            max_steps=time_limit - 1,
        )
        return Mpe(
            _spec(suite, time_limit, action_size=_size(suite.action_spaces)), suite, arguments["reward"]
        )
    with _undeprecated():
        suite = jaxmarl.make(
            arguments["name"], episode_length=time_limit, homogenisation_method="max", auto_reset=False
        )
    spec = _spec(
        suite,
        time_limit,
        action_size=_size(suite.action_spaces),
        state_size=suite.env.observation_size,
        views_carry_id=True,
    )
    return Mabrax(spec, suite)


def _spec(suite: tp.Any, time_limit: int, **sizes: tp.Any) -> EnvSpec:
    views = {agent: suite.observation_spaces[agent] for agent in suite.agents}
    return EnvSpec(num_agents=len(suite.agents), view_size=_size(views), time_limit=time_limit, **sizes)


def _size(spaces: dict) -> int:
    """Return the length of the agents' vectors, the same for all."""
    (size,) = {space.shape[0] for space in spaces.values()}
    return size
