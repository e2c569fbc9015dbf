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

from sable.config.schema import Config
from sable.envs.python.vector_env import PythonVectorEnv
from sable.errors import SableError
from sable.ops import trees as tree
from sable.systems.base import System
from sable.training.rollout import RolloutState, collect
from sable.training.update import CollectResult, Program, RunState, Stages, State, evaluation_key
from sable.types import Decision, Metrics, Observation, PyTree, Rollout, TimeStep, Transition

TRAINING, EVALUATION = "training", "evaluation"
"""The two batches of environments of a run."""

Compiler = tp.Callable[..., tp.Any]
Stats = tp.Mapping[str, tp.Any]


@dataclasses.dataclass(frozen=True)
class RunUpdates:
    """Some updates, host and device in turn; called as the compiled one for JAX environments is."""

    collect: tp.Callable[[RunState], CollectResult]
    learn: tp.Any
    """(run, the rollout) -> run; compiled"""

    def __call__(self, state: RunState, num_updates: tp.Any) -> RunState:
        for _ in range(num_updates):
            state = self.learn(state, self.collect(state))
        return state

    def memory_analysis(self) -> tp.Any:
        """Return that of learning, which holds most."""
        return self.learn.memory_analysis()


def refuse_sharing(env: tp.Any, mesh: Mesh | None) -> None:
    """Refuse to share a Python environment's run among devices."""
    if mesh is not None and isinstance(env, PythonVectorEnv):
        raise SableError(
            f"{env.task} is stepped in processes of its own and trained on one device: leave --devices out"
        )


def make_stages(
    env: PythonVectorEnv,
    system: System,
    program: Program,
    config: Config,
    compiled: Compiler,
    state: State,
) -> Stages:
    """Return the stages of a run whose episodes all begin now, those of a resumed one too: the state of a
    Python environment cannot be saved."""
    collector = Collector(env, system, config, compiled, state)
    learn = compiled(jax.vmap(program.update), state.run, collector.shapes, donate=True)
    evaluate_policy = make_evaluate_policy(
        env, system, compiled, min(config.run.evaluation_episodes, config.system.num_envs)
    )
    # A seed's statistics of episodes, of whatever they are.
    shape = (len(config.run.seeds), config.run.evaluation_episodes)
    stats = {name: np.zeros(shape, np.float32) for name in collector.timestep.stats}
    assess_stats = compiled(jax.vmap(program.evaluate_and_keep_best), state, stats, donate=True)

    def evaluate_and_keep_best(state: State) -> tuple[State, Metrics]:
        keys = jax.vmap(evaluation_key)(state.run)
        return assess_stats(
            state, evaluate_policy(state.run.learner.params, keys, config.run.evaluation_episodes)
        )

    def absolute_metric(state: State) -> Stats:
        keys = jax.vmap(lambda one: jax.random.fold_in(evaluation_key(one), 1))(state.run)
        return evaluate_policy(state.best.params, keys, config.run.absolute_episodes)

    return Stages(RunUpdates(collector, learn), evaluate_and_keep_best, absolute_metric)


def decision(
    system: System,
    learner: PyTree,
    observation: Observation,
    first: Array,
    memory: PyTree,
    key: Array,
    t: Array,
) -> Decision:
    """Return the decision of a seed at time step t, drawn from the keys of `update`,
    `collect_and_learn` and `collect`: `split(key)[t]` is `fold_in(key, t)`."""
    _, advance_key = jax.random.split(key)
    _, steps_key = jax.random.split(jax.random.split(advance_key)[0])
    decision_key, _ = jax.random.split(jax.random.fold_in(steps_key, t))
    return system.explore(learner, observation, tree.reset_memory(memory, first), decision_key)


