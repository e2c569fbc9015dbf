"""QMIX learns from the targets it says it does, and explores as it says it does."""

import typing as tp
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sable.config.schema import QMIXConfig
from sable.envs.suites.probes import PROBES
from sable.nets.qmix import Mixer, agent_q
from sable.systems import qmix
from sable.training.rollout import collect, init_rollout_state
from sable.types import EnvSpec, Observation, PyTree, Rollout, Transition

LENGTH = 4
SPEC = EnvSpec(num_agents=2, view_size=3, num_actions=3, time_limit=9)
# Replay holds one sequence of one environment: what is sampled is what was put in last.
ONE = QMIXConfig(
    num_envs=1,
    rollout_length=LENGTH,
    num_updates_per_rollout=1,
    batch_size=2,
    replay_size=LENGTH,
    sequence_length=LENGTH,
    warmup_sequences=1,
    polyak=0.25,
    q_layers=(6, 5),
    recurrent_size=4,
    mixer_size=3,
)

MODES = {
    "views": (SPEC, ONE),
    "state": (replace(SPEC, state_size=5), ONE),
    "hard": (SPEC, replace(ONE, hard_target_update=True, target_update_period=2)),
    "patient": (SPEC, replace(ONE, num_envs=2, rollout_length=2, replay_size=8, warmup_sequences=3)),
}


class Built(tp.NamedTuple):
    spec: EnvSpec
    system: tp.Any
    learner: qmix.QMIXLearner
    learn: tp.Callable


@cache
def build(mode: str) -> Built:
    spec, config = MODES[mode]
    system = qmix.make(spec, config)
    learner = jax.jit(system.init)(jax.random.key(0), system.hyper)
    return Built(spec, system, learner, jax.jit(system.learn))


def learn(built: Built, learner: PyTree, *rollouts: Rollout) -> tuple[qmix.QMIXLearner, dict]:
    metrics = {}
    for i, rollout in enumerate(rollouts):
        learner, metrics = built.learn(learner, rollout, jax.random.key(i))
    return learner, metrics


def random_rollout(spec: EnvSpec, num_envs: int = 1, length: int = LENGTH, seed: int = 0) -> Rollout:
    """Anything at all, without the opening of an episode."""
    rng, lead = np.random.default_rng(seed), (length, num_envs)
    team = (*lead, spec.num_agents)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    legal = rng.random((*team, spec.num_actions)) < 0.6
    legal[..., 0] |= ~legal.any(-1)
    observation = Observation(
        view=normal(*team, spec.view_size),
        action_mask=jnp.asarray(legal),
        step_count=jnp.zeros(lead, jnp.int32),
        state=normal(*lead, spec.state_size) if spec.state_size else (),
    )
    steps = Transition(
        observation=observation,
        action=jnp.asarray(rng.integers(0, spec.num_actions, team), jnp.int32),
        reward=3 * normal(*team),
        discount=jnp.ones(lead),
        first=jnp.zeros(lead, bool),
        extras=(),
        next_extras=(),
    )
    nothing: tp.Any = ()
    return Rollout(steps=steps, start_memory=(), last=nothing, last_memory=())


def opened(rollout: Rollout, time: int) -> Rollout:
    """The rollout with an episode that opens at `time`."""
    return replace(rollout, steps=replace(rollout.steps, first=rollout.steps.first.at[time].set(True)))


def seen_otherwise(rollout: Rollout, time: int) -> Rollout:
    """The rollout with another observation at `time`."""
    other = random_rollout(build("state").spec, seed=1).steps.observation
    observation = jax.tree.map(lambda x, y: x.at[time].set(y[time]), rollout.steps.observation, other)
    return replace(rollout, steps=replace(rollout.steps, observation=observation))


def equal(a: PyTree, b: PyTree) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, jax.device_get(a), jax.device_get(b))))


def another(learner: qmix.QMIXLearner) -> qmix.QMIXLearner:
    """The learner with random targets that are not what it has learned."""
    rng = np.random.default_rng(2)
    target = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), learner.target)
    return replace(learner, target=target)


