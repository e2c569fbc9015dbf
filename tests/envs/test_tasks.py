"""The table of tasks: names, sizes, mistakes. No environment is made here."""

import json
import subprocess
import sys

import pytest

from sable import envs
from sable.envs.tasks import PAPER, list_tasks, parse, with_options
from sable.errors import SableError

# id: agents, view, actions, action components, steps; as measured on the suites' own constructors.
SIZES = {
    **{f"rware/{size}-4ag{level}": (4, 66, 5, 0, 500)
       for size in ("tiny", "small", "medium", "large", "xlarge") for level in ("", "-hard")},
    "rware/tiny-2ag": (2, 66, 5, 0, 500), "rware/tiny-2ag-hard": (2, 66, 5, 0, 500),
    "rware/medium-6ag": (6, 66, 5, 0, 500),
    "rware/large-8ag": (8, 66, 5, 0, 500), "rware/large-8ag-hard": (8, 66, 5, 0, 500),
    "mabrax/hopper_3x1": (3, 12, 0, 1, 1000), "mabrax/halfcheetah_6x1": (6, 15, 0, 1, 1000),
    "mabrax/walker2d_2x3": (2, 12, 0, 3, 1000), "mabrax/ant_4x2": (4, 22, 0, 2, 1000),
    "mabrax/humanoid_9|8": (2, 250, 0, 9, 1000),
    "smax/2s3z": (5, 127, 10, 0, 101), "smax/3s5z": (8, 205, 13, 0, 101),
    "smax/3s_vs_5z": (3, 101, 10, 0, 101),
    "smax/6h_vs_8z": (6, 179, 13, 0, 101), "smax/5m_vs_6m": (5, 140, 11, 0, 101),
    "smax/10m_vs_11m": (10, 270, 16, 0, 101), "smax/3s5z_vs_3s6z": (8, 218, 14, 0, 101),
    "smax/27m_vs_30m": (27, 738, 35, 0, 101), "smax/smacv2_5_units": (5, 127, 10, 0, 101),
    "smax/smacv2_10_units": (10, 257, 15, 0, 101), "smax/smacv2_20_units": (20, 517, 25, 0, 101),
    "connector/con-5x5x3a": (3, 54, 5, 0, 25), "connector/con-7x7x5a": (5, 54, 5, 0, 49),
    "connector/con-10x10x10a": (10, 54, 5, 0, 100), "connector/con-15x15x23a": (23, 54, 5, 0, 225),
    "lbf/8x8-2p-2f-coop": (2, 12, 6, 0, 100), "lbf/2s-8x8-2p-2f-coop": (2, 12, 6, 0, 100),
    "lbf/10x10-3p-3f": (3, 18, 6, 0, 100), "lbf/2s-10x10-3p-3f": (3, 18, 6, 0, 100),
    "lbf/15x15-3p-5f": (3, 24, 6, 0, 100), "lbf/15x15-4p-3f": (4, 21, 6, 0, 100),
    "lbf/15x15-4p-5f": (4, 27, 6, 0, 100),
    "mpe/simple_spread_3ag": (3, 18, 0, 5, 26), "mpe/simple_spread_5ag": (5, 30, 0, 5, 26),
    "mpe/simple_spread_10ag": (10, 60, 0, 5, 26),
    "lbf/2s-32x32-32p-16f": (32, 75, 6, 0, 100), "lbf/2s-45x45-64p-32f": (64, 75, 6, 0, 100),
    "lbf/2s-64x64-128p-64f": (128, 75, 6, 0, 100),
    **{f"neom/simple-sine-{n}ag": (n, 26, 5, 0, 100) for n in (32, 512, 1024)},
    **{f"neom/half-1-half-0-{n}ag": (n, 5, 2, 0, 100) for n in (32, 512, 1024)},
    **{f"neom/quick-flip-{n}ag": (n, 10, 3, 0, 100) for n in (32, 512, 1024)},
}  # fmt: skip


def sizes(task):
    return task.num_agents, task.view_size, task.num_actions, task.action_size, task.time_limit


def test_the_table_has_the_papers_57_tasks_with_their_sizes():
    assert len(PAPER) == 57
    assert {name: sizes(parse(name)) for name in PAPER} == SIZES
    groups = [parse(name).group for name in PAPER]
    assert [groups.count(group) for group in ("paper", "scaling", "neom")] == [45, 3, 9]


