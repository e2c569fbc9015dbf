"""A trained team is loaded and acts as it did when it was measured; what is damaged is never loaded."""

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from functools import partial
from time import process_time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import sable
from sable import systems, tensors
from sable.cli.main import main
from sable.envs.suites.probes import PROBES
from sable.errors import SableError
from sable.runs import policy
from sable.training import checkpoint
from sable.training.evaluate import evaluate_policy
from sable.types import Observation

SMALL = {"total_steps": 640, "num_evaluations": 2, "evaluation_episodes": 4, "absolute_episodes": 4}
SIZES = {"num_envs": 4, "rollout_length": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out, fields = tmp_path_factory.mktemp("run"), SMALL | SIZES | {"embed_dim": 16, "num_heads": 2}
    # The precision tests run with: an exported file computes with the run's, also on a GPU.
    return sable.train(
        "probe/recall", seeds=(3, 8), out=out, name="r", quiet=True, precision="highest", **fields
    )


def played(team: policy.Policy, views, *, first=None, greedy=False) -> np.ndarray:
    team.reset(batch=views.shape[1], seed=7)
    firsts = np.zeros(views.shape[:2], bool) if first is None else first
    return np.stack([team.act(view, first=f, greedy=greedy) for view, f in zip(views, firsts, strict=True)])


@pytest.fixture(scope="module")
def views():
    return np.random.default_rng(0).normal(size=(5, 3, 2, 4)).astype(np.float32)


def test_the_best_seed_is_loaded_unless_another_is_asked_for(run):
    best = run.summary["seeds"][int(np.argmax(run.summary["absolute_return"]))]
    params = [sable.load(run.directory, seed=seed).params for seed in (None, best, {3: 8, 8: 3}[best])]
    same = [jax.tree.map(np.array_equal, params[0], other) for other in params[1:]]
    assert all(jax.tree.leaves(same[0])) and not all(jax.tree.leaves(same[1]))
    with pytest.raises(SableError, match="has no seed 5; it has 3, 8"):
        sable.load(run.directory, seed=5)


def test_acting_is_what_the_system_does_with_the_best_parameters(run, views):
    team = sable.load(run.directory)
    system = systems.make("sable", team.spec, team.config.system)
    memory, actions = system.initial_memory(3), []
    for time, view in enumerate(views):
        seen = Observation(
            view=jnp.asarray(view),
            action_mask=jnp.ones((3, 2, team.spec.num_actions), bool),
            step_count=jnp.full(3, time),
            state=(),
        )
        decision = system.act(team.params, seen, memory, None)
        memory = decision.memory
        actions.append(decision.action)
    np.testing.assert_array_equal(played(team, views, greedy=True), np.stack(actions))


def test_acting_is_what_the_evaluator_does_given_the_same_noise(run):
    """The evaluator's own loop plays, with the noise a policy of that seed would draw; what it saw the policy
    sees."""
    team, env, episodes, seen = sable.load(run.directory), PROBES["recall"], 5, []
    system = systems.make("sable", team.spec, team.config.system)
    key, noise = jax.random.key(7), []
    for _ in range(env.spec.time_limit):
        key, sample_key = jax.random.split(key)
        noise.append(sample_key)
    noise = jnp.stack(noise)

    def act(params, observation, memory, _):
        decision = system.act(params, observation, memory, noise[observation.step_count[0]])
        shown = observation.view, observation.action_mask, decision.action
        jax.debug.callback(lambda *now: seen.append([np.asarray(x) for x in now]), *shown, ordered=True)
        return decision

    evaluator = jax.jit(
        lambda params: evaluate_policy(env, system._replace(act=act), params, noise[0], episodes)
    )
    jax.block_until_ready(evaluator(team.params))
    jax.effects_barrier()
    assert len(seen) == env.spec.time_limit
    team.reset(batch=episodes, seed=7)
    for view, legal, action in seen:
        np.testing.assert_array_equal(team.act(view, legal), action)


def test_acting_computes_with_the_precision_of_the_run(run, views):
    team = sable.load(run.directory)
    legal = np.ones((3, 2, team.spec.num_actions), bool)
    given = team.params, team.initial_memory(3), views[0], legal, np.zeros(3, bool)
    with jax.default_matmul_precision("default"):
        program = str(jax.make_jaxpr(partial(team.decide, greedy=True))(*given))
    precisions = re.findall(r"precision=(\S*HIGHEST|\S+)", program)
    assert precisions and all("HIGHEST" in precision for precision in precisions)


def test_sampling_depends_on_the_seed_alone_and_greedy_on_nothing(run, views):
    team = sable.load(run.directory)
    many = np.repeat(views, 40, axis=1)
    assert np.array_equal(played(team, many), played(team, many))
    assert not np.array_equal(played(team, many), played(team, many, greedy=True))


def test_a_new_episode_empties_its_part_of_the_memory_and_no_other(run, views):
    team, opens = sable.load(run.directory), np.array([False, True, False])
    memory = team.initial_memory(3)
    for view in views[:2]:
        _, memory = team.step(memory, view, greedy=True)
    (_, mixed), (_, went_on), (_, began) = (
        team.step(before, views[2], first=first, greedy=True)
        for before, first in ((memory, opens), (memory, None), (team.initial_memory(3), None))
    )
    for found, on, new in zip(*(jax.tree.leaves(m.remembered) for m in (mixed, went_on, began)), strict=True):
        np.testing.assert_array_equal(found, np.where(opens[:, None, None, None], new, on))
        assert not np.array_equal(on, new)
    assert mixed.time.tolist() == [3, 1, 3]


def test_an_exported_folder_plays_the_same_without_a_suite(run, views, tmp_path):
    assert main(["export", str(run.directory), "-o", str(tmp_path / "team")]) == 0
    assert {path.name for path in (tmp_path / "team").iterdir()} == {
        "weights.safetensors", "policy.json", "README.md", "curve.png",
    }  # fmt: skip
    np.save(tmp_path / "views.npy", views)
    code = """
import sys
sys.modules |= dict.fromkeys(["jumanji", "jaxmarl", "brax"])  # importing one of them fails
import numpy as np, sable
team = sable.load("team")
team.reset(batch=3, seed=7)
np.save("actions.npy", np.stack([team.act(view) for view in np.load("views.npy")]))
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "actions.npy"), played(sable.load(run.directory), views))


def test_a_damaged_artefact_is_refused_and_named(run, tmp_path):
    folder = sable.export(run.directory, tmp_path / "team")
    for name in (policy.WEIGHTS, policy.ABOUT):
        whole = (folder / name).read_bytes()
        for position in np.linspace(0, len(whole) - 1, 40).astype(int):
            damaged = bytearray(whole)
            damaged[position] ^= 16
            (folder / name).write_bytes(damaged)
            try:
                team = sable.load(folder)
            except SableError as error:
                assert str(folder / name) in str(error)
            else:  # white space
                assert name == policy.ABOUT and team.params is not None
        (folder / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SableError):
            sable.load(folder)
        (folder / name).write_bytes(whole)


@pytest.fixture(scope="module")
def team(run, tmp_path_factory):
    """An exported folder, to be copied and changed."""
    return sable.export(run.directory, tmp_path_factory.mktemp("export") / "team")


def rewritten(team, tmp_path, arrays=None, config=None, spec=None):
    """The export with these changes, and every sum as it then has to be: what no sum can find."""
    folder = tmp_path / "changed"
    shutil.copytree(team, folder)
    if arrays is not None:
        tensors.write(folder / policy.WEIGHTS, arrays)
    about = json.loads((folder / policy.ABOUT).read_text())
    about["settings"]["config"] |= config or {}
    about["spec"] |= spec or {}
    about["weights"] = hashlib.sha256((folder / policy.WEIGHTS).read_bytes()).hexdigest()
    about["sum"] = policy._sum({name: value for name, value in about.items() if name != "sum"})
    (folder / policy.ABOUT).write_text(json.dumps(about))
    return folder


def refusal_of(folder, capsys) -> str:
    """The one line with which the folder is refused, within seconds and without much memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = process_time()
    assert main(["watch", str(folder), "-o", str(folder / "film")]) == 2
    assert process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 2000 and not (folder / "film").exists()
    return said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda arrays, name: arrays.pop(name), "holds nothing, and its configuration wants float32"),
        (lambda arrays, name: arrays.update(more=arrays[name]), "'more' holds float32"),
        (lambda arrays, name: arrays.update({".".join("n" * 5000): arrays[name]}), "n.n.n"),
        (lambda arrays, name: arrays.update({f"{name}.": arrays.pop(name)}), "holds nothing"),
        (lambda arrays, name: arrays.update({name: arrays[name][None]}), "wants float32"),
        (lambda arrays, name: arrays.update({name: arrays[name].astype("f8")}), "holds float64"),
        (lambda arrays, name: arrays.update({name: arrays[name].astype(ml_dtypes.bfloat16)}), "bfloat16"),
        (lambda arrays, name: arrays[name].fill(np.nan), "holds a number that is not finite"),
        (lambda arrays, name: arrays[name].fill(-np.inf), "holds a number that is not finite"),
    ],
)
def test_weights_that_do_not_fit_their_configuration_are_refused(team, tmp_path, capsys, change, words):
    """Names, shapes, types and finite numbers, where every sum is right."""
    arrays = {name: array.copy() for name, array in tensors.read(team / policy.WEIGHTS).items()}
    name = next(name for name, array in arrays.items() if array.ndim == 2)
    change(arrays, name)
    said = refusal_of(rewritten(team, tmp_path, arrays), capsys)
    assert policy.WEIGHTS in said and words in said


