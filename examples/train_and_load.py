"""Train a team, measure it, and let it act in a loop of your own. Usage: train_and_load.py [STEPS]."""

import sys

import jax
import numpy as np

import sable

TASK = "lbf/2s-8x8-2p-2f-coop"  # two agents must load food together
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500_000

fields = {"num_envs": 32, "rollout_length": 64, "num_evaluations": 4, "video": False}
result = sable.train(TASK, num_seeds=2, total_steps=steps, **fields)
print("folder:", result.directory)
print("absolute return of each seed:", result.summary["absolute_return"])

policy = sable.load(result.directory)  # the best seed
env = sable.make_env(TASK)
reset, step = jax.jit(env.reset), jax.jit(env.step)

policy.reset(batch=1, seed=1)
state, timestep = reset(jax.random.key(1))
total = 0.0
for _ in range(env.spec.time_limit):
    seen = timestep.observation
    actions = policy.act(np.asarray(seen.view)[None], legal=np.asarray(seen.action_mask)[None])
    state, timestep = step(state, actions[0])
    total += float(timestep.reward.mean())
    if timestep.first:  # the episode is over
        break
print(f"return of one episode: {total:.2f}")
