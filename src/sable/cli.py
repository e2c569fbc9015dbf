"""The command line: argument parsing only. A mistake is one line on stderr, exit code 2, no import of jax.

The flags are made from the fields of the configuration classes, their help from the fields' docstrings.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import json
import os
import re
import shlex
import sys
import textwrap
import typing as tp
from collections.abc import Callable, Sequence

import sable
from sable.config import RunConfig, system_config
from sable.errors import SableError, suggest

if tp.TYPE_CHECKING:
    from sable.envs import Task
    from sable.experiments.benchmark import Cell
    from sable.training.loop import Result

_HELP = """\
Cooperative multi-agent reinforcement learning with sequence models.

  sable train                                  learn a small task in minutes, on a CPU
  sable train rware/tiny-4ag --num-seeds 3     a task of the paper, three seeds at once
  sable train smax/3s5z --learning-rate 1e-3   change a setting
  sable train --resume RUN                     go on with an interrupted run
  sable evaluate RUN                           play with what was learnt
  sable list rware                             the tasks of a suite

  sable benchmark 'lbf/*' --systems sable mat  compare systems; a study: sable benchmark paper
  sable report benchmark                       tables, curves and statistics in one page
  sable tune rware/tiny-4ag                    look for better settings

Each command explains itself: sable train --help, sable train rware/tiny-4ag --help,
sable benchmark --help and so on. A run is a folder,
runs/<suite>/<task>/<system>/<name>/, with its configuration, metrics, checkpoints,
curve.png and summary.json."""

Argv = list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command `argv`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path:  # a system of the user's own is a module, most likely in the current folder
        sys.path.append("")
    try:
        return _dispatch(arguments)
    except SableError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", code=130)
    except BrokenPipeError:  # whoever read our output has gone, as in `sable list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(argv: Argv) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_HELP)
        return 0
    if argv[0] == "--version":
        from importlib.metadata import version

        print(f"sable {version('sable')}")
        return 0
    if argv[0] not in _COMMANDS:
        what = "flag" if argv[0].startswith("-") else "command"
        near = suggest(argv[0], _COMMANDS)
        raise SableError(
            f"unknown {what} {argv[0]!r}{near or ';'} commands: {', '.join(_COMMANDS)} (see sable --help)"
        )
    return _COMMANDS[argv[0]](argv[1:])


def _train(argv: Argv) -> int:
    given = _parse(_train_parser(_system_of(argv)), argv)
    if given.pop("help", False):
        print(_train_help(given))
        return 0
    if given.get("task") in ("true", "false", "True", "False"):
        raise SableError(
            f"{given['task']!r} is not a task; switches are written like --memory or --no-memory"
        )
    return _report_training(sable.train(given.pop("task", None), **given), bool(given.get("quiet")))


def _report_training(result: "Result", quiet: bool) -> int:
    """Say how training ended; the exit code."""
    if result.interrupted is not None:
        resume = shlex.join(["sable", "train", "--resume", str(result.directory)])
        print(f"sable: interrupted; go on with: {resume}", file=sys.stderr)
        return 128 + result.interrupted
    if not quiet:
        print(f"{_results(result.summary)}\n{result.directory}")
    return 0


def _evaluate(argv: Argv) -> int:
    parser = _Parser("evaluate", "Play with the best parameters of a run and measure the return.")
    parser.add_argument("run", metavar="RUN", help="the run's folder, as `sable train` printed it")
    parser.add_argument(
        "--episodes", type=_reader(int), metavar="INT", help="episodes per seed (default: 320)"
    )
    parser.add_argument(
        "--seed", type=_reader(int), metavar="INT", help="seed of the episodes (default: a fixed one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    given = _parse(parser, argv)
    if given.pop("help", False):
        print(parser.format_help(), end="")
        return 0
    as_json = given.pop("json", False)
    results = sable.evaluate(given.pop("run"), **given)
    from sable.experiments.runs import plain

    print(json.dumps(plain(results), indent=2) if as_json else _results(results))
    return 0


def _list(argv: Argv) -> int:
    parser = _Parser(
        "list", "The tasks by suite. Any other name that follows its suite's convention works too."
    )
    parser.add_argument("suite", nargs="?", metavar="SUITE", help="only the tasks of this suite")
    parser.add_argument("--json", action="store_true", help="print one JSON array, for programs")
    given = _parse(parser, argv)
    if given.get("help"):
        print(parser.format_help(), end="")
        return 0
    tasks = sable.list_tasks(given.get("suite"))
    print(_as_json(tasks) if given.get("json") else _as_table(tasks))
    return 0


def _benchmark(argv: Argv) -> int:
    parser = _benchmark_parser()
    given = _parse(parser, argv)
    if given.pop("help", False):
        print(parser.format_help(), end="")
        return 0
    on_ray, index = given.pop("on", None) == "ray", given.pop("cell", None)
    listing, quiet, tasks = given.pop("list", False), given.pop("quiet", False), given.pop("tasks", ())
    cells = sable.grid(*tasks, **given)
    from sable.experiments import benchmark

    if listing:
        for number, cell in enumerate(cells):
            now = benchmark.status(cell)
            shown = now.text if now.state in ("waiting", "stopped") else f"{now.state} {now.text}"
            print(f"{number:>5}  {cell.run.task:24}  {cell.label:24}  {shown}")
        return 0
    if index is not None:
        return _one_cell(cells, index, quiet)
    outcome = benchmark.work(cells, on_ray=on_ray, quiet=quiet)
    for line in outcome.failures:
        print(f"sable: failed: {line}", file=sys.stderr)
    if outcome.interrupted is not None:
        print("sable: interrupted; the same command goes on from here", file=sys.stderr)
        return 128 + outcome.interrupted
    if not quiet and any(cell.finished for cell in cells):
        out = cells[0].out
        _write_report(out, out=out / "report", paper="paper" in tasks)
    return 1 if outcome.failures else 0


def _one_cell(cells: "list[Cell]", index: tp.Any, quiet: bool) -> int:
    """Finish one cell in this process, as a job array does."""
    from sable.experiments import benchmark

    if not isinstance(index, int) or not 0 <= index < len(cells):
        raise SableError(f"--cell {index}: this grid's cells are 0 to {len(cells) - 1} (see --list)")
    cell = cells[index]
    if cell.finished:
        print(f"{cell.directory} has finished already")
        return 0
    return _report_training(sable.train(resume=benchmark.prepare(cell), quiet=quiet), quiet)


def _tune(argv: Argv) -> int:
    parser = _tune_parser(_system_of(argv))
    given = _parse(parser, argv)
    if given.pop("help", False):
        print(parser.format_help(), end="")
        return 0
    outcome = sable.tune(given.pop("task"), **given)
    if outcome.interrupted is not None:
        print("sable: interrupted; the same command goes on from here", file=sys.stderr)
        return 128 + outcome.interrupted
    if not given.get("quiet") and outcome.best is not None:
        best = {"trial": outcome.best.number, "absolute_return": outcome.best.value, **outcome.best.values}
        print(f"{_results(best)}\n{outcome.directory / 'recipe.toml'}")
    return 0


def _report(argv: Argv) -> int:
    parser = _Parser(
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
    parser.add_argument("--paper", action="store_true", help="set the paper's figures beside ours")
    given = _parse(parser, argv)
    if given.pop("help", False):
        print(parser.format_help(), end="")
        return 0
    _write_report(*given.pop("runs"), **given)
    return 0


def _write_report(*runs: tp.Any, **given: tp.Any) -> None:
    page, notes = sable.report(*runs, **given)
    for note in notes:
        print(f"note: {note}")
    print(page)


_COMMANDS: dict[str, Callable[[Argv], int]] = {
    "train": _train,
    "evaluate": _evaluate,
    "list": _list,
    "benchmark": _benchmark,
    "report": _report,
    "tune": _tune,
}


class _Parser(argparse.ArgumentParser):
    """A parser that answers only what was given, and raises SableError where argparse would exit."""

    def __init__(self, command: str, description: str):
        super().__init__(
            prog=f"sable {command}",
            description=description,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="store_true", help="show this and exit")

    def error(self, message: str) -> tp.NoReturn:
        message = message.removeprefix("argument ").replace(
            "the following arguments are required:", "missing argument"
        )
        raise SableError(f"{message} (see {self.prog} --help)")


def _parse(parser: _Parser, argv: Argv) -> dict[str, tp.Any]:
    """The flags and arguments that were given, by name; an unknown flag is refused with the nearest known."""
    if "-h" in argv or "--help" in argv:
        for action in parser._actions:  # somebody who asks for help may leave out what is required
            action.required = False
    known, unknown = parser.parse_known_args(_tidied(argv))
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for argument in sorted(unknown, key=lambda argument: not argument.startswith("-")):
        flag = argument.partition("=")[0]
        if flag.startswith("-"):
            raise SableError(f"unknown flag {flag}{suggest(flag, flags)} (see {parser.prog} --help)")
        raise SableError(f"unexpected argument {argument!r} (see {parser.prog} --help)")
    return vars(known)


def _tidied(argv: Argv) -> Argv:
    """`argv` with --num_envs as --num-envs, and -1e-3 tied to its flag: argparse takes it for a flag."""
    tidied: Argv = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if flag.startswith("--"):
            tidied.append(flag.replace("_", "-") + equals + value)
        elif (
            tidied
            and tidied[-1].startswith("--")
            and re.fullmatch(r"-[0-9.]+e[+-]?[0-9]+", argument, re.IGNORECASE)
        ):
            tidied[-1] += f"={argument}"
        else:
            tidied.append(argument)
    return tidied


def _system_of(argv: Argv) -> str:
    """The system whose flags `argv` is to be parsed with."""
    parser = _Parser("train", "")
    parser.add_argument("--system")
    system = getattr(parser.parse_known_args(_tidied(argv))[0], "system", "sable")
    system_config(system)
    return system


def _train_parser(system: str, defaults: dict[str, tp.Any] | None = None) -> _Parser:
    """The parser of `sable train`: a flag for every field of the run and of the system."""
    parser = _Parser(
        "train", "Train a system on a task; without TASK the built-in default, with a budget fit for a CPU."
    )
    parser.usage = "sable train [TASK] [flags]"
    parser.add_argument(
        "task", nargs="?", metavar="TASK", help="task name with its suite, as `sable list` prints it"
    )
    parser.add_argument(
        "--num-seeds", type=_reader(int), metavar="INT", help="as many seeds, from 0 on, instead of --seeds"
    )
    parser.add_argument("--out", metavar="DIR", help="folder that holds the runs (default: runs)")
    parser.add_argument("--name", metavar="NAME", help="name of this run's folder (default: the time)")
    parser.add_argument("--recipe", metavar="FILE", help="settings from a file, as `sable tune` writes one")
    parser.add_argument("--resume", metavar="RUN", help="go on with this run, as it was configured")
    parser.add_argument("--quiet", action="store_true", help="print nothing while training")
    for cls in (RunConfig, *_own_classes(system_config(system))):
        _add_flags(parser, cls, defaults or {}, leave_out=("task",))
    return parser


def _add_flags(parser: _Parser, cls: type, defaults: dict[str, tp.Any], leave_out: Sequence[str]) -> None:
    """A flag for every field that a configuration class declares."""
    group = parser.add_argument_group((cls.__doc__ or "").partition(".")[0])
    helps = _field_helps(cls)
    for field in dataclasses.fields(cls):
        if field.name in helps and field.name not in leave_out:
            default = _shown(defaults.get(field.name, field.default))
            _add_flag(group, field, f"{helps[field.name]} (default: {default})".replace("%", "%%"))


def _tune_parser(system: str) -> _Parser:
    parser = _Parser(
        "tune",
        "Search the paper's space of a system's settings for those that suit a task best. Started again, it "
        "goes on; started several times, here or on machines that share the disk, it shares the work.",
    )
    parser.usage = "sable tune TASK [--system SYSTEM] [flags]"
    parser.add_argument("task", metavar="TASK", help="task name with its suite, as `sable list` prints it")
    parser.add_argument(
        "--trials", type=_reader(int), metavar="INT", help="finished trials to come to (default: 40)"
    )
    parser.add_argument(
        "--points",
        type=_reader(int),
        metavar="INT",
        help="trials that run side by side in one program: they share what shapes it and differ in learning "
        "rate, entropy, clipping and so on (default: 4)",
    )
    parser.add_argument(
        "--num-seeds", type=_reader(int), metavar="INT", help="seeds of each trial (default: 1)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder that holds the studies (default: tuning)")
    parser.add_argument(
        "--storage", metavar="URL", help="an Optuna storage (default: a journal file in the study's folder)"
    )
    parser.add_argument("--recipe", metavar="FILE", help="settings to begin with, from a file")
    parser.add_argument("--quiet", action="store_true", help="print nothing while tuning")
    parser.epilog = (
        "A setting given by its flag stays as given. The study is a folder, DIR/<suite>/<task>/<system>, "
        "with recipe.toml (the best trial's settings, for sable train TASK --recipe FILE), trials.csv and study.png."
    )
    for cls in (RunConfig, *_own_classes(system_config(system))):
        _add_flags(parser, cls, {}, leave_out=("task", "seeds", "label"))
    return parser


def _benchmark_parser() -> _Parser:
    parser = _Parser(
        "benchmark",
        "Train systems on tasks, every pair a cell of a grid: one run of all seeds. Started again, it skips "
        "what is finished and goes on with what is not.",
    )
    parser.usage = "sable benchmark TASKS... [--systems SYSTEMS...] [flags]"
    parser.add_argument(
        "tasks",
        nargs="*",
        metavar="TASKS",
        help="tasks, patterns such as 'rware/*', or studies: paper (every table of the paper), "
        "scaling (32 to 1,024 agents), ablation (from MAT to Sable), chunk (chunk size against memory)",
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        metavar="SYSTEM",
        help="systems or variants of them: sable, sable:no-memory, mat:rms-norm:swiglu, ippo:num-envs=64 "
        "(default: a study's own, else all that can do the task, with and without memory)",
    )
    parser.add_argument(
        "--num-seeds", type=_reader(int), metavar="INT", help="as many seeds, from 0 on (default: 10)"
    )
    parser.add_argument("--out", metavar="DIR", help="folder that holds the cells (default: benchmark)")
    parser.add_argument("--list", action="store_true", help="print the cells, their numbers and states")
    parser.add_argument(
        "--cell", type=_reader(int), metavar="INT", help="only the cell of this number, for job arrays"
    )
    parser.add_argument("--on", choices=["ray"], help="hand the cells to a Ray cluster")
    parser.add_argument("--quiet", action="store_true", help="print nothing but failures")
    _add_flags(parser, RunConfig, {"seeds": range(10)}, leave_out=("task", "system", "label"))
    parser.epilog = (
        "On one machine cells run one after another. A job array: sbatch --array=0-N --wrap 'sable benchmark "
        "TASKS... --cell $SLURM_ARRAY_TASK_ID', N as --list shows. Settings of a system go with it, as in "
        "sable:learning-rate=1e-3; the flags above hold for every cell."
    )
    return parser


def _add_flag(group: tp.Any, field: dataclasses.Field, text: str) -> None:
    flag, kind = f"--{field.name.replace('_', '-')}", field.type
    if kind is bool:
        group.add_argument(flag, action=_Switch, help=text)
    elif tp.get_origin(kind) is tuple:
        item = tp.get_args(kind)[0]
        group.add_argument(flag, nargs="+", type=_reader(item), metavar=_metavar(item), help=text)
    else:
        group.add_argument(flag, type=_reader(kind), metavar=_metavar(kind), help=text)


class _Switch(argparse.BooleanOptionalAction):
    """--flag and --no-flag, without argparse's own words about a default."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: tp.Any, help: str):
        super().__init__(option_strings, dest, default=default)
        self.help = help


