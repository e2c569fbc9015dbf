"""The actor and the critic of IPPO and MAPPO (SPEC section 4)."""

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.initializers import normal
from jaxtyping import Array, Bool, Float

from sable.config import ActorCriticConfig, SystemConfig
from sable.nets.layers import dense
from sable.nets.recurrent import GRU
from sable.ops.distributions import Distribution, masked_categorical, tanh_normal
from sable.types import EnvSpec, Observation

Carry = Array | tuple
"""What a GRU remembers, [B, N, R] or [B, R]; () where nothing is to be remembered."""


def global_state(observation: Observation) -> Float[Array, "*b S"]:
    """What is known of the whole team: the suite's own state where it offers one, else all views in a row."""
    if isinstance(observation.state, tuple):
        return observation.view.reshape(*observation.view.shape[:-2], -1)
    return observation.state


class Network(nn.Module):
    """Dense layers with ReLU, then a head; the first is told which agent it sees for, a GRU follows it."""

    layers: tuple[int, ...]
    num_outputs: int
    head_gain: float
    num_agents: int
    """Agents to tell apart, 0 to tell none apart."""
    recurrent_size: int
    """Width of the GRU, 0 for none."""

    def setup(self):
        width = self.layers[0]
        self.first = dense(width, bias=not self.num_agents)  # an agent's row is its bias
        if self.num_agents:
            self.agent_embedding = self.param(
                "agent_embedding", normal(width**-0.5), (self.num_agents, width)
            )
        if self.recurrent_size:
            self.memory = GRU(self.recurrent_size)
        self.rest = [dense(width) for width in self.layers[1:]]
        self.head = dense(self.num_outputs, self.head_gain)

    def __call__(
        self, x: Float[Array, "T *b F"], carry: Carry, first: Bool[Array, "T B"]
    ) -> tuple[Float[Array, "T *b out"], Carry]:
        """(the head's output at every step, what is remembered after the last)."""
        # Layers are given matrices: on a CPU, XLA takes twice as long for the gradients of anything higher.
        shape = x.shape[:-1]
        x = self.first(x.reshape(-1, x.shape[-1]))
        if self.num_agents:
            teams = (len(x) // self.num_agents, *self.agent_embedding.shape)
            x = x + jnp.broadcast_to(self.agent_embedding, teams).reshape(x.shape)
        x = nn.relu(x)
        if not isinstance(carry, tuple):
            x, carry = self.memory.sequence(x.reshape(*shape, -1), carry, first)
            x = x.reshape(-1, self.recurrent_size)
        for layer in self.rest:
            x = nn.relu(layer(x))
        return self.head(x).reshape(*shape, -1), carry


class Actor(nn.Module):
    """What each agent does, from what it alone sees; all agents share the parameters."""

    config: ActorCriticConfig
    spec: EnvSpec

    def setup(self):
        self.network = Network(
            layers=self.config.policy_layers,
            num_outputs=self.spec.num_actions or self.spec.action_size,
            head_gain=0.01,
            num_agents=num_identities(self.config, self.spec),
            recurrent_size=recurrent_size(self.config),
        )
        if not self.spec.discrete:
            self.raw_std = self.param("raw_std", nn.initializers.zeros, (self.spec.action_size,))

    def __call__(
        self, observation: Observation, carry: Carry, first: Bool[Array, "T B"]
    ) -> tuple[Distribution, Carry]:
        """Each agent's distribution over a sequence, and what is remembered after it."""
        out, carry = self.network(observation.view, carry, first)
        if self.spec.discrete:
            return masked_categorical(out, observation.legal), carry
        std = nn.softplus(self.raw_std) + 1e-3
        return tanh_normal(out, std, self.spec.action_low, self.spec.action_high), carry


class Critic(nn.Module):
    """What each agent may expect, from what it alone sees; or what all may, from the global state."""

    config: ActorCriticConfig
    spec: EnvSpec
    centralised: bool

    def setup(self):
        self.network = Network(
            layers=self.config.critic_layers,
            num_outputs=1,
            head_gain=1.0,
            num_agents=0 if self.centralised else num_identities(self.config, self.spec),
            recurrent_size=recurrent_size(self.config),
        )

    def __call__(
        self, observation: Observation, carry: Carry, first: Bool[Array, "T B"]
    ) -> tuple[Float[Array, "T B N"], Carry]:
        """Each agent's value over a sequence, and what is remembered after it."""
        if not self.centralised:
            value, carry = self.network(observation.view, carry, first)
            return value[..., 0], carry
        value, carry = self.network(global_state(observation), carry, first)
        return jnp.broadcast_to(value, (*first.shape, self.spec.num_agents)), carry


def num_identities(config: SystemConfig, spec: EnvSpec) -> int:
    """How many agents the first layer tells apart: none where that is switched off or the views tell."""
    return spec.num_agents if config.agent_id and not spec.views_carry_id else 0


def recurrent_size(config: ActorCriticConfig) -> int:
    """Width of the GRUs, 0 where nothing is to be remembered."""
    return config.recurrent_size if config.memory else 0
