"""The two distributions an agent's action can have, behind the same methods, so that callers never branch.

An action exists in three forms. The *raw* action is what is sampled, stored and scored: an index, or the
normal variable u before it is squashed, which keeps log-probabilities exact where tanh(u) has rounded to one.
`squash` turns it into what the next agent is told, the index again or tanh(u) in [-1, 1]; `scale` into what
the environment takes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from sable.types import struct


@struct
class Categorical:
    """p(a) = softmax(logits)[a]; a raw action is an int32 index."""

    logits: Array  # [.., A]

    @staticmethod
    def noise(key: Array, shape: tuple[int, ...]) -> Array:
        """Return standard Gumbel noise for logits of this shape."""
        return jax.random.gumbel(key, shape)

    def sample_from_noise(self, noise: Array) -> Array:
        """Return the raw action that `noise` leads to, by Gumbel-max sampling: argmax(logits + noise)."""
        return jnp.argmax(self.logits + noise, axis=-1).astype(jnp.int32)

    def sample(self, key: Array | None) -> Array:
        """Return a raw action [..]; the most probable one without a key."""
        return self.mode() if key is None else self.sample_from_noise(self.noise(key, self.logits.shape))

    def mode(self) -> Array:
        """Return the most probable raw action [..]."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def squash(self, raw: Array) -> Array:
        """Return the action as the next agent sees it: the index itself."""
        return raw

    def scale(self, raw: Array) -> Array:
        """Return the action as the environment takes it: the index itself."""
        return raw

    def log_prob(self, raw: Array) -> Array:
        """Return log p(raw) [..]."""
        return _log_prob(self.logits, raw)

    def entropy(self, key: Array | None = None) -> Array:
        """Return -sum_a p(a) log p(a) [..], exact, so that `key` goes unused."""
        return _entropy(self.logits)


# Their gradients (residuals forwards, cotangents backwards) are written out: derived, they are sums over the
# actions within sums, for which a GPU takes ten times as long.


@jax.custom_vjp
def _log_prob(logits: Array, raw: Array) -> Array:
    return _log_prob_fwd(logits, raw)[0]


def _log_prob_fwd(logits, raw):
    log_p = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_p, raw[..., None], axis=-1)[..., 0], (log_p, raw)


def _log_prob_bwd(residuals, cotangent):
    log_p, raw = residuals
    chosen = jax.nn.one_hot(raw, log_p.shape[-1], dtype=log_p.dtype)
    return cotangent[..., None] * (chosen - jnp.exp(log_p)), None


_log_prob.defvjp(_log_prob_fwd, _log_prob_bwd)


@jax.custom_vjp
def _entropy(logits: Array) -> Array:
    return _entropy_fwd(logits)[0]


def _entropy_fwd(logits):
    log_p = jax.nn.log_softmax(logits)
    entropy = -_p_times_log(log_p, 0.0).sum(-1)
    return entropy, (log_p, entropy)


def _entropy_bwd(residuals, cotangent):
    log_p, entropy = residuals
    return (-cotangent[..., None] * _p_times_log(log_p, entropy[..., None]),)


def _p_times_log(log_p: Array, added: Array | float) -> Array:
    """Return p (log p + added). An impossible action has none of it, huge though its log-probability is."""
    p = jnp.exp(log_p)
    return p * jnp.where(p > 0, log_p + added, 0.0)


_entropy.defvjp(_entropy_fwd, _entropy_bwd)


@struct
class TanhNormal:
    """tanh(u) with u ~ Normal(mean, std), independent components on the last axis; a raw action is u.

    Log-probabilities and entropies are those of tanh(u) in [-1, 1]: the constant that scaling to the bounds
    would add is left out.
    """

    mean: Array  # [.., A]
    std: Array  # [.., A]
    low: float = dataclasses.field(default=-1.0, metadata={"static": True})
    high: float = dataclasses.field(default=1.0, metadata={"static": True})

    @staticmethod
    def noise(key: Array, shape: tuple[int, ...]) -> Array:
        """Return standard normal noise for a mean of this shape."""
        return jax.random.normal(key, shape)

    def sample_from_noise(self, noise: Array) -> Array:
        """Return the raw action that `noise` leads to: mean + std * noise."""
        return self.mean + self.std * noise

    def sample(self, key: Array | None) -> Array:
        """Return a raw action [.., A]; the centre of the normal without a key."""
        return self.mode() if key is None else self.sample_from_noise(self.noise(key, self.mean.shape))

    def mode(self) -> Array:
        """Return the raw action at the centre of the normal [.., A], whose tanh is the median of tanh(u)."""
        return self.mean

    def squash(self, raw: Array) -> Array:
        """Return the action as the next agent sees it: tanh(raw) in [-1, 1]."""
        return jnp.tanh(raw)

    def scale(self, raw: Array) -> Array:
        """Return the action as the environment takes it: tanh(raw) mapped from [-1, 1] to [low, high]."""
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        return jnp.clip(middle + half * jnp.tanh(raw), self.low, self.high)  # rounding may step over a bound

    def log_prob(self, raw: Array) -> Array:
        """Return log p(tanh(raw)) = sum over components of log Normal(raw) - log(1 - tanh(raw)^2) [..]."""
        distance = (raw - self.mean) / self.std
        normal = -0.5 * jnp.square(distance) - jnp.log(self.std) - 0.5 * jnp.log(2 * jnp.pi)
        return (normal - _log_det_jacobian(raw)).sum(-1)

    def entropy(self, key: Array) -> Array:
        """Return H[Normal] + log(1 - tanh(u)^2) at one fresh sample u, summed over components [..];
        unbiased."""
        normal = 0.5 * jnp.log(2 * jnp.pi * jnp.e) + jnp.log(self.std)
        return (normal + _log_det_jacobian(self.sample(key))).sum(-1)


Distribution = Categorical | TanhNormal


def masked_categorical(logits: Array, action_mask: Array) -> Categorical:
    """Return a categorical over the legal actions alone; uniform over all where none is legal."""
    return Categorical(logits=jnp.where(action_mask, logits, jnp.finfo(logits.dtype).min))


def tanh_normal(mean: Array, std: Array, low: float = -1.0, high: float = 1.0) -> TanhNormal:
    """Return a tanh-normal of the shape of `mean`, over which `std` is broadcast."""
    return TanhNormal(mean=mean, std=jnp.broadcast_to(std, mean.shape), low=low, high=high)


def _log_det_jacobian(u: Array) -> Array:
    """Return log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which stays finite where tanh(u) rounds to
    one."""
    return 2 * (jnp.log(2.0) - u - jax.nn.softplus(-2 * u))
