"""Accumulated gradients, and bfloat16, learn what a whole batch in float32 does."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from sable.kernels import block, retention
from sable.ops import trees as tree
from sable.systems import minibatches, ppo
from sable.systems import sable as sable_system
from tests.systems.conftest import marks, play

KEY = jax.random.key(0)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=marks(mode)) for mode in ("sable", "ippo")])
def test_accumulated_gradients_learn_as_the_whole_batch_does(monkeypatch, mode):
    played = play(mode)
    whole, metrics = played.learn(played.learner, played.rollout, jax.random.key(1))
    monkeypatch.setattr(minibatches, "MICROBATCH", 1)
    learn = jax.jit(ppo.make(played.policy, played.config, played.spec).learn)
    sliced, other = learn(played.learner, played.rollout, jax.random.key(1))
    for a, b in zip(jax.tree.leaves(sliced.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for name in metrics:
        np.testing.assert_allclose(other[name], metrics[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_microbatches_are_equal_and_as_few_as_may_be():
    assert minibatches.num_microbatches(64, minibatches.MICROBATCH // 64) == 1
    assert minibatches.num_microbatches(64, minibatches.MICROBATCH // 63) == 2
    assert minibatches.num_microbatches(6, minibatches.MICROBATCH // 2) == 3
    assert minibatches.num_microbatches(7, minibatches.MICROBATCH // 2) == 7  # a prime number of columns
    assert minibatches.num_microbatches(4, 10 * minibatches.MICROBATCH) == 4  # a column is never cut


@pytest.mark.xdist_group("ippo")
def test_learning_rates_fall_linearly_to_zero_over_the_horizon():
    """Half a horizon later a single step of Adam is half as long, and after it none is taken."""
    played = play("ippo")
    update = played.config.num_envs * played.config.rollout_length
    config = replace(played.config, num_epochs=1, num_minibatches=1, learning_rate_horizon=4 * update)
    system = ppo.make(played.policy, config, played.spec)
    start = system.init(KEY, system.hyper)
    start, learn = replace(start, params=played.learner.params), jax.jit(system.learn)

    def moved(num_updates):
        after, _ = learn(replace(start, num_updates=num_updates), played.rollout, KEY)
        return jax.tree.map(lambda a, b: np.asarray(a - b), after.params, start.params)

    whole, half, rest = (jax.tree.leaves(moved(k)) for k in (0, 2, 4))
    assert all(np.abs(x).max() > 1e-5 for x in whole)
    for a, b, none in zip(whole, half, rest, strict=True):
        np.testing.assert_allclose(b, a / 2, atol=1e-6)
        assert not none.any()


@pytest.mark.slow
@pytest.mark.xdist_group("sable")
def test_bfloat16_computes_nearly_the_same_and_keeps_float32_parameters():
    played = play("sable")
    policy = sable_system.make_policy(played.spec, replace(played.config, compute_dtype="bfloat16"))
    given = played.rollout.start_memory, played.learner.order, jax.random.key(0)

    def score(policy):
        return jax.jit(policy.evaluate_actions)(
            played.learner.params, policy.prepare(played.rollout.steps), *given
        )

    exact, rounded = score(played.policy), score(policy)
    for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(exact), strict=True):
        assert a.dtype == b.dtype == np.float32
        assert 0 < np.abs(a - b).max() < 0.05 * (1 + np.abs(b).max())
    system = ppo.make(policy, replace(played.config, compute_dtype="bfloat16"), played.spec)
    learner, metrics = jax.jit(system.learn)(played.learner, played.rollout, jax.random.key(1))
    assert tree.all_finite((learner.params, metrics))
    assert {x.dtype for x in jax.tree.leaves(learner.params)} == {np.dtype("float32")}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.xdist_group("sable")
def test_bfloat16_is_as_near_by_the_kernels_as_by_the_layers(monkeypatch):
    """On a network that the kernels can handle, both are off in the mean by about as much."""
    played = play("sable")
    config = replace(played.config, embed_dim=32, num_heads=2)
    exact = sable_system.make_policy(played.spec, config)
    params = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(KEY, x.shape), exact.init(KEY))
    memory = exact.initial_memory(played.rollout.steps.first.shape[1])
    given = memory, played.learner.order, KEY

    def answers(policy, by_kernels):
        for kernel in (block, retention):
            monkeypatch.setattr(kernel, "use_kernel", lambda width: by_kernels)
        steps = policy.prepare(played.rollout.steps)
        return jax.tree.leaves(jax.jit(lambda *given: policy.evaluate_actions(*given))(params, steps, *given))

    truth = answers(exact, by_kernels=False)
    rounded = sable_system.make_policy(played.spec, replace(config, compute_dtype="bfloat16"))
    errors = [
        [np.abs(a - b).mean() for a, b in zip(answers(rounded, by_kernels), truth, strict=True)]
        for by_kernels in (True, False)
    ]
    for one, other in zip(*errors, strict=True):
        assert 0 < one < 1.2 * other