@pytest.mark.parametrize("mode", ["views", "state"])
def test_the_loss_is_the_squared_error_of_double_q_targets_of_the_mean_reward_cut_where_episodes_end(mode):
    built = build(mode)
    learner, spec = another(built.learner), built.spec
    rollout = opened(random_rollout(spec), 2)
    _, metrics = learn(built, learner, rollout)

    steps = jax.tree.map(lambda x: np.asarray(x)[:, 0], rollout.steps)
    view = steps.observation.view
    state = steps.observation.state if spec.state_size else view.reshape(LENGTH, -1)
    net, mixer = agent_q(ONE, spec), Mixer(spec.num_agents, ONE.mixer_size)
    judge, mix = jax.jit(net.apply), jax.jit(mixer.apply)

    def along(params):  # one step after another, by the definition
        carry, values = np.zeros((1, 2, ONE.recurrent_size), np.float32), []
        for t in range(LENGTH):
            carry = np.zeros_like(carry) if steps.first[t] else carry
            q, carry = judge(params, view[t][None, None], carry, np.zeros((1, 1), bool))
            values.append(np.asarray(q[0, 0]))
        return values

    q, target_q, errors = along(learner.params), along(learner.target["agent"]), []
    for t in range(LENGTH - 1):
        legal_q = np.where(steps.observation.action_mask[t + 1], q[t + 1], -np.inf)
        next_q = np.array([target_q[t + 1][i, legal_q[i].argmax()] for i in range(2)])
        next_value = mix(learner.target["mixer"], next_q[None], state[t + 1][None])[0]
        target = steps.reward[t].mean() + (0.0 if steps.first[t + 1] else 0.99 * next_value)
        taken = np.array([q[t][i, steps.action[t, i]] for i in range(2)])
        errors.append(mix(learner.mixer, taken[None], state[t][None])[0] - target)
    np.testing.assert_allclose(metrics["loss/q"], np.square(errors).mean(), rtol=1e-4)


@pytest.mark.parametrize("ends", [True, False])
def test_what_is_seen_after_an_episodes_end_teaches_nothing_about_it(ends):
    """The last step of a sequence serves its targets alone, or nothing where it opens another episode."""
    built = build("state")
    rollout = random_rollout(built.spec)
    rollout = opened(rollout, LENGTH - 1) if ends else rollout
    usual, _ = learn(built, another(built.learner), rollout)
    other, _ = learn(built, another(built.learner), seen_otherwise(rollout, LENGTH - 1))
    assert equal(usual.params, other.params) == equal(usual.mixer, other.mixer) == ends


def test_gradients_are_clipped_to_the_global_norm_over_both_networks():
    built = build("views")

    def applied(max_grad_norm):
        hyper = replace(built.learner.hyper, max_grad_norm=jnp.float32(max_grad_norm))
        learner, metrics = learn(built, replace(built.learner, hyper=hyper), random_rollout(built.spec))
        moments = learner.opt_state[1][0].mu
        assert set(moments) == {"agent", "mixer"}
        return optax.tree.norm(moments) / 0.1, metrics[
            "gradient/norm"
        ]  # Adam's first moment is a tenth of it

    clipped, norm = applied(1e-3)
    assert norm > 1e-2
    np.testing.assert_allclose(clipped, 1e-3, rtol=1e-3)
    whole, norm = applied(1e3)
    np.testing.assert_allclose(whole, norm, rtol=1e-3)


def test_targets_start_as_copies_in_buffers_of_their_own():
    learner = build("views").learner
    networks = {"agent": learner.params, "mixer": learner.mixer}
    assert equal(networks, learner.target)
    for learned, target in zip(jax.tree.leaves(networks), jax.tree.leaves(learner.target), strict=True):
        assert learned.unsafe_buffer_pointer() != target.unsafe_buffer_pointer()


def test_soft_targets_move_a_little_way_to_what_was_learned_in_every_gradient_step():
    built = build("views")
    before = another(built.learner)
    after, _ = learn(built, before, random_rollout(built.spec))
    assert not equal(after.params, before.params)
    learned = {"agent": after.params, "mixer": after.mixer}
    expected = jax.tree.map(
        lambda new, old: 0.25 * np.asarray(new) + 0.75 * np.asarray(old), learned, before.target
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), after.target, expected)


def test_hard_targets_are_copied_once_a_period_and_rest_between():
    built = build("hard")
    rollout = random_rollout(built.spec)
    first, _ = learn(built, built.learner, rollout)
    assert equal(first.target, built.learner.target)
    second, _ = learn(built, first, rollout)
    assert equal(second.target, {"agent": second.params, "mixer": second.mixer})
    third, _ = learn(built, second, rollout)
    assert equal(third.target, second.target) and not equal(third.params, second.params)


def test_every_parameter_receives_a_gradient():
    built = build("views")
    learner, _ = learn(built, built.learner, *(random_rollout(built.spec, seed=seed) for seed in range(4)))
    for path, moment in jax.tree.leaves_with_path(learner.opt_state[1][0].mu):
        assert (np.asarray(moment) != 0).mean() >= 0.5, jax.tree_util.keystr(path)


def test_nothing_is_learned_before_replay_holds_a_sequence_of_each_environment_and_enough_in_all():
    """Sequences of 4 steps from 2 environments, 12 steps in all: 6 of each, or 3 rollouts of 2."""
    built = build("patient")
    learner = built.learner
    for rollouts in range(1, 5):
        after, metrics = learn(
            built, learner, random_rollout(built.spec, num_envs=2, length=2, seed=rollouts)
        )
        assert equal(after.params, learner.params) == equal(after.target, learner.target) == (rollouts < 3)
        assert int(after.num_updates) == max(rollouts - 2, 0)
        assert int(after.env_steps) == 4 * rollouts
        assert (float(metrics["gradient/norm"]) > 0) == (rollouts >= 3)
        learner = after


