"""The cost of an update grows linearly with agents and with time, and its program does not grow at all."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

from sable import envs, systems
from sable.config.schema import Config, RunConfig, SableConfig
from sable.training import update as programs


def lowered(num_agents: int, rollout_length: int):
    """One update of null/<N>ag, traced."""
    config = SableConfig(num_envs=2, rollout_length=rollout_length, num_epochs=1, num_minibatches=1)
    env = envs.make(f"null/{num_agents}ag")
    system = systems.make("sable", env.spec, config)
    program = programs.make_program(env, system, Config(RunConfig(), config))
    state = jax.eval_shape(partial(jax.lax.map, program.start), jnp.zeros(1, jnp.uint32))
    return jax.jit(jax.vmap(program.run_updates, (0, None))).lower(state.run, jnp.int32(1))


@cache
def temporaries(num_agents: int, rollout_length: int) -> int:
    """XLA's own count of an update's temporary memory."""
    return lowered(num_agents, rollout_length).compile().memory_analysis().temp_size_in_bytes


def test_twice_the_agents_take_at_most_2_1_times_the_memory():
    assert temporaries(256, 16) <= 2.1 * temporaries(128, 16)


@pytest.mark.slow
def test_twice_the_time_takes_at_most_2_1_times_the_memory():
    assert temporaries(128, 32) <= 2.1 * temporaries(128, 16)


def test_the_program_of_512_agents_is_no_longer_than_that_of_32():
    """Compile time follows the length of the program; docs/results.md has the seconds."""
    few, many = (len(lowered(num_agents, 8).as_text().splitlines()) for num_agents in (32, 512))
    assert many <= 1.1 * few
