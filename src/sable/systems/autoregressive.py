"""Policies whose agents are encoded together and then act one after another: what Sable and MAT share.

Agents are processed in `order`, whatever it is; what comes out is in their natural order again.
"""

import typing as tp
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from sable.kernels import fused_decoder as kernel
from sable.kernels import gpu
from sable.nets.embeddings import next_token, previous_tokens, start_token
from sable.nets.mat import MAT
from sable.nets.sable import Sable, decoder_weights, nothing_told
from sable.ops import sharding
from sable.ops.distributions import Categorical, TanhNormal, masked_categorical
from sable.systems import ppo
from sable.types import Decision, Observation, PyTree, Transition

Net = Sable | MAT
SMALL_TEAM, SMALL_NETWORK = 64, 64**2
"""Up to how many agents, and how many blocks times squared width, a kernel that decides in turn beats
deciding at once: beyond, its weights leave the cache. For every agent those before it are read again, so more
than so many are not decided for by rows either."""


def make_policy(net: Net, initial_memory: tp.Callable[[int], PyTree], chunk: int) -> ppo.Policy:
    """The network as a PPO policy that learns from `chunk` time steps at a stretch."""
    return ppo.Policy(
        init=partial(init, net),
        initial_memory=initial_memory,
        act=partial(act, net),
        value=partial(value, net),
        prepare=partial(prepare, net),
        evaluate=partial(evaluate, net),
        learning_rate=net.config.learning_rate,
        chunk=chunk,
        agent_order=net.config.agent_order,
    )


def init(net: Net, key: Array) -> PyTree:
    """Fresh parameters, made through `evaluate`, which touches every one of them."""
    spec = net.spec
    team = (1, 1, spec.num_agents)
    return net.init(
        key,
        seen=net.look(jnp.zeros((*team, spec.view_size))),
        legal=jnp.ones((*team, spec.num_actions or 1), bool),
        time=jnp.zeros((1, 1), jnp.int32),
        action=jnp.zeros(team, jnp.int32) if spec.discrete else jnp.zeros((*team, spec.action_size)),
        ids=jnp.arange(spec.num_agents),
        memory=(),  # parameters do not depend on it
        first=jnp.ones((1, 1), bool),
        method=net.evaluate,
    )


def act(
    net: Net, params: PyTree, observation: Observation, memory: PyTree, order: Array, key: Array | None
) -> Decision:
    """One decision for the whole team: all agents encoded at once, then decoded in `order`."""
    view, legal = observation.view[:, order], observation.legal[:, order]
    num_envs, time = view.shape[0], observation.time
    encoded, values, memory = _apply(net, params, net.encode, view, time, order, memory)
    size = net.spec.num_actions or net.spec.action_size
    kind = Categorical if net.spec.discrete else TanhNormal
    shape = (num_envs, net.spec.num_agents, size)
    noise = jnp.zeros(shape) if key is None else kind.noise(key, shape)  # without noise, the most probable
    given = params, encoded, legal, _apply(net, params, net.clock, time), noise, memory
    if isinstance(net, Sable) and (how := decoding(net)) != "scan":
        form = {"parallel": decode_at_once, "kernel": decode_by_kernel, "rows": decode_by_rows}[how]
        told, acted = sharding.apart(partial(form, net), *given)
    else:
        told, acted = decode_in_turn(net, *given)
    raw, action, log_prob = (_natural(x, order, axis=1) for x in acted)
    extras = ppo.Acted(raw=raw, log_prob=log_prob, value=_natural(values, order, axis=1))
    return Decision(action=action, memory=told, extras=extras)


def decoding(net: Sable) -> str:
    """How a network's teams decide; benchmarks/README.md has the measurements behind it."""
    config, spec = net.config, net.spec
    if config.decoding != "auto":
        return config.decoding
    if jax.default_backend() != "gpu":
        return "scan"
    fits = gpu.capable() and kernel.supported(config.embed_dim, config.num_heads)
    few = fits and spec.num_agents <= SMALL_TEAM
    # No guess of a number comes true early: at once would take as many rounds as agents, each of all agents.
    if not spec.discrete:
        return "rows" if few else "scan"
    # The kernel knows one position for all agents of a timestep.
    small = (
        config.positions == "timestep" and few and config.num_blocks * config.embed_dim**2 <= SMALL_NETWORK
    )
    return "kernel" if small else "parallel"


