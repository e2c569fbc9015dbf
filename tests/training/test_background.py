"""Large states are written while training goes on, from a copy that training does not touch."""

import errno
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sable.cli.main import main
from sable.errors import SableError
from sable.training import checkpoint, loop, progress
from sable.training.background import Background

TINY = "--system ippo --num-envs 4 --rollout-length 4 --num-epochs 1 --num-minibatches 1 --no-video --quiet"
TINY += " --policy-layers 8 --critic-layers 8 --evaluation-episodes 2 --absolute-episodes 2 --name r"
TINY += " --total-steps 128 --num-evaluations 8"


@pytest.fixture
def behind(monkeypatch):
    """Every state is large, and saved after every evaluation; units are of one update."""
    monkeypatch.setattr(progress, "SMALL_STATE", 0)
    monkeypatch.setattr(progress, "MAX_SAVING_SHARE", float("inf"))
    monkeypatch.setattr(progress, "SECONDS_PER_CALL", 0.0)


def test_what_fails_in_the_background_is_raised_once():
    background, begin = Background(), threading.Event()

    def fail():
        begin.wait(10)
        raise SableError("no room")

    background.start(fail)
    background.refuse_failed()
    assert background.busy()
    begin.set()
    with pytest.raises(SableError, match="no room"):
        background.wait()
    background.wait()
    assert not background.busy()


def test_one_thing_waits_for_the_one_before_it():
    background, done = Background(), []

    def slow() -> None:
        time.sleep(0.1)
        done.append(1)

    background.start(slow)
    background.start(lambda: done.append(2))
    background.wait()
    assert done == [1, 2]


def test_a_snapshot_is_not_what_training_does_next(tmp_path):
    """The next update is given the memory of the state and writes over it, as if nobody had looked."""
    state = {"x": jnp.arange(100_000.0), "keys": jax.random.split(jax.random.key(3), 4)}
    like = jax.eval_shape(lambda: state)
    expected = np.arange(100_000.0, dtype=np.float32)
    snapshot = checkpoint.take(tmp_path, 1, state, {})
    before = {name: array.copy() for name, array in snapshot.arrays.items()}
    advance = jax.jit(lambda x: x * 2 - 1, donate_argnums=0)
    x, place = state["x"], state["x"].unsafe_buffer_pointer()
    for _ in range(3):
        x = jax.block_until_ready(advance(x))
    assert x.unsafe_buffer_pointer() == place
    checkpoint.commit(snapshot)
    found = checkpoint.restore(tmp_path, like).state
    np.testing.assert_array_equal(found["x"], expected)
    np.testing.assert_array_equal(jax.random.key_data(found["keys"]), before["keys"])


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, behind, monkeypatch):
    """The first write ends only once an update after it has been finished."""
    went_on, writing, waited = threading.Event(), threading.Event(), []

    def write(*args, real=checkpoint._write):
        if not writing.is_set():
            writing.set()
            waited.append(went_on.wait(60))
        real(*args)

    class Watching(loop.Logger):
        def progress(self, steps, seconds_training):
            super().progress(steps, seconds_training)
            if writing.is_set():
                went_on.set()

    monkeypatch.setattr(checkpoint, "_write", write)
    monkeypatch.setattr(loop, "Logger", Watching)
    assert main(["train", "probe/bandit", *TINY.split(), "--out", str(tmp_path)]) == 0
    assert waited == [True]
    folder = tmp_path / "probe" / "bandit" / "ippo" / "r" / checkpoint.FOLDER
    newest = checkpoint._verified(folder / f"{max(checkpoint.steps(folder)):010d}")
    assert newest["facts"]["updates"] == newest["facts"]["evaluations"] == 8


@pytest.mark.parametrize("at", [2, 8])
def test_a_write_that_fails_behind_ends_the_run_in_a_line(tmp_path, behind, monkeypatch, capfd, at):
    """In the middle of training, and the last one."""
    count = 0

    def write(*args, real=checkpoint._write):
        nonlocal count
        if (count := count + 1) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    class Slow(loop.Logger):
        def phase(self, text):
            super().phase(text)
            if text == "evaluating":
                time.sleep(0.1)  # so that no write is left out

    monkeypatch.setattr(checkpoint, "_write", write)
    monkeypatch.setattr(loop, "Logger", Slow)
    assert main(["train", "probe/bandit", *TINY.split(), "--out", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "No space left on device" in said and "--resume" in said
    run = tmp_path / "probe" / "bandit" / "ippo" / "r"
    assert len(checkpoint.steps(run / checkpoint.FOLDER)) == min(at - 1, checkpoint.KEEP)
    assert not list((run / checkpoint.FOLDER).glob(".partial*")) and not (run / "summary.json").exists()
    assert main(["train", "--quiet", "--resume", str(run)]) == 0
