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
class Explanation:
    """All that could be found out about a policy's decisions, numpy [T, B, N, ..]; None where a system has
    nothing of the kind."""

    probability: np.ndarray | None = None  # [.., A] of every action; 0 where it is not legal
    q_value: np.ndarray | None = None  # [.., A] of every action
    spread: np.ndarray | None = None  # [.., action_size, 3] 16 %, 50 % and 84 % of a continuous action
    value: np.ndarray | None = None
    in_turn: bool = False
    """Whether agents decide one after another, each told what those before it do."""
    retention: dict[str, tuple] | None = None
    """Captured retention layers, where the system remembers by them."""


def explain(policy: Policy, recording: Recording) -> Explanation:
    """Return what the policy had in mind when it played these episodes."""
    name = policy.config.run.system
    module = systems.module_of(name, policy.config.system)
    value = getattr(recording.extras, "value", None)
    if hasattr(module, "make_policy"):
        return replace(_explain_ppo(policy, module.make_policy, recording), value=value)
    views = recording.observation.view
    if name == "qmix":
        net = agent_q(tp.cast(tp.Any, policy.config.system), policy.spec)
        memory = policy.initial_memory(recording.num_episodes).remembered
        q, _ = jax.jit(net.apply)(policy.params, views, memory, _first(recording))
        return Explanation(q_value=np.asarray(q))
    if hasattr(module, "make_policies"):
        act = module.make_policies(policy.spec, policy.config.system).act
        return Explanation(
            spread=np.asarray(
                jax.jit(lambda *inputs: _action_probabilities(act(*inputs)))(policy.params, views)
            )
        )
    return Explanation(value=value)


def _explain_ppo(policy: Policy, make_policy: tp.Callable, recording: Recording) -> Explanation:
    """Score the actions that were taken, as learning does, and catch what the networks say inside."""
    net = make_policy(policy.spec, _plain_config(policy.config.system, policy.spec))
    has_memory = isinstance(policy.config.system, SableConfig) and policy.config.system.memory

    def score(params: PyTree, steps: Transition) -> tuple:
        distributions: list = []

        def catch(call: tp.Callable, args: tuple, kwargs: dict, context: tp.Any) -> tp.Any:
            result = call(*args, **kwargs)
            if isinstance(context.module, ActionDistribution) and context.method_name == "__call__":
                distributions.append(result)
            return result

        capture = attribution.Capture()
        with nn.intercept_methods(catch), nn.intercept_methods(capture):
            order = jnp.arange(policy.spec.num_agents)
            memory = policy.initial_memory(recording.num_episodes).remembered
            net.evaluate_actions(params, net.prepare(steps), memory, order, jax.random.key(0))
        retention = {path: tuple(map(jnp.asarray, arrays)) for path, arrays in capture.outputs.items()}
        return _action_probabilities(distributions[0]), retention if has_memory else None

    steps = Transition(
        observation=recording.observation,
        action=jnp.asarray(recording.action),
        reward=jnp.asarray(recording.reward),
        discount=jnp.ones(recording.reward.shape[:2]),
        first=jnp.asarray(_first(recording)),
        extras=recording.extras,
        next_extras=(),
    )
    with jax.default_matmul_precision(policy.config.run.precision):
        odds, retention = jax.device_get(jax.jit(score)(policy.params, steps))
    if isinstance(policy.config.system, SableConfig):  # whose network goes environment by environment inside
        odds = odds.swapaxes(0, 1)
    in_turn = policy.config.run.system in ("sable", "mat")
    if policy.spec.discrete:
        return Explanation(probability=odds, in_turn=in_turn, retention=retention)
    return Explanation(spread=odds, in_turn=in_turn, retention=retention)


def _plain_config(config: SystemConfig, spec: EnvSpec) -> SystemConfig:
    """Return the settings with which a network computes as it acts, and by no kernel, in which nothing is
    caught."""
    if not isinstance(config, SableConfig):
        return config
    config = replace(config, compute_dtype="float32")
    if jax.default_backend() != "gpu":
        return config
    return replace(config, chunk_size=config.chunk_size or max(1, 64 // spec.num_agents))


def _action_probabilities(distribution: Distribution) -> Array:
    """Return the probability of every action; or what a continuous one is most likely between, one standard
    deviation about the centre."""
    if isinstance(distribution, Categorical):
        return jax.nn.softmax(distribution.logits)
    return jnp.stack(
        [distribution.scale(distribution.mean + k * distribution.std) for k in (-1, 0, 1)], axis=-1
    )


def _first(recording: Recording) -> np.ndarray:
    """Return where episodes begin: every one opens at its first step."""
    return np.arange(len(recording.reward))[:, None] == np.zeros((1, recording.num_episodes))
