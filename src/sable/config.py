"""Every setting there is: what to run (RunConfig) and each system's own numbers.

Imports no jax, so that mistakes answer at once. A setting comes from, later ones winning: the dataclass's
default, the recipe for the suite, the recipe for the task, what the user gave.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.resources
import importlib.util
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
    """Learning system: sable, mat, ippo, mappo, masac, hasac, qmix, or a module with one of your own."""
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
class SystemConfig:
    """What every system has."""

    num_envs: int = 128
    """Environments stepped side by side, per seed."""
    rollout_length: int = 128
    """Environment steps between two updates."""
    discount: float = 0.99
    """Discount of future reward."""
    max_grad_norm: float = 0.5
    """Global norm to which gradients are clipped."""
    agent_id: bool = True
    """Learn an embedding per agent; ignored where the views already carry identity (MABrax)."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig(SystemConfig):
    """Proximal policy optimisation: what every on-policy system shares."""

    num_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 2
    """Minibatches per epoch; must divide the number of environments."""
    learning_rate_horizon: int = 0
    """Environment steps over which learning rates fall linearly to zero; 0 keeps them constant."""
    gae_lambda: float = 0.9
    """Decay of the generalised advantage estimate."""
    clip_eps: float = 0.2
    """Clipping of the probability ratio, and of the value's change with `clip_value`."""
    entropy_weight: float = 0.01
    """Weight of the entropy bonus."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    clip_value: bool = True
    """Clip the value's change in an update too. It then moves by `clip_eps` at most: far too slow where
    returns are large."""
    bootstrap_time_limits: bool = False
    """Go on valuing the future where an episode only ran out of time. The paper does not."""


@dataclass(frozen=True, kw_only=True)
class SableConfig(PPOConfig):
    """Sable: a retention network over time steps and agents, trained by PPO."""

    learning_rate: float = 2.5e-4
    """Adam's step size."""
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


@dataclass(frozen=True, kw_only=True)
class MATConfig(PPOConfig):
    """MAT, the multi-agent transformer: attention over the agents of one time step, trained by PPO."""

    num_epochs: int = 5
    num_minibatches: int = 1
    clip_eps: float = 0.1
    max_grad_norm: float = 5.0
    learning_rate: float = 5e-4
    """Adam's step size."""
    embed_dim: int = 64
    """Width of the network; a multiple of the number of heads."""
    num_heads: int = 1
    """Attention heads."""
    num_blocks: int = 1
    """Encoder blocks, and decoder blocks."""
    rms_norm: bool = False
    """Normalise by the root mean square, as Sable does, instead of LayerNorm."""
    swiglu: bool = False
    """Gated feed-forward layers, as Sable has, instead of plain ones."""
    agent_order: tp.Literal["per_rollout", "per_epoch"] = "per_rollout"
    """When agents are reordered: per rollout (acting, learning) or per epoch (learning only, the paper's)."""


@dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(PPOConfig):
    """IPPO and MAPPO: one actor for all agents and one critic, which sees what its agent sees (IPPO) or the
    global state (MAPPO)."""

    policy_learning_rate: float = 2.5e-4
    """Adam's step size for the actor."""
    critic_learning_rate: float = 2.5e-4
    """Adam's step size for the critic."""
    policy_layers: tuple[int, ...] = (128, 128)
    """Widths of the actor's layers."""
    critic_layers: tuple[int, ...] = (128, 128)
    """Widths of the critic's layers."""
    memory: bool = False
    """Remember the episode with a GRU behind the first layer of actor and critic."""
    recurrent_size: int = 128
    """Width of the GRUs."""
    recurrent_chunk: int = 128
    """Contiguous time steps a gradient flows through with memory; must divide the rollout, or exceed it."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(SystemConfig):
    """What every system that learns from stored experience shares."""

    max_grad_norm: float = 10.0
    num_updates_per_rollout: int = 32
    """Gradient steps after each rollout."""
    batch_size: int = 64
    """Transitions (SAC) or sequences (QMIX) per gradient step."""
    polyak: float = 0.005
    """How far the target networks move towards the learned ones, each time they move."""


@dataclass(frozen=True, kw_only=True)
class SACConfig(ReplayConfig):
    """Soft actor-critic over a team: twin critics of the global state and the joint action."""

    num_envs: int = 64
    rollout_length: int = 8
    replay_size: int = 100_000
    """Transitions kept, all environments together."""
    warmup_steps: int = 5000
    """Environment steps of random actions before learning starts."""
    policy_delay: int = 2
    """Gradient steps of the critics for each one of the policy."""
    policy_learning_rate: float = 3e-4
    """Adam's step size for the policy."""
    q_learning_rate: float = 5e-4
    """Adam's step size for the critics."""
    temperature_learning_rate: float = 1e-3
    """Adam's step size for the temperature."""
    autotune_temperature: bool = False
    """Learn the temperature, so that the policy keeps the target entropy."""
    initial_temperature: float = 0.005
    """Weight of the entropy, at first or for good."""
    target_entropy_scale: float = 5.0
    """The target entropy, as minus this for each component of an action."""
    policy_layers: tuple[int, ...] = (128, 128)
    """Widths of the policy's layers."""
    q_layers: tuple[int, ...] = (128, 128)
    """Widths of the critics' layers."""


