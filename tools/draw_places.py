"""Draw places of the package at random, to see whether names are read without a dictionary.

    python tools/draw_places.py 7        # a seed; 25 places, or as many as a second number says

A place is a module, class or function with its signature and the first line of its docstring. Count those at
which a reader who knows JAX and reinforcement learning would have to look a name up.
"""

import ast
import random
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "sable"


def places(path: Path) -> list[str]:
    """Return a line or two on every class and function of a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if isinstance(node, ast.ClassDef):
                fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
                names = ", ".join(ast.unparse(item.target) for item in fields)
            else:
                names = ast.unparse(node.args)
            first = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
            found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}({names})\n    {first}")
    return found


def main(argv: list[str]) -> None:
    """Print the places of a seed."""
    seed, number = int(argv[0]), int(argv[1]) if len(argv) > 1 else 25
    everything = [place for path in sorted(PACKAGE.rglob("*.py")) for place in places(path)]
    for count, place in enumerate(random.Random(seed).sample(everything, number), 1):
        print(f"{count:2} {place}")


if __name__ == "__main__":
    main(sys.argv[1:])
