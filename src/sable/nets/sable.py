"""The Sable network: a retention encoder over views, a retention decoder over actions."""

import typing as tp
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sable.config.schema import SableConfig
from sable.kernels import block as kernel
from sable.kernels.fused_decoder import BlockWeights, DecoderWeights
from sable.nets.embeddings import ActionEmbedding, PolicyHead, ViewEmbedding, look, previous_tokens
from sable.nets.layers import Head, RMSNorm, SwiGLU, num_identities, time_encoding
from sable.nets.retention import MultiScaleRetention
from sable.ops import sharding
from sable.ops.distributions import Distribution
from sable.types import EnvSpec, PyTree, struct


@struct
class BlockMemory:
    """What one encoder and one decoder block remember of an episode; [B, H, d, d] each."""

    encoder: Array
    decoder_self: Array
    decoder_cross: Array


class Told(tp.NamedTuple):
    """What the agents of a timestep tell one decoder block's memories: projections, or only keys and values,
    [B, N, _]."""

    own: Array
    cross: Array


Asked = tuple[Array, Array]
"""A decoder block's queries of a timestep, and what its memory says to them; [B, N, E] each."""

Memory = tuple[BlockMemory, ...]
"""One per block; () where nothing is to be remembered."""


def nothing_told(config: SableConfig, num_envs: int, num_agents: int) -> tuple[Told, ...]:
    """What `decode_row` is given before the first agent."""
    zeros = jnp.zeros((num_envs, num_agents, 2 * config.embed_dim))
    return (Told(zeros, zeros),) * config.num_blocks


def initial_memory(config: SableConfig, num_envs: int) -> Memory:
    """Memories of an episode not yet begun, or () where none are kept."""
    return _zeros(config, num_envs) if config.memory else ()


def _zeros(config: SableConfig, num_envs: int) -> Memory:
    head = config.embed_dim // config.num_heads
    zeros = jnp.zeros((num_envs, config.num_heads, head, head))
    return (BlockMemory(encoder=zeros, decoder_self=zeros, decoder_cross=zeros),) * config.num_blocks


class EncoderBlock(nn.Module):
    """u = norm(x); a = norm(u + retention(u)); norm(a + SwiGLU(a))."""

    config: SableConfig

    def setup(self):
        self.norms = [RMSNorm() for _ in range(3)]
        self.retention = _retention(self.config, causal=False, agent_chunk=self.config.agent_chunk or None)
        self.feed_forward = SwiGLU(self.config.embed_dim)

    def sequence(self, x, time, memory, first):
        u = self.norms[0](x)
        x = u + time
        out, memory = self.retention.sequence(x, x, memory, first)
        return self._finish(u, out), memory

    def timestep(self, x, time, memory):
        u = self.norms[0](x)
        out, memory = self.retention.timestep(u + time, memory)
        return self._finish(u, out), memory

    def _finish(self, u, out):
        if _ends_by_kernel(self):
            return _end(kernel.finish, out, u, _finish_weights(self, "retention"))
        a = self.norms[1](u + self.retention.output(out))
        return self.norms[2](a + self.feed_forward(a))


