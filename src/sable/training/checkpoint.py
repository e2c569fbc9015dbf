"""Checkpoints of a whole run: its arrays in one safetensors file, by their paths in the state, and a SHA-256
manifest that proves they are still what was written.

A checkpoint is written beside its final place and renamed there, so that a folder with a step's name is
always complete. Where the newest has been damaged since, the newest that is whole is loaded, and the damage
is named. `take` copies a state into the host's memory and `commit` writes it, in any thread; `save` is both.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import typing as tp
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sable import tensors
from sable.config import renamed
from sable.config.schema import resume_argv
from sable.errors import SableError
from sable.files import read_regular, require_unicode
from sable.training import orbax_files, processes, records
from sable.training.loggers.logger import METRICS
from sable.types import PyTree

FORMAT = 3
"""3 has its arrays in one safetensors file; 2 and 1, which are still read, have Orbax's; 1 had no sum of the
manifest itself and no settings."""
MANIFEST = "manifest.json"
FOLDER = "checkpoints"
ARRAYS = "arrays.safetensors"
KEEP = 2
MOST_MANIFEST = 2**26
"""Bytes of a manifest: far more than the largest has."""


class Checkpoint(tp.NamedTuple):
    """A restored checkpoint."""

    state: PyTree
    facts: dict[str, tp.Any]
    metrics: bytes | None
    """what metrics.jsonl held when it was saved; None in those of older versions"""


class Damaged(SableError):
    """A checkpoint that is not what this run wrote."""


Settings = Mapping[str, tp.Any]
"""What a run was asked to do, by field: how a checkpoint of another run is told apart."""


class Snapshot(tp.NamedTuple):
    """All that a checkpoint will hold, in the host's memory."""

    directory: Path
    step: int
    arrays: dict[str, np.ndarray]
    manifest: dict[str, tp.Any]
    metrics: bytes | None


def take(
    directory: Path,
    step: int,
    state: PyTree,
    facts: dict[str, tp.Any],
    settings: Settings | None = None,
    fingerprints: Mapping[str, str] | None = None,
    metrics: bytes | None = None,
) -> Snapshot:
    """Return a copy of `state`, whose own memory can then be given to the next update. Of several processes
    all must call it; only the first's has the arrays.

    `fingerprints` are those of the run's other files (see `records`), `metrics` what metrics.jsonl holds.
    """
    leaves = named(state)
    manifest = {
        "format": FORMAT,
        "step": step,
        "facts": facts,
        "settings": plain(settings or {}),
        "records": records.describe(fingerprints or {}, metrics),
        "arrays": {name: _kind(leaf) for name, leaf in leaves.items()},
    }
    arrays = {}
    for name, leaf in leaves.items():
        array = processes.to_host(_raw(leaf))
        if processes.is_main_process():
            # A copy: on a CPU numpy shows the device's own memory, which could not be given away then.
            arrays[name] = tensors.to_storable(np.array(array, order="C"))
    return Snapshot(directory, step, arrays, manifest, metrics)


def commit(snapshot: Snapshot) -> Path:
    """Return the path of the checkpoint that now holds `snapshot`, for the first process alone; of the older
    ones, the newest is kept."""
    directory, step, arrays, manifest, metrics = snapshot
    folder = directory / FOLDER
    target, partial = _place(folder, step), folder / f".partial-{step:010d}"
    if target.exists() and _is_whole(target):  # an interruption right after a save
        return target
    try:
        remove_leftovers(directory)
        folder.mkdir(exist_ok=True)  # without parents: a run's folder that was removed stays so
        partial.mkdir()
        if metrics is not None:
            (partial / METRICS).write_bytes(metrics)
        _write(partial, arrays, manifest)
        # What has this number, or a later one, is damaged: or the run would have gone on from there.
        for other in (other for other in steps(folder) if other >= step):
            set_aside = folder / f".damaged-{other:010d}"
            shutil.rmtree(set_aside, ignore_errors=True)
            _place(folder, other).rename(set_aside)
        partial.rename(target)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        names = manifest["settings"]
        flags = resume_argv(directory, names.get("task", ""), names.get("system", "sable"))
        raise SableError(
            f"cannot save a checkpoint to {folder}: {_reason(error)}; those before it are untouched: "
            f"make room, or the folder writable, and go on with {shlex.join(flags)}"
        ) from None
    for old in steps(folder)[:-KEEP]:
        removed = folder / f".removed-{old:010d}"  # or one killed here would leave half of it, with a number
        with contextlib.suppress(OSError):
            _place(folder, old).rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
    return target


def save(directory: Path, step: int, state: PyTree, *parts: tp.Any) -> Path:
    """Return the path of a committed checkpoint of `state` in a run's directory; the rest is as of `take`."""
    snapshot = take(directory, step, state, *parts)
    return commit(snapshot) if processes.is_main_process() else _place(directory / FOLDER, step)


