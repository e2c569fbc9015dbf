"""Signals as requests to stop or to save, honoured where nothing is lost."""

import os
import select
import signal
import sys
import threading
import time
import typing as tp
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE = signal.SIGUSR1
"""The signal schedulers are made to send some time before they end a job."""

PATIENCE = 5.0
"""Seconds that a process asked to end by SIGTERM or SIGHUP may go on before it is ended where it stands."""

TWICE = 1.0
"""Seconds within which another signal is still the same request: schedulers and terminals send several. Two
Ctrl-C are two."""

REQUEUE = 75
"""The exit code of an interrupted run that is to be started again (EX_TEMPFAIL of sysexits.h)."""


@dataclass(frozen=True)
class Exit:
    """How an interrupted process ends: its last line, which says how to go on, and its exit code."""

    hint: str
    requeue: bool = False
    speaks: bool = True
    """Whether this process is the one that prints, of several that work together."""

    def announce(self) -> None:
        """Print the line, though the terminal may be gone."""
        if self.speaks:
            with suppress(OSError, ValueError):
                print(f"sable: interrupted; {self.hint}", file=sys.stderr, flush=True)

    def code(self, number: int) -> int:
        """Return the exit code after that signal."""
        return REQUEUE if self.requeue else 128 + number


class Interruption:
    """The requests that signals have made."""

    def __init__(self) -> None:
        self.signal = 0
        """The one that asked to stop, or 0."""
        self.since = 0.0
        self.save = False
        """Whether a save was asked for."""
        self.unsaved = False
        """Whether something is finished that would be lost with this process."""
        self.finishing = False
        """Whether only such work is left as can be done again: nothing then waits for its end."""
        self.on_forced_exit: Callable[[], None] = lambda: None
        """Called where the process is ended, to give the terminal back."""

    def overdue(self) -> bool:
        """Return whether a request to stop has waited long enough."""
        return bool(self.signal) and time.monotonic() > self.since + PATIENCE


def raise_interrupt(_number: int, _frame: tp.Any) -> tp.NoReturn:
    """Return a handler of SIGINT that does what Python's own does, and says that the process is a command of
    ours: a second Ctrl-C may end it."""
    raise KeyboardInterrupt


@contextmanager
def interruption(exit: Exit | None = None) -> Iterator[Interruption]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into requests the loop can honour between two units, and SIGUSR1 into
    one to save.

    With an `exit`, none waits for long where nothing would be lost: after SIGTERM and SIGHUP a process that
    compiles or measures, which nothing interrupts, ends after `PATIENCE` seconds, unless something is
    unsaved, and after a second request at once. A second Ctrl-C ends a command; elsewhere, such as in a
    notebook, it is Python's KeyboardInterrupt.
    """
    state = Interruption()
    # A handler of somebody else's has its own idea of how to end, and what is ignored (nohup) stays so.
    hears = [number for number in STOP if number != signal.SIGHUP or _default(number)]
    hears += [SAVE] if _default(SAVE) or signal.getsignal(SAVE) is signal.SIG_IGN else []
    watched = exit is not None and _default(signal.SIGTERM)

    def note(number: int, _frame: tp.Any) -> None:
        if number == SAVE:
            state.save = True
            return
        if not state.signal:
            state.signal, state.since = number, time.monotonic()
        for other, handler in previous.items():
            # A second one does what it would have done; where a thread watches, that is the thread's.
            if other in STOP and not (watched and (other != signal.SIGINT or handler is raise_interrupt)):
                signal.signal(other, handler)
        if state.finishing and signal.getsignal(number) is not note:
            signal.raise_signal(number)

    previous: dict[int, tp.Any] = {}
    with suppress(ValueError):  # not the main thread: signals are somebody else's business
        for number in hears:
            previous[number] = signal.signal(number, note)
    try:
        if exit is not None and watched and previous:
            with _watch(state, exit, previous[signal.SIGINT] is raise_interrupt):
                yield state
        else:
            yield state
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _watch(state: Interruption, exit: Exit, command: bool) -> Iterator[None]:
    """Return a thread that hears of signals at once; Python's own handlers wait for compiled code to
    return."""
    hears, says = os.pipe()
    os.set_blocking(says, False)
    before = signal.set_wakeup_fd(says, warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(hears, state, exit, command), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(says)
        thread.join()
        os.close(hears)


def _listen(pipe: int, state: Interruption, exit: Exit, command: bool) -> None:
    """End the process where signals ask for it, until the pipe that tells of them is closed."""
    first, since = 0, 0.0
    while True:
        if select.select([pipe], [], [], 0.05 if first else None)[0]:
            numbers = os.read(pipe, 64)
            if not numbers:
                return
            for number in numbers:
                if number not in STOP or (number == signal.SIGINT and not command):
                    continue
                if not first:
                    first, since = number, time.monotonic()
                elif first == number == signal.SIGINT or time.monotonic() > since + TWICE:
                    _end(state, exit, number)
        if first and not state.unsaved:
            late = first != signal.SIGINT and time.monotonic() > since + PATIENCE
            if late or state.finishing:
                _end(state, exit, first)


def _end(state: Interruption, exit: Exit, number: int) -> tp.NoReturn:
    """End this process where it stands, in seconds: the main thread may hold what is waited for here."""
    for last in (state.on_forced_exit, exit.announce):
        thread = threading.Thread(target=_quietly, args=(last,), daemon=True)
        thread.start()
        thread.join(1.0)
    os._exit(exit.code(number))


def _quietly(function: Callable[[], None]) -> None:
    with suppress(Exception):
        function()


def _default(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_DFL
