"""What a process may have of the host's memory, what is foreseen of it, and how it is said that there is no
more."""

import os
import resource

import jax.numpy as jnp
import numpy as np
import pytest

import sable
from sable.errors import SableError
from sable.runs import plan
from sable.training import device_memory as memory

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def limits(tmp_path, cgroup: str, **files: str) -> list[int]:
    """The limits of a process in these groups, of which the files say something."""
    (tmp_path / "cgroup").write_text(cgroup)
    for name, content in files.items():
        path = tmp_path / "groups" / name.replace("__", "/").replace("_max", ".max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return memory.process_limits(tmp_path, tmp_path / "groups")


def test_the_limits_of_a_container_and_of_the_job_around_it_count(tmp_path):
    found = limits(tmp_path, "0::/job/step\n", job__step__memory_max="max\n", job__memory_max="2000000\n")
    assert found == [2_000_000]


def test_the_limit_of_older_control_groups_counts(tmp_path):
    (tmp_path / "groups" / "memory" / "box").mkdir(parents=True)
    (tmp_path / "groups" / "memory" / "box" / "memory.limit_in_bytes").write_text("3000000\n")
    assert limits(tmp_path, "5:cpu:/box\n4:hugetlb,memory:/box\n") == [3_000_000]


def test_where_nothing_is_limited_there_is_the_machines_memory(tmp_path):
    assert limits(tmp_path, "0::/\n") == []
    assert memory.process_limits(tmp_path / "none", tmp_path) == []


def test_the_limit_of_the_process_itself_counts(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (PHYSICAL // 2, resource.RLIM_INFINITY))
    assert memory.capacity().total <= PHYSICAL // 2
    assert memory.capacity().available <= PHYSICAL // 2


@pytest.fixture
def little(monkeypatch):
    """A host that has next to nothing."""

    def little(total):
        monkeypatch.setattr(memory, "capacity", lambda: memory.Capacity(total, total))

    return little


@pytest.mark.parametrize("name", ["evaluation_episodes", "absolute_episodes"])
def test_episodes_that_do_not_fit_are_foreseen_and_named_and_nothing_is_left(little, tmp_path, name):
    """Before anything is compiled: each is played in an environment of its own, like those of training."""
    little(2_000_000)
    fields = {
        "num_envs": 4,
        "rollout_length": 2,
        "policy_layers": (4,),
        "critic_layers": (4,),
        "video": False,
    }
    fields |= {"evaluation_episodes": 1, "absolute_episodes": 1, name: 10**6}
    with pytest.raises(SableError, match=rf"{name}=1000000: so many side by side need .* take fewer"):
        sable.train("probe/bandit", system="ippo", out=tmp_path / "runs", quiet=True, **fields)
    assert list(tmp_path.rglob("*.json")) == []


ERRORS = {
    "jax": lambda: jnp.zeros(1 << 46).block_until_ready(),
    "numpy": lambda: np.zeros(1 << 55),
    "python": lambda: bytearray(1 << 62),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_allocation_that_fails_is_one_line(kind):
    with (
        pytest.raises(SableError, match=r"ran out of memory.* fewer --num-envs") as error,
        memory.explain_out_of_memory(),
    ):
        ERRORS[kind]()
    assert "\n" not in str(error.value) and not isinstance(error.value, memory.DoesNotFit)


def test_a_plan_that_runs_out_of_memory_says_so_in_one_line(monkeypatch):
    monkeypatch.setattr(plan, "DryRun", lambda *_: ERRORS["numpy"]())
    with pytest.raises(SableError, match="ran out of memory"):
        sable.plan("probe/bandit")