def _reader(kind: tp.Any) -> Callable[[str], tp.Any]:
    """From text to `kind`; text that is none stays, so that the configuration's own check can name it."""

    def read(text: str) -> tp.Any:
        try:
            number = float(text) if kind is float else int(text)
        except ValueError:
            number = _whole(text) if kind is int else text
        return number

    return read if kind in (int, float) else str


def _whole(text: str) -> tp.Any:
    """A whole number written like 2e7, or else the text."""
    try:
        return int(float(text)) if float(text).is_integer() else text
    except (ValueError, OverflowError):
        return text


def _train_help(given: dict[str, tp.Any]) -> str:
    """The help of `sable train`, whose defaults are those for the task and system that were given."""
    run, config = sable.configure(given.get("task"), system=given.get("system", "sable"))
    defaults = dataclasses.asdict(run) | dataclasses.asdict(config)
    about = f"Defaults shown are those for {run.task}" + (
        "" if "task" in given else ", the task trained without TASK"
    )
    parser = _train_parser(run.system, defaults)
    parser.epilog = about + "; those for another task: sable train TASK --help."
    return parser.format_help().rstrip()


def _own_classes(cls: type) -> list[type]:
    """`cls` and the configuration classes it extends, the most general first."""
    return [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]


def _field_helps(cls: type) -> dict[str, str]:
    """The docstring below each field that `cls` itself declares."""
    body = tp.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]).body
    return {
        ast.unparse(field.target): ast.literal_eval(text.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _metavar(kind: tp.Any) -> str:
    if tp.get_origin(kind) is tp.Literal:
        return "{" + ",".join(tp.get_args(kind)) + "}"
    return {int: "INT", float: "FLOAT", str: "TEXT"}[kind]


def _shown(value: tp.Any) -> str:
    if isinstance(value, (tuple, list, range)):
        return " ".join(map(str, value)) or "none"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _as_json(tasks: "list[Task]") -> str:
    columns = (
        "id",
        "suite",
        "name",
        "num_agents",
        "view_size",
        "num_actions",
        "action_size",
        "time_limit",
        "group",
    )
    return json.dumps([{column: getattr(task, column) for column in columns} for task in tasks], indent=2)


def _as_table(tasks: "list[Task]") -> str:
    """One block of lines per suite, columns aligned over all of them."""
    width = max(len(task.id) for task in tasks)
    lines = [_row(width, "task", "agents", "view", "actions", "time limit")]
    for suite in dict.fromkeys(task.suite for task in tasks):
        lines.append("")
        for task in (task for task in tasks if task.suite == suite):
            actions = task.num_actions or f"{task.action_size}-dim"
            lines.append(_row(width, task.id, task.num_agents, task.view_size, actions, task.time_limit))
    return "\n".join(lines)


def _row(width: int, task: str, *sizes: tp.Any) -> str:
    return f"{task:{width}}" + "".join(f"  {size:>10}" for size in sizes)


def _results(results: dict[str, tp.Any]) -> str:
    """One aligned line per entry."""
    width = max(map(len, results), default=0)
    return "\n".join(f"{name:{width}}  {_in_words(value)}" for name, value in results.items())


def _in_words(value: tp.Any) -> str:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return " ".join(map(_in_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_in_words(item)}" for name, item in value.items())
    return (
        f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )


def _fail(message: str, code: int = 2) -> int:
    print("sable: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
