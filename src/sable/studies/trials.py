"""A tuning study: what was tried, what is being tried, what to try next. Optuna keeps the book of trials.

A study is a folder that all its workers share. Beside the book (journal.log) it holds study.json, what the
study is about, and its batches, each a run directory with points.json: which trials its seeds belong to.
"""

import contextlib
import itertools
import json
import math
import secrets
import shutil
import time
import typing as tp
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sable.config import meaning, renamed
from sable.config import resolve as settings
from sable.errors import SableError
from sable.installation import pip_install
from sable.runs import directory as runs
from sable.studies import journal

JOURNAL, POINTS, STUDY = "journal.log", "points.json", "study.json"
FIRST_SEED = 1000

PATIENCE_SECONDS = 60.0
"""How long to wait for another worker that is just choosing its next batch."""

DRAWS = 200
"""How often to draw, for one batch, until its values are different and can be used together."""

Values = dict[str, tp.Any]
Space = Mapping[str, Sequence[tp.Any]]


@dataclass(frozen=True)
class Point:
    """A trial: its number, and the values it has."""

    number: int
    values: Values


@dataclass(frozen=True)
class Batch:
    """Trials that run side by side in one program. Each has as many of the run's seeds, in their order;
    the values here are those in which the trials differ, the others are in the run's configuration."""

    directory: Path
    points: list[Point]


@dataclass(frozen=True)
class TrialRecord:
    """All that is known of a trial."""

    number: int
    state: str
    """complete, pruned, running, or fail: given up, which does not count"""
    value: float | None
    values: Values
    note: str
    batch: str

    @property
    def finished(self) -> bool:
        return self.state in ("complete", "pruned")


class Study:
    """The study in a folder, begun there if it is not; refused where it is about something else."""

    def __init__(self, directory: Path, about: Values, storage: str | None, warmup_steps: int):
        self._optuna = optuna = import_optuna()
        self.directory = directory
        with self.exclusive():
            name = _identify(directory, about)
            self._storage = journal.open_storage(optuna, storage or str(directory / JOURNAL))
            known = [study.study_name for study in optuna.get_all_study_summaries(self._storage)]
            if name not in known and self._folders():
                raise SableError(f"{directory} belongs to another storage; give the --storage it began with")
            # Pruned: what is below the median of the completed trials, once the warm-up is over.
            pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=warmup_steps)
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=name,
                direction="maximize",
                pruner=pruner,
                load_if_exists=True,
            )
        self._id = self._storage.get_study_id_from_name(name)

    @contextlib.contextmanager
    def exclusive(self) -> tp.Iterator[None]:
        """Let nobody else take a batch of this study meanwhile."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(runs.claim(self.directory))
                    break
                except runs.Claimed:
                    if time.monotonic() > deadline:
                        raise
            yield

    def records(self) -> list[TrialRecord]:
        """Return all trials, in their order."""
        batches = {point.number: batch.directory.name for batch in self.batches() for point in batch.points}
        return [
            TrialRecord(
                number=trial.number,
                state=trial.state.name.lower(),
                value=trial.value,
                values=dict(trial.params),
                note=trial.user_attrs.get("note", ""),
                batch=batches.get(trial.number, ""),
            )
            for trial in self._study.get_trials(deepcopy=False)
        ]

    def batches(self) -> list[Batch]:
        """Return all batches that were begun."""
        return [_read_batch(folder) for folder in self._folders() if (folder / POINTS).exists()]

    def running(self) -> set[int]:
        """Return the numbers of the trials that were begun and have not ended."""
        state = self._optuna.trial.TrialState.RUNNING
        return {trial.number for trial in self._study.get_trials(deepcopy=False, states=(state,))}

    def take(
        self, hold: contextlib.ExitStack, trials: int, begin: Callable[[int, str], Batch]
    ) -> Batch | None:
        """Return the next batch for this worker, claimed until `hold` ends: one that a dead worker left
        behind, or a new one of `begin(most trials, name)`; None where all `trials` are done or in other
        hands."""
        with self.exclusive():
            self._clear()
            batches = self.batches()
            for batch in batches:
                if self._unfinished(batch) and not runs.is_claimed(batch.directory):
                    hold.enter_context(runs.claim(batch.directory))
                    if self._unfinished(batch):
                        return batch
                    hold.close()  # its worker was just about to end it
            records = self.records()
            running = {trial.number for trial in records if trial.state == "running"}
            in_hands = running & {point.number for batch in batches for point in batch.points}
            for number in running - in_hands:
                self.give_up(number, "its worker ended before it began")
            left = trials - sum(trial.finished for trial in records) - len(in_hands)
            if left <= 0:
                return None
            number = 1 + _number(batches[-1].directory) if batches else 0
            batch = begin(left, f"batch-{number:03d}")
            hold.enter_context(runs.claim(batch.directory))
            return batch

    def draw(
        self, size: int, space: Space, shaping: Sequence[str], refusal: Callable[[Values], str | None]
    ) -> list[Point]:
        """Return up to `size` new trials that differ, but not in what shapes the program.

        What `refusal` has something against is given up and drawn again: it never counts.
        """
        points, why = [], None
        # Seeded by how much was drawn before, so that no two workers draw alike.
        seed, samplers = len(self._study.get_trials(deepcopy=False)), self._optuna.samplers
        tpe = samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        # What was given up teaches TPE nothing, and it might draw the same again and again.
        chance = samplers.RandomSampler(seed=seed)
        for _ in range(DRAWS):
            shared = {name: points[0].values[name] for name in shaping} if points else {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
                self._study.sampler = samplers.PartialFixedSampler(shared, chance if why else tpe)
            trial = self._study.ask()
            values = {name: trial.suggest_categorical(name, choices) for name, choices in space.items()}
            if values | shared != values:  # a trial somebody put into the book by hand
                why = "does not fit its batch"
            elif any(point.values == values for point in points):
                why = "drawn twice for one batch"
            else:
                why = refusal(values)
            if why:
                self.give_up(trial.number, why)
            else:
                points.append(Point(trial.number, values))
            if len(points) == size:
                return points
        if not points:
            raise SableError(f"none of {DRAWS} draws could be used; the last: {why}")
        return points

    def report(self, number: int, steps: int, value: float) -> bool:
        """Note a trial's return after so many steps; whether that is too little to go on. Says the same when
        told the same again."""
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
        if steps not in self._storage.get_trial(trial_id).intermediate_values:
            self._storage.set_trial_intermediate_value(trial_id, steps, value)
        return self._study.pruner.prune(self._study, self._storage.get_trial(trial_id))

    def complete(self, number: int, value: float) -> None:
        """Note that a trial ended with that value."""
        self._study.tell(number, value)

    def prune(self, number: int, note: str) -> None:
        """Note that a trial was no good; it counts as one, and as worse than all that were completed."""
        self._end(number, note, self._optuna.trial.TrialState.PRUNED)

    def give_up(self, number: int, note: str) -> None:
        """Note that a trial says nothing about its values and does not count."""
        self._end(number, note, self._optuna.trial.TrialState.FAIL)

    def _end(self, number: int, note: str, state: tp.Any) -> None:
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._id, number)
        self._storage.set_trial_user_attr(trial_id, "note", note)
        self._study.tell(number, state=state)

    def _unfinished(self, batch: Batch) -> bool:
        return not self.running().isdisjoint(point.number for point in batch.points)

    def _clear(self) -> None:
        """Remove the folder of a batch whose worker ended while it made it."""
        for folder in self._folders():
            if not (folder / POINTS).exists():
                shutil.rmtree(folder)

    def _folders(self) -> list[Path]:
        """Return the folders of batches, in the order in which they were made."""
        folders = self.directory.glob("batch-*")
        return sorted((path for path in folders if _number(path) >= 0), key=_number)


def _number(folder: Path) -> int:
    """Return the number in a batch's name; -1 for a folder of another name."""
    digits = folder.name.removeprefix("batch-")
    return int(digits) if digits.isdecimal() else -1


