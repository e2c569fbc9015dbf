"""Other sizes of a run: the largest that fits, and the nearest to one that does not.

The memory a run needs grows with its environments along a straight line, and with its seeds in proportion
from two of them on, so that two or three programs, compiled and not run, tell how far it may go
(tests/experiments/test_plan.py holds the line against XLA's count).
"""

import dataclasses
from collections.abc import Callable

import jax

from sable import settings
from sable.config import RunConfig, SystemConfig, split_devices
from sable.envs.base import Env
from sable.errors import SableError
from sable.experiments.rehearsal import Rehearsal
from sable.training import memory

Point = tuple[int, int]
"""A number of environments or seeds, and the bytes a run of that size needs."""

MARGIN = 0.95
"""How much of the memory a run may fill: allocators round up, and a process needs some for itself."""


def room() -> int:
    """The bytes a run may fill here."""
    return int(memory.capacity().available * MARGIN)


def most_envs(one: Rehearsal, other: Rehearsal, room: int) -> int | None:
    """The largest number of environments that fits, by two runs that differ in nothing else; None where
    memory does not grow with them."""
    run, config = one.run, one.config
    reach = _reach((config.num_envs, one.needed), (other.config.num_envs, other.needed), room)
    if reach is None:
        return None
    step = _steps(run, config)[1]
    most = max(int(reach) // step, 0)
    least = min(config.num_envs // step, most)
    while least < most:  # too many for a setting, such as the replay's size, stay too many
        middle = (least + most + 1) // 2
        least, most = (middle, most) if _allowed(run, config, middle * step) else (least, middle - 1)
    return least * step


def most_seeds(one: Rehearsal, room: int) -> int:
    """The largest number of seeds that fits; a seed alone may need less than its share of several."""
    several = one
    if len(one.run.seeds) == 1:
        several = Rehearsal(one.env, *changed(one.run, one.config, num_seeds=2))
    step = _steps(several.run, several.config)[0]
    most = room * len(several.run.seeds) // several.needed // step * step
    return most if most > 1 else int(one.needed <= room)


def refusal(error: memory.DoesNotFit, env: Env, run: RunConfig, config: SystemConfig) -> SableError:
    """The same refusal with the nearest setting that fits, which was compiled to make sure."""
    seeds, bound = len(run.seeds), room()

    def needed(**sizes: int) -> int:
        return Rehearsal(env, *changed(run, config, **sizes)).needed

    found = None
    if seeds > 1:
        end = (seeds, error.needed)
        found = _nearest("num_seeds", (0, 0), end, _steps(run, config)[0], bound, needed)
    if found is None:
        _, small = another(run, config)
        start, end = (small.num_envs, needed(num_envs=small.num_envs)), (config.num_envs, error.needed)
        found = _nearest("num_envs", start, end, _steps(run, config)[1], bound, needed)
    advice = found or "no number of environments fits; try a shorter rollout_length or a smaller network"
    return SableError(f"{run.task}: {error}; {advice}")


def changed(
    run: RunConfig, config: SystemConfig, *, num_envs: int | None = None, num_seeds: int | None = None
) -> tuple[RunConfig, SystemConfig]:
    """The same configuration, checked again, with another number of environments or seeds."""
    run_fields, fields = dataclasses.asdict(run), dataclasses.asdict(config)
    if num_seeds is not None:
        run_fields["seeds"] = (run.seeds + tuple(set(range(num_seeds)) - set(run.seeds)))[:num_seeds]
    return settings.resolve(run_fields, fields if num_envs is None else fields | {"num_envs": num_envs})


def another(run: RunConfig, config: SystemConfig) -> tuple[RunConfig, SystemConfig]:
    """The same run with about an eighth of its environments, or with twice as many where that is not
    possible."""
    step = _steps(run, config)[1]
    fewer = max(config.num_envs // 8 // step * step, step)
    try:
        if fewer < config.num_envs:
            return changed(run, config, num_envs=fewer)
    except SableError:  # too few for something else
        pass
    return changed(run, config, num_envs=2 * config.num_envs)


def _steps(run: RunConfig, config: SystemConfig) -> tuple[int, int]:
    """What seeds, and environments, must be multiples of, for devices and minibatches to share them."""
    along_seeds, along_envs = split_devices(run.devices or jax.device_count(), len(run.seeds), config)
    return along_seeds, along_envs * getattr(config, "num_minibatches", 1)


def _reach(one: Point, other: Point, room: int) -> float | None:
    """Where the line through two points comes to `room` bytes; None where it never does."""
    slope = (other[1] - one[1]) / (other[0] - one[0]) if other[0] != one[0] else 0.0
    return one[0] + (room - one[1]) / slope if slope > 0 else None


def _allowed(run: RunConfig, config: SystemConfig, num_envs: int) -> bool:
    try:
        changed(run, config, num_envs=num_envs)
    except SableError:
        return False
    return True


def _nearest(
    name: str, small: Point, large: Point, step: int, room: int, needed: Callable[..., int]
) -> str | None:
    """The setting nearest to `large` that fits, in words, by the line from `small` and then by the count of
    the program at the place it points to."""
    for _ in range(3):
        number = int(_reach(small, large, room) or 0) // step * step
        if number < step or number == large[0]:
            return None
        num_bytes = needed(**{name: number})
        if num_bytes <= room:
            return f"{name}={number} would fit, with {memory.in_words(num_bytes)}"
        large = (number, num_bytes)
    return None