class DecoderBlock(nn.Module):
    """r = norm(x + retention(x)); y = norm(o + retention(o over r)); norm(y + SwiGLU(y))."""

    config: SableConfig

    def setup(self):
        self.norms = [RMSNorm() for _ in range(3)]
        self.self_retention = _retention(self.config, causal=True)
        self.cross_retention = _retention(self.config, causal=True, cross=True)
        self.feed_forward = SwiGLU(self.config.embed_dim)

    def sequence(self, x, encoded, time, self_memory, cross_memory, first):
        here = x + time
        out, _ = self.self_retention.sequence(here, here, self_memory, first)
        r = self._mend(x, out)
        out, _ = self.cross_retention.sequence(encoded + time, r + time, cross_memory, first)
        return self._finish(encoded, out)

    def ask(self, encoded, time, memory):
        return self.cross_retention.ask(encoded + time, memory.decoder_cross)

    def timestep(self, x, encoded, time, memory, asked):
        """All agents of a timestep, and what they tell; to the last bit, no agent sees a later one."""
        out, own = self.self_retention.team(x + time, memory.decoder_self)
        r = self._mend(x, out)
        out, cross = self.cross_retention.team(r + time, asked)
        return self._finish(encoded, out), Told(own, cross)

    def row(self, x, encoded, time, memory, asked, kept, agent):
        """`timestep` for the next agent alone; `kept` are the keys and values of those before."""
        out, own = self.self_retention.row(x + time, memory.decoder_self, kept.own, agent)
        r = self._mend(x, out)
        out, cross = self.cross_retention.row(r + time, asked, kept.cross, agent)
        return self._finish(encoded, out), Told(own, cross)

    def remember(self, memory, told):
        return replace(
            memory,
            decoder_self=self.self_retention.remember(memory.decoder_self, told.own),
            decoder_cross=self.cross_retention.remember(memory.decoder_cross, told.cross),
        )

    def token(self, x, encoded, time, memory):
        out, self_memory = self.self_retention.token(x + time, x + time, memory.decoder_self)
        r = self._mend(x, out)
        out, cross_memory = self.cross_retention.token(encoded + time, r + time, memory.decoder_cross)
        return self._finish(encoded, out), replace(
            memory, decoder_self=self_memory, decoder_cross=cross_memory
        )

    def open(self, memory):
        return replace(
            memory,
            decoder_self=self.self_retention.open(memory.decoder_self),
            decoder_cross=self.cross_retention.open(memory.decoder_cross),
        )

    def _mend(self, x, out):
        if _ends_by_kernel(self):
            return _end(kernel.mend, out, x, _mend_weights(self))
        return self.norms[0](x + self.self_retention.output(out))

    def _finish(self, encoded, out):
        if _ends_by_kernel(self):
            return _end(kernel.finish, out, encoded, _finish_weights(self, "cross_retention"))
        y = self.norms[1](encoded + self.cross_retention.output(out))
        return self.norms[2](y + self.feed_forward(y))


