"""What one seed computes: starting, updating, measuring. Pure functions; `loop` compiles and maps them."""

import typing as tp
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from sable.config.schema import RunConfig, SystemConfig
from sable.envs.base import Env
from sable.ops import trees as tree
from sable.systems.base import System
from sable.training.evaluate import play, summarise
from sable.training.loggers.logger import RETURN
from sable.training.rollout import Situation, collect, open_situation
from sable.types import Metrics, PyTree, Rollout, struct

Collected = tuple[Situation, Rollout, Metrics]
"""What `collect` returns."""


@struct
class RunState:
    """All of one seed's training; a run has a leading [S]. Saving it whole is what makes resuming exact."""

    learner: PyTree
    situation: Situation
    key: Array
    num_updates: Array
    tally: Metrics  # sums since the last evaluation, of learning and of the episodes that ended
    halted: Array  # -1, or the index in `causes` of what stopped being finite; see also `time_without_choice`


@struct
class Best:
    """The best evaluated parameters so far."""

    params: PyTree
    score: Array


@struct
class State:
    """What a checkpoint holds; leading [S]."""

    run: RunState
    best: Best


class Program(tp.NamedTuple):
    """The functions of one run, for one seed; the host loop maps them over all."""

    start: tp.Callable[..., State]
    """(seed, hyper, or the system's own without one) -> State"""
    unit: tp.Callable[[RunState, Array], RunState]
    """(run, updates) -> run"""
    update: tp.Callable[..., RunState]
    """(run, what was collected, or without: it collects) -> run after one update"""
    assess: tp.Callable[..., tuple[State, Metrics]]
    """(State, statistics of episodes, or without: it plays) -> (the state with its best brought up to date
    and its tally cleared, metrics)"""
    absolute: tp.Callable[[State], Metrics]
    """State -> statistics [episodes] of the best parameters"""


Advance = tp.Callable[
    [PyTree, Situation, Array, Collected | None], tuple[PyTree, Situation, Metrics, Array, Array]
]
"""`advance` of one run"""


def make_program(env: Env, system: System, run: RunConfig, config: SystemConfig) -> Program:
    """Return the functions of this run, pure and not yet compiled."""
    # Jitted so that `start`, which wants only its shapes, and `unit` share one trace.
    own_advance = jax.jit(partial(advance, env, system, run, config))
    own_update = partial(update, own_advance)
    return Program(
        start=partial(start, env, system, config, own_advance),
        unit=partial(unit, own_update),
        update=own_update,
        assess=partial(assess, env, system, run),
        absolute=partial(absolute, env, system, run),
    )


def advance(
    env: Env,
    system: System,
    run: RunConfig,
    config: SystemConfig,
    learner: PyTree,
    situation: Situation,
    key: Array,
    collected: Collected | None,
) -> tuple[PyTree, Situation, Metrics, Array, Array]:
    """Collect one rollout and learn from it.

    Return, after learner and situation, everything there is to tally, whether all that was seen in the
    rollout is finite, and in which of its time steps an agent first had no legal action (-1: none).
    """
    collect_key, learn_key = jax.random.split(key)
    if collected is None:
        collected = collect(
            env, system, learner, situation, collect_key, config.rollout_length, run.pool_size
        )
    situation, rollout, ended = collected
    sound = tree.all_finite((rollout.steps, rollout.last.observation))
    if jax.tree.leaves(learner.replay):  # which is not put back when an update is undone
        rollout = tree.select(sound, rollout, jax.tree.map(jnp.zeros_like, rollout))
    learner, learned = system.learn(learner, rollout, learn_key)
    counted = {"updates": jnp.ones(()), "parameters": _poison(replace(learner, replay=()))}
    tally = learned | counted | {f"rollout/{k}": v for k, v in ended.items()}
    return learner, situation, tally, sound, _first_without_choice(rollout.steps.observation.legal)


def update(advance: Advance, state: RunState, collected: Collected | None = None) -> RunState:
    """Return the state after one update; a seed in which something stopped being finite stays as it was, for
    good."""
    key, advance_key = jax.random.split(state.key)
    learner, situation, sums, sound, stuck = advance(state.learner, state.situation, advance_key, collected)
    broken = jnp.stack([~jnp.isfinite(sums[name]) for name in sorted(sums)] + [~sound, stuck >= 0])
    new = RunState(
        learner=learner,
        situation=situation,
        key=key,
        num_updates=state.num_updates + 1,
        tally=jax.tree.map(jnp.add, state.tally, sums),
        halted=state.halted,
    )
    cause = jnp.where(sound, jnp.argmax(broken), len(sums))
    cause = jnp.where(stuck >= 0, len(sums) + 1 + stuck, cause)  # which may be why others are not finite
    halted = jnp.where((state.halted < 0) & broken.any(), cause, state.halted)
    kept = tree.select(halted < 0, _without_replay(new), _without_replay(state))
    return replace(kept, learner=replace(kept.learner, replay=learner.replay), halted=halted)


