"""Checks of an environment: it is played at random and held to the contract of `envs.base`, each check with
what was found and what to do about it."""

import re
import sys
import time
import typing as tp
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sable import old_names
from sable.envs import wrappers
from sable.envs.base import Env
from sable.envs.checker import findings
from sable.envs.checker.findings import Finding, Play
from sable.envs.python.vector_env import PythonVectorEnv
from sable.errors import SableError, describe
from sable.types import EnvSpec, Observation, PyTree, TimeStep

NUM_ENVS = 8
MOST_STEPS = 1200
"""Steps of the longest play; episodes that last longer are not seen to their end."""
_TIMED = 0.2
"""Seconds to take the pace over."""
_BYTES = 2**26
"""Of what one stretch of a play keeps."""
_OWN = "the environment's own observation"


def examine(env: "Env | PythonVectorEnv") -> Iterator[Finding]:
    """Return the findings, one check after another; those that cannot be made after what was found are left
    out."""
    yield (spec := _spec(env.spec))
    if spec.verdict == "wrong":
        return
    yield from _hosted(env) if isinstance(env, PythonVectorEnv) else _traced(env)


def _spec(spec: tp.Any) -> Finding:
    problems = []
    if not isinstance(spec, EnvSpec):
        return Finding("spec", "wrong", f"spec is {type(spec).__name__}", "make it a sable.types.EnvSpec")
    for name in ("num_agents", "view_size", "time_limit"):
        if type(getattr(spec, name)) is not int or getattr(spec, name) < 1:
            problems.append(f"{name}={getattr(spec, name)!r}")
    if (spec.num_actions > 0) == (spec.action_size > 0):
        problems.append(f"num_actions={spec.num_actions} and action_size={spec.action_size}")
    if not -np.inf < spec.action_low < spec.action_high < np.inf:
        problems.append(f"action_low={spec.action_low}, action_high={spec.action_high}")
    if problems:
        fix = "counts are whole numbers from 1 on, one of num_actions and action_size is 0, bounds are finite"
        return Finding("spec", "wrong", ", ".join(problems), fix)
    actions = f"{spec.num_actions} actions" if spec.discrete else f"actions of {spec.action_size} numbers"
    state = f", a state of {spec.state_size}" if spec.state_size else ""
    sizes = f"{spec.num_agents} agents, views of {spec.view_size}, {actions}"
    return Finding("spec", "ok", f"{sizes}, at most {spec.time_limit} steps{state}")


# JAX environments


def _traced(env: Env) -> Iterator[Finding]:
    spec, key = env.spec, jax.random.key(0)
    action = jnp.zeros(_action_shape(spec), jnp.int32 if spec.discrete else jnp.float32)
    fix = "no Python branch on an array, no numpy on one; shapes are fixed (docs/guides/own-environment.md)"
    try:
        state, initial = jax.eval_shape(env.reset, key)
        after, following_step = jax.eval_shape(env.step, state, action)
        rekeyed = jax.eval_shape(env.rekey, state, key)
    except Exception as error:
        module = sys.modules.get(type(env).__module__)
        fix = old_names.in_file(getattr(module, "__file__", None)) or fix
        yield Finding("traces", "wrong", f"reset, step or rekey cannot be compiled: {describe(error)}", fix)
        return
    yield Finding("traces", "ok", "reset, step and rekey compile")
    problems = [*_shapes(spec, "reset", initial), *_shapes(spec, "step", following_step)]
    if initial.stats.keys() != following_step.stats.keys():
        names = sorted(initial.stats), sorted(following_step.stats)
        problems.append(f"stats are {names[0]} after reset and {names[1]} after step")
    fix = "give what spec says; sable.envs.base.first_timestep and next_timestep make both kinds of time step"
    yield findings.verdict("shapes", problems, "as spec says, in both kinds of time step", fix)
    types = _types(state, after, "step") + _types(state, rekeyed, "rekey")
    weak = [one for one in types if "weak type" in one]
    fix = (
        "make every leaf of the state by one expression with a dtype, in reset as in step "
        "(jnp.zeros((), jnp.int32), not 0)"
    )
    found = findings.verdict("types", types, "the state keeps its structure, shapes and types", fix)
    # Training strips weak types; whoever else compiles the environment pays for them.
    yield found if len(types) > len(weak) or not weak else found._replace(verdict="note")
    if problems or len(types) > len(weak):
        return
    yield _pure(env, state, action)
    yield from _played(env)


