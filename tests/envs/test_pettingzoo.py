"""PettingZoo environments as arrays, and in worker processes: nothing is lost, shifted or left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import sable
from sable.errors import SableError
from sable.quiet import silence_output

pytest.importorskip("gymnasium")
pytest.importorskip("pettingzoo")

from sable.envs.python.pettingzoo import Team
from sable.envs.python.vector_env import EnvFailed

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def make():
    """Environments by factory, ended behind the test."""
    made = []

    def make(factory, **options):
        made.append(sable.make_env(f"pettingzoo:parallel_envs:{factory}", **options))
        return made[-1]

    yield make
    for env in made:
        env.close()


def alive(pids):
    """Those processes that still run (a zombie has ended)."""

    def runs(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in pids if runs(pid)]


def soon_gone(pids, seconds=10.0):
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pids)


def test_unlike_agents_are_padded_masked_and_leave():
    import parallel_envs

    team = Team(parallel_envs.Leaving(), time_limit=9)
    assert (team.sizes.num_agents, team.sizes.view_size, team.sizes.num_actions) == (3, 5, 4)
    seen = team.reset(seed=0)
    assert seen.action_mask.tolist() == [[True, False, True, False], [False, True, False, False], [True] * 4]
    assert seen.view[1].tolist() == [0, 2, 0, 0, 0] and seen.view[2].tolist() == [1, 0, 0, 0, 0]
    step = team.step(np.array([2, 1, 3]))
    assert step.observation.view[0, [0, 1, 2, 4]].tolist() == [1, 1, 2, 0]  # its own action, padding
    assert step.observation.view[1].tolist() == [1, 2, 8, 0, 0]  # Discrete(2, start=7)
    assert step.reward.tolist() == [1, 1, 1] and not step.done
    step = team.step(np.array([0, 1, 0]))  # c leaves: paid for it, seen no more
    assert step.reward.tolist() == [2, 2, 2] and not step.done
    assert not step.observation.view[2].any() and step.observation.action_mask[2].tolist() == [
        True,
        False,
        False,
        False,
    ]
    for time_now in (3, 4, 5):
        step = team.step(np.array([0, 1, 0]))
        assert step.reward.tolist() == [time_now, time_now, 0] and step.done == (time_now == 5)
    assert not step.terminated and step.observation.view[0, 0] == 5  # cut short, the last observation kept
    team.reset(seed=0)
    assert team.live == {"a", "b", "c"}


def test_an_end_a_limit_of_its_own_and_a_limit_given_are_told_apart():
    import parallel_envs

    def outcome(env, **limit):
        team, steps = Team(env, **limit), 0
        team.reset(seed=0)
        while True:
            steps, step = steps + 1, team.step(np.zeros(len(team.agents), np.int32))
            if step.done:
                return steps, step.terminated

    assert outcome(parallel_envs.Delayed()) == (4, True)
    assert outcome(parallel_envs.Delayed(), time_limit=3) == (3, False)
    assert outcome(parallel_envs.Delayed(), time_limit=4) == (4, True)
    assert outcome(parallel_envs.Leaving(), time_limit=9) == (5, False)


def test_continuous_actions_are_stretched_to_each_agents_bounds():
    import parallel_envs

    env = parallel_envs.continuous()
    team = Team(env)
    assert (team.sizes.num_actions, team.sizes.action_size) == (0, 2)
    assert team.reset(seed=0).action_mask.tolist() == [[True], [True]]
    team.step(np.array([[-1.0, 0.5], [0.0, 0.9]], np.float32))
    assert env.actions["a"].tolist() == [0.0, 1.0] and env.actions["b"].tolist() == [7.0]


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        ("mixed", {}, "must all be Discrete or all be Box"),
        ("multi", {}, "must all be Discrete or all be Box"),
        ("unbounded", {}, "the actions of agent 'a' have no bounds"),
        ("endless", {}, "give --env-options time_limit=STEPS"),
        ("delayed", {"time_limit": "soon"}, "time_limit='soon'"),
        ("delayed", {"workers": 0.5}, "workers=0.5"),
        ("in_turns", {}, "its agents act in turns (AEC)"),
        ("nothing", {}, "object is no PettingZoo parallel environment"),
        ("absent", {}, "has no 'absent'"),
        ("delayed", {"wings": 2}, "unexpected keyword argument 'wings'"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(make, factory, options, words):
    if factory == "in_turns":
        pytest.importorskip("mpe2")
    with pytest.raises(SableError, match="pettingzoo:parallel_envs") as refusal:
        make(factory, **options)
    assert words in str(refusal.value)


def test_a_batch_over_workers_is_the_environments_one_by_one(make):
    import parallel_envs

    seeds, rng = np.arange(5), np.random.default_rng(0)
    env = make("leaving", time_limit=9, workers=3)
    teams = [Team(parallel_envs.Leaving(), time_limit=9) for _ in seeds]
    random = [np.random.default_rng(seed) for seed in seeds]
    seen = [team.reset(int(rng_.integers(2**31))) for team, rng_ in zip(teams, random, strict=True)]
    timestep = env.reset("one", seeds)
    assert timestep.first.all() and not timestep.reward.any()
    returns = np.zeros(5)
    for _ in range(12):
        assert (timestep.observation.view == np.stack([one.view for one in seen])).all()
        assert (timestep.observation.action_mask == np.stack([one.action_mask for one in seen])).all()
        assert timestep.observation.step_count.tolist() == [one.step_count for one in seen]
        action = np.where(timestep.observation.action_mask, rng.random((5, 3, 4)), -1).argmax(-1)
        env.reset("another", seeds[:2])  # which disturbs nothing
        timestep = env.step("one", action)
        for i, team in enumerate(teams):
            step = team.step(action[i])
            returns[i] += step.reward.mean()
            assert (timestep.final_observation.view[i] == step.observation.view).all()
            assert (timestep.reward[i] == step.reward).all() and timestep.first[i] == step.done
            assert timestep.discount[i] == 1 - step.terminated
            assert np.isclose(timestep.stats["return"][i], returns[i])
            assert timestep.stats["length"][i] == step.observation.step_count
            seen[i] = step.observation
            if step.done:
                seen[i], returns[i] = team.reset(int(random[i].integers(2**31))), 0.0


def test_without_restarting_an_episode_that_is_over_stands_still(make):
    env = make("delayed")
    env.reset("one", np.arange(3))
    steps = [env.step("one", np.ones((3, 2), np.int32), restart=False) for _ in range(6)]
    assert [step.first.all() for step in steps] == [False, False, False, True, False, False]
    assert (steps[-1].stats["return"] == 1).all() and (steps[-1].observation.step_count == 4).all()


def test_a_workers_error_is_one_line_with_the_environments_own_and_ends_all(make):
    env = make("delayed", fails_at=3, workers=2)
    env.reset("one", np.arange(4))
    pids = [worker.process.pid for worker in env._workers]
    assert len(alive(pids)) == 2
    with pytest.raises(SableError) as failure:
        for _ in range(3):
            env.step("one", np.zeros((4, 2), np.int32))
    text = str(failure.value)
    assert "ValueError: the motor is stuck (parallel_envs.py, line" in text and "\n" not in text
    assert not alive(pids)
    with pytest.raises(SableError, match="has been closed, or has failed"):
        env.reset("one", np.arange(4))


def test_a_worker_that_dies_is_told_of_and_ends_all(make):
    env = make("dying", workers=2)
    env.reset("one", np.arange(4))
    pids = [worker.process.pid for worker in env._workers]
    with pytest.raises(SableError, match=r"worker process 0: the process died \(SIGKILL, "):
        for _ in range(3):
            env.step("one", np.zeros((4, 2), np.int32))
    assert not alive(pids)


@pytest.mark.parametrize(("how", "name"), [("kill", "SIGKILL"), ("abort", "SIGABRT")])
def test_how_a_worker_without_memory_ended_is_said(make, how, name):
    env = make("starving", how=how)
    env.reset("one", np.arange(1))
    with pytest.raises(SableError, match=rf"the process died \({name}, as (where|of) .*(memory|bad_alloc)"):
        env.step("one", np.zeros((1, 2), np.int32))


def test_a_reward_for_an_agent_never_declared_is_ignored_and_said_once(make, capfd):
    env = make("talkative", workers=2)
    env.reset("one", np.arange(4))
    rewards = [env.step("one", np.ones((4, 2), np.int32)).reward for _ in range(4)]
    np.testing.assert_array_equal(np.asarray(rewards[-1]), np.tile([1.0, 0.0], (4, 1)))
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("sable: ")]
    words = "a reward for agent 'zoe', which is not among possible_agents, is ignored"
    assert said == [f"sable: pettingzoo:parallel_envs:talkative: {words}"]


def test_what_an_environment_prints_is_on_stderr_or_where_it_is_to_be_quiet_nowhere(make, capfd):
    for quiet in (False, True):
        with silence_output(quiet):
            env = make("talkative", workers=2)
            env.reset("one", np.arange(4))
            env.step("one", np.ones((4, 2), np.int32))
            env.close()
        out, err = capfd.readouterr()
        assert out == ""
        assert err == "" if quiet else "chatter on stdout" in err and "chatter while made" in err


def test_an_environment_that_hangs_is_one_line_and_ends_all(make):
    env = make("delayed", fails_at=2, how="hang-deaf", workers=2, env_timeout=500)
    env.reset("one", np.arange(4))
    env.step("one", np.zeros((4, 2), np.int32))
    assert env._timeout == 500
    env._timeout = 1.0  # only now: to start a process takes longer on a busy machine
    pids, began = [worker.process.pid for worker in env._workers], time.monotonic()
    with pytest.raises(EnvFailed) as failure:
        env.step("one", np.zeros((4, 2), np.int32))
    assert time.monotonic() - began < 10 and not alive(pids)
    text = "pettingzoo:parallel_envs:delayed: the environment failed in worker process 0: "
    assert str(failure.value) == text + "no answer within 1 seconds (--env-timeout)"


def test_an_environment_that_hangs_is_waited_for_only_while_somebody_wants_to(make):
    env = make("delayed", fails_at=1, how="hang", workers=1)
    env.reset("one", np.arange(1))
    looks = iter([False, False, True])
    with (
        env.abandoned_when(lambda: next(looks)),
        pytest.raises(EnvFailed, match="no answer yet when interrupted"),
    ):
        env.step("one", np.zeros((1, 2), np.int32))
    assert next(looks, None) is None


@pytest.mark.parametrize("given", [0, -1, "soon", True, float("nan")])
def test_a_time_out_that_is_none_is_refused(make, given):
    with pytest.raises(SableError, match=r"env_timeout=.*: expected a number of seconds above 0"):
        make("delayed", env_timeout=given)


def test_a_worker_leaves_signals_to_its_parent(make):
    """A scheduler or a terminal sends them to every process of a job."""
    env = make("delayed", workers=1)
    env.reset("one", np.arange(2))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(env._workers[0].process.pid, number)
        assert not env.step("one", np.zeros((2, 2), np.int32)).reward.any()


@pytest.mark.parametrize(
    ("factory", "words"),
    [("no_legal", "agent 'a' has no legal action at step 0"), ("stranger", "agent 'zoe' is not among")],
)
def test_masks_without_a_legal_action_and_unknown_agents_are_refused(make, factory, words):
    env = make(factory, time_limit=9)
    with pytest.raises(SableError, match=words):
        env.reset("one", np.arange(2))
        env.step("one", np.zeros((2, env.spec.num_agents), np.int32))


SCRIPT = """
import signal, sys
import numpy as np
import sable
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests run in the background ignore it
how = sys.argv[1]
fails_at = None if how == "work" else 1
env = sable.make_env("pettingzoo:parallel_envs:delayed", workers=2, fails_at=fails_at, how=how)
env.reset("one", np.arange(4))
print(*(worker.process.pid for worker in env._workers), flush=True)
while True:
    env.step("one", np.zeros((4, 2), np.int32))
