"""Names that a reader may come with: those of earlier versions, and those that other libraries have.

An earlier version's name is read in its files as the one of now. A user who gives it is told the one of now.
A name is replaced only where the class has the new one and not the old: a user's own systems keep theirs.
What other libraries call a setting is told as a hint, never taken for it: scales differ.
"""

import re
import typing as tp
from collections.abc import Collection, Iterable, Mapping

from sable.errors import SableError, suggest

Fields = Mapping[str, tp.Any]

FIELDS = {"compute": "compute_dtype", "pool_size": "reset_pool_size", "options": "env_options"}
"""Settings, with their flags."""
VALUES = {"decoding": {"scan": "sequential", "rows": "cached", "parallel": "jacobi", "kernel": "fused"}}
"""Values of settings."""
ARGUMENTS = {
    "at_once": "jobs",
    "on": "launcher",
    "on_ray": "launcher",
    "points": "parallel_trials",
    "other_protocol": "allow_deviations",
}
"""Flags and arguments of commands that are no settings."""
ABSENT = {"devices": 1, "advantage_floor": 0.0}
"""What a setting was in runs of before it, where that is not its default."""
LEAVES = (
    (r"^run\.situation\.", "run.rollout_state."),
    (r"^(run\.rollout_state\.timestep)\.final\.", r"\1.final_observation."),
    (r"^(run\.rollout_state\.timestep\.(?:final_)?observation)\.legal$", r"\1.action_mask"),
    (r"^(run\.rollout_state\.timestep\.(?:final_)?observation)\.time$", r"\1.step_count"),
    (r"^run\.tally\.", "run.metric_sums."),
    (r"^(run\.learner\.replay\.experience)\.final\b", r"\1.next_extras"),
    (r"^(run\.learner\.replay\.experience\.(?:observation|next_extras))\.legal$", r"\1.action_mask"),
    (r"^(run\.learner\.replay\.experience\.(?:observation|next_extras))\.time$", r"\1.step_count"),
)
"""Arrays of a run's state and parameters by their places: patterns, one after another, with what
replaces them."""

HINTS: dict[str, tuple[str, ...]] = {
    "absolute_metric_episodes": ("absolute_episodes",),
    "actor_lr": ("policy_learning_rate", "learning_rate"),
    "add_agent_id": ("agent_id",),
    "alpha": ("initial_temperature",),
    "alpha_lr": ("temperature_learning_rate",),
    "anneal_lr": ("learning_rate_horizon",),
    "autotune": ("autotune_temperature",),
    "batch_size": ("num_minibatches",),
    "buffer_size": ("replay_size",),
    "clip_coef": ("clip_eps",),
    "clip_epsilon": ("clip_eps",),
    "clip_grad_val": ("max_grad_norm",),
    "clip_range": ("clip_eps",),
    "clip_value_loss": ("clip_value",),
    "clip_vloss": ("clip_value",),
    "critic_coef": ("value_weight",),
    "critic_lr": ("critic_learning_rate", "q_learning_rate"),
    "decay_scaling_factor": ("decay_scaling",),
    "ent_coef": ("entropy_weight",),
    "entropy_coef": ("entropy_weight",),
    "eps_decay": ("epsilon_decay",),
    "eps_finish": ("epsilon_min",),
    "eps_min": ("epsilon_min",),
    "explore_steps": ("warmup_steps",),
    "exploration_final_eps": ("epsilon_min",),
    "gamma": ("discount",),
    "gradient_steps": ("num_updates_per_rollout",),
    "gru_hidden_dim": ("recurrent_size",),
    "hidden_state_dim": ("recurrent_size",),
    "lambda": ("gae_lambda",),
    "learning_starts": ("warmup_steps", "warmup_sequences"),
    "lmbda": ("gae_lambda",),
    "lr": ("learning_rate", "policy_learning_rate", "critic_learning_rate", "q_learning_rate"),
    "max_n_frames": ("total_steps",),
    "minibatch_size": ("num_minibatches",),
    "mixer_embed_dim": ("mixer_size",),
    "mixing_embed_dim": ("mixer_size",),
    "n_block": ("num_blocks",),
    "n_envs": ("num_envs",),
    "n_epochs": ("num_epochs",),
    "n_head": ("num_heads",),
    "n_minibatch_iters": ("num_epochs",),
    "n_steps": ("rollout_length",),
    "num_eval_episodes": ("evaluation_episodes",),
    "num_evaluation": ("num_evaluations",),
    "num_minibatch": ("num_minibatches",),
    "num_steps": ("rollout_length",),
    "num_updates_per_iter": ("num_updates_per_rollout",),
    "obs_agent_id": ("agent_id",),
    "policy_frequency": ("policy_delay",),
    "policy_lr": ("policy_learning_rate",),
    "polyak_tau": ("polyak",),
    "ppo_epochs": ("num_epochs",),
    "q_lr": ("q_learning_rate",),
    "recurrent_chunk_size": ("recurrent_chunk",),
    "rollout_steps": ("rollout_length",),
    "seed": ("seeds",),
    "target_network_frequency": ("target_update_period",),
    "target_update_interval": ("target_update_period",),
    "tau": ("polyak",),
    "timestep_chunk_size": ("chunk_size",),
    "total_frames": ("total_steps",),
    "total_timesteps": ("total_steps",),
    "update_epochs": ("num_epochs",),
    "value_coef": ("value_weight",),
    "vf_coef": ("value_weight",),
}
"""What SB3, CleanRL, BenchMARL, JaxMARL and Mava call our settings, in small letters."""


