"""Jumanji's robot warehouse without loops, scatters and sorts: a GPU launches kernels for each of them.

The suite lets agents act, goals be served and cells be looked at one after another. Here all do so at once,
in comparisons that XLA fuses, and every result is the suite's to the last bit
(tests/envs/suites/test_rware.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jumanji.environments.routing.robot_warehouse.constants import _AGENTS, _SHELVES
from jumanji.environments.routing.robot_warehouse.env import RobotWarehouse
from jumanji.environments.routing.robot_warehouse.generator import Generator
from jumanji.environments.routing.robot_warehouse.types import (
    Action,
    Agent,
    Direction,
    Observation,
    Position,
    Shelf,
    State,
)
from jumanji.types import StepType, TimeStep

from sable.types import PyTree


class Warehouse(RobotWarehouse):
    """The suite's warehouse: its reset, states, specs and viewer, and an equal step that is faster.

    States are taken to be those that play leads to: positions lie within the grid, a robot's id is on no
    cell but its own, a shelf is in the queue of requests once.
    """

    def __init__(self, generator: Generator, time_limit: int) -> None:
        super().__init__(generator, time_limit)
        self._num_shelves = jnp.size(self.shelf_ids)
        self._num_columns = jnp.shape(self.highways)[1]
        self._is_highway = jnp.asarray(self.highways, bool).reshape(-1)
        self._goal_cells = [(int(row), int(column)) for column, row in np.asarray(self.goals)]
        offset = np.arange(-self.sensor_range, self.sensor_range + 1)
        row, column = np.meshgrid(offset, offset, indexing="ij")
        self._window = row.reshape(-1), column.reshape(-1)  # of a view's cells, from the agent's own

    def step(self, state: PyTree, action: PyTree) -> tuple[State, TimeStep[Observation]]:
        """Return the suite's step."""
        grid, agents, shelves = self._act(state, action)
        key, reward, request_queue, shelves = self._deliver(state.key, state.request_queue, grid, shelves)
        robots, racks = self._look(grid, agents)
        own = robots.shape[1] // 2
        collided = (robots[:, own] != self.agent_ids + 1).any()  # somebody else was the last to write there
        steps = state.step_count + 1
        done = collided | (steps >= self.time_limit)

        width = 2 * self.sensor_range + 1
        ahead = lax.select_n(agents.direction, *(racks[:, own + way] for way in (-width, 1, width, -1)))
        blocked = (agents.is_carrying != 0) & (ahead != 0)  # beyond the walls lies no shelf
        action_mask = ~blocked[:, None] | (jnp.arange(len(Action)) != Action.FORWARD)
        view = self._view(agents, shelves, robots, racks)
        observation = Observation(agents_view=view, action_mask=action_mask, step_count=steps)
        timestep = TimeStep(
            step_type=jnp.where(done, StepType.LAST, StepType.MID),
            reward=reward,
            discount=jnp.where(done, 0.0, jnp.ones((), float)),
            observation=observation,
            extras={},
        )
        state = State(
            grid=grid,
            agents=agents,
            shelves=shelves,
            request_queue=request_queue,
            step_count=steps,
            action_mask=action_mask,
            key=key,
        )
        return state, timestep

    def _make_observations(self, grid: PyTree, agents: PyTree, shelves: PyTree) -> Array:
        """Return the views [N, F]; the suite's reset calls this too."""
        return self._view(agents, shelves, *self._look(grid, agents))

    def _act(self, state: PyTree, action: Array) -> tuple[Array, Agent, Shelf]:
        """Let all agents act: return the grid, agents and shelves as if they had one by one, by number."""
        agents, (_, rows, columns) = state.agents, state.grid.shape
        number = jnp.arange(self.num_agents)
        legal = (state.action_mask & (action[:, None] == jnp.arange(len(Action)))).any(-1)
        action = jnp.where(legal, action, Action.NOOP)
        turns = (action == Action.RIGHT).astype(int) - (action == Action.LEFT)
        direction = jnp.where(turns == 0, agents.direction, (agents.direction + turns) % len(Direction))

        x, y = agents.position
        forward = action == Action.FORWARD
        up, down = jnp.maximum(x - 1, 0), jnp.minimum(x + 1, rows - 1)
        left, right = jnp.maximum(y - 1, 0), jnp.minimum(y + 1, columns - 1)
        x = jnp.where(forward, lax.select_n(agents.direction, up, x, down, x), x)
        y = jnp.where(forward, lax.select_n(agents.direction, y, right, y, left), y)
        cell, target = _cell(agents.position, columns), _cell(Position(x, y), columns)

        carries = forward & (agents.is_carrying != 0)
        shelf = _underfoot(state.grid[_SHELVES].reshape(-1), carries, cell, target)
        takes = (action == Action.TOGGLE_LOAD) & (agents.is_carrying == 0)
        keeps = forward | (turns != 0) | _take(self._is_highway, cell)
        carrying = jnp.where(takes, shelf > 0, agents.is_carrying * keeps)

        # Both layers of the grid at once: robots write their numbers, the carried shelves theirs.
        of_robots = jnp.arange(2)[:, None] == _AGENTS
        cells = jnp.arange(rows * columns)
        cell, target, forward, carries, shelf, robot = (
            array[:, None, None] for array in (cell, target, forward, carries, shelf, number + 1)
        )
        writes, value = jnp.where(of_robots, forward, carries), jnp.where(of_robots, robot, shelf)
        limit = max(self.num_agents, self._num_shelves) + 1
        layers = state.grid.reshape(2, -1)
        layers = _last_write(layers, writes & (cell == cells), writes & (target == cells), value, limit)
        # Who carries nothing after all (robots on one cell took the same shelf) moves the last one: index -1.
        index = jnp.where(shelf == 0, self._num_shelves, shelf) - 1
        moved = (carries & (index == jnp.arange(self._num_shelves)))[:, 0]
        place = _cell(state.shelves.position, columns)
        place = _last_write(place, jnp.zeros_like(moved), moved, target[:, 0], rows * columns)

        grid = layers.reshape(state.grid.shape)
        agents = Agent(position=Position(x, y), direction=direction, is_carrying=carrying)
        position = Position(lax.div(place, columns), lax.rem(place, columns))
        return grid, agents, Shelf(position=position, is_requested=state.shelves.is_requested)

    def _deliver(
        self, key: Array, queue: Array, grid: Array, shelves: PyTree
    ) -> tuple[Array, Array, Array, Shelf]:
        """Let the goals in turn take requested shelves that stand there; another is requested for each."""
        keys, draws = [key], []
        for _ in self._goal_cells:
            key, draw = jax.random.split(keys[-1])
            keys.append(key)
            draws.append(draw)
        ranks = jax.vmap(self._draw)(jnp.stack(draws))
        ids, requested = jnp.arange(self._num_shelves), shelves.is_requested
        served = jnp.zeros((), int)  # each delivery, whichever goal's, uses up a key
        for row, column in self._goal_cells:
            shelf = grid[_SHELVES, row, column]
            delivered = (shelf != 0) & (queue == shelf - 1).any()
            rank = lax.select_n(served, *ranks)
            # The shelf of this rank among those not in the queue: pass over those of the queue before it.
            request = rank + (queue - (queue < queue[:, None]).sum(-1) <= rank).sum()
            requested = jnp.where(delivered & (ids == shelf - 1), 0.0, requested)
            requested = jnp.where(delivered & (ids == request), 1.0, requested)
            queue = jnp.where(delivered & (queue == shelf - 1), request, queue)
            served = served + delivered
        reward = served.astype(jnp.float32)
        shelves = Shelf(position=shelves.position, is_requested=requested)
        return lax.select_n(served, *keys), reward, queue, shelves

    def _draw(self, key: Array) -> Array:
        """Return the index that `jax.random.choice` draws without replacement: it sorts by random bits.

        One round of sorting serves up to 1,625 items; no warehouse has more than 304 shelves.
        """
        others = self._num_shelves - self.request_queue_size
        return jnp.argmin(jax.random.bits(jax.random.split(key)[1], (others,), jnp.uint32))

    def _look(self, grid: Array, agents: PyTree) -> tuple[Array, Array]:
        """Return [N, C] ids of the robots and of the shelves on the cells around each agent; 0 where none."""
        _, rows, columns = grid.shape
        x, y = (place[:, None] + offset for place, offset in zip(agents.position, self._window, strict=True))
        inside = (x >= 0) & (x < rows) & (y >= 0) & (y < columns)
        cell = jnp.where(inside, _cell(Position(x, y), columns), 0)
        visible = grid.reshape(2, -1).at[:, cell].get(mode="promise_in_bounds")
        visible = jnp.where(inside, visible, 0)
        return visible[_AGENTS], visible[_SHELVES]

    def _view(self, agents: PyTree, shelves: PyTree, robots: Array, racks: Array) -> Array:
        """Return [N, F]: the agent itself, the robots around it, the shelves around it."""
        facing = jnp.arange(len(Direction))
        highway = _take(self._is_highway, _cell(agents.position, self._num_columns))
        itself = jnp.stack([*agents.position, agents.is_carrying, highway.astype(int)], -1)
        itself = jnp.concatenate([itself[:, :3], agents.direction[:, None] == facing, itself[:, 3:]], -1)

        number, own = self.agent_ids[:, None] + 1, robots.shape[1] // 2
        visible = ((robots != 0) & (robots != number))[..., None]
        direction = _take(agents.direction, jnp.maximum(robots - 1, 0))[..., None]
        others = jnp.concatenate([visible, visible & (direction == facing)], -1).astype(int)
        occupied = racks != 0
        requested = _take(shelves.is_requested, jnp.maximum(racks - 1, 0)).astype(int) * occupied
        stock = jnp.stack([occupied.astype(int), requested], -1)

        def flat(array: Array) -> Array:
            return array.reshape(array.shape[0], -1)

        view = [itself, flat(others[:, :own]), flat(others[:, own + 1 :]), flat(stock)]
        # The suite leaves out the cell with the agent's own id. After a collision another's, or none, may be
        # there: five more features, and the last three shelves are all written onto the last two places.
        some, last = occupied[:, -3], requested[:, -3]
        for cell in (-2, -1):
            some, last = some | occupied[:, cell], jnp.where(occupied[:, cell], requested[:, cell], last)
        end = jnp.stack([jnp.where(some, 1, requested[:, -4]), last], -1)
        pushed = [itself, flat(others), flat(stock[:, :-3])[:, :-1], end]
        return jnp.where(
            robots[:, own, None] == number, jnp.concatenate(view, -1), jnp.concatenate(pushed, -1)
        )


