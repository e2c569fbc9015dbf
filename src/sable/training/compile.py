"""Compiling ahead of time, as a run's configuration asks for."""

import time
import typing as tp

import jax
from jax.sharding import Mesh

from sable.config.schema import RunConfig
from sable.training import devices
from sable.types import PyTree


class Compiler:
    """Compiles ahead of time with the run's precision and determinism, and adds up the seconds it takes."""

    def __init__(self, run: RunConfig, mesh: Mesh | None = None):
        self.precision, self.mesh = run.precision, mesh
        self.options = options(run)
        self.seconds = 0.0

    def __call__(
        self, function: tp.Callable, *args: PyTree, donate: bool = False, out: PyTree = None
    ) -> tp.Callable:
        """Return `function`, compiled for arguments like these; `out` says where on several devices its
        results go."""
        began = time.monotonic()
        # Seeds are a batch axis; the old state is dead after the call, so its memory is reused.
        with jax.default_matmul_precision(self.precision), devices.use_mesh(self.mesh):
            jitted = jax.jit(function, donate_argnums=(0,) if donate else (), out_shardings=out)
            lowered = jitted.lower(*args)
        compiled = lowered.compile(compiler_options=self.options)
        self.seconds += time.monotonic() - began
        return compiled


def options(run: RunConfig) -> dict[str, str | bool]:
    """Return what the compiler is told, on this machine."""
    if jax.default_backend() == "gpu":
        return {"xla_gpu_deterministic_ops": True} if run.deterministic else {}
    # XLA may hand matrix products, elementwise work and reductions to YNNPACK; its reductions are slow.
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}
