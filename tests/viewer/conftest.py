"""Teams that were never trained: what is watched needs no skill."""

import jax
import pytest

import sable
from sable import systems
from sable.runs.policy import Policy


@pytest.fixture(scope="session")
def untrained():
    """A function that makes the policy and the environment of a task and a system, with fresh parameters."""

    def make(task: str, system: str = "sable", **fields):
        config = sable.configure(task, system=system, **fields)
        env = sable.make_env(task)
        made = systems.make(system, env.spec, config.system)
        params = made.init(jax.random.key(1), made.hyper).params
        return Policy(config, env.spec, params, 0), env

    return make
