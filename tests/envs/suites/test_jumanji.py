"""RWARE, LBF and Connector against Jumanji's own code, stepped directly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jumanji.environments import Connector, LevelBasedForaging, RobotWarehouse
from jumanji.environments.routing.connector.generator import LegacyRandomWalkGenerator
from jumanji.environments.routing.lbf.generator import RandomGenerator as FoodGenerator
from jumanji.environments.routing.robot_warehouse.generator import RandomGenerator as WarehouseGenerator

from sable import envs
from sable.envs.suites.jumanji import ReducedObserver, window_view

RWARE, LBF, CONNECTOR = "rware/tiny-4ag", "lbf/2s-8x8-2p-2f-coop", "connector/con-5x5x3a"


def warehouse():
    return RobotWarehouse(
        generator=WarehouseGenerator(
            column_height=8, shelf_rows=1, shelf_columns=3, num_agents=4, sensor_range=1, request_queue_size=4
        ),
        time_limit=500,
    )


def foraging():
    return LevelBasedForaging(
        generator=FoodGenerator(
            grid_size=8, fov=2, num_agents=2, num_food=2, max_agent_level=2, force_coop=True
        ),
        time_limit=100,
        grid_observation=False,
        normalize_reward=True,
        penalty=0.0,
    )


def wiring():
    return Connector(generator=LegacyRandomWalkGenerator(grid_size=5, num_agents=3), time_limit=25)


@pytest.mark.parametrize(
    ("name", "native", "team_reward"),
    [
        (RWARE, warehouse, lambda reward: reward[:, None]),
        (LBF, foraging, lambda reward: reward.sum(-1, keepdims=True)),
        (CONNECTOR, wiring, lambda reward: reward),
    ],
)
def test_play_is_the_suites_own(compiled, batched, keys, act, name, native, team_reward):
    game, native = compiled(name), native()
    native_reset, native_step = batched(native.reset), batched(native.step)
    for policy in ("random", "scripted"):
        rng = np.random.default_rng(1)
        state, timestep = game.reset(keys(3))
        native_state, native_timestep = native_reset(keys(3))
        running, returns = np.ones(2, bool), np.zeros((2, 2))
        for time in range(60):
            seen = jax.device_get(native_timestep.observation)
            if name != CONNECTOR:  # whose view is ours
                np.testing.assert_array_equal(timestep.observation.view[running], seen.agents_view[running])
            np.testing.assert_array_equal(
                timestep.observation.action_mask[running], seen.action_mask[running]
            )
            action = act(game.env.spec, timestep.observation, time, policy, rng)
            state, timestep = game.step(state, action)
            native_state, native_timestep = native_step(native_state, action)
            expected = np.broadcast_to(team_reward(np.asarray(native_timestep.reward)), timestep.reward.shape)
            np.testing.assert_allclose(timestep.reward[running], expected[running], atol=1e-6)
            np.testing.assert_array_equal(timestep.first[running], native_timestep.last()[running])
            returns[0] += running * np.asarray(timestep.reward.mean(-1))
            returns[1] += running * expected.mean(-1)
            running &= ~np.asarray(timestep.first)
        np.testing.assert_allclose(returns[0], returns[1], atol=1e-5)


def test_a_collision_ends_a_warehouse_even_at_the_time_limit_and_the_limit_alone_does_not(
    compiled, keys, act
):
    game, rng = compiled(RWARE), np.random.default_rng(0)
    state, timestep = game.reset(keys())
    for time in range(500):
        before, action = state, act(game.env.spec, timestep.observation, time, "random", rng)
        state, timestep = game.step(before, action)
        if timestep.first.any():
            break
    collided = np.asarray(timestep.first)
    assert (
        time < 499
        and (timestep.discount[collided] == 0).all()
        and (timestep.stats["collision"][collided] == 1).all()
    )
    late = dataclasses.replace(before, step_count=jnp.full(2, 499))
    _, timestep = game.step(late, action)
    assert timestep.first.all() and (timestep.observation.step_count == 500).all()
    np.testing.assert_array_equal(timestep.discount, ~collided)


def test_foragers_start_in_no_row_that_is_a_foods_row_or_column(compiled, batched):
    """The suite's way, kept: of the rows whose index is a food's column only, too, none is taken."""
    state, _ = batched(compiled(LBF).env.reset)(jax.random.split(jax.random.key(0), 64))
    rows = np.asarray(state.agents.position)[:, :, None, None, 0]
    foods = np.asarray(state.food_items.position)[:, None]
    assert (rows != foods).all()
    assert (np.asarray(state.agents.position)[:, :, None, 1] == foods[..., 1]).any()  # columns are free


def test_clearing_a_forage_returns_one_and_ends(compiled, keys):
    game = compiled(LBF)
    state, _ = game.reset(keys())
    position = jnp.array([[3, 3], [6, 6]])
    foods = dataclasses.replace(state.food_items, position=jnp.stack([position] * 2))
    returns = 0.0
    for food in range(2):
        beside = jnp.stack([position[food] + jnp.array([[0, 1], [0, -1]])] * 2)
        agents = dataclasses.replace(state.agents, position=beside)
        state = dataclasses.replace(state, agents=agents, food_items=foods if food == 0 else state.food_items)
        state, timestep = game.step(state, jnp.full((2, 2), 5))
        returns += timestep.reward
        np.testing.assert_array_equal(timestep.stats["percent_eaten"], 50.0 * (food + 1))
        assert (timestep.first == (food == 1)).all() and (timestep.discount == (food == 0)).all()
    np.testing.assert_allclose(returns, 1.0, atol=1e-6)


def test_blocked_or_connected_agents_end_a_connector_with_discount_zero_once_all_are(compiled, keys, act):
    game, rng = compiled(CONNECTOR), np.random.default_rng(0)
    state, timestep = game.reset(keys())
    for time in range(25):
        state, timestep = game.step(state, act(game.env.spec, timestep.observation, time, "random", rng))
        done = np.asarray((~timestep.observation.action_mask[..., 1:]).all((1, 2)))  # nobody can move
        np.testing.assert_array_equal(timestep.discount, ~done)
        if done.all():
            break
    assert done.any()


def test_the_mean_reward_of_a_connector_is_shared(compiled, keys):
    shared = envs.make(CONNECTOR, reward="mean")
    individual = compiled(CONNECTOR)
    state, _ = individual.reset(keys())
    action = jnp.array([[1, 2, 3], [4, 1, 2]])
    expected = individual.step(state, action)[1].reward.mean(-1, keepdims=True)
    reward = jax.jit(jax.vmap(shared.step))(state, action)[1].reward
    np.testing.assert_allclose(reward, np.broadcast_to(expected, (2, 3)), rtol=1e-6)


def test_the_reduced_view_is_the_suites_without_hidden_triplets(keys):
    env = envs.make("lbf/2s-12x12-20p-8f")
    assert isinstance(env.suite._observer, ReducedObserver)
    native = LevelBasedForaging(
        generator=FoodGenerator(grid_size=12, fov=2, num_agents=20, num_food=8), time_limit=100
    )
    state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 64))
    eaten = jax.random.bernoulli(jax.random.key(1), 0.3, (64, 8))
    state = dataclasses.replace(state, food_items=dataclasses.replace(state.food_items, eaten=eaten))
    reduced = np.asarray(jax.jit(jax.vmap(env.suite._observer.state_to_observation))(state).agents_view)
    full = np.asarray(jax.jit(jax.vmap(native._observer.state_to_observation))(state).agents_view)
    full, reduced = full.reshape(-1, 28, 3), reduced.reshape(-1, 25, 3)
    most = 0
    for whole, seen in zip(full, reduced, strict=True):
        visible = whole[whole[:, 2] > 0]
        most = max(most, len(visible))
        np.testing.assert_array_equal(seen[: len(visible)], visible)
        np.testing.assert_array_equal(seen[len(visible) :], np.tile([-1, -1, 0], (25 - len(visible), 1)))
    assert most > 8  # crowded enough to mean something


def test_the_view_of_a_connector_board_is_as_drawn():
    # Values 1 trail, 2 head, 3 target, then 4, 5, 6. Agent 0 came down from the corner; 1 has not moved.
    grid = jnp.array([
        [1, 0, 0, 0],
        [2, 0, 3, 0],
        [0, 0, 0, 0],
        [0, 6, 0, 5],
    ])  # fmt: skip
    view = window_view(grid, jnp.array([[1, 0], [3, 3]]), jnp.array([[1, 2], [3, 1]]))
    np.testing.assert_allclose(view[:, :4] * 16, [[1, 0, 1, 2], [3, 3, 3, 1]])
    blockers, targets = np.split(np.asarray(view[:, 4:]).reshape(2, 2, 5, 5), 2, axis=1)
    np.testing.assert_array_equal(blockers[0, 0], [
        [1, 1, 1, 1, 1],
        [1, 1, -1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
    ])  # fmt: skip
    np.testing.assert_array_equal(targets[0, 0], [
        [1, 1, 1, 1, 1],
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1],
        [1, 1, 0, 0, 0],
        [1, 1, 0, -1, 0],
    ])  # fmt: skip
    np.testing.assert_array_equal(blockers[1, 0], [
        [0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1],
        [0, 0, 1, 1, 1],
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1],
    ])  # fmt: skip
    np.testing.assert_array_equal(targets[1, 0], [
        [0, -1, 0, 1, 1],
        [0, 0, 0, 1, 1],
        [1, 0, 0, 1, 1],
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1],
    ])  # fmt: skip


def test_a_reached_target_reads_as_the_corner_and_leaves_a_head():
    grid = jnp.array([[0, 0, 0], [0, 1, 2], [0, 0, 0]])
    view = np.asarray(window_view(grid, jnp.array([[1, 2]]), jnp.array([[1, 2]])))[0]
    np.testing.assert_allclose(view[:4] * 9, [1, 2, 0, 0])
    assert view[4:29].reshape(5, 5)[2, 2] == 1 and view[4:29].reshape(5, 5)[2, 1] == -1
    assert (view[29:].reshape(5, 5)[1:4, :3] == 0).all()


@pytest.mark.parametrize(
    "name", ["rware/tiny-2ag-easy", "rware/small-3ag-easy", "lbf/9x9-1p-1f", "connector/con-2x2x1a"]
)
def test_names_beyond_the_paper_reset(name):
    env = envs.make(name)
    _, timestep = jax.eval_shape(env.reset, jax.random.key(0))
    assert timestep.observation.view.shape == (env.spec.num_agents, env.spec.view_size)
