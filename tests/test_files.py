"""Files are written whole or not at all, read only if they are files, and no killed writer leaves a trace."""

import os
import signal
import subprocess
import sys

import pytest

from sable.files import atomic_replacement, read_regular, remove_leftovers, write_atomically


def killed_while_writing(path) -> None:
    """A process is killed between the first byte of `path` and the last."""
    code = f"""
import os, signal, time
from pathlib import Path
from sable.files import atomic_replacement
with atomic_replacement(Path({str(path)!r})) as temporary:
    temporary.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL


def test_what_a_killed_writer_leaves_is_gone_at_the_next_start(tmp_path):
    path = tmp_path / "meta.json"
    path.write_bytes(b"whole")
    killed_while_writing(path)
    assert len(list(tmp_path.iterdir())) == 2 and path.read_bytes() == b"whole"
    write_atomically(tmp_path / "config.json", b"new")  # of any file there
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "meta.json"]


def test_what_a_living_writer_writes_stays(tmp_path):
    (tmp_path / ".notes.tmp").write_text("not one of ours")
    with atomic_replacement(tmp_path / "a") as temporary:
        temporary.write_bytes(b"a")
        remove_leftovers(tmp_path)
        write_atomically(tmp_path / "b", b"b")
        assert temporary.exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == [".notes.tmp", "a", "b"]
    assert (tmp_path / "a").read_bytes() == b"a"


def test_an_error_leaves_the_old_content_and_nothing_else(tmp_path):
    write_atomically(tmp_path / "a", b"old")
    with pytest.raises(ZeroDivisionError), atomic_replacement(tmp_path / "a") as temporary:
        temporary.write_bytes(b"new")
        _ = 1 / 0
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


def test_only_files_of_a_size_are_read(tmp_path):
    write_atomically(tmp_path / "a", b"12345")
    assert read_regular(tmp_path / "a", 5) == b"12345"
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    for name, why in [
        ("fifo", "not a regular file"),
        ("zero", "not a regular file"),
        ("sparse", "it holds 1099511627776 bytes, and can hold 5 at most"),
        (".", "directory"),
        ("none", "No such file"),
    ]:
        with pytest.raises(OSError) as error:
            read_regular(tmp_path / name, 5)
        assert why in str(error.value)
