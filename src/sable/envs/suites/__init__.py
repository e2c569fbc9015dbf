"""The paper's suites, Neom and our own small tasks, behind `envs.base`."""
