"""Proximal policy optimisation over a team: what every on-policy system shares."""

import typing as tp
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sable.config.schema import PPOConfig
from sable.ops import sharding
from sable.ops import trees as tree
from sable.ops.losses import clipped_surrogate, clipped_value_error, standardise
from sable.ops.returns import gae
from sable.systems.base import System, configured
from sable.types import Decision, EnvSpec, Metrics, Observation, PyTree, Rollout, Transition, struct


@struct
class Acted:
    """What acting leaves behind for learning; agents in natural order."""

    raw: Array  # [.., N] or [.., N, action_size], the action as it was sampled, before squashing and scaling
    log_prob: Array  # [.., N]
    value: Array  # [.., N]
    memory: PyTree = ()  # what was remembered before acting, where learning starts in mid-rollout


@struct
class Evaluation:
    """What the current parameters say about actions already taken; agents in natural order."""

    log_prob: Array  # [T, B, N]
    value: Array  # [T, B, N]
    entropy: Array  # [T, B, N]


class Policy(tp.NamedTuple):
    """The network side of a PPO system. `order` [N] says in which order agents are processed; some policies
    do not care."""

    init: tp.Callable[[Array], PyTree]
    initial_memory: tp.Callable[[int], PyTree]
    act: tp.Callable[[PyTree, Observation, PyTree, Array, Array | None], Decision]
    """(params, observation [B], memory, order, key) -> Decision whose extras are `Acted`"""
    value: tp.Callable[[PyTree, Observation, PyTree, Array], Array]
    """(params, observation [B], memory, order) -> [B, N]"""
    evaluate: tp.Callable[[PyTree, Transition, PyTree, Array, Array], Evaluation]
    """(params, steps [T, B] as `prepare` gives them, start memory [B], order, key) -> Evaluation"""
    learning_rate: PyTree
    """Adam's step size, or one for each entry of the parameters, whose gradients are then clipped apart."""
    chunk: int
    """How many contiguous time steps `evaluate` is given: 1 where each stands alone. Where it is neither 1
    nor the whole rollout, `Acted.memory` says what each chunk begins with."""
    prepare: tp.Callable[[Transition], Transition] = lambda steps: steps
    """What `evaluate` needs of steps and no parameter enters, done once for all minibatches"""
    agent_order: str | None = None
    """Where `order` comes from: `natural`, or drawn anew `per_rollout`, for acting and learning alike, or
    `per_epoch`, for learning only. None where the policy ignores it."""


@struct
class Hyper:
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
    hyper: Hyper
    opt_state: PyTree
    order: Array  # [N] the order agents act in
    num_updates: Array
    largest_reward: PyTree  # of all seen so far, in size; () without a floor for advantages
    replay: tuple = ()


@struct
class Batch:
    """What an epoch is cut from; environments on axis 1 of the steps, 0 of the memory."""

    steps: Transition
    advantage: Array
    target: Array
    memory: PyTree