def start(
    env: Env, system: System, config: SystemConfig, advance: Advance, seed: Array, hyper: PyTree = None
) -> State:
    """Return the state of a seed before its first update."""
    learner_key, env_key, key = jax.random.split(jax.random.key(seed), 3)
    learner = system.init(learner_key, system.hyper if hyper is None else hyper)
    situation = open_situation(env, system, env_key, config.num_envs)
    _, _, sums, _, _ = jax.eval_shape(advance, learner, situation, key, None)
    run_state = RunState(
        learner=learner,
        situation=situation,
        key=key,
        num_updates=jnp.zeros((), jnp.int32),
        tally={name: jnp.zeros(x.shape, x.dtype) for name, x in sums.items()},
        halted=jnp.full((), -1, jnp.int32),
    )
    return State(run=run_state, best=Best(params=learner.params, score=jnp.full((), -jnp.inf)))


def unit(update: tp.Callable[[RunState], RunState], state: RunState, num_updates: Array) -> RunState:
    """Return the state after so many updates."""
    return jax.lax.fori_loop(0, num_updates, lambda _, state: update(state), state)


def assess(
    env: Env, system: System, run: RunConfig, state: State, stats: Metrics | None = None
) -> tuple[State, Metrics]:
    """Evaluate the parameters, or take the statistics of episodes played elsewhere, and keep the best."""
    params, key = state.run.learner.params, evaluation_key(state.run)
    stats = play(env, system, params, key, run.evaluation_episodes) if stats is None else stats
    metrics = summarise(stats)
    score = metrics[RETURN]
    score = jnp.where(jnp.isfinite(score), score, -jnp.inf)
    best = tree.select(score >= state.best.score, Best(params=params, score=score), state.best)
    metrics |= _averages(state.run.tally) | {"updates": state.run.num_updates}
    cleared = replace(state.run, tally=jax.tree.map(jnp.zeros_like, state.run.tally))
    return State(run=cleared, best=best), metrics


def absolute(env: Env, system: System, run: RunConfig, state: State) -> Metrics:
    """Return the statistics of the episodes on which the best parameters are measured at the end."""
    key = jax.random.fold_in(evaluation_key(state.run), 1)
    return play(env, system, state.best.params, key, run.absolute_episodes)


def causes(state: RunState) -> list[str]:
    """What may stop being finite in an update, in the order in which `halted` counts."""
    return [*sorted(state.tally), "a reward or an observation"]


def time_without_choice(state: RunState, halted: int) -> int | None:
    """The time step of its last rollout in which a seed had no legal action, where that is why it halted."""
    beyond = halted - len(causes(state))
    return beyond if beyond >= 0 else None


def evaluation_key(state: RunState) -> Array:
    """A key for measuring, beyond those that updates split off (`split(key)[i]` is `fold_in(key, i)`)."""
    return jax.random.fold_in(state.key, 2**31)


def one_by_one(start: tp.Callable[..., State]) -> tp.Callable[..., State]:
    """`start` over seeds, and hypers, without `vmap`: batched QR decompositions, which orthogonal weights
    need, can fill XLA's CPU thread pool and wait for each other for ever (jaxlib 0.10.2, two cores)."""
    return lambda *each: jax.lax.map(lambda one: start(*one), each)


def _without_replay(state: RunState) -> RunState:
    return replace(state, learner=replace(state.learner, replay=()))


def _first_without_choice(legal: Array) -> Array:
    """The first time step of masks [T, B, N, A] in which an agent has no legal action; -1 for none."""
    stuck = ~legal.any(-1).all((1, 2))
    return jnp.where(stuck.any(), jnp.argmax(stuck), -1)


def _poison(learner: PyTree) -> Array:
    """0 where all is finite, else NaN."""
    return jnp.where(tree.all_finite(learner), 0.0, jnp.nan)


def _averages(tally: Metrics) -> Metrics:
    """Means of what `advance` tallied: over updates, or over the episodes that ended."""
    counts = {"updates", "parameters", "rollout/episodes"}
    return {
        name: total / tally["rollout/episodes" if name.startswith("rollout/") else "updates"]
        for name, total in tally.items()
        if name not in counts
    } | {"rollout/episodes": tally["rollout/episodes"]}
