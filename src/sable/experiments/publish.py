"""From finished runs to published numbers: their data kept, a row each in the ledger, and the page that shows
them, docs/results.md, with its figures."""

import gzip
import re
import typing as tp
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sable.errors import SableError
from sable.experiments import ledger, provenance, runs
from sable.experiments.ledger import Row
from sable.files import write_atomically
from sable.training.logging import METRICS, PACKED

PAGE = Path("docs", "results.md")
BEGIN = "<!-- Made by sable publish from results/ledger.jsonl: change it there. -->"
END = "<!-- The end of what sable publish made. -->"
KEPT = ("started", "finished", "wall_seconds", "git", "source", "versions", "device")
"""What is kept of meta.json: nothing about folders and machines."""


def publish(
    directories: Sequence[Path],
    results: Path,
    *,
    name: str | None = None,
    other_protocol: bool = False,
    replace: bool = False,
) -> list[Row]:
    """The new rows of the ledger in `results`, with their data kept there; all of the runs are published or
    none."""
    if name is not None and (runs.safe(name) != name or not name.strip(".")):
        raise SableError(f"name={name!r} must be a plain folder name of letters, digits and . _ + = -")
    rows, new = ledger.read(results), {}
    for directory in map(runs.find, directories):
        row = _row(directory, name, other_protocol)
        if row["row"] in new:
            raise SableError(f"{directory}: {row['row']} is given twice; publish one of them under a --name")
        _refuse_again(directory, row, ledger.find(rows, row["row"]), replace)
        new[row["row"]] = directory, row
    made = {row["row"]: row for _, row in new.values()}
    try:
        for directory, row in new.values():
            _keep(directory, ledger.folder(results, row["row"]))
        if new:  # a row that replaces another takes its place
            ledger.write(results, list(({row["row"]: row for row in rows} | made).values()))
    except OSError as error:
        raise SableError(f"cannot write to {results}: {error.strerror or error}") from None
    return list(made.values())


def _row(directory: Path, name: str | None, other_protocol: bool) -> Row:
    """The run's row; refused where it has not finished or what it ran cannot be told."""
    from sable.experiments.results import variant

    run, config = runs.read_config(directory)
    runs.refuse_batch(directory)
    runs.read_summary(directory)
    if not (directory / METRICS).is_file():
        raise SableError(f"{directory} has no {METRICS}: it is not as training left it")
    label = re.sub("-+", "-", runs.safe(run.label or variant(run.system, config))).strip("-")
    row = ledger.make(directory, ledger.name_of(run, name or label))
    if row["deviations"] and not other_protocol:
        raise SableError(
            f"{directory} is not by the paper's protocol: {', '.join(row['deviations'])}; with "
            "--other-protocol its row says so"
        )
    commits = [provenance.commit_of(source) if source else None for source in row["sources"]]
    if None in commits:
        raise SableError(
            f"{directory} ran code that no commit up to the current one has (source "
            f"{row['sources'][commits.index(None)]}); commit first, then run"
        )
    *earlier, commit = commits
    row |= {"commit": commit, "earlier_commits": earlier, "command": ledger.command(run, config)}
    return ledger.checked(ledger.line(row), f"{directory}: its row")


def _refuse_again(directory: Path, row: Row, before: Row | None, replace: bool) -> None:
    """Every run counts: a number is replaced by one of other settings or code, never by a luckier one."""
    if before is None:
        return
    if not replace:
        raise SableError(
            f"{directory}: {row['row']} is published already, of {before.get('date')}; publish under another "
            "--name, or --replace it"
        )
    if [before.get(key) for key in ("config_hash", "sources")] == [row["config_hash"], row["sources"]]:
        raise SableError(
            f"{directory}: {row['row']} is published already with the same settings and code; every run "
            "counts, so that one stays"
        )


def _keep(directory: Path, place: Path) -> None:
    """Put what a report needs of a run into the folder `place`."""
    place.mkdir(parents=True, exist_ok=True)
    meta = runs.read_meta(directory)
    resumed = [{key: one[key] for key in KEPT if key in one} for one in meta.get("resumed", [])]
    kept = {key: meta[key] for key in KEPT if key in meta}
    runs.write_json(place / "meta.json", kept | ({"resumed": resumed} if resumed else {}))
    for file in ("config.json", "summary.json"):
        write_atomically(place / file, (directory / file).read_bytes())
    # Without the time, so that the same metrics are the same bytes.
    packed = gzip.compress((directory / METRICS).read_bytes(), mtime=0)
    write_atomically(place / (METRICS + PACKED), packed)


