"""What is wrong with an environment: `check` plays it, `findings` says what was found."""
