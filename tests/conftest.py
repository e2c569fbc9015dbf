"""Strict settings for every test: annotations checked at run time, no silent rank promotion, full precision,
one compile cache."""

import os

# Before jax is imported anywhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of a test run; less optimisation compiles faster and runs long enough.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/sable/xla"))

from jaxtyping import install_import_hook

install_import_hook(
    [
        "sable.ops",
        "sable.nets.actor_critic",
        "sable.nets.layers",
        "sable.nets.mat",
        "sable.nets.recurrent",
        "sable.nets.retention",
        "sable.nets.tokens",
        "sable.nets.values",
    ],
    "beartype.beartype",
)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True)
def strict_ranks(request):
    """Around ops, nets and systems, adding arrays of different ranks raises; the suites' own code would not
    survive it."""
    strict = {"ops", "nets", "systems"} & set(request.path.parts)
    with jax.numpy_rank_promotion("raise" if strict else "allow"):
        yield


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Each compiled program maps memory, and a process may hold only so many maps: compiling aborts there."""
    yield
    jax.clear_caches()
