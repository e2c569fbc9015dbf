"""One run and what it leaves: `open_run` starts here, `directory` is its folder, `policy` and `export` what
is taken from it, `plan` what it will take."""
