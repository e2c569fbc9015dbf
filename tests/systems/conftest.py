"""Small rollouts of every mode of every on-policy system, each compiled once."""

import importlib
import typing as tp
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import pytest
from jax.flatten_util import ravel_pytree

from sable.config.schema import ActorCriticConfig, MATConfig, PPOConfig, SableConfig
from sable.envs.suites.probes import PROBES
from sable.systems import ppo
from sable.training.rollout import collect, init_rollout_state
from sable.types import EnvSpec, Observation, PyTree, Rollout

SMALL = {"num_envs": 4, "rollout_length": 6, "num_epochs": 3, "num_minibatches": 2}
NARROW = {"embed_dim": 8, "num_heads": 2}
# On a GPU heads that its kernels take, so that acting and learning go through them; narrow ones never do.
WIDTH = {"embed_dim": 32, "num_heads": 2} if jax.default_backend() == "gpu" else NARROW
# Shaken as much at any width: more would amplify rounding beyond what the contracts allow, kernels or not.
SHAKE = 0.1 * (NARROW["embed_dim"] / WIDTH["embed_dim"]) ** 0.5
LAYERS = {"policy_layers": (8, 8), "critic_layers": (8, 8), "recurrent_size": 8}
MODES = {
    "sable": SableConfig(**SMALL, **WIDTH, num_blocks=2),
    "sable-memoryless": SableConfig(**SMALL, **WIDTH, memory=False),
    "sable-per_epoch": SableConfig(**SMALL, **WIDTH, agent_order="per_epoch"),
    "sable-natural": SableConfig(**SMALL, **WIDTH, agent_order="natural"),
    "sable-token_positions": SableConfig(**SMALL, **WIDTH, positions="token"),
    "sable-memoryless-agent_chunk": SableConfig(**SMALL, **WIDTH, memory=False, agent_chunk=1),
    "sable-time_limits": SableConfig(**SMALL, **NARROW, bootstrap_time_limits=True),
    "sable-continuous": SableConfig(**SMALL, **WIDTH),
    "sable-continuous-memoryless": SableConfig(**SMALL, **NARROW, memory=False),
    "sable-bfloat16": SableConfig(**SMALL, **WIDTH, num_blocks=2, compute_dtype="bfloat16"),
    "sable-memoryless-bfloat16": SableConfig(**SMALL, **WIDTH, memory=False, compute_dtype="bfloat16"),
    "sable-natural-bfloat16": SableConfig(**SMALL, **WIDTH, agent_order="natural", compute_dtype="bfloat16"),
    "sable-continuous-bfloat16": SableConfig(**SMALL, **WIDTH, compute_dtype="bfloat16"),
    "mat": MATConfig(**SMALL, **WIDTH, num_blocks=2),
    "mat-per_epoch": MATConfig(**SMALL, **WIDTH, agent_order="per_epoch"),
    "mat-continuous": MATConfig(**SMALL, **WIDTH, rms_norm=True, swiglu=True),
    "ippo": ActorCriticConfig(**SMALL, **LAYERS),
    "ippo-memory": ActorCriticConfig(**SMALL, **LAYERS, memory=True),
    "ippo-continuous-memory-chunks": ActorCriticConfig(**SMALL, **LAYERS, memory=True, recurrent_chunk=3),
    "mappo-continuous": ActorCriticConfig(**SMALL, **LAYERS),
    "mappo-memory-chunks": ActorCriticConfig(**SMALL, **LAYERS, memory=True, recurrent_chunk=2),
    "mappo-memory-time_limits": ActorCriticConfig(**SMALL, **LAYERS, memory=True, bootstrap_time_limits=True),
}


QUICK = {"sable", "sable-bfloat16", "ippo-continuous-memory-chunks"}
"""Modes for `make test`; the others, each of which compiles for some ten seconds, for `make test-all`."""


@dataclass(frozen=True)
class Played:
    """A system that has played a little: short episodes, so that boundaries lie inside the rollout."""

    mode: str
    config: PPOConfig
    spec: EnvSpec
    policy: ppo.Policy
    learn: tp.Callable
    learner: PyTree
    rollout: Rollout
    finals: Observation
    """What followed each step, before an episode's end opened another; [T, B]."""

    @property
    def memory(self) -> bool:
        return getattr(self.config, "memory", False)


