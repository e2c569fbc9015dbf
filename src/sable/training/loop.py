"""The training loop: the host calls the jitted updates, evaluates, logs, keeps the best and checkpoints."""

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
from sable.envs.python.vector_env import EnvFailed, PythonVectorEnv
from sable.errors import SableError
from sable.files import require_unicode
from sable.systems.base import System
from sable.training import checkpoint, devices, host_rollout, processes, records
from sable.training import device_memory as memory
from sable.training.background import Background
from sable.training.compile import Compiler
from sable.training.interruption import Interruption, interruption
from sable.training.loggers.logger import METRICS, RETURN, Logger, NullLogger, read_rows
from sable.training.update import (
    Program,
    RunState,
    State,
    halt_causes,
    make_program,
    map_seeds,
    step_without_legal_action,
)
from sable.types import EnvSpec, PyTree

FACTS = ("updates", "evaluations", "training_seconds", "wall_seconds")
"""The facts a checkpoint has of how far the run had come."""

EvaluationCallback = tp.Callable[[int, list[float]], bool]
"""(environment steps, return of every seed) after an evaluation -> whether to stop."""

SECONDS_PER_CALL = 2.0
"""How long the device works before the host looks up: signals, progress."""

LONG_SECONDS = 3.0
"""Longer work begins with all saved: who asks a run to end does not wait long."""

SMALL_STATE, MAX_SAVING_SHARE = 2**24, 0.1
"""Bytes that are saved after every evaluation, at once. More are written in the background, and seldom
enough that this takes no larger share of a run's time."""


class Halted(SableError):
    """Something stopped being finite in every seed."""


@dataclass(frozen=True)
class Result:
    """The result of training: its folder, its summary, and the signal that cut it short, if one did."""

    directory: Path
    summary: dict
    interrupted: int | None = None


class RunProgress:
    """A run's progress, and its checkpoints: that nothing of it is lost."""

    def __init__(self, directory: Path, settings: checkpoint.Settings, circumstances: dict | None):
        self.directory, self.settings, self.circumstances = directory, settings, circumstances
        self.fingerprints = records.fingerprints(directory) if processes.is_main_process() else {}
        self.logger: Logger = NullLogger()
        self.writer, self._lock = Background(), threading.Lock()

    def resume_from(self, began: float, facts: dict[str, tp.Any], interrupted: Interruption) -> None:
        """Go on from where a checkpoint, or nothing, leaves off."""
        self.began, self.interrupted = began - facts["wall_seconds"], interrupted
        self.updates, self.evaluations = facts["updates"], facts["evaluations"]
        self.clock = Clock(training_seconds=facts["training_seconds"])
        earlier, current = facts.get("circumstances", []), self.circumstances
        self.gone_through = earlier if current is None or current in earlier else [*earlier, current]
        self._saved, self._saving_seconds = time.monotonic(), 0.0
        self._snapshot = self.updates

    def wall_seconds(self) -> float:
        """Return the seconds since the run began, its interruptions left out."""
        return time.monotonic() - self.began

    def add_updates(self, num: int) -> None:
        """Note that so many updates are done, and not saved yet."""
        with self._lock:
            self.updates += num
            self.interrupted.unsaved = True

    def save(self, state: State) -> None:
        """Save a checkpoint of all there is."""
        self.logger.phase("saving")
        self.writer.wait()
        began, updates = time.monotonic(), self.updates
        current = (updates, self.evaluations, self.clock.training_seconds, self.wall_seconds())
        facts = dict[str, tp.Any](zip(FACTS, current, strict=True))
        facts["circumstances"] = self.gone_through
        parts = facts, self.settings, self.fingerprints, self.logger.metrics()
        snapshot = checkpoint.take(self.directory, updates + self.evaluations, state, *parts)
        self._snapshot, leads = updates, processes.is_main_process()

        def write() -> None:
            if leads:
                checkpoint.commit(snapshot)
            with self._lock:
                self.interrupted.unsaved = self.updates != updates
            self._saved = time.monotonic()
            self._saving_seconds = self._saved - began

        if memory.tree_bytes(state) <= SMALL_STATE:
            write()
        else:
            self.writer.start(write)

    def save_now(self, state: State) -> None:
        """Return a checkpoint of all there is, committed on return."""
        self.save(state)
        self.writer.wait()

    def save_in_time(self, state: State) -> None:
        """Save, unless the state is large and saving it so often would hold the run up: a fast device
        evaluates every second."""
        elapsed = time.monotonic() - self._saved
        due = not self.writer.busy() and elapsed >= self._saving_seconds / MAX_SAVING_SHARE
        # The first process knows how long writing takes.
        if processes.max_over_processes(
            int(memory.tree_bytes(state) <= SMALL_STATE or (due and processes.is_main_process()))
        ):
            self.save(state)

    def save_before(self, seconds: float, state: State) -> None:
        """Save what is not, if what comes next takes longer than a signal can wait."""
        if processes.max_over_processes(int(self.updates != self._snapshot and seconds > LONG_SECONDS)):
            self.save(state)

    def stop_signal(self, state: State) -> int:
        """Return the signal that asks to stop, once all is saved, or 0; one that asks for a save gets it.
        Refused where there is nowhere to save."""
        self.logger.refuse_lost()
        self.writer.refuse_failed()
        interruption_state = self.interrupted
        request = processes.max_over_processes(interruption_state.signal << 1 | interruption_state.save)
        if request:
            self.writer.wait()
            if interruption_state.unsaved or request == 1:
                self.save_now(state)
        if request == 1:
            interruption_state.save = False
            self.logger.note(f"saved after {self.updates:,} updates, as SIGUSR1 asked")
        return request >> 1

    def close(self, kind: tp.Any, *_: tp.Any) -> None:
        """Wait for what is being written; of two errors the first is raised."""
        with suppress(SableError) if kind else nullcontext():
            self.writer.wait()


