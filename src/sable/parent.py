"""What a process does that another one of ours started: it ends when that one does, however that ends."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

VARIABLE = "SABLE_PARENT"
"""The environment variable that tells a command which process started it as a part of its own work."""

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int, *, by_kernel: bool = True) -> None:
    """Have this process sent the signal `number` when `parent`, which started it, has ended, or now if it
    has.

    On Linux the kernel sends it, even to a process that is stuck; elsewhere a thread looks every second. The
    kernel takes the end of the thread that started this process for its parent's: leave it out
    (`by_kernel=False`) where that thread may end first.
    """
    if by_kernel and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), number)
    threading.Thread(target=_look, args=(parent, number), daemon=True).start()


def ignore_signals(parent: int, *, by_kernel: bool = True) -> None:
    """End with `parent` and by nothing else.

    Terminals and schedulers signal every process of a job. What is meant is the parent, which needs this one
    until it has saved. (Handlers, since programs started from here would inherit that a signal is ignored.)
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    end_with_parent(parent, signal.SIGKILL, by_kernel=by_kernel)


def end_with_caller() -> None:
    """Be asked to end (SIGTERM) with the process that started this command as a part of its own work."""
    parent = os.environ.pop(VARIABLE, "")
    if parent.isdecimal():
        end_with_parent(int(parent), signal.SIGTERM)


def _look(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), number)
