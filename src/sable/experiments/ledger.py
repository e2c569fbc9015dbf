"""The ledger: a row for every published number, with all it takes to check it and to make it again.

results/ledger.jsonl             one JSON object a line
results/<suite>/<task>/<name>/   a row's data: config.json, meta.json, summary.json, metrics.jsonl.gz

A row is called <suite>/<task>:<name>, after its data. All of it but `CODE` follows from the data. numpy is
imported only to make rows, so that reading them stays quick.
"""

import difflib
import hashlib
import json
import math
import shlex
import typing as tp
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from sable import settings
from sable.config import RunConfig, SystemConfig
from sable.envs.own import suite_and_name
from sable.errors import SableError
from sable.experiments import runs
from sable.files import write_atomically
from sable.training.logging import number

LEDGER = "ledger.jsonl"
FIELDS = {
    "row": str,
    "task": str,
    "settings": dict,
    "seeds": list,
    "absolute_return": list,
    "mean": float,
    "interval": (list, type(None)),
    "paper": (dict, type(None)),
    "verdict": (str, type(None)),
    "deviations": list,
    "device": str,
    "steps_per_second": float,
    "device_minutes": float,
    "command": str,
}
"""What a reader of rows may rely on; `make` has the rest."""
CODE = ("commit", "earlier_commits", "command")
"""What is known of the code that ran, and does not follow from the data."""
NEUTRAL = ("video", "label")
"""Settings that change nothing about what is learnt."""
PROTOCOL = ("total_steps", "num_evaluations", "evaluation_episodes", "absolute_episodes")
NUM_SEEDS = 10

Row = dict[str, tp.Any]


def read(results: Path | None = None) -> list[Row]:
    """The rows of the ledger in that folder. Without one: in `results` in the current folder, or where there
    is none, those that came with sable."""
    if results is None and not (results := Path("results")).joinpath(LEDGER).is_file():
        place = files("sable").joinpath("data", LEDGER)
    else:
        place = results / LEDGER
    try:
        lines = place.read_text(encoding="utf-8").split("\n") if place.is_file() else []
    except (OSError, ValueError) as error:
        raise SableError(f"{place} cannot be read: {' '.join(str(error).split())}") from None
    rows = [checked(line, f"{place} is damaged: line {k + 1}") for k, line in enumerate(lines) if line]
    if twice := next((row["row"] for k, row in enumerate(rows) if find(rows[:k], row["row"])), None):
        raise SableError(f"{place} is damaged: it has two rows {twice}")
    return rows


def checked(line: str, where: str) -> Row:
    """A line of the ledger as a row that can be relied on."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise SableError(f"{where} is not a JSON object")
    wrong = next((name for name, kind in FIELDS.items() if not isinstance(row.get(name, ...), kind)), None)
    if wrong is not None:
        raise SableError(f"{where} has no proper {wrong!r}")
    theirs, returns = row["paper"] or {"mean": 0.0, "interval": [0.0, 0.0]}, row["absolute_return"]
    pairs = [row["interval"] or [0.0, 0.0], theirs.get("interval")]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise SableError(f"{where} has an interval without two ends")
    numbers = [row["mean"], row["steps_per_second"], row["device_minutes"], theirs.get("mean"), *returns]
    if not all(math.isfinite(number(x)) for x in (*numbers, *pairs[0], *pairs[1])):
        raise SableError(f"{where} has something in place of a number")
    if not returns or len(returns) != len(row["seeds"]):
        raise SableError(f"{where} has not one return for each of its seeds")
    if not all(isinstance(seed, int) for seed in row["seeds"]):
        raise SableError(f"{where} has something in place of a seed")
    if not all(isinstance(text, str) for text in row["deviations"]):
        raise SableError(f"{where} has deviations that are no text")
    return row


def find(rows: Sequence[Row], name: str) -> Row | None:
    """The row of that name, if there is one."""
    return next((row for row in rows if row["row"] == name), None)


def require(rows: Sequence[Row], name: str) -> Row:
    """The row of that name; refused with the nearest ones where there is none."""
    if row := find(rows, name):
        return row
    names = [row["row"] for row in rows]
    if not names:
        raise SableError(f"there is no row {name!r}: nothing is published yet")
    near = [one for one in names if name in one][:3] or difflib.get_close_matches(name, names, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
    raise SableError(f"the ledger has no row {name!r}{hint} sable reproduce lists all {len(names)}")


def name_of(run: RunConfig, name: str) -> str:
    """What a run's row is called; `name` tells it from other rows of its task."""
    suite, task = suite_and_name(run.task)
    return f"{runs.safe(suite)}/{runs.safe(task)}:{name}"


def folder(results: Path, row: str) -> Path:
    """Where a row's data lies."""
    return results.joinpath(*row.replace(":", "/").split("/"))


