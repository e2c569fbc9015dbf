"""Environments by name. Suites, and jax itself, are imported when the first environment is made."""

import importlib
import typing as tp

from sable.envs import custom as own
from sable.envs.tasks import parse, with_options
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


def make(task: str, trust: Trust = NOTHING, /, **options: tp.Any) -> "Env":
    """The environment of that task, with the task's options (see `Task.options`) changed as given; or one of
    the user's own that `trust` covers, made with `options` as keyword arguments."""
    if own.is_own(task):
        return own.make(task, options, trust)
    known = with_options(parse(task), options)
    try:
        return importlib.import_module(f"sable.envs.suites.{_MODULES[known.suite]}").make(known)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        raise SableError(
            f"task {task!r} needs {missing}, which is not installed: {pip_install(_EXTRAS[missing])}"
        ) from None
