"""Proximal policy optimisation over a team: what every on-policy system shares."""

import typing as tp
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sable.config.schema import PPOConfig
from sable.ops import sharding
from sable.ops import trees as tree
from sable.ops.losses import clipped_surrogate, clipped_value_error, standardise
from sable.ops.returns import gae
from sable.systems.base import System, gradient_step, hyperparameters_from
from sable.systems.minibatches import Batch, microbatches, num_microbatches, split_time
from sable.types import Decision, EnvSpec, Metrics, Observation, PyTree, Rollout, Transition, struct


@struct
class PolicyExtras:
    """The `Decision.extras` of a PPO policy, which learning needs again; agents in natural order."""

    raw: Array  # [.., N] or [.., N, action_size], the action as it was sampled, before squashing and scaling
    log_prob: Array  # [.., N]
    value: Array  # [.., N]
    memory: PyTree = ()  # the memory before acting, where learning starts in mid-rollout


@struct
class ActionEvaluation:
    """The current parameters' view of actions already taken; agents in natural order."""

    log_prob: Array  # [T, B, N]
    value: Array  # [T, B, N]
    entropy: Array  # [T, B, N]


class Policy(tp.NamedTuple):
    """The network side of a PPO system. `order` [N] says in which order agents are processed; some policies
    do not care."""

    init: tp.Callable[[Array], PyTree]
    initial_memory: tp.Callable[[int], PyTree]
    act: tp.Callable[[PyTree, Observation, PyTree, Array, Array | None], Decision]
    """(params, observation [B], memory, order, key) -> Decision whose extras are `PolicyExtras`"""
    value: tp.Callable[[PyTree, Observation, PyTree, Array], Array]
    """(params, observation [B], memory, order) -> [B, N]"""
    evaluate_actions: tp.Callable[[PyTree, Transition, PyTree, Array, Array], ActionEvaluation]
    """(params, steps [T, B] as `prepare` gives them, start memory [B], order, key) -> ActionEvaluation"""
    learning_rate: PyTree
    """Adam's step size, or one for each entry of the parameters, whose gradients are then clipped apart."""
    chunk: int
    """How many contiguous time steps `evaluate_actions` is given: 1 where each stands alone. Where it is
    neither 1 nor the whole rollout, `PolicyExtras.memory` says what each chunk begins with."""
    prepare: tp.Callable[[Transition], Transition] = lambda steps: steps
    """steps -> the steps as `evaluate_actions` takes them; no parameter enters, so it is done once for all
    minibatches"""
    agent_order: str | None = None
    """Where `order` comes from: `natural_order`, or drawn anew `per_rollout`, for acting and learning alike,
    or `per_epoch`, for learning only. None where the policy ignores it."""


@struct
class Hyperparameters:
    """The numbers a batch of learners can differ in while sharing one program."""

    learning_rate: PyTree
    discount: Array
    gae_lambda: Array
    clip_eps: Array
    entropy_weight: Array
    max_grad_norm: Array


@struct
class PPOLearner:
    params: PyTree
    hyper: Hyperparameters
    opt_state: PyTree
    order: Array  # [N] the order agents act in
    num_updates: Array
    largest_reward: PyTree  # of all seen so far, in size; () without a floor for advantages
    replay: tuple = ()


def make(policy: Policy, config: PPOConfig, spec: EnvSpec) -> System:
    """Return the system that trains `policy` by PPO."""
    natural_order = jnp.arange(spec.num_agents)
    return System(
        hyper=hyperparameters_from(Hyperparameters, config, learning_rate=policy.learning_rate),
        init=partial(init, policy, config, natural_order),
        initial_memory=policy.initial_memory,
        explore=partial(explore, policy),
        act=partial(act, policy, natural_order),
        next_extras=partial(next_extras, policy, config),
        learn=partial(learn, policy, config),
    )


def init(
    policy: Policy, config: PPOConfig, natural_order: Array, key: Array, hyper: Hyperparameters
) -> PPOLearner:
    """Return a fresh learner; `natural_order` is the agents' own order."""
    params_key, order_key = jax.random.split(key)
    params, num_updates = policy.init(params_key), jnp.zeros((), jnp.int32)
    return PPOLearner(
        params=params,
        hyper=hyper,
        opt_state=optimiser(config, hyper, num_updates).init(params),
        order=draw_order(policy, "per_rollout", order_key, natural_order),
        num_updates=num_updates,
        largest_reward=jnp.zeros(()) if config.advantage_floor else (),
    )


