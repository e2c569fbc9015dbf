"""Contract 5: every system solves the probes within its power, and none what needs a memory it lacks."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from sable import systems
from sable.config import (
    ActorCriticConfig,
    HASACConfig,
    MASACConfig,
    MATConfig,
    QMIXConfig,
    RunConfig,
    SableConfig,
    SystemConfig,
)
from sable.envs.probes import PROBES, Probe
from sable.systems import ppo, sable
from sable.training import program as programs

PPO = {"num_envs": 32, "rollout_length": 8, "num_minibatches": 2, "gae_lambda": 0.95, "entropy_weight": 0.003}
CONFIG = SableConfig(**PPO, num_epochs=4, embed_dim=16, learning_rate=2e-3, decay_scaling=1.0)
MAT = MATConfig(**PPO, num_epochs=4, embed_dim=16, learning_rate=2e-3, clip_eps=0.2, max_grad_norm=0.5)
ACTOR_CRITIC = ActorCriticConfig(
    **PPO,
    num_epochs=4,
    policy_layers=(32, 32),
    critic_layers=(32, 32),
    recurrent_size=32,
    policy_learning_rate=3e-3,
    critic_learning_rate=3e-3,
)
SAC = {
    "num_envs": 16,
    "rollout_length": 4,
    "num_updates_per_rollout": 8,
    "batch_size": 64,
    "warmup_steps": 256,
    "policy_delay": 2,
    "policy_learning_rate": 2e-3,
    "q_learning_rate": 2e-3,
    "policy_layers": (32, 32),
    "q_layers": (64, 64),
    "initial_temperature": 0.01,
    "replay_size": 10_000,
    "polyak": 0.02,
}
QMIX = QMIXConfig(
    num_envs=16,
    rollout_length=4,
    num_updates_per_rollout=2,
    batch_size=16,
    replay_size=32,
    sequence_length=8,
    warmup_sequences=16,
    q_learning_rate=1e-3,
    epsilon_decay=1e-3,
    polyak=0.05,
    q_layers=(16, 16),
    recurrent_size=16,
    mixer_size=8,
)
RUN = RunConfig(evaluation_episodes=256)
SEEDS, MANY_SEEDS = (jnp.arange(number, dtype=jnp.uint32) for number in (2, 6))


def learned_return(
    probe: str | Probe, system: str, config: SystemConfig, updates: int, seeds: jax.Array = SEEDS
) -> list[float]:
    """The best return each seed reaches in five evaluations, evenly spaced."""
    env = PROBES[probe] if isinstance(probe, str) else probe
    program = programs.make_program(env, systems.make(system, env.spec, config), RUN, config)
    state = jax.jit(programs.one_by_one(program.start))(seeds)
    unit, assess = jax.jit(jax.vmap(program.unit, (0, None))), jax.jit(jax.vmap(program.assess))
    for _ in range(5):
        state, _ = assess(replace(state, run=unit(state.run, jnp.int32(updates // 5))))
    return state.best.score.tolist()


UPDATES = {"recall": 225, "continuous": 150}
SHORTFALL = {"recall": 0.05, "continuous": 0.2}
"""Of the best return; a continuous policy samples while it is measured, and its spread shrinks slowly."""


def case(*values: object, quick: bool = False, gpu: bool = False):
    """A case of a test; in the slow tier unless `quick`, since each compiles for ten seconds or more."""
    marks = [pytest.mark.slow] * (not quick) + [pytest.mark.gpu] * gpu
    return pytest.param(*values, marks=marks, id="-".join(map(str, values)))


KEEN = {"recall"}
"""What Sable shows on this, it would show on the others too."""
ON_GPU = KEEN | {"coordination", "continuous"}


@pytest.mark.parametrize("probe", [case(probe, quick=probe in KEEN, gpu=probe in ON_GPU) for probe in PROBES])
def test_sable_reaches_the_best_return(probe):
    recall = probe == "recall"
    updates, seeds = (150, MANY_SEEDS) if recall else (UPDATES.get(probe, 60), SEEDS)
    reached = learned_return(probe, "sable", CONFIG, updates, seeds)
    best = PROBES[probe].optimal_return
    assert max(reached) <= best + 1e-6, reached
    if recall:
        # One seed in fifteen or so stays at 7/8, where in one case of four one agent errs; rounding decides
        # which. So of six one may.
        assert sum(reached) / len(reached) > best - 0.035 and min(reached) > best - 0.15, reached
    else:
        assert min(reached) > best - SHORTFALL.get(probe, 0.1), reached


BLIND = {("ippo", "coordination")}
"""The cases without memory for `make test`; on a GPU also what Sable then cannot recall."""


@pytest.mark.parametrize(
    ("system", "probe"),
    [
        case(
            system,
            probe,
            quick=(system, probe) in BLIND,
            gpu=(system, probe) in {*BLIND, ("sable", "recall")},
        )
        for system in ("sable", "mat", "ippo", "mappo")
        for probe in PROBES
    ],
)
def test_without_memory_a_system_reaches_what_can_be_known_without_and_no_more(system, probe):
    config = {"sable": replace(CONFIG, memory=False), "mat": MAT}.get(system, ACTOR_CRITIC)
    reached = learned_return(probe, system, config, UPDATES.get(probe, 60))
    best = PROBES[probe].memoryless_return
    assert best - SHORTFALL.get(probe, 0.1) < min(reached) <= max(reached) < best + 0.1, reached


@pytest.mark.slow
@pytest.mark.parametrize("system", [case("ippo"), case("mappo", gpu=True)])
def test_a_gru_remembers_what_must_be_recalled(system):
    config = replace(ACTOR_CRITIC, memory=True, recurrent_chunk=4)
    reached = learned_return("recall", system, config, UPDATES["recall"])
    assert min(reached) > PROBES["recall"].optimal_return - 0.1, reached


@pytest.mark.parametrize("system", [case("masac"), case("hasac", gpu=True)])
def test_soft_actor_critics_solve_by_replay(system):
    config = {"masac": MASACConfig, "hasac": HASACConfig}[system](**SAC)
    reached = learned_return("continuous", system, config, 60)
    assert min(reached) > PROBES["continuous"].optimal_return - SHORTFALL["continuous"], reached


def told_what_it_did() -> Probe:
    """The delayed probe with the first action shown in later views. A one-step Q-learner cannot do without:
    the state after the first action looks the same whatever it was."""
    probe = PROBES["delayed"]

    @dataclass(frozen=True, kw_only=True)
    class Told(Probe):
        def _observe(self, state):
            seen = super()._observe(state)
            did = state.actions[0][:, None].astype(jnp.float32) * (state.time > 0)
            return replace(seen, view=jnp.concatenate([seen.view, did], axis=-1))

    fields = {name: getattr(probe, name) for name in probe.__dataclass_fields__}
    return Told(**fields | {"spec": replace(probe.spec, view_size=probe.spec.view_size + 1)})


@pytest.mark.parametrize(
    ("probe", "updates"),
    [
        case("recall", 240, gpu=True),
        case("masked", 120),
        case("coordination", 240),
        case("bandit", 120),
        case("observation", 120),
        case("told", 120),
    ],
)
def test_qmix_solves_by_replay(probe, updates):
    reached = learned_return(told_what_it_did() if probe == "told" else probe, "qmix", QMIX, updates)
    assert min(reached) > 0.9, reached


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["coordination", "recall"])
def test_the_papers_order_of_agents_learns_too(probe):
    config = replace(CONFIG, agent_order="per_epoch")
    reached = learned_return(probe, "sable", config, UPDATES.get(probe, 100))
    assert min(reached) > PROBES[probe].optimal_return - 0.1, reached


@pytest.mark.slow
@pytest.mark.parametrize(("bootstrap", "value"), [(True, 2.0), (False, 1.0)])
def test_the_value_of_a_time_limit_is_the_future_it_cuts_off_or_nothing(bootstrap, value):
    """One step that pays 1 and runs out of time, discount 1/2: 1 + 1/2 + 1/4 + ... = 2 with bootstrapping."""
    env = replace(PROBES["bandit"], pay=lambda secret, time, actions: jnp.ones(2), times_out=True)
    config = replace(CONFIG, bootstrap_time_limits=bootstrap, discount=0.5)
    policy = sable.make_policy(env.spec, config)
    program = programs.make_program(env, ppo.make(policy, config, env.spec), RUN, config)
    state = jax.jit(programs.one_by_one(program.start))(SEEDS).run
    state = jax.jit(jax.vmap(program.unit, (0, None)))(state, jnp.int32(80))
    judge = jax.jit(
        jax.vmap(
            lambda s: policy.value(
                s.learner.params,
                s.situation.timestep.observation,
                policy.initial_memory(config.num_envs),
                s.learner.order,
            )
        )
    )
    assert jnp.abs(judge(state) - value).max() < 0.15
