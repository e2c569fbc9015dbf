"""The view of a run while it trains: a live one in a terminal, plain lines in a pipe.

rich is imported where first needed.
"""

import contextlib
import math
import os
import statistics
import sys
import time
import typing as tp
from collections.abc import Sequence


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
        self.mean, self.std = mean_and_std(returns)
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
        steps_taken = (self.steps - self.resume_steps) * self.num_seeds
        return steps_taken / self.seconds_training if self.seconds_training > 0 else 0.0

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
        with contextlib.suppress(OSError):  # the terminal may have gone
            self._live.refresh()

    def say(self, text: str) -> None:
        """Print `text` above the live view."""
        with contextlib.suppress(OSError):
            self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last picture standing and give the terminal back."""
        with contextlib.suppress(OSError):
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
    """Return the last `width` values as blocks from their lowest to their highest; gaps where not finite."""
    recent = values[-width:]
    finite = [value for value in recent if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / span)] if math.isfinite(v) else " " for v in recent)


def make_view(progress: Progress, quiet: bool) -> PlainView | LiveView:
    if quiet:
        return QuietView(progress)
    return LiveView(progress) if in_terminal() else PlainView(progress)


def in_terminal() -> bool:
    """Return whether somebody looks on who can be shown lines that stay in place."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def mean_and_std(values: list[float]) -> tuple[float, float]:
    """Return mean and standard deviation of the finite values; a seed that halted does not hide the
    others."""
    finite = [value for value in values if math.isfinite(value)]
    return (statistics.fmean(finite), statistics.pstdev(finite)) if finite else (math.nan, 0.0)


def _plus_minus(progress: Progress) -> str:
    return f"{progress.mean:.3f}" + (f" ± {progress.std:.3f}" if progress.num_seeds > 1 else "")


def _clock(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
