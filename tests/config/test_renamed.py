"""Old names are read in files, refused from users with the new one; others' words are hints."""

import dataclasses
import typing as tp

import pytest

import sable
from sable.cli.main import main
from sable.config import RunConfig, SableConfig, renamed
from sable.config.schema import SYSTEM_CONFIGS, field_names, field_types
from sable.errors import SableError

EVERY = {name for cls in (RunConfig, *SYSTEM_CONFIGS.values()) for name in field_names(cls)}


def test_the_table_leads_to_settings_that_there_are():
    assert set(renamed.FIELDS.values()) | renamed.ABSENT.keys() <= EVERY
    assert not renamed.FIELDS.keys() & EVERY
    assert {name for names in renamed.HINTS.values() for name in names} <= EVERY
    assert all(name == name.lower() for name in renamed.HINTS)
    types = {name: kind for cls in SYSTEM_CONFIGS.values() for name, kind in field_types(cls).items()}
    for name, values in renamed.VALUES.items():
        for old, new in values.items():
            assert (old in tp.get_args(types[name])) != (new in tp.get_args(types[name]))


def test_files_are_read_under_the_names_of_now():
    run = renamed.current({"pool_size": 3, "options": ["a=b"], "task": "x/y"}, field_types(RunConfig))
    assert run == {"reset_pool_size": 3, "env_options": ["a=b"], "task": "x/y"}
    with pytest.raises(SableError, match="'pool_size' stands beside 'reset_pool_size'"):
        renamed.current({"pool_size": 3, "reset_pool_size": 3}, field_types(RunConfig))


def test_settings_of_before_a_field_have_what_it_was():
    assert renamed.complete({}, field_types(RunConfig)) == {"devices": 1}
    assert renamed.complete({"advantage_floor": 0.3}, field_types(SableConfig)) == {"advantage_floor": 0.3}
    assert renamed.complete({}, field_types(SableConfig)) == {"advantage_floor": 0.0}


def test_values_are_read_by_their_new_names():
    @dataclasses.dataclass
    class Now:
        decoding: tp.Literal["auto", "sequential", "fused"] = "auto"

    @dataclasses.dataclass
    class Own:
        decoding: tp.Literal["scan", "kernel"] = "scan"
        compute: int = 0

    assert renamed.current({"decoding": "scan"}, field_types(Now)) == {"decoding": "sequential"}
    assert renamed.current({"decoding": "auto"}, field_types(Now)) == {"decoding": "auto"}
    mine = {"decoding": "scan", "compute": 3}
    assert renamed.current(mine, field_types(Own)) == mine, "a system of the user's own keeps its names"
    assert renamed.current({"decoding": ["scan", "auto"]}, {"decoding": None})["decoding"][0] == "sequential"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sable compute=bfloat16", "sable compute-dtype=bfloat16"),
        ("sable decoding=kernel chunk-size=8", "sable decoding=fused chunk-size=8"),
        ("sable no memory", "sable no memory"),
        ("my label", "my label"),
        ("", ""),
    ],
)
def test_labels_and_folders_are_spelled_anew(old, new):
    assert renamed.label(old) == renamed.label(new) == new
    assert renamed.folder(old.replace(" ", "+")) == new.replace(" ", "+")


def test_flags_of_a_command_are_spelled_anew():
    text = "sable train x/y --compute bfloat16 --pool-size 3 --no-memory --options compute=3"
    now = renamed.command(text, EVERY)
    assert now == (
        "sable train x/y --compute-dtype bfloat16 --reset-pool-size 3 --no-memory --env-options compute=3"
    )
    assert renamed.command(now, EVERY) == now


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("run.situation.memory.0.encoder", "run.rollout_state.memory.0.encoder"),
        ("run.situation.timestep.observation.time", "run.rollout_state.timestep.observation.step_count"),
        (
            "run.situation.timestep.final.legal",
            "run.rollout_state.timestep.final_observation.action_mask",
        ),
        ("run.situation.env_state.env.time", "run.rollout_state.env_state.env.time"),
        ("run.tally.policy/kl", "run.metric_sums.policy/kl"),
        ("run.learner.replay.experience.final.time", "run.learner.replay.experience.next_extras.step_count"),
        ("run.learner.params.agent.rows", "run.learner.params.agent.rows"),
        ("best.params.params.agent.rows", "best.params.params.agent.rows"),
    ],
)
def test_a_place_of_a_run_is_read_under_its_new_name(old, new):
    assert renamed.leaf(old) == renamed.leaf(new) == new
    assert renamed.leaves([old], [new]) == {new: old} and renamed.leaves([old], [old]) == {old: old}


