"""Many runs as one piece of work: each cell of the grid a run of all its seeds, in its own process.

What is done is read from the run folders and nowhere else. So a grid can be stopped at any moment, started
again, and worked on by several machines that share the disk: finished cells are skipped, stopped ones go on
from their checkpoints, claimed ones are left to whoever is at them.
"""

import dataclasses
import logging
import os
import re
import socket
import subprocess
import time
import typing as tp
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sable import parent
from sable.config import renamed
from sable.config.checks import check_count
from sable.config.schema import Config, RunConfig, needs_trust, resume_argv
from sable.errors import SableError, ending
from sable.installation import pip_install
from sable.reports.read import variant
from sable.runs import directory as runs
from sable.studies.live_table import BenchmarkTable, Status
from sable.training.console import mean_and_std
from sable.training.interruption import SAVE, Exit, Interruption, interruption
from sable.training.loggers.logger import METRICS, RETURN, number, read_rows
from sable.trust import Trust, Untrusted, child_command, child_environment

LOG = "log.txt"
"""What a cell's process said."""

LOG_HEADER = b"-- begun --\n"
"""What stands in the log before what each process said."""

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Cell:
    """One run of the grid, all its seeds."""

    out: Path
    name: str
    config: Config

    @property
    def directory(self) -> Path:
        return runs.folder(self.out, self.config.run) / self.name

    @property
    def label(self) -> str:
        """Return what its system is called in tables."""
        return self.config.run.label or variant(self.config.run.system, vars(self.config.system))

    @property
    def is_custom(self) -> bool:
        """Whether it runs code from outside sable, which the command that made the cell named."""
        return needs_trust(self.config.run.task, self.config.run.system)

    @property
    def finished(self) -> bool:
        return (self.directory / "summary.json").is_file()


class Outcome(tp.NamedTuple):
    """The outcome of working on a grid."""

    cells: list[Cell]
    failures: list[str]
    """one line for each cell that failed"""
    interrupted: int | None
    """the signal that cut it short, if one did"""


def check(cell: Cell) -> None:
    """Refuse a cell whose folder cannot be used, or was begun with other settings."""
    if not (cell.directory / "config.json").is_file():
        runs.place(cell.out, cell.config.run, cell.name)
        return
    try:
        begun = runs.read_config(cell.directory, Trust(system=cell.config.run.system))
    except Untrusted as error:
        raise Untrusted(f"{error}; choose another --out") from None
    runs.refuse_older_meaning(cell.directory)
    for stored, requested in zip(_plain(begun), _plain(cell.config), strict=True):
        for field, value in requested.items():
            if stored[field] != value:
                raise SableError(
                    f"{cell.directory} was begun with {field}={stored[field]!r}, not {value!r}; "
                    "choose another --out"
                )


def _plain(config: Config) -> tuple[dict[str, tp.Any], dict[str, tp.Any]]:
    """Return the fields of the run, its label in words of now, and those of its system."""
    run = dataclasses.asdict(config.run) | {"label": renamed.label(config.run.label)}
    return run, dataclasses.asdict(config.system)


def folder_name(out: Path, run: RunConfig, name: str) -> str:
    """Return the name of a cell's folder: that under which an earlier version made it, or `name`."""
    cells = runs.folder(out, run)
    if (cells / name).exists() or not cells.is_dir():
        return name
    earlier = sorted(path.name for path in cells.iterdir() if renamed.folder(path.name) == name)
    return next(iter(earlier), name)


def status(cell: Cell) -> Status:
    """Return how far a cell has come, by what its folder holds."""
    if not (cell.directory / "config.json").is_file():
        return Status("waiting")
    if cell.finished:
        absolute = runs.read_summary(cell.directory).get("absolute_return") or []
        return Status("finished", 1.0, *mean_and_std([number(value) for value in absolute]))
    state = "running" if runs.is_claimed(cell.directory) else "stopped"
    rows = read_rows(cell.directory / METRICS)
    if not rows:
        return Status(state)
    steps = rows[-1]["env_steps"]
    newest = [number(row.get(RETURN)) for row in rows if row["env_steps"] == steps]
    return Status(state, min(steps / cell.config.run.total_steps, 1.0), *mean_and_std(newest))


def prepare(cell: Cell) -> Path:
    """Return the cell's folder, made if it is not there, ready for `sable train --resume`."""
    if not (config := cell.directory / "config.json").is_file():
        try:
            runs.create_pending(cell.out, cell.config, cell.name)
        except SableError:
            if not config.is_file():  # else another worker was quicker, perhaps with other settings
                raise
            check(cell)
    return cell.directory


def work(
    cells: Sequence[Cell],
    *,
    jobs: int = 1,
    launcher: str | None = None,
    quiet: bool = False,
    requeue: bool = False,
) -> Outcome:
    """Finish the cells in their order: here `jobs` at a time, or on a Ray cluster all at once. `requeue`
    is how this process ends where a second signal does not let it end by itself."""
    check_count("jobs", jobs, 1)
    if launcher not in (None, "ray"):
        raise SableError(f"launcher={launcher!r}: expected 'ray', or none for this machine")
    if launcher and jobs > 1:
        raise SableError(f"jobs={jobs} is for cells on this machine; on Ray, Ray places them")
    failures: dict[Cell, str] = {}
    exit = Exit("the same command goes on from here", requeue)
    names = [(cell, cell.config.run.task, cell.label) for cell in cells]
    with interruption(exit) as interrupted, BenchmarkTable(names, quiet) as table:
        # Cells are waited for while they save; a second signal leaves that to them.
        interrupted.unsaved, interrupted.on_forced_exit = True, table.close
        for cell in cells:
            table.show(cell, status(cell))
        missing = [cell for cell in cells if not cell.finished]
        if launcher:
            _work_on_ray(missing, table, interrupted, failures)
        else:
            _work_locally(missing, jobs, table, interrupted, failures)
        for cell in missing:
            table.show(cell, _final_status(cell, failures))
    lines = [f"{cell.config.run.task} {cell.label}: {why}" for cell, why in failures.items()]
    return Outcome(list(cells), lines, interrupted.signal or None)


