"""Runs that are killed: a process of its own that trains in children and ends them at moments of its choice.

    python victim.py kill FOLDER SYSTEM EVALUATIONS KILLS SEED
    python victim.py behind FOLDER SYSTEM EVALUATIONS KILLS SEED
    python victim.py end FOLDER SYSTEM COUNT BLOCKS SEED

`behind` kills where a checkpoint is being written in the background and training has gone on. `end` asks them
to end, by SIGTERM, every second one while it compiles a network of that many blocks; with 0 blocks, all of
them while a checkpoint is written in the background.

The children are forked after the imports and before jax starts anything, so that a life costs only tracing
and reading compiled programs. Nothing in the package knows of this: the parent watches the run's folder.
"""

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import jax

import sable
import sable.runs.curve
import sable.runs.policy
from sable.config.schema import RunConfig, field_names, system_config
from sable.runs import open_run as running
from sable.training import checkpoint, loop, progress

SIZES = {"video": False, "evaluation_episodes": 2, "absolute_episodes": 4, "num_envs": 4, "rollout_length": 4}
SIZES |= {"num_epochs": 1, "num_minibatches": 1, "embed_dim": 8, "num_heads": 1, "num_blocks": 1}
SIZES |= {"policy_layers": (8, 8), "critic_layers": (8, 8), "q_layers": (8, 8), "batch_size": 8}
SIZES |= {"replay_size": 64, "warmup_steps": 16, "num_updates_per_rollout": 2}
SIZES |= {"recurrent_size": 8, "mixer_size": 8, "sequence_length": 4, "warmup_sequences": 4}
TASKS = {"sable": "probe/recall", "ippo": "probe/bandit", "gru": "probe/recall", "qmix": "probe/recall"}
TASKS |= {"masac": "probe/continuous", "hasac": "probe/continuous"}
SYSTEMS = {"gru": ("ippo", {"memory": True, "recurrent_chunk": 4})}
"""Systems that are others with some settings."""


def child(function) -> int:
    """The id of a process that calls `function` and ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of forks; it has started no thread yet
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        function()
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int | None:
    """The exit code of a child that has ended, negative for a signal."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def write_behind(diary: Path, seconds: float) -> None:
    """Write all checkpoints in the background, each for so long at least; a diary says when."""

    def write(*args, real=checkpoint._write):
        jot(diary, "writing")
        time.sleep(seconds / 2)
        real(*args)
        time.sleep(seconds / 2)
        jot(diary, "written")

    progress.SMALL_STATE, progress.MAX_SAVING_SHARE, progress.SECONDS_PER_CALL = 0, float("inf"), 0.0
    checkpoint._write = write


def jot(diary: Path, words: str) -> None:
    with diary.open("a") as file:
        file.write(words + "\n")


def trains_behind(diary: Path) -> bool:
    """Whether a checkpoint is being written now and updates have been finished since that began."""
    lines = diary.read_text().splitlines() if diary.exists() else []
    since = lines[len(lines) - lines[::-1].index("writing") :] if "writing" in lines else ["written"]
    return "written" not in since and any(line.startswith("finished") for line in since)


def place(folder: Path, name: str) -> Path:
    """Where the runs of a system go."""
    return folder / TASKS[name] / SYSTEMS.get(name, (name,))[0]


