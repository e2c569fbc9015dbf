"""The command line. `main` has the commands, `flags` makes flags of the configuration's fields, `parsers`
has the larger commands' own, `formatting` prints."""