def _shapes(spec: EnvSpec, function: str, timestep: TimeStep) -> list[str]:
    """Return what is not as `spec` says in what `function` returns."""
    num_agents, problems = spec.num_agents, []

    def compare(name: str, leaf: tp.Any, shape: tuple[int, ...], dtype: tp.Any) -> None:
        if not hasattr(leaf, "shape"):
            problems.append(f"{name} of {function} is {type(leaf).__name__}, not an array")
        elif leaf.shape != shape or leaf.dtype != dtype:
            wanted = f"{jnp.dtype(dtype).name}{list(shape)}"
            problems.append(f"{name} of {function} is {leaf.dtype.name}{list(leaf.shape)}, not {wanted}")

    for name, observation in (
        ("observation", timestep.observation),
        ("final_observation", timestep.final_observation),
    ):
        compare(f"{name}.view", observation.view, (num_agents, spec.view_size), jnp.float32)
        compare(
            f"{name}.action_mask", observation.action_mask, (num_agents, max(spec.num_actions, 1)), jnp.bool_
        )
        compare(f"{name}.step_count", observation.step_count, (), jnp.int32)
        if spec.state_size:
            compare(f"{name}.state", observation.state, (spec.state_size,), jnp.float32)
        elif isinstance(observation.state, tuple) is False:
            problems.append(f"{name}.state of {function} is an array, and spec.state_size is 0")
    compare("reward", timestep.reward, (num_agents,), jnp.float32)
    compare("discount", timestep.discount, (), jnp.float32)
    compare("first", timestep.first, (), jnp.bool_)
    for name, value in timestep.stats.items():
        compare(f"stats[{name!r}]", value, (), jnp.float32)
    return problems


