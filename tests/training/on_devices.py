"""What `test_devices.py` has done on eight simulated devices: run as a script, which prints JSON.

on_devices.py JOB...: a system and splits such as sable:4x2,1x8, to compare some updates with one device's; or
a folder, for whole runs in it that are stopped and resumed on other devices.
"""

import json
import os
import re
import shutil
import signal
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import numpy as np

from sable import systems
from sable.config.schema import Config, RunConfig, field_names, system_config
from sable.envs.suites.probes import PROBES
from sable.training import checkpoint, devices, loop, progress
from sable.training import update as programs
from sable.training.compile import Compiler
from sable.training.loggers.logger import Logger, read_rows

FIELDS = {"num_envs": 16, "rollout_length": 4, "num_epochs": 2, "num_minibatches": 2, "embed_dim": 16}
FIELDS |= {"policy_layers": (8, 8), "critic_layers": (8, 8), "q_layers": (8, 8), "recurrent_size": 8}
FIELDS |= {"replay_size": 1024, "sequence_length": 4, "warmup_sequences": 4, "warmup_steps": 16}
FIELDS |= {"num_updates_per_rollout": 4, "batch_size": 8, "memory": True, "recurrent_chunk": 2}
UPDATES = 3
RUN_FIELDS = {"seeds": (3,), "total_steps": 4 * 64, "num_evaluations": 2, "evaluation_episodes": 8}
RUN_FIELDS |= {"absolute_episodes": 16}


def make_parts(variant, **run_fields):
    """A small run of a system; `sable-fused` decodes by the fused kernel."""
    system, _, decoding = variant.partition("-")
    cls, task = system_config(system), "continuous" if "sac" in system else "recall"
    config = cls(**{name: value for name, value in FIELDS.items() if name in field_names(cls)})
    config = replace(config, decoding=decoding) if decoding else config
    run = RunConfig(task=f"probe/{task}", system=system, seeds=tuple(range(20, 28)), precision="highest")
    env = PROBES[task]
    return env, systems.make(system, env.spec, config), Config(replace(run, **run_fields), config)


def updates(system, splits):
    """After one update and after some: how far each split is from one device, and who holds what."""
    alone = make_parts(system)
    program = programs.make_program(*alone)
    seeds = np.array(alone[2].run.seeds, np.uint32)
    first = Compiler(alone[2].run)(programs.map_seeds(program.start), seeds)(seeds)
    unit = Compiler(alone[2].run)(jax.vmap(program.run_updates, (0, None)), first.run, np.int32(1))
    expected = [unit(first.run, np.int32(n)) for n in (1, UPDATES)]
    return {split: _on(split, alone, first, expected) for split in splits}


def _on(split, parts, first, expected):
    num_seeds, sharers = map(int, split.split("x"))
    env, system, config = parts
    run = replace(config.run, seeds=config.run.seeds[:num_seeds], devices=num_seeds * sharers)
    config = replace(config, run=run)
    mesh = devices.make_mesh(config)
    state = jax.tree.map(lambda x: x[:num_seeds], first)
    places = devices.state_shardings(mesh, state)
    state = devices.put_state(state, places)
    unit = devices.vmap_seeds(mesh, programs.make_program(env, system, config).run_updates, (0, None))
    unit = Compiler(run, mesh)(unit, state.run, np.int32(1), out=places.run)
    found = [unit(state.run, np.int32(n)) for n in (1, UPDATES)]
    same = [jax.tree.map(lambda x: x[:num_seeds], state) for state in expected]
    return {
        "split": list(mesh.devices.shape),
        "params": [deviation(a.learner.params, b.learner.params) for a, b in zip(found, same, strict=True)],
        "gradients": [deviation(momenta(a), momenta(b)) for a, b in zip(found, same, strict=True)],
        "rollout_state": [
            distance(a.rollout_state, b.rollout_state) for a, b in zip(found, same, strict=True)
        ],
        "metrics": [
            distance(a.metric_sums, b.metric_sums, floor=1.0) for a, b in zip(found, same, strict=True)
        ],
        "shares": {name: shares(getattr(found[1], name)) for name in ("rollout_state", "learner", "halted")},
        "collectives": collectives(unit.as_text()),
    }


def momenta(run):
    """The means of gradients that Adam keeps, by their place in the learner."""
    leaves = jax.tree.leaves_with_path(run.learner)
    return {name: leaf for path, leaf in leaves if ".mu" in (name := jax.tree_util.keystr(path))}


def deviation(found, expected):
    """The length of the difference of two trees, taken as vectors, relative to the length of the second."""
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (found, expected))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def distance(found, expected, floor=1e-12):
    """The largest difference of two trees, each leaf relative to its own largest number, `floor` at least."""
    distances = [0.0]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(checkpoint._raw(x)).astype(np.float64) for x in (a, b))
        distances.append(float((np.abs(a - b) / max(np.abs(b).max(initial=0), floor)).max(initial=0)))
    return max(distances)


def shares(tree):
    """The part of each array that one device holds: the numbers that occur."""
    return sorted({x.addressable_shards[0].data.size / x.size for x in jax.tree.leaves(tree) if x.size})


def collectives(program):
    """(kind, whether inside a loop of an update) of all communication in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    lines = [line for line in program.splitlines() if re.search(rf" ({kinds})(-start)?\(", line)]
    return sorted({(re.search(kinds, line)[0], "jit(collect_and_learn)/while" in line) for line in lines})


def runs(directory):
    """How runs end: whole on one device or on eight, and stopped on eight and resumed on others."""
    parts = {num: make_parts("masac", devices=num, **RUN_FIELDS) for num in (1, 8)}

    def train(num, name, stop_after=None):
        (place := directory / name).mkdir(exist_ok=True)
        resume = (place / checkpoint.FOLDER).exists()
        with interrupting(stop_after):
            return loop.train_loop(*parts[num], place, resume=resume, quiet=True)

    train(8, "8 8", stop_after=1)
    shutil.copytree(directory / "8 8", directory / "8 1 8")
    train(1, "8 1 8", stop_after=3)
    ends = {name: train(num, name) for name, num in {"1": 1, "8": 8, "8 8": 8, "8 1 8": 8}.items()}
    begin = programs.map_seeds(programs.make_program(*parts[1]).start)
    like = jax.eval_shape(begin, np.zeros(1, np.uint32))
    states = {name: checkpoint.restore(directory / name, like).state for name in ends}
    return {
        name: {
            "absolute": end.summary["absolute_return"],
            "rows": timeless(read_rows(end.directory / "metrics.jsonl")),
            "from 1": distance(states[name], states["1"]),
            "from 8": distance(states[name], states["8"]),
        }
        for name, end in ends.items()
    }


@contextmanager
def interrupting(stop_after):
    """Runs are sent a signal after so many updates."""

    class Interrupting(Logger):
        def progress(self, steps, seconds_training):
            super().progress(steps, seconds_training)
            if steps == stop_after * 64:
                os.kill(os.getpid(), signal.SIGTERM)

    before = loop.Logger, progress.SECONDS_PER_CALL
    loop.Logger, progress.SECONDS_PER_CALL = (Interrupting, 0.0) if stop_after else before
    yield
    loop.Logger, progress.SECONDS_PER_CALL = before


def timeless(rows):
    return [{name: value for name, value in row.items() if name != "wall_seconds"} for row in rows]


if __name__ == "__main__":
    done = {}
    for job in sys.argv[1:]:
        name, _, splits = job.partition(":")
        done[name] = updates(name, splits.split(",")) if splits else runs(Path(name))
    print(json.dumps(done))