def _cell(position: PyTree, columns: int) -> Array:
    return position.x * columns + position.y


def _take(table: Array, index: Array) -> Array:
    return table.at[index].get(mode="promise_in_bounds")


def _underfoot(layer: Array, carries: Array, cell: Array, target: Array) -> Array:
    """Return [N] the shelf on each agent's cell (0: none) when its turn comes: those before it may have
    carried."""
    num_agents = carries.shape[0]
    number, untouched = jnp.arange(num_agents), num_agents + 1
    earlier = carries[:, None] & (number[:, None] < number)
    leaves, comes = (earlier & (place[:, None] == cell) for place in (cell, target))
    writer = _last_write(jnp.full(num_agents, untouched), leaves, comes, number[:, None] + 1, untouched + 1)
    shelf = jnp.where(writer == untouched, _take(layer, cell), 0)
    # Where another came, its shelf counts, which may itself have come so: doubling steps back to the first.
    source = jnp.where((writer > 0) & (writer < untouched), writer - 1, number)
    for _ in range(max(num_agents - 2, 0).bit_length()):
        source = _take(source, source)
    return _take(shelf, source)


def _last_write(old: Array, leaves: Array, comes: Array, value: Array, limit: int) -> Array:
    """Return places [..] after agents [N] wrote in turn: 0 where one leaves, then its value where it comes.

    `leaves`, `comes` and `value` are [N, ..]. With its time in front the last write is the largest; values
    are below `limit`.
    """
    time = jnp.expand_dims(2 * jnp.arange(value.shape[0]) + 1, range(1, value.ndim))
    written = jnp.where(comes, (time + 1) * limit + value, jnp.where(leaves, time * limit, 0)).max(0)
    return jnp.where(written == 0, old, lax.rem(written, limit))