def make(policy: Policy, config: PPOConfig, spec: EnvSpec) -> System:
    """The system that trains `policy` by PPO."""
    natural = jnp.arange(spec.num_agents)
    per_rollout, per_epoch = (policy.agent_order == name for name in ("per_rollout", "per_epoch"))
    chunk = min(policy.chunk, config.rollout_length)
    decay_updates = config.learning_rate_horizon / (config.num_envs * config.rollout_length)

    def optimiser(learner: PPOLearner) -> optax.GradientTransformation:
        def one(rate: Array) -> optax.GradientTransformation:
            if config.learning_rate_horizon:
                rate = rate * jnp.maximum(0.0, 1.0 - learner.num_updates / decay_updates)
            clip = optax.clip_by_global_norm(learner.hyper.max_grad_norm)
            return optax.chain(clip, optax.adam(rate, eps=1e-5))

        rates = learner.hyper.learning_rate
        if not isinstance(rates, dict):
            return one(rates)
        return optax.multi_transform({name: one(rate) for name, rate in rates.items()}, {n: n for n in rates})

    def init(key: Array, hyper: Hyper) -> PPOLearner:
        params_key, order_key = jax.random.split(key)
        learner = PPOLearner(
            params=policy.init(params_key),
            hyper=hyper,
            opt_state=(),
            order=jax.random.permutation(order_key, natural) if per_rollout else natural,
            num_updates=jnp.zeros((), jnp.int32),
            largest_reward=jnp.zeros(()) if config.advantage_floor else (),
        )
        return replace(learner, opt_state=optimiser(learner).init(learner.params))

    def explore(learner: PPOLearner, observation: Observation, memory: PyTree, key: Array) -> Decision:
        return policy.act(learner.params, observation, memory, learner.order, key)

    def exploit(params: PyTree, observation: Observation, memory: PyTree, key: Array | None) -> Decision:
        return policy.act(params, observation, memory, natural, key)

    def final(learner: PPOLearner, observation: Observation, memory: PyTree) -> PyTree:
        if not config.bootstrap_time_limits:
            return ()
        return policy.value(learner.params, observation, memory, learner.order)

    def estimate(learner: PPOLearner, rollout: Rollout) -> tuple[Array, Array]:
        """(advantage, target) of every step, as the parameters that acted saw it."""
        steps, last, value = rollout.steps, rollout.last, rollout.steps.extras.value
        last_memory = tree.reset(rollout.last_memory, last.first)
        last_value = policy.value(learner.params, last.observation, last_memory, learner.order)
        next_value = jnp.concatenate([value[1:], last_value[None]])
        next_first = jnp.concatenate([steps.first[1:], last.first[None]])
        trace = bootstrap = 1.0 - next_first
        if config.bootstrap_time_limits:
            next_value = tree.select(next_first, steps.final, next_value)
            bootstrap = steps.discount
        hyper = learner.hyper
        return gae(steps.reward, value, next_value, bootstrap, trace, hyper.discount, hyper.gae_lambda)

    def floor(learner: PPOLearner, reward: Array) -> tuple[PPOLearner, Array | float]:
        """The learner that has seen these rewards, and the least standard deviation for advantages.

        Until a first reward, advantages are a critic's noise alone. Blown up to a variance of one, it would
        be learnt as fast as rewards are later, and exploration be over before there is anything to learn.
        """
        if not config.advantage_floor:
            return learner, 0.0
        largest = jnp.maximum(learner.largest_reward, jnp.abs(reward).max())
        least = jnp.where(largest > 0, config.advantage_floor * largest, jnp.inf)
        return replace(learner, largest_reward=largest), least

    def loss(params: PyTree, hyper: Hyper, batch: Batch, order: Array, key: Array) -> tuple[Array, Metrics]:
        """What is to be minimised over a batch whose advantages are standardised."""
        acted = batch.steps.extras
        now = policy.evaluate(params, batch.steps, batch.memory, order, key)
        ratio = jnp.exp(now.log_prob - acted.log_prob)
        actor = clipped_surrogate(ratio, batch.advantage, hyper.clip_eps).mean()
        reach = hyper.clip_eps if config.clip_value else jnp.inf
        critic = clipped_value_error(now.value, acted.value, batch.target, reach).mean()
        entropy = now.entropy.mean()
        total = actor + config.value_weight * critic - hyper.entropy_weight * entropy
        return total, {
            "loss/total": total,
            "loss/actor": actor,
            "loss/critic": critic,
            "policy/entropy": entropy,
            "policy/kl": (ratio - 1 - (now.log_prob - acted.log_prob)).mean(),
            "policy/clipped": (jnp.abs(ratio - 1) > hyper.clip_eps).mean(),
            "policy/largest_change": jnp.abs(ratio - 1).max(),
        }

    def slope(params: PyTree, hyper: Hyper, batch: Batch, order: Array, key: Array) -> tuple[PyTree, Metrics]:
        """The gradient of the loss, and metrics; of a large batch slice by slice, which takes less memory."""
        gradient = jax.grad(loss, has_aux=True)
        num_steps, num_columns = batch.steps.first.shape
        num = num_slices(num_columns, num_steps * spec.num_agents)
        if num == 1:
            return gradient(params, hyper, batch, order, key)

        def add(total: PyTree, now: tuple[Batch, Array]) -> tuple[PyTree, Metrics]:
            own, metrics = gradient(params, hyper, now[0], order, now[1])
            return jax.tree.map(lambda a, b: a + b / num, total, own), metrics

        each = slices(batch, num), jax.random.split(key, num)
        total, metrics = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), each)
        largest = metrics["policy/largest_change"].max()
        return total, jax.tree.map(jnp.mean, metrics) | {"policy/largest_change": largest}

    def learn(learner: PPOLearner, rollout: Rollout, key: Array) -> tuple[PPOLearner, Metrics]:
        learner, least = floor(learner, rollout.steps.reward)
        advantage, target = estimate(learner, rollout)
        steps = policy.prepare(rollout.steps)
        whole = Batch(steps=steps, advantage=advantage, target=target, memory=rollout.start_memory)
        if chunk < config.rollout_length:
            whole = cut(whole, chunk)
        # Minibatches take from anywhere in it: brought together once, it is not asked for again.
        whole = sharding.whole(whole)
        num_columns = whole.steps.first.shape[1]

        def minibatch(learner: PPOLearner, now: tuple[Array, Array, Array]) -> tuple[PPOLearner, Metrics]:
            columns, order, key = now
            columns = sharding.shared(columns)
            batch = Batch(
                steps=tree.take(whole.steps, columns, axis=1),
                advantage=standardise(whole.advantage[:, columns], least),
                target=whole.target[:, columns],
                memory=tree.take(whole.memory, columns),
            )
            gradient, metrics = slope(learner.params, learner.hyper, batch, order, key)
            updates, opt_state = optimiser(learner).update(gradient, learner.opt_state)
            metrics |= {"gradient/norm": optax.tree.norm(gradient)}
            return replace(
                learner, params=optax.apply_updates(learner.params, updates), opt_state=opt_state
            ), metrics

        def epoch(learner: PPOLearner, key: Array) -> tuple[PPOLearner, Metrics]:
            columns_key, order_key, loss_key = jax.random.split(key, 3)
            # The stored rollout is indexed, never permuted and carried: trajectories and memories cannot
            # part ways.
            columns = jax.random.permutation(columns_key, num_columns).reshape(config.num_minibatches, -1)
            order = jax.random.permutation(order_key, natural) if per_epoch else learner.order
            orders = jnp.broadcast_to(order, (config.num_minibatches, spec.num_agents))
            keys = jax.random.split(loss_key, config.num_minibatches)
            return jax.lax.scan(minibatch, learner, (columns, orders, keys))

        epochs_key, order_key = jax.random.split(key)
        learner, metrics = jax.lax.scan(epoch, learner, jax.random.split(epochs_key, config.num_epochs))
        order = jax.random.permutation(order_key, natural) if per_rollout else natural
        learner = replace(learner, order=order, num_updates=learner.num_updates + 1)
        return learner, jax.tree.map(jnp.mean, metrics)

    return System(
        hyper=configured(Hyper, config, learning_rate=policy.learning_rate),
        init=init,
        initial_memory=policy.initial_memory,
        explore=explore,
        exploit=exploit,
        final=final,
        learn=learn,
    )


