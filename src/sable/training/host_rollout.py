"""Training on Python environments: the host steps them, the jitted policy decides, and what comes of it is
learnt by the same program that learns from JAX environments."""

import dataclasses
import typing as tp
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from sable.config.schema import RunConfig, SystemConfig
from sable.envs.python.vector_env import HostedEnv
from sable.errors import SableError
from sable.ops import trees as tree
from sable.systems.base import System
from sable.training.rollout import Situation, collect
from sable.training.update import Collected, Program, RunState, State, evaluation_key
from sable.types import Decision, Metrics, Observation, PyTree, Rollout, TimeStep, Transition

TRAINING, EVALUATION = "training", "evaluation"
"""The two batches of environments of a run."""

Compiler = tp.Callable[..., tp.Any]
Stats = tp.Mapping[str, tp.Any]


@dataclasses.dataclass(frozen=True)
class Unit:
    """Some updates, host and device in turn; called as the compiled one for JAX environments is."""

    collect: tp.Callable[[RunState], Collected]
    learn: tp.Any
    """(run, what was collected) -> run; compiled"""

    def __call__(self, state: RunState, num_updates: tp.Any) -> RunState:
        for _ in range(num_updates):
            state = self.learn(state, self.collect(state))
        return state

    def memory_analysis(self) -> tp.Any:
        """Of learning, which holds most."""
        return self.learn.memory_analysis()


class Stages(tp.NamedTuple):
    """What the host loop calls, for all seeds at once."""

    unit: Unit
    assess: tp.Callable[[State], tuple[State, Metrics]]
    absolute: tp.Callable[[State], Stats]


def refuse_sharing(env: tp.Any, mesh: Mesh | None) -> None:
    """Refuse to share a Python environment's run among devices."""
    if mesh is not None and isinstance(env, HostedEnv):
        raise SableError(
            f"{env.task} is stepped in processes of its own and trained on one device: leave --devices out"
        )


def make_stages(
    env: HostedEnv,
    system: System,
    program: Program,
    run: RunConfig,
    config: SystemConfig,
    compiled: Compiler,
    state: State,
) -> Stages:
    """Return the stages of a run whose episodes all begin now, those of a resumed one too: the state of a
    Python environment cannot be saved."""
    collector = Collector(env, system, run, config, compiled, state)
    learn = compiled(jax.vmap(program.update), state.run, collector.shapes, donate=True)
    play = make_play(env, system, compiled, min(run.evaluation_episodes, config.num_envs))
    # A seed's statistics of episodes, of whatever they are.
    shape = (len(run.seeds), run.evaluation_episodes)
    stats = {name: np.zeros(shape, np.float32) for name in collector.timestep.stats}
    judge = compiled(jax.vmap(program.assess), state, stats, donate=True)

    def assess(state: State) -> tuple[State, Metrics]:
        keys = jax.vmap(evaluation_key)(state.run)
        return judge(state, play(state.run.learner.params, keys, run.evaluation_episodes))

    def absolute(state: State) -> Stats:
        keys = jax.vmap(lambda one: jax.random.fold_in(evaluation_key(one), 1))(state.run)
        return play(state.best.params, keys, run.absolute_episodes)

    return Stages(Unit(collector, learn), assess, absolute)


def decision(
    system: System,
    learner: PyTree,
    observation: Observation,
    first: Array,
    memory: PyTree,
    key: Array,
    t: Array,
) -> Decision:
    """Return the decision of a seed at time step t, drawn from the keys of `update`, `advance` and
    `collect`: `split(key)[t]` is `fold_in(key, t)`."""
    _, advance_key = jax.random.split(key)
    _, steps_key = jax.random.split(jax.random.split(advance_key)[0])
    decision_key, _ = jax.random.split(jax.random.fold_in(steps_key, t))
    return system.explore(learner, observation, tree.reset(memory, first), decision_key)