def make(directory: Path, row: str) -> Row:
    """The row that a finished run, or what was kept of it, gives; all but `CODE`."""
    from sable.experiments.analysis import MAIN
    from sable.experiments.results import read_run, variant

    run, config = runs.read_config(directory)
    summary, meta = runs.read_summary(directory), runs.read_meta(directory)
    series, _ = read_run(directory)
    for one in series:
        if problem := one.problem():
            raise SableError(f"{directory}: seed {one.seed}: {problem}")
    if not series:
        raise SableError(f"{directory} is no run whose seeds share their settings")
    absolute = [one.absolute for one in series]
    circumstances = [meta, *meta.get("resumed", [])]
    deviations = _deviations(run)
    return {
        "row": row,
        "task": run.task,
        "system": run.label or variant(run.system, config),
        "data": row.replace(":", "/"),
        "sources": list(dict.fromkeys(one.get("source") for one in circumstances)),
        "config_hash": config_hash(data := runs.read_object(directory / "config.json")),
        "device": ", ".join(dict.fromkeys(str(_within(one, "device", "kind")) for one in circumstances)),
        "jax": ", ".join(dict.fromkeys(str(_within(one, "versions", "jax")) for one in circumstances)),
        "date": str(meta.get("finished"))[:10],
        "seeds": list(run.seeds),
        "absolute_return": absolute,
        "halted_seeds": summary.get("halted_seeds"),
        **_judged(run, config, absolute, MAIN, judge=not deviations),
        "deviations": deviations,
        "steps_per_second": _rounded(number(summary.get("steps_per_second"))),
        "device_minutes": _rounded(number(summary.get("wall_seconds")) / 60),
        "settings": data,
    }


def _judged(run: RunConfig, config: SystemConfig, absolute: list[float], summary: str, judge: bool) -> Row:
    """The mean with its interval, as a report has them, and the paper's beside them; a verdict only where the
    paper's protocol was followed."""
    from sable.experiments import paper, stats, variants
    from sable.experiments.results import variant

    ours = stats.estimate({run.task: absolute}, stats.mean)
    family = variants.named([variant(run.system, config)])[0].family
    theirs = paper.figures().get((summary, run.task, family))
    return {
        "mean": _rounded(ours.value),
        "interval": [_rounded(ours.low), _rounded(ours.high)] if math.isfinite(ours.low) else None,
        "paper": {"mean": theirs.value, "interval": [theirs.low, theirs.high]} if theirs else None,
        "verdict": paper.verdict(ours, theirs) if theirs and judge else None,
    }


def _deviations(run: RunConfig) -> list[str]:
    """Where a run is not by the paper's protocol. Its seeds are those that everybody would take."""
    found = [
        f"{name} {value}" for name in PROTOCOL if (value := getattr(run, name)) != getattr(RunConfig, name)
    ]
    found += [f"options {' '.join(run.options)}"] if run.options else []
    usual = run.seeds == tuple(range(NUM_SEEDS))
    return found if usual else [*found, f"seeds {' '.join(map(str, run.seeds))}"]


def config_hash(data: tp.Mapping[str, tp.Any]) -> str:
    """A fingerprint of the settings in a config.json: of those that matter to what is learnt."""
    run = {name: value for name, value in data["run"].items() if name not in NEUTRAL}
    text = json.dumps({**data, "run": run}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def command(run: RunConfig, config: SystemConfig) -> str:
    """The command that trains with these settings: a flag for each that is not this code's default for the
    task."""
    usual = settings.resolve({"task": run.task, "system": run.system}, {})
    words = ["sable", "train", run.task] + (
        ["--system", run.system] if run.system != RunConfig.system else []
    )
    count = len(run.seeds)
    every = run.seeds == tuple(range(count))
    words += ["--num-seeds", str(count)] if every else ["--seeds", *map(str, run.seeds)]
    for given, default in zip((run, config), usual, strict=True):
        for name, value in vars(given).items():
            if name not in ("task", "system", "seeds", *NEUTRAL) and value != getattr(default, name):
                words += _flag(name.replace("_", "-"), value)
    return shlex.join(words)


def _flag(name: str, value: tp.Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]


def mistakes(results: Path) -> list[str]:
    """What does not hold about a ledger and its data: numbers that do not follow, data or a row missing."""
    found, rows = [], read(results)
    for row in rows:
        try:
            made = make(folder(results, row["row"]), row["row"])
        except SableError as error:
            found.append(f"{row['row']}: its data cannot be used: {error}")
            continue
        stated = {name: value for name, value in row.items() if name not in CODE}
        wrong = sorted(name for name in stated.keys() | made.keys() if stated.get(name) != made.get(name))
        if wrong:
            found.append(f"{row['row']}: its {', '.join(wrong)} do not follow from its data")
        if not isinstance(row.get("commit"), str):
            found.append(f"{row['row']}: it names no commit")
    known = {folder(results, row["row"]) for row in rows}
    kept = (path.parent for path in sorted(results.rglob("config.json")))
    return found + [f"{path}: data without a row" for path in kept if path not in known]


def write(results: Path, rows: Sequence[Row]) -> None:
    """Make these the ledger's rows, whole or not at all."""
    write_atomically(results / LEDGER, "".join(line(row) + "\n" for row in rows).encode())


def line(row: Row) -> str:
    """A row as it stands in the ledger."""
    return json.dumps(runs.plain(row), allow_nan=False)


def _within(data: tp.Any, *names: str) -> tp.Any:
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _rounded(value: float) -> float:
    """As fine as can matter."""
    return float(f"{value:.6g}")
