"""The host loop: exact resumption, honest evaluation, guarded updates."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sable
from sable import systems
from sable.cli.main import main
from sable.config import resolve as settings
from sable.config.schema import ActorCriticConfig, Config, RunConfig, SableConfig, field_names, system_config
from sable.envs.suites.probes import PROBES
from sable.errors import SableError
from sable.ops import trees as tree
from sable.runs import directory as runs
from sable.training import best, checkpoint, job, loop, progress
from sable.training import update as programs
from sable.training.evaluate import evaluate_policy
from sable.training.loggers.logger import Logger, read_rows

RUN = RunConfig(
    task="probe/recall",
    seeds=(3, 5),
    total_steps=8 * 16,
    num_evaluations=4,
    evaluation_episodes=4,
    absolute_episodes=8,
)
CONFIG = SableConfig(
    num_envs=4,
    rollout_length=4,
    num_epochs=1,
    num_minibatches=2,
    embed_dim=8,
    num_heads=2,
    learning_rate=1e-3,
)
ENV = PROBES["recall"]


@pytest.fixture(scope="module")
def parts():
    return ENV, systems.make("sable", ENV.spec, CONFIG), Config(RUN, CONFIG)


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    """A run trained from end to end."""
    directory = tmp_path_factory.mktemp("whole")
    return loop.train_loop(*parts, directory, quiet=True)


def saved(directory: Path, parts):
    begin = programs.map_seeds(programs.make_program(*parts).start)
    return checkpoint.restore(directory, jax.eval_shape(begin, jnp.array(RUN.seeds, jnp.uint32))).state


def assert_same_bits(a, b):
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(
            checkpoint._raw(x), checkpoint._raw(y), err_msg=jax.tree_util.keystr(path)
        )


def timeless(directory: Path):
    return [
        {k: v for k, v in row.items() if k != "wall_seconds"}
        for row in read_rows(directory / "metrics.jsonl")
    ]


def stop_and_resume(parts, directory, monkeypatch, stop_after):
    """What a run ends with that was stopped by a signal after so many updates, and resumed."""

    class Interrupting(Logger):
        def progress(self, steps, seconds_training):
            super().progress(steps, seconds_training)
            if steps == stop_after * 16:
                os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "Logger", Interrupting)
        patch.setattr(progress, "SECONDS_PER_CALL", 0.0)
        stopped = loop.train_loop(*parts, directory, quiet=True)
    assert stopped.interrupted == signal.SIGTERM
    assert int(saved(directory, parts).run.num_updates[0]) == stop_after
    return loop.train_loop(*parts, directory, resume=True, quiet=True)


def assert_same_runs(a, b, parts):
    assert_same_bits(saved(a.directory, parts), saved(b.directory, parts))
    assert timeless(a.directory) == timeless(b.directory)
    assert a.summary["absolute_return"] == b.summary["absolute_return"]
    assert a.summary["final_return"] == b.summary["final_return"]


@pytest.mark.parametrize("stop_after", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 7))])
def test_a_run_stopped_and_resumed_ends_as_if_never_stopped(whole, parts, tmp_path, monkeypatch, stop_after):
    """Stops inside an interval between two evaluations (1, 3, 7) and right at its end (4)."""
    assert_same_runs(stop_and_resume(parts, tmp_path, monkeypatch, stop_after), whole, parts)


def test_a_large_state_is_saved_only_as_often_as_time_allows(whole, parts, tmp_path, monkeypatch):
    """A run killed long after its last save goes on from there, and ends as if never stopped."""
    steps, real = [], checkpoint.commit

    def commit(snapshot):
        steps.append(snapshot.step)
        if len(steps) == 2:
            raise RuntimeError("killed")
        time.sleep(1.0)
        return real(snapshot)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(progress, "SMALL_STATE", 0)
        patch.setattr(checkpoint, "commit", commit)
        loop.train_loop(*parts, tmp_path, quiet=True)
    assert steps == [2, 8 + 4]  # updates and evaluations: before the first evaluation, and at the end
    assert len(timeless(tmp_path)) == 4 * len(RUN.seeds)
    assert_same_runs(loop.train_loop(*parts, tmp_path, resume=True, quiet=True), whole, parts)


TINY = {"num_envs": 4, "rollout_length": 4, "num_epochs": 1, "num_updates_per_rollout": 2, "batch_size": 8}
TINY |= {"embed_dim": 8, "replay_size": 64, "sequence_length": 4, "warmup_sequences": 4, "warmup_steps": 16}
TINY |= {"policy_layers": (8, 8), "critic_layers": (8, 8), "q_layers": (8, 8), "recurrent_size": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    "system",
    ["mat", "ippo", "mappo", "masac", "hasac", "qmix"],
)
def test_every_system_resumes_exactly_and_is_evaluated(system, tmp_path, monkeypatch):
    task = "probe/continuous" if "sac" in system else "probe/recall"
    cls = system_config(system)
    config = cls(**{name: value for name, value in TINY.items() if name in field_names(cls)})
    if isinstance(config, ActorCriticConfig):
        config = replace(config, memory=True, recurrent_chunk=2)
    env, run = PROBES[task.partition("/")[2]], replace(RUN, task=task, system=system)
    parts = env, systems.make(system, env.spec, config), Config(run, config)
    directories = [tmp_path / name for name in ("whole", "stopped")]
    for directory in directories:
        directory.mkdir()
    whole = loop.train_loop(*parts, directories[0], quiet=True)
    assert_same_runs(stop_and_resume(parts, directories[1], monkeypatch, 5), whole, parts)
    assert whole.summary["system"] == system and len(whole.summary["absolute_return"]) == 2
    played = best.evaluate_best(*parts, whole.directory, episodes=8)
    assert len(played["return"]) == 2
    start = jax.jit(programs.map_seeds(programs.make_program(*parts).start))(jnp.array(RUN.seeds, jnp.uint32))
    learnt = saved(whole.directory, parts).run.learner.params
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), learnt, start.run.learner.params)
    assert all(jax.tree.leaves(moved)), moved


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("width", [8, 32], ids=["narrow", "wide enough for a GPU's kernels"])
def test_a_deterministic_run_resumes_exactly_on_any_device(width, tmp_path, monkeypatch):
    """On a GPU it is the only kind that does."""
    config = replace(CONFIG, embed_dim=width)
    run = replace(RUN, deterministic=True)
    parts = ENV, systems.make("sable", ENV.spec, config), Config(run, config)
    directories = tmp_path / "whole", tmp_path / "stopped"
    for directory in directories:
        directory.mkdir()
    whole = loop.train_loop(*parts, directories[0], quiet=True)
    assert_same_runs(stop_and_resume(parts, directories[1], monkeypatch, 3), whole, parts)


def test_the_same_seeds_give_the_same_run(whole, parts, tmp_path, monkeypatch):
    """Also when the work is cut into other units."""
    monkeypatch.setattr(progress, "SECONDS_PER_CALL", 0.0)
    again = loop.train_loop(*parts, tmp_path, quiet=True)
    assert_same_runs(again, whole, parts)


@pytest.mark.slow
def test_each_seed_may_have_hyper_parameters_of_its_own(whole, parts, tmp_path):
    """The first seed stands still at a learning rate of 0; the second learns as the whole run's second."""
    env, system, _ = parts
    still = systems.make("sable", env.spec, replace(CONFIG, learning_rate=0.0)).hyper
    hypers = jax.tree.map(lambda *leaves: jnp.stack(leaves), still, system.hyper)
    loop.train_loop(*parts, tmp_path, quiet=True, hypers=hypers)
    learnt, expected = (saved(d, parts).run.learner for d in (tmp_path, whole.directory))
    np.testing.assert_array_equal(learnt.hyper.learning_rate, np.float32([0, 1e-3]))
    begin = programs.map_seeds(programs.make_program(*parts).start)
    start = jax.jit(begin)(jnp.array(RUN.seeds, jnp.uint32), hypers).run.learner.params
    for a, b, c in zip(*map(jax.tree.leaves, (learnt.params, expected.params, start)), strict=True):
        np.testing.assert_array_equal(a[0], c[0])
        np.testing.assert_allclose(a[1], b[1], atol=1e-6)
        assert (a[1] != c[1]).any()


