"""MASAC: soft actor-critic with one policy that all agents share."""

import typing as tp
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from sable.config.schema import MASACConfig
from sable.nets.sac import SoftPolicy
from sable.systems import sac
from sable.systems.base import System, gradient_step
from sable.types import EnvSpec, PyTree


def make(spec: EnvSpec, config: MASACConfig) -> System:
    """Return MASAC for this kind of environment."""
    return sac.make(spec, config, make_policies(spec, config))


def make_policies(spec: EnvSpec, config: MASACConfig) -> sac.Policies:
    """Return the shared policy, improved for all agents at once."""
    net = SoftPolicy(config, spec, shared=True)
    return sac.Policies(
        init=lambda key: net.init(key, jnp.zeros((spec.num_agents, spec.view_size))),
        act=partial(act, net),
        init_optimiser=lambda optimiser, params: optimiser.init(params),
        update_policy=partial(update_policy, net),
    )


def act(net: SoftPolicy, params: PyTree, view: Array) -> tp.Any:
    """Return the distributions of all agents' actions [B, N, A]."""
    return net.apply(params, view)


def policy_loss(
    net: SoftPolicy, view: Array, critic_fn: sac.CriticFn, temperature: Array, key: Array, params: PyTree
) -> tuple[Array, Array]:
    """Return E[sum_i alpha_i log pi_i(a_i) - Q(s, a)], all actions the policy's own, and log pi."""
    distribution = act(net, params, view)
    raw = distribution.sample(key)
    log_prob = distribution.log_prob(raw)
    cost = (temperature[None] * log_prob).sum(-1)
    return (cost - critic_fn(distribution.squash(raw))).mean(), log_prob


def update_policy(
    net: SoftPolicy,
    optimiser: sac.Optimiser,
    params: PyTree,
    opt_state: PyTree,
    view: Array,
    critic_fn: sac.CriticFn,
    temperature: Array,
    key: Array,
) -> sac.PolicyUpdate:
    """Take a gradient step for all agents at once."""
    loss = partial(policy_loss, net, view, critic_fn, temperature, key)
    (error, log_prob), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    params, opt_state = gradient_step(optimiser, gradient, opt_state, params)
    return sac.PolicyUpdate(params, opt_state, error, log_prob)
