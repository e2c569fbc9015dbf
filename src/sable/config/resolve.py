"""Where settings come from, later ones winning: the dataclass's default, the recipe for the suite, the recipe
for the task, a recipe of the user's own, what the user gave. And how they are written down.
"""

import dataclasses
import functools
import importlib.resources
import json
import tomllib
import typing as tp
from pathlib import Path

from sable.config import renamed
from sable.config.checks import Fields, build, check_together, check_updates, refuse_unknown
from sable.config.meaning import number_of, since
from sable.config.schema import (
    ONLY_ACTIONS,
    SYSTEM_CONFIGS,
    Config,
    PPOConfig,
    RunConfig,
    SystemConfig,
    field_names,
    field_types,
    imported_system,
    settings_of,
    split_devices,
    system_config,
)
from sable.errors import SableError, suggest
from sable.trust import NOTHING, Trust

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


def resolve(run_fields: Fields, system_fields: Fields, trust: Trust = NOTHING) -> Config:
    """Return the checked configuration: defaults <- recipe for the suite <- recipe for the task <- given
    fields."""
    system_class = system_config(run_fields.get("system", RunConfig.system), trust)
    refuse_unknown(run_fields, RunConfig, "of a run")
    refuse_unknown(system_fields, system_class, f"of system {run_fields.get('system', RunConfig.system)!r}")
    run = build(RunConfig, run_fields)
    run_recipe, system_recipe = split_fields(recipe(run.system, run.task), run.system, trust)
    run = build(RunConfig, {**run_recipe, **run_fields})
    return _check_config(Config(run, build(system_class, {**system_recipe, **system_fields})))


def replace_fields(config: Config, run_fields: Fields, system_fields: Fields) -> Config:
    """Return the same configuration with some fields changed, checked again."""
    run = build(RunConfig, {**dataclasses.asdict(config.run), **run_fields})
    system = build(type(config.system), {**dataclasses.asdict(config.system), **system_fields})
    return _check_config(Config(run, system))


def _check_config(config: Config) -> Config:
    """Refuse what does not go together."""
    run, system = config.run, config.system
    check_together(system)
    check_updates(run.total_steps, system)
    if isinstance(system, PPOConfig) and 0 < system.learning_rate_horizon < run.total_steps:
        raise SableError(
            f"with learning_rate_horizon={system.learning_rate_horizon} nothing is learnt at the end of "
            f"total_steps={run.total_steps}; make it as long, or 0 to keep learning rates constant"
        )
    if run.devices:
        split_devices(run.devices, len(run.seeds), system)
    return config


def quick_fields(system: str, trust: Trust = NOTHING) -> dict[str, tp.Any]:
    """Return what `QUICK` means for a system, with a task it can do."""
    names = field_names(RunConfig) + field_names(system_config(system, trust))
    task = {"task": "mpe/simple_spread_3ag"} if ONLY_ACTIONS.get(system) == "continuous" else {}
    return task | {name: value for name, value in QUICK.items() if name in names}


def split_fields(
    fields: Fields, system: str, trust: Trust = NOTHING
) -> tuple[dict[str, tp.Any], dict[str, tp.Any]]:
    """Return the fields of the run and those of its system; a name that is neither is refused with the
    nearest."""
    run_names, system_names = field_names(RunConfig), field_names(system_config(system, trust))
    for name in fields:
        if name not in run_names + system_names:
            raise SableError(f"unknown field {name!r}{renamed.near(name, run_names + system_names)}")
    run_fields = {name: value for name, value in fields.items() if name in run_names}
    return run_fields, {name: value for name, value in fields.items() if name in system_names}


def recipe(system: str, task: str) -> dict[str, tp.Any]:
    """Return the tuned values for a task: those of its suite, overridden by its own."""
    tables = recipes(system) if system in SYSTEM_CONFIGS else {}
    return tables.get(task.partition("/")[0], {}) | tables.get(task, {})