@pytest.mark.slow
def test_whoever_watches_sees_every_evaluation_and_may_end_the_run(whole, parts, tmp_path):
    seen = []

    def watch(steps, returns):
        seen.append((steps, returns))
        return steps == 64

    assert loop.train_loop(*parts, tmp_path, quiet=True, on_evaluation=watch).summary == {}
    rows = read_rows(whole.directory / "metrics.jsonl")
    assert seen == [(s, [r["evaluation/return"] for r in rows if r["env_steps"] == s]) for s in (32, 64)]
    loop.train_loop(
        *parts, tmp_path, quiet=True, resume=True, on_evaluation=lambda *now: bool(seen.append(now))
    )
    assert [steps for steps, _ in seen] == [32, 64, 64, 96, 128], "what was not saved is seen again"


def test_the_summary_tells_what_the_issue_promises(whole):
    summary = whole.summary
    assert summary["task"] == "probe/recall" and summary["system"] == "sable" and summary["seeds"] == [3, 5]
    assert summary["env_steps"] == 8 * 16
    assert len(summary["final_return"]) == len(summary["absolute_return"]) == 2
    assert summary["steps_per_second"] == pytest.approx(2 * 8 * 16 / summary["training_seconds"])
    assert summary["wall_seconds"] > summary["training_seconds"] > 0
    assert summary["peak_memory_bytes"] > 1e7
    json.dumps(summary)


