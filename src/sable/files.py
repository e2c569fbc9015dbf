"""Files as this package writes and reads them: whole or not at all, and never more than there may be."""

import contextlib
import fcntl
import os
import re
import stat
import sys
import typing as tp
from pathlib import Path

from sable.errors import SableError


@contextlib.contextmanager
def atomic_replacement(path: Path) -> tp.Iterator[Path]:
    """Yield a temporary file beside `path` that takes its place in the end, or is gone after an error. So a
    crash leaves the old content or the new, never a part; what a killed process leaves beside it is removed
    by the next that writes to the folder."""
    remove_leftovers(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _locked(temporary):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Make `data` the content of `path`, whole or not at all."""
    with atomic_replacement(path) as temporary:
        temporary.write_bytes(data)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files in `folder` whose writers were killed; a living one holds its own locked."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.\d+\.tmp", path.name):
            with contextlib.suppress(OSError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def read_regular(path: Path, most: int = sys.maxsize) -> bytes:
    """Return the content of a regular file of at most `most` bytes; anything else, which may have no end, is
    an OSError."""
    with _open_regular(path, most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def require_regular(path: Path, most: int = sys.maxsize) -> None:
    """Refuse, by an OSError, what `read_regular` would not read."""
    _open_regular(path, most).close()


def require_unicode(folder: Path) -> None:
    """Refuse a folder whose name is no text, where something is to be written that is given its name as one:
    bytes that are no UTF-8, or in a locale without UTF-8 all that is not ASCII."""
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:
        raise SableError(
            f"{folder}: the name of a run's folder is not UTF-8; choose another, or, if it is the locale "
            "that knows no UTF-8, set PYTHONUTF8=1"
        ) from None


def _open_regular(path: Path, most: int) -> tp.IO[bytes]:
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # or a FIFO would wait for a writer
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= most:
        return file
    file.close()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(None, "it is not a regular file")
    raise OSError(None, f"it holds {status.st_size} bytes, and can hold {most} at most")


def _locked(path: Path) -> tp.IO[bytes]:
    """Return the file at `path`, made and locked while it is open."""
    while True:
        file = path.open("wb")
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # it was taken for a leftover before it was locked