def current(fields: Fields, kinds: Mapping[str, tp.Any]) -> dict[str, tp.Any]:
    """Return settings from a file under the names of now, where `kinds` are those that there are, with their
    types; refused where it has one under both names."""
    result: dict[str, tp.Any] = {}
    for name, value in fields.items():
        new = field(name, kinds)
        if new != name and new in fields:
            raise SableError(f"field {name!r} stands beside {new!r}, which is what it is called now")
        result[new] = _value(new, value, kinds.get(new))
    return result


def complete(fields: Fields, kinds: Mapping[str, tp.Any]) -> dict[str, tp.Any]:
    """Return the same with what settings were that are younger than the file."""
    return {name: value for name, value in ABSENT.items() if name in kinds} | current(fields, kinds)


def field(name: str, names: Collection[str]) -> str:
    """Return a setting's name as it is now, where `names` are those that there are."""
    return _if_known(FIELDS.get(name), name, names)


def _if_known(new: str | None, name: str, names: Collection[str]) -> str:
    return new if new is not None and new in names and name not in names else name


def _value(name: str, value: tp.Any, kind: tp.Any = None) -> tp.Any:
    """Return a setting's value, or each of those in a list, as it is called now; as it is where its type
    still has it."""
    if isinstance(value, list):
        return [_value(name, one, kind) for one in value]
    if not isinstance(value, str) or (tp.get_origin(kind) is tp.Literal and value in tp.get_args(kind)):
        return value
    return VALUES.get(name, {}).get(value, value)


def change(text: str) -> str:
    """Return a part of a system's variant, such as compute=bfloat16, as it is written now."""
    name, equals, value = text.partition("=")
    key = name.replace("-", "_")
    if not equals or (key not in FIELDS and key not in VALUES):
        return text
    new = FIELDS.get(key, key)
    return f"{new.replace('_', '-')}={_value(new, value)}"


def label(text: str) -> str:
    """Return what a run's system is called in reports, with its changes as they are written now."""
    return " ".join(map(change, text.split(" ")))


def command(text: str, names: Collection[str]) -> str:
    """Return a command's text with its flags as they are written now."""

    def flag(match: re.Match[str]) -> str:
        return "--" + field(match[1].replace("-", "_"), names).replace("_", "-")

    return re.sub(r"(?<!\S)--([a-z-]+)", flag, text)


def folder(name: str) -> str:
    """Return the name that a cell's folder would be given now."""
    return "+".join(map(change, name.split("+")))


def leaf(name: str) -> str:
    """Return the place of an array in a run's state, or in parameters, as it is called now."""
    for old, new in LEAVES:
        name = re.sub(old, new, name)
    return name


def leaves(saved: Iterable[str], wanted: Collection[str]) -> dict[str, str]:
    """Return the names of saved arrays by those of now; a name that is wanted as it is stays."""
    return {name if name in wanted else _if_known(leaf(name), name, wanted): name for name in saved}


def near(name: str, names: Collection[str]) -> str:
    """Return, to end a refusal of an unknown name with: what it is called now, what others' word for it is
    here, or the nearest that there is."""
    key = name.lstrip("-").replace("-", "_").lower()
    known = {other.lstrip("-").replace("-", "_"): other for other in names}
    new = FIELDS.get(key) or ARGUMENTS.get(key)
    if new in known:
        return f"; it is now called {known[new]}"
    if here := [known[ours] for ours in HINTS.get(key, ()) if ours in known]:
        return f"; here it is {' or '.join(here)}"
    return suggest(name, names)


def refuse(arguments: Collection[str], names: Collection[str]) -> None:
    """Refuse an argument of a command that is one of these `names` now, with its new name."""
    for name in arguments:
        if ARGUMENTS.get(name) in names:
            raise SableError(f"unknown argument {name!r}{near(name, names)}")


def near_value(name: str, value: tp.Any, values: Collection[str]) -> str:
    """Return what a value that a setting had is called now, to end its refusal with."""
    new = VALUES.get(name, {}).get(value) if isinstance(value, str) else None
    return f"; {value!r} is now called {new!r}" if new in values else ""
