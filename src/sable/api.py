"""What users call: every public function, the only place where a run meets what is drawn and said of it.

A call that only finds a mistake imports no jax.
"""

import itertools
import typing as tp
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sable.errors import SableError, suggest
from sable.runs import open_run as running
from sable.trust import Trust

if tp.TYPE_CHECKING:
    from sable.config.schema import Config
    from sable.envs import Task
    from sable.envs.base import Env
    from sable.envs.checker.findings import Finding
    from sable.reports.page import Report
    from sable.runs.plan import Plan, Progress
    from sable.runs.policy import Policy
    from sable.studies.benchmark import Cell, Outcome
    from sable.studies.reproduce import Measurement, Reproduction
    from sable.studies.tune import Outcome as Tuned
    from sable.training.loop import Result

__all__ = [
    "benchmark",
    "check",
    "configure",
    "evaluate",
    "evaluate_row",
    "export",
    "grid",
    "list_systems",
    "list_tasks",
    "load",
    "make_env",
    "plan",
    "publish",
    "report",
    "reproduce",
    "train",
    "tune",
    "watch",
]


def train(
    task: "str | Env | None" = None,
    *,
    system: str | None = None,
    seeds: Sequence[int] | None = None,
    num_seeds: int | None = None,
    out: str | Path = "runs",
    name: str | None = None,
    recipe: str | Path | None = None,
    resume: str | Path | None = None,
    strict: bool = False,
    requeue: bool = False,
    env_timeout: float | None = None,
    env: "str | Env | None" = None,
    trust: bool = False,
    quiet: bool = False,
    **fields: tp.Any,
) -> "Result":
    """Train a system on a task, and return the run's directory, its summary, and the signal that interrupted
    it, if one did.

    `task` is a task's name or an environment of your own; without one the built-in default is trained, with a
    budget fit for a CPU. `seeds` are (0,) unless given, or the first `num_seeds`. `fields` are those of
    `sable.config.RunConfig` and of the system's configuration. They win over a `recipe` file of your own, as
    tuning writes one, and that over the built-in recipes. `resume` goes on with a run as it was configured:
    nothing but the number of `devices` to go on with may change. Where another jax, device, number of
    devices, thread pool or source than before says that it will not be bit-exact, a `strict` one is refused.
    Where it runs code from outside sable, name that again (`env`, or `task`, and `system`, as in the run, or
    an environment itself), or `trust` it. `requeue` is for jobs that are started again: it resumes the run
    called `name` if that was begun, and returns what came of it if it has finished. A Python environment, by
    its name, that takes longer than `env_timeout` seconds (600 unless given) for an answer ends the run.
    """
    from sable.config import resolve as settings
    from sable.runs import directory as runs
    from sable.training import processes

    how: dict[str, tp.Any] = {"quiet": quiet, "strict": strict, "requeue": requeue}
    how |= {"env_timeout": env_timeout}
    if resume is not None:
        conflicts = {
            "seeds": seeds is not None,
            "num_seeds": num_seeds is not None,
            "out": str(out) != "runs",
        }
        conflicts |= {"name": name is not None, "recipe": recipe is not None, "task": None not in (task, env)}
        others = [name for name in fields if name != "devices"]
        _refuse_beside_resume([*(key for key, present in conflicts.items() if present), *others])
        env = task if env is None else env
        code_trust = running.caller_trust(env, system, trust)
        directory = runs.find(resume)
        config = runs.read_config(directory, code_trust)
        runs.refuse_batch(directory)
        runs.refuse_older_meaning(directory)
        config = settings.replace_fields(config, fields, {}) if fields else config
        claim_directory = partial(runs.claim, directory)
        return running.run_training(config, env, claim_directory, resume=True, trust=code_trust, **how)
    if strict and not requeue:
        raise SableError("strict=True is for a run to go on with: give it with resume")
    if trust or env is not None:
        raise SableError("env and trust go with resume: a new run's task and system are named already")
    system = system or "sable"
    config = configure(task, system=system, seeds=seeds, num_seeds=num_seeds, recipe=recipe, **fields)
    how["trust"] = Trust(env=config.run.task, system=config.run.system)
    if requeue and (earlier := _find_run(Path(out), config, name)) is not None:
        from sable.training.loop import Result

        if earlier.finished:
            return Result(earlier.directory, runs.read_summary(earlier.directory))
        return running.run_training(config, task, partial(runs.claim, earlier.directory), resume=True, **how)
    # A folder that cannot be used is found out before jax is imported; of several processes the first does.
    if processes.detect_processes(config.run).count == 1:
        runs.place(Path(out), config.run, name)
    claim_directory = partial(runs.claim_new, Path(out), config, name)
    return running.run_training(config, task, claim_directory, resume=False, **how)


