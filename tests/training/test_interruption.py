"""What signals do to a process: what is asked for first, what a second one does, and what it says last."""

import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import hashlib, os, signal, sys, time
from sable.training import interruption as module
from sable.training.interruption import Exit, interruption, raise_interrupt

module.PATIENCE, module.TWICE = 0.5, 0.3

def stuck(seconds=20):  # in compiled code, so that Python's handlers wait
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000_000)

signal.signal(signal.SIGINT, raise_interrupt)
{before}
with interruption(Exit("go on like this", requeue={requeue})) as state:
    print("ready", flush=True)
    {body}
print("ended by itself", state.signal, flush=True)
"""
WAIT = "while not state.signal: time.sleep(0.01)"
SAVING = "state.unsaved = True; stuck()"


def ends(body, *numbers, before="", requeue=False, pause=0.0):
    """(exit code, output, errors, seconds) of a process that is sent these signals."""
    code = SCRIPT.format(body=body, before=before, requeue=requeue)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout and process.stdout.readline() == "ready\n"
            began = time.monotonic()
            for number in numbers:
                time.sleep(pause)
                process.send_signal(number)
            out, err = process.communicate(timeout=15)
        finally:
            process.kill()
    return process.returncode, out, err, time.monotonic() - began


LINE = "sable: interrupted; go on like this\n"
STOP = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", STOP)
def test_the_first_is_a_request(number):
    assert ends(WAIT, number)[:3] == (0, f"ended by itself {int(number)}\n", "")


@pytest.mark.parametrize("requeue", [False, True])
def test_two_of_ctrl_c_in_a_save_end_it_at_once_in_one_line(requeue):
    code, out, err, seconds = ends(SAVING, signal.SIGINT, signal.SIGINT, pause=0.05, requeue=requeue)
    assert (code, out, err) == (75 if requeue else 130, "", LINE) and seconds < 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_where_nothing_is_lost_a_process_that_hears_nothing_is_ended(number):
    code, out, err, seconds = ends("stuck()", number)
    assert (code, out, err) == (128 + number, "", LINE) and 0.4 < seconds < 5


def test_where_something_is_unsaved_it_is_waited_for():
    body = "state.unsaved = True; time.sleep(1.2); state.unsaved = False; stuck()"
    code, out, err, seconds = ends(body, signal.SIGTERM)
    assert (code, out, err) == (143, "", LINE) and 1.1 < seconds < 5


def test_what_schedulers_send_twice_is_one_request_and_later_another():
    body = "state.unsaved = True; time.sleep(1)"
    assert ends(body, signal.SIGTERM, signal.SIGTERM)[:3] == (0, "ended by itself 15\n", "")
    code, _, err, seconds = ends(SAVING, signal.SIGTERM, signal.SIGTERM, pause=0.5)
    assert (code, err) == (143, LINE) and seconds < 5


@pytest.mark.parametrize("number", STOP)
def test_what_can_be_done_again_is_not_waited_for(number):
    before = "module.PATIENCE = 60"
    code, out, err, seconds = ends("state.finishing = True; stuck()", number, before=before)
    assert (code, out, err) == (128 + number, "", LINE) and seconds < 5


def test_a_save_is_asked_for_as_often_as_one_likes():
    body = """
    for _ in range(2):
        while not state.save: time.sleep(0.01)
        state.save = False
        os.write(1, b"saved\\n")"""
    assert ends(body, signal.SIGUSR1, signal.SIGUSR1, pause=0.3)[:3] == (
        0, "saved\nsaved\nended by itself 0\n", "",
    )  # fmt: skip


def test_in_another_program_a_second_ctrl_c_is_pythons_own():
    before = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    for body, count in (
        ("state.unsaved = True; time.sleep(20)", 2),
        ("state.finishing = True; time.sleep(20)", 1),
    ):
        numbers = [signal.SIGINT] * count
        code, out, err, _ = ends(body, *numbers, before=before, pause=0.1)
        assert code in (1, -signal.SIGINT, 130) and out == "" and err.endswith("KeyboardInterrupt\n"), body


def test_what_is_ignored_stays_so_and_others_handlers_stay():
    before = "signal.signal(signal.SIGHUP, signal.SIG_IGN); heard = []\n"
    before += "signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))"
    body = "while not (state.signal or heard): time.sleep(0.01)\n    print(heard, state.save, state.signal)"
    assert ends(body, signal.SIGHUP, signal.SIGUSR1, before=before, pause=0.1)[:2] == (
        0, "[10] False 0\nended by itself 0\n",
    )  # fmt: skip


def test_a_terminal_that_stops_taking_words_does_not_hold_it_up():
    """Both streams are pipes that are full, and one holds a lock."""
    before = "stdout = os.dup(1)\n"
    before += "import threading, fcntl\nr, w = os.pipe(); os.dup2(w, 2)\n"
    before += "fcntl.fcntl(w, fcntl.F_SETFL, os.O_NONBLOCK)\n"
    before += "try:\n    while True: os.write(w, bytes(4096))\nexcept BlockingIOError: pass\n"
    before += "fcntl.fcntl(w, fcntl.F_SETFL, 0)"
    body = "state.on_forced_exit = lambda: time.sleep(60); stuck()"
    code, out, _, seconds = ends(body, signal.SIGTERM, before=before)
    assert (code, out) == (143, "") and seconds < 5
