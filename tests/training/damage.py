"""What can happen to files: the corruptions that the tests of checkpoints and artefacts draw from."""

import random
import shutil
from pathlib import Path


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(rng: random.Random, newest: Path, older: Path) -> set[str]:
    """One to eight bits, anywhere in a file."""
    path = rng.choice([path for path in files(newest) if path.stat().st_size])
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return {path.name}


def truncate(rng: random.Random, newest: Path, older: Path) -> set[str]:
    path = rng.choice([path for path in files(newest) if path.stat().st_size])
    content = path.read_bytes()
    path.write_bytes(content[: rng.choice([0, len(content) - 1, rng.randrange(len(content))])])
    return {path.name}


def blank(rng: random.Random, newest: Path, older: Path) -> set[str]:
    """A stretch of zeros, as a file system may leave after a crash, or some bytes too many."""
    path = rng.choice([path for path in files(newest) if path.stat().st_size])
    content = bytearray(path.read_bytes())
    begin = rng.randrange(len(content))
    content[begin : begin + rng.randrange(1, 512)] = bytes(rng.randrange(1, 512))
    path.write_bytes(content)
    return {path.name}


def delete(rng: random.Random, newest: Path, older: Path) -> set[str]:
    """A file or a folder."""
    path = rng.choice([path for path in newest.rglob("*") if path.is_dir() or path.stat().st_size >= 0])
    if path.is_file():
        path.unlink()
        return {path.name}
    gone = {inner.name for inner in files(path)}
    shutil.rmtree(path)
    return gone


def swap(rng: random.Random, newest: Path, older: Path) -> set[str]:
    """Two files of the checkpoint, or one with its namesake of the older checkpoint, or all of them."""
    how = rng.randrange(3)
    if how == 0:
        a, b = rng.sample(files(newest), 2)
    elif how == 1:
        both = [path for path in files(newest) if (older / path.relative_to(newest)).is_file()]
        a = rng.choice(both)
        b = older / a.relative_to(newest)
        shutil.copyfile(b, a)
        return {a.name, b.name}
    else:
        shutil.rmtree(newest)
        shutil.copytree(older, newest)
        return {path.name for path in files(newest)}
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    return {a.name, b.name}


def add(rng: random.Random, newest: Path, older: Path) -> set[str]:
    """A file that nobody wrote."""
    place = rng.choice([newest, *(path for path in newest.rglob("*") if path.is_dir())])
    (place / "stranger").write_bytes(rng.randbytes(20))
    return {"stranger"}


CORRUPTIONS = (flip, flip, truncate, blank, delete, swap, add)
