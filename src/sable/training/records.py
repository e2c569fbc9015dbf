"""A checkpoint's record of the files beside it: the evaluations so far, the run's settings, and its
environment's sizes.

This finds accidents, not forgery: whoever can write here can write the sums too.
"""

import hashlib
import json
import typing as tp
from collections.abc import Mapping
from pathlib import Path

from sable.errors import SableError
from sable.training.loggers.logger import METRICS

CONFIG, SPEC = "config.json", "spec.json"
FINISHED = "sums.json"
"""The file that only a finished run has; see `runs.sums`."""
REMEDIES = {
    CONFIG: "put back the one it was; the checkpoint's manifest.json has its values under 'settings'",
    SPEC: "remove it, and --resume writes it anew",
}


def fingerprints(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of the files that do not change while a run goes on, of those that are there."""
    return {name: _fingerprint(directory / name) for name in REMEDIES if (directory / name).is_file()}


def describe(fingerprints: Mapping[str, str], metrics: bytes | None) -> dict[str, tp.Any]:
    """Return what a manifest says: those, and the length and SHA-256 of metrics.jsonl so far."""
    if metrics is None:
        return dict(fingerprints)
    return {**fingerprints, METRICS: {"bytes": len(metrics), "sha256": hashlib.sha256(metrics).hexdigest()}}


def refuse_changed(directory: Path, records: tp.Any, checkpoint: Path) -> None:
    """Refuse a run whose settings or environment are not those it was saved with; checkpoints of older
    versions do not tell."""
    saved = records if isinstance(records, Mapping) else {}
    for name, remedy in REMEDIES.items():
        path = directory / name
        if name in saved and (not path.is_file() or _fingerprint(path) != saved[name]):
            what = "is not what it was" if path.is_file() else "was there and is not any more"
            raise SableError(f"{path} {what} when {checkpoint} was saved: {remedy}")


def goes_beyond(directory: Path, records: tp.Any) -> bool:
    """Return whether a finished run has evaluations that its newest checkpoint, which says this, has not: a
    later one is gone."""
    saved = records.get(METRICS) if isinstance(records, Mapping) else None
    path = directory / METRICS
    finished = (directory / FINISHED).is_file() and path.is_file()
    return finished and isinstance(saved, Mapping) and path.stat().st_size > saved["bytes"]


def _fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file; of settings without the number of devices, which may change."""
    try:
        content = path.read_bytes()
        if path.name == CONFIG:
            data = json.loads(content)
            data["run"].pop("devices", None)
            content = json.dumps(data, sort_keys=True).encode()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SableError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    return hashlib.sha256(content).hexdigest()
