"""What training means, by number: old runs are read and named as what they are, and trained no further."""

import dataclasses
import json
from pathlib import Path

import pytest

from sable.cli.main import main
from sable.config import meaning
from sable.config import resolve as settings
from sable.config.schema import SYSTEM_CONFIGS, Config, RunConfig, SableConfig
from sable.errors import SableError
from sable.reports import ledger, results_page
from sable.runs import directory as runs
from sable.studies import benchmark, reproduce, trials

RESULTS = Path(__file__).resolve().parents[2] / "results"
POOL, POLICY_DELAY, MAT_NORM, STARTS = meaning.CHANGES
LONG = {"task": "mpe/simple_spread_3ag"}


def test_changes_are_in_order_and_name_whole_commits():
    assert [change.number for change in meaning.CHANGES] == list(range(1, meaning.MEANING + 1))
    assert all(len(change.commit) == 40 for change in meaning.CHANGES)


@pytest.mark.parametrize("system", SYSTEM_CONFIGS)
def test_a_configuration_says_what_it_means_and_no_one_sets_it(system):
    config = settings.resolve({"system": system}, {})
    data = json.loads(settings.to_json(config))
    assert data["meaning"] == config.system.meaning == meaning.MEANING
    assert "meaning" not in data["run"] | data["config"]
    assert settings.from_dict(data) == config
    with pytest.raises(SableError, match="unknown field 'meaning'"):
        settings.resolve({"system": system}, {"meaning": 1})
    data["config"]["meaning"] = 1
    with pytest.raises(SableError, match="unknown field 'meaning'"):
        settings.from_dict(data)


@pytest.mark.parametrize("number", [-1, meaning.MEANING + 1, "1", 1.0, True, None])
def test_a_meaning_that_is_not_known_is_refused(number):
    data = settings.to_dict(Config(RunConfig(), SableConfig())) | {"meaning": number}
    with pytest.raises(SableError, match=r"configuration meaning .* is none of 0 to"):
        settings.from_dict(data)


def test_without_a_number_it_is_1_and_of_the_oldest_published_code_0():
    data = settings.to_dict(Config(RunConfig(**LONG), SableConfig()))
    del data["meaning"]
    assert meaning.number_of(data) == meaning.number_of(data, ["new"]) == 1
    assert meaning.number_of(data, ["new", *meaning.OLDER_SOURCES]) == 0
    # Where nothing that concerns it has changed, it means what it would now.
    assert settings.from_dict(data).system == SableConfig()


def test_only_what_a_change_concerns_is_of_an_older_meaning():
    long = RunConfig(**LONG)
    assert meaning.since(0, long, {}) == [POOL]
    assert meaning.since(0, dataclasses.replace(long, reset_pool_size=128), {}) == []
    assert meaning.since(1, long, {}) == []


@pytest.mark.parametrize("task", ["connector/con-5x5x3a", "lbf/8x8-2p-2f-coop", "probe/recall", "mine:Env"])
def test_where_episodes_are_short_a_pool_of_other_starts_is_another_meaning(task):
    assert meaning.since(3, RunConfig(task=task), {}) == [STARTS]
    assert meaning.since(3, RunConfig(task=task, reset_pool_size=128), {}) == [STARTS]
    assert meaning.since(4, RunConfig(task=task), {}) == []


@pytest.mark.parametrize(
    ("system", "fields", "numbers"),
    [
        ("masac", {"policy_delay": 4}, [2]),
        ("hasac", {"policy_delay": 2}, [2]),
        ("masac", {"policy_delay": 1}, []),
        ("mat", {}, [3]),
        ("mat", {"rms_norm": True}, []),
        *((system, {}, []) for system in ("sable", "ippo", "mappo", "qmix")),
    ],
)
def test_what_has_no_number_is_older_only_where_something_changed_since(system, fields, numbers):
    config = settings.resolve({"system": system, **LONG}, fields)
    data = settings.to_dict(config)
    del data["meaning"]
    found = settings.from_dict(data).system
    assert found.meaning == (1 if numbers else meaning.MEANING)
    assert [change.number for change in meaning.since(found.meaning, config.run, vars(found))] == numbers
    # Written anew, as by an export, it says what it was.
    assert settings.from_dict(settings.to_dict(Config(config.run, found))).system == found


def test_the_five_rows_of_the_small_pool_are_marked_and_their_commit_is_named():
    rows = [row for row in ledger.read(RESULTS) if POOL in ledger.older_meaning(row)]
    assert all(ledger.older_meaning(row) == [POOL, STARTS] for row in rows)
    assert [row["row"] for row in rows if not row.get("superseded")] == [
        "lbf/10x10-3p-3f:sable",
        "lbf/15x15-3p-5f:sable",
        "lbf/2s-10x10-3p-3f:sable",
        "lbf/2s-8x8-2p-2f-coop:sable",
        "lbf/8x8-2p-2f-coop:sable",
    ]
    page = results_page.section(ledger.read(RESULTS))
    (line,) = (line for line in page.split("\n") if f"when {POOL.before}" in line)
    for row in rows:
        assert f"`{row['row']}`†" in line and page.count(f"| `{row['row']}`† |") >= 1
    assert f"commit {POOL.commit[:10]} still means that" in line


