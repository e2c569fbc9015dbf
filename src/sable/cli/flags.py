"""Flags: made from the fields of the configuration classes, their help from the fields' docstrings.

A parser answers only what was given, so that whoever asks knows what was not.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import typing as tp
from collections.abc import Callable, Sequence

from sable.config import renamed
from sable.errors import SableError

Argv = list[str]


class Help(Exception):
    """Help was asked for; this is it."""


class Parser(argparse.ArgumentParser):
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

    def add_count(self, flag: str, help: str) -> None:
        """Add a flag that takes a whole number."""
        self.add_argument(flag, type=value_parser(int), metavar="INT", help=help)

    def error(self, message: str) -> tp.NoReturn:
        message = message.removeprefix("argument ").replace(
            "the following arguments are required:", "missing argument"
        )
        raise SableError(f"{message} (see {self.prog} --help)")


def parse(
    parser: Parser, argv: Argv, help: Callable[[dict[str, tp.Any]], str] | None = None
) -> dict[str, tp.Any]:
    """Return the flags and arguments that were given, by name; an unknown flag is refused with the nearest
    known."""
    if "-h" in argv or "--help" in argv:
        for action in parser._actions:  # somebody who asks for help may leave out what is required
            action.required = False
    known, unknown = parser.parse_known_args(normalise_argv(argv))
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for argument in sorted(unknown, key=lambda argument: not argument.startswith("-")):
        flag = argument.partition("=")[0]
        if flag.startswith("-"):
            raise SableError(f"unknown flag {flag}{renamed.near(flag, flags)} (see {parser.prog} --help)")
        raise SableError(f"unexpected argument {argument!r} (see {parser.prog} --help)")
    args = vars(known)
    if args.pop("help", False):
        raise Help(parser.format_help() if help is None else help(args))
    return args


def normalise_argv(argv: Argv) -> Argv:
    """Return `argv` with --num_envs as --num-envs, and -1e-3 tied to its flag: argparse takes it for a
    flag."""
    normalise_argv: Argv = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if flag.startswith("--"):
            normalise_argv.append(flag.replace("_", "-") + equals + value)
        elif (
            normalise_argv
            and normalise_argv[-1].startswith("--")
            and re.fullmatch(r"-[0-9.]+e[+-]?[0-9]+", argument, re.IGNORECASE)
        ):
            normalise_argv[-1] += f"={argument}"
        else:
            normalise_argv.append(argument)
    return normalise_argv


def add_flags(parser: Parser, cls: type, defaults: dict[str, tp.Any], leave_out: Sequence[str]) -> None:
    """Add a flag for every field that a configuration class declares."""
    group = parser.add_argument_group((cls.__doc__ or "").partition(".")[0])
    helps = _field_helps(cls)
    for field in dataclasses.fields(cls):
        if field.name in helps and field.name not in leave_out:
            default = _format_default(defaults.get(field.name, field.default))
            _add_flag(group, field, f"{helps[field.name]} (default: {default})".replace("%", "%%"))


def _add_flag(group: tp.Any, field: dataclasses.Field, text: str) -> None:
    flag, kind = f"--{field.name.replace('_', '-')}", field.type
    if kind is bool:
        group.add_argument(flag, action=_Switch, help=text)
    elif tp.get_origin(kind) is tuple:
        item = tp.get_args(kind)[0]
        group.add_argument(flag, nargs="+", type=value_parser(item), metavar=_metavar(item), help=text)
    else:
        group.add_argument(flag, type=value_parser(kind), metavar=_metavar(kind), help=text)


class _Switch(argparse.BooleanOptionalAction):
    """--flag and --no-flag, without argparse's own words about a default."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: tp.Any, help: str):
        super().__init__(option_strings, dest, default=default)
        self.help = help


def value_parser(kind: tp.Any) -> Callable[[str], tp.Any]:
    """Return a function from text to `kind`; text that is none stays, so that the configuration's own check
    can name it."""

    def read(text: str) -> tp.Any:
        try:
            number = float(text) if kind is float else int(text)
        except ValueError:
            number = _whole(text) if kind is int else text
        return number

    return read if kind in (int, float) else str


def _whole(text: str) -> tp.Any:
    """Return a whole number written like 2e7, or else the text."""
    try:
        return int(float(text)) if float(text).is_integer() else text
    except (ValueError, OverflowError):
        return text


def config_bases(cls: type) -> list[type]:
    """Return `cls` and the configuration classes it extends, the most general first."""
    return [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]


def _field_helps(cls: type) -> dict[str, str]:
    """Return the docstring below each field that `cls` itself declares."""
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


def _format_default(value: tp.Any) -> str:
    if isinstance(value, (tuple, list, range)):
        return " ".join(map(str, value)) or "none"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
