"""Every setting there is: what to run (RunConfig) and each system's own numbers.

Imports no jax, so that mistakes answer at once. A setting comes from, later ones winning: the dataclass's
default, the recipe for the suite, the recipe for the task, what the user gave.
"""

import contextlib
import dataclasses
import functools
import importlib.resources
import json
import math
import numbers
import tomllib
import typing as tp
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sable.errors import SableError, suggest

Fields = Mapping[str, tp.Any]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to train, for how long, and how to measure it. The defaults are the paper's protocol."""

    task: str = "lbf/2s-8x8-2p-2f-coop"
    """Task name with its suite, as `sable list` prints it."""
    system: str = "sable"
    """Learning system."""
    seeds: tuple[int, ...] = (0,)
    """Seeds to train side by side in one program."""
    total_steps: int = 20_000_000
    """Environment steps per seed, rounded down to whole updates (at least one)."""
    num_evaluations: int = 122
    """Evaluations, evenly spaced over training."""
    evaluation_episodes: int = 32
    """Episodes per evaluation and seed."""
    absolute_episodes: int = 320
    """Episodes on which the best parameters are measured at the end (the absolute metric)."""
    pool_size: int = 0
    """Start states generated per rollout for episodes that begin inside it; 0: as many as environments."""
    options: tuple[str, ...] = ()
    """Options of the task as name=value, such as reward=mean."""
    precision: tp.Literal["default", "high", "highest"] = "default"
    """Precision of float32 matrix products on accelerators (tf32 or full)."""
    deterministic: bool = False
    """Make GPU runs bit-exact (slower); CPU runs always are."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Proximal policy optimisation: what every on-policy system shares."""

    num_envs: int = 128
    """Environments stepped side by side, per seed."""
    rollout_length: int = 128
    """Environment steps between two updates."""
    num_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 2
    """Minibatches per epoch; must divide the number of environments."""
    learning_rate: float = 2.5e-4
    """Adam's step size."""
    learning_rate_horizon: int = 0
    """Environment steps over which the learning rate falls linearly to zero; 0 keeps it constant."""
    discount: float = 0.99
    """Discount of future reward."""
    gae_lambda: float = 0.9
    """Decay of the generalised advantage estimate."""
    clip_eps: float = 0.2
    """Clipping of the probability ratio and of the value's change."""
    entropy_weight: float = 0.01
    """Weight of the entropy bonus."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Global norm to which gradients are clipped."""
    bootstrap_time_limits: bool = False
    """Go on valuing the future where an episode only ran out of time. The paper does not."""


@dataclass(frozen=True, kw_only=True)
class SableConfig(PPOConfig):
    """Sable: a retention network over time steps and agents, trained by PPO."""

    embed_dim: int = 64
    """Width of the network; a multiple of the number of heads."""
    num_heads: int = 1
    """Retention heads, each with its own decay."""
    num_blocks: int = 1
    """Encoder blocks, and decoder blocks."""
    decay_scaling: float = 0.8
    """Scales every head's decay: 0 forgets at once, 1 remembers longest."""
    memory: bool = True
    """Remember the whole episode; without it every time step stands alone."""
    agent_order: tp.Literal["per_rollout", "per_epoch"] = "per_rollout"
    """When agents are reordered: per rollout (acting, learning) or per epoch (learning only, the paper's)."""
    agent_id: bool = True
    """Learn an embedding per agent; ignored where the views already carry identity (MABrax)."""


SystemConfig: tp.TypeAlias = SableConfig
SYSTEM_CONFIGS: dict[str, type[SystemConfig]] = {"sable": SableConfig}

QUICK: dict[str, tp.Any] = {
    "total_steps": 500_000,
    "num_evaluations": 20,
    "num_envs": 32,
    "embed_dim": 64,
    "num_heads": 1,
    "num_blocks": 1,
    "decay_scaling": 0.8,
}
"""What `sable train` without a TASK sets on top of the recipe: a budget and a network fit for a CPU."""

FORMAT = 1
"""Version of the dictionary that `to_dict` writes."""