@pytest.mark.parametrize(
    ("config", "spec", "words"),
    [
        ({}, {"num_agents": 10**9}, "num_agents=1000000000: expected a whole number of at least 1 and at"),
        ({}, {"num_agents": 65536}, "agent"),
        ({}, {"view_size": 2**24}, "wants float32[16777218]"),
        ({}, {"num_actions": 0}, "one of num_actions and action_size must be 0"),
        ({}, {"num_actions": 2**24}, "16777217, 16]"),
        ({"embed_dim": 10**9}, {}, "embed_dim=1000000000"),
        ({"embed_dim": 65536}, {}, "65536]"),
        ({"num_blocks": 3}, {}, "holds nothing"),
    ],
)
def test_sizes_that_are_not_those_of_the_weights_are_refused_unallocated(
    team, tmp_path, capsys, config, spec, words
):
    folder = rewritten(team, tmp_path, config=config, spec=spec)
    assert words in refusal_of(folder, capsys)


@pytest.mark.parametrize("kind", ["fifo", "endless", "folder", "sparse", "link to nothing"])
def test_weights_that_are_no_file_of_their_size_are_refused(team, tmp_path, capsys, kind):
    folder = rewritten(team, tmp_path)
    weights = folder / policy.WEIGHTS
    weights.unlink()
    if kind == "fifo":
        os.mkfifo(weights)
    elif kind == "folder":
        weights.mkdir()
    elif kind == "sparse":
        with weights.open("wb") as file:
            file.truncate(1 << 40)
    else:
        weights.symlink_to("/dev/zero" if kind == "endless" else "nowhere")
    assert f"{weights} cannot be read: " in refusal_of(folder, capsys)