def train(directory: Path, name: str, num_evaluations: int, behind: float = 0) -> None:
    """Train the run there, or go on with it: an update, an evaluation and a save, and again; in the end the
    absolute evaluation and a film. Its diary says when these begin. With `behind` every save takes so many
    seconds, in the background."""

    class Diary(loop.Logger):
        def phase(self, text):
            super().phase(text)
            if text == "measuring the best parameters":
                note(directory, "absolute")

        def progress(self, steps, seconds_training):
            super().progress(steps, seconds_training)
            if behind:
                note(directory, "finished")

    def film(*args, real=running.write_video, **fields):
        note(directory, "video")
        real(*args, **fields)

    loop.Logger, running.write_video = Diary, film
    if behind:
        write_behind(diary_of(directory), behind)
    if directory.exists():
        sable.train(resume=directory, quiet=True)
        return
    system, more = SYSTEMS.get(name, (name, {}))
    names = field_names(RunConfig) + field_names(system_config(system))
    fields = {name: value for name, value in SIZES.items() if name in names} | more
    fields |= {"total_steps": num_evaluations * 16, "num_evaluations": num_evaluations, "seeds": (3, 5)}
    fields |= {"video": True}
    out = directory.parents[3]
    sable.train(TASKS[name], system=system, out=out, name=directory.name, quiet=True, **fields)


def diary_of(directory: Path) -> Path:
    """Where the last moments of a run are noted: beside all runs."""
    return directory.parents[3] / f"{directory.name}.txt"


def note(directory: Path, words: str) -> None:
    jot(diary_of(directory), words)


def partials(directory: Path) -> list[str]:
    folder = directory / checkpoint.FOLDER
    return sorted(path.name for path in folder.glob(".partial-*")) if folder.is_dir() else []


def kill_once(directory: Path, name: str, evaluations: int, rng: random.Random, moment: str) -> dict | None:
    """What came of one life that was to be killed at such a moment: inside a save, behind training that has
    gone on, at work, in the absolute evaluation, or while its film is made; None if it ended first."""
    inside = moment == "save"
    diary_of(directory).unlink(missing_ok=True)
    folder = directory / checkpoint.FOLDER
    known = checkpoint.steps(folder) if folder.is_dir() else []
    left = partials(directory)
    saves, seen = rng.randrange(1, 4), set()  # which of its saves, or of the stretches after one
    behind = rng.uniform(0.2, 0.6) if moment == "behind" else 0
    pid = child(lambda: train(directory, name, evaluations, behind))
    wait = None
    while (code := ended(pid)) is None:
        now = time.monotonic()
        new = [name for name in partials(directory) if name not in left]
        seen.update(new)
        left = [name for name in left if name in partials(directory)]
        begun = len(seen) >= (saves if inside else 1)
        if moment == "behind":
            begun = len(seen) >= saves and trains_behind(diary_of(directory))
        elif moment in ("absolute", "video"):
            begun = diary_of(directory).exists() and moment in diary_of(directory).read_text().split()
        if wait is None and begun:
            # Inside: somewhere in the save that has just begun. Else anywhere in the work that follows.
            wait = now + rng.uniform(0, {"save": 0.06, "behind": 0.2}.get(moment, 0.6))
        if moment == "behind" and wait is not None and not trains_behind(diary_of(directory)):
            wait = None  # that save has ended: the next one
        if wait is not None and now >= wait and (partials(directory) or not inside):
            os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            break
        time.sleep(0.0005)
    if code == 0:
        return None
    assert code == -signal.SIGKILL, code
    after = checkpoint.steps(folder)
    whole = [step for step in after if checkpoint._is_whole(folder / f"{step:010d}")]
    lost = bool(known) and (not whole or max(whole) < max(known))
    last = diary_of(directory).read_text().split()[-1:] if diary_of(directory).exists() else []
    if moment == "behind":
        found = "behind" if partials(directory) and trains_behind(diary_of(directory)) else "other"
    else:
        found = "save" if partials(directory) else (last or ["work"])[0]
    return {"moment": found, "committed": after, "whole": whole, "lost": lost}


