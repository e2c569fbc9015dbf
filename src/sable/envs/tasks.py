"""Every task by name: what it is made of and how large it is. Imports no jax, to answer at once."""

import dataclasses
import re
import typing as tp
from collections.abc import Mapping

from sable.errors import SableError, suggest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One task: its name, its sizes, and the arguments its environment is made with."""

    id: str
    """Suite and name, `rware/tiny-4ag`."""
    suite: str
    name: str
    num_agents: int
    view_size: int
    num_actions: int = 0
    """Discrete actions per agent; 0 where actions are continuous."""
    action_size: int = 0
    """Components of one agent's action; 0 where actions are discrete."""
    time_limit: int
    """The most steps an episode can last."""
    group: str
    """`paper`, `scaling` or `neom` for the tasks of the paper, `probe`, `null`, or `other`."""
    arguments: Mapping[str, tp.Any] = dataclasses.field(default_factory=dict, hash=False)
    """Arguments of the suite's constructor."""
    options: Mapping[str, tuple] = dataclasses.field(default_factory=dict, hash=False)
    """The arguments a user may change, with the values they may take."""


_GROUPS = {
    "paper": {
        "rware": ["tiny-2ag", "tiny-2ag-hard", "tiny-4ag", "tiny-4ag-hard", "small-4ag", "small-4ag-hard",
                  "medium-4ag", "medium-4ag-hard", "large-4ag", "large-4ag-hard", "xlarge-4ag",
                  "xlarge-4ag-hard", "medium-6ag", "large-8ag", "large-8ag-hard"],
        "mabrax": ["hopper_3x1", "halfcheetah_6x1", "walker2d_2x3", "ant_4x2", "humanoid_9|8"],
        "smax": ["2s3z", "3s5z", "3s_vs_5z", "6h_vs_8z", "5m_vs_6m", "10m_vs_11m", "3s5z_vs_3s6z",
                 "27m_vs_30m", "smacv2_5_units", "smacv2_10_units", "smacv2_20_units"],
        "connector": ["con-5x5x3a", "con-7x7x5a", "con-10x10x10a", "con-15x15x23a"],
        "lbf": ["8x8-2p-2f-coop", "2s-8x8-2p-2f-coop", "10x10-3p-3f", "2s-10x10-3p-3f", "15x15-3p-5f",
                "15x15-4p-3f", "15x15-4p-5f"],
        "mpe": ["simple_spread_3ag", "simple_spread_5ag", "simple_spread_10ag"],
    },
    "scaling": {"lbf": ["2s-32x32-32p-16f", "2s-45x45-64p-32f", "2s-64x64-128p-64f"]},
    "neom": {"neom": [f"{pattern}-{agents}ag" for pattern in ("simple-sine", "half-1-half-0", "quick-flip")
                      for agents in (32, 512, 1024)]},
}  # fmt: skip
_GROUP = {
    f"{suite}/{name}": group
    for group, suites in _GROUPS.items()
    for suite, names in suites.items()
    for name in names
}
PAPER = tuple(_GROUP)
"""The 57 task ids of the paper: 45 of its benchmark, 3 of scaled LBF, 9 of Neom."""

