import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.ops.returns import discounted_sum, gae


def loop_gae(reward, value, next_value, bootstrap, trace, discount, lam):
    """(advantage, target) by the definition, element by element."""
    advantage = np.zeros(reward.shape)
    num_steps, num_envs, num_agents = reward.shape
    for b in range(num_envs):
        for n in range(num_agents):
            future = 0.0
            for t in reversed(range(num_steps)):
                delta = reward[t, b, n] + discount * bootstrap[t, b] * next_value[t, b, n] - value[t, b, n]
                future = delta + discount * lam * trace[t, b] * future
                advantage[t, b, n] = future
    return advantage, advantage + value


def random_rollout(seed, T=13, B=4, N=3):
    """The arguments of gae before discount, for a rollout with ends, time limits and plain steps."""
    random = np.random.default_rng(seed)
    reward, value, next_value = random.normal(size=(3, T, B, N)).astype(np.float32)
    ended, limited = random.random((2, T, B)) < 0.2
    return {
        "reward": reward,
        "value": value,
        "next_value": next_value,
        "bootstrap": ~ended,
        "trace": ~(ended | limited),
    }


def hand(bootstrap, trace, discount=0.5, lam=0.5):
    """Three steps of one environment and one agent: reward 1, 2, 3; value 1, 1, 1; next value 4, 8, 16."""
    reward, value, next_value = jnp.array([[1.0, 2, 3], [1, 1, 1], [4, 8, 16]]).reshape(3, 3, 1, 1)
    bootstrap, trace = jnp.array([bootstrap, trace]).reshape(2, 3, 1)
    advantage, target = gae(reward, value, next_value, bootstrap, trace, discount, lam)
    np.testing.assert_allclose(target, advantage + 1)
    return advantage[:, 0, 0].tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("discount, lam", [(0.99, 0.9), (1.0, 1.0), (0.9, 0.0), (0.0, 0.9)])
def test_gae_equals_the_loop_across_random_resets(seed, discount, lam):
    rollout = random_rollout(seed)
    truth = loop_gae(**rollout, discount=discount, lam=lam)
    ours = gae(**jax.tree.map(jnp.asarray, rollout), discount=discount, lam=lam)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), ours, truth)


def test_gae_equals_hand_computed_numbers():
    # delta = (1 + 2 - 1, 2 + 4 - 1, 3 + 8 - 1) = (2, 5, 10); A = (2 + 7.5 / 4, 5 + 10 / 4, 10)
    assert hand(bootstrap=[1, 1, 1], trace=[1, 1, 1]) == [3.875, 7.5, 10.0]


def test_a_time_limit_treated_as_an_end_drops_the_next_value():
    # Step 1 is the last of its episode: delta[1] = 2 - 1, and nothing comes back from step 2.
    assert hand(bootstrap=[1, 0, 1], trace=[1, 0, 1]) == [2.25, 1.0, 10.0]


def test_a_time_limit_bootstrapped_keeps_the_next_value_and_still_cuts_the_trace():
    # delta[1] = 2 + 8 / 2 - 1 with the value of the true last observation; nothing comes back from step 2.
    assert hand(bootstrap=[1, 1, 1], trace=[1, 0, 1]) == [3.25, 5.0, 10.0]


def test_nothing_after_a_boundary_reaches_the_steps_before_it():
    rollout = jax.tree.map(jnp.asarray, random_rollout(0))
    trace = rollout["trace"].at[5].set(False)

    def before(reward, value, next_value):
        return gae(reward, value, next_value, rollout["bootstrap"], trace, 0.99, 0.9)[0][:6].sum()

    arguments = rollout["reward"], rollout["value"], rollout["next_value"]
    for gradient in jax.grad(before, argnums=(0, 1, 2))(*arguments):
        assert gradient[:6].any() and not gradient[6:].any()


def test_lambda_one_gives_discounted_returns_and_lambda_zero_one_step_errors():
    rollout = jax.tree.map(jnp.asarray, random_rollout(1))
    reward, value = rollout["reward"], rollout["value"]
    next_value = rollout["next_value"].at[:-1].set(value[1:])
    ones = jnp.ones(reward.shape[:2])
    _, target = gae(reward, value, next_value, ones, ones, 0.9, 1.0)
    horizon = reward.at[-1].add(0.9 * next_value[-1])
    np.testing.assert_allclose(target, discounted_sum(horizon, 0.9 * ones[..., None]), rtol=1e-5, atol=1e-5)
    advantage, _ = gae(reward, value, next_value, ones, ones, 0.9, 0.0)
    np.testing.assert_allclose(advantage, reward + 0.9 * next_value - value, rtol=1e-5, atol=1e-5)


def test_discount_and_lambda_may_be_traced_and_batched():
    rollout = jax.tree.map(jnp.asarray, random_rollout(2))
    discounts, lams = jnp.array([0.9, 0.99]), jnp.array([0.5, 0.95])
    together, _ = jax.jit(jax.vmap(lambda discount, lam: gae(**rollout, discount=discount, lam=lam)))(
        discounts, lams
    )
    for seed in range(2):
        alone, _ = gae(**rollout, discount=float(discounts[seed]), lam=float(lams[seed]))
        np.testing.assert_allclose(together[seed], alone, rtol=1e-5, atol=1e-5)
