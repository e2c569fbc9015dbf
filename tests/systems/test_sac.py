"""MASAC and HASAC: targets, delays, warm-up, temperatures, and who sees whose new actions."""

import typing as tp
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sable.config.schema import HASACConfig, MASACConfig
from sable.nets.sac import SoftQ
from sable.ops import trees as tree
from sable.systems import hasac, masac, sac
from sable.systems.base import System
from sable.types import EnvSpec, Observation, Rollout, TimeStep, Transition

SPEC = EnvSpec(num_agents=3, view_size=4, action_size=2, time_limit=5, action_low=-2.0, action_high=6.0)
STATEFUL = replace(SPEC, state_size=7)
SMALL = {
    "num_envs": 8,
    "rollout_length": 4,
    "num_updates_per_rollout": 4,
    "batch_size": 16,
    "replay_size": 64,
    "warmup_steps": 64,
    "policy_delay": 2,
    "autotune_temperature": True,
    "policy_layers": (16, 16),
    "q_layers": (16, 16),
}
# The other way round in both: steps of a rollout that the delay does not divide, and a fixed temperature.
ODD = {"num_updates_per_rollout": 6, "policy_delay": 4, "autotune_temperature": False}
MODULES = {"masac": (masac, MASACConfig), "hasac": (hasac, HASACConfig)}
KEY = jax.random.key(0)

both = pytest.mark.parametrize("name", MODULES)


def configured(name: str, **changes) -> tp.Any:
    return MODULES[name][1](**SMALL | changes)


@cache
def built(name: str, spec: EnvSpec = SPEC, *, odd: bool = False) -> System:
    """The system, compiled."""
    system = MODULES[name][0].make(spec, configured(name, **ODD if odd else {}))
    return system._replace(
        **{part: jax.jit(getattr(system, part)) for part in ("init", "explore", "act", "learn")}
    )


def begun(name: str, *, odd: bool = False):
    """A learner whose warm-up is over."""
    system = built(name, odd=odd)
    return replace(system.init(KEY, system.hyper), env_steps=jnp.int32(SMALL["warmup_steps"]))


def observed(spec: EnvSpec, key, shape) -> Observation:
    view_key, state_key = jax.random.split(key)
    return Observation(
        view=jax.random.normal(view_key, (*shape, spec.num_agents, spec.view_size)),
        action_mask=jnp.ones((*shape, spec.num_agents, 1), bool),
        step_count=jnp.zeros(shape, jnp.int32),
        state=jax.random.normal(state_key, (*shape, spec.state_size)) if spec.state_size else (),
    )


def transitions(spec: EnvSpec, key, shape) -> Transition:
    """Made-up experience, as `collect` would hand it over."""
    keys = jax.random.split(key, 5)
    squashed = jax.random.uniform(keys[0], (*shape, spec.num_agents, spec.action_size), minval=-1.0)
    return Transition(
        observation=observed(spec, keys[1], shape),
        action=2.0 + 4.0 * squashed,
        reward=jax.random.normal(keys[2], (*shape, spec.num_agents)),
        discount=jax.random.bernoulli(keys[3], 0.7, shape).astype(jnp.float32),
        first=jnp.zeros(shape, bool),
        extras=squashed,
        next_extras=replace(observed(spec, keys[4], shape), action_mask=(), step_count=()),
    )


def rollout(seed: int = 0, spec: EnvSpec = SPEC) -> Rollout:
    steps = transitions(spec, jax.random.key(seed), (4, 8))
    observation = observed(spec, KEY, (8,))
    last = TimeStep(
        observation=observation,
        final_observation=observation,
        reward=steps.reward[-1],
        discount=steps.discount[-1],
        first=steps.first[-1],
        stats={},
    )
    return Rollout(steps=steps, start_memory=(), last=last, last_memory=())


def same(one, other) -> list[bool]:
    return jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), one, other))


