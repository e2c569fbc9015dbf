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

MAX_TEXT_BYTES = 8192
"""Bytes of a text that one process tells the others."""


@dataclass(frozen=True)
class ProcessInfo:
    """Which of how many processes this is, and who brings them together; jax finds out where that is None."""

    index: int = 0
    count: int = 1
    coordinator: str | None = None


def detect_processes(run: RunConfig) -> ProcessInfo:
    """Return how this process was started. Only a run on all devices is shared; else every process is on its
    own."""
    if run.devices != 0:
        return ProcessInfo()
    if "SABLE_PROCESSES" in os.environ:
        if ":" not in (coordinator := os.environ.get("SABLE_COORDINATOR", "")):
            raise SableError(f"SABLE_COORDINATOR={coordinator!r}: expected host:port of the first process")
        return _process_info("SABLE_PROCESS", "SABLE_PROCESSES", coordinator)
    if "SLURM_STEP_NODELIST" in os.environ:  # only what srun started has it
        return _process_info("SLURM_PROCID", "SLURM_NTASKS")
    if "OMPI_MCA_orte_hnp_uri" in os.environ:
        return _process_info("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    return ProcessInfo()


def join(run: RunConfig) -> None:
    """Meet the other processes, if there are any; before anything touches a device."""
    info = detect_processes(run)
    if info.count == 1:
        return
    import jax

    if jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(info.coordinator, info.count, info.index)
    except (RuntimeError, ValueError) as error:
        raise SableError(f"the {info.count} processes could not meet: {error}") from None


def is_main_process() -> bool:
    """Return whether this is the first of the processes that work together, or the only one."""
    import jax

    return jax.process_index() == 0


def max_over_processes(value: int) -> int:
    """Return the highest of the processes' values."""
    import jax

    if jax.process_count() == 1:
        return value
    from jax.experimental.multihost_utils import process_allgather

    return int(process_allgather(value).max())


def broadcast_from_main(function: Callable[[], str]) -> str:
    """Return what `function` returns, called in the main process alone; what it refuses, all refuse."""
    import jax

    if jax.process_count() == 1:
        return function()
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    text_of_main, refusal = "", None
    if is_main_process():
        try:
            text_of_main = function()
        except SableError as error:
            text_of_main, refusal = str(error), error
    text = np.zeros(MAX_TEXT_BYTES, np.uint8)
    encoded = text_of_main.encode()[:MAX_TEXT_BYTES]
    text[: len(encoded)] = list(encoded)
    refused, text = broadcast_one_to_all((np.int32(refusal is not None), text))
    text_of_main = bytes(text).rstrip(b"\0").decode(errors="replace")
    if refused:
        raise refusal or SableError(text_of_main)
    return text_of_main


def to_host(array: "PyTree") -> "PyTree":
    """Return an array that devices of several processes hold, whole in the memory of each; any other as it
    is."""
    if array.is_fully_addressable:
        return array
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(array, tiled=True)


def _process_info(index: str, count: str, coordinator: str | None = None) -> ProcessInfo:
    """Return which process this is, of how many, as these variables say."""
    values = []
    for name in (index, count):
        if not (text := os.environ.get(name, "")).isdecimal():
            raise SableError(f"{name}={text!r}: expected a whole number")
        values.append(int(text))
    if values[0] >= values[1]:
        raise SableError(f"{index}={values[0]} of {count}={values[1]}: processes are counted from 0")
    return ProcessInfo(values[0], values[1], coordinator)
