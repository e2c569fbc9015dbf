"""PettingZoo parallel environments for tests; imported by worker processes too."""

import ctypes
import os
import signal
import sys
import time

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete


class Delayed:
    """`probe/delayed` as a Python environment: the first action decides, the last step pays."""

    possible_agents = ("a", "b")
    max_cycles = 4

    def __init__(self, fails_at=None, how="raise"):
        self.fails_at, self.how, self.steps = fails_at, how, 0

    def observation_space(self, agent):
        return Box(0, 1, (4,), np.float32)

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.time = list(self.possible_agents), 0
        return self.seen(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.steps += 1
        if self.steps == self.fails_at:
            self.fail()
        if self.time == 0:
            self.chosen = dict(actions)
        paid = {agent: float(self.time == 3 and self.chosen[agent] == 1) for agent in self.agents}
        self.time += 1
        over = dict.fromkeys(self.agents, self.time == 4)
        result = self.seen(), paid, over, dict.fromkeys(self.agents, False), {a: {} for a in self.agents}
        if self.time == 4:
            self.agents = []
        return result

    def seen(self):
        return {agent: np.eye(5, 4, dtype=np.float32)[self.time] for agent in self.agents}

    def fail(self):
        if self.how == "raise":
            raise ValueError("the motor\nis stuck")
        if self.how == "hang":
            time.sleep(600)
        if self.how == "hang-deaf":  # no other thread of Python's gets to run, and no handler of signals
            ctypes.PyDLL(None).sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)


class Leaving:
    """Three unlike agents; `c` leaves after two steps, and all are cut short after five. Views say the step,
    the agent and its last action; masks come in the observation (`a`), in the info (`b`), or not (`c`)."""

    possible_agents = ("a", "b", "c")

    def __init__(self, mask=(1, 0, 1), seeded=True):
        self.mask, self.seeded = mask, seeded

    def observation_space(self, agent):
        masked = Dict({"observation": Box(-9, 9, (2, 2)), "action_mask": Box(0, 1, (3,), np.int8)})
        return {"a": masked, "b": Box(-9, 9, (3,)), "c": Discrete(5)}[agent]

    def action_space(self, agent):
        return {"a": Discrete(3), "b": Discrete(2, start=7), "c": Discrete(4)}[agent]

    def reset(self, seed=None, options=None):
        self.noise = np.random.default_rng(seed if self.seeded else None)
        self.agents, self.time, self.last = list(self.possible_agents), 0, dict.fromkeys("abc", 0)
        return self.seen()

    def step(self, actions):
        assert set(actions) == set(self.agents), "actions are for those who are there"
        self.time, self.last = self.time + 1, self.last | actions
        paid = {agent: float(self.time) for agent in self.agents}
        leaves = {agent: agent == "c" and self.time == 2 for agent in self.agents}
        cut = dict.fromkeys(self.agents, self.time == 5)
        seen, infos = self.seen()
        self.agents = [agent for agent in self.agents if not leaves[agent] and not cut[agent]]
        return seen, paid, leaves, cut, infos

    def seen(self):
        first = np.array([[self.time, 1], [self.last["a"], self.noise.random()]])
        masked = {"observation": first, "action_mask": np.array(self.mask, np.int8)}
        views = {"a": masked, "b": np.array([self.time, 2, self.last["b"]]), "c": self.time % 5}
        infos = {"a": {}, "b": {"action_mask": np.array([0, 1])}, "c": {}}
        return {a: views[a] for a in self.agents}, {a: infos[a] for a in self.agents}


class Continuous:
    """Each agent is paid for how near its action is to what it saw: -1 .. 1 stretched to its own bounds."""

    possible_agents = ("a", "b")

    def __init__(self):
        self.low = {"a": np.array([0.0, -2.0], np.float32), "b": np.array([5.0], np.float32)}
        self.high = {"a": np.array([1.0, 2.0], np.float32), "b": np.array([9.0], np.float32)}

    def observation_space(self, agent):
        return Box(-1, 1, (1,), np.float32)

    def action_space(self, agent):
        return Box(self.low[agent], self.high[agent])

    def reset(self, seed=None, options=None):
        self.agents, self.noise = list(self.possible_agents), np.random.default_rng(seed)
        self.target = self.noise.uniform(-0.75, 0.75, 2).astype(np.float32)
        return dict(zip("ab", self.target[:, None], strict=True)), {}

    def step(self, actions):
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), action
        self.actions = actions
        units = {a: 2 * (x - self.low[a]) / (self.high[a] - self.low[a]) - 1 for a, x in actions.items()}
        paid = {a: 1 - float(np.abs(units[a] - self.target[i]).max()) for i, a in enumerate("ab")}
        seen = dict(zip("ab", self.target[:, None], strict=True))
        self.agents = []
        return seen, paid, dict.fromkeys("ab", True), dict.fromkeys("ab", False), {}


def delayed(**options):
    return Delayed(**options)


def dying():
    return Delayed(fails_at=3, how="kill")


def with_spaces(**spaces):
    """`Delayed` with other action spaces."""
    env = Delayed()
    env.action_space = spaces.__getitem__
    return env


def mixed():
    return with_spaces(a=Discrete(2), b=Box(0, 1, (1,)))


def multi():
    return with_spaces(a=MultiDiscrete([2, 2]), b=MultiDiscrete([2, 2]))


def unbounded():
    return with_spaces(a=Box(-np.inf, 1, (1,)), b=Box(0, 1, (1,)))


def endless():
    env = Delayed()
    env.max_cycles = None
    return env


def in_turns():
    from mpe2 import simple_spread_v3

    return simple_spread_v3.env()


def nothing():
    return object()


def no_legal():
    return Leaving(mask=(0, 0, 0))


def talkative():
    """Prints, on both streams, when it is made and at every step; and rewards somebody it never declared."""

    class Talkative(Delayed):
        def step(self, actions):
            print("chatter on stdout")
            print("chatter on stderr", file=sys.stderr)
            observations, rewards, *others = super().step(actions)
            rewards.pop("b")
            return observations, rewards | {"zoe": 1e9}, *others

    print("chatter while made", flush=True)
    return Talkative()


def starving(how="kill"):
    """Dies as a process does that gets no memory."""

    class Starving(Delayed):
        def step(self, actions):
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "abort": signal.SIGABRT}[how])

    return Starving()


def stranger():
    class Joined(Delayed):
        def step(self, actions):
            result = super().step({a: actions[a] for a in actions})
            self.agents = [*self.agents, "zoe"]
            return result

    return Joined()


def unseeded():
    return Leaving(seeded=False)


def leaving():
    return Leaving()


def continuous():
    env = Continuous()
    env.max_cycles = 1
    return env
