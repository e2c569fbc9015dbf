"""How fast one core steps our environments, and the ports of three of them to C++ in EnvPool.

    python benchmarks/ports.py
    python benchmarks/ports.py --num-envs 128 --seconds 4 --repeats 5

Needs sable[envpool]. Both sides take random actions and begin anew where an episode ends, on one core, in
turn, `repeats` times in one run; medians are printed. Before 1.2.7 EnvPool's warehouse and connector are not
Jumanji's, and are left out.
"""

import argparse
import importlib.metadata
import os
import statistics
import time
import typing as tp

CORE = max(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORE})
os.environ["JAX_PLATFORMS"] = "cpu"

TASKS = {
    "lbf/8x8-2p-2f-coop": ("LevelBasedForaging-v0", (0,)),
    "connector/con-10x10x10a": ("Connector-v2", (1, 2, 7)),
    "rware/small-4ag-easy": ("RobotWarehouse-v0", (1, 2, 7)),
}
"""Our task, EnvPool's, and from which version on it has the same rules."""
LENGTH = 128
"""Steps of ours in one call."""


def ours(name: str, num_envs: int) -> tp.Callable[[], int]:
    """Return a function that plays some steps and says how many."""
    import jax

    from sable import envs
    from sable.envs import wrappers

    env = envs.make(name)

    @jax.jit
    def play(carry, key):
        action_key, start_key, restart_key = jax.random.split(key, 3)
        waiting = wrappers.vmap_reset(env, start_key, num_envs)
        shape = (LENGTH, num_envs, env.spec.num_agents)
        actions = jax.random.randint(action_key, shape, 0, env.spec.num_actions)

        def step(carry, now):
            action, key = now  # the time step is carried, or XLA would leave out views that nobody reads
            return wrappers.step(env, waiting, carry[0], action, key), None

        return jax.lax.scan(step, carry, (actions, jax.random.split(restart_key, LENGTH)))[0]

    begin = jax.jit(lambda key: wrappers.reset(env, key, num_envs))
    carry, calls = begin(jax.random.key(0)), 0

    def some() -> int:
        nonlocal carry, calls
        carry = jax.block_until_ready(play(carry, jax.random.key(calls)))
        calls += 1
        return LENGTH * num_envs

    some()  # compiled before the clock starts
    return some


def theirs(name: str, num_envs: int, num_agents: int, num_actions: int) -> tp.Callable[[], int]:
    """Return the same for EnvPool's, with one thread."""
    import numpy as np
    from envpool import make  # pyright: ignore[reportMissingImports]

    env = make(name, env_type="gymnasium", num_envs=num_envs, num_threads=1, seed=0)
    env.reset()
    random = np.random.default_rng(0)

    def some() -> int:
        actions = random.integers(0, num_actions, (LENGTH, num_envs, num_agents)).astype(np.int32)
        for action in actions:
            env.step(action)
        return LENGTH * num_envs

    return some


def pace(some: tp.Callable[[], int], seconds: float) -> float:
    """Return the environment steps a second."""
    began, steps = time.monotonic(), 0
    while (took := time.monotonic() - began) < seconds:
        steps += some()
    return steps / took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-envs", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    version = importlib.metadata.version("envpool")
    number = tuple(map(int, version.split(".")[:3]))

    from sable.envs import parse

    print(f"EnvPool {version}, core {CORE} alone, {given.num_envs} environments; environment steps/s\n")
    print("| task | ours | EnvPool's | ours / EnvPool's |\n|---|---|---|---|")
    for name, (port, since) in TASKS.items():
        if number < since:
            print(f"| `{name}` | | not the same rules before {'.'.join(map(str, since))} | |")
            continue
        task, rates = parse(name), ([], [])
        sides = ours(name, given.num_envs), theirs(port, given.num_envs, task.num_agents, task.num_actions)
        for _ in range(given.repeats):
            for found, some in zip(rates, sides, strict=True):
                found.append(pace(some, given.seconds))
        one, other = map(statistics.median, rates)
        print(f"| `{name}` | {one:,.0f} | {other:,.0f} | {one / other:.2f} |", flush=True)


if __name__ == "__main__":
    main()
