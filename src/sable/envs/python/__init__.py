"""Environments in Python: `vector_env` starts processes, `worker` is one, `pettingzoo` makes arrays of an
environment."""
