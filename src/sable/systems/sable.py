"""Sable: the retention network as a PPO policy, and the four ways in which its teams decode.

A team acts from top to bottom: `autoregressive.act` encodes all agents at once, and one of the decoders here
turns what they decide from into their actions. All sample the same, since the noise is drawn beforehand;
`decode_sequential` is the definition.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from sable.config.schema import SableConfig
from sable.errors import SableError
from sable.kernels import fused_decoder, gpu
from sable.nets.embeddings import previous_tokens
from sable.nets.sable import Memory, Sable, decoder_weights, empty_cache, initial_memory
from sable.ops import sharding
from sable.ops.distributions import masked_categorical
from sable.systems import autoregressive, ppo
from sable.systems.autoregressive import Decoder, TeamActions, TeamInputs, apply
from sable.systems.base import System
from sable.types import EnvSpec, PyTree

SMALL_TEAM, SMALL_NETWORK = 64, 64**2
"""Up to how many agents, and how many blocks times squared width, fused decoding beats Jacobi decoding:
beyond, its weights leave the cache. For every agent those before it are read again, so more than so many
are not decoded with a cache either."""


def make(spec: EnvSpec, config: SableConfig) -> System:
    """Return Sable for this kind of environment."""
    return ppo.make(make_policy(spec, config), config, spec)


def make_policy(spec: EnvSpec, config: SableConfig) -> ppo.Policy:
    """Return the network's side of it."""
    check_decoding(spec, config)
    net = Sable(config, spec)
    return autoregressive.make_policy(
        net,
        make_decoder(net),
        partial(initial_memory, config),
        chunk=config.rollout_length if config.memory else 1,
        compute_dtype=config.compute_dtype,
    )


def check_decoding(spec: EnvSpec, config: SableConfig) -> None:
    """Raise unless the decoding that was asked for can be had."""
    decoding, supported = config.decoding, fused_decoder.supported(config.embed_dim, config.num_heads)
    if decoding in ("fused", "cached") and not (supported and (spec.discrete or decoding == "cached")):
        actions = "discrete actions, and " if decoding == "fused" else ""
        raise SableError(
            f"decoding='{decoding}' takes {actions}an embed_dim that is a power of two and at least 16 times "
            f"num_heads={config.num_heads}; decoding='sequential' takes all"
        )
    if decoding in ("fused", "cached") and jax.default_backend() == "gpu" and not gpu.supports_kernels():
        raise SableError(
            f"decoding='{decoding}' takes an NVIDIA GPU of compute capability 8.0 or more; "
            "decoding='sequential' takes any"
        )


def make_decoder(net: Sable) -> Decoder:
    """Return the network's decoder, as `resolve_decoding` says."""
    decoding = resolve_decoding(net)
    if decoding == "sequential":  # whose scan XLA divides among devices by itself
        return partial(decode_sequential, net)
    decode = {"cached": decode_cached, "jacobi": decode_jacobi, "fused": decode_fused}[decoding]
    return partial(sharding.shard_map_envs, partial(decode, net))


def resolve_decoding(net: Sable) -> str:
    """Return the decoding of a network's teams: as configured, or for `auto` what was measured fastest
    (benchmarks/README.md)."""
    config, spec = net.config, net.spec
    if config.decoding != "auto":
        return config.decoding
    if jax.default_backend() != "gpu":
        return "sequential"
    fits = gpu.supports_kernels() and fused_decoder.supported(config.embed_dim, config.num_heads)
    few = fits and spec.num_agents <= SMALL_TEAM
    # No guess of a number comes true early: Jacobi would take as many rounds as agents, each of all agents.
    if not spec.discrete:
        return "cached" if few else "sequential"
    # The kernel knows one position for all agents of a timestep.
    small = (
        config.positions == "timestep" and few and config.num_blocks * config.embed_dim**2 <= SMALL_NETWORK
    )
    return "fused" if small else "jacobi"


def decode_sequential(
    net: Sable, params: PyTree, inputs: TeamInputs, memory: Memory
) -> tuple[TeamActions, Memory]:
    """Return (the actions of all agents, the memory after them) by autoregressive decoding, agent after agent
    in a scan: the truth the other decoders are held to."""

    def decide(state, token, agent):
        where = agent.encoded, agent.action_mask, agent.time_encoding
        return apply(net, params, net.decode_agent, *where, token, state)

    state = apply(net, params, net.decay_memory, memory, inputs.encoded.shape[0])
    actions, state = autoregressive.scan_agents(net.spec, decide, state, inputs)
    return actions, state if memory else ()


