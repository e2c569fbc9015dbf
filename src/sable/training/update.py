"""The computation of one seed: starting, updating, measuring. Pure functions; `loop` compiles and maps
them."""

import typing as tp
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from sable.config.schema import Config, RunConfig, SystemConfig
from sable.envs.base import Env
from sable.ops import trees as tree
from sable.systems.base import System
from sable.training.evaluate import evaluate_policy, summarise
from sable.training.loggers.logger import RETURN
from sable.training.rollout import RolloutState, collect, init_rollout_state
from sable.types import Metrics, PyTree, Rollout, struct

CollectResult = tuple[RolloutState, Rollout, Metrics]
"""The result of `collect`."""


@struct
class RunState:
    """All of one seed's training; a run has a leading [S]. Saving it whole is what makes resuming exact."""

    learner: PyTree
    rollout_state: RolloutState
    key: Array
    num_updates: Array
    metric_sums: Metrics  # sums since the last evaluation, of learning and of the episodes that ended
    # -1, or the index in `halt_causes` of what stopped being finite; see also `step_without_legal_action`
    halted: Array


@struct
class Best:
    """The best evaluated parameters so far."""

    params: PyTree
    score: Array


@struct
class State:
    """The contents of a checkpoint; leading [S]."""

    run: RunState
    best: Best


class Program(tp.NamedTuple):
    """The functions of one run, for one seed; the host loop maps them over all."""

    start: tp.Callable[..., State]
    """(seed, hyper, or the system's own without one) -> State"""
    run_updates: tp.Callable[[RunState, Array], RunState]
    """(run, updates) -> run"""
    update: tp.Callable[..., RunState]
    """(run, what was collected, or without: it collects) -> run after one update"""
    evaluate_and_keep_best: tp.Callable[..., tuple[State, Metrics]]
    """(State, statistics of episodes, or without: it plays) -> (the state with its best brought up to date
    and its metric sums cleared, metrics)"""
    absolute_metric: tp.Callable[[State], Metrics]
    """State -> statistics [episodes] of the best parameters"""


CollectAndLearn = tp.Callable[
    [PyTree, RolloutState, Array, CollectResult | None], tuple[PyTree, RolloutState, Metrics, Array, Array]
]
"""`collect_and_learn` of one run"""


class Stages(tp.NamedTuple):
    """The compiled programs of a run, for all seeds at once."""

    run_updates: tp.Any
    """(run, updates) -> run; compiled, or `host_rollout.RunUpdates`, which the host steps"""
    evaluate_and_keep_best: tp.Callable[[State], tuple[State, tp.Any]]
    absolute_metric: tp.Callable[[State], tp.Any]


def make_program(env: Env, system: System, config: Config) -> Program:
    """Return the functions of this run, pure and not yet compiled."""
    # Jitted so that `start`, which wants only its shapes, and `run_updates` share one trace.
    own_collect_and_learn = jax.jit(partial(collect_and_learn, env, system, config))
    own_update = partial(update, own_collect_and_learn)
    return Program(
        start=partial(start, env, system, config.system, own_collect_and_learn),
        run_updates=partial(run_updates, own_update),
        update=own_update,
        evaluate_and_keep_best=partial(evaluate_and_keep_best, env, system, config.run),
        absolute_metric=partial(absolute_metric, env, system, config.run),
    )


def collect_and_learn(
    env: Env,
    system: System,
    config: Config,
    learner: PyTree,
    rollout_state: RolloutState,
    key: Array,
    collect_result: CollectResult | None,
) -> tuple[PyTree, RolloutState, Metrics, Array, Array]:
    """Collect one rollout and learn from it.

    Return, after learner and rollout state, all sums of metrics, whether all that was seen in the
    rollout is finite, and in which of its time steps an agent first had no legal action (-1: none).
    """
    collect_key, learn_key = jax.random.split(key)
    if collect_result is None:
        collect_result = collect(
            env,
            system,
            learner,
            rollout_state,
            collect_key,
            config.system.rollout_length,
            config.run.reset_pool_size,
        )
    rollout_state, rollout, episode_sums = collect_result
    rollout_is_finite = tree.all_finite((rollout.steps, rollout.last.observation))
    if jax.tree.leaves(learner.replay):  # which is not put back when an update is undone
        rollout = tree.select(rollout_is_finite, rollout, jax.tree.map(jnp.zeros_like, rollout))
    learner, learn_metrics = system.learn(learner, rollout, learn_key)
    counts = {"updates": jnp.ones(()), "parameters": _nan_unless_finite(replace(learner, replay=()))}
    metric_sums = learn_metrics | counts | {f"rollout/{k}": v for k, v in episode_sums.items()}
    return (
        learner,
        rollout_state,
        metric_sums,
        rollout_is_finite,
        _first_step_without_legal_action(rollout.steps.observation.action_mask),
    )