@dataclass(frozen=True, kw_only=True)
class MASACConfig(SACConfig):
    """MASAC: soft actor-critic with one policy that all agents share."""

    batch_size: int = 32
    policy_delay: int = 4
    q_learning_rate: float = 1e-3
    temperature_learning_rate: float = 3e-4
    autotune_temperature: bool = True
    initial_temperature: float = 0.1


@dataclass(frozen=True, kw_only=True)
class HASACConfig(SACConfig):
    """HASAC: soft actor-critic with a policy per agent, improved one after another."""

    discount: float = 0.95
    shuffle_agents: bool = False
    """Improve the agents in a new random order each time, instead of from the first to the last."""


@dataclass(frozen=True, kw_only=True)
class QMIXConfig(ReplayConfig):
    """QMIX: recurrent Q-learning whose joint value rises with every agent's own."""

    num_envs: int = 32
    rollout_length: int = 2
    num_updates_per_rollout: int = 2
    batch_size: int = 128
    polyak: float = 0.01
    replay_size: int = 4000
    """Time steps kept per environment."""
    sequence_length: int = 20
    """Time steps of a replayed sequence."""
    warmup_sequences: int = 32
    """Sequences' worth of time steps, all environments together, before learning starts."""
    q_learning_rate: float = 3e-4
    """Adam's step size."""
    epsilon_min: float = 0.05
    """The chance of a random action in the end."""
    epsilon_decay: float = 1e-5
    """How much that chance, 1 at first, falls with every environment step."""
    hard_target_update: bool = False
    """Copy the target networks every `target_update_period` gradient steps instead of moving them softly."""
    target_update_period: int = 200
    """Gradient steps between two copies; used with `hard_target_update`."""
    q_layers: tuple[int, ...] = (128, 128)
    """Widths of the agents' layers: the first stands before the GRU, the others behind it."""
    recurrent_size: int = 256
    """Width of the GRU."""
    mixer_size: int = 32
    """Width of the mixing network."""


SYSTEM_CONFIGS: dict[str, type[SystemConfig]] = {
    "sable": SableConfig,
    "mat": MATConfig,
    "ippo": ActorCriticConfig,
    "mappo": ActorCriticConfig,
    "masac": MASACConfig,
    "hasac": HASACConfig,
    "qmix": QMIXConfig,
}

ONLY_ACTIONS = {"masac": "continuous", "hasac": "continuous", "qmix": "discrete"}
"""The systems that can do with one kind of actions only."""

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


def quick(system: str) -> dict[str, tp.Any]:
    """What `QUICK` means for a system, with a task it can do."""
    names = field_names(RunConfig) + field_names(system_config(system))
    task = {"task": "mpe/simple_spread_3ag"} if ONLY_ACTIONS.get(system) == "continuous" else {}
    return task | {name: value for name, value in QUICK.items() if name in names}


def split(fields: Fields, system: str) -> tuple[dict[str, tp.Any], dict[str, tp.Any]]:
    """The fields of the run and those of its system; a name that is neither is refused with the nearest."""
    run_names, system_names = field_names(RunConfig), field_names(system_config(system))
    for name in fields:
        if name not in run_names + system_names:
            raise SableError(f"unknown field {name!r}{suggest(name, run_names + system_names)}")
    run_fields = {name: value for name, value in fields.items() if name in run_names}
    return run_fields, {name: value for name, value in fields.items() if name in system_names}


def system_config(system: tp.Any) -> type[SystemConfig]:
    """The configuration class of the system called `system`: one of ours, or a module's `Config`."""
    if isinstance(system, str) and system in SYSTEM_CONFIGS:
        return SYSTEM_CONFIGS[system]
    return own_system(system).Config


