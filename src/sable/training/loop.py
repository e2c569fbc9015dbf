"""Time passes here: the jitted unit of work, and the host loop that evaluates, logs, keeps the best and
checkpoints."""

import dataclasses
import resource
import shlex
import sys
import threading
import time
import typing as tp
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from sable.config.schema import RunConfig, SystemConfig, resume_argv, settings_of
from sable.envs.base import Env
from sable.envs.python.vector_env import EnvFailed, HostedEnv
from sable.errors import SableError
from sable.files import require_unicode
from sable.systems.base import System
from sable.training import checkpoint, devices, processes, records
from sable.training import device_memory as memory
from sable.training import host_rollout as hosted
from sable.training.background import Background
from sable.training.compile import Compiler
from sable.training.interruption import Interruption, interruption
from sable.training.loggers.logger import METRICS, RETURN, Logger, Mute, read_rows
from sable.training.update import (
    Program,
    RunState,
    State,
    causes,
    make_program,
    one_by_one,
    time_without_choice,
)
from sable.types import EnvSpec, PyTree

FACTS = ("updates", "evaluations", "training_seconds", "wall_seconds")
"""What a checkpoint says of how far the run had come."""

Watch = tp.Callable[[int, list[float]], bool]
"""(environment steps, return of every seed) after an evaluation -> whether to stop."""

UNIT_SECONDS = 2.0
"""How long the device works before the host looks up: signals, progress."""

LONG_SECONDS = 3.0
"""What takes longer begins with all saved: who asks a run to end does not wait long."""

SMALL_STATE, SAVING_SHARE = 2**24, 0.1
"""Bytes that are saved after every evaluation, at once. More are written in the background, and seldom
enough that this takes no larger share of a run's time."""


class Halted(SableError):
    """Something stopped being finite in every seed."""


@dataclass(frozen=True)
class Result:
    """What training leaves: where, how it went, and the signal that cut it short, if one did."""

    directory: Path
    summary: dict
    interrupted: int | None = None


class Course:
    """How far a run has come, and that nothing of it is lost."""

    def __init__(self, directory: Path, settings: checkpoint.Settings, circumstances: dict | None):
        self.directory, self.settings, self.circumstances = directory, settings, circumstances
        self.fingerprints = records.fingerprints(directory) if processes.leads() else {}
        self.logger: Logger = Mute()
        self.writer, self._lock = Background(), threading.Lock()

    def begin(self, began: float, facts: dict[str, tp.Any], interrupted: Interruption) -> None:
        """Go on from where a checkpoint, or nothing, leaves off."""
        self.began, self.interrupted = began - facts["wall_seconds"], interrupted
        self.updates, self.evaluations = facts["updates"], facts["evaluations"]
        self.clock = Clock(training_seconds=facts["training_seconds"])
        earlier, now = facts.get("circumstances", []), self.circumstances
        self.gone_through = earlier if now is None or now in earlier else [*earlier, now]
        self._saved, self._saving_seconds = time.monotonic(), 0.0
        self._snapshot = self.updates

    def wall_seconds(self) -> float:
        """Since the run began, its interruptions left out."""
        return time.monotonic() - self.began

    def advanced(self, num: int) -> None:
        """So many updates are done, and not saved yet."""
        with self._lock:
            self.updates += num
            self.interrupted.unsaved = True

    def save(self, state: State) -> None:
        """A checkpoint of all there is. A large one is written while training goes on, once the one before it
        is; until then, what it holds counts as unsaved."""
        self.logger.phase("saving")
        self.writer.wait()
        began, updates = time.monotonic(), self.updates
        now = (updates, self.evaluations, self.clock.training_seconds, self.wall_seconds())
        facts = dict[str, tp.Any](zip(FACTS, now, strict=True))
        facts["circumstances"] = self.gone_through
        parts = facts, self.settings, self.fingerprints, self.logger.metrics()
        snapshot = checkpoint.take(self.directory, updates + self.evaluations, state, *parts)
        self._snapshot, leads = updates, processes.leads()

        def write() -> None:
            if leads:
                checkpoint.commit(snapshot)
            with self._lock:
                self.interrupted.unsaved = self.updates != updates
            self._saved = time.monotonic()
            self._saving_seconds = self._saved - began

        if memory.size(state) <= SMALL_STATE:
            write()
        else:
            self.writer.start(write)

    def save_now(self, state: State) -> None:
        """A checkpoint of all there is, committed on return."""
        self.save(state)
        self.writer.wait()

    def save_in_time(self, state: State) -> None:
        """Save, unless the state is large and saving it so often would hold the run up: a fast device
        evaluates every second."""
        elapsed = time.monotonic() - self._saved
        due = not self.writer.busy() and elapsed >= self._saving_seconds / SAVING_SHARE
        # The first process knows how long writing takes.
        if processes.highest(int(memory.size(state) <= SMALL_STATE or (due and processes.leads()))):
            self.save(state)

    def save_before(self, seconds: float, state: State) -> None:
        """Save what is not, if what comes next takes longer than a signal can wait."""
        if processes.highest(int(self.updates != self._snapshot and seconds > LONG_SECONDS)):
            self.save(state)

    def stopped_by(self, state: State) -> int:
        """The signal that asks to stop, once all is saved, or 0; one that asks for a save gets it.
        Refused where there is nowhere to save."""
        self.logger.refuse_lost()
        self.writer.refuse_failed()
        asked = self.interrupted
        highest = processes.highest(asked.signal << 1 | asked.save)
        if highest:
            self.writer.wait()
            if asked.unsaved or highest == 1:
                self.save_now(state)
        if highest == 1:
            asked.save = False
            self.logger.note(f"saved after {self.updates:,} updates, as SIGUSR1 asked")
        return highest >> 1

    def close(self, kind: tp.Any, *_: tp.Any) -> None:
        """Wait for what is being written; of two errors the first is raised."""
        with suppress(SableError) if kind else nullcontext():
            self.writer.wait()


