"""Policies whose agents are encoded together and then act one after another: what Sable and MAT share.

Agents are processed in `order`, whatever it is; what comes out is in their natural order again. `act` encodes
the team and hands a `Decoder` what its agents decide from; the decoders themselves are in `systems.sable` and
`systems.mat`, most of them around `scan_agents`.
"""

import typing as tp
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from sable.nets.embeddings import next_token, start_token
from sable.nets.mat import MAT
from sable.nets.sable import Sable
from sable.ops.distributions import Categorical, Distribution, TanhNormal
from sable.systems import ppo
from sable.types import Decision, EnvSpec, Observation, PyTree, Transition, struct

Net = Sable | MAT


@struct
class TeamInputs:
    """All that the agents of one timestep decide from, in the order they decide in."""

    encoded: Array  # [B, N, E]
    action_mask: Array  # [B, N, A]
    time_encoding: PyTree  # [B, 1, E] for all agents, or [B, N, E]; () without time
    noise: Array  # [B, N, A] or [B, N, action_size]: given it, sampling is a function of the distribution


@struct
class TeamActions:
    """The actions of the agents of one timestep."""

    raw: Array  # [B, N] or [B, N, action_size], as sampled, before squashing and scaling
    action: Array  # as the environment takes it
    log_prob: Array  # [B, N]


Decoder = tp.Callable[[PyTree, TeamInputs, PyTree], tuple[TeamActions, PyTree]]
"""(params, inputs, memory with the timestep in its encoder part) -> (actions, memory after the timestep)"""


def make_policy(
    net: Net,
    decode: Decoder,
    initial_memory: tp.Callable[[int], PyTree],
    *,
    chunk: int,
    compute_dtype: str = "float32",
) -> ppo.Policy:
    """Return the network as a PPO policy that acts by `decode`, and learns from `chunk` time steps at a
    stretch, computing with `compute_dtype`."""
    return ppo.Policy(
        init=partial(init, net),
        initial_memory=initial_memory,
        act=partial(act, net, decode),
        value=partial(value, net),
        prepare=partial(prepare, net),
        evaluate_actions=partial(evaluate_actions, net, compute_dtype),
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
    net: Net,
    decode: Decoder,
    params: PyTree,
    observation: Observation,
    memory: PyTree,
    order: Array,
    key: Array | None,
) -> Decision:
    """Return one decision for the whole team: all agents encoded at once, then decoded in `order`. Without a
    key, each takes its most probable action."""
    view, action_mask = observation.view[:, order], observation.action_mask[:, order]
    step_count = observation.step_count
    encoded, values, memory = apply(net, params, net.encode, view, step_count, order, memory)
    inputs = TeamInputs(
        encoded=encoded,
        action_mask=action_mask,
        noise=_sampling_noise(net.spec, view.shape[0], key),
        time_encoding=apply(net, params, net.encode_time, step_count),
    )
    actions, memory = decode(params, inputs, memory)
    actions, values = jax.tree.map(partial(_natural_order, order=order, axis=1), (actions, values))
    extras = ppo.PolicyExtras(raw=actions.raw, log_prob=actions.log_prob, value=values)
    return Decision(action=actions.action, memory=memory, extras=extras)


def _sampling_noise(spec: EnvSpec, num_envs: int, key: Array | None) -> Array:
    """Return the noise of all agents' samples [B, N, _]: zeros without a key, for the most probable
    actions."""
    shape = (num_envs, spec.num_agents, spec.num_actions or spec.action_size)
    kind = Categorical if spec.discrete else TanhNormal
    return jnp.zeros(shape) if key is None else kind.noise(key, shape)


def scan_agents(
    spec: EnvSpec,
    decide: tp.Callable[[PyTree, Array, TeamInputs], tuple[Distribution, PyTree]],
    state: PyTree,
    inputs: TeamInputs,
) -> tuple[TeamActions, PyTree]:
    """Decode agent after agent in a scan: (the actions of all, the state after the last).

    `decide(state, token, the inputs of an agent, without N)` returns (the agent's distribution, the state
    after it); `token` says what the agent before did.
    """
    # The encoding of a time that all agents share is not carried through the scan.
    is_shared = all(x.shape[1] == 1 for x in jax.tree.leaves(inputs.time_encoding))
    time_encodings = () if is_shared else inputs.time_encoding

    def agent(carry, xs):
        state, token = carry
        noise, encoded, action_mask, time_encoding = xs
        if is_shared:
            time_encoding = jax.tree.map(lambda x: x[:, 0], inputs.time_encoding)
        agent_inputs = TeamInputs(
            encoded=encoded, action_mask=action_mask, time_encoding=time_encoding, noise=noise
        )
        distribution, state = decide(state, token, agent_inputs)
        actions = sample(distribution, noise)
        return (state, next_token(spec, distribution.squash(actions.raw))), actions

    token = start_token(spec)
    token = jnp.broadcast_to(token, (inputs.noise.shape[0], *token.shape))
    xs = inputs.noise, inputs.encoded, inputs.action_mask, time_encodings
    agents_first = jax.tree.map(lambda x: x.swapaxes(0, 1), xs)
    (state, _), actions = jax.lax.scan(agent, (state, token), agents_first)
    return jax.tree.map(lambda x: x.swapaxes(0, 1), actions), state


def sample(distribution: Distribution, noise: Array) -> TeamActions:
    """Return what the noise makes of a distribution, of one agent or of all."""
    raw = distribution.sample_from_noise(noise)
    return TeamActions(raw=raw, action=distribution.scale(raw), log_prob=distribution.log_prob(raw))


def value(net: Net, params: PyTree, observation: Observation, memory: PyTree, order: Array) -> Array:
    """Return each agent's value [B, N] of an observation nobody has acted on."""
    view = observation.view[:, order]
    _, values, _ = apply(net, params, net.encode, view, observation.step_count, order, memory)
    return _natural_order(values, order, axis=1)


def prepare(net: Net, steps: Transition) -> Transition:
    """Return the steps with views as the network's `evaluate_actions` takes them."""
    return replace(
        steps, observation=replace(steps.observation, view=net.normalise_view(steps.observation.view))
    )


def evaluate_actions(
    net: Net,
    compute_dtype: str,
    params: PyTree,
    steps: Transition,
    memory: PyTree,
    order: Array,
    key: Array,
) -> ppo.ActionEvaluation:
    """Return the log-probabilities, values and entropies of actions already taken, agents processed in
    `order`."""
    raw = steps.extras.raw[:, :, order]
    distribution, values = apply(
        net,
        jax.tree.map(lambda x: x.astype(compute_dtype), params),
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


def apply(net: Net, params: PyTree, method: tp.Callable, *args: tp.Any, **kwargs: tp.Any) -> tp.Any:
    """Return what a method of the network returns with these parameters."""
    return net.apply(params, *args, **kwargs, method=method)


def _natural_order(x: Array, order: Array, *, axis: int) -> Array:
    """Return `x`, whose agents are in `order` along `axis`, with its agents back in their natural order."""
    return jnp.take(x, jnp.argsort(order), axis=axis)
