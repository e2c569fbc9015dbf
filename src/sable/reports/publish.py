"""From finished runs to published numbers: their data and policies kept, a row each in the ledger."""

import gzip
import itertools
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sable.config import renamed
from sable.config.schema import SYSTEM_CONFIGS
from sable.errors import SableError
from sable.files import write_atomically
from sable.reports import ledger
from sable.reports.ledger import Row
from sable.runs import directory as runs
from sable.runs import provenance, sums
from sable.training.loggers.logger import GZIP_SUFFIX, METRICS

META_KEYS = ("started", "finished", "wall_seconds", "git", "source", "versions", "device")
"""What is kept of meta.json: nothing about folders and machines."""


def publish(
    directories: Sequence[Path],
    results: Path,
    export: Callable[[Path], Path],
    *,
    name: str | None = None,
    allow_deviations: bool = False,
    replace: bool = False,
    reason: str = "",
) -> list[Row]:
    """Return the new rows of the ledger in `results`, with their data kept there; all of the runs are
    published or none. `export` answers the folder with the best policy of every seed of a run. A row that
    gives way to another stays, superseded for that reason."""
    if name is not None and (runs.safe_name(name) != name or not name.strip(".")):
        raise SableError(f"name={name!r} must be a plain folder name of letters, digits and . _ + = -")
    rows, new = ledger.read(results), {}
    for directory in map(runs.find, directories):
        row = _row(directory, name, rows, allow_deviations)
        if row["row"] in new:
            raise SableError(f"{directory}: {row['row']} is given twice; publish one of them under a --name")
        _refuse_again(directory, row, rows, replace)
        new[row["row"]] = directory, row
    # To write and to check the policies of a system takes its code, and publishing imports none but ours.
    exported = [
        export(directory) if row["settings"]["run"]["system"] in SYSTEM_CONFIGS else None
        for directory, row in new.values()
    ]
    try:
        for (directory, row), policies in zip(new.values(), exported, strict=True):
            if line := sums.unchecked(directory):
                print(f"sable: {line}", file=sys.stderr)
            place = ledger.folder(results, row)
            rows = _supersede(results, rows, row, reason)
            _copy_data(directory, policies, place)
            row["policies"] = ledger.policies(place)
        if new:
            ledger.write(results, rows)
    except OSError as error:
        raise SableError(f"cannot write to {results}: {error.strerror or error}") from None
    return [row for _, row in new.values()]


def _supersede(results: Path, rows: Sequence[Row], row: Row, reason: str) -> list[Row]:
    """Return the rows with this one: where one of its name is, in its place, and that one behind it,
    superseded."""
    before = ledger.find(rows, row["row"])
    if before is None:
        return [*rows, row]
    number = next(k for k in itertools.count(1) if ledger.find(rows, f"{row['row']}.{k}") is None)
    old = before | {
        "row": f"{row['row']}.{number}",
        "superseded": {"row": row["row"], "reason": reason or _difference(before, row)},
    }
    place = ledger.folder(results, old)
    old["data"] = place.relative_to(results).as_posix()
    if not place.exists():  # else it was moved by a call that was killed before it wrote the ledger
        partial = place.with_name(f".{place.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(ledger.folder(results, before), partial)
        partial.rename(place)
    at = rows.index(before)
    return [*rows[:at], row, old, *rows[at + 1 :]]


def _difference(before: Row, row: Row) -> str:
    """Return what a row has that the one before it had not, in a few words."""
    pairs = [(row["settings"][part], before["settings"].get(part, {})) for part in ("run", "config")]
    pairs = [
        (renamed.current(now, dict.fromkeys(now)), renamed.complete(then, dict.fromkeys(now)))
        for now, then in pairs
    ]
    names = [name for now, then in pairs for name in now if now[name] != then.get(name)]
    names = [name for name in names if name not in ledger.NEUTRAL]
    return f"run again with another {', '.join(names)}" if names else "run again with other code"


def _row(directory: Path, name: str | None, rows: Sequence[Row], allow_deviations: bool) -> Row:
    """Return the run's row; refused where it has not finished or what it ran cannot be told."""
    from sable.reports.read import system_name

    run, fields = runs.read_plain_config(directory)
    runs.refuse_batch(directory)
    runs.read_summary(directory)
    if not (directory / METRICS).is_file():
        raise SableError(f"{directory} has no {METRICS}: it is not as training left it")
    if name is None:
        name = _usual_name(rows, run.task, system_name(run, fields))
    row = ledger.make_row(directory, ledger.row_name(run, name))
    if (outside := ledger.outside_protocol(row)) and not allow_deviations:
        raise SableError(
            f"{directory} is not by the paper's protocol: {', '.join(outside)}; with "
            "--allow-deviations its row says so"
        )
    commits = [provenance.commit_of(source) if source else None for source in row["sources"]]
    if None in commits:
        raise SableError(
            f"{directory} ran code that no commit up to the current one has (source "
            f"{row['sources'][commits.index(None)]}); commit first, then run"
        )
    *earlier, commit = commits
    row |= {"commit": commit, "earlier_commits": earlier, "command": ledger.command(run, fields)}
    return ledger.parse_row(ledger.line(row), f"{directory}: its row")


def _usual_name(rows: Sequence[Row], task: str, system: str) -> str:
    """Return the name of a row that was given none: its system's, as it was spelled in a row that is there
    already, or else as it is now."""
    for label in (row["settings"].get("run", {}).get("label", "") for row in rows if row["task"] == task):
        if (
            label
            and renamed.label(label) == system
            and any(row["row"].endswith(f":{_safe(label)}") for row in rows)
        ):
            return _safe(label)
    return _safe(system)


def _safe(label: str) -> str:
    return re.sub("-+", "-", runs.safe_name(label)).strip("-")


def _refuse_again(directory: Path, row: Row, rows: Sequence[Row], replace: bool) -> None:
    """Refuse a run that was published. Every run counts: a number is replaced by one of other settings or
    code, never by a luckier one."""
    before = ledger.find(rows, row["row"])
    if before is not None and not replace:
        raise SableError(
            f"{directory}: {row['row']} is published already, of {before.get('date')}; publish under another "
            "--name, or --replace it"
        )
    if ledger.identity(row) in map(ledger.identity, rows):
        raise SableError(
            f"{directory}: {row['row']} is published already with the same settings and code; every run "
            "counts, so that one stays"
        )


def _copy_data(directory: Path, policies: Path | None, place: Path) -> None:
    """Put what a report needs of a run, and its policies, into the folder `place`."""
    place.mkdir(parents=True, exist_ok=True)
    sums.remove(place)
    meta = runs.read_meta(directory)
    resumed = [{key: one[key] for key in META_KEYS if key in one} for one in meta.get("resumed", [])]
    excerpt = {key: meta[key] for key in META_KEYS if key in meta}
    runs.write_json(place / "meta.json", excerpt | ({"resumed": resumed} if resumed else {}))
    for file in ("config.json", "summary.json"):
        write_atomically(place / file, (directory / file).read_bytes())
    # Without the time, so that the same metrics are the same bytes.
    packed = gzip.compress((directory / METRICS).read_bytes(), mtime=0)
    write_atomically(place / (METRICS + GZIP_SUFFIX), packed)
    shutil.rmtree(place / ledger.POLICIES, ignore_errors=True)
    if policies is not None:
        shutil.copytree(policies, place / ledger.POLICIES)
    sums.write(place)
