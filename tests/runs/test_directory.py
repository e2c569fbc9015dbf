"""The run directory: where it goes, what it says, that nothing in it is half written or overwritten."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from sable.config.schema import Config, RunConfig, SableConfig
from sable.errors import SableError
from sable.files import write_atomically
from sable.runs import circumstances
from sable.runs import directory as runs

CONFIG = Config(RunConfig(seeds=(1, 2)), SableConfig(num_envs=16))


def test_a_new_run_has_its_place_its_configuration_and_its_circumstances(tmp_path):
    directory = runs.create(tmp_path, CONFIG, "first")
    assert directory == tmp_path / "lbf" / "2s-8x8-2p-2f-coop" / "sable" / "first"
    assert runs.find(directory) == directory
    assert runs.read_config(directory) == CONFIG
    meta = json.loads((directory / "meta.json").read_text())
    assert meta["versions"]["jax"] and meta["versions"]["python"]
    assert meta["device"]["platform"] == "cpu" and meta["thread_pool"] >= 1
    assert {"started", "command", "git", "platform", "cpus", "NPROC"} <= meta.keys()
    assert sorted(file.name for file in directory.iterdir()) == [".claim", "config.json", "meta.json"]


def test_runs_without_a_name_are_named_by_the_time_and_never_share_a_folder(tmp_path):
    first, second = (runs.create(tmp_path, CONFIG) for _ in range(2))
    assert first != second and first.name[:8].isdigit()


@pytest.mark.parametrize(
    ("task", "folder"), [("mabrax/humanoid_9|8", "mabrax/humanoid_9-8"), ("custom/My Env", "custom/My-Env")]
)
def test_task_names_become_safe_folder_names(tmp_path, task, folder):
    directory = runs.create(tmp_path, Config(RunConfig(task=task), CONFIG.system), "x")
    assert directory == tmp_path / folder / "sable" / "x"
    assert runs.read_config(directory).run.task == task


def test_a_folder_that_holds_something_is_refused_and_kept(tmp_path):
    directory = runs.create(tmp_path, CONFIG, "x")
    before = (directory / "config.json").read_bytes()
    with pytest.raises(SableError, match="already holds something"):
        runs.create(tmp_path, Config(CONFIG.run, SableConfig()), "x")
    assert (directory / "config.json").read_bytes() == before


def test_an_empty_folder_may_be_used(tmp_path):
    (tmp_path / "lbf" / "2s-8x8-2p-2f-coop" / "sable" / "x").mkdir(parents=True)
    assert runs.read_config(runs.create(tmp_path, CONFIG, "x")) == CONFIG


@pytest.mark.parametrize("name", ["a/b", "..", "", ".", "a b", "a\nb"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(SableError, match="plain folder name"):
        runs.create(tmp_path, CONFIG, name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for refuse in (runs.create, lambda out, config, name: runs.place(out, config.run, name)):
        with pytest.raises(SableError) as error:
            refuse(tmp_path / "file" / "out", CONFIG, "x")
        assert "cannot write" in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def locked():
    """A folder nobody may write in, with root, who may write everywhere, acting as nobody meanwhile."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        if user == 0:
            os.seteuid(65534)
        yield Path(folder)
        os.seteuid(user)


def test_a_folder_without_permission_is_refused(locked):
    with pytest.raises(SableError, match="no permission"):
        runs.place(locked, CONFIG.run, "x")


def test_what_is_not_a_run_is_said_not_to_be_one(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text('{"model": 1}')
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"format": 1, "ru')
    for name in ("missing", "empty", "foreign", "torn"):
        with pytest.raises(SableError, match=f"{name}.*(is not a run|cannot be read)"):
            runs.read_config(tmp_path / name)


def test_a_finished_run_has_a_summary_and_its_time(tmp_path):
    directory = runs.create(tmp_path, CONFIG, "x")
    with pytest.raises(SableError, match="not finished"):
        runs.read_summary(directory)
    runs.finish(directory, {"wall_seconds": 1.5, "final_return": np.array([0.5, np.nan])})
    assert runs.read_summary(directory) == {"wall_seconds": 1.5, "final_return": [0.5, None]}
    meta = json.loads((directory / "meta.json").read_text())
    assert meta["wall_seconds"] == 1.5 and meta["started"]


def test_a_resumed_run_remembers_both_circumstances(tmp_path):
    directory = runs.create(tmp_path, CONFIG, "x")
    for _ in range(2):
        runs.note_resumption(directory, circumstances.describe())
    assert len(json.loads((directory / "meta.json").read_text())["resumed"]) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"resumed": 5}', '{"resumed": [1]}', "\x00" * 40])
