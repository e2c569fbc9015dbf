"""Which code from outside this package a command may run: what its caller named, or trusts.

A name in a file (a run's config.json, an exported policy.json, a ledger's row) is data. It is looked up,
imported or called only with a `Trust` that covers it, and always through this module: looking up a dotted
name already imports the packages around it. Whether a module is imported already plays no part.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
import typing as tp
from dataclasses import dataclass
from types import ModuleType

from sable import old_names
from sable.errors import SableError, describe

Kind = tp.Literal["env", "system"]

_WORDS = {"env": "environment", "system": "system"}
_LONGEST = 100


class Untrusted(SableError):
    """A file names code that the caller neither named nor trusts, or other code than the caller named."""


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The code that the caller of one command named or trusts. It holds for that command and for the
    processes that it starts, and is written down nowhere."""

    env: str | None = None
    """The environment's name, as the caller gave it."""
    system: str | None = None
    """The system's name, as the caller gave it."""
    everything: bool = False
    """Whether the caller trusts the run, or the row of a ledger, that the command reads."""

    def require_equal(self, kind: Kind, name: str) -> None:
        """Refuse a file's name where the caller gave another one."""
        allowed = getattr(self, kind)
        if allowed is not None and allowed != name:
            raise Untrusted(f"its {_WORDS[kind]} is {_shown(name)}, not {_shown(allowed)} as named")

    def require(self, kind: Kind, name: str) -> None:
        """Refuse code that the caller neither named nor trusts."""
        self.require_equal(kind, name)
        if self.everything is True or getattr(self, kind) == name:
            return
        text = _shown(name)
        raise Untrusted(
            f"its {_WORDS[kind]} {text} is not part of sable, and files run no code: name it "
            f"(--{kind} {text}, in Python {kind}={text}) or trust it (--trust, trust=True)"
        )

    def exists(self, kind: Kind, name: str, module: str) -> bool:
        """Return whether there is a `module`, where the code called `name` is; imports the packages around
        it."""
        self.require(kind, name)
        _join_current_folder()
        try:
            return importlib.util.find_spec(module) is not None
        except (ModuleNotFoundError, ValueError):  # no such package; a module that says nothing of its origin
            return module in sys.modules
        except Exception as error:  # a package around the module runs when it is looked for
            raise _import_error(kind, name, module, error) from None

    def import_module(self, kind: Kind, name: str, module: str) -> ModuleType:
        """Import `module`, where the code called `name` is."""
        self.require(kind, name)
        _join_current_folder()
        _refuse_old_names(kind, name, module)
        try:
            return importlib.import_module(module)
        except Exception as error:
            raise _import_error(kind, name, module, error) from None


NOTHING = Trust()
"""What a command may run whose caller named nothing: this package alone."""


def _refuse_old_names(kind: Kind, name: str, module: str) -> None:
    """Refuse a module that is not imported yet and has names of an older version."""
    spec = None
    with contextlib.suppress(Exception):  # whatever is wrong, importing it says so
        spec = None if module in sys.modules else importlib.util.find_spec(module)
    if old := old_names.in_file(spec.origin if spec else None):
        raise SableError(f"{_WORDS[kind]} {name!r} is written for an older version of sable: {old}")


def child_command() -> list[str]:
    """Return how a Python process of ours begins: -P leaves the current folder out of its path."""
    return [sys.executable, "-P"]


def child_environment() -> dict[str, str]:
    """Return the environment of a Python process of ours, which is to find modules where this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _join_current_folder() -> None:
    """Let modules in the current folder be found, after all others: only a command that names code looks
    there."""
    if "" not in sys.path and (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)


def _import_error(kind: Kind, name: str, module: str, error: Exception) -> SableError:
    return SableError(f"{_WORDS[kind]} {name!r}: importing {module!r} failed: {describe(error)}")


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