def resolve(run_fields: Fields, system_fields: Fields) -> tuple[RunConfig, SystemConfig]:
    """The checked configuration: defaults <- recipe for the suite <- recipe for the task <- given fields."""
    system_class = system_config(run_fields.get("system", RunConfig.system))
    _refuse_unknown(run_fields, RunConfig, "of a run")
    _refuse_unknown(system_fields, system_class, f"of system {run_fields.get('system', RunConfig.system)!r}")
    run = _build(RunConfig, run_fields)
    run_recipe, system_recipe = split(recipe(run.system, run.task), run.system)
    run = _build(RunConfig, {**run_recipe, **run_fields})
    config = _build(system_class, {**system_recipe, **system_fields})
    _check_together(config)
    return run, config


def split(fields: Fields, system: str) -> tuple[dict[str, tp.Any], dict[str, tp.Any]]:
    """The fields of the run and those of its system; a name that is neither is refused with the nearest."""
    run_names, system_names = field_names(RunConfig), field_names(system_config(system))
    for name in fields:
        if name not in run_names + system_names:
            raise SableError(f"unknown field {name!r}{suggest(name, run_names + system_names)}")
    run_fields = {name: value for name, value in fields.items() if name in run_names}
    return run_fields, {name: value for name, value in fields.items() if name in system_names}


def system_config(system: tp.Any) -> type[SystemConfig]:
    """The configuration class of the system called `system`."""
    if not isinstance(system, str) or system not in SYSTEM_CONFIGS:
        known = ", ".join(SYSTEM_CONFIGS)
        raise SableError(
            f"unknown system {system!r}; known systems: {known}{suggest(str(system), SYSTEM_CONFIGS)}"
        )
    return SYSTEM_CONFIGS[system]


def field_names(cls: type) -> list[str]:
    """The names of a configuration class's fields, in order."""
    return [field.name for field in dataclasses.fields(cls)]


def recipe(system: str, task: str) -> dict[str, tp.Any]:
    """The tuned values for a task: those of its suite, overridden by its own."""
    tables = recipes(system)
    return tables.get(task.partition("/")[0], {}) | tables.get(task, {})


@functools.cache
def recipes(system: str) -> dict[str, dict[str, tp.Any]]:
    """Every recipe of a system, by suite or task; empty where none is shipped."""
    file = importlib.resources.files("sable").joinpath("recipes", f"{system}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def search_space(system: str) -> dict[str, list[tp.Any]]:
    """The values the paper searched for a system's fields."""
    file = importlib.resources.files("sable").joinpath("recipes", "search.toml")
    return tomllib.loads(file.read_text(encoding="utf-8")).get(system, {})


def to_dict(run: RunConfig, config: SystemConfig) -> dict[str, tp.Any]:
    """The configuration as plain data; `from_dict` is its exact inverse, also through JSON."""
    return {"format": FORMAT, "run": dataclasses.asdict(run), "config": dataclasses.asdict(config)}


def to_json(run: RunConfig, config: SystemConfig) -> str:
    """The configuration as JSON text."""
    return json.dumps(to_dict(run, config), indent=2)


def from_dict(data: tp.Any) -> tuple[RunConfig, SystemConfig]:
    """The configuration that `to_dict` made `data` from; anything else is refused."""
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("run"), dict)
        or not isinstance(data.get("config"), dict)
    ):
        raise SableError("not a configuration of sable: expected an object with format, run and config")
    if data.get("format") != FORMAT:
        raise SableError(
            f"configuration format {data.get('format')!r} is not {FORMAT}, which this version reads"
        )
    system_class = system_config(data["run"].get("system"))
    for fields, cls in ((data["run"], RunConfig), (data["config"], system_class)):
        _refuse_unknown(fields, cls, "in this configuration")
        missing = [name for name in field_names(cls) if name not in fields]
        if missing:
            raise SableError(f"damaged configuration: field {missing[0]!r} is missing")
    run, config = _build(RunConfig, data["run"]), _build(system_class, data["config"])
    _check_together(config)
    return run, config


_Class = tp.TypeVar("_Class")


