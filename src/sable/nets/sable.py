"""The Sable network: a retention encoder over views, a retention decoder over actions."""

import typing as tp
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sable.config.schema import SableConfig
from sable.kernels import block as block_kernel
from sable.kernels.fused_decoder import BlockWeights, DecoderWeights
from sable.nets.embeddings import ActionEmbedding, PolicyHead, ViewEmbedding, normalise_view, previous_tokens
from sable.nets.layers import Head, RMSNorm, SwiGLU, num_agent_embeddings, sinusoidal_encoding
from sable.nets.retention import CrossQueries, CrossRetention, SelfRetention
from sable.ops import sharding
from sable.ops.distributions import Distribution
from sable.types import EnvSpec, PyTree, struct


@struct
class BlockMemory:
    """The memories of one encoder and one decoder block, [B, H, d, d] each."""

    encoder: Array
    decoder_self: Array
    decoder_cross: Array


@struct
class TimestepProjections:
    """A timestep's projections in one decoder block, to be written into its memories."""

    self_projections: Array  # [B, N, 4 E] queries, keys, values, gates
    cross_projections: Array  # [B, N, 3 E] keys, values, gates


@struct
class BlockCache:
    """The key/value cache of one decoder block: keys and values side by side, [B, N, 2 E] in each of its
    retentions."""

    self_cache: Array
    cross_cache: Array


Memory = tuple[BlockMemory, ...]
"""One per block; () where nothing is to be remembered."""


def empty_cache(config: SableConfig, num_envs: int, num_agents: int) -> tuple[BlockCache, ...]:
    """Return the empty key/value cache that `decode_agent_cached` begins with."""
    zeros = jnp.zeros((num_envs, num_agents, 2 * config.embed_dim))
    return (BlockCache(self_cache=zeros, cross_cache=zeros),) * config.num_blocks


def initial_memory(config: SableConfig, num_envs: int) -> Memory:
    """Return memories of an episode not yet begun, or () where none are kept."""
    return _zero_memory(config, num_envs) if config.memory else ()


def _zero_memory(config: SableConfig, num_envs: int) -> Memory:
    head_dim = config.embed_dim // config.num_heads
    zeros = jnp.zeros((num_envs, config.num_heads, head_dim, head_dim))
    return (BlockMemory(encoder=zeros, decoder_self=zeros, decoder_cross=zeros),) * config.num_blocks


class EncoderBlock(nn.Module):
    """u = norm(x); a = norm(u + retention(u)); norm(a + SwiGLU(a))."""

    config: SableConfig

    def setup(self):
        self.norms = [RMSNorm() for _ in range(3)]
        config, agent_chunk = self.config, self.config.agent_chunk or None
        self.retention = SelfRetention(*_sizes(config), False, config.chunk_size or None, agent_chunk)
        self.feed_forward = SwiGLU(self.config.embed_dim)

    def sequence(self, x, time_encoding, memory, first):
        u = self.norms[0](x)
        x = u + time_encoding
        out, memory = self.retention.sequence(x, memory, first)
        return self._project_add_norm_ffn(u, out), memory

    def timestep(self, x, time_encoding, memory):
        u = self.norms[0](x)
        out, memory = self.retention.timestep(u + time_encoding, memory)
        return self._project_add_norm_ffn(u, out), memory

    def _project_add_norm_ffn(self, u, out):
        if _use_block_kernel(self):
            return _shard_block_kernel(
                block_kernel.project_add_norm_ffn, out, u, _ffn_weights(self, "retention")
            )
        a = self.norms[1](u + self.retention.output(out))
        return self.norms[2](a + self.feed_forward(a))