def test_a_damaged_meta_is_one_line_that_says_what_to_do(tmp_path, content):
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(SableError, match=r"meta.json (cannot be read|is damaged).*remove it") as error:
        runs.read_meta(tmp_path)
    assert "\n" not in str(error.value)


def test_a_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch):
    runs.write_json(tmp_path / "a.json", {"a": 1})

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        runs.write_json(tmp_path / "a.json", {"a": 2})
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}


def test_a_claimed_run_is_refused_until_its_process_is_gone(tmp_path):
    code = """
import sys, time
from pathlib import Path
from sable.runs import circumstances, directory as runs
with runs.claim(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(runs.Claimed, match="another process"), runs.claim(tmp_path):
            pass
        other.kill()
    with runs.claim(tmp_path):
        pass


STARTS = """
import dataclasses, json, os, sys, time
from pathlib import Path
from sable.config import Config, RunConfig, SableConfig
from sable.errors import SableError
from sable.runs import circumstances, directory as runs

def start(number, out, name):
    try:
        config = Config(RunConfig(), SableConfig(num_envs=16 * (number + 1)))
        with runs.claim_new(out, config, name) as directory:
            time.sleep(0.05)  # it works; whoever comes now must not write
            runs.begin(directory)
            os.write(1, json.dumps([number, str(directory)]).encode() + b"\\n")
            time.sleep(1.5)
    except SableError as error:
        os.write(1, json.dumps([number, None, str(error)]).encode() + b"\\n")

circumstances.describe = lambda: {"started": str(os.getpid())}
out, rounds, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
name = sys.argv[4] if len(sys.argv) > 4 else None
begin = time.monotonic() + 0.3
children = []
for round in range(rounds):
    for number in range(count):
        if not (child := os.fork()):
            while time.monotonic() < begin:
                pass
            start(number, out / str(round), name)
            os._exit(0)
        children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
"""


def synchronised(out: Path, rounds: int, count: int, *name: str) -> list[list]:
    """What came of so many starts at the same moment, in each of so many folders: (which of them, the folder
    it holds) or (which of them, None, why)."""
    command = [sys.executable, "-c", STARTS, str(out), str(rounds), str(count), *name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_one_of_synchronised_starts_wins_with_its_own_settings(tmp_path):
    """60 starts, three at a time of one name but other settings; the others say so and write nothing."""
    lives = synchronised(tmp_path, 20, 3, "x")
    assert len(lives) == 60
    winners = {Path(directory): number for number, directory, *_ in lives if directory}
    losers = [why for _, directory, *why in lives if not directory]
    assert len(winners) == 20 and len(losers) == 40
    for directory, number in winners.items():
        assert runs.read_config(directory).system.num_envs == 16 * (number + 1)
        assert {path.name for path in directory.iterdir()} == {".claim", "config.json", "meta.json"}
    assert all("another process" in why or "already holds" in why for (why,) in losers)


def test_synchronised_starts_without_a_name_each_get_a_folder(tmp_path):
    lives = synchronised(tmp_path, 1, 6)
    directories = {Path(directory): number for number, directory, *_ in lives if directory}
    assert len(directories) == 6
    for directory, number in directories.items():
        assert runs.read_config(directory).system.num_envs == 16 * (number + 1)


WAITING = """
import os, sys, time
from pathlib import Path
from sable.cli.main import main
from sable.runs import directory

def claim_new(*args, real=directory.claim_new):
    (together / str(os.getpid())).touch()
    while not (together / "moment").exists():
        time.sleep(0.02)
    moment = float((together / "moment").read_text())
    while time.monotonic() < moment:
        pass
    return real(*args)

