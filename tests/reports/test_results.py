"""Many runs read back: what counts, what does not and why; and the same through marl-eval's JSON."""

import json
from pathlib import Path

import numpy as np
import pytest

from sable.config.schema import ActorCriticConfig, Config, MATConfig, RunConfig, SableConfig, SystemConfig
from sable.errors import SableError
from sable.reports import looks, marl_eval, series, stats, variants
from sable.reports import read as results
from sable.runs import directory as runs

TASK = "lbf/2s-8x8-2p-2f-coop"


def make_run(
    out: Path,
    name: str,
    returns: dict[int, list[float | None]],
    absolute: list[float | None],
    config: SystemConfig = SableConfig(),  # noqa: B008
    **fields,
) -> Path:
    """A run as training leaves it, evaluated every 100 steps; not finished where `absolute` is empty."""
    steps = 100 * max(map(len, returns.values()))
    run = RunConfig(task=TASK, seeds=tuple(returns), total_steps=steps, **fields)
    directory = runs.create(out, Config(run, config), name)
    rows = [
        {"seed": seed, "env_steps": 100 * (k + 1), "wall_seconds": k + 0.5, "evaluation/return": value}
        for seed, values in returns.items()
        for k, value in enumerate(values)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if absolute:
        runs.finish(directory, {"absolute_return": absolute, "halted_seeds": []})
    return directory


def test_finished_runs_below_a_folder_are_read_seed_by_seed(tmp_path):
    make_run(tmp_path, "a", {0: [0.0, 1.0], 1: [0.5, 0.75]}, [1.0, 0.8])
    make_run(tmp_path, "b", {0: [0.0, 0.5]}, [0.5], ActorCriticConfig(memory=True), system="ippo")
    found, notes, _ = results.read([tmp_path])
    assert notes == []
    assert [(one.system, one.seed, one.absolute) for one in found] == [
        ("ippo memory", "0", 0.5),
        ("sable", "0", 1.0),
        ("sable", "1", 0.8),
    ]
    assert found[1].steps.tolist() == [100, 200] and found[1].seconds.tolist() == [0.5, 1.5]
    final = series.scores(found, "final")
    assert {s: {t: x.tolist() for t, x in tasks.items()} for s, tasks in final.items()} == {
        "ippo memory": {TASK: [0.5]},
        "sable": {TASK: [1.0, 0.75]},
    }
    assert stats.estimate(series.scores(found)["sable"], stats.mean).value == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("system", "config", "name"),
    [
        ("sable", SableConfig(), "sable"),
        ("sable", SableConfig(memory=False), "sable no memory"),
        ("mat", MATConfig(rms_norm=True, swiglu=True), "mat rms_norm swiglu"),
        ("ippo", ActorCriticConfig(memory=True, num_epochs=9), "ippo memory"),
        ("module", SableConfig(), "module memory"),  # whose defaults only its own code knows
    ],
)
def test_a_variant_is_another_system(system, config, name):
    assert results.variant(system, vars(config)) == name


def test_what_does_not_count_is_said_and_never_averaged(tmp_path):
    make_run(tmp_path, "good", {0: [0.0, 1.0]}, [1.0])
    make_run(tmp_path, "going", {1: [0.1]}, [])
    make_run(tmp_path, "odd", {2: [0.1, None], 3: [0.1, 0.2], 4: [], 5: [0.1, 0.3]}, [0.5, None, 0.5, 0.4])
    runs.finish(make_run(tmp_path, "few", {6: [0.1], 7: [0.2]}, []), {"absolute_return": [0.1]})
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"format"')
    found, notes, _ = results.read([tmp_path])
    assert sorted(one.seed for one in found) == ["0", "5"]
    assert len(notes) == 6 and not any("\n" in note for note in notes)
    expected = [
        ("going", "not finished, at 100 of 100 steps", "--resume"),
        ("odd", "seed 2 of sable on lbf", "return at step 200 is not a finite number"),
        ("odd", "seed 3", "absolute metric is missing"),
        ("odd", "seed 4", "no evaluations"),
        ("few", "left out", "no absolute_return for each of its 2 seeds"),
        ("torn", "left out", "cannot be read"),
    ]
    for words in expected:
        assert any(all(word in note for word in words) for note in notes), (words, notes)


def test_a_seed_that_is_there_twice_counts_once_the_longer_run_of_it(tmp_path):
    make_run(tmp_path, "long", {0: [0.0, 1.0]}, [1.0])
    make_run(tmp_path, "short", {0: [0.3]}, [0.3])
    found, notes, _ = results.read([tmp_path])
    assert [one.absolute for one in found] == [1.0]
    assert len(notes) == 1 and "twice" in notes[0] and notes[0].endswith("long counts")


