"""A PettingZoo environment of your own, stepped by worker processes.

Needs pip install 'sable-marl[pettingzoo]'. Usage: own_pettingzoo_environment.py [STEPS]
"""

import sys

import gymnasium
import numpy as np
from pettingzoo import ParallelEnv

import sable


class Echo(ParallelEnv):
    """Two agents are paid when both play the number that they see."""

    def __init__(self, max_cycles: int = 10):
        self.possible_agents, self.max_cycles = ["left", "right"], max_cycles

    def observation_space(self, agent):
        """Return what `agent` sees: one of four numbers, as a vector."""
        return gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32)

    def action_space(self, agent):
        """Return what `agent` may play."""
        return gymnasium.spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        """Begin an episode."""
        self.random, self.time, self.agents = np.random.default_rng(seed), 0, list(self.possible_agents)
        return self._look(), {agent: {} for agent in self.agents}

    def step(self, actions):
        """Pay, and show another number."""
        reward = float(all(action == self.number for action in actions.values()))
        self.time += 1
        late = {agent: self.time >= self.max_cycles for agent in self.agents}
        never, infos = dict.fromkeys(self.agents, False), {agent: {} for agent in self.agents}
        rewards = dict.fromkeys(self.agents, reward)
        views = self._look()
        if self.time >= self.max_cycles:
            self.agents = []
        return views, rewards, never, late, infos

    def _look(self):
        self.number = int(self.random.integers(4))
        return {agent: np.eye(4, dtype=np.float32)[self.number] for agent in self.agents}


if __name__ == "__main__":  # workers import this file too: they must not train
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40_000
    fields = {"num_envs": 8, "rollout_length": 20, "num_evaluations": 4}
    name = "pettingzoo:own_pettingzoo_environment:Echo"  # this module; here because its folder is on the path
    result = sable.train(name, system="ippo", total_steps=steps, video=False, **fields)
    print("return:", result.summary["absolute_return"], "of 10")
