"""What a team had in mind at every step it played: probabilities, Q-values, values, retention."""

import typing as tp
from dataclasses import dataclass, replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sable import systems
from sable.config.schema import SableConfig, SystemConfig
from sable.nets.layers import ActionDistribution
from sable.nets.qmix import agent_q
from sable.ops.distributions import Categorical, Distribution
from sable.runs.policy import Policy
from sable.types import EnvSpec, PyTree, Transition
from sable.viewer import attribution
from sable.viewer.record import Recording


@dataclass(frozen=True)
class Explained:
    """What could be found out, numpy [T, B, N, ..]; None where a system has nothing of the kind."""

    probability: np.ndarray | None = None  # [.., A] of every action; 0 where it is not legal
    q_value: np.ndarray | None = None  # [.., A] of every action
    spread: np.ndarray | None = None  # [.., action_size, 3] 16 %, 50 % and 84 % of a continuous action
    value: np.ndarray | None = None
    in_turn: bool = False
    """Whether agents decide one after another, each told what those before it do."""
    retention: dict[str, tuple] | None = None
    """Captured retention layers, where the system remembers by them."""


def explain(policy: Policy, recording: Recording) -> Explained:
    """What the policy had in mind when it played these episodes."""
    name = policy.run.system
    module = systems.module_of(name, policy.config)
    value = getattr(recording.extras, "value", None)
    if hasattr(module, "make_policy"):
        return replace(_of_ppo(policy, module.make_policy, recording), value=value)
    views = recording.observation.view
    if name == "qmix":
        net = agent_q(tp.cast(tp.Any, policy.config), policy.spec)
        memory = policy.initial_memory(recording.num_episodes).remembered
        q, _ = jax.jit(net.apply)(policy.params, views, memory, _first(recording))
        return Explained(q_value=np.asarray(q))
    if hasattr(module, "make_policies"):
        act = module.make_policies(policy.spec, policy.config).act
        return Explained(spread=np.asarray(jax.jit(lambda *given: _odds(act(*given)))(policy.params, views)))
    return Explained(value=value)


def _of_ppo(policy: Policy, make_policy: tp.Callable, recording: Recording) -> Explained:
    """By scoring the actions that were taken, as learning does, and catching what the networks say inside."""
    net = make_policy(policy.spec, _openly(policy.config, policy.spec))
    remembers = isinstance(policy.config, SableConfig) and policy.config.memory

    def score(params: PyTree, steps: Transition) -> tuple:
        said: list = []

        def catch(call: tp.Callable, args: tuple, named: dict, context: tp.Any) -> tp.Any:
            result = call(*args, **named)
            if isinstance(context.module, ActionDistribution) and context.method_name == "__call__":
                said.append(result)
            return result

        capture = attribution.Capture()
        with nn.intercept_methods(catch), nn.intercept_methods(capture):
            order = jnp.arange(policy.spec.num_agents)
            memory = policy.initial_memory(recording.num_episodes).remembered
            net.evaluate_actions(params, net.prepare(steps), memory, order, jax.random.key(0))
        retention = {path: tuple(map(jnp.asarray, found)) for path, found in capture.found.items()}
        return _odds(said[0]), retention if remembers else None

    steps = Transition(
        observation=recording.observation,
        action=jnp.asarray(recording.action),
        reward=jnp.asarray(recording.reward),
        discount=jnp.ones(recording.reward.shape[:2]),
        first=jnp.asarray(_first(recording)),
        extras=recording.extras,
        next_extras=(),
    )
    with jax.default_matmul_precision(policy.run.precision):
        odds, retention = jax.device_get(jax.jit(score)(policy.params, steps))
    if isinstance(policy.config, SableConfig):  # whose network goes environment by environment inside
        odds = odds.swapaxes(0, 1)
    in_turn = policy.run.system in ("sable", "mat")
    if policy.spec.discrete:
        return Explained(probability=odds, in_turn=in_turn, retention=retention)
    return Explained(spread=odds, in_turn=in_turn, retention=retention)


def _openly(config: SystemConfig, spec: EnvSpec) -> SystemConfig:
    """The settings with which a network computes as it acts, and by no kernel, in which nothing is caught."""
    if not isinstance(config, SableConfig):
        return config
    config = replace(config, compute="float32")
    if jax.default_backend() != "gpu":
        return config
    return replace(config, chunk_size=config.chunk_size or max(1, 64 // spec.num_agents))


def _odds(found: Distribution) -> Array:
    """The probability of every action; or what a continuous one is most likely between, one standard
    deviation about the centre."""
    if isinstance(found, Categorical):
        return jax.nn.softmax(found.logits)
    return jnp.stack([found.scale(found.mean + k * found.std) for k in (-1, 0, 1)], axis=-1)


def _first(recording: Recording) -> np.ndarray:
    """Every episode opens at its first step."""
    return np.arange(len(recording.reward))[:, None] == np.zeros((1, recording.num_episodes))
