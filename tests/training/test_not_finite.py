"""A number that is not finite, wherever it comes from, reaches neither parameters nor checkpoints: its seed
halts, the others go on, and the host says so."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable import systems
from sable.config.schema import Config, RunConfig, field_names, system_config
from sable.envs.suites.probes import PROBES
from sable.errors import SableError
from sable.ops import trees as tree
from sable.training import checkpoint, loop
from sable.training import update as programs
from sable.trust import Trust

SEEDS = tuple(range(6))
SIZES = {"num_envs": 4, "rollout_length": 4, "num_epochs": 1, "num_minibatches": 1, "embed_dim": 8}
SIZES |= {"policy_layers": (8,), "critic_layers": (8,), "q_layers": (8,), "batch_size": 8, "replay_size": 64}
SIZES |= {"warmup_steps": 16, "num_updates_per_rollout": 2, "num_heads": 1, "recurrent_size": 8}
SIZES |= {"sequence_length": 4, "warmup_sequences": 2}
BAD = (jnp.nan, jnp.inf, -jnp.inf)


def slow(*names: str) -> list:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(autouse=True)
def reinforce(tmp_path, monkeypatch):
    """The small system of docs/guides/own-system.md, in a module of that name: it compiles in no time."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / "own-system.md").read_text()
    (tmp_path / "reinforce.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("reinforce", None)


def parts(system: str, env):
    cls = system_config(system, Trust(system=system))
    config = cls(**{name: value for name, value in SIZES.items() if name in field_names(cls)})
    run = RunConfig(task="probe/x", system=system, seeds=SEEDS, total_steps=12 * 16, num_evaluations=3)
    run = replace(run, evaluation_episodes=2, absolute_episodes=2)
    return env, systems.make(system, env.spec, config), Config(run, config)


def treacherous(system: str):
    """An environment that in one episode of fifty pays what is not finite, and in another one shows it."""
    continuous = "sac" in system
    base = PROBES["continuous" if continuous else "bandit"]
    agents, size = base.spec.num_agents, base.spec.view_size

    def poison(secret, first):
        bad = jnp.select([secret == first + i for i in range(3)], jnp.array(BAD), 0.0)
        return jnp.where(jnp.isfinite(bad), 0.0, bad)

    return replace(
        base,
        draw=lambda key: jax.random.randint(key, (), 0, 300),
        view=lambda secret, time: jnp.ones((agents, size)) + poison(secret, 0),
        pay=lambda secret, time, actions: jnp.ones(agents) + poison(secret, 3),
    )


@pytest.mark.parametrize(
    "system", ["reinforce", *slow("masac", "sable", "mat", "ippo", "mappo", "hasac", "qmix")]
)
def test_what_an_environment_gives_that_is_not_finite_halts_its_seed_alone(system):
    made = parts(system, treacherous(system))
    program = programs.make_program(*made)
    run = jax.jit(programs.map_seeds(program.start))(jnp.array(SEEDS, jnp.uint32)).run
    unit = jax.jit(jax.vmap(program.run_updates, (0, None)))
    causes, frozen = programs.halt_causes(run), {}
    for _ in range(60):
        run = unit(run, jnp.int32(1))
        assert tree.all_finite(run), "of replay too"
        for seed in np.flatnonzero(run.halted >= 0):
            mine = jax.tree.map(lambda x, seed=seed: x[seed], replace(run.learner, replay=()))
            kept = frozen.setdefault(int(seed), mine)
            same = jax.tree.map(np.array_equal, jax.tree.leaves(mine), jax.tree.leaves(kept))
            assert all(same), "a seed that has halted stays as it was"
            assert causes[run.halted[seed]] == "a reward or an observation"
    assert len(frozen) >= 3
    assert len(set(run.num_updates.tolist())) >= 3, "they halted together, which shows less"


POISONS = {
    # For the loss, the gradient that is applied, and the parameters, by fields of the hyper-parameters.
    "reinforce": ({"discount": jnp.nan}, {"learning_rate": jnp.nan}, {"learning_rate": jnp.inf}),
    "ppo": ({"entropy_weight": jnp.inf}, {"max_grad_norm": jnp.nan}, {"learning_rate": jnp.inf}),
    "sac": ({"discount": jnp.nan}, {"max_grad_norm": jnp.nan}, {"policy_learning_rate": jnp.inf}),
    "qmix": ({"discount": jnp.inf}, {"max_grad_norm": jnp.nan}, {"q_learning_rate": jnp.nan}),
}


@pytest.mark.parametrize("system", ["reinforce", *slow("sable", "ippo", "masac", "hasac", "qmix")])
def test_a_loss_gradient_or_parameter_that_is_not_finite_halts_its_seed_alone(system, tmp_path, capsys):
    """Of six seeds three have a number in their hyper-parameters that spoils the loss, the gradient or the
    parameters."""
    made = parts(system, PROBES["continuous" if "sac" in system else "bandit"])
    poisons = POISONS[system if system in POISONS else "sac" if "sac" in system else "ppo"]
    lanes = []
    for lane in range(len(SEEDS)):
        fields = poisons[lane] if lane < len(poisons) else {}
        hyper = made[1].hyper
        for name, value in fields.items():
            spoilt = jax.tree.map(lambda leaf, value=value: jnp.full_like(leaf, value), getattr(hyper, name))
            hyper = replace(hyper, **{name: spoilt})
        lanes.append(hyper)
    hypers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes)
    result = loop.train_loop(*made, tmp_path, hypers=hypers)
    said = capsys.readouterr().out
    assert result.summary["halted_seeds"] == [0, 1, 2]
    for seed in SEEDS:
        assert (f"seed {seed} halted: " in said) == (seed < 3), said
    saved = checkpoint.read(tmp_path, "")
    for name, array in saved.items():
        if ".hyper." not in name and np.issubdtype(array.dtype, np.inexact):
            assert np.isfinite(array).all(), name
    assert (saved["run.num_updates"][3:] == 12).all() and (saved["run.num_updates"][:3] < 12).all()
    assert np.isfinite(result.summary["absolute_return"]).all()


