"""`python -m sable` is `sable`, also where it is not installed but on the path."""

import sys

from sable.cli import main

sys.exit(main())