def configure(
    task: "str | Env | None" = None,
    *,
    system: str = "sable",
    seeds: Sequence[int] | None = None,
    num_seeds: int | None = None,
    recipe: str | Path | None = None,
    **fields: tp.Any,
) -> "Config":
    """Return the checked configuration that `train` would use for the same arguments."""
    from sable.config import resolve as settings
    from sable.config.schema import RunConfig, check_actions
    from sable.envs import tasks
    from sable.envs.custom import is_custom, locate

    trust = Trust(env=task if isinstance(task, str) else None, system=system)
    quick = settings.quick_fields(system, trust) if task is None else {}
    name = task if isinstance(task, str) else f"custom/{type(task).__name__}"
    name = quick.get("task", RunConfig.task) if task is None else name
    own = settings.read_recipe(recipe, system, name, trust) if recipe is not None else {}
    run_fields, system_fields = settings.split_fields({**quick, **own, **fields}, system, trust)
    run_fields |= {"system": system, "task": name}
    if seeds is not None or num_seeds is not None:
        run_fields["seeds"] = _seeds(seeds, num_seeds)
    if isinstance(task, str) and is_custom(task):
        locate(task, trust)
        known = None  # its sizes are known once it is made
    else:
        known = tasks.parse(name) if task is None or isinstance(task, str) else None
    config = settings.resolve(run_fields, system_fields, trust)
    if known is not None:
        tasks.with_options(known, running.env_arguments(config.run))
        check_actions(system, discrete=known.num_actions > 0, task=known.id)
    return config


def plan(
    task: "str | Env | None" = None,
    *,
    system: str = "sable",
    seeds: Sequence[int] | None = None,
    num_seeds: int | None = None,
    recipe: str | Path | None = None,
    measure: bool = True,
    progress: "Progress | None" = None,
    **fields: tp.Any,
) -> "Plan":
    """Return what `train` would take for the same arguments, on this machine: parameters, memory by part, the
    most environments and seeds that fit, steps per second, the time of the whole.

    It compiles a few programs and runs a few updates, which takes a minute or more; nothing is written.
    Without `measure` it answers from shapes alone, within seconds: memory is then an estimate, and there are
    no times. `progress(plan, step)` is called before each step of the work, with what is known by then: first
    with the answer from shapes.
    """
    from sable.envs.custom import is_custom, parse

    config = configure(task, system=system, seeds=seeds, num_seeds=num_seeds, recipe=recipe, **fields)
    if is_custom(config.run.task) and parse(config.run.task).is_python:
        raise SableError(
            f"{config.run.task} is stepped in processes of its own, which sable plan cannot foresee: sable "
            "check tells its pace, and sable train, before it starts, its memory"
        )
    if task is None or isinstance(task, str):
        env = running.make_run_env(config.run, Trust(env=config.run.task))
    else:
        env = task
    from sable.runs.plan import make_plan, no_progress

    return make_plan(env, config, measure=measure, progress=progress or no_progress)


def evaluate(
    run: str | Path,
    *,
    episodes: int = 320,
    seed: int | None = None,
    env: "str | Env | None" = None,
    system: str | None = None,
    trust: bool = False,
) -> dict[str, tp.Any]:
    """Play with the best parameters of a run, and return the return of every seed with its 95 % interval.

    Where the run ran code from outside sable, name it again (`env`, or the environment itself, and `system`,
    as in the run), or `trust` the run.
    """
    from sable.config.checks import check_count
    from sable.runs import directory as runs

    check_count("episodes", episodes, 1, 2**24)
    check_count("seed", 0 if seed is None else seed, most=2**32 - 1)
    directory = runs.find(run)
    code_trust = running.caller_trust(env, system, trust)
    config = runs.read_config(directory, code_trust)
    with running.open_run_env(config.run, env, code_trust) as env:
        from sable import systems
        from sable.training import best

        learner = systems.make(config.run.system, env.spec, config.system)
        return best.evaluate_best(env, learner, config, directory, episodes=episodes, seed=seed)