together = Path(sys.argv.pop(1))
directory.claim_new = claim_new
sys.exit(main(sys.argv[1:]))
"""


def train_at_once(out: Path, together: Path, count: int, *, wait: bool) -> list[tuple[int, str]]:
    """Return the exit codes and errors of so many trainings of one name that are started one right after the
    other, and that may wait so that they claim the folder at the same moment."""
    command = [sys.executable, *(("-c", WAITING, str(together)) if wait else ("-m", "sable"))]
    flags = ["train", "probe/bandit", "--system", "ippo", "--name", "x", "--out", str(out), "--quiet"]
    flags += ["--rollout-length", "4", "--num-evaluations", "2", "--evaluation-episodes", "2", "--no-video"]
    flags += ["--num-minibatches", "1", "--num-epochs", "1", "--absolute-episodes", "2"]
    sizes = [["--num-envs", f"{n}", "--total-steps", f"{8 * n}"] for n in range(4, 4 + count)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    starts = [subprocess.Popen([*command, *flags, *size], **pipes) for size in sizes]
    while wait and len(list(together.iterdir())) < count:
        assert all(process.poll() is None for process in starts)
        time.sleep(0.05)
    write_atomically(together / "moment", str(time.monotonic() + 0.3).encode())
    errors = [process.communicate(timeout=600)[1] for process in starts]
    return [(process.returncode, error) for process, error in zip(starts, errors, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_one_of_synchronised_trainings_wins_and_is_whole(tmp_path, wait):
    """Five times three real `sable train` of one name; each has its own number of environments and of steps,
    so that whatever a loser wrote would show."""
    for attempt in range(5):
        out = tmp_path / str(attempt)
        (together := tmp_path / f"together-{attempt}").mkdir()
        ends = train_at_once(out, together, 3, wait=wait)
        assert sorted(code for code, _ in ends) == [0, 2, 2], ends
        winner = next(number for number, (code, _) in enumerate(ends) if code == 0)
        for _, error in (end for end in ends if end[0]):
            assert error.count("\n") == 1, error
            assert "another process" in error or "already holds something" in error, error
        directory = out / "probe" / "bandit" / "ippo" / "x"
        assert [path.parent for path in out.rglob("config.json")] == [directory]
        config = runs.read_config(directory)
        assert (config.system.num_envs, config.run.total_steps) == (4 + winner, 8 * (4 + winner))
        steps = [row["env_steps"] for row in runs.read_metrics(directory)]
        assert steps == [4 * (4 + winner), 8 * (4 + winner)] and runs.is_whole(directory)
        assert f"--num-envs {4 + winner} " in runs.read_meta(directory)["command"]


def test_a_folder_removed_by_its_holder_is_not_held_by_the_next(tmp_path):
    """A run that does not fit removes its folder while another start waits for it."""
    code = """
import shutil, sys, time
from pathlib import Path
from sable.runs import circumstances, directory as runs
with runs.claim(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(0.5)
    runs.discard(Path(sys.argv[1]))
"""
    directory = tmp_path / "a" / "b" / "c" / "d"
    directory.mkdir(parents=True)
    (tmp_path / "other").write_text("stays")
    command = [sys.executable, "-c", code, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(runs.Claimed, match="removed by another process"), runs.claim(directory):
            pass
    assert not directory.exists() and (tmp_path / "other").exists()


def test_what_a_start_that_was_killed_claimed_may_be_used(tmp_path):
    directory = runs.folder(tmp_path, CONFIG.run) / "x"
    directory.mkdir(parents=True)
    with runs.claim(directory):
        pass
    assert runs.read_config(runs.create(tmp_path, CONFIG, "x")) == CONFIG


def test_a_name_whose_first_start_was_killed_is_free_again(tmp_path):
    config = Config(RunConfig(), SableConfig())
    directory = runs.place(tmp_path, config.run, "x")
    directory.mkdir(parents=True)
    (directory / ".config.json.123.tmp").write_text("{")
    assert runs.create_pending(tmp_path, config, "x") == directory
    assert {path.name for path in directory.iterdir()} == {".claim", "config.json"}
