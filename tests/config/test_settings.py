"""Settings: what wins over what, what is refused and how, and that nothing is lost through JSON."""

import dataclasses
import json
import typing as tp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sable
from sable.config import checks
from sable.config import resolve as settings
from sable.config.resolve import from_dict, resolve, to_dict, to_json
from sable.config.schema import SYSTEM_CONFIGS, Config, RunConfig, SableConfig
from sable.errors import SableError

RECIPES = [(system, table) for system in SYSTEM_CONFIGS for table in settings.recipes(system)]


def refusal(run_fields: dict, system_fields: dict) -> str:
    with pytest.raises(SableError) as error:
        resolve(run_fields, system_fields)
    return str(error.value)


@pytest.mark.parametrize(("system", "table"), RECIPES)
def test_every_recipe_merges(system, table):
    task = table if "/" in table else f"{table}/any"
    config = resolve({"task": task, "system": system}, {})
    assert (
        config.run.task == task
        and settings.recipe(system, task).keys() >= settings.recipes(system)[table].keys()
    )
    for name, value in settings.recipe(system, task).items():
        assert getattr(config.system, name) == value


@pytest.mark.parametrize("system", SYSTEM_CONFIGS)
def test_every_value_the_paper_searched_is_accepted_alone(system):
    space = settings.search_space(system)
    assert len(space) >= 5
    for name, values in space.items():
        for value in values:
            config = resolve({"system": system}, {"num_envs": 120, name: value}).system
            assert getattr(config, name) == value


def test_families_share_a_search_space_but_for_what_one_member_lacks():
    assert settings.search_space("ippo") == settings.search_space("mappo")
    both = settings.search_space("masac"), settings.search_space("hasac")
    assert both[1].keys() - both[0].keys() == {"shuffle_agents"}


def test_later_sources_win(monkeypatch):
    tables = {"lbf": {"clip_eps": 0.3, "num_epochs": 7, "total_steps": 99}, "lbf/a": {"clip_eps": 0.4}}
    monkeypatch.setattr(settings, "recipes", lambda system: tables)
    config = resolve({"task": "lbf/a"}, {"num_epochs": 8})
    assert (config.system.num_epochs, config.system.clip_eps, config.system.gae_lambda) == (
        8,
        0.4,
        SableConfig.gae_lambda,
    )
    assert (config.run.total_steps, resolve({"task": "lbf/a", "total_steps": 5}, {}).run.total_steps) == (
        99,
        5,
    )


@pytest.mark.parametrize("system", SYSTEM_CONFIGS)
def test_quick_settings_are_valid_beside_a_default_task_for_every_system(system):
    run_fields, system_fields = settings.split_fields(settings.quick_fields(system), system)
    run = resolve(run_fields | {"system": system}, system_fields).run
    assert run.task == ("mpe/simple_spread_3ag" if "sac" in system else "lbf/2s-8x8-2p-2f-coop")
    assert run.total_steps < RunConfig.total_steps


def test_quick_settings_of_the_default_system_divide():
    config = resolve(*settings.split_fields(settings.QUICK, "sable"))
    assert config.run.task == RunConfig.task and config.system.num_envs % config.system.num_minibatches == 0


