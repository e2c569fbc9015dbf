"""QMIX's networks: each agent's Q-values, and the mixer that makes a joint value of them."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from sable.config.schema import QMIXConfig
from sable.nets.actor_critic import Network
from sable.nets.layers import dense, num_agent_embeddings
from sable.types import EnvSpec

HYPER_SIZE = 64
"""Width of the layers that make the mixer's weights."""


def agent_q(config: QMIXConfig, spec: EnvSpec) -> Network:
    """Return the network of every agent's Q-values, from what it alone has seen of its episode."""
    return Network(
        layers=config.q_layers,
        num_outputs=spec.num_actions,
        head_gain=0.01,
        num_agents=num_agent_embeddings(config, spec),
        recurrent_size=config.recurrent_size,
    )


class Mixer(nn.Module):
    """Q_tot = elu(q |W1(s)| + b1(s)) |w2(s)| + b2(s): never falls where an agent's own value rises.

    It starts as about the sum of the agents' values.
    """

    num_agents: int
    width: int

    def setup(self):
        self.norm = nn.LayerNorm()
        self.weight_1 = _positive_weights(self.num_agents * self.width, 1.0)
        self.bias_1 = dense(self.width, 0.01)
        self.weight_2 = _positive_weights(self.width, 1 / self.width)
        self.bias_2 = nn.Sequential([dense(self.width), nn.relu, dense(1, 0.01)])

    def __call__(self, q: Float[Array, "*b N"], state: Float[Array, "*b S"]) -> Float[Array, "*b"]:
        # Layers see a matrix: XLA's CPU gradients of products with higher arrays take twice as long.
        state = self.norm(state.reshape(-1, state.shape[-1]))
        weight_1 = self.weight_1(state).reshape(-1, self.num_agents, self.width)
        hidden = jnp.einsum("bn,bne->be", q.reshape(-1, self.num_agents), weight_1) + self.bias_1(state)
        value = (nn.elu(hidden) * self.weight_2(state)).sum(-1) + self.bias_2(state)[:, 0]
        return value.reshape(q.shape[:-1])


def _positive_weights(features: int, scale: float) -> nn.Sequential:
    """Return the mixer's weights as a function of the state, positive and of about this scale at first."""
    # LayerNorm makes a constant state zero; were these biases zero too, so would the weights be, for good.
    weights = nn.Dense(
        features,
        kernel_init=nn.initializers.variance_scaling(scale**2, "fan_in", "normal"),
        bias_init=nn.initializers.normal(scale),
    )
    return nn.Sequential([dense(HYPER_SIZE), nn.relu, weights, jnp.abs])
