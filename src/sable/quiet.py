"""What code that is not ours prints while a command is to be quiet: nothing. Imports no jax."""

import contextlib
import functools
import os
import typing as tp
from contextvars import ContextVar

_SILENCED = ContextVar("silenced", default=False)


@contextlib.contextmanager
def silence_output(quiet: bool = True) -> tp.Iterator[None]:
    """Let nothing that is printed here reach standard output, nor what processes started here write; only if
    `quiet`. Errors and our own lines on stderr are still seen."""
    if not quiet:
        yield
        return
    token = _SILENCED.set(True)
    try:
        with contextlib.redirect_stdout(_nowhere()):
            yield
    finally:
        _SILENCED.reset(token)


def is_silent() -> bool:
    """Return whether we are inside `silenced`."""
    return _SILENCED.get()


@functools.cache
def _nowhere() -> tp.TextIO:
    """Return a file that is never closed, since somebody may have kept it for their standard output."""
    return open(os.devnull, "w")
