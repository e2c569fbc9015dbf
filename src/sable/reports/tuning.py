"""Which systems ran a tuned recipe and which ran on defaults, by the settings that runs recorded."""

import typing as tp
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from sable.config import resolve as settings
from sable.config.schema import SYSTEM_CONFIGS
from sable.reports.read import VARIANTS, Cost


def is_tuned(system: str, fields: Mapping[str, tp.Any]) -> bool:
    """Return whether any setting that the paper searched, or a recipe of ours has, is not the system's
    default. A recipe that says what the default says cannot be told from it."""
    names = {name for table in settings.recipes(system).values() for name in table}
    names |= set(settings.search_space(system))
    defaults = vars(SYSTEM_CONFIGS[system]())
    return any(
        fields[name] != defaults[name]
        for name in names - set(VARIANTS)
        if name in fields and name in defaults
    )


def unequal(costs: Iterable[Cost]) -> list[str]:
    """Return a line for each set of systems that ran on defaults on tasks where others were tuned, with the
    suites."""
    tasks: dict[str, dict[str, bool]] = defaultdict(dict)
    for cost in costs:
        if cost.algorithm in SYSTEM_CONFIGS:
            tuned = is_tuned(cost.algorithm, cost.settings)
            tasks[cost.task][cost.algorithm] = tasks[cost.task].get(cost.algorithm, False) or tuned
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for task, own in sorted(tasks.items()):
        if len(set(own.values())) > 1:
            plain, tuned = (
                ", ".join(name for name in SYSTEM_CONFIGS if own.get(name) is kind) for kind in (False, True)
            )
            found[plain, tuned][task.partition("/")[0]] += 1
    return [_line(plain, tuned, suites) for (plain, tuned), suites in found.items()]


def _line(plain: str, tuned: str, suites: Mapping[str, int]) -> str:
    where = ", ".join(f"{suite} ({count} task{'s' * (count != 1)})" for suite, count in suites.items())
    return (
        f"UNEQUAL TUNING on {where}: {plain} ran on defaults where {tuned} ran a tuned recipe; this does not "
        "compare systems at their best"
    )