def shaken(params: PyTree, key: jax.Array) -> PyTree:
    """Parameters away from where they start, where heads and attention say next to nothing."""
    flat, restore = ravel_pytree(params)
    return restore(flat + SHAKE * jax.random.normal(key, flat.shape))  # one draw: each takes long to compile


@cache
def play(mode: str) -> Played:
    config, parts = MODES[mode], mode.split("-")
    env = PROBES["recall"]
    if "time_limits" in parts:
        env = replace(env, truncates=True)
    if "continuous" in parts:
        env = replace(PROBES["continuous"], spec=replace(PROBES["continuous"].spec, time_limit=4))
    policy = importlib.import_module(f"sable.systems.{parts[0]}").make_policy(env.spec, config)
    system = ppo.make(policy, config, env.spec)

    @jax.jit
    def begin(learner_key, shake_key, env_key):
        learner = system.init(learner_key, system.hyper)
        learner = replace(learner, params=shaken(learner.params, shake_key))
        return learner, init_rollout_state(env, system, env_key, config.num_envs)

    # Episodes last four steps: the second rollout of six starts in the middle of one.
    seeing = system._replace(next_extras=lambda *seen: (system.next_extras(*seen), seen[1]))
    gather = jax.jit(partial(collect, env, seeing, length=config.rollout_length, reset_pool_size=4))
    *keys, first_key, second_key = jax.random.split(jax.random.key(7), 5)
    with jax.numpy_rank_promotion("allow"):  # environments are not ours to hold to it
        learner, rollout_state = begin(*keys)
        rollout_state, _, _ = gather(learner, rollout_state, first_key)
        _, played, _ = gather(learner, rollout_state, second_key)
    kept, finals = played.steps.next_extras
    rollout = replace(played, steps=replace(played.steps, next_extras=kept))
    return Played(mode, config, env.spec, policy, jax.jit(system.learn), learner, rollout, finals)


UNIT_ROUNDOFF = 2.0**-8
"""The largest relative error of rounding a number to bfloat16, which has 8 significant bits."""
ROUNDINGS = 10
"""Roundings that follow one another for each product with weights: those of the weight and of its input, of
the product, and of what comes of it in retention (scores, decay, what is recalled, norm, gate) or in a norm
and the sum with its residual. At worst they add up."""
DRAWS = 16


class Tolerance(tp.NamedTuple):
    """How far learning may be from acting, in an action's log-probability and in a value."""

    log_prob: float
    value: float


@cache
def tolerance(mode: str) -> Tolerance:
    """Return what rounding explains. In bfloat16 that follows from the network: as often as activations are
    rounded between two weights, the most that rounding errors of the weights alone change in float32."""
    played = play(mode)
    if getattr(played.config, "compute_dtype", "float32") == "float32":
        return Tolerance(1e-5, 1e-5)
    return Tolerance(*(ROUNDINGS * change for change in rounded_weights(played)))


def rounded_weights(played: Played) -> Tolerance:
    """Return the largest changes of log-probabilities and values in float32 where every weight is off by what
    rounding may do to it, over some draws."""
    exact = importlib.import_module("sable.systems.sable").make_policy(
        played.spec, replace(played.config, compute_dtype="float32")
    )
    given = exact.prepare(played.rollout.steps), played.rollout.start_memory, played.learner.order
    flat, restore = ravel_pytree(played.learner.params)

    @jax.jit
    def answers(key: jax.Array, size: float) -> tuple[jax.Array, jax.Array]:
        off = size * jax.random.uniform(key, flat.shape, minval=-1.0, maxval=1.0)
        found = exact.evaluate_actions(restore(flat * (1 + off)), *given, jax.random.key(0))
        return found.log_prob, found.value

    truth = answers(jax.random.key(0), 0.0)
    draws = [answers(key, UNIT_ROUNDOFF) for key in jax.random.split(jax.random.key(11), DRAWS)]
    return Tolerance(*(max(float(abs(a[k] - truth[k]).max()) for a in draws) for k in (0, 1)))


def marks(mode: str) -> list[pytest.MarkDecorator]:
    together = pytest.mark.xdist_group(mode)  # in one process, which compiles once
    return [together] if mode in QUICK else [together, pytest.mark.slow]


@pytest.fixture(params=[pytest.param(mode, marks=marks(mode)) for mode in MODES])
def played(request) -> Played:
    return play(request.param)