@pytest.mark.parametrize(
    ("run_fields", "system_fields", "words"),
    [
        ({"total_steps": -1}, {}, ["total_steps=-1", "at least 1"]),
        ({"total_steps": 1e6}, {}, ["total_steps=1000000.0", "whole number"]),
        ({"total_steps": True}, {}, ["total_steps=True", "whole number"]),
        ({"seeds": ()}, {}, ["seeds=()", "at least one"]),
        ({"seeds": (1, 1)}, {}, ["seeds=(1, 1)", "none twice"]),
        ({"seeds": (-1,)}, {}, ["seeds=(-1,)", "from 0"]),
        ({"seeds": 3}, {}, ["seeds=3", "whole numbers"]),
        ({"task": "tiny"}, {}, ["task='tiny'", "suite/name"]),
        ({"task": None}, {}, ["task=None", "text"]),
        ({"env_options": ("reward",)}, {}, ["env_options=('reward',)", "name=value"]),
        ({"precision": "low"}, {}, ["precision='low'", "default, high, highest"]),
        ({"system": "sabel"}, {}, ["system 'sabel' is not part of sable", "did you mean 'sable'"]),
        ({"system": ["sable"]}, {}, ["unknown system"]),
        ({"total_step": 1}, {}, ["unknown field 'total_step'", "did you mean 'total_steps'"]),
        ({}, {"lerning_rate": 1}, ["unknown field 'lerning_rate'", "did you mean 'learning_rate'"]),
        ({}, {"num_envs": 6, "num_minibatches": 4}, ["num_envs=6", "num_minibatches=4", "divides"]),
        ({"total_steps": 9}, {"learning_rate_horizon": 8}, ["learning_rate_horizon=8", "total_steps=9"]),
        ({}, {"embed_dim": 10, "num_heads": 4}, ["embed_dim=10", "num_heads=4", "divides"]),
        ({}, {"decay_scaling": 1.1}, ["decay_scaling=1.1", "from 0 to 1"]),
        ({}, {"discount": 0}, ["discount=0", "above 0 and at most 1"]),
        ({}, {"learning_rate": float("nan")}, ["learning_rate=nan", "finite"]),
        ({}, {"learning_rate": True}, ["learning_rate=True", "finite number"]),
        ({}, {"learning_rate": 10**400}, ["finite number"]),
        ({}, {"learning_rate": "fast"}, ["learning_rate='fast'", "finite number"]),
        ({}, {"memory": 1}, ["memory=1", "true or false"]),
        ({}, {"positions": "token", "memory": False}, ["positions='token'", "needs memory"]),
        (
            {},
            {"positions": "token", "decoding": "fused"},
            ["decoding='fused'", "sequential, cached or jacobi"],
        ),
        ({}, {"agent_chunk": 2}, ["agent_chunk=2", "memory=false"]),
        ({}, {"agent_order": "random"}, ["agent_order='random'", "natural, per_rollout, per_epoch"]),
        ({"seeds": range(10**8)}, {}, ["seeds=range(0, 100000000)", "65536 at most"]),
        ({}, {"num_envs": 10**5000}, ["num_envs=a number of thousands of digits", "at most 16777216"]),
        ({"total_steps": 10**15}, {"num_envs": 2, "rollout_length": 1}, ["more updates", "2147483647"]),
        ({"label": "\udcff"}, {}, [r"label='\udcff'", "UTF-8"]),
    ],
)
def test_a_bad_setting_is_refused_in_one_line_that_names_it(run_fields, system_fields, words):
    message = refusal(run_fields, system_fields)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("cls", [RunConfig, *SYSTEM_CONFIGS.values()])
def test_every_number_has_a_range(cls):
    numbers = [field.name for field in dataclasses.fields(cls) if field.type in (int, float)]
    assert not set(numbers) - set(checks._RANGES)


def test_values_arrive_in_their_exact_types():
    config = resolve({"seeds": [np.int64(3), 4]}, {"learning_rate": 1, "clip_eps": np.float32(0.5)})
    assert config.run.seeds == (3, 4) and all(type(seed) is int for seed in config.run.seeds)
    assert type(config.system.learning_rate) is float and type(config.system.clip_eps) is float


@given(
    seeds=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4, unique=True),
    options=st.lists(st.just("reward=mean"), max_size=2),
    learning_rate=st.floats(0, 1e300),
    parts=st.integers(1, 9),
    memory=st.booleans(),
)
def test_configuration_survives_json_exactly(seeds, options, learning_rate, parts, memory):
    before = resolve(
        {"seeds": seeds, "env_options": options},
        {"learning_rate": learning_rate, "num_envs": 4 * parts, "num_minibatches": parts, "memory": memory},
    )
    assert from_dict(json.loads(to_json(before))) == before
    assert from_dict(to_dict(before)) == before


