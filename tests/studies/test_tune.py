"""Tuning: batches of one program, workers that may die at any moment, and what a study leaves."""

import contextlib
import csv
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import typing as tp
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sable
from sable import systems
from sable.config import resolve as settings
from sable.config.schema import SYSTEM_CONFIGS, ActorCriticConfig, Config, field_names
from sable.errors import SableError
from sable.reports import read as results
from sable.runs import circumstances
from sable.runs import directory as runs
from sable.studies import study_files, trials, tune
from sable.studies import worker as batches
from sable.studies.tune_view import View
from sable.training import loop, progress
from sable.training.update import make_program

optuna = pytest.importorskip("optuna")
from optuna.storages.journal import JournalFileBackend  # noqa: E402

TASK = "probe/delayed"
SPACE = {
    "num_epochs": [1, 2],
    "policy_learning_rate": [0, 1e-3, 1e-2],
    "critic_learning_rate": [1e-3, 1e-2],
    "clip_eps": [0.1, 0.2],
}
FREE = ["policy_learning_rate", "critic_learning_rate", "clip_eps"]
GIVEN = {"num_envs": 4, "rollout_length": 4, "policy_layers": [8], "critic_layers": [8]}
CONFIG = ActorCriticConfig()
BUDGET = {"total_steps": 8 * 16, "num_evaluations": 4, "evaluation_episodes": 4, "absolute_episodes": 8}


def search(
    out, *, system="ippo", num_seeds=2, trials=4, parallel_trials=2, space=None, storage=None, **fields
):
    """A small study, worked on by this process."""
    config = sable.configure(TASK, system=system, num_seeds=num_seeds, **BUDGET | GIVEN | fields)
    return tune.tune(
        config,
        lambda: sable.make_env(TASK),
        fixed=GIVEN,
        space=SPACE if space is None else space,
        trials=trials,
        parallel_trials=parallel_trials,
        out=out,
        storage=storage,
        quiet=True,
    )


def folder(out) -> Path:
    return Path(out) / "probe" / "delayed" / "ippo"


def table(directory) -> list[dict]:
    return list(csv.DictReader((directory / "trials.csv").open()))


def points_of(directory) -> dict[str, list[int]]:
    paths = sorted(directory.glob("batch-*/points.json"))
    return {p.parent.name: [point["trial"] for point in json.loads(p.read_text())["points"]] for p in paths}