def remove_leftovers(directory: Path) -> None:
    """Remove what saves that were killed left in a run's directory; for whoever holds it."""
    folder = directory / FOLDER
    for left in (*folder.glob(".partial-*"), *folder.glob(".removed-*")):
        shutil.rmtree(left, ignore_errors=True)


def _write(partial: Path, arrays: dict[str, np.ndarray], manifest: dict[str, tp.Any]) -> None:
    """Fill the folder `partial` with a checkpoint, and make the disk hold it."""
    tensors.stream(partial / ARRAYS, arrays)
    digests = {str(path.relative_to(partial)): sha256(path) for path in _files(partial)}
    manifest = manifest | {"sha256": digests}
    (partial / MANIFEST).write_text(json.dumps(manifest | {"sum": _sum(manifest)}, indent=1))
    shutil.copymode(partial / MANIFEST, partial / ARRAYS)  # which safetensors makes for its owner alone
    for path in (*partial.rglob("*"), partial):
        _sync(path)


def steps(folder: Path) -> list[int]:
    """The steps that have a committed checkpoint, in order."""
    return sorted(int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit())


def restore(directory: Path, like: PyTree, settings: Settings | None = None) -> Checkpoint:
    """The newest whole checkpoint of a run, checked against its manifest, with the structure and types of
    `like`."""
    leaves = named(like)

    def load(path: Path, manifest: dict[str, tp.Any]) -> Checkpoint:
        sources = _match(path, manifest, leaves)
        arrays = _read_arrays(path, manifest, sources.values())
        restored = [_placed(path, arrays, sources[name], leaf) for name, leaf in leaves.items()]
        metrics = (path / METRICS).read_bytes() if METRICS in manifest["sha256"] else None
        return Checkpoint(jax.tree.unflatten(jax.tree.structure(like), restored), manifest["facts"], metrics)

    return _newest_whole(directory, settings, load)


def read(directory: Path, prefix: str, settings: Settings | None = None) -> dict[str, np.ndarray]:
    """Those arrays of a run's newest whole checkpoint whose paths begin so, checked against its manifest."""

    def load(path: Path, manifest: dict[str, tp.Any]) -> dict[str, np.ndarray]:
        sources = {renamed.leaf(source): source for source in manifest["arrays"]}
        sources = {name: source for name, source in sources.items() if name.startswith(prefix)}
        arrays = _read_arrays(path, manifest, sources.values())
        return {name: arrays[source] for name, source in sources.items() if source in arrays}

    return _newest_whole(directory, settings, load)


_Loaded = tp.TypeVar("_Loaded")


def _newest_whole(
    directory: Path, settings: Settings | None, load: tp.Callable[[Path, dict[str, tp.Any]], _Loaded]
) -> _Loaded:
    """What `load` makes of the newest checkpoint that is whole; a line on stderr for each that is not."""
    require_unicode(directory)  # as of every run's folder
    committed = steps(directory / FOLDER)
    if not committed:
        raise SableError(
            f"{directory} holds no checkpoint: the run stopped before its first one; go on with --resume"
        )
    problems: list[Damaged] = []
    for step in reversed(committed):
        path = _place(directory / FOLDER, step)
        try:
            manifest = _verified(path)
            _refuse_other_settings(path, manifest.get("settings", {}), plain(settings or {}))
            records.refuse_changed(directory, manifest.get("records"), path)
            loaded = load(path, manifest)
        except Damaged as problem:
            problems.append(problem)
        else:
            for problem in problems if processes.is_main_process() else ():
                print(f"sable: {problem}; using the one before it, {path.name}", file=sys.stderr)
            if (
                not problems
                and processes.is_main_process()
                and records.goes_beyond(directory, manifest.get("records"))
            ):
                what = f"{directory / METRICS} goes on beyond its newest checkpoint, {path.name}"
                print(f"sable: {what}: a later one is gone, and this one is used", file=sys.stderr)
            return loaded
    others = f"; neither is any other of the {len(problems)} whole" if len(problems) > 1 else ""
    raise SableError(f"{problems[0]}{others}")


def named(state: PyTree) -> dict[str, tp.Any]:
    """The leaves of `state` by their place in it."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
    }


def _is_key(leaf: tp.Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: tp.Any) -> Array:
    """`leaf` as plain numbers, PRNG keys too."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _placed(path: Path, arrays: dict[str, np.ndarray], name: str, like: tp.Any) -> Array:
    """Take an array out of those that were read: the leaf of a state, on this process's first device."""
    raw, array = jax.eval_shape(_raw, like), arrays.pop(name, None)
    if array is None and not like.size:  # Orbax keeps no array of size zero
        array = np.zeros(raw.shape, raw.dtype)
    if array is None or _kind(array) != _kind(raw):
        holds = "nothing" if array is None else _kind(array)
        raise Damaged(
            f"checkpoint {path} is damaged: {name} holds {holds}, and its manifest says {_kind(raw)}"
        )
    placed = jax.device_put(array, jax.local_devices()[0], may_alias=False)
    return jax.random.wrap_key_data(placed) if _is_key(like) else placed