def test_every_seed_and_evaluation_has_a_row(whole):
    rows = read_rows(whole.directory / "metrics.jsonl")
    assert [(row["env_steps"], row["seed"]) for row in rows] == [
        (steps, seed) for steps in (32, 64, 96, 128) for seed in RUN.seeds
    ]
    assert {"evaluation/return", "evaluation/length", "loss/actor", "rollout/return"} <= rows[0].keys()


@pytest.fixture(scope="module")
def program(parts):
    program = programs.make_program(*parts)
    state = jax.jit(programs.map_seeds(program.start))(jnp.array(RUN.seeds, jnp.uint32))
    return program, state


def test_evaluation_measures_the_parameters_just_trained(program, parts):
    functions, state = program
    trained = jax.jit(jax.vmap(functions.run_updates, (0, None)))(state.run, jnp.int32(3))
    _, metrics = jax.jit(jax.vmap(functions.evaluate_and_keep_best))(replace(state, run=trained))
    env, system, *_ = parts

    def measure(run):
        return evaluate_policy(
            env, system, run.learner.params, programs.evaluation_key(run), RUN.evaluation_episodes
        )

    expected = jax.jit(jax.vmap(measure))(trained)["return"].mean(axis=1)
    np.testing.assert_allclose(metrics["evaluation/return"], expected)


def test_the_best_parameters_are_kept_the_later_of_equals_and_never_for_a_nan(program):
    functions, state = program
    assess = jax.jit(jax.vmap(functions.evaluate_and_keep_best))
    low, high = (replace(state.best, score=jnp.full(2, score)) for score in (-1e9, 1e9))
    after, metrics = assess(replace(state, best=low))
    np.testing.assert_array_equal(after.best.score, metrics["evaluation/return"])
    assert_same_bits(assess(replace(state, best=high))[0].best, high)
    marked = jax.tree.map(lambda x: x + 1, state.best.params)
    tied = replace(state.best, params=marked, score=metrics["evaluation/return"])
    assert_same_bits(assess(replace(state, best=tied))[0].best.params, state.run.learner.params)


# Rewards turn NaN in one start of many, so that the seeds halt at different times.
TREACHEROUS = replace(
    PROBES["recall"],
    draw=lambda key: jax.random.randint(key, (2,), 0, 60),
    view=lambda cue, time: jnp.ones((2, 4)),
    pay=lambda cue, time, actions: jnp.where((cue == 0).any(), jnp.nan, 1.0) * jnp.ones(2),
)


@pytest.mark.slow
def test_something_not_finite_halts_its_seed_alone_and_never_reaches_the_parameters(parts):
    program = programs.make_program(TREACHEROUS, *parts[1:])
    run = jax.jit(programs.map_seeds(program.start))(jnp.array(RUN.seeds, jnp.uint32)).run
    unit = jax.jit(jax.vmap(program.run_updates, (0, None)), donate_argnums=0)
    frozen = {}
    for _ in range(40):
        run = unit(run, jnp.int32(1))
        assert tree.all_finite((run.learner, run.rollout_state.memory, run.metric_sums))
        for seed in np.flatnonzero(run.halted >= 0):
            mine = jax.tree.map(lambda x, seed=seed: x[seed].copy(), run)
            assert_same_bits(mine, frozen.setdefault(int(seed), mine))
    assert len(frozen) == 2
    assert len(set(run.num_updates.tolist())) == 2, "the seeds halted together, which shows less"


