"""The one error a user's mistake raises: the command line prints it as one line and exits with 2."""

import difflib
from collections.abc import Iterable


class SableError(ValueError):
    """Something given was wrong; the message says what was given and what would work."""


def suggest(given: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the nearest known name, or nothing where none is near."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
