"""How fast a system trains on a task, where the time goes, and what it takes to compile and to hold.

    python benchmarks/throughput.py rware/tiny-4ag null/32ag --systems sable mat ippo
    python benchmarks/throughput.py rware/tiny-4ag --num-seeds 10 --embed-dim 128 --num-blocks 3
    python benchmarks/throughput.py --growth
    python benchmarks/throughput.py rware/tiny-4ag --brief --kernels 20

One JSON line per task and system, then a table; benchmarks/README.md says what each figure is. Every
measurement runs in a process of its own, since a device's peak memory is only measured, and given back, by
one. Settings are those of `sable train`; recipes are not applied.
"""

import collections
import gzip
import json
import multiprocessing
import re
import sys
import tempfile
import typing as tp
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sable import envs
from sable.cli.flags import Help, Parser, add_flags, config_bases, normalise_argv, parse
from sable.config.checks import build, check_together
from sable.config.schema import Config, PPOConfig, RunConfig, field_names, system_config
from sable.envs import tasks, wrappers
from sable.envs.base import Env
from sable.errors import SableError
from sable.runs.dry_run import DryRun, Timing, time_calls
from sable.training import device_memory as memory
from sable.training.rollout import RolloutState, collect, make_reset_pool
from sable.training.update import RunState, State

SIZES = {"num_epochs": 4, "num_minibatches": 2, "embed_dim": 64, "num_heads": 1, "num_blocks": 1}
"""What every on-policy system is measured with unless told otherwise, so that they compare."""

DEFAULTS = {"repeats": 5, "brief": False, "kernels": 0}
"""How to measure."""

GROWTH = [f"null/{number}ag" for number in (32, 128, 512, 1024, 4096)]


class Job(tp.NamedTuple):
    """One measurement."""

    config: Config
    repeats: int
    brief: bool
    kernels: int


