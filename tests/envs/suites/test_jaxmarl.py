"""SMAX, MPE and MABrax against JaxMARL's own code, stepped directly."""

import dataclasses
import importlib
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable import envs

SMAX, MPE, MABRAX = "smax/3m", "mpe/simple_spread_3ag", "mabrax/hopper_3x1"


def native(name):
    import jaxmarl
    from jaxmarl.environments.smax import map_name_to_scenario

    if name == SMAX:
        return jaxmarl.make(
            "HeuristicEnemySMAX",
            scenario=map_name_to_scenario("3m"),
            see_enemy_actions=True,
            walls_cause_death=True,
            attack_mode="closest",
        )
    if name == MPE:
        return jaxmarl.make(
            "MPE_simple_spread_v3", num_agents=3, num_landmarks=3, local_ratio=0.5, action_type="Continuous"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jaxmarl.make("hopper_3x1", episode_length=1000, homogenisation_method="max", auto_reset=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:brax")
@pytest.mark.parametrize(
    ("name", "num_steps"), [(SMAX, 20), (MPE, 26), pytest.param(MABRAX, 10, marks=pytest.mark.slow)]
)
def test_play_is_the_suites_own(compiled, batched, keys, act, name, num_steps):
    game = compiled(name)
    suite = native(name)
    native_reset, native_step = batched(suite.reset), batched(suite.step_env)
    for policy in ("random", "scripted"):
        rng = np.random.default_rng(1)
        state, timestep = game.reset(keys(3))
        native_keys, reset_keys = jax.vmap(jax.random.split, out_axes=1)(keys(3))
        seen, native_state = native_reset(reset_keys)
        returns = np.zeros((2, 2))
        for time in range(num_steps):
            expected = np.stack([seen[agent] for agent in suite.agents], axis=1)
            np.testing.assert_allclose(timestep.observation.view, expected, atol=2e-3)
            if name == SMAX:
                legal = suite.get_avail_actions(jax.tree.map(lambda leaf: leaf[0], native_state))
                np.testing.assert_array_equal(
                    timestep.observation.action_mask[0], [legal[agent] for agent in suite.agents]
                )
                np.testing.assert_allclose(timestep.observation.state, seen["world_state"], atol=1e-3)
            action = act(game.env.spec, timestep.observation, time, policy, rng)
            state, timestep = game.step(state, action)
            native_keys, step_keys = jax.vmap(jax.random.split, out_axes=1)(native_keys)
            actions = {agent: action[:, i] for i, agent in enumerate(suite.agents)}
            seen, native_state, reward, done, _ = native_step(step_keys, native_state, actions)
            reward = np.stack([reward[agent] for agent in suite.agents], axis=1)
            np.testing.assert_allclose(timestep.reward, reward, atol=1e-3)
            np.testing.assert_array_equal(timestep.first, done["__all__"])
            returns += np.asarray([timestep.reward.mean(-1), reward.mean(-1)])
            if timestep.first.any():
                break
        np.testing.assert_allclose(returns[0], returns[1], atol=5e-3)


def changed(state, **fields):
    """The state of a batch with some fields of the suite's game state changed."""
    game = state.suite.state.replace(**fields)
    return dataclasses.replace(state, suite=state.suite.replace(state=game))


def test_smax_ends_when_a_side_is_dead_and_times_out_at_step_101(compiled, keys):
    game = compiled(SMAX)
    start, timestep = game.reset(keys())
    stop = jnp.full((2, 3), 4)
    alive, health = start.suite.state.unit_alive, start.suite.state.unit_health

    won = changed(start, unit_alive=alive.at[:, 3:].set(False), unit_health=health.at[:, 3:].set(0.0))
    _, timestep = game.step(won, stop)
    assert timestep.first.all() and (timestep.discount == 0).all() and (timestep.stats["won"] == 1).all()
    assert (timestep.reward >= 1).all()

    lost = changed(start, unit_alive=alive.at[:, :3].set(False), unit_health=health.at[:, :3].set(0.0))
    _, timestep = game.step(lost, stop)
    assert timestep.first.all() and (timestep.discount == 0).all() and (timestep.stats["won"] == 0).all()
    np.testing.assert_array_equal(timestep.observation.action_mask[0], np.arange(8) == np.full((3, 1), 4))

    late, timestep = game.step(changed(start, step=jnp.full(2, 99)), stop)
    assert not timestep.first.any()
    _, timestep = game.step(late, stop)
    assert (
        timestep.first.all()
        and (timestep.discount == 1).all()
        and (timestep.observation.step_count == 101).all()
    )


def test_a_fall_ends_mabrax_and_the_time_limit_does_not(compiled, keys, act):
    game, rng = compiled(MABRAX), np.random.default_rng(0)
    start, timestep = game.reset(keys())
    state = start
    for time in range(300):
        state, timestep = game.step(state, act(game.env.spec, timestep.observation, time, "random", rng))
        if timestep.first.any():
            break
    assert (timestep.discount[timestep.first] == 0).all()

    info = start.suite.info | {"steps": jnp.full_like(start.suite.info["steps"], 998)}
    state = dataclasses.replace(start, suite=start.suite.replace(info=info))
    for last in (False, True):
        state, timestep = game.step(state, jnp.zeros((2, 3, 1)))
        assert (timestep.first == last).all() and (timestep.discount == 1).all()
    assert (timestep.observation.step_count == 1000).all()


def test_mabrax_shows_critics_brax_own_observation_and_needs_no_other_identity(compiled, keys):
    game = compiled(MABRAX)
    state, timestep = game.reset(keys())
    assert game.env.spec.state_size == 11 and game.env.spec.views_carry_id
    np.testing.assert_array_equal(timestep.observation.state, state.suite.obs)


def test_smax_steps_differ_by_their_key(compiled, keys):
    """The enemies' choices are random: copies of one start go different ways once rekeyed."""
    game = compiled(SMAX)
    state, _ = game.reset(keys())
    state = jax.tree.map(lambda leaf: jnp.stack([leaf[0], leaf[0]]), state)
    state = jax.vmap(game.env.rekey)(state, keys(7))
    for _ in range(20):
        state, timestep = game.step(state, jnp.full((2, 3), 4))
    assert (timestep.observation.state[0] != timestep.observation.state[1]).any()


def test_the_mean_reward_of_mpe_is_shared(compiled, keys):
    shared, individual = envs.make(MPE, reward="mean"), compiled(MPE)
    state, _ = individual.reset(keys())
    action = jnp.full((2, 3, 5), 0.3)
    expected = individual.step(state, action)[1].reward.mean(-1, keepdims=True)
    reward = jax.jit(jax.vmap(shared.step))(state, action)[1].reward
    np.testing.assert_allclose(reward, np.broadcast_to(expected, (2, 3)), rtol=1e-5)


def test_importing_the_suite_leaves_the_streams_alone_and_prints_nothing(compiled, capfd):
    from sable.envs.suites import jaxmarl as suites

    compiled(MPE)  # the suite is imported by now; its one module that meddles is imported again
    before, errors = sys.stdout, sys.stderr
    with suites._quiet():
        importlib.reload(sys.modules["jaxmarl.environments.mabrax.mabrax_env"])
        print("not to be seen")
    assert sys.stdout is before and sys.stderr is errors
    assert capfd.readouterr() == ("", "")
