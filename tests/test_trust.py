"""Files never run code: every command is given files that name code, under an audit hook."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

import sable
from sable import systems, tensors
from sable.cli.main import main
from sable.config import resolve as settings
from sable.config.schema import Config, RunConfig
from sable.errors import SableError
from sable.reports import ledger
from sable.runs import directory as runs
from sable.runs import policy, provenance
from sable.studies import benchmark
from sable.studies import worker as batches
from sable.training import checkpoint
from sable.trust import Trust, Untrusted

ROW = "probe/bandit:ippo"
TINY = {"policy_layers": (8,), "critic_layers": (8,), "num_envs": 4, "rollout_length": 4}
CODE = "open({mark!r}, 'w').close()\nfrom sable.config import ActorCriticConfig as Config\n"
CODE += "from sable.systems.ippo import make\nEnv = make\n"

SYSTEMS = ("evil_system", "evil_package.system", "evil_loaded", "evil_on_path", "os", "../evil")
SYSTEMS += ("sable.cli.main",)
TASKS = ("os:system", "pettingzoo:os:system", "evil_system:Env", "evil_package.system:Env", "evil_loaded:Env")
TASKS += ("pettingzoo:evil_package.system:Env", "pettingzoo:evil_on_path:Env")
FOREIGN = [("ippo", task) for task in TASKS] + [(system, "probe/bandit") for system in SYSTEMS]
FOREIGN += [("evil_system", "os:system")]

STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen")


class Trap:
    """An audit hook that notes when code runs which stands in a folder, or which none of our commands needs.
    A hook stays for as long as its process, so this one can be switched off."""

    def __init__(self):
        self.folder, self.events = None, []
        sys.addaudithook(self)

    def __call__(self, event, arguments):
        if self.folder is None:
            return
        if event == "import" and arguments[0].startswith("evil"):
            self.events.append((event, arguments[0]))
        elif event == "exec" and str(self.folder) in getattr(arguments[0], "co_filename", ""):
            self.events.append((event, arguments[0].co_filename))
        elif event in STARTS and arguments[0] != "git":  # which tells what code a run ran
            self.events.append((event, arguments))


class Loaded(types.ModuleType):
    """A module that is imported already, and notes who takes a system or an environment from it."""

    def __getattr__(self, name):
        if name in ("Config", "make", "Env"):
            trap.events.append(("taken", name))
        raise AttributeError(name)


@pytest.fixture(scope="module", autouse=True)
def installed():
    global trap
    trap = Trap()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of files that name code, with that code in it. Beside it, code on Python's path."""
    place = tmp_path_factory.mktemp("place")
    mark = CODE.format(mark=str(place / "ran"))
    (place / "evil_system.py").write_text(mark)
    for name in ("evil_package", "beside"):
        (place / name).mkdir()
    (place / "evil_package" / "__init__.py").write_text(mark)
    (place / "evil_package" / "system.py").write_text(mark)
    (place / "beside" / "evil_on_path.py").write_text(mark)
    config = sable.configure("probe/bandit", system="ippo", **TINY)
    env = sable.make_env("probe/bandit")
    system = systems.make("ippo", env.spec, config.system)
    params = jax.jit(lambda key: system.init(key, system.hyper).params)(jax.random.key(0))
    team = place / "team"
    team.mkdir()
    tensors.write(team / policy.WEIGHTS, jax.device_get(checkpoint.named(params)))
    weights = checkpoint.sha256(team / policy.WEIGHTS)
    about = {"format": policy.FORMAT, "spec": dataclasses.asdict(env.spec), "seed": 0, "weights": weights}
    (team / policy.ABOUT).write_text(json.dumps(about | {"settings": settings.to_dict(config)}))
    directory = runs.create_pending(place, config, "run")
    runs.begin(directory, env.spec)
    finished(directory, config.run).rename(place / "run")
    return place


