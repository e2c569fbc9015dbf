"""What pyproject.toml cannot say: the ledger, results/ledger.jsonl, becomes data of the package when that is
built. An editable install reads it where it is."""

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


setup(cmdclass={"build_py": BuildWithLedger})