def make_stages(
    program: Program, compiled: Compiler, mesh: Mesh | None, places: PyTree, state: State
) -> tuple[tp.Callable, tp.Callable, tp.Callable]:
    """A unit of updates, an evaluation, and the measuring of the best, for all seeds."""
    everywhere = devices.everywhere(mesh)
    unit = devices.over_seeds(mesh, program.unit, (0, None))
    unit = compiled(unit, state.run, np.int32(1), donate=True, out=places and places.run)
    assess = devices.over_seeds(mesh, program.assess)
    assess = compiled(assess, state, donate=True, out=places and (places, everywhere))

    def absolute(state: State) -> PyTree:  # compiled only when called: a run that is stopped does not need it
        return compiled(devices.over_seeds(mesh, program.absolute), state, out=everywhere)(state)

    return unit, assess, absolute


@memory.explained()
def train(
    env: Env | HostedEnv,
    system: System,
    run: RunConfig,
    config: SystemConfig,
    directory: Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    hypers: PyTree = None,
    watch: Watch | None = None,
    circumstances: dict[str, tp.Any] | None = None,
    interrupted: Interruption | None = None,
) -> Result:
    """What training `run` into `directory` came to; `resume` continues from its newest checkpoint, bit for
    bit, or from the start where it was stopped before its first. Of a Python environment nothing can be
    saved: its episodes begin anew.

    `hypers`, with a leading [S], gives each seed numbers of its own instead of the system's. `watch` may end
    the run at an evaluation; there is no summary then. Checkpoints record all `circumstances` that their
    run has gone through. Signals are heard by `interrupted`, or by one of its own.
    """
    began = time.monotonic()
    steps_per_update = config.num_envs * config.rollout_length
    boundaries = schedule(run, steps_per_update)
    # Python environments are stepped by the host; programs are then made from shapes alone.
    on_host = env if isinstance(env, HostedEnv) else None
    program = make_program(env.stand_in if isinstance(env, HostedEnv) else env, system, run, config)
    begin, seeds = one_by_one(program.start), np.array(run.seeds, np.uint32)
    mesh = devices.make_mesh(run, config)
    compiled, lanes = Compiler(run, mesh), (seeds,) if hypers is None else (seeds, hypers)
    with devices.in_force(mesh):
        shapes = jax.eval_shape(begin, *lanes)
    places = devices.places(mesh, shapes)
    num_devices = mesh.size if mesh else 1
    memory.refuse_beyond(memory.size(shapes) // num_devices)  # before any of it is there
    if on_host is None:  # which plays them a few at a time
        memory.refuse_episodes(shapes, run, config.num_envs, num_devices)
    require_unicode(directory)
    course = Course(directory, asked_for(run, config, env.spec), circumstances)
    with ExitStack() as open_files:
        interrupted = interrupted or open_files.enter_context(interruption())
        facts: dict[str, tp.Any] = dict.fromkeys(FACTS, 0)
        metrics = b""
        if processes.leads():
            checkpoint.remove_leftovers(directory)
        if resume and checkpoint.steps(directory / checkpoint.FOLDER):
            state, facts, metrics = checkpoint.restore(directory, shapes, course.settings)
            state = devices.place(state, places)
        else:
            first = compiled(begin, *lanes, out=places)
            memory.refuse_beyond(memory.count(first))
            state = first(*lanes)
        course.begin(began, facts, interrupted)
        if processes.leads():
            course.logger = Logger(
                directory,
                title=f"{run.task} · {run.system}",
                seeds=run.seeds,
                total_steps=boundaries[-1] * steps_per_update,
                resume_steps=course.updates * steps_per_update,
                evaluated_steps=boundaries[course.evaluations - 1] * steps_per_update
                if course.evaluations
                else 0,
                metrics=metrics,
                quiet=quiet,
            )
        logger, clock = open_files.enter_context(course.logger), course.clock
        open_files.push(course.close)
        interrupted.on_forced_exit = logger.close
        if on_host is not None:
            open_files.enter_context(on_host.abandoned_when(interrupted.overdue))
        try:
            logger.phase("compiling")
            if on_host is not None:
                unit, assess, absolute = hosted.make_stages(
                    on_host, system, program, run, config, compiled, state
                )
            else:
                unit, assess, absolute = make_stages(program, compiled, mesh, places, state)
            memory.refuse_beyond(memory.count(unit))
            if on_host is None:
                memory.refuse_measuring("evaluation_episodes", run.evaluation_episodes, memory.count(assess))
            logger.note(memory.summary(state, unit, run, config, boundaries[-1]))
            if on_host is not None and course.updates:
                logger.note("the environments' states could not be saved: all episodes begin anew")
            if signal := course.stopped_by(state):
                return Result(directory, {}, signal)
            for boundary in boundaries[course.evaluations :]:
                while course.updates < boundary:
                    course.save_before(clock.per_update, state)
                    logger.phase("training")
                    num = min(processes.highest(clock.updates_per_unit()), boundary - course.updates)
                    num = 1 if on_host is not None else num  # what an environment that hangs leaves is saved
                    with clock.training(num):
                        halted = state.run.halted.copy()
                        state = replace(state, run=jax.block_until_ready(unit(state.run, np.int32(num))))
                    course.advanced(num)
                    _announce_halted(logger, run, halted, state.run)
                    logger.progress(
                        course.updates * steps_per_update, clock.training_seconds - facts["training_seconds"]
                    )
                    if signal := course.stopped_by(state):
                        return Result(directory, {}, signal)
                course.save_before(clock.per_evaluation, state)
                logger.phase("evaluating")
                with clock.evaluating():
                    state, metrics = assess(state)
                    metrics = jax.device_get(metrics)
                course.evaluations += 1
                logger.evaluation(course.updates * steps_per_update, metrics)
                # Before saving: a run killed in between evaluates again, so `watch` sees every evaluation.
                if watch is not None and watch(course.updates * steps_per_update, metrics[RETURN].tolist()):
                    return Result(directory, {})
                if boundary == boundaries[-1]:
                    course.save_now(state)
                else:
                    course.save_in_time(state)
                if signal := course.stopped_by(state):
                    return Result(directory, {}, signal)
            logger.phase("measuring the best parameters")
            interrupted.finishing = True
            absolute = jax.device_get(absolute(state))
            logger.metrics()  # refused where they are not what was written
        except EnvFailed as error:
            # What it was asked for last is not part of the state: nothing finished is lost.
            if signal := course.stopped_by(state):
                return Result(directory, {}, signal)
            course.writer.wait()
            if interrupted.unsaved:
                course.save_now(state)
            flags = shlex.join(resume_argv(directory, run.task, run.system))
            raise EnvFailed(f"{error}; all before is saved, go on with {flags}") from None

    return Result(
        directory,
        {
            "task": run.task,
            "system": run.system,
            "seeds": list(run.seeds),
            "env_steps": course.updates * steps_per_update,
            "wall_seconds": course.wall_seconds(),
            "training_seconds": clock.training_seconds,
            "compile_seconds": compiled.seconds,
            "steps_per_second": len(run.seeds) * course.updates * steps_per_update / clock.training_seconds,
            "final_return": [row[RETURN] for row in read_rows(directory / METRICS)[-len(run.seeds) :]],
            **{f"absolute_{name}": values.mean(axis=1).tolist() for name, values in absolute.items()},
            "halted_seeds": [run.seeds[i] for i in np.flatnonzero(jax.device_get(state.run.halted) >= 0)],
            "peak_memory_bytes": peak_memory_bytes(),
        },
    )


def asked_for(run: RunConfig, config: SystemConfig, spec: EnvSpec) -> checkpoint.Settings:
    """What tells a run's checkpoints from those of others."""
    sizes = {f"environment's {name}": value for name, value in dataclasses.asdict(spec).items()}
    return dataclasses.asdict(run) | settings_of(config) | sizes


def schedule(run: RunConfig, steps_per_update: int) -> list[int]:
    """The updates after which to evaluate, as even as possible; the last is the end of training."""
    num_updates = max(1, run.total_steps // steps_per_update)
    num_evaluations = min(run.num_evaluations, num_updates)
    return [round((i + 1) * num_updates / num_evaluations) for i in range(num_evaluations)]


class Clock:
    """How long training has taken, and so how many updates fit into a unit."""

    def __init__(self, training_seconds: float):
        self.training_seconds = training_seconds
        self.per_update = self.per_evaluation = float("inf")  # not known before the first

    @contextmanager
    def training(self, num_updates: int) -> tp.Iterator[None]:
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        self.training_seconds += seconds
        self.per_update = seconds / num_updates

    @contextmanager
    def evaluating(self) -> tp.Iterator[None]:
        began = time.monotonic()
        yield
        self.per_evaluation = time.monotonic() - began

    def updates_per_unit(self) -> int:
        return max(1, int(UNIT_SECONDS / self.per_update))


def peak_memory_bytes() -> int:
    """The most memory ever in use on one device; on CPU the process's peak."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return max(peaks) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _announce_halted(logger: Logger, run: RunConfig, before: Array, state: RunState) -> None:
    """Says which seeds have halted since `before`, and why; fails once none is left."""
    halted, updates = jax.device_get((state.halted, state.num_updates))
    for seed, old, why, update in zip(run.seeds, before, halted, updates, strict=True):
        if why >= 0 > old:
            if (time_step := time_without_choice(state, why)) is not None:
                raise SableError(
                    f"{run.task}: an agent has no legal action at time step {time_step} of update "
                    f"{update + 1}, seed {seed}; a mask must leave at least one (see sable check)"
                )
            name = causes(state)[why]
            logger.note(
                f"seed {seed} halted: {name} was not finite in update {update + 1}; it stays as it was before"
            )
    if (halted >= 0).all():
        raise Halted(
            f"{run.task}: every seed has halted; try a lower learning rate, or check the environment"
        )