def decode_in_turn(
    net: Net, params: PyTree, encoded: Array, legal: Array, clock: Array, noise: Array, memory: PyTree
) -> tuple[PyTree, tuple[Array, Array, Array]]:
    """(the memory after, (raw, action, log_prob) of all agents [B, N]), decided one after another."""

    def decide(told, previous, now):
        encoded, legal, clock = now
        return _apply(net, params, net.decode, encoded, legal, clock, previous, told)

    opened = _apply(net, params, net.open, memory, encoded.shape[0])
    told, acted = _in_turn(net, decide, opened, noise, (encoded, legal, clock))
    return told if memory else (), acted


def decode_by_rows(
    net: Sable, params: PyTree, encoded: Array, legal: Array, clock: Array, noise: Array, memory: PyTree
) -> tuple[PyTree, tuple[Array, Array, Array]]:
    """What `decode_in_turn` gives, to rounding, by kernels that leave the memories alone until all agents
    have decided: interpreted, and slow, without a GPU."""

    def decide(state, previous, now):
        agent, kept = state
        encoded, legal, clock = now
        given = encoded, legal, clock, previous, memory, asked, kept, agent
        distribution, kept = _apply(net, params, net.decode_row, *given)
        return distribution, (agent + 1, kept)

    asked = _apply(net, params, net.ask, encoded, clock, memory)
    nothing = jnp.int32(0), nothing_told(net.config, *encoded.shape[:2])
    (_, told), acted = _in_turn(net, decide, nothing, noise, (encoded, legal, clock))
    return _apply(net, params, net.remember, memory, told), acted


def _in_turn(
    net: Net, decide: tp.Callable, state: PyTree, noise: Array, given: PyTree
) -> tuple[PyTree, tuple[Array, Array, Array]]:
    """(the state after, (raw, action, log_prob) of all agents) where `decide(state, token, an agent's given)`
    says (its distribution, the state after). What has one entry for all agents is given to each."""
    leaves, structure = jax.tree.flatten(given)
    shared = [x.shape[1] == 1 < noise.shape[1] for x in leaves]

    def agent(carry, now):
        state, previous = carry
        noise, own = now[0], iter(now[1:])
        given = [x[:, 0] if one else next(own) for x, one in zip(leaves, shared, strict=True)]
        distribution, state = decide(state, previous, jax.tree.unflatten(structure, given))
        raw = distribution.sample_with(noise)
        previous = next_token(net.spec, distribution.squash(raw))
        return (state, previous), (raw, distribution.scale(raw), distribution.log_prob(raw))

    start = start_token(net.spec)
    start = jnp.broadcast_to(start, (noise.shape[0], *start.shape))
    each = [x for x, one in zip(leaves, shared, strict=True) if not one]
    turned = jax.tree.map(lambda x: x.swapaxes(0, 1), [noise, *each])
    (state, _), acted = jax.lax.scan(agent, (state, start), turned)
    return state, jax.tree.map(lambda x: x.swapaxes(0, 1), acted)


