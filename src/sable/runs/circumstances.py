"""Where and with what a run's state came about, and whether it can go on to the same bits here. jax is
imported only where a process describes itself.
"""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import sys
import typing as tp
from collections.abc import Mapping, Sequence
from pathlib import Path

from sable.errors import SableError
from sable.installation import VERSION
from sable.runs import provenance

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "safetensors",
    "numpy",
    "jumanji",
    "jaxmarl",
    "brax",
)


def describe(num_devices: int = 1) -> dict[str, tp.Any]:
    """Return where and with what this process runs, on so many of the devices: what bit-exactness depends on,
    and what a reader will ask."""
    return {
        "started": now(),
        # Without the password that the address of a tuning storage may hold.
        "command": re.sub("//[^@/ ]*@", "//", shlex.join([_program(), *sys.argv[1:]])),
        "git": provenance.git(),
        "source": provenance.source(),
        "versions": {"python": platform.python_version(), "sable": VERSION}
        | {name: version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "device": _device(),
        "devices": num_devices,
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "thread_pool": _thread_pool(),
        "NPROC": os.environ.get("NPROC"),
    }


Circumstances = dict[str, tp.Any]
"""What the last bits of a run depend on, by what it is called in a sentence."""


def of(meta: Mapping[str, tp.Any]) -> Circumstances:
    """Return the circumstances of a description (see `describe`), those it has."""
    parts = (meta.get(name) for name in ("versions", "device"))
    versions, device = (part if isinstance(part, dict) else {} for part in parts)
    on_cpu = device.get("platform") == "cpu"
    circumstances = {
        "jax": versions.get("jax"),
        "jaxlib": versions.get("jaxlib"),
        "device kind": device.get("kind"),
        "CPU": meta.get("cpu") if on_cpu else None,
        "number of devices": meta.get("devices"),
        "thread pool": meta.get("thread_pool") if on_cpu else None,  # a GPU's results do not depend on it
        "source": meta.get("source"),
    }
    return {name: value for name, value in circumstances.items() if value is not None}


def earlier(meta: Mapping[str, tp.Any], facts: Mapping[str, tp.Any]) -> list[Circumstances]:
    """Return those of a run's start, by its meta.json, and those that its newest checkpoint has gone through,
    by its facts; one of an older version does not tell, and meta.json has the resumptions."""
    gone_through = facts.get("circumstances")
    return [of(meta), *(map(of, meta.get("resumed", [])) if gone_through is None else gone_through)]


def compare(directory: Path, earlier: Sequence[Circumstances], now: Circumstances, *, strict: bool) -> None:
    """Say in one line on stderr what is otherwise than it was earlier in the run there; with `strict` refuse
    it."""
    what = f"goes on with {', '.join(differences(earlier, now))}: it will not be bit-exact"
    if not any(earlier):
        what = "does not say where it ran so far: it may not be bit-exact"
    elif not differences(earlier, now):
        return
    if strict:
        raise SableError(f"{directory} {what}; go on where it ran before, or without --strict")
    print(f"sable: {directory} {what}", file=sys.stderr)


def differences(earlier: Sequence[Circumstances], now: Circumstances) -> list[str]:
    """Return what is otherwise now, as far as both say."""
    changes = []
    for name, value in now.items():
        others = dict.fromkeys(str(one[name]) for one in earlier if one.get(name, value) != value)
        changes += [f"{name} {value} instead of {' and '.join(others)}"] if others else []
    return changes


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "sable" if name == "__main__.py" else name


def version(package: str) -> str | None:
    """Return what is installed of it; None where it is only on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> dict[str, tp.Any]:
    import jax

    devices = jax.devices()
    return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}


def _cpu() -> str:
    """Return the processor's model: what one rounds, another may round otherwise."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if model := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return model[1].strip()
    return platform.processor() or platform.machine()


def _thread_pool() -> int | None:
    """Return threads of XLA's CPU pool, on which the last bits of a result depend."""
    value = os.environ.get("NPROC", "")
    if value.isdigit():
        return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def now() -> str:
    """Return the time, with its zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
