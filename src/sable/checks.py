"""Which values a setting may have, alone and beside others."""

import contextlib
import dataclasses
import math
import numbers
import typing as tp
from collections.abc import Callable, Mapping

from sable.config import (
    ActorCriticConfig,
    MATConfig,
    PPOConfig,
    QMIXConfig,
    SableConfig,
    SACConfig,
    SystemConfig,
    field_names,
)
from sable.errors import SableError, suggest

Fields = Mapping[str, tp.Any]

_Class = tp.TypeVar("_Class")


def build(cls: type[_Class], fields: Fields) -> _Class:
    """An instance of `cls` with `fields` checked and brought to their exact types."""
    types = {field.name: field.type for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    return cls(**{name: _checked(name, types[name], value) for name, value in fields.items()})


def refuse_unknown(fields: Fields, cls: type, where: str) -> None:
    """Refuse a name that is no field of `cls`, with the nearest that is."""
    for name in fields:
        if name not in field_names(cls):
            raise SableError(f"unknown field {name!r} {where}{suggest(name, field_names(cls))}")


def check_together(config: SystemConfig) -> None:
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
    exact = _exact(kind, 0 if (name, value) == ("devices", "all") else value)
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
    "num_agents": _COUNT,
    "view_size": _COUNT,
    "time_limit": _COUNT,
    "state_size": _NOT_NEGATIVE,
    "num_actions": _NOT_NEGATIVE,
    "action_size": _NOT_NEGATIVE,
    "task": (
        lambda task: ":" in task or all(task.partition("/")),
        "of the form suite/name, as `sable list` prints it, or module:Class",
    ),
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
    "devices": _NOT_NEGATIVE,
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
    "chunk_size": _NOT_NEGATIVE,
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
