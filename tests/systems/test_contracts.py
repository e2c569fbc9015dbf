"""Contracts 2 to 4, for every mode: acting and evaluating agree, the ratio is one at learning rate zero,
nothing is dead."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sable.config.schema import ActorCriticConfig
from sable.ops import trees as tree
from tests.systems.conftest import ROUNDINGS, play, tolerance


def evaluate(played, order=None):
    """What the acting parameters say of the rollout they played."""
    order = played.learner.order if order is None else order
    steps, memory = played.policy.prepare(played.rollout.steps), played.rollout.start_memory
    score = jax.jit(played.policy.evaluate_actions)
    return score(played.learner.params, steps, memory, order, jax.random.key(0))


def learn(played, learner, rollout=None):
    return played.learn(learner, rollout or played.rollout, jax.random.key(1))


def test_an_episode_opens_inside_the_rollout_and_memory_comes_in(played):
    assert played.rollout.steps.first[1:].any()
    assert not played.rollout.steps.first[0].all()
    if played.memory:
        assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(played.rollout.start_memory))


FORWARDS = {"retention", "project_add_norm", "project_add_norm_ffn", "dense_gelu_norm"}
BACKWARDS = {"retention_query_gate_bwd", "retention_key_value_bwd"}
BACKWARDS |= {"project_add_norm_bwd", "project_add_norm_ffn_bwd", "dense_gelu_norm_bwd"}
LEARNING = FORWARDS | BACKWARDS | {"retention_timestep"}  # with the value of what comes after a rollout
KERNELS = {
    "sable": ({"retention_timestep", "project_add_norm_ffn", "dense_gelu_norm", "sable_decode"}, LEARNING)
}
KERNELS["sable-continuous"] = (
    {"retention_timestep", "retention_next_agent", "read_memory", "write_memory", *FORWARDS} - {"retention"},
    LEARNING,
)
KERNELS["sable-time_limits"] = set(), set()  # heads are too small
"""The kernels that a mode acts by, and learns by, on a GPU."""
NAMES = ("sable", "retention", "read_memory", "write_memory", "project_add_norm", "dense_gelu_norm")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.xdist_group(mode)) for mode in KERNELS]
)
def test_on_a_gpu_the_contracts_are_those_of_its_kernels(mode):
    played = play(mode)
    params, order, key = played.learner.params, played.learner.order, jax.random.key(0)
    last = played.rollout.last.observation
    acting = jax.make_jaxpr(played.policy.act)(params, last, played.rollout.last_memory, order, key)
    learning = jax.make_jaxpr(played.learn)(played.learner, played.rollout, key)
    found = tuple(
        set(re.findall(rf"\bname=((?:{'|'.join(NAMES)})_?\w*)", str(x))) for x in (acting, learning)
    )
    assert found == (KERNELS[mode] if jax.default_backend() == "gpu" else (set(), set()))


@pytest.mark.gpu
def test_acting_and_evaluating_agree_in_the_order_acted_in(played):
    found, acted, near = evaluate(played), played.rollout.steps.extras, tolerance(played.mode)
    np.testing.assert_allclose(found.log_prob, acted.log_prob, atol=near.log_prob)
    np.testing.assert_allclose(found.value, acted.value, atol=near.value)


@pytest.mark.gpu
def test_bfloat16_is_what_learning_computes_with(played):
    """Else the tolerance above would be wide for nothing: learning is as far off as rounding makes it."""
    if getattr(played.config, "compute_dtype", "float32") == "float32":
        return
    found, acted, near = evaluate(played), played.rollout.steps.extras, tolerance(played.mode)
    for part in ("log_prob", "value"):
        off = np.abs(getattr(found, part) - getattr(acted, part)).max()
        assert off > getattr(near, part) / ROUNDINGS / 10, part


def test_another_order_of_agents_is_another_policy(played):
    """Otherwise the order would be ignored and the agreement above would prove nothing about it. Where agents
    act side by side it is."""
    found = evaluate(played, order=played.learner.order[::-1])
    change = jnp.abs(found.log_prob - evaluate(played).log_prob).max()
    assert change < 1e-5 if played.policy.agent_order is None else change > 1e-4


@pytest.mark.gpu
def test_memory_that_comes_in_matters(played):
    if not played.memory:
        assert played.rollout.start_memory == ()
        return
    forgetful = replace(
        played,
        rollout=replace(
            played.rollout, start_memory=jax.tree.map(jnp.zeros_like, played.rollout.start_memory)
        ),
    )
    assert jnp.abs(evaluate(forgetful).value - evaluate(played).value).max() > 1e-4


@pytest.mark.gpu
def test_the_ratio_is_one_in_every_epoch_at_learning_rate_zero(played):
    rates = jax.tree.map(jnp.zeros_like, played.learner.hyper.learning_rate)
    still = replace(played.learner, hyper=replace(played.learner.hyper, learning_rate=rates))
    after, metrics = learn(played, still)
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, after.params, still.params)))
    if played.policy.agent_order != "per_epoch":
        assert metrics["policy/largest_change"] < max(1e-4, np.expm1(tolerance(played.mode).log_prob))
    else:  # the paper's way learns in another order than it acted in
        assert metrics["policy/largest_change"] > 1e-4


def test_targets_are_those_of_a_loop_with_lambda_09(played):
    """At learning rate zero the value loss is half the mean square of the advantages."""
    rates = jax.tree.map(jnp.zeros_like, played.learner.hyper.learning_rate)
    still = replace(played.learner, hyper=replace(played.learner.hyper, learning_rate=rates))
    _, metrics = learn(played, still)
    found = {lam: np.square(advantages(played, lam)).mean() / 2 for lam in (0.9, 0.95)}
    # Values off by so much change the root of their mean squared error by no more.
    near = tolerance(played.mode).value if tolerance(played.mode).value > 1e-5 else 0.0
    off = abs(np.sqrt(2 * metrics["loss/critic"]) - np.sqrt(2 * found[0.9]))
    assert off <= near + 5e-5 * np.sqrt(2 * found[0.9])
    assert abs(found[0.95] / found[0.9] - 1) > 1e-3


def advantages(played, lam):
    """GAE by a loop over time, from what the steps hold and the value of what came last."""
    steps, last = played.rollout.steps, played.rollout.last
    memory = tree.reset_memory(played.rollout.last_memory, last.first)
    value = played.policy.value(played.learner.params, last.observation, memory, played.learner.order)
    after, advantage, found = np.asarray(value), np.zeros_like(value), []
    opens = np.concatenate([steps.first[1:], last.first[None]])[..., None]
    for t in reversed(range(len(opens))):
        follows = np.where(opens[t], 0.0, after)
        if played.config.bootstrap_time_limits:
            follows = np.where(opens[t], steps.discount[t][:, None] * steps.next_extras[t], after)
        error = steps.reward[t] + 0.99 * follows - steps.extras.value[t]
        advantage = error + 0.99 * lam * np.where(opens[t], 0.0, advantage)
        after = np.asarray(steps.extras.value[t])
        found.append(advantage)
    return np.stack(found)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("mappo-memory-time_limits", marks=pytest.mark.xdist_group("mappo-memory-time_limits")),
        pytest.param(
            "sable-time_limits", marks=[pytest.mark.xdist_group("sable-time_limits"), pytest.mark.slow]
        ),
    ],
)
def test_a_time_limit_is_valued_by_the_memory_before_it(mode):
    """By that of the episode that ended: what follows its last step is scored as one step more of it."""
    played = play(mode)
    steps, score = played.rollout.steps, jax.jit(played.policy.evaluate_actions)
    prepared = played.policy.prepare(replace(steps, observation=played.finals)).observation
    ends = jnp.concatenate([steps.first[1:], played.rollout.last.first[None]]) & (steps.discount == 1)
    given = played.learner.params, played.rollout.start_memory, played.learner.order, jax.random.key(0)
    assert ends[:-1].any()
    for t in range(len(ends) - 1):
        known = played.policy.prepare(steps).observation
        seen = jax.tree.map(lambda a, b, t=t: a.at[t + 1].set(b[t]), known, prepared)
        for forgets in (False, True):
            longer = replace(steps, observation=seen, first=steps.first.at[t + 1].set(forgets))
            params, memory, order, key = given
            value = score(params, longer, memory, order, key).value[t + 1]
            gap = jnp.abs(value - steps.next_extras[t])[ends[t]]
            assert (gap > 1e-4).all() if forgets else (gap < 1e-5).all()


@pytest.mark.gpu
def test_every_parameter_receives_a_gradient_within_two_updates(played):
    learner, _ = learn(played, played.learner)
    learner, _ = learn(played, learner)
    dead, rounded = {}, getattr(played.config, "compute_dtype", "float32") == "bfloat16"
    moments = [moment for _, moment in optax.tree.get_all_with_path(learner.opt_state, "mu")]
    for path, moment in jax.tree.leaves_with_path(moments):
        name = jax.tree_util.keystr(path)
        # Rows of the action embedding wait for their action, columns of the view for their feature, and a
        # rectified unit may stay silent.
        rectified = isinstance(played.config, ActorCriticConfig)
        least = 0.2 if rectified or "embedding" in name else 0.95
        # GELU in bfloat16 has no slope at all below -3.3: a unit that an agent's views leave there is silent.
        if rounded and "['agent']" in name:
            least = 0.9
        if (share := (moment != 0).mean()) < least:
            dead[name] = f"{share:.0%} of it receives a gradient"
    assert not dead


def test_learning_changes_every_parameter_and_stays_finite(played):
    learner, metrics = learn(played, played.learner)
    assert tree.all_finite((learner.params, metrics))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), learner.params, played.learner.params)
    assert not any(jax.tree.leaves(same))


def test_advantages_are_not_learnt_from_before_the_first_reward(played):
    """They are a critic's noise until then; and only the entropy bonus may move the policy."""
    steps = replace(played.rollout.steps, reward=jnp.zeros_like(played.rollout.steps.reward))
    weightless = replace(played.learner.hyper, entropy_weight=jnp.zeros(()))
    learner, metrics = learn(
        played, replace(played.learner, hyper=weightless), replace(played.rollout, steps=steps)
    )
    assert metrics["loss/critic"] > 0 and metrics["loss/actor"] == 0 and learner.largest_reward == 0
    if isinstance(played.config, ActorCriticConfig):  # elsewhere the critic moves what both share
        before, after = played.learner.params["actor"], learner.params["actor"]
        assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, before, after)))
    learner, metrics = learn(played, played.learner)
    assert metrics["loss/actor"] != 0
    assert learner.largest_reward == jnp.abs(played.rollout.steps.reward).max() > 0


def test_a_new_order_is_drawn_after_each_rollout_or_never(played):
    orders = {tuple(np.asarray(played.learner.order).tolist())}
    learner = played.learner
    for key in range(6):
        learner, _ = played.learn(learner, played.rollout, jax.random.key(key))
        orders.add(tuple(np.asarray(learner.order).tolist()))
    assert (len(orders) > 1) == (played.policy.agent_order == "per_rollout")


def test_illegal_actions_are_never_taken_and_bounds_are_kept(played):
    steps = played.rollout.steps
    if played.spec.discrete:
        legal = jnp.take_along_axis(steps.observation.action_mask, steps.action[..., None], axis=-1)
        assert legal.all()
    else:
        assert (jnp.abs(steps.action) <= 1).all()
        np.testing.assert_allclose(steps.action, jnp.tanh(steps.extras.raw), atol=1e-6)
