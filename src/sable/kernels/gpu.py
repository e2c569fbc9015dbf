"""What the GPU there is can do. Where none of its properties are known, as when kernels are only lowered, it
can do all."""

import jax

ROOMY = ("8.0", "8.7", "9.0", "10.0", "10.3", "11.0")
"""Compute capabilities where the threads of a program may share 160 KiB and more; elsewhere they have 99."""


def capable() -> bool:
    """Whether there is a GPU that can run the kernels: NVIDIA's since 2020, of compute capability 8.0."""
    major = _capability().partition(".")[0]  # other makers' have names, not numbers
    return jax.default_backend() == "gpu" and major.isdigit() and int(major) >= 8


def roomy() -> bool:
    """Whether its programs have much memory to share."""
    return _capability() in ROOMY


def _capability() -> str:
    return getattr(jax.devices()[0], "compute_capability", ROOMY[0])
