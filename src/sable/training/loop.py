"""Time passes here: the jitted unit of work, and the host loop that evaluates, logs, keeps the best and
checkpoints."""

import resource
import signal
import sys
import time
import typing as tp
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sable.config import PPOConfig, RunConfig
from sable.envs.base import Env
from sable.errors import SableError
from sable.ops import tree
from sable.systems.base import System
from sable.training import checkpoint
from sable.training.evaluate import play, summarise
from sable.training.logging import METRICS, RETURN, Logger, read_rows
from sable.training.rollout import Situation, collect, open_situation
from sable.types import Metrics, PyTree, struct

FACTS = ("updates", "evaluations", "training_seconds", "wall_seconds")
"""What a checkpoint says of how far the run had come."""

UNIT_SECONDS = 2.0
"""How long the device works before the host looks up: signals, progress."""


@struct
class RunState:
    """All of one seed's training; a run has a leading [S]. Saving it whole is what makes resuming exact."""

    learner: PyTree
    situation: Situation
    key: Array
    num_updates: Array
    tally: Metrics  # sums since the last evaluation, of learning and of the episodes that ended
    halted: Array  # -1, or the index in the sorted tally of what stopped being finite


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


@dataclass(frozen=True)
class Result:
    """What training leaves: where, how it went, and the signal that cut it short, if one did."""

    directory: Path
    summary: dict
    interrupted: int | None = None


class Program(tp.NamedTuple):
    """The functions of one run, for one seed; the host loop maps them over all."""

    start: tp.Callable[[Array], State]
    """seed -> State"""
    unit: tp.Callable[[RunState, Array], RunState]
    """(run, updates) -> run"""
    assess: tp.Callable[[State], tuple[State, Metrics]]
    """State -> (the state with its best brought up to date and its tally cleared, metrics)"""
    absolute: tp.Callable[[State], Metrics]
    """State -> statistics [episodes] of the best parameters"""


def make_program(env: Env, system: System, run: RunConfig, config: PPOConfig) -> Program:
    """The functions of this run, pure and not yet compiled."""

    @jax.jit  # so that `start`, which wants only its shapes, and `unit` share one trace
    def advance(learner: PyTree, situation: Situation, key: Array) -> tuple[PyTree, Situation, Metrics]:
        """One rollout and what is learned from it, with everything there is to tally."""
        collect_key, learn_key = jax.random.split(key)
        pool_size = run.pool_size or config.num_envs
        situation, rollout, ended = collect(
            env, system, learner, situation, collect_key, config.rollout_length, pool_size
        )
        learner, learned = system.learn(learner, rollout, learn_key)
        counted = {"updates": jnp.ones(()), "parameters": _poison(learner.params)}
        return learner, situation, learned | counted | {f"rollout/{k}": v for k, v in ended.items()}

    def update(state: RunState) -> RunState:
        """The state after one update; a seed in which something stopped being finite stays as it was, for
        good."""
        key, advance_key = jax.random.split(state.key)
        learner, situation, seen = advance(state.learner, state.situation, advance_key)
        broken = jnp.stack([~jnp.isfinite(seen[name]) for name in sorted(seen)])
        new = RunState(
            learner=learner,
            situation=situation,
            key=key,
            num_updates=state.num_updates + 1,
            tally=jax.tree.map(jnp.add, state.tally, seen),
            halted=state.halted,
        )
        halted = jnp.where((state.halted < 0) & broken.any(), jnp.argmax(broken), state.halted)
        return replace(tree.select(halted < 0, new, state), halted=halted)

    def start(seed: Array) -> State:
        learner_key, env_key, key = jax.random.split(jax.random.key(seed), 3)
        learner = system.init(learner_key, system.hyper)
        situation = open_situation(env, system, env_key, config.num_envs)
        _, _, seen = jax.eval_shape(advance, learner, situation, key)
        run_state = RunState(
            learner=learner,
            situation=situation,
            key=key,
            num_updates=jnp.zeros((), jnp.int32),
            tally={name: jnp.zeros(x.shape, x.dtype) for name, x in seen.items()},
            halted=jnp.full((), -1, jnp.int32),
        )
        return State(run=run_state, best=Best(params=learner.params, score=jnp.full((), -jnp.inf)))

    def unit(state: RunState, num_updates: Array) -> RunState:
        return jax.lax.fori_loop(0, num_updates, lambda _, state: update(state), state)

    def assess(state: State) -> tuple[State, Metrics]:
        params, key = state.run.learner.params, evaluation_key(state.run)
        metrics = summarise(play(env, system, params, key, run.evaluation_episodes))
        score = metrics[RETURN]
        score = jnp.where(jnp.isfinite(score), score, -jnp.inf)
        best = tree.select(score >= state.best.score, Best(params=params, score=score), state.best)
        metrics |= _averages(state.run.tally) | {"updates": state.run.num_updates}
        cleared = replace(state.run, tally=jax.tree.map(jnp.zeros_like, state.run.tally))
        return State(run=cleared, best=best), metrics

    def absolute(state: State) -> Metrics:
        key = jax.random.fold_in(evaluation_key(state.run), 1)
        return play(env, system, state.best.params, key, run.absolute_episodes)

    return Program(start=start, unit=unit, assess=assess, absolute=absolute)


