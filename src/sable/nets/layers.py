"""Layers that several networks share."""

import typing as tp
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import normal, orthogonal, zeros
from jaxtyping import Array, Bool, Float, Int

from sable.config.schema import SystemConfig
from sable.kernels import block
from sable.ops import sharding
from sable.ops.distributions import Distribution, masked_categorical, tanh_normal
from sable.types import EnvSpec


def _broadcast(x: Float[Array, " E"], shape: tuple[int, ...]) -> Float[Array, "*b E"]:
    return jnp.broadcast_to(x, shape)


def _broadcast_rows_bwd(shape: tuple[int, ...], _: None, cotangent: Array) -> tuple[Array]:
    cotangent = cotangent.reshape(-1, shape[-1])
    if jax.default_backend() == "gpu":
        return (cotangent.astype(jnp.float32).sum(0).astype(cotangent.dtype),)
    return ((jnp.ones((1, cotangent.shape[0]), cotangent.dtype) @ cotangent)[0],)


broadcast_rows = jax.custom_vjp(_broadcast, nondiff_argnums=(1,))
"""(x [E], shape [.., E]) -> `x` for every token. Its gradient, a sum over tokens, is taken as a matrix
product on a CPU, where XLA's reductions over leading axes are several times slower."""
broadcast_rows.defvjp(lambda x, shape: (_broadcast(x, shape), None), _broadcast_rows_bwd)


def _lookup(rows: Float[Array, "R E"], index: Int[Array, "*b"]) -> Float[Array, "*b E"]:
    return jnp.take(rows, index, axis=0, mode="clip")


def _lookup_bwd(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, None]:
    rows, index = residuals
    cotangent = cotangent.reshape(-1, cotangent.shape[-1])
    one_hot = nn.one_hot(index.reshape(-1), rows.shape[0], dtype=cotangent.dtype)
    return jnp.dot(one_hot.T, cotangent, preferred_element_type=jnp.float32).astype(cotangent.dtype), None


embedding_lookup = jax.custom_vjp(_lookup)
"""(rows [R, E], index) -> rows[index]. Its gradient is a matrix product: that of indexing would add token
after token to the same few rows."""
embedding_lookup.defvjp(lambda rows, index: (_lookup(rows, index), (rows, index)), _lookup_bwd)


class RMSNorm(nn.Module):
    """scale * x / sqrt(mean(x^2) + 1e-6), one learned scale per channel."""

    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        scale, _ = self.weights(x.shape[-1])
        return self.normalise(x) * broadcast_rows(scale, x.shape)

    @staticmethod
    def normalise(x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        """Return x normalised, not yet scaled."""
        mean = jnp.square(x.astype(jnp.float32)).mean(axis=-1, keepdims=True)
        return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)

    @nn.compact
    def weights(self, size: int) -> tuple[Float[Array, " E"], None]:
        """Return (the scale, no bias)."""
        return self.param("scale", nn.initializers.ones, (size,)), None


