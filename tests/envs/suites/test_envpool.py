"""RWARE, LBF and Connector against ports of Jumanji's to C++ that others wrote: EnvPool's.

From the same start, by the same actions: the same views, masks, rewards and ends. EnvPool's tasks are
rware/small-4ag-easy, lbf/8x8-2p-2f-coop and connector/con-10x10x10a, and differ from ours in this alone: one
reward for the team (the mean, in Connector); 50 steps instead of 100 in Connector; which shelf is requested
after a delivery.
"""

import dataclasses
import importlib.metadata
import typing as tp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable import envs
from sable.types import TimeStep

pytestmark = pytest.mark.slow
envpool = pytest.importorskip("envpool", reason="EnvPool is not installed: it comes with the extra envpool")

VERSION = importlib.metadata.version("envpool")
needs_ports = pytest.mark.skipif(
    tuple(map(int, VERSION.split(".")[:3])) < (1, 2, 7),
    reason=f"EnvPool {VERSION} has no warehouse and no connector by Jumanji's rules; 1.2.7 has",
)
SHELVES, ROBOTS = 0, 1
UP, DOWN, LOAD, TOGGLE = 1, 2, 5, 4

Seen = tp.Mapping[str, np.ndarray]


class Port:
    """One environment of EnvPool's, from a start of ours."""

    def __init__(self, task: str, start: tp.Mapping[str, tp.Any]) -> None:
        given = {name: ",".join(map(str, np.asarray(x, int).reshape(-1))) for name, x in start.items()}
        self.env = envpool.make(task, env_type="gymnasium", num_envs=1, num_threads=1, seed=0, **given)
        seen, info = self.env.reset()
        self.seen, self.info = _alone(seen), _alone(info)

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        """Return the reward, and whether the episode ended."""
        seen, reward, terminated, truncated, info = self.env.step(action[None].astype(np.int32))
        self.seen, self.info = _alone(seen), _alone(info)
        return float(reward[0]), bool(terminated[0] or truncated[0])


def _alone(batch: tp.Mapping[str, tp.Any]) -> dict[str, np.ndarray]:
    return {name: x[0] for name, x in batch.items() if not isinstance(x, dict)}


