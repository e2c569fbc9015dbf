"""How far a run has come: its state, its clock, and the checkpoints that keep all of it."""

import threading
import time
import typing as tp
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from sable.errors import SableError
from sable.training import checkpoint, processes, records
from sable.training import device_memory as memory
from sable.training.background import Background
from sable.training.interruption import Interruption
from sable.training.loggers.logger import Logger, NullLogger
from sable.training.update import State

FACTS = ("updates", "evaluations", "training_seconds", "wall_seconds")
"""The facts a checkpoint has of how far the run had come."""

SECONDS_PER_CALL = 2.0
"""How long the device works before the host looks up: signals, progress."""

LONG_SECONDS = 3.0
"""Longer work begins with all saved: who asks a run to end does not wait long."""

SMALL_STATE, MAX_SAVING_SHARE = 2**24, 0.1
"""Bytes that are saved after every evaluation, at once. More are written in the background, and seldom
enough that this takes no larger share of a run's time."""


class Stopped(Exception):
    """The end of training before its time, with all saved: by a signal, or by a callback (None)."""

    def __init__(self, signal: int | None):
        super().__init__(signal)
        self.signal = signal


class RunProgress:
    """A run's progress, and its checkpoints: that nothing of it is lost."""

    state: State
    clock: "Clock"
    interrupted: Interruption

    def __init__(self, directory: Path, settings: checkpoint.Settings, circumstances: dict | None):
        self.directory, self.settings, self.circumstances = directory, settings, circumstances
        self.fingerprints = records.fingerprints(directory) if processes.is_main_process() else {}
        self.logger: Logger = NullLogger()
        self.writer, self._lock = Background(), threading.Lock()

    def resume_from(self, state: State, facts: dict[str, tp.Any], began: float) -> None:
        """Go on from where a checkpoint, or nothing, leaves off."""
        self.state, self.began = state, began - facts["wall_seconds"]
        self.updates, self.evaluations = facts["updates"], facts["evaluations"]
        self.clock = Clock(training_seconds=facts["training_seconds"])
        earlier, current = facts.get("circumstances", []), self.circumstances
        self.gone_through = earlier if current is None or current in earlier else [*earlier, current]
        self._saved, self._saving_seconds = time.monotonic(), 0.0
        self._snapshot = self.updates

    def wall_seconds(self) -> float:
        """Return the seconds since the run began, its interruptions left out."""
        return time.monotonic() - self.began

    def add_updates(self, num: int) -> None:
        """Note that so many updates are done, and not saved yet."""
        with self._lock:
            self.updates += num
            self.interrupted.unsaved = True

    def save(self) -> None:
        """Save a checkpoint of all there is."""
        self.logger.phase("saving")
        self.writer.wait()
        began, updates = time.monotonic(), self.updates
        current = (updates, self.evaluations, self.clock.training_seconds, self.wall_seconds())
        facts = dict[str, tp.Any](zip(FACTS, current, strict=True))
        facts["circumstances"] = self.gone_through
        parts = facts, self.settings, self.fingerprints, self.logger.metrics()
        snapshot = checkpoint.take(self.directory, updates + self.evaluations, self.state, *parts)
        self._snapshot, leads = updates, processes.is_main_process()

        def write() -> None:
            if leads:
                checkpoint.commit(snapshot)
            with self._lock:
                self.interrupted.unsaved = self.updates != updates
            self._saved = time.monotonic()
            self._saving_seconds = self._saved - began

        if memory.tree_bytes(self.state) <= SMALL_STATE:
            write()
        else:
            self.writer.start(write)

    def save_now(self) -> None:
        """Save a checkpoint of all there is, committed on return."""
        self.save()
        self.writer.wait()

    def save_in_time(self) -> None:
        """Save, unless the state is large and saving it so often would hold the run up: a fast device
        evaluates every second."""
        elapsed = time.monotonic() - self._saved
        due = not self.writer.busy() and elapsed >= self._saving_seconds / MAX_SAVING_SHARE
        # The first process knows how long writing takes.
        if processes.max_over_processes(
            int(memory.tree_bytes(self.state) <= SMALL_STATE or (due and processes.is_main_process()))
        ):
            self.save()

    def save_before(self, seconds: float) -> None:
        """Save what is not, if what comes next takes longer than a signal can wait."""
        if processes.max_over_processes(int(self.updates != self._snapshot and seconds > LONG_SECONDS)):
            self.save()

    def stop_if_asked(self) -> None:
        """Raise `Stopped` with the signal that asks for it, once all is saved; one that asks for a save gets
        it. Refused where there is nowhere to save."""
        self.logger.refuse_lost()
        self.writer.refuse_failed()
        request = processes.max_over_processes(self.interrupted.signal << 1 | self.interrupted.save)
        if request:
            self.writer.wait()
            if self.interrupted.unsaved or request == 1:
                self.save_now()
        if request == 1:
            self.interrupted.save = False
            self.logger.note(f"saved after {self.updates:,} updates, as SIGUSR1 asked")
        if signal := request >> 1:
            raise Stopped(signal)

    def close(self, kind: tp.Any, *_: tp.Any) -> None:
        """Wait for what is being written; of two errors the first is raised."""
        with suppress(SableError) if kind else nullcontext():
            self.writer.wait()


class Clock:
    """How long training has taken, and so how many updates fit into a unit."""

    def __init__(self, training_seconds: float):
        self.training_seconds = self._earlier = training_seconds
        self.per_update = self.per_evaluation = float("inf")  # not known before the first

    @contextmanager
    def training(self, num_updates: int) -> tp.Iterator[None]:
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        self.training_seconds += seconds
        self.per_update = seconds / num_updates

    @contextmanager
    def evaluating(self) -> tp.Iterator[None]:
        began = time.monotonic()
        yield
        self.per_evaluation = time.monotonic() - began

    @property
    def seconds_here(self) -> float:
        """The seconds of training in this process."""
        return self.training_seconds - self._earlier

    def updates_per_call(self) -> int:
        """Return how many updates fit between two looks of the host."""
        return max(1, int(SECONDS_PER_CALL / self.per_update))
