"""Soft actor-critic over a team: what MASAC and HASAC share.

The team maximises its reward, the mean over agents, and the entropy of its joint policy, the sum over agents:

    y = r + gamma (min over both target critics of Q(s', a') - sum_i alpha_i log pi_i(a'_i | s')),  a' ~ pi

s' is the observation that truly followed, and only a true end stops the sum: time limits are looked through.
Critics are told actions as the policies squash them, in [-1, 1], whatever the environment's bounds.
"""

import math
import typing as tp
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sable.config.schema import SACConfig
from sable.nets.actor_critic import global_state
from sable.nets.sac import SoftQ
from sable.ops import trees as tree
from sable.ops.distributions import TanhNormal
from sable.ops.losses import soft_q_target
from sable.systems import replay as replays
from sable.systems.base import System, gradient_step, hyperparameters_from
from sable.types import Decision, EnvSpec, Metrics, Observation, PyTree, Transition, struct

Optimiser = optax.GradientTransformation
CriticFn = tp.Callable[[Array], Array]
"""The team's squashed actions [B, N, A] -> their Q-value [B] in the states of a batch."""


class PolicyUpdate(tp.NamedTuple):
    """The result of a policy update."""

    params: PyTree
    opt_state: PyTree
    loss: Array
    log_prob: Array  # [B, N], of actions as they were before


class Policies(tp.NamedTuple):
    """The agents' policies, and how they are updated."""

    init: tp.Callable[[Array], PyTree]
    """key -> params"""
    act: tp.Callable[[PyTree, Array], TanhNormal]
    """(params, view [B, N, F]) -> the distribution of every agent's action [B, N, A]"""
    init_optimiser: tp.Callable[[Optimiser, PyTree], PyTree]
    """(optimiser, params) -> opt_state"""
    update_policy: tp.Callable[[Optimiser, PyTree, PyTree, Array, CriticFn, Array, Array], PolicyUpdate]
    """(optimiser, params, opt_state, view [B, N, F], critic_fn, temperature [N], key) -> PolicyUpdate"""


@struct
class Hyperparameters:
    """The numbers a batch of learners can differ in while sharing one program."""

    policy_learning_rate: Array
    q_learning_rate: Array
    temperature_learning_rate: Array
    initial_temperature: Array
    target_entropy_scale: Array
    discount: Array
    polyak: Array
    max_grad_norm: Array


class PerNetwork(tp.NamedTuple):
    """An optimiser, or its state, for each thing that learns."""

    policy: tp.Any
    q: tp.Any
    temperature: tp.Any


@struct
class SACLearner:
    params: PyTree  # of the policies, all that acting needs
    q: PyTree  # both critics, along a leading [2]
    target: PyTree  # likewise
    log_temperature: Array  # [N]
    hyper: Hyperparameters
    opt_states: PerNetwork
    num_updates: Array  # gradient steps of the critics
    env_steps: Array
    replay: PyTree


class Team(tp.NamedTuple):
    """All that does not change while a team learns."""

    spec: EnvSpec
    config: SACConfig
    policies: Policies
    critic: SoftQ