_WAREHOUSES = {  # rows and columns of shelf clusters
    "tiny": (1, 3),
    "small": (2, 3),
    "medium": (2, 5),
    "large": (3, 5),
    "xlarge": (4, 5),
}
_SMAX_MAPS = {  # allies, enemies
    "3m": (3, 3),
    "2s3z": (5, 5),
    "25m": (25, 25),
    "3s5z": (8, 8),
    "8m": (8, 8),
    "5m_vs_6m": (5, 6),
    "10m_vs_11m": (10, 11),
    "27m_vs_30m": (27, 30),
    "3s5z_vs_3s6z": (8, 9),
    "3s_vs_5z": (3, 5),
    "6h_vs_8z": (6, 8),
    "smacv2_5_units": (5, 5),
    "smacv2_10_units": (10, 10),
    "smacv2_20_units": (20, 20),
}
_MABRAX = {  # agents, view size, action components
    "hopper_3x1": (3, 12, 1),
    "halfcheetah_6x1": (6, 15, 1),
    "walker2d_2x3": (2, 12, 3),
    "ant_4x2": (4, 22, 2),
    "humanoid_9|8": (2, 250, 9),
}
NEOM_PATTERNS = {
    "simple-sine": (0.5, 0.7, 0.8, 0.7, 0.5, 0.3, 0.2, 0.3),
    "half-1-half-0": (1.0, 0.0),
    "quick-flip": (0.5, 0.0, -0.5, 0.0),
}
_PROBES = {  # agents, view size, discrete actions, action components, steps
    "bandit": (2, 1, 3, 0, 1),
    "sparse": (2, 10, 2, 0, 10),
    "observation": (2, 2, 2, 0, 1),
    "delayed": (2, 4, 2, 0, 4),
    "recall": (2, 4, 2, 0, 4),
    "coordination": (2, 1, 2, 0, 1),
    "masked": (2, 1, 3, 0, 1),
    "continuous": (2, 2, 0, 2, 1),
}
_NULLS = ("null/32ag", "null/1024ag")
_REWARD = ("individual", "mean")
_MOST = 2**15
"""The largest number a task's name, or an option, may have: the cells of a grid of it are counted in 32
bits."""
_ANY_COUNT = (f"a count from 0 to {_MOST}",)

_COUNT = "(0|[1-9][0-9]*)"


@dataclasses.dataclass(frozen=True)
class _Suite:
    """How a suite names its tasks and what a name amounts to."""

    pattern: str
    """Regular expression of the names."""
    convention: str
    """The same for people."""
    example: str
    sizes: tp.Callable[..., dict]
    """From the pattern's groups to the fields of a Task; raises ValueError, saying why, where none can be."""


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise ValueError(why)


