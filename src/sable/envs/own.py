"""Environments of the user's own, by name: `module:Class` for JAX ones, `pettingzoo:module:factory` for
Python ones. Imports no jax."""

import importlib
import importlib.util
import json
import re
import traceback
import typing as tp
from collections.abc import Mapping
from pathlib import Path

from sable.errors import SableError

if tp.TYPE_CHECKING:
    from sable.envs.base import Env

PETTINGZOO = "pettingzoo"
_PACKAGE = str(Path(__file__).parents[1])


class Place(tp.NamedTuple):
    """Where an environment of the user's own is made."""

    hosted: bool
    """Whether it is a Python environment, stepped by the host in processes of its own."""
    module: str
    attribute: str


def is_own(task: str) -> bool:
    """Whether a task's name names a module of the user's own."""
    return ":" in task


def locate(task: str) -> Place:
    """Where the environment called `task` is made; refused where it is no such name or no such module."""
    suite, _, rest = task.partition(":")
    module, _, attribute = rest.partition(":") if suite == PETTINGZOO else (suite, ":", rest)
    if not re.fullmatch(r"\w+(\.\w+)*", module) or not re.fullmatch(r"[^\W\d]\w*", attribute):
        raise SableError(
            f"task {task!r}: an environment of your own is named module:Class, such as meet:Meet, and one of "
            "PettingZoo's kind pettingzoo:module:factory, such as "
            "pettingzoo:mpe2.simple_spread_v3:parallel_env"
        )
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    except Exception as error:  # a package around the module runs when it is looked for
        raise SableError(f"task {task!r}: importing {module!r} failed: {told(error)}") from None
    if found is None:
        top = module.partition(".")[0]
        known = top in ("mpe2", "rware", "lbforaging", "gymnasium", "pettingzoo")
        extra = "; pip install 'sable[pettingzoo]' installs it" if known else ""
        raise SableError(
            f"task {task!r}: there is no module {module!r} in this folder or on Python's path{extra}"
        )
    return Place(suite == PETTINGZOO, module, attribute)


def suite_and_name(task: str) -> tuple[str, str]:
    """A task's suite and its name there, for folders, recipes and reports."""
    if not is_own(task):
        suite, _, name = task.partition("/")
        return suite, name
    suite, _, rest = task.partition(":")
    return (suite, rest) if suite == PETTINGZOO else ("own", task)


def make(task: str, options: Mapping[str, tp.Any]) -> "Env":
    """The environment called `task`, made with `options` as keyword arguments."""
    place, arguments = locate(task), {name: value_of(given) for name, given in options.items()}
    if place.hosted:
        from sable.envs.hosted import HostedEnv

        return tp.cast("Env", HostedEnv(task, place.module, place.attribute, arguments))
    try:
        thing = find(place.module, place.attribute)
        env: tp.Any = thing(**arguments) if callable(thing) else thing
    except SableError:
        raise
    except Exception as error:
        raise SableError(f"task {task!r} could not be made: {told(error)}") from None
    missing = [part for part in ("spec", "reset", "step", "rekey") if not hasattr(env, part)]
    if missing:
        raise SableError(
            f"task {task!r} is no environment: it has no {missing[0]} (see docs/add-an-environment.md)"
        )
    return env


def find(module: str, attribute: str) -> tp.Any:
    """What the module calls by that name."""
    loaded = importlib.import_module(module)
    if not hasattr(loaded, attribute):
        names = ", ".join(name for name in vars(loaded) if not name.startswith("_"))
        raise SableError(f"module {module!r} has no {attribute!r}; it has {names or 'nothing'}")
    return getattr(loaded, attribute)


def value_of(given: tp.Any) -> tp.Any:
    """An option's value: as JSON where its text is, else the text itself."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        return given


def told(error: BaseException) -> str:
    """An error of somebody else's code in one line: what it says, and where it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_PACKAGE)]
    frames = [f for f in frames if "importlib" not in f.filename]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    said = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}{': ' if said else ''}{said}{where}"
