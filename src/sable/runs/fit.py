"""Other sizes of a run: the largest that fits, and the nearest to one that does not.

The memory a run needs grows with its environments along a straight line, or two where a rollout comes to
need more than learning does, and with its seeds in proportion from two of them on. So a few programs,
compiled and not run, tell how far it may go.
"""

import jax

from sable.config import resolve as settings
from sable.config.schema import RunConfig, SystemConfig, split_devices
from sable.envs.base import Env
from sable.errors import SableError
from sable.runs.dry_run import Rehearsal
from sable.training import device_memory as memory

Point = tuple[int, int]
"""A number of environments or seeds, and the bytes a run of that size needs."""

MARGIN = 0.95
"""How much of the memory a run may fill: allocators round up, and a process needs some for itself."""


def room() -> int:
    """The bytes a run may fill here."""
    return int(memory.capacity().available * MARGIN)


def estimate_envs(one: Rehearsal, needed: int, growing: int, room: int) -> int | None:
    """The number of environments that would fill the room if `growing` of the bytes grew with them; None
    where none do. Nothing is compiled."""
    if not growing:
        return None
    return _allowed("num_envs", one, one.config.num_envs * (room - needed + growing) // growing)


def estimate_seeds(one: Rehearsal, needed: int, room: int) -> int:
    """The number of seeds that would fill the room if all of them needed alike. Nothing is compiled."""
    return _allowed("num_seeds", one, room * len(one.run.seeds) // needed)


def most_envs(one: Rehearsal, other: Rehearsal, room: int) -> int | None:
    """The largest number of environments that fits, found from two runs that differ in nothing else and
    compiled to make sure; None where memory does not grow with them."""
    small, large = sorted((each.config.num_envs, each.needed) for each in (one, other))
    if small[1] >= large[1]:
        return None
    found = _fitting("num_envs", one, small, large, room)
    return found[0] if found else 0


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
    refused, bound, name, found = Rehearsal(env, run, config), room(), "num_seeds", None
    if len(run.seeds) > 1:
        found = _fitting(name, refused, (0, 0), (len(run.seeds), error.needed), bound)
    if found is None:
        name, found = "num_envs", _fewer_envs(refused, error.needed, bound)
    advice = "no number of environments fits; try a shorter rollout_length or a smaller network"
    if found is not None:
        advice = f"{name}={found[0]} would fit, with {memory.in_words(found[1])}"
    return SableError(f"{run.task}: {error}; {advice}")


def changed(
    run: RunConfig, config: SystemConfig, *, num_envs: int | None = None, num_seeds: int | None = None
) -> tuple[RunConfig, SystemConfig]:
    """The same configuration, checked again, with another number of environments or seeds."""
    seeds = run.seeds
    if num_seeds is not None:
        seeds = (seeds + tuple(set(range(num_seeds)) - set(seeds)))[:num_seeds]
    return settings.changed(run, config, {"seeds": seeds}, {} if num_envs is None else {"num_envs": num_envs})


def another(run: RunConfig, config: SystemConfig) -> tuple[RunConfig, SystemConfig]:
    """The same run with about a sixteenth of its environments, or with twice as many where that is not
    possible."""
    step = _steps(run, config)[1]
    fewer = max(config.num_envs // 16 // step * step, step)
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


def _fewer_envs(refused: Rehearsal, needed: int, room: int) -> Point | None:
    """The largest number of environments that fits, for a run that does not. What that needs may be told too
    low, so a line is drawn to it only from one that fits."""
    one, large = refused, (refused.config.num_envs, needed)
    while True:
        other = Rehearsal(one.env, *another(one.run, one.config))
        small = other.config.num_envs, _needed(other, room)
        if small[1] <= room or small[0] > large[0]:
            small, large = sorted([small, large])
            return _fitting("num_envs", refused, small, large, room)
        one, large = other, small


def _needed(run: Rehearsal, room: int) -> int:
    """The bytes a run needs; more than there are if it is too large even to be compiled."""
    try:
        return run.needed
    except jax.errors.JaxRuntimeError:
        return 2 * room


def _reach(one: Point, other: Point, room: int) -> float | None:
    """Where the line through two points comes to `room` bytes; None where it never does."""
    slope = (other[1] - one[1]) / (other[0] - one[0]) if other[0] != one[0] else 0.0
    return one[0] + (room - one[1]) / slope if slope > 0 else None


def _fitting(name: str, run: Rehearsal, small: Point, large: Point, room: int) -> Point | None:
    """The largest number of environments or seeds that fits: where the line says, if the program compiled
    for it agrees. Else that program ends the next line, whose inside lies above all counts in between, since
    they grow ever faster if not evenly."""
    for _ in range(3):
        number = _allowed(name, run, int(_reach(small, large, room) or 0))
        if number == 0 or number == large[0]:
            return large if number and large[1] <= room else None
        needed = _needed(Rehearsal(run.env, *changed(run.run, run.config, **{name: number})), room)
        if needed <= room:
            return number, needed
        large = (number, needed)
    return small if 0 < small[1] <= room else None


def _allowed(name: str, run: Rehearsal, most: int) -> int:
    """The largest number up to `most` that the configuration allows; 0 for none."""
    step = _steps(run.run, run.config)[name == "num_envs"]
    few, many = 0, most // step
    while few < many:  # too many for a setting, such as the replay's size, stay too many
        middle = (few + many + 1) // 2
        few, many = (middle, many) if _is_allowed(name, run, middle * step) else (few, middle - 1)
    return few * step


def _is_allowed(name: str, run: Rehearsal, number: int) -> bool:
    try:
        changed(run.run, run.config, **{name: number})
    except SableError:
        return False
    return True