def _rware(size: str, agents: str, level: str | None) -> dict:
    num_agents, (rows, columns) = int(agents), _WAREHOUSES[size]
    queue = {None: num_agents, "easy": 2 * num_agents, "hard": num_agents // 2}[level]
    num_shelves = 16 * (rows * columns - 1)  # clusters of 2x8; the one in front of the goals is left out
    _require(num_agents > 0, "it has no agents")
    _require(queue > 0, "half of its agents' requests round down to none; hard needs 2 agents or more")
    _require(
        queue < num_shelves, f"it requests {queue} shelves at a time and a {size} warehouse has {num_shelves}"
    )
    arguments = {
        "shelf_rows": rows,
        "shelf_columns": columns,
        "num_agents": num_agents,
        "request_queue_size": queue,
    }
    return dict(num_agents=num_agents, view_size=66, num_actions=5, time_limit=500, arguments=arguments)


def _lbf(sight: str | None, rows: str, columns: str, agents: str, foods: str, coop: str | None) -> dict:
    grid, num_agents, num_foods = int(rows), int(agents), int(foods)
    fov = grid if sight is None else int(sight)
    _require(rows == columns, "its grid is not square")
    _require(grid >= 5, "its grid is smaller than 5x5")
    _require(num_agents > 0, "it has no agents")
    _require(num_foods > 0, "it has no food")
    _require(1 <= fov <= grid, f"its sight must lie between 1 and the grid's {grid}")
    _require(
        (grid - 2) ** 2 - num_agents > 5 * num_foods,
        f"a {grid}x{grid} grid is too small for its agents and food",
    )
    # The suite keeps agents out of every row whose index is a food's row or column; no food is on the border.
    num_open = grid * (grid - min(2 * num_foods, grid - 2))
    _require(
        num_agents <= num_open,
        f"a {grid}x{grid} grid with {num_foods} foods may start only {num_open} agents",
    )
    num_items = num_agents + num_foods
    if sight is not None:
        num_items = min(num_items, (2 * fov + 1) ** 2)
    return dict(
        num_agents=num_agents,
        view_size=3 * num_items,
        num_actions=6,
        time_limit=100,
        arguments={
            "grid_size": grid,
            "fov": fov,
            "num_agents": num_agents,
            "num_food": num_foods,
            "force_coop": coop is not None,
        },
    )


def _connector(rows: str, columns: str, agents: str) -> dict:
    grid, num_agents = int(rows), int(agents)
    _require(rows == columns, "its grid is not square")
    _require(grid >= 2, "its grid is smaller than 2x2")
    _require(num_agents > 0, "it has no agents")
    # The generator draws a free start with a free neighbour for each agent in turn; where none is left
    # it goes wrong silently.
    most = grid * grid // 4
    _require(num_agents <= most, f"a {grid}x{grid} grid has room for {most} agents and their wires")
    return dict(
        num_agents=num_agents,
        view_size=54,
        num_actions=5,
        time_limit=grid * grid,
        arguments={"grid_size": grid, "num_agents": num_agents, "reward": "individual"},
        options={"reward": _REWARD},
    )


def _smax(name: str) -> dict:
    allies, enemies = _SMAX_MAPS[name]
    return dict(
        num_agents=allies,
        view_size=13 * (allies - 1 + enemies) + 10,
        num_actions=5 + enemies,
        time_limit=101,  # the suite tests its limit of 100 before it counts
        arguments={"map_name": name},
    )


def _mpe(agents: str) -> dict:
    num_agents = int(agents)
    _require(num_agents > 1, "it needs 2 agents or more")
    return dict(
        num_agents=num_agents,
        view_size=6 * num_agents,
        action_size=5,
        time_limit=26,  # the suite tests its limit of 25 before it counts
        arguments={"num_agents": num_agents, "reward": "individual"},
        options={"reward": _REWARD},
    )


def _mabrax(name: str) -> dict:
    num_agents, view_size, action_size = _MABRAX[name]
    return dict(
        num_agents=num_agents,
        view_size=view_size,
        action_size=action_size,
        time_limit=1000,
        arguments={"name": name},
    )


def _neom(pattern: str, agents: str) -> dict:
    num_agents, num_actions = int(agents), len(set(NEOM_PATTERNS[pattern]))
    _require(num_agents > 0, "it has no agents")
    return dict(
        num_agents=num_agents,
        view_size=1 + num_actions**2,
        num_actions=num_actions,
        time_limit=100,
        arguments={
            "pattern": NEOM_PATTERNS[pattern],
            "num_agents": num_agents,
            "history": num_actions,
            "normalisation": "worst_case",
        },
        options={"history": _ANY_COUNT, "normalisation": ("worst_case", "range")},
    )


def _probe(name: str) -> dict:
    num_agents, view_size, num_actions, action_size, time_limit = _PROBES[name]
    return dict(
        num_agents=num_agents,
        view_size=view_size,
        num_actions=num_actions,
        action_size=action_size,
        time_limit=time_limit,
        group="probe",
        arguments={"name": name},
    )


def _null(agents: str) -> dict:
    num_agents = int(agents)
    _require(num_agents > 0, "it has no agents")
    return dict(
        num_agents=num_agents,
        view_size=16,
        num_actions=5,
        time_limit=100,
        group="null",
        arguments={"num_agents": num_agents},
    )


def _one_of(names: tp.Iterable[str]) -> str:
    return f"({'|'.join(map(re.escape, names))})"


SUITES = {
    "rware": _Suite(
        f"{_one_of(_WAREHOUSES)}-{_COUNT}ag(?:-(easy|hard))?",
        f"rware/<{'|'.join(_WAREHOUSES)}>-<agents>ag[-easy|-hard]",
        "rware/tiny-4ag",
        _rware,
    ),
    "mabrax": _Suite(
        _one_of(_MABRAX),
        f"one of {', '.join(f'mabrax/{name}' for name in _MABRAX)}",
        "mabrax/ant_4x2",
        _mabrax,
    ),
    "smax": _Suite(
        _one_of(_SMAX_MAPS), f"smax/<map>, the maps being {', '.join(_SMAX_MAPS)}", "smax/3s5z", _smax
    ),
    "connector": _Suite(
        f"con-{_COUNT}x{_COUNT}x{_COUNT}a",
        "connector/con-<grid>x<grid>x<agents>a",
        "connector/con-5x5x3a",
        _connector,
    ),
    "lbf": _Suite(
        f"(?:{_COUNT}s-)?{_COUNT}x{_COUNT}-{_COUNT}p-{_COUNT}f(-coop)?",
        "lbf/[<sight>s-]<grid>x<grid>-<agents>p-<foods>f[-coop]",
        "lbf/2s-8x8-2p-2f-coop",
        _lbf,
    ),
    "mpe": _Suite(f"simple_spread_{_COUNT}ag", "mpe/simple_spread_<agents>ag", "mpe/simple_spread_3ag", _mpe),
    "neom": _Suite(
        f"{_one_of(NEOM_PATTERNS)}-{_COUNT}ag",
        f"neom/<{'|'.join(NEOM_PATTERNS)}>-<agents>ag",
        "neom/simple-sine-32ag",
        _neom,
    ),
    "probe": _Suite(
        _one_of(_PROBES), f"one of {', '.join(f'probe/{name}' for name in _PROBES)}", "probe/recall", _probe
    ),
    "null": _Suite(f"{_COUNT}ag", "null/<agents>ag", "null/32ag", _null),
}


def parse(task: str) -> Task:
    """Return the task of that name: the paper's, a probe, or any other that follows its suite's
    convention."""
    if ":" in str(task):
        raise SableError(
            f"{task} is an environment of your own: it can be trained, evaluated, tuned and checked by that "
            "name; lists, grids and plans are for tasks named <suite>/<name>"
        )
    suite_name, slash, name = str(task).partition("/")
    suite = SUITES.get(suite_name)
    if suite is None:
        names = [known.id for known in list_tasks()]
        guess = next(
            (known for known in names if known.split("/")[1] == task), None
        )  # the suite was left out
        hint = f"; did you mean {guess!r}?" if guess else suggest(task, [*names, *SUITES]) or "."
        what = f"suite {suite_name!r} in task {task!r}" if slash else f"task {task!r}"
        raise SableError(
            f"unknown {what}{hint} Tasks are named <suite>/<name>, such as rware/tiny-4ag; "
            f"suites: {', '.join(SUITES)}"
        )
    match = re.fullmatch(suite.pattern, name)
    if match is None:
        known = [known.id for known in list_tasks(suite_name)] + [f"smax/{name}" for name in _SMAX_MAPS]
        hint = suggest(task, [known for known in known if known.startswith(suite_name)]) or "."
        raise SableError(
            f"unknown task {task!r}{hint} The {suite_name} tasks are {suite.convention}; "
            f"for example {suite.example}"
        )
    try:
        large = next((n for n in match.groups() if n and n.isdecimal() and int(n) > _MOST), None)
        _require(large is None, f"{large} is more than {_MOST}")
        sizes = suite.sizes(*match.groups())
    except ValueError as error:
        raise SableError(f"task {task!r} cannot exist: {error}. A task that can: {suite.example}") from None
    fields = {"id": task, "suite": suite_name, "name": name, "group": _GROUP.get(task, "other")} | sizes
    return Task(**tp.cast(dict[str, tp.Any], fields))


def with_options(task: Task, options: Mapping[str, tp.Any]) -> Task:
    """Return the task with some of its arguments changed; values may come as text, from the command line."""
    arguments = dict(task.arguments)
    for name, option in options.items():
        if name not in task.options:
            can = "; ".join(f"{option}={_values(values)}" for option, values in task.options.items())
            has = f"its options are {can}" if can else f"tasks of {task.suite} have no options"
            raise SableError(
                f"task {task.id!r} has no option {name!r}{suggest(name, task.options) or ';'} {has}"
            )
        values = task.options[name]
        if values == _ANY_COUNT:
            value = int(option) if re.fullmatch("[0-9]{1,9}", str(option)) else _MOST + 1
            value = value if value <= _MOST else None
        else:
            value = option if option in values else None
        if value is None:
            raise SableError(
                f"option {name}={option!r} of task {task.id!r} is not possible; it takes {_values(values)}"
            )
        arguments[name] = value
    if task.suite == "neom":
        task = dataclasses.replace(task, view_size=1 + arguments["history"] * task.num_actions)
    return dataclasses.replace(task, arguments=arguments)


def _values(values: tuple) -> str:
    return "|".join(values)


def list_tasks(suite: str | None = None) -> list[Task]:
    """Return the paper's tasks, then probes and examples of null; of one suite only if it is named."""
    if suite is not None and suite not in SUITES:
        raise SableError(
            f"unknown suite {suite!r}{suggest(suite, SUITES) or ';'} suites: {', '.join(SUITES)}"
        )
    names = [*PAPER, *(f"probe/{name}" for name in _PROBES), *_NULLS]
    return [parse(name) for name in names if suite in (None, name.split("/")[0])]