@pytest.mark.parametrize("system", ["reinforce", *slow("sable", "hasac")])
def test_the_best_parameters_survive_a_metric_that_is_not_finite(system):
    base = PROBES["continuous" if "sac" in system else "bandit"]
    for bad in BAD:
        env = replace(base, pay=lambda secret, time, actions, bad=bad: jnp.full(base.spec.num_agents, bad))
        program = programs.make_program(*parts(system, env))
        state = jax.jit(programs.map_seeds(program.start))(jnp.array(SEEDS, jnp.uint32))
        marked = jax.tree.map(lambda x: x + 1, state.best.params)
        good = replace(state, best=replace(state.best, params=marked, score=jnp.full(len(SEEDS), -3.0)))
        after, metrics = jax.jit(jax.vmap(program.evaluate_and_keep_best))(good)
        assert not np.isfinite(metrics["evaluation/return"]).any()
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, after.best, good.best)))


class Stuck(type(PROBES["delayed"])):
    """In the last step of every episode one agent may do nothing."""

    def _observe(self, state):
        seen = super()._observe(state)
        return replace(seen, action_mask=seen.action_mask.at[1].set(seen.action_mask[1] & (state.time != 3)))


def test_a_mask_without_a_legal_action_ends_the_run_with_the_step_named(tmp_path):
    """Episodes of four steps and rollouts of three: it is in the first step of the second."""
    env = Stuck(**vars(PROBES["delayed"]))
    _, system, config = parts("reinforce", env)
    config = replace(config, system=replace(config.system, rollout_length=3))
    words = "probe/x: an agent has no legal action at time step 0 of update 2, seed 0"
    with pytest.raises(SableError, match=words):
        loop.train_loop(env, system, config, tmp_path, quiet=True)
