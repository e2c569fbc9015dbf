"""The one error a user's mistake raises: the command line prints it as one line and exits with 2."""

import difflib
import signal
from collections.abc import Iterable


class SableError(ValueError):
    """Something given was wrong; the message says what was given and what would work."""


def ending(code: int) -> str:
    """How a process with that return code ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    memory = {signal.SIGKILL: ", as where memory has run out", signal.SIGABRT: ", as of std::bad_alloc"}
    return f"{signal.Signals(-code).name}{memory.get(signal.Signals(-code), '')}"


def suggest(given: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the nearest known name, or nothing where none is near."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