class DecoderBlock(nn.Module):
    """r = norm(x + retention(x)); y = norm(o + retention(o over r)); norm(y + SwiGLU(y))."""

    config: SableConfig

    def setup(self):
        self.norms = [RMSNorm() for _ in range(3)]
        chunk = self.config.chunk_size or None
        self.self_retention = SelfRetention(*_sizes(self.config), True, chunk)
        self.cross_retention = CrossRetention(*_sizes(self.config), chunk)
        self.feed_forward = SwiGLU(self.config.embed_dim)

    def sequence(self, x, encoded, time_encoding, self_memory, cross_memory, first):
        out, _ = self.self_retention.sequence(x + time_encoding, self_memory, first)
        r = self._project_add_norm(x, out)
        out, _ = self.cross_retention.sequence(
            encoded + time_encoding, r + time_encoding, cross_memory, first
        )
        return self._project_add_norm_ffn(encoded, out)

    def read_memory(self, encoded, time_encoding, memory):
        return self.cross_retention.read_memory(encoded + time_encoding, memory.decoder_cross)

    def timestep(self, x, encoded, time_encoding, memory, cross_queries):
        """Decode all agents of a timestep: (out, their projections); to the last bit, no agent sees a later
        one."""
        out, self_projections = self.self_retention.all_agents(x + time_encoding, memory.decoder_self)
        r = self._project_add_norm(x, out)
        out, cross_projections = self.cross_retention.all_agents(r + time_encoding, cross_queries)
        projections = TimestepProjections(
            self_projections=self_projections, cross_projections=cross_projections
        )
        return self._project_add_norm_ffn(encoded, out), projections

    def write_projections(self, memory, projections):
        self_retention, cross_retention = self.self_retention, self.cross_retention
        return replace(
            memory,
            decoder_self=self_retention.write_projections(memory.decoder_self, projections.self_projections),
            decoder_cross=cross_retention.write_projections(
                memory.decoder_cross, projections.cross_projections
            ),
        )

    def next_agent(self, x, encoded, time_encoding, memory, cross_queries, cache, agent):
        """Return `timestep` for the next agent alone; `cache` has the keys and values of those before."""
        out, self_cache = self.self_retention.next_agent(
            x + time_encoding, memory.decoder_self, cache.self_cache, agent
        )
        r = self._project_add_norm(x, out)
        out, cross_cache = self.cross_retention.next_agent(
            r + time_encoding, cross_queries, cache.cross_cache, agent
        )
        cache = BlockCache(self_cache=self_cache, cross_cache=cross_cache)
        return self._project_add_norm_ffn(encoded, out), cache

    def write_cache(self, memory, cache):
        return replace(
            memory,
            decoder_self=self.self_retention.write_cache(memory.decoder_self, cache.self_cache),
            decoder_cross=self.cross_retention.write_cache(memory.decoder_cross, cache.cross_cache),
        )

    def token(self, x, encoded, time_encoding, memory):
        """Decode the next agent of a timestep: (out, the memories that now hold it)."""
        out, self_memory = self.self_retention.token(x + time_encoding, memory.decoder_self)
        r = self._project_add_norm(x, out)
        out, cross_memory = self.cross_retention.token(
            encoded + time_encoding, r + time_encoding, memory.decoder_cross
        )
        return self._project_add_norm_ffn(encoded, out), replace(
            memory, decoder_self=self_memory, decoder_cross=cross_memory
        )

    def decay_memory(self, memory):
        return replace(
            memory,
            decoder_self=self.self_retention.decay_memory(memory.decoder_self),
            decoder_cross=self.cross_retention.decay_memory(memory.decoder_cross),
        )

    def _project_add_norm(self, x, out):
        if _use_block_kernel(self):
            return _shard_block_kernel(block_kernel.project_add_norm, out, x, _projection_weights(self))
        return self.norms[0](x + self.self_retention.output(out))

    def _project_add_norm_ffn(self, encoded, out):
        if _use_block_kernel(self):
            return _shard_block_kernel(
                block_kernel.project_add_norm_ffn, out, encoded, _ffn_weights(self, "cross_retention")
            )
        y = self.norms[1](encoded + self.cross_retention.output(out))
        return self.norms[2](y + self.feed_forward(y))