def optimiser(config: PPOConfig, hyper: Hyperparameters, num_updates: Array) -> optax.GradientTransformation:
    """Return Adam behind clipping by the global norm, its rate annealed to zero where that is configured."""

    def clipped_adam(rate: Array) -> optax.GradientTransformation:
        if config.learning_rate_horizon:
            horizon = config.learning_rate_horizon / (config.num_envs * config.rollout_length)  # in updates
            rate = rate * jnp.maximum(0.0, 1.0 - num_updates / horizon)
        return optax.chain(optax.clip_by_global_norm(hyper.max_grad_norm), optax.adam(rate, eps=1e-5))

    rates = hyper.learning_rate
    if not isinstance(rates, dict):
        return clipped_adam(rates)
    return optax.multi_transform(
        {name: clipped_adam(rate) for name, rate in rates.items()}, {n: n for n in rates}
    )


def draw_order(policy: Policy, when: str, key: Array, order: Array) -> Array:
    """Return a new random order of agents where the policy draws one at this time, else `order`."""
    return jax.random.permutation(key, order.shape[0]) if policy.agent_order == when else order


def explore(
    policy: Policy, learner: PPOLearner, observation: Observation, memory: PyTree, key: Array
) -> Decision:
    """Act in the learner's own order of agents."""
    return policy.act(learner.params, observation, memory, learner.order, key)


def act(
    policy: Policy,
    natural_order: Array,
    params: PyTree,
    observation: Observation,
    memory: PyTree,
    key: Array | None,
) -> Decision:
    """Act in the natural order of agents."""
    return policy.act(params, observation, memory, natural_order, key)


def next_extras(
    policy: Policy, config: PPOConfig, learner: PPOLearner, observation: Observation, memory: PyTree
) -> PyTree:
    """Return the value of a true last observation, where time limits are bootstrapped through."""
    if not config.bootstrap_time_limits:
        return ()
    return policy.value(learner.params, observation, memory, learner.order)


def compute_advantages(
    policy: Policy, config: PPOConfig, learner: PPOLearner, rollout: Rollout
) -> tuple[Array, Array]:
    """Return (advantage, target) of every step by GAE, as the parameters that acted saw it."""
    steps, last, value = rollout.steps, rollout.last, rollout.steps.extras.value
    last_memory = tree.reset_memory(rollout.last_memory, last.first)
    last_value = policy.value(learner.params, last.observation, last_memory, learner.order)
    next_value = jnp.concatenate([value[1:], last_value[None]])
    next_first = jnp.concatenate([steps.first[1:], last.first[None]])
    trace = bootstrap = 1.0 - next_first
    if config.bootstrap_time_limits:
        next_value = tree.select(next_first, steps.next_extras, next_value)
        bootstrap = steps.discount
    hyper = learner.hyper
    return gae(steps.reward, value, next_value, bootstrap, trace, hyper.discount, hyper.gae_lambda)


def scale_floor(config: PPOConfig, learner: PPOLearner, reward: Array) -> tuple[PPOLearner, Array | float]:
    """Return the learner with these rewards noted, and the least standard deviation of advantages.

    Until a first reward, advantages are a critic's noise alone. Blown up to a variance of one, it would
    be learnt as fast as rewards are later, and exploration be over before there is anything to learn.
    """
    if not config.advantage_floor:
        return learner, 0.0
    largest = jnp.maximum(learner.largest_reward, jnp.abs(reward).max())
    min_std = jnp.where(largest > 0, config.advantage_floor * largest, jnp.inf)
    return replace(learner, largest_reward=largest), min_std


def loss(
    policy: Policy,
    config: PPOConfig,
    hyper: Hyperparameters,
    order: Array,
    params: PyTree,
    batch: Batch,
    key: Array,
) -> tuple[Array, Metrics]:
    """Return PPO's loss over a batch whose advantages are standardised, and metrics.

    clipped surrogate + value_weight * clipped value error - entropy_weight * entropy, each a mean over all
    agents of all steps.
    """
    old = batch.steps.extras
    new = policy.evaluate_actions(params, batch.steps, batch.memory, order, key)
    ratio = jnp.exp(new.log_prob - old.log_prob)
    actor = clipped_surrogate(ratio, batch.advantage, hyper.clip_eps).mean()
    value_clip_range = hyper.clip_eps if config.clip_value else jnp.inf
    critic = clipped_value_error(new.value, old.value, batch.target, value_clip_range).mean()
    entropy = new.entropy.mean()
    total = actor + config.value_weight * critic - hyper.entropy_weight * entropy
    return total, {
        "loss/total": total,
        "loss/actor": actor,
        "loss/critic": critic,
        "policy/entropy": entropy,
        "policy/kl": (ratio - 1 - (new.log_prob - old.log_prob)).mean(),
        "policy/clipped": (jnp.abs(ratio - 1) > hyper.clip_eps).mean(),
        "policy/largest_change": jnp.abs(ratio - 1).max(),
    }


