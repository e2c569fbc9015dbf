"""Named arrays in one file, in the safetensors format: a length, a JSON header, the raw numbers. Reading runs
no code, and a SHA-256 sum of the numbers, kept in the header where we wrote it, is checked first."""

import hashlib
import json
import math
import sys
import typing as tp
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from sable.config.checks import shown
from sable.errors import SableError
from sable.files import read_regular, write_atomically

_KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U32": "<u4", "U8": "|u1"}
_KINDS |= {"BOOL": "|b1", "U64": "<u8", "I16": "<i2", "U16": "<u2", "I8": "|i1", "BF16": ml_dtypes.bfloat16}
_NAMES = {np.dtype(kind): name for name, kind in _KINDS.items()}


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Make these arrays the content of `path`, whole or not at all."""
    header, parts, offset = {}, [], 0
    for name, array in sorted(arrays.items()):
        part = np.ascontiguousarray(array).tobytes()
        place = [offset, offset := offset + len(part)]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": place}
        parts.append(part)
    data = b"".join(parts)
    header["__metadata__"] = {"sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_atomically(path, len(text).to_bytes(8, "little") + text + data)


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
    """The arrays in `path`, by name; anything not as it was written is refused, and before that a file of
    more than `most` bytes, or of another SHA-256 sum than `digest`."""
    try:
        content = read_regular(path, most)
        if digest is not None and digest != hashlib.sha256(content).hexdigest():
            raise ValueError("it is damaged: its sum is another than was noted when it was written")
        begin = 8 + int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8:begin]), content[begin:]
        digest = header.pop("__metadata__", {}).get("sha256")  # other programs write none
        if len(content) < begin or digest not in (None, hashlib.sha256(data).hexdigest()):
            raise ValueError("its numbers are not what was written")
        return {name: _array(entry, data) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error) or "it is damaged"
        raise SableError(f"{path} cannot be read: {' '.join(why.split())}") from None


def refuse_unfit(arrays: Mapping[str, np.ndarray], kinds: Mapping[str, Kind], where: str) -> None:
    """Refuse arrays of other names, shapes or types than these, and numbers that are not finite."""
    for name in sorted(arrays.keys() | kinds.keys()):
        holds, wants = (_words(one[name]) if name in one else "nothing" for one in (arrays, kinds))
        if holds != wants:
            raise SableError(f"{where}: {shown(name)} holds {holds}, and its configuration wants {wants}")
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise SableError(f"{where}: {shown(name)} holds a number that is not finite")


def _words(kind: Kind) -> str:
    return f"{kind.dtype}{list(kind.shape)}"


def _array(entry: dict[str, tp.Any], data: bytes) -> np.ndarray:
    kind, shape, (begin, end) = np.dtype(_KINDS[entry["dtype"]]), tuple(entry["shape"]), entry["data_offsets"]
    if not 0 <= begin <= end <= len(data) or math.prod(shape) * kind.itemsize != end - begin:
        raise ValueError("an array does not fit its place")
    return np.frombuffer(data[begin:end], kind).reshape(shape)
