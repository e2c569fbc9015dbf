"""What training means, by number: raised by each change of code after which the same settings learn
otherwise.

A configuration holds the number it was written under. Only the changes that concern it make it one of an
older meaning: it is evaluated and loaded as it was trained, and trained no further.
"""

import typing as tp
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from sable.errors import SableError

if tp.TYPE_CHECKING:
    from sable.config.schema import RunConfig

Fields = Mapping[str, tp.Any]
"""A system's, as plain data."""


LONG_EPISODES = ("mpe", "neom", "null", "smax")
"""The suites on which less than one episode in twenty began at a start that an earlier one of its rollout had
used, when an environment had one for 16 steps."""


class Change(tp.NamedTuple):
    """A change of what training means."""

    number: int
    """the meaning that began with it"""
    commit: str
    """the last one before it"""
    before: str
    """what held until then, to be read behind "when" """
    concerns: "Callable[[RunConfig, Fields], bool]"
    """whether a run learns otherwise since"""


CHANGES = (
    Change(
        1,
        "4e9bc954f8a66044be3825bb0c916c15f5eecdb4",
        "reset_pool_size 0 was 128 start states that all environments drew from",
        lambda run, fields: run.reset_pool_size == 0,
    ),
    Change(
        2,
        "fa08a91fb025741a65d79da7e9fae3862853984e",
        "the policy took one step, not policy_delay, after so many of the critics",
        lambda run, fields: run.system in ("masac", "hasac") and fields["policy_delay"] > 1,
    ),
    Change(
        3,
        "89d45048223db7b505f0b1a8d3b60160db9a16d4",
        "MAT without rms_norm still had RMSNorm in its action embedding and its heads",
        lambda run, fields: run.system == "mat" and not fields["rms_norm"],
    ),
    Change(
        4,
        "b1d880371922825398224cb66e999877489ac6fb",
        "short episodes repeated the starts of their rollout",
        lambda run, fields: run.task.partition("/")[0] not in LONG_EPISODES,
    ),
)
MEANING = CHANGES[-1].number
"""What training means now."""

UNNUMBERED = 1
"""The meaning of a configuration that has no number: it is older than numbers are."""
OLDER_SOURCES = {"b8ae72df524e165d"}
"""Code of before that one, meaning 0, whose runs were published."""


def number_of(data: Mapping[str, tp.Any], sources: Iterable[tp.Any] = ()) -> int:
    """Return the meaning of a configuration as `settings.to_dict` wrote it, of a run by these sources."""
    number = data.get("meaning", 0 if OLDER_SOURCES.intersection(sources) else UNNUMBERED)
    if type(number) is not int or not 0 <= number <= MEANING:
        raise SableError(
            f"configuration meaning {number!r} is none of 0 to {MEANING}, which this version knows: a newer "
            "version wrote it, or it is damaged"
        )
    return number


def since(number: int, run: "RunConfig", fields: Fields) -> list[Change]:
    """Return the changes after that meaning that concern a run, the oldest first."""
    return [change for change in CHANGES if change.number > number and change.concerns(run, fields)]


def refuse_older(directory: Path, number: int, run: "RunConfig", fields: Fields) -> None:
    """Refuse to go on with what was begun there under that meaning, if it has another now."""
    if changes := since(number, run, fields):
        raise SableError(
            f"{directory} was begun when {describe_changes(changes)}: go on with it there, or begin it anew "
            "under another --out or --name"
        )


def describe_changes(changes: Iterable[Change]) -> str:
    """Return what an older meaning was, and the commit that still has it."""
    first, *others = changes
    before = ", and ".join(change.before for change in (first, *others))
    return f"{before} (commit {first.commit[:10]} still means that)"