"""


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, "work"), (signal.SIGINT, "work"), (signal.SIGKILL, "hang-deaf")]
)
def test_workers_end_with_the_process_that_started_them(number, how):
    if how == "hang-deaf" and sys.platform != "linux":
        pytest.skip("only Linux's kernel ends a process that hears nothing")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        try:
            time.sleep(0.2)  # one that hangs does so by now
            assert len(alive(pids)) == 2
            parent.send_signal(number)
            parent.wait(20)
        finally:
            parent.kill()
    assert soon_gone(pids)


REAL = {
    "mpe2.simple_spread_v3:parallel_env": {"N": 3, "max_cycles": 20},
    "gymnasium:make rware": {"id": "rware:rware-tiny-2ag-v2", "max_steps": None, "time_limit": 30},
    "gymnasium:make lbforaging": {"id": "lbforaging:Foraging-8x8-2p-2f-coop-v3"},
}


@pytest.mark.parametrize("name", REAL)
def test_real_packages_play_as_they_do_alone(name):
    """The same seeds and actions give the same views and rewards as the package itself."""
    pytest.importorskip({"mpe2": "mpe2", "gymn": name.rpartition(" ")[2]}[name[:4]])
    options = REAL[name]
    env = sable.make_env(f"pettingzoo:{name.partition(' ')[0]}", **options, workers=1)
    try:
        timestep = env.reset("one", np.array([7]))
        arguments = {key: value for key, value in options.items() if key != "time_limit"}
        if name.startswith("mpe2"):
            from mpe2 import simple_spread_v3

            alone, agents = simple_spread_v3.parallel_env(**arguments), ["agent_0", "agent_1", "agent_2"]
        else:
            import gymnasium

            alone, agents = gymnasium.make(**arguments, disable_env_checker=True), None
        seeds, rng = np.random.default_rng(7), np.random.default_rng(0)
        seen, _ = alone.reset(seed=int(seeds.integers(2**31)))
        for _ in range(50):
            views = np.stack([seen[agent] for agent in agents] if agents else seen)
            assert (timestep.observation.view[0] == views.astype(np.float32)).all()
            action = rng.integers(0, env.spec.num_actions, (1, env.spec.num_agents))
            timestep = env.step("one", action)
            seen, reward, *_ = alone.step(
                dict(zip(agents, action[0], strict=True)) if agents else tuple(action[0])
            )
            reward = [reward[agent] for agent in agents] if agents else reward
            assert np.allclose(timestep.reward[0], reward)
            if timestep.first[0]:
                assert timestep.stats["length"][0] == env.spec.time_limit
                assert timestep.discount[0] == (0 if "lbf" in name else 1)
                seen, _ = alone.reset(seed=int(seeds.integers(2**31)))
        assert env.spec.time_limit in (20, 30, 50)
    finally:
        env.close()


@pytest.mark.parametrize(("factory", "limit"), [("warehouse", 30), ("foraging", 20)])
def test_the_documented_factories_are_cut_short_at_the_limit_given(tmp_path, monkeypatch, factory, limit):
    pytest.importorskip("rware")
    pytest.importorskip("lbforaging")
    text = (HERE.parents[1] / "docs" / "guides" / "own-environment.md").read_text()
    (tmp_path / "teams.py").write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    env = sable.make_env(f"pettingzoo:teams:{factory}", time_limit=limit, workers=1)
    try:
        env.reset("one", np.arange(2))
        steps = [env.step("one", np.zeros((2, 2), np.int32)) for _ in range(limit)]
    finally:
        env.close()
    assert [step.first.all() for step in steps] == [False] * (limit - 1) + [True]
    assert (steps[-1].discount == 1).all()