def work_long(directory: Path, diary: Path, blocks: int) -> None:
    """Train what takes long, keeping a diary of phases and of finished updates. With several blocks its unit
    takes long to compile too, and is not read from a cache; with none it is saved in the background."""

    class Diary(loop.Logger):
        def _note(self, *words):
            jot(diary, " ".join(map(str, words)))

        def phase(self, text):
            super().phase(text)
            if text == "compiling" and blocks > 1:
                jax.config.update("jax_enable_compilation_cache", False)
            self._note("phase", text)

        def progress(self, steps, seconds_training):
            super().progress(steps, seconds_training)
            self._note("finished", steps // 256)

    loop.Logger = Diary
    if not blocks:
        write_behind(diary, 1.0)
    system = directory.parent.name
    names = field_names(RunConfig) + field_names(system_config(system))
    fields = {name: value for name, value in SIZES.items() if name in names}
    fields |= {"total_steps": 1_000_000_000, "num_evaluations": 100_000, "num_envs": 16, "rollout_length": 16}
    fields |= {} if blocks else {"total_steps": 25_600_000}  # an evaluation, and so a save, every update
    if blocks > 1:
        fields |= {"num_blocks": blocks, "num_heads": 4, "embed_dim": 64, "num_minibatches": 4}
    result = sable.train(
        TASKS[system], system=system, out=directory.parents[3], name=directory.name, quiet=True, **fields
    )
    os._exit(128 + (result.interrupted or 0))


def end_once(directory: Path, rng: random.Random, blocks: int) -> dict:
    """What came of one life that was asked to end."""
    diary = directory.parents[3] / f"{directory.name}.txt"
    pid = child(lambda: work_long(directory, diary, blocks))
    wanted = "phase compiling" if blocks > 1 else "phase training"
    while not diary.exists() or wanted not in diary.read_text() or not (blocks or trains_behind(diary)):
        assert ended(pid) is None, "it ended by itself"
        time.sleep(0.02)
    time.sleep(rng.uniform(0, min(3.0, blocks / 2)))
    behind = trains_behind(diary)
    asked = time.monotonic()
    said = diary.read_text().splitlines()
    os.kill(pid, signal.SIGTERM)
    while (code := ended(pid)) is None:
        if time.monotonic() - asked > 60:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    seconds = time.monotonic() - asked
    finished = [int(line.split()[1]) for line in diary.read_text().splitlines() if "finished" in line]
    folder = directory / checkpoint.FOLDER
    committed = checkpoint.steps(folder) if folder.is_dir() else []
    whole = [step for step in committed if checkpoint._is_whole(folder / f"{step:010d}")]
    saved = checkpoint._verified(folder / f"{whole[-1]:010d}")["facts"]["updates"] if whole else 0
    phase = [line for line in said if line.startswith("phase")][-1].removeprefix("phase ")
    return {
        "phase": phase,
        "behind": behind,
        "seconds": round(seconds, 2),
        "code": code,
        "finished": max(finished, default=0),
        "saved": saved,
    }


def main() -> None:
    folder, system, seed = Path(sys.argv[2]), sys.argv[3], int(sys.argv[-1])
    rng, runs = random.Random(seed), place(folder, system)
    if sys.argv[1] == "end":
        for number in range(int(sys.argv[4])):
            blocks = 1 if number % 2 and sys.argv[5] != "0" else int(sys.argv[5])
            life = end_once(runs / f"ended-{number}", rng, blocks)
            print(json.dumps(life), flush=True)
        return
    evaluations, kills = int(sys.argv[4]), int(sys.argv[5])
    killed, number = 0, 0

    def finish(directory: Path) -> None:
        pid = child(lambda: train(directory, system, evaluations))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    finish(runs / "whole")
    while killed < kills:
        moment = rng.choices(("save", "work", "absolute", "video"), (5, 1, 2, 2))[0]
        moment = "behind" if sys.argv[1] == "behind" else moment
        life = kill_once(runs / f"killed-{number}", system, evaluations, rng, moment)
        if life is None:  # it came to its end: the next one is killed
            number += 1
        else:
            killed += 1
            print(json.dumps(life), flush=True)
    if not (runs / f"killed-{number}" / "summary.json").exists():
        finish(runs / f"killed-{number}")


if __name__ == "__main__":
    main()
