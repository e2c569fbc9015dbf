"""The run directory, `<out>/<suite>/<task>/<system>/<name>/`: made, described, read and found again here.

config.json    what was asked for           metrics.jsonl  one object per seed and evaluation
meta.json      where and with what it ran   checkpoints/   the whole run state
spec.json      what its environment is like
summary.json   what came out                sums.json      SHA-256 of these
                                            curve.png, video.gif, tensorboard/, marl_eval.json
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import math
import os
import platform
import re
import shlex
import shutil
import time
import typing as tp
from pathlib import Path

from sable.config import meaning
from sable.config import resolve as settings
from sable.config.schema import Config, RunConfig, resume_argv
from sable.envs.custom import suite_and_name
from sable.errors import SableError
from sable.files import read_regular, remove_leftovers, require_unicode, write_atomically
from sable.runs import circumstances, sums
from sable.training.loggers.logger import METRICS, Row, parse_rows
from sable.training.loggers.logger import read_metrics as read_metrics_file
from sable.trust import NOTHING, Trust, Untrusted

if tp.TYPE_CHECKING:
    from sable.types import EnvSpec

MOST_JSON = 2**26
"""Bytes of a file of settings or results: far more than the largest has."""

CLAIM = ".claim"
"""The file that whoever works on a run holds locked."""


def place(out: Path, run: RunConfig, name: str | None) -> Path:
    """Return where the run would go; refused, with nothing written, where that is taken or cannot be
    written."""
    if name is not None and (safe_name(name) != name or not name.strip(".")):
        raise SableError(f"name={name!r} must be a plain folder name of letters, digits and . _ + = -")
    parent = folder(out, run)
    require_unicode(parent)
    try:
        directory = parent / name if name is not None else _untaken(parent)
        if name is not None:  # a free name that another takes meanwhile is no reason to refuse
            _refuse_used(directory)
        _require_writable(directory)
    except OSError as error:
        raise _cannot_write(parent, error) from None
    return directory


def folder(out: Path, run: RunConfig) -> Path:
    """Return the folder of all runs of that task and system."""
    suite, task = suite_and_name(run.task)
    return out.expanduser() / safe_name(suite) / safe_name(task) / safe_name(run.system)


@contextlib.contextmanager
def claim_new(out: Path, config: Config, name: str | None = None) -> tp.Iterator[Path]:
    """Hold a new run directory, with config.json in it, for this process; imports no jax. The name is the
    time where none is given.

    Of several processes that start at once with one name, the one that holds the folder writes; the others
    write nothing.
    """
    directory = _make_folder(out, config.run, name)
    with claim(directory):
        _refuse_used(directory)  # by another process, since it was made
        try:
            write_json(directory / "config.json", settings.to_dict(config))
        except OSError as error:
            raise _cannot_write(directory, error) from None
        yield directory


def create_pending(out: Path, config: Config, name: str | None = None) -> Path:
    """Return a new run directory with config.json in it, which a resume will begin; imports no jax."""
    with claim_new(out, config, name) as directory:
        return directory


def create(out: Path, config: Config, name: str | None = None) -> Path:
    """Return a new run directory that begins now: with config.json and meta.json."""
    directory = create_pending(out, config, name)
    begin(directory)
    return directory


def begin(
    directory: Path,
    spec: "EnvSpec | None" = None,
    now: dict[str, tp.Any] | None = None,
    *,
    anew: bool = False,
) -> None:
    """Write what its environment is like, and where and with what a run begins (`now`, by
    `circumstances.describe`), unless it is there; `anew` where nothing came of an earlier beginning."""
    try:
        if spec is not None and not (directory / "spec.json").exists():
            write_json(directory / "spec.json", dataclasses.asdict(spec))
        if anew or not (directory / "meta.json").exists():
            write_json(directory / "meta.json", now or circumstances.describe())
    except OSError as error:
        raise _cannot_write(directory, error) from None


def discard(directory: Path) -> None:
    """Remove a run's folder, and those around it that hold nothing else: what never ran leaves nothing."""
    shutil.rmtree(directory)
    with contextlib.suppress(OSError):  # of the first that holds something else
        for parent in list(directory.parents)[:3]:  # of its system, its task, its suite
            parent.rmdir()