def damaged() -> dict[str, tp.Any]:
    whole = json.loads(to_json(Config(RunConfig(), SableConfig())))
    return {
        "nothing": None,
        "list": [1],
        "foreign": {"model": "x"},
        "no run": {"format": 1, "config": whole["config"]},
        "other format": whole | {"format": 2},
        "missing field": whole | {"run": {k: v for k, v in whole["run"].items() if k != "seeds"}},
        "extra field": whole | {"config": whole["config"] | {"clip_epsilon": 1}},
        "wrong type": whole | {"run": whole["run"] | {"total_steps": "many"}},
        "wrong system": whole | {"run": whole["run"] | {"system": "dqn"}},
        "no system": whole | {"run": {}},
        "bad together": whole | {"config": whole["config"] | {"num_envs": 3}},
    }


def test_a_field_that_came_later_has_its_default_and_an_unknown_one_is_named():
    before = resolve({"seeds": (4,), "task": "probe/recall"}, {"clip_eps": 0.3})
    data = to_dict(before)
    for part, name in (
        ("run", "reset_pool_size"),
        ("run", "devices"),
        ("config", "decoding"),
        ("config", "memory"),
    ):
        data[part] = {key: value for key, value in data[part].items() if key != name}
    assert from_dict(json.loads(json.dumps(data))) == before
    data["config"]["clip_epsilon"] = 0.1
    with pytest.raises(SableError, match=r"unknown field 'clip_epsilon' .*here it is clip_eps"):
        from_dict(data)


def test_advantages_of_a_run_from_before_their_floor_have_none():
    data = json.loads(to_json(Config(RunConfig(), SableConfig())))
    assert data["config"].pop("advantage_floor") > 0
    assert from_dict(data).system == SableConfig(advantage_floor=0.0)


@pytest.mark.parametrize("case", damaged())
def test_a_damaged_configuration_is_refused(case):
    with pytest.raises(SableError):
        from_dict(damaged()[case])


def test_an_unknown_field_is_refused_with_the_nearest_of_run_and_system():
    with pytest.raises(SableError, match="'num_env'; did you mean 'num_envs'"):
        settings.split_fields({"num_env": 1}, "sable")


RECIPE = """
[lbf]
clip_eps = 0.3
num_epochs = 7
["lbf/2s-8x8-2p-2f-coop"]
clip_eps = 0.4
total_steps = 99
["rware/tiny-2ag"]
lerning_rate = 1
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_a_recipe_of_ones_own_wins_over_ours_and_what_is_given_over_it(recipe):
    task = "lbf/2s-8x8-2p-2f-coop"
    config = sable.configure(task, recipe=recipe, num_epochs=8)
    assert (config.system.clip_eps, config.system.num_epochs, config.run.total_steps) == (0.4, 8, 99)
    assert config.system.embed_dim == sable.configure(task).system.embed_dim, "our recipe still says the rest"
    quick = sable.configure(recipe=recipe).run
    assert (quick.total_steps, quick.num_evaluations) == (99, settings.QUICK["num_evaluations"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["cannot be read", "No such file"]),
        ("= 3", ["cannot be read"]),
        ("num_epochs = 3", ["'num_epochs'", '["rware/tiny-2ag"]']),
        (RECIPE, ["'lerning_rate'", "did you mean 'learning_rate'"]),
        ('["rware/tiny-2ag"]\nclip_eps = "x"', ["clip_eps='x'"]),
        (
            '["rware/tiny-4ag"]\nclip_eps = 1',
            ["no table for rware/tiny-2ag", "did you mean 'rware/tiny-4ag'"],
        ),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused_in_one_line_with_its_name(tmp_path, text, words):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SableError) as error:
        sable.configure("rware/tiny-2ag", recipe=path)
    for word in ("mine.toml", *words):
        assert word in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_cannot_come_with_a_run_to_resume(recipe):
    with pytest.raises(SableError, match="recipe cannot be given"):
        sable.train(resume="somewhere", recipe=recipe)
