"""Where a run differs from the paper: every setting is compared."""

import dataclasses

import pytest

from sable.config import protocol
from sable.config import resolve as settings
from sable.config.schema import (
    SYSTEM_CONFIGS,
    ActorCriticConfig,
    QMIXConfig,
    RunConfig,
    SableConfig,
    field_names,
)
from sable.envs import tasks


@pytest.mark.parametrize("system", SYSTEM_CONFIGS)
def test_every_setting_is_fixed_searched_part_of_the_protocol_or_free(system):
    tables, family = protocol._tables(), settings.family(system)
    run_names = [*tables["run"]["code"], *protocol.PROTOCOL, *tables["free"]["run"]]
    assert sorted(run_names) == sorted(field_names(RunConfig))
    fixed = [name for name in tables[family] if name not in ("code", "scaling")]
    names = [*fixed, *tables[family].get("code", {}), *settings.search_space(system)]
    assert len(set(names)) == len(names)
    known = {*names, *tables["free"]["system"]}
    assert set(field_names(SYSTEM_CONFIGS[system])) - known == set()
    names += tables[family].get("scaling", {})
    assert set(names) <= set(field_names(SYSTEM_CONFIGS[system]))


def test_the_default_run_is_by_the_protocol_but_for_its_single_seed():
    assert protocol.protocol_deviations(RunConfig(seeds=tuple(range(10)))) == []
    assert protocol.protocol_deviations(RunConfig()) == ["seeds 0"]
    other = RunConfig(total_steps=1000, env_options=("reward=mean",), seeds=(3, 4))
    assert protocol.protocol_deviations(other) == ["total_steps 1000", "env_options reward=mean", "seeds 3 4"]
    assert protocol.setting_deviations(other, {}) == protocol.setting_deviations(RunConfig(), {}) == []


def paper_sable(**fields) -> SableConfig:
    return SableConfig(**{"num_epochs": 5, "agent_order": "per_epoch", "advantage_floor": 0.0} | fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, []),
        ({"memory": False, "chunk_size": 4, "decoding": "sequential"}, []),
        ({"num_heads": 4, "decay_scaling": 1.0, "entropy_weight": 1.0}, []),
        ({"num_epochs": 4}, ["num_epochs 4 (paper: 2, 5, 10 or 15)"]),
        ({"entropy_weight": 0.003}, ["entropy_weight 0.003 (paper: 0.1, 0.01, 0.001 or 1)"]),
        ({"discount": 0.95}, ["discount 0.95 (paper: 0.99)"]),
        ({"learning_rate_horizon": 20_000_000}, ["learning_rate_horizon 20000000 (the public code: 0)"]),
        ({"compute_dtype": "bfloat16"}, ["compute_dtype bfloat16 (the public code: float32)"]),
        ({"clip_value": False}, ["clip_value off (the public code: on)"]),
        ({"agent_order": "per_rollout"}, ["agent_order per_rollout (paper: per_epoch)"]),
        ({"agent_order": "natural"}, ["agent_order natural (paper: per_epoch)"]),
        ({"advantage_floor": 0.01}, ["advantage_floor 0.01 (the public code: 0)"]),
        ({"num_envs": 64}, ["num_envs 64 (paper: 128)"]),
        ({"positions": "token"}, ["positions token (paper: timestep)"]),
        ({"memory": False, "agent_chunk": 8}, ["agent_chunk 8 (paper: 0)"]),
    ],
)
def test_settings_that_the_paper_did_not_use_are_named(fields, said):
    config = paper_sable(**fields)
    assert protocol.setting_deviations(RunConfig(), vars(config)) == said


@pytest.mark.parametrize("task", ["neom/simple-sine-512ag", "lbf/2s-32x32-32p-16f"])
def test_large_teams_have_chunks_of_agents_in_the_paper(task):
    run, chunks = RunConfig(task=task), paper_sable(memory=False, agent_chunk=32)
    assert protocol.setting_deviations(run, vars(chunks)) == []
    assert protocol.setting_deviations(run, vars(paper_sable())) == [
        "memory on (paper: off)",
        "agent_chunk 0 (paper: 32)",
    ]
    scaling = {name for name in tasks.PAPER if tasks.parse(name).group == "scaling"}
    assert set(protocol._tables()["scaling"]["tasks"]) == scaling | {"neom/"}


def test_other_systems_are_held_to_their_own_tables():
    ippo = vars(ActorCriticConfig(policy_layers=(64, 64), num_epochs=5, advantage_floor=0.0))
    assert set(protocol.setting_deviations(RunConfig(system="ippo"), ippo)) == {
        "num_epochs 5 (paper: 2, 4 or 8)",
        "policy_layers 64 64 (paper: 128 128)",
    }
    assert protocol.setting_deviations(RunConfig(system="qmix"), vars(QMIXConfig())) == []
    qmix = dataclasses.replace(QMIXConfig(), discount=0.9)
    assert protocol.setting_deviations(RunConfig(system="qmix"), vars(qmix)) == [
        "discount 0.9 (the public code: 0.99)"
    ]


def test_a_system_of_ones_own_is_in_no_paper_but_its_run_is_compared():
    run = RunConfig(system="my.module", reset_pool_size=64)
    assert protocol.setting_deviations(run, {"discount": 0.5}) == ["reset_pool_size 64 (the public code: 0)"]
