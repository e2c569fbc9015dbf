"""HASAC: soft actor-critic with a policy per agent, improved one after another."""

import typing as tp

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sable.config.schema import HASACConfig
from sable.nets.sac import SoftPolicy
from sable.ops import trees as tree
from sable.ops.distributions import TanhNormal
from sable.systems import sac
from sable.systems.base import System
from sable.types import EnvSpec, PyTree


def make(spec: EnvSpec, config: HASACConfig) -> System:
    """HASAC for this kind of environment."""
    return sac.make(spec, config, make_policies(spec, config))


def make_policies(spec: EnvSpec, config: HASACConfig) -> sac.Policies:
    """One policy per agent, parameters and optimiser states along a leading [N]."""
    net, natural = SoftPolicy(config, spec, shared=False), jnp.arange(spec.num_agents)

    def act_alone(params: PyTree, view: Array) -> tp.Any:
        return net.apply(params, view)

    act = jax.vmap(act_alone, (0, -2), -2)

    def improve(
        optimiser: sac.Optimiser,
        params: PyTree,
        opt_state: PyTree,
        view: Array,
        judge: sac.Judge,
        temperature: Array,
        key: Array,
    ) -> sac.Improved:
        """Agent after agent, a step down E[alpha_i log pi_i(a_i) - Q(s, a)]: in `a`, the agents before i act
        by their new policies and the others by their old ones."""
        order_key, old_key, new_key = jax.random.split(key, 3)
        order = jax.random.permutation(order_key, natural) if config.shuffle_agents else natural
        shape = (spec.num_agents, view.shape[0], spec.action_size)
        old_noise, new_noise = TanhNormal.noise(old_key, shape), TanhNormal.noise(new_key, shape)

        def agent(joint: Array, now: tuple) -> tuple[Array, sac.Improved]:
            index, params, opt_state, view, temperature, old_noise, new_noise = now

            def with_own(action: Array) -> Array:  # fuses with what follows, as a scatter would not
                return jnp.where((natural == index)[None, :, None], action[:, None], joint)

            def loss(params: PyTree) -> tuple[Array, Array]:
                distribution = act_alone(params, view)
                raw = distribution.sample_with(old_noise)
                log_prob = distribution.log_prob(raw)
                value = judge(with_own(distribution.squash(raw)))
                return (temperature * log_prob - value).mean(), log_prob

            (found, log_prob), gradient = jax.value_and_grad(loss, has_aux=True)(params)
            updates, opt_state = optimiser.update(gradient, opt_state)
            params = optax.apply_updates(params, updates)
            distribution = act_alone(params, view)
            new = distribution.squash(distribution.sample_with(new_noise))
            return with_own(new), sac.Improved(params, opt_state, found, log_prob)

        distribution = act(params, view)
        joint = distribution.squash(distribution.sample_with(old_noise.swapaxes(0, 1)))
        teams = (params, opt_state, view.swapaxes(0, 1), temperature, old_noise, new_noise)
        _, improved = jax.lax.scan(agent, joint, (order, *tree.take(teams, order)))
        improved = tree.take(improved, jnp.argsort(order))
        return improved._replace(loss=improved.loss.mean(), log_prob=improved.log_prob.T)

    return sac.Policies(
        init=lambda key: sac.init_each(
            lambda key: net.init(key, jnp.zeros(spec.view_size)), key, spec.num_agents
        ),
        act=act,
        open=lambda optimiser, params: jax.vmap(optimiser.init)(params),
        improve=improve,
    )
