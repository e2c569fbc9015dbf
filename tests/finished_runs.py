"""Runs as training leaves them, without training."""

import json
from pathlib import Path

import pytest

from sable.config.schema import SYSTEM_CONFIGS, Config, RunConfig
from sable.runs import directory as runs


@pytest.fixture(scope="session")
def make_runs():
    """A function that writes one finished run of a system with several seeds, every return 10 k + seed / 10 +
    `better` at its k-th evaluation of 1000 steps. `pace` and `peak` are what it took, `fields` its system's
    settings."""

    def make(
        out: Path,
        task: str,
        system: str,
        *,
        seeds: int = 4,
        better: float = 0.0,
        evaluations: int = 5,
        memory: bool | None = None,
        label: str = "",
        pace: float = 1_234_567.0,
        peak: float | None = 2_500_000_000,
        **fields,
    ) -> Path:
        fields |= {} if memory is None else {"memory": memory}
        config = SYSTEM_CONFIGS[system](**fields)
        run = RunConfig(
            task=task, system=system, seeds=tuple(range(seeds)), total_steps=1000 * evaluations, label=label
        )
        changed = "+".join(f"{key}={value}" for key, value in fields.items()) or "default"
        name = f"{changed}-{seeds}-{evaluations}"
        directory = runs.create(out, Config(run, config), name)
        rows = [
            {"seed": seed, "env_steps": 1000 * (k + 1), "wall_seconds": k + 0.5}
            | {"evaluation/return": 10 * k + seed / 10 + better}
            for seed in range(seeds)
            for k in range(evaluations)
        ]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        last = [10 * (evaluations - 1) + seed / 10 + better for seed in range(seeds)]
        took = {"steps_per_second": pace, "peak_memory_bytes": peak}
        runs.finish(directory, {"absolute_return": last, "halted_seeds": [], **took})
        return directory

    return make