class Sable(nn.Module):
    """Encoder and decoder over a team's tokens. Agents come in whatever order the caller chose; `ids` says
    which they are.

    `evaluate` scores actions already taken, over whole sequences; `encode`, `open` and `decode` act, one
    timestep at a time.
    """

    config: SableConfig
    spec: EnvSpec

    def setup(self):
        width = self.config.embed_dim
        num_agents = num_identities(self.config, self.spec)
        self.embed_view = ViewEmbedding(width, self.spec.view_size, RMSNorm(), num_agents)
        self.encoder = [EncoderBlock(self.config) for _ in range(self.config.num_blocks)]
        self.value_head = Head(width, 1)
        self.embed_action = ActionEmbedding(width, self.spec)
        self.decoder = [DecoderBlock(self.config) for _ in range(self.config.num_blocks)]
        self.policy_head = PolicyHead(width, self.spec)

    def look(self, view: Float[Array, "*b F"]) -> Float[Array, "*b G"]:
        """Views as `evaluate` takes them."""
        return look(view, RMSNorm, self.config.compute)

    def evaluate(
        self,
        seen: Float[Array, "T B N G"],
        legal: Bool[Array, "T B N A"],
        time: Int[Array, "T B"],
        action: Array,  # squashed, [T, B, N] or [T, B, N, action_size]
        ids: Int[Array, " N"],
        memory: Memory,
        first: Bool[Array, "T B"],
    ) -> tuple[Distribution, Float[Array, "T B N"]]:
        """Each agent's distribution given the actions of those before it, and each agent's value."""
        # Inside, environment by environment: see MultiScaleRetention.
        seen, legal, time, action = (x.swapaxes(0, 1) for x in (seen, legal, time, action))
        # Else XLA writes them down twice, once turned round for the weights' gradient, which takes longest.
        seen = jax.lax.optimization_barrier(seen)
        dtype = jnp.dtype(self.config.compute)
        clock, pasts = self.clock(time).astype(dtype), self._pasts(memory)
        x = self.embed_view(seen, ids)
        for block, past in zip(self.encoder, pasts, strict=True):
            x, _ = block.sequence(x, clock, past and past.encoder, first)
        encoded, x = x, self.embed_action(previous_tokens(self.spec, action), dtype)
        for block, past in zip(self.decoder, pasts, strict=True):
            x = block.sequence(
                x, encoded, clock, past and past.decoder_self, past and past.decoder_cross, first
            )
        distribution = self.policy_head(x, legal)
        value = self.value_head(encoded)[..., 0].astype(jnp.float32)
        return jax.tree.map(lambda x: x.swapaxes(0, 1), (distribution, value))

    def encode(
        self, view: Float[Array, "B N F"], time: Int[Array, " B"], ids: Int[Array, " N"], memory: Memory
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B N"], Memory]:
        """One timestep seen by all agents: (their encodings, their values, the memory with this timestep in
        its encoder part)."""
        clock, x, new = self.clock(time), self.embed_view(look(view, RMSNorm), ids), []
        for block, past in zip(self.encoder, self._pasts(memory), strict=True):
            x, encoder = block.timestep(x, clock, past and past.encoder)
            new.append(encoder)
        memory = tuple(replace(past, encoder=encoder) for past, encoder in zip(memory, new, strict=False))
        return x, self.value_head(x)[..., 0], memory

    def open(self, memory: Memory, num_envs: int) -> Memory:
        """The memory with its decoder parts as the first agent of a timestep finds them."""
        if not memory:
            return _zeros(self.config, num_envs)
        return tuple(block.open(past) for block, past in zip(self.decoder, memory, strict=True))

    def decode(
        self,
        encoded: Float[Array, "B E"],
        legal: Bool[Array, "B A"],
        clock: Float[Array, "B _"],  # this agent's, of `clock`
        previous: Array,  # the squashed action of the agent before, or `start_token`
        memory: Memory,
    ) -> tuple[Distribution, Memory]:
        """The next agent's distribution, and the memory that now holds it."""
        x, new = self.embed_action(previous), []
        for block, past in zip(self.decoder, memory, strict=True):
            x, past = block.token(x, encoded, clock, past)
            new.append(past)
        return self.policy_head(x, legal), tuple(new)

    def ask(
        self, encoded: Float[Array, "B N E"], clock: Float[Array, "B n _"], memory: Memory
    ) -> tuple[Asked, ...]:
        """What `decode_all` finds in the memory, whatever its tokens."""
        pasts = memory or _zeros(self.config, encoded.shape[0])
        return tuple(block.ask(encoded, clock, past) for block, past in zip(self.decoder, pasts, strict=True))

    def decode_all(
        self,
        encoded: Float[Array, "B N E"],
        legal: Bool[Array, "B N A"],
        clock: Float[Array, "B n _"],
        tokens: Array,  # what each agent is told of the one before
        memory: Memory,  # not opened
        asked: tuple[Asked, ...],
    ) -> tuple[Distribution, tuple[Told, ...]]:
        """`decode` for all agents of a timestep at once, were these their tokens; what they tell is not
        remembered yet."""
        x, told = self.embed_action(tokens), []
        pasts = memory or _zeros(self.config, x.shape[0])
        for block, past, found in zip(self.decoder, pasts, asked, strict=True):
            x, by_block = block.timestep(x, encoded, clock, past, found)
            told.append(by_block)
        return self.policy_head(x, legal), tuple(told)

    def decode_row(
        self,
        encoded: Float[Array, "B E"],
        legal: Bool[Array, "B A"],
        clock: Float[Array, "B _"],
        previous: Array,  # the squashed action of the agent before, or `start_token`
        memory: Memory,  # not opened
        asked: tuple[Asked, ...],
        kept: tuple[Told, ...],  # by the agents before it
        agent: Int[Array, ""],
    ) -> tuple[Distribution, tuple[Told, ...]]:
        """`decode` for the next agent of a timestep, by kernels; what is told is not remembered yet."""
        x, told = self.embed_action(previous), []
        pasts = memory or _zeros(self.config, x.shape[0])
        for block, past, found, earlier in zip(self.decoder, pasts, asked, kept, strict=True):
            x, by_block = block.row(x, encoded, clock, past, found, earlier, agent)
            told.append(by_block)
        return self.policy_head(x, legal), tuple(told)

    def remember(self, memory: Memory, told: tuple[Told, ...]) -> Memory:
        """The memory with what a timestep's agents tell in its decoder parts."""
        return tuple(map(DecoderBlock.remember, self.decoder, memory, told)) if memory else ()

    def embed_token(self, token: Array) -> Float[Array, "*b E"]:
        """What an agent makes of what it is told."""
        return self.embed_action(token)

    def clock(self, time: Int[Array, "*b"]) -> Float[Array, "*b n _"]:
        """Return what is added for positions: one for all agents of a timestep (n = 1) or one for each, by
        its place in the order; zeros where each timestep stands alone."""
        if not self.config.memory:
            return jnp.zeros((*time.shape, 1, 1))
        position = time[..., None]
        if self.config.positions == "token":
            place = jnp.broadcast_to(jnp.arange(self.spec.num_agents), (*time.shape, self.spec.num_agents))
            position = position * self.spec.num_agents + place
        return time_encoding(position, self.config.embed_dim)

    def _pasts(self, memory: Memory) -> tuple:
        """What each block remembers, () each where nothing is."""
        return memory or ((),) * self.config.num_blocks


def decoder_weights(net: Sable, params: PyTree) -> DecoderWeights:
    """The decoder's parameters as the kernel takes them."""
    own = params["params"]

    def block(own: PyTree) -> BlockWeights:
        self_retention, cross_retention, feed_forward = (
            own[name] for name in ("self_retention", "cross_retention", "feed_forward")
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
            norms=tuple(own[f"norms_{k}"]["scale"] for k in range(3)),
            ff_in=feed_forward["gate_and_input"]["kernel"],
            ff_out=feed_forward["output"]["kernel"],
        )

    head, every_token = own["policy_head"]["head"], jnp.arange(net.spec.num_actions + 1)
    return DecoderWeights(
        blocks=tuple(block(own[f"decoder_{k}"]) for k in range(net.config.num_blocks)),
        tokens=tp.cast(Array, net.apply(params, every_token, method=net.embed_token)),
        head_in=head["hidden"]["kernel"],
        head_bias=head["hidden"]["bias"],
        head_norm=head["norm"]["scale"],
        head_out=head["output"]["kernel"],
        head_out_bias=head["output"]["bias"],
    )


def _ends_by_kernel(block: EncoderBlock | DecoderBlock) -> bool:
    """Whether a block's sequences go through `kernels.block`; not where they are to come in chunks, nor while
    parameters are made, which layers do when they are called."""
    config = block.config
    return not config.chunk_size and not block.is_initializing() and kernel.chosen(config.embed_dim)


def _end(form: tp.Callable, out: Array, residual: Array, weights: tuple[Array, ...]) -> Array:
    """A kernel's result, each device with its own environments."""
    return sharding.apart(lambda weights, *tokens: form(*tokens, *weights), weights, out, residual)


def _mend_weights(block: DecoderBlock) -> tuple[Array, ...]:
    own = block.variables["params"]
    return own["self_retention"]["output"]["kernel"], own["norms_0"]["scale"]


def _finish_weights(block: EncoderBlock | DecoderBlock, retention: str) -> tuple[Array, ...]:
    own = block.variables["params"]
    return (
        own[retention]["output"]["kernel"],
        own["norms_1"]["scale"],
        own["feed_forward"]["gate_and_input"]["kernel"],
        own["feed_forward"]["output"]["kernel"],
        own["norms_2"]["scale"],
    )


def _retention(
    config: SableConfig, *, causal: bool, cross: bool = False, agent_chunk: int | None = None
) -> MultiScaleRetention:
    sizes = config.embed_dim, config.num_heads, config.decay_scaling
    return MultiScaleRetention(*sizes, causal, cross, config.chunk_size or None, agent_chunk)