def test_the_list_ends_with_probes_and_null_and_can_be_of_one_suite():
    names = [task.id for task in list_tasks()]
    assert tuple(names[:57]) == PAPER
    assert {name.split("/")[0] for name in names[57:]} == {"probe", "null"}
    assert [task.id for task in list_tasks("mpe")] == [name for name in PAPER if name.startswith("mpe/")]
    assert all(parse(task.id) == task for task in list_tasks())
    json.dumps([[dict(task.arguments), dict(task.options)] for task in list_tasks()])


def test_requests_follow_the_level_of_a_warehouse():
    queue = {name: parse(f"rware/{name}").arguments["request_queue_size"] for name in
             ("small-3ag-easy", "small-3ag", "small-3ag-hard", "tiny-4ag-hard")}  # fmt: skip
    assert queue == {"small-3ag-easy": 6, "small-3ag": 3, "small-3ag-hard": 1, "tiny-4ag-hard": 2}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rware/small-3ag-easy", (3, 66, 5, 0, 500)),
        ("lbf/1s-12x12-9p-3f", (9, 27, 6, 0, 100)),  # a window of 9 cells holds no more than 9 things
        ("lbf/3s-12x12-9p-3f-coop", (9, 36, 6, 0, 100)),
        ("lbf/20x20-40p-9f", (40, 147, 6, 0, 100)),  # without a window nothing is hidden
        ("connector/con-6x6x2a", (2, 54, 5, 0, 36)),
        ("smax/25m", (25, 647, 30, 0, 101)),
        ("mpe/simple_spread_7ag", (7, 42, 0, 5, 26)),
        ("neom/quick-flip-4096ag", (4096, 10, 3, 0, 100)),
        ("null/77ag", (77, 16, 5, 0, 100)),
    ],
)
def test_names_that_follow_a_convention_work(name, expected):
    assert sizes(parse(name)) == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tiny-4ag", "did you mean 'rware/tiny-4ag'"),
        ("rwaer/tiny-4ag", "did you mean 'rware/tiny-4ag'"),
        ("foo", "suites: rware"),
        ("", "suites: rware"),
        ("rware/tiny-4", "for example rware/tiny-4ag"),
        ("rware/tiny-04ag", "rware/<tiny|small|medium|large|xlarge>-<agents>ag"),
        ("rware/tiny-0ag", "no agents"),
        ("rware/tiny-1ag-hard", "2 agents or more"),
        ("rware/tiny-40ag", "32"),
        ("lbf/8x9-2p-2f", "not square"),
        ("lbf/5x5-2p-3f", "too small"),
        ("lbf/9s-8x8-2p-2f", "sight"),
        ("lbf/8x8-2p-0f", "no food"),
        ("lbf/20x20-90p-9f", "40 agents"),
        ("connector/con-3x3x9a", "room for 2"),
        ("smax/3s6z", "did you mean 'smax/3s5z'"),
        ("mabrax/ant", "did you mean 'mabrax/ant_4x2'"),
        ("mpe/simple_spread_1ag", "2 agents or more"),
        ("neom/sine-3ag", "half-1-half-0"),
        ("null/0ag", "no agents"),
        ("probe/recal", "did you mean 'probe/recall'"),
    ],
)
def test_mistakes_get_one_line_that_says_what_would_work(name, said):
    with pytest.raises(SableError) as error:
        parse(name)
    message = str(error.value)
    assert said in message and repr(name) in message and "\n" not in message


def test_options_take_text_and_refuse_what_they_cannot_be():
    task = parse("neom/quick-flip-32ag")
    assert with_options(task, {"history": "2"}).view_size == 1 + 2 * 3
    assert with_options(task, {"normalisation": "range"}).arguments["normalisation"] == "range"
    with pytest.raises(SableError, match=r"no option 'rewrd'.*did you mean 'reward'.*individual\|mean"):
        with_options(parse("mpe/simple_spread_3ag"), {"rewrd": "mean"})
    with pytest.raises(SableError, match=r"individual\|mean"):
        with_options(parse("connector/con-5x5x3a"), {"reward": "sum"})
    with pytest.raises(SableError, match="have no options"):
        with_options(parse("rware/tiny-4ag"), {"reward": "mean"})
    for wrong in ("-1", 1.5, "many", True):
        with pytest.raises(SableError, match="count"):
            with_options(task, {"history": wrong})


def test_an_unknown_suite_cannot_be_listed():
    with pytest.raises(SableError, match="did you mean 'rware'"):
        list_tasks("rwar")


def test_listing_imports_no_jax():
    code = "import sys, sable.envs; sable.envs.list_tasks(); assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_missing_suite_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxmarl", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "sable.envs.suites.jaxmarl", raising=False)
    with pytest.raises(SableError, match=r"pip install 'sable-marl\[jaxmarl\]'"):
        envs.make("mpe/simple_spread_3ag")
