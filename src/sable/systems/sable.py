"""Sable: the retention network as a PPO policy."""

import typing as tp
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from sable.config import SableConfig
from sable.nets.sable import Memory, Sable, initial_memory, next_token, start_token
from sable.ops.distributions import Categorical, TanhNormal
from sable.systems import ppo
from sable.systems.base import System
from sable.types import Decision, EnvSpec, Observation, PyTree, Transition


def make(spec: EnvSpec, config: SableConfig) -> System:
    """Sable for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


def make_policy(spec: EnvSpec, config: SableConfig) -> ppo.Policy:
    """The network's side of it."""
    net = Sable(config, spec)
    return ppo.Policy(
        init=partial(init, net),
        initial_memory=partial(initial_memory, config),
        act=partial(act, net),
        value=partial(value, net),
        evaluate=partial(evaluate, net),
        learning_rate=config.learning_rate,
        chunk=config.rollout_length if config.memory else 1,
        agent_order=config.agent_order,
    )


def init(net: Sable, key: Array) -> PyTree:
    """Fresh parameters, made through `evaluate`, which touches every one of them."""
    spec = net.spec
    team = (1, 1, spec.num_agents)
    return net.init(
        key,
        view=jnp.zeros((*team, spec.view_size)),
        legal=jnp.ones((*team, spec.num_actions or 1), bool),
        time=jnp.zeros((1, 1), jnp.int32),
        action=jnp.zeros(team, jnp.int32) if spec.discrete else jnp.zeros((*team, spec.action_size)),
        ids=jnp.arange(spec.num_agents),
        memory=initial_memory(net.config, 1),
        first=jnp.ones((1, 1), bool),
        method=Sable.evaluate,
    )


def act(
    net: Sable, params: PyTree, observation: Observation, memory: Memory, order: Array, key: Array
) -> Decision:
    """One decision for the whole team: all agents encoded at once, then decoded in `order`, one by one."""
    view, legal = observation.view[:, order], observation.legal[:, order]
    num_envs, time = view.shape[0], observation.time
    encoded, values, memory = _apply(net, params, Sable.encode, view, time, order, memory)
    size = net.spec.num_actions or net.spec.action_size
    noise = (Categorical if net.spec.discrete else TanhNormal).noise(
        key, (net.spec.num_agents, num_envs, size)
    )

    clock = _apply(net, params, Sable.clock, time)

    def agent(carry, now):
        memory, previous = carry
        encoded, legal, noise = now
        distribution, memory = _apply(net, params, Sable.decode, encoded, legal, clock, previous, memory)
        raw = distribution.sample_with(noise)
        told = next_token(net.spec, distribution.squash(raw))
        return (memory, told), (raw, distribution.scale(raw), distribution.log_prob(raw))

    start = start_token(net.spec)
    start = jnp.broadcast_to(start, (num_envs, *start.shape))
    opened = _apply(net, params, Sable.open, memory, num_envs)
    in_turn = jax.tree.map(lambda x: x.swapaxes(0, 1), (encoded, legal))
    (decoded, _), acted = jax.lax.scan(agent, (opened, start), (*in_turn, noise))

    raw, action, log_prob = (_natural(x.swapaxes(0, 1), order, axis=1) for x in acted)
    extras = ppo.Acted(raw=raw, log_prob=log_prob, value=_natural(values, order, axis=1))
    return Decision(action=action, memory=decoded if memory else (), extras=extras)


def value(net: Sable, params: PyTree, observation: Observation, memory: Memory, order: Array) -> Array:
    """Each agent's value [B, N] of a situation nobody has acted on."""
    view = observation.view[:, order]
    _, values, _ = _apply(net, params, Sable.encode, view, observation.time, order, memory)
    return _natural(values, order, axis=1)


def evaluate(
    net: Sable, params: PyTree, steps: Transition, memory: Memory, order: Array, key: Array
) -> ppo.Evaluation:
    """What `params` say of actions already taken, agents processed in `order`."""
    raw = steps.extras.raw[:, :, order]
    distribution, values = _apply(
        net,
        params,
        Sable.evaluate,
        view=steps.observation.view[:, :, order],
        legal=steps.observation.legal[:, :, order],
        time=steps.observation.time,
        action=raw if net.spec.discrete else jnp.tanh(raw),
        ids=order,
        memory=memory,
        first=steps.first,
    )
    found = distribution.log_prob(raw), values, distribution.entropy(key)
    log_prob, values, entropy = (_natural(x, order, axis=2) for x in found)
    return ppo.Evaluation(log_prob=log_prob, value=values, entropy=entropy)


def _apply(net: Sable, params: PyTree, method: tp.Callable, *args: tp.Any, **named: tp.Any) -> tp.Any:
    return net.apply(params, *args, **named, method=method)


def _natural(x: Array, order: Array, *, axis: int) -> Array:
    """`x`, whose agents are in `order` along `axis`, with its agents back in their natural order."""
    return jnp.take(x, jnp.argsort(order), axis=axis)