def update(
    collect_and_learn: CollectAndLearn, state: RunState, collect_result: CollectResult | None = None
) -> RunState:
    """Return the state after one update; a seed in which something stopped being finite stays as it was, for
    good."""
    key, advance_key = jax.random.split(state.key)
    learner, rollout_state, update_metrics, rollout_is_finite, no_legal_action = collect_and_learn(
        state.learner, state.rollout_state, advance_key, collect_result
    )
    is_broken = jnp.stack(
        [~jnp.isfinite(update_metrics[name]) for name in sorted(update_metrics)]
        + [~rollout_is_finite, no_legal_action >= 0]
    )
    new = RunState(
        learner=learner,
        rollout_state=rollout_state,
        key=key,
        num_updates=state.num_updates + 1,
        metric_sums=jax.tree.map(jnp.add, state.metric_sums, update_metrics),
        halted=state.halted,
    )
    cause = jnp.where(rollout_is_finite, jnp.argmax(is_broken), len(update_metrics))
    cause = jnp.where(
        no_legal_action >= 0, len(update_metrics) + 1 + no_legal_action, cause
    )  # which may be why others are not finite
    halted = jnp.where((state.halted < 0) & is_broken.any(), cause, state.halted)
    new_or_old = tree.select(halted < 0, _without_replay(new), _without_replay(state))
    return replace(new_or_old, learner=replace(new_or_old.learner, replay=learner.replay), halted=halted)


def start(
    env: Env,
    system: System,
    config: SystemConfig,
    collect_and_learn: CollectAndLearn,
    seed: Array,
    hyper: PyTree = None,
) -> State:
    """Return the state of a seed before its first update."""
    learner_key, env_key, key = jax.random.split(jax.random.key(seed), 3)
    learner = system.init(learner_key, system.hyper if hyper is None else hyper)
    rollout_state = init_rollout_state(env, system, env_key, config.num_envs)
    _, _, update_metrics, _, _ = jax.eval_shape(collect_and_learn, learner, rollout_state, key, None)
    run_state = RunState(
        learner=learner,
        rollout_state=rollout_state,
        key=key,
        num_updates=jnp.zeros((), jnp.int32),
        metric_sums={name: jnp.zeros(x.shape, x.dtype) for name, x in update_metrics.items()},
        halted=jnp.full((), -1, jnp.int32),
    )
    return State(run=run_state, best=Best(params=learner.params, score=jnp.full((), -jnp.inf)))


def run_updates(update: tp.Callable[[RunState], RunState], state: RunState, num_updates: Array) -> RunState:
    """Return the state after so many updates."""
    return jax.lax.fori_loop(0, num_updates, lambda _, state: update(state), state)


def evaluate_and_keep_best(
    env: Env, system: System, run: RunConfig, state: State, stats: Metrics | None = None
) -> tuple[State, Metrics]:
    """Evaluate the parameters, or take the statistics of episodes played elsewhere, and keep the best."""
    params, key = state.run.learner.params, evaluation_key(state.run)
    stats = evaluate_policy(env, system, params, key, run.evaluation_episodes) if stats is None else stats
    metrics = summarise(stats)
    score = metrics[RETURN]
    score = jnp.where(jnp.isfinite(score), score, -jnp.inf)
    best = tree.select(score >= state.best.score, Best(params=params, score=score), state.best)
    metrics |= _mean_metrics(state.run.metric_sums) | {"updates": state.run.num_updates}
    cleared_run = replace(state.run, metric_sums=jax.tree.map(jnp.zeros_like, state.run.metric_sums))
    return State(run=cleared_run, best=best), metrics


def absolute_metric(env: Env, system: System, run: RunConfig, state: State) -> Metrics:
    """Return the statistics of the episodes on which the best parameters are measured at the end."""
    key = jax.random.fold_in(evaluation_key(state.run), 1)
    return evaluate_policy(env, system, state.best.params, key, run.absolute_episodes)


def halt_causes(state: RunState) -> list[str]:
    """Return the names of all that may stop being finite in an update, in the order in which `halted`
    counts."""
    return [*sorted(state.metric_sums), "a reward or an observation"]


def step_without_legal_action(state: RunState, halted: int) -> int | None:
    """Return the time step of its last rollout in which a seed had no legal action, where that is why it
    halted."""
    time_step = halted - len(halt_causes(state))
    return time_step if time_step >= 0 else None


def evaluation_key(state: RunState) -> Array:
    """Return a key for measuring, beyond those that updates split off (`split(key)[i]` is `fold_in(key,
    i)`)."""
    return jax.random.fold_in(state.key, 2**31)


def map_seeds(start: tp.Callable[..., State]) -> tp.Callable[..., State]:
    """Return `start` mapped over seeds, and hyperparameters, without `vmap`: batched QR decompositions, which
    orthogonal weights need, can fill XLA's CPU thread pool and wait for each other for ever (jaxlib 0.10.2,
    two cores)."""
    return lambda *each: jax.lax.map(lambda one: start(*one), each)


def _without_replay(state: RunState) -> RunState:
    return replace(state, learner=replace(state.learner, replay=()))


def _first_step_without_legal_action(action_mask: Array) -> Array:
    """Return the first time step of masks [T, B, N, A] in which an agent has no legal action; -1 for none."""
    no_legal_action = ~action_mask.any(-1).all((1, 2))
    return jnp.where(no_legal_action.any(), jnp.argmax(no_legal_action), -1)


def _nan_unless_finite(learner: PyTree) -> Array:
    """Return 0 where all is finite, else NaN."""
    return jnp.where(tree.all_finite(learner), 0.0, jnp.nan)


def _mean_metrics(metric_sums: Metrics) -> Metrics:
    """Return the means of what `collect_and_learn` added up: over updates, or over the episodes that
    ended."""
    counts = {"updates", "parameters", "rollout/episodes"}
    return {
        name: total / metric_sums["rollout/episodes" if name.startswith("rollout/") else "updates"]
        for name, total in metric_sums.items()
        if name not in counts
    } | {"rollout/episodes": metric_sums["rollout/episodes"]}
