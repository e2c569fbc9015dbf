"""What the larger commands take: a flag for every field of the run and of the system, and their own."""

import typing as tp

from sable.cli.flags import Argv, Parser, add_flags, config_bases, normalise_argv, value_parser
from sable.config.schema import RunConfig, SystemConfig, system_config
from sable.trust import Trust


def system_of(argv: Argv) -> str:
    """Return the system whose flags `argv` is to be parsed with."""
    parser = Parser("train", "")
    parser.add_argument("--system")
    system = getattr(parser.parse_known_args(normalise_argv(argv))[0], "system", "sable")
    _class(system)
    return system


def _class(system: str) -> type[SystemConfig]:
    """Return the configuration class of a system that the caller named."""
    return system_config(system, Trust(system=system))


def add_trust(parser: Parser, *, env: bool = True, system: bool = True) -> None:
    """Add the flags that let code from outside sable run which a RUN names."""
    of_run = "that RUN was trained {}: imported only if it is named here"
    if env:
        text = "the environment of your own " + of_run.format("on")
        parser.add_argument("--env", metavar="ENV", help=text)
    if system:
        text = "the system of your own " + of_run.format("with")
        parser.add_argument("--system", metavar="SYSTEM", help=text)
    parser.add_argument("--trust", action="store_true", help="run all code from outside sable that RUN names")


def train_parser(system: str, defaults: dict[str, tp.Any] | None = None) -> Parser:
    """Return the parser of `sable train`: a flag for every field of the run and of the system."""
    parser = Parser(
        "train", "Train a system on a task; without TASK the built-in default, with a budget fit for a CPU."
    )
    parser.usage = "sable train [TASK] [flags]"
    parser.add_argument("--out", metavar="DIR", help="folder that holds the runs (default: runs)")
    parser.add_argument("--name", metavar="NAME", help="name of this run's folder (default: the time)")
    parser.add_argument("--resume", metavar="RUN", help="go on with this run, as it was configured")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="with --resume: refuse to go on where it would not be bit-exact (another jax, device, number of "
        "devices, thread pool or source)",
    )
    _add_requeue(parser, "resume the run of that --name if it was begun, and when interrupted")
    parser.add_argument(
        "--env-timeout",
        type=value_parser(float),
        metavar="SECONDS",
        help="how long a Python environment's worker may take for an answer, a step of its share of the "
        "environments, before it counts as hanging, which ends the run (default: 600)",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing while training")
    add_trust(parser, system=False)
    _add_run_flags(parser, system, defaults or {})
    return parser


def _add_requeue(parser: Parser, what: str) -> None:
    """Add the flag that makes a command fit for a scheduler that starts it again."""
    parser.add_argument(
        "--requeue",
        action="store_true",
        help=f"for jobs that are started again: {what} exit with code 75, not with 128 plus the signal's",
    )


def plan_parser(system: str) -> Parser:
    """Return the parser of `sable plan`: what shapes a run, and so what it takes."""
    parser = Parser(
        "plan",
        "What `sable train` with the same flags would take on this machine: parameters, memory by part, the "
        "most environments or seeds that fit, steps/s, and the time of the whole. Says at once what shapes "
        "alone tell, then compiles a few programs and runs a few updates. Writes nothing.",
    )
    parser.usage = "sable plan [TASK] [flags of sable train]"
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.add_argument("--no-measure", action="store_true", help="only what shapes tell: seconds, no times")
    _add_run_flags(parser, system, {})
    return parser


def _add_run_flags(parser: Parser, system: str, defaults: dict[str, tp.Any]) -> None:
    """Add the flags that say what a run is."""
    parser.add_argument(
        "task", nargs="?", metavar="TASK", help="task name with its suite, as `sable list` prints it"
    )
    parser.add_count("--num-seeds", "as many seeds, from 0 on, instead of --seeds")
    parser.add_argument("--recipe", metavar="FILE", help="settings from a file, as `sable tune` writes one")
    for cls in (RunConfig, *config_bases(_class(system))):
        add_flags(parser, cls, defaults, leave_out=("task",))


def tune_parser(system: str) -> Parser:
    parser = Parser(
        "tune",
        "Search the paper's space of a system's settings for those that suit a task best. Started again, it "
        "goes on; started several times, here or on machines that share the disk, it shares the work.",
    )
    parser.usage = "sable tune TASK [--system SYSTEM] [flags]"
    parser.add_argument("task", metavar="TASK", help="task name with its suite, as `sable list` prints it")
    parser.add_count("--trials", "finished trials to come to (default: 40)")
    parser.add_count(
        "--parallel-trials",
        "trials that run side by side in one program: they share what shapes it and differ in learning "
        "rate, entropy, clipping and so on (default: 4)",
    )
    parser.add_count("--num-seeds", "seeds of each trial (default: 1)")
    parser.add_argument("--out", metavar="DIR", help="folder that holds the studies (default: tuning)")
    parser.add_argument(
        "--storage", metavar="URL", help="an Optuna storage (default: a journal file in the study's folder)"
    )
    parser.add_argument("--recipe", metavar="FILE", help="settings to begin with, from a file")
    parser.add_argument("--quiet", action="store_true", help="print nothing while tuning")
    parser.epilog = (
        "A setting given by its flag stays as given. The study is a folder, DIR/<suite>/<task>/<system>, "
        "with recipe.toml (the best trial's settings, for sable train TASK --recipe FILE), trials.csv and "
        "study.png."
    )
    for cls in (RunConfig, *config_bases(_class(system))):
        add_flags(parser, cls, {}, leave_out=("task", "seeds", "label"))
    return parser


def benchmark_parser() -> Parser:
    parser = Parser(
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
    parser.add_count("--num-seeds", "as many seeds, from 0 on (default: 10)")
    parser.add_argument("--out", metavar="DIR", help="folder that holds the cells (default: benchmark)")
    parser.add_argument("--list", action="store_true", help="print the cells, their numbers and states")
    parser.add_count("--cell", "only the cell of this number, for job arrays")
    parser.add_count(
        "--jobs",
        "cells that share this machine at a time: one compiles while another has the device (default: 1)",
    )
    _add_requeue(parser, "when interrupted")
    parser.add_argument("--launcher", choices=["ray"], help="hand the cells to a Ray cluster")
    parser.add_argument("--quiet", action="store_true", help="print nothing but failures")
    add_flags(parser, RunConfig, {"seeds": range(10)}, leave_out=("task", "system", "label"))
    parser.epilog = (
        "On one machine cells run one after another, or --jobs so many. A job array: sbatch --array=0-N "
        "--wrap 'sable benchmark TASKS... --cell $SLURM_ARRAY_TASK_ID', N as --list shows. Settings "
        "of a system go with it, as in sable:learning-rate=1e-3; the flags above hold for every cell."
    )
    return parser
