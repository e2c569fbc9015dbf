"""Policies whose agents are encoded together and then act one after another: what Sable and MAT share.

Agents are processed in `order`, whatever it is; what comes out is in their natural order again.
"""

import typing as tp
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from sable.kernels import fused_decoder, gpu
from sable.nets.embeddings import next_token, previous_tokens, start_token
from sable.nets.mat import MAT
from sable.nets.sable import Sable, decoder_weights, empty_projections
from sable.ops import sharding
from sable.ops.distributions import Categorical, TanhNormal, masked_categorical
from sable.systems import ppo
from sable.types import Decision, Observation, PyTree, Transition

Net = Sable | MAT
SMALL_TEAM, SMALL_NETWORK = 64, 64**2
"""Up to how many agents, and how many blocks times squared width, fused decoding beats Jacobi decoding:
beyond, its weights leave the cache. For every agent those before it are read again, so more than so many
are not decoded with a cache either."""


def make_policy(net: Net, initial_memory: tp.Callable[[int], PyTree], chunk: int) -> ppo.Policy:
    """Return the network as a PPO policy that learns from `chunk` time steps at a stretch."""
    return ppo.Policy(
        init=partial(init, net),
        initial_memory=initial_memory,
        act=partial(act, net),
        value=partial(value, net),
        prepare=partial(prepare, net),
        evaluate_actions=partial(evaluate_actions, net),
        learning_rate=net.config.learning_rate,
        chunk=chunk,
        agent_order=net.config.agent_order,
    )


def init(net: Net, key: Array) -> PyTree:
    """Return fresh parameters, made through `evaluate_actions`, which touches every one of them."""
    spec = net.spec
    team = (1, 1, spec.num_agents)
    return net.init(
        key,
        normalised_view=net.normalise_view(jnp.zeros((*team, spec.view_size))),
        action_mask=jnp.ones((*team, spec.num_actions or 1), bool),
        step_count=jnp.zeros((1, 1), jnp.int32),
        action=jnp.zeros(team, jnp.int32) if spec.discrete else jnp.zeros((*team, spec.action_size)),
        ids=jnp.arange(spec.num_agents),
        memory=(),  # parameters do not depend on it
        first=jnp.ones((1, 1), bool),
        method=net.evaluate_actions,
    )


def act(
    net: Net, params: PyTree, observation: Observation, memory: PyTree, order: Array, key: Array | None
) -> Decision:
    """Return one decision for the whole team: all agents encoded at once, then decoded in `order`."""
    view, action_mask = observation.view[:, order], observation.action_mask[:, order]
    num_envs, step_count = view.shape[0], observation.step_count
    encoded, values, memory = _apply(net, params, net.encode, view, step_count, order, memory)
    size = net.spec.num_actions or net.spec.action_size
    kind = Categorical if net.spec.discrete else TanhNormal
    shape = (num_envs, net.spec.num_agents, size)
    noise = jnp.zeros(shape) if key is None else kind.noise(key, shape)  # without noise, the most probable
    inputs = params, encoded, action_mask, _apply(net, params, net.encode_time, step_count), noise, memory
    if isinstance(net, Sable) and (decoding := resolve_decoding(net)) != "sequential":
        decode = {"jacobi": decode_jacobi, "fused": decode_fused, "cached": decode_cached}[decoding]
        new_memory, actions = sharding.shard_map_envs(partial(decode, net), *inputs)
    else:
        new_memory, actions = decode_sequential(net, *inputs)
    raw, action, log_prob = (_natural_order(x, order, axis=1) for x in actions)
    extras = ppo.PolicyExtras(raw=raw, log_prob=log_prob, value=_natural_order(values, order, axis=1))
    return Decision(action=action, memory=new_memory, extras=extras)


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
    net: Net,
    params: PyTree,
    encoded: Array,
    action_mask: Array,
    time_encoding: Array,
    noise: Array,
    memory: PyTree,
) -> tuple[PyTree, tuple[Array, Array, Array]]:
    """Return (the memory after, (raw, action, log_prob) of all agents [B, N]) by autoregressive decoding,
    agent after agent in a scan: the truth the other decoders are held to."""

    def decide(state, previous, agent_inputs):
        encoded, action_mask, time_encoding = agent_inputs
        return _apply(net, params, net.decode_agent, encoded, action_mask, time_encoding, previous, state)

    decoder_state = _apply(net, params, net.initial_decoder_state, memory, encoded.shape[0])
    state, actions = _scan_agents(net, decide, decoder_state, noise, (encoded, action_mask, time_encoding))
    return state if memory else (), actions


