"""The warehouse's step without loops against Jumanji's own, from the same states, to the last bit."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji.environments import RobotWarehouse

from sable import envs
from sable.envs.suites.rware import Warehouse

BATCH = 128
SHELVES, ROBOTS = 0, 1
FORWARD, TOGGLE, DOWN = 1, 4, 2


def pair(name):
    """Ours and Jumanji's of one task."""
    ours = envs.make(name).suite
    assert isinstance(ours, Warehouse)
    return ours, RobotWarehouse(ours._generator, ours.time_limit)


def put_shelf(state, env, shelf, place):
    """In the environments `env`: `shelf` at `place`, and what stood there where it was."""
    x, y = state.shelves.position
    here, other = (x[env, shelf], y[env, shelf]), state.grid[env, SHELVES, *place]
    state.grid[env, SHELVES, *here] = other
    state.grid[env, SHELVES, *place] = shelf + 1
    some = other > 0
    for values, old, new in zip((x, y), here, place, strict=True):
        values[env[some], other[some] - 1] = old[some]
        values[env, shelf] = new


def put_robot(state, env, robot, place):
    """In the environments `env`: `robot`, carrying, facing down, at `place`, on top of any who is there."""
    agents, (x, y) = state.agents, state.agents.position
    here = x[env, robot], y[env, robot]
    own = state.grid[env, ROBOTS, *here] == robot + 1
    state.grid[env[own], ROBOTS, here[0][own], here[1][own]] = 0
    state.grid[env, ROBOTS, *place] = robot + 1
    x[env, robot], y[env, robot] = place
    agents.direction[env, robot], agents.is_carrying[env, robot] = DOWN, 1


def arrange(suite, state, rng):
    """Here and there: requested shelves at the goals, or carried one cell before them; robots in a line."""
    num_agents, queue = suite.num_agents, state.request_queue
    env, lined = (np.flatnonzero(rng.random(BATCH) < 0.08) for _ in range(2))
    lift, first = rng.integers(0, 2, env.size), rng.integers(0, queue.shape[1], env.size)
    robots, carried = rng.permuted(np.tile(np.arange(num_agents), (env.size, 1)), axis=1), lift == 1
    for goal, (column, row) in enumerate(np.asarray(suite.goals)):
        place = row - lift, np.full(env.size, column)
        put_shelf(state, env, queue[env, (first + goal) % queue.shape[1]], place)
        ahead = tuple(values[carried] for values in place)
        put_robot(state, env[carried], robots[carried, goal % num_agents], ahead)
    for robot in range(num_agents):  # each hands what it carries to the next, if all may move
        row = min(robot + 1, state.grid.shape[2] - 1)
        put_robot(
            state, lined, np.full(lined.size, robot), (np.full(lined.size, row), np.ones(lined.size, int))
        )
    state.action_mask[lined] = True
    state.step_count[:] = rng.integers(suite.time_limit - 30, suite.time_limit, BATCH)


def happened(state, action, after, reward):
    """How often what the comparison is about took place."""

    def on_cell(state, layer):
        position = state.agents.position
        return state.grid[np.arange(BATCH)[:, None], layer, position.x, position.y]

    robot, under = np.arange(action.shape[-1]) + 1, on_cell(state, SHELVES)
    carried, carries = state.agents.is_carrying == 1, after.agents.is_carrying == 1
    legal = np.take_along_axis(state.action_mask, action[..., None] % 5, -1)[..., 0]
    return {
        "collision": (on_cell(after, ROBOTS) != robot).any(-1),
        "collided before": (on_cell(state, ROBOTS) != robot).any(-1),
        "delivery": reward == 1,
        "double delivery": reward == 2,
        "illegal": ~legal,
        "pickup": ~carried & carries & (under > 0),
        "pickup of what came": ~carried & carries & (under == 0),
        "drop": carried & ~carries & (action == TOGGLE),
        "idle drop": carried & ~carries & (action != TOGGLE),
        "carrying no shelf": (action == FORWARD) & legal & carried & (under == 0),
        "time limit": after.step_count >= 500,
        "action out of range": (action < 0) | (action > 4),
    }


def compared(name, length):
    """Plays a batch for `length` steps; asserts that each is Jumanji's; counts what happened."""
    ours, theirs = pair(name)

    @jax.jit
    def both(state, action):
        expected = jax.vmap(theirs.step)(state, action)
        return expected, jax.tree.map(
            lambda a, b: (a == b).all(), jax.vmap(ours.step)(state, action), expected
        )

    rng, events = np.random.default_rng(0), Counter()
    start, _ = jax.jit(jax.vmap(ours.reset))(jax.random.split(jax.random.key(0), BATCH))
    key, start = start.key, jax.tree.map(np.array, dataclasses.replace(start, key=()))
    state = jax.tree.map(np.copy, start)
    for time in range(length):
        arrange(ours, state, rng)
        action = rng.choice(5, (BATCH, ours.num_agents), p=[0.1, 0.5, 0.1, 0.1, 0.2]).astype(np.int32)
        action = np.where(rng.random(action.shape) < 0.01, 3 * action - 5, action)
        (after, timestep), equal = both(dataclasses.replace(state, key=key), action)
        different = [
            jax.tree_util.keystr(path)
            for path, same in jax.tree_util.tree_leaves_with_path(jax.device_get(equal))
            if not same
        ]
        assert not different, f"step {time}: {different}"
        key, after = after.key, jax.tree.map(np.array, dataclasses.replace(after, key=()))
        reward = np.asarray(timestep.reward)
        events.update({e: int(seen.sum()) for e, seen in happened(state, action, after, reward).items()})
        # Half go on after their end: a step is defined there too, and stranger.
        over = np.asarray(timestep.last()) & (rng.random(BATCH) < 0.5)
        for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(start), strict=True):
            new[over] = old[over]
        state = after
    return events


def test_every_step_is_the_suites_own():
    events = compared("rware/tiny-4ag", 80)
    assert all(count >= 3 for count in events.values()), events


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["tiny-1ag", "tiny-2ag", "tiny-4ag", "small-4ag", "large-8ag", "xlarge-4ag-hard", "tiny-12ag-easy"],
)
def test_every_one_of_many_steps_is_the_suites_own(name):
    events = compared(f"rware/{name}", 600)
    alone = ("collision", "collided before", "double delivery", "pickup of what came")  # take two
    assert all(count >= 3 for event, count in events.items() if name != "tiny-1ag" or event not in alone), (
        events
    )


@pytest.mark.slow
def test_resets_are_the_suites_own():
    keys = jax.random.split(jax.random.key(1), 16)
    ours, theirs = (jax.jit(jax.vmap(suite.reset))(keys) for suite in pair("rware/tiny-2ag"))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), ours, theirs))


def test_a_step_has_the_types_of_the_suites_own():
    ours, theirs = pair("rware/tiny-2ag")
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):  # typed and raw
        state, _ = jax.eval_shape(theirs.reset, key)
        mine, native = (jax.eval_shape(suite.step, state, jnp.zeros(2, int)) for suite in (ours, theirs))
        assert jax.tree.structure(mine) == jax.tree.structure(native)
        for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(native), strict=True):
            assert (one.shape, one.dtype, one.weak_type) == (other.shape, other.dtype, other.weak_type)
