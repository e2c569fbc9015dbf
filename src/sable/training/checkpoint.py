"""Checkpoints of a whole run: Orbax writes the arrays, a SHA-256 manifest proves they are still what was
written.

Orbax alone loads flipped bits without a word, so every load checks the manifest first. A checkpoint is
written beside its final place and renamed there, so that a folder with a step's name is always complete.
Where the newest has been damaged since, the newest that is whole is loaded, and the damage is named.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shlex
import shutil
import sys
import typing as tp
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sable.config.schema import resume_argv
from sable.errors import SableError
from sable.files import read_regular, require_unicode
from sable.training import processes, records
from sable.training.loggers.logger import METRICS
from sable.types import PyTree

FORMAT = 2
"""2 has a sum of the manifest itself, and the settings; 1, which is still read, had neither."""
MANIFEST = "manifest.json"
FOLDER = "checkpoints"
ARRAYS = "arrays"
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


def save(
    directory: Path,
    step: int,
    state: PyTree,
    facts: dict[str, tp.Any],
    settings: Settings | None = None,
    fingerprints: Mapping[str, str] | None = None,
    metrics: bytes | None = None,
) -> Path:
    """The path of a committed checkpoint of `state` in a run's directory; of the older ones, the newest is
    kept. Of several processes all must call it, and the first writes.

    `fingerprints` are those of the run's other files (see `records`), `metrics` what metrics.jsonl holds.
    """
    folder = directory / FOLDER
    target, partial = _place(folder, step), folder / f".partial-{step:010d}"
    leaves = named(state)
    # Orbax refuses arrays of size zero, which some environments' states have; nothing of theirs needs saving.
    arrays = {name: processes.to_host(_raw(leaf)) for name, leaf in leaves.items() if leaf.size}
    if not processes.leads():
        return target
    if target.exists() and _whole(target):  # an interruption right after a save
        return target
    manifest = {
        "format": FORMAT,
        "step": step,
        "facts": facts,
        "settings": plain(settings or {}),
        "records": records.describe(fingerprints or {}, metrics),
        "arrays": {name: _kind(leaf) for name, leaf in leaves.items()},
    }
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
    except (OSError, ValueError) as error:  # Orbax makes a ValueError of a full disk
        shutil.rmtree(partial, ignore_errors=True)
        names = settings or {}
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


def remove_leftovers(directory: Path) -> None:
    """Remove what saves that were killed left in a run's directory; for whoever holds it."""
    folder = directory / FOLDER
    for left in (*folder.glob(".partial-*"), *folder.glob(".removed-*")):
        shutil.rmtree(left, ignore_errors=True)


def _write(partial: Path, arrays: dict[str, tp.Any], manifest: dict[str, tp.Any]) -> None:
    """Fill the folder `partial` with a checkpoint, and make the disk hold it."""
    with _silent(), _checkpointer() as writer:
        writer.save((partial / ARRAYS).absolute(), arrays)
    digests = {str(path.relative_to(partial)): sha256(path) for path in _files(partial)}
    manifest = manifest | {"sha256": digests}
    (partial / MANIFEST).write_text(json.dumps(manifest | {"sum": _sum(manifest)}, indent=1))
    for path in (*partial.rglob("*"), partial):
        _sync(path)


def steps(folder: Path) -> list[int]:
    """The steps that have a committed checkpoint, in order."""
    return sorted(int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit())


def restore(directory: Path, like: PyTree, settings: Settings | None = None) -> Checkpoint:
    """The newest whole checkpoint of a run, checked against its manifest, with the structure and types of
    `like`."""
    leaves = named(like)
    kinds = {name: _kind(leaf) for name, leaf in leaves.items()}
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    saved = {name: jax.eval_shape(_raw, leaf) for name, leaf in leaves.items() if leaf.size}

    def load(path: Path, manifest: dict[str, tp.Any]) -> Checkpoint:
        import orbax.checkpoint as ocp

        _refuse_other_arrays(path, manifest["arrays"], kinds)
        wanted = {
            name: ocp.ArrayRestoreArgs(sharding=device, global_shape=leaf.shape)
            for name, leaf in saved.items()
        }
        with _checkpointer() as reader:
            arrays = reader.restore((path / ARRAYS).absolute(), item=saved, restore_args=wanted)
        restored = [
            _typed(arrays[name], leaf) if leaf.size else jnp.zeros(leaf.shape, leaf.dtype)
            for name, leaf in leaves.items()
        ]
        metrics = (path / METRICS).read_bytes() if METRICS in manifest["sha256"] else None
        return Checkpoint(jax.tree.unflatten(jax.tree.structure(like), restored), manifest["facts"], metrics)

    return _newest_whole(directory, settings, load)


def read(directory: Path, prefix: str, settings: Settings | None = None) -> dict[str, tp.Any]:
    """Those arrays of a run's newest whole checkpoint whose names begin so, checked against its manifest."""

    def load(path: Path, manifest: dict[str, tp.Any]) -> dict[str, tp.Any]:
        import orbax.checkpoint as ocp

        names = [name for name in manifest["arrays"] if name.startswith(prefix)]
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        with _checkpointer() as reader:
            return reader.restore(
                (path / ARRAYS).absolute(),
                item=dict.fromkeys(names, 0),
                restore_args=as_numpy,
                partial_restore=True,
            )

    return _newest_whole(directory, settings, load)


_Loaded = tp.TypeVar("_Loaded")


def _newest_whole(
    directory: Path, settings: Settings | None, load: tp.Callable[[Path, dict[str, tp.Any]], _Loaded]
) -> _Loaded:
    """What `load` makes of the newest checkpoint that is whole; a line on stderr for each that is not."""
    require_unicode(directory)  # for Orbax
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
            for problem in problems if processes.leads() else ():
                print(f"sable: {problem}; using the one before it, {path.name}", file=sys.stderr)
            if not problems and processes.leads() and records.goes_beyond(directory, manifest.get("records")):
                what = f"{directory / METRICS} goes on beyond its newest checkpoint, {path.name}"
                print(f"sable: {what}: a later one is gone, and this one is used", file=sys.stderr)
            return loaded
    others = f"; neither is any other of the {len(problems)} whole" if len(problems) > 1 else ""
    raise SableError(f"{problems[0]}{others}")


def _checkpointer() -> tp.Any:
    """Orbax, for this process alone: it would wait for the others."""
    import orbax.checkpoint as ocp  # slow to import, and needed only here

    if jax.process_count() == 1:
        return ocp.PyTreeCheckpointer()
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


@contextmanager
def _silent() -> Iterator[None]:
    """Orbax logs the tracebacks of its threads before it raises what went wrong; the latter is enough."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


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


def _typed(raw: Array, like: tp.Any) -> Array:
    """The inverse of `_raw`."""
    return jax.random.wrap_key_data(raw) if _is_key(like) else raw


def _kind(leaf: tp.Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _refuse_other_arrays(path: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            holds, wants = saved.get(name, "nothing"), wanted.get(name, "nothing")
            raise Damaged(
                f"checkpoint {path} does not fit this run: {name} holds {holds}, the run wants {wants}"
            )


def _refuse_other_settings(path: Path, saved: Settings, wanted: Settings) -> None:
    """Refuse what another run wrote. Fields that only one of them has came or went with a version, and the
    number of devices may change."""
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
        if manifest["step"] != int(path.name) or manifest["format"] not in (1, FORMAT):
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


def _whole(path: Path) -> bool:
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
