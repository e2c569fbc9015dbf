"""The pages that show the published numbers, made from the ledger: a section of docs/results.md with its
figures, and what they come to in README.md."""

import re
import typing as tp
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sable.config import meaning
from sable.errors import SableError
from sable.files import write_atomically
from sable.reports import ledger
from sable.reports.ledger import Row

PAGE, README = Path("docs", "results.md"), Path("README.md")
BEGIN = "<!-- Made by sable publish from results/ledger.jsonl: change it there. -->"
END = "<!-- The end of what sable publish made. -->"


def write(results: Path) -> Path | None:
    """Make the page's section and its figures anew, where there is a page beside `results`, and the counts in
    the README; the page's path."""
    if not (page := results.parent / PAGE).is_file():
        return None
    if wrong := ledger.find_mistakes(results):
        raise SableError(
            f"{page} is left as it was: {wrong[0]}" + f" (and {len(wrong) - 1} more)" * (len(wrong) > 1)
        )
    rows = ledger.read(results)
    text = page.read_text(encoding="utf-8")
    if section_of(text) is None:
        raise SableError(f"{page} has no place for results: a line {BEGIN!r}, and below it {END!r}")
    drawn, readme = _figures(results, rows), results.parent / README
    try:
        for name, content in drawn.items():
            (page.parent / name).parent.mkdir(exist_ok=True)
            write_atomically(page.parent / name, content)
        write_atomically(page, _with(text, section(rows)).encode())
        if readme.is_file() and section_of(brief := readme.read_text(encoding="utf-8")) is not None:
            write_atomically(readme, _with(brief, in_brief(rows)).encode())
    except OSError as error:
        raise SableError(f"cannot write to {page.parent}: {error.strerror or error}") from None
    return page


def section_of(text: str) -> str | None:
    """Return what a page has between the marks; None without them."""
    match = re.search(f"{re.escape(BEGIN)}(.*?){re.escape(END)}", text, re.DOTALL)
    return match[1] if match else None


def _with(text: str, section: str) -> str:
    return text.partition(BEGIN)[0] + BEGIN + section + END + text.partition(END)[2]


def in_brief(rows: Sequence[Row]) -> str:
    """Return what the published numbers come to, for the README."""
    return "\n\n" + "\n\n".join(_overview(rows) if rows else ["Nothing is published yet."]) + "\n\n"


def section(rows: Sequence[Row]) -> str:
    """Return the published numbers as Markdown: an overview, then tables and a figure for each suite."""
    if not rows:
        return "\n\nNothing is published yet.\n\n"
    parts = [*_overview(rows), _device_time(rows)]
    superseded = _by_suite([row for row in rows if row.get("superseded")])
    for suite, current in _by_suite([row for row in rows if not row.get("superseded")]).items():
        others = [name for name in current[0]["summaries"] if name != "absolute"]
        parts += [f"### {suite}", _table(_ROW, map(_cells, current))]
        parts += [_table(["row", *map(_long, others)], (_summary_cells(row, others) for row in current))]
        for row in current:
            if outside := ledger.outside_protocol(row):
                parts.append(f"`{row['row']}` is not by the protocol: {', '.join(outside)}.")
        if suite in superseded:
            parts.append(_table(_SUPERSEDED, map(_superseded_cells, superseded[suite])))
        parts += _older([*current, *superseded.get(suite, [])])
        parts.append(f"![{suite}: return (IQM over seeds) by environment steps](figures/{suite}.svg)")
    return "\n\n" + "\n\n".join(parts) + "\n\n"


_ROW = ["row", "absolute return", "the paper's", "verdict", "settings other than the paper's", "steps/s"]
_ROW += ["device minutes", "command"]
_SUPERSEDED = ["superseded row", "absolute return", "why", "commit", "device minutes"]


def _overview(rows: Sequence[Row]) -> list[str]:
    """Return how many rows reach the paper, by each of its summaries."""
    current = [row for row in rows if not row.get("superseded")]
    judged = [row for row in current if row["verdict"]]
    usual = sum(not row["deviations"] for row in current)

    def line(name: str) -> list[str]:
        summaries = [row["summaries"][name] for row in judged]
        count = Counter(one["verdict"] for one in summaries)
        rounded = sum(one["by_rounding"] for one in summaries)
        return [_long(name), *map(str, (count["not below"], rounded, count["overlapping"], count["below"]))]

    head = ["summary", "not below", "of these by rounding only", "overlapping", "below"]
    text = (
        f"Rows: {len(current)}, of which {len(judged)} are by the paper's protocol, on its tasks. Rows with "
        f"every setting as the paper's: {usual}. The means of those {len(judged)} beside the paper's 95 % "
        "intervals:"
    )
    return [text, _table(head, map(line, current[0]["summaries"]))] if judged else [text]


