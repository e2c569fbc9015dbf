"""`python -m sable` is `sable`, also where it is not installed but on the path."""

import os
import sys
from pathlib import Path

# Python puts the current folder first; `sable` looks there last, and only for code that was named (`trust`).
if not sys.flags.safe_path and sys.path[0] == os.getcwd() != str(Path(__file__).parents[1]):
    del sys.path[0]

from sable.cli.main import main

sys.exit(main())
