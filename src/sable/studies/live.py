"""What is shown while many runs are worked on: a table that stays in place in a terminal, lines in a pipe."""

import abc
import contextlib
import typing as tp

from sable.training.console import in_terminal


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
