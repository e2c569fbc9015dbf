"""Python environments, stepped in processes of their own: many of them look like one batch of arrays.

Each worker is a fresh interpreter with one thread for numerical libraries, and steps its share of every
batch. Workers end with this object or with this process, however that ends.
"""

import contextlib
import dataclasses
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import typing as tp
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection

import jax.numpy as jnp
import numpy as np
from jax import Array

from sable.envs.base import first_timestep, next_timestep
from sable.envs.python.worker import Arrays
from sable.errors import SableError, ending
from sable.quiet import is_silent
from sable.trust import Trust, child_command, child_environment
from sable.types import EnvSpec, Observation, TimeStep

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_PATIENCE = 2.0
"""Seconds for workers to end by themselves."""
_GLANCE = 0.2
"""Seconds between two looks at whether to go on waiting."""
TIMEOUT = 600.0
"""Seconds that a worker may take for an answer, where no other number is given."""


class EnvFailed(SableError):
    """An environment raised an error, died, or does not answer."""


class PythonVectorEnv:
    """Environments of PettingZoo's kind. Not an `Env`: it is stepped by the host, a batch at a time.

    Batches have names, so that measuring does not disturb training: each name has its own environments.
    """

    spec: EnvSpec

    def __init__(self, task: str, arguments: Mapping[str, tp.Any], trust: Trust):
        options = dict(arguments)
        self._timeout = _seconds(task, options.pop("env_timeout", TIMEOUT))
        self._give_up = _never
        self.task, self.num_workers = task, options.pop("workers", None) or len(os.sched_getaffinity(0))
        if type(self.num_workers) is not int or self.num_workers < 1:
            raise SableError(
                f"{task}: option workers={self.num_workers!r}: expected a whole number of at least 1"
            )
        self._recipe = (sys.path, task, options, trust)
        self._workers: list[Worker] = []
        self._noted: set[str] = set()
        self._shares: dict[str, list[int]] = {}
        self._end = weakref.finalize(self, _end_all, self._workers)  # also when this process exits
        self._start(1)
        self.spec = EnvSpec(**self._receive(0))

    def reset(self, batch: str, seeds: np.ndarray) -> TimeStep:
        """Fresh episodes in as many environments as there are seeds; each seed fixes all of its episodes."""
        self._refuse_closed()
        started = len(self._workers)
        self._start(min(self.num_workers, len(seeds)) - started)
        for i in range(started, len(self._workers)):
            self._receive(i)
        parts = np.array_split(seeds, min(self.num_workers, len(seeds)))
        self._shares[batch] = [len(part) for part in parts]
        return self._together([("reset", batch, part) for part in parts])

    def step(self, batch: str, action: np.ndarray, *, restart: bool = True) -> TimeStep:
        """Return the time step after `action` [B, N, ..]. Where an episode is over a new one has begun, as
        behind `envs.wrappers.step`; without `restart` that environment stands still from then on."""
        self._refuse_closed()
        parts = np.split(action, np.cumsum(self._shares[batch])[:-1])
        return self._together([("step", batch, part, restart) for part in parts])

    @contextlib.contextmanager
    def abandoned_when(self, condition: tp.Callable[[], bool]) -> tp.Iterator[None]:
        """Do not wait for an answer where the condition holds, which is asked while there is none."""
        self._give_up = condition
        try:
            yield
        finally:
            self._give_up = _never

    @property
    def stub_env(self) -> "StubEnv":
        """A JAX environment of the same sizes, for programs that only want to know shapes."""
        return StubEnv(self.spec)

    def close(self) -> None:
        """End all workers."""
        self._end()

    def _together(self, requests: list[tuple]) -> TimeStep:
        """Return the answers of the workers to their requests, as one batch."""
        for worker, request in zip(self._workers, requests, strict=False):
            worker.send(request)
        answers = [self._receive(i) for i in range(len(requests))]
        if len(answers) == 1:
            return _timestep(answers[0])
        done = [answer.first.any() for answer in answers]
        columns = zip(*answers, strict=True)
        parts = [
            [x for x, any_ended in zip(column, done, strict=True) if any_ended or "final" not in name]
            for name, column in zip(Arrays._fields, columns, strict=True)
        ]
        return _timestep(Arrays(*(np.concatenate(part) if part else np.zeros(0) for part in parts)))

    def _note(self, text: str) -> None:
        """Say something of the environment, once, whichever worker found it."""
        if text not in self._noted:
            self._noted.add(text)
            if not is_silent():
                print(f"sable: {self.task}: {text}", file=sys.stderr)

    def _refuse_closed(self) -> None:
        if not self._end.alive:
            raise SableError(f"{self.task} has been closed, or has failed: make it again")

    def _start(self, count: int) -> None:
        for _ in range(count):
            self._workers.append(Worker(self._recipe))

    def _receive(self, index: int) -> tp.Any:
        """Return what a worker answers; its error, its death or its silence ends all of them and is raised in
        one line."""
        worker = self._workers[index]
        while (message := worker.receive(self._timeout, self._give_up))[0] == "note":
            self._note(message[1])
        kind, answer = message
        if kind == "done":
            return answer
        self.close()
        where = f"the environment failed in worker process {index}: " if kind == "failed" else ""
        raise EnvFailed(f"{self.task}: {where}{answer}")


