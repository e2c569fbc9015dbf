"""A run's programs without the run: compiled from shapes alone, to be counted, or started, to be timed."""

import math
import statistics
import time
import typing as tp
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import jax
import numpy as np
from jax.extend.core import Jaxpr

from sable import systems
from sable.config.schema import Config
from sable.envs.base import Env
from sable.systems.base import System
from sable.training import device_memory as memory
from sable.training import devices
from sable.training.compile import Compiler
from sable.training.rollout import collect
from sable.training.update import Program, RunState, State, make_program, map_seeds
from sable.types import Rollout


@dataclass(frozen=True)
class DryRun:
    """The programs `sable train` would run for this configuration. Nothing is compiled before it is asked
    for, and nothing but `start` fills the device."""

    env: Env
    config: Config
    compile_seconds: dict[str, float] = field(default_factory=dict)
    """of what was asked for so far; tracing counts, of an update mostly among its `shapes`"""

    @cached_property
    def system(self) -> System:
        return systems.make(self.config.run.system, self.env.spec, self.config.system)

    @cached_property
    def program(self) -> Program:
        return make_program(self.env, self.system, self.config)

    @cached_property
    def compiler(self) -> Compiler:
        return Compiler(self.config.run, devices.make_mesh(self.config))

    @cached_property
    def state(self) -> State:
        """The shapes of the run's state, each with its place where several devices share it."""
        began = time.monotonic()
        shapes = jax.eval_shape(map_seeds(self.program.start), self._seeds)
        self.compile_seconds["shapes"] = time.monotonic() - began
        if self.compiler.mesh is None:
            return shapes
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type, sharding=where),
            shapes,
            devices.state_shardings(self.compiler.mesh, shapes),
        )

    @cached_property
    def update(self) -> Jaxpr:
        """One update of one seed, traced and not compiled; `state` has traced most of it already."""
        return jax.make_jaxpr(self.program.update)(self._one_seed).jaxpr

    @cached_property
    def rollout(self) -> Rollout:
        """The shapes of one seed's rollout."""
        one, length = self._one_seed, self.config.system.rollout_length
        gather = partial(collect, self.env, self.system, length=length, reset_pool_size=1)
        return jax.eval_shape(gather, one.learner, one.rollout_state, one.key)[1]

    @cached_property
    def unit(self) -> tp.Any:
        """The compiled unit: (run, updates) -> run."""
        places = devices.state_shardings(self.compiler.mesh, self.state)
        unit = devices.vmap_seeds(self.compiler.mesh, self.program.run_updates, (0, None))
        out = places and places.run
        return self._compiled("unit", unit, self.state.run, np.int32(1), donate=True, out=out)

    @cached_property
    def assess(self) -> tp.Any:
        """The compiled evaluation: State -> (State, metrics)."""
        mesh = self.compiler.mesh
        places, everywhere = devices.state_shardings(mesh, self.state), devices.replicated_sharding(mesh)
        out = places and (places, everywhere)
        assess = devices.vmap_seeds(mesh, self.program.evaluate_and_keep_best)
        return self._compiled("assess", assess, self.state, donate=True, out=out)

    @property
    def needed(self) -> int:
        """The bytes each device holds while the run trains: those of the unit, and the best parameters."""
        return memory.program_bytes(self.unit) + memory.tree_bytes(self.state.best)

    def start(self) -> State:
        """Return the state the run would begin with."""
        begin = self._compiled("start", map_seeds(self.program.start), self._seeds)
        return devices.put_state(begin(self._seeds), devices.state_shardings(self.compiler.mesh, self.state))

    def _compiled(self, name: str, *args: tp.Any, **options: tp.Any) -> tp.Any:
        before = self.compiler.seconds
        compiled = self.compiler(*args, **options)
        self.compile_seconds[name] = self.compiler.seconds - before
        return compiled

    @property
    def _one_seed(self) -> RunState:
        """The shapes of one seed's state, wherever it is."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, weak_type=x.weak_type), self.state.run
        )

    @property
    def _seeds(self) -> np.ndarray:
        return np.array(self.config.run.seeds, np.uint32)


class Timing(tp.NamedTuple):
    """Medians over calls: by the clock, and of all threads' work together."""

    seconds: float
    cpu_seconds: float


def time_calls(
    call: Callable[[tp.Any], tp.Any], state: tp.Any, repeats: int, patience: float = math.inf
) -> tuple[Timing, tp.Any]:
    """Return how long `call`, which is fed what it last returned, takes after one call that warms up, and
    what it returned. Once the calls took longer than `patience` together, there are no more."""
    walls, cpus = [], []
    for _ in range(1 + repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        state = jax.block_until_ready(call(state))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        if sum(walls) > patience:
            break
    return Timing(statistics.median(walls[1:] or walls), statistics.median(cpus[1:] or cpus)), state
