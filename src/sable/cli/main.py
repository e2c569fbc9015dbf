"""The command line: what each command takes and prints. A mistake is one line on stderr, exit code 2, no
import of jax."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import signal
import sys
import typing as tp
from collections.abc import Callable, Sequence
from pathlib import Path

import sable
from sable.cli import formatting
from sable.cli.flags import Argv, Help, Parser, parse, value_parser
from sable.cli.parsers import add_trust, benchmark_parser, plan_parser, system_of, train_parser, tune_parser
from sable.config.checks import short_repr
from sable.errors import SableError, suggest
from sable.installation import DISTRIBUTION, VERSION

if tp.TYPE_CHECKING:
    from sable.runs.plan import Plan
    from sable.studies.benchmark import Cell
    from sable.training.loop import Result

_HELP = """\
Cooperative multi-agent reinforcement learning with sequence models.

  sable train                                  learn a small task in minutes, on a CPU
  sable train rware/tiny-4ag --num-seeds 3     a task of the paper, three seeds at once
  sable train smax/3s5z --learning-rate 1e-3   change a setting
  sable train --resume RUN                     go on with an interrupted run
  sable plan rware/tiny-4ag                    what that would take: memory, pace, time
  sable evaluate RUN                           play with what was learnt
  sable watch RUN                              see it: a film, and a page to step through
  sable export RUN -o FOLDER                   what was learnt, to be loaded anywhere
  sable list rware                             the tasks of a suite
  sable check module:Class                     what is wrong with an environment of your own

  sable benchmark 'lbf/*' --systems sable mat  compare systems; a study: sable benchmark paper
  sable report benchmark                       tables, curves and statistics in one page
  sable tune rware/tiny-4ag                    look for better settings
  sable reproduce                              the published results; with a ROW, run it again

Each command explains itself: sable train --help, sable train rware/tiny-4ag --help,
sable benchmark --help and so on. A run is a folder,
runs/<suite>/<task>/<system>/<name>/, with its configuration, metrics, checkpoints,
curve.png, video.gif and summary.json."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `argv`, and return its exit code."""
    if argv is None:  # else somebody else's process
        _install_signal_handlers()
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name, or a sign of ours, may not be in its encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(arguments)
        _flush()
        return code
    except SableError as error:
        return _print_error(str(error))
    except UnicodeError as error:
        text = short_repr(getattr(error, "object", str(error)))
        return _print_error(f"{text} is no text here: use names in UTF-8, or set PYTHONUTF8=1")
    except MemoryError as error:
        return _print_error(f"this machine has no more memory to give: {error or 'take less of something'}")
    except KeyboardInterrupt:
        return _print_error("interrupted", code=130)
    except BrokenPipeError:  # whoever read our output has gone, as in `sable list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _install_signal_handlers() -> None:
    """Take signals as a command does: Ctrl-C ends it in one line, and what asks for a save may come too early
    or too late for one."""
    from sable.parent import end_with_caller
    from sable.training.interruption import SAVE, raise_interrupt

    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, raise_interrupt)
        signal.signal(SAVE, signal.SIG_IGN)
    end_with_caller()