def train(
    env: Env,
    system: System,
    run: RunConfig,
    config: PPOConfig,
    directory: Path,
    *,
    resume: bool = False,
    quiet: bool = False,
) -> Result:
    """What training `run` into `directory` came to; `resume` continues from its newest checkpoint, bit for
    bit."""
    began = time.monotonic()
    steps_per_update = config.num_envs * config.rollout_length
    boundaries = schedule(run, steps_per_update)
    program = make_program(env, system, run, config)
    begin, seeds = _one_by_one(program.start), jnp.array(run.seeds, jnp.uint32)
    compiled = Compiler(run)
    if resume:
        state, facts = checkpoint.restore(directory, jax.eval_shape(begin, seeds))
    else:
        state, facts = compiled(begin, seeds)(seeds), dict.fromkeys(FACTS, 0)
    updates, evaluations = facts["updates"], facts["evaluations"]
    clock = Clock(training_seconds=facts["training_seconds"])

    def wall_seconds() -> float:
        return facts["wall_seconds"] + time.monotonic() - began

    def save() -> None:
        logger.phase("saving")
        now = (updates, evaluations, clock.training_seconds, wall_seconds())
        checkpoint.save(directory, updates + evaluations, state, dict(zip(FACTS, now, strict=True)))

    logger = Logger(
        directory,
        title=f"{run.task} · {run.system}",
        seeds=run.seeds,
        total_steps=boundaries[-1] * steps_per_update,
        resume_steps=updates * steps_per_update,
        evaluated_steps=boundaries[evaluations - 1] * steps_per_update if evaluations else 0,
        quiet=quiet,
    )
    with interruption() as interrupted, logger:
        logger.phase("compiling")
        unit = compiled(jax.vmap(program.unit, in_axes=(0, None)), state.run, jnp.int32(1), donate=True)
        assess = compiled(jax.vmap(program.assess), state, donate=True)
        for boundary in boundaries[evaluations:]:
            while updates < boundary:
                logger.phase("training")
                num = min(clock.updates_per_unit(), boundary - updates)
                with clock.training(num):
                    halted = state.run.halted.copy()
                    state = replace(state, run=jax.block_until_ready(unit(state.run, jnp.int32(num))))
                updates += num
                _announce_halted(logger, run, halted, state.run)
                logger.progress(
                    updates * steps_per_update, clock.training_seconds - facts["training_seconds"]
                )
                if interrupted.signal:
                    save()
                    return Result(directory, {}, interrupted.signal)
            logger.phase("evaluating")
            state, metrics = assess(state)
            evaluations += 1
            logger.evaluation(updates * steps_per_update, jax.device_get(metrics))
            save()
        logger.phase("measuring the best parameters")
        absolute = jax.device_get(compiled(jax.vmap(program.absolute), state)(state))

    return Result(
        directory,
        {
            "task": run.task,
            "system": run.system,
            "seeds": list(run.seeds),
            "env_steps": updates * steps_per_update,
            "wall_seconds": wall_seconds(),
            "training_seconds": clock.training_seconds,
            "compile_seconds": compiled.seconds,
            "steps_per_second": len(run.seeds) * updates * steps_per_update / clock.training_seconds,
            "final_return": [row[RETURN] for row in read_rows(directory / METRICS)[-len(run.seeds) :]],
            **{f"absolute_{name}": values.mean(axis=1).tolist() for name, values in absolute.items()},
            "halted_seeds": [seed for seed, why in zip(run.seeds, state.run.halted, strict=True) if why >= 0],
            "peak_memory_bytes": peak_memory_bytes(),
        },
    )


def evaluate(
    env: Env,
    system: System,
    run: RunConfig,
    config: PPOConfig,
    directory: Path,
    *,
    episodes: int,
    seed: int | None = None,
) -> dict[str, tp.Any]:
    """How the best parameters of the run in `directory` play fresh episodes, per training seed.

    `seed` chooses the episodes; left out, they are others than those of training and of the absolute metric.
    """
    begin = _one_by_one(make_program(env, system, run, config).start)
    shapes = jax.eval_shape(begin, jnp.array(run.seeds, jnp.uint32))
    state, facts = checkpoint.restore(directory, shapes)
    if not facts["evaluations"]:
        raise SableError(
            f"{directory} was stopped before its first evaluation: it has no best parameters yet"
        )
    params = state.best.params
    keys = jax.random.split(jax.random.key(2**31 - 1 if seed is None else seed), len(run.seeds))
    measure = Compiler(run)(
        jax.vmap(lambda params, key: play(env, system, params, key, episodes)), params, keys
    )
    stats = {
        name: np.asarray(values, float) for name, values in jax.device_get(measure(params, keys)).items()
    }
    means = stats["return"].mean(axis=1)
    half_widths = 1.96 * stats["return"].std(axis=1) / max(episodes - 1, 1) ** 0.5
    return {
        "task": run.task,
        "system": run.system,
        "episodes": episodes,
        "seeds": list(run.seeds),
        **{name: values.mean(axis=1).tolist() for name, values in stats.items()},
        "return_interval_95": [
            [m - h, m + h] for m, h in zip(means.tolist(), half_widths.tolist(), strict=True)
        ],
    }


