"""Looking for better settings: trials of a study, run in batches of one program each.

Searched fields are of two kinds. The free ones are array leaves of the learner (`System.hyper`): learners
that differ in them share a program. The others shape the program. So all points of a batch share the values
that shape it, differ in the free ones, and run side by side as the seeds of one run do.

What has been done is in the study's folder and its book of trials, nowhere else. A worker can be killed at
any moment; whoever next takes a batch of the study goes on with what it left (`trials.Study.take`).
"""

import dataclasses
import typing as tp
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

from sable.config import resolve as settings
from sable.config.checks import MOST_SEEDS, check_count, refuse_unknown
from sable.config.schema import Config, RunConfig, SystemConfig, field_names, settings_of
from sable.errors import SableError
from sable.files import require_unicode
from sable.quiet import silence_output
from sable.runs import directory as runs
from sable.studies import study_files
from sable.studies.trials import Space, Study, TrialRecord, import_optuna, trial_seeds
from sable.studies.tune_view import View
from sable.studies.worker import Worker
from sable.trust import NOTHING, Trust

if tp.TYPE_CHECKING:
    from sable.envs.base import Env

WARMUP = 0.25
"""The part of training before which no trial is pruned."""

NEEDS = {"recurrent_chunk": "memory", "target_update_period": "hard_target_update"}
"""Fields that do nothing without a switch."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of tuning: where, the best trial so far, how many are finished, and the signal that cut it
    short, if one did."""

    directory: Path
    best: TrialRecord | None
    finished: int
    interrupted: int | None = None


def tune(
    config: Config,
    make_env: "Callable[[], Env]",
    *,
    fixed: Collection[str] = (),
    space: Space | None = None,
    trials: int = 40,
    parallel_trials: int = 4,
    out: Path = Path("tuning"),
    storage: str | None = None,
    quiet: bool = False,
    trust: Trust = NOTHING,
) -> Outcome:
    """Work on the study of that run's task and system until it has so many finished trials; others may do
    the same at the same time.

    `run` is the budget of a trial, with as many seeds as each is to have, and `config` what is not searched.
    `fixed` names the system's fields that were chosen by hand and stay so. `parallel_trials` trials run side
    by side.
    """
    check_count("trials", trials, 1)
    check_count(
        "parallel_trials", parallel_trials, 1, MOST_SEEDS // len(config.run.seeds)
    )  # each seed of each is one of a run
    space = dimensions(config.run.system, config.system, fixed, space)
    import_optuna()
    directory = runs.folder(Path(out), config.run)
    require_unicode(directory)
    run = dataclasses.replace(config.run, seeds=trial_seeds(directory, len(config.run.seeds)))
    config = Config(run, config.system)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SableError(f"cannot write to {directory}: {error.strerror}; choose another --out") from None
    plain = settings.resolve({"task": run.task, "system": run.system}, {}, trust).system
    fields = {name: value for name, value in settings_of(config.system).items() if name not in space}
    constants = {name: value for name, value in fields.items() if value != getattr(plain, name)}
    about = {**settings.to_dict(config), "space": dict(space)}
    about.pop("format")
    study = Study(directory, about, storage, warmup_steps=int(WARMUP * run.total_steps))
    with silence_output(quiet), View(f"{run.task} · {run.system}", trials, quiet) as view:
        worker = Worker(study, config, make_env(), space, Path(out), parallel_trials, trust)
        while True:
            with study.exclusive():  # so that nobody's older view overwrites a newer one
                study_files.write(directory, run.task, run.system, constants, space, study.records())
            with ExitStack() as hold:
                batch = study.take(hold, trials, worker.begin)
                signal = worker.work(batch, view) if batch is not None else None
            if batch is None or signal is not None:
                records = study.records()
                return Outcome(directory, study_files.best(records), sum(t.finished for t in records), signal)


def dimensions(
    system: str, config: SystemConfig, fixed: Collection[str] = (), space: Space | None = None
) -> Space:
    """Return the fields to search, with their values: those of the system's search space, or of `space`, that
    were not given and have an effect."""
    space = settings.search_space(system, config) if space is None else space
    if not space:
        raise SableError(
            f"system {system!r} has no search space; a module of your own may have one: "
            "SEARCH_SPACE = {'learning_rate': [1e-3, 1e-4]}"
        )
    for name, values in space.items():
        if name in field_names(RunConfig):
            raise SableError(f"search space: {name} is a setting of the run, not of {system}")
        refuse_unknown({name: None}, type(config), f"of system {system!r}")
        plain = isinstance(values, (list, tuple)) and all(
            isinstance(v, (bool, int, float, str)) for v in values
        )
        if not plain or not values:
            raise SableError(
                f"search space: {name}={values!r}: expected a list of numbers, switches or texts"
            )
    idle = {name for name, switch in NEEDS.items() if not getattr(config, switch, True)}
    space = {name: list(values) for name, values in space.items() if name not in idle | set(fixed)}
    if not space:
        raise SableError(f"nothing is left to search: every field of {system}'s search space was given")
    return space
