"""Signals as a request to stop, honoured where nothing is lost."""

import os
import signal
import threading
import time
import typing as tp
from contextlib import contextmanager

PATIENCE = 5.0
"""Seconds that a process asked to end by SIGTERM may go on before it is ended where it stands."""


class Interruption:
    """The signal that asked to stop, or 0."""

    signal: int = 0
    unsaved: bool = False
    """Whether something is finished that would be lost with this process."""


@contextmanager
def interruption(farewell: tp.Callable[[], None] | None = None) -> tp.Iterator[Interruption]:
    """Turns Ctrl-C and SIGTERM into a request the loop can honour between two units; a second one acts at
    once.

    With a `farewell`, SIGTERM does not wait for long either: a process that compiles or measures, which
    nothing interrupts, says it and ends after `PATIENCE` seconds, unless something is unsaved.
    """
    state = Interruption()

    def note(number: int, _frame: tp.Any) -> None:
        state.signal = number
        for watched, handler in previous.items():
            signal.signal(watched, handler)

    try:
        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's business
        previous = {}
    # Somebody else's handler would have had its own idea of how to end.
    impatient = farewell is not None and previous.get(signal.SIGTERM) is signal.SIG_DFL
    try:
        with _watch(state, farewell) if impatient and farewell else _nothing():
            yield state
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _watch(state: Interruption, farewell: tp.Callable[[], None]) -> tp.Iterator[None]:
    """A thread that hears of signals at once; Python's own handlers wait for compiled code to return."""
    hears, says = os.pipe()
    os.set_blocking(says, False)
    before = signal.set_wakeup_fd(says, warn_on_full_buffer=False)
    over = threading.Event()

    def listen() -> None:
        while (heard := os.read(hears, 1)) and heard[0] != signal.SIGTERM:
            pass
        if not heard:
            return
        deadline = time.monotonic() + PATIENCE
        while not over.wait(0.05):
            if time.monotonic() > deadline and not state.unsaved:
                farewell()
                os._exit(128 + signal.SIGTERM)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(says)
        thread.join()
        os.close(hears)


@contextmanager
def _nothing() -> tp.Iterator[None]:
    yield