@dataclasses.dataclass(frozen=True)
class StubEnv:
    """An environment in which nothing happens."""

    spec: EnvSpec

    def reset(self, key: Array) -> tuple[tuple, TimeStep]:
        return (), first_timestep(self._observe(), {})

    def step(self, state: tuple, action: Array) -> tuple[tuple, TimeStep]:
        return (), next_timestep(self._observe(), 0.0, terminated=False, truncated=False, stats={})

    def rekey(self, state: tuple, key: Array) -> tuple:
        return ()

    def _observe(self) -> Observation:
        spec = self.spec
        return Observation(
            view=jnp.zeros((spec.num_agents, spec.view_size)),
            action_mask=jnp.ones((spec.num_agents, max(spec.num_actions, 1)), bool),
            step_count=jnp.zeros((), jnp.int32),
            state=(),
        )


class Worker:
    """One process, and the line to it."""

    def __init__(self, recipe: tuple):
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self._ready = select.poll()
        self._ready.register(self.connection.fileno(), select.POLLIN)
        fd, main = theirs.fileno(), threading.current_thread() is threading.main_thread()
        program = "from sable.parent import ignore_signals; "
        program += f"ignore_signals({os.getpid()}, by_kernel={main}); "
        program += f"from sable.envs.python.worker import main; main({fd})"
        self.process = subprocess.Popen(
            [*child_command(), "-c", program],
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            # What an environment prints is no output of ours.
            stdout=subprocess.DEVNULL if is_silent() else 2,
            stderr=subprocess.DEVNULL if is_silent() else 2,
            start_new_session=True,  # Ctrl-C is for this process, which ends the workers when it is done
            env=child_environment()
            | dict.fromkeys(_THREADS, "1")
            | {"JAX_PLATFORMS": "cpu"}
            | {"PYGAME_HIDE_SUPPORT_PROMPT": "1"},
        )
        theirs.close()
        self.send(recipe)

    def send(self, request: tp.Any) -> None:
        self._sent = time.monotonic()
        with contextlib.suppress(OSError):  # it is dead; receiving from it tells why
            self.connection.send(request)

    def receive(self, timeout: float, give_up: tp.Callable[[], bool]) -> tuple[str, tp.Any]:
        """Return ("done", its answer), or what is wrong: ("wrong", ..) with the environment as it was asked
        for, ("failed", ..) while it worked."""
        try:
            while not self._ready.poll(_GLANCE * 1000):
                late = time.monotonic() > self._sent + timeout
                if late or give_up():
                    self.kill()
                    why = f"within {timeout:g} seconds (--env-timeout)" if late else "yet when interrupted"
                    return "failed", f"no answer {why}"
            return self.connection.recv()
        except (EOFError, OSError):
            return "failed", self.fate()

    def fate(self) -> str:
        """Return how it ended, in words."""
        try:
            code = self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return "the process no longer answers"
        return f"the process died ({ending(code)})"

    def kill(self) -> None:
        """End it by force, with what it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _end_all(workers: list[Worker]) -> None:
    """End all workers: by themselves, since nobody is at the other end, or by force, with what they
    started."""
    for worker in workers:
        worker.connection.close()
    deadline = time.monotonic() + _PATIENCE
    for worker in workers:
        try:
            worker.process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            worker.kill()
    workers.clear()


def _never() -> bool:
    return False


def _seconds(task: str, value: tp.Any) -> float:
    if type(value) not in (int, float) or not value > 0:
        raise SableError(f"{task}: env_timeout={value!r}: expected a number of seconds above 0")
    return float(value)


def _timestep(arrays: Arrays) -> TimeStep:
    done = arrays.first
    view, action_mask, step_count = arrays.view, arrays.action_mask, arrays.step_count
    observation = Observation(view=view, action_mask=action_mask, step_count=step_count, state=())  # pyright: ignore[reportArgumentType]
    final_observation = observation
    if done.any():
        view, action_mask, step_count = view.copy(), action_mask.copy(), step_count.copy()
        view[done], action_mask[done], step_count[done] = (
            arrays.final_view,
            arrays.final_action_mask,
            arrays.final_step_count,
        )
        final_observation = Observation(view=view, action_mask=action_mask, step_count=step_count, state=())  # pyright: ignore[reportArgumentType]
    return TimeStep(
        observation=observation,
        final_observation=final_observation,
        reward=arrays.reward,  # pyright: ignore[reportArgumentType]
        discount=arrays.discount,  # pyright: ignore[reportArgumentType]
        first=done,  # pyright: ignore[reportArgumentType]
        stats={"return": arrays.returns, "length": arrays.lengths},  # pyright: ignore[reportArgumentType]
    )