def own_system(name: tp.Any) -> tp.Any:
    """The module of that name, where a user keeps a system: `Config` and `make` (docs/add-a-system.md)."""
    try:
        known = importlib.util.find_spec(name)
    except (AttributeError, ImportError, TypeError, ValueError):  # not the name of a module
        known = None
    if known is None:
        raise SableError(
            f"unknown system {name!r}; known systems: {', '.join(SYSTEM_CONFIGS)}, "
            f"or a module with one of your own{suggest(str(name), SYSTEM_CONFIGS)}"
        )
    module = importlib.import_module(name)
    for part in ("Config", "make"):
        if not hasattr(module, part):
            raise SableError(f"module {name!r} holds no system: it has no {part}")
    return module


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
    spaces, names = tomllib.loads(file.read_text(encoding="utf-8")), field_names(system_config(system))
    family = next((family for family, members in _FAMILIES.items() if system in members), system)
    return {name: values for name, values in spaces.get(family, {}).items() if name in names}


_FAMILIES = {"ppo": ["ippo", "mappo"], "sac": ["masac", "hasac"]}
"""Systems that share a search space."""


def check_actions(system: str, *, discrete: bool, task: str) -> None:
    """Refuse a system that cannot handle this kind of actions, naming those that can."""
    kind = "discrete" if discrete else "continuous"
    if ONLY_ACTIONS.get(system, kind) != kind:
        able = ", ".join(name for name in SYSTEM_CONFIGS if ONLY_ACTIONS.get(name, kind) == kind)
        raise SableError(
            f"{system} needs {ONLY_ACTIONS[system]} actions and those of {task} are {kind}; "
            f"systems that would work: {able}"
        )


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

    def divides(whole: str, part: str, into: str) -> None:
        sizes = getattr(config, whole), getattr(config, part)
        if sizes[0] % sizes[1]:
            raise SableError(
                f"{whole}={sizes[0]} cannot be split into {part}={sizes[1]} {into}; "
                "choose one that divides the other"
            )

    if isinstance(config, PPOConfig):
        divides("num_envs", "num_minibatches", "equal parts")
    if isinstance(config, SableConfig | MATConfig):
        divides("embed_dim", "num_heads", "equal heads")
    if isinstance(config, ActorCriticConfig) and config.recurrent_chunk < config.rollout_length:
        divides("rollout_length", "recurrent_chunk", "time steps each")
    if isinstance(config, QMIXConfig) and config.replay_size < config.sequence_length:
        raise SableError(
            f"replay_size={config.replay_size} time steps cannot hold a sequence of "
            f"sequence_length={config.sequence_length}; enlarge the one or shorten the other"
        )
    if isinstance(config, QMIXConfig):
        wanted, kept = config.warmup_sequences * config.sequence_length, config.replay_size * config.num_envs
        if wanted > kept:
            raise SableError(
                f"warmup_sequences={config.warmup_sequences} of sequence_length={config.sequence_length} are "
                f"{wanted} time steps, and replay_size={config.replay_size} times num_envs={config.num_envs} "
                f"holds {kept}: learning would never start"
            )
    if isinstance(config, SACConfig) and config.replay_size < config.num_envs * config.rollout_length:
        raise SableError(
            f"replay_size={config.replay_size} transitions cannot hold a rollout of "
            f"num_envs={config.num_envs} times rollout_length={config.rollout_length}; enlarge it"
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
_WIDTHS: _Rule = (lambda value: value and min(value) >= 1, "of at least 1, one or more")

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
    "policy_learning_rate": _NOT_NEGATIVE,
    "critic_learning_rate": _NOT_NEGATIVE,
    "q_learning_rate": _NOT_NEGATIVE,
    "temperature_learning_rate": _NOT_NEGATIVE,
    "policy_layers": _WIDTHS,
    "critic_layers": _WIDTHS,
    "q_layers": _WIDTHS,
    "recurrent_size": _COUNT,
    "recurrent_chunk": _COUNT,
    "num_updates_per_rollout": _COUNT,
    "batch_size": _COUNT,
    "polyak": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "replay_size": _COUNT,
    "warmup_steps": _NOT_NEGATIVE,
    "policy_delay": _COUNT,
    "initial_temperature": _POSITIVE,
    "target_entropy_scale": _POSITIVE,
    "sequence_length": (lambda value: value >= 2, "of at least 2"),
    "warmup_sequences": _COUNT,
    "epsilon_min": _FRACTION,
    "epsilon_decay": _NOT_NEGATIVE,
    "target_update_period": _COUNT,
    "mixer_size": _COUNT,
}
