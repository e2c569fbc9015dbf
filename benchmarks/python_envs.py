"""How fast Python environments are stepped: alone, in our workers, by training's rollout, by training.

    python benchmarks/python_envs.py
    python benchmarks/python_envs.py --workers 2 --num-envs 32 --seconds 4 --repeats 3

Needs sable[pettingzoo]. All four are taken in turn, `repeats` times, in one run; medians are printed. *Alone*
is the package's own environment in as many processes, each playing random actions in its share of them: no
array is made of anything, and nothing is sent anywhere.
"""

import argparse
import multiprocessing
import os
import statistics
import time
import typing as tp

os.environ.setdefault("JAX_PLATFORMS", "cpu")

PACKAGES = {
    "mpe2 simple_spread (3 agents)": ("mpe2.simple_spread_v3:parallel_env", {}),
    "rware tiny-2ag": ("gymnasium:make", {"id": "rware:rware-tiny-2ag-v2"}),
    "lbforaging 8x8-2p-2f": ("gymnasium:make", {"id": "lbforaging:Foraging-8x8-2p-2f-v3"}),
}


def alone(place: str, options: dict, num_envs: int, seconds: float, ready: tp.Any, rates: tp.Any) -> None:
    """Put the steps per second of some of the package's own environments into `rates`."""
    import importlib
    import warnings

    import numpy as np

    warnings.simplefilter("ignore")
    module, _, factory = place.partition(":")
    make = getattr(importlib.import_module(module), factory)
    made = [make(**options) for _ in range(num_envs)]
    random, parallel = np.random.default_rng(0), hasattr(made[0], "possible_agents")
    agents = made[0].possible_agents if parallel else range(len(made[0].action_space))
    spaces = [made[0].action_space(agent) if parallel else made[0].action_space[agent] for agent in agents]
    for i, env in enumerate(made):
        env.reset(seed=i)
    ready.wait()
    began, steps = time.monotonic(), 0
    while (took := time.monotonic() - began) < seconds:
        for env in made:
            action = [random.integers(space.n) for space in spaces]
            result = env.step(dict(zip(agents, action, strict=True)) if parallel else tuple(action))
            over = not env.agents if parallel else result[2] or result[3]
            if over:
                env.reset(seed=steps)
            steps += 1
    rates.put(steps / took)


def measure_alone(place: str, options: dict, num_envs: int, workers: int, seconds: float) -> float:
    context = multiprocessing.get_context("spawn")
    ready, rates = context.Barrier(workers), context.Queue()
    arguments = (place, options, num_envs // workers, seconds, ready, rates)
    started = [context.Process(target=alone, args=arguments) for _ in range(workers)]
    for process in started:
        process.start()
    total = sum(rates.get() for _ in started)
    for process in started:
        process.join()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()

    import jax
    import numpy as np

    import sable
    from sable import systems
    from sable.config.schema import Config, RunConfig, SableConfig
    from sable.envs.python.vector_env import PythonVectorEnv
    from sable.training import host_rollout as hosted
    from sable.training.compile import Compiler
    from sable.training.update import make_program, map_seeds

    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that play alone; ours have it anyway

    def pace(work: tp.Callable[[], int]) -> float:
        began, steps = time.monotonic(), 0
        while (took := time.monotonic() - began) < given.seconds:
            steps += work()
        return steps / took

    print(f"{given.workers} workers, {given.num_envs} environments, {os.cpu_count()} cores; steps/s\n")
    print("| environment | alone | our workers | rollout | training | rollout / alone |")
    print("|---|---|---|---|---|---|")
    for name, (place, options) in PACKAGES.items():
        env = tp.cast(
            PythonVectorEnv, sable.make_env(f"pettingzoo:{place}", **options, workers=given.workers)
        )
        run = RunConfig(task=env.task, evaluation_episodes=2)
        config = Config(run, SableConfig(num_envs=given.num_envs, rollout_length=32))
        system = systems.make("sable", env.spec, config.system)
        program = make_program(env.stub_env, system, config)
        state = map_seeds(program.start)(np.array(run.seeds, np.uint32))
        stages = hosted.make_stages(env, system, program, config, Compiler(run), state)
        random, shape = np.random.default_rng(0), (given.num_envs, env.spec.num_agents)
        env.reset("benchmark", np.arange(given.num_envs))
        run_state = stages.run_updates(state.run, 1)

        def step() -> int:
            env.step("benchmark", random.integers(0, env.spec.num_actions, shape))  # noqa: B023
            return given.num_envs

        def roll() -> int:
            stages.run_updates.collect(run_state)  # noqa: B023
            return given.num_envs * config.system.rollout_length  # noqa: B023

        def update() -> int:
            nonlocal run_state
            run_state = jax.block_until_ready(stages.run_updates(run_state, 1))  # noqa: B023
            return given.num_envs * config.system.rollout_length  # noqa: B023

        rates = [[], [], [], []]
        for _ in range(given.repeats):
            rates[0].append(measure_alone(place, options, given.num_envs, given.workers, given.seconds))
            for found, work in zip(rates[1:], (step, roll, update), strict=True):
                found.append(pace(work))
        medians = [statistics.median(each) for each in rates]
        env.close()
        cells = " | ".join(f"{median:,.0f}" for median in medians)
        print(f"| {name} | {cells} | {medians[2] / medians[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
