"""PPO's parts against versions of them written out in loops."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sable.config.schema import PPOConfig
from sable.systems import minibatches, ppo
from sable.systems.base import gradient_step, hyperparameters_from
from sable.types import Decision, Observation, Rollout, TimeStep, Transition

T, B, N = 5, 4, 3
KEY = jax.random.key(0)
CONFIG = PPOConfig(num_envs=B, rollout_length=T, value_weight=0.7, entropy_weight=0.3, clip_eps=0.2)
PARAMS = {"shift": jnp.float32(0.3), "scale": jnp.float32(1.5)}


def evaluate(params, steps, memory, order, key):
    """Return log-probabilities, values and entropies that both parameters and the views enter."""
    x = steps.observation.view[..., 0]
    log_prob = steps.extras.log_prob + params["shift"] * x
    return ppo.ActionEvaluation(log_prob=log_prob, value=params["scale"] * x, entropy=params["scale"] * x**2)


POLICY = ppo.Policy(
    init=lambda key: PARAMS,
    initial_memory=lambda num_envs: (),
    act=lambda params, observation, memory, order, key: Decision(action=jnp.zeros(()), memory=(), extras=()),
    value=lambda params, observation, memory, order: params["scale"] * observation.view[..., 0],
    evaluate_actions=evaluate,
    learning_rate=1e-2,
    chunk=1,
)


def observe(rng, *lead):
    view = jnp.asarray(rng.normal(size=(*lead, N, 1)), jnp.float32)
    return Observation(
        view=view, action_mask=jnp.ones((*lead, N, 2), bool), step_count=jnp.zeros(lead, jnp.int32), state=()
    )


def rollout(seed=0):
    """Return random experience with ends, time limits and openings of episodes anywhere."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    extras = ppo.PolicyExtras(raw=jnp.zeros((T, B, N)), log_prob=normal(T, B, N), value=normal(T, B, N))
    steps = Transition(
        observation=observe(rng, T, B),
        action=jnp.zeros((T, B, N)),
        reward=normal(T, B, N),
        discount=jnp.asarray(rng.random((T, B)) < 0.7, jnp.float32),
        first=jnp.asarray(rng.random((T, B)) < 0.3),
        extras=extras,
        next_extras=normal(T, B, N),
    )
    last = observe(rng, B)
    nothing = jnp.zeros(B)
    first = jnp.asarray([True, False, True, False])
    last = TimeStep(
        observation=last, final_observation=last, reward=nothing, discount=nothing, first=first, stats={}
    )
    return Rollout(steps=steps, start_memory=(), last=last, last_memory=())


def learner(config=CONFIG):
    hyper = hyperparameters_from(ppo.Hyperparameters, config, learning_rate=POLICY.learning_rate)
    return ppo.init(POLICY, config, jnp.arange(N), KEY, hyper)


def batch(seed=0):
    played = rollout(seed)
    rng = np.random.default_rng(seed + 1)
    advantage, target = (jnp.asarray(rng.normal(size=(T, B, N)), jnp.float32) for _ in range(2))
    return minibatches.Batch(steps=played.steps, advantage=advantage, target=target, memory=())


