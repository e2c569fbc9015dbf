"""A system of your own: a small network on the PPO that all on-policy systems share."""
# Usage: own_system.py [STEPS], or from this folder: sable train probe/delayed --system own_system

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import sable
from sable.config.schema import PPOConfig
from sable.ops.distributions import masked_categorical
from sable.systems import ppo
from sable.types import Decision


@dataclass(frozen=True, kw_only=True)
class Config(PPOConfig):
    """One hidden layer for all agents, no memory."""

    learning_rate: float = 1e-3
    """Adam's step size."""
    width: int = 32
    """Units of the layer."""


def make(spec, config):
    """Return the system for this kind of environment, as pure functions."""
    w = config.width
    shapes = {"in": (spec.view_size, w), "out": (w, spec.num_actions), "value": (w, 1)}

    def init(key):
        return {name: 0.3 * jax.random.normal(key, shape) for name, shape in shapes.items()}

    def network(params, observation):
        x = jnp.tanh(observation.view @ params["in"])
        return masked_categorical(x @ params["out"], observation.action_mask), (x @ params["value"])[..., 0]

    def act(params, observation, memory, order, key):
        distribution, value = network(params, observation)
        raw = distribution.sample(key)
        extras = ppo.PolicyExtras(raw=raw, log_prob=distribution.log_prob(raw), value=value)
        return Decision(action=raw, memory=(), extras=extras)

    def evaluate_actions(params, steps, memory, order, key):
        p, value = network(params, steps.observation)
        log_prob, entropy = p.log_prob(steps.extras.raw), p.entropy(key)
        return ppo.ActionEvaluation(log_prob=log_prob, value=value, entropy=entropy)

    def value(params, observation, memory, order):
        return network(params, observation)[1]

    parts = init, lambda num_envs: (), act, value, evaluate_actions, config.learning_rate
    return ppo.make(ppo.Policy(*parts, chunk=1), config, spec)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    result = sable.train("probe/delayed", system="own_system", total_steps=steps, video=False)
    print("return:", result.summary["absolute_return"])
