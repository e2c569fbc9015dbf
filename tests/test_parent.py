"""A process that another one of ours started ends with it."""

import os
import signal
import subprocess
import sys
import time

import pytest

CHILD = """
import os, signal, sys, time
from sable.parent import end_with_parent
end_with_parent(int(sys.argv[1]), int(sys.argv[2]), by_kernel=sys.argv[3] == "kernel")
print(os.getpid(), flush=True)
time.sleep(60)
"""

PARENT = f"""
import os, subprocess, sys, time
child = [sys.executable, "-c", {CHILD!r}, str(os.getpid()), *sys.argv[1:]]
subprocess.Popen(child)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    """Whether a process, which may be nobody's child any more, still runs."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(state.strip()) and "Z" not in state


@pytest.mark.parametrize(("how", "number"), [("kernel", signal.SIGKILL), ("thread", signal.SIGTERM)])
def test_a_child_ends_with_its_parent(how, number):
    command = [sys.executable, "-c", PARENT, str(int(number)), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_whose_parent_ended_before_it_looked_ends_at_once(number):
    """The parent is then another process than the one that started it."""
    command = [sys.executable, "-c", CHILD, str(os.getppid()), str(int(number)), "kernel"]
    done = subprocess.run(command, capture_output=True, timeout=20)
    assert done.returncode == -number and done.stdout == b""