def finished(directory, run):
    """Make a run directory look like that of a finished run."""
    row = {"env_steps": 16, "wall_seconds": 1.0, "evaluation/return": 0.5}
    rows = [json.dumps({"seed": seed, **row}) + "\n" for seed in run.seeds]
    (directory / "metrics.jsonl").write_text("".join(rows))
    took = {"steps_per_second": 1.0, "peak_memory_bytes": 1, "wall_seconds": 1.0}
    runs.finish(directory, {"absolute_return": [0.5] * len(run.seeds), "halted_seeds": [], **took})
    return directory


def rename(data, system, task):
    """The same configuration, of a foreign system or task. `os.system` would take the option."""
    data["run"] |= {"system": system, "task": task}
    data["run"]["env_options"] = ["command=touch ran"] if task == "os:system" else []
    return data


@pytest.fixture
def armed(place, tmp_path, monkeypatch):
    """The folder as the current one, and the trap set."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path] + [str(place / "beside")])
    monkeypatch.setitem(sys.modules, "evil_loaded", Loaded("evil_loaded"))
    trap.events.clear()
    trap.folder = place
    yield place
    trap.folder = None
    for name in [name for name in sys.modules if name.startswith("evil") and name != "evil_loaded"]:
        del sys.modules[name]
    (place / "ran").unlink(missing_ok=True)


def nothing_ran(place):
    assert trap.events == [] and not (place / "ran").exists()
    assert str(place) not in sys.path and "" not in sys.path
    assert not [name for name in sys.modules if name.startswith("evil") and name != "evil_loaded"]


def config_of(folder, system, task):
    """Let the configuration in `folder` name these."""
    file = folder / "config.json"
    file.write_text(json.dumps(rename(json.loads(file.read_text()), system, task)))
    (folder / "sums.json").unlink(missing_ok=True)  # which finds accidents, and this is none


def about_of(folder, system, task):
    """Let an exported folder name these, with a sum that fits."""
    about = json.loads((folder / policy.ABOUT).read_text())
    about.pop("sum", None)
    rename(about["settings"], system, task)
    (folder / policy.ABOUT).write_text(json.dumps(about | {"sum": policy._sum(about)}))


REFUSED = [
    "train --resume run",
    "train --resume run --env probe/delayed",
    "train --resume run --system mappo",
    "evaluate run",
    "evaluate run --env probe/bandit --system ippo",
    "watch run",
    "watch team",
    "watch team --env probe/bandit --system ippo",
    "reproduce ROW",
    "reproduce ROW --results results",
]
"""What needs the run's environment and system."""
NO_ENV = [
    "export run -o out",
    "export run -o out --format onnx",
    "export run -o out --every-seed",
    "export run -o out --format stablehlo --system ippo",
]
"""What needs its system alone."""


@pytest.mark.parametrize(("system", "task"), FOREIGN)
def test_no_command_runs_code_that_a_file_names(armed, capsys, system, task):
    config_of(armed / "run", system, task)
    about_of(armed / "team", system, task)
    write_ledger(armed / "results", system, task)
    for text in REFUSED + NO_ENV * (system != "ippo"):
        assert main([ROW if word == "ROW" else word for word in text.split()]) == 2, text
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1, text
        watched = ["no checkpoint", "cannot be recorded"] * text.startswith("watch")
        words = ["not part of sable", "as named", "unknown system", *watched]
        assert any(word in err for word in words), (text, err)
        nothing_ran(armed)
    assert not (armed / "out").exists() and not (armed / "reproduced").exists()
    for call in (sable.load, sable.evaluate, sable.watch, lambda run: sable.train(resume=run)):
        for folder in (armed / "run", armed / "team"):
            if system != "ippo" or call is not sable.load:
                with pytest.raises(SableError):
                    call(folder)
    assert (
        sable.load(armed / "team").config.run.task == task if system == "ippo" else True
    )  # which needs none
    nothing_ran(armed)


