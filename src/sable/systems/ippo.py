"""IPPO: one actor and one critic for all agents, both of an agent's own view. MAPPO, whose critic is of the
global state, is made here too."""

import typing as tp
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from sable.config.schema import ActorCriticConfig
from sable.nets.actor_critic import Actor, Critic
from sable.ops.distributions import Distribution
from sable.systems import ppo
from sable.systems.base import System
from sable.types import Decision, EnvSpec, Observation, PyTree, Transition, struct


@struct
class Memory:
    """The memories of both networks; () stands in its place where they have none."""

    actor: PyTree  # [B, N, R]
    critic: PyTree  # [B, N, R], or [B, R] for a critic of the global state


def make(spec: EnvSpec, config: ActorCriticConfig) -> System:
    """Return IPPO for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


class Nets(tp.NamedTuple):
    """The networks and what they were made for."""

    spec: EnvSpec
    config: ActorCriticConfig
    actor: Actor
    critic: Critic


def make_policy(spec: EnvSpec, config: ActorCriticConfig, *, centralised: bool = False) -> ppo.Policy:
    """Return the policy, with a critic of each agent's view or a `centralised` one."""
    nets = Nets(spec, config, Actor(config, spec), Critic(config, spec, centralised))
    return ppo.Policy(
        init=partial(init, nets),
        initial_memory=partial(initial_memory, nets),
        act=partial(act, nets),
        value=partial(value, nets),
        evaluate_actions=partial(evaluate_actions, nets),
        learning_rate={"actor": config.policy_learning_rate, "critic": config.critic_learning_rate},
        chunk=config.recurrent_chunk if config.memory else 1,
    )


def init(nets: Nets, key: Array) -> PyTree:
    """Return fresh parameters of both networks."""
    actor_key, critic_key = jax.random.split(key)
    spec, memory, first = nets.spec, initial_memory(nets, 1), jnp.ones((1, 1), bool)
    team = (1, 1, spec.num_agents)
    observation = Observation(
        view=jnp.zeros((*team, spec.view_size)),
        action_mask=jnp.ones((*team, spec.num_actions or 1), bool),
        step_count=jnp.zeros((1, 1), jnp.int32),
        state=jnp.zeros((1, 1, spec.state_size)) if spec.state_size else (),
    )
    return {
        "actor": nets.actor.init(actor_key, observation, memory and memory.actor, first),
        "critic": nets.critic.init(critic_key, observation, memory and memory.critic, first),
    }


def initial_memory(nets: Nets, num_envs: int) -> PyTree:
    """Return the zero memories of both networks, () where they have none."""
    if not nets.config.memory:
        return ()
    zeros = jnp.zeros((num_envs, nets.spec.num_agents, nets.config.recurrent_size))
    return Memory(actor=zeros, critic=zeros[:, 0] if nets.critic.centralised else zeros)


def apply_networks(
    nets: Nets, params: PyTree, observation: Observation, memory: PyTree, first: Array
) -> tuple[Distribution, Array, PyTree]:
    """Return, over a sequence [T, B], distributions and values of all agents, and the memory after it."""
    inputs = observation, memory and memory.actor, first
    distribution, actor_memory = nets.actor.apply(params["actor"], *inputs)
    inputs = observation, memory and memory.critic, first
    value, critic_memory = nets.critic.apply(params["critic"], *inputs)
    return distribution, value, memory and Memory(actor=actor_memory, critic=critic_memory)


def act(
    nets: Nets, params: PyTree, observation: Observation, memory: PyTree, order: Array, key: Array | None
) -> Decision:
    """Return one decision of all agents, each by its own view and memory."""
    distribution, values, new = apply_networks(nets, params, *_one_step(observation, memory))
    raw = distribution.sample(key)
    action, raw, log_prob, value = (
        x[0] for x in (distribution.scale(raw), raw, distribution.log_prob(raw), values)
    )
    stores_memory = nets.config.memory and nets.config.recurrent_chunk < nets.config.rollout_length
    extras = ppo.PolicyExtras(raw=raw, log_prob=log_prob, value=value, memory=memory if stores_memory else ())
    return Decision(action=action, memory=new, extras=extras)


def value(nets: Nets, params: PyTree, observation: Observation, memory: PyTree, order: Array) -> Array:
    """Return each agent's value [B, N] of an observation nobody has acted on."""
    return apply_networks(nets, params, *_one_step(observation, memory))[1][0]


def evaluate_actions(
    nets: Nets, params: PyTree, steps: Transition, memory: PyTree, order: Array, key: Array
) -> ppo.ActionEvaluation:
    """Return the log-probabilities, values and entropies of actions already taken."""
    distribution, values, _ = apply_networks(nets, params, steps.observation, memory, steps.first)
    log_prob, entropy = distribution.log_prob(steps.extras.raw), distribution.entropy(key)
    return ppo.ActionEvaluation(log_prob=log_prob, value=values, entropy=entropy)


def _one_step(observation: Observation, memory: PyTree) -> tuple[Observation, PyTree, Array]:
    """Return the observation as a sequence of one step, its memory, and that no episode opens: a memory that
    is to be acted with has been reset already."""
    sequence = jax.tree.map(lambda x: x[None], observation)
    return sequence, memory, jnp.zeros(sequence.step_count.shape, bool)
