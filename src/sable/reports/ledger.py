"""The ledger: a row for every published number, with all it takes to check it and to make it again.

results/ledger.jsonl             one JSON object a line
results/published.txt            a line for every run that was ever published: none goes missing
results/<suite>/<task>/<name>/   a row's data: config.json, meta.json, summary.json, metrics.jsonl.gz, and the
                                 best policy of every seed, policies/<seed>/
results/superseded/              the same of rows that gave way to others

A row is called <suite>/<task>:<name>, after its data. All of it but `STATED` follows from the data. numpy is
imported only to make rows, so that reading them stays quick.
"""

import difflib
import hashlib
import json
import math
import shlex
import typing as tp
from collections.abc import Sequence
from pathlib import Path

from sable.config import meaning, protocol, renamed
from sable.config import resolve as settings
from sable.config.schema import SYSTEM_CONFIGS, RunConfig, field_types
from sable.envs.custom import suite_and_name
from sable.errors import SableError
from sable.files import read_regular, write_atomically
from sable.runs import directory as runs
from sable.runs.provenance import PACKAGE
from sable.training.loggers.logger import number

if tp.TYPE_CHECKING:
    from sable.reports.series import Series

LEDGER, PUBLISHED, SUPERSEDED, POLICIES = "ledger.jsonl", "published.txt", "superseded", "policies"
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
NOT_DERIVED = ("commit", "earlier_commits", "command", "superseded")
"""What does not follow from the data: the code that ran, and of a row that gave way to another, which and
why."""
NEUTRAL = ("video", "label")
"""Settings that change nothing about what is learnt."""

Row = dict[str, tp.Any]
Fields = tp.Mapping[str, tp.Any]
"""A system's, as plain data."""


def read(results: Path | None = None) -> list[Row]:
    """Return the rows of the ledger in that folder. Without one: in `results` in the current folder, or where
    there is none, those that came with sable."""
    if results is None and not (results := Path("results")).joinpath(LEDGER).is_file():
        place = shipped()
    else:
        place = results / LEDGER
    try:
        lines = place.read_text(encoding="utf-8").split("\n") if place.is_file() else []
    except (OSError, ValueError) as error:
        raise SableError(f"{place} cannot be read: {' '.join(str(error).split())}") from None
    rows = [parse_row(line, f"{place} is damaged: line {k + 1}") for k, line in enumerate(lines) if line]
    if twice := next((row["row"] for k, row in enumerate(rows) if find(rows[:k], row["row"])), None):
        raise SableError(f"{place} is damaged: it has two rows {twice}")
    return rows


def shipped(package: Path = PACKAGE) -> Path:
    """Return where the ledger lies that came with sable: in the package as it was built, or in the checkout
    that the package is part of."""
    built = package / "reports" / LEDGER
    return built if built.is_file() else package.parents[1] / "results" / LEDGER


def parse_row(line: str, where: str) -> Row:
    """Return a line of the ledger as a row that can be relied on."""
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
    if (gave_way := row.get("superseded")) is not None and (
        not isinstance(gave_way, dict)
        or not all(isinstance(gave_way.get(name), str) for name in ("row", "reason"))
    ):
        raise SableError(f"{where} does not say which row superseded it, and why")
    return row | _renamed(row)


def _renamed(row: Row) -> Row:
    """Return what a row says of its settings, but for the settings themselves, in words of now."""
    types = field_types(RunConfig)
    for cls in SYSTEM_CONFIGS.values():
        types |= field_types(cls)
    words = (text.partition(" ") for text in row["deviations"])
    return {
        "system": renamed.label(str(row.get("system", ""))),
        "deviations": [f"{renamed.field(name, types)}{space}{rest}" for name, space, rest in words],
        "command": renamed.command(row["command"], types),
    }


def find(rows: Sequence[Row], name: str) -> Row | None:
    """Return the row of that name, if there is one."""
    return next((row for row in rows if row["row"] == name), None)