def test_a_checkpoint_that_does_not_fit_its_configuration_is_refused(run, tmp_path, capsys):
    """As with an export: a run's best parameters, had somebody saved others."""
    shutil.copytree(run.directory, tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            policy.checkpoint, "read", lambda *_: {"best.score": np.zeros(2), "best.params.x": np.zeros(2)}
        )
        assert "holds nothing, and its configuration wants" in refusal_of(tmp_path / "run", capsys)


def test_what_a_killed_export_left_is_taken_over(run, team, tmp_path):
    folder = tmp_path / "team"
    folder.mkdir()
    (folder / ".weights.safetensors.123.tmp").write_bytes(b"half")
    sable.export(run.directory, folder)
    (folder / policy.ABOUT).unlink()
    (folder / ".policy.json.123.tmp").write_bytes(b"half")
    sable.export(run.directory, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in team.iterdir())
    (folder / policy.ABOUT).unlink()
    (folder / "mine.txt").write_text("keep")
    with pytest.raises(SableError, match="already holds something"):
        sable.export(run.directory, folder)


def test_mistakes_are_one_line(run, tmp_path):
    team = sable.load(run.directory)
    with pytest.raises(SableError, match="call reset"):
        team.act(np.zeros((1, 2, 4)))
    team.reset(batch=2)
    with pytest.raises(SableError, match=r"views has shape \[1, 2, 4\]; expected \[2, 2, 4\]"):
        team.act(np.zeros((1, 2, 4)))
    with pytest.raises(SableError, match="not a run"):
        sable.load(tmp_path)
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(SableError, match="already holds something"):
        sable.export(run.directory, tmp_path)


