"""Systems with and without memory, or computed in another precision, are variants of one: each stands in a
report, and the best of them."""

import re
import typing as tp
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from sable.config.schema import SYSTEM_CONFIGS
from sable.reports import paper
from sable.reports.stats import Scores

ELSEWHERE = re.compile(r" \((mava|paper)\)$")
"""How the name of a system ends whose numbers are not ours."""


class System(tp.NamedTuple):
    """A system as it stands in the report; `best` where it is the better of its family's variants."""

    name: str
    family: str
    best: bool


def group_by_family(names: Iterable[str]) -> list[System]:
    """Return the systems, families in the paper's order and then by name, each followed by its best."""
    families, taken = defaultdict(list), set(names)
    for name in sorted(taken):
        families[re.sub(r" (no )?memory\b| compute(-dtype)?=\w+", "", name)].append(name)
    order = list(dict.fromkeys(system for _, _, system in paper.figures()))

    def place(family: str) -> tuple[int, str]:
        base = ELSEWHERE.sub("", family)
        return order.index(base) if base in order else len(order), family

    grouped = []
    for family in sorted(families, key=place):
        grouped += [System(name, family, False) for name in families[family]]
        if len(families[family]) > 1:
            best = f"{family} (best)"
            grouped.append(System(best if best not in taken else f"{best} here", family, True))
    return grouped


def is_changed(family: str) -> bool:
    """Return whether a family is one of our systems with other changes than memory and precision."""
    name = ELSEWHERE.sub("", family)
    return name not in SYSTEM_CONFIGS and name.split(" ")[0] in SYSTEM_CONFIGS


def with_best(scores: Mapping[str, Scores], systems: Sequence[System]) -> dict[str, Scores]:
    """Return the scores, and those of each family's better variant task by task."""
    best_scores = {name: dict(tasks) for name, tasks in scores.items()}
    for name, family, best in systems:
        if best:
            members = _best_member(scores, [s.name for s in systems if s.family == family and not s.best])
            best_scores[name] = {task: scores[member][task] for task, member in members.items()}
    return {system.name: best_scores[system.name] for system in systems}


def _best_member(scores: Mapping[str, Scores], members: Sequence[str]) -> dict[str, str]:
    """Return for each task the member with the highest mean score."""
    tasks = dict.fromkeys(task for member in members for task in scores[member])
    return {
        task: max((m for m in members if task in scores[m]), key=lambda m: np.mean(scores[m][task]))
        for task in tasks
    }


def contestants(systems: Sequence[System]) -> list[str]:
    """Return the best of every family; the variants themselves where there is but one family."""
    families = {system.family: system.name for system in systems}  # a best comes last in its family
    return list(families.values()) if len(families) > 1 else [s.name for s in systems if not s.best]
