"""How long a trained team takes to decide, one episode at a time, on a CPU.

    python benchmarks/latency.py            # Sable, 4 and 128 agents
    python benchmarks/latency.py mat 4 32

`policy.act` is numpy in, numpy out, checks included; *bare* is the compiled function under it, called with
arrays that lie on the device already, until its result is there. The two are timed in turn, so that both
meet the same machine.
"""

import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from sable import envs, systems
from sable.config import resolve as settings
from sable.runs.policy import Policy

CALLS, WARM_UP = 400, 20


def measure(name: str, num_agents: int) -> tuple[float, float, float]:
    """Seconds: the median of `policy.act`, that of the bare function, and the 99th percentile of the
    former."""
    task = f"null/{num_agents}ag"
    spec = envs.make(task).spec
    config = settings.resolve({"task": task, "system": name}, {})
    system = systems.make(name, spec, config.system)
    team = Policy(config, spec, system.init(jax.random.key(0), system.hyper).params)
    views = np.random.default_rng(0).normal(size=(1, spec.num_agents, spec.view_size)).astype(np.float32)
    legal, first = np.ones((1, spec.num_agents, spec.num_actions), bool), np.zeros(1, bool)
    given, memory = jax.device_put((views, legal, first)), team.initial_memory(1)
    bare = jax.jit(lambda memory, *given: team.decide(team.params, memory, *given, greedy=False))
    team.reset(batch=1)
    acting, barely = [], []
    for _ in range(WARM_UP + CALLS):
        began = time.perf_counter()
        team.act(views, legal, first)
        between = time.perf_counter()
        action, memory = bare(memory, *given)
        action.block_until_ready()
        acting.append(between - began)
        barely.append(time.perf_counter() - between)
    acting, barely = acting[WARM_UP:], barely[WARM_UP:]
    return float(np.median(acting)), float(np.median(barely)), float(np.quantile(acting, 0.99))


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "sable"
    sizes = [int(size) for size in sys.argv[2:]] or [4, 128]
    print(f"{name}, batch 1, {CALLS} calls, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'agents':>8}{'act p50':>12}{'bare p50':>12}{'ratio':>8}{'act p99':>12}")
    for size in sizes:
        act, bare, slow = measure(name, size)
        print(f"{size:>8}{act * 1e3:>9.2f} ms{bare * 1e3:>9.2f} ms{act / bare:>8.2f}{slow * 1e3:>9.2f} ms")


if __name__ == "__main__":
    main()