def make_stages(
    program: Program, compiled: Compiler, mesh: Mesh | None, shardings: PyTree, state: State
) -> tuple[tp.Callable, tp.Callable, tp.Callable]:
    """Return a unit of updates, an evaluation, and the measuring of the best, for all seeds."""
    replicated = devices.replicated_sharding(mesh)
    run_updates = devices.vmap_seeds(mesh, program.run_updates, (0, None))
    run_updates = compiled(run_updates, state.run, np.int32(1), donate=True, out=shardings and shardings.run)
    evaluate_and_keep_best = devices.vmap_seeds(mesh, program.evaluate_and_keep_best)
    evaluate_and_keep_best = compiled(
        evaluate_and_keep_best, state, donate=True, out=shardings and (shardings, replicated)
    )

    # Compiled only when called: a run that is stopped does not need it.
    def absolute_metric(state: State) -> PyTree:
        return compiled(devices.vmap_seeds(mesh, program.absolute_metric), state, out=replicated)(state)

    return run_updates, evaluate_and_keep_best, absolute_metric


@memory.explain_out_of_memory()
def train_loop(
    env: Env | PythonVectorEnv,
    system: System,
    run: RunConfig,
    config: SystemConfig,
    directory: Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    hypers: PyTree = None,
    on_evaluation: EvaluationCallback | None = None,
    circumstances: dict[str, tp.Any] | None = None,
    interrupted: Interruption | None = None,
) -> Result:
    """Train `run` into `directory`; `resume` continues from its newest checkpoint, bit for bit, or from the
    start where it was stopped before its first. Of a Python environment nothing can be saved: its episodes
    begin anew.

    `hypers`, with a leading [S], gives each seed numbers of its own instead of the system's. `on_evaluation`
    may end the run at an evaluation; there is no summary then. Checkpoints record all `circumstances` that
    their run has gone through. Signals are heard by `interrupted`, or by one of its own.
    """
    began = time.monotonic()
    steps_per_update = config.num_envs * config.rollout_length
    boundaries = schedule(run, steps_per_update)
    # Python environments are stepped by the host; programs are then made from shapes alone.
    python_env = env if isinstance(env, PythonVectorEnv) else None
    program = make_program(env.stub_env if isinstance(env, PythonVectorEnv) else env, system, run, config)
    init_state, seeds = map_seeds(program.start), np.array(run.seeds, np.uint32)
    mesh = devices.make_mesh(run, config)
    compiled, learner_args = Compiler(run, mesh), (seeds,) if hypers is None else (seeds, hypers)
    with devices.use_mesh(mesh):
        shapes = jax.eval_shape(init_state, *learner_args)
    shardings = devices.state_shardings(mesh, shapes)
    num_devices = mesh.size if mesh else 1
    memory.refuse_beyond(memory.tree_bytes(shapes) // num_devices)  # before any of it is there
    if python_env is None:  # which plays them a few at a time
        memory.refuse_episodes(shapes, run, config.num_envs, num_devices)
    require_unicode(directory)
    progress = RunProgress(directory, checkpoint_settings(run, config, env.spec), circumstances)
    with ExitStack() as open_files:
        interrupted = interrupted or open_files.enter_context(interruption())
        facts: dict[str, tp.Any] = dict.fromkeys(FACTS, 0)
        metrics = b""
        if processes.is_main_process():
            checkpoint.remove_leftovers(directory)
        if resume and checkpoint.steps(directory / checkpoint.FOLDER):
            state, facts, metrics = checkpoint.restore(directory, shapes, progress.settings)
            state = devices.put_state(state, shardings)
        else:
            first = compiled(init_state, *learner_args, out=shardings)
            memory.refuse_beyond(memory.program_bytes(first))
            state = first(*learner_args)
        progress.resume_from(began, facts, interrupted)
        if processes.is_main_process():
            progress.logger = Logger(
                directory,
                title=f"{run.task} · {run.system}",
                seeds=run.seeds,
                total_steps=boundaries[-1] * steps_per_update,
                resume_steps=progress.updates * steps_per_update,
                evaluated_steps=boundaries[progress.evaluations - 1] * steps_per_update
                if progress.evaluations
                else 0,
                metrics=metrics,
                quiet=quiet,
            )
        logger, clock = open_files.enter_context(progress.logger), progress.clock
        open_files.push(progress.close)
        interrupted.on_forced_exit = logger.close
        if python_env is not None:
            open_files.enter_context(python_env.abandoned_when(interrupted.overdue))
        try:
            logger.phase("compiling")
            if python_env is not None:
                run_updates, evaluate_and_keep_best, absolute_metric = host_rollout.make_stages(
                    python_env, system, program, run, config, compiled, state
                )
            else:
                run_updates, evaluate_and_keep_best, absolute_metric = make_stages(
                    program, compiled, mesh, shardings, state
                )
            memory.refuse_beyond(memory.program_bytes(run_updates))
            if python_env is None:
                memory.refuse_measuring(
                    "evaluation_episodes",
                    run.evaluation_episodes,
                    memory.program_bytes(evaluate_and_keep_best),
                )
            logger.note(memory.summary(state, run_updates, run, config, boundaries[-1]))
            if python_env is not None and progress.updates:
                logger.note("the environments' states could not be saved: all episodes begin anew")
            if signal := progress.stop_signal(state):
                return Result(directory, {}, signal)
            for boundary in boundaries[progress.evaluations :]:
                while progress.updates < boundary:
                    progress.save_before(clock.per_update, state)
                    logger.phase("training")
                    num = min(
                        processes.max_over_processes(clock.updates_per_call()), boundary - progress.updates
                    )
                    # One by one on the host: all before an environment that hangs is saved.
                    num = 1 if python_env is not None else num
                    with clock.training(num):
                        halted = state.run.halted.copy()
                        state = replace(
                            state, run=jax.block_until_ready(run_updates(state.run, np.int32(num)))
                        )
                    progress.add_updates(num)
                    _announce_halted(logger, run, halted, state.run)
                    logger.progress(
                        progress.updates * steps_per_update,
                        clock.training_seconds - facts["training_seconds"],
                    )
                    if signal := progress.stop_signal(state):
                        return Result(directory, {}, signal)
                progress.save_before(clock.per_evaluation, state)
                logger.phase("evaluating")
                with clock.evaluating():
                    state, metrics = evaluate_and_keep_best(state)
                    metrics = jax.device_get(metrics)
                progress.evaluations += 1
                logger.evaluation(progress.updates * steps_per_update, metrics)
                # Before saving: a run killed in between evaluates again, so `on_evaluation` sees every
                # evaluation.
                if on_evaluation is not None and on_evaluation(
                    progress.updates * steps_per_update, metrics[RETURN].tolist()
                ):
                    return Result(directory, {})
                if boundary == boundaries[-1]:
                    progress.save_now(state)
                else:
                    progress.save_in_time(state)
                if signal := progress.stop_signal(state):
                    return Result(directory, {}, signal)
            logger.phase("measuring the best parameters")
            interrupted.finishing = True
            absolute_metric = jax.device_get(absolute_metric(state))
            logger.metrics()  # refused where they are not what was written
        except EnvFailed as error:
            # What it was asked for last is not part of the state: nothing finished is lost.
            if signal := progress.stop_signal(state):
                return Result(directory, {}, signal)
            progress.writer.wait()
            if interrupted.unsaved:
                progress.save_now(state)
            flags = shlex.join(resume_argv(directory, run.task, run.system))
            raise EnvFailed(f"{error}; all before is saved, go on with {flags}") from None

    return Result(
        directory,
        {
            "task": run.task,
            "system": run.system,
            "seeds": list(run.seeds),
            "env_steps": progress.updates * steps_per_update,
            "wall_seconds": progress.wall_seconds(),
            "training_seconds": clock.training_seconds,
            "compile_seconds": compiled.seconds,
            "steps_per_second": len(run.seeds) * progress.updates * steps_per_update / clock.training_seconds,
            "final_return": [row[RETURN] for row in read_rows(directory / METRICS)[-len(run.seeds) :]],
            **{f"absolute_{name}": values.mean(axis=1).tolist() for name, values in absolute_metric.items()},
            "halted_seeds": [run.seeds[i] for i in np.flatnonzero(jax.device_get(state.run.halted) >= 0)],
            "peak_memory_bytes": peak_memory_bytes(),
        },
    )


def checkpoint_settings(run: RunConfig, config: SystemConfig, spec: EnvSpec) -> checkpoint.Settings:
    """Return the settings that tell a run's checkpoints from those of others."""
    sizes = {f"environment's {name}": value for name, value in dataclasses.asdict(spec).items()}
    return dataclasses.asdict(run) | settings_of(config) | sizes


def schedule(run: RunConfig, steps_per_update: int) -> list[int]:
    """Return the updates after which to evaluate, as even as possible; the last is the end of training."""
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

    def updates_per_call(self) -> int:
        return max(1, int(SECONDS_PER_CALL / self.per_update))


def peak_memory_bytes() -> int:
    """Return the most memory ever in use on one device; on CPU the process's peak."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    factor = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return max(peaks) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor


def _announce_halted(logger: Logger, run: RunConfig, before: Array, state: RunState) -> None:
    """Say which seeds have halted since `before`, and why; fails once none is left."""
    halted, updates = jax.device_get((state.halted, state.num_updates))
    for seed, old, why, update in zip(run.seeds, before, halted, updates, strict=True):
        if why >= 0 > old:
            if (time_step := step_without_legal_action(state, why)) is not None:
                raise SableError(
                    f"{run.task}: an agent has no legal action at time step {time_step} of update "
                    f"{update + 1}, seed {seed}; a mask must leave at least one (see sable check)"
                )
            name = halt_causes(state)[why]
            logger.note(
                f"seed {seed} halted: {name} was not finite in update {update + 1}; it stays as it was before"
            )
    if (halted >= 0).all():
        raise Halted(
            f"{run.task}: every seed has halted; try a lower learning rate, or check the environment"
        )
