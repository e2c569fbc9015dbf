"""A run before anything of its state is there, and its compiled stages."""

import functools
import typing as tp
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from sable.config.schema import Config, RunConfig
from sable.envs.base import Env
from sable.envs.python.vector_env import PythonVectorEnv
from sable.systems.base import System
from sable.training import device_memory as memory
from sable.training import devices, host_rollout
from sable.training.compile import Compiler
from sable.training.progress import RunProgress
from sable.training.update import Program, Stages, State, make_program, map_seeds
from sable.types import PyTree


@dataclass(frozen=True)
class Job:
    """A run before anything of its state is there: what is trained, its programs, and the devices for it."""

    env: Env | PythonVectorEnv
    system: System
    config: Config
    program: Program
    mesh: Mesh | None
    compiled: Compiler
    init_state: tp.Callable[..., State]
    learner_args: tuple
    shapes: State
    shardings: State | None

    @property
    def python_env(self) -> PythonVectorEnv | None:
        """The environments that the host steps, where it does."""
        return self.env if isinstance(self.env, PythonVectorEnv) else None

    @property
    def steps_per_update(self) -> int:
        """Environment steps of a seed in an update."""
        return self.config.system.num_envs * self.config.system.rollout_length

    @functools.cached_property
    def boundaries(self) -> list[int]:
        """The updates after which to evaluate."""
        return schedule(self.config.run, self.steps_per_update)


def make_job(env: Env | PythonVectorEnv, system: System, config: Config, hypers: PyTree) -> Job:
    """Return the run's programs, not yet compiled; refuse what cannot fit the devices."""
    # Python environments are stepped by the host; programs are then made from shapes alone.
    python_env = isinstance(env, PythonVectorEnv)
    program = make_program(env.stub_env if isinstance(env, PythonVectorEnv) else env, system, config)
    init_state, seeds = map_seeds(program.start), np.array(config.run.seeds, np.uint32)
    mesh = devices.make_mesh(config)
    learner_args = (seeds,) if hypers is None else (seeds, hypers)
    with devices.use_mesh(mesh):
        shapes = jax.eval_shape(init_state, *learner_args)
    num_devices = mesh.size if mesh else 1
    memory.refuse_beyond(memory.tree_bytes(shapes) // num_devices)  # before any of it is there
    if not python_env:  # which plays them a few at a time
        memory.refuse_episodes(shapes, config.run, config.system.num_envs, num_devices)
    return Job(
        env=env,
        system=system,
        config=config,
        program=program,
        mesh=mesh,
        compiled=Compiler(config.run, mesh),
        init_state=init_state,
        learner_args=learner_args,
        shapes=shapes,
        shardings=devices.state_shardings(mesh, shapes),
    )


def compile_stages(job: Job, progress: RunProgress) -> Stages:
    """Return the compiled stages; refuse what does not fit, and note what the run takes."""
    logger, state = progress.logger, progress.state
    logger.phase("compiling")
    if job.python_env is not None:
        parts = job.system, job.program, job.config, job.compiled, state
        stages = host_rollout.make_stages(job.python_env, *parts)
    else:
        stages = make_stages(job, state)
    memory.refuse_beyond(memory.program_bytes(stages.run_updates))
    if job.python_env is None:
        num_bytes = memory.program_bytes(stages.evaluate_and_keep_best)
        memory.refuse_measuring("evaluation_episodes", job.config.run.evaluation_episodes, num_bytes)
    logger.note(memory.summary(state, stages.run_updates, job.config, job.boundaries[-1]))
    if job.python_env is not None and progress.updates:
        logger.note("the environments' states could not be saved: all episodes begin anew")
    return stages


def make_stages(job: Job, state: State) -> Stages:
    """Return the stages of environments that the device steps."""
    mesh, compiled, shardings = job.mesh, job.compiled, job.shardings
    replicated = devices.replicated_sharding(mesh)
    run_updates = devices.vmap_seeds(mesh, job.program.run_updates, (0, None))
    evaluate = devices.vmap_seeds(mesh, job.program.evaluate_and_keep_best)

    # Compiled only when called: a run that is stopped does not need it.
    def absolute_metric(state: State) -> PyTree:
        return compiled(devices.vmap_seeds(mesh, job.program.absolute_metric), state, out=replicated)(state)

    return Stages(
        compiled(run_updates, state.run, np.int32(1), donate=True, out=shardings and shardings.run),
        compiled(evaluate, state, donate=True, out=shardings and (shardings, replicated)),
        absolute_metric,
    )


def schedule(run: RunConfig, steps_per_update: int) -> list[int]:
    """Return the updates after which to evaluate, as even as possible; the last is the end of training."""
    num_updates = max(1, run.total_steps // steps_per_update)
    num_evaluations = min(run.num_evaluations, num_updates)
    return [round((i + 1) * num_updates / num_evaluations) for i in range(num_evaluations)]
