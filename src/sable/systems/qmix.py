"""QMIX: recurrent Q-learning over a team whose joint value rises with every agent's own."""

import typing as tp
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import Array

from sable.config.schema import QMIXConfig
from sable.nets.actor_critic import Network, global_state
from sable.nets.qmix import Mixer, agent_q
from sable.ops.distributions import masked_categorical
from sable.ops.losses import td_target
from sable.systems import replay as replays
from sable.systems.base import System, gradient_step, hyperparameters_from
from sable.types import Decision, EnvSpec, Metrics, Observation, PyTree, Rollout, Transition, struct

Networks = dict[str, PyTree]
"""The parameters of the `agent` and of the `mixer`."""


@struct
class Hyperparameters:
    """The numbers a batch of learners can differ in while sharing one program."""

    q_learning_rate: Array
    discount: Array
    polyak: Array
    max_grad_norm: Array
    epsilon_min: Array
    epsilon_decay: Array


@struct
class QMIXLearner:
    params: PyTree  # of the agents' network, all that acting needs
    mixer: PyTree
    target: Networks
    hyper: Hyperparameters
    opt_state: PyTree  # over both networks
    num_updates: Array  # gradient steps
    env_steps: Array
    replay: PyTree


class Nets(tp.NamedTuple):
    """All that does not change while a team learns."""

    spec: EnvSpec
    config: QMIXConfig
    agent: Network
    mixer: Mixer


def make(spec: EnvSpec, config: QMIXConfig) -> System:
    """Return QMIX for this kind of environment."""
    nets = Nets(spec, config, agent_q(config, spec), Mixer(spec.num_agents, config.mixer_size))
    replay = replays.make(config.num_envs, config.replay_size, config.sequence_length, config.batch_size)

    def ready(learner: QMIXLearner) -> Array:
        size = replay.size(learner.replay)
        enough = size * config.num_envs >= config.warmup_sequences * config.sequence_length
        return enough & (size >= config.sequence_length)

    learn_from_replay = replays.make_learn(
        replay, config, lambda rollout: _to_replay(rollout.steps), partial(update, nets), ready
    )

    def learn(learner: QMIXLearner, rollout: Rollout, key: Array) -> tuple[QMIXLearner, Metrics]:
        exploration = {"exploration/epsilon": epsilon(learner)}
        learner, metrics = learn_from_replay(learner, rollout, key)
        return learner, metrics | exploration

    return System(
        hyper=hyperparameters_from(Hyperparameters, config),
        init=partial(init, nets, replay),
        initial_memory=partial(initial_memory, nets),
        explore=partial(explore, nets),
        act=partial(act, nets),
        next_extras=lambda learner, observation, memory: (),
        learn=learn,
    )


def init(nets: Nets, replay: replays.Replay, key: Array, hyper: Hyperparameters) -> QMIXLearner:
    """Return a fresh learner, its target networks copies of the learned ones."""
    agent_key, mixer_key = jax.random.split(key)
    step = _zero_transition(nets.spec)
    batch_of_one = jax.tree.map(lambda x: x[None, None], step)
    view, state = batch_of_one.observation.view, global_state(batch_of_one.observation)
    networks: PyTree = {
        "agent": nets.agent.init(agent_key, view, initial_memory(nets, 1), batch_of_one.first),
        "mixer": nets.mixer.init(mixer_key, batch_of_one.action.astype(view.dtype), state),
    }
    return QMIXLearner(
        params=networks["agent"],
        mixer=networks["mixer"],
        target=jax.tree.map(jnp.copy, networks),  # a buffer cannot be donated twice
        hyper=hyper,
        opt_state=optimiser(hyper).init(networks),
        num_updates=jnp.zeros((), jnp.int32),
        env_steps=jnp.zeros((), jnp.int32),
        replay=replay.init(step),
    )


def optimiser(hyper: Hyperparameters) -> optax.GradientTransformation:
    """Return Adam behind clipping by the global norm over both networks."""
    clip = optax.clip_by_global_norm(hyper.max_grad_norm)
    return optax.chain(clip, optax.adam(hyper.q_learning_rate))


def initial_memory(nets: Nets, num_envs: int) -> Array:
    """Return the GRUs' zero memories [B, N, R]."""
    return jnp.zeros((num_envs, nets.spec.num_agents, nets.config.recurrent_size))


def act(nets: Nets, params: PyTree, observation: Observation, memory: PyTree, key: Array | None) -> Decision:
    """Take the legal action of the highest value."""
    first = jnp.zeros((1, memory.shape[0]), bool)  # whoever calls has emptied the memory where it is
    q, memory = nets.agent.apply(params, observation.view[None], memory, first)
    return Decision(action=masked_categorical(q[0], observation.action_mask).mode(), memory=memory, extras=())