@contextlib.contextmanager
def claim(directory: Path) -> tp.Iterator[Path]:
    """Hold a run, or any folder, for this process; refused while another process, on this machine or on one
    that shares its disk, holds it. A claim ends with its process, however that ends."""
    with explaining_write_errors(directory):
        file = (directory / CLAIM).open("a+")
    with file:
        if not _try_lock(file, patience=1.0):
            raise Claimed(f"{directory} is being worked on by another process: {holder(directory)}")
        if not os.fstat(file.fileno()).st_nlink:  # its holder removed the folder before letting go
            raise Claimed(f"{directory} was removed by another process; try again")
        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}\n")
        file.flush()
        yield directory


def is_claimed(directory: Path) -> bool:
    """Return whether some process holds the folder right now."""
    if not (directory / CLAIM).is_file():
        return False
    with (directory / CLAIM).open("r+") as file:
        return not _try_lock(file)


def holder(directory: Path) -> str:
    """Return the process that claimed the folder last, as its number and its machine."""
    with contextlib.suppress(OSError):  # it has removed the folder
        return (directory / CLAIM).read_text().strip()
    return "it has ended"


class Claimed(SableError):
    """Somebody else is at work there."""


def _try_lock(file: tp.IO, patience: float = 0.0) -> bool:
    """Return whether the lock on a file could be had; with some patience for those who only ask about it."""
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)


def note_resumption(directory: Path, now: dict[str, tp.Any]) -> None:
    """Add to meta.json where and with what (`now`, see `circumstances.describe`) the run was resumed."""
    meta = read_meta(directory)
    write_json(directory / "meta.json", meta | {"resumed": [*meta.get("resumed", []), now]})


def finish(directory: Path, summary: dict[str, tp.Any]) -> None:
    """Write the time the run took into meta.json, summary.json, which makes the run a finished one, and last
    the sums of its files."""
    sums.remove(directory)
    timing = {"finished": circumstances.now(), "wall_seconds": summary.get("wall_seconds")}
    write_json(directory / "meta.json", read_meta(directory) | timing)
    write_json(directory / "summary.json", summary)
    sums.write(directory)


def is_whole(directory: Path) -> bool:
    """Return whether a run has finished and has all its evaluations: one that fell back to an earlier
    checkpoint has not."""
    try:
        rows, summary = read_metrics(directory), read_summary(directory)
    except SableError:
        return False
    return bool(rows) and rows[-1]["env_steps"] == summary.get("env_steps")


def reopen(directory: Path) -> None:
    """Remove what only a finished run has."""
    for name in (sums.FILE, sums.SUMMARY, sums.MARL_EVAL):
        (directory / name).unlink(missing_ok=True)


