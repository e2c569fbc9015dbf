"""Experience is collected from as many different episodes as there can be."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np

from sable import systems
from sable.config.schema import ActorCriticConfig, RunConfig
from sable.envs.suites.probes import PROBES
from sable.training.rollout import collect, open_situation
from sable.training.update import make_program
from tests.envs.test_wrappers import Walk

NUM_ENVS, LENGTH = 4, 12  # of episodes that last three steps at most


def opened(rounds, seed=0):
    """Where the episodes of a rollout begin, the first of every environment included."""
    env, key = Walk(), jax.random.key(0)
    system = systems.make("ippo", env.spec, ActorCriticConfig())
    learner = system.init(key, system.hyper)
    situation = open_situation(env, system, key, NUM_ENVS)
    gather = jax.jit(partial(collect, env, system, length=LENGTH, pool_size=rounds * NUM_ENVS))
    steps = gather(learner, situation, jax.random.key(seed))[1].steps
    return np.asarray(steps.observation.view[:, :, 0, 0])[np.asarray(steps.first)]


def test_every_start_of_a_rollout_is_another():
    places = opened(rounds=LENGTH)
    assert len(places) >= NUM_ENVS * LENGTH // 3
    assert len(np.unique(places)) == len(places)


def test_every_rollout_has_starts_of_its_own():
    one, other = opened(rounds=LENGTH), opened(rounds=LENGTH, seed=1)
    assert len(np.intersect1d(one, other)) == NUM_ENVS  # what both began with


def test_a_small_pool_serves_every_environment_all_the_same():
    places = opened(rounds=0)
    assert len(places) >= NUM_ENVS * LENGTH // 3
    assert len(np.unique(places)) == 2 * NUM_ENVS  # what they began with, and one start each


def test_every_environment_and_seed_acts_by_its_own_noise():
    """One policy in environments that are all alike and draw nothing: only the noise can tell them apart."""
    env, length = PROBES["sparse"], 8
    config = ActorCriticConfig(num_envs=8, rollout_length=length, num_minibatches=1)
    system = systems.make("ippo", env.spec, config)
    program = make_program(env, system, RunConfig(), config)
    one, other = (jax.jit(program.start)(seed).run for seed in (0, 1))
    other = replace(other, learner=one.learner, situation=one.situation)
    states = [jax.jit(program.update)(run).situation.env_state.env for run in (one, other)]
    actions = np.concatenate([state.actions[:, :length].reshape(8, -1) for state in states])
    assert len(np.unique(actions, axis=0)) == 16