class Collector:
    """Collects one rollout after another from environments that the host steps."""

    def __init__(
        self,
        env: PythonVectorEnv,
        system: System,
        config: Config,
        compiled: Compiler,
        state: State,
    ):
        """Begin episodes, and compile what decides in them."""
        self.env, self.length = env, config.system.rollout_length
        self.timestep = timestep = _reset(env, TRAINING, state.run.key, config.system.num_envs)
        learner, memory = state.run.learner, state.run.rollout_state.memory
        self.decide = compiled(
            jax.vmap(partial(decision, system), (0, 0, 0, 0, 0, None)),
            *(learner, timestep.observation, timestep.first, memory, state.run.key, np.int32(0)),
        )
        next_extras = jax.vmap(system.next_extras)
        has_next_extras = bool(
            jax.tree.leaves(jax.eval_shape(next_extras, learner, timestep.final_observation, memory))
        )
        self.next_extras = (
            compiled(next_extras, learner, timestep.final_observation, memory)
            if has_next_extras
            else lambda *_: ()
        )

        def one(learner: PyTree, rollout_state: RolloutState, key: Array) -> CollectResult:
            return collect(env.stub_env, system, learner, rollout_state, key, config.system.rollout_length, 1)

        # What `collect` would hand over, which learning is compiled for.
        self.shapes = jax.eval_shape(jax.vmap(one), learner, state.run.rollout_state, state.run.key)
        self.blank = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.shapes[0].env_state)

    def __call__(self, run_state: RunState) -> CollectResult:
        """Step all environments through one rollout."""
        memory, steps, episode_sums = run_state.rollout_state.memory, [], []
        start_memory = jax.tree.map(jnp.copy, memory)  # the state's own is donated
        for t in range(self.length):
            step, memory = self.step(run_state, memory, t)
            steps.append(step)
            stats = self.timestep.stats | {"episodes": np.ones_like(self.timestep.discount)}
            episode_sums.append({name: (value * self.timestep.first).sum(1) for name, value in stats.items()})
        rollout = Rollout(
            steps=jax.tree.map(lambda *x: np.stack(x, axis=1), *steps),
            start_memory=start_memory,
            last=self.timestep,
            last_memory=memory,
        )
        sums = jax.tree.map(lambda *x: np.sum(x, axis=0, dtype=np.float32), *episode_sums)
        return RolloutState(env_state=self.blank, timestep=self.timestep, memory=memory), rollout, sums

    def step(self, run_state: RunState, memory: PyTree, t: int) -> tuple[Transition, PyTree]:
        """Step all environments once; return the transition and the memory after it."""
        before, learner = self.timestep, run_state.learner
        team_decision = self.decide(
            learner, before.observation, before.first, memory, run_state.key, np.int32(t)
        )
        action, extras = jax.device_get((team_decision.action, team_decision.extras))
        self.timestep = timestep = _step(self.env, TRAINING, action)
        return Transition(
            observation=before.observation,
            action=action,
            reward=timestep.reward,
            discount=timestep.discount,
            first=before.first,
            extras=extras,
            next_extras=jax.device_get(
                self.next_extras(learner, timestep.final_observation, team_decision.memory)
            ),
        ), team_decision.memory


def make_evaluate_policy(
    env: PythonVectorEnv, system: System, compiled: Compiler, side_by_side: int
) -> tp.Callable[[PyTree, Array, int], Stats]:
    """Return (params [S], keys [S], episodes) -> the statistics [S, episodes] of that many episodes of each
    seed, played with fixed parameters, so many at a time."""
    act = None

    def decide(
        params: PyTree, observation: Observation, memory: PyTree, key: Array, step_count: Array
    ) -> Decision:
        return system.act(params, observation, memory, jax.random.fold_in(key, step_count))

    def evaluate_round(params: PyTree, keys: Array) -> Stats:
        nonlocal act
        timestep = _reset(env, EVALUATION, keys, side_by_side)
        empty = system.initial_memory(side_by_side)
        memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(keys), *x.shape)), empty)
        done, stats = np.zeros(timestep.first.shape, bool), timestep.stats
        if act is None:
            examples = (params, timestep.observation, memory, keys, np.int32(0))
            act = compiled(jax.vmap(decide, (0, 0, 0, 0, None)), *examples)
        step_count = 0
        while not done.all():
            decision = act(params, timestep.observation, memory, keys, np.int32(step_count))
            timestep = _step(env, EVALUATION, jax.device_get(decision.action), restart=False)
            ended_now = np.asarray(timestep.first) & ~done
            stats = {name: np.where(ended_now, timestep.stats[name], stats[name]) for name in stats}
            memory, done, step_count = decision.memory, done | ended_now, step_count + 1
        return stats

    def evaluate_policy(params: PyTree, keys: Array, episodes: int) -> Stats:
        rounds = [
            evaluate_round(params, jax.vmap(jax.random.fold_in, (0, None))(keys, i))
            for i in range(-(-episodes // side_by_side))
        ]
        return jax.tree.map(lambda *x: np.concatenate(x, axis=1)[:, :episodes], *rounds)

    return evaluate_policy


def _reset(env: PythonVectorEnv, batch: str, keys: Array, num_envs: int) -> TimeStep:
    """Fresh episodes [S, B], of seeds drawn from keys [S]."""
    # Beyond what updates and evaluations draw from the same keys.
    draw = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, 2**31 + 1), (num_envs,)))
    seeds = np.asarray(draw(keys))
    return _split(env.reset(batch, seeds.reshape(-1)), seeds.shape)


def _step(env: PythonVectorEnv, batch: str, action: np.ndarray, restart: bool = True) -> TimeStep:
    """Return the time step after actions [S, B, N, ..]; all seeds' environments are stepped as one batch."""
    shape = action.shape[:2]
    return _split(env.step(batch, action.reshape(-1, *action.shape[2:]), restart=restart), shape)


def _split(timestep: TimeStep, shape: tuple[int, ...]) -> TimeStep:
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), timestep)