def write_ledger(folder, system, task):
    row = dict(ledger.read(Path(runs.__file__).parents[3] / "results")[0])
    config = sable.configure("probe/bandit", system="ippo", **TINY)
    row |= {"row": ROW, "settings": rename(settings.to_dict(config), system, task)}
    folder.mkdir(exist_ok=True)
    ledger.write(folder, [row])


SOME = [("ippo", TASKS[0]), ("ippo", TASKS[5]), (SYSTEMS[1], "probe/bandit"), ("evil_system", "os:system")]


def test_reports_listings_and_publishing_read_such_files_and_run_nothing(armed, capsys, monkeypatch):
    monkeypatch.setattr(provenance, "commit_of", lambda source: "c" * 40)
    (armed / "policies").mkdir(exist_ok=True)
    monkeypatch.setattr(
        policy, "collect_policies", lambda directory: armed / "policies"
    )  # of systems of ours
    folders = []
    for k, (system, task) in enumerate(SOME):
        run = RunConfig(task="probe/bandit", system="ippo", total_steps=16, seeds=(0, 1))
        config = sable.configure("probe/bandit", system="ippo", memory=True, **TINY).system
        folders.append(str(finished(runs.create(armed / "all", Config(run, config), f"run-{k}"), run)))
        config_of(Path(folders[-1]), system, task)
    write_ledger(armed / "results", "evil_system", "os:system")
    assert main(["report", "all", "-o", "page"]) == 0
    assert "left out" not in capsys.readouterr().out
    text = (armed / "page" / "report.md").read_text()
    assert [name for names in SOME for name in names if name not in text.replace("\\", "")] == []
    assert main(["publish", *folders, "--allow-deviations", "--results", "kept"]) == 0
    published = {row["row"]: row for row in ledger.read(armed / "kept")}
    assert len(published) == len(SOME)
    words = shlex.split(published["own/os-system:evil_system-memory"]["command"])
    assert words[:5] == ["sable", "train", "os:system", "--system", "evil_system"]
    assert "--memory" in words and words[words.index("--policy-layers") + 1] == "8"
    for argv in ("reproduce", "reproduce --results kept", "publish --results kept", "list", "list --json"):
        assert main(argv.split()) == (2 if argv.startswith("publish") else 0), argv
    capsys.readouterr()
    nothing_ran(armed)