def _work_locally(
    cells: list[Cell], jobs: int, table: BenchmarkTable, interrupted: Interruption, failures: dict[Cell, str]
) -> None:
    """Run each cell in a process of its own: its memory is its own to use and to measure. An interruption is
    passed on to all of them, once."""
    running: dict[Cell, subprocess.Popen] = {}
    stopping = False
    try:
        while True:
            waiting = [c for c in cells if c not in failures and c not in running and not c.finished]
            others = [cell for cell in waiting if runs.is_claimed(cell.directory)]
            if not interrupted.signal:
                for cell in [c for c in waiting if c not in others][: jobs - len(running)]:
                    running[cell] = _start(cell, shared=jobs > 1)
                    table.show(cell, Status("running"))
            elif not stopping:
                stopping = True
                for process in running.values():
                    process.terminate()
            if interrupted.save:
                interrupted.save = False
                for process in running.values():
                    process.send_signal(SAVE)
            if not running and (interrupted.signal or not waiting):
                return
            time.sleep(POLL_SECONDS)
            _update_table(table, others)
            for cell, process in list(running.items()):
                if process.poll() is None:
                    # It runs, though it may not have claimed its folder yet.
                    table.show(cell, status(cell)._replace(state="running"))
                    continue
                del running[cell]
                if process.returncode and not interrupted.signal and not runs.is_claimed(cell.directory):
                    failures[cell] = _failure_reason(cell, process.returncode)
                table.show(cell, _final_status(cell, failures))  # at once: others may run for long
    finally:
        for process in running.values():
            process.kill()


def _start(cell: Cell, shared: bool) -> subprocess.Popen:
    """Start `sable train --resume` for the cell; where cells share a device, none takes all its memory."""
    resume = resume_argv(prepare(cell), cell.config.run.task, cell.config.run.system)
    command = [*child_command(), "-m", "sable", "train", "--quiet", *resume]
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if shared else {}
    with (cell.directory / LOG).open("ab") as log:
        log.write(LOG_HEADER)
        log.flush()
        # In a session of its own, so that Ctrl-C reaches it through us alone.
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment | child_environment() | {parent.VARIABLE: str(os.getpid())},
        )


def _final_status(cell: Cell, failures: dict[Cell, str]) -> Status:
    return Status("failed", note=failures[cell]) if cell in failures else status(cell)


def _work_on_ray(
    cells: list[Cell], table: BenchmarkTable, interrupted: Interruption, failures: dict[Cell, str]
) -> None:
    """Run every cell as a Ray task. Placing them, and trying again where a worker or a node was lost, is
    Ray's work; a cell tried again goes on from its checkpoint."""
    ray = _connect_to_ray()
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    # A worker serves one cell: memory of the device is only given back by the end of a process.
    train = ray.remote(num_gpus=gpus, max_calls=1)(_train_cell)
    tasks = {train.remote(str(prepare(cell)), cell.is_custom): cell for cell in cells}
    cancelled = False
    while tasks:
        done, _ = ray.wait(list(tasks), timeout=POLL_SECONDS)
        for task in done:
            cell = tasks.pop(task)
            try:
                ray.get(task)
            except ray.exceptions.RayError as error:
                if not cancelled:
                    failures[cell] = _last_line(error)
            table.show(cell, _final_status(cell, failures))
        _update_table(table, tasks.values())
        if interrupted.signal and not cancelled:
            cancelled = True
            for task in tasks:
                ray.cancel(task)
    ray.shutdown()


def _train_cell(directory: str, trust: bool) -> None:
    """Train a cell on a Ray worker."""
    import sable

    sable.train(resume=directory, quiet=True, trust=trust)


def _connect_to_ray() -> tp.Any:
    """Connect to the Ray cluster this machine belongs to or RAY_ADDRESS names, or to one of its own."""
    address = re.fullmatch(r"(?:ray://)?([^/:]+):(\d+)", os.environ.get("RAY_ADDRESS", ""))
    try:
        import ray

        if address:  # Ray itself would try for minutes
            socket.create_connection((address[1], int(address[2])), timeout=10).close()
        ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    except ImportError:
        raise SableError(f"--launcher ray needs Ray, which is not installed: {pip_install('ray')}") from None
    except (OSError, RuntimeError, ValueError) as error:
        where = f" at RAY_ADDRESS={address[0]}" if address else ""
        raise SableError(f"Ray could not be reached{where}: {_last_line(error)}") from None
    return ray


def _update_table(table: BenchmarkTable, cells: Iterable[Cell]) -> None:
    """Bring the board up to date about cells that others work on."""
    for cell in cells:
        table.show(cell, status(cell))


def _failure_reason(cell: Cell, code: int) -> str:
    """Return why a cell's process failed, in one line: its last words, and how it ended where that was no
    choice of its own."""
    text = (cell.directory / LOG).read_bytes().rpartition(LOG_HEADER)[2].decode(errors="replace")
    lines = [" ".join(line.split()).removeprefix("sable: ") for line in text.split("\n")]
    words = next((line for line in reversed(lines) if line), "")
    if words and code > 0:
        return words
    return f"its process ended ({ending(code)}){words and ': '}{words}"


def _last_line(error: Exception) -> str:
    """Return the last line of an error, which for one that happened on a worker is its own."""
    return str(error).strip().split("\n")[-1]
