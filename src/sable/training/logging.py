"""Where a run's numbers go: a live view or plain lines, metrics.jsonl, and TensorBoard.

rich and tensorboardX are imported where first needed, numpy not at all: reading stays quick.
"""

import contextlib
import json
import math
import os
import statistics
import sys
import time
import typing as tp
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sable.errors import SableError

RETURN = "evaluation/return"
METRICS = "metrics.jsonl"
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
        self._view = _view(self._progress, quiet)

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


class Progress:
    """How far a run has come: the numbers that the live view and the plain lines show."""

    def __init__(self, title: str, num_seeds: int, total_steps: int, resume_steps: int, returns: list[float]):
        self.title, self.num_seeds, self.total_steps = title, num_seeds, total_steps
        self.steps, self.resume_steps, self.seconds_training = resume_steps, resume_steps, 0.0
        self.phase = "starting"
        self.returns = returns
        self.mean, self.std = (returns[-1] if returns else math.nan), 0.0
        self.started = time.perf_counter()
        self._first_unit: tuple[int, float] | None = None

    def advance(self, steps: int, seconds_training: float) -> None:
        """Take in one more unit of training."""
        self.steps, self.seconds_training, self.phase = int(steps), seconds_training, "training"
        self._first_unit = self._first_unit or (self.steps, time.perf_counter())

    def evaluated(self, steps: int, returns: list[float]) -> None:
        """Take in one evaluation."""
        self.steps = int(steps)
        self.mean, self.std = spread(returns)
        self.returns = [*self.returns, self.mean]

    @property
    def fraction(self) -> float:
        return min(self.steps / self.total_steps, 1.0)

    @property
    def best(self) -> float:
        return max(filter(math.isfinite, self.returns), default=math.nan)

    @property
    def steps_per_second(self) -> float:
        """Environment steps of all seeds per second spent training."""
        taken = (self.steps - self.resume_steps) * self.num_seeds
        return taken / self.seconds_training if self.seconds_training > 0 else 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds to the end at the pace since the first unit: with evaluations, without its compilation."""
        remaining = max(self.total_steps - self.steps, 0)
        since_steps, since = self._first_unit or (self.steps, 0.0)
        if self.steps > since_steps:
            return remaining * (time.perf_counter() - since) / (self.steps - since_steps)
        return remaining * self.num_seeds / self.steps_per_second if self.steps_per_second else math.nan


class PlainView:
    """One line per evaluation, for logs and pipes."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self.say(progress.title)

    def refresh(self) -> None:
        """Nothing: plain lines come with evaluations."""

    def evaluated(self) -> None:
        """Print where the run stands."""
        now = self._progress
        self.say(
            f"{now.fraction:4.0%}  {now.steps:>11,} steps  {now.steps_per_second:>9,.0f} steps/s  "
            f"return {_plus_minus(now)}  best {now.best:.3f}  {_clock(now.seconds_left)} left"
        )

    def say(self, text: str) -> None:
        """Print `text`; a reader that went away must not stop the training."""
        encoding = sys.stdout.encoding or "utf-8"
        with contextlib.suppress(OSError, ValueError):
            print(text.encode(encoding, "replace").decode(encoding), flush=True)

    def close(self) -> None:
        """Nothing to release."""


class QuietView(PlainView):
    """No words at all."""

    def say(self, text: str) -> None:
        """Nothing."""


class LiveView:
    """A few lines that stay in place in a terminal: bar, pace, return over seeds, its curve, time left."""

    def __init__(self, progress: Progress):
        from rich.console import Console
        from rich.live import Live

        self._progress = progress
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def refresh(self) -> None:
        """Nothing: the view draws itself four times a second."""

    def evaluated(self) -> None:
        """Draw the new numbers at once."""
        self._live.refresh()

    def say(self, text: str) -> None:
        """Print `text` above the live view."""
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last picture standing and give the terminal back."""
        self._live.stop()

    def _render(self) -> tp.Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self._progress
        head = Text.assemble((now.title, "bold"), ("  " + now.phase, "cyan"))
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(
                total=now.total_steps,
                completed=min(now.steps, now.total_steps),
                width=32,
                finished_style="bar.complete",
            ),
            Text(f"{now.fraction:.0%}", style="bold"),
            Text(f"{now.steps:,} of {now.total_steps:,} steps", style="dim"),
        )
        pace = Text.assemble(
            (f"{now.steps_per_second:,.0f}", "bold"),
            " steps/s   ",
            (_clock(time.perf_counter() - now.started), "bold"),
            " gone   ",
            (_clock(now.seconds_left), "bold"),
            " left",
        )
        curve = Text.assemble(
            "return ",
            (_plus_minus(now), "bold green"),
            f"   best {now.best:.3f}   ",
            (sparkline(now.returns), "green"),
        )
        return Group(head, bar, pace, *([curve] if now.returns else []))


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The last `width` values as blocks from their lowest to their highest; gaps where not finite."""
    shown = values[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / span)] if math.isfinite(v) else " " for v in shown)


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl; an end that was torn by a crash is left out, damage before it refused."""
    if not path.is_file():
        return []
    rows = [_row(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    while rows and rows[-1] is None:
        rows.pop()
    if None in rows:
        raise SableError(f"{path} is damaged: line {rows.index(None) + 1} is not a row of metrics")
    return tp.cast(list[Row], rows)


def write_atomically(path: Path, data: bytes) -> None:
    """Make `data` the content of `path`, so that a crash leaves the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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


def _view(progress: Progress, quiet: bool) -> PlainView | LiveView:
    if quiet:
        return QuietView(progress)
    return LiveView(progress) if in_terminal() else PlainView(progress)


def in_terminal() -> bool:
    """Whether somebody looks on who can be shown lines that stay in place."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _mean_returns(rows: list[Row]) -> list[float]:
    """The mean return over seeds at each evaluation in `rows`."""
    by_steps: dict[int, list[float]] = {}
    for row in rows:
        by_steps.setdefault(row["env_steps"], []).append(number(row.get(RETURN)))
    return [spread(returns)[0] for _, returns in sorted(by_steps.items())]


def spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation of the finite values; a seed that halted does not hide the others."""
    finite = [value for value in values if math.isfinite(value)]
    return (statistics.fmean(finite), statistics.pstdev(finite)) if finite else (math.nan, 0.0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def number(value: tp.Any) -> float:
    """`value` as a float; nan where it is none, or too large to be one."""
    with contextlib.suppress(OverflowError):
        return float(value) if isinstance(value, (int, float)) else math.nan
    return math.nan


def _plus_minus(progress: Progress) -> str:
    return f"{progress.mean:.3f}" + (f" ± {progress.std:.3f}" if progress.num_seeds > 1 else "")


def _clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
