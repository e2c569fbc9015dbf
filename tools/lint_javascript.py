"""Lint the scripts of the report's and the viewer's page, and check their types, each page's together.

The scripts of a page share one scope, in the order the page has them, so they are checked as one file. Deno,
a Python package of `dev`, has a linter and TypeScript's checker, and needs no network.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deno import find_deno_bin

from sable.reports import page as report
from sable.viewer import page as viewer

SETTINGS = {
    "compilerOptions": {
        "checkJs": True,
        "strict": False,
        "noImplicitAny": False,
        "lib": ["dom", "dom.iterable", "esnext"],
    },
    # Two pages share some scripts, and neither uses all that is in them.
    "lint": {"rules": {"exclude": ["no-unused-vars"]}},
}


def pages() -> dict[str, list[Path]]:
    """Return the scripts of each page, in its order."""
    of_report, of_viewer = (Path(module.__file__).parent / "web" for module in (report, viewer))
    shared = [of_report / name for name in viewer._REPORT]
    return {
        "report": [of_report / name for name in report._SCRIPTS],
        "viewer": [*shared, *(of_viewer / name for name in viewer._SCRIPTS)],
    }


def findings(scripts: Sequence[Path]) -> str:
    """Return what Deno says against the scripts of one page, by their names and lines; "" if nothing."""
    texts = [script.read_text(encoding="utf-8") for script in scripts]
    starts = [0, *itertools.accumulate(text.count("\n") for text in texts)]
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "page.js")
        bundle.write_text("".join(texts), encoding="utf-8")
        Path(folder, "deno.json").write_text(json.dumps(SETTINGS))
        said = []
        for command in (["check", "--no-remote"], ["lint"]):
            done = subprocess.run(
                [find_deno_bin(), *command, bundle.name],
                cwd=folder,
                capture_output=True,
                text=True,
                env={"NO_COLOR": "1", "DENO_NO_UPDATE_CHECK": "1", "DENO_DIR": folder},
                check=False,
            )
            if done.returncode:
                said.append(done.stdout + done.stderr)

    def place(match: re.Match[str]) -> str:
        line = int(match[1])
        k = max(k for k, start in enumerate(starts[:-1]) if start < line)
        return f"{scripts[k].name}:{line - starts[k]}"

    return re.sub(r"\S*page\.js:(\d+)", place, "\n".join(said))


def main() -> int:
    """Print what is wrong; the exit code."""
    wrong = [text for scripts in pages().values() if (text := findings(scripts))]
    print("\n".join(wrong), end="")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
