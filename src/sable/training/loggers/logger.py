"""Where a run's numbers go: a view for whoever looks on, metrics.jsonl, and TensorBoard.

tensorboardX is imported where first needed, numpy not at all: reading stays quick.
"""

import contextlib
import gzip
import hashlib
import json
import math
import os
import sys
import time
import typing as tp
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sable.errors import SableError
from sable.files import write_atomically
from sable.training.console import Progress, make_view, mean_and_std

RETURN = "evaluation/return"
METRICS = "metrics.jsonl"
GZIP_SUFFIX = ".gz"
"""End of the name of metrics that were compressed to be kept."""
Row = dict[str, tp.Any]
"""One line of metrics.jsonl: seed, env_steps, wall_seconds and the metrics of one seed at one evaluation."""


class Logger:
    """The sinks of one run; every metric comes with one value per seed."""

    def __init__(
        self,
        directory: Path,
        *,
        title: str,
        seeds: Sequence[int],
        total_steps: int,
        resume_steps: int = 0,
        evaluated_steps: int | None = None,
        metrics: bytes | None = b"",
        quiet: bool = False,
    ):
        """`resume_steps` is where a resumed run goes on; its last evaluation may lie before, at
        `evaluated_steps`. `metrics` is what metrics.jsonl held there; None where the checkpoint does not
        say."""
        evaluated_steps = resume_steps if evaluated_steps is None else evaluated_steps
        path, known = directory / METRICS, metrics
        if known is None:
            known = _until(path, evaluated_steps)
            print(f"sable: {path} is taken as it is: an older checkpoint cannot check it", file=sys.stderr)
        self._metrics = MetricsFile(path, known, compare=metrics is not None)
        rows = read_rows(directory / METRICS)
        self.seeds = tuple(seeds)
        self._earlier_seconds = max((row["wall_seconds"] for row in rows), default=0.0)
        self._started = time.perf_counter()
        self._events = Events(directory / "tensorboard", evaluated_steps)
        self._progress = Progress(title, len(self.seeds), total_steps, resume_steps, _mean_returns(rows))
        self._view = make_view(self._progress, quiet)

    def phase(self, text: str) -> None:
        """Say what is going on right now, such as compiling."""
        self._progress.phase = text
        self._view.refresh()

    def progress(self, steps: int, seconds_training: float) -> None:
        """Note the steps each seed has taken and the seconds this process has spent training so far."""
        self._progress.advance(steps, seconds_training)
        self._view.refresh()

    def evaluation(self, steps: int, metrics: Mapping[str, Iterable[float]]) -> None:
        """Record one evaluation in every sink; it is on disk when this returns."""
        values = {name: [float(value) for value in per_seed] for name, per_seed in metrics.items()}
        self._write_rows(steps, values)
        self._write_events(steps, values)
        self._progress.evaluated(steps, values.get(RETURN, []))
        self._view.evaluated()

    def note(self, text: str) -> None:
        """Tell the user one line."""
        self._view.say(text)

    def refuse_lost(self) -> None:
        """Raise where metrics.jsonl, or the folder it is in, is not there any more."""
        self._metrics.refuse_lost()

    def metrics(self) -> bytes:
        """Return what metrics.jsonl holds so far, which is what was written."""
        return self._metrics.read()

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the terminal and the files."""
        self._view.close()
        self._metrics.close()
        self._events.close()

    def _write_rows(self, steps: int, values: dict[str, list[float]]) -> None:
        wall_seconds = round(self._earlier_seconds + time.perf_counter() - self._started, 3)
        lines = []
        for index, seed in enumerate(self.seeds):
            row = {"seed": seed, "env_steps": int(steps), "wall_seconds": wall_seconds}
            row |= {name: _finite(per_seed[index]) for name, per_seed in values.items()}
            lines.append(json.dumps(row, allow_nan=False) + "\n")
        self._metrics.append("".join(lines).encode())

    def _write_events(self, steps: int, values: dict[str, list[float]]) -> None:
        scalars = {name: mean_and_std(per_seed)[0] for name, per_seed in values.items()}
        if len(self.seeds) > 1:
            for index, seed in enumerate(self.seeds):
                scalars |= {f"seed_{seed}/{name}": per_seed[index] for name, per_seed in values.items()}
        self._events.write(int(steps), {name: x for name, x in scalars.items() if math.isfinite(x)})


class NullLogger(Logger):
    """No sinks: what a process has whose numbers another one writes."""

    def __init__(self):
        """Nothing to open."""

    def phase(self, text: str) -> None:
        """Nothing."""

    def progress(self, steps: int, seconds_training: float) -> None:
        """Nothing."""

    def evaluation(self, steps: int, metrics: Mapping[str, Iterable[float]]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def refuse_lost(self) -> None:
        """Nothing to lose."""

    def metrics(self) -> bytes:
        """Return nothing: another process writes."""
        return b""

    def close(self) -> None:
        """Nothing to release."""


class MetricsFile:
    """metrics.jsonl, which no one else is to change while a run appends to it."""

    def __init__(self, path: Path, content: bytes, *, compare: bool):
        """Make it hold `content`; what came after is dropped. With `compare`, whether that was still there is
        said on stderr."""
        self.path = path
        try:
            was = path.read_bytes() if path.is_file() else None
            if compare and not (was or b"").startswith(content):
                print(f"sable: {path} {_set_aside(path, was, content)}", file=sys.stderr)
            write_atomically(path, content)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._cannot_write(error) from None
        self._size, self._sum = len(content), hashlib.sha256(content)

    def append(self, lines: bytes) -> None:
        """Write some lines; they are on disk when this returns."""
        self.refuse_lost()
        try:
            view = memoryview(lines)
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from None
        self._size += len(lines)
        self._sum.update(lines)

    def read(self) -> bytes:
        """Return the content; refused where it is not what was written."""
        self.refuse_lost()
        try:
            content = self.path.read_bytes()
        except OSError:
            raise self._changed() from None
        if hashlib.sha256(content).digest() != self._sum.digest():
            raise self._changed()
        return content

    def refuse_lost(self) -> None:
        """Raise where it, or the folder it is in, was removed, replaced, cut or grown by another hand."""
        if not self.path.parent.is_dir():
            raise SableError(
                f"{self.path.parent} was removed or moved while the run worked in it: it ends here"
            )
        ours = os.fstat(self._file.fileno())
        there = self.path.stat() if self.path.exists() else None
        if there is None or not os.path.samestat(ours, there) or there.st_size != self._size:
            raise self._changed()

    def close(self) -> None:
        """Release the file."""
        with contextlib.suppress(OSError):  # what a full disk did not take has been said
            self._file.close()

    def _changed(self) -> SableError:
        return SableError(
            f"{self.path} was changed while the run wrote to it; sable train --resume {self.path.parent} "
            "goes on from the last checkpoint, which holds it"
        )

    def _cannot_write(self, error: OSError) -> SableError:
        return SableError(f"cannot write to {self.path}: {error.strerror or error}")


def _set_aside(path: Path, was: bytes | None, content: bytes) -> str:
    """Keep what `path` holds where that is not a part of `content`; return what happens to it, in words."""
    if was is None or content.startswith(was):
        return f"was {'missing' if was is None else 'cut short'}: written anew from the checkpoint"
    aside = path.with_name(f".damaged-{path.name}")
    os.replace(path, aside)
    return f"is not what was written: written anew from the checkpoint, and kept as {aside.name}"


class Events:
    """Scalars for TensorBoard: a copy for the eye, which is given up where the disk does not take it.

    Written here and now, not through tensorboardX's thread: once a full disk has ended that, the next scalars
    wait for it for ever.
    """

    def __init__(self, directory: Path, evaluated_steps: int):
        """TensorBoard is told to forget what it has seen beyond `evaluated_steps`."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._writer = None
        with contextlib.suppress(OSError):
            directory.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}")
        if evaluated_steps:
            pb: tp.Any = event_pb2
            start = pb.Event(step=evaluated_steps + 1, session_log=pb.SessionLog(status=pb.SessionLog.START))
            self._try(lambda writer: writer.write_event(start))

    def write(self, steps: int, scalars: Mapping[str, float]) -> None:
        """Record these values."""
        from tensorboardX.proto import event_pb2
        from tensorboardX.summary import scalar

        pb: tp.Any = event_pb2

        def record(writer: tp.Any) -> None:
            for name, value in scalars.items():
                event = pb.Event(wall_time=time.time(), step=steps, summary=scalar(name, value))
                writer.write_event(event)
            writer.flush()

        self._try(record)

    def close(self) -> None:
        """Release the file."""
        self._try(lambda writer: writer.close())

    def _try(self, action: tp.Callable[[tp.Any], None]) -> None:
        """Do something with the writer, if there still is one; after a failure there is none."""
        if self._writer is not None:
            try:
                action(self._writer)
            except OSError:
                writer, self._writer = self._writer, None
                with contextlib.suppress(OSError):
                    writer.close()


