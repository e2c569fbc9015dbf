"""Neom against the returns its specification implies, and its views by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable import envs


def play(name, policy, num_envs=2, **options):
    """(return, last fraction correct), means over episodes of `policy(state, key) -> action` ([N])."""
    env = envs.make(name, **options)

    def episode(key):
        reset_key, *step_keys = jax.random.split(key, env.spec.time_limit + 1)

        def step(state, key):
            state, timestep = env.step(state, policy(env, state, key))
            return state, (timestep.reward[0], timestep.stats["fraction_correct"])

        _, (reward, correct) = jax.lax.scan(step, env.reset(reset_key)[0], jnp.stack(step_keys))
        return reward.sum(), correct[-1]

    returns, correct = jax.jit(jax.vmap(episode))(jax.random.split(jax.random.key(0), num_envs))
    return float(returns.mean()), float(correct.mean())


def oracle(env, state, key):
    return jnp.asarray(env.target)


def always(value):
    return lambda env, state, key: jnp.full(env.spec.num_agents, list(env.values).index(value))


def farthest(env, state, key):
    return jnp.abs(env.values[env.target][:, None] - env.values).argmax(-1)


def at_random(env, state, key):
    return jax.random.randint(key, (env.spec.num_agents,), 0, env.spec.num_actions)


def stay_or_next(env, state, key):
    return jnp.where(state.value == env.target, state.value, (state.value + 1) % env.spec.num_actions)


def stay_or_random(env, state, key):
    return jnp.where(state.value == env.target, state.value, at_random(env, state, key))


@pytest.mark.parametrize(
    ("name", "policy", "expected", "tolerance", "correct"),
    [
        ("simple-sine-32ag", oracle, 554.5, 0.01, 1.0),
        ("half-1-half-0-32ag", oracle, 554.5, 0.01, 1.0),
        ("simple-sine-32ag", always(0.5), 26.3, 0.05, 0.25),
        ("quick-flip-32ag", always(0.0), 33.3, 0.05, 0.5),
        ("simple-sine-32ag", farthest, -100.0, 0.01, 0.0),
        ("quick-flip-32ag", farthest, -100.0, 0.01, 0.0),
        ("simple-sine-1024ag", at_random, -3.1, 1.0, None),
        ("simple-sine-1024ag", stay_or_next, 526.0, 1.0, 1.0),
        ("simple-sine-1024ag", stay_or_random, 302.0, 25.0, 1.0),
    ],
)
def test_reference_policies_return_what_the_specification_implies(name, policy, expected, tolerance, correct):
    returns, fraction = play(f"neom/{name}", policy, num_envs=2 if policy is not stay_or_random else 16)
    assert returns == pytest.approx(expected, abs=tolerance)
    assert correct is None or fraction == correct


def test_range_normalisation_spares_the_worst_play():
    returns, _ = play("neom/simple-sine-32ag", farthest, normalisation="range")
    assert returns == pytest.approx(100 * (1 - 2 * 0.475 / 0.6), abs=0.01)


def test_the_first_step_of_a_solved_pattern_pays_ten():
    env = envs.make("neom/half-1-half-0-32ag")
    state, _ = env.reset(jax.random.key(0))
    assert env.step(state, jnp.asarray(env.target))[1].reward[0] == pytest.approx(10.0)


def test_views_say_whether_one_is_right_then_the_last_actions_newest_first():
    env = envs.make("neom/half-1-half-0-32ag", history="2")
    state, timestep = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(timestep.observation.view[:, 0], state.value == env.target)
    assert (timestep.observation.view[:, 1:] == 0).all()
    assert list(env.target[:4]) == [1, 0, 1, 0]  # the pattern 1, 0, 1, 0, ... as indices of the values 0, 1
    for action in (1, 0, 0):
        state, timestep = env.step(state, jnp.full(32, action))
    np.testing.assert_array_equal(timestep.observation.view[0], [0, 1, 0, 1, 0])
    state, timestep = env.step(state, jnp.full(32, 1))
    np.testing.assert_array_equal(timestep.observation.view[:2], [[1, 0, 1, 1, 0], [0, 0, 1, 1, 0]])
    assert timestep.stats["fraction_correct"] == 0.5 and timestep.stats["solved"] == 0


def test_without_history_a_view_is_one_number():
    env = envs.make("neom/quick-flip-32ag", history=0)
    state, timestep = env.reset(jax.random.key(0))
    assert (
        timestep.observation.view.shape == (32, 1) == env.step(state, state.value)[1].observation.view.shape
    )