@both
def test_targets_start_as_copies_in_buffers_of_their_own(name):
    learner = begun(name)
    assert all(same(learner.target, learner.q))
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((learner.q, learner.target))]
    assert len(set(places)) == len(places)
    twins = learner.q["params"]["Dense_0"]["kernel"]
    assert twins.shape[0] == 2 and (twins[0] != twins[1]).all()


@both
def test_polyak_moves_the_targets_by_its_fraction_at_every_step(name):
    learner = begun(name)
    away = jax.tree.map(lambda x: x + 1, learner.q)
    hyper = replace(learner.hyper, polyak=jnp.float32(0.25), q_learning_rate=jnp.float32(0))
    after, _ = built(name).learn(replace(learner, target=away, hyper=hyper), rollout(), KEY)
    assert all(same(after.q, learner.q))
    gap = jax.tree.map(lambda target, q: target - q, after.target, after.q)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, 0.75**4, atol=1e-5), gap)


@pytest.mark.parametrize("odd", [False, True], ids=["whole", "remainder"])
@both
def test_policies_take_as_many_steps_as_the_critics_but_late(name, odd):
    """At a delay of d, d steps after every d of the critics."""
    learner, (steps, delay) = begun(name, odd=odd), (6, 4) if odd else (4, 2)
    for num_rollouts in range(1, 4):
        learner, _ = built(name, odd=odd).learn(learner, rollout(num_rollouts), jax.random.key(num_rollouts))
        done = steps * num_rollouts
        assert learner.num_updates == learner.opt_states.q[1][0].count == done
        # The optimiser's own count, one for each of HASAC's policies.
        due = done // delay * delay
        assert set(np.ravel(learner.opt_states.policy[1][0].count).tolist()) == {due}
        assert learner.opt_states.temperature[1][0].count == (0 if odd else due)


@both
def test_actions_of_the_warm_up_cover_the_bounds_and_later_ones_come_from_the_policy(name):
    learner, system, observation = begun(name), built(name), observed(SPEC, KEY, (2000,))
    action = system.explore(replace(learner, env_steps=jnp.int32(63)), observation, (), KEY).action
    low, high = np.quantile(action, [0.01, 0.99], axis=(0, 1))
    np.testing.assert_allclose(low, -2 + 0.01 * 8, atol=0.1)
    np.testing.assert_allclose(high, 6 - 0.01 * 8, atol=0.1)
    np.testing.assert_allclose(np.mean(action, (0, 1)), 2.0, atol=0.15)
    np.testing.assert_allclose(np.std(action, (0, 1)), 8 / 12**0.5, atol=0.1)

    exploring = system.explore(learner, observation, (), KEY).action
    exploiting = system.act(learner.params, observation, (), KEY).action
    for action in (exploring, exploiting):
        assert (action >= -2).all() and (action <= 6).all()
        spread = np.std(action, (0, 1))
        assert (spread > 1).all() and (spread < 2.1).all()  # it samples, and is not uniform


@both
def test_what_is_stored_is_the_action_taken_in_squashed_units(name):
    learner, observation = begun(name), observed(SPEC, KEY, (2000,))
    for env_steps in (0, 64):
        decision = built(name).explore(replace(learner, env_steps=jnp.int32(env_steps)), observation, (), KEY)
        np.testing.assert_allclose(decision.action, 2 + 4 * decision.extras, atol=1e-5)
        assert (jnp.abs(decision.extras) <= 1).all()


@both
def test_nothing_is_learned_before_the_warm_up_is_over(name):
    system = built(name)
    start = system.init(KEY, system.hyper)
    learner, metrics = system.learn(start, rollout(1), jax.random.key(1))
    assert learner.env_steps == 32  # of 64
    assert all(same(replace(learner, env_steps=start.env_steps, replay=start.replay), start))
    assert all(value == 0 for value in metrics.values())
    learner, metrics = system.learn(learner, rollout(2), jax.random.key(2))
    assert learner.num_updates == 4 and metrics["loss/critic"] > 0
    assert not any(same((learner.q, learner.params), (start.q, start.params)))


