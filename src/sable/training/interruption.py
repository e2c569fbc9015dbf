"""Signals as a request to stop, honoured where nothing is lost."""

import signal
import typing as tp
from contextlib import contextmanager


class Interruption:
    """The signal that asked to stop, or 0."""

    signal: int = 0


@contextmanager
def interruption() -> tp.Iterator[Interruption]:
    """Turns Ctrl-C and SIGTERM into a request the loop can honour between two units; a second one acts at
    once."""
    state = Interruption()

    def note(number: int, _frame: tp.Any) -> None:
        state.signal = number
        for watched, handler in previous.items():
            signal.signal(watched, handler)

    try:
        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's business
        previous = {}
    try:
        yield state
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
