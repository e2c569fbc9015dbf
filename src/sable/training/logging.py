"""Where a run's numbers go: a view for whoever looks on, metrics.jsonl, and TensorBoard.

tensorboardX is imported where first needed, numpy not at all: reading stays quick.
"""

import contextlib
import gzip
import json
import math
import os
import time
import typing as tp
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sable.errors import SableError
from sable.files import write_atomically
from sable.training.view import Progress, make_view, spread

RETURN = "evaluation/return"
METRICS = "metrics.jsonl"
PACKED = ".gz"
"""What the name of metrics that were compressed to be kept ends with."""
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
        quiet: bool = False,
    ):
        """`resume_steps` is where a resumed run goes on; its last evaluation may lie before, at
        `evaluated_steps`."""
        evaluated_steps = resume_steps if evaluated_steps is None else evaluated_steps
        try:
            kept = _keep(directory / METRICS, evaluated_steps)
            self._metrics = (directory / METRICS).open("a", encoding="utf-8")
        except OSError as error:
            raise SableError(f"cannot write to {directory / METRICS}: {error.strerror or error}") from None
        self.seeds = tuple(seeds)
        self._earlier_seconds = max((row["wall_seconds"] for row in kept), default=0.0)
        self._started = time.perf_counter()
        self._events = Events(directory / "tensorboard", evaluated_steps)
        self._progress = Progress(title, len(self.seeds), total_steps, resume_steps, _mean_returns(kept))
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
        try:
            self._write_rows(steps, values)
        except OSError as error:
            raise SableError(f"cannot write to {self._metrics.name}: {error.strerror or error}") from None
        self._write_events(steps, values)
        self._progress.evaluated(steps, values.get(RETURN, []))
        self._view.evaluated()

    def note(self, text: str) -> None:
        """Tell the user one line."""
        self._view.say(text)

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the terminal and the files."""
        self._view.close()
        with contextlib.suppress(OSError):  # what a full disk did not take has been said
            self._metrics.close()
        self._events.close()

    def _write_rows(self, steps: int, values: dict[str, list[float]]) -> None:
        wall_seconds = round(self._earlier_seconds + time.perf_counter() - self._started, 3)
        for index, seed in enumerate(self.seeds):
            row = {"seed": seed, "env_steps": int(steps), "wall_seconds": wall_seconds}
            row |= {name: _finite(per_seed[index]) for name, per_seed in values.items()}
            self._metrics.write(json.dumps(row, allow_nan=False) + "\n")
        self._metrics.flush()
        os.fsync(self._metrics.fileno())

    def _write_events(self, steps: int, values: dict[str, list[float]]) -> None:
        scalars = {name: spread(per_seed)[0] for name, per_seed in values.items()}
        if len(self.seeds) > 1:
            for index, seed in enumerate(self.seeds):
                scalars |= {f"seed_{seed}/{name}": per_seed[index] for name, per_seed in values.items()}
        self._events.write(int(steps), {name: x for name, x in scalars.items() if math.isfinite(x)})


class Mute(Logger):
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

    def close(self) -> None:
        """Nothing to release."""


class Events:
    """Scalars for TensorBoard: a copy for the eye, which is given up where the disk does not take it.

    Written here and now, not through tensorboardX's thread: once a full disk has ended that, the next scalars
    wait for it for ever.
    """

    def __init__(self, directory: Path, evaluated_steps: int):
        """What TensorBoard has seen beyond `evaluated_steps` it is told to forget."""
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


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl, or where there is none of the metrics.jsonl.gz beside it; an end that was
    torn by a crash is left out, damage before it refused."""
    if path.is_file():
        data = path.read_bytes()
    elif (packed := path.with_name(path.name + PACKED)).is_file():
        try:
            data = gzip.decompress(packed.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise SableError(f"{packed} is damaged: {error}") from None
    else:
        return []
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


def _keep(path: Path, evaluated_steps: int) -> list[Row]:
    """The rows up to `evaluated_steps`, after dropping later ones from the file; a fresh run has none."""
    kept = [row for row in read_rows(path) if row["env_steps"] <= evaluated_steps] if evaluated_steps else []
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
    return kept


def _mean_returns(rows: list[Row]) -> list[float]:
    """The mean return over seeds at each evaluation in `rows`."""
    by_steps: dict[int, list[float]] = {}
    for row in rows:
        by_steps.setdefault(row["env_steps"], []).append(number(row.get(RETURN)))
    return [spread(returns)[0] for _, returns in sorted(by_steps.items())]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def number(value: tp.Any) -> float:
    """`value` as a float; nan where it is none, or too large to be one."""
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, (int, float)) else math.nan
    return math.nan
