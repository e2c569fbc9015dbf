"""IPPO: one actor and one critic for all agents, both of an agent's own view. MAPPO, whose critic is of the
global state, is made here too."""

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
    """What the networks remember of an episode; () stands in its place where they remember nothing."""

    actor: PyTree  # [B, N, R]
    critic: PyTree  # [B, N, R], or [B, R] for a critic of the global state


def make(spec: EnvSpec, config: ActorCriticConfig) -> System:
    """IPPO for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


def make_policy(spec: EnvSpec, config: ActorCriticConfig, *, centralised: bool = False) -> ppo.Policy:
    """The networks' side of it, with a critic of each agent's view or a `centralised` one."""
    actor, critic = Actor(config, spec), Critic(config, spec, centralised)
    starts_inside = config.memory and config.recurrent_chunk < config.rollout_length

    def init(key: Array) -> PyTree:
        actor_key, critic_key = jax.random.split(key)
        team, memory, first = (1, 1, spec.num_agents), initial_memory(1), jnp.ones((1, 1), bool)
        observation = Observation(
            view=jnp.zeros((*team, spec.view_size)),
            legal=jnp.ones((*team, spec.num_actions or 1), bool),
            time=jnp.zeros((1, 1), jnp.int32),
            state=jnp.zeros((1, 1, spec.state_size)) if spec.state_size else (),
        )
        return {
            "actor": actor.init(actor_key, observation, memory and memory.actor, first),
            "critic": critic.init(critic_key, observation, memory and memory.critic, first),
        }

    def initial_memory(num_envs: int) -> PyTree:
        if not config.memory:
            return ()
        zeros = jnp.zeros((num_envs, spec.num_agents, config.recurrent_size))
        return Memory(actor=zeros, critic=zeros[:, 0] if centralised else zeros)

    def consider(
        params: PyTree, observation: Observation, memory: PyTree, first: Array
    ) -> tuple[Distribution, Array, PyTree]:
        """Over a sequence [T, B], the distributions and values of all agents; the memory after it."""
        distribution, actor_memory = actor.apply(params["actor"], observation, memory and memory.actor, first)
        value, critic_memory = critic.apply(params["critic"], observation, memory and memory.critic, first)
        return distribution, value, memory and Memory(actor=actor_memory, critic=critic_memory)

    def act(
        params: PyTree, observation: Observation, memory: PyTree, order: Array, key: Array | None
    ) -> Decision:
        distribution, values, new = consider(params, *_one_step(observation, memory))
        raw = distribution.sample(key)
        action, raw, log_prob, value = (
            x[0] for x in (distribution.scale(raw), raw, distribution.log_prob(raw), values)
        )
        extras = ppo.Acted(raw=raw, log_prob=log_prob, value=value, memory=memory if starts_inside else ())
        return Decision(action=action, memory=new, extras=extras)

    def value(params: PyTree, observation: Observation, memory: PyTree, order: Array) -> Array:
        return consider(params, *_one_step(observation, memory))[1][0]

    def evaluate(
        params: PyTree, steps: Transition, memory: PyTree, order: Array, key: Array
    ) -> ppo.Evaluation:
        distribution, values, _ = consider(params, steps.observation, memory, steps.first)
        log_prob, entropy = distribution.log_prob(steps.extras.raw), distribution.entropy(key)
        return ppo.Evaluation(log_prob=log_prob, value=values, entropy=entropy)

    return ppo.Policy(
        init=init,
        initial_memory=initial_memory,
        act=act,
        value=value,
        evaluate=evaluate,
        learning_rate={"actor": config.policy_learning_rate, "critic": config.critic_learning_rate},
        chunk=config.recurrent_chunk if config.memory else 1,
    )


def _one_step(observation: Observation, memory: PyTree) -> tuple[Observation, PyTree, Array]:
    """The observation as a sequence of one step, its memory, and that no episode opens: a memory that is to
    be acted with has been reset already."""
    sequence = jax.tree.map(lambda x: x[None], observation)
    return sequence, memory, jnp.zeros(sequence.time.shape, bool)
