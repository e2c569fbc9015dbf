"""Layers shared by the sequence networks."""

import typing as tp

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.initializers import orthogonal
from jaxtyping import Array, Float, Int

RMSNorm = nn.RMSNorm  # epsilon 1e-6, one learned scale per channel


def dense(features: int, gain: float = 2**0.5, *, bias: bool = True, name: str | None = None) -> nn.Dense:
    """A dense layer with orthogonal weights of this gain."""
    return nn.Dense(features, use_bias=bias, kernel_init=orthogonal(gain), name=name)


class SwiGLU(nn.Module):
    """(swish(x W_g) * x W_1) W_2 at constant width.

    Nothing starts at zero: with all three matrices at zero every gradient is zero too, and the layer never
    learns.
    """

    width: int

    def setup(self):
        self.gate_and_input = nn.Dense(2 * self.width, use_bias=False, kernel_init=_orthogonal_pair)
        self.output = dense(self.width, bias=False)

    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        gate, x = jnp.split(self.gate_and_input(x), 2, axis=-1)
        return self.output(nn.swish(gate) * x)


def _orthogonal_pair(key: Array, shape: tuple[int, ...], dtype: tp.Any = jnp.float32) -> Array:
    """Two orthogonal matrices side by side, each with the gain it would have alone."""
    half = (shape[0], shape[1] // 2)
    return jnp.concatenate([orthogonal(2**0.5)(k, half, dtype) for k in jax.random.split(key)], axis=1)


class Head(nn.Module):
    """Dense, GELU, RMSNorm, then a near-zero Dense: the value and policy heads."""

    width: int
    features: int

    def setup(self):
        self.hidden = dense(self.width)
        self.norm = RMSNorm()
        self.output = dense(self.features, 0.01)

    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b out"]:
        return self.output(self.norm(nn.gelu(self.hidden(x))))


def time_encoding(time: Int[Array, "*b"], width: int) -> Float[Array, "*b E"]:
    """Sinusoids of the step count: sin(t w_i) and cos(t w_i) in turn, w_i = 10000^(-2i/E)."""
    frequency = jnp.exp(-jnp.log(10_000.0) * jnp.arange(0, width, 2) / width)
    angle = time[..., None] * jnp.broadcast_to(frequency, (*time.shape, frequency.size))
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*time.shape, -1)[..., :width]
