"""Named arrays in one file, by the safetensors package: it runs no code, and believes no length that its file
does not have. Here is what comes around it: sizes and sums before anything is read, and what an array must be
before it is used."""

import hashlib
import math
import sys
import typing as tp
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from sable.config.checks import short_repr
from sable.errors import SableError
from sable.files import read_regular, require_regular, write_atomically

_DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": ml_dtypes.bfloat16, "C64": "c8", "BOOL": "?"}
_DTYPES |= {
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U64": "u8",
    "U32": "u4",
    "U16": "u2",
    "U8": "u1",
}
_KNOWN = frozenset(np.dtype(dtype) for dtype in _DTYPES.values())


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Make these arrays the content of `path`, whole or not at all."""
    write_atomically(path, safetensors.numpy.save(_contiguous(arrays)))


def stream(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write these arrays to a new file without a second copy of them in memory."""
    try:
        safetensors.numpy.save_file(_contiguous(arrays), path)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from None


class Kind(tp.Protocol):
    """An array, or what is known of one before it is there."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> tp.Any: ...


def most_bytes(kinds: Mapping[str, Kind]) -> int:
    """Return the size that a file of such arrays does not exceed."""
    header = 2**20 + 2**10 * len(kinds)
    return header + sum(math.prod(kind.shape) * kind.dtype.itemsize for kind in kinds.values())


def read(path: Path, most: int = sys.maxsize, digest: str | None = None) -> dict[str, np.ndarray]:
    """Return the arrays in `path`, by name. A file of more than `most` bytes, or of another SHA-256 sum than
    `digest`, is refused before it is looked into."""
    try:
        content = read_regular(path, most)
        if digest is not None and digest != hashlib.sha256(content).hexdigest():
            raise ValueError("it is damaged: its sum is another than was noted when it was written")
        return {name: _array(entry) for name, entry in safetensors.deserialize(content)}
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error) or "it is damaged"
        raise SableError(f"{path} cannot be read: {' '.join(why.split())[:400]}") from None


def pick(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return those arrays of a file, of which nothing else is read."""
    try:
        require_regular(path)
        with safetensors.safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in names}
    except safetensors.SafetensorError as error:
        raise ValueError(" ".join(str(error).split())[:400]) from None


def to_storable(array: np.ndarray) -> np.ndarray:
    """Return an array of a type that the format has: of any other its bytes, along one more axis."""
    if array.dtype in _KNOWN:
        return array
    return np.frombuffer(array.tobytes(), np.uint8).reshape(*array.shape, array.dtype.itemsize)


def from_storable(array: np.ndarray, name: str) -> np.ndarray:
    """Return the array of the type of that name of which `to_storable` made this one."""
    dtype = np.dtype(name)
    return array if dtype in _KNOWN else np.frombuffer(array.tobytes(), dtype).reshape(array.shape[:-1])


def refuse_unfit(arrays: Mapping[str, np.ndarray], kinds: Mapping[str, Kind], where: str) -> None:
    """Refuse arrays of other names, shapes or types than these, and numbers that are not finite."""
    for name in sorted(arrays.keys() | kinds.keys()):
        holds, wants = (_words(one[name]) if name in one else "nothing" for one in (arrays, kinds))
        if holds != wants:
            raise SableError(
                f"{where}: {short_repr(name)} holds {holds}, and its configuration wants {wants}"
            )
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise SableError(f"{where}: {short_repr(name)} holds a number that is not finite")


def _words(kind: Kind) -> str:
    return f"{kind.dtype}{list(kind.shape)}"


def _contiguous(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays whose numbers lie one after another, which the package takes for granted."""
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _array(entry: dict[str, tp.Any]) -> np.ndarray:
    return np.frombuffer(entry["data"], np.dtype(_DTYPES[entry["dtype"]])).reshape(entry["shape"])