def _flush() -> None:
    """Write what is still to be written, unless the terminal has gone."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: Argv) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_HELP)
        return 0
    if argv[0] == "--version":
        print(f"sable {VERSION}")
        return 0
    if argv[0] not in _COMMANDS:
        what = "flag" if argv[0].startswith("-") else "command"
        near = suggest(argv[0], _COMMANDS)
        raise SableError(
            f"unknown {what} {argv[0]!r}{near or ';'} commands: {', '.join(_COMMANDS)} (see sable --help)"
        )
    try:
        return _COMMANDS[argv[0]](argv[1:])
    except Help as text:
        print(str(text).rstrip())
        return 0


def _train(argv: Argv) -> int:
    args = parse(train_parser(system_of(argv)), argv, help=_train_help)
    if args.get("task") in ("true", "false", "True", "False"):
        raise SableError(f"{args['task']!r} is not a task; switches are written like --memory or --no-memory")
    quiet, requeue = bool(args.get("quiet")), bool(args.get("requeue"))
    return _report_training(sable.train(args.pop("task", None), **args), quiet, requeue)


def _report_training(result: "Result", quiet: bool, requeue: bool) -> int:
    """Say how training ended, where no other process does; the exit code."""
    from sable.runs.directory import how_to_resume
    from sable.training.processes import is_main_process

    if result.interrupted is not None:
        hint = f"go on with: sable train {how_to_resume(result.directory)}"
        return _interrupted(result.interrupted, hint, requeue, speaks=is_main_process())
    if is_main_process() and not quiet:
        print(f"{formatting.format_results(result.summary)}\n{result.directory}")
    return 0


def _interrupted(
    number: int,
    hint: str = "the same command goes on from here",
    requeue: bool = False,
    speaks: bool = True,
) -> int:
    """Say how to go on after that signal; the exit code."""
    from sable.training.interruption import Exit

    exit = Exit(hint, requeue, speaks)
    exit.announce()
    return exit.code(number)


def _plan(argv: Argv) -> int:
    args = parse(plan_parser(system_of(argv)), argv)
    as_json, measure = args.pop("json", False), not args.pop("no_measure", False)
    progress = _PlanProgress(as_json)
    plan = sable.plan(args.pop("task", None), **args, measure=measure, progress=progress)
    from sable.runs.plan import format_plan

    if progress.began and not as_json:
        print("\nmeasured:")
    print(json.dumps(dataclasses.asdict(plan), indent=2) if as_json else format_plan(plan))
    return 0


class _PlanProgress:
    """Print the first answer at once, then a line on stderr for each step of the work."""

    def __init__(self, as_json: bool):
        self.as_json, self.began = as_json, False

    def __call__(self, plan: "Plan", step: str) -> None:
        if not self.began and not self.as_json:
            from sable.runs.plan import format_plan

            print(f"from shapes alone:\n{format_plan(plan)}\n", flush=True)
        self.began = True
        print(f"{step} ...", file=sys.stderr, flush=True)


def _evaluate(argv: Argv) -> int:
    parser = Parser("evaluate", "Play with the best parameters of a run and measure the return.")
    parser.add_argument("run", metavar="RUN", help="the run's folder, as `sable train` printed it")
    parser.add_count("--episodes", "episodes per seed (default: 320)")
    parser.add_count("--seed", "seed of the episodes (default: a fixed one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    add_trust(parser)
    args = parse(parser, argv)
    as_json = args.pop("json", False)
    results = sable.evaluate(args.pop("run"), **args)
    from sable.runs.directory import to_plain

    print(json.dumps(to_plain(results), indent=2) if as_json else formatting.format_results(results))
    return 0


def _check(argv: Argv) -> int:
    parser = Parser(
        "check",
        "Play an environment at random and say what is wrong with it, if anything: shapes and types, masks, "
        "ends and time limits, auto-reset, determinism, scales, speed. Exit code 1 if something is wrong.",
    )
    parser.add_argument(
        "task",
        metavar="ENV",
        help="a task's name, module:Class for an environment of your own, or pettingzoo:module:factory",
    )
    parser.add_argument("--env-options", nargs="+", metavar="NAME=VALUE", help="options of the environment")
    parser.add_argument("--json", action="store_true", help="print one JSON array, for programs")
    args = parse(parser, argv)
    options = {
        name: value for name, _, value in (text.partition("=") for text in args.get("env_options", []))
    }
    if not all(map(all, options.items())):
        raise SableError("--env-options are of the form name=value")
    findings = sable.check(args["task"], **options)
    wrong = sum(finding.verdict == "wrong" for finding in findings)
    if args.get("json"):
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return 1 if wrong else 0
    for finding in findings:
        print(f"{finding.verdict:5}  {finding.check:15}  {finding.found}")
        if finding.fix:
            print(f"{'':24}fix: {finding.fix}")
    print(f"{len(findings)} checks, {wrong or 'nothing'} wrong")
    return 1 if wrong else 0


def _list(argv: Argv) -> int:
    parser = Parser(
        "list", "The tasks by suite. Any other name that follows its suite's convention works too."
    )
    parser.add_argument("suite", nargs="?", metavar="SUITE", help="only the tasks of this suite")
    parser.add_argument("--json", action="store_true", help="print one JSON array, for programs")
    args = parse(parser, argv)
    tasks = sable.list_tasks(args.get("suite"))
    print(formatting.format_tasks_json(tasks) if args.get("json") else formatting.format_tasks(tasks))
    return 0


def _benchmark(argv: Argv) -> int:
    parser = benchmark_parser()
    args = parse(parser, argv)
    launcher, index = args.pop("launcher", None), args.pop("cell", None)
    jobs, requeue = args.pop("jobs", 1), args.pop("requeue", False)
    listing, quiet, tasks = args.pop("list", False), args.pop("quiet", False), args.pop("tasks", ())
    cells = sable.grid(*tasks, **args)
    from sable.studies import benchmark

    if listing:
        for number, cell in enumerate(cells):
            now = benchmark.status(cell)
            shown = now.text if now.state in ("waiting", "stopped") else f"{now.state} {now.text}"
            print(f"{number:>5}  {cell.config.run.task:24}  {cell.label:24}  {shown}")
        return 0
    if index is not None:
        return _one_cell(cells, index, quiet, requeue)
    outcome = benchmark.work(cells, jobs=jobs, launcher=launcher, quiet=quiet, requeue=requeue)
    for line in outcome.failures:
        print(f"sable: failed: {line}", file=sys.stderr)
    if outcome.interrupted is not None:
        return _interrupted(outcome.interrupted, requeue=requeue)
    if not quiet and any(cell.finished for cell in cells):
        out = cells[0].out
        _write_report(out, out=out / "report", paper="paper" in tasks)
    return 1 if outcome.failures else 0


def _one_cell(cells: "list[Cell]", index: tp.Any, quiet: bool, requeue: bool) -> int:
    """Finish one cell in this process, as a job array does."""
    from sable.studies import benchmark

    if not isinstance(index, int) or not 0 <= index < len(cells):
        raise SableError(f"--cell {index}: this grid's cells are 0 to {len(cells) - 1} (see --list)")
    cell = cells[index]
    if cell.finished:
        print(f"{cell.directory} has finished already")
        return 0
    result = sable.train(resume=benchmark.prepare(cell), quiet=quiet, requeue=requeue, trust=cell.is_custom)
    return _report_training(result, quiet, requeue)


def _tune(argv: Argv) -> int:
    parser = tune_parser(system_of(argv))
    args = parse(parser, argv)
    outcome = sable.tune(args.pop("task"), **args)
    if outcome.interrupted is not None:
        return _interrupted(outcome.interrupted)
    if not args.get("quiet") and outcome.finished < args.get("trials", 40):
        print(f"{outcome.finished} trials have finished; the rest are with other workers")
    if not args.get("quiet") and outcome.best is not None:
        best = {"trial": outcome.best.number, "absolute_return": outcome.best.value, **outcome.best.values}
        print(f"{formatting.format_results(best)}\n{outcome.directory / 'recipe.toml'}")
    return 0


def _export(argv: Argv) -> int:
    parser = Parser(
        "export",
        "Write the trained team of a run into a folder of its own: weights (safetensors), settings, a model "
        "card. In Python, sable.load(FOLDER) makes it act, on any machine.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder, as `sable train` printed it")
    parser.add_argument("-o", "--out", metavar="FOLDER", required=True, help="folder to write to")
    parser.add_count("--seed", "which of the run's seeds (default: the best)")
    parser.add_argument(
        "--every-seed",
        action="store_true",
        help="all of them, each in a folder of its number",
    )
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        help="safetensors (default), or one step of the team as a function that runs without sable: "
        "stablehlo (with jax), onnx (with an ONNX runtime; takes the most probable actions)",
    )
    add_trust(parser, env=False)
    args = parse(parser, argv)
    print(sable.export(args.pop("run"), args.pop("out"), **args))
    return 0


def _watch(argv: Argv) -> int:
    parser = Parser(
        "watch",
        "Play with the best parameters of a run, or of an exported folder, and write what there is to see: a "
        "film, and a page to step through with every agent's probabilities and what its memory weighs.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder, or one that `sable export` wrote")
    parser.add_count("--episodes", "episodes to show (default: 1)")
    parser.add_count("--seed", "seed of the episodes, as in `sable evaluate` (default: a fixed one)")
    parser.add_argument("--greedy", action="store_true", help="the most probable actions, not sampled ones")
    parser.add_count("--run-seed", "which of the run's seeds plays (default: the best)")
    parser.add_argument(
        "--format",
        dest="formats",
        nargs="+",
        metavar="FORMAT",
        help=f"gif, mp4 (needs {DISTRIBUTION}[video]), html, or several (default: gif html)",
    )
    parser.add_argument("-o", "--out", metavar="FOLDER", help="folder to write to (default: RUN/watch)")
    add_trust(parser)
    args = parse(parser, argv)
    for path in sable.watch(args.pop("run"), quiet=False, **args):
        print(path)
    return 0


def _report(argv: Argv) -> int:
    parser = Parser(
        "report",
        "Tables, curves and statistics of many runs: one page (report.html), Markdown, LaTeX and figures.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUNS",
        help="folders that hold runs, at any depth, and marl-eval JSON files of other libraries",
    )
    parser.add_argument("-o", "--out", metavar="DIR", help="folder to write to (default: report)")
    parser.add_argument(
        "--paper", action="store_true", help="make the paper's figures and tables, its own beside ours"
    )
    parser.add_argument(
        "--curves", choices=["iqm", "mean"], help="over seeds: iqm (default), or mean as the paper's are"
    )
    args = parse(parser, argv)
    _write_report(*args.pop("runs"), **args)
    return 0


def _write_report(*runs: tp.Any, **args: tp.Any) -> None:
    page, notes = sable.report(*runs, **args)
    for note in notes:
        print(f"note: {note}")
    print(page)


def _publish(argv: Argv) -> int:
    parser = Parser(
        "publish",
        "Keep the data of finished runs under results/<suite>/<task>/<name>/, add a row for each to "
        "results/ledger.jsonl, and make the tables and figures of docs/results.md from it. Without RUN only "
        "the last.",
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="finished runs, all published or none")
    parser.add_argument(
        "--name", metavar="NAME", help="what the row is called beside its task (default: its system)"
    )
    parser.add_argument(
        "--allow-deviations",
        action="store_true",
        help="though it is not the paper's protocol; the row says so",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="in place of a published row of other settings or code, which stays, superseded",
    )
    parser.add_argument("--reason", metavar="TEXT", help="why it gives way (default: what differs)")
    parser.add_argument(
        "--remake", action="store_true", help="make all rows anew from their data, as they are made now"
    )
    parser.add_argument("--results", metavar="DIR", help="folder of the ledger (default: results)")
    parser.epilog = (
        "A row's numbers follow from its data: commit, settings and their hash, where they differ from the "
        "paper's, device, every seed's absolute return, five summaries with 95 % intervals, the paper's "
        "figures and verdicts, pace. The code a run ran must be committed: first commit, then run. The best "
        "policy of every seed is kept with it: RUN/policies if the run has no checkpoints any more. Run a "
        "row again with sable reproduce ROW."
    )
    args = parse(parser, argv)
    rows, page = sable.publish(*args.pop("runs", ()), **args)
    for row in rows:
        print(f"{row['row']}  {formatting.format_row(row)}")
    if page is not None:
        print(page)
    return 0


def _reproduce(argv: Argv) -> int:
    parser = Parser(
        "reproduce",
        "Run a published result again, with the settings and seeds of its row in the ledger, and say whether "
        "chance explains how far the means are apart; or measure the policies it keeps again. Without ROW: "
        "the rows.",
    )
    parser.add_argument("row", nargs="?", metavar="ROW", help="a row, such as rware/tiny-4ag:sable")
    parser.add_argument(
        "--seeds", nargs="+", type=value_parser(int), metavar="INT", help="only these of the row's seeds"
    )
    parser.add_argument("--out", metavar="DIR", help="folder that holds the runs (default: reproduced)")
    parser.add_argument(
        "--evaluate", action="store_true", help="train nothing: measure the row's policies on fresh episodes"
    )
    parser.add_count("--episodes", "fresh episodes of each policy, with --evaluate (default: 320)")
    parser.add_argument(
        "--results",
        metavar="DIR",
        help="folder of the ledger (default: results here, or else the ledger that came with sable)",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing while training")
    parser.add_argument("--trust", action="store_true", help="run the code from outside sable that ROW names")
    parser.epilog = (
        "Exit code 0: chance explains the difference of the means (its 95 % interval holds 0); 1: it does "
        "not. It takes about the minutes that the list shows; stop it whenever "
        "you like, the same command goes on. Returns are the same to the last bit on the same kind of "
        "machine, with the same versions and code, with all seeds, on a CPU or with settings that are "
        "deterministic; else compare means. Fewer seeds make the interval wider. It counts with two "
        "decimals, as the paper prints them. A row that was made when its settings meant something else is "
        "run as meant now; a line then says what has changed, and names the commit that still means it."
    )
    args = parse(parser, argv)
    from sable.reports import ledger

    rows = ledger.read(Path(args["results"]).expanduser() if "results" in args else None)
    if "row" not in args:
        width = max((len(row["row"]) for row in rows), default=0)
        lines = [f"{row['row']:{width}}  {formatting.format_row(row)}" for row in rows]
        print("\n".join(lines) or "nothing is published yet")
        return 0
    if args.pop("evaluate", False):
        return _evaluate_row(args)
    if "episodes" in args:
        raise SableError("--episodes goes with --evaluate: a row is run again with its own numbers")
    result = sable.reproduce(args["row"], **{name: args[name] for name in args if name != "row"})
    if result.interrupted is not None:
        return _interrupted(result.interrupted)
    from sable.studies.reproduce import format_reproduction

    print(f"{format_reproduction(ledger.require(rows, args['row']), result)}\n{result.directory}")
    return 0 if result.within else 1


def _evaluate_row(args: dict[str, tp.Any]) -> int:
    """Measure the policies of a row; the exit code."""
    if "out" in args:
        raise SableError("--out goes without --evaluate, which trains nothing")
    args.pop("quiet", None)
    result = sable.evaluate_row(args.pop("row"), **args)
    from sable.studies.reproduce import format_measurement

    print(format_measurement(result))
    return 0 if result.within else 1


_COMMANDS: dict[str, Callable[[Argv], int]] = {
    "train": _train,
    "plan": _plan,
    "evaluate": _evaluate,
    "check": _check,
    "list": _list,
    "benchmark": _benchmark,
    "report": _report,
    "tune": _tune,
    "watch": _watch,
    "export": _export,
    "publish": _publish,
    "reproduce": _reproduce,
}


def _train_help(args: dict[str, tp.Any]) -> str:
    """Return the help of `sable train`, whose defaults are those for the task and system that were given."""
    config = sable.configure(args.get("task"), system=args.get("system", "sable"))
    defaults = dataclasses.asdict(config.run) | dataclasses.asdict(config.system)
    about = f"Defaults shown are those for {config.run.task}" + (
        "" if "task" in args else ", the task trained without TASK"
    )
    parser = train_parser(config.run.system, defaults)
    parser.epilog = about + "; those for another task: sable train TASK --help."
    return parser.format_help()


def _print_error(message: str, code: int = 2) -> int:
    with contextlib.suppress(OSError):  # the terminal may have gone
        print("sable: " + " ".join(message.split()), file=sys.stderr)
    return code
