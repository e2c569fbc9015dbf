"""A run from its configuration to what it leaves: environment, system, devices and folder together."""

import sys
import typing as tp
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sable.quiet import silence_output
from sable.trust import Trust

if tp.TYPE_CHECKING:
    from sable.config.schema import Config, RunConfig
    from sable.envs.base import Env
    from sable.errors import SableError
    from sable.training.device_memory import DoesNotFit
    from sable.training.loop import Result


def run_training(
    config: "Config",
    env: "Env | str | None",
    claim_directory: Callable[[], tp.ContextManager[Path]],
    *,
    resume: bool,
    quiet: bool,
    trust: Trust,
    strict: bool = False,
    requeue: bool = False,
    env_timeout: float | None = None,
) -> "Result":
    """Train a run and return what it leaves; its directory is claimed, and made, only once environment,
    system and devices are there. With `resume` one that holds a checkpoint is gone on with; `requeue` is how
    it ends where signals do not let it end by itself."""
    from sable.errors import SableError
    from sable.reports import read as results
    from sable.runs import circumstances, sums
    from sable.runs import directory as runs
    from sable.training import processes

    processes.join(config.run)  # before anything touches a device
    with ExitStack() as stack:
        stack.enter_context(silence_output(quiet))
        env = stack.enter_context(open_run_env(config.run, env, trust, env_timeout))
        from sable import systems
        from sable.envs.python.vector_env import PythonVectorEnv
        from sable.runs.curve import draw_curve
        from sable.training import checkpoint, devices, loop
        from sable.training import device_memory as memory
        from sable.training import host_rollout as hosted
        from sable.training.interruption import Exit, interruption

        system = systems.make(config.run.system, env.spec, config.system)
        hosted.refuse_sharing(env, mesh := devices.make_mesh(config))
        now = circumstances.describe(mesh.size if mesh else 1)
        circumstances_here, is_resumption = circumstances.of(now), False

        def claim_run() -> str:
            nonlocal is_resumption
            directory = stack.enter_context(claim_directory())
            sums.report(directory)
            if is_resumption := bool(checkpoint.steps(directory / checkpoint.FOLDER)):
                earlier = circumstances.earlier(runs.read_meta(directory), checkpoint.newest_facts(directory))
                circumstances.compare(directory, earlier, circumstances_here, strict=strict)
            elif (directory / sums.SUMMARY).is_file():  # beginning anew would overwrite what came of it
                raise SableError(
                    f"{directory} has finished and keeps no checkpoint to go on from: train it anew"
                )
            runs.begin(directory, env.spec, now, anew=not is_resumption)
            return str(directory)

        directory = Path(processes.broadcast_from_main(claim_run))
        hint = f"go on with: sable train {runs.how_to_resume(directory)}"
        exit = Exit(hint, requeue, speaks=processes.is_main_process())
        interrupted = stack.enter_context(interruption(exit))
        parts = env, system, config, directory
        how = {
            "resume": resume,
            "quiet": quiet,
            "circumstances": circumstances_here,
            "interrupted": interrupted,
        }
        try:
            result = loop.train_loop(*parts, **how)
        except memory.DoesNotFit as error:
            raise _refusal(error, env, config, None if resume else directory) from None
        if not processes.is_main_process() or (result.interrupted is not None and runs.is_whole(directory)):
            return result  # a finished run that was not measured again stays as it is
        with runs.explaining_write_errors(directory):
            runs.reopen(directory) if result.interrupted is not None else sums.remove(directory)
            if is_resumption:  # noted only now: a run of which no checkpoint is whole is left untouched
                runs.note_resumption(directory, now)
            draw_curve(directory, result.summary.get("absolute_return"))
            if result.interrupted is None:
                results.export(directory, result.summary)
                # Episodes of Python environments cannot be recorded.
                if config.run.video and not isinstance(env, PythonVectorEnv):
                    write_video(directory, env, config.run, quiet=quiet)
                runs.finish(directory, result.summary)
    return result


def write_video(directory: Path, env: "Env", run: "RunConfig", *, quiet: bool) -> None:
    """Leave a short film in a run's folder, or say in one line why there is none."""
    from sable.viewer.show import leave_video

    problem = leave_video(directory, env, run)
    if problem and not quiet:
        print(f"sable: {problem}", file=sys.stderr)


def _refusal(error: "DoesNotFit", env: "Env", config: "Config", directory: Path | None) -> "SableError":
    """Return the refusal of a run that does not fit, with what would; its folder, if it was made for it, is
    gone."""
    from sable.runs import directory as runs
    from sable.runs import fit as sizes
    from sable.training import device_memory as memory
    from sable.training import processes

    if directory is not None and processes.is_main_process():
        runs.discard(directory)
    if processes.detect_processes(config.run).count > 1 or isinstance(error, memory.TooManyEpisodes):
        return error
    return sizes.refusal(error, env, config)


def caller_trust(env: "Env | str | None", system: str | None, everything: bool) -> Trust:
    """Return what the caller of a command named beside a run, or trusts."""
    return Trust(env=env if isinstance(env, str) else None, system=system, everything=everything)


def make_run_env(run: "RunConfig", trust: Trust, timeout: float | None = None) -> "Env":
    """Return the environment that a run's configuration names, if `trust` covers it. A Python one may take
    `timeout` seconds to answer; where None, what is usual."""
    from sable import envs
    from sable.errors import SableError

    if run.task.startswith("custom/"):
        raise SableError(
            f"{run.task} is an environment of yours: go on from Python, giving it beside the run"
        )
    if timeout is None:
        return envs.make(run.task, trust, **env_arguments(run))
    from sable.envs.custom import is_custom, parse

    if not is_custom(run.task) or not parse(run.task).is_python:
        raise SableError(
            f"env_timeout={timeout!r} is for Python environments (pettingzoo:module:factory); "
            f"{run.task} is none"
        )
    return envs.make(run.task, trust, **env_arguments(run), env_timeout=timeout)


@contextmanager
def open_run_env(
    run: "RunConfig", env: "Env | str | None", trust: Trust, timeout: float | None = None
) -> tp.Iterator["Env"]:
    """Return the environment as given, or the one that the configuration names, which is closed behind us if
    it runs in processes of its own."""
    own = None if isinstance(env, str) else env
    opened = make_run_env(run, trust, timeout) if own is None else own
    try:
        yield opened
    finally:
        if own is None and hasattr(opened, "close"):
            opened.close()  # pyright: ignore[reportAttributeAccessIssue]


def env_arguments(run: "RunConfig") -> dict[str, str]:
    return dict(option.split("=", 1) for option in run.env_options)
