"""The reference pages that are made from the code: what each command takes, and every setting."""

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import os
import re
import textwrap
import typing as tp
from collections.abc import Iterator

from sphinx.application import Sphinx

import sable
from sable.cli import main as cli
from sable.config import checks
from sable.config.schema import SYSTEM_CONFIGS, RunConfig
from sable.errors import SableError

COMMANDS, SETTINGS = "<!-- The commands -->", "<!-- The settings -->"
FUNCTIONS = "<!-- The public functions -->"
"""Where a page has them."""


def commands() -> str:
    """Return the help of every command, as it prints it."""
    names = re.findall(r"^  sable (\w+)", _help(), re.MULTILINE)
    parts = [f"## sable {name}\n\n```text\n{_help(name)}\n```" for name in dict.fromkeys([*names, "publish"])]
    return f"```text\n{_help()}\n```\n\n" + "\n\n".join(parts)


def settings() -> str:
    """Return a table of the settings that each configuration class declares, the general ones first."""
    systems: dict[type, list[str]] = {}
    for name, cls in SYSTEM_CONFIGS.items():
        for base in reversed(cls.__mro__):
            if dataclasses.is_dataclass(base):
                systems.setdefault(base, []).append(name)
    parts = [_section(RunConfig, [])]
    parts += [_section(cls, names) for cls, names in sorted(systems.items(), key=lambda item: -len(item[1]))]
    return "\n\n".join(parts)


def functions() -> str:
    """Return a directive for every public function."""
    names = [name for name in sable.__all__ if callable(getattr(sable, name))]
    return "```{eval-rst}\n" + "\n".join(f".. autofunction:: sable.{name}" for name in names) + "\n```"


def _help(*argv: str) -> str:
    out, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "88"
    try:
        with contextlib.redirect_stdout(out):
            code = cli.main([*argv, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    if code:
        raise SableError(f"sable {' '.join(argv)} --help ends with {code}")
    return out.getvalue().rstrip()


def _section(cls: type, systems: list[str]) -> str:
    """Return the table of what `cls` declares or gives another default."""
    of = f" Of {', '.join(f'`{name}`' for name in systems)}." if systems else ""
    about = " ".join((inspect.getdoc(cls) or "").split())
    rows = ["| setting | what it does | default | what it may be |", "| --- | --- | --- | --- |", *_rows(cls)]
    return f"## {cls.__name__}\n\n{about}{of}\n\n" + "\n".join(rows)


def _rows(cls: type) -> Iterator[str]:
    helps, declared = _texts(cls), vars(cls)["__annotations__"]
    for field in dataclasses.fields(cls):
        if field.name in declared and field.name != "meaning":
            text = " ".join(helps.get(field.name, "As above, with another default.").split())
            yield f"| `{field.name}` | {text} | {_default(field.default)} | {_allowed(cls, field.name)} |"


def _default(value: tp.Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`" if value else "none"
    return f"`{value}`" if value != "" else "none"


def _allowed(cls: type, name: str) -> str:
    """Return what a setting may be, in the words of the error for what it may not."""
    try:
        checks.build(cls, {name: object()})
    except SableError as error:
        return str(error).partition(": expected ")[2].replace("|", "\\|")
    raise SableError(f"{name} takes anything")


def _texts(cls: type) -> dict[str, str]:
    """Return the text below each field that `cls` itself declares."""
    body = tp.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]).body
    return {
        ast.unparse(field.target): ast.literal_eval(text.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    for mark, make in ((COMMANDS, commands), (SETTINGS, settings), (FUNCTIONS, functions)):
        if mark in source[0]:
            source[0] = source[0].replace(mark, make())


def _plain(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn a docstring, which is plain text with `names` and indented blocks, into reStructuredText."""
    out, block = [], False
    for line in lines:
        indented = line.startswith("    ") and bool(line.strip())
        if indented and not block:
            out += ["", "::", ""]
        if block and line.strip() and not indented:
            out.append("")
        block = (indented or not line.strip()) if block else indented
        parts = line.split("`")
        out.append(line if block else "``".join(re.sub(r"([*|_\\])", r"\\\1", p) if k % 2 == 0 else p
                                                for k, p in enumerate(parts)))  # fmt: skip
    lines[:] = out


def setup(app: Sphinx) -> dict[str, bool]:
    """Fill the pages in as they are read, and docstrings as they are shown."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _plain)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
