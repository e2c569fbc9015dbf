"""Jumanji's suites: RWARE, LBF (large teams included) and Connector."""

import dataclasses
import typing as tp
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jumanji.environments.routing.connector import env as connector
from jumanji.environments.routing.connector.constants import PATH, POSITION, TARGET
from jumanji.environments.routing.connector.generator import LegacyRandomWalkGenerator
from jumanji.environments.routing.lbf import env as lbf
from jumanji.environments.routing.lbf import generator as lbf_generator
from jumanji.environments.routing.lbf.observer import VectorObserver
from jumanji.environments.routing.lbf.types import State
from jumanji.environments.routing.robot_warehouse import generator as rware_generator
from jumanji.environments.routing.robot_warehouse.constants import _AGENTS

from sable.envs.base import Env, first_timestep, next_timestep
from sable.envs.suites.rware import Warehouse
from sable.envs.tasks import Task
from sable.types import EnvSpec, Metrics, Observation, PyTree, TimeStep


@dataclass(frozen=True, eq=False)
class Rware:
    """Robots fetch requested shelves: one reward for all, 1 per delivery; a collision ends the episode."""

    spec: EnvSpec
    suite: Warehouse

    def reset(self, key: Array) -> tuple[PyTree, TimeStep]:
        state, step = self.suite.reset(key)
        return state, first_timestep(_observation(step.observation), {"collision": jnp.zeros(())})

    def step(self, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state, step = self.suite.step(state, action)
        # The suite ends collisions and time limits alike; the grid tells: it keeps one robot per cell.
        position = state.agents.position
        collided = (state.grid[_AGENTS, position.x, position.y] != jnp.arange(self.spec.num_agents) + 1).any()
        truncated = state.step_count >= self.spec.time_limit
        observation, stats = _observation(step.observation), {"collision": collided}
        return state, next_timestep(
            observation, step.reward, terminated=collided, truncated=truncated, stats=stats
        )

    def rekey(self, state: PyTree, key: Array) -> PyTree:
        return dataclasses.replace(state, key=key)


@dataclass(frozen=True, eq=False)
class Lbf:
    """Foragers load food together; the suite's rewards are summed and shared: clearing the grid returns 1."""

    spec: EnvSpec
    suite: lbf.LevelBasedForaging

    def reset(self, key: Array) -> tuple[PyTree, TimeStep]:
        state, step = self.suite.reset(key)
        return state, first_timestep(_observation(step.observation), step.extras)

    def step(self, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state, step = self.suite.step(state, action)
        terminated = state.food_items.eaten.all()
        observation, reward = _observation(step.observation), step.reward.sum()
        return state, next_timestep(
            observation, reward, terminated=terminated, truncated=step.last(), stats=step.extras
        )

    def rekey(self, state: PyTree, key: Array) -> PyTree:
        return dataclasses.replace(state, key=key)


class ReducedObserver(VectorObserver):
    """The suite's view without the hidden: what lies in sight, in its order, then (-1, -1, 0) to fill.

    A cell holds one thing at most, so a view needs no more triplets than the window has cells.
    """

    def make_agents_view(self, agent: tp.Any, state: State) -> Array:
        """Return one agent's view: visible food by id, itself, visible others by id."""
        foods, agents = tp.cast(tp.Any, state.food_items), tp.cast(tp.Any, state.agents)
        num_slots = (2 * self.fov + 1) ** 2
        position = jnp.concatenate([foods.position, agent.position[None], agents.position])
        level = jnp.concatenate([foods.level, agent.level[None], agents.level])
        there = jnp.concatenate([~foods.eaten, jnp.ones(1, bool), agents.id != agent.id])
        visible = there & (jnp.abs(position - agent.position) <= self.fov).all(-1)
        origin = agent.position - jnp.minimum(self.fov, agent.position)
        item = jnp.concatenate([position - origin, level[:, None]], axis=-1)
        slot = jnp.where(visible, jnp.cumsum(visible) - 1, num_slots)  # the hidden fall off the end
        view = jnp.tile(jnp.array([-1, -1, 0]), (num_slots, 1))
        return view.at[slot].set(item, mode="drop").reshape(-1)


@dataclass(frozen=True, eq=False)
class Connector:
    """Agents lay wires to their targets without crossing; each has its own reward, or all have the mean."""

    spec: EnvSpec
    suite: connector.Connector
    reward: str

    def reset(self, key: Array) -> tuple[PyTree, TimeStep]:
        state, step = self.suite.reset(key)
        return state, first_timestep(self._observe(state), self._stats(step.extras))

    def step(self, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        state, step = self.suite.step(state, action)
        # The suite's discounts are 0 for every agent that is done; the team's is 0 once all are.
        terminated = (step.discount == 0).all()
        reward = step.reward if self.reward == "individual" else step.reward.mean()
        stats = self._stats(step.extras)
        return state, next_timestep(
            self._observe(state), reward, terminated=terminated, truncated=step.last(), stats=stats
        )

    def rekey(self, state: PyTree, key: Array) -> PyTree:
        return dataclasses.replace(state, key=key)

    def _observe(self, state: PyTree) -> Observation:
        view = window_view(state.grid, state.agents.position, state.agents.target)
        return Observation(view=view, action_mask=state.action_mask, step_count=state.step_count, state=())

    def _stats(self, extras: Metrics) -> Metrics:
        return extras | {"won": extras["ratio_connections"] == 1}


def window_view(grid: Array, position: Array, target: Array) -> Array:
    """Return [N, 54]: own cell and target's over the number of cells, then the 5x5 cells around: blockers,
    targets.

    Blockers are 1 for a head, -1 for a trail; targets 1 for one's own, -1 for another's; both are 1 outside
    the grid. A target that has been reached reads as cell (0, 0).
    """
    agent = jnp.arange(position.shape[0])
    kind = jnp.where(grid > 0, (grid - 1) % 3 + 1, 0)
    owner = (grid - 1) // 3
    head_or_trail = jnp.where(kind == POSITION, 1, jnp.where(kind == PATH, -1, 0))
    blockers = jnp.pad(head_or_trail, 2, constant_values=1)
    is_target = jnp.pad(kind == TARGET, 2)
    owner = jnp.pad(owner, 2, constant_values=-1)
    outside = jnp.pad(jnp.zeros(grid.shape, bool), 2, constant_values=True)

    def one(agent: Array, position: Array, target: Array) -> Array:
        def window(plane: Array) -> Array:
            return jax.lax.dynamic_slice(plane, position, (5, 5)).reshape(-1)

        targets = jnp.where(window(is_target), jnp.where(window(owner) == agent, 1, -1), window(outside))
        reached = (position == target).all()
        cells = jnp.concatenate([position, jnp.where(reached, 0, target)]) / grid.size
        return jnp.concatenate([cells, window(blockers), targets], dtype=jnp.float32)

    return jax.vmap(one)(agent, position, target)


def _observation(suite_observation: PyTree) -> Observation:
    """Return the suite's vector observation in our words."""
    return Observation(
        view=suite_observation.agents_view.astype(jnp.float32),
        action_mask=suite_observation.action_mask,
        step_count=suite_observation.step_count,
        state=(),
    )


def make(task: Task) -> Env:
    """Return the RWARE, LBF or Connector task."""
    spec = EnvSpec(
        num_agents=task.num_agents,
        view_size=task.view_size,
        num_actions=task.num_actions,
        time_limit=task.time_limit,
    )
    arguments: dict[str, tp.Any] = dict(task.arguments)
    if task.suite == "rware":
        warehouse = rware_generator.RandomGenerator(column_height=8, sensor_range=1, **arguments)
        return Rware(spec, Warehouse(warehouse, time_limit=task.time_limit))
    if task.suite == "lbf":
        suite = lbf.LevelBasedForaging(
            lbf_generator.RandomGenerator(max_agent_level=2, **arguments),
            time_limit=task.time_limit,
            normalize_reward=True,
            penalty=0.0,
        )
        if task.view_size < 3 * (suite.num_agents + suite.num_food):
            suite._observer = ReducedObserver(suite.fov, suite.grid_size, suite.num_agents, suite.num_food)
        return Lbf(spec, suite)
    reward = arguments.pop("reward")
    board = LegacyRandomWalkGenerator(**arguments)
    return Connector(spec, connector.Connector(board, time_limit=task.time_limit), reward)