def decode_at_once(
    net: Sable, params: PyTree, encoded: Array, legal: Array, clock: Array, noise: Array, memory: PyTree
) -> tuple[PyTree, tuple[Array, Array, Array]]:
    """What `decode_in_turn` gives, to rounding: all agents decide at once, given guesses of what the others
    do, until the guesses come true.

    The noise is drawn beforehand, so what an agent does follows from what those before it do. A round in
    which nothing changes has found just what deciding in turn finds. Since no agent sees a later one, each
    round settles one agent more at least, and as many rounds as there are agents settle all.
    """
    asked = _apply(net, params, net.ask, encoded, clock, memory)

    def decide(raw):
        squashed = raw if net.spec.discrete else jnp.tanh(raw)
        tokens = previous_tokens(net.spec, squashed[None])[0]
        given = encoded, legal, clock, tokens, memory, asked
        distribution, told = _apply(net, params, net.decode_all, *given)
        raw = distribution.sample_with(noise)
        return told, (raw, distribution.scale(raw), distribution.log_prob(raw))

    def unsettled(state):
        guess, (_, (raw, _, _)), rounds = state
        return sharding.by_any((guess != raw).any()) & (rounds < net.spec.num_agents)

    def again(state):
        _, (_, (raw, _, _)), rounds = state
        return raw, decide(raw), rounds + 1

    # What the noise alone leads to: nearly all of it comes true while a policy is still undecided.
    guess = masked_categorical(noise, legal).mode() if net.spec.discrete else jnp.zeros_like(noise)
    # Carried round are a timestep's few projections, not the memories they go into.
    _, (told, acted), _ = jax.lax.while_loop(unsettled, again, (guess, decide(guess), jnp.int32(1)))
    return _apply(net, params, net.remember, memory, told), acted


def decode_by_kernel(
    net: Sable, params: PyTree, encoded: Array, legal: Array, clock: Array, noise: Array, memory: PyTree
) -> tuple[PyTree, tuple[Array, Array, Array]]:
    """What `decode_in_turn` gives, to rounding, by one kernel: interpreted, and slow, without a GPU."""
    opened = _apply(net, params, net.open, memory, encoded.shape[0])
    decided = kernel.decode(
        decoder_weights(net, params),
        encoded,
        jnp.broadcast_to(clock[:, 0], (clock.shape[0], encoded.shape[-1])),
        legal,
        noise,
        tuple(block.decoder_self for block in opened),
        tuple(block.decoder_cross for block in opened),
        interpret=jax.default_backend() != "gpu",
    )
    told = tuple(
        replace(block, decoder_self=own, decoder_cross=cross)
        for block, own, cross in zip(opened, decided.self_memory, decided.cross_memory, strict=True)
    )
    return told if memory else (), (decided.raw, decided.raw, decided.log_prob)


def value(net: Net, params: PyTree, observation: Observation, memory: PyTree, order: Array) -> Array:
    """Each agent's value [B, N] of a situation nobody has acted on."""
    view = observation.view[:, order]
    _, values, _ = _apply(net, params, net.encode, view, observation.time, order, memory)
    return _natural(values, order, axis=1)


def prepare(net: Net, steps: Transition) -> Transition:
    """The steps with views as the network's `evaluate` takes them."""
    return replace(steps, observation=replace(steps.observation, view=net.look(steps.observation.view)))


def evaluate(
    net: Net, params: PyTree, steps: Transition, memory: PyTree, order: Array, key: Array
) -> ppo.Evaluation:
    """What `params` say of actions already taken, agents processed in `order`."""
    raw = steps.extras.raw[:, :, order]
    if isinstance(net, Sable):
        params = jax.tree.map(lambda x: x.astype(net.config.compute), params)
    distribution, values = _apply(
        net,
        params,
        net.evaluate,
        seen=steps.observation.view[:, :, order],
        legal=steps.observation.legal[:, :, order],
        time=steps.observation.time,
        action=raw if net.spec.discrete else jnp.tanh(raw),
        ids=order,
        memory=memory,
        first=steps.first,
    )
    found = distribution.log_prob(raw), values, distribution.entropy(key)
    log_prob, values, entropy = (_natural(x, order, axis=2) for x in found)
    return ppo.Evaluation(log_prob=log_prob, value=values, entropy=entropy)


def _apply(net: Net, params: PyTree, method: tp.Callable, *args: tp.Any, **named: tp.Any) -> tp.Any:
    return net.apply(params, *args, **named, method=method)


def _natural(x: Array, order: Array, *, axis: int) -> Array:
    """`x`, whose agents are in `order` along `axis`, with its agents back in their natural order."""
    return jnp.take(x, jnp.argsort(order), axis=axis)
