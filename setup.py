"""What pyproject.toml cannot say: the ledger, results/ledger.jsonl, becomes data of the package when that is
built (an editable install reads it where it is), and a description without links to files beside it."""

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithLedger(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            reports = Path(self.build_lib, "sable", "reports")
            self.mkpath(str(reports))
            self.copy_file("results/ledger.jsonl", str(reports / "ledger.jsonl"))


def description() -> str:
    """Return the README for a page without files beside it: links to files become the names of those in the
    source distribution, and pictures what is said of them."""
    text = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"!?\[([^][]+)\]\((?![a-z]+:|#)[^()\s]+\)", r"\1", text)


setup(
    cmdclass={"build_py": BuildWithLedger},
    long_description=description(),
    long_description_content_type="text/markdown",
)
