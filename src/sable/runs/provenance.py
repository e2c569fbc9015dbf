"""Which code a process runs: the commit of its checkout, and a fingerprint of its source.

The fingerprint needs no git where the run is made, and leaves out what cannot change a result. With git, from
any later commit, it finds the commit the code was of; code that was never committed has none.
"""

import hashlib
import subprocess
import typing as tp
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE = (".py", ".toml")
"""What results depend on: code and recipes."""


def source(package: Path = PACKAGE) -> str:
    """Return a fingerprint of the package's code and recipes, as they are on disk."""
    files = (path for path in package.rglob("*") if path.suffix in SOURCE and path.is_file())
    return _fingerprint(
        (path.relative_to(package).as_posix(), _git_hash(path.read_bytes())) for path in files
    )


def commit_of(fingerprint: str, package: Path = PACKAGE) -> str | None:
    """Return the newest commit, from the current one back, whose code has this fingerprint; None where none
    has."""
    for commit in (_git_output(package, "rev-list", "HEAD") or "").split():
        entries = (_git_output(package, "ls-tree", "-r", commit, ".") or "").splitlines()
        named = ((entry.partition("\t")[2], entry.split()[2]) for entry in entries)
        if _fingerprint((name, blob) for name, blob in named if name.endswith(SOURCE)) == fingerprint:
            return commit
    return None


def git(package: Path = PACKAGE) -> dict[str, tp.Any] | None:
    """Return the commit of the checkout this package is part of, and whether it was changed; None outside
    one."""
    if _git_output(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # installed below somebody else's checkout
    commit = _git_output(package, "rev-parse", "HEAD")
    changes = _git_output(package, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes)} if commit else None


def _fingerprint(files: Iterable[tuple[str, str]]) -> str:
    listing = "".join(f"{blob} {name}\n" for name, blob in sorted(files))
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


def _git_hash(content: bytes) -> str:
    """Return what git calls a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _git_output(package: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(package), *arguments], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