class Suite:
    """How a suite's starts, views and actions are translated."""

    def __init__(self, name: str, task: str) -> None:
        self.env, self.task = envs.make(name), task

    def start(self, state: tp.Any, rng: np.random.Generator) -> tuple[tp.Any, dict[str, tp.Any]]:
        """Return a state to begin in, and the settings that put EnvPool there."""
        raise NotImplementedError

    def same_view(self, state: tp.Any, timestep: TimeStep, port: Port) -> None:
        np.testing.assert_array_equal(timestep.observation.view, port.seen["agents_view"])

    def choose(self, state: tp.Any, legal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return actions: legal ones at random, and now and then any."""
        wild = rng.integers(legal.shape[1], size=len(legal))
        legal_ones = [rng.choice(np.flatnonzero(one)) for one in legal]
        return np.where(rng.random(len(legal)) < 0.1, wild, legal_ones)

    def follow(self, state: tp.Any, timestep: TimeStep, port: Port) -> tp.Any:
        """Return the state to go on from."""
        return state


def play(suite: Suite, *, starts: int, length: int) -> dict[str, int]:
    """Play episodes on both sides; count rewards above zero, ends, and ends at the time limit."""
    rng, counts = np.random.default_rng(0), {"rewards": 0, "ends": 0, "time limits": 0}
    reset, step = jax.jit(suite.env.reset), jax.jit(suite.env.step)
    for k in range(starts):
        state, timestep = jax.device_get(reset(jax.random.key(k)))
        state, start = suite.start(state, rng)
        port = Port(suite.task, start)
        for time in range(length):
            suite.same_view(state, timestep, port)
            np.testing.assert_array_equal(timestep.observation.action_mask, port.seen["action_mask"])
            action = suite.choose(state, np.array(port.seen["action_mask"]), rng)
            state, timestep = jax.device_get(step(state, jnp.asarray(action, jnp.int32)))
            reward, ended = port.step(action)
            where = f"start {k}, step {time}"
            assert reward == pytest.approx(float(timestep.reward.mean()), abs=1e-6), where
            assert ended == bool(timestep.first), where
            counts["rewards"] += reward > 0
            if ended:
                counts["ends"] += 1
                counts["time limits"] += bool(timestep.discount == 1)
                break
            assert int(port.seen["step_count"]) == time + 1
            state = suite.follow(state, timestep, port)
        port.env.close()
    return counts


class Forage(Suite):
    def start(self, state, rng):
        agents, foods = (
            np.column_stack([one.position, one.level]) for one in (state.agents, state.food_items)
        )
        return state, {"lbf_agents": agents, "lbf_food": foods}

    def choose(self, state, legal, rng):
        """Mostly towards a food that is left, and load it."""
        action = super().choose(state, legal, rng)
        food = int(np.argmin(state.food_items.eaten))
        for agent, (rows, columns) in enumerate(state.food_items.position[food] - state.agents.position):
            if rng.random() < 0.6:
                vertical, horizontal = (UP if rows < 0 else DOWN), (3 if columns < 0 else 4)
                action[agent] = vertical if abs(rows) > abs(columns) else horizontal
                action[agent] = LOAD if abs(rows) + abs(columns) == 1 else action[agent]
        return action


class Wires(Suite):
    def start(self, state, rng):
        return state, {"connector_grid": state.grid}

    def same_view(self, state, timestep, port):
        np.testing.assert_array_equal(state.grid, port.seen["grid"])

    def follow(self, state, timestep, port):
        np.testing.assert_allclose(timestep.reward, port.info["agent_rewards"], atol=1e-6)
        return state


class Stock(Suite):
    def __init__(self, name, task):
        super().__init__(name, task)
        self.look = jax.jit(self.env.suite._make_observations)

    def start(self, state, rng):
        """Robots here and there carry requested shelves and stand before the goals."""
        self.calm = rng.random() < 0.1  # nobody moves, so nobody collides before the time limit
        grid, shelves = np.array(state.grid), state.shelves
        agents = jax.tree.map(np.array, state.agents)
        rows, columns = np.array(shelves.position.x), np.array(shelves.position.y)
        for robot, (column, _) in enumerate(np.asarray(self.env.suite.goals)):
            shelf, row = int(state.request_queue[robot]), grid.shape[1] - 2 - int(rng.integers(3))
            if not self.calm and grid[:, row, column].max() == 0:
                for layer, x, y, who in (
                    (SHELVES, rows, columns, shelf),
                    (ROBOTS, agents.position.x, agents.position.y, robot),
                ):
                    grid[layer, x[who], y[who]] = 0
                    x[who], y[who], grid[layer, row, column] = row, column, who + 1
                agents.direction[robot], agents.is_carrying[robot] = DOWN, 1
        shelves = shelves._replace(position=shelves.position._replace(x=rows, y=columns))
        state = dataclasses.replace(state, grid=grid, agents=agents, shelves=shelves)
        robots = {"x": agents.position.x, "y": agents.position.y}
        robots |= {"direction": agents.direction, "carrying": agents.is_carrying}
        stock = {"x": rows, "y": columns, "requested": shelves.is_requested}
        given = {f"agent_{name}": x for name, x in robots.items()} | {
            f"shelf_{n}": x for n, x in stock.items()
        }
        return state, {f"robot_warehouse_render_{name}": x for name, x in given.items()}

    def same_view(self, state, timestep, port):
        view = self.look(state.grid, state.agents, state.shelves)
        np.testing.assert_array_equal(view, port.seen["agents_view"])
        place = np.column_stack([state.shelves.position.x, state.shelves.position.y])
        np.testing.assert_array_equal(place, port.info["shelf_positions"])
        np.testing.assert_array_equal(state.shelves.is_requested > 0, port.info["shelf_requested"])

    def choose(self, state, legal, rng):
        action = rng.choice(5, len(legal), p=[0.05, 0.55, 0.1, 0.1, 0.2])
        return np.where(action == UP, TOGGLE, action) if self.calm else action

    def follow(self, state, timestep, port):
        """The next shelf is requested at random: theirs is, from here on."""
        if timestep.reward.max() == 0:
            return state
        requested = np.asarray(port.info["shelf_requested"])
        assert requested.sum() == len(state.request_queue)
        queue = np.flatnonzero(requested).astype(state.request_queue.dtype)
        shelves = state.shelves._replace(is_requested=requested.astype(state.shelves.is_requested.dtype))
        return dataclasses.replace(state, shelves=shelves, request_queue=queue)


def test_foraging_is_that_of_a_port_by_others():
    counts = play(Forage("lbf/8x8-2p-2f-coop", "LevelBasedForaging-v0"), starts=60, length=100)
    assert counts["ends"] == 60 and counts["rewards"] > 60 and 0 < counts["time limits"] < 60, counts


@needs_ports
def test_wiring_is_that_of_a_port_by_others():
    counts = play(Wires("connector/con-10x10x10a", "Connector-v2"), starts=60, length=49)
    assert counts["ends"] > 20 and counts["rewards"] > 60, counts


@needs_ports
def test_a_warehouse_is_that_of_a_port_by_others():
    counts = play(Stock("rware/small-4ag-easy", "RobotWarehouse-v0"), starts=80, length=500)
    assert counts["ends"] == 80 and counts["rewards"] > 40 and 0 < counts["time limits"] < 40, counts
