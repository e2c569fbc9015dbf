"""A process that steps some of a run's Python environments (`hosted` starts it).

It is told what to do over a socket and ends when nobody is at its other end, or with its parent
(`sable.parent`), even inside a step that never returns. Imports no jax.
"""

import dataclasses
import sys
import typing as tp
import warnings
from multiprocessing.connection import Connection

import numpy as np

from sable.envs import custom
from sable.errors import SableError, describe


class Arrays(tp.NamedTuple):
    """Time steps of some environments, side by side; the `final` ones for those whose episode is over
    only."""

    view: np.ndarray
    action_mask: np.ndarray
    step_count: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    first: np.ndarray
    final_view: np.ndarray
    final_action_mask: np.ndarray
    final_step_count: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray


class Group:
    """Environments stepped side by side, each with its own random numbers and its episode's return."""

    def __init__(self, make: tp.Callable[[], tp.Any]):
        self.make, self.teams = make, []

    def reset(self, seeds: np.ndarray) -> Arrays:
        """Fresh episodes in as many environments as there are seeds."""
        while len(self.teams) < len(seeds):
            self.teams.append(self.make())
        self.random = [np.random.default_rng(seed) for seed in seeds]
        self.observations = [self._start(i) for i in range(len(seeds))]
        self.done, self.returns = np.zeros(len(seeds), bool), np.zeros(len(seeds), np.float32)
        sizes = self.teams[0].sizes
        no_reward = np.zeros((len(seeds), sizes.num_agents), np.float32)
        return self._answer(
            no_reward, np.ones(len(seeds), np.float32), np.ones(len(seeds), bool), self.observations
        )

    def step(self, action: np.ndarray, restart: bool) -> Arrays:
        """Return what followed; ended episodes start anew if `restart`, else stand still from then on."""
        count = len(self.observations)
        reward = np.zeros((count, self.teams[0].sizes.num_agents), np.float32)
        discount, first = np.ones(count, np.float32), np.zeros(count, bool)
        for i in range(count):
            if self.done[i]:
                continue
            self.observations[i], reward[i], first[i], terminated = self.teams[i].step(action[i])
            discount[i] = 0.0 if terminated else 1.0
        self.returns += reward.mean(-1)
        final = list(self.observations)
        if restart:
            for i in np.flatnonzero(first).tolist():
                self.observations[i] = self._start(i)
        else:
            self.done |= first
        answer = self._answer(reward, discount, first, final)
        self.returns[first & restart] = 0.0
        return answer

    def _start(self, i: int) -> tp.Any:
        return self.teams[i].reset(int(self.random[i].integers(2**31)))

    def _answer(self, reward: np.ndarray, discount: np.ndarray, first: np.ndarray, final: list) -> Arrays:
        last = [final[i] for i in np.flatnonzero(first)]
        return Arrays(
            *_stacked(self.observations),
            reward,
            discount,
            first,
            *_stacked(last or final[:1]),
            self.returns.copy(),
            np.array([observations.step_count for observations in final], np.float32),
        )


def _stacked(observations: list) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    view, action_mask, times = zip(*observations, strict=True)
    return np.stack(view), np.stack(action_mask), np.array(times, np.int32)


def main(fd: int) -> None:
    """Serve whoever holds the other end, until it is closed."""
    warnings.simplefilter("ignore")  # of environments, at every start of every worker
    with Connection(fd) as connection:
        try:
            serve(connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass
        except SableError as error:
            connection.send(("wrong", str(error)))
        except BaseException as error:  # whatever an environment raises, SystemExit included
            connection.send(("failed", describe(error)))


def serve(connection: Connection) -> None:
    path, task, arguments, trust = connection.recv()
    sys.path[:] = path
    from sable.envs.python.pettingzoo import Team

    time_limit = arguments.pop("time_limit", None)
    factory = custom.find(task, trust)
    if not callable(factory):
        raise SableError(f"{task.rpartition(':')[2]!r} is not a function or a class that makes environments")

    def team() -> Team:
        return Team(factory(**arguments), time_limit, note=lambda text: connection.send(("note", text)))

    spare = [team()]  # tells the sizes, then serves as the first
    connection.send(("done", dataclasses.asdict(spare[0].sizes)))

    def make() -> Team:
        return spare.pop() if spare else team()

    groups: dict[str, Group] = {}
    while True:
        command, name, *rest = connection.recv()
        group = groups.setdefault(name, Group(make))
        answer = group.reset(*rest) if command == "reset" else group.step(*rest)
        connection.send(("done", answer))
