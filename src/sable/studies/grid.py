"""What to compare: tasks by name, pattern or study, and systems in variants such as `mat:rms-norm:swiglu`."""

import fnmatch
import functools
import json
import typing as tp
from collections.abc import Sequence

from sable.config import renamed
from sable.config.schema import ONLY_ACTIONS, SYSTEM_CONFIGS, check_actions, field_names, system_config
from sable.envs import tasks
from sable.errors import SableError
from sable.reports import paper
from sable.reports.read import VARIANTS
from sable.runs.directory import safe_name
from sable.trust import Trust


class Variant(tp.NamedTuple):
    """A system with some of its fields changed."""

    system: str
    fields: dict[str, tp.Any]
    name: str
    """of its folder"""
    label: str
    """in reports, where it does not follow from the fields"""


Pair = tuple[str, Variant]
"""A task and what to train on it."""


def pairs(wanted: Sequence[str], systems: Sequence[str] = ()) -> list[Pair]:
    """Return every pairing asked for that the action spaces allow, in order and once.

    `wanted` are tasks, patterns of tasks, or names of `STUDIES`. Without `systems` a study has its own, and
    any other task all that can do it, with and without memory.
    """
    if not wanted:
        raise SableError(
            "nothing to compare: name tasks, patterns such as 'rware/*', or studies: " + ", ".join(STUDIES)
        )
    texts = dict.fromkeys(pair for name in wanted for pair in _expand(name, systems))
    possible = [(task, variant(text)) for task, text in texts if _is_possible(text, task)]
    for system in systems:
        its = [task for task, text in texts if text == system]
        if not any(_is_possible(system, task) for task in its):
            check_actions(variant(system).system, discrete=_action_kind(its[0]) == "discrete", task=its[0])
    return possible


def variant(text: str) -> Variant:
    """Return the system that `text` names: `sable:no-memory`, `mat:rms-norm:swiglu`, `sable:chunk-size=8`,
    `sable:recipe=FILE`."""
    system, *changes = text.split(":")
    names, fields = [*field_names(system_config(system, Trust(system=system))), "recipe"], {}
    for change in changes:
        name, equals, value = change.partition("=")
        name, switch = name.replace("-", "_"), True
        if not equals and name not in names and name.startswith("no_"):
            name, switch = name[3:], False
        if name not in names:
            raise SableError(f"{text!r}: {system} has no field {name!r}{renamed.near(name, names)}")
        fields[name] = _parse_value(value) if equals else switch
    plain = set(fields) <= set(VARIANTS) and all(isinstance(value, bool) for value in fields.values())
    label = "" if plain else " ".join([system, *changes])
    return Variant(system, fields, safe_name("+".join(changes)) or "default", label)


def _expand(name: str, systems: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs that one name stands for."""
    if name in STUDIES:
        study = STUDIES[name]()
        return [(task, s) for task in dict.fromkeys(t for t, _ in study) for s in systems] or study
    if not set(name) & set("*?["):
        return [(tasks.parse(name).id, system) for system in systems or _all_variants()]
    known = [task.id for task in tasks.list_tasks()]
    if not (matches := fnmatch.filter(known, name)):
        raise SableError(f"no task matches {name!r}; sable list prints them all")
    return [(task, system) for task in matches for system in systems or _all_variants()]


def _all_variants() -> list[str]:
    return [text for system in SYSTEM_CONFIGS for text in _with_and_without_memory(system)]


def _with_and_without_memory(system: str) -> list[str]:
    has = "memory" in field_names(system_config(system))
    return [f"{system}:memory", f"{system}:no-memory"] if has else [system]


def _is_possible(text: str, task: str) -> bool:
    kind = _action_kind(task)
    return ONLY_ACTIONS.get(text.split(":")[0], kind) == kind


@functools.cache
def _action_kind(task: str) -> str:
    return "discrete" if tasks.parse(task).num_actions > 0 else "continuous"


def _parse_value(text: str) -> tp.Any:
    """Return a number, a switch or a list as JSON writes them, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _product(names: Sequence[str], systems: Sequence[str]) -> list[tuple[str, str]]:
    return [(task, system) for task in names for system in systems]


def _paper() -> list[tuple[str, str]]:
    """Return what the paper's tables hold."""
    figures = ((task, system) for summary, task, system in paper.figures() if summary == "absolute")
    return [(task, text) for task, system in figures for text in _with_and_without_memory(system)]


def _scaling() -> list[tuple[str, str]]:
    """Return teams of 32 to 1,024 agents. The paper had to leave memory out here."""
    large = [
        task.id for task in tasks.list_tasks() if task.suite in ("lbf", "neom") and task.num_agents >= 32
    ]
    return _product(large, ["sable:memory", "sable:no-memory", "mat", "ippo:no-memory"])


def _ablation() -> list[tuple[str, str]]:
    """Return what Sable has and MAT lacks, one by one."""
    systems = ["mat", "mat:rms-norm", "mat:swiglu", "mat:rms-norm:swiglu", "sable:memory", "sable:no-memory"]
    return _product(paper.ABLATION, systems)


def _chunk() -> list[tuple[str, str]]:
    """Return chunk sizes from the whole rollout of 128 time steps at once to a sixteenth of it."""
    return _product(["rware/tiny-4ag"], [f"sable:chunk-size={size}" for size in (128, 64, 32, 16, 8)])


STUDIES = {"paper": _paper, "scaling": _scaling, "ablation": _ablation, "chunk": _chunk}
"""The paper's studies by name."""