def test_arrays_are_read_under_their_new_places(monkeypatch):
    monkeypatch.setattr(renamed, "LEAVES", ((r"^situation\.", "rollout."),))
    saved = ["situation.key", "params.situation.kernel", "best.score"]
    found = renamed.leaves(saved, ["rollout.key", "best.score"])
    assert found == {"rollout.key": saved[0], saved[1]: saved[1], "best.score": saved[2]}
    assert renamed.leaves(saved, saved) == {name: name for name in saved}


OLD = [
    (["train", "--compute", "bfloat16"], "--compute; it is now called --compute-dtype"),
    (["train", "--pool-size", "8"], "--pool-size; it is now called --reset-pool-size"),
    (["train", "--pool_size=8"], "--pool-size; it is now called --reset-pool-size"),
    (["train", "probe/recall", "--options", "a=b"], "--options; it is now called --env-options"),
    (["plan", "probe/recall", "--options", "a=b"], "--options; it is now called --env-options"),
    (["check", "probe/recall", "--options", "a=b"], "--options; it is now called --env-options"),
    (["benchmark", "probe/bandit", "--at-once", "2"], "--at-once; it is now called --jobs"),
    (["benchmark", "probe/bandit", "--on", "ray"], "--on; it is now called --launcher"),
    (["tune", "probe/bandit", "--points", "2"], "--points; it is now called --parallel-trials"),
    (["publish", "run", "--other-protocol"], "--other-protocol; it is now called --allow-deviations"),
    (["benchmark", "probe/bandit", "--systems", "sable:compute=bfloat16"], "it is now called compute_dtype"),
    (["train", "--ent-coef", "0.1"], "--ent-coef; here it is --entropy-weight"),
    (["train", "--n_envs", "8"], "--n-envs; here it is --num-envs"),
    (["train", "--gamma=0.9"], "--gamma; here it is --discount"),
    (["train", "--system", "qmix", "--lr", "1"], "--lr; here it is --q-learning-rate"),
    (
        ["train", "--system", "ippo", "--lr", "1"],
        "--lr; here it is --policy-learning-rate or --critic-learning-rate",
    ),
    (["benchmark", "probe/bandit", "--systems", "sable:ent_coef=1"], "here it is entropy_weight"),
]


@pytest.mark.parametrize(("argv", "words"), OLD, ids=lambda value: str(value)[:40])
def test_an_old_flag_is_answered_with_the_new_one(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sable.configure(compute="bfloat16"), "'compute'; it is now called compute_dtype"),
        (lambda: sable.configure(options=("a=b",)), "'options'; it is now called env_options"),
        (lambda: sable.configure(ent_coef=0.1), "'ent_coef'; here it is entropy_weight"),
        (lambda: sable.configure(UPDATE_EPOCHS=3), "'UPDATE_EPOCHS'; here it is num_epochs"),
        (lambda: sable.grid("probe/bandit", at_once=2), "'at_once'; it is now called jobs"),
        (lambda: sable.benchmark("probe/bandit", on_ray=True), "'on_ray'; it is now called launcher"),
        (lambda: sable.benchmark("probe/bandit", launcher="dask"), "launcher='dask'"),
        (lambda: sable.tune("probe/bandit", points=2), "'points'; it is now called parallel_trials"),
    ],
)
def test_an_old_field_is_answered_with_the_new_one(call, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SableError) as refused:
        call()
    assert words in str(refused.value) and not list(tmp_path.iterdir())


def test_a_recipe_of_old_words_is_read(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('["probe"]\ncompute = "bfloat16"\npool_size = 3\n["probe/recall"]\npool_size = 5\n')
    config = sable.configure("probe/recall", recipe=recipe)
    assert isinstance(config.system, SableConfig)
    assert (config.system.compute_dtype, config.run.reset_pool_size) == ("bfloat16", 5)
    with recipe.open("a") as file:
        file.write("reset_pool_size = 7\n")
    with pytest.raises(SableError, match=r"recipe.toml: field 'pool_size' stands beside"):
        sable.configure("probe/recall", recipe=recipe)
