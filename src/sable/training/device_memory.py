"""The device memory a run needs, counted before it runs, and the memory the device has."""

import contextlib
import math
import os
import re
import resource
import typing as tp
from contextlib import contextmanager
from pathlib import Path

import jax

from sable.config.schema import Config, RunConfig
from sable.errors import SableError
from sable.training.update import State
from sable.types import PyTree


class DoesNotFit(SableError):
    """A run that the device cannot hold: it needs so much at least."""

    def __init__(self, needed: int, total: int):
        super().__init__(
            f"this run needs at least {format_bytes(needed)} and the device has {format_bytes(total)}"
        )
        self.needed, self.total = needed, total


class TooManyEpisodes(DoesNotFit):
    """A run whose measurements the device cannot hold: fewer environments would not help."""

    def __init__(self, name: str, episodes: int, needed: int, total: int):
        super().__init__(needed, total)
        self.args = (
            f"{name}={episodes}: so many side by side need at least {format_bytes(needed)} and the device "
            f"has {format_bytes(total)}; take fewer",
        )


class OutOfMemory(SableError):
    """A device that had no more memory to give while it worked."""


@contextmanager
def explain_out_of_memory() -> tp.Iterator[None]:
    """Say in one line that the device's memory is full, and what would help."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        text = str(error)
        is_out_of_memory = any(
            words in text.lower() for words in ("resource_exhausted", "out of memory", "bad_alloc")
        )
        if not is_out_of_memory and not isinstance(error, MemoryError):
            raise
        asked = re.search(r"[Aa]llocat\w+ ([\d.]+ ?[A-Za-z]*)", text)
        raise OutOfMemory(
            f"the device ran out of memory{f' (it was asked for {asked[1]} more)' if asked else ''}; end "
            "what else uses it, or take fewer --num-envs or --num-seeds, or a shorter --rollout-length: "
            "`sable plan TASK` says what fits"
        ) from None


class Capacity(tp.NamedTuple):
    """The bytes of a device: all it could ever give, and what it can give now."""

    total: int
    available: int


def capacity() -> Capacity:
    """Return the bytes of one device here; for a CPU the machine's memory, the same however many devices it
    plays."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit:
        return Capacity(limit, limit)
    total = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *process_limits())
    return Capacity(total, min(_available() or total, total))


def process_limits(proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return the bytes this process may have by its own limit (ulimit -v) and by those of its container or
    job, whose groups lie one in another."""
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    limits = [own] if own != resource.RLIM_INFINITY else []
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    except OSError:
        groups = []
    for _, controllers, group in groups:
        if not controllers:
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        place = root / group.strip("/")
        for folder in (place, *place.parents):
            with contextlib.suppress(OSError, ValueError):  # "max": no limit
                limits.append(int((folder / name).read_text()))
    return limits


def program_bytes(compiled: tp.Any) -> int:
    """Return the bytes a compiled program holds on each device while it runs, by XLA's own account: what goes
    in, what comes out elsewhere, and its temporaries."""
    stats = compiled.memory_analysis()
    inputs, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes - stats.alias_size_in_bytes
    return inputs + outputs + stats.temp_size_in_bytes


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes that one device holds of arrays, or would of arrays of such shapes."""
    return sum(math.prod(_share(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def num_parameters(state: State) -> int:
    """Return the parameters of one seed."""
    params = state.run.learner.params
    return sum(leaf.size for leaf in jax.tree.leaves(params)) // state.run.halted.shape[0]


def refuse_beyond(needed: int) -> None:
    """Refuse what the device could not hold even if it held nothing else. A lower bound of what is needed is
    enough: whoever is refused could never have run."""
    total = capacity().total
    if needed > total:
        raise DoesNotFit(needed, total)


def refuse_episodes(state: State, run: RunConfig, num_envs: int, num_devices: int) -> None:
    """Refuse measurements of more episodes than the device could hold. Those of one measurement are played
    side by side, each in an environment like those of training."""
    each = tree_bytes(state.run.rollout_state) / num_envs / num_devices
    for name in ("evaluation_episodes", "absolute_episodes"):
        refuse_measuring(name, getattr(run, name), int(each * getattr(run, name)))


def refuse_measuring(name: str, episodes: int, needed: int) -> None:
    """Refuse to play so many episodes where the device could not hold what that needs."""
    total = capacity().total
    if needed > total:
        raise TooManyEpisodes(name, episodes, needed, total)


def summary(state: State, unit: tp.Any, config: Config, num_updates: int) -> str:
    """Return a run in one line: parameters, memory while `unit` runs, and the work before it."""
    seeds = f" x {len(config.run.seeds)} seeds" if len(config.run.seeds) > 1 else ""
    return (
        f"{num_parameters(state):,} parameters, "
        f"{format_bytes(program_bytes(unit))} of {format_bytes(capacity().total)}, "
        f"{num_updates:,} update{'s' * (num_updates != 1)} of "
        f"{config.system.num_envs * config.system.rollout_length:,} steps{seeds}"
    )


def format_bytes(num_bytes: float) -> str:
    """Return bytes as a reader likes them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.{1 if num_bytes < 100 * factor else 0}f} {unit}"
    return f"{num_bytes / 1e3:.0f} kB"


def _share(leaf: tp.Any) -> tuple[int, ...]:
    """Return the shape of the part of `leaf` that one device holds."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _available() -> int:
    """Return what Linux could give without swapping; 0 where it does not say."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
