"""How sequences of agents are told what was seen and done: what Sable and MAT share."""

import typing as tp

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sable.nets.layers import (
    ActionDistribution,
    AgentEmbedding,
    DenseAfterNorm,
    Head,
    LayerNorm,
    RMSNorm,
    dense,
    embedding_lookup,
)
from sable.ops.distributions import Distribution
from sable.types import EnvSpec

CONSTANTS = (1.0, -1.0)
FEATURE_MULTIPLE = 8


def normalise_view(
    view: Float[Array, "*b F"], norm: type[RMSNorm | LayerNorm], dtype: tp.Any = jnp.float32
) -> Float[Array, "*b G"]:
    """Return norm([view, 1, -1]), not yet scaled: what `ViewEmbedding` takes. Nothing in it is learned, so
    learning does it once, and not for every minibatch.

    The two constants keep the norm from hiding how large a view's numbers are: near a goal all distances
    shrink alike. In the reference, the one-hot ids that are normalised with the views do that. Zeros make
    the features a multiple of eight, of which GPUs make products faster.
    """
    constants = jnp.broadcast_to(jnp.array(CONSTANTS), (*view.shape[:-1], len(CONSTANTS)))
    normalised = norm.normalise(jnp.concatenate([view, constants], axis=-1)).astype(dtype)
    return jnp.pad(normalised, [(0, 0)] * (view.ndim - 1) + [(0, -normalised.shape[-1] % FEATURE_MULTIPLE)])


class ViewEmbedding(nn.Module):
    """gelu(norm([view, 1, -1]) W + agent), a learned row per agent where views do not tell them apart."""

    width: int
    view_size: int
    norm: RMSNorm | LayerNorm
    num_agents: int
    """Agents to tell apart, 0 to tell none apart."""
    bias: bool = False

    def setup(self):
        self.projection = DenseAfterNorm(self.width, self.bias)
        if self.num_agents:
            self.agent = AgentEmbedding(self.num_agents)

    def __call__(
        self, normalised_view: Float[Array, "*b N G"], ids: Int[Array, " N"]
    ) -> Float[Array, "*b N E"]:
        """Return the embeddings of normalised views, agents in the order of `ids`."""
        x = self.projection(normalised_view, *self.norm.weights(self.view_size + len(CONSTANTS)))
        return nn.gelu(self.agent(x, ids) if self.num_agents else x)


class ActionEmbedding(nn.Module):
    """norm(gelu(token W)), of a one-hot over the start and all actions, or of a continuous action. Of the
    former there are so few that each is computed once."""

    width: int
    spec: EnvSpec
    norm_type: type[RMSNorm | LayerNorm] = RMSNorm

    def setup(self):
        # A continuous start token is all zeros, so its embedding must come from a bias.
        self.projection = dense(self.width, bias=not self.spec.discrete)
        self.norm = self.norm_type()

    def __call__(self, token: Array, dtype: tp.Any = jnp.float32) -> Float[Array, "*b E"]:
        tokens = jnp.eye(self.spec.num_actions + 1) if self.spec.discrete else token
        rows = self.norm(nn.gelu(self.projection(tokens.astype(dtype))))
        return embedding_lookup(rows, token) if self.spec.discrete else rows


class PolicyHead(nn.Module):
    """The distribution of the action of each agent."""

    width: int
    spec: EnvSpec
    norm_type: type[RMSNorm | LayerNorm] = RMSNorm

    def setup(self):
        self.head = Head(self.width, self.spec.num_actions or self.spec.action_size, self.norm_type)
        self.distribution = ActionDistribution(self.spec)

    def __call__(self, x: Float[Array, "*b E"], action_mask: Bool[Array, "*b A"]) -> Distribution:
        return self.distribution(self.head(x).astype(jnp.float32), action_mask)


def start_token(spec: EnvSpec) -> Array:
    """Return the token of a timestep's first agent: slot 0 of the one-hot, or a zero action."""
    return jnp.zeros((), jnp.int32) if spec.discrete else jnp.zeros(spec.action_size)


def next_token(spec: EnvSpec, squashed: Array) -> Array:
    """Return the next agent's token, made of this one's action."""
    return squashed + 1 if spec.discrete else squashed


def previous_tokens(spec: EnvSpec, action: Array) -> Array:
    """Return every agent's token [T, B, N, ..]: the action of the one before it; the start token for the
    first."""
    tokens = next_token(spec, action)
    start = jnp.broadcast_to(start_token(spec), (*tokens.shape[:2], 1, *tokens.shape[3:]))
    return jnp.concatenate([start, tokens[:, :, :-1]], axis=2)