def accumulate_gradients(
    loss: tp.Callable[[PyTree, Batch, Array], tuple[Array, Metrics]], params: PyTree, batch: Batch, key: Array
) -> tuple[PyTree, Metrics]:
    """Return the gradient of a loss and its metrics, of a large batch by gradient accumulation over
    microbatches.

    Activations of one microbatch are held instead of the whole batch's; microbatches are equal in size, so
    the mean of their gradients is the gradient of the whole.
    """
    gradient = jax.grad(loss, has_aux=True)
    num_steps, num_columns, num_agents = batch.advantage.shape
    num = num_microbatches(num_columns, num_steps * num_agents)
    if num == 1:
        return gradient(params, batch, key)

    def add(total: PyTree, inputs: tuple[Batch, Array]) -> tuple[PyTree, Metrics]:
        gradients, metrics = gradient(params, *inputs)
        return jax.tree.map(lambda a, b: a + b / num, total, gradients), metrics

    inputs = microbatches(batch, num), jax.random.split(key, num)
    total, metrics = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), inputs)
    largest = metrics["policy/largest_change"].max()
    return total, jax.tree.map(jnp.mean, metrics) | {"policy/largest_change": largest}


def update_minibatch(
    policy: Policy,
    config: PPOConfig,
    data: Batch,
    min_std: Array | float,
    learner: PPOLearner,
    inputs: tuple[Array, Array, Array],
) -> tuple[PPOLearner, Metrics]:
    """Take one gradient step on some columns of the data; `inputs` is (columns, order, key)."""
    columns, order, key = inputs
    columns = sharding.shard(columns)
    batch = Batch(
        steps=tree.take(data.steps, columns, axis=1),
        advantage=standardise(data.advantage[:, columns], min_std),
        target=data.target[:, columns],
        memory=tree.take(data.memory, columns),
    )
    own_loss = partial(loss, policy, config, learner.hyper, order)
    gradient, metrics = accumulate_gradients(own_loss, learner.params, batch, key)
    adam = optimiser(config, learner.hyper, learner.num_updates)
    params, opt_state = gradient_step(adam, gradient, learner.opt_state, learner.params)
    metrics |= {"gradient/norm": optax.tree.norm(gradient)}
    return replace(learner, params=params, opt_state=opt_state), metrics


def learn(
    policy: Policy, config: PPOConfig, learner: PPOLearner, rollout: Rollout, key: Array
) -> tuple[PPOLearner, Metrics]:
    """Run all epochs over a rollout, each a random division of its columns into minibatches."""
    learner, min_std = scale_floor(config, learner, rollout.steps.reward)
    advantage, target = compute_advantages(policy, config, learner, rollout)
    steps = policy.prepare(rollout.steps)
    data = Batch(steps=steps, advantage=advantage, target=target, memory=rollout.start_memory)
    if policy.chunk < config.rollout_length:
        data = split_time(data, policy.chunk)
    # Minibatches take from anywhere in it: brought together once, it is not gathered again.
    data = sharding.replicate(data)
    num_columns = data.advantage.shape[1]
    update = partial(update_minibatch, policy, config, data, min_std)

    def epoch(learner: PPOLearner, key: Array) -> tuple[PPOLearner, Metrics]:
        columns_key, order_key, loss_key = jax.random.split(key, 3)
        # The stored rollout is indexed, never permuted and carried: trajectories and memories cannot
        # part ways.
        columns = jax.random.permutation(columns_key, num_columns).reshape(config.num_minibatches, -1)
        order = draw_order(policy, "per_epoch", order_key, learner.order)
        orders = jnp.broadcast_to(order, (config.num_minibatches, *order.shape))
        keys = jax.random.split(loss_key, config.num_minibatches)
        return jax.lax.scan(update, learner, (columns, orders, keys))

    epochs_key, order_key = jax.random.split(key)
    learner, metrics = jax.lax.scan(epoch, learner, jax.random.split(epochs_key, config.num_epochs))
    order = draw_order(policy, "per_rollout", order_key, learner.order)
    learner = replace(learner, order=order, num_updates=learner.num_updates + 1)
    return learner, jax.tree.map(jnp.mean, metrics)