@pytest.mark.slow
def test_a_run_whose_seeds_have_all_halted_says_so_and_leaves_only_good_checkpoints(parts, tmp_path, capsys):
    _, system, config = parts
    config = replace(config, run=replace(RUN, total_steps=40 * 16, num_evaluations=20))
    with pytest.raises(SableError, match="every seed has halted"):
        loop.train_loop(TREACHEROUS, system, config, tmp_path)
    said = capsys.readouterr().out
    assert "seed 3 halted" in said and "seed 5 halted" in said
    assert tree.all_finite(saved(tmp_path, parts).run)


@pytest.mark.parametrize(
    ("total_steps", "num_evaluations", "expected_updates", "expected_evaluations"),
    [(20_000_000, 122, 1220, 122), (16_384, 122, 1, 1), (1, 5, 1, 1), (5 * 16_384 + 7, 3, 5, 3)],
)
def test_budgets_round_down_and_evaluations_are_even(
    total_steps, num_evaluations, expected_updates, expected_evaluations
):
    run = RunConfig(total_steps=total_steps, num_evaluations=num_evaluations)
    boundaries = job.schedule(run, 128 * 128)
    assert boundaries[-1] == expected_updates and len(boundaries) == expected_evaluations
    gaps = np.diff([0, *boundaries])
    assert gaps.min() >= 1 and gaps.max() - gaps.min() <= 1


FIELDS = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__} | {
    name: getattr(RUN, name)
    for name in ("total_steps", "num_evaluations", "evaluation_episodes", "absolute_episodes", "seeds")
}


@pytest.mark.slow
def test_the_public_functions_train_evaluate_and_resume(whole, tmp_path):
    result = sable.train("probe/recall", out=tmp_path, name="r", quiet=True, **FIELDS)
    assert result.directory == tmp_path / "probe" / "recall" / "sable" / "r"
    assert {path.name for path in result.directory.iterdir()} == {
        "config.json", "meta.json", "metrics.jsonl", "checkpoints", "tensorboard", "curve.png",
        "summary.json", "marl_eval.json", "spec.json", "sums.json", ".claim",
    }  # fmt: skip
    assert result.summary["absolute_return"] == whole.summary["absolute_return"]
    played = sable.evaluate(result.directory, episodes=8)
    assert len(played["return"]) == 2 and 0 <= min(played["return"]) <= max(played["return"]) <= 1
    assert played == sable.evaluate(result.directory, episodes=8)
    shutil.rmtree(result.directory / "checkpoints")  # as if stopped before the first: it begins again
    runs.reopen(result.directory)
    again = sable.train(resume=result.directory, quiet=True)
    assert again.summary["env_steps"] == 128
    assert again.summary["final_return"] == whole.summary["final_return"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_leads_to_the_same_end(
    whole, parts, tmp_path, capsys
):
    directory = tmp_path / "run"
    shutil.copytree(whole.directory, directory)
    (directory / "config.json").write_text(settings.to_json(Config(RUN, CONFIG)))
    runs.begin(directory, ENV.spec)
    before, newest = sorted((directory / checkpoint.FOLDER).iterdir())
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    damaged = bytearray(victim.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    victim.write_bytes(damaged)

    def contents():
        return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}

    untouched = contents()
    assert main(["export", str(directory), "-o", str(tmp_path / "team")]) == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and victim.name in said and "damaged" in said and before.name in said
    assert contents() == untouched
    shutil.copytree(directory, tmp_path / "lost")
    assert main(["train", "--quiet", "--resume", str(directory)]) == 0
    assert victim.name in capsys.readouterr().err
    assert_same_bits(saved(directory, parts), saved(whole.directory, parts))
    assert timeless(directory) == timeless(whole.directory)
    # With none that is whole, nothing is begun anew and nothing is touched.
    (tmp_path / "lost" / checkpoint.FOLDER / before.name / checkpoint.ARRAYS).unlink()
    lost = {path: path.read_bytes() for path in (tmp_path / "lost").rglob("*") if path.is_file()}
    assert main(["train", "--resume", str(tmp_path / "lost")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and victim.name in said and "neither is any other" in said
    now = {p: p.read_bytes() for p in (tmp_path / "lost").rglob("*") if p.is_file() and p.name != ".claim"}
    assert now == lost


@pytest.mark.slow
def test_an_environment_of_ones_own_trains(tmp_path):
    result = sable.train(ENV, out=tmp_path, quiet=True, **FIELDS)
    assert result.directory.parts[-4:-2] == ("custom", "Probe")
    assert len(sable.evaluate(result.directory, episodes=8, env=ENV)["return"]) == 2
    with pytest.raises(SableError, match="environment of yours"):
        sable.evaluate(result.directory)