def test_arrays_survive_and_their_file_is_safetensors(tmp_path):
    arrays = {
        "a.b": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
        "flag": np.array([True, False]),
        "none": np.zeros((0, 4), np.int32),
    }
    tensors.write(tmp_path / "x.safetensors", arrays)
    found = tensors.read(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    content = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header["a.b"] == {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]} and length % 8 == 0


def test_safetensors_reads_what_we_write_and_we_read_what_it_writes(run, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = sable.export(run.directory, tmp_path / "team")
    theirs, ours = load_file(folder / policy.WEIGHTS), tensors.read(folder / policy.WEIGHTS)
    assert theirs.keys() == ours.keys() and len(ours) > 10
    rng = np.random.default_rng(0)
    kinds = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?")
    many = {kind: rng.integers(0, 2, (3, 5)).astype(kind) for kind in kinds} | {
        "none": np.zeros((0, 2), "f4")
    }
    save_file(many, tmp_path / "theirs.safetensors")
    tensors.write(tmp_path / "ours.safetensors", many)
    for found, expected in (
        (theirs, ours),
        (tensors.read(tmp_path / "theirs.safetensors"), many),
        (load_file(tmp_path / "ours.safetensors"), many),
    ):
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes(), name
    half = {"x": jnp.arange(7, dtype=jnp.bfloat16)}
    tensors.write(tmp_path / "half.safetensors", {name: np.asarray(x) for name, x in half.items()})
    assert np.array_equal(tensors.read(tmp_path / "half.safetensors")["x"], half["x"])


@pytest.fixture
def old(run, tmp_path):
    """The run as a version wrote it that did not know some fields, and no sums of such files, yet."""
    directory = tmp_path / "old"
    shutil.copytree(run.directory, directory)
    (directory / "sums.json").unlink()
    for file in (directory / checkpoint.FOLDER).glob(f"*/{checkpoint.MANIFEST}"):
        manifest = json.loads(file.read_text())
        del manifest["records"], manifest["sum"]
        file.write_text(json.dumps(manifest | {"sum": checkpoint._sum(manifest)}))
    config = json.loads((directory / "config.json").read_text())
    for part, name in (("run", "label"), ("run", "devices"), ("config", "decoding")):
        del config[part][name]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_run_from_before_a_field_existed_is_loaded_and_reported(run, old, tmp_path, capsys):
    before, after = sable.load(run.directory), sable.load(old)
    same = jax.tree.map(np.array_equal, before.params, after.params)
    assert all(jax.tree.leaves(same)) and after.config == before.config
    assert not any("left out" in note for note in sable.report(old, out=tmp_path / "report").notes)
    config = json.loads((old / "config.json").read_text())
    config["run"]["flavour"] = "sweet"
    (old / "config.json").write_text(json.dumps(config))
    for command in (["evaluate"], ["train", "--resume"], ["export", "-o", str(tmp_path / "team")]):
        assert main([*command, str(old)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "unknown field 'flavour'" in said


@pytest.mark.slow
def test_a_run_from_before_a_field_existed_is_evaluated_and_resumed(run, old):
    assert sable.evaluate(old, episodes=2) == sable.evaluate(run.directory, episodes=2)
    assert sable.train(resume=old, quiet=True).summary["absolute_return"] == run.summary["absolute_return"]


@pytest.mark.slow
@pytest.mark.parametrize("system", ["mat", "ippo", "mappo", "qmix", "masac", "hasac"])
def test_every_system_can_be_loaded(system, tmp_path):
    task = "probe/continuous" if system in ("masac", "hasac") else "probe/recall"
    result = sable.train(task, system=system, out=tmp_path, quiet=True, **SMALL, **SIZES)
    team = sable.load(sable.export(result.directory, tmp_path / "team"))
    team.reset(batch=2)
    for greedy in (False, True):
        assert team.act(np.zeros((2, 2, team.spec.view_size)), greedy=greedy).shape[:2] == (2, 2)


STEPS, BATCH = 6, 3

ALONE = """
import sys
sys.modules |= dict.fromkeys(["sable", "flax", "optax", "orbax"])  # importing one of them fails
import json, re
import numpy as np
given = np.load("given.npz")
code = re.search(r"```python\\n(.*?)```", open("team/README.md").read(), re.DOTALL)[1]  # as it tells the user
code = code.replace("interface.json", "team/interface.json").replace("greedy.onnx", "team/greedy.onnx")
code = code.replace('"sampled.stablehlo"', f'"team/{sys.argv[1]}"')
opening, step = code.split("actions, ", 1)
exec(opening.replace("batch, seed = 16, 0", "batch, seed = 3, 7").replace(", 16", ", 3"))
if sys.argv[1] == "greedy.stablehlo":
    del memory["key"]
chosen = []
for views, legal, first in zip(given["views"], given["legal"], given["first"]):
    exec("actions, " + step)
    chosen.append(np.asarray(actions))
np.save("actions.npy", np.stack(chosen))
"""


def trained(system: str, out):
    task = "probe/continuous" if system in ("masac", "hasac") else "probe/recall"
    return sable.train(task, system=system, out=out, quiet=True, **SMALL, **SIZES).directory


def assert_parity(run, place, format: str, file: str) -> None:
    """What a process without sable chooses is what `policy.act` chooses."""
    team, rng = sable.load(run), np.random.default_rng(0)
    spec, lead = team.spec, (STEPS, BATCH, team.spec.num_agents)
    legal = rng.random((*lead, spec.num_actions or 1)) < 0.7
    legal[..., 0] = True
    given = {"views": rng.normal(size=(*lead, spec.view_size)).astype(np.float32), "legal": legal}
    given["first"] = np.arange(STEPS)[:, None] == [0, 2, 4]
    np.savez(place / "given.npz", **given)
    if not (place / "team").exists():  # elsewhere: the checks of shapes in tests know no symbolic batch
        export = [sys.executable, "-m", "sable", "export", str(run), "-o", "team", "--format", format]
        subprocess.run(export, cwd=place, check=True)
    subprocess.run([sys.executable, "-c", ALONE, file], cwd=place, check=True)
    team.reset(batch=BATCH, seed=7)
    greedy = file.startswith("greedy")
    expected = [team.act(v, x, f, greedy=greedy) for v, x, f in zip(*given.values(), strict=True)]
    found = np.load(place / "actions.npy")
    if spec.discrete:
        np.testing.assert_array_equal(found, np.stack(expected))
    else:
        np.testing.assert_allclose(found, np.stack(expected), atol=1e-5)


@pytest.mark.slow
@pytest.mark.gpu
def test_stablehlo_runs_with_jax_alone_and_acts_alike(run, tmp_path):
    assert_parity(run.directory, tmp_path, "stablehlo", "sampled.stablehlo")
    about = json.loads((tmp_path / "team" / "interface.json").read_text())
    assert about["platforms"] == ["cpu", "cuda"] and about["inputs"]["views"]["shape"] == ["batch", 2, 4]
    assert {path.name for path in (tmp_path / "team").iterdir()} == {
        "sampled.stablehlo", "greedy.stablehlo", "interface.json", "README.md",
    }  # fmt: skip
    assert_parity(run.directory, tmp_path, "stablehlo", "greedy.stablehlo")


def test_formats_are_checked_and_nothing_is_overwritten(run, tmp_path, capsys):
    assert main(["export", str(run.directory), "-o", str(tmp_path / "x"), "--format", "stablehol"]) == 2
    assert "did you mean 'stablehlo'?" in capsys.readouterr().err and not (tmp_path / "x").exists()
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(SableError, match="already holds something"):
        sable.export(run.directory, tmp_path, format="stablehlo")


@pytest.mark.slow
@pytest.mark.parametrize("system", ["mat", "ippo", "mappo", "qmix", "masac", "hasac"])
def test_every_system_runs_as_stablehlo(system, tmp_path):
    assert_parity(trained(system, tmp_path), tmp_path, "stablehlo", "sampled.stablehlo")


@pytest.mark.slow
@pytest.mark.parametrize("system", ["sable", "mat", "ippo", "mappo", "qmix", "masac"])
def test_onnx_runs_in_an_onnx_runtime_and_acts_alike(system, tmp_path):
    pytest.importorskip("jax2onnx")
    pytest.importorskip("onnxruntime")
    assert_parity(trained(system, tmp_path), tmp_path, "onnx", "greedy.onnx")


@pytest.mark.slow
def test_what_cannot_be_converted_is_one_line(tmp_path):
    pytest.importorskip("jax2onnx")
    export = [sys.executable, "-m", "sable", "export", "--format", "onnx", "-o", "team"]
    done = subprocess.run(
        [*export, str(trained("hasac", tmp_path))], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and "cannot convert hasac: " in done.stderr
    assert "--format stablehlo would work" in done.stderr.splitlines()[-1]