def _kind(leaf: tp.Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _match(path: Path, manifest: dict[str, tp.Any], leaves: Mapping[str, tp.Any]) -> dict[str, str]:
    """Return the array of a checkpoint, by its name of then, for each of these leaves; refuse other paths,
    shapes or types."""
    sources = renamed.leaves(manifest["arrays"], leaves)
    saved = {name: manifest["arrays"][source] for name, source in sources.items()}
    wanted = {name: _kind(leaf) for name, leaf in leaves.items()}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            holds, wants = saved.get(name, "nothing"), wanted.get(name, "nothing")
            raise Damaged(
                f"checkpoint {path} does not fit this run: {name} holds {holds}, the run wants {wants}"
            )
    return sources


def _read_arrays(path: Path, manifest: dict[str, tp.Any], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return arrays of a checkpoint whose files have been verified, PRNG keys as numbers."""
    kinds = {name: manifest["arrays"][name] for name in names}
    if ARRAYS not in manifest["sha256"]:
        return orbax_files.read(path, (name for name, kind in kinds.items() if not re.search(r"\b0\b", kind)))
    try:
        found = tensors.pick(path / ARRAYS, kinds)
        types = {name: kind.rpartition("[")[0] for name, kind in kinds.items()}
        return {
            name: array if types[name].startswith("key<") else tensors.from_storable(array, types[name])
            for name, array in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise Damaged(f"checkpoint {path} is damaged: {ARRAYS}: {_reason(error)}") from None


def _refuse_other_settings(path: Path, saved: Settings, wanted: Settings) -> None:
    """Refuse what another run wrote. Fields that only one of them has came or went with a version, but for
    those that were renamed, and the number of devices may change."""
    known = dict.fromkeys(wanted)
    saved, wanted = renamed.complete(saved, known), renamed.current(wanted, known)
    for name in sorted((saved.keys() & wanted.keys()) - {"devices"}):
        if saved[name] != wanted[name]:
            raise Damaged(
                f"checkpoint {path} is another run's: {name} is {saved[name]!r} there and "
                f"{wanted[name]!r} in this run"
            )


def newest_facts(directory: Path) -> dict[str, tp.Any]:
    """Return what the newest manifest that can be read says of how its run had come there."""
    for step in reversed(steps(directory / FOLDER)):
        with contextlib.suppress(Damaged):
            return _manifest(_place(directory / FOLDER, step))["facts"]
    return {}


def _manifest(path: Path) -> dict[str, tp.Any]:
    """The manifest of the checkpoint at `path`, as it was written."""
    try:
        manifest = json.loads(read_regular(path / MANIFEST, MOST_MANIFEST))
        total = manifest.pop("sum", None)
        if manifest["step"] != int(path.name) or manifest["format"] not in (1, 2, FORMAT):
            raise ValueError
        if total != _sum(manifest) and (manifest["format"] > 1 or total is not None):
            raise ValueError
        if not all(isinstance(manifest[name], dict) for name in ("facts", "arrays", "sha256")):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"checkpoint {path} is damaged: {MANIFEST} is missing or unreadable") from None
    return manifest


def _verified(path: Path) -> dict[str, tp.Any]:
    """The manifest of the checkpoint at `path`, once every file has proved to be as it was written."""
    manifest = _manifest(path)
    digests = manifest["sha256"]
    found = {str(file.relative_to(path)) for file in _files(path)} - {MANIFEST}
    for name in sorted(found.symmetric_difference(digests)):
        what = "missing" if name in digests else "foreign"
        raise Damaged(f"checkpoint {path} is damaged: {name} is {what}")
    for name, digest in digests.items():
        try:
            same = sha256(path / name) == digest
        except OSError as error:
            raise Damaged(f"checkpoint {path} is damaged: {name}: {error.strerror}") from None
        if not same:
            raise Damaged(f"checkpoint {path} is damaged: {name} is not what was written")
    return manifest


def _is_whole(path: Path) -> bool:
    try:
        return bool(_verified(path))
    except Damaged:
        return False


def _sum(manifest: dict[str, tp.Any]) -> str:
    """The SHA-256 sum of what a manifest says."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    """Why something could not be written, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    known = (os.strerror(number) for number in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT))
    return next((words for words in known if words in text), " ".join(text.split())[:200])


def plain(settings: Settings) -> Settings:
    """`settings` as JSON gives them back."""
    return json.loads(json.dumps(dict(settings), default=lambda number: number.item()))


def _place(folder: Path, step: int) -> Path:
    return folder / f"{step:010d}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sha256(path: Path) -> str:
    """The SHA-256 sum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Makes the disk hold what was written to `path`, a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