def benchmark(
    *tasks: str,
    systems: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    num_seeds: int | None = None,
    out: str | Path = "benchmark",
    jobs: int = 1,
    launcher: str | None = None,
    quiet: bool = False,
    **fields: tp.Any,
) -> "Outcome":
    """Train every system on every task, each pair a run of all seeds, ten unless given, and return the
    outcome.

    `tasks` are names, patterns such as `rware/*`, or the studies `paper`, `scaling`, `ablation`, `chunk`;
    `systems` may be variants such as `sable:no-memory`. `jobs` runs share this machine at a time, or the
    `launcher` "ray" hands them to a Ray cluster. Called again, it goes on where it stopped.
    """
    from sable.studies import benchmark

    cells = grid(*tasks, systems=systems, seeds=seeds, num_seeds=num_seeds, out=out, **fields)
    return benchmark.work(cells, jobs=jobs, launcher=launcher, quiet=quiet)


def grid(
    *tasks: str,
    systems: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    num_seeds: int | None = None,
    out: str | Path = "benchmark",
    **fields: tp.Any,
) -> "list[Cell]":
    """Return the checked cells that `benchmark` would work on for the same arguments."""
    from sable.config import renamed
    from sable.studies import benchmark
    from sable.studies import grid as studies

    renamed.refuse(fields, ("jobs", "launcher"))
    num_seeds, cells = 10 if seeds is None and num_seeds is None else num_seeds, {}
    for task, variant in studies.pairs(tasks, systems):
        cell_fields = {**fields, **variant.fields, **({"label": variant.label} if variant.label else {})}
        config = configure(task, system=variant.system, seeds=seeds, num_seeds=num_seeds, **cell_fields)
        place = Path(out).expanduser().absolute()
        cell = benchmark.Cell(place, benchmark.folder_name(place, config.run, variant.name), config)
        cells.setdefault(config, cell)  # two variants may come to the same settings
    for cell in cells.values():
        benchmark.check(cell)
    return list(cells.values())


def tune(
    task: str,
    *,
    system: str = "sable",
    trials: int = 40,
    parallel_trials: int = 4,
    num_seeds: int = 1,
    out: str | Path = "tuning",
    storage: str | None = None,
    recipe: str | Path | None = None,
    quiet: bool = False,
    **fields: tp.Any,
) -> "Tuned":
    """Search for the system's best settings on a task, and return the study's folder, with recipe.toml in it,
    and the best trial.

    `trials` is how many finished ones the study is to have, `parallel_trials` how many run side by side.
    `fields` are the budget of a trial and settings that stay as given. Called again, it goes on where it
    stopped.
    """
    from sable.config import renamed
    from sable.config import resolve as settings
    from sable.studies import tune

    renamed.refuse(fields, ("parallel_trials",))
    config = configure(task, system=system, num_seeds=num_seeds, recipe=recipe, **fields)
    trust = Trust(env=task, system=system)
    _, fixed = settings.split_fields(fields, system, trust)
    study = {
        "trials": trials,
        "parallel_trials": parallel_trials,
        "out": Path(out),
        "storage": storage,
        "quiet": quiet,
    }
    return tune.tune(
        config, partial(running.make_run_env, config.run, trust), fixed=fixed, trust=trust, **study
    )


def report(
    *runs: str | Path, out: str | Path = "report", paper: bool = False, curves: str = "iqm"
) -> "Report":
    """Write the page, tables and figures that compare these runs to the folder `out`, and return them with
    notes on all that was left out. `paper` sets the paper's figures beside ours; `curves` are interquartile
    means over seeds ("iqm") or, as the paper's, means ("mean")."""
    from sable.reports import page as report

    return report.write(runs, Path(out), paper=paper, curves=curves)


def publish(
    *runs: str | Path,
    results: str | Path = "results",
    name: str | None = None,
    allow_deviations: bool = False,
    replace: bool = False,
    reason: str = "",
    remake: bool = False,
) -> tuple[list[dict[str, tp.Any]], Path | None]:
    """Publish finished runs, all of them or none: add a row for each to the ledger in the folder `results`,
    where their data and the best policy of every seed are kept. Return the rows, and the page docs/results.md
    beside the folder, if there is one, made anew also without runs. `remake` makes all rows anew from their
    data first.

    A run's row is called after its task and system, or `name`. Refused are runs that have not finished, are
    not by the paper's protocol (with `allow_deviations` their rows say so), ran code that was never
    committed, or are published already (with `replace` those rows give way, if settings or code are others:
    they stay, superseded, for that `reason`).
    """
    from sable.reports import ledger, publish, results_page

    def export_policies(directory: Path) -> Path:
        from sable.runs import policy  # and so jax, which a mistake need not wait for

        return policy.collect_policies(directory)

    options: dict[str, tp.Any] = {"name": name, "allow_deviations": allow_deviations, "replace": replace}
    folder = Path(results).expanduser()
    if remake:
        ledger.remake(folder)
    rows = publish.publish([Path(run) for run in runs], folder, export_policies, reason=reason, **options)
    page = results_page.write(folder)
    if not rows and page is None and not remake:
        raise SableError(f"there is nothing to publish: name finished runs; no page beside {results} either")
    return rows, page


