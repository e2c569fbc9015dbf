"""The code blocks of the pages, by kind, and what lets them run at tiny sizes."""

import re
import shlex
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
TINY = {"total_steps": 64, "num_evaluations": 1, "evaluation_episodes": 2, "absolute_episodes": 2}
TINY |= {"num_envs": 4, "rollout_length": 4, "num_minibatches": 1, "num_epochs": 1, "video": False}
_FENCE = re.compile(
    r"^(?P<fence>```+)(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=fence)\s*$", re.DOTALL | re.MULTILINE
)


def name_of(page: Path) -> str:
    """Return the page's path in the repository."""
    return page.relative_to(REPOSITORY).as_posix()


def blocks(page: Path, *kinds: str) -> list[str]:
    """Return the texts of a page's blocks of these kinds."""
    return [one["text"] for one in _FENCE.finditer(page.read_text()) if one["kind"].strip() in kinds]


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of every `sable ...` in a page's shell blocks."""
    found = []
    for text in blocks(page, "", "sh", "bash", "shell"):
        variables = dict(re.findall(r'^(\w+)="(.*)"$', text, re.MULTILINE))
        for line in text.replace("\\\n", " ").splitlines():
            for name, value in variables.items():
                line = re.sub(rf"\${name}\b", value, line)
            line = re.sub(r"\$SLURM_ARRAY_TASK_ID", "0", line)
            if words := _command(line):
                found.append(words[1:])
    return found


def _command(line: str) -> list[str]:
    """Return a command from `sable` on: by itself, after srun, or in quotes after --wrap."""
    if not re.match(r"(srun|sbatch|\S*/?sable)\s", line):
        return []
    words = shlex.split(line, comments=True)
    if "--wrap" in words:
        words = shlex.split(words[words.index("--wrap") + 1])
    while words and words[0].rpartition("/")[2] != "sable":
        words = words[1:]
    return words