@pytest.mark.parametrize("spec", [SPEC, STATEFUL], ids=["views", "state"])
@both
def test_time_limits_are_looked_through_and_true_ends_are_not(name, spec):
    """The target by hand: r + gamma discount (min Q - sum_i alpha_i log pi_i) at what truly followed."""
    system, config = built(name, spec), configured(name)
    policies, critic = MODULES[name][0].make_policies(spec, config), SoftQ(config)
    temperature = jnp.array([0.5, 1.0, 2.0])
    learner = replace(system.init(KEY, system.hyper), log_temperature=jnp.log(temperature))
    learner = replace(learner, target=jax.tree.map(lambda x: x + 0.1, learner.target))
    batch = transitions(spec, jax.random.key(3), (6,))
    batch = replace(batch, reward=batch.reward.mean(-1), discount=jnp.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0]))
    found = jax.jit(partial(sac.td_targets, policies, critic))(learner, batch, KEY)

    distribution = jax.jit(policies.act)(learner.params, batch.next_extras.view)
    raw = distribution.sample(KEY)
    seen = batch.next_extras.state if spec.state_size else batch.next_extras.view.reshape(6, -1)
    one, other = (jax.tree.map(lambda x, i=i: x[i], learner.target) for i in range(2))
    next_value = np.minimum(*(np.asarray(critic.apply(q, seen, jnp.tanh(raw))) for q in (one, other)))
    future = next_value - np.asarray(distribution.log_prob(raw)) @ np.asarray(temperature)
    limit = np.asarray(batch.discount) == 1
    reward, gamma = np.asarray(batch.reward), float(learner.hyper.discount)
    np.testing.assert_allclose(found[limit], (reward + gamma * future)[limit], atol=1e-4)
    np.testing.assert_array_equal(found[~limit], reward[~limit])


@both
def test_the_reward_is_the_teams_and_what_followed_is_kept(name):
    learner, _ = built(name).learn(begun(name), rollout(), KEY)
    stored, steps = learner.replay.experience, rollout().steps
    for kept, given in (
        (stored.reward, steps.reward.mean(-1)),
        (stored.action, steps.extras),
        (stored.discount, steps.discount),
        (stored.observation.view, steps.observation.view),
        (stored.next_extras.view, steps.next_extras.view),
    ):
        np.testing.assert_allclose(np.swapaxes(kept, 0, 1)[:4], given, atol=1e-6)
    final = built(name).next_extras(learner, steps.observation, ())
    assert final.view is steps.observation.view and len(jax.tree.leaves(final)) == 1


@both
def test_every_parameter_receives_a_gradient_and_changes(name):
    start = learner = begun(name)
    for key in range(2):
        learner, metrics = built(name).learn(learner, rollout(key), jax.random.key(key))
        assert tree.all_finite((learner, metrics))
    for state in learner.opt_states:
        for path, moment in jax.tree.leaves_with_path(state[1][0].mu):
            assert (moment != 0).mean() >= 0.9, jax.tree_util.keystr(path)
    before, after = ((x.params, x.q, x.target, x.log_temperature) for x in (start, learner))
    assert not any(same(before, after))


@pytest.mark.parametrize(("scale", "sign"), [(50.0, -1), (-50.0, 1)], ids=["falls", "rises"])
@both
def test_the_temperature_goes_where_the_target_entropy_is(name, scale, sign):
    learner, first = begun(name), configured(name).initial_temperature
    np.testing.assert_allclose(np.exp(learner.log_temperature), first, rtol=1e-5)
    learner = replace(learner, hyper=replace(learner.hyper, target_entropy_scale=jnp.float32(scale)))
    after, metrics = built(name).learn(learner, rollout(), KEY)
    # Where gradients are all alike, each step of Adam is as long as its rate.
    moved = SMALL["num_updates_per_rollout"] * configured(name).temperature_learning_rate
    np.testing.assert_allclose(after.log_temperature - learner.log_temperature, sign * moved, rtol=0.1)
    np.testing.assert_allclose(metrics["policy/temperature"], first, rtol=0.01)


