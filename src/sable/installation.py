"""What the distribution is called, which version this is, and how to install more of it."""

DISTRIBUTION = "sable-marl"
"""On PyPI `sable` is somebody else's; the import and the command are `sable` all the same."""
VERSION = "0.1.0"
"""Where it is not installed but on the path too; pyproject.toml reads it here."""


def pip_install(extra: str = "") -> str:
    """Return the command that installs sable, with an extra if one is named."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"