@pytest.mark.parametrize("clip_value", [True, False])
def test_the_loss_is_the_sum_over_all_tokens_one_by_one(clip_value):
    config, given = replace(CONFIG, clip_value=clip_value), batch()
    total, metrics = ppo.loss(POLICY, config, learner(config).hyper, jnp.arange(N), PARAMS, given, KEY)
    steps, sums = given.steps, {"actor": 0.0, "critic": 0.0, "entropy": 0.0, "kl": 0.0, "clipped": 0.0}
    for at in np.ndindex(T, B, N):
        x = float(steps.observation.view[(*at, 0)])
        log_ratio, advantage = 0.3 * x, float(given.advantage[at])
        ratio, value, old = np.exp(log_ratio), 1.5 * x, float(steps.extras.value[at])
        sums["actor"] -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        errors = [(value - float(given.target[at])) ** 2]
        if clip_value:
            errors.append((old + min(max(value - old, -0.2), 0.2) - float(given.target[at])) ** 2)
        sums["critic"] += 0.5 * max(errors)
        sums["entropy"] += 1.5 * x**2
        sums["kl"] += ratio - 1 - log_ratio
        sums["clipped"] += abs(ratio - 1) > 0.2
    means = {name: value / (T * B * N) for name, value in sums.items()}
    assert 0 < means["clipped"] < 1
    np.testing.assert_allclose(
        total, means["actor"] + 0.7 * means["critic"] - 0.3 * means["entropy"], rtol=1e-4
    )
    for name in ("loss/actor", "loss/critic", "policy/entropy", "policy/kl", "policy/clipped"):
        np.testing.assert_allclose(metrics[name], means[name.split("/")[1]], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("through_limits", [False, True])
def test_advantages_are_those_of_a_loop_over_time(through_limits):
    config, played = replace(CONFIG, bootstrap_time_limits=through_limits), rollout()
    advantage, target = ppo.compute_advantages(POLICY, config, learner(config), played)
    steps = jax.tree.map(np.asarray, played.steps)
    last_value = 1.5 * np.asarray(played.last.observation.view[..., 0])
    for b, n in np.ndindex(B, N):
        future = 0.0
        for t in reversed(range(T)):
            ends = played.last.first[b] if t == T - 1 else steps.first[t + 1, b]
            following = last_value[b, n] if t == T - 1 else steps.extras.value[t + 1, b, n]
            counts = not ends
            if through_limits:
                following = steps.next_extras[t, b, n] if ends else following
                counts = steps.discount[t, b]
            delta = steps.reward[t, b, n] + 0.99 * counts * following - steps.extras.value[t, b, n]
            future = delta + 0.99 * 0.9 * (not ends) * future
            np.testing.assert_allclose(advantage[t, b, n], future, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(target[t, b, n], future + steps.extras.value[t, b, n], atol=1e-5)


def test_accumulated_gradients_are_those_of_the_whole_batch(monkeypatch):
    loss = partial(ppo.loss, POLICY, CONFIG, learner().hyper, jnp.arange(N))
    whole, metrics = ppo.accumulate_gradients(loss, PARAMS, batch(), KEY)
    monkeypatch.setattr(minibatches, "MICROBATCH", T * N)  # a column each
    parts, others = ppo.accumulate_gradients(loss, PARAMS, batch(), KEY)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), parts, whole)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), others, metrics)


def test_a_minibatch_is_standardised_and_takes_one_clipped_step_of_adam():
    config = replace(CONFIG, max_grad_norm=1e-3)
    start, whole, columns = learner(config), batch(), jnp.asarray([2, 0])
    now = columns, jnp.arange(N), KEY
    after, metrics = ppo.update_minibatch(POLICY, config, whole, 0.0, start, now)
    advantage = np.asarray(whole.advantage)[:, [2, 0]]
    own = minibatches.Batch(
        steps=jax.tree.map(lambda x: x[:, columns], whole.steps),
        advantage=jnp.asarray((advantage - advantage.mean()) / advantage.std()),
        target=whole.target[:, columns],
        memory=(),
    )
    loss = partial(ppo.loss, POLICY, config, start.hyper, jnp.arange(N))
    gradient = jax.grad(lambda params: loss(params, own, KEY)[0])(PARAMS)
    norm = np.sqrt(sum(float(g) ** 2 for g in gradient.values()))
    np.testing.assert_allclose(metrics["gradient/norm"], norm, rtol=1e-4)
    for name, g in gradient.items():
        g = float(g) * 1e-3 / norm
        np.testing.assert_allclose(after.params[name], PARAMS[name] - 1e-2 * g / (abs(g) + 1e-5), rtol=1e-4)


def test_a_gradient_step_is_what_the_optimiser_says():
    optimiser, params = optax.sgd(0.5, momentum=0.9), {"w": jnp.asarray([1.0, 2.0])}
    state, gradient = optimiser.init(params), {"w": jnp.asarray([0.2, -0.4])}
    params, state = gradient_step(optimiser, gradient, state, params)
    np.testing.assert_allclose(params["w"], [0.9, 2.2], rtol=1e-6)
    params, _ = gradient_step(optimiser, gradient, state, params)
    np.testing.assert_allclose(params["w"], [0.9 - 0.5 * 1.9 * 0.2, 2.2 + 0.5 * 1.9 * 0.4], rtol=1e-6)


@pytest.mark.parametrize(("reward", "least"), [(0.0, np.inf), (-4.0, 0.4)])
def test_the_floor_of_advantages_follows_the_largest_reward(reward, least):
    rewards = jnp.zeros((T, B, N)).at[1, 2, 0].set(reward)
    after, found = ppo.scale_floor(CONFIG, learner(), rewards)
    np.testing.assert_allclose(found, least)
    _, later = ppo.scale_floor(CONFIG, after, jnp.zeros((T, B, N)))
    np.testing.assert_allclose(later, least)  # a rollout without rewards forgets nothing
    assert ppo.scale_floor(replace(CONFIG, advantage_floor=0.0), learner(), rewards)[1] == 0.0