def reproduce(
    row: str,
    *,
    seeds: Sequence[int] | None = None,
    out: str | Path = "reproduced",
    results: str | Path | None = None,
    trust: bool = False,
    quiet: bool = False,
) -> "Reproduction":
    """Run a row of the ledger again, with its settings and its seeds, or some of them, and return how it
    compares. Called again, it goes on where it stopped. `results` is the folder of the ledger: that of the
    current folder, or the one that came with sable, unless given. A row may name code from outside sable: it
    is run only if you `trust` the row."""
    from sable.reports import ledger

    ledger_row = ledger.require(ledger.read(None if results is None else Path(results).expanduser()), row)
    from sable.studies import reproduce  # and so numpy, which a row that is not there need not wait for

    again = reproduce.cell(ledger_row, Path(out), seeds, Trust(everything=trust))
    go_on = partial(train, quiet=quiet, trust=trust)
    return reproduce.reproduce(ledger_row, again, lambda directory: go_on(resume=directory))


def evaluate_row(
    row: str,
    *,
    seeds: Sequence[int] | None = None,
    episodes: int = 320,
    seed: int | None = None,
    results: str | Path | None = None,
    trust: bool = False,
) -> "Measurement":
    """Return how the policies that a row of the ledger keeps, of its seeds or some of them, play fresh
    episodes, beside what the row says. `results` is the folder of the ledger and of the policies. A row may
    name code from outside sable: it is run only if you `trust` the row."""
    from sable.config.checks import check_count
    from sable.reports import ledger
    from sable.studies import reproduce

    check_count("episodes", episodes, 1, 2**24)
    check_count("seed", 0 if seed is None else seed, most=2**32 - 1)
    place = None if results is None else Path(results).expanduser()
    ledger_row = ledger.require(ledger.read(place), row)
    folders = reproduce.policies(ledger_row, place or Path("results"), seeds)
    code_trust = Trust(everything=trust)
    from sable.runs import policy  # and so jax, which a mistake need not wait for

    teams = [policy.load(folder, seed=of_seed, trust=code_trust) for of_seed, folder in folders.items()]
    with running.open_run_env(teams[0].config.run, None, code_trust) as env:
        returns = policy.measure(teams, env, episodes=episodes, seed=seed)
    return reproduce.compare_policies(ledger_row, list(folders), returns)


def load(
    path: str | Path, *, seed: int | None = None, system: str | None = None, trust: bool = False
) -> "Policy":
    """Load the trained team of a run or of an exported folder, ready to act: numpy in, numpy out.

    Of a run's seeds it is the one with the highest absolute return, or the one given. Needs no suite. A
    `system` of your own is imported only if you name it here, or `trust` the folder.
    """
    from sable.runs import policy

    return policy.load(path, seed=seed, trust=Trust(system=system, everything=trust))


def export(
    run: str | Path,
    out: str | Path,
    *,
    seed: int | None = None,
    every_seed: bool = False,
    format: str = "safetensors",
    system: str | None = None,
    trust: bool = False,
) -> Path:
    """Write a run's policy into the folder `out`, to be loaded anywhere: weights (safetensors), settings, a
    model card. As `stablehlo` or `onnx` it is one step of the team as a function, which needs no sable. With
    `every_seed` the policies of all seeds, weights and settings alone, each in a folder of its number. A
    `system` of your own is imported only if you name it here, or `trust` the run."""
    formats = ("safetensors", "stablehlo", "onnx")
    if format not in formats:
        near = suggest(str(format), formats)
        raise SableError(f"unknown format {format!r}{near}; formats: {', '.join(formats)}")
    if every_seed and (seed is not None or format != "safetensors"):
        raise SableError("every_seed goes with no seed, and with safetensors alone")
    from sable.runs import policy

    code_trust = Trust(system=system, everything=trust)
    if every_seed:
        return policy.export_seeds(run, out, code_trust)
    if format == "safetensors":
        return policy.export(run, out, seed=seed, trust=code_trust)
    from sable.runs import export as deployment

    return policy.export(
        run, out, seed=seed, trust=code_trust, write=partial(deployment.write, format=format)
    )


