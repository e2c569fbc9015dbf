"""Our battles against the suite's own, from the same states: everything is equal but for rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable import envs

NUM_ENVS, NUM_STEPS = 8, 60


def make(map_name, **changes):
    """(The suite's, ours)."""
    # And jaxmarl is there, quietly.
    assert type(envs.make("smax/3m").suite).__module__ == "sable.envs.suites.smax"
    from jaxmarl.environments.smax import map_name_to_scenario
    from jaxmarl.environments.smax.heuristic_enemy_smax_env import HeuristicEnemySMAX

    from sable.envs.suites.smax import ScriptedEnemies

    arguments = {
        "see_enemy_actions": True,
        "walls_cause_death": True,
        "max_steps": 50,
    }
    arguments |= {"scenario": map_name_to_scenario(map_name)} | changes
    return HeuristicEnemySMAX(**arguments), ScriptedEnemies(**arguments)


@pytest.mark.parametrize(
    ("map_name", "changes"),
    [
        ("3s5z", {}),
        pytest.param(
            "5m_vs_6m", {"see_enemy_actions": False, "walls_cause_death": False}, marks=pytest.mark.slow
        ),
        pytest.param("smacv2_5_units", {}, marks=pytest.mark.slow),
    ],
)
def test_every_step_is_the_suites(map_name, changes):
    """Played by legal actions, shots before moves, and on past the end, where the suite goes on too."""
    suite, ours = make(map_name, **changes)
    agents = suite.agents

    def legal(state, key):
        masks = suite.get_avail_actions(state)
        weight = jnp.stack([masks[agent] for agent in agents]) * jnp.where(
            jnp.arange(masks[agents[0]].size) < 5, 1, 9
        )
        return jax.random.categorical(key, jnp.log(weight))

    @jax.jit
    @jax.vmap
    def both(key, state):
        action_key, step_key = jax.random.split(key)
        action = dict(zip(agents, legal(state, action_key), strict=True))
        return tuple(env.step_env(step_key, state, action) for env in (suite, ours))

    keys = jax.random.split(jax.random.key(0), NUM_ENVS)
    (seen, state), found = (jax.jit(jax.vmap(env.reset))(keys) for env in (suite, ours))
    assert_alike(found, (seen, state))
    hurt = 0.0
    for step_keys in jax.random.split(jax.random.key(1), (NUM_STEPS, NUM_ENVS)):
        truth, found = both(step_keys, state)
        assert_alike(found, truth)
        hurt += float((state.state.unit_health - truth[1].state.unit_health).sum())
        state = truth[1]
    assert hurt > 0 and not np.asarray(state.state.unit_alive).all()  # they fought, and some died


def assert_alike(found, truth):
    def alike(a, b):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

    jax.tree.map(alike, found, truth)
