"""How sequences of agents are told what was seen and done: what Sable and MAT share."""

import typing as tp

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.initializers import orthogonal, zeros
from jaxtyping import Array, Bool, Float, Int

from sable.nets.layers import ActionDistribution, AgentEmbedding, Head, LayerNorm, RMSNorm, dense, spread
from sable.ops.distributions import Distribution
from sable.types import EnvSpec


class Projection(nn.Module):
    """A dense layer after a norm, which comes in parts: its scale and bias go into the weights. Their
    gradients come from the weights', and none is computed of every input, as a norm by itself would need."""

    width: int
    bias: bool

    @nn.compact
    def __call__(
        self, normal: Float[Array, "*b F"], scale: Float[Array, " F"], shift: Float[Array, " F"] | None
    ) -> Float[Array, "*b E"]:
        kernel = self.param("kernel", orthogonal(2**0.5), (normal.shape[-1], self.width))
        x = normal @ (kernel * scale[:, None])
        if shift is not None:
            x = x + spread(shift @ kernel, x.shape)
        return x + spread(self.param("bias", zeros, (self.width,)), x.shape) if self.bias else x


class ViewEmbedding(nn.Module):
    """gelu(norm([view, 1, -1]) W + agent), a learned row per agent where views do not tell them apart.

    The two constants keep the norm from hiding how large a view's numbers are: near a goal all distances
    shrink alike. In the reference, the one-hot ids that are normalised with the views do that.
    """

    width: int
    norm: RMSNorm | LayerNorm
    num_agents: int
    """Agents to tell apart, 0 to tell none apart."""
    bias: bool = False

    def setup(self):
        self.projection = Projection(self.width, self.bias)
        if self.num_agents:
            self.agent = AgentEmbedding(self.num_agents)

    def __call__(
        self, view: Float[Array, "*b N F"], ids: Int[Array, " N"], dtype: tp.Any = jnp.float32
    ) -> Float[Array, "*b N E"]:
        """The views' embeddings, agents in the order of `ids`; past the norm computed with `dtype`."""
        constants = jnp.broadcast_to(jnp.array([1.0, -1.0]), (*view.shape[:-1], 2))
        normal, scale, shift = self.norm.parts(jnp.concatenate([view, constants], axis=-1))
        x = self.projection(normal.astype(dtype), scale, shift)
        return nn.gelu(self.agent(x, ids) if self.num_agents else x)


class ActionEmbedding(nn.Module):
    """norm(gelu(token W)), of a one-hot over the start and all actions, or of a continuous action."""

    width: int
    spec: EnvSpec

    def setup(self):
        # A continuous start token is all zeros, so its embedding must come from a bias.
        self.projection = dense(self.width, bias=not self.spec.discrete)
        self.norm = RMSNorm()

    def __call__(self, token: Array, dtype: tp.Any = jnp.float32) -> Float[Array, "*b E"]:
        if self.spec.discrete:
            token = nn.one_hot(token, self.spec.num_actions + 1)
        return self.norm(nn.gelu(self.projection(token.astype(dtype))))


class PolicyHead(nn.Module):
    """The distribution of the action of each agent."""

    width: int
    spec: EnvSpec

    def setup(self):
        self.head = Head(self.width, self.spec.num_actions or self.spec.action_size)
        self.distribution = ActionDistribution(self.spec)

    def __call__(self, x: Float[Array, "*b E"], legal: Bool[Array, "*b A"]) -> Distribution:
        return self.distribution(self.head(x).astype(jnp.float32), legal)


def start_token(spec: EnvSpec) -> Array:
    """What the first agent of a timestep is told: slot 0 of the one-hot, or a zero action."""
    return jnp.zeros((), jnp.int32) if spec.discrete else jnp.zeros(spec.action_size)


def next_token(spec: EnvSpec, squashed: Array) -> Array:
    """What the next agent is told of this one's action."""
    return squashed + 1 if spec.discrete else squashed


def previous_tokens(spec: EnvSpec, action: Array) -> Array:
    """What each agent is told, [T, B, N, ..]: the action of the one before it, the first the start token."""
    tokens = next_token(spec, action)
    start = jnp.broadcast_to(start_token(spec), (*tokens.shape[:2], 1, *tokens.shape[3:]))
    return jnp.concatenate([start, tokens[:, :, :-1]], axis=2)