def test_replay_keeps_no_more_than_learning_looks_at():
    stored = build("state").learner.replay.experience
    shapes = sorted(leaf.shape[2:] for leaf in jax.tree.leaves(stored))
    view, legal, action, state, reward, first = (2, 3), (2, 3), (2,), (5,), (), ()
    assert shapes == sorted([view, legal, action, state, reward, first])


def test_epsilon_falls_with_every_environment_step_to_its_floor():
    built = build("views")
    hyper = replace(built.learner.hyper, epsilon_decay=jnp.float32(0.1), epsilon_min=jnp.float32(0.15))
    learner, epsilons = replace(built.learner, hyper=hyper), []
    for _ in range(4):
        epsilons.append(float(qmix.epsilon(learner)))
        learner, metrics = learn(built, learner, random_rollout(built.spec))
        assert metrics["exploration/epsilon"] == pytest.approx(epsilons[-1])
    assert epsilons == pytest.approx([1.0, 0.6, 0.2, 0.15])


@cache
def acted(epsilon: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(legal, explored actions, exploited actions) of many environments that see the same."""
    built, num_envs = build("views"), 3000
    observation = jax.tree.map(
        lambda x: jnp.repeat(x[0], num_envs, axis=0), random_rollout(built.spec, seed=3).steps.observation
    )
    legal = jnp.broadcast_to(jnp.array([[True, False, True], [True, True, True]]), (num_envs, 2, 3))
    observation = replace(observation, action_mask=legal)
    hyper = replace(built.learner.hyper, epsilon_min=jnp.float32(epsilon), epsilon_decay=jnp.float32(1e9))
    learner = replace(built.learner, hyper=hyper, env_steps=jnp.int32(1))
    memory, key = built.system.initial_memory(num_envs), jax.random.key(4)
    explored = jax.jit(built.system.explore)(learner, observation, memory, key)
    exploited = jax.jit(built.system.act)(learner.params, observation, memory, key)
    assert equal(explored.memory, exploited.memory)
    return np.asarray(legal), np.asarray(explored.action), np.asarray(exploited.action)


def shares(action: np.ndarray) -> np.ndarray:
    return np.stack([(action == a).mean(0) for a in range(3)], axis=-1)


def test_at_epsilon_one_legal_actions_are_taken_uniformly_and_others_never():
    _, explored, _ = acted(1.0)
    np.testing.assert_allclose(shares(explored), [[1 / 2, 0, 1 / 2], [1 / 3, 1 / 3, 1 / 3]], atol=0.04)
    assert shares(explored)[0, 1] == 0


def test_at_epsilon_zero_exploring_is_exploiting_which_takes_the_best_legal_action():
    legal, explored, exploited = acted(0.0)
    np.testing.assert_array_equal(explored, exploited)
    built = build("views")
    view = random_rollout(built.spec, seed=3).steps.observation.view[0][None]
    carry = np.zeros((1, 2, ONE.recurrent_size), np.float32)
    q, _ = jax.jit(agent_q(ONE, built.spec).apply)(built.learner.params, view, carry, np.zeros((1, 1), bool))
    best = np.where(legal[0], np.asarray(q)[0, 0], -np.inf).argmax(-1)
    assert (exploited == best).all()


def test_each_agent_explores_for_itself():
    _, explored, exploited = acted(0.5)
    off = explored != exploited
    np.testing.assert_allclose(off.mean(0), [0.5 * 1 / 2, 0.5 * 2 / 3], atol=0.04)
    assert off.all(-1).mean() == pytest.approx(off.mean(0).prod(), abs=0.03)


def test_memory_while_acting_is_that_of_the_sequence_across_episodes():
    env, config = PROBES["recall"], replace(ONE, num_envs=3)
    system = qmix.make(env.spec, config)

    @jax.jit
    def play(key):
        learner = system.init(key, system.hyper)
        rollout_state = init_rollout_state(env, system, key, 3)
        _, rollout, _ = collect(env, system, learner, rollout_state, key, length=7, reset_pool_size=3)
        return learner.params, rollout

    with jax.numpy_rank_promotion("allow"):  # environments are not ours to hold to it
        params, rollout = play(jax.random.key(5))
    steps = rollout.steps
    assert steps.first[4].all() and steps.first.sum() == 6
    _, carry = jax.jit(agent_q(config, env.spec).apply)(
        params, steps.observation.view, system.initial_memory(3), steps.first
    )
    np.testing.assert_allclose(rollout.last_memory, carry, atol=1e-6)
