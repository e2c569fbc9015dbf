"""The warehouse's step without loops against Jumanji's own, from the same states, to the last bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji.environments import RobotWarehouse

from sable import envs

BATCH = 128
SHELVES, ROBOTS = 0, 1
FORWARD, TOGGLE, DOWN = 1, 4, 2


def pair(name):
    """Ours and Jumanji's of one task."""
    ours = envs.make(name).suite
    return ours, RobotWarehouse(ours._generator, ours.time_limit)


def move_shelf(state, shelf, place):
    """`shelf` at `place`, what stood there where it was."""
    x, y = state.shelves.position
    here, other = (x[shelf], y[shelf]), state.grid[SHELVES, *place]
    grid = state.grid.at[SHELVES, *here].set(other).at[SHELVES, *place].set(shelf + 1)
    index = jnp.where(other == 0, x.shape[0], other - 1)  # none: dropped
    x, y = (
        values.at[index].set(old, mode="drop").at[shelf].set(new)
        for values, old, new in zip((x, y), here, place, strict=True)
    )
    shelves = state.shelves._replace(position=state.shelves.position._replace(x=x, y=y))
    return dataclasses.replace(state, grid=grid, shelves=shelves)


def move_robot(state, robot, place):
    """`robot`, carrying and facing down, at `place`, on top of any who is there."""
    agents = state.agents
    x, y = agents.position
    here = x[robot], y[robot]
    left = jnp.where(state.grid[ROBOTS, *here] == robot + 1, 0, state.grid[ROBOTS, *here])
    grid = state.grid.at[ROBOTS, *here].set(left).at[ROBOTS, *place].set(robot + 1)
    position = agents.position._replace(x=x.at[robot].set(place[0]), y=y.at[robot].set(place[1]))
    agents = agents._replace(
        position=position,
        direction=agents.direction.at[robot].set(DOWN),
        is_carrying=agents.is_carrying.at[robot].set(1),
    )
    return dataclasses.replace(state, grid=grid, agents=agents)


def arrange(suite, state, key):
    """Once in a while: robots carry requested shelves to the goals, or these stand there; the end is near."""
    keys = jax.random.split(key, 5)
    columns, row = np.asarray(suite.goals).T
    robots = jax.random.permutation(keys[0], suite.num_agents)
    lift = jax.random.bernoulli(keys[1], 0.5).astype(int)  # a robot in front of the goal, or a shelf on it
    first = jax.random.randint(keys[2], (), 0, suite.request_queue_size)
    arranged = state
    for goal in range(2):
        shelf = state.request_queue[(first + goal) % suite.request_queue_size]
        place = (int(row[goal]) - lift, int(columns[goal]))
        arranged = move_shelf(arranged, shelf, place)
        arranged = jax.tree.map(
            functools.partial(jnp.where, lift == 1),
            move_robot(arranged, robots[goal % suite.num_agents], place),
            arranged,
        )
    seldom = jax.random.bernoulli(keys[3], 0.08)
    state = jax.tree.map(functools.partial(jnp.where, seldom), arranged, state)
    steps = jax.random.randint(keys[4], (), suite.time_limit - 30, suite.time_limit)
    return dataclasses.replace(state, step_count=steps)


def happened(state, action, after, timestep):
    """How often what the comparison is about took place."""

    def on_cell(grid, layer, agents):
        return jax.vmap(lambda grid, place: grid[layer, place.x, place.y])(grid, agents.position)

    robot = jnp.arange(action.shape[-1]) + 1
    carried, carries = state.agents.is_carrying, after.agents.is_carrying
    legal = jnp.take_along_axis(state.action_mask, action[..., None] % 5, -1)[..., 0]
    forward = (action == FORWARD) & legal
    return {
        "collision": (on_cell(after.grid, ROBOTS, after.agents) != robot).any(-1).sum(),
        "collided before": (on_cell(state.grid, ROBOTS, state.agents) != robot).any(-1).sum(),
        "delivery": (timestep.reward == 1).sum(),
        "double delivery": (timestep.reward == 2).sum(),
        "illegal": (~legal).sum(),
        "pickup": ((carried == 0) & (carries == 1)).sum(),
        "drop": ((carried == 1) & (carries == 0)).sum(),
        "idle drop": ((carried == 1) & (carries == 0) & (action != TOGGLE)).sum(),
        "carrying no shelf": (forward & (carried == 1) & (on_cell(state.grid, SHELVES, state.agents) == 0)).sum(),
        "time limit": (after.step_count >= 500).sum(),
        "action out of range": ((action < 0) | (action > 4)).sum(),
    }


@functools.cache
def plays(name, length):
    """seed -> by leaf, whether `length` steps of a batch were equal; and counts of what happened."""
    ours, theirs = pair(name)

    @jax.jit
    def play(key):
        start_key, key = jax.random.split(key)
        starts, _ = jax.vmap(theirs.reset)(jax.random.split(start_key, BATCH))

        def one(state, key):
            keys = jax.random.split(key, 4)
            state = jax.vmap(functools.partial(arrange, ours))(state, jax.random.split(keys[0], BATCH))
            likely = jnp.log(jnp.array([1.0, 5, 1, 1, 2]))
            action = jax.random.categorical(keys[1], likely, shape=(BATCH, ours.num_agents))
            action = jnp.where(jax.random.bernoulli(keys[2], 0.01, action.shape), 3 * action - 5, action)
            result = jax.vmap(theirs.step)(state, action)
            equal = jax.tree.map(lambda a, b: (a == b).all(), jax.vmap(ours.step)(state, action), result)
            after, timestep = result
            events = happened(state, action, after, timestep)
            # Some go on after their end: the suite's step is defined there too, and stranger.
            over = timestep.last() & jax.random.bernoulli(keys[3], 0.5, (BATCH,))
            after = jax.vmap(lambda *args: jax.tree.map(functools.partial(jnp.where, args[0]), *args[1:]))(
                over, starts, after
            )
            return after, (equal, events)

        _, (equal, events) = jax.lax.scan(one, starts, jax.random.split(key, length))
        return jax.tree.map(lambda each: each.all(), equal), jax.tree.map(lambda each: each.sum(), events)

    return lambda seed: jax.device_get(play(jax.random.key(seed)))


def check(name, length, seeds):
    total = {}
    for seed in seeds:
        equal, events = plays(name, length)(seed)
        different = [jax.tree_util.keystr(p) for p, same in jax.tree_util.tree_leaves_with_path(equal) if not same]
        assert not different, f"{name}, seed {seed}: {different}"
        total = {event: total.get(event, 0) + int(count) for event, count in events.items()}
    return total


@pytest.mark.parametrize("name", ["rware/tiny-2ag", "rware/tiny-4ag", "rware/small-4ag", "rware/large-8ag"])
def test_every_step_is_the_suites_own(name):
    events = check(name, 100, range(1))
    print(name, events)
    assert all(count >= 10 for count in events.values()), events
