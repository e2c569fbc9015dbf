"""Checkpoints of a whole run: Orbax writes the arrays, a SHA-256 manifest proves they are still what was
written.

Orbax alone loads flipped bits without a word, so every load checks the manifest first. A checkpoint is
written beside its final
place and renamed there, so that a folder with a step's name is always complete.
"""

import hashlib
import json
import os
import shutil
import typing as tp
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sable.errors import SableError
from sable.training import processes
from sable.types import PyTree

FORMAT = 1
MANIFEST = "manifest.json"
FOLDER = "checkpoints"
ARRAYS = "arrays"
KEEP = 2


class Checkpoint(tp.NamedTuple):
    """A restored checkpoint."""

    state: PyTree
    facts: dict[str, tp.Any]


def save(directory: Path, step: int, state: PyTree, facts: dict[str, tp.Any]) -> Path:
    """The path of a committed checkpoint of `state` in a run's directory; of the older ones, the newest is
    kept. Of several processes all must call it, and the first writes."""
    folder = directory / FOLDER
    target, partial = folder / f"{step:010d}", folder / f".partial-{step:010d}"
    leaves = named(state)
    # Orbax refuses arrays of size zero, which some environments' states have; nothing of theirs needs saving.
    arrays = {name: processes.to_host(_raw(leaf)) for name, leaf in leaves.items() if leaf.size}
    if not processes.leads():
        return target
    if target.exists():  # an interruption right after a save
        return target
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with _checkpointer() as writer:
        writer.save((partial / ARRAYS).absolute(), arrays)
    digests = {str(path.relative_to(partial)): sha256(path) for path in _files(partial)}
    kinds = {name: _kind(leaf) for name, leaf in leaves.items()}
    manifest = {"format": FORMAT, "step": step, "facts": facts, "arrays": kinds, "sha256": digests}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*partial.rglob("*"), partial):
        _sync(path)
    partial.rename(target)
    _sync(folder)
    for old in steps(folder)[:-KEEP]:
        shutil.rmtree(folder / f"{old:010d}")
    return target


def steps(folder: Path) -> list[int]:
    """The steps that have a committed checkpoint, in order."""
    return sorted(int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit())


def restore(directory: Path, like: PyTree) -> Checkpoint:
    """The newest checkpoint of a run, checked against its manifest, with the structure and types of
    `like`."""
    path = _newest(directory)
    manifest = _verified(path)
    leaves = named(like)
    _refuse_other_arrays(path, manifest["arrays"], {name: _kind(leaf) for name, leaf in leaves.items()})
    import orbax.checkpoint as ocp

    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    saved = {name: jax.eval_shape(_raw, leaf) for name, leaf in leaves.items() if leaf.size}
    wanted = {
        name: ocp.ArrayRestoreArgs(sharding=device, global_shape=leaf.shape) for name, leaf in saved.items()
    }
    with _checkpointer() as reader:
        arrays = reader.restore((path / ARRAYS).absolute(), item=saved, restore_args=wanted)
    restored = [
        _typed(arrays[name], leaf) if leaf.size else jnp.zeros(leaf.shape, leaf.dtype)
        for name, leaf in leaves.items()
    ]
    return Checkpoint(jax.tree.unflatten(jax.tree.structure(like), restored), manifest["facts"])


def read(directory: Path, prefix: str) -> dict[str, tp.Any]:
    """Those arrays of a run's newest checkpoint whose names begin so, checked against its manifest."""
    path = _newest(directory)
    names = [name for name in _verified(path)["arrays"] if name.startswith(prefix)]
    import orbax.checkpoint as ocp

    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    with _checkpointer() as reader:
        return reader.restore(
            (path / ARRAYS).absolute(),
            item=dict.fromkeys(names, 0),
            restore_args=as_numpy,
            partial_restore=True,
        )


def _newest(directory: Path) -> Path:
    """The newest committed checkpoint of a run."""
    committed = steps(directory / FOLDER)
    if not committed:
        raise SableError(
            f"{directory} holds no checkpoint: the run stopped before its first one; go on with --resume"
        )
    return directory / FOLDER / f"{committed[-1]:010d}"


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
            raise SableError(
                f"checkpoint {path} does not fit this run: {name} holds {holds}, the run wants {wants}"
            )


def _verified(path: Path) -> dict[str, tp.Any]:
    """The manifest of the checkpoint at `path`, once every file has proved to be as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        digests, step = manifest["sha256"], manifest["step"]
        if manifest["format"] != FORMAT or step != int(path.name):
            raise ValueError
        if not all(isinstance(manifest[name], dict) for name in ("facts", "arrays", "sha256")):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        raise SableError(f"checkpoint {path} is damaged: {MANIFEST} is missing or unreadable") from None
    found = {str(file.relative_to(path)) for file in _files(path)} - {MANIFEST}
    for name in sorted(found.symmetric_difference(digests)):
        what = "missing" if name in digests else "foreign"
        raise SableError(f"checkpoint {path} is damaged: {name} is {what}")
    for name, digest in digests.items():
        if sha256(path / name) != digest:
            raise SableError(f"checkpoint {path} is damaged: {name} is not what was written")
    return manifest


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