def refusal(*args, **kwargs) -> str:
    with pytest.raises(SableError) as error:
        search(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


# Real training.


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """A study of four trials of two seeds each."""
    out = tmp_path_factory.mktemp("tuning")
    return out, search(out)


def test_points_of_a_batch_share_what_shapes_the_program_and_differ_in_the_rest(studied):
    _, outcome = studied
    assert outcome.finished == 4 and outcome.interrupted is None
    rows = {int(row["trial"]): row for row in table(outcome.directory)}
    for name, numbers in points_of(outcome.directory).items():
        shaping = {rows[number]["num_epochs"] for number in numbers}
        config = runs.read_config(outcome.directory / name)
        assert shaping == {str(config.system.num_epochs)} and config.run.seeds == (1000, 1001, 1002, 1003)
        assert len({tuple(rows[number][field] for field in FREE) for number in numbers}) == 2
        assert {rows[number]["batch"] for number in numbers} == {name}


def test_a_study_from_before_keeps_its_seeds(tmp_path):
    assert trials.trial_seeds(tmp_path, 2) == (1000, 1001)
    (tmp_path / "study.json").write_text(json.dumps({"run": {"seeds": [0, 1]}}))
    assert trials.trial_seeds(tmp_path, 2) == (0, 1)
    assert trials.trial_seeds(tmp_path, 3) == (1000, 1001, 1002), "which the study then refuses"


def test_a_value_is_the_mean_absolute_return_over_the_seeds_of_a_trial(studied):
    _, outcome = studied
    rows = {int(row["trial"]): row for row in table(outcome.directory)}
    for name, numbers in points_of(outcome.directory).items():
        absolute = runs.read_summary(outcome.directory / name)["absolute_return"]
        for index, number in enumerate(numbers):
            assert float(rows[number]["value"]) == pytest.approx(np.mean(absolute[2 * index : 2 * index + 2]))
    best = max(float(row["value"]) for row in rows.values() if row["state"] == "complete")
    assert outcome.best.value == best


def test_the_recipe_is_read_back_and_gives_what_the_best_trial_had(studied):
    _, outcome = studied
    path = outcome.directory / "recipe.toml"
    assert tomllib.loads(path.read_text()) == {TASK: GIVEN | outcome.best.values}
    config = sable.configure(TASK, system="ippo", recipe=path)
    assert all(getattr(config.system, name) == value for name, value in outcome.best.values.items())
    assert config.system.num_envs == 4 and config.run.total_steps == 20_000_000
    assert sable.configure(TASK, system="ippo", recipe=path, num_envs=8).system.num_envs == 8
    assert (outcome.directory / "study.png").read_bytes().startswith(b"\x89PNG")


def test_a_batch_is_not_taken_for_a_run_of_the_system(studied):
    out, outcome = studied
    found = results.read([out])
    assert not found.series and all("tuning study" in note for note in found.notes)
    assert len(found.notes) == len(points_of(outcome.directory))
    batch = next(out.rglob("points.json")).parent
    with pytest.raises(SableError, match="is a batch of a study"):
        sable.train(resume=batch)


def test_of_a_finished_batch_curves_and_summary_are_kept_and_checkpoints_are_not(studied):
    _, outcome = studied
    for name in points_of(outcome.directory):
        assert len(runs.read_metrics(outcome.directory / name)) == 4 * 4
        assert not (outcome.directory / name / "checkpoints").exists()


def test_draws_for_one_batch_differ_even_where_the_sampler_has_made_up_its_mind(formula, tmp_path):
    assert search(tmp_path, trials=24, parallel_trials=3).finished == 24
    rows = table(folder(tmp_path))
    assert {len(numbers) for numbers in points_of(folder(tmp_path)).values()} == {3}
    assert sum(row["state"] == "fail" for row in rows) < 24


def test_a_finished_study_is_left_as_it_is_and_goes_on_where_more_is_asked(studied, monkeypatch):
    out, outcome = studied
    before = table(outcome.directory)
    monkeypatch.setattr(loop, "train_loop", lambda *_, **__: pytest.fail("trained again"))
    assert search(out).best == outcome.best and table(outcome.directory) == before
    with pytest.raises(pytest.fail.Exception):
        search(out, trials=5)


def test_another_study_in_the_same_folder_is_refused(studied):
    out, _ = studied
    assert "begun with total_steps=128, not 64" in refusal(out, total_steps=64)
    assert "begun with num_epochs in [1, 2], not [1]" in refusal(out, space=SPACE | {"num_epochs": [1]})
    assert "begun with clip_eps in [0.1, 0.2], not None" in refusal(
        out, space={name: values for name, values in SPACE.items() if name != "clip_eps"}
    )
    assert "begun with seeds" in refusal(out, num_seeds=1)
    assert "another storage" in refusal(out, storage=f"{out}/other.log")


def test_an_interrupted_study_says_so_and_goes_on_with_the_same_trials(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_CALL", 0.0)

    def evaluated(self, steps, returns):
        if steps == 64:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(tune.View, "evaluated", evaluated)
        stopped = search(tmp_path, trials=2, space=SPACE | {"num_epochs": [1]})
    assert stopped.interrupted == signal.SIGTERM and stopped.finished == 0
    seen = []
    monkeypatch.setattr(tune.View, "evaluated", lambda self, steps, returns: seen.append(steps))
    whole = search(tmp_path, trials=2, space=SPACE | {"num_epochs": [1]})
    assert whole.finished == 2 and seen == [96, 128]
    assert [row["state"] for row in table(whole.directory)] == ["complete", "complete"]


WORKER = """
import sys, time
sys.path[:0] = [{tests!r}]
import jax
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_default_matmul_precision", "highest")
import test_tune
view = test_tune.tune.View
view.evaluated = lambda self, steps, returns: time.sleep({pause})
test_tune.search({out!r}, **{kwargs!r})
"""


@pytest.fixture
def worker():
    """A function that starts a process to work on the study in `out`, with a pause after each evaluation."""
    started = []

    def start(out, pause, **kwargs) -> subprocess.Popen:
        code = WORKER.format(tests=str(Path(__file__).parent), out=str(out), pause=pause, kwargs=kwargs)
        started.append(subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.05)


@pytest.mark.slow
def test_trials_of_a_killed_worker_are_gone_on_with_and_none_is_lost_or_repeated(
    studied, worker, tmp_path, monkeypatch
):
    """Killed in the middle of its second batch; `studied` has compiled the programs."""
    process = worker(tmp_path, pause=0.4)
    metrics = folder(tmp_path) / "batch-001" / "metrics.jsonl"
    wait_for(lambda: len(runs.read_metrics(metrics.parent)) >= 2 * 4, process)
    process.kill()
    process.wait()
    numbers, book = points_of(folder(tmp_path)), journal(tmp_path)
    assert (
        sorted(state for state, _ in book.values() if state != "FAIL") == ["COMPLETE"] * 2 + ["RUNNING"] * 2
    )
    seen = []
    monkeypatch.setattr(tune.View, "evaluated", lambda self, steps, returns: seen.append(steps))
    outcome = search(tmp_path)
    assert outcome.finished == 4 and points_of(folder(tmp_path)) == numbers
    assert seen and seen[0] > 32, "began anew instead of going on"
    after = journal(tmp_path)
    assert all(after[number] == book[number] for number in book if book[number][0] == "COMPLETE")
    assert sorted(state for state, _ in after.values() if state != "FAIL") == ["COMPLETE"] * 4


@pytest.mark.slow
def test_two_workers_share_a_study(studied, worker, tmp_path):
    workers = [worker(tmp_path, pause=0.3, trials=6) for _ in range(2)]
    for process in workers:
        assert process.wait(timeout=240) == 0, process.stderr.read()
    shares = points_of(folder(tmp_path))
    numbers = [number for numbers in shares.values() for number in numbers]
    assert len(set(numbers)) == len(numbers) == 6
    counted = {number for number, (state, _) in journal(tmp_path).items() if state != "FAIL"}
    assert counted == set(numbers)
    assert {int(row["trial"]) for row in table(folder(tmp_path)) if row["state"] == "complete"} == counted
    holders = {runs.holder(folder(tmp_path) / name) for name in shares}
    assert len(holders) == 2, "one of them did all the work"


@pytest.mark.slow
def test_workers_killed_again_and_again_get_there_in_the_end(studied, worker, tmp_path):
    """Two at a time, each killed after some seconds, until all is done; then each trial was told once."""
    random, known = np.random.default_rng(0), {}
    for _ in range(40):
        workers = [worker(tmp_path, pause=0.3, trials=8) for _ in range(2)]
        time.sleep(random.uniform(3, 9))
        for process in workers:
            process.kill()
            process.wait()
        book = journal(tmp_path)
        assert all(book[number] == trial for number, trial in known.items()), "a finished trial changed"
        known = {n: t for n, t in book.items() if t[0] in ("COMPLETE", "PRUNED")}
        if len(known) == 8:
            break
    assert search(tmp_path, trials=8).finished == len(known) == 8
    numbers = [number for numbers in points_of(folder(tmp_path)).values() for number in numbers]
    assert sorted(numbers) == sorted(known)


def journal(out) -> dict[int, tuple[str, float | None]]:
    """Every trial's state and value, as Optuna alone reads the journal."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder(out) / "journal.log")))
    found = {}
    for study in storage.get_all_studies():
        found |= {t.number: (t.state.name, t.value) for t in storage.get_all_trials(study._study_id)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEM_CONFIGS)
def test_every_system_is_tuned_over_its_own_space(system, tmp_path):
    """Two points side by side, of the paper's space and with a tiny budget; then the recipe is trained."""
    task = "probe/continuous" if "sac" in system else TASK
    tiny = {
        "num_envs": 8,
        "rollout_length": 4,
        "replay_size": 64,
        "sequence_length": 4,
        "warmup_sequences": 4,
    }
    tiny |= {"warmup_steps": 16, "num_updates_per_rollout": 2, "embed_dim": 8, "num_blocks": 1}
    given = {name: value for name, value in tiny.items() if name in field_names(SYSTEM_CONFIGS[system])}
    config = sable.configure(task, system=system, **BUDGET, **given)
    make_env = partial(sable.make_env, task)
    outcome = tune.tune(config, make_env, fixed=given, trials=2, parallel_trials=2, out=tmp_path, quiet=True)
    assert outcome.finished == 2 and [*map(len, points_of(outcome.directory).values())] == [2]
    recipe = outcome.directory / "recipe.toml"
    trained = sable.train(task, system=system, recipe=recipe, out=tmp_path / "r", quiet=True, **BUDGET)
    assert math.isfinite(trained.summary["absolute_return"][0])


# Training replaced by a formula, which leaves all moments at which a worker can die.


class Killed(BaseException):
    """The process ends here."""


def score(values) -> float:
    return 100 * values["policy_learning_rate"] - values["critic_learning_rate"] + values["num_epochs"]


@pytest.fixture
def formula(monkeypatch):
    """Training whose returns follow from the settings; the list of (batch, evaluation) that were trained."""
    done = []

    def train(env, system, config, directory, *, resume, quiet, hypers, on_evaluation, interrupted):
        rates, checkpoint = hypers.learning_rate, directory / "checkpoint"
        lanes = [
            {"policy_learning_rate": round(float(a), 6), "critic_learning_rate": round(float(c), 6)}
            for a, c in zip(rates["actor"], rates["critic"], strict=True)
        ]
        returns = [score(lane | {"num_epochs": config.system.num_epochs}) for lane in lanes]
        for evaluation in range(int(checkpoint.read_text()) if checkpoint.exists() else 0, 4):
            done.append((directory.name, evaluation))
            if on_evaluation(32 * (evaluation + 1), [value * (evaluation + 1) / 4 for value in returns]):
                return loop.Result(directory, {})
            checkpoint.write_text(str(evaluation + 1))
        summary = {"seeds": config.run.seeds, "absolute_return": returns, "halted_seeds": []}
        return loop.Result(directory, summary)

    monkeypatch.setattr(loop, "train_loop", train)
    monkeypatch.setattr(study_files, "_picture", lambda *_: b"")
    monkeypatch.setattr(circumstances, "describe", dict)
    return done


def crash(monkeypatch, moment: int, how: str) -> None:
    """Let the process end at its so-many-th write to the journal, or to a JSON file."""
    count = itertools.count()
    append, write = JournalFileBackend.append_logs, runs.write_json

    def appending(self, logs):
        now = next(count) == moment
        if now and how == "torn":
            with open(self._file_path, "ab") as file:
                file.write(json.dumps(logs[0]).encode()[:-3])
        if not now or how == "after":
            append(self, logs)
        if now:
            raise Killed

    def writing(path, data):
        now = next(count) == moment
        if not now or how == "after":
            write(path, data)
        if now:
            raise Killed

    monkeypatch.setattr(JournalFileBackend, "append_logs", appending)
    monkeypatch.setattr(runs, "write_json", writing)


@pytest.mark.parametrize(
    "how", ["torn", *(pytest.param(h, marks=pytest.mark.slow) for h in ("before", "after"))]
)
def test_killed_at_any_write_a_study_loses_no_finished_trial_and_repeats_none(
    formula, tmp_path, monkeypatch, how
):
    for moment in itertools.count():
        out = tmp_path / str(moment)
        formula.clear()
        with monkeypatch.context() as patch:
            crash(patch, moment, how)
            try:
                search(out, num_seeds=1)
                break  # there are no more moments
            except Killed:
                finished = {n: t for n, t in journal(out).items() if t[0] in ("COMPLETE", "PRUNED")}
        numbers, trained = points_of(folder(out)), set(formula)
        outcome = search(out, num_seeds=1)
        after = {n: t for n, t in journal(out).items() if t[0] != "FAIL"}
        assert outcome.finished == len(after) == 4, moment
        assert {state for state, _ in after.values()} <= {"COMPLETE", "PRUNED"}, moment
        assert all(after[number] == trial for number, trial in finished.items()), moment
        assert points_of(folder(out)).items() >= numbers.items(), moment
        assert sum(map(len, points_of(folder(out)).values())) == 4, moment
        repeated = [now for now in formula if formula.count(now) > 1]
        assert len(repeated) <= 2 and set(repeated) <= trained, (
            f"{moment}: more than one evaluation done again"
        )
        for row in table(folder(out)):
            if row["state"] == "complete":
                values = {name: float(row[name]) for name in SPACE}
                assert float(row["value"]) == pytest.approx(score(values), abs=1e-5), moment
    assert moment > 50, moment


def test_a_worker_killed_while_it_makes_a_batch_leaves_trials_that_do_not_count(
    formula, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(batches, "write_points", lambda batch: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            search(tmp_path)
    assert {state for state, _ in journal(tmp_path).values()} == {"RUNNING"}
    assert search(tmp_path).finished == 4
    assert [row["state"] for row in table(folder(tmp_path))] == ["fail"] * 2 + ["complete"] * 4
    assert list(points_of(folder(tmp_path))) == ["batch-000", "batch-001"]


def test_what_others_are_at_is_left_to_them(formula, tmp_path):
    """All trials but one are in the hands of a live worker."""
    with pytest.raises(Killed):
        formula_killed_in(tmp_path)
    with runs.claim(folder(tmp_path) / "batch-000"):
        outcome = search(tmp_path, trials=3)
        assert outcome.finished == 1 and set(points_of(folder(tmp_path))) == {"batch-000", "batch-001"}
    assert search(tmp_path, trials=3).finished == 3


def test_a_batch_that_ends_while_it_is_looked_at_is_not_taken_over(formula, tmp_path, monkeypatch):
    with pytest.raises(Killed):
        formula_killed_in(tmp_path)
    other = trials.Study(folder(tmp_path), about(SPACE), None, warmup_steps=32)

    def claimed(directory):
        for number in points_of(folder(tmp_path))[directory.name]:
            other.complete(number, 1.0)
        return False

    monkeypatch.setattr(runs, "is_claimed", claimed)
    trained = list(formula)
    assert search(tmp_path, trials=2).finished == 2 and formula == trained
    with runs.claim(folder(tmp_path) / "batch-000"):
        pass


def formula_killed_in(out):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune.View, "evaluated", lambda *_: (_ for _ in ()).throw(Killed))
        search(out)


def test_points_below_the_median_are_pruned_and_a_batch_without_any_left_ends(formula, tmp_path):
    """Six good trials, then two that are worse from the start."""
    space = SPACE | {"num_epochs": [2], "policy_learning_rate": [1e-2, 1e-3]}
    search(tmp_path, trials=6, parallel_trials=6, space=space)
    study = trials.Study(folder(tmp_path), about(space), None, warmup_steps=32)
    worse, other = study.draw(2, space, ["num_epochs"], lambda values: None)
    batch = trials.Batch(folder(tmp_path) / "batch-001", [worse, other])
    told = batches.TrialReporter(study, batch, tune.View("", 8, quiet=True))
    assert not told.watch(16, [-9.0, -9.0]), "pruned before the warm-up was over"
    assert not told.watch(32, [-9.0, 9.0]) and study.running() == {other.number}
    assert not told.watch(64, [9.0, math.nan]), "nothing is said of what is not finite"
    assert told.watch(96, [9.0, -9.0]) is False, "the best evaluation of a trial counts"
    assert [(trial.state, trial.value) for trial in study.records()][-2] == ("pruned", -9.0)
    study.prune(other.number, "enough")
    assert told.watch(128, [9.0, 9.0])


def test_a_batch_whose_points_are_all_pruned_is_trained_no_further(formula, tmp_path, monkeypatch):
    monkeypatch.setattr(trials.Study, "report", lambda self, number, steps, value: steps >= 64)
    assert search(tmp_path, trials=2).finished == 2
    assert formula == [("batch-000", 0), ("batch-000", 1)]
    assert {row["state"] for row in table(folder(tmp_path))} == {"pruned"}
    assert not (folder(tmp_path) / "recipe.toml").exists()


def test_a_point_with_a_halted_seed_counts_as_pruned_and_never_as_best(formula, tmp_path, monkeypatch):
    train = loop.train_loop

    def halting(*args, **kwargs):
        result = train(*args, **kwargs)
        return replace(result, summary=result.summary | {"halted_seeds": [1001]})

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_loop", halting)
        outcome = search(tmp_path, trials=2)
    first, second = table(folder(tmp_path))
    assert (first["state"], second["state"]) == ("pruned", "complete") and "finite" in first["note"]
    assert outcome.best.number == 1 and outcome.finished == 2

    def halted(*_, **__):
        raise loop.Halted("every seed has halted")

    monkeypatch.setattr(loop, "train_loop", halted)
    assert search(tmp_path, trials=4).finished == 4
    assert [row["state"] for row in table(folder(tmp_path))][2:] == ["pruned"] * 2


def test_a_batch_the_device_cannot_run_is_given_up_in_one_line(formula, tmp_path, monkeypatch):
    def exhausted(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of\nmemory")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_loop", exhausted)
        said = refusal(tmp_path)
    assert "RESOURCE_EXHAUSTED: out of memory" in said and "--parallel-trials" in said
    assert search(tmp_path).finished == 4
    assert [row["state"] for row in table(folder(tmp_path))] == ["fail"] * 2 + ["complete"] * 4


def test_values_that_do_not_go_together_are_replaced_and_do_not_count(formula, tmp_path):
    space = SPACE | {"num_minibatches": [3, 5, 4, 7]}
    assert search(tmp_path, space=space, trials=6).finished == 6
    rows = table(folder(tmp_path))
    assert {row["num_minibatches"] for row in rows if row["state"] == "complete"} == {"4"}
    refused = [row for row in rows if row["state"] == "fail"]
    assert 0 < len(refused) < 30 and all(
        "num_minibatches" in row["note"] or "twice" in row["note"] for row in refused
    )
    said = refusal(tmp_path / "none", space=SPACE | {"num_minibatches": [3]})
    assert "none of 200 draws" in said and "num_minibatches=3" in said


def test_a_batch_is_no_larger_than_there_are_different_points(formula, tmp_path):
    space = {"num_epochs": [1, 2, 3], "clip_eps": [0.1, 0.2]}
    assert search(tmp_path, space=space, parallel_trials=5, trials=3).finished == 3
    assert [len(numbers) for numbers in points_of(folder(tmp_path)).values()] == [2, 1]
    assert search(tmp_path / "b", space={"num_epochs": [1, 2]}, parallel_trials=5, trials=2).finished == 2
    assert [len(numbers) for numbers in points_of(folder(tmp_path / "b")).values()] == [1, 1]


def test_any_storage_of_optuna_will_do(formula, tmp_path):
    url = f"sqlite:///{tmp_path}/book.db"
    assert search(tmp_path, storage=url).finished == 4
    assert search(tmp_path, storage=url, trials=6).finished == 6
    assert not (folder(tmp_path) / "journal.log").exists()
    assert "another storage" in refusal(tmp_path)
    said = refusal(tmp_path / "other", storage="nothing://me:secret@at/all")
    assert "cannot use storage nothing://at/all" in said and "secret" not in said


def test_a_line_for_every_finished_trial(formula, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "View", lambda title, trials, quiet: View(title, trials, quiet=False))
    monkeypatch.setattr(tune, "silence_output", lambda quiet: contextlib.nullcontext())
    search(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].startswith("[1/4] trial 0: return ") and "clip_eps=0." in lines[0]
    assert lines[3].startswith("[4/4]") and "best" in lines[3]


def test_the_live_table_shows_trials_best_and_batch(formula, tmp_path):
    rich = pytest.importorskip("rich.console")
    outcome = search(tmp_path)
    study = trials.Study(folder(tmp_path), about(SPACE), None, warmup_steps=32)
    view = View("delayed", 6, quiet=True)
    console = rich.Console(width=120, record=True, file=io.StringIO())
    console.print(view.table())
    view.begin(study.batches()[0], 128, study.records())
    view.evaluated(64, [1.5, math.nan])
    console.print(view.table())
    text = console.export_text()
    assert "4 of 6 trials finished" in text and f"best {outcome.best.value:.4g}" in text
    assert "50% of 128 steps" in text and "policy_learning_rate" in text and "complete" in text


SHAPING = {
    "sable": {"num_epochs", "num_minibatches", "embed_dim", "num_heads", "num_blocks", "decay_scaling"}
}
SHAPING["mat"] = SHAPING["sable"] - {"decay_scaling"}
SHAPING["ippo"] = SHAPING["mappo"] = {"num_epochs", "num_minibatches"}
SHAPING["masac"] = {"num_updates_per_rollout", "batch_size", "policy_delay", "autotune_temperature"}
SHAPING["hasac"] = SHAPING["masac"] | {"shuffle_agents"}
SHAPING["qmix"] = {"batch_size", "replay_size", "mixer_size"}


@pytest.mark.parametrize("system", SYSTEM_CONFIGS)
def test_what_is_free_is_what_reaches_the_learner_as_numbers_and_changes_no_program(system):
    config = sable.configure("probe/continuous" if "sac" in system else TASK, system=system)
    env, space = sable.make_env(config.run.task), tune.dimensions(system, config.system)
    made = batches.Worker(tp.cast(tp.Any, None), config, env, space, Path(), 4)
    assert set(made.shaping) == SHAPING[system]
    assert set(made.free) == space.keys() - SHAPING[system]

    def program(which: int) -> str:
        numbers = made._with_values({name: space[name][which] for name in made.free})
        learner = systems.make(system, env.spec, numbers)
        functions = make_program(env, learner, Config(config.run, numbers))

        def updated(seed, hyper):
            return functions.run_updates(functions.start(seed, hyper).run, jnp.int32(1))

        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(updated)(jnp.uint32(0), learner.hyper)))

    assert program(0) == program(-1)


def test_a_field_without_effect_or_given_by_hand_is_not_searched():
    for memory in (True, False):
        config = sable.configure(TASK, system="ippo", memory=memory).system
        assert ("recurrent_chunk" in tune.dimensions("ippo", config)) == memory
    space = tune.dimensions("ippo", sable.configure(TASK, system="ippo").system, ["clip_eps"])
    assert "clip_eps" not in space and "num_epochs" in space


def test_mistakes_are_one_line_and_nothing_is_written(tmp_path, monkeypatch):
    assert "trials=0" in refusal(tmp_path, trials=0) and "parallel_trials='4'" in refusal(
        tmp_path, parallel_trials="4"
    )
    assert "did you mean 'clip_eps'" in refusal(tmp_path, space={"clip_ep": [1]})
    assert "expected a list" in refusal(tmp_path, space={"clip_eps": 0.1})
    assert "expected a list" in refusal(tmp_path, space={"policy_layers": [[8], [16]]})
    assert "total_steps is a setting of the run" in refusal(tmp_path, space={"total_steps": [1, 2]})
    assert "nothing is left" in refusal(tmp_path, space={"num_envs": [4, 8]})
    assert "unknown system 'ipo'" in refusal(tmp_path, system="ipo")
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "sable-marl[tune]" in refusal(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_system_of_ones_own_is_tuned_if_it_says_where_to_search(tmp_path, monkeypatch):
    code = "from sable.config import ActorCriticConfig as Config\nfrom sable.systems.ippo import make\n"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quiet_one.py").write_text(code)
    (tmp_path / "open_one.py").write_text(code + "SEARCH_SPACE = {'clip_eps': [0.1, 0.2]}")
    configs = {name: sable.configure(TASK, system=name).system for name in ("quiet_one", "open_one")}
    no_space = refusal_of(lambda: tune.dimensions("quiet_one", configs["quiet_one"]))
    assert "'quiet_one' has no search space" in no_space
    assert tune.dimensions("open_one", configs["open_one"]) == {"clip_eps": [0.1, 0.2]}


def refusal_of(call) -> str:
    with pytest.raises(SableError) as error:
        call()
    return str(error.value)


def about(space):
    config = sable.configure(TASK, system="ippo", seeds=(1000, 1001), **BUDGET | GIVEN)
    data = settings.to_dict(config)
    return {name: data[name] for name in ("meaning", "run", "config")} | {"space": space}