def evaluation_key(state: RunState) -> Array:
    """A key for measuring, beyond those that updates split off (`split(key)[i]` is `fold_in(key, i)`)."""
    return jax.random.fold_in(state.key, 2**31)


def schedule(run: RunConfig, steps_per_update: int) -> list[int]:
    """The updates after which to evaluate, as even as possible; the last is the end of training."""
    num_updates = max(1, run.total_steps // steps_per_update)
    num_evaluations = min(run.num_evaluations, num_updates)
    return [round((i + 1) * num_updates / num_evaluations) for i in range(num_evaluations)]


class Compiler:
    """Compiles ahead of time with the run's precision and determinism, and adds up the seconds it takes."""

    def __init__(self, run: RunConfig):
        self.precision = run.precision
        deterministic = run.deterministic and jax.default_backend() == "gpu"
        self.options: dict[str, str | bool] = {"xla_gpu_deterministic_ops": True} if deterministic else {}
        self.seconds = 0.0

    def __call__(self, function: tp.Callable, *args: PyTree, donate: bool = False) -> tp.Callable:
        began = time.monotonic()
        # Seeds are a batch axis; the old state is dead after the call, so its memory is reused.
        with jax.default_matmul_precision(self.precision):
            lowered = jax.jit(function, donate_argnums=(0,) if donate else ()).lower(*args)
        compiled = lowered.compile(compiler_options=self.options)
        self.seconds += time.monotonic() - began
        return compiled


class Clock:
    """How long training has taken, and so how many updates fit into a unit."""

    def __init__(self, training_seconds: float):
        self.training_seconds = training_seconds
        self.per_update = float("inf")

    @contextmanager
    def training(self, num_updates: int) -> tp.Iterator[None]:
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        self.training_seconds += seconds
        self.per_update = seconds / num_updates

    def updates_per_unit(self) -> int:
        return max(1, int(UNIT_SECONDS / self.per_update))


class Interruption:
    """The signal that asked to stop, or 0."""

    signal: int = 0


@contextmanager
def interruption() -> tp.Iterator[Interruption]:
    """Turns Ctrl-C and SIGTERM into a request the loop can honour between two units; a second one acts at
    once."""
    state = Interruption()

    def note(number: int, _frame: tp.Any) -> None:
        state.signal = number
        for watched, handler in previous.items():
            signal.signal(watched, handler)

    try:
        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's business
        previous = {}
    try:
        yield state
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def peak_memory_bytes() -> int:
    """The most device memory ever in use; on CPU the process's peak."""
    stats = jax.devices()[0].memory_stats() or {}
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _one_by_one(start: tp.Callable[[Array], State]) -> tp.Callable[[Array], State]:
    """`start` over seeds without `vmap`: batched QR decompositions, which orthogonal weights need, can fill
    XLA's CPU thread
    pool and wait for each other for ever (jaxlib 0.10.2, two cores)."""
    return lambda seeds: jax.lax.map(start, seeds)


def _poison(params: PyTree) -> Array:
    """0 where all is finite, else NaN."""
    return jnp.where(tree.all_finite(params), 0.0, jnp.nan)


def _averages(tally: Metrics) -> Metrics:
    """Means of what `advance` tallied: over updates, or over the episodes that ended."""
    counts = {"updates", "parameters", "rollout/episodes"}
    return {
        name: total / tally["rollout/episodes" if name.startswith("rollout/") else "updates"]
        for name, total in tally.items()
        if name not in counts
    } | {"rollout/episodes": tally["rollout/episodes"]}


def _announce_halted(logger: Logger, run: RunConfig, before: Array, state: RunState) -> None:
    """Says which seeds have halted since `before`, and why; fails once none is left."""
    halted, updates = jax.device_get((state.halted, state.num_updates))
    for seed, old, why, update in zip(run.seeds, before, halted, updates, strict=True):
        if why >= 0 > old:
            name = sorted(state.tally)[why]
            logger.note(
                f"seed {seed} halted: {name} was not finite in update {update + 1}; it stays as it was before"
            )
    if (halted >= 0).all():
        raise SableError(
            f"{run.task}: every seed has halted; try a lower learning rate, or check the environment"
        )