class LayerNorm(nn.Module):
    """scale * (x - mean) / sqrt(variance + 1e-6) + bias, one learned scale and bias per channel."""

    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        scale, bias = self.weights(x.shape[-1])
        return self.normalise(x) * broadcast_rows(scale, x.shape) + broadcast_rows(bias, x.shape)

    @staticmethod
    def normalise(x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        """Return x normalised, neither scaled nor shifted yet."""
        x = x - x.mean(axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)

    @nn.compact
    def weights(self, size: int) -> tuple[Float[Array, " E"], Float[Array, " E"]]:
        """Return (the scale, the bias)."""
        scale = self.param("scale", nn.initializers.ones, (size,))
        return scale, self.param("bias", nn.initializers.zeros, (size,))


def dense(features: int, gain: float = 2**0.5, *, bias: bool = True, name: str | None = None) -> nn.Dense:
    """Return a dense layer with orthogonal weights of this gain."""
    return nn.Dense(features, use_bias=bias, kernel_init=orthogonal(gain), name=name)


class DenseAfterNorm(nn.Module):
    """A dense layer after a norm, whose scale and bias go into the weights: their gradients come from the
    weights', and none is computed of every input, as a norm by itself would need. Features beyond those of
    the scale are zeros, and have no weights."""

    width: int
    bias: bool = True
    gain: float = 2**0.5

    @nn.compact
    def __call__(
        self, normalised: Float[Array, "*b G"], scale: Float[Array, " F"], shift: Float[Array, " F"] | None
    ) -> Float[Array, "*b E"]:
        kernel = self.param("kernel", orthogonal(self.gain), (scale.size, self.width))
        x = normalised @ jnp.pad(kernel * scale[:, None], ((0, normalised.shape[-1] - scale.size), (0, 0)))
        if shift is not None:
            x = x + broadcast_rows(shift @ kernel, x.shape)
        return x + broadcast_rows(self.param("bias", zeros, (self.width,)), x.shape) if self.bias else x


class SwiGLU(nn.Module):
    """(swish(x W_g) * x W_1) W_2 at constant width.

    It starts quietly, adding little to what it is given, which makes learning faster (docs/results.md,
    section 8), but not at zero: with all three matrices at zero every gradient is zero too, and the layer
    never learns.
    """

    width: int

    def setup(self):
        self.gate_and_input = nn.Dense(2 * self.width, use_bias=False, kernel_init=orthogonal_parts(2**0.5))
        self.output = dense(self.width, 0.1, bias=False)

    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        gate, x = jnp.split(self.gate_and_input(x), 2, axis=-1)
        return self.output(nn.swish(gate) * x)


def orthogonal_parts(gain: float) -> Callable[..., Array]:
    """Return an initialiser of square orthogonal matrices side by side, each with the gain it would have
    alone."""

    def init(key: Array, shape: tuple[int, ...], dtype: tp.Any = jnp.float32) -> Array:
        keys = jax.random.split(key, shape[1] // shape[0])
        return jnp.concatenate([orthogonal(gain)(k, (shape[0],) * 2, dtype) for k in keys], axis=1)

    return init


class AgentEmbedding(nn.Module):
    """A learned row for each agent, added to its tokens."""

    num_agents: int

    @nn.compact
    def __call__(self, x: Float[Array, "*b E"], ids: Int[Array, " N"] | None = None) -> Float[Array, "*b E"]:
        """Add each agent's row to its tokens, which come team by team, the agents of each in the order of
        `ids`, or in their natural one."""
        width = x.shape[-1]
        rows = self.param("rows", normal(width**-0.5), (self.num_agents, width))
        team = (rows if ids is None else embedding_lookup(rows, ids)).reshape(-1)
        return x + broadcast_rows(team, (x.size // team.size, team.size)).reshape(x.shape)


def num_agent_embeddings(config: SystemConfig, spec: EnvSpec) -> int:
    """Return how many agents a network must tell apart: none where that is switched off or the views tell."""
    return spec.num_agents if config.agent_id and not spec.views_carry_id else 0


class ActionDistribution(nn.Module):
    """The distribution of an action, of a network's output: a choice among the legal ones, or a tanh-normal
    with one spread for all views."""

    spec: EnvSpec

    @nn.compact
    def __call__(self, out: Float[Array, "*b out"], action_mask: Bool[Array, "*b A"]) -> Distribution:
        if self.spec.discrete:
            return masked_categorical(out, action_mask)
        std = nn.softplus(self.param("raw_std", nn.initializers.zeros, (self.spec.action_size,))) + 1e-3
        return tanh_normal(out, std.astype(out.dtype), self.spec.action_low, self.spec.action_high)


class Head(nn.Module):
    """Dense, GELU, a norm, then a near-zero Dense: the value and policy heads."""

    width: int
    features: int
    norm_type: type[RMSNorm | LayerNorm] = RMSNorm

    def setup(self):
        self.hidden = dense(self.width)
        self.norm = self.norm_type()
        self.output = DenseAfterNorm(self.features, gain=0.01)

    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b out"]:
        # The kernel's norm is RMSNorm.
        if self.norm_type is RMSNorm and block.use_kernel(self.width) and not self.is_initializing():
            own = self.variables["params"]
            weights = own["hidden"]["kernel"], own["hidden"]["bias"]
            normalised = sharding.shard_map_envs(
                lambda weights, x: block.dense_gelu_norm(x, *weights), weights, x
            )
            return self.output(normalised, own["norm"]["scale"], None)
        return self.output(self.norm.normalise(nn.gelu(self.hidden(x))), *self.norm.weights(self.width))


def sinusoidal_encoding(step_count: Int[Array, "*b"], width: int) -> Float[Array, "*b E"]:
    """Return sinusoids of the step count: sin(t w_i) and cos(t w_i) in turn, w_i = 10000^(-2i/E)."""
    frequency = jnp.exp(-jnp.log(10_000.0) * jnp.arange(0, width, 2) / width)
    angle = step_count[..., None] * jnp.broadcast_to(frequency, (*step_count.shape, frequency.size))
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*step_count.shape, -1)[..., :width]
