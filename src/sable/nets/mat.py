"""The MAT network: an attention encoder over views, a causal attention decoder over actions, both among the
agents of one timestep."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sable.config.schema import MATConfig
from sable.nets.embeddings import ActionEmbedding, PolicyHead, ViewEmbedding, normalise_view, previous_tokens
from sable.nets.layers import (
    Head,
    LayerNorm,
    RMSNorm,
    SwiGLU,
    broadcast_rows,
    dense,
    num_agent_embeddings,
    orthogonal_parts,
)
from sable.ops.distributions import Distribution
from sable.types import EnvSpec, struct


@struct
class KeyValueCache:
    """The decoder's key/value cache over the agents that have acted in this timestep: keys and values side by
    side, [B, N, 2E] in each of its attentions."""

    self_cache: tuple[Array, ...]  # one per block
    cross_cache: tuple[Array, ...]  # one per block
    index: Array  # how many agents have acted


class MLP(nn.Module):
    """Dense, GELU, then a near-zero Dense, at constant width."""

    width: int

    def setup(self):
        self.hidden = dense(self.width)
        self.output = dense(self.width, 0.01)

    def __call__(self, x: Float[Array, "*b E"]) -> Float[Array, "*b E"]:
        return self.output(nn.gelu(self.hidden(x)))


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v in every head, of `query` over `key`, whose stream also gives the values.

    Two ways in: all agents at once, and, while decoding, one agent after another.
    """

    width: int
    num_heads: int
    causal: bool
    cross: bool = False
    """Whether queries come from another stream than keys; else one product makes all three projections."""

    def setup(self):
        if self.cross:
            self.query = dense(self.width, 0.01, bias=False)
        parts = 2 if self.cross else 3
        self.projections = nn.Dense(parts * self.width, use_bias=False, kernel_init=orthogonal_parts(0.01))
        # Keys have no bias: it would add the same to all scores of a query, which the softmax does not see.
        self.query_bias = self.param("query_bias", nn.initializers.zeros, (self.width,))
        self.value_bias = self.param("value_bias", nn.initializers.zeros, (self.width,))
        self.output = dense(self.width, 0.01)

    def __call__(
        self,
        query: Float[Array, "*b N E"],  # the same as `key` unless `cross`
        key: Float[Array, "*b N E"],
    ) -> Float[Array, "*b N E"]:
        """Return the layer's output for every agent."""
        q, keys_values = self._project(query, key)
        num_agents = query.shape[-2]
        visible = jnp.tri(num_agents, dtype=bool) if self.causal else jnp.ones((num_agents,) * 2, bool)
        return self._attend(q, keys_values, visible)

    def token(
        self,
        query: Float[Array, "B E"],
        key: Float[Array, "B E"],
        cache: Float[Array, "B N 2*E"],
        index: Array,
    ) -> tuple[Float[Array, "B E"], Float[Array, "B N 2*E"]]:
        """Return the output for agent `index`, and the cache that now holds it."""
        q, keys_values = self._project(query, key)
        cache = jax.lax.dynamic_update_index_in_dim(cache, keys_values, index, axis=1)
        visible = jnp.arange(cache.shape[1]) <= index
        return self._attend(q[:, None], cache, visible[None])[:, 0], cache

    def _project(self, query, key):
        """Return queries, and keys and values side by side."""
        if self.cross:
            q, keys_values = self.query(query), self.projections(key)
        else:
            q, keys_values = jnp.split(self.projections(key), [self.width], axis=-1)
        return q + broadcast_rows(self.query_bias, q.shape), keys_values

    def _attend(self, q, keys_values, visible):
        """Return the output for queries [*b, n, E] over keys and values [*b, N, 2E], as far as `visible` [n,
        N]."""
        k, v = jnp.split(keys_values, 2, axis=-1)
        shape, (q, k, v) = q.shape, (x.reshape(*x.shape[:-1], self.num_heads, -1) for x in (q, k, v))
        scores = jnp.einsum("...nhi,...mhi->...hnm", q, k) * q.shape[-1] ** -0.5
        visible = jnp.broadcast_to(visible, scores.shape)
        weights = nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min))
        out = jnp.einsum("...hnm,...mhj->...nhj", weights, v).reshape(shape)
        # Weights sum to one: a bias of the values comes out as it went in.
        return self.output(out + broadcast_rows(self.value_bias, shape))


class EncoderBlock(nn.Module):
    """a = norm(x + attention(x)); norm(a + feed_forward(a))."""

    config: MATConfig

    def setup(self):
        self.norms = [_norm(self.config)() for _ in range(2)]
        self.attention = _attention(self.config, causal=False)
        self.feed_forward = _feed_forward(self.config)

    def __call__(self, x: Float[Array, "*b N E"]) -> Float[Array, "*b N E"]:
        a = self.norms[0](x + self.attention(x, x))
        return self.norms[1](a + self.feed_forward(a))


