"""Several processes that train one run together: how they find each other, and what they agree on.

Each runs the same program on devices of its own; the first alone writes, prints and claims. They are started
by Slurm (srun), by Open MPI (mpirun), or by hand with SABLE_COORDINATOR=host:port, SABLE_PROCESSES=number and
SABLE_PROCESS=0, 1, .. set. A process alone needs none of this, and jax is imported only where several meet.
"""

import os
import typing as tp
from collections.abc import Callable
from dataclasses import dataclass

from sable.config.schema import RunConfig
from sable.errors import SableError

if tp.TYPE_CHECKING:
    from sable.types import PyTree

LONGEST = 8192
"""Bytes of a text that one process tells the others."""


@dataclass(frozen=True)
class Launch:
    """Which of how many processes this is, and who brings them together; jax finds out where that is None."""

    index: int = 0
    count: int = 1
    coordinator: str | None = None


def launched(run: RunConfig) -> Launch:
    """How this process was started. Only a run on all devices is shared; else every process is on its own."""
    if run.devices != 0:
        return Launch()
    if "SABLE_PROCESSES" in os.environ:
        if ":" not in (coordinator := os.environ.get("SABLE_COORDINATOR", "")):
            raise SableError(f"SABLE_COORDINATOR={coordinator!r}: expected host:port of the first process")
        return _launch("SABLE_PROCESS", "SABLE_PROCESSES", coordinator)
    if "SLURM_STEP_NODELIST" in os.environ:  # only what srun started has it
        return _launch("SLURM_PROCID", "SLURM_NTASKS")
    if "OMPI_MCA_orte_hnp_uri" in os.environ:
        return _launch("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    return Launch()


def join(run: RunConfig) -> None:
    """Meet the other processes, if there are any; before anything touches a device."""
    launch = launched(run)
    if launch.count == 1:
        return
    import jax

    if jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(launch.coordinator, launch.count, launch.index)
    except (RuntimeError, ValueError) as error:
        raise SableError(f"the {launch.count} processes could not meet: {error}") from None


def leads() -> bool:
    """Whether this process is the first of those that work together, or the only one."""
    import jax

    return jax.process_index() == 0


def highest(value: int) -> int:
    """The highest of the processes' values."""
    import jax

    if jax.process_count() == 1:
        return value
    from jax.experimental.multihost_utils import process_allgather

    return int(process_allgather(value).max())


def from_first(function: Callable[[], str]) -> str:
    """What `function` says, called in the first process alone; what it refuses, all refuse."""
    import jax

    if jax.process_count() == 1:
        return function()
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    said, refusal = "", None
    if leads():
        try:
            said = function()
        except SableError as error:
            said, refusal = str(error), error
    text = np.zeros(LONGEST, np.uint8)
    encoded = said.encode()[:LONGEST]
    text[: len(encoded)] = list(encoded)
    refused, text = broadcast_one_to_all((np.int32(refusal is not None), text))
    said = bytes(text).rstrip(b"\0").decode(errors="replace")
    if refused:
        raise refusal or SableError(said)
    return said


def to_host(array: "PyTree") -> "PyTree":
    """An array that devices of several processes hold, whole in the memory of each; any other as it is."""
    if array.is_fully_addressable:
        return array
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(array, tiled=True)


def _launch(index: str, count: str, coordinator: str | None = None) -> Launch:
    """What these variables say."""
    values = []
    for name in (index, count):
        if not (text := os.environ.get(name, "")).isdecimal():
            raise SableError(f"{name}={text!r}: expected a whole number")
        values.append(int(text))
    if values[0] >= values[1]:
        raise SableError(f"{index}={values[0]} of {count}={values[1]}: processes are counted from 0")
    return Launch(values[0], values[1], coordinator)
