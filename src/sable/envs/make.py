"""Environments by name. Suites, and jax itself, are imported when the first environment is made."""

import importlib
import importlib.metadata
import typing as tp

from sable.envs import custom
from sable.envs.tasks import Task, parse, with_options
from sable.errors import SableError
from sable.installation import pip_install
from sable.trust import NOTHING, Trust

if tp.TYPE_CHECKING:
    from sable.envs.base import Env

_MODULES = {
    "rware": "jumanji",
    "lbf": "jumanji",
    "connector": "jumanji",
    "smax": "jaxmarl",
    "mpe": "jaxmarl",
    "mabrax": "jaxmarl",
    "neom": "neom",
    "probe": "probes",
    "null": "probes",
}
_EXTRAS = {"jumanji": "", "jaxmarl": "jaxmarl", "brax": "jaxmarl"}
RULES = {"jumanji": "1.1.2", "jaxmarl": "0.2.0", "brax": "0.14.2"}
"""The versions by whose rules our tasks are played: starts, rewards, views and physics are theirs, and parts
of them are written anew to match to the last bit. Of other packages any version will do that the metadata
allow."""
_RULES_OF = {
    "rware": "jumanji",
    "lbf": "jumanji",
    "connector": "jumanji",
    "smax": "jaxmarl",
    "mpe": "jaxmarl",
}
_RULES_OF |= {"mabrax": "jaxmarl brax"}


def make(task: str, trust: Trust = NOTHING, /, **options: tp.Any) -> "Env":
    """Return the environment of that task, with the task's options (see `Task.options`) changed as given; or
    one of the user's own that `trust` covers, made with `options` as keyword arguments."""
    if custom.is_custom(task):
        return custom.make(task, options, trust)
    known = with_options(parse(task), options)
    _require_rules(known)
    try:
        return importlib.import_module(f"sable.envs.suites.{_MODULES[known.suite]}").make(known)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        raise SableError(
            f"task {task!r} needs {missing}, which is not installed: {pip_install(_EXTRAS[missing])}"
        ) from None


def _require_rules(task: Task) -> None:
    """Refuse to play by other rules than those that are tested: another version may change what is learnt."""
    for package in _RULES_OF.get(task.suite, "").split():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # said where it is imported
        if found != RULES[package]:
            raise SableError(
                f"task {task.id!r} is tested with {package} {RULES[package]}, and {found} is installed, "
                f"whose rules may differ: pip install '{package}=={RULES[package]}'"
            )
