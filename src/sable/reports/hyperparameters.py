"""Tables of settings: what the paper searched and what it fixed, beside our defaults. Nothing in them is
written by hand: they are `recipes/search.toml`, `protocol.toml` and the schema."""

import typing as tp
from collections.abc import Mapping, Sequence

from sable.config import protocol
from sable.config import resolve as settings
from sable.config.schema import SYSTEM_CONFIGS, RunConfig, field_names
from sable.reports import paper
from sable.reports.panels import Chapter
from sable.reports.typeset import Table

NONE = "–"


def chapters() -> list[Chapter]:
    """Return the default settings and the search spaces of every system."""
    families: dict[str, list[str]] = {}
    for system in SYSTEM_CONFIGS:
        families.setdefault(settings.family(system), []).append(system)
    return [
        Chapter(
            key="default-settings",
            title="Default settings",
            text="What the paper fixed, and what its public code has where the paper is silent (marked), "
            "beside our defaults; with a dash what is a setting of ours only. Recipes change ours for some "
            "suites.",
            tables=[_protocol(), *(_defaults(family, members) for family, members in families.items())],
        ),
        Chapter(
            key="search-spaces",
            title="Search spaces",
            text="What sable tune searches, which is what the paper searched, beside our defaults.",
            tables=[_searched(members) for members in families.values()],
        ),
    ]


def _protocol() -> Table:
    theirs = protocol.fixed("protocol") | protocol.fixed("run")
    defaults = vars(RunConfig())
    rows = [[name, _printed(theirs, name), text_of(defaults[name])] for name in theirs]
    return Table("Protocol", ["setting", "the paper", "ours"], rows)


def _defaults(family: str, members: Sequence[str]) -> Table:
    theirs = protocol.fixed(family)
    names = _names(members, searched=False)
    rows = [[name, _printed(theirs, name), *_ours(members, name)] for name in names]
    return Table(f"Default settings of {_title(members)}", ["setting", "the paper", *_heads(members)], rows)


def _searched(members: Sequence[str]) -> Table:
    spaces = {name: values for member in members for name, values in settings.search_space(member).items()}
    rows = [[name, ", ".join(map(text_of, values)), *_ours(members, name)] for name, values in spaces.items()]
    return Table(f"Search space of {_title(members)}", ["setting", "values", *_heads(members)], rows)


def _names(members: Sequence[str], *, searched: bool) -> list[str]:
    """Return the settings of these systems that the paper searched, or the others."""
    names = dict.fromkeys(name for member in members for name in field_names(SYSTEM_CONFIGS[member]))
    spaces = {name for member in members for name in settings.search_space(member)}
    return [name for name in names if (name in spaces) == searched]


def _printed(theirs: Mapping[str, tuple[tp.Any, bool]], name: str) -> str:
    if name not in theirs:
        return NONE
    value, from_code = theirs[name]
    return text_of(value) + " (public code)" * from_code


def _ours(members: Sequence[str], name: str) -> list[str]:
    """Return the default of each system, once where all have the same class."""
    classes = dict.fromkeys(SYSTEM_CONFIGS[member] for member in members)
    found = [vars(one()) for one in classes]
    return [text_of(one[name]) if name in one else NONE for one in found]


def _heads(members: Sequence[str]) -> list[str]:
    classes = {SYSTEM_CONFIGS[member] for member in members}
    return [f"our {paper.NAMES[member]}" for member in members] if len(classes) > 1 else ["ours"]


def _title(members: Sequence[str]) -> str:
    return " and ".join(paper.NAMES[member] for member in members)


def text_of(value: tp.Any) -> str:
    """Return a setting as a table shows it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, list)):
        return " ".join(map(text_of, value)) or "none"
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