def write_page(results: Path) -> Path | None:
    """Make the page's section and its figures anew, where there is a page beside `results`; its path."""
    if not (page := results.parent / PAGE).is_file():
        return None
    if wrong := ledger.mistakes(results):
        raise SableError(
            f"{page} is left as it was: {wrong[0]}" + f" (and {len(wrong) - 1} more)" * (len(wrong) > 1)
        )
    rows = ledger.read(results)
    text = page.read_text(encoding="utf-8")
    if section_of(text) is None:
        raise SableError(f"{page} has no place for results: a line {BEGIN!r}, and below it {END!r}")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    drawn = _figures(results, rows)
    try:
        for name, content in drawn.items():
            (page.parent / name).parent.mkdir(exist_ok=True)
            write_atomically(page.parent / name, content)
        write_atomically(page, (before + BEGIN + section(rows) + END + after).encode())
    except OSError as error:
        raise SableError(f"cannot write to {page.parent}: {error.strerror or error}") from None
    return page


def section_of(text: str) -> str | None:
    """What a page has between the marks; None without them."""
    found = re.search(f"{re.escape(BEGIN)}(.*?){re.escape(END)}", text, re.DOTALL)
    return found[1] if found else None


def section(rows: Sequence[Row]) -> str:
    """The published numbers as Markdown: a table and a figure for each suite."""
    if not rows:
        return "\n\nNothing is published yet.\n\n"
    parts = [_counted(rows)]
    for suite, own in _by_suite(rows).items():
        lines = [
            ["row", "absolute return", "the paper's", "verdict", "steps/s", "minutes", "command"],
            ["---", "---:", "---:", "---", "---:", "---:", "---"],
            *map(_cells, own),
        ]
        parts += [f"### {suite}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
        parts += [
            f"`{row['row']}` is not by the protocol: {', '.join(row['deviations'])}."
            for row in own
            if row["deviations"]
        ]
        parts.append(f"![{suite}: return (IQM over seeds) by environment steps](figures/{suite}.svg)")
    return "\n\n" + "\n\n".join(parts) + "\n\n"


def _counted(rows: Sequence[Row]) -> str:
    verdicts = Counter(row["verdict"] for row in rows if row["verdict"])
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows))
    return (
        f"Rows: {len(rows)}. By the protocol on tasks of the paper: {verdicts.total()}, of which "
        f"{verdicts['at or above']} at or above the paper, {verdicts['overlapping']} below it with "
        f"overlapping intervals, {verdicts['below']} below. Device: {devices}."
    )


def _cells(row: Row) -> list[str]:
    from sable.experiments.looks import decimals, interval, number
    from sable.experiments.stats import Estimate
    from sable.experiments.tables import short

    paper = row["paper"]
    digits = decimals([row["mean"], paper["mean"]] if paper else [row["mean"]])

    def figure(mean: float, pair: Sequence[float] | None) -> str:
        estimate = Estimate(mean, *(pair or (float("nan"),) * 2))
        return f"{number(mean, digits)} {interval(estimate, digits)}".strip()

    return [
        f"`{row['row']}`",
        figure(row["mean"], row["interval"]),
        figure(paper["mean"], paper["interval"]) if paper else "",
        row["verdict"] or "",
        short(row["steps_per_second"]),
        number(row["device_minutes"], 1),
        "`" + row["command"].replace("|", "\\|") + "`",
    ]


def _by_suite(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["row"].partition("/")[0], []).append(row)
    return found


def _figures(results: Path, rows: Sequence[Row]) -> dict[str, bytes]:
    """A figure of every suite's curves, by file name."""
    from sable.experiments import figures
    from sable.experiments.analysis import analyse
    from sable.experiments.results import read

    drawn: dict[str, bytes] = {}
    for suite, own in _by_suite(rows).items():
        found = analyse(read([ledger.folder(results, row["row"]) for row in own]))
        papers: dict[str, tp.Any] = {row["task"]: row["paper"] for row in own if row["paper"]}
        drawn[f"figures/{suite}.svg"] = figures.overview(found, papers)
    return drawn