def explore(
    nets: Nets, learner: QMIXLearner, observation: Observation, memory: PyTree, key: Array
) -> Decision:
    """Act epsilon-greedily, each agent for itself."""
    chance_key, action_key = jax.random.split(key)
    greedy, action_mask = act(nets, learner.params, observation, memory, key), observation.action_mask
    random_action = masked_categorical(jnp.zeros(action_mask.shape), action_mask).sample(action_key)
    is_random = jax.random.bernoulli(chance_key, epsilon(learner), random_action.shape)
    return replace(greedy, action=jnp.where(is_random, random_action, greedy.action))


def loss(
    nets: Nets, target: Networks, discount: Array, networks: Networks, batch: Transition
) -> tuple[Array, Metrics]:
    """Return the mean squared error of the mixed value over sequences [T, B], and metrics.

    y[t] = reward[t] + discount * (1 - first[t+1]) * mixed target value of the actions that are best by the
    learned values at t+1 (double Q-learning); the last step only serves as a target.
    """

    def q_values(params: PyTree) -> tp.Any:
        memory = initial_memory(nets, nets.config.batch_size)
        return nets.agent.apply(params, batch.observation.view, memory, batch.first)[0]

    def mix(params: PyTree, q: Array, state: Array) -> tp.Any:
        return nets.mixer.apply(params, q, state)

    state = global_state(batch.observation)
    q, target_q = q_values(networks["agent"]), q_values(target["agent"])
    best = masked_categorical(q, batch.observation.action_mask).mode()
    value = mix(networks["mixer"], _take_action(q, batch.action)[:-1], state[:-1])
    next_value = mix(target["mixer"], _take_action(target_q, best)[1:], state[1:])
    # A time step that opens an episode says nothing of the one before.
    continues = 1.0 - batch.first[1:]
    y = td_target(batch.reward[:-1], discount * continues, next_value)
    error = jnp.square(value - y).mean()
    return error, {"loss/q": error, "value/mean": value.mean(), "value/target": y.mean()}


def update(nets: Nets, learner: QMIXLearner, batch: Transition, key: Array) -> tuple[QMIXLearner, Metrics]:
    """Take one gradient step on a batch of sequences, and move the target networks after it."""
    networks: PyTree = {"agent": learner.params, "mixer": learner.mixer}
    own_loss = partial(loss, nets, learner.target, learner.hyper.discount)
    gradient, metrics = jax.grad(own_loss, has_aux=True)(networks, batch)
    networks, opt_state = gradient_step(optimiser(learner.hyper), gradient, learner.opt_state, networks)
    num_updates = learner.num_updates + 1
    if nets.config.hard_target_update:
        period = nets.config.target_update_period
        target = optax.periodic_update(networks, learner.target, num_updates, period)
    else:
        target = optax.incremental_update(networks, learner.target, learner.hyper.polyak)
    return replace(
        learner,
        params=networks["agent"],
        mixer=networks["mixer"],
        target=target,
        opt_state=opt_state,
        num_updates=num_updates,
    ), metrics | {"gradient/norm": optax.tree.norm(gradient)}


def epsilon(learner: QMIXLearner) -> Array:
    """Return the chance of a random action: 1 at first, falling with every environment step to its floor."""
    return jnp.maximum(learner.hyper.epsilon_min, 1.0 - learner.hyper.epsilon_decay * learner.env_steps)


def _to_replay(steps: Transition) -> Transition:
    """Return the steps with one reward for the team, and without what learning does not look at."""
    return replace(
        steps,
        observation=replace(steps.observation, step_count=()),
        reward=steps.reward.mean(-1),
        discount=(),
        extras=(),
        next_extras=(),
    )


def _zero_transition(spec: EnvSpec) -> Transition:
    """Return one step as replay keeps it, all zeros."""
    team = (spec.num_agents,)
    observation = Observation(
        view=jnp.zeros((*team, spec.view_size)),
        action_mask=jnp.zeros((*team, spec.num_actions), bool),
        step_count=jnp.zeros((), jnp.int32),
        state=jnp.zeros(spec.state_size) if spec.state_size else (),
    )
    step = Transition(
        observation=observation,
        action=jnp.zeros(team, jnp.int32),
        reward=jnp.zeros(team),
        discount=jnp.zeros(()),
        first=jnp.zeros((), bool),
        extras=(),
        next_extras=(),
    )
    return _to_replay(step)


def _take_action(q: Array, action: Array) -> Array:
    """Return the entry `action` [..] of `q` [.., A]; as a product, whose gradient is no scatter."""
    return (q * jax.nn.one_hot(action, q.shape[-1])).sum(-1)