class Collector:
    """Collects one rollout after another from environments that the host steps."""

    def __init__(
        self,
        env: HostedEnv,
        system: System,
        run: RunConfig,
        config: SystemConfig,
        compiled: Compiler,
        state: State,
    ):
        """Begin episodes, and compile what decides in them."""
        self.env, self.length = env, config.rollout_length
        self.timestep = now = _reset(env, TRAINING, state.run.key, config.num_envs)
        learner, memory = state.run.learner, state.run.situation.memory
        self.decide = compiled(
            jax.vmap(partial(decision, system), (0, 0, 0, 0, 0, None)),
            *(learner, now.observation, now.first, memory, state.run.key, np.int32(0)),
        )
        keep = jax.vmap(system.final)
        keeps = bool(jax.tree.leaves(jax.eval_shape(keep, learner, now.final, memory)))
        self.keep = compiled(keep, learner, now.final, memory) if keeps else lambda *_: ()

        def one(learner: PyTree, situation: Situation, key: Array) -> Collected:
            return collect(env.stand_in, system, learner, situation, key, config.rollout_length, 1)

        # What `collect` would hand over, which learning is compiled for.
        self.shapes = jax.eval_shape(jax.vmap(one), learner, state.run.situation, state.run.key)
        self.blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.shapes[0].env_state)

    def __call__(self, run_state: RunState) -> Collected:
        """Step all environments through one rollout."""
        memory, steps, ended = run_state.situation.memory, [], []
        start_memory = jax.tree.map(jnp.copy, memory)  # the state's own is donated
        for t in range(self.length):
            step, memory = self.step(run_state, memory, t)
            steps.append(step)
            stats = self.timestep.stats | {"episodes": np.ones_like(self.timestep.discount)}
            ended.append({name: (value * self.timestep.first).sum(1) for name, value in stats.items()})
        rollout = Rollout(
            steps=jax.tree.map(lambda *x: np.stack(x, axis=1), *steps),
            start_memory=start_memory,
            last=self.timestep,
            last_memory=memory,
        )
        sums = jax.tree.map(lambda *x: np.sum(x, axis=0, dtype=np.float32), *ended)
        return Situation(env_state=self.blank, timestep=self.timestep, memory=memory), rollout, sums

    def step(self, run_state: RunState, memory: PyTree, t: int) -> tuple[Transition, PyTree]:
        """Step all environments once; return the transition and the memory after it."""
        before, learner = self.timestep, run_state.learner
        decided = self.decide(learner, before.observation, before.first, memory, run_state.key, np.int32(t))
        action, extras = jax.device_get((decided.action, decided.extras))
        self.timestep = now = _step(self.env, TRAINING, action)
        return Transition(
            observation=before.observation,
            action=action,
            reward=now.reward,
            discount=now.discount,
            first=before.first,
            extras=extras,
            final=jax.device_get(self.keep(learner, now.final, decided.memory)),
        ), decided.memory


def make_play(
    env: HostedEnv, system: System, compiled: Compiler, side_by_side: int
) -> tp.Callable[[PyTree, Array, int], Stats]:
    """(params [S], keys [S], episodes) -> the statistics [S, episodes] of that many episodes of each seed,
    played with fixed parameters, so many at a time."""
    act = None

    def exploit(
        params: PyTree, observation: Observation, memory: PyTree, key: Array, time: Array
    ) -> Decision:
        return system.exploit(params, observation, memory, jax.random.fold_in(key, time))

    def round_of(params: PyTree, keys: Array) -> Stats:
        nonlocal act
        timestep = _reset(env, EVALUATION, keys, side_by_side)
        empty = system.initial_memory(side_by_side)
        memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(keys), *x.shape)), empty)
        over, stats = np.zeros(timestep.first.shape, bool), timestep.stats
        if act is None:
            likes = (params, timestep.observation, memory, keys, np.int32(0))
            act = compiled(jax.vmap(exploit, (0, 0, 0, 0, None)), *likes)
        time = 0
        while not over.all():
            decision = act(params, timestep.observation, memory, keys, np.int32(time))
            timestep = _step(env, EVALUATION, jax.device_get(decision.action), restart=False)
            ends = np.asarray(timestep.first) & ~over
            stats = {name: np.where(ends, timestep.stats[name], stats[name]) for name in stats}
            memory, over, time = decision.memory, over | ends, time + 1
        return stats

    def play(params: PyTree, keys: Array, episodes: int) -> Stats:
        rounds = [
            round_of(params, jax.vmap(jax.random.fold_in, (0, None))(keys, i))
            for i in range(-(-episodes // side_by_side))
        ]
        return jax.tree.map(lambda *x: np.concatenate(x, axis=1)[:, :episodes], *rounds)

    return play


def _reset(env: HostedEnv, batch: str, keys: Array, num_envs: int) -> TimeStep:
    """Fresh episodes [S, B], of seeds drawn from keys [S]."""
    # Beyond what updates and evaluations draw from the same keys.
    draw = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, 2**31 + 1), (num_envs,)))
    seeds = np.asarray(draw(keys))
    return _split(env.reset(batch, seeds.reshape(-1)), seeds.shape)


def _step(env: HostedEnv, batch: str, action: np.ndarray, restart: bool = True) -> TimeStep:
    """What follows actions [S, B, N, ..]; all seeds' environments are stepped as one batch."""
    shape = action.shape[:2]
    return _split(env.step(batch, action.reshape(-1, *action.shape[2:]), restart=restart), shape)


def _split(timestep: TimeStep, shape: tuple[int, ...]) -> TimeStep:
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), timestep)