def decode_cached(
    net: Sable,
    params: PyTree,
    encoded: Array,
    action_mask: Array,
    time_encoding: Array,
    noise: Array,
    memory: PyTree,
) -> tuple[PyTree, tuple[Array, Array, Array]]:
    """Return what `decode_sequential` returns, to rounding, with a key/value cache: kernels leave the
    memories alone until all agents have decided. Interpreted, and slow, without a GPU."""

    def decide(state, previous, agent_inputs):
        agent, cache = state
        encoded, action_mask, time_encoding = agent_inputs
        inputs = encoded, action_mask, time_encoding, previous, memory, cross_queries, cache, agent
        distribution, cache = _apply(net, params, net.decode_agent_cached, *inputs)
        return distribution, (agent + 1, cache)

    cross_queries = _apply(net, params, net.read_memory, encoded, time_encoding, memory)
    start = jnp.int32(0), empty_projections(net.config, *encoded.shape[:2])
    (_, projections), actions = _scan_agents(net, decide, start, noise, (encoded, action_mask, time_encoding))
    return _apply(net, params, net.write_memory, memory, projections), actions


def _scan_agents(
    net: Net, decide: tp.Callable, state: PyTree, noise: Array, inputs: PyTree
) -> tuple[PyTree, tuple[Array, Array, Array]]:
    """Return (the state after, (raw, action, log_prob) of all agents) where `decide(state, token, an agent's
    inputs)` returns (its distribution, the state after). What has one entry for all agents is given to
    each."""
    leaves, structure = jax.tree.flatten(inputs)
    is_shared = [x.shape[1] == 1 < noise.shape[1] for x in leaves]

    def agent(carry, step_inputs):
        state, previous = carry
        noise, rest = step_inputs[0], iter(step_inputs[1:])
        inputs = [x[:, 0] if only else next(rest) for x, only in zip(leaves, is_shared, strict=True)]
        distribution, state = decide(state, previous, jax.tree.unflatten(structure, inputs))
        raw = distribution.sample_from_noise(noise)
        previous = next_token(net.spec, distribution.squash(raw))
        return (state, previous), (raw, distribution.scale(raw), distribution.log_prob(raw))

    start = start_token(net.spec)
    start = jnp.broadcast_to(start, (noise.shape[0], *start.shape))
    per_agent = [x for x, only in zip(leaves, is_shared, strict=True) if not only]
    agents_first = jax.tree.map(lambda x: x.swapaxes(0, 1), [noise, *per_agent])
    (state, _), actions = jax.lax.scan(agent, (state, start), agents_first)
    return state, jax.tree.map(lambda x: x.swapaxes(0, 1), actions)


def decode_jacobi(
    net: Sable,
    params: PyTree,
    encoded: Array,
    action_mask: Array,
    time_encoding: Array,
    noise: Array,
    memory: PyTree,
) -> tuple[PyTree, tuple[Array, Array, Array]]:
    """Return what `decode_sequential` returns, to rounding, by Jacobi (fixed-point) decoding: all agents
    decide at once, given guesses of what the others do, until the guesses come true.

    The noise is drawn beforehand, so what an agent does follows from what those before it do. A round in
    which nothing changes has found just what deciding in turn finds. Since no agent sees a later one, each
    round settles one agent more at least, and as many rounds as there are agents settle all.
    """
    cross_queries = _apply(net, params, net.read_memory, encoded, time_encoding, memory)

    def decide(raw):
        squashed = raw if net.spec.discrete else jnp.tanh(raw)
        tokens = previous_tokens(net.spec, squashed[None])[0]
        inputs = encoded, action_mask, time_encoding, tokens, memory, cross_queries
        distribution, projections = _apply(net, params, net.decode_all_agents, *inputs)
        raw = distribution.sample_from_noise(noise)
        return projections, (raw, distribution.scale(raw), distribution.log_prob(raw))

    def unconverged(state):
        guess, (_, (raw, _, _)), rounds = state
        return sharding.any_learner((guess != raw).any()) & (rounds < net.spec.num_agents)

    def iterate(state):
        _, (_, (raw, _, _)), rounds = state
        return raw, decide(raw), rounds + 1

    # What the noise alone leads to: nearly all of it comes true while a policy is still undecided.
    guess = masked_categorical(noise, action_mask).mode() if net.spec.discrete else jnp.zeros_like(noise)
    # Carried round are a timestep's few projections, not the memories they go into.
    _, (projections, actions), _ = jax.lax.while_loop(
        unconverged, iterate, (guess, decide(guess), jnp.int32(1))
    )
    return _apply(net, params, net.write_memory, memory, projections), actions