def test_runs_of_different_lengths_are_pointed_out_and_compared_over_what_they_share(tmp_path):
    make_run(tmp_path, "a", {0: [0.0, 1.0, 2.0, 3.0]}, [1.0])
    make_run(tmp_path, "b", {1: [0.0, 4.0]}, [1.0])
    found, notes, _ = results.read([tmp_path])
    assert notes == [f"{TASK}: runs of 200 and of 400 steps stand side by side"]
    axes, drawn = series.curves(found, points=3)
    assert axes[TASK].tolist() == [100, 150, 200]
    assert drawn["sable"][TASK].tolist() == [[0.0, 0.5, 1.0], [0.0, 2.0, 4.0]]


def test_a_halted_seed_counts_as_it_stood_and_is_named(tmp_path):
    directory = make_run(tmp_path, "a", {0: [0.0, 1.0]}, [1.0])
    runs.finish(directory, {"absolute_return": [1.0], "halted_seeds": [0]})
    found, notes, _ = results.read([directory])
    assert len(found) == 1 and len(notes) == 1 and "seed 0 halted" in notes[0]


@pytest.mark.parametrize("place", ["missing", "empty"])
def test_a_place_without_runs_is_refused(tmp_path, place):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SableError, match=f"no (runs in|file or folder) .*{place}"):
        results.read([tmp_path / place])


def test_runs_survive_marl_evals_json(tmp_path):
    directory = make_run(tmp_path, "a", {0: [0.0, 1.0], 7: [0.5, 0.75]}, [1.0, 0.8])
    results.export(directory, runs.read_summary(directory))
    own, again = results.read([directory]), results.read([directory / "marl_eval.json"])
    assert own.notes == again.notes == []
    for one, other in zip(own.series, again.series, strict=True):
        assert (one.task, one.system, one.seed, one.absolute) == (
            other.task,
            other.system,
            other.seed,
            other.absolute,
        )
        for name in ("steps", "returns", "seconds"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_other_libraries_files_are_read(tmp_path):
    """Steps out of order, several episodes an evaluation, another name for the return and for the
    suite, a run without a return."""
    blocks = {
        "step_1": {"step_count": 20, "elapsed_time": 2.0, "mean_episode_return": [1.0, 3.0]},
        "step_0": {"step_count": 10, "elapsed_time": 1.0, "mean_episode_return": [0.0, 1.0]},
        "absolute_metrics": {"mean_episode_return": [2.0, 4.0]},
    }
    path = tmp_path / "theirs.json"
    seeds = {"seed_42": blocks, "seed_43": {}}
    path.write_text(json.dumps({"RobotWarehouse": {"tiny-4ag": {"rec_mappo": seeds}}}))
    found, notes, _ = results.read([path])
    assert len(notes) == 1 and "seed 43" in notes[0] and "no evaluations" in notes[0]
    (one,) = found
    assert (one.task, one.system, one.seed) == ("rware/tiny-4ag", "mappo memory (mava)", "42")
    assert (one.steps.tolist(), one.returns.tolist(), one.absolute) == ([10, 20], [0.5, 2.0], 3.0)


def test_systems_of_mava_are_known_and_no_runs_of_ours(tmp_path):
    blocks = {"step_0": {"step_count": 10, "return": [1.0]}, "absolute_metrics": {"return": [2.0]}}
    names = {"rec_sable": "sable (mava)", "ff_sable": "sable no memory (mava)", "ff_ippo": "ippo (mava)"}
    names |= {
        "rec_qmix": "qmix (mava)",
        "mat": "mat (mava)",
        "ff_hasac": "hasac (mava)",
        "rec_iql": "rec_iql",
    }
    path, ours = tmp_path / "theirs.json", tmp_path / "ours.json"
    seeds = {"seed_0": blocks, "seed_1": blocks}
    path.write_text(json.dumps({"Smax": {"2s3z": dict.fromkeys(names, seeds)}}))
    ours.write_text(json.dumps({"smax": {"2s3z": dict.fromkeys(["sable", "mat"], seeds)}}))
    found = results.read([path, ours])
    assert not found.notes and [one.system for one in found.series[::2]] == [*names.values(), "sable", "mat"]
    systems = variants.group_by_family({one.system for one in found.series})
    assert [system.name for system in systems][:7] == [
        "sable",
        "sable (mava)",
        "sable no memory (mava)",
        "sable (mava) (best)",
        "mat",
        "mat (mava)",
        "ippo (mava)",
    ]
    look = looks.looks(systems)
    assert look["sable"].colour == look["sable (mava)"].colour and look["sable"] != look["sable (mava)"]


@pytest.mark.parametrize("text", ["", "[1]", '{"a": {"b": {"c": {"d": 3}}}}', '{"a": {"b": 1}}'])
def test_a_file_of_another_kind_is_named(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(SableError, match="not a marl-eval JSON file"):
        marl_eval.read(path)
    assert results.read([path]).notes[0].startswith(f"{path}: left out")
