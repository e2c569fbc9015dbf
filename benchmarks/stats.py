"""Seconds of every statistic of a comparison of the paper's size: 7 systems x 45 tasks x 10 runs.

python benchmarks/stats.py
"""

import time
from itertools import permutations

import numpy as np

from sable.reports import stats


def main() -> None:
    rng = np.random.default_rng(0)
    raw = {f"s{k}": {f"t{j}": rng.normal(k / 2, 1, 10) for j in range(45)} for k in range(7)}
    systems = stats.normalise(raw)
    series = [
        {task: rng.normal(0, 1, (10, 122)) + x[:, None] for task, x in s.items()} for s in systems.values()
    ]
    jobs = {
        "interquartile means": lambda: [stats.estimate(s) for s in systems.values()],
        "performance profiles": lambda: [stats.profile(s, np.linspace(0, 1, 81)) for s in systems.values()],
        "sample-efficiency curves": lambda: [stats.curve(s) for s in series],
        "probabilities of improvement": lambda: [
            stats.improvement(a, b) for a, b in permutations(systems.values(), 2)
        ],
        "tasks won": lambda: stats.task_wins(systems),
    }
    for name, job in jobs.items():
        began = time.perf_counter()
        job()
        print(f"{name:<30}{time.perf_counter() - began:8.2f} s", flush=True)


if __name__ == "__main__":
    main()