@pytest.mark.parametrize(("system", "task"), [FOREIGN[0], FOREIGN[2], ("evil_system", "probe/bandit")])
def test_a_grid_and_a_study_run_nothing_that_their_folders_name(
    armed, tmp_path, capsys, monkeypatch, system, task
):
    flags = ["--systems", "ippo:num-envs=4", "--num-seeds", "1", "--out", str(tmp_path)]
    (cell,) = sable.grid("probe/bandit", systems=[flags[1]], num_seeds=1, out=tmp_path)
    config_of(benchmark.prepare(cell), system, task)
    for more in (["--list"], ["--cell", "0"], ["--quiet"]):
        assert main(["benchmark", "probe/bandit", *flags, *more]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    nothing_ran(armed)

    def stop(worker, batch, view):
        raise KeyboardInterrupt

    study = ["tune", "probe/bandit", "--system", "ippo", "--trials", "1", "--quiet", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(batches.Worker, "work", stop)
        assert main(study) == 130
    (batch,) = tmp_path.glob("probe/bandit/ippo/batch-*")
    config_of(batch, system, task)
    capsys.readouterr()
    assert main(study) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and ("as named" in err)
    nothing_ran(armed)


def test_the_trap_sees_code_that_is_named_or_trusted(armed, capsys):
    """And only then the current folder is looked into, last of all."""
    config_of(armed / "run", "evil_package.system", "probe/bandit")
    assert main(["evaluate", "run", "--system", "evil_package.system"]) == 2  # there is no checkpoint
    assert ("exec", str(armed / "evil_package" / "system.py")) in trap.events and (armed / "ran").exists()
    assert sys.path[-1] == str(armed)
    config_of(armed / "run", "evil_system", "os:system")
    trap.events.clear()
    assert main(["evaluate", "run", "--env", "os:system"]) == 2
    assert trap.events == [], "naming the one is no leave for the other"
    assert main(["evaluate", "run", "--trust"]) == 2
    assert ("exec", str(armed / "evil_system.py")) in trap.events
    assert not [event for event, _ in trap.events if event == "os.system"], "a function is no environment"
    assert "it has no reset" in capsys.readouterr().err
    assert main(["check", "evil_loaded:Env"]) == 2 and ("taken", "Env") in trap.events


def test_an_exported_team_of_ones_own_system_acts_where_it_is_named(armed):
    about_of(armed / "team", "evil_system", "probe/bandit")
    for leave in ({"system": "evil_system"}, {"trust": True}):
        team = sable.load(armed / "team", **leave)
        team.reset(batch=1)
        assert team.act(team_views(team)).shape == (1, 2)
    with pytest.raises(Untrusted, match="'evil_system' is not part of sable"):  # imported, and not named
        sable.load(armed / "team")
    with pytest.raises(Untrusted, match="'evil_system', not 'ippo' as named"):
        sable.load(armed / "team", system="ippo")


def team_views(team):
    return [[[0.0] * team.spec.view_size] * team.spec.num_agents]


def test_trust_is_for_one_name_of_one_kind():
    trust = Trust(env="meet:Meet", system="mine")
    trust.require("env", "meet:Meet")
    trust.require("system", "mine")
    for kind, name in (("env", "mine"), ("system", "meet:Meet"), ("env", "meet:Other")):
        with pytest.raises(Untrusted):
            trust.require(kind, name)
    Trust(everything=True).require("env", "whatever:Env")
    with pytest.raises(Untrusted, match="'a:B', not 'c:D' as named"):
        Trust(everything=True, env="c:D").require("env", "a:B")
    for truthy in ("no", 1):
        with pytest.raises(Untrusted):
            Trust(everything=truthy).require("env", "whatever:Env")


# Processes that we start.


@pytest.mark.parametrize(("system", "trusted"), [("ippo", False), ("evil_system", True)])
def test_a_cell_is_trusted_exactly_when_the_command_named_its_code(
    armed, tmp_path, monkeypatch, system, trusted
):
    (cell,) = sable.grid("probe/bandit", systems=[system], num_seeds=1, out=tmp_path)
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: started.append((command, options)))
    benchmark._start(cell, shared=False)
    ((command, options),) = started
    assert command[1] == "-P" and command[-1] == ("--trust" if trusted else str(cell.directory))
    assert os.environ.items() <= options["env"].items() | {("PYTHONPATH", os.environ.get("PYTHONPATH", ""))}
    handed = []
    monkeypatch.setattr(sable, "train", lambda **options: handed.append(options["trust"]))
    benchmark._train_cell(str(cell.directory), cell.is_custom)
    assert handed == [trusted]


def test_a_process_of_ours_leaves_the_current_folder_alone(tmp_path, monkeypatch):
    """Where `python -c` would take `numpy` from it."""
    pytest.importorskip("gymnasium")
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "envs"))
    monkeypatch.chdir(tmp_path)
    for name in ("numpy", "socket", "gymnasium"):
        (tmp_path / f"{name}.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    env = sable.make_env("pettingzoo:parallel_envs:delayed", workers=1)
    env.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not (tmp_path / "ran").exists()


def test_a_resume_command_says_trust_where_it_is_needed(tmp_path):
    for system, task, more in (("ippo", "probe/bandit", ""), ("mine", "probe/bandit", " --trust"),
                               ("ippo", "meet:Meet", " --trust")):  # fmt: skip
        config = sable.configure("probe/bandit", system="ippo", **TINY)
        directory = runs.create_pending(tmp_path, config)
        config_of(directory, system, task)
        assert runs.how_to_resume(directory) == f"--resume {directory}{more}"
        with pytest.raises(SableError, match=f"go on with --resume {directory}{more}$"):
            runs.read_summary(directory)
