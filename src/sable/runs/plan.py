"""What a run will take, before it runs: at once from shapes alone (`estimate`), then memory from XLA's own
count of programs that are compiled and not run, and time from a few updates.

Two or three compilations tell the largest run that fits (`sizes`).
"""

import dataclasses
import datetime
import typing as tp
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from sable.config.schema import Config
from sable.envs.base import Env
from sable.runs import fit as sizes
from sable.runs.dry_run import DryRun, Timing, time_calls
from sable.runs.estimate import temporary_bytes
from sable.training import device_memory as memory
from sable.training import job
from sable.training.update import State

PROBE_SECONDS = 6.0
"""How long a probe may take; there are three: updates at a small size, at the run's own, and evaluation."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The needs of a run. Bytes are those of one device, all its seeds together."""

    task: str
    system: str
    num_seeds: int
    num_envs: int
    parameters: int
    """of one seed"""
    updates: int
    steps_per_update: int
    """environment steps of one seed"""
    device: str
    measured: bool
    """Whether memory is XLA's own count of the compiled programs; else it is told from shapes."""
    memory: dict[str, int]
    """bytes by part"""
    needed_bytes: int
    available_bytes: int
    fits: bool
    largest_num_envs: int | None
    """with these seeds; None: memory does not grow with them"""
    largest_num_seeds: int
    """with these environments"""
    compile_seconds: float | None = None
    """This and what follows is None where nothing was measured: not even a small part of the run fits."""
    update_seconds: float | None = None
    evaluation_seconds: float | None = None
    steps_per_second: float | None = None
    """environment steps of all seeds, training alone"""
    total_seconds: float | None = None
    probed_num_envs: int | None = None
    """environments of the updates that were timed: fewer where the run's own would take too long"""


Progress = tp.Callable[["Plan", str], None]
"""Called with what is known so far and what is done next."""


def no_progress(plan: Plan, step: str) -> None:
    """Say nothing."""


@memory.explain_out_of_memory()
def estimate(dry_run: DryRun) -> Plan:
    """Return what training would take as far as shapes alone tell it: nothing is compiled, nothing is run."""
    config, room = dry_run.config, sizes.memory_limit()
    parts = _estimated_parts(dry_run)
    needed = sum(parts.values())
    growing = needed - parts["parameters"] - parts["optimiser"] - parts["replay"]
    steps_per_update = config.system.num_envs * config.system.rollout_length
    return Plan(
        task=config.run.task,
        system=config.run.system,
        num_seeds=len(config.run.seeds),
        num_envs=config.system.num_envs,
        parameters=memory.num_parameters(dry_run.state),
        updates=job.schedule(config.run, steps_per_update)[-1],
        steps_per_update=steps_per_update,
        device=jax.devices()[0].device_kind,
        measured=False,
        memory=parts,
        needed_bytes=needed,
        available_bytes=memory.capacity().available,
        fits=needed <= room,
        largest_num_envs=sizes.estimate_envs(dry_run, needed, growing, room),
        largest_num_seeds=sizes.estimate_seeds(dry_run, needed, room),
    )


@memory.explain_out_of_memory()
def make_plan(env: Env, config: Config, *, measure: bool = True, progress: Progress = no_progress) -> Plan:
    """Return what training `run` would take here: from shapes, then from compilations and a few updates."""
    dry_run = DryRun(env, config)
    found = estimate(dry_run)
    if not measure:
        return found
    other, room = DryRun(env, sizes.other_size(config)), sizes.memory_limit()
    progress(found, f"compiling an update of {config.system.num_envs} environments")
    found = dataclasses.replace(
        found,
        measured=True,
        memory=_counted_parts(dry_run),
        needed_bytes=dry_run.needed,
        fits=dry_run.needed <= room,
    )
    progress(found, f"compiling one of {other.config.system.num_envs}, to see what more environments cost")
    found = dataclasses.replace(found, largest_num_envs=sizes.max_envs(dry_run, other, room))
    progress(
        found, "compiling one of two seeds" if len(config.run.seeds) == 1 else "looking for the most seeds"
    )
    found = dataclasses.replace(found, largest_num_seeds=sizes.max_seeds(dry_run, room))
    boundaries = job.schedule(config.run, found.steps_per_update)
    return dataclasses.replace(found, **_times(dry_run, other, boundaries, room, partial(progress, found)))