def read_metrics(path: Path) -> bytes | None:
    """Return what a metrics.jsonl holds, or where there is none the metrics.jsonl.gz beside it; None where
    there is neither."""
    if path.is_file():
        return path.read_bytes()
    if not (packed := path.with_name(path.name + GZIP_SUFFIX)).is_file():
        return None
    try:
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise SableError(f"{packed} is damaged: {error}") from None


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a metrics.jsonl, or where there is none of the metrics.jsonl.gz beside it."""
    return parse_rows(path, read_metrics(path) or b"")


def parse_rows(path: Path, data: bytes) -> list[Row]:
    """Return the rows in what `path` holds; an end torn by a crash is left out, damage before it refused."""
    rows = [_row(line) for line in data.decode(errors="replace").splitlines()]
    while rows and rows[-1] is None:
        rows.pop()
    if None in rows:
        raise SableError(f"{path} is damaged: line {rows.index(None) + 1} is not a row of metrics")
    return tp.cast(list[Row], rows)


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(row, dict)
        or not isinstance(row.get("seed"), int)
        or not isinstance(row.get("env_steps"), int)
    ):
        return None
    return row if isinstance(row.get("wall_seconds"), (int, float)) else None


def _until(path: Path, evaluated_steps: int) -> bytes:
    """Return the rows up to `evaluated_steps`, by a file of which nothing else is known."""
    rows = [row for row in read_rows(path) if row["env_steps"] <= evaluated_steps] if evaluated_steps else []
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _mean_returns(rows: list[Row]) -> list[float]:
    """Return the mean return over seeds at each evaluation in `rows`."""
    by_steps: dict[int, list[float]] = {}
    for row in rows:
        by_steps.setdefault(row["env_steps"], []).append(number(row.get(RETURN)))
    return [mean_and_std(returns)[0] for _, returns in sorted(by_steps.items())]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def number(value: tp.Any) -> float:
    """Return `value` as a float; nan where it is none, or too large to be one."""
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, (int, float)) else math.nan
    return math.nan
