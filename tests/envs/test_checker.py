"""`sable check`: every defect is named by the right line, and what is sound passes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sable
from sable.cli.main import main
from sable.envs import list_tasks
from sable.envs.base import first_timestep, next_timestep
from sable.types import EnvSpec, Observation, struct


@struct
class State:
    key: jax.Array
    time: jax.Array
    place: jax.Array


class Sound:
    """Two agents walk at random from chance places; meeting ends the episode, six steps cut it short."""

    spec = EnvSpec(num_agents=2, view_size=3, num_actions=3, time_limit=6)

    def reset(self, key):
        key, place_key = jax.random.split(key)
        place = jax.random.randint(place_key, (2,), 0, 9)
        state = State(key=key, time=jnp.zeros((), jnp.int32), place=place)
        return state, first_timestep(self.observe(state), self.stats(state))

    def step(self, state, action):
        state = self.move(state, action)
        met, late = state.place[0] == state.place[1], state.time >= self.spec.time_limit
        reward = self.reward(state, action)
        seen, stats = self.observe(state), self.stats(state)
        return state, next_timestep(seen, reward, terminated=met, truncated=late, stats=stats)

    def move(self, state, action):
        key, gust = jax.random.split(state.key)
        place = state.place + action - 1 + jax.random.randint(gust, (2,), 0, 2)
        return State(key=key, time=state.time + 1, place=place)

    def rekey(self, state, key):
        return dataclasses.replace(state, key=key)

    def observe(self, state):
        place = state.place[:, None].astype(jnp.float32)
        view = jnp.concatenate([place, place[::-1], place * 0.5], axis=-1) / 10
        return Observation(view=view, action_mask=self.legal(state), step_count=state.time, state=())

    def legal(self, state):
        return jnp.stack([jnp.ones(2, bool), state.place > 3, jnp.ones(2, bool)], axis=-1)

    def reward(self, state, action):
        return -jnp.abs(state.place[0] - state.place[1]) / 10

    def stats(self, state):
        return {"met": state.place[0] == state.place[1]}


class NoActions(Sound):
    spec = dataclasses.replace(Sound.spec, num_actions=0)


class Branches(Sound):
    def reward(self, state, action):
        return 1.0 if state.place[0] == state.place[1] else 0.0


class Wide(Sound):
    spec = dataclasses.replace(Sound.spec, view_size=4)


class Whole(Sound):
    def observe(self, state):
        return dataclasses.replace(super().observe(state), view=state.place[:, None].repeat(3, 1))


class OtherStats(Sound):
    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state, dataclasses.replace(timestep, stats={"lost": timestep.stats["met"]})


class Grows(Sound):
    def move(self, state, action):
        state = super().move(state, action)
        return dataclasses.replace(state, place=state.place.astype(jnp.float32))


class Weak(Sound):
    def reset(self, key):
        state, timestep = super().reset(key)
        return dataclasses.replace(state, time=jnp.asarray(0)), timestep

    def move(self, state, action):
        state = super().move(state, action)
        return dataclasses.replace(state, time=state.time.astype(jnp.int32))


class Impure(Sound):
    def reward(self, state, action):
        return super().reward(state, action) + float(np.random.default_rng().random())


class PaidAtOnce(Sound):
    def reset(self, key):
        state, timestep = super().reset(key)
        return state, dataclasses.replace(timestep, reward=jnp.ones(2))


class NotFinite(Sound):
    def reward(self, state, action):
        return 1.0 / jnp.abs(state.place[0] - state.place[1])


class NothingLegal(Sound):
    def legal(self, state):
        return super().legal(state) & (state.time != 3)


class Stopped(Sound):
    def observe(self, state):
        return dataclasses.replace(super().observe(state), step_count=jnp.zeros((), jnp.int32))


class Discounts(Sound):
    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state, dataclasses.replace(timestep, discount=timestep.discount * 0.99)


class EndsAndGoesOn(Sound):
    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state, dataclasses.replace(timestep, first=state.time >= 6)


class Endless(Sound):
    def step(self, state, action):
        state, timestep = super().step(state, action)
        return state, dataclasses.replace(timestep, first=timestep.discount == 0)


class LimitIsEnd(Sound):
    def step(self, state, action):
        state, timestep = super().step(state, action)
        late = state.time >= 6
        return state, dataclasses.replace(timestep, first=late, discount=1.0 - late)


class EndIsLimit(Sound):
    def step(self, state, action):
        state, timestep = super().step(state, action)
        early = jax.random.bernoulli(jax.random.fold_in(state.key, 1), 0.2)
        return state, dataclasses.replace(timestep, first=early, discount=jnp.ones(()))

    spec = dataclasses.replace(Sound.spec, time_limit=500)


class RestartsItself(Sound):
    def step(self, state, action):
        after, timestep = super().step(state, action)
        fresh, opened = self.reset(state.key)
        choose = lambda one, other: jax.tree.map(lambda a, b: jnp.where(timestep.first, a, b), one, other)  # noqa: E731
        seen = choose(opened.observation, timestep.observation)
        return choose(fresh, after), dataclasses.replace(timestep, observation=seen)


class TwoLasts(Sound):
    def step(self, state, action):
        after, timestep = super().step(state, action)
        return after, dataclasses.replace(timestep, final_observation=self.observe(state))


class Remembers(Sound):
    """Asks the host, which counts."""

    def reward(self, state, action):
        self.calls = 0

        def count(_):
            self.calls += 1
            return np.float32(self.calls)

        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(count, shape, state.time, vmap_method="sequential")


class KeepsKey(Sound):
    def rekey(self, state, key):
        return state


class RekeyMoves(Sound):
    def rekey(self, state, key):
        return dataclasses.replace(state, key=key, place=state.place * 0)


class NoReward(Sound):
    def reward(self, state, action):
        return 0.0


class Rich(Sound):
    def reward(self, state, action):
        return 1e5 * super().reward(state, action)


class Loud(Sound):
    def observe(self, state):
        seen = super().observe(state)
        return dataclasses.replace(seen, view=seen.view * 1e4)


class Padded(Sound):
    def observe(self, state):
        seen = super().observe(state)
        return dataclasses.replace(seen, view=seen.view * jnp.array([1.0, 0.0, 0.0]))


class SameStart(Sound):
    def reset(self, key):
        state = State(key=key, time=jnp.zeros((), jnp.int32), place=jnp.array([0, 8], jnp.int32))
        return state, first_timestep(self.observe(state), self.stats(state))


class Fragile(Sound):
    def reward(self, state, action):
        illegal = (action == 1) & (state.place < 3)
        return jnp.where(illegal.any(), jnp.nan, 0.1)


DEFECTS = {
    NoActions: ("spec", "wrong", "num_actions=0 and action_size=0"),
    Branches: ("traces", "wrong", "TracerBoolConversionError"),
    Wide: ("shapes", "wrong", "view of reset is float32[2, 3], not float32[2, 4]"),
    Whole: ("shapes", "wrong", "view of reset is int32[2, 3], not float32[2, 3]"),
    OtherStats: ("shapes", "wrong", "stats are ['met'] after reset and ['lost'] after step"),
    Grows: ("types", "wrong", "state.place is int32[2] after reset and float32[2] after step"),
    Weak: ("types", "note", "state.time has a weak type after reset only"),
    Impure: ("purity", "wrong", "another program"),
    PaidAtOnce: ("start", "wrong", "the reward of reset is not 0"),
    NotFinite: ("finite numbers", "wrong", "reward is NaN or infinite"),
    NothingLegal: ("masks", "wrong", "had no legal action"),
    Stopped: ("time", "wrong", "does not count"),
    Discounts: ("ends", "wrong", "the discount is 0.99 somewhere"),
    EndsAndGoesOn: ("ends", "wrong", "the discount is 0 and first is not true"),
    Endless: ("time limit", "wrong", "go on beyond time_limit=6"),
    LimitIsEnd: ("truncation", "note", "every episode truly ended (discount 0) at the time limit of 6"),
    EndIsLimit: ("truncation", "note", "at different times and none at the limit of 500"),
    RestartsItself: ("auto-reset", "wrong", "it restarts itself"),
    TwoLasts: ("auto-reset", "wrong", "final is not the last observation"),
    Remembers: ("determinism", "wrong", "another episode"),
    KeepsKey: ("rekey", "wrong", "rekey leaves it"),
    RekeyMoves: ("rekey", "wrong", "rekey changes state.place, which is not a key"),
    NoReward: ("rewards", "note", "never got any"),
    Rich: ("rewards", "note", "returns of random play"),
    Loud: ("views", "note", "e+0"),
    Padded: ("views", "note", "2 of 3 features never changed"),
    SameStart: ("starts", "note", "began with the same views"),
    Fragile: ("illegal actions", "note", "not finite"),
}
FAST = {NoActions, Branches, Wide, OtherStats, Grows, NothingLegal, RestartsItself}


def test_a_sound_environment_passes_every_check():
    findings = sable.check(Sound())
    assert {one.check: one.verdict for one in findings} == dict.fromkeys(
        ["spec", "traces", "shapes", "types", "purity", "start", "finite numbers", "masks", "time", "ends",
         "time limit", "truncation", "auto-reset", "determinism", "rekey", "rewards", "views", "speed"], "ok"
    )  # fmt: skip


@pytest.mark.parametrize(
    "env", [pytest.param(env, marks=() if env in FAST else pytest.mark.slow) for env in DEFECTS]
)
def test_a_defect_is_named_by_the_right_line(env):
    check, verdict, words = DEFECTS[env]
    findings = {one.check: one for one in sable.check(env())}
    assert findings[check].verdict == verdict, findings
    assert words in findings[check].found
    assert findings[check].fix or check == "starts"
    if verdict == "note":
        assert not [one for one in findings.values() if one.verdict == "wrong"]
    allowed = {check, "truncation", "rewards", "views"} | SIDE_EFFECTS.get(env, set())
    assert {one.check for one in findings.values() if one.verdict == "wrong"} <= allowed


SIDE_EFFECTS = {
    Stopped: {"auto-reset"},  # a last observation at time 0 looks like an first_timestep
    RestartsItself: {"time"},
    Remembers: {"purity"},
    Impure: {"determinism"},
}


TASKS = [task.id for task in list_tasks()]


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=() if task == "probe/recall" else pytest.mark.slow) for task in TASKS]
)
def test_nothing_is_wrong_with_the_tasks_that_come_with_sable(task):
    wrong = [one for one in sable.check(task) if one.verdict == "wrong"]
    assert not wrong


def test_the_command_prints_what_was_found_and_exits_by_it(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    assert main(["check", "test_checker:NoActions"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("wrong  spec") and "fix: counts are whole numbers" in out and "1 wrong" in out
    assert main(["check", "test_checker:NoActions", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["verdict"] == "wrong"
    for argv in (["check"], ["check", "lbf/none"], ["check", "probe/recall", "--env-options", "x"]):
        assert main(argv) == 2
        assert capsys.readouterr().err.count("\n") == 1


HOSTED = {
    "leaving": (0, "agents"),
    "unseeded": (1, "determinism"),
    "no_legal": (1, "plays"),
    "dying": (1, "plays"),
}


@pytest.mark.parametrize("factory", HOSTED)
def test_python_environments_are_examined_too(factory, monkeypatch):
    pytest.importorskip("gymnasium")
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    wrong, check = HOSTED[factory]
    findings = {one.check: one for one in sable.check(f"pettingzoo:parallel_envs:{factory}", time_limit=9)}
    assert check in findings
    assert [one.check for one in findings.values() if one.verdict == "wrong"] == [check] * wrong
