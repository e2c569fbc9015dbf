"""Checks of an environment: `check` plays it, `findings` says what was found."""
