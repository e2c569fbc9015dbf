"""What a run will take: counted against the programs themselves, and refused in one line where it is too
much."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler

import sable
from sable.cli import main as cli
from sable.errors import SableError
from sable.runs import fit as sizes
from sable.runs.dry_run import DryRun
from sable.runs.estimate import temporary_bytes
from sable.training import device_memory as memory

TINY = {
    "system": "ippo",
    "num_envs": 16,
    "rollout_length": 8,
    "num_epochs": 1,
    "num_minibatches": 2,
    "policy_layers": (8,),
    "critic_layers": (8,),
    "total_steps": 256,
    "num_evaluations": 1,
    "evaluation_episodes": 2,
    "absolute_episodes": 2,
}
TASK = "null/2ag"


def dry_run(**fields) -> DryRun:
    return DryRun(sable.make_env(TASK), sable.configure(TASK, **TINY | fields))


@pytest.fixture(scope="module")
def progress():
    """What was known, what came next and how many programs were compiled by then, each time it was told."""
    return []


@pytest.fixture(scope="module")
def plan(progress):
    with pytest.MonkeyPatch.context() as patch:
        compilations = count_compilations(patch)
        return sable.plan(TASK, **TINY, progress=lambda *now: progress.append((*now, len(compilations))))


def count_compilations(patch) -> list[str]:
    """A list that grows by every program with a loop that XLA is given: any of a run has one, those that make
    a constant array have none."""
    found, real = [], compiler.compile_or_get_cached

    def compile(backend, computation, *rest, **named):
        if "stablehlo.while" in str(computation):
            found.append(str(computation.operation.attributes["sym_name"]))
        return real(backend, computation, *rest, **named)

    patch.setattr(compiler, "compile_or_get_cached", compile)
    return found


@pytest.fixture
def device_with(monkeypatch):
    """A function that makes this machine one of so many bytes."""

    def give(num_bytes: int) -> None:
        monkeypatch.setattr(memory, "capacity", lambda: memory.Capacity(num_bytes, num_bytes))

    return give


def test_parameters_and_updates_are_those_of_the_run(plan):
    config = sable.configure(TASK, **TINY)
    state = dry_run().start()
    assert plan.parameters == sum(leaf[0].size for leaf in jax.tree.leaves(state.run.learner.params))
    assert (plan.updates, plan.steps_per_update) == (2, config.system.num_envs * config.system.rollout_length)
    assert (plan.num_seeds, plan.num_envs, plan.task) == (len(config.run.seeds), 16, TASK)


def test_the_first_answer_comes_before_anything_is_compiled(plan, progress):
    first, _, compilations = progress[0]
    assert compilations == 0 and progress[-1][2] > 0
    assert not first.measured and plan.measured and first.total_seconds is None
    same = ("parameters", "updates", "steps_per_update", "num_seeds", "num_envs", "available_bytes")
    assert all(getattr(first, name) == getattr(plan, name) for name in same)
    assert first.fits and sum(first.memory.values()) == first.needed_bytes
    exact = {"parameters", "optimiser", "environments", "memories", "replay"}
    assert {part: first.memory[part] for part in exact} == {part: plan.memory[part] for part in exact}
    steps = [step for _, step, _ in progress]
    assert len(set(steps)) == len(steps) >= 4 and steps[0] == "compiling an update of 16 environments"


def test_without_measuring_nothing_is_compiled(monkeypatch):
    compilations = count_compilations(monkeypatch)
    found = sable.plan(TASK, **TINY, measure=False)
    assert compilations == [] and not found.measured
    assert found.largest_num_envs > 0 and found.largest_num_seeds > 0


@pytest.mark.parametrize("most", [0, 1])
def test_a_first_answer_says_what_does_not_fit(most, device_with):
    needed = sable.plan(TASK, **TINY, measure=False).needed_bytes
    device_with(int(needed * (0.5 if most == 0 else 1.2)))
    found = sable.plan(TASK, **TINY, measure=False)
    assert found.fits == bool(most) and found.largest_num_seeds == most
    assert (found.largest_num_envs >= 16) == found.fits


def test_the_first_answer_is_printed_at_once(plan, monkeypatch, capsys):
    """On stdout, before the first step of the work; each step has a line on stderr."""
    seen = []

    def fake(task, *, measure, progress, **fields):
        progress(dataclasses.replace(plan, measured=False, total_seconds=None), "compiling")
        seen.append(capsys.readouterr())
        return plan

    monkeypatch.setattr(sable, "plan", fake)
    assert cli.main(["plan", TASK, "--system", "ippo"]) == 0
    assert seen[0].out.startswith("from shapes alone:\nparameters") and "about" in seen[0].out
    assert seen[0].err == "compiling ...\n"
    assert capsys.readouterr().out.startswith("\nmeasured:\nparameters")


def test_temporaries_are_those_alive_at_once():
    """By hand, of 4 kB arrays: two at once in a chain; three and the first product of a fan."""
    kilo = jax.ShapeDtypeStruct((1000,), "float32")

    def chain(x):
        a = jnp.sin(x)
        b = jnp.cos(a)  # a dies here
        return jnp.tan(b) + x

    def fan(x):
        a, b, c = jnp.sin(x), jnp.cos(x), jnp.tan(x)
        return a * b * c

    def loop(x):
        return jax.lax.fori_loop(0, 9, lambda _, x: chain(x), x)

    found = [temporary_bytes(jax.make_jaxpr(form)(kilo).jaxpr) for form in (chain, fan, loop)]
    assert found[:2] == [8000, 16000] and found[0] <= found[2] <= found[0] + 4000


def test_memory_by_part_adds_up_to_what_is_needed(plan):
    assert sum(plan.memory.values()) == plan.needed_bytes
    assert {"parameters", "optimiser", "environments", "memories", "replay", "rollout"} < plan.memory.keys()
    assert all(num_bytes >= 0 for num_bytes in plan.memory.values())
    state = dry_run().start()
    assert plan.memory["environments"] == memory.tree_bytes(
        (state.run.rollout_state.env_state, state.run.rollout_state.timestep)
    )


def test_times_add_up(plan):
    assert plan.fits and plan.probed_num_envs == 16
    assert plan.steps_per_second == pytest.approx(128 / plan.update_seconds)
    assert plan.total_seconds > plan.compile_seconds + 2 * plan.update_seconds


@pytest.mark.slow
def test_the_largest_run_that_fits_needs_what_was_predicted():
    """The line through two small programs, held against the count of one several times as large."""
    room, small = 10 * dry_run().needed, dry_run(num_envs=2)
    most = sizes.max_envs(dry_run(), small, room)
    assert most is not None and most % 2 == 0
    assert dry_run(num_envs=most).needed == pytest.approx(room, rel=0.1)
    seeds = sizes.max_seeds(dry_run(), room)
    assert dry_run(num_seeds=seeds).needed == pytest.approx(room, rel=0.15)  # it is a whole number


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("num_envs", 16), ("num_seeds", 2)])
def test_what_cannot_fit_is_refused_in_one_line_with_what_does(name, value, device_with, tmp_path, capsys):
    device_with(int(dry_run(**{name: value}).needed * 0.8))
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in TINY.items() if not isinstance(v, tuple)]
    flags += ["--policy-layers=8", "--critic-layers=8", f"--{name.replace('_', '-')}={value}"]
    assert cli.main(["train", TASK, *flags, "--out", str(tmp_path), "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("sable: null/2ag: this run needs ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
    found = re.search(rf"; {name}=(\d+) would fit", err)
    assert found and value / 2 <= int(found[1]) < value
    assert sable.train(TASK, **TINY | {name: int(found[1])}, out=tmp_path, quiet=True).summary
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_what_its_state_alone_refuses_is_told_what_fits_too(device_with, tmp_path):
    """All that learning needs, many times the state, is not counted then."""
    much = {"num_envs": 512, "rollout_length": 64, "total_steps": 2**16}
    device_with(int(memory.tree_bytes(dry_run(**much).state) * 0.9))
    with pytest.raises(SableError) as refused:
        sable.train(TASK, **TINY | much, out=tmp_path)
    found = re.search(r"; num_envs=(\d+) would fit", str(refused.value))
    assert found, refused.value
    most = int(found[1])
    assert dry_run(**much | {"num_envs": most}).needed <= sizes.memory_limit()
    assert dry_run(**much | {"num_envs": 2 * most + 2}).needed > sizes.memory_limit()


def test_a_run_that_fits_at_no_size_is_refused_too(device_with, tmp_path):
    device_with(1000)
    with pytest.raises(SableError, match=r"needs .* and the device has 1 kB; no number of environments fits"):
        sable.train(TASK, **TINY, out=tmp_path)


def test_training_begins_with_its_plan_in_one_line(tmp_path, capsys):
    sable.train(TASK, **TINY, out=tmp_path)
    line = capsys.readouterr().out.splitlines()[1]
    assert re.fullmatch(r"[\d,]+ parameters, [\d.]+ [kMG]B of [\d.]+ GB, 2 updates of 128 steps", line)


def test_the_command_prints_a_table_or_json(plan, monkeypatch, capsys):
    given = {}

    def fake(task, *, measure, progress, **fields):
        given.update(task=task, **fields)
        return plan

    monkeypatch.setattr(sable, "plan", fake)
    assert cli.main(["plan", TASK, "--system", "ippo", "--num-envs", "16"]) == 0
    assert given == {"task": TASK, "system": "ippo", "num_envs": 16}
    rows = dict(
        re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines()
    )
    assert rows["parameters"] and rows["fits"] == "yes" and rows["largest num_envs"]
    assert cli.main(["plan", TASK, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == dataclasses.asdict(plan)


@pytest.mark.slow
def test_throughput_runs_on_a_tiny_task():
    flags = "null/2ag --systems ippo --num-envs 2 --rollout-length 4 --num-epochs 1 --num-minibatches 1"
    flags += " --policy-layers 8 --critic-layers 8 --evaluation-episodes 2 --repeats 2 --kernels 3"
    file = Path(__file__).parents[2] / "benchmarks" / "throughput.py"
    done = subprocess.run([sys.executable, file, *flags.split()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    row, _, head, cells, _, _, *kernels = done.stdout.splitlines()
    assert {"steps_per_second", "compile_seconds", "temporary_bytes", "acting_cpu_seconds"} < json.loads(
        row
    ).keys()
    assert head.split()[:3] == ["task", "system", "seeds"] and cells.split()[:3] == ["null/2ag", "ippo", "1"]
    assert [line.split()[2] for line in kernels] == list(json.loads(row)["kernels"]) and len(kernels) == 3