def _types(before: PyTree, after: PyTree, function: str) -> list[str]:
    """Return how the state's leaves differ after `function` from those after reset."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        return [f"{function} returns a state of another structure than reset"]
    problems = []
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        name = f"state{jax.tree_util.keystr(path)}"
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            problems.append(
                f"{name} is {one.dtype.name}{list(one.shape)} after reset and "
                f"{other.dtype.name}{list(other.shape)} after {function}"
            )
        elif getattr(one, "weak_type", False) != getattr(other, "weak_type", False):
            weak = "reset" if getattr(one, "weak_type", False) else function
            problems.append(f"{name} has a weak type after {weak} only, so programs compile twice")
    return problems


def _pure(env: Env, state: PyTree, action: Array) -> Finding:
    """Check that tracing twice gives the same program: randomness from outside would be frozen into it."""

    def programs() -> list:
        # New functions, or a cached trace would be compared with itself.
        made = [
            jax.make_jaxpr(lambda key: env.reset(key))(jax.random.key(0)),
            jax.make_jaxpr(lambda state, action: env.step(state, action))(state, action),
        ]
        texts = [re.sub(r"0x[0-9a-f]+", "", str(one)) for one in made]
        return [
            *texts,
            *(np.asarray(x).tobytes() for one in made for x in one.consts if not findings.is_key(x)),
        ]

    same = programs() == programs()
    return findings.verdict(
        "purity",
        [] if same else ["traced twice, reset or step is another program"],
        "traced twice, the same programs",
        "draw from the key alone: no numpy or Python randomness, no clock, no changing attributes",
    )


def _played(env: Env) -> Iterator[Finding]:
    spec, env = env.spec, _ObservationInStats(env)
    reset = jax.jit(lambda key: wrappers.reset(env, key, NUM_ENVS))
    next_reset = jax.jit(lambda key: wrappers.vmap_reset(env, key, NUM_ENVS))(jax.random.key(1))
    length = _stretch(spec)

    @jax.jit
    def stretch(state: PyTree, observation: Observation, key: Array, illegal: Array):
        def step(carry: tuple, key: Array) -> tuple[tuple, Play]:
            state, observation = carry
            act_key, reset_key = jax.random.split(key)
            action = _random(spec, observation.action_mask, act_key, illegal)
            state, timestep = wrappers.step(env, next_reset, state, action, reset_key)
            stats = {name: value for name, value in timestep.stats.items() if name != _OWN}
            timestep, own = replace(timestep, stats=stats), timestep.stats[_OWN]
            play = Play(before=observation, bare=replace(timestep, observation=own), reset=timestep)
            return (state, timestep.observation), play

        return jax.lax.scan(step, (state, observation), jax.random.split(key, length))

    def play(steps: int, illegal: bool = False) -> Play:
        (state, initial), parts = reset(jax.random.key(0)), []
        observation = initial.observation
        for i in range(-(-steps // length)):
            key = jax.random.fold_in(jax.random.key(2), i)
            (state, observation), part = stretch(state, observation, key, illegal)
            parts.append(jax.device_get(part))
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def steps_per_second() -> float:
        (state, initial), began, count = reset(jax.random.key(0)), time.monotonic(), 0
        observation = initial.observation
        while (seconds := time.monotonic() - began) < _TIMED or not count:
            (state, observation), _ = jax.block_until_ready(
                stretch(state, observation, jax.random.key(count), False)
            )
            count += 1
        return NUM_ENVS * length * count / seconds

    _, initial = reset(jax.random.key(0))
    yield findings.start(jax.device_get(initial))
    history, again = play(min(2 * spec.time_limit + 2, MOST_STEPS)), play(length)
    yield from findings.common(spec, history)
    starts = jax.device_get(next_reset[1].observation)
    yield _auto_reset(history, starts)
    yield findings.determinism(jax.tree.map(lambda x: x[:length], history), again)
    yield _rekey(env, next_reset[0])
    yield from findings.scales(spec, history, starts)
    if spec.discrete and not history.before.action_mask.all() and not _finite(play(length, illegal=True)):
        yield Finding(
            "illegal actions",
            "note",
            "an illegal action leads to numbers that are not finite",
            "systems never choose one; make it do nothing, for whoever else plays",
        )
    pace = f"{steps_per_second():,.0f} steps/s of {NUM_ENVS} environments"
    yield Finding("speed", "ok", f"{pace}, compiled, what they return kept")


@dataclass(frozen=True)
class _ObservationInStats:
    """The environment, with its own observation among the stats: auto-reset puts another in its place."""

    env: Env

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    def reset(self, key: Array) -> tuple[PyTree, TimeStep]:
        return self._with_observation(*self.env.reset(key))

    def step(self, state: PyTree, action: Array) -> tuple[PyTree, TimeStep]:
        return self._with_observation(*self.env.step(state, action))

    def rekey(self, state: PyTree, key: Array) -> PyTree:
        return self.env.rekey(state, key)

    def _with_observation(self, state: PyTree, timestep: TimeStep) -> tuple[PyTree, TimeStep]:
        stats: tp.Any = timestep.stats | {_OWN: timestep.observation}
        return state, replace(timestep, stats=stats)


def _auto_reset(play: Play, starts: Observation) -> Finding:
    """Check that behind auto-reset a boundary shows the new episode's first observation, and
    `final_observation` the old one's last."""
    problems, done = [], play.bare.first
    own, final = play.bare.observation, play.reset.final_observation
    if ((own.step_count == 0) & done).any():
        problems.append(
            "step returns a first observation (step_count 0) where an episode ends: it restarts itself"
        )
    elif not findings.same(final, own):
        problems.append("final_observation is not the last observation: a step returns two that differ")
    if (play.reset.observation.step_count[done] != 0).any():
        problems.append("reset returns observations whose step_count is not 0")
    initial = play.reset.observation.view[done].reshape(int(done.sum()), -1)
    known = starts.view.reshape(len(starts.view), -1)
    if len(initial) and not (initial[:50, None] == known[None]).all(-1).any(1).all():
        problems.append("what opens an episode is not what reset returned")
    goes_on = jax.tree.map(lambda x: x[~done], (play.reset.observation, own))
    if not findings.same(*goes_on):
        problems.append("observations differ with and without auto-reset inside an episode")
    return findings.verdict(
        "auto-reset",
        problems,
        f"{int(done.sum())} boundaries: observation opens the new episode, final_observation ends the "
        "old one",
        "step returns its true last observation, as observation and as final_observation, and never resets "
        "itself",
    )


def _rekey(env: Env, states: PyTree) -> Finding:
    rekeyed = jax.jit(jax.vmap(env.rekey))(states, jax.random.split(jax.random.key(3), NUM_ENVS))
    problems, keys, changed_keys = [], 0, 0
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(states), jax.tree.leaves(rekeyed), strict=True
    ):
        is_key = findings.is_key(one) or (one.dtype == jnp.uint32 and one.shape[-1:] == (2,))
        same = findings.same(one, other)
        keys, changed_keys = keys + is_key, changed_keys + (is_key and not same)
        if not same and not is_key:
            problems.append(f"rekey changes state{jax.tree_util.keystr(path)}, which is not a key")
    if keys and not changed_keys:
        problems.append("the state carries a key and rekey leaves it: copies of a start share all randomness")
    kept = "gives a copied state randomness of its own" if keys else "the state has no key: nothing to change"
    return findings.verdict(
        "rekey", problems, kept, "replace the state's key by the one given, and nothing else"
    )