def _build(cls: type[_Class], fields: Fields) -> _Class:
    """An instance of `cls` with `fields` checked and brought to their exact types."""
    types = {field.name: field.type for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    return cls(**{name: _checked(name, types[name], value) for name, value in fields.items()})


def _refuse_unknown(fields: Fields, cls: type, where: str) -> None:
    for name in fields:
        if name not in field_names(cls):
            raise SableError(f"unknown field {name!r} {where}{suggest(name, field_names(cls))}")


def _check_together(config: SystemConfig) -> None:
    """Refuse fields that are fine alone but not with one another."""
    if config.num_envs % config.num_minibatches:
        raise SableError(
            f"num_envs={config.num_envs} cannot be split into num_minibatches={config.num_minibatches} "
            "equal parts; choose one that divides the other"
        )
    if config.embed_dim % config.num_heads:
        raise SableError(
            f"embed_dim={config.embed_dim} cannot be split into num_heads={config.num_heads} equal heads; "
            "choose one that divides the other"
        )


def _checked(name: str, kind: tp.Any, value: tp.Any) -> tp.Any:
    """`value` in the exact type of field `name`, or an error that says what was given and what would work."""
    exact = _exact(kind, value)
    holds, condition = _RANGES.get(name, _ANYTHING)
    if exact is None or not holds(exact):
        raise SableError(f"{name}={value!r}: expected {' '.join(filter(None, (_describe(kind), condition)))}")
    return exact


def _exact(kind: tp.Any, value: tp.Any) -> tp.Any:
    """`value` as `kind`, or None where it is of another type; a bool is no number, an int may be a float."""
    if tp.get_origin(kind) is tp.Literal:
        return value if isinstance(value, str) and value in tp.get_args(kind) else None
    if tp.get_origin(kind) is tuple:
        if not isinstance(value, (tuple, list, range)):
            return None
        items = tuple(_exact(tp.get_args(kind)[0], item) for item in value)
        return None if None in items else items
    if kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int too large for a float
            return float(value) if math.isfinite(value) else None
        return None
    if kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return value if kind in (bool, str) and isinstance(value, kind) else None


def _describe(kind: tp.Any) -> str:
    """`kind` in plain words."""
    if tp.get_origin(kind) is tp.Literal:
        return "one of " + ", ".join(tp.get_args(kind))
    if tp.get_origin(kind) is tuple:
        return {int: "whole numbers", str: "texts"}[tp.get_args(kind)[0]]
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}[kind]


_Rule = tuple[Callable[[tp.Any], bool], str]
_ANYTHING: _Rule = (lambda value: True, "")
_COUNT: _Rule = (lambda value: value >= 1, "of at least 1")
_POSITIVE: _Rule = (lambda value: value > 0, "above 0")
_NOT_NEGATIVE: _Rule = (lambda value: value >= 0, "of at least 0")
_FRACTION: _Rule = (lambda value: 0 <= value <= 1, "from 0 to 1")

_RANGES: dict[str, _Rule] = {
    "task": (lambda task: all(task.partition("/")), "of the form suite/name, as `sable list` prints it"),
    "seeds": (
        lambda seeds: seeds and len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds),
        "from 0 to 4294967295, at least one of them and none twice",
    ),
    "options": (
        lambda options: all(all(option.partition("=")) for option in options),
        "of the form name=value",
    ),
    "total_steps": _COUNT,
    "num_evaluations": _COUNT,
    "evaluation_episodes": _COUNT,
    "absolute_episodes": _COUNT,
    "pool_size": _NOT_NEGATIVE,
    "num_envs": _COUNT,
    "rollout_length": _COUNT,
    "num_epochs": _COUNT,
    "num_minibatches": _COUNT,
    "learning_rate": _NOT_NEGATIVE,
    "learning_rate_horizon": _NOT_NEGATIVE,
    "discount": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "gae_lambda": _FRACTION,
    "clip_eps": _POSITIVE,
    "entropy_weight": _NOT_NEGATIVE,
    "value_weight": _NOT_NEGATIVE,
    "max_grad_norm": _POSITIVE,
    "embed_dim": _COUNT,
    "num_heads": _COUNT,
    "num_blocks": _COUNT,
    "decay_scaling": _FRACTION,
}