def watch(
    run: str | Path,
    *,
    episodes: int = 1,
    seed: int | None = None,
    greedy: bool = False,
    run_seed: int | None = None,
    formats: Sequence[str] = ("gif", "html"),
    out: str | Path | None = None,
    env: "str | Env | None" = None,
    system: str | None = None,
    trust: bool = False,
    quiet: bool = True,
) -> list[Path]:
    """Write files that show how the best parameters of a run, or of an exported folder, play: a film (gif,
    mp4) and a page (html) to step through, with every agent's probabilities and what its memory weighs.

    The episodes are those that `evaluate` would play for the same `seed`, with sampled actions, or with the
    most probable ones if `greedy`. `run_seed` is which of the run's seeds plays, the best unless given. They
    are written to the folder `out`, by default `watch` in the run. Where the run ran code from outside sable,
    name it again (`env`, or the environment itself, and `system`, as in the run), or `trust` it.
    """
    from sable.config.checks import check_count
    from sable.envs.custom import is_custom, parse

    names = ("gif", "mp4", "html")
    for name in formats if not isinstance(formats, str) else (formats,):
        if name not in names:
            raise SableError(f"format {name!r} is not one of {', '.join(names)}{suggest(str(name), names)}")
    check_count("episodes", episodes, 1, 10_000)
    for name, value in (("seed", seed), ("run_seed", run_seed)):
        check_count(name, value or 0, most=2**32 - 1)
    from sable.runs import directory as runs

    directory = Path(run).expanduser()
    if not (directory / "policy.json").is_file():  # found out before jax is imported
        runs.find(directory)
    from sable.runs.policy import load
    from sable.viewer import show

    code_trust = running.caller_trust(env, system, trust)
    policy = load(directory, seed=run_seed, trust=code_trust)
    run_config = policy.config.run
    if isinstance(env, str | None) and is_custom(run_config.task) and parse(run_config.task).is_python:
        raise SableError(
            f"{run_config.task} is a Python environment, whose episodes cannot be recorded: play it with "
            "sable.load and its own viewer"
        )
    return show.watch(
        policy,
        running.make_run_env(run_config, code_trust) if isinstance(env, str | None) else env,
        directory / "watch" if out is None else Path(out).expanduser(),
        episodes=episodes,
        seed=seed,
        greedy=greedy,
        formats=(formats,) if isinstance(formats, str) else formats,
        quiet=quiet,
    )


def check(task: "str | Env", **options: tp.Any) -> "list[Finding]":
    """Check an environment by playing it at random, and return one finding per check. `task` is a name, or an
    environment of your own."""
    from sable import envs

    env = envs.make(task, Trust(env=task), **options) if isinstance(task, str) else task
    from sable.envs.checker.check import examine

    try:
        return list(examine(env))
    finally:
        if isinstance(task, str) and hasattr(env, "close"):
            env.close()  # pyright: ignore[reportAttributeAccessIssue]


def make_env(task: str, **options: tp.Any) -> "Env":
    """Make the environment of that task, with the task's options changed as given."""
    from sable import envs

    return envs.make(task, Trust(env=task), **options)


def list_tasks(suite: str | None = None) -> "list[Task]":
    """Return the tasks that have a name, with their sizes; of one suite only if it is named."""
    from sable.envs import tasks

    return tasks.list_tasks(suite)


def list_systems() -> list[str]:
    """Return the names of the learning systems."""
    from sable.config.schema import SYSTEM_CONFIGS

    return list(SYSTEM_CONFIGS)


def _find_run(out: Path, config: "Config", name: str | None) -> "Cell | None":
    """Return the run of that name, if it was begun; refused where it was with other settings."""
    from sable.studies import benchmark

    if name is None:
        raise SableError("requeue finds a run by its name: give it one (--name)")
    cell = benchmark.Cell(out.expanduser(), name, config)
    benchmark.check(cell)
    return cell if (cell.directory / "config.json").is_file() else None


def _seeds(seeds: Sequence[int] | None, num_seeds: int | None) -> tp.Any:
    from sable.config.checks import MOST_SEEDS, check_count

    if seeds is not None and num_seeds is not None:
        raise SableError(f"seeds={seeds!r} and num_seeds={num_seeds!r} were both given; give one of them")
    if seeds is not None:
        if isinstance(seeds, str) or not isinstance(seeds, tp.Iterable):
            return seeds
        return tuple(itertools.islice(seeds, MOST_SEEDS + 1))  # one more is refused, as 10^8 are
    check_count("num_seeds", num_seeds, 1, MOST_SEEDS)
    return tuple(range(tp.cast(int, num_seeds)))


def _refuse_beside_resume(names: list[str]) -> None:
    if names:
        raise SableError(
            f"resume goes on with a run as it was configured; {names[0]} cannot be given with it"
        )
