"""The training loop: the host calls the jitted updates, evaluates, logs, keeps the best and checkpoints."""

import dataclasses
import resource
import shlex
import sys
import time
import typing as tp
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from jax import Array

from sable.config.schema import Config, RunConfig, resume_argv, settings_of
from sable.envs.base import Env
from sable.envs.python.vector_env import EnvFailed, PythonVectorEnv
from sable.errors import SableError
from sable.files import require_unicode
from sable.systems.base import System
from sable.training import checkpoint, devices, processes
from sable.training import device_memory as memory
from sable.training.interruption import Interruption, interruption
from sable.training.job import Job, compile_stages, make_job
from sable.training.loggers.logger import METRICS, RETURN, Logger, read_rows
from sable.training.progress import FACTS, RunProgress, Stopped
from sable.training.update import RunState, Stages, halt_causes, step_without_legal_action
from sable.types import EnvSpec, PyTree

EvaluationCallback = tp.Callable[[int, list[float]], bool]
"""(environment steps, return of every seed) after an evaluation -> whether to stop."""


class Halted(SableError):
    """Something stopped being finite in every seed."""


@dataclass(frozen=True)
class Result:
    """The result of training: its folder, its summary, and the signal that cut it short, if one did."""

    directory: Path
    summary: dict
    interrupted: int | None = None


