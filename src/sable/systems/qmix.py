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
from sable.systems.base import System, configured, gradient_step
from sable.types import Decision, EnvSpec, Metrics, Observation, PyTree, Rollout, Transition, struct

Networks = dict[str, PyTree]
"""The parameters of the `agent` and of the `mixer`."""


@struct
class Hyper:
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
    hyper: Hyper
    opt_state: PyTree  # over both networks
    num_updates: Array  # gradient steps
    env_steps: Array
    replay: PyTree


class Nets(tp.NamedTuple):
    """What does not change while a team learns."""

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
        replay, config, lambda rollout: _keep(rollout.steps), partial(update, nets), ready
    )

    def learn(learner: QMIXLearner, rollout: Rollout, key: Array) -> tuple[QMIXLearner, Metrics]:
        explored = {"exploration/epsilon": epsilon(learner)}
        learner, metrics = learn_from_replay(learner, rollout, key)
        return learner, metrics | explored

    return System(
        hyper=configured(Hyper, config),
        init=partial(init, nets, replay),
        initial_memory=partial(initial_memory, nets),
        explore=partial(explore, nets),
        exploit=partial(exploit, nets),
        final=lambda learner, observation, memory: (),
        learn=learn,
    )


def init(nets: Nets, replay: replays.Replay, key: Array, hyper: Hyper) -> QMIXLearner:
    """Return a fresh learner, its target networks copies of the learned ones."""
    agent_key, mixer_key = jax.random.split(key)
    step = _blank(nets.spec)
    alone = jax.tree.map(lambda x: x[None, None], step)
    view, state = alone.observation.view, global_state(alone.observation)
    networks: PyTree = {
        "agent": nets.agent.init(agent_key, view, initial_memory(nets, 1), alone.first),
        "mixer": nets.mixer.init(mixer_key, alone.action.astype(view.dtype), state),
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


def optimiser(hyper: Hyper) -> optax.GradientTransformation:
    """Return Adam behind clipping by the global norm over both networks."""
    clip = optax.clip_by_global_norm(hyper.max_grad_norm)
    return optax.chain(clip, optax.adam(hyper.q_learning_rate))


def initial_memory(nets: Nets, num_envs: int) -> Array:
    """Return the GRUs' zero memories [B, N, R]."""
    return jnp.zeros((num_envs, nets.spec.num_agents, nets.config.recurrent_size))


def exploit(
    nets: Nets, params: PyTree, observation: Observation, memory: PyTree, key: Array | None
) -> Decision:
    """Take the legal action of the highest value."""
    first = jnp.zeros((1, memory.shape[0]), bool)  # whoever calls has emptied the memory where it is
    q, memory = nets.agent.apply(params, observation.view[None], memory, first)
    return Decision(action=masked_categorical(q[0], observation.legal).mode(), memory=memory, extras=())


def explore(
    nets: Nets, learner: QMIXLearner, observation: Observation, memory: PyTree, key: Array
) -> Decision:
    """Act epsilon-greedily, each agent for itself."""
    chance_key, action_key = jax.random.split(key)
    greedy, legal = exploit(nets, learner.params, observation, memory, key), observation.legal
    anything = masked_categorical(jnp.zeros(legal.shape), legal).sample(action_key)
    random = jax.random.bernoulli(chance_key, epsilon(learner), anything.shape)
    return replace(greedy, action=jnp.where(random, anything, greedy.action))


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
    best = masked_categorical(q, batch.observation.legal).mode()
    value = mix(networks["mixer"], _entry(q, batch.action)[:-1], state[:-1])
    next_value = mix(target["mixer"], _entry(target_q, best)[1:], state[1:])
    # A time step that opens an episode says nothing of the one before.
    goes_on = 1.0 - batch.first[1:]
    y = td_target(batch.reward[:-1], discount * goes_on, next_value)
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
    """The chance of a random action: 1 at first, falling with every environment step to its floor."""
    return jnp.maximum(learner.hyper.epsilon_min, 1.0 - learner.hyper.epsilon_decay * learner.env_steps)


def _keep(steps: Transition) -> Transition:
    """The steps with one reward for the team, and without what learning does not look at."""
    return replace(
        steps,
        observation=replace(steps.observation, time=()),
        reward=steps.reward.mean(-1),
        discount=(),
        extras=(),
        final=(),
    )


def _blank(spec: EnvSpec) -> Transition:
    """One step as replay keeps it, all zeros."""
    team = (spec.num_agents,)
    observation = Observation(
        view=jnp.zeros((*team, spec.view_size)),
        legal=jnp.zeros((*team, spec.num_actions), bool),
        time=jnp.zeros((), jnp.int32),
        state=jnp.zeros(spec.state_size) if spec.state_size else (),
    )
    step = Transition(
        observation=observation,
        action=jnp.zeros(team, jnp.int32),
        reward=jnp.zeros(team),
        discount=jnp.zeros(()),
        first=jnp.zeros((), bool),
        extras=(),
        final=(),
    )
    return _keep(step)


def _entry(q: Array, action: Array) -> Array:
    """The entry `action` [..] of `q` [.., A]; as a product, whose gradient is no scatter."""
    return (q * jax.nn.one_hot(action, q.shape[-1])).sum(-1)
