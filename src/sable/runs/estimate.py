"""What a program will hold in memory, told from its shapes before anything is compiled."""

import math
import typing as tp
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

NEVER_WRITTEN = {"broadcast_in_dim", "iota"}
"""Operations whose results XLA always computes where they are used."""


def temporary_bytes(jaxpr: Jaxpr) -> int:
    """Return the most bytes of intermediate arrays alive at once, if every operation ran in the order it was
    traced and wrote its result down.

    XLA fuses some operations, which takes less, and copies what loops carry, which takes more.
    """
    last_use = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in _variables(eqn.invars)}
    # Results belong to the caller, which counts them.
    owned_by_caller = set(_variables(jaxpr.outvars))
    alive: dict[Var, int] = {}
    peak = now = 0
    for i, eqn in enumerate(jaxpr.eqns):
        inside = max(map(temporary_bytes, _inner_jaxprs(eqn)), default=0)
        for var in set(_variables(eqn.outvars)) - owned_by_caller:
            alive[var] = 0 if eqn.primitive.name in NEVER_WRITTEN else _num_bytes(var)
            now += alive[var]
        peak = max(peak, now + inside)
        for var in {*_variables(eqn.invars), *_variables(eqn.outvars)}:
            if var in alive and last_use.get(var, -1) <= i:
                now -= alive.pop(var)
    return peak


def _variables(atoms: tp.Iterable[tp.Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _num_bytes(var: Var) -> int:
    shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)


def _inner_jaxprs(eqn: tp.Any) -> Iterator[Jaxpr]:
    """Yield the bodies of loops, branches and calls. A kernel's body works on the chip."""
    if eqn.primitive.name == "pallas_call":
        return
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, ClosedJaxpr):
                yield one.jaxpr
            elif isinstance(one, Jaxpr):
                yield one
