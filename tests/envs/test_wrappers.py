"""The batch: auto-reset, its starts, and episode statistics, on an environment to follow by hand."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sable.envs import wrappers
from sable.envs.base import first_timestep, next_timestep
from sable.types import EnvSpec, Observation, struct


@struct
class WalkState:
    key: jax.Array
    time: jax.Array
    place: jax.Array


@dataclasses.dataclass(frozen=True)
class Walk:
    """A random walk of three steps from a random place; agent i is paid i + its action; action 9 ends it."""

    spec = EnvSpec(num_agents=2, view_size=1, num_actions=10, time_limit=3)

    def observe(self, state):
        view = jnp.full((2, 1), state.place)
        return Observation(view=view, action_mask=jnp.ones((2, 10), bool), step_count=state.time, state=())

    def reset(self, key):
        key, place_key = jax.random.split(key)
        state = WalkState(key=key, time=jnp.zeros((), jnp.int32), place=jax.random.normal(place_key))
        return state, first_timestep(self.observe(state), {"place": state.place})

    def step(self, state, action):
        key, step_key = jax.random.split(state.key)
        state = WalkState(key=key, time=state.time + 1, place=state.place + jax.random.normal(step_key))
        reward, ended = jnp.arange(2) + action, (action == 9).any()
        stats = {"place": state.place}
        return state, next_timestep(
            self.observe(state), reward, terminated=ended, truncated=state.time >= 3, stats=stats
        )

    def rekey(self, state, key):
        return dataclasses.replace(state, key=key)


ENV, NUM_ENVS = Walk(), 5
reset = jax.jit(partial(wrappers.reset, ENV), static_argnums=1)
starts = jax.jit(partial(wrappers.vmap_reset, ENV), static_argnums=1)
step = jax.jit(partial(wrappers.step, ENV))


def play(actions):
    """The starts that wait for a batch, and its time steps when it takes these actions, one per step."""
    starts_key, reset_key, *step_keys = jax.random.split(jax.random.key(0), 2 + len(actions))
    waiting = starts(starts_key, NUM_ENVS)
    state, timestep = reset(reset_key, NUM_ENVS)
    history = [(state, timestep)]
    for action, key in zip(actions, step_keys, strict=True):
        state, timestep = step(waiting, state, jnp.full((NUM_ENVS, 2), action), key)
        history.append((state, timestep))
    return waiting, history


def test_an_end_keeps_the_true_last_observation_and_opens_the_start_that_waits():
    (_, opening), history = play([0, 0, 0])
    bare = jax.vmap(ENV.step)
    state = history[0][0].env
    for _ in range(3):
        state, last = bare(state, jnp.zeros((NUM_ENVS, 2), jnp.int32))
    timestep = history[3][1]
    assert timestep.first.all() and (timestep.discount == 1).all()
    np.testing.assert_allclose(timestep.final_observation.view, last.observation.view, rtol=1e-6)
    assert (timestep.final_observation.step_count == 3).all() and (timestep.observation.step_count == 0).all()
    np.testing.assert_array_equal(timestep.observation.view, opening.observation.view)
    np.testing.assert_allclose(
        timestep.stats["place"], last.stats["place"], rtol=1e-6
    )  # still the old episode's


def test_between_ends_both_observations_are_the_same_and_first_is_false():
    _, history = play([0, 0])
    for _, timestep in history[1:]:
        assert not timestep.first.any()
        np.testing.assert_array_equal(timestep.final_observation.view, timestep.observation.view)


def test_a_true_end_has_discount_zero():
    _, history = play([0, 9])
    assert history[2][1].first.all() and (history[2][1].discount == 0).all()


def test_environments_at_the_same_start_go_different_ways():
    waiting = jax.tree.map(lambda leaf: leaf[jnp.zeros(NUM_ENVS, int)], starts(jax.random.key(1), 1))
    state, _ = reset(jax.random.key(0), NUM_ENVS)
    state, opened = step(waiting, state, jnp.full((NUM_ENVS, 2), 9), jax.random.key(2))
    _, after = step(waiting, state, jnp.zeros((NUM_ENVS, 2), jnp.int32), jax.random.key(3))
    assert len(np.unique(opened.observation.view)) == 1
    assert len(np.unique(after.observation.view[:, 0, 0])) == NUM_ENVS


def test_a_start_that_is_taken_again_goes_another_way():
    _, history = play([9, 0, 9, 0])
    views = [timestep.observation.view[:, 0, 0] for _, timestep in history]
    np.testing.assert_array_equal(views[1], views[3])
    assert (views[2] != views[4]).all()


def test_statistics_cover_the_episode_and_restart_with_the_next():
    _, history = play([1, 2, 3, 4])
    returns = [np.unique(timestep.stats["return"]).item() for _, timestep in history]
    lengths = [np.unique(timestep.stats["length"]).item() for _, timestep in history]
    assert returns == [0.0, 1.5, 4.0, 7.5, 4.5]  # the mean over agents of i + action
    assert lengths == [0, 1, 2, 3, 1]
    assert (history[3][0].returns == 0).all() and (history[3][0].lengths == 0).all()
    assert history[0][1].stats.keys() == history[1][1].stats.keys() == {"place", "return", "length"}


def test_where_none_waits_nothing_restarts():
    state, _ = reset(jax.random.key(0), NUM_ENVS)
    for _ in range(3):
        state, timestep = step(None, state, jnp.zeros((NUM_ENVS, 2), jnp.int32), jax.random.key(1))
    assert (
        timestep.first.all()
        and (timestep.observation.step_count == 3).all()
        and (timestep.stats["length"] == 3).all()
    )
    np.testing.assert_array_equal(timestep.final_observation.view, timestep.observation.view)


def test_equal_inputs_give_equal_batches():
    for one, other in zip(
        jax.tree.leaves(play([0, 9, 0])[1]), jax.tree.leaves(play([0, 9, 0])[1]), strict=True
    ):
        assert jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key) or (one == other).all()


def test_starts_are_all_different():
    _, opening = starts(jax.random.key(0), 20)
    assert len(np.unique(opening.observation.view[:, 0, 0])) == 20


def test_only_ended_environments_restart():
    state, _ = reset(jax.random.key(0), NUM_ENVS)
    waiting = starts(jax.random.key(1), NUM_ENVS)
    action = jnp.zeros((NUM_ENVS, 2), jnp.int32).at[2].set(9)
    state, timestep = step(waiting, state, action, jax.random.key(2))
    np.testing.assert_array_equal(timestep.first, np.arange(NUM_ENVS) == 2)
    np.testing.assert_array_equal(timestep.observation.step_count, np.where(timestep.first, 0, 1))
    np.testing.assert_array_equal(state.lengths, np.where(timestep.first, 0, 1))


def test_the_documented_example_plays():
    text = (Path(__file__).parents[2] / "docs" / "guides" / "own-environment.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert len(example.splitlines()) <= 40
    scope = {}
    exec(example.split("sable.train(")[0], scope)  # training itself is another test's matter
    (env,) = [value() for value in scope.values() if isinstance(value, type) and hasattr(value, "rekey")]
    waiting = wrappers.vmap_reset(env, jax.random.key(0), 2)
    state, timestep = wrappers.reset(env, jax.random.key(1), 2)
    step, ends = jax.jit(partial(wrappers.step, env)), 0
    for key in jax.random.split(jax.random.key(2), env.spec.time_limit + 1):
        action = jax.random.randint(key, (2, env.spec.num_agents), 0, env.spec.num_actions)
        state, timestep = step(waiting, state, action, key)
        assert timestep.observation.view.shape == (2, env.spec.num_agents, env.spec.view_size)
        ends += int(timestep.first.sum())
    assert ends >= 2
