"""A run from its configuration to what it leaves: environment, system, devices and folder together."""

import sys
import typing as tp
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sable.quiet import silenced
from sable.trust import Trust

if tp.TYPE_CHECKING:
    from sable.config.schema import RunConfig, SystemConfig
    from sable.envs.base import Env
    from sable.errors import SableError
    from sable.training.device_memory import DoesNotFit
    from sable.training.loop import Result


def train(
    run: "RunConfig",
    config: "SystemConfig",
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
    """What training leaves; its directory is claimed, and made, only once environment, system and devices are
    there. With `resume` one that holds a checkpoint is gone on with; `requeue` is how it ends where signals
    do not let it end by itself."""
    from sable.errors import SableError
    from sable.reports import read as results
    from sable.runs import circumstances, sums
    from sable.runs import directory as runs
    from sable.training import processes

    processes.join(run)  # before anything touches a device
    with ExitStack() as held:
        held.enter_context(silenced(quiet))
        env = held.enter_context(env_for(run, env, trust, env_timeout))
        from sable import systems
        from sable.envs.python.vector_env import PythonVectorEnv
        from sable.runs.curve import draw_curve
        from sable.training import checkpoint, devices, loop
        from sable.training import device_memory as memory
        from sable.training import host_rollout as hosted
        from sable.training.interruption import Exit, interruption

        system = systems.make(run.system, env.spec, config)
        hosted.refuse_sharing(env, mesh := devices.make_mesh(run, config))
        now = circumstances.describe(mesh.size if mesh else 1)
        here, goes_on = circumstances.of(now), False

        def hold() -> str:
            nonlocal goes_on
            directory = held.enter_context(claim_directory())
            sums.report(directory)
            if goes_on := bool(checkpoint.steps(directory / checkpoint.FOLDER)):
                earlier = circumstances.earlier(runs.read_meta(directory), checkpoint.newest_facts(directory))
                circumstances.compare(directory, earlier, here, strict=strict)
            elif (directory / sums.SUMMARY).is_file():  # beginning anew would overwrite what came of it
                raise SableError(
                    f"{directory} has finished and keeps no checkpoint to go on from: train it anew"
                )
            runs.begin(directory, env.spec, now, anew=not goes_on)
            return str(directory)

        directory = Path(processes.broadcast_from_main(hold))
        hint = f"go on with: sable train {runs.how_to_resume(directory)}"
        exit = Exit(hint, requeue, speaks=processes.is_main_process())
        interrupted = held.enter_context(interruption(exit))
        parts = env, system, run, config, directory
        how = {"resume": resume, "quiet": quiet, "circumstances": here, "interrupted": interrupted}
        try:
            result = loop.train(*parts, **how)
        except memory.DoesNotFit as error:
            raise _refusal(error, env, run, config, None if resume else directory) from None
        if not processes.is_main_process() or (result.interrupted is not None and runs.is_whole(directory)):
            return result  # a finished run that was not measured again stays as it is
        with runs.writing(directory):
            runs.reopen(directory) if result.interrupted is not None else sums.remove(directory)
            if goes_on:  # noted only now: a run of which no checkpoint is whole is left untouched
                runs.note_resumption(directory, now)
            draw_curve(directory, result.summary.get("absolute_return"))
            if result.interrupted is None:
                results.export(directory, result.summary)
                if run.video and not isinstance(env, PythonVectorEnv):  # whose episodes cannot be recorded
                    leave_film(directory, env, run, quiet=quiet)
                runs.finish(directory, result.summary)
    return result


def leave_film(directory: Path, env: "Env", run: "RunConfig", *, quiet: bool) -> None:
    """Leave a short film in a run's folder, or say in one line why there is none."""
    from sable.viewer.show import leave_video

    problem = leave_video(directory, env, run)
    if problem and not quiet:
        print(f"sable: {problem}", file=sys.stderr)


def _refusal(
    error: "DoesNotFit", env: "Env", run: "RunConfig", config: "SystemConfig", directory: Path | None
) -> "SableError":
    """The refusal of a run that does not fit, with what would; its folder, if it was made for it, is gone."""
    from sable.runs import directory as runs
    from sable.runs import fit as sizes
    from sable.training import device_memory as memory
    from sable.training import processes

    if directory is not None and processes.is_main_process():
        runs.discard(directory)
    if processes.detect_processes(run).count > 1 or isinstance(error, memory.TooManyEpisodes):
        return error
    return sizes.refusal(error, env, run, config)


def trust_in(env: "Env | str | None", system: str | None, everything: bool) -> Trust:
    """Return what the caller of a command named beside a run, or trusts."""
    return Trust(env=env if isinstance(env, str) else None, system=system, everything=everything)


def env_of(run: "RunConfig", trust: Trust, timeout: float | None = None) -> "Env":
    """The environment that a run's configuration names, if `trust` covers it. A Python one may take `timeout`
    seconds to answer; where None, what is usual."""
    from sable import envs
    from sable.errors import SableError

    if run.task.startswith("custom/"):
        raise SableError(
            f"{run.task} is an environment of yours: go on from Python, giving it beside the run"
        )
    if timeout is None:
        return envs.make(run.task, trust, **options(run))
    from sable.envs.custom import is_custom, parse

    if not is_custom(run.task) or not parse(run.task).is_python:
        raise SableError(
            f"env_timeout={timeout!r} is for Python environments (pettingzoo:module:factory); "
            f"{run.task} is none"
        )
    return envs.make(run.task, trust, **options(run), env_timeout=timeout)


@contextmanager
def env_for(
    run: "RunConfig", env: "Env | str | None", trust: Trust, timeout: float | None = None
) -> tp.Iterator["Env"]:
    """The environment as given, or the one that the configuration names, which is closed behind us if it runs
    in processes of its own."""
    given = None if isinstance(env, str) else env
    made = env_of(run, trust, timeout) if given is None else given
    try:
        yield made
    finally:
        if given is None and hasattr(made, "close"):
            made.close()  # pyright: ignore[reportAttributeAccessIssue]


def options(run: "RunConfig") -> dict[str, str]:
    return dict(option.split("=", 1) for option in run.options)
