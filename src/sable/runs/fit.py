"""Other sizes of a run: the largest that fits, and the nearest to one that does not.

The memory a run needs grows with its environments along a straight line, or two where a rollout comes to
need more than learning does, and with its seeds in proportion from two of them on. So a few programs,
compiled and not run, tell how far it may go.
"""

import jax

from sable.config import resolve as settings
from sable.config.schema import Config, split_devices
from sable.envs.base import Env
from sable.errors import SableError
from sable.runs.dry_run import DryRun
from sable.training import device_memory as memory

Point = tuple[int, int]
"""A number of environments or seeds, and the bytes a run of that size needs."""

MARGIN = 0.95
"""How much of the memory a run may fill: allocators round up, and a process needs some for itself."""


def memory_limit() -> int:
    """Return the bytes a run may fill here."""
    return int(memory.capacity().available * MARGIN)


def estimate_envs(one: DryRun, needed: int, growing: int, memory_limit: int) -> int | None:
    """Return the number of environments that would fill the room if `growing` of the bytes grew with them;
    None where none do. Nothing is compiled."""
    if not growing:
        return None
    return _largest_allowed(
        "num_envs", one, one.config.system.num_envs * (memory_limit - needed + growing) // growing
    )


def estimate_seeds(one: DryRun, needed: int, memory_limit: int) -> int:
    """Return the number of seeds that would fill the room if all of them needed alike. Nothing is
    compiled."""
    return _largest_allowed("num_seeds", one, memory_limit * len(one.config.run.seeds) // needed)


def max_envs(one: DryRun, other: DryRun, memory_limit: int) -> int | None:
    """Return the largest number of environments that fits, found from two runs that differ in nothing else
    and compiled to make sure; None where memory does not grow with them."""
    small, large = sorted((each.config.system.num_envs, each.needed) for each in (one, other))
    if small[1] >= large[1]:
        return None
    fit = _largest_fitting("num_envs", one, small, large, memory_limit)
    return fit[0] if fit else 0


def max_seeds(one: DryRun, memory_limit: int) -> int:
    """Return the largest number of seeds that fits; a seed alone may need less than its share of several."""
    several = one
    if len(one.config.run.seeds) == 1:
        several = DryRun(one.env, resized(one.config, num_seeds=2))
    step = _steps(several.config)[0]
    most = memory_limit * len(several.config.run.seeds) // several.needed // step * step
    return most if most > 1 else int(one.needed <= memory_limit)


def refusal(error: memory.DoesNotFit, env: Env, config: Config) -> SableError:
    """Return the same refusal with the nearest setting that fits, which was compiled to make sure."""
    refused, bound, name, fit = DryRun(env, config), memory_limit(), "num_seeds", None
    if len(config.run.seeds) > 1:
        fit = _largest_fitting(name, refused, (0, 0), (len(config.run.seeds), error.needed), bound)
    if fit is None:
        name, fit = "num_envs", _fewer_envs(refused, error.needed, bound)
    advice = "no number of environments fits; try a shorter rollout_length or a smaller network"
    if fit is not None:
        advice = f"{name}={fit[0]} would fit, with {memory.format_bytes(fit[1])}"
    return SableError(f"{config.run.task}: {error}; {advice}")


def resized(config: Config, *, num_envs: int | None = None, num_seeds: int | None = None) -> Config:
    """Return the same configuration, checked again, with another number of environments or seeds."""
    seeds = config.run.seeds
    if num_seeds is not None:
        seeds = (seeds + tuple(set(range(num_seeds)) - set(seeds)))[:num_seeds]
    return settings.replace_fields(
        config, {"seeds": seeds}, {} if num_envs is None else {"num_envs": num_envs}
    )


def other_size(config: Config) -> Config:
    """Return the same run with about a sixteenth of its environments, or with twice as many where that is not
    possible."""
    step = _steps(config)[1]
    fewer = max(config.system.num_envs // 16 // step * step, step)
    try:
        if fewer < config.system.num_envs:
            return resized(config, num_envs=fewer)
    except SableError:  # too few for something else
        pass
    return resized(config, num_envs=2 * config.system.num_envs)


def _steps(config: Config) -> tuple[int, int]:
    """Return what seeds, and environments, must be multiples of, for devices and minibatches to share
    them."""
    along_seeds, along_envs = split_devices(
        config.run.devices or jax.device_count(), len(config.run.seeds), config.system
    )
    return along_seeds, along_envs * getattr(config.system, "num_minibatches", 1)


def _fewer_envs(refused: DryRun, needed: int, memory_limit: int) -> Point | None:
    """Return the largest number of environments that fits, for a run that does not. What that needs may be
    told too low, so a line is drawn to it only from one that fits."""
    one, large = refused, (refused.config.system.num_envs, needed)
    while True:
        other = DryRun(one.env, other_size(one.config))
        small = other.config.system.num_envs, _memory_needed(other, memory_limit)
        if small[1] <= memory_limit or small[0] > large[0]:
            small, large = sorted([small, large])
            return _largest_fitting("num_envs", refused, small, large, memory_limit)
        one, large = other, small


def _memory_needed(run: DryRun, memory_limit: int) -> int:
    """Return the bytes a run needs; more than there are if it is too large even to be compiled."""
    try:
        return run.needed
    except jax.errors.JaxRuntimeError:
        return 2 * memory_limit


def _extrapolate(one: Point, other: Point, memory_limit: int) -> float | None:
    """Return where the line through two points comes to `memory_limit` bytes; None where it never does."""
    slope = (other[1] - one[1]) / (other[0] - one[0]) if other[0] != one[0] else 0.0
    return one[0] + (memory_limit - one[1]) / slope if slope > 0 else None


def _largest_fitting(name: str, run: DryRun, small: Point, large: Point, memory_limit: int) -> Point | None:
    """Return the largest number of environments or seeds that fits: where the line says, if the program
    compiled for it agrees. Else that program ends the next line, whose inside lies above all counts in
    between, since they grow ever faster if not evenly."""
    for _ in range(3):
        number = _largest_allowed(name, run, int(_extrapolate(small, large, memory_limit) or 0))
        if number == 0 or number == large[0]:
            return large if number and large[1] <= memory_limit else None
        needed = _memory_needed(DryRun(run.env, resized(run.config, **{name: number})), memory_limit)
        if needed <= memory_limit:
            return number, needed
        large = (number, needed)
    return small if 0 < small[1] <= memory_limit else None


def _largest_allowed(name: str, run: DryRun, most: int) -> int:
    """Return the largest number up to `most` that the configuration allows; 0 for none."""
    step = _steps(run.config)[name == "num_envs"]
    few, many = 0, most // step
    while few < many:  # too many for a setting, such as the replay's size, stay too many
        middle = (few + many + 1) // 2
        few, many = (middle, many) if _is_allowed(name, run, middle * step) else (few, middle - 1)
    return few * step


def _is_allowed(name: str, run: DryRun, number: int) -> bool:
    try:
        resized(run.config, **{name: number})
    except SableError:
        return False
    return True