@memory.explain_out_of_memory()
def train_loop(
    env: Env | PythonVectorEnv,
    system: System,
    config: Config,
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
    job = make_job(env, system, config, hypers)
    require_unicode(directory)
    progress = RunProgress(directory, checkpoint_settings(config, env.spec), circumstances)
    with ExitStack() as open_files:
        progress.interrupted = interrupted or open_files.enter_context(interruption())
        metrics = restore_or_init(job, progress, resume, began)
        if processes.is_main_process():
            progress.logger = make_logger(job, progress, metrics, quiet)
        logger = open_files.enter_context(progress.logger)
        open_files.push(progress.close)
        progress.interrupted.on_forced_exit = logger.close
        if job.python_env is not None:
            open_files.enter_context(job.python_env.abandoned_when(progress.interrupted.overdue))
        try:
            stages = compile_stages(job, progress)
            progress.stop_if_asked()
            for boundary in job.boundaries[progress.evaluations :]:
                train_until(boundary, job, stages, progress)
                evaluate(job, stages, progress, on_evaluation)
                progress.save_now() if boundary == job.boundaries[-1] else progress.save_in_time()
                progress.stop_if_asked()
            absolute = measure_best(stages, progress)
        except Stopped as stopped:
            return Result(directory, {}, stopped.signal)
        except EnvFailed as error:
            return save_or_explain(job, progress, error)
    return Result(directory, summarise(job, progress, absolute))


def restore_or_init(job: Job, progress: RunProgress, resume: bool, began: float) -> bytes | None:
    """Begin at a checkpoint, or fresh; return what metrics.jsonl held there, None where that is not known."""
    directory = progress.directory
    if processes.is_main_process():
        checkpoint.remove_leftovers(directory)
    if resume and checkpoint.steps(directory / checkpoint.FOLDER):
        state, facts, metrics = checkpoint.restore(directory, job.shapes, progress.settings)
        progress.resume_from(devices.put_state(state, job.shardings), facts, began)
        return metrics
    init = job.compiled(job.init_state, *job.learner_args, out=job.shardings)
    memory.refuse_beyond(memory.program_bytes(init))
    progress.resume_from(init(*job.learner_args), dict.fromkeys(FACTS, 0), began)
    return b""


def make_logger(job: Job, progress: RunProgress, metrics: bytes | None, quiet: bool) -> Logger:
    """Return the logger of the process that writes."""
    last_evaluation = job.boundaries[progress.evaluations - 1] if progress.evaluations else 0
    return Logger(
        progress.directory,
        title=f"{job.config.run.task} · {job.config.run.system}",
        seeds=job.config.run.seeds,
        total_steps=job.boundaries[-1] * job.steps_per_update,
        resume_steps=progress.updates * job.steps_per_update,
        evaluated_steps=last_evaluation * job.steps_per_update,
        metrics=metrics,
        quiet=quiet,
    )


def train_until(boundary: int, job: Job, stages: Stages, progress: RunProgress) -> None:
    """Run updates until so many are done, a few at a time; the host looks up between."""
    clock, logger = progress.clock, progress.logger
    while progress.updates < boundary:
        progress.save_before(clock.per_update)
        logger.phase("training")
        num = min(processes.max_over_processes(clock.updates_per_call()), boundary - progress.updates)
        # One by one on the host: all before an environment that hangs is saved.
        num = 1 if job.python_env is not None else num
        state = progress.state
        with clock.training(num):
            halted = state.run.halted.copy()
            run_state = jax.block_until_ready(stages.run_updates(state.run, np.int32(num)))
        progress.state = replace(state, run=run_state)
        progress.add_updates(num)
        _announce_halted(logger, job.config.run, halted, run_state)
        logger.progress(progress.updates * job.steps_per_update, clock.seconds_here)
        progress.stop_if_asked()


def evaluate(
    job: Job, stages: Stages, progress: RunProgress, on_evaluation: EvaluationCallback | None
) -> None:
    """Evaluate the parameters just trained, keep the best, and record it."""
    progress.save_before(progress.clock.per_evaluation)
    progress.logger.phase("evaluating")
    with progress.clock.evaluating():
        progress.state, metrics = stages.evaluate_and_keep_best(progress.state)
        metrics = jax.device_get(metrics)
    progress.evaluations += 1
    steps = progress.updates * job.steps_per_update
    progress.logger.evaluation(steps, metrics)
    # Before saving: a run killed in between evaluates again, so `on_evaluation` sees every evaluation.
    if on_evaluation is not None and on_evaluation(steps, metrics[RETURN].tolist()):
        raise Stopped(None)


def measure_best(stages: Stages, progress: RunProgress) -> dict[str, np.ndarray]:
    """Return the statistics of the best parameters' episodes, each [S, episodes]: the absolute metric."""
    progress.logger.phase("measuring the best parameters")
    progress.interrupted.finishing = True
    absolute = jax.device_get(stages.absolute_metric(progress.state))
    progress.logger.metrics()  # refused where they are not what was written
    return absolute


def save_or_explain(job: Job, progress: RunProgress, error: EnvFailed) -> Result:
    """Return the result of a run that a signal asked to stop while its environment hung; else save, and say
    how to go on. What the environment was asked for last is not part of the state: nothing finished is lost.
    """
    try:
        progress.stop_if_asked()
    except Stopped as stopped:
        return Result(progress.directory, {}, stopped.signal)
    progress.writer.wait()
    if progress.interrupted.unsaved:
        progress.save_now()
    flags = shlex.join(resume_argv(progress.directory, job.config.run.task, job.config.run.system))
    raise EnvFailed(f"{error}; all before is saved, go on with {flags}") from None


def summarise(job: Job, progress: RunProgress, absolute: dict[str, np.ndarray]) -> dict[str, tp.Any]:
    """Return a finished run's summary."""
    seeds, steps = job.config.run.seeds, progress.updates * job.steps_per_update
    training_seconds = progress.clock.training_seconds
    halted = np.flatnonzero(jax.device_get(progress.state.run.halted) >= 0)
    return {
        "task": job.config.run.task,
        "system": job.config.run.system,
        "seeds": list(seeds),
        "env_steps": steps,
        "wall_seconds": progress.wall_seconds(),
        "training_seconds": training_seconds,
        "compile_seconds": job.compiled.seconds,
        "steps_per_second": len(seeds) * steps / training_seconds,
        "final_return": [row[RETURN] for row in read_rows(progress.directory / METRICS)[-len(seeds) :]],
        **{f"absolute_{name}": values.mean(axis=1).tolist() for name, values in absolute.items()},
        "halted_seeds": [seeds[i] for i in halted],
        "peak_memory_bytes": peak_memory_bytes(),
    }


def checkpoint_settings(config: Config, spec: EnvSpec) -> checkpoint.Settings:
    """Return the settings that tell a run's checkpoints from those of others."""
    sizes = {f"environment's {name}": value for name, value in dataclasses.asdict(spec).items()}
    return dataclasses.asdict(config.run) | settings_of(config.system) | sizes


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
