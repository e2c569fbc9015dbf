"""Training on Python environments: it is what training on the same JAX environment is, and learns."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import sable
from sable import envs, systems
from sable.cli.main import main
from sable.config.schema import ActorCriticConfig, Config, QMIXConfig, RunConfig, SableConfig
from sable.envs.python.vector_env import PythonVectorEnv
from sable.training import host_rollout as hosted
from sable.training.compile import Compiler
from sable.training.update import make_program, map_seeds
from tests.learning.cases import required

pytest.importorskip("gymnasium")

MODULES = str(Path(__file__).parents[1] / "envs")
DELAYED = "pettingzoo:parallel_envs:delayed"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(MODULES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


CONFIGS = {
    "ippo": ActorCriticConfig(num_envs=4, rollout_length=6, num_epochs=1, bootstrap_time_limits=True,
                              policy_layers=(8,), critic_layers=(8,)),
    "sable": SableConfig(num_envs=4, rollout_length=6, num_epochs=1, embed_dim=8),
    "qmix": QMIXConfig(num_envs=4, rollout_length=6, replay_size=24, sequence_length=6, warmup_sequences=2,
                       batch_size=4, q_layers=(8,), recurrent_size=8, mixer_size=8),
}  # fmt: skip


def updated(name, env, num_updates):
    """The run states [S] after some updates on an environment."""
    run = RunConfig(system=name, seeds=(3, 5), total_steps=24 * num_updates, evaluation_episodes=2)
    config = Config(run, CONFIGS[name])
    system = systems.make(name, env.spec, config.system)
    compiled = Compiler(run)
    program = make_program(env.stub_env if isinstance(env, PythonVectorEnv) else env, system, config)
    state = map_seeds(program.start)(np.array(run.seeds, np.uint32))
    if isinstance(env, PythonVectorEnv):
        unit = hosted.make_stages(env, system, program, config, compiled, state).run_updates
    else:
        unit = compiled(jax.vmap(program.run_updates, (0, None)), state.run, np.int32(1), donate=True)
    return unit(state.run, np.int32(num_updates))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_learnt_is_what_the_same_jax_environment_teaches(name):
    """`probe/delayed` draws nothing, so its Python twin must give the same parameters, seed by seed."""
    env = sable.make_env(DELAYED)
    try:
        ours = updated(name, env, 3)
    finally:
        env.close()
    truth = updated(name, envs.make("probe/delayed"), 3)
    assert (np.asarray(ours.halted) == -1).all()
    for part in ("learner", "metric_sums"):
        for one, other in zip(
            jax.tree.leaves(getattr(ours, part)), jax.tree.leaves(getattr(truth, part)), strict=True
        ):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-6)
    timesteps = ours.rollout_state.timestep, truth.rollout_state.timestep
    for name in ("reward", "discount", "first"):
        assert (getattr(timesteps[0], name) == getattr(timesteps[1], name)).all()
    assert (timesteps[0].final_observation.view == timesteps[1].final_observation.view).all()


SMALL = "--num-envs 8 --rollout-length 8 --num-evaluations 2 --evaluation-episodes 8 --quiet"
SMALL += " --policy-layers 8 --critic-layers 8 --num-epochs 1 --num-minibatches 1"


def run_of(here, task, system, name="mine"):
    return here / "runs" / "pettingzoo" / task / system / name


@pytest.mark.slow
def test_a_run_from_the_command_line_resumes_and_is_evaluated(here, capsys):
    """With agents that leave, masks, two seeds, and more episodes than are played side by side."""
    argv = (
        f"train pettingzoo:parallel_envs:leaving --env-options time_limit=9 --system ippo {SMALL} --name mine"
    )
    assert (
        main([*argv.split(), *["--seeds", "0", "1", "--total-steps", "128", "--absolute-episodes", "20"]])
        == 0
    )
    run = run_of(here, "parallel_envs-leaving", "ippo")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["absolute_length"] == [5.0, 5.0]  # the whole episodes, not what is left of some
    assert summary["absolute_return"] == pytest.approx([(3 * (1 + 2) + 2 * (3 + 4 + 5)) / 3] * 2)
    (run / "summary.json").unlink()
    assert main(["train", "--resume", str(run), "--env", "pettingzoo:parallel_envs:leaving"]) == 0
    assert "all episodes begin anew" in "".join(capsys.readouterr())
    assert main(["evaluate", str(run), "--trust", "--episodes", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["length"] == [5.0, 5.0]
    assert main(["watch", str(run)]) == 2
    assert "cannot be recorded" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failing_environment_ends_training_in_one_line(here, capsys):
    argv = f"train {DELAYED} --env-options fails_at=40 workers=2 --system ippo {SMALL} --name mine"
    assert main([*argv.split(), *["--total-steps", "6400", "--absolute-episodes", "8"]]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "ValueError: the motor is stuck (parallel_envs.py, line" in err
    assert main([*argv.replace("mine", "other").split(), "--devices", "7"]) == 2
    assert "devices=7" in capsys.readouterr().err


LEARN = {
    (DELAYED, "sable"): "16_000 --embed-dim 16 --learning-rate 2e-3 --rollout-length 16 --num-envs 16",
    (DELAYED, "qmix"): "8_000 --epsilon-decay 1e-3 --num-envs 16 --rollout-length 4",
    ("pettingzoo:parallel_envs:continuous", "mappo"): "60_000 --policy-learning-rate 2e-3 "
    "--critic-learning-rate 2e-3 --num-envs 32 --rollout-length 16",
}


FAILED = {"sable": (0, 66)}
"""How many seeds stayed at 0.75 or below, of how many; the others are not measured yet."""


@pytest.mark.slow
@pytest.mark.parametrize(("task", "system"), LEARN)
def test_python_environments_are_learnt(here, task, system):
    """Of all three the best return is 1."""
    argv = f"train {task} --system {system} --quiet --name mine --total-steps {LEARN[task, system]}"
    argv += " --num-seeds 6 --num-evaluations 4 --evaluation-episodes 16 --absolute-episodes 32 --no-video"
    assert main(argv.split()) == 0
    run = run_of(here, task.partition(":")[2].replace(":", "-"), system)
    returns = json.loads((run / "summary.json").read_text())["absolute_return"]
    least = required(6, *FAILED[system]) if system in FAILED else 3
    assert sum(value > 0.75 for value in returns) >= least, returns


def started(here, *argv):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([MODULES, *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-m", "sable", "train", *argv],
        env=environment, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def children(pid):
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()
            and re.search(rf"\) \S {pid} ", (p / "stat").read_text())]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_process_and_goes_on(here, number):
    flags = f"{DELAYED} --env-options workers=2 --system ippo --total-steps 9e6 --name mine --num-envs 8"
    process = started(here, *flags.split(), *["--rollout-length", "8", "--num-evaluations", "9999"])
    run = run_of(here, "parallel_envs-delayed", "ippo")
    deadline = time.monotonic() + 240
    while not (run / "checkpoints").is_dir() or not any((run / "checkpoints").glob("0*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    workers = children(process.pid)
    assert len(workers) >= 2
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    time.sleep(2.5)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    again = started(here, "--resume", str(run), "--trust")
    time.sleep(20)
    assert again.poll() is None
    again.send_signal(signal.SIGTERM)
    _, err = again.communicate(timeout=60)
    assert f"go on with: sable train --resume {run} --trust" in err
    assert again.returncode == 128 + signal.SIGTERM and "go on with" in err