# Python environments


def _hosted(env: PythonVectorEnv) -> Iterator[Finding]:
    spec, seeds = env.spec, np.arange(NUM_ENVS)
    fix = "play it by hand with the same seeds; the error is the environment's own"

    def play(batch: str, steps: int) -> tuple[TimeStep, Play, float]:
        random, initial = np.random.default_rng(0), env.reset(batch, seeds)
        observation, parts, began = initial.observation, [], time.monotonic()
        for _ in range(steps):
            step = env.step(batch, _random_on_host(spec, np.asarray(observation.action_mask), random))
            final = step.final_observation
            bare = TimeStep(
                observation=final,
                final_observation=final,
                reward=step.reward,
                discount=step.discount,
                first=step.first,
                stats=step.stats,
            )
            parts.append(Play(before=observation, bare=bare, reset=step))
            observation = step.observation
        return initial, jax.tree.map(lambda *x: np.stack(x), *parts), time.monotonic() - began

    steps = min(spec.time_limit + 2, MOST_STEPS)
    try:
        initial, history, seconds = play("check", steps)
        short = min(steps, 50)
        _, again, _ = play("check again", short)
    except SableError as error:
        yield Finding("plays", "wrong", str(error), fix)
        return
    yield Finding("plays", "ok", f"{NUM_ENVS} environments side by side, {steps} steps each")
    yield findings.start(initial)
    yield from findings.common(spec, history)
    done = int(history.reset.first.sum())
    yield findings.verdict(
        "auto-reset",
        [] if (history.reset.observation.step_count[history.reset.first] == 0).all() else ["time goes on"],
        f"{done} boundaries",
        "",
    )
    yield findings.determinism(jax.tree.map(lambda x: x[:short], history), again)
    yield from findings.scales(spec, history, initial.observation)
    dead = (history.before.action_mask.sum(-1) == 1) & ~history.before.view.any(-1)
    if dead.any():
        share = f"agents were gone for {dead.mean():.0%} of the time"
        yield Finding("agents", "ok", f"{share}: zero views, one legal action, no reward")
    speed = f"{NUM_ENVS * steps / seconds:,.0f} steps/s of {NUM_ENVS} environments"
    yield Finding("speed", "ok", f"{speed} in {min(env.num_workers, NUM_ENVS)} processes")


def _action_shape(spec: EnvSpec) -> tuple[int, ...]:
    return (spec.num_agents,) if spec.discrete else (spec.num_agents, spec.action_size)


def _stretch(spec: EnvSpec) -> int:
    """Return steps to play at once, as many as fit."""
    each = 16 * NUM_ENVS * spec.num_agents * (spec.view_size + max(spec.num_actions, 1))
    return int(max(1, min(64, 2 * spec.time_limit, _BYTES // each)))


def _random(spec: EnvSpec, action_mask: Array, key: Array, illegal: Array) -> Array:
    """Return actions at random: legal ones, or, where asked for and there are some, illegal ones."""
    if not spec.discrete:
        shape = (NUM_ENVS, *_action_shape(spec))
        return jax.random.uniform(key, shape, minval=spec.action_low, maxval=spec.action_high)
    wanted = jnp.where(illegal & ~action_mask.all(-1, keepdims=True), ~action_mask, action_mask)
    return jax.random.categorical(key, jnp.where(wanted, 0.0, -1e9)).astype(jnp.int32)


def _random_on_host(spec: EnvSpec, action_mask: np.ndarray, random: np.random.Generator) -> np.ndarray:
    if not spec.discrete:
        shape = (len(action_mask), *_action_shape(spec))
        return random.uniform(spec.action_low, spec.action_high, shape).astype(np.float32)
    return np.where(action_mask, random.random(action_mask.shape), -1.0).argmax(-1).astype(np.int32)


def _finite(tree: PyTree) -> bool:
    leaves = [x for x in jax.tree.leaves(tree) if np.issubdtype(x.dtype, np.floating)]
    return all(np.isfinite(x).all() for x in leaves)