class Sable(nn.Module):
    """Encoder and decoder over a team's tokens. Agents come in whatever order the caller chose; `ids` says
    which they are.

    `evaluate_actions` scores actions already taken, over whole sequences; `encode`, `decay_memory` and
    `decode_agent` act, one timestep at a time. `systems.sable` has all ways of decoding.
    """

    config: SableConfig
    spec: EnvSpec

    def setup(self):
        width = self.config.embed_dim
        num_agents = num_agent_embeddings(self.config, self.spec)
        self.embed_view = ViewEmbedding(width, self.spec.view_size, RMSNorm(), num_agents)
        self.encoder = [EncoderBlock(self.config) for _ in range(self.config.num_blocks)]
        self.value_head = Head(width, 1)
        self.embed_action = ActionEmbedding(width, self.spec)
        self.decoder = [DecoderBlock(self.config) for _ in range(self.config.num_blocks)]
        self.policy_head = PolicyHead(width, self.spec)

    def normalise_view(self, view: Float[Array, "*b F"]) -> Float[Array, "*b G"]:
        """Return views as `evaluate_actions` takes them."""
        return normalise_view(view, RMSNorm, self.config.compute_dtype)

    def evaluate_actions(
        self,
        normalised_view: Float[Array, "T B N G"],
        action_mask: Bool[Array, "T B N A"],
        step_count: Int[Array, "T B"],
        action: Array,  # squashed, [T, B, N] or [T, B, N, action_size]
        ids: Int[Array, " N"],
        memory: Memory,
        first: Bool[Array, "T B"],
    ) -> tuple[Distribution, Float[Array, "T B N"]]:
        """Return each agent's distribution given the actions of those before it, and each agent's value."""
        # Inside, environment by environment: see `nets.retention`.
        normalised_view, action_mask, step_count, action = (
            x.swapaxes(0, 1) for x in (normalised_view, action_mask, step_count, action)
        )
        # Else XLA writes them down twice, once turned round for the weights' gradient, which takes longest.
        normalised_view = jax.lax.optimization_barrier(normalised_view)
        dtype = jnp.dtype(self.config.compute_dtype)
        time_encoding, block_memories = (
            self.encode_time(step_count).astype(dtype),
            self._block_memories(memory),
        )
        x = self.embed_view(normalised_view, ids)
        for block, block_memory in zip(self.encoder, block_memories, strict=True):
            x, _ = block.sequence(x, time_encoding, block_memory and block_memory.encoder, first)
        encoded, x = x, self.embed_action(previous_tokens(self.spec, action), dtype)
        for block, block_memory in zip(self.decoder, block_memories, strict=True):
            x = block.sequence(
                x,
                encoded,
                time_encoding,
                block_memory and block_memory.decoder_self,
                block_memory and block_memory.decoder_cross,
                first,
            )
        distribution = self.policy_head(x, action_mask)
        value = self.value_head(encoded)[..., 0].astype(jnp.float32)
        return jax.tree.map(lambda x: x.swapaxes(0, 1), (distribution, value))

    def encode(
        self, view: Float[Array, "B N F"], step_count: Int[Array, " B"], ids: Int[Array, " N"], memory: Memory
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B N"], Memory]:
        """Return one timestep seen by all agents: (their encodings, their values, the memory with this
        timestep in its encoder part)."""
        time_encoding, x, new = (
            self.encode_time(step_count),
            self.embed_view(normalise_view(view, RMSNorm), ids),
            [],
        )
        for block, block_memory in zip(self.encoder, self._block_memories(memory), strict=True):
            x, encoder = block.timestep(x, time_encoding, block_memory and block_memory.encoder)
            new.append(encoder)
        memory = tuple(
            replace(block_memory, encoder=encoder) for block_memory, encoder in zip(memory, new, strict=False)
        )
        return x, self.value_head(x)[..., 0], memory

    def decay_memory(self, memory: Memory, num_envs: int) -> Memory:
        """Return the memory with its decoder parts decayed, as the first agent of a timestep finds them;
        zeros where nothing is remembered."""
        if not memory:
            return _zero_memory(self.config, num_envs)
        return tuple(
            block.decay_memory(block_memory) for block, block_memory in zip(self.decoder, memory, strict=True)
        )

    def decode_agent(
        self,
        encoded: Float[Array, "B E"],
        action_mask: Bool[Array, "B A"],
        time_encoding: Float[Array, "B _"],  # this agent's, of `encode_time`
        previous: Array,  # the squashed action of the agent before, or `start_token`
        memory: Memory,
    ) -> tuple[Distribution, Memory]:
        """Return the next agent's distribution, and the memory that now holds it."""
        x, new = self.embed_action(previous), []
        for block, block_memory in zip(self.decoder, memory, strict=True):
            x, block_memory = block.token(x, encoded, time_encoding, block_memory)
            new.append(block_memory)
        return self.policy_head(x, action_mask), tuple(new)

    def read_memory(
        self, encoded: Float[Array, "B N E"], time_encoding: Float[Array, "B n _"], memory: Memory
    ) -> tuple[CrossQueries, ...]:
        """Return what `decode_all_agents` reads from the memory, whatever its tokens."""
        block_memories = memory or _zero_memory(self.config, encoded.shape[0])
        return tuple(
            block.read_memory(encoded, time_encoding, block_memory)
            for block, block_memory in zip(self.decoder, block_memories, strict=True)
        )

    def decode_all_agents(
        self,
        encoded: Float[Array, "B N E"],
        action_mask: Bool[Array, "B N A"],
        time_encoding: Float[Array, "B n _"],
        tokens: Array,  # what each agent is told of the one before
        memory: Memory,  # not decayed yet
        cross_queries: tuple[CrossQueries, ...],
    ) -> tuple[Distribution, tuple[TimestepProjections, ...]]:
        """Return `decode_agent` for all agents of a timestep at once, were these their tokens; their
        projections are not written yet."""
        x, projections = self.embed_action(tokens), []
        block_memories = memory or _zero_memory(self.config, x.shape[0])
        for block, block_memory, queries in zip(self.decoder, block_memories, cross_queries, strict=True):
            x, block_projections = block.timestep(x, encoded, time_encoding, block_memory, queries)
            projections.append(block_projections)
        return self.policy_head(x, action_mask), tuple(projections)

    def decode_agent_cached(
        self,
        encoded: Float[Array, "B E"],
        action_mask: Bool[Array, "B A"],
        time_encoding: Float[Array, "B _"],
        previous: Array,  # the squashed action of the agent before, or `start_token`
        memory: Memory,  # not decayed yet
        cross_queries: tuple[CrossQueries, ...],
        cache: tuple[BlockCache, ...],  # of the agents before it
        agent: Int[Array, ""],
    ) -> tuple[Distribution, tuple[BlockCache, ...]]:
        """Return `decode_agent` for the next agent of a timestep, by kernels and with a key/value cache,
        which is not written to the memory yet."""
        x, new = self.embed_action(previous), []
        block_memories = memory or _zero_memory(self.config, x.shape[0])
        for block, block_memory, queries, block_cache in zip(
            self.decoder, block_memories, cross_queries, cache, strict=True
        ):
            x, block_cache = block.next_agent(
                x, encoded, time_encoding, block_memory, queries, block_cache, agent
            )
            new.append(block_cache)
        return self.policy_head(x, action_mask), tuple(new)

    def write_projections(self, memory: Memory, projections: tuple[TimestepProjections, ...]) -> Memory:
        """Return the memory with the projections of `decode_all_agents` written into its decoder parts."""
        return tuple(map(DecoderBlock.write_projections, self.decoder, memory, projections)) if memory else ()

    def write_cache(self, memory: Memory, cache: tuple[BlockCache, ...]) -> Memory:
        """Return the memory with a timestep's keys and values written into its decoder parts."""
        return tuple(map(DecoderBlock.write_cache, self.decoder, memory, cache)) if memory else ()

    def embed_token(self, token: Array) -> Float[Array, "*b E"]:
        """Return the embedding of a token."""
        return self.embed_action(token)

    def encode_time(self, step_count: Int[Array, "*b"]) -> Float[Array, "*b n _"]:
        """Return what is added for positions: one for all agents of a timestep (n = 1) or one for each, by
        its place in the order; zeros where each timestep stands alone."""
        if not self.config.memory:
            return jnp.zeros((*step_count.shape, 1, 1))
        position = step_count[..., None]
        if self.config.positions == "token":
            place = jnp.broadcast_to(
                jnp.arange(self.spec.num_agents), (*step_count.shape, self.spec.num_agents)
            )
            position = position * self.spec.num_agents + place
        return sinusoidal_encoding(position, self.config.embed_dim)

    def _block_memories(self, memory: Memory) -> tuple:
        """Return each block's memory, () each where nothing is remembered."""
        return memory or ((),) * self.config.num_blocks


def decoder_weights(net: Sable, params: PyTree) -> DecoderWeights:
    """Return the decoder's parameters as the kernel takes them."""
    variables = params["params"]

    def block(variables: PyTree) -> BlockWeights:
        self_retention, cross_retention, feed_forward = (
            variables[name] for name in ("self_retention", "cross_retention", "feed_forward")
        )
        return BlockWeights(
            queries=cross_retention["query"]["kernel"],
            self_in=self_retention["projections"]["kernel"],
            self_scale=self_retention["scale"],
            self_bias=self_retention["bias"],
            self_out=self_retention["output"]["kernel"],
            cross_in=cross_retention["projections"]["kernel"],
            cross_scale=cross_retention["scale"],
            cross_bias=cross_retention["bias"],
            cross_out=cross_retention["output"]["kernel"],
            norms=tuple(variables[f"norms_{k}"]["scale"] for k in range(3)),
            ff_in=feed_forward["gate_and_input"]["kernel"],
            ff_out=feed_forward["output"]["kernel"],
        )

    head, every_token = variables["policy_head"]["head"], jnp.arange(net.spec.num_actions + 1)
    return DecoderWeights(
        blocks=tuple(block(variables[f"decoder_{k}"]) for k in range(net.config.num_blocks)),
        tokens=tp.cast(Array, net.apply(params, every_token, method=net.embed_token)),
        head_in=head["hidden"]["kernel"],
        head_bias=head["hidden"]["bias"],
        head_norm=head["norm"]["scale"],
        head_out=head["output"]["kernel"],
        head_out_bias=head["output"]["bias"],
    )


def _use_block_kernel(block: EncoderBlock | DecoderBlock) -> bool:
    """Return whether a block's sequences go through `kernels.block`; not where they are to come in chunks,
    nor while parameters are made, which layers do when they are called."""
    config = block.config
    return not config.chunk_size and not block.is_initializing() and block_kernel.use_kernel(config.embed_dim)


def _shard_block_kernel(form: tp.Callable, out: Array, residual: Array, weights: tuple[Array, ...]) -> Array:
    """Return a kernel's result, each device with its own environments."""
    return sharding.shard_map_envs(lambda weights, *tokens: form(*tokens, *weights), weights, out, residual)


def _projection_weights(block: DecoderBlock) -> tuple[Array, ...]:
    variables = block.variables["params"]
    return variables["self_retention"]["output"]["kernel"], variables["norms_0"]["scale"]


def _ffn_weights(block: EncoderBlock | DecoderBlock, retention: str) -> tuple[Array, ...]:
    variables = block.variables["params"]
    return (
        variables[retention]["output"]["kernel"],
        variables["norms_1"]["scale"],
        variables["feed_forward"]["gate_and_input"]["kernel"],
        variables["feed_forward"]["output"]["kernel"],
        variables["norms_2"]["scale"],
    )


def _sizes(config: SableConfig) -> tuple[int, int, float]:
    """Return the sizes that all retention layers share: width, heads, and how decays are scaled."""
    return config.embed_dim, config.num_heads, config.decay_scaling