def measure(job: Job) -> dict[str, tp.Any]:
    """The figures of one system on one task."""
    config, repeats, brief, kernels = job
    try:
        env = envs.make(config.run.task, **dict(option.split("=", 1) for option in config.run.env_options))
        dry_run = DryRun(env, config)
        state = dry_run.start()
        unit = dry_run.unit
    finally:
        in_turn.barrier.wait()  # nothing is timed while others still compile

    def step(state: State) -> State:
        return replace(state, run=unit(state.run, np.int32(1)))

    with in_turn.lock:
        update, state = time_calls(step, state, repeats)
        # Read before the parts run one by one: the peak of training alone.
        peak = max(
            (device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()
        )
        parts = {"update": update}
        state, longest = profiled(step, state, kernels) if kernels else (state, {})
        if not brief:
            assess = dry_run.assess
            parts["evaluation"], state = time_calls(lambda state: assess(state)[0], state, repeats)
            parts |= parts_of_update(dry_run, state.run, repeats)
    analysis = unit.memory_analysis()
    steps = len(config.run.seeds) * config.system.num_envs * config.system.rollout_length
    return {
        "task": config.run.task,
        "system": config.run.system,
        "agents": env.spec.num_agents,
        "seeds": len(config.run.seeds),
        "num_envs": config.system.num_envs,
        "rollout_length": config.system.rollout_length,
        "parameters": memory.num_parameters(state),
        "steps_per_second": steps / update.seconds,
        **{f"{part}_{unit}": value for part, row in parts.items() for unit, value in row._asdict().items()},
        "compile_seconds": dry_run.compile_seconds["shapes"] + dry_run.compile_seconds["unit"],
        "temporary_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "peak_bytes": peak or None,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **({"kernels": longest} if kernels else {}),
    }


def profiled(step: tp.Callable, state: tp.Any, most: int) -> tuple[tp.Any, dict[str, tuple[int, float]]]:
    """(What `step` makes of `state`, its kernels that take longest: calls and milliseconds by name)."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state = jax.block_until_ready(step(state))
        events = [
            event
            for file in Path(folder).rglob("*.trace.json.gz")
            for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        ]
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    ran = [event for event in events if "hlo_op" in event.get("args", {})]
    on_device = [event for event in ran if names[event["pid"]].startswith("/device:")]
    calls, milliseconds = collections.Counter(), collections.Counter()
    for event in on_device or ran:
        name = re.sub(r"[._]+\d+$", "", event["name"])  # XLA numbers those it has several of
        if name not in ("while", "call", "conditional"):  # their kernels are there by themselves
            calls[name] += 1
            milliseconds[name] += event["dur"] / 1e3
    return state, {name: (calls[name], total) for name, total in milliseconds.most_common(most)}


def parts_of_update(dry_run: DryRun, state: RunState, repeats: int) -> dict[str, Timing]:
    """The parts of one update, each compiled and run alone."""
    env, system, config = dry_run.env, dry_run.system, dry_run.config
    sizes = {"length": config.system.rollout_length, "reset_pool_size": config.run.reset_pool_size}

    def part(function: tp.Callable, *args: tp.Any) -> tuple[Timing, tp.Any]:
        compiled = dry_run.compiler(jax.vmap(function), *args)
        return time_calls(lambda _: compiled(*args), None, repeats)

    environment, _ = part(partial(play_blindly, env, **sizes), state.rollout_state, state.key)
    gather = partial(collect, env, system, **sizes)
    collected, (_, rollout, _) = part(gather, state.learner, state.rollout_state, state.key)
    learning, _ = part(system.learn, state.learner, rollout, state.key)
    acting = Timing(*(whole - alone for whole, alone in zip(collected, environment, strict=True)))
    return {"environment": environment, "acting": acting, "learning": learning}


def play_blindly(
    env: Env, rollout_state: RolloutState, key: jax.Array, length: int, reset_pool_size: int
) -> tuple[tp.Any, jax.Array]:
    """The environment alone: the same steps and restarts as `collect`, with random legal actions."""
    pool = make_reset_pool(env, key, rollout_state.timestep.first.shape[0], length, reset_pool_size)
    spec = env.spec

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        state, timestep, taken = carry
        waiting = wrappers.take_resets(pool, taken)
        if spec.discrete:
            action = jax.random.categorical(key, jnp.where(timestep.observation.action_mask, 0.0, -1e9))
        else:
            shape = (*timestep.first.shape, spec.num_agents, spec.action_size)
            action = jax.random.uniform(key, shape, minval=-1.0)
        state, timestep = wrappers.step(env, waiting, state, action, key)
        return (state, timestep, taken + timestep.first), timestep.reward.sum()

    taken = jnp.zeros_like(rollout_state.timestep.first, jnp.int32)
    start = (rollout_state.env_state, rollout_state.timestep, taken)
    return jax.lax.scan(step, start, jax.random.split(key, length))


class InTurn(tp.NamedTuple):
    """How the processes of a group wait for each other: until all have compiled, then for their turn."""

    barrier: tp.Any
    lock: tp.Any


in_turn: InTurn


def arm(how: InTurn) -> None:
    global in_turn
    in_turn = how


def in_processes(jobs: list[Job]) -> list[dict[str, tp.Any]]:
    """The figures of each measurement, or why there are none; all compile at once, each is timed alone."""
    context = multiprocessing.get_context("spawn")
    how = InTurn(context.Barrier(len(jobs)), context.Lock())
    with ProcessPoolExecutor(len(jobs), mp_context=context, initializer=arm, initargs=(how,)) as pool:
        return [figures(job, future) for job, future in [(job, pool.submit(measure, job)) for job in jobs]]


def figures(job: Job, future: Future) -> dict[str, tp.Any]:
    """What a measurement came to."""
    try:
        return future.result()
    except Exception as error:  # out of memory, most likely: the others go on
        why = " ".join(str(error).split())[:200]
        return {
            "task": job.config.run.task,
            "system": job.config.run.system,
            "error": f"{type(error).__name__}: {why}",
        }


def table(rows: list[dict[str, tp.Any]]) -> str:
    """The figures side by side."""
    head = "task,system,seeds,environment,acting,learning,update s,CPU-s,evaluation s,steps/s,compile s"
    lines = [[*head.split(","), "temporaries", "peak"], *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line) for line in padded)


def cells(row: dict[str, tp.Any]) -> list[str]:
    """The figures of one measurement as text. Parts are seconds and shares: of the CPU time of all threads on
    a CPU, which compares between machines, and of the clock's elsewhere."""
    basis = "cpu_seconds" if row["device"] == "cpu" else "seconds"
    parts = ("environment", "acting", "learning")
    total = sum(row.get(f"{part}_{basis}", 0) for part in parts)

    def share(part: str) -> str:
        return f"{row[f'{part}_seconds']:.3f} {row[f'{part}_{basis}'] / total:4.0%}" if total else "-"

    def seconds(name: str) -> str:
        return f"{row[f'{name}_seconds']:.3f}" if f"{name}_seconds" in row else "-"

    return [
        *(row["task"], row["system"], str(row["seeds"])),
        *map(share, parts),
        *map(seconds, ("update", "update_cpu", "evaluation")),
        *(f"{row['steps_per_second']:,.0f}", f"{row['compile_seconds']:.1f}"),
        *(memory.format_bytes(row[name]) if row[name] else "-" for name in ("temporary_bytes", "peak_bytes")),
    ]


def growth(rows: list[dict[str, tp.Any]]) -> str:
    """The exponent p of seconds per environment step ~ agents^p, for each system: 1 is linear."""
    lines = []
    for system in dict.fromkeys(row["system"] for row in rows):
        points = [(row["agents"], 1 / row["steps_per_second"]) for row in rows if row["system"] == system]
        if len({agents for agents, _ in points}) > 1:
            agents, seconds = zip(*points, strict=True)
            exponent = np.polyfit(np.log(agents), np.log(seconds), 1)[0]
            lines.append(
                f"{system}: seconds per environment step grow with agents to the power of {exponent:.2f} "
                f"({min(agents):,} to {max(agents):,} agents)"
            )
    return "\n".join(lines)


def make_parser(systems: list[str]) -> Parser:
    """A flag for every setting of a run and of these systems, beside what to measure."""
    parser = Parser("", (__doc__ or "").partition("\n")[0])
    parser.prog = parser.usage = "throughput.py"
    parser.usage += " [TASKS...] [--systems SYSTEMS...] [flags]"
    parser.add_argument("tasks", nargs="*", metavar="TASKS", help="default: rware/tiny-4ag and null/32ag")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help="default: sable")
    parser.add_argument("--num-seeds", type=int, metavar="INT", help="seeds side by side (default: 1)")
    parser.add_argument("--repeats", type=int, metavar="INT", help="timed calls (default: 5)")
    parser.add_argument("--brief", action="store_true", help="whole updates only: no parts, no evaluation")
    parser.add_argument(
        "--kernels", type=int, metavar="INT", help="also the so many kernels an update spends most time in"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="INT", help="compile so many at once; each is timed alone (default: 1)"
    )
    parser.add_argument(
        "--growth", action="store_true", help=f"fit the growth with agents (tasks: {' '.join(GROWTH)})"
    )
    left_out = ["task", "system", "seeds", "label"]
    for cls in dict.fromkeys(cls for name in systems for cls in config_bases(system_config(name))):
        add_flags(parser, cls, SIZES, left_out)
        left_out += field_names(cls)
    add_flags(parser, RunConfig, {}, left_out)
    return parser


