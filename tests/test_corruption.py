"""Every file of a finished run, of an exported folder and of published data, damaged in every way, and every
command that reads it: what the undamaged one gives, a fall-back that is named, or one line; no code runs."""

import importlib.util
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import typing as tp
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

import sable
from sable.cli.main import main
from sable.errors import SableError
from sable.reports import figures, ledger
from sable.runs import curve, provenance, sums
from sable.studies import benchmark, reproduce
from sable.training import best, checkpoint, job
from sable.training import device_memory as memory
from sable.training.update import Stages
from sable.viewer import show

_spec = importlib.util.spec_from_file_location("trust", Path(__file__).with_name("test_trust.py"))
_trust = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_trust)

SIZES = {"video": False, "total_steps": 64, "num_evaluations": 4, "evaluation_episodes": 2, "seeds": (0, 1)}
SIZES |= {"absolute_episodes": 2, "num_envs": 4, "rollout_length": 4, "num_minibatches": 1, "num_epochs": 1}
SIZES |= {"policy_layers": (8,), "critic_layers": (8,)}
PATIENCE = 60
"""Seconds after which a command hangs."""


# What happens to a file.


def flip(rng: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8]) if content else 0):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def digit(rng: random.Random, path: Path) -> None:
    """Another digit, where there is one: still a file of its kind."""
    content = bytearray(path.read_bytes())
    places = [k for k, byte in enumerate(content) if 48 <= byte < 57]
    if places:
        content[rng.choice(places)] += 1
    path.write_bytes(content)


