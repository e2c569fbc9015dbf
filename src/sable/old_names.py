"""Names of an older version in the source of own environments and systems, found before it runs.

A module that still has them would fail somewhere inside a compiled program; here the first is named with its
new one.
"""

import ast
from pathlib import Path

IMPORTS = {
    "sable.envs.base": {"opening": "first_timestep", "following": "next_timestep"},
    "sable.systems.base": {"configured": "hyperparameters_from"},
    "sable.systems.ppo": {
        "Acted": "PolicyExtras",
        "Evaluation": "ActionEvaluation",
        "Hyper": "Hyperparameters",
    },
    "sable.ops.trees": {"reset": "reset_memory"},
}
"""By module: what is imported from it, or asked of it."""
KEYWORDS = {
    "Observation": {"legal": "action_mask", "time": "step_count"},
    "TimeStep": {"final": "final_observation"},
    "Transition": {"final": "next_extras"},
    "System": {"exploit": "act", "final": "next_extras"},
    "Policy": {"evaluate": "evaluate_actions"},
    "next_timestep": {"ended": "terminated", "timed_out": "truncated"},
}
"""By the name, imported from sable, of what is called with them."""
ATTRIBUTES = {
    "observation": {"legal": "action_mask", "time": "step_count"},
    "timestep": {"final": "final_observation"},
    "steps": {"final": "next_extras"},
}
"""By the name of what they are asked of."""


def in_file(path: str | None) -> str:
    """Return what `in_source` finds in a module's file, if it is one of Python."""
    if not path or not path.endswith(".py"):
        return ""
    try:
        return in_source(Path(path).read_text(), Path(path).name)
    except (OSError, ValueError):  # whoever imports it says what is wrong
        return ""


def in_source(text: str, file: str) -> str:
    """Return the first old name in the text of a module and its new one, in words; nothing where there is
    none."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return ""
    found, modules, names = [], {}, set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sable":
            for one in node.names:
                modules[one.asname or one.name] = f"{node.module}.{one.name}"
                names.add(one.asname or one.name)
                found.append((node.lineno, one.name, IMPORTS.get(str(node.module), {}).get(one.name)))
    if not names:  # whatever else is in there, it is not ours
        return ""
    for node in nodes:
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else _name(node.func)
            owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            known = KEYWORDS.get(called, {}) if _name(owner) in names else {}
            found += [
                (node.lineno, f"{called}({key.arg}=)", known.get(str(key.arg))) for key in node.keywords
            ]
        elif isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else _name(node.value)
            known = ATTRIBUTES.get(owner) or IMPORTS.get(modules.get(owner, ""), {})
            found.append((node.lineno, f"{owner}.{node.attr}", known.get(node.attr)))
    first = min((one for one in found if one[2]), default=None)
    return f"{file}, line {first[0]}: {first[1]} is called {first[2]} now" if first else ""


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
