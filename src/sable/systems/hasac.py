"""HASAC: soft actor-critic with a policy per agent, improved one after another."""

import typing as tp
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from sable.config.schema import HASACConfig
from sable.nets.sac import SoftPolicy
from sable.ops import trees as tree
from sable.ops.distributions import TanhNormal
from sable.systems import sac
from sable.systems.base import System, gradient_step
from sable.types import EnvSpec, PyTree


def make(spec: EnvSpec, config: HASACConfig) -> System:
    """Return HASAC for this kind of environment."""
    return sac.make(spec, config, make_policies(spec, config))


def make_policies(spec: EnvSpec, config: HASACConfig) -> sac.Policies:
    """Return one policy per agent, parameters and optimiser states along a leading [N]."""
    net = SoftPolicy(config, spec, shared=False)
    return sac.Policies(
        init=lambda key: sac.init_ensemble(
            lambda key: net.init(key, jnp.zeros(spec.view_size)), key, spec.num_agents
        ),
        act=partial(act, net),
        init_optimiser=lambda optimiser, params: jax.vmap(optimiser.init)(params),
        update_policy=partial(update_policy, net, config.shuffle_agents),
    )


def act(net: SoftPolicy, params: PyTree, view: Array) -> tp.Any:
    """Return the distributions of all agents' actions [B, N, A], each by its own parameters."""
    return jax.vmap(partial(act_one_agent, net), (0, -2), -2)(params, view)


def act_one_agent(net: SoftPolicy, params: PyTree, view: Array) -> tp.Any:
    """Return the distributions of one agent's actions [B, A]."""
    return net.apply(params, view)


def policy_loss(
    net: SoftPolicy, view: Array, critic_fn: sac.CriticFn, temperature: Array, noise: Array, params: PyTree
) -> tuple[Array, Array]:
    """Return E[alpha_i log pi_i(a_i) - Q(s, a)] of one agent and log pi_i [B]; `critic_fn` knows the others'
    actions."""
    distribution = act_one_agent(net, params, view)
    raw = distribution.sample_from_noise(noise)
    log_prob = distribution.log_prob(raw)
    return (temperature * log_prob - critic_fn(distribution.squash(raw))).mean(), log_prob


def update_policy(
    net: SoftPolicy,
    shuffle_agents: bool,
    optimiser: sac.Optimiser,
    params: PyTree,
    opt_state: PyTree,
    view: Array,
    critic_fn: sac.CriticFn,
    temperature: Array,
    key: Array,
) -> sac.PolicyUpdate:
    """Take a gradient step for agent after agent: the agents before it act by their new policies, the others
    by their old ones."""
    order_key, old_key, new_key = jax.random.split(key, 3)
    distribution = act(net, params, view)
    num_agents = view.shape[-2]
    natural_order = jnp.arange(num_agents)
    order = jax.random.permutation(order_key, natural_order) if shuffle_agents else natural_order
    shape = (num_agents, view.shape[0], distribution.mean.shape[-1])
    old_noise, new_noise = TanhNormal.noise(old_key, shape), TanhNormal.noise(new_key, shape)

    def agent(joint_action: Array, inputs: tuple) -> tuple[Array, sac.PolicyUpdate]:
        index, params, opt_state, view, temperature, old_noise, new_noise = inputs

        def replace_own(action: Array) -> Array:  # fuses with what follows, as a scatter would not
            return jnp.where((natural_order == index)[None, :, None], action[:, None], joint_action)

        loss = partial(
            policy_loss, net, view, lambda own: critic_fn(replace_own(own)), temperature, old_noise
        )
        (error, log_prob), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        params, opt_state = gradient_step(optimiser, gradient, opt_state, params)
        distribution = act_one_agent(net, params, view)
        new = distribution.squash(distribution.sample_from_noise(new_noise))
        return replace_own(new), sac.PolicyUpdate(params, opt_state, error, log_prob)

    joint_action = distribution.squash(distribution.sample_from_noise(old_noise.swapaxes(0, 1)))
    agents = (params, opt_state, view.swapaxes(0, 1), temperature, old_noise, new_noise)
    _, updated = jax.lax.scan(agent, joint_action, (order, *tree.take(agents, order)))
    updated = tree.take(updated, jnp.argsort(order))
    return updated._replace(loss=updated.loss.mean(), log_prob=updated.log_prob.T)