def make(spec: EnvSpec, config: SACConfig, policies: Policies) -> System:
    """Return the system that trains `policies` with twin critics."""
    team = Team(spec, config, policies, SoftQ(config))
    # Policies wait for `policy_delay` steps of the critics. Where that divides the steps of a rollout, none
    # of theirs is computed in vain; elsewhere the ones not yet due are thrown away.
    group = math.gcd(config.num_updates_per_rollout, config.policy_delay)
    max_length = config.replay_size // config.num_envs
    replay = replays.make(config.num_envs, max_length, 1, group * config.batch_size)

    def ready(learner: SACLearner) -> Array:
        enough = replay.size(learner.replay) * config.num_envs >= config.batch_size
        return enough & (learner.env_steps >= config.warmup_steps)

    grouped = replace(config, num_updates_per_rollout=config.num_updates_per_rollout // group)
    return System(
        hyper=hyperparameters_from(Hyperparameters, config),
        init=partial(init, team, replay),
        initial_memory=lambda num_envs: (),
        explore=partial(explore, team),
        act=partial(act, team),
        next_extras=lambda learner, observation, memory: _used_observation(observation),
        learn=replays.make_learn(
            replay, grouped, lambda rollout: _to_replay(rollout.steps), partial(update, team, group), ready
        ),
    )


def init(team: Team, replay: replays.Replay, key: Array, hyper: Hyperparameters) -> SACLearner:
    """Return a fresh learner, its target critics copies of the critics."""
    policy_key, q_key = jax.random.split(key)
    params, zero_transition, optimisers = (
        team.policies.init(policy_key),
        _zero_transition(team.spec),
        _optimisers(hyper),
    )
    state = global_state(zero_transition.observation)
    q = init_ensemble(lambda key: team.critic.init(key, state, zero_transition.action), q_key, 2)
    log_temperature = jnp.full(team.spec.num_agents, jnp.log(hyper.initial_temperature))
    return SACLearner(
        params=params,
        q=q,
        target=jax.tree.map(jnp.copy, q),  # a buffer cannot be donated twice
        log_temperature=log_temperature,
        hyper=hyper,
        opt_states=PerNetwork(
            policy=team.policies.init_optimiser(optimisers.policy, params),
            q=optimisers.q.init(q),
            temperature=optimisers.temperature.init(log_temperature),
        ),
        num_updates=jnp.zeros((), jnp.int32),
        env_steps=jnp.zeros((), jnp.int32),
        replay=replay.init(zero_transition),
    )


def explore(
    team: Team, learner: SACLearner, observation: Observation, memory: PyTree, key: Array
) -> Decision:
    """Act at random, uniformly within the bounds, until the warm-up is over; then by the policies."""
    sample_key, uniform_key = jax.random.split(key)
    distribution = team.policies.act(learner.params, observation.view)
    raw = distribution.sample(sample_key)
    uniform = jnp.arctanh(jax.random.uniform(uniform_key, raw.shape, minval=-1.0))
    return _decision(distribution, jnp.where(learner.env_steps < team.config.warmup_steps, uniform, raw))


def act(team: Team, params: PyTree, observation: Observation, memory: PyTree, key: Array | None) -> Decision:
    """Act by the policies."""
    distribution = team.policies.act(params, observation.view)
    return _decision(distribution, distribution.sample(key))


def update(
    team: Team, group: int, learner: SACLearner, sampled: Transition, key: Array
) -> tuple[SACLearner, Metrics]:
    """Take a group of the critics' steps, each on a batch of its own, then the policies' if they are due: as
    many as the critics took since, all on the newest batch, with new actions each time."""
    q_key, policy_key = jax.random.split(key)
    batches = tree.split(tree.merge(sampled), (group, team.config.batch_size))
    q_keys = jax.random.split(q_key, group)
    learner, metrics = jax.lax.scan(partial(update_critics, team), learner, (batches, q_keys))
    last = jax.tree.map(lambda x: x[-1], batches)
    updated, policy_metrics = jax.lax.scan(
        lambda learner, key: update_policies(team, learner, last, key),
        learner,
        jax.random.split(policy_key, team.config.policy_delay),
    )
    due = learner.num_updates % team.config.policy_delay == 0
    return tree.select(due, updated, learner), jax.tree.map(jnp.mean, metrics | policy_metrics)


def critic_loss(critic: SoftQ, q: PyTree, batch: Transition, target: Array) -> tuple[Array, Array]:
    """Return both critics' squared errors, summed over the two, and their mean value."""
    value = q_values(critic, q, batch.observation, batch.action)
    return jnp.square(value - target[None]).sum(0).mean(), value.mean()


def update_critics(
    team: Team, learner: SACLearner, inputs: tuple[Transition, Array]
) -> tuple[SACLearner, Metrics]:
    """Take one gradient step of both critics on a batch, and move their targets after them."""
    batch, key = inputs
    target = td_targets(team.policies, team.critic, learner, batch, key)
    loss = partial(critic_loss, team.critic, batch=batch, target=target)
    (error, value), gradient = jax.value_and_grad(loss, has_aux=True)(learner.q)
    optimiser = _optimisers(learner.hyper).q
    q, opt_state = gradient_step(optimiser, gradient, learner.opt_states.q, learner.q)
    return replace(
        learner,
        q=q,
        target=optax.incremental_update(q, learner.target, learner.hyper.polyak),
        opt_states=learner.opt_states._replace(q=opt_state),
        num_updates=learner.num_updates + 1,
    ), {"loss/critic": error, "value/mean": value, "gradient/norm": optax.tree.norm(gradient)}


def update_policies(
    team: Team, learner: SACLearner, batch: Transition, key: Array
) -> tuple[SACLearner, Metrics]:
    """Take one gradient step of the policies, and of the temperatures where they are tuned."""
    observation, temperature = batch.observation, jnp.exp(learner.log_temperature)
    updated = team.policies.update_policy(
        _optimisers(learner.hyper).policy,
        learner.params,
        learner.opt_states.policy,
        observation.view,
        lambda action: q_values(team.critic, learner.q, observation, action).min(0),
        temperature,
        key,
    )
    opt_states = learner.opt_states._replace(policy=updated.opt_state)
    learner = replace(learner, params=updated.params, opt_states=opt_states)
    if team.config.autotune_temperature:
        learner = update_temperatures(learner, updated.log_prob, team.spec.action_size)
    return learner, {
        "loss/actor": updated.loss,
        "policy/entropy": -updated.log_prob.mean(),
        "policy/temperature": temperature.mean(),
    }


def update_temperatures(learner: SACLearner, log_prob: Array, action_size: int) -> SACLearner:
    """Move temperatures a step up where entropy is below its target, else a step down."""
    target_entropy = -learner.hyper.target_entropy_scale * action_size
    gradient = -(log_prob.mean(0) + target_entropy)  # of -log alpha (log pi + target entropy)
    log_temperature, opt_state = gradient_step(
        _optimisers(learner.hyper).temperature,
        gradient,
        learner.opt_states.temperature,
        learner.log_temperature,
    )
    opt_states = learner.opt_states._replace(temperature=opt_state)
    return replace(learner, log_temperature=log_temperature, opt_states=opt_states)


def init_ensemble(init: tp.Callable[[Array], PyTree], key: Array, num: int) -> PyTree:
    """Return that many sets of fresh parameters along a leading axis; not by `vmap`, see
    `training.update.map_seeds`."""
    return jax.lax.map(init, jax.random.split(key, num))


def q_values(critic: SoftQ, q: PyTree, observation: Observation, action: Array) -> Array:
    """Return both critics' values [2, B] of the team's squashed actions [B, N, A]."""
    return tp.cast(Array, jax.vmap(critic.apply, (0, None, None))(q, global_state(observation), action))


def td_targets(
    policies: Policies, critic: SoftQ, learner: SACLearner, batch: Transition, key: Array
) -> Array:
    """Return y [B], as above, for transitions whose `next_extras` is what followed."""
    distribution = policies.act(learner.params, batch.next_extras.view)
    raw = distribution.sample(key)
    weighted = jnp.exp(learner.log_temperature)[None] * distribution.log_prob(raw)
    next_value = q_values(critic, learner.target, batch.next_extras, distribution.squash(raw))
    discount = learner.hyper.discount * batch.discount
    return soft_q_target(batch.reward, discount, next_value, weighted.sum(-1), 1.0)


def _optimisers(hyper: Hyperparameters) -> PerNetwork:
    rates = PerNetwork(hyper.policy_learning_rate, hyper.q_learning_rate, hyper.temperature_learning_rate)
    return PerNetwork(
        *(optax.chain(optax.clip_by_global_norm(hyper.max_grad_norm), optax.adam(r)) for r in rates)
    )


def _decision(distribution: TanhNormal, raw: Array) -> Decision:
    return Decision(action=distribution.scale(raw), memory=(), extras=distribution.squash(raw))


def _used_observation(observation: Observation) -> Observation:
    """Return the observation without what neither policies nor critics look at."""
    return replace(observation, action_mask=(), step_count=())


def _to_replay(steps: Transition) -> Transition:
    """Return the steps as replay keeps them: squashed actions, one reward for the team, nothing nobody looks
    at."""
    return replace(
        steps,
        observation=_used_observation(steps.observation),
        action=steps.extras,
        reward=steps.reward.mean(-1),
        first=(),
        extras=(),
    )


def _zero_transition(spec: EnvSpec) -> Transition:
    """Return one step as replay keeps it, all zeros."""
    observation = Observation(
        view=jnp.zeros((spec.num_agents, spec.view_size)),
        action_mask=jnp.zeros((spec.num_agents, 1), bool),
        step_count=jnp.zeros((), jnp.int32),
        state=jnp.zeros(spec.state_size) if spec.state_size else (),
    )
    action = jnp.zeros((spec.num_agents, spec.action_size))
    step = Transition(
        observation=observation,
        action=action,
        reward=jnp.zeros(spec.num_agents),
        discount=jnp.zeros(()),
        first=jnp.zeros((), bool),
        extras=action,
        next_extras=_used_observation(observation),
    )
    return _to_replay(step)