@both
def test_a_fixed_temperature_stays(name):
    learner = begun(name, odd=True)
    after, _ = built(name, odd=True).learn(learner, rollout(), KEY)
    np.testing.assert_array_equal(after.log_temperature, learner.log_temperature)


def test_a_shared_policy_tells_agents_apart_and_own_ones_start_apart():
    views = jnp.ones((1, 3, 4))
    for name, (module, _) in MODULES.items():
        policies = module.make_policies(SPEC, configured(name))
        mean = policies.act(policies.init(KEY), views).mean[0]
        assert (jnp.abs(mean[0] - mean[1]) > 1e-5).all() and (jnp.abs(mean[1] - mean[2]) > 1e-5).all()
    named = replace(SPEC, views_carry_id=True)
    policies = masac.make_policies(named, configured("masac"))
    mean = policies.act(policies.init(KEY), views).mean[0]
    np.testing.assert_allclose(mean[0], mean[1], atol=1e-6)


def test_masac_judges_actions_that_all_come_from_the_policy_now():
    """Not one agent's at a time, beside what the others did when it was stored."""
    policies = masac.make_policies(SPEC, configured("masac"))
    params, view, temperature = policies.init(KEY), jax.random.normal(KEY, (16, 3, 4)), jnp.arange(1.0, 4.0)
    judge = lambda action: jnp.square(action).sum((-2, -1))  # noqa: E731
    optimiser = optax.sgd(0.1)
    state = policies.init_optimiser(optimiser, params)
    improved = policies.update_policy(optimiser, params, state, view, judge, temperature, KEY)

    def loss(params):
        distribution = policies.act(params, view)
        raw = distribution.sample(KEY)
        entropy_cost = sum(temperature[i] * distribution.log_prob(raw)[:, i] for i in range(3))
        return (entropy_cost - judge(jnp.tanh(raw))).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    np.testing.assert_allclose(improved.loss, value, rtol=1e-5)
    for before, after, g in zip(*map(jax.tree.leaves, (params, improved.params, gradient)), strict=True):
        np.testing.assert_allclose(after, before - 0.1 * g, atol=1e-6)


PAIR = EnvSpec(num_agents=2, view_size=1, action_size=1, time_limit=5)


def improved_means(config: HASACConfig, keys: range) -> np.ndarray:
    """The means of two agents' policies [.., 2] after a huge step towards large a_0 a_1, for several keys.

    Agent 0 starts near -1 and agent 1 near 1: whoever is improved first turns towards the other, and the
    other, if it sees that, stays.
    """
    policies = hasac.make_policies(PAIR, config)
    params = jax.tree.map(jnp.zeros_like, policies.init(KEY))
    bias = jnp.array([[-1.0, -3.0], [1.0, -3.0]])  # mean, and a narrow spread
    params["params"]["head"]["bias"] = bias
    optimiser = optax.sgd(10.0)

    @jax.jit
    def improve(key):
        judge = lambda action: action[:, 0, 0] * action[:, 1, 0]  # noqa: E731
        state, view = policies.init_optimiser(optimiser, params), jnp.ones((32, 2, 1))
        improved = policies.update_policy(optimiser, params, state, view, judge, jnp.zeros(2), key)
        return policies.act(improved.params, view).mean[0, :, 0]

    return np.stack([improve(jax.random.key(key)) for key in keys])


def test_later_agents_see_the_new_actions_of_those_before_in_a_fixed_order():
    means = improved_means(configured("hasac"), range(8))
    assert (means[:, 0] > 1).all(), "agent 0 sees what agent 1 does by its old policy"
    assert (means[:, 1] > 1).all(), "agent 1 sees agent 0's new action; its old one would turn it away"


def test_or_in_a_new_random_order_each_time():
    means = improved_means(configured("hasac", shuffle_agents=True), range(16))
    upwards = means[:, 0] > 1
    np.testing.assert_array_equal(means[:, 1] > 1, upwards)  # they agree, whoever was first
    np.testing.assert_array_equal(means[:, 1] < -1, ~upwards)
    assert 0 < upwards.sum() < 16
