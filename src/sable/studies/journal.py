"""Where a study's book of trials is kept: in a file that many processes write to, or wherever Optuna can."""

import fcntl
import re
import typing as tp
from pathlib import Path

from sable.errors import SableError


def open_storage(optuna: tp.Any, storage: str) -> tp.Any:
    """Open Optuna's storage at a URL, or the journal in a file."""
    try:
        if "://" in storage:
            return optuna.storages.get_storage(storage)
        path = str(Path(storage).expanduser())
        lock = tp.cast(tp.Any, _Lock(Path(path)))
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path, lock))
    except Exception as error:  # whatever a database may say
        masked = re.sub("//[^@/]*@", "//", storage)  # nobody's password
        raise SableError(f"cannot use storage {masked}: {' '.join(str(error).split())}") from None


class _Lock:
    """Keeps writers of a journal apart. Unlike Optuna's own locks it ends with its process, however that
    ends, and takes away a line left half-written, over which every reader would stumble for ever."""

    def __init__(self, journal: Path):
        self._journal, self._file = journal, None

    def acquire(self) -> bool:
        self._file = self._journal.with_name(self._journal.name + ".lock").open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        data = self._journal.read_bytes()
        if data and not data.endswith(b"\n"):
            with self._journal.open("rb+") as file:
                file.truncate(data.rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