def _device_time(rows: Sequence[Row]) -> str:
    """Return the hours that devices spent on rows, those of Sable on the paper's tasks by themselves."""

    def hours(which: Callable[[Row], tp.Any]) -> str:
        by_device: Counter[str] = Counter()
        for row in filter(which, rows):
            by_device[row["device"]] += row["device_minutes"] / 60
        return ", ".join(f"{spent:.2f} on {device}" for device, spent in by_device.items()) or "0"

    def counts(row: Row) -> bool:
        return bool(
            not row.get("superseded") and row["paper"] and row["settings"]["run"]["system"] == "sable"
        )

    tasks = len({row["task"] for row in rows if counts(row)})
    return (
        f"Device hours: {hours(lambda row: not row.get('superseded'))}; superseded rows: "
        f"{hours(lambda row: row.get('superseded'))}. Sable on {tasks} of the paper's 45 tasks: "
        f"{hours(counts)}; the aim is 3 on GPUs for all 45."
    )


def _older(rows: Iterable[Row]) -> list[str]:
    """Return which rows were made when training with their settings meant something else, and what."""
    rows_by_change: dict[str, list[str]] = {}
    for row in rows:
        if changes := ledger.older_meaning(row):
            rows_by_change.setdefault(meaning.describe_changes(changes), []).append(_name(row))
    return [
        f"Of an older meaning, when {what}: {', '.join(names)}." for what, names in rows_by_change.items()
    ]


def _name(row: Row) -> str:
    """Return a row's name, marked if it is of an older meaning."""
    return f"`{row['row']}`" + "†" * bool(ledger.older_meaning(row))


def _cells(row: Row) -> list[str]:
    from sable.reports.looks import number
    from sable.reports.tables import short

    outside = ledger.outside_protocol(row)
    others = (text.partition(" (")[0] for text in row["deviations"] if text not in outside)
    ours, theirs = _figures_of(row)
    return [
        _name(row),
        ours,
        theirs,
        _verdict(row["summaries"]["absolute"]),
        ", ".join(others) or "none",
        short(row["steps_per_second"]),
        number(row["device_minutes"], 1),
        "`" + row["command"].replace("|", "\\|") + "`",
    ]


def _summary_cells(row: Row, names: Iterable[str]) -> list[str]:
    """Return our figure, the paper's and the verdict of each of these summaries."""

    def cell(summary: Row) -> str:
        ours, theirs = _figures_of(summary)
        return "; ".join(filter(None, (ours, theirs, _verdict(summary))))

    return [_name(row), *(cell(row["summaries"][name]) for name in names)]


def _superseded_cells(row: Row) -> list[str]:
    ours, _ = _figures_of(row)
    why = row["superseded"]["reason"].replace("|", "\\|")
    return [_name(row), ours, why, f"`{row['commit'][:10]}`", f"{row['device_minutes']:.1f}"]


def _figures_of(summary: Row) -> tuple[str, str]:
    """Return our mean with its interval, and the paper's."""
    from sable.reports.looks import decimals, interval, number
    from sable.reports.stats import Estimate

    paper = summary["paper"]
    digits = decimals([summary["mean"], paper["mean"]] if paper else [summary["mean"]])

    def figure(mean: float, pair: Sequence[float] | None) -> str:
        estimate = Estimate(mean, *(pair or (float("nan"),) * 2))
        return f"{number(mean, digits)} {interval(estimate, digits)}".strip()

    return figure(summary["mean"], summary["interval"]), figure(
        paper["mean"], paper["interval"]
    ) if paper else ""


def _verdict(summary: Row) -> str:
    return f"{summary['verdict'] or ''}{', by rounding' if summary['by_rounding'] else ''}"


def _long(summary: str) -> str:
    from sable.reports.tables import LONG

    return LONG[summary]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:" if name in _NUMBERS else "---" for name in head[1:]]]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


_NUMBERS = {"absolute return", "the paper's", "steps/s", "device minutes", "not below"}
_NUMBERS |= {"of these by rounding only", "overlapping", "below"}


def _by_suite(rows: Sequence[Row]) -> dict[str, list[Row]]:
    by_suite: dict[str, list[Row]] = {}
    for row in rows:
        by_suite.setdefault(row["row"].partition("/")[0], []).append(row)
    return by_suite


def _figures(results: Path, rows: Sequence[Row]) -> dict[str, bytes]:
    """Return a figure of every suite's curves, by file name."""
    from sable.reports import figures
    from sable.reports.analysis import analyse
    from sable.reports.read import read

    drawn: dict[str, bytes] = {}
    for suite, own in _by_suite([row for row in rows if not row.get("superseded")]).items():
        analysis = analyse(read([ledger.folder(results, row) for row in own]))
        papers: dict[str, tp.Any] = {row["task"]: row["paper"] for row in own if row["paper"]}
        drawn[f"figures/{suite}.svg"] = figures.overview(analysis, papers)
    return drawn
