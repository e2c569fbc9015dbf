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
    """HASAC for this kind of environment."""
    return sac.make(spec, config, make_policies(spec, config))


def make_policies(spec: EnvSpec, config: HASACConfig) -> sac.Policies:
    """Return one policy per agent, parameters and optimiser states along a leading [N]."""
    net = SoftPolicy(config, spec, shared=False)
    return sac.Policies(
        init=lambda key: sac.init_each(
            lambda key: net.init(key, jnp.zeros(spec.view_size)), key, spec.num_agents
        ),
        act=partial(act, net),
        open=lambda optimiser, params: jax.vmap(optimiser.init)(params),
        improve=partial(improve, net, config.shuffle_agents),
    )


def act(net: SoftPolicy, params: PyTree, view: Array) -> tp.Any:
    """Return the distributions of all agents' actions [B, N, A], each by its own parameters."""
    return jax.vmap(partial(act_alone, net), (0, -2), -2)(params, view)


def act_alone(net: SoftPolicy, params: PyTree, view: Array) -> tp.Any:
    """Return the distributions of one agent's actions [B, A]."""
    return net.apply(params, view)


def policy_loss(
    net: SoftPolicy, view: Array, judge: sac.Judge, temperature: Array, noise: Array, params: PyTree
) -> tuple[Array, Array]:
    """Return E[alpha_i log pi_i(a_i) - Q(s, a)] of one agent and log pi_i [B]; `judge` knows the others'
    actions."""
    distribution = act_alone(net, params, view)
    raw = distribution.sample_with(noise)
    log_prob = distribution.log_prob(raw)
    return (temperature * log_prob - judge(distribution.squash(raw))).mean(), log_prob


def improve(
    net: SoftPolicy,
    shuffle_agents: bool,
    optimiser: sac.Optimiser,
    params: PyTree,
    opt_state: PyTree,
    view: Array,
    judge: sac.Judge,
    temperature: Array,
    key: Array,
) -> sac.Improved:
    """Take a gradient step for agent after agent: the agents before it act by their new policies, the others
    by their old ones."""
    order_key, old_key, new_key = jax.random.split(key, 3)
    distribution = act(net, params, view)
    num_agents = view.shape[-2]
    natural = jnp.arange(num_agents)
    order = jax.random.permutation(order_key, natural) if shuffle_agents else natural
    shape = (num_agents, view.shape[0], distribution.mean.shape[-1])
    old_noise, new_noise = TanhNormal.noise(old_key, shape), TanhNormal.noise(new_key, shape)

    def agent(joint: Array, now: tuple) -> tuple[Array, sac.Improved]:
        index, params, opt_state, view, temperature, old_noise, new_noise = now

        def with_own(action: Array) -> Array:  # fuses with what follows, as a scatter would not
            return jnp.where((natural == index)[None, :, None], action[:, None], joint)

        loss = partial(policy_loss, net, view, lambda own: judge(with_own(own)), temperature, old_noise)
        (error, log_prob), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        params, opt_state = gradient_step(optimiser, gradient, opt_state, params)
        distribution = act_alone(net, params, view)
        new = distribution.squash(distribution.sample_with(new_noise))
        return with_own(new), sac.Improved(params, opt_state, error, log_prob)

    joint = distribution.squash(distribution.sample_with(old_noise.swapaxes(0, 1)))
    teams = (params, opt_state, view.swapaxes(0, 1), temperature, old_noise, new_noise)
    _, improved = jax.lax.scan(agent, joint, (order, *tree.take(teams, order)))
    improved = tree.take(improved, jnp.argsort(order))
    return improved._replace(loss=improved.loss.mean(), log_prob=improved.log_prob.T)