def write_points(batch: Batch) -> None:
    """Make a run directory the batch's own."""
    points = [{"trial": point.number, "values": point.values} for point in batch.points]
    runs.write_json(batch.directory / POINTS, {"points": points})


def import_optuna() -> tp.Any:
    """Import Optuna, quiet; refused where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise SableError(f"sable tune needs Optuna, which is not installed: {pip_install('tune')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def combinations(space: Space, names: Sequence[str]) -> int:
    """Return how many different values these dimensions can take together."""
    return math.prod(len(space[name]) for name in names)


def _read_batch(directory: Path) -> Batch:
    try:
        points = json.loads((directory / POINTS).read_text(encoding="utf-8"))["points"]
        return Batch(directory, [Point(int(point["trial"]), dict(point["values"])) for point in points])
    except (OSError, ValueError, KeyError, TypeError):
        raise SableError(
            f"{directory / POINTS} is damaged; remove {directory} to have it done again"
        ) from None


def trial_seeds(directory: Path, count: int) -> tuple[int, ...]:
    """Return the seeds of a study's first trial: from 1000 on, since results are counted on those from 0 on.

    A study begun on those keeps them.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        seeds = json.loads((directory / STUDY).read_text(encoding="utf-8"))["run"]["seeds"]
        if seeds == list(range(count)):
            return tuple(seeds)
    return tuple(range(FIRST_SEED, FIRST_SEED + count))


def _identify(directory: Path, about: Values) -> str:
    """Return the study's name in its storage; what it is about is written down, or compared where that was
    done."""
    about, path = json.loads(json.dumps(about)), directory / STUDY
    number = about.pop("meaning")
    if not path.is_file():
        name = f"{about['run']['task']} {about['run']['system']} {secrets.token_hex(4)}"
        runs.write_json(path, {"name": name, "meaning": number, **about})
        return name
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        name, parts = stored["name"], {part: dict(stored[part]) for part in about}
    except (OSError, ValueError, KeyError, TypeError):
        raise SableError(f"{path} is damaged; choose another --out") from None
    for part, fields in about.items():
        known = dict.fromkeys(fields)
        parts[part], fields = renamed.complete(parts[part], known), renamed.current(fields, known)
        for field in itertools.chain(fields, parts[part]):
            before, now = parts[part].get(field), fields.get(field)
            if before != now:
                what = f"{field} in " if part == "space" else f"{field}="
                raise SableError(
                    f"the study in {directory} was begun with {what}{before!r}, not {now!r}; "
                    "choose another --out"
                )
    plain = settings.plain_from_dict({"format": settings.FORMAT, **about})
    meaning.refuse_older(directory, meaning.number_of(stored), *plain)
    return name
