"""What every environment keeps, whatever its suite: the shapes, types and conventions of envs.base."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.envs import list_tasks, wrappers
from sable.envs.tasks import PAPER

OURS = [
    task.id for task in list_tasks() if task.suite in ("neom", "probe", "null") or task.group == "scaling"
]
SUITES = [
    "rware/tiny-4ag",
    "lbf/2s-8x8-2p-2f-coop",
    "connector/con-5x5x3a",
    "smax/3m",
    "mpe/simple_spread_3ag",
]
REST = [name for name in PAPER if name not in OURS + SUITES]
SHORT = [
    "lbf/2s-8x8-2p-2f-coop",
    "connector/con-5x5x3a",
    "mpe/simple_spread_3ag",
    "neom/quick-flip-32ag",
    "null/32ag",
]


def check(timestep, task, time):
    observation, num_envs = timestep.observation, timestep.first.shape[0]
    num_legal = task.num_actions or 1
    shapes = {
        "view": ((num_envs, task.num_agents, task.view_size), jnp.float32),
        "action_mask": ((num_envs, task.num_agents, num_legal), bool),
        "step_count": ((num_envs,), jnp.int32),
    }
    for name, (shape, dtype) in shapes.items():
        leaf = getattr(observation, name)
        assert leaf.shape == shape and leaf.dtype == dtype, name
    for leaf, shape, dtype in [
        (timestep.reward, (num_envs, task.num_agents), jnp.float32),
        (timestep.discount, (num_envs,), jnp.float32),
        (timestep.first, (num_envs,), bool),
        *((value, (num_envs,), jnp.float32) for value in timestep.stats.values()),
    ]:
        assert leaf.shape == shape and leaf.dtype == dtype
    assert np.isfinite(observation.view).all() and observation.action_mask.any(-1).all()
    assert (observation.step_count == time).all()
    assert np.isin(timestep.discount, (0.0, 1.0)).all()


def plays(compiled, keys, act, name):
    game, rng = compiled(name), np.random.default_rng(0)
    spec, task = game.env.spec, game.task
    assert (spec.num_agents, spec.view_size, spec.num_actions, spec.action_size, spec.time_limit) == (
        task.num_agents, task.view_size, task.num_actions, task.action_size, task.time_limit)  # fmt: skip
    state, timestep = game.reset(keys())
    check(timestep, task, 0)
    assert (timestep.reward == 0).all() and (timestep.discount == 1).all() and timestep.first.all()
    assert np.size(timestep.observation.state) == 2 * spec.state_size
    names = timestep.stats.keys()
    for time in range(1, min(4, task.time_limit + 1)):
        state, timestep = game.step(state, act(spec, timestep.observation, time, "random", rng))
        check(timestep, task, time)
        assert timestep.stats.keys() == names
        assert not (timestep.discount[~np.asarray(timestep.first)] == 0).any()
        if timestep.first.any():
            break


@pytest.mark.parametrize("name", SUITES + OURS)
def test_resets_and_steps_under_jit_and_vmap(compiled, keys, act, name):
    plays(compiled, keys, act, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_every_other_task_of_the_paper_resets_and_steps(compiled, keys, act, name):
    plays(compiled, keys, act, name)


@pytest.mark.parametrize("name", SHORT)
def test_a_time_limit_is_reached_exactly_and_leaves_the_discount_at_one(compiled, keys, name):
    game = compiled(name)
    spec = game.env.spec
    action = jnp.zeros((2, spec.num_agents) + ((spec.action_size,) if not spec.discrete else ()), jnp.float32)
    action = (
        action.astype(jnp.int32) if spec.discrete else action
    )  # staying put solves nothing and breaks nothing
    state, _ = game.reset(keys())
    for time in range(1, spec.time_limit + 1):
        state, timestep = game.step(state, action)
        assert (timestep.first == (time == spec.time_limit)).all(), time
        assert (timestep.discount == 1).all()


@pytest.mark.parametrize("name", ["rware/tiny-4ag", "smax/3m", "lbf/2s-8x8-2p-2f-coop", "probe/recall"])
def test_a_batch_has_the_same_types_after_a_reset_as_after_a_step(compiled, name):
    """Weak types included: where they differ, every program that carries the state compiles twice."""
    env = compiled(name).env

    def opened(key):
        return wrappers.reset(env, key, 2)

    def stepped(key):
        waiting = wrappers.vmap_reset(env, key, 2)
        return wrappers.step(
            env, waiting, opened(key)[0], jnp.zeros((2, env.spec.num_agents), jnp.int32), key
        )

    def types(function):
        return jax.tree.map(
            lambda x: (x.shape, x.dtype, x.weak_type), jax.eval_shape(function, jax.random.key(0))
        )

    assert types(opened) == types(stepped)


def test_views_of_null_vary_by_agent_time_and_episode(compiled):
    env = compiled("null/32ag").env
    state, opening = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 4))
    views = np.asarray(opening.observation.view)
    assert len(np.unique(views[0], axis=0)) == 32
    assert len(np.unique(views, axis=0)) > 1
    _, after = jax.vmap(env.step)(state, jnp.zeros((4, 32), jnp.int32))
    assert (views != np.asarray(after.observation.view)).any(-1).all()