def require(rows: Sequence[Row], name: str) -> Row:
    """Return the row of that name; refused with the nearest ones where there is none."""
    if row := find(rows, name):
        return row
    names = [row["row"] for row in rows]
    if not names:
        raise SableError(f"there is no row {name!r}: nothing is published yet")
    near = [one for one in names if name in one][:3] or difflib.get_close_matches(name, names, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
    raise SableError(f"the ledger has no row {name!r}{hint} sable reproduce lists all {len(names)}")


def row_name(run: RunConfig, name: str) -> str:
    """Return what a run's row is called; `name` tells it from other rows of its task."""
    suite, task = suite_and_name(run.task)
    return f"{runs.safe_name(suite)}/{runs.safe_name(task)}:{name}"


def folder(results: Path, row: Row) -> Path:
    """Return where a row's data lies."""
    return results / _data_path(row["row"], row.get("superseded"))


def _data_path(name: str, superseded: tp.Any) -> str:
    return (f"{SUPERSEDED}/" if superseded else "") + name.replace(":", "/")


def make_row(directory: Path, row: str, superseded: tp.Any = None) -> Row:
    """Return the row that a finished run, or what was kept of it, gives; all but `STATED`."""
    from sable.reports.read import read_run, system_name

    run, fields = runs.read_plain_config(directory)
    summary, meta = runs.read_summary(directory), runs.read_meta(directory)
    series, _ = read_run(directory)
    for one in series:
        if problem := one.problem():
            raise SableError(f"{directory}: seed {one.seed}: {problem}")
    if not series:
        raise SableError(f"{directory} is no run whose seeds share their settings")
    circumstances = [meta, *meta.get("resumed", [])]
    elsewhere = protocol.protocol_deviations(run)
    return {
        "row": row,
        "task": run.task,
        "system": system_name(run, fields),
        "data": _data_path(row, superseded),
        "sources": list(dict.fromkeys(one.get("source") for one in circumstances)),
        "config_hash": config_hash(data := runs.read_object(directory / "config.json")),
        "device": ", ".join(dict.fromkeys(str(_get_nested(one, "device", "kind")) for one in circumstances)),
        "jax": ", ".join(dict.fromkeys(str(_get_nested(one, "versions", "jax")) for one in circumstances)),
        "date": str(meta.get("finished"))[:10],
        "seeds": list(run.seeds),
        "absolute_return": [one.absolute for one in series],
        "halted_seeds": summary.get("halted_seeds"),
        **_judge(run, fields, series, judge=not elsewhere),
        "deviations": elsewhere + protocol.setting_deviations(run, fields),
        "policies": policies(directory),
        "steps_per_second": _rounded(number(summary.get("steps_per_second"))),
        "device_minutes": _rounded(number(summary.get("wall_seconds")) / 60 * _num_devices(run, meta)),
        "settings": data,
    }


def policies(directory: Path) -> dict[str, str]:
    """Return the seeds whose best policy is kept beside a row's data, each with the SHA-256 sum of its
    weights."""
    try:
        return {
            weights.parent.name: hashlib.sha256(read_regular(weights)).hexdigest()
            for weights in sorted((directory / POLICIES).glob("*/*.safetensors"))
        }
    except OSError as error:
        raise SableError(f"{directory / POLICIES} cannot be read: {error.strerror or error}") from None


def _num_devices(run: RunConfig, meta: tp.Mapping[str, tp.Any]) -> int:
    count = _get_nested(meta, "device", "count")
    return run.devices or (count if isinstance(count, int) else 1)


def _judge(run: RunConfig, fields: Fields, series: "Sequence[Series]", judge: bool) -> Row:
    """Return the absolute metric's mean with its interval, the paper's, and the verdict where the paper's
    protocol was followed; and the same of all five summaries."""
    from sable.reports import paper, stats, variants
    from sable.reports.read import variant

    family = variants.group_by_family([variant(run.system, fields)])[0].family
    each = [stats.summaries(one.returns, one.absolute) for one in series]

    def summary(name: str) -> Row:
        ours = stats.estimate({run.task: [one[name] for one in each]}, stats.mean)
        theirs = paper.figures().get((name, run.task, family))
        judged = theirs if judge else None
        return {
            "mean": _rounded(ours.value),
            "interval": [_rounded(ours.low), _rounded(ours.high)] if math.isfinite(ours.low) else None,
            "paper": {"mean": theirs.value, "interval": [theirs.low, theirs.high]} if theirs else None,
            "verdict": paper.verdict(ours, judged) if judged else None,
            "by_rounding": bool(judged and paper.by_rounding(ours, judged)),
        }

    summaries = {name: summary(name) for name in stats.SUMMARIES}
    return summaries["absolute"] | {"summaries": summaries}


def older_meaning(row: Row) -> list[meaning.Change]:
    """Return the changes since a row was made of what training with its settings means."""
    number = meaning.number_of(row["settings"], row.get("sources", ()))
    return meaning.since(number, *settings.plain_from_dict(row["settings"]))


def outside_protocol(row: Row) -> list[str]:
    """Return those deviations of a row for which it has no verdict."""
    return [text for text in row["deviations"] if text.partition(" ")[0] in protocol.PROTOCOL]


def config_hash(data: tp.Mapping[str, tp.Any]) -> str:
    """Return a fingerprint of the settings in a config.json: of those that matter to what is learnt."""
    run = {name: value for name, value in data["run"].items() if name not in NEUTRAL}
    text = json.dumps({**data, "run": run}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def command(run: RunConfig, fields: Fields) -> str:
    """Return the command that trains with these settings: a flag for each that is not this code's default for
    the task. Of a system from outside sable, whose defaults are in its own code, that is every one."""
    defaults = RunConfig(), None
    if run.system in SYSTEM_CONFIGS:
        usual = settings.resolve({"task": run.task, "system": run.system}, {})
        defaults = usual.run, usual.system
    words = ["sable", "train", run.task] + (
        ["--system", run.system] if run.system != RunConfig.system else []
    )
    count = len(run.seeds)
    every = run.seeds == tuple(range(count))
    words += ["--num-seeds", str(count)] if every else ["--seeds", *map(str, run.seeds)]
    for values, default in zip((vars(run), fields), defaults, strict=True):
        for name, value in values.items():
            if name not in ("task", "system", "seeds", *NEUTRAL) and value != getattr(default, name, None):
                words += _flag(name.replace("_", "-"), value)
    return shlex.join(words)


def _flag(name: str, value: tp.Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", *map(str, value if isinstance(value, (tuple, list)) else (value,))]


def find_mistakes(results: Path) -> list[str]:
    """Return what does not hold about a ledger and its data: numbers that do not follow, data or a row
    missing."""
    errors, rows = [], read(results)
    for row in rows:
        try:
            derived_now = make_row(folder(results, row), row["row"], row.get("superseded"))
        except SableError as error:
            errors.append(f"{row['row']}: its data cannot be used: {error}")
            continue
        derived = {name: value for name, value in row.items() if name not in NOT_DERIVED}
        wrong = sorted(
            name for name in derived.keys() | derived_now.keys() if derived.get(name) != derived_now.get(name)
        )
        if wrong:
            errors.append(
                f"{row['row']}: its {', '.join(wrong)} do not follow from its data (sable publish --remake "
                "makes rows anew)"
            )
        if not isinstance(row.get("commit"), str):
            errors.append(f"{row['row']}: it names no commit")
    known = {folder(results, row) for row in rows}
    folders = (path.parent for path in sorted(results.rglob("config.json")))
    errors += [f"{path}: data without a row" for path in folders if path not in known]
    there = set(map(identity, rows))
    gone = (run for run in published(results) if run not in there)
    return errors + [f"{run}: this run was published and its row is gone" for run in gone]


def remake(results: Path) -> None:
    """Make every row anew from its data, by how rows are made and judged now."""
    rows = read(results)
    new_rows = [make_row(folder(results, row), row["row"], row.get("superseded")) for row in rows]
    for before, now in zip(rows, new_rows, strict=True):
        if before.get("policies") and before["policies"] != now["policies"]:
            place = folder(results, before) / POLICIES
            raise SableError(
                f"{place} is not what was published, by the SHA-256 sums in its row: put it back"
            )
    stated = ({name: row[name] for name in NOT_DERIVED if name in row} for row in rows)
    write(results, [new | old for new, old in zip(new_rows, stated, strict=True)])


def identity(row: Row) -> str:
    """Return which run a row is of: what it was published as, the hash of its settings, its code."""
    name = (row.get("superseded") or row)["row"]
    return f"{name} {row.get('config_hash')} {','.join(map(str, row.get('sources', ())))}"


def published(results: Path) -> list[str]:
    """Return the runs that were ever published, by their `identity`."""
    place = results / PUBLISHED
    try:
        return place.read_text(encoding="utf-8").splitlines() if place.is_file() else []
    except (OSError, ValueError) as error:
        raise SableError(f"{place} cannot be read: {' '.join(str(error).split())}") from None


def write(results: Path, rows: Sequence[Row]) -> None:
    """Make these the ledger's rows, whole or not at all."""
    write_atomically(results / LEDGER, "".join(line(row) + "\n" for row in rows).encode())
    every = dict.fromkeys([*published(results), *map(identity, rows)])
    write_atomically(results / PUBLISHED, "".join(f"{run}\n" for run in every).encode())


def line(row: Row) -> str:
    """Return a row as it stands in the ledger."""
    return json.dumps(runs.to_plain(row), allow_nan=False)


def _get_nested(data: tp.Any, *names: str) -> tp.Any:
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _rounded(value: float) -> float:
    """Round as fine as can matter."""
    return float(f"{value:.6g}")
