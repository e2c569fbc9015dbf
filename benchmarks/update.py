"""Where the time of one update goes: environment, acting, learning; with compile time and XLA's own count of
temporary memory.

    python benchmarks/update.py rware/tiny-4ag null/32ag --systems sable mat ippo

One JSON line per task and system, then a table. Seconds are medians over `--repeats` updates after one
warm-up; CPU-seconds are those of all threads, so that they compare between machines with different numbers
of cores. The reference's figures quoted in docs/results.md were taken at the default sizes here.
"""

import argparse
import json
import statistics
import time
import typing as tp
from functools import partial

import jax
import jax.numpy as jnp

from sable import envs, systems
from sable.config import RunConfig, SystemConfig, field_names, system_config
from sable.envs import wrappers
from sable.training.loop import options
from sable.training.program import make_program
from sable.training.rollout import Situation, collect


def measure(function, *args, repeats: int) -> tuple[dict, tp.Any]:
    """Seconds of a jitted function, compile time apart, and its output."""
    began = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile(compiler_options=options(RunConfig()))
    compile_seconds = time.perf_counter() - began
    out = jax.block_until_ready(compiled(*args))
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(compiled(*args))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    analysis = compiled.memory_analysis()
    return {
        "seconds": statistics.median(walls),
        "cpu_seconds": statistics.median(cpus),
        "compile_seconds": compile_seconds,
        "temporary_bytes": getattr(analysis, "temp_size_in_bytes", None),
    }, out


def play_blindly(env, length, num_envs, situation: Situation, key):
    """The environment alone: the same steps and resets as `collect`, with random legal actions."""
    pool = wrappers.starts(env, key, num_envs)

    def step(carry, key):
        state, timestep = carry
        if env.spec.discrete:
            action = jax.random.categorical(key, jnp.where(timestep.observation.legal, 0.0, -1e9))
        else:
            action = jax.random.uniform(
                key, (num_envs, env.spec.num_agents, env.spec.action_size), minval=-1.0
            )
        state, timestep = wrappers.step(env, pool, state, action, key)
        return (state, timestep), timestep.reward.sum()

    return jax.lax.scan(step, (situation.env_state, situation.timestep), jax.random.split(key, length))


def benchmark(task: str, name: str, config: SystemConfig, num_seeds: int, repeats: int) -> dict:
    """Seconds of every part of one update of a system on `task`."""
    env = envs.make(task)
    system = systems.make(name, env.spec, config)
    program = make_program(env, system, RunConfig(task=task), config)
    state = jax.jit(partial(jax.lax.map, program.start))(jnp.arange(num_seeds, dtype=jnp.uint32)).run
    parts = {}
    parts["environment"], _ = measure(
        jax.vmap(partial(play_blindly, env, config.rollout_length, config.num_envs)),
        state.situation,
        state.key,
        repeats=repeats,
    )
    gather = partial(collect, env, system, length=config.rollout_length, pool_size=config.num_envs)
    parts["collect"], (_, rollout, _) = measure(
        jax.vmap(gather), state.learner, state.situation, state.key, repeats=repeats
    )
    parts["learn"], _ = measure(jax.vmap(system.learn), state.learner, rollout, state.key, repeats=repeats)
    unit = jax.vmap(program.unit, in_axes=(0, None))
    parts["update"], _ = measure(unit, state, jnp.int32(1), repeats=repeats)
    steps = num_seeds * config.num_envs * config.rollout_length
    parameters = sum(leaf[0].size for leaf in jax.tree.leaves(state.learner.params))
    return {
        "task": task,
        "system": name,
        "seeds": num_seeds,
        "parameters": parameters,
        "steps_per_second": steps / parts["update"]["seconds"],
        **{f"{part}_{name}": value for part, row in parts.items() for name, value in row.items()},
        "device": jax.devices()[0].device_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", default=["rware/tiny-4ag", "null/32ag"])
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--rollout-length", type=int, default=32)
    parser.add_argument("--num-epochs", type=int, default=4)
    parser.add_argument("--num-minibatches", type=int, default=2)
    parser.add_argument("--embed-dim", type=int, default=64)
    parser.add_argument("--num-heads", type=int, default=1)
    parser.add_argument("--num-blocks", type=int, default=1)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, help="default: the system's own")
    parser.add_argument("--systems", nargs="+", default=["sable"])
    parser.add_argument("--num-seeds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    tasks, names, num_seeds, repeats = (
        arguments.pop(name) for name in ("tasks", "systems", "num_seeds", "repeats")
    )
    rows = []
    for task in tasks:
        for name in names:
            config_class = system_config(name)
            fields = {key: value for key, value in arguments.items() if key in field_names(config_class)}
            rows.append(benchmark(task, name, config_class(**fields), num_seeds, repeats))
            print(json.dumps(rows[-1]), flush=True)
    print(f"\n{'task':<18}{'system':<8}{'environment':>12}{'acting':>9}{'learning':>10}", end="")
    print(f"{'update, CPU-s':>15}{'compile, s':>12}{'steps/s':>10}")
    for row in rows:
        total = row["collect_cpu_seconds"] + row["learn_cpu_seconds"]
        shares = (
            row["environment_cpu_seconds"],
            row["collect_cpu_seconds"] - row["environment_cpu_seconds"],
            row["learn_cpu_seconds"],
        )
        print(
            f"{row['task']:<18}{row['system']:<8}"
            f"{shares[0] / total:>12.0%}{shares[1] / total:>9.0%}{shares[2] / total:>10.0%}"
            f"{row['update_cpu_seconds']:>15.3f}{row['update_compile_seconds']:>12.1f}{row['steps_per_second']:>10,.0f}"
        )


if __name__ == "__main__":
    main()