def find(path: str | Path) -> Path:
    """Return the folder of the run at `path`."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise SableError(f"{directory} is not a run: there is no such folder")
    if not (directory / "config.json").is_file():
        raise SableError(
            f"{directory} is not a run: there is no config.json in it; "
            "a run's folder is <out>/<suite>/<task>/<system>/<name>"
        )
    return directory


def refuse_batch(directory: Path) -> None:
    """Refuse a run whose seeds are trials of a study, with settings of their own."""
    if (directory / "points.json").exists():
        raise SableError(f"{directory} is a batch of a study: the command that began it, sable tune, goes on")


def read_config(directory: Path, trust: Trust = NOTHING) -> Config:
    """Return what the run was asked to do; refused where its system is from outside sable and not covered by
    `trust`."""
    data = read_object(find(directory) / "config.json")
    try:
        return settings.from_dict(data, trust)
    except Untrusted as error:
        raise Untrusted(f"{directory}: {error}") from None
    except SableError as error:
        raise SableError(f"{directory} is not a run that sable can read: {error}") from None


def refuse_older_meaning(directory: Path) -> None:
    """Refuse to go on with a run that was begun when training with its settings meant something else."""
    data, meta = read_object(directory / "config.json"), read_meta(directory)
    sources = [one.get("source") for one in (meta, *meta.get("resumed", []))]
    meaning.refuse_older(directory, meaning.number_of(data, sources), *read_plain_config(directory))


def read_plain_config(directory: Path) -> tuple[RunConfig, dict[str, tp.Any]]:
    """Return the same with the system's fields as plain data, whatever the system: no name in it is
    imported."""
    data = read_object(find(directory) / "config.json")
    try:
        return settings.plain_from_dict(data)
    except SableError as error:
        raise SableError(f"{directory} is not a run that sable can read: {error}") from None


def how_to_resume(directory: Path) -> str:
    """Return the flags that go on with a run."""
    try:
        run, _ = read_plain_config(directory)
    except SableError:  # a folder that holds no run, such as a study's
        return f"--resume {directory}"
    return shlex.join(resume_argv(directory, run.task, run.system))


def read_metrics(directory: Path) -> list[Row]:
    """Return one row per seed and evaluation, in the order they were written."""
    path = directory / METRICS
    if (content := read_metrics_file(path)) is None:
        return []
    sums.check(path, content)
    return parse_rows(path, content)


def read_summary(directory: Path) -> dict[str, tp.Any]:
    """Return what came out of a finished run."""
    if not (directory / "summary.json").is_file():
        resume = how_to_resume(directory)
        raise SableError(f"{directory} has no summary.json: the run has not finished; go on with {resume}")
    return read_object(directory / "summary.json")


def read_meta(directory: Path) -> dict[str, tp.Any]:
    """Return where and with what the run ran; nothing where it does not say."""
    if not (directory / "meta.json").is_file():
        sums.refuse_missing(directory / "meta.json")
        return {}
    try:
        meta = read_object(directory / "meta.json")
        resumed = meta.get("resumed", [])
        if not isinstance(resumed, list) or not all(isinstance(one, dict) for one in resumed):
            raise SableError(f"{directory / 'meta.json'} is damaged: 'resumed' is not a list of objects")
    except sums.Altered:
        raise
    except SableError as error:
        raise SableError(f"{error}; put it back or remove it: only where the run began is lost") from None
    return meta


def write_json(path: Path, data: tp.Any) -> None:
    """Make `data` the content of the JSON file `path`, whole or not at all; what is not finite is null."""
    write_atomically(path, (json.dumps(to_plain(data), indent=2, allow_nan=False) + "\n").encode())


def to_plain(data: tp.Any) -> tp.Any:
    """Return `data` as JSON can hold it: arrays as lists, paths as text, numbers that are not finite as
    None."""
    if isinstance(data, dict):
        return {str(name): to_plain(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [to_plain(value) for value in data]
    if hasattr(data, "tolist"):
        return to_plain(data.tolist())
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return str(data) if isinstance(data, Path) else data


def safe_name(part: str) -> str:
    """Return `part` with what does not belong in a folder's name replaced: humanoid_9|8 becomes
    humanoid_9-8."""
    return re.sub(r"[^A-Za-z0-9._+=-]", "-", part)


def _make_folder(out: Path, run: RunConfig, name: str | None) -> Path:
    """Return the folder of a new run, made."""
    while True:
        directory = place(out, run, name)
        try:
            directory.mkdir(parents=True, exist_ok=name is not None)
        except FileExistsError:  # another process was quicker by a moment: the next free name
            continue
        except OSError as error:
            raise _cannot_write(directory, error) from None
        return directory


def _refuse_used(directory: Path) -> None:
    """Raise where a folder is there with something in it, other than the claim of whoever will write."""
    remove_leftovers(directory)
    if directory.is_dir() and any(path.name != CLAIM for path in directory.iterdir()):
        raise SableError(
            f"{directory} already holds something; choose another --name, or go on with --resume"
        )


def _untaken(parent: Path) -> Path:
    """Return a folder in `parent` named by the time, numbered where two runs start within a second."""
    stamp = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    number = 0
    while (directory := parent / (stamp + (f"-{number}" if number else ""))).exists():
        number += 1
    return directory


def _require_writable(directory: Path) -> None:
    """Raise the error that making and filling `directory` would meet, without doing so."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(None, f"{nearest} is not a folder")
    effective = os.access in os.supports_effective_ids
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=effective):
        raise PermissionError(None, f"no permission to write in {nearest}")


@contextlib.contextmanager
def explaining_write_errors(directory: Path) -> tp.Iterator[None]:
    """Say in one line that the disk or the folder does not take what is written to a run, which can go on
    later."""
    try:
        yield
    except OSError as error:
        raise SableError(
            f"cannot write to {directory}: {error.strerror or error}; what is saved of the run is untouched, "
            f"go on with {how_to_resume(directory)}"
        ) from None


def _cannot_write(directory: Path, error: OSError) -> SableError:
    return SableError(
        f"cannot write to {directory}: {error.strerror or error}; choose another folder with --out"
    )


def read_object(path: Path) -> dict[str, tp.Any]:
    """Return the JSON object in a file, which is what was written, as far as there are sums."""
    try:
        content = read_regular(path, MOST_JSON)
        sums.check(path, content)
        data = json.loads(content.decode())
    except sums.Altered:
        raise
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise SableError(f"{path} cannot be read: {' '.join(str(why).split())}") from None
    if not isinstance(data, dict):
        raise SableError(f"{path} is damaged: it does not hold a JSON object")
    return data