def decode_fused(
    net: Sable,
    params: PyTree,
    encoded: Array,
    action_mask: Array,
    time_encoding: Array,
    noise: Array,
    memory: PyTree,
) -> tuple[PyTree, tuple[Array, Array, Array]]:
    """Return what `decode_sequential` returns, to rounding, by one fused kernel: interpreted, and slow,
    without a GPU."""
    decayed_memory = _apply(net, params, net.initial_decoder_state, memory, encoded.shape[0])
    outputs = fused_decoder.decode(
        decoder_weights(net, params),
        encoded,
        jnp.broadcast_to(time_encoding[:, 0], (time_encoding.shape[0], encoded.shape[-1])),
        action_mask,
        noise,
        tuple(block.decoder_self for block in decayed_memory),
        tuple(block.decoder_cross for block in decayed_memory),
        interpret=jax.default_backend() != "gpu",
    )
    new_memory = tuple(
        replace(block, decoder_self=own, decoder_cross=cross)
        for block, own, cross in zip(decayed_memory, outputs.self_memory, outputs.cross_memory, strict=True)
    )
    return new_memory if memory else (), (outputs.raw, outputs.raw, outputs.log_prob)


def value(net: Net, params: PyTree, observation: Observation, memory: PyTree, order: Array) -> Array:
    """Return each agent's value [B, N] of an observation nobody has acted on."""
    view = observation.view[:, order]
    _, values, _ = _apply(net, params, net.encode, view, observation.step_count, order, memory)
    return _natural_order(values, order, axis=1)


def prepare(net: Net, steps: Transition) -> Transition:
    """Return the steps with views as the network's `evaluate_actions` takes them."""
    return replace(
        steps, observation=replace(steps.observation, view=net.normalise_view(steps.observation.view))
    )


def evaluate_actions(
    net: Net, params: PyTree, steps: Transition, memory: PyTree, order: Array, key: Array
) -> ppo.ActionEvaluation:
    """Return the log-probabilities, values and entropies of actions already taken, agents processed in
    `order`."""
    raw = steps.extras.raw[:, :, order]
    if isinstance(net, Sable):
        params = jax.tree.map(lambda x: x.astype(net.config.compute_dtype), params)
    distribution, values = _apply(
        net,
        params,
        net.evaluate_actions,
        normalised_view=steps.observation.view[:, :, order],
        action_mask=steps.observation.action_mask[:, :, order],
        step_count=steps.observation.step_count,
        action=raw if net.spec.discrete else jnp.tanh(raw),
        ids=order,
        memory=memory,
        first=steps.first,
    )
    outputs = distribution.log_prob(raw), values, distribution.entropy(key)
    log_prob, values, entropy = (_natural_order(x, order, axis=2) for x in outputs)
    return ppo.ActionEvaluation(log_prob=log_prob, value=values, entropy=entropy)


def _apply(net: Net, params: PyTree, method: tp.Callable, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    return net.apply(params, *args, **kwargs, method=method)


def _natural_order(x: Array, order: Array, *, axis: int) -> Array:
    """Return `x`, whose agents are in `order` along `axis`, with its agents back in their natural order."""
    return jnp.take(x, jnp.argsort(order), axis=axis)
