"""Experience is collected from as many different episodes as there can be."""

import gzip
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from sable import systems
from sable.config.schema import ActorCriticConfig, Config, RunConfig
from sable.envs.make import make
from sable.envs.suites.probes import PROBES
from sable.envs.tasks import list_tasks, parse
from sable.training.rollout import collect, init_rollout_state, resets_per_env
from sable.training.update import make_program
from tests.envs.test_wrappers import Walk

RESULTS = Path(__file__).resolve().parents[2] / "results"
FAST = ["probe/recall", "probe/observation"]
REST = [task.id for task in list_tasks() if task.id not in FAST]
NUM_ENVS, LENGTH = 4, 12  # of episodes that last three steps at most


def opened(rounds=0, seed=0):
    """Where the episodes of a rollout begin, the first of every environment included."""
    env, key = Walk(), jax.random.key(0)
    system = systems.make("ippo", env.spec, ActorCriticConfig())
    learner = system.init(key, system.hyper)
    rollout_state = init_rollout_state(env, system, key, NUM_ENVS)
    gather = jax.jit(partial(collect, env, system, length=LENGTH, reset_pool_size=rounds * NUM_ENVS))
    steps = gather(learner, rollout_state, jax.random.key(seed))[1].steps
    return np.asarray(steps.observation.view[:, :, 0, 0])[np.asarray(steps.first)]


def test_every_start_of_a_rollout_is_another():
    places = opened()
    assert len(places) >= NUM_ENVS * LENGTH // 3
    assert len(np.unique(places)) == len(places)


def test_every_rollout_has_starts_of_its_own():
    one, other = opened(), opened(seed=1)
    assert len(np.intersect1d(one, other)) == NUM_ENVS  # what both began with


def test_a_small_pool_serves_every_environment_all_the_same():
    places = opened(rounds=1)
    assert len(places) >= NUM_ENVS * LENGTH // 3
    assert len(np.unique(places)) == 2 * NUM_ENVS  # what they began with, and one start each


def test_an_environment_takes_its_starts_in_turn():
    """Those of an environment whose episodes are short are not gone before half of the rollout is."""
    places = opened(rounds=LENGTH // 3)
    assert len(np.unique(places)) == len(places)


def share_of_repeats(first, rounds):
    """Of the episodes that begin where `first` [T, B] is true: those that find all starts taken."""
    episodes = first.sum(0)
    return np.maximum(episodes - rounds, 0).sum() / max(episodes.sum(), 1)


@pytest.mark.parametrize(
    "task",
    [*FAST, *(pytest.param(task, marks=pytest.mark.slow) for task in REST)],
)
def test_one_episode_in_twenty_at_most_repeats_a_start(task):
    """Whatever a team that chooses at random comes to."""
    env, key, num_envs, length = make(task), jax.random.key(0), 8, 128
    config = ActorCriticConfig()
    system = systems.make("ippo", env.spec, config)
    learner = system.init(key, system.hyper)
    rollout_state = init_rollout_state(env, system, key, num_envs)
    gather = jax.jit(partial(collect, env, system, length=length, reset_pool_size=0))
    rollout_state, *_ = gather(learner, rollout_state, key)
    _, rollout, _ = gather(learner, rollout_state, jax.random.key(1))
    rounds = resets_per_env(num_envs, length, 0, env.spec.time_limit)
    first = np.append(rollout.steps.first[1:], rollout.last.first[None], axis=0)
    assert share_of_repeats(first, rounds) <= 1 / 20


def test_trained_teams_repeat_no_more_of_their_starts():
    """Their episodes are shorter. Where all lasted as long as the mean of a row we keep, each has a start."""
    seen = set()
    for path in RESULTS.rglob("metrics.jsonl.gz"):
        config = json.loads(path.with_name("config.json").read_text())
        task, length = parse(config["run"]["task"]), config["config"]["rollout_length"]
        rounds = resets_per_env(config["config"]["num_envs"], length, 0, task.time_limit)
        rows = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
        lasted = min(row["rollout/length"] for row in rows if row.get("rollout/length"))
        assert length / lasted <= rounds, (task.id, lasted)
        seen.add(task.suite)
    assert {"connector", "lbf", "rware"} <= seen


def test_every_environment_and_seed_acts_by_its_own_noise():
    """One policy in environments that are all alike and draw nothing: only the noise can tell them apart."""
    env, length = PROBES["sparse"], 8
    config = ActorCriticConfig(num_envs=8, rollout_length=length, num_minibatches=1)
    system = systems.make("ippo", env.spec, config)
    program = make_program(env, system, Config(RunConfig(), config))
    one, other = (jax.jit(program.start)(seed).run for seed in (0, 1))
    other = replace(other, learner=one.learner, rollout_state=one.rollout_state)
    states = [jax.jit(program.update)(run).rollout_state.env_state.env for run in (one, other)]
    actions = np.concatenate([state.actions[:, :length].reshape(8, -1) for state in states])
    assert len(np.unique(actions, axis=0)) == 16