def test_rows_of_before_each_episode_had_a_start_are_marked_where_that_mattered():
    for row in ledger.read(RESULTS):
        if row["settings"].get("meaning", 0) < STARTS.number:
            assert (STARTS in ledger.older_meaning(row)) == (row["task"].split("/")[0] != "mpe"), row["row"]


def test_reproducing_a_row_of_an_older_meaning_says_so_and_means_it_as_now(tmp_path):
    row = ledger.require(ledger.read(RESULTS), "lbf/8x8-2p-2f-coop:sable")
    assert reproduce.cell(row, tmp_path, None).config.system.meaning == meaning.MEANING
    said = reproduce.describe_older_meaning(row)
    assert POOL.commit[:10] in said and POOL.before in said and "\n" not in said
    newer = row | {"settings": row["settings"] | {"meaning": meaning.MEANING}}
    assert reproduce.describe_older_meaning(newer) == ""


def begun(out: Path) -> Path:
    """A run of the code of before numbers were."""
    directory = runs.create_pending(out, Config(RunConfig(), SableConfig()), "old")
    config = runs.read_object(directory / "config.json")
    del config["meaning"]
    runs.write_json(directory / "config.json", config)
    runs.write_json(directory / "meta.json", {"source": next(iter(meaning.OLDER_SOURCES))})
    return directory


def test_a_resume_across_meanings_is_refused_in_one_line_that_names_the_commit(tmp_path, capsys):
    directory = begun(tmp_path)
    before = {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    assert main(["train", "--resume", str(directory)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and POOL.before in said and POOL.commit[:10] in said
    assert {path: path.read_bytes() for path in directory.iterdir() if path.is_file()} == before


def test_a_grid_does_not_go_on_across_meanings(tmp_path):
    begun(tmp_path)
    with pytest.raises(SableError, match=f"was begun when {POOL.before}"):
        benchmark.check(benchmark.Cell(tmp_path, "old", Config(RunConfig(), SableConfig())))


def test_a_study_does_not_go_on_across_meanings(tmp_path):
    about = settings.to_dict(Config(RunConfig(**LONG), SableConfig())) | {"space": {}}
    del about["format"]
    name = trials._identify(tmp_path, about)
    assert trials._identify(tmp_path, about) == name
    study = json.loads((tmp_path / trials.STUDY).read_text())
    (tmp_path / trials.STUDY).write_text(json.dumps(study | {"meaning": 0}))
    with pytest.raises(SableError, match=f"was begun when {POOL.before}"):
        trials._identify(tmp_path, about)
    del study["meaning"]  # as those of before numbers were
    (tmp_path / trials.STUDY).write_text(json.dumps(study))
    assert trials._identify(tmp_path, about) == name


def test_an_older_mat_is_loaded_and_acts_with_the_norms_it_had(tmp_path):
    """As an export of before numbers: its heads have no bias in their norms, and are RMSNorm."""
    import jax
    import numpy as np

    from sable import systems, tensors
    from sable.runs import policy
    from sable.training import checkpoint
    from sable.types import EnvSpec

    spec = EnvSpec(num_agents=2, view_size=3, num_actions=4, time_limit=5)
    config = settings.resolve({"system": "mat"}, {"embed_dim": 8})
    system = systems.make("mat", spec, dataclasses.replace(config.system, meaning=1))
    shapes, rng = (
        jax.eval_shape(system.init, jax.random.key(0), system.hyper).params,
        np.random.default_rng(0),
    )
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    older_config = Config(config.run, dataclasses.replace(config.system, meaning=1))
    older = policy.Policy(older_config, spec, params, 0)
    tensors.write(tmp_path / policy.WEIGHTS, jax.device_get(checkpoint.named(older.params)))
    data = settings.to_dict(config)
    del data["meaning"]
    about = {"format": 1, "settings": data, "spec": dataclasses.asdict(spec), "seed": 0}
    about["weights"] = checkpoint.sha256(tmp_path / policy.WEIGHTS)
    runs.write_json(tmp_path / policy.ABOUT, about)
    loaded = policy.load(tmp_path)
    assert loaded.config.system.meaning == 1
    views = np.random.default_rng(0).normal(size=(32, 2, 3)).astype(np.float32)
    for team in (older, loaded):
        team.reset(32)
    np.testing.assert_array_equal(loaded.act(views), older.act(views))
    # The network of today is another, and would not take these weights for its own.
    data["meaning"] = meaning.MEANING
    runs.write_json(tmp_path / policy.ABOUT, about)
    with pytest.raises(SableError):
        policy.load(tmp_path)


def test_the_number_survives_a_change_of_settings():
    config = dataclasses.replace(SableConfig(), meaning=0)
    assert settings.replace_fields(Config(RunConfig(), config), {}, {"num_envs": 64}).system.meaning == 0
