"""Environments of the user's own, by name: `module:Class` for JAX ones, `pettingzoo:module:factory` for
Python ones. Imports no jax."""

import json
import re
import typing as tp
from collections.abc import Mapping

from sable.errors import SableError, describe
from sable.installation import pip_install
from sable.trust import Trust

if tp.TYPE_CHECKING:
    from sable.envs.base import Env

PETTINGZOO = "pettingzoo"


class EnvLocation(tp.NamedTuple):
    """Where an environment of the user's own is made."""

    is_python: bool
    """Whether it is a Python environment, stepped by the host in processes of its own."""
    module: str
    attribute: str


def is_custom(task: str) -> bool:
    """Return whether a task's name names a module of the user's own."""
    return ":" in task


def parse(task: str) -> EnvLocation:
    """Return where the environment called `task` is made, by its name alone: nothing is looked up."""
    suite, _, rest = task.partition(":")
    module, _, attribute = rest.partition(":") if suite == PETTINGZOO else (suite, ":", rest)
    if not re.fullmatch(r"\w+(\.\w+)*", module) or not re.fullmatch(r"[^\W\d]\w*", attribute):
        raise SableError(
            f"task {task!r}: an environment of your own is named module:Class, such as meet:Meet, and one of "
            "PettingZoo's kind pettingzoo:module:factory, such as "
            "pettingzoo:mpe2.simple_spread_v3:parallel_env"
        )
    return EnvLocation(suite == PETTINGZOO, module, attribute)


def locate(task: str, trust: Trust) -> EnvLocation:
    """Return the same; refused where there is no such module, or `trust` does not cover it."""
    location = parse(task)
    if not trust.exists("env", task, location.module):
        top = location.module.partition(".")[0]
        known = top in ("mpe2", "rware", "lbforaging", "gymnasium", "pettingzoo")
        extra = f"; {pip_install('pettingzoo')} installs it" if known else ""
        raise SableError(
            f"task {task!r}: there is no module {location.module!r} in this folder or on Python's path{extra}"
        )
    return location


def suite_and_name(task: str) -> tuple[str, str]:
    """Return a task's suite and its name there, for folders, recipes and reports."""
    if not is_custom(task):
        suite, _, name = task.partition("/")
        return suite, name
    suite, _, rest = task.partition(":")
    return (suite, rest) if suite == PETTINGZOO else ("own", task)


def make(task: str, options: Mapping[str, tp.Any], trust: Trust) -> "Env":
    """Return the environment called `task`, made with `options` as keyword arguments, if `trust` covers
    it."""
    location, arguments = locate(task, trust), {name: value_of(value) for name, value in options.items()}
    if location.is_python:
        from sable.envs.python.vector_env import PythonVectorEnv

        return tp.cast("Env", PythonVectorEnv(task, arguments, trust))
    env = find(task, trust)
    _require(env, ("reset", "step", "rekey"), task)  # before it is called
    if isinstance(env, type):
        try:
            env = env(**arguments)
        except Exception as error:
            raise SableError(f"task {task!r} could not be made: {describe(error)}") from None
    elif arguments:
        raise SableError(f"task {task!r} is there already, an object: it takes no options")
    _require(env, ("spec", "reset", "step", "rekey"), task)
    return tp.cast("Env", env)


def find(task: str, trust: Trust) -> tp.Any:
    """Return what the name of an environment stands for, not called yet."""
    location = parse(task)
    module = trust.import_module("env", task, location.module)
    if not hasattr(module, location.attribute):
        names = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise SableError(
            f"module {location.module!r} has no {location.attribute!r}; it has {names or 'nothing'}"
        )
    return getattr(module, location.attribute)


def _require(thing: tp.Any, parts: tp.Iterable[str], task: str) -> None:
    """Refuse what lacks a part of an environment."""
    for part in parts:
        if not hasattr(thing, part):
            raise SableError(
                f"task {task!r} is no environment: it has no {part}; it is to be a class, or an object, with "
                "spec, reset, step and rekey (see docs/guides/own-environment.md)"
            )


def value_of(value: tp.Any) -> tp.Any:
    """Return an option's value: as JSON where its text is, else the text itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
