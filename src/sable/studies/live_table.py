"""What is shown while many runs are worked on: a table that stays in place in a terminal, lines in a pipe.
That of a grid has tasks down and systems across, and a line whenever a cell begins or ends."""

import abc
import contextlib
import math
import time
import typing as tp
from collections import Counter
from collections.abc import Hashable, Sequence

from sable.training.console import in_terminal

State = tp.Literal["waiting", "running", "stopped", "finished", "failed"]
STYLES: dict[State, str] = {
    "waiting": "dim",
    "running": "cyan",
    "stopped": "yellow",
    "finished": "green",
    "failed": "bold red",
}


class LiveDisplay(abc.ABC):
    """Draws `table()` in a terminal twice a second while it is entered; elsewhere `say` prints lines."""

    def __init__(self, quiet: bool):
        self._quiet, self._live = quiet, None

    @abc.abstractmethod
    def table(self) -> tp.Any:
        """Return what to draw, for rich."""

    def say(self, line: str) -> None:
        """Print a line where no table is drawn; a reader that went away must not stop the work."""
        if self._live is None and not self._quiet:
            with contextlib.suppress(OSError, ValueError):
                print(line, flush=True)

    def __enter__(self) -> tp.Self:
        if not self._quiet and in_terminal():
            from rich.live import Live as RichLive

            self._live = RichLive(get_renderable=self.table, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back, if it is still there."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()


class Status(tp.NamedTuple):
    """How far a cell has come. Its mean return over seeds is the absolute one when it has finished, else that
    of the newest evaluation."""

    state: State
    fraction: float = 0.0
    mean: float = math.nan
    std: float = 0.0
    note: str = ""

    @property
    def text(self) -> str:
        value = f"{self.mean:.4g}" if math.isfinite(self.mean) else ""
        if self.state in ("running", "stopped"):
            return f"{self.fraction:.0%} {value}".strip() + (" stopped" if self.state == "stopped" else "")
        return {"waiting": "·", "finished": value or "finished", "failed": "failed"}[self.state]


class BenchmarkTable(LiveDisplay):
    """All that is known of every cell, shown as it becomes known."""

    def __init__(self, cells: Sequence[tuple[Hashable, str, str]], quiet: bool = False):
        """Begin with all cells waiting; `cells` are (cell, task, system)."""
        self._names = {cell: (task, system) for cell, task, system in cells}
        self._tasks = list(dict.fromkeys(task for _, task, _ in cells))
        self._systems = list(dict.fromkeys(system for _, _, system in cells))
        self._status: dict[Hashable, Status] = {cell: Status("waiting") for cell, _, _ in cells}
        super().__init__(quiet)
        self._started = time.monotonic()

    def show(self, cell: Hashable, status: Status) -> None:
        """Take in how far a cell has come."""
        before, self._status[cell] = self._status[cell], status
        if before.state != status.state:
            self.say(self._line(cell, status))

    def _line(self, cell: Hashable, status: Status) -> str:
        task, system = self._names[cell]
        what = status.state
        if status.state == "finished":
            what = f"finished: {status.mean:.4g} ± {status.std:.2g}"
        elif status.state == "failed":
            what = f"failed: {status.note}"
        elif status.fraction:
            what += f" at {status.fraction:.0%}"
        count = Counter(s.state for s in self._status.values())["finished"]
        return f"[{count}/{len(self._status)}] {task} · {system}: {what}"

    def table(self) -> tp.Any:
        """Return the table: tasks down, systems across."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        states = Counter(status.state for status in self._status.values())
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        head = Text(f"{states['finished']} of {len(self._status)} cells finished", style="bold")
        head.append(
            "".join(f"   {states[s]} {s}" for s in ("running", "stopped", "failed") if states[s])
            + f"   {minutes // 60}:{minutes % 60:02}:{seconds:02} gone",
            style="not bold",
        )
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("")
        for system in self._systems:
            table.add_column(system, justify="right")
        cells = {names: self._status[cell] for cell, names in self._names.items()}
        for task in (visible := self._visible_tasks()):
            statuses = [cells.get((task, system)) for system in self._systems]
            table.add_row(task, *(Text(s.text, style=STYLES[s.state]) if s else "" for s in statuses))
        more = len(self._tasks) - len(visible)
        return Group(head, table, Text(f"and {more} more tasks", style="dim") if more else Text())

    def _visible_tasks(self) -> list[str]:
        """Return the tasks that fit the terminal: all, or those at work first."""
        from rich import get_console

        room = max(get_console().height - 6, 3)
        busy = {self._names[c][0] for c, s in self._status.items() if s.state in ("running", "failed")}
        visible = sorted(self._tasks, key=lambda task: task not in busy)[:room]
        return [task for task in self._tasks if task in visible]