@functools.cache
def recipes(system: str) -> dict[str, dict[str, tp.Any]]:
    """Return every recipe of a system, by suite or task; empty where none is shipped."""
    file = importlib.resources.files("sable.config").joinpath("recipes", f"{system}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def read_recipe(file: str | Path, system: str, task: str, trust: Trust = NOTHING) -> dict[str, tp.Any]:
    """Return what a recipe file of the user's own says about a task: a table for its suite, one for itself,
    or both, as in our own recipes; what is wrong with it is said with the file's name."""
    system_class = system_config(system, trust)
    try:
        tables = tomllib.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise SableError(f"recipe {file} cannot be read: {why}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SableError(f'recipe {file}: {name!r} stands in no table; put it below ["{task}"]')
    names = [name for name in (task.partition("/")[0], task) if name in tables]
    if not names:
        near = suggest(task, tables)
        raise SableError(f"recipe {file} has no table for {task}{near}; it has {', '.join(tables) or 'none'}")
    types, fields = field_types(RunConfig) | field_types(system_class), {}
    try:
        for name in names:
            fields |= renamed.current(tables[name], types)
        run_fields, system_fields = split_fields(fields, system, trust)
        build(RunConfig, run_fields)
        build(system_class, system_fields)
    except SableError as error:
        raise SableError(f"recipe {file}: {error}") from None
    return fields


def search_space(system: str, config: SystemConfig | None = None) -> dict[str, list[tp.Any]]:
    """Return the values the paper searched for a system's fields; or the `SEARCH_SPACE` of the user's own
    module, of which `config` is a configuration."""
    if system not in SYSTEM_CONFIGS and config is not None:
        return getattr(imported_system(system, config), "SEARCH_SPACE", {})
    file = importlib.resources.files("sable.config").joinpath("recipes", "search.toml")
    spaces, names = tomllib.loads(file.read_text(encoding="utf-8")), field_names(system_config(system))
    return {name: values for name, values in spaces.get(family(system), {}).items() if name in names}


def family(system: str) -> str:
    """Return the name under which the paper has a system's settings."""
    return next((family for family, members in _FAMILIES.items() if system in members), system)


_FAMILIES = {"ppo": ["ippo", "mappo"], "sac": ["masac", "hasac"]}
"""Systems that share their settings in the paper."""


def to_dict(config: Config) -> dict[str, tp.Any]:
    """Return the configuration as plain data; `from_dict` is its exact inverse, also through JSON."""
    data = {"format": FORMAT, "meaning": config.system.meaning}
    return data | {"run": dataclasses.asdict(config.run), "config": settings_of(config.system)}


def to_json(config: Config) -> str:
    """Return the configuration as JSON text."""
    return json.dumps(to_dict(config), indent=2)


def from_dict(data: tp.Any, trust: Trust = NOTHING) -> Config:
    """Return the configuration that `to_dict` made `data` from, in this version or an older one; anything
    else is refused, and so is a system from outside sable unless `trust` covers it. Its meaning is an older
    one only where something that concerns it has changed since."""
    run, fields = _read_run(data)
    trust.require_equal("env", run.task)
    trust.require_equal("system", run.system)
    system = _build_system(fields, system_config(run.system, trust))
    number = number_of(data)
    if since(number, run, vars(system)):
        system = dataclasses.replace(system, meaning=number)
    return Config(run, system)


def plain_from_dict(data: tp.Any) -> tuple[RunConfig, dict[str, tp.Any]]:
    """Return the same with the system's fields as plain data, for those who only read: no name in it is
    imported. Those of a system from outside sable are as they were written."""
    run, fields = _read_run(data)
    ours = SYSTEM_CONFIGS.get(run.system)
    return run, fields if ours is None else settings_of(_build_system(fields, ours))


def _read_run(data: tp.Any) -> tuple[RunConfig, dict[str, tp.Any]]:
    """Return the run's configuration and the fields of its system's, the latter not checked yet."""
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
    run = renamed.complete(data["run"], field_types(RunConfig))
    refuse_unknown(run, RunConfig, _NEWER_OR_DAMAGED)
    # Fields that came after this configuration was written have their defaults; these were always there.
    missing = [name for name in ("task", "system", "seeds", "total_steps") if name not in run]
    missing += [name for name in ("num_envs", "rollout_length") if name not in data["config"]]
    if missing:
        raise SableError(f"damaged configuration: field {missing[0]!r} is missing")
    return build(RunConfig, run), data["config"]


def _build_system(fields: Fields, system_class: type[SystemConfig]) -> SystemConfig:
    fields = renamed.complete(fields, field_types(system_class))
    refuse_unknown(fields, system_class, _NEWER_OR_DAMAGED)
    config = build(system_class, fields)
    check_together(config)
    return config


_NEWER_OR_DAMAGED = "in this configuration: a newer version wrote it, or it is damaged"
