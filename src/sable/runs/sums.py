"""The SHA-256 sums of a finished run's files, in sums.json, which is written last and checked by whoever
reads one of them. Runs of older versions have none.

This finds accidents, not forgery: whoever can write here can write the sums too.
"""

import hashlib
import json
import sys
import typing as tp
from pathlib import Path

from sable.errors import SableError
from sable.files import read_regular, write_atomically
from sable.training.loggers.logger import METRICS, read_metrics

FILE = "sums.json"
SUMMARY, MARL_EVAL = "summary.json", "marl_eval.json"
COVERED = ("config.json", "spec.json", "meta.json", METRICS, MARL_EVAL, SUMMARY)
MADE_ANEW = (METRICS, MARL_EVAL, SUMMARY)
"""What a resume makes again, from the newest checkpoint."""
MOST = 2**16
"""Bytes of a sums.json: far more than it has."""


class Altered(SableError):
    """A file is not what was written."""


def write(directory: Path) -> None:
    """Write the sums of those files that are there."""
    digests = {name: digest for name in COVERED if (digest := _digest(directory / name)) is not None}
    about = {"format": 1, "sha256": digests}
    text = json.dumps(about | {"sum": _sum(about)}, indent=2)
    write_atomically(directory / FILE, f"{text}\n".encode())


def check(path: Path, content: bytes) -> None:
    """Refuse a file of a finished run that does not hold what was written."""
    expected = _read(path.parent).get(path.name)
    if expected is not None and hashlib.sha256(content).hexdigest() != expected:
        raise Altered(_complaint(path, "is not what was written"))


def refuse_missing(path: Path) -> None:
    """Refuse a finished run that has lost a file, where a run without that file means something else."""
    if path.name in _read(path.parent) and not path.is_file():
        raise Altered(_complaint(path, "is missing"))


def verify(directory: Path) -> None:
    """Refuse a finished run of which any file is missing or is not what was written."""
    for name in altered(directory):
        path = directory / name
        raise Altered(_complaint(path, "is not what was written" if path.exists() else "is missing"))


def altered(directory: Path) -> list[str]:
    """Return the files that are missing or not what was written; none where there are no sums."""
    return [name for name, expected in _read(directory).items() if _digest(directory / name) != expected]


def report(directory: Path) -> None:
    """Say on stderr, a line each, what of a finished run a resume writes anew, or that nobody can tell. One
    without a summary has not finished, and metrics.jsonl is compared with the checkpoint."""
    for name in altered(directory):
        path = directory / name
        if name in (MARL_EVAL, SUMMARY):
            what = "is not what was written" if path.exists() else "is missing"
            print(f"sable: {path} {what}: it is written anew", file=sys.stderr)
    if line := unchecked(directory):
        print(f"sable: {line}", file=sys.stderr)


def unchecked(directory: Path) -> str | None:
    """Return the line that a finished run without sums deserves."""
    if (directory / FILE).is_file() or not (directory / SUMMARY).is_file():
        return None
    return f"{directory} has no {FILE}: nobody can tell whether its files are what was written"


def remove(directory: Path) -> None:
    """Remove the sums before what they cover is written anew."""
    (directory / FILE).unlink(missing_ok=True)


def _complaint(path: Path, what: str) -> str:
    remedy = f"put it back, or remove {FILE} to use it as it is"
    if path.name in MADE_ANEW and (path.parent / "checkpoints").is_dir():
        remedy = f"sable train --resume {path.parent} writes it anew"
    return f"{path} {what}, by its SHA-256 in {FILE}: {remedy}"


def _read(directory: Path) -> dict[str, str]:
    """Return the sums by file; none where there is no sums.json."""
    path = directory / FILE
    if not path.exists():
        return {}
    try:
        about = json.loads(read_regular(path, MOST))
        if about.pop("sum") != _sum(about) or about["format"] != 1:
            raise ValueError
        return {name: about["sha256"][name] for name in COVERED if name in about["sha256"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Altered(f"{path} is damaged; remove it to use the run's files unchecked") from None


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file, None where there is none; of metrics.jsonl also where it was
    compressed."""
    try:
        content = read_metrics(path) if path.name == METRICS else read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SableError(f"{path} cannot be read: {error.strerror or error}") from None
    return None if content is None else hashlib.sha256(content).hexdigest()


def _sum(about: dict[str, tp.Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