def decode_cached(
    net: Sable, params: PyTree, inputs: TeamInputs, memory: Memory
) -> tuple[TeamActions, Memory]:
    """Return what `decode_sequential` returns, to rounding, with a key/value cache: kernels leave the
    memories alone until all agents have decided. Interpreted, and slow, without a GPU."""

    def decide(state, token, agent):
        index, cache = state
        where = agent.encoded, agent.action_mask, agent.time_encoding
        past = memory, cross_queries, cache, index
        distribution, cache = apply(net, params, net.decode_agent_cached, *where, token, *past)
        return distribution, (index + 1, cache)

    cross_queries = apply(net, params, net.read_memory, inputs.encoded, inputs.time_encoding, memory)
    start = jnp.int32(0), empty_cache(net.config, *inputs.encoded.shape[:2])
    actions, (_, cache) = autoregressive.scan_agents(net.spec, decide, start, inputs)
    return actions, apply(net, params, net.write_cache, memory, cache)


def decode_jacobi(
    net: Sable, params: PyTree, inputs: TeamInputs, memory: Memory
) -> tuple[TeamActions, Memory]:
    """Return what `decode_sequential` returns, to rounding, by Jacobi (fixed-point) decoding: all agents
    decide at once, given guesses of what the others do, until the guesses come true.

    The noise is drawn beforehand, so what an agent does follows from what those before it do. A round in
    which nothing changes has found just what deciding in turn finds. Since no agent sees a later one, each
    round settles one agent more at least, and as many rounds as there are agents settle all.
    """
    where = inputs.encoded, inputs.action_mask, inputs.time_encoding
    cross_queries = apply(net, params, net.read_memory, inputs.encoded, inputs.time_encoding, memory)

    def decide(raw):
        """Return what the agents do if the others do `raw`, and their projections."""
        squashed = raw if net.spec.discrete else jnp.tanh(raw)
        tokens = previous_tokens(net.spec, squashed[None])[0]
        past = memory, cross_queries
        distribution, projections = apply(net, params, net.decode_all_agents, *where, tokens, *past)
        return projections, autoregressive.sample(distribution, inputs.noise)

    def unconverged(state):
        guess, (_, actions), rounds = state
        return sharding.any_learner((guess != actions.raw).any()) & (rounds < net.spec.num_agents)

    def iterate(state):
        _, (_, actions), rounds = state
        return actions.raw, decide(actions.raw), rounds + 1

    # What the noise alone leads to: nearly all of it comes true while a policy is still undecided.
    guess = (
        masked_categorical(inputs.noise, inputs.action_mask).mode()
        if net.spec.discrete
        else jnp.zeros_like(inputs.noise)
    )
    # Carried round are a timestep's few projections, not the memories they go into.
    _, (projections, actions), _ = jax.lax.while_loop(
        unconverged, iterate, (guess, decide(guess), jnp.int32(1))
    )
    return actions, apply(net, params, net.write_projections, memory, projections)


def decode_fused(
    net: Sable, params: PyTree, inputs: TeamInputs, memory: Memory
) -> tuple[TeamActions, Memory]:
    """Return what `decode_sequential` returns, to rounding, by one fused kernel, for discrete actions:
    interpreted, and slow, without a GPU."""
    num_envs, _, width = inputs.encoded.shape
    decayed_memory = apply(net, params, net.decay_memory, memory, num_envs)
    outputs = fused_decoder.decode(
        decoder_weights(net, params),
        inputs.encoded,
        jnp.broadcast_to(inputs.time_encoding[:, 0], (num_envs, width)),
        inputs.action_mask,
        inputs.noise,
        tuple(block.decoder_self for block in decayed_memory),
        tuple(block.decoder_cross for block in decayed_memory),
    )
    new_memory = tuple(
        replace(block, decoder_self=own, decoder_cross=cross)
        for block, own, cross in zip(decayed_memory, outputs.self_memory, outputs.cross_memory, strict=True)
    )
    actions = TeamActions(raw=outputs.raw, action=outputs.raw, log_prob=outputs.log_prob)
    return actions, new_memory if memory else ()
