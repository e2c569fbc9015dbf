"""The one error a user's mistake raises: the command line prints it as one line and exits with 2."""

import difflib
import signal
import traceback
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)


class SableError(ValueError):
    """Something given was wrong; the message says what was given and what would work."""


def ending(code: int) -> str:
    """Return how a process with that return code ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    memory = {signal.SIGKILL: ", as where memory has run out", signal.SIGABRT: ", as of std::bad_alloc"}
    return f"{signal.Signals(-code).name}{memory.get(signal.Signals(-code), '')}"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the nearest known name, or nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def describe(error: BaseException) -> str:
    """Return an error of somebody else's code in one line: its message, and where it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_PACKAGE)]
    frames = [f for f in frames if "importlib" not in f.filename]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"