def make_job(task: str, system: str, num_seeds: int, how: dict[str, tp.Any], given: dict[str, tp.Any]) -> Job:
    """The measurement of a system on a task; of the settings given, those that the system has."""
    cls = system_config(system)
    sizes = SIZES if issubclass(cls, PPOConfig) else {}
    fields = {name: value for name, value in (sizes | given).items() if name in field_names(cls)}
    run = {name: value for name, value in given.items() if name in field_names(RunConfig)}
    run |= {"task": task, "system": system, "seeds": tuple(range(num_seeds))}
    tasks.with_options(tasks.parse(task), dict(option.split("=", 1) for option in run.get("env_options", ())))
    job = Job(Config(build(RunConfig, run), build(cls, fields)), **how)
    check_together(job.config.system)
    return job


def main(argv: list[str]) -> None:
    first = Parser("", "")
    first.add_argument("--systems", nargs="+", default=["sable"])
    systems = first.parse_known_args(normalise_argv(argv))[0].systems
    given = parse(make_parser(systems), argv)
    given.pop("systems", None)
    fit, num_seeds, group_size = (
        given.pop(name, default) for name, default in (("growth", False), ("num_seeds", 1), ("jobs", 1))
    )
    how = {name: given.pop(name, default) for name, default in DEFAULTS.items()}
    names = given.pop("tasks", []) or (GROWTH if fit else ["rware/tiny-4ag", "null/32ag"])
    rows = []
    jobs = [make_job(task, name, num_seeds, how, given) for task in names for name in systems]
    for start in range(0, len(jobs), group_size):
        rows += (group := in_processes(jobs[start : start + group_size]))
        for row in group:
            print(json.dumps(row), flush=True)
    rows = [row for row in rows if "error" not in row]
    print(f"\n{table(rows)}")
    for row in rows if how["kernels"] else []:
        print(f"\n{row['task']} {row['system']}: milliseconds of an update, calls")
        for name, (calls, milliseconds) in row["kernels"].items():
            print(f"{milliseconds:9.2f}  {calls:6}  {name}")
    if fit:
        print(f"\n{growth(rows)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Help as text:
        print(text)
    except SableError as error:
        sys.exit(f"throughput.py: {error}")
