"""Which values a setting may have, alone and beside others."""

import contextlib
import dataclasses
import math
import numbers
import reprlib
import typing as tp
from collections.abc import Callable, Mapping

from sable.config import renamed
from sable.config.meaning import MEANING
from sable.config.schema import (
    ActorCriticConfig,
    MATConfig,
    PPOConfig,
    QMIXConfig,
    SableConfig,
    SACConfig,
    SystemConfig,
    field_names,
)
from sable.errors import SableError

Fields = Mapping[str, tp.Any]

_Class = tp.TypeVar("_Class")

MOST = 2**31 - 1
"""The largest count: programs count in 32 bits."""
MOST_SEEDS = 2**16


def build(cls: type[_Class], fields: Fields) -> _Class:
    """Make an instance of `cls` with `fields` checked and brought to their exact types."""
    types = {field.name: field.type for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    return cls(**{name: _check_field(name, types[name], value) for name, value in fields.items()})


def refuse_unknown(fields: Fields, cls: type, where: str) -> None:
    """Refuse a name that is no field of `cls`, with the nearest that is."""
    for name in fields:
        if name not in field_names(cls):
            raise SableError(f"unknown field {name!r} {where}{renamed.near(name, field_names(cls))}")


def check_together(config: SystemConfig) -> None:
    """Refuse fields that are fine alone but not with one another."""

    def divides(whole: str, part: str, into: str) -> None:
        sizes = getattr(config, whole), getattr(config, part)
        if sizes[0] % sizes[1]:
            raise SableError(
                f"{whole}={sizes[0]} cannot be split into {part}={sizes[1]} {into}; "
                "choose one that divides the other"
            )

    if config.num_envs * config.rollout_length > MOST:
        raise SableError(
            f"num_envs={config.num_envs} times rollout_length={config.rollout_length} are more steps than an "
            f"update can have, {MOST}; choose fewer"
        )
    if isinstance(config, PPOConfig):
        divides("num_envs", "num_minibatches", "equal parts")
    if isinstance(config, SableConfig | MATConfig):
        divides("embed_dim", "num_heads", "equal heads")
    if isinstance(config, SableConfig):
        _check_sable(config)
    if isinstance(config, ActorCriticConfig) and config.recurrent_chunk < config.rollout_length:
        divides("rollout_length", "recurrent_chunk", "time steps each")
    if isinstance(config, QMIXConfig) and config.replay_size < config.sequence_length:
        raise SableError(
            f"replay_size={config.replay_size} time steps cannot hold a sequence of "
            f"sequence_length={config.sequence_length}; enlarge the one or shorten the other"
        )
    if isinstance(config, QMIXConfig):
        needed, capacity = (
            config.warmup_sequences * config.sequence_length,
            config.replay_size * config.num_envs,
        )
        if needed > capacity:
            raise SableError(
                f"warmup_sequences={config.warmup_sequences} of sequence_length={config.sequence_length} are "
                f"{needed} time steps, and replay_size={config.replay_size} times num_envs={config.num_envs} "
                f"holds {capacity}: learning would never start"
            )
    if isinstance(config, SACConfig) and config.replay_size < config.num_envs * config.rollout_length:
        raise SableError(
            f"replay_size={config.replay_size} transitions cannot hold a rollout of "
            f"num_envs={config.num_envs} times rollout_length={config.rollout_length}; enlarge it"
        )


def _check_sable(config: SableConfig) -> None:
    """Refuse switches of Sable that need others."""
    if config.positions == "token" and not config.memory:
        raise SableError("positions='token' needs memory: without it a token has no position")
    if config.positions == "token" and config.decoding == "fused":
        raise SableError(
            "decoding='fused' knows one position for all agents of a time step; positions='token' takes "
            "decoding auto, sequential, cached or jacobi"
        )
    if config.agent_chunk and config.memory:
        raise SableError(
            f"agent_chunk={config.agent_chunk} gives up memory and is for memory=false alone; with memory "
            "all agents of a time step see each other, and chunk_size cuts time"
        )


def check_updates(total_steps: int, config: SystemConfig) -> None:
    """Refuse a run of more updates than can be counted."""
    steps_per_update = config.num_envs * config.rollout_length
    if total_steps // steps_per_update > MOST:
        raise SableError(
            f"total_steps={total_steps} are more updates of num_envs * rollout_length = {steps_per_update} "
            f"steps than can be counted, {MOST}"
        )


def check_count(name: str, value: tp.Any, least: int = 0, most: int = MOST) -> None:
    """Refuse an argument that is no whole number within these bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        bound = f" and at most {most}" if isinstance(value, int) and value > most else ""
        raise SableError(f"{name}={short_repr(value)}: expected a whole number of at least {least}{bound}")


def short_repr(value: tp.Any) -> str:
    """Return `value` as an error message shows it: not at any length."""
    try:
        return _REPR.repr(value)
    except ValueError:  # a number of more digits than Python prints
        return "a number of thousands of digits"


_REPR = reprlib.Repr()
_REPR.maxtuple = _REPR.maxlist = _REPR.maxdict = 8
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 300


def _check_field(name: str, kind: tp.Any, value: tp.Any) -> tp.Any:
    """Return `value` in the exact type of field `name`, or an error that says what was given and what would
    work."""
    exact = _coerce(kind, 0 if (name, value) == ("devices", "all") else value)
    holds, condition = _RANGES.get(name, _ANYTHING)
    if exact is None or not holds(exact):
        expected = " ".join(filter(None, (_describe(kind), condition)))
        now = renamed.near_value(name, value, tp.get_args(kind))
        raise SableError(f"{name}={short_repr(value)}: expected {expected}{now}")
    return exact


def _coerce(kind: tp.Any, value: tp.Any) -> tp.Any:
    """Return `value` as `kind`, or None where it is of another type; a bool is no number, an int may be a
    float."""
    if tp.get_origin(kind) is tp.Literal:
        return value if isinstance(value, str) and value in tp.get_args(kind) else None
    if tp.get_origin(kind) is tuple:
        if not isinstance(value, (tuple, list, range)) or len(value) > MOST_SEEDS:
            return None
        items = tuple(_coerce(tp.get_args(kind)[0], item) for item in value)
        return None if None in items else items
    if kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int too large for a float
            return float(value) if math.isfinite(value) else None
        return None
    if kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if kind is str:
        return value if isinstance(value, str) and _is_unicode(value) else None
    return value if kind is bool and isinstance(value, bool) else None


def _is_unicode(text: str) -> bool:
    """Return whether files can hold `text`: bytes of a name that are no UTF-8 arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe(kind: tp.Any) -> str:
    """Return `kind` in plain words."""
    if tp.get_origin(kind) is tp.Literal:
        return "one of " + ", ".join(tp.get_args(kind))
    if tp.get_origin(kind) is tuple:
        return {int: "whole numbers", str: "texts"}[tp.get_args(kind)[0]]
    numbers = {int: "a whole number", float: "a finite number"}
    return (numbers | {bool: "true or false", str: "a text (in UTF-8)"})[kind]


_Rule = tuple[Callable[[tp.Any], bool], str]
_ANYTHING: _Rule = (lambda value: True, "")


def _between(least: int, most: int = MOST) -> _Rule:
    return lambda value: least <= value <= most, f"of at least {least} and at most {most}"


_COUNT, _INDEX = _between(1), _between(0)
_MANY = _between(1, 2**24)  # environments, episodes
_LENGTH = _between(1, 2**20)  # time steps
_WIDTH = _between(1, 2**16)
_STEPS = _between(1, 10**15)
_POSITIVE: _Rule = (lambda value: value > 0, "above 0")
_NOT_NEGATIVE: _Rule = (lambda value: value >= 0, "of at least 0")
_FRACTION: _Rule = (lambda value: 0 <= value <= 1, "from 0 to 1")
_WIDTHS: _Rule = (
    lambda value: 0 < len(value) <= 128 and all(1 <= width <= 2**16 for width in value),
    "of at least 1 and at most 65536, from one to 128 of them",
)

_RANGES: dict[str, _Rule] = {
    "num_agents": _WIDTH,
    "view_size": _MANY,
    "time_limit": _COUNT,
    "state_size": _INDEX,
    "num_actions": _between(0, 2**24),
    "action_size": _between(0, 2**24),
    "task": (
        lambda task: ":" in task or all(task.partition("/")),
        "of the form suite/name, as `sable list` prints it, or module:Class",
    ),
    "seeds": (
        lambda seeds: seeds and len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds),
        f"from 0 to 4294967295, at least one of them, none twice, and {MOST_SEEDS} at most",
    ),
    "env_options": (
        lambda options: all(all(option.partition("=")) for option in options),
        "of the form name=value",
    ),
    "total_steps": _STEPS,
    "num_evaluations": _between(1, 10**6),
    "evaluation_episodes": _MANY,
    "absolute_episodes": _MANY,
    "reset_pool_size": _INDEX,
    "devices": _between(0, 2**16),
    "meaning": _between(0, MEANING),
    "num_envs": _MANY,
    "rollout_length": _LENGTH,
    "num_epochs": _COUNT,
    "num_minibatches": _COUNT,
    "learning_rate": _NOT_NEGATIVE,
    "learning_rate_horizon": _between(0, 10**15),
    "discount": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "gae_lambda": _FRACTION,
    "advantage_floor": _NOT_NEGATIVE,
    "clip_eps": _POSITIVE,
    "entropy_weight": _NOT_NEGATIVE,
    "value_weight": _NOT_NEGATIVE,
    "max_grad_norm": _POSITIVE,
    "embed_dim": _WIDTH,
    "num_heads": _WIDTH,
    "num_blocks": _between(1, 128),
    "decay_scaling": _FRACTION,
    "chunk_size": _INDEX,
    "agent_chunk": _between(0, 2**16),
    "policy_learning_rate": _NOT_NEGATIVE,
    "critic_learning_rate": _NOT_NEGATIVE,
    "q_learning_rate": _NOT_NEGATIVE,
    "temperature_learning_rate": _NOT_NEGATIVE,
    "policy_layers": _WIDTHS,
    "critic_layers": _WIDTHS,
    "q_layers": _WIDTHS,
    "recurrent_size": _WIDTH,
    "recurrent_chunk": _COUNT,
    "num_updates_per_rollout": _COUNT,
    "batch_size": _MANY,
    "polyak": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "replay_size": _COUNT,
    "warmup_steps": _INDEX,
    "policy_delay": _COUNT,
    "initial_temperature": _POSITIVE,
    "target_entropy_scale": _POSITIVE,
    "sequence_length": _between(2, 2**20),
    "warmup_sequences": _COUNT,
    "epsilon_min": _FRACTION,
    "epsilon_decay": _NOT_NEGATIVE,
    "target_update_period": _COUNT,
    "mixer_size": _WIDTH,
}
