"""The abilities of the GPU there is. Where none of its properties are known, as when kernels are only
lowered, it has all."""

import jax

LARGE_SHARED_MEMORY = ("8.0", "8.7", "9.0", "10.0", "10.3", "11.0")
"""Compute capabilities where the threads of a program may share 160 KiB and more; elsewhere they have 99."""


def supports_kernels() -> bool:
    """Return whether there is a GPU that can run the kernels: NVIDIA's since 2020, of compute capability
    8.0."""
    major = _capability().partition(".")[0]  # other makers' have names, not numbers
    return jax.default_backend() == "gpu" and major.isdigit() and int(major) >= 8


def has_large_shared_memory() -> bool:
    """Return whether its programs have much memory to share."""
    return _capability() in LARGE_SHARED_MEMORY


def _capability() -> str:
    return getattr(jax.devices()[0], "compute_capability", LARGE_SHARED_MEMORY[0])