class DecoderBlock(nn.Module):
    """r = norm(x + attention(x)); y = norm(o + attention(o over r)); norm(y + feed_forward(y))."""

    config: MATConfig

    def setup(self):
        self.norms = [_norm(self.config)() for _ in range(3)]
        self.self_attention = _attention(self.config, causal=True)
        self.cross_attention = _attention(self.config, causal=True, cross=True)
        self.feed_forward = _feed_forward(self.config)

    def __call__(self, x, encoded):
        r = self.norms[0](x + self.self_attention(x, x))
        return self._add_norm_ffn(encoded, self.cross_attention(encoded, r))

    def token(self, x, encoded, self_cache, cross_cache, index):
        out, self_cache = self.self_attention.token(x, x, self_cache, index)
        r = self.norms[0](x + out)
        out, cross_cache = self.cross_attention.token(encoded, r, cross_cache, index)
        return self._add_norm_ffn(encoded, out), self_cache, cross_cache

    def _add_norm_ffn(self, encoded, out):
        y = self.norms[1](encoded + out)
        return self.norms[2](y + self.feed_forward(y))


class MAT(nn.Module):
    """Encoder and decoder over a team's tokens, with the methods of `nets.sable.Sable` for encoding and
    learning, so that one policy serves both. Nothing is remembered: times, memories and `first` go unused."""

    config: MATConfig
    spec: EnvSpec

    def setup(self):
        width = self.config.embed_dim
        num_agents = num_agent_embeddings(self.config, self.spec)
        # Until meaning 3 action embedding and heads had Sable's norm, whatever the other layers had.
        end_norm = _norm(self.config) if self.config.meaning >= 3 else RMSNorm
        self.embed_view = ViewEmbedding(
            width, self.spec.view_size, _norm(self.config)(), num_agents, bias=True
        )
        self.embedding_norm = _norm(self.config)()
        self.encoder = [EncoderBlock(self.config) for _ in range(self.config.num_blocks)]
        self.value_head = Head(width, 1, end_norm)
        self.embed_action = ActionEmbedding(width, self.spec, end_norm)
        self.decoder = [DecoderBlock(self.config) for _ in range(self.config.num_blocks)]
        self.policy_head = PolicyHead(width, self.spec, end_norm)

    def normalise_view(self, view: Float[Array, "*b F"]) -> Float[Array, "*b G"]:
        """Return views as `evaluate_actions` takes them."""
        return normalise_view(view, _norm(self.config))

    def evaluate_actions(
        self,
        normalised_view: Float[Array, "T B N G"],
        action_mask: Bool[Array, "T B N A"],
        step_count: Int[Array, "T B"],
        action: Array,  # squashed, [T, B, N] or [T, B, N, action_size]
        ids: Int[Array, " N"],
        memory: tuple[()],
        first: Bool[Array, "T B"],
    ) -> tuple[Distribution, Float[Array, "T B N"]]:
        """Return each agent's distribution given the actions of those before it, and each agent's value."""
        encoded, values = self._encode(normalised_view, ids)
        x = self.embed_action(previous_tokens(self.spec, action))
        for block in self.decoder:
            x = block(x, encoded)
        return self.policy_head(x, action_mask), values

    def encode(
        self,
        view: Float[Array, "B N F"],
        step_count: Int[Array, " B"],
        ids: Int[Array, " N"],
        memory: tuple[()],
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B N"], tuple[()]]:
        """Return one timestep seen by all agents: (their encodings, their values, nothing remembered)."""
        return *self._encode(self.normalise_view(view), ids), ()

    def empty_cache(self, num_envs: int) -> KeyValueCache:
        """Return an empty key/value cache, for the first agent of a timestep."""
        empty = jnp.zeros((num_envs, self.spec.num_agents, 2 * self.config.embed_dim))
        caches = (empty,) * self.config.num_blocks
        return KeyValueCache(self_cache=caches, cross_cache=caches, index=jnp.zeros((), jnp.int32))

    def decode_agent(
        self,
        encoded: Float[Array, "B E"],
        action_mask: Bool[Array, "B A"],
        previous: Array,  # the squashed action of the agent before, or `start_token`
        cache: KeyValueCache,
    ) -> tuple[Distribution, KeyValueCache]:
        """Return the next agent's distribution, and the cache that now holds it."""
        x, self_caches, cross_caches = self.embed_action(previous), [], []
        for block, self_cache, cross_cache in zip(
            self.decoder, cache.self_cache, cache.cross_cache, strict=True
        ):
            x, self_cache, cross_cache = block.token(x, encoded, self_cache, cross_cache, cache.index)
            self_caches.append(self_cache)
            cross_caches.append(cross_cache)
        cache = KeyValueCache(
            self_cache=tuple(self_caches), cross_cache=tuple(cross_caches), index=cache.index + 1
        )
        return self.policy_head(x, action_mask), cache

    def encode_time(self, step_count: Int[Array, "*b"]) -> tuple[()]:
        """Nothing: each timestep stands alone."""
        return ()

    def _encode(self, normalised_view, ids):
        x = self.embedding_norm(self.embed_view(normalised_view, ids))
        for block in self.encoder:
            x = block(x)
        return x, self.value_head(x)[..., 0]


def _norm(config: MATConfig) -> type[RMSNorm | LayerNorm]:
    return RMSNorm if config.rms_norm else LayerNorm


def _feed_forward(config: MATConfig) -> SwiGLU | MLP:
    return SwiGLU(config.embed_dim) if config.swiglu else MLP(config.embed_dim)


def _attention(config: MATConfig, *, causal: bool, cross: bool = False) -> Attention:
    return Attention(config.embed_dim, config.num_heads, causal, cross)