def format_plan(plan: Plan) -> str:
    """Return the plan as a table."""
    words, about = memory.format_bytes, "" if plan.measured else "about "
    seeds = f" x {plan.num_seeds} seeds" if plan.num_seeds > 1 else ""
    rows = [
        ("parameters", f"{plan.parameters:,}"),
        ("updates", f"{plan.updates:,} of {plan.steps_per_update:,} steps{seeds}"),
        ("memory", f"{about}{words(plan.needed_bytes)} of {words(plan.available_bytes)} on {plan.device}"),
        *((f"  {part}", words(num_bytes)) for part, num_bytes in plan.memory.items() if num_bytes),
        ("fits", "yes" if plan.fits else "no"),
        ("largest num_envs", "any" if plan.largest_num_envs is None else f"{plan.largest_num_envs:,}"),
        ("largest num_seeds", f"{plan.largest_num_seeds:,}"),
    ]
    if plan.total_seconds is not None:
        few = f", from {plan.probed_num_envs} environments" * (plan.probed_num_envs != plan.num_envs)
        rows += [
            ("compiling", f"{plan.compile_seconds:.0f} s"),
            ("an update", f"{plan.update_seconds:.3g} s{few}"),
            ("an evaluation", f"{plan.evaluation_seconds:.3g} s"),
            ("steps/s", f"{plan.steps_per_second:,.0f}"),
            ("the whole run", str(datetime.timedelta(seconds=round(plan.total_seconds)))),
        ]
    return "\n".join(f"{name:<22}{text}" for name, text in rows)


def _counted_parts(dry_run: DryRun) -> dict[str, int]:
    """Return the bytes of each part of the run on one device, by XLA's count; they add up to what it
    needs."""
    temporaries = dry_run.unit.memory_analysis().temp_size_in_bytes
    parts = _state_parts(dry_run) | {"rollout": min(_rollout_bytes(dry_run), temporaries)}
    return parts | {"other temporaries": dry_run.needed - sum(parts.values())}


def _estimated_parts(dry_run: DryRun) -> dict[str, int]:
    """Return the same by shapes alone."""
    temporaries = temporary_bytes(dry_run.update) * len(dry_run.config.run.seeds) // _num_devices(dry_run)
    rollout = min(_rollout_bytes(dry_run), temporaries)
    return _state_parts(dry_run) | {"rollout": rollout, "other temporaries": temporaries - rollout}


def _state_parts(dry_run: DryRun) -> dict[str, int]:
    state = dry_run.state
    learner, rollout_state = state.run.learner, state.run.rollout_state
    return {
        "parameters": memory.tree_bytes((learner.params, state.best)),
        "optimiser": memory.tree_bytes(dataclasses.replace(learner, params=(), replay=())),
        "environments": memory.tree_bytes((rollout_state.env_state, rollout_state.timestep)),
        "memories": memory.tree_bytes(rollout_state.memory),
        "replay": memory.tree_bytes(learner.replay),
    }


def _rollout_bytes(dry_run: DryRun) -> int:
    return memory.tree_bytes(dry_run.rollout) * len(dry_run.config.run.seeds) // _num_devices(dry_run)


def _num_devices(dry_run: DryRun) -> int:
    return dry_run.config.run.devices or jax.device_count()


def _times(
    dry_run: DryRun,
    other: DryRun,
    boundaries: list[int],
    room: int,
    progress: tp.Callable[[str], None],
) -> dict[str, tp.Any]:
    """Return the fields of a Plan that take running to know: the small program first, then the run's own if
    that will not take long."""
    run, num_envs = dry_run.config.run, dry_run.config.system.num_envs
    small = min(dry_run, other, key=lambda each: each.config.system.num_envs)
    if small.needed > room:
        return {}
    progress(f"timing updates of {small.config.system.num_envs} environments")
    update, state = _timed_updates(small, small.start())
    progress("compiling and timing an evaluation")
    assess = small.assess  # compiled before the clock starts
    evaluation, _ = time_calls(lambda state: assess(state)[0], state, 1, patience=PROBE_SECONDS)
    del state
    probed, seconds = small, update.seconds * num_envs / small.config.system.num_envs
    # Accelerators take hardly longer for many environments than for few: there this is far too much.
    likely = seconds if jax.default_backend() == "cpu" else seconds / 10
    if small is not dry_run and dry_run.needed <= room and likely <= PROBE_SECONDS:
        progress(f"timing updates of {num_envs} environments")
        update, _ = _timed_updates(dry_run, dry_run.start())
        probed, seconds = dry_run, update.seconds
    compiling = dry_run.compile_seconds["shapes"] + dry_run.compile_seconds["unit"]
    # Evaluation is compiled twice, for its own episodes and for those of the absolute metric.
    compiling += small.compile_seconds["start"] + 2 * small.compile_seconds["assess"]
    evaluations = len(boundaries) + run.absolute_episodes / run.evaluation_episodes
    return {
        "probed_num_envs": probed.config.system.num_envs,
        "compile_seconds": compiling,
        "update_seconds": seconds,
        "evaluation_seconds": evaluation.seconds,
        "steps_per_second": len(run.seeds) * num_envs * dry_run.config.system.rollout_length / seconds,
        "total_seconds": compiling + boundaries[-1] * seconds + evaluations * evaluation.seconds,
    }


def _timed_updates(dry_run: DryRun, state: State) -> tuple[Timing, State]:
    def update(state: State) -> State:
        return dataclasses.replace(state, run=dry_run.unit(state.run, np.int32(1)))

    return time_calls(update, state, repeats=5, patience=PROBE_SECONDS)
