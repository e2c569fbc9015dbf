"""Contract 5: every system solves the probes within its power, and none what needs a memory it lacks.

How many of a test's seeds must reach the goal follows from how many failed of those measured (`cases.py`), so
that a test fails less than once in 1,000 runs whatever the machine's rounding.
"""

import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from sable.config.schema import Config
from sable.envs.suites.probes import PROBES
from sable.systems import ppo, sable
from sable.training import update as programs
from tests.learning.cases import CASES, RUN, SABLE, best_returns, failure_rate, required, sets_that_pass

FIRST = int(os.environ.get("FIRST_SEED", "0"))


def seeds(number: int) -> jax.Array:
    return jnp.arange(FIRST, FIRST + number, dtype=jnp.uint32)


QUICK = {"sable-recall", "ippo-memoryless-coordination", "ippo-sparse"}
ON_GPU = {"sable-recall", "sable-coordination", "sable-continuous", "sable-memoryless-recall"}
ON_GPU |= {"ippo-memoryless-coordination", "mappo-gru-recall", "hasac-continuous", "qmix-recall"}


def case(name: str):
    """A case of a test; in the slow tier unless it is quick, since each compiles for ten seconds or more."""
    marks = [pytest.mark.slow] * (name not in QUICK) + [pytest.mark.gpu] * (name in ON_GPU)
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [case(name) for name in CASES])
def test_enough_seeds_reach_the_goal(name):
    reached = best_returns(CASES[name], seeds(CASES[name].num_seeds))
    best = CASES[name].probe.optimal_return
    if "memoryless" in name:  # what can be known without a memory, and no more
        best = CASES[name].probe.memoryless_return + 0.1
    assert max(reached) <= best + 1e-6, reached
    assert sum(value > CASES[name].goal for value in reached) >= CASES[name].enough(len(reached)), reached


def test_what_is_asked_of_seeds_follows_from_those_measured():
    assert failure_rate(0, 32) == pytest.approx(1 - 0.05 ** (1 / 32))
    assert failure_rate(0, 128) == pytest.approx(0.0231, abs=1e-4)
    assert required(6, 0, 32) == 3 and required(6, 0, 128) == 4
    assert required(6, 64, 128) == 0, "of seeds of which half fail nothing can be asked"


def test_sets_of_seeds_pass_by_what_is_asked_of_them():
    case = replace(CASES["sable-bandit"], failed=3, measured=20)  # two sets of six and eight seeds too few
    assert case.num_seeds == 18 and sets_that_pass(case, [0, 1, 2]) == (1, 1)
    case = replace(case, failed=5, measured=128)
    assert case.num_seeds == 6 and case.enough(6) == 3
    assert sets_that_pass(case, [0, 1, 2, 3, 126]) == (20, 21), "the first set of six has four that fail"
    assert sets_that_pass(case, [1, 6, 7, 8, 9], first=6) == (20, 21)


def test_every_case_asks_something():
    assert all(case.enough(case.num_seeds) >= 2 for case in CASES.values())


@pytest.mark.slow
@pytest.mark.parametrize(("bootstrap", "value"), [(True, 2.0), (False, 1.0)])
def test_the_value_of_a_time_limit_is_the_future_it_cuts_off_or_nothing(bootstrap, value):
    """One step that pays 1 and runs out of time, discount 1/2: 1 + 1/2 + 1/4 + ... = 2 with bootstrapping."""
    env = replace(PROBES["bandit"], pay=lambda secret, time, actions: jnp.ones(2), truncates=True)
    config = replace(SABLE, bootstrap_time_limits=bootstrap, discount=0.5)
    policy = sable.make_policy(env.spec, config)
    program = programs.make_program(env, ppo.make(policy, config, env.spec), Config(RUN, config))
    state = jax.jit(programs.map_seeds(program.start))(seeds(6)).run
    state = jax.jit(jax.vmap(program.run_updates, (0, None)))(state, jnp.int32(80))
    judge = jax.jit(
        jax.vmap(
            lambda s: policy.value(
                s.learner.params,
                s.rollout_state.timestep.observation,
                policy.initial_memory(config.num_envs),
                s.learner.order,
            )
        )
    )
    # Half of what tells the two apart: a value that is off by that much learnt the other.
    assert jnp.median(jnp.abs(judge(state) - value).max(axis=(1, 2))) < 0.5
