"""The networks of IPPO and MAPPO: who sees what, who remembers what, and how time is cut for them."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.config.schema import ActorCriticConfig
from sable.nets.actor_critic import global_state
from sable.ops import trees as tree
from sable.systems import ippo, mappo, minibatches
from sable.types import EnvSpec, Observation, Transition

T, B, N, F, A = 6, 2, 3, 4, 5
SPEC = EnvSpec(num_agents=N, view_size=F, num_actions=A, time_limit=10)
WITH_STATE = replace(SPEC, state_size=7)
CONFIG = ActorCriticConfig(
    num_envs=B,
    rollout_length=T,
    policy_layers=(8, 10),
    critic_layers=(9, 11),
    recurrent_size=6,
    recurrent_chunk=3,
)
MEMORY = replace(CONFIG, memory=True)
SYSTEMS = {"ippo": ippo, "mappo": mappo}
KEYS = jax.random.split(jax.random.key(0), 5)
NATURAL = jnp.arange(N)


@cache
def make(name, spec=SPEC, config=CONFIG):
    policy = SYSTEMS[name].make_policy(spec, config)
    return policy, jax.jit(policy.init)(KEYS[0])


def observe(spec=SPEC):
    return Observation(
        view=jax.random.normal(KEYS[1], (T, B, N, F)),
        action_mask=jnp.ones((T, B, N, A), bool),
        step_count=jnp.zeros((T, B), jnp.int32),
        state=jax.random.normal(KEYS[2], (T, B, spec.state_size)) if spec.state_size else (),
    )


def act(name, observation, first, spec=SPEC, config=CONFIG):
    """A rollout of actions, as `collect` would take them."""
    policy, params = make(name, spec, config)
    return _act(policy.act, params, policy.initial_memory(B), observation, first)


def evaluate(name, steps, memory=None, spec=SPEC, config=CONFIG):
    policy, params = make(name, spec, config)
    memory = policy.initial_memory(B) if memory is None else memory
    return _evaluate(policy.evaluate_actions, params, steps, memory)


@partial(jax.jit, static_argnums=0)
def _act(act, params, memory, observation, first):
    def step(memory, now):
        observation, first, key = now
        decision = act(params, observation, tree.reset_memory(memory, first), NATURAL, key)
        transition = Transition(
            observation=observation,
            action=decision.action,
            reward=jnp.zeros((B, N)),
            discount=jnp.ones(B),
            first=first,
            extras=decision.extras,
            next_extras=(),
        )
        return decision.memory, transition

    keys = jax.random.split(KEYS[3], T)
    return jax.lax.scan(step, memory, (observation, first, keys))[1]


@partial(jax.jit, static_argnums=0)
def _evaluate(evaluate, params, steps, memory):
    return evaluate(params, steps, memory, NATURAL, KEYS[4])


def influence(name, steps, change, **kinds):
    """Where (actors, critics) answer differently, as booleans [T, B, N], once `change` happens to views."""
    before = evaluate(name, steps, **kinds)
    changed = replace(steps, observation=replace(steps.observation, view=change(steps.observation.view)))
    after = evaluate(name, changed, **kinds)
    return np.asarray(before.log_prob != after.log_prob), np.asarray(before.value != after.value)


def one_episode(name, **kinds):
    first = jnp.zeros((T, B), bool).at[0].set(True)
    return act(name, observe(kinds.get("spec", SPEC)), first, **kinds)


def test_the_global_state_is_the_suites_own_or_all_views_in_a_row():
    own, joint = observe(WITH_STATE), observe()
    np.testing.assert_array_equal(global_state(own), own.state)
    np.testing.assert_array_equal(global_state(joint), joint.view.reshape(T, B, N * F))
    np.testing.assert_array_equal(global_state(jax.tree.map(lambda x: x[0], joint)), global_state(joint)[0])


@pytest.mark.parametrize("config", [CONFIG, MEMORY], ids=["memoryless", "memory"])
def test_an_actor_and_an_independent_critic_see_their_own_agents_view_alone(config):
    steps = one_episode("ippo", config=config)
    for changed in influence("ippo", steps, lambda view: view.at[:, :, 1].add(1.0), config=config):
        assert changed[:, :, 1].all()
        assert not changed[:, :, [0, 2]].any()


@pytest.mark.parametrize("config", [CONFIG, MEMORY], ids=["memoryless", "memory"])
def test_a_central_critic_sees_everyones_view_and_gives_all_agents_one_value(config):
    steps = one_episode("mappo", config=config)
    assert (steps.extras.value == steps.extras.value[..., :1]).all()
    for agent in range(N):
        actors, critics = influence("mappo", steps, lambda v, i=agent: v.at[:, :, i].add(1.0), config=config)
        assert critics.all()
        assert not np.delete(actors, agent, axis=2).any()


def test_a_central_critic_sees_the_suites_own_state_where_there_is_one():
    steps = one_episode("mappo", spec=WITH_STATE)
    _, critics = influence("mappo", steps, lambda view: view + 1.0, spec=WITH_STATE)
    assert not critics.any()
    other = replace(steps, observation=replace(steps.observation, state=steps.observation.state + 1.0))
    assert (evaluate("mappo", other, spec=WITH_STATE).value != steps.extras.value).all()


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_past_matters_with_memory_until_an_episode_opens_and_never_without(name):
    first = jnp.zeros((T, B), bool).at[0].set(True).at[4, 0].set(True)
    for config in (CONFIG, MEMORY):
        steps = act(name, observe(), first, config=config)
        for changed in influence(name, steps, lambda view: view.at[0].add(1.0), config=config):
            assert changed[0].all()
            assert changed[1:4].all() == changed[4:, 1].all() == config.memory
            assert changed[1:4].any() == changed[4:, 1].any() == config.memory
            assert not changed[4:, 0].any()


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_is_remembered_is_one_row_per_agent_or_one_per_global_state(name):
    policy, _ = make(name, config=MEMORY)
    memory = policy.initial_memory(B)
    assert memory.actor.shape == (B, N, 6)
    assert memory.critic.shape == ((B, N, 6) if name == "ippo" else (B, 6))
    assert make(name)[0].initial_memory(B) == ()


@pytest.mark.parametrize("name", SYSTEMS)
def test_agents_are_told_apart_unless_their_views_or_the_user_say_otherwise(name):
    steps = one_episode(name)
    view = jnp.broadcast_to(steps.observation.view[:, :, :1], (T, B, N, F))
    same = replace(
        steps,
        observation=replace(steps.observation, view=view),
        extras=replace(steps.extras, raw=jnp.zeros((T, B, N), jnp.int32)),
    )
    spec, config = replace(SPEC, views_carry_id=True), replace(CONFIG, agent_id=False)
    for kinds, apart in (({}, True), ({"spec": spec}, False), ({"config": config}, False)):
        found = evaluate(name, same, **kinds)
        assert (found.log_prob[..., 0] != found.log_prob[..., 1]).all() == apart
        assert (found.value[..., 0] != found.value[..., 1]).all() == (apart and name == "ippo")


def test_the_networks_have_as_many_parameters_as_their_layers_say():
    def count(params):
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    _, params = make("ippo", config=MEMORY)
    gru = 3 * 6 * 6 + 3 * 6 + 6
    assert count(params["actor"]) == F * 8 + N * 8 + 3 * 8 * 6 + gru + (6 * 10 + 10) + (10 * A + A)
    assert count(params["critic"]) == F * 9 + N * 9 + 3 * 9 * 6 + gru + (6 * 11 + 11) + (11 + 1)
    _, params = make("mappo", WITH_STATE)
    assert count(params["critic"]) == (7 * 9 + 9) + (9 * 11 + 11) + (11 + 1)


def test_time_is_cut_into_contiguous_windows_that_begin_with_what_was_remembered_then():
    steps = one_episode("ippo", config=MEMORY)
    clock = jnp.broadcast_to(jnp.arange(T)[:, None] * 10 + jnp.arange(B)[None], (T, B))
    team = jnp.broadcast_to(clock[..., None], (T, B, N))
    steps = replace(steps, observation=replace(steps.observation, step_count=clock))
    batch = minibatches.split_time(minibatches.Batch(steps=steps, advantage=team, target=team, memory=()), 3)
    windows = [[0, 1, 30, 31], [10, 11, 40, 41], [20, 21, 50, 51]]
    np.testing.assert_array_equal(batch.steps.observation.step_count, windows)
    np.testing.assert_array_equal(batch.advantage[..., -1], windows)
    np.testing.assert_array_equal(batch.target[..., 0], windows)
    assert batch.steps.extras.memory == ()
    remembered = steps.extras.memory
    for found, stored in ((batch.memory.actor, remembered.actor), (batch.memory.critic, remembered.critic)):
        np.testing.assert_array_equal(found, jnp.concatenate([stored[0], stored[3]]))
        assert (found[:B] == 0).all()
        assert (found[B:] != 0).any()


@pytest.mark.parametrize("name", SYSTEMS)
def test_chunk_by_chunk_is_the_same_as_the_whole_rollout(name):
    first = jnp.zeros((T, B), bool).at[0].set(True).at[3, 0].set(True).at[4, 1].set(True)
    steps = act(name, observe(), first, config=MEMORY)
    whole = evaluate(name, steps, config=MEMORY)
    np.testing.assert_allclose(whole.log_prob, steps.extras.log_prob, atol=1e-6)
    np.testing.assert_allclose(whole.value, steps.extras.value, atol=1e-6)
    batch = minibatches.Batch(steps=steps, advantage=whole.value, target=whole.log_prob, memory=())
    batch = minibatches.split_time(batch, 3)
    chunks = evaluate(name, batch.steps, batch.memory, config=MEMORY)
    np.testing.assert_allclose(chunks.value, batch.advantage, atol=1e-6)
    np.testing.assert_allclose(chunks.log_prob, batch.target, atol=1e-6)


@pytest.mark.parametrize(("chunk", "kept"), [(3, True), (6, False), (128, False)])
def test_memories_are_stored_only_where_learning_starts_inside_a_rollout(chunk, kept):
    config = replace(MEMORY, recurrent_chunk=chunk)
    steps = jax.eval_shape(lambda: one_episode("ippo", config=config))
    assert (steps.extras.memory != ()) == kept
    assert make("ippo", config=config)[0].chunk == chunk