SLICE = 2**18
"""Tokens whose activations learning holds at once, where a column does not have more."""


def num_slices(num_columns: int, tokens: int) -> int:
    """Into how many equal slices a batch of columns, each of so many tokens, is cut: as few as may be."""
    return next(
        n
        for n in range(1, num_columns + 1)
        if (num_columns % n == 0 and num_columns // n * tokens <= SLICE) or n == num_columns
    )


def slices(batch: Batch, num: int) -> Batch:
    """The batch with its columns dealt out to as many slices, along a new first axis."""

    def steps(x: Array) -> Array:
        return x.reshape(x.shape[0], num, -1, *x.shape[2:]).swapaxes(0, 1)

    memory = jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), batch.memory)
    return Batch(
        memory=memory,
        **{name: jax.tree.map(steps, getattr(batch, name)) for name in ("steps", "advantage", "target")},
    )


def cut(batch: Batch, chunk: int) -> Batch:
    """The batch with its time cut into contiguous chunks, each an environment of its own.

    [T, B] becomes [chunk, T / chunk * B], and each chunk begins with the memory it was acted with.
    """

    def column(x: Array) -> Array:
        x = x.reshape(-1, chunk, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(chunk, -1, *x.shape[3:])

    acted = batch.steps.extras
    bare = replace(batch.steps, extras=replace(acted, memory=()))
    steps, advantage, target = jax.tree.map(column, (bare, batch.advantage, batch.target))
    memory = jax.tree.map(lambda x: column(x)[0], acted.memory)
    return Batch(steps=steps, advantage=advantage, target=target, memory=memory)
