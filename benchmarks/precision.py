"""How far learning in bfloat16 is from acting in float32, before a gradient step is taken.

    python benchmarks/precision.py
    python benchmarks/precision.py rware/tiny-4ag --updates 20 --num-envs 64

Trains a seed for a few updates with `--compute-dtype bfloat16`, lets it act once more, and asks of every
action how probable the same parameters make it: the ratio, which PPO takes to be one. In float32 only the
order of sums differs; in bfloat16 every activation is rounded to 8 bits. *other form* compares bfloat16 with
bfloat16, one timestep at a time with many at once: so much at least would be left if acting were in bfloat16.
"""

import argparse
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import sable
from sable.runs.dry_run import DryRun
from sable.systems import sable as sable_system
from sable.training.rollout import collect


def log_ratios(task: str, updates: int, **fields) -> dict[str, np.ndarray]:
    """Return each way of learning's log ratios, of all actions of one rollout."""
    config = sable.configure(task, num_seeds=1, compute_dtype="bfloat16", **fields)
    dry_run = DryRun(sable.make_env(task), config)
    state, update = dry_run.program.start(jnp.uint32(0)).run, jax.jit(dry_run.program.update)
    for _ in range(updates):
        state = update(state)
    learner, key = state.learner, jax.random.key(1)
    play = jax.jit(
        lambda now: collect(dry_run.env, dry_run.system, learner, now, key, config.system.rollout_length, 0)
    )
    _, rollout, _ = play(state.rollout_state)

    def log_prob(system):
        policy = sable_system.make_policy(dry_run.env.spec, system)
        given = policy.prepare(rollout.steps), rollout.start_memory, learner.order, key
        return np.asarray(
            jax.jit(lambda params: policy.evaluate_actions(params, *given).log_prob)(learner.params)
        )

    acted, half = np.asarray(rollout.steps.extras.log_prob), log_prob(config.system)
    return {
        "float32": log_prob(replace(config.system, compute_dtype="float32")) - acted,
        "bfloat16": half - acted,
        "other form": log_prob(replace(config.system, chunk_size=1)) - half,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", nargs="?", default="lbf/2s-8x8-2p-2f-coop")
    parser.add_argument("--updates", type=int, nargs="+", default=[0, 20, 100])
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--rollout-length", type=int, default=64)
    given = parser.parse_args()
    sizes = {"num_envs": given.num_envs, "rollout_length": given.rollout_length}
    print(f"{given.task}, {sizes}, {jax.devices()[0].device_kind}")
    print(f"{'updates':>8}  {'learning in':<12}{'std of ratio':>14}{'largest':>10}{'beyond 0.2':>12}")
    for updates in given.updates:
        for name, logs in log_ratios(given.task, updates, **sizes).items():
            off = np.exp(logs) - 1
            largest, beyond = np.abs(off).max(), (np.abs(off) > 0.2).mean()
            print(f"{updates:>8}  {name:<12}{off.std():>14.2g}{largest:>10.2g}{beyond:>12.1e}")


if __name__ == "__main__":
    main()
