"""The policies and the critics of the soft actor-critic systems."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from sable.config.schema import SACConfig
from sable.nets.layers import AgentEmbedding, dense, num_agent_embeddings
from sable.ops.distributions import TanhNormal, tanh_normal
from sable.types import EnvSpec


class SoftPolicy(nn.Module):
    """A tanh-normal over actions whose mean and spread both depend on the view."""

    config: SACConfig
    spec: EnvSpec
    shared: bool
    """Whether all agents use these parameters; each is then told who it is."""

    def setup(self):
        self.hidden = [dense(width) for width in self.config.policy_layers]
        self.head = dense(2 * self.spec.action_size, 0.01)
        self.num_agents = num_agent_embeddings(self.config, self.spec) if self.shared else 0
        if self.num_agents:
            self.agent = AgentEmbedding(self.num_agents)

    def __call__(self, view: Float[Array, "*b F"]) -> TanhNormal:
        """Return the distribution of the actions [.., A]; the views of a shared policy are [.., N, F]."""
        x = self.hidden[0](view)
        if self.num_agents:
            x = self.agent(x)
        for layer in self.hidden[1:]:
            x = layer(nn.relu(x))
        mean, raw_std = jnp.split(self.head(nn.relu(x)), 2, axis=-1)
        return tanh_normal(mean, nn.softplus(raw_std) + 1e-3, self.spec.action_low, self.spec.action_high)


class SoftQ(nn.Module):
    """A critic of the global state and the joint action."""

    config: SACConfig

    @nn.compact
    def __call__(self, state: Float[Array, "*b S"], action: Float[Array, "*b N A"]) -> Float[Array, "*b"]:
        """Return the value of the team's actions, squashed to [-1, 1]."""
        x = jnp.concatenate([state, action.reshape(*action.shape[:-2], -1)], axis=-1)
        for width in self.config.q_layers:
            x = nn.relu(dense(width)(x))
        return dense(1, 1.0)(x)[..., 0]
