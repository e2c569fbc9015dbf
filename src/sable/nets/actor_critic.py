"""The actor and the critic of IPPO and MAPPO."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sable.config.schema import ActorCriticConfig
from sable.nets.gru import GRU
from sable.nets.layers import ActionDistribution, AgentEmbedding, dense, num_agent_embeddings
from sable.ops.distributions import Distribution
from sable.types import EnvSpec, Observation

Carry = Array | tuple
"""The carry of a GRU, [B, N, R] or [B, R]; () where nothing is to be remembered."""


def global_state(observation: Observation) -> Float[Array, "*b S"]:
    """Return the global state: the suite's own where it offers one, else all views in a row."""
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
            self.agent = AgentEmbedding(self.num_agents)
        if self.recurrent_size:
            self.memory = GRU(self.recurrent_size)
        self.rest = [dense(width) for width in self.layers[1:]]
        self.head = dense(self.num_outputs, self.head_gain)

    def __call__(
        self, x: Float[Array, "T *b F"], carry: Carry, first: Bool[Array, "T B"]
    ) -> tuple[Float[Array, "T *b out"], Carry]:
        """Return (the head's output at every step, the carry after the last)."""
        # Layers are given matrices: on a CPU, XLA takes twice as long for the gradients of anything higher.
        shape = x.shape[:-1]
        x = self.first(x.reshape(-1, x.shape[-1]))
        x = nn.relu(self.agent(x) if self.num_agents else x)
        if not isinstance(carry, tuple):
            x, carry = self.memory.sequence(x.reshape(*shape, -1), carry, first)
            x = x.reshape(-1, self.recurrent_size)
        for layer in self.rest:
            x = nn.relu(layer(x))
        return self.head(x).reshape(*shape, -1), carry


class Actor(nn.Module):
    """The policy of each agent, of its own view alone; all agents share the parameters."""

    config: ActorCriticConfig
    spec: EnvSpec

    def setup(self):
        self.network = Network(
            layers=self.config.policy_layers,
            num_outputs=self.spec.num_actions or self.spec.action_size,
            head_gain=0.01,
            num_agents=num_agent_embeddings(self.config, self.spec),
            recurrent_size=recurrent_size(self.config),
        )
        self.distribution = ActionDistribution(self.spec)

    def __call__(
        self, observation: Observation, carry: Carry, first: Bool[Array, "T B"]
    ) -> tuple[Distribution, Carry]:
        """Return each agent's distribution over a sequence, and the carry after it."""
        out, carry = self.network(observation.view, carry, first)
        return self.distribution(out, observation.action_mask), carry


class Critic(nn.Module):
    """The value of each agent, of its own view alone; or of all agents, of the global state."""

    config: ActorCriticConfig
    spec: EnvSpec
    centralised: bool

    def setup(self):
        self.network = Network(
            layers=self.config.critic_layers,
            num_outputs=1,
            head_gain=1.0,
            num_agents=0 if self.centralised else num_agent_embeddings(self.config, self.spec),
            recurrent_size=recurrent_size(self.config),
        )

    def __call__(
        self, observation: Observation, carry: Carry, first: Bool[Array, "T B"]
    ) -> tuple[Float[Array, "T B N"], Carry]:
        """Return each agent's value over a sequence, and the carry after it."""
        if not self.centralised:
            value, carry = self.network(observation.view, carry, first)
            return value[..., 0], carry
        value, carry = self.network(global_state(observation), carry, first)
        return jnp.broadcast_to(value, (*first.shape, self.spec.num_agents)), carry


def recurrent_size(config: ActorCriticConfig) -> int:
    """Return the width of the GRUs, 0 where nothing is to be remembered."""
    return config.recurrent_size if config.memory else 0
