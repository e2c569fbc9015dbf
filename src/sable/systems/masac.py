"""MASAC: soft actor-critic with one policy that all agents share."""

import typing as tp

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sable.config.schema import MASACConfig
from sable.nets.sac import SoftPolicy
from sable.systems import sac
from sable.systems.base import System
from sable.types import EnvSpec, PyTree


def make(spec: EnvSpec, config: MASACConfig) -> System:
    """MASAC for this kind of environment."""
    return sac.make(spec, config, make_policies(spec, config))


def make_policies(spec: EnvSpec, config: MASACConfig) -> sac.Policies:
    """The shared policy, improved for all agents at once."""
    net = SoftPolicy(config, spec, shared=True)

    def act(params: PyTree, view: Array) -> tp.Any:
        return net.apply(params, view)

    def improve(
        optimiser: sac.Optimiser,
        params: PyTree,
        opt_state: PyTree,
        view: Array,
        judge: sac.Judge,
        temperature: Array,
        key: Array,
    ) -> sac.Improved:
        """A step down E[sum_i alpha_i log pi_i(a_i) - Q(s, a)], all actions drawn from the policy."""

        def loss(params: PyTree) -> tuple[Array, Array]:
            distribution = act(params, view)
            raw = distribution.sample(key)
            log_prob = distribution.log_prob(raw)
            cost = (temperature[None] * log_prob).sum(-1)
            return (cost - judge(distribution.squash(raw))).mean(), log_prob

        (found, log_prob), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimiser.update(gradient, opt_state)
        return sac.Improved(optax.apply_updates(params, updates), opt_state, found, log_prob)

    return sac.Policies(
        init=lambda key: net.init(key, jnp.zeros((spec.num_agents, spec.view_size))),
        act=act,
        open=lambda optimiser, params: optimiser.init(params),
        improve=improve,
    )
