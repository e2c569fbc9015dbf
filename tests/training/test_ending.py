"""How whole commands end: what is saved, what is said, with which exit code, and what goes with them."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sable.runs import directory as runs
from sable.training import checkpoint

pytest.importorskip("gymnasium")

MODULES = str(Path(__file__).parents[1] / "envs")
TINY = "--system ippo --num-envs 4 --rollout-length 4 --num-epochs 1 --num-minibatches 1 --no-video"
TINY += " --policy-layers 8 --critic-layers 8 --evaluation-episodes 2 --absolute-episodes 2 --name mine"
LONG = f"{TINY} --total-steps 1e8 --num-evaluations 2"
JAX = f"probe/bandit {LONG}"
PYTHON = f"pettingzoo:parallel_envs:delayed {LONG} --env-options workers=2"

DRIVER = """
import os, sys, time
from sable.training import checkpoint, loop
from sable.cli.main import main

diary, stall_at, saves = sys.argv.pop(1), int(sys.argv.pop(1)), 0
real = checkpoint._write

def note(*words):
    with open(diary, "a") as file:
        print(*words, file=file)

def write(*args):
    global saves
    saves += 1
    real(*args)
    note("save", saves)
    if saves == stall_at:
        time.sleep(60)

class Diary(loop.Logger):
    def phase(self, text):
        super().phase(text)
        note("phase", text)

    def progress(self, steps, seconds):
        super().progress(steps, seconds)
        note("finished", steps // 16)

checkpoint._write, loop.Logger = write, Diary
sys.exit(main())
"""


class Life:
    """A command at work, and its diary."""

    def __init__(self, folder: Path, command: str, stall_at: int = 0, **streams):
        self.diary, self.run = folder / "diary.txt", None
        self.diary.unlink(missing_ok=True)
        more = {"PYTHONPATH": os.pathsep.join([MODULES, *sys.path])}
        more |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        streams = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
        } | streams
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(self.diary), str(stall_at), *command.split()],
            cwd=folder, env=os.environ | more, start_new_session=True, text=True, **streams,
        )  # fmt: skip

    def lines(self, word: str) -> list[str]:
        text = self.diary.read_text() if self.diary.exists() else ""
        return [line for line in text.splitlines() if line.startswith(word)]

    def until(self, condition, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def ends(self, seconds: float = 10) -> tuple[int, str]:
        """Its exit code and what it said on stderr."""
        try:
            _, err = self.process.communicate(timeout=seconds)
        finally:
            self.process.kill()
        return self.process.returncode, err or ""


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in children.read_text().split()] if children.exists() else []


def alive(pids: list[int]) -> list[int]:
    def runs(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    return [pid for pid in pids if runs(pid)]


def soon(condition, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def run_in(folder: Path) -> Path:
    (config,) = folder.rglob("mine/config.json")
    return config.parent


def saved_updates(run: Path) -> int:
    folder = run / checkpoint.FOLDER
    newest = max(checkpoint.steps(folder))
    return checkpoint._verified(folder / f"{newest:010d}")["facts"]["updates"]


def resume_line(run: Path) -> str:
    trust = " --trust" if "pettingzoo" in run.parts else ""
    return f"sable: interrupted; go on with: sable train --resume {run}{trust}\n"


def test_it_saves_when_asked_and_ends_in_one_line_at_ctrl_c_twice_in_a_save(tmp_path):
    """SIGUSR1, then SIGINT twice to the terminal's process group, the second inside a save. Its workers end
    with it."""
    life = Life(tmp_path, f"train {PYTHON} --out {tmp_path} --quiet", stall_at=2)
    life.until(lambda: life.lines("finished"))
    assert not life.lines("save")
    life.process.send_signal(signal.SIGUSR1)
    life.until(lambda: life.lines("save"))
    run, count = run_in(tmp_path), len(life.lines("finished"))
    life.until(lambda: len(life.lines("finished")) > count + 1)  # it goes on
    workers = workers_of(life.process.pid)
    assert len(alive(workers)) == 2
    os.killpg(life.process.pid, signal.SIGINT)
    life.until(lambda: len(life.lines("save")) == 2)
    os.killpg(life.process.pid, signal.SIGINT)
    assert life.ends() == (128 + signal.SIGINT, resume_line(run))
    assert saved_updates(run) >= 1, "what was saved stays"
    assert soon(lambda: not alive(workers))


EVERY = "--total-steps 16e6 --num-evaluations 1000000 --evaluation-episodes 64"
HANGS = [(1, signal.SIGTERM, "hang", ""), (60, signal.SIGTERM, "hang", ""), (60, signal.SIGINT, "hang", "")]
HANGS += [(60, signal.SIGTERM, "hang", EVERY), (60, signal.SIGTERM, "hang-deaf", EVERY)]


@pytest.mark.slow
@pytest.mark.parametrize(("fails_at", "number", "how", "schedule"), HANGS)
def test_a_run_whose_environment_hangs_saves_and_ends_within_ten_seconds(
    tmp_path, fails_at, number, how, schedule
):
    """At its first step, in an update, or in an evaluation, whose environments take more steps."""
    options = f"--env-options workers=2 fails_at={fails_at} how={how} {schedule}"
    life = Life(tmp_path, f"train pettingzoo:parallel_envs:delayed {LONG} {options} --out {tmp_path} --quiet")
    life.until(lambda: life.lines("phase training"))

    expected = "phase evaluating" if schedule else "phase training"

    def hangs():
        before = life.diary.read_text()
        time.sleep(3)
        return life.diary.read_text() == before and life.lines("phase")[-1] == expected

    life.until(hangs)
    workers = workers_of(life.process.pid)
    began = time.monotonic()
    life.process.send_signal(number)
    code, err = life.ends(20)
    assert (code, err) == (128 + number, resume_line(run_in(tmp_path)))
    assert number == signal.SIGINT or time.monotonic() - began < 10
    assert soon(lambda: not alive(workers))
    finished = life.lines("finished")
    if finished:
        assert saved_updates(run_in(tmp_path)) == int(finished[-1].split()[1])


@pytest.mark.slow
def test_a_run_whose_environment_hangs_longer_than_the_time_out_ends_and_can_go_on(tmp_path):
    options = "--env-options workers=2 fails_at=60 how=hang --env-timeout 15"
    life = Life(tmp_path, f"train pettingzoo:parallel_envs:delayed {LONG} {options} --out {tmp_path} --quiet")
    code, err = life.ends(120)
    run = run_in(tmp_path)
    text = "sable: pettingzoo:parallel_envs:delayed: the environment failed in worker process 0: no answer "
    text += f"within 15 seconds (--env-timeout); all before is saved, go on with --resume {run} --trust\n"
    assert (code, err) == (2, text)
    updates = int(life.lines("finished")[-1].split()[1])
    assert saved_updates(run) == updates > 0
    again = Life(tmp_path, f"train --resume {run} --trust --env-timeout 16 --quiet")
    code, err = again.ends(120)
    assert code == 2 and "within 16 seconds" in err and saved_updates(run) > updates


@pytest.mark.slow
@pytest.mark.parametrize("quiet", ["", "--quiet"])
def test_a_run_whose_terminal_is_closed_saves_and_ends(tmp_path, quiet):
    ours, theirs = pty.openpty()
    life = Life(
        tmp_path, f"train {JAX} --out {tmp_path} {quiet}", stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)

    def trains():
        with contextlib.suppress(OSError):
            os.read(ours, 1 << 16)
        return len(life.lines("finished")) > 1

    life.until(trains)
    os.close(ours)  # nothing can be written any more
    os.killpg(life.process.pid, signal.SIGHUP)  # the kernel's, to the session's group
    assert life.ends()[0] == 128 + signal.SIGHUP
    assert saved_updates(run_in(tmp_path)) == int(life.lines("finished")[-1].split()[1])


@pytest.mark.slow
def test_a_job_that_is_started_again_goes_on_until_it_has_finished(tmp_path):
    command = f"train probe/bandit {TINY} --total-steps 160 --num-evaluations 5 --out {tmp_path} --requeue"
    first = Life(tmp_path, f"{command} --quiet", stall_at=2)
    first.until(lambda: len(first.lines("save")) == 2)
    first.process.send_signal(signal.SIGTERM)  # in a save, which is waited for until a second one
    time.sleep(1.2)
    first.process.send_signal(signal.SIGTERM)
    run = run_in(tmp_path)
    assert first.ends() == (75, resume_line(run))
    updates = saved_updates(run)
    second = Life(tmp_path, command)
    assert second.ends(120) == (0, "")
    assert int(second.lines("finished")[0].split()[1]) > updates > 0
    assert len(runs.read_meta(run)["resumed"]) == 1
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert Life(tmp_path, command).ends(60) == (0, "")
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_cells_end_with_their_benchmark_and_save(tmp_path, number):
    small = "ippo:num-envs=4:rollout-length=4:num-epochs=1:num-minibatches=1"
    command = f"benchmark probe/bandit --systems {small} --no-video --num-seeds 1 --total-steps 1e8"
    life = Life(tmp_path, f"{command} --num-evaluations 100000 --out {tmp_path} --quiet")
    life.until(lambda: list(tmp_path.rglob("checkpoints/0*")))
    (worker,) = workers_of(life.process.pid)
    life.process.send_signal(signal.SIGUSR1)  # passed on
    time.sleep(2)
    assert alive([worker]) and life.process.poll() is None
    life.process.send_signal(number)
    code, err = life.ends(15)
    assert soon(lambda: not alive([worker]), 15)
    (log,) = tmp_path.rglob("log.txt")
    assert "interrupted; go on with: sable train --resume" in log.read_text()
    assert "Traceback" not in log.read_text() + err
    if number == signal.SIGINT:
        assert (code, err) == (130, "sable: interrupted; the same command goes on from here\n")
