"""The arrays of checkpoints that versions before this one wrote, with Orbax. Nothing here writes."""

import typing as tp
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sable.errors import SableError, describe
from sable.installation import pip_install

ARRAYS = "arrays"


def read(checkpoint: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return these arrays of a checkpoint whose files have been verified."""
    try:
        import orbax.checkpoint as ocp  # slow to import, and needed only here
    except ImportError:
        raise SableError(
            f"checkpoint {checkpoint} is of an older version, whose arrays Orbax reads, which is not "
            f"installed: {pip_install('orbax')}"
        ) from None
    names = list(names)
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    try:
        with _reader(ocp) as reader:
            return reader.restore(
                (checkpoint / ARRAYS).absolute(),
                item=dict.fromkeys(names, 0),
                restore_args=as_numpy,
                partial_restore=True,
            )
    except Exception as error:  # of any of the packages that Orbax uses
        raise SableError(f"checkpoint {checkpoint} cannot be read by Orbax: {describe(error)}") from None


def _reader(ocp: tp.Any) -> tp.Any:
    """Return Orbax, for this process alone: it would wait for the others."""
    import jax

    if jax.process_count() == 1:
        return ocp.PyTreeCheckpointer()
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)