def cut(rng: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.choice([len(content) - 1, len(content) // 2])])


def empty(rng: random.Random, path: Path) -> None:
    path.write_bytes(b"")


def lengthen(rng: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 200)))


def noise(rng: random.Random, path: Path) -> None:
    path.write_bytes(rng.randbytes(max(path.stat().st_size, 1)))


def delete(rng: random.Random, path: Path) -> None:
    path.unlink()


def swap(rng: random.Random, path: Path) -> None:
    """With another file of the same folder."""
    others = [other for other in sorted(path.parent.iterdir()) if other.is_file() and other != path]
    if others:
        other = rng.choice(others)
        ours, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(ours)


def fifo(rng: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def endless(rng: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


SHAPES: tuple[tp.Any, ...] = (
    [],
    {},
    "x",
    5,
    None,
    [[]],
    {"run": []},
    {"sha256": 1},
    {"format": 2, "sum": {}},
)


def shape(rng: random.Random, path: Path) -> None:
    """Valid JSON of another shape: something else, or a part of it something else."""
    try:
        data = json.loads(path.read_bytes())
    except ValueError:
        data = None
    if isinstance(data, dict) and data and rng.random() < 0.7:
        data[rng.choice(sorted(data))] = rng.choice(SHAPES)
    else:
        data = rng.choice(SHAPES)
    path.write_text(json.dumps(data))


DAMAGES = (flip, digit, cut, empty, lengthen, noise, delete, swap, fifo, folder, endless, shape)


# What reads them.


def number_of(params: tp.Any) -> float:
    """A number that follows from every bit of some arrays."""
    return float(zlib.crc32(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))))


def numbers_of(params: tp.Any) -> np.ndarray:
    """[S, 1], of the parameters of every seed."""
    count = jax.tree.leaves(params)[0].shape[0]
    return np.array([[number_of(jax.tree.map(lambda x, k=k: x[k], params))] for k in range(count)])


def make_stages(_, state):
    """Nothing that must be compiled: no updates, and an absolute evaluation that tells parameters apart."""

    def unit(run, count):
        learner = jax.tree.map(checkpoint._raw, run.learner)
        raise SableError(f"run goes on training from {number_of(learner)}")

    return Stages(unit, tp.cast(tp.Any, None), lambda state: {"return": numbers_of(state.best.params)})


def of_policy(policy, *_, **__) -> tp.Any:
    about = policy.config, policy.spec, policy.seed
    return repr(about), number_of(policy.params)


def content(place: Path) -> dict[str, bytes]:
    """All regular files in a folder."""
    files = (path for path in sorted(place.rglob("*")) if path.is_file())
    return {str(path.relative_to(place)): path.read_bytes() for path in files if path.name != ".claim"}


def no_time(data: dict[str, bytes]) -> dict[str, tp.Any]:
    """What is left in a run: without where and when."""
    summary = json.loads(data["summary.json"])
    same = {name: data[name] for name in ("config.json", "spec.json", "metrics.jsonl", "marl_eval.json")}
    return same | {"returns": [summary[name] for name in ("absolute_return", "final_return", "env_steps")]}


def command(text: str, result: tp.Callable[[], tp.Any] = lambda: None) -> tp.Callable[[], tuple[int, tp.Any]]:
    def call() -> tuple[int, tp.Any]:
        code = main(text.split())
        return code, result() if code == 0 else None

    return call


def loaded(path: str) -> tp.Callable[[], tuple[int, tp.Any]]:
    """`sable.load`, with its refusal as a command gives it."""

    def call() -> tuple[int, tp.Any]:
        try:
            return 0, of_policy(sable.load(path))
        except SableError as error:
            print("sable: " + str(error), file=sys.stderr)
            return 2, None

    return call


def state_of_cell() -> tuple[int, tp.Any]:
    """What `sable benchmark` says of a finished cell."""
    try:
        if (status := benchmark.status(_cell())).state == "finished":
            return 0, status
        print(f"sable: run is {status.state}, and gone on with", file=sys.stderr)
        return 2, None
    except SableError as error:
        print("sable: " + str(error), file=sys.stderr)
        return 2, None


def _cell() -> benchmark.Cell:
    (row,) = ledger.read(Path("results"))
    return reproduce.cell(row, Path("reproduced"), None)


def resumed() -> dict[str, tp.Any]:
    sums.verify(Path("run"))
    return no_time(content(Path("run")))


def team() -> dict[str, bytes]:
    """What can be loaded of an export."""
    return {name: data for name, data in content(Path("out")).items() if not name.endswith((".png", ".md"))}


def rows() -> str:
    return Path("results", ledger.LEDGER).read_text()


def tables() -> bytes:
    return Path("page", "tables.tex").read_bytes()


ROW = "probe/bandit:ippo"
READERS = {
    "run": {
        "load": loaded("run"),
        "export": command("export run -o out", team),
        "export every seed": command("export run -o out --every-seed", team),
        "evaluate": command("evaluate run --episodes 1 --json"),
        "watch": command("watch run"),
        "report": command("report run -o page", tables),
        "publish": command("publish run --allow-deviations --results kept", lambda: content(Path("kept"))),
        "reproduce": command(f"reproduce {ROW} --quiet --results results"),
        "benchmark": state_of_cell,
        "resume": command("train --resume run --quiet", resumed),
    },
    "team": {"load": loaded("team"), "watch": command("watch team")},
    "results": {
        "report": command("report results -o page", tables),
        "remake": command("publish --remake --results results", rows),
        "reproduce": command(f"reproduce {ROW} --evaluate --episodes 1 --results results"),
        "load": loaded("results/probe/bandit/ippo/policies/1"),
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A finished run, its exported team, and what was published of it; nothing here is compiled."""
    place, work = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("work")
    trap = _trust.Trap()
    trained = sable.train("probe/bandit", system="ippo", out=place, name="r", quiet=True, **SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "commit_of", lambda source: "c" * 40)
        patch.setattr(best, "evaluate_params", lambda *args, **named: {"return": numbers_of(args[3])})
        patch.setattr(show, "watch", lambda policy, *_, **__: [print(of_policy(policy))][:0])
        patch.setattr(job, "make_stages", make_stages)
        patch.setattr(memory, "program_bytes", lambda unit: 0)
        patch.setattr(memory, "summary", lambda *_: "")
        patch.setattr(figures, "draw", lambda *_: [])
        patch.setattr(curve, "draw_curve", lambda *_: None)
        patch.chdir(work)
        trained.directory.rename(place / "run")
        sable.train(resume=place / "run", quiet=True)  # for the numbers that are measured here
        shutil.copytree(place / "run", "run")
        sable.export("run", place / "team")
        sable.publish("run", results=place / "results", allow_deviations=True)
        for name in ("team", "results"):
            shutil.copytree(place / name, name)
        directory = _cell().directory
        directory.parent.mkdir(parents=True)
        directory.symlink_to(work / "run")
        trap.folder, trap.events = work, []
        yield place, trap
        trap.folder = None


def put_back(place: Path, name: str) -> None:
    """The folder `name` as it was, and nothing beside it that a command wrote."""
    for left in ("out", "page", "kept", name):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(place / name, name)


class Outcome(tp.NamedTuple):
    code: int
    result: tp.Any
    out: str
    err: str


def outcome(call: tp.Callable[[], tuple[int, tp.Any]], capsys) -> Outcome:
    def hangs(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, limits[1]))  # what has no end is not read
    signal.alarm(PATIENCE)
    try:
        code, result = call()
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)
    out, err = capsys.readouterr()
    lines = out.splitlines(keepends=True)
    notes = [line for line in lines if line.startswith("note: ")]  # of a report
    return Outcome(code, result, "".join(line for line in lines if line not in notes), err + "".join(notes))


@pytest.fixture(scope="module")
def truth(place):
    """What each command gives of undamaged files, and of a run whose newest checkpoint is damaged; filled as
    they are needed."""
    return {}


def expected(truth, place: Path, name: str, reader: str, capsys) -> list[Outcome]:
    if (name, reader) not in truth:
        found = []
        for older in (False, True) if name == "run" else (False,):
            put_back(place, name)
            if older:
                max(Path("run/checkpoints").iterdir()).joinpath("manifest.json").unlink()
            found.append(outcome(READERS[name][reader], capsys))
        assert found[0].code in (0, 1) and "damaged" not in found[0].err, found[0]
        truth[name, reader] = found
    return truth[name, reader]


def judge(whole: list[Outcome], now: Outcome, name: str) -> str:
    """Return how a command took a damage; an AssertionError where it must not take it so."""
    if now[:3] == whole[0][:3]:
        return "same, with a line" if now.err != whole[0].err else "same"
    places = f"{name}/", f"{name} ", f"{name}:", "reproduced/"
    assert any(place in now.err for place in places), now
    if "the one before it" in now.err or "a later one is gone" in now.err:
        assert [now[:3]] == [one[:3] for one in whole[1:]], now
        return "fell back"
    assert now.code == 2 and now.out == "", now
    assert now.err.count("\n") == 1 and now.err.startswith("sable: "), now
    return "refused"


def corruptions(place: Path) -> list[tuple[str, Path, tp.Callable]]:
    """Every file with every damage; in rounds over all files, so that the first of them meet each file."""
    files = [
        (name, path.relative_to(place / name))
        for name in READERS
        for path in sorted((place / name).rglob("*"))
        if path.is_file() and path.name not in (ledger.LEDGER, ledger.PUBLISHED)
    ]
    return [
        (name, path, DAMAGES[(k + turn) % len(DAMAGES)])
        for turn in range(len(DAMAGES))
        for k, (name, path) in enumerate(files)
    ]


@pytest.mark.parametrize(("count", "commands"), [(60, 1), pytest.param(500, 3, marks=pytest.mark.slow)])
def test_no_damaged_file_is_silent_anywhere(place, truth, capsys, count, commands):
    """Commands take turns: every file and every command, and in full every damage, meet several times."""
    place, trap = place
    rng, tally, failures = random.Random(count), {}, []
    newest = max(path.name for path in (place / "run" / "checkpoints").iterdir())
    turns = {name: itertools.cycle(READERS[name]) for name in READERS}
    for name, path, damage in corruptions(place)[:count]:
        readers = [next(turns[name]) for _ in range(min(commands, len(READERS[name])))]
        seed = rng.random()
        for reader in readers:
            whole = expected(truth, place, name, reader, capsys)
            put_back(place, name)
            damage(random.Random(seed), Path(name) / path)
            before, what = content(Path(name)), f"{damage.__name__} of {name}/{path}, {reader}"
            try:
                now = outcome(READERS[name][reader], capsys)
                verdict = judge(whole, now, name)
                if (
                    verdict == "same"
                    and path.parts[:2] == ("checkpoints", newest)
                    and "damaged" in whole[-1].err
                ):
                    assert checkpoint._is_whole(max(Path("run/checkpoints").iterdir())), "nothing was said"
                if verdict == "refused":
                    assert content(Path(name)) == before, "a refusal changes nothing"
            except (Exception, SystemExit) as error:  # whatever a command lets through
                failures.append(f"{what}: {error!r}"[:800])
                verdict = "failed"
            tally[verdict] = tally.get(verdict, 0) + 1
            assert trap.events == [], what
    assert not failures, "\n".join([f"{len(failures)} of {sum(tally.values())}", *failures[:40]])
    with capsys.disabled():
        print(f"\n{count} corruptions, {sum(tally.values())} calls: {tally}")


@pytest.mark.parametrize("reader", ["load", "evaluate", "resume"])
def test_a_checkpoint_that_is_gone_is_missed(place, truth, capsys, reader):
    """The newest: the one before it is used, with a line. All of them: nothing of the run is overwritten."""
    place, _ = place
    whole = expected(truth, place, "run", reader, capsys)
    put_back(place, "run")
    shutil.rmtree(max(Path("run/checkpoints").iterdir()))
    now = outcome(READERS["run"][reader], capsys)
    assert now[:3] == whole[1][:3] and "a later one is gone, and this one is used" in now.err
    put_back(place, "run")
    shutil.rmtree("run/checkpoints")
    before = content(Path("run"))
    assert judge(whole, outcome(READERS["run"][reader], capsys), "run") == "refused"
    assert content(Path("run")) == before
