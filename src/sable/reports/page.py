"""Runs to a report: one page that opens anywhere, the same tables as Markdown and LaTeX, and figures."""

import datetime
import importlib.resources
import json
import math
import re
import typing as tp
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sable.errors import SableError
from sable.files import write_atomically
from sable.installation import VERSION
from sable.reports import chapters, figures, tables
from sable.reports import read as results
from sable.reports.analysis import Analysis, Curve, Suite, Task, analyse
from sable.reports.looks import PALETTE, chapter_looks, decimals, looks
from sable.reports.panels import Bars, Chapter, Line, Lines, Panel, Points
from sable.reports.stats import Estimate
from sable.reports.typeset import Figure, Table
from sable.reports.variants import System
from sable.runs import directory as runs

_SCRIPTS = (
    "svg.js",
    "theme.js",
    "chart.js",
    "lines.js",
    "intervals.js",
    "bars.js",
    "page.js",
    "sections.js",
    "chapters.js",
    "suites.js",
    "start.js",
)


class Report(tp.NamedTuple):
    """The page that was written, and what a reader must know about the runs."""

    page: Path
    notes: list[str]


def write(
    paths: Sequence[str | Path], out: str | Path, *, paper: bool = False, curves: str = "iqm"
) -> Report:
    """Write report.html, report.md, tables.tex and figures/ into the folder `out`, from the finished runs in
    or below `paths` and from marl-eval JSON files; with `paper`, our figures beside the paper's, and its
    figures and tables made of these runs. `curves` says what learning curves are over seeds."""
    out = Path(out).expanduser()
    _require_place(out)
    found = results.read(paths)
    analysis = analyse(found, beside_paper=paper, curves=curves)
    if paper:
        analysis = replace(analysis, chapters=chapters.make(found, analysis))
    names = _file_names(analysis)
    # All is made before anything is written: what fails, fails with nothing changed.
    files = {f"figures/{name}": content for name, content in figures.draw(analysis, names)}
    files["tables.tex"] = tables.latex(analysis).encode()
    files["report.md"] = tables.markdown(analysis, names).encode()
    files["report.html"] = page(analysis).encode()
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(out / name, content)
    except OSError as error:
        raise SableError(f"cannot write a report to {out}: {error.strerror or error}") from None
    return Report(out / "report.html", analysis.notes)


def _require_place(out: Path) -> None:
    """Raise where the report would replace anything but an earlier report."""
    if out.exists() and not out.is_dir():
        raise SableError(f"cannot write a report to {out}: it is not a folder")
    for name in ("report.html", "report.md", "tables.tex"):
        path = out / name
        if path.exists() and not (path.is_file() and b"able report" in path.read_bytes()[:2000]):
            raise SableError(f"{path} is there already and no report of ours; choose another folder")


def page(analysis: Analysis) -> str:
    """Return the page: a template with its style, its scripts and the data in it."""
    folder = importlib.resources.files("sable.reports").joinpath("web")

    def text(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    # In JSON a < may be written \u003c, so that no name can end the script it stands in.
    data = json.dumps(
        runs.to_plain(_data(analysis)), allow_nan=False, separators=(",", ":"), ensure_ascii=False
    )
    parts = {
        "palette": _palette(),
        "style": text("style.css"),
        "scripts": "\n".join(map(text, _SCRIPTS)),
        "data": data.replace("<", "\\u003c"),
    }
    return re.sub(r"@(\w+)@", lambda match: parts[match[1]], text("page.html"))


def _palette() -> str:
    colours = (f"--c{k}: light-dark({light}, {dark});" for k, (light, dark) in enumerate(PALETTE))
    return f":root {{ {' '.join(colours)} }}"


def _data(analysis: Analysis) -> dict[str, tp.Any]:
    return {
        "made": f"Made by sable {VERSION} on {datetime.date.today():%d %B %Y}.",
        "runs": analysis.runs,
        "curve": analysis.curve,
        "notes": analysis.notes,
        "systems": [{"name": name} | own._asdict() for name, own in looks(analysis.systems).items()],
        "contestants": analysis.contestants,
        "suites": [_suite(suite, analysis.contestants) for suite in analysis.suites],
        "paper": [
            one._asdict() | {"ours": _estimate(one.ours), "paper": _estimate(one.paper)}
            for one in analysis.paper
        ],
        "chapters": [_chapter(chapter, analysis.systems) for chapter in analysis.chapters],
    }


def _chapter(chapter: Chapter, systems: Sequence[System]) -> dict[str, tp.Any]:
    look = chapter_looks(systems, chapter.systems())
    return {
        "systems": [{"name": name} | own._asdict() for name, own in look.items()],
        "title": chapter.title,
        "text": chapter.text,
        "missing": chapter.missing,
        "command": chapter.command,
        "panels": [] if chapter.elsewhere else [_panel(panel) for panel in chapter.panels],
        "elsewhere": chapter.elsewhere,
        "tables": [_table(one) for one in chapter.tables],
    }


def _panel(panel: Panel) -> dict[str, tp.Any]:
    found: dict[str, tp.Any] = {"title": panel.title, "xLabel": panel.x_label}
    match panel:
        case Lines():
            values = [y for line in panel.lines.values() for y in line.y if np.isfinite(y).all()]
            values += [np.array(one) for one in panel.references.values()]
            highest = max((float(np.abs(one).max()) for one in values), default=0.0)
            return found | {
                "kind": "lines",
                "yLabel": panel.y_label,
                "lines": {name: _places(line, _digits(highest)) for name, line in panel.lines.items()},
                "references": {name: _estimate(one) for name, one in panel.references.items()},
                "dots": panel.dots,
                "zero": panel.zero,
                "log": panel.log,
                "decimals": decimals([highest]),
            }
        case Points():
            points = {name: _estimate(one) for name, one in panel.points.items()}
            return found | {"kind": "points", "points": points, "chance": panel.chance}
        case Bars():
            return found | {"kind": "bars", "bars": {name: [*bar] for name, bar in panel.bars.items()}}


def _places(line: Line, digits: int) -> dict[str, tp.Any]:
    """Return a line to draw: its ends alone where its places lie evenly between them."""
    x = line.x.tolist()
    even = len(x) > 1 and np.allclose(line.x, np.linspace(x[0], x[-1], len(x)), rtol=1e-6)
    return {"x": [x[0], x[-1]], "at": None if even else x, "seeds": []} | _line(line.y, digits)


def _table(table: Table) -> dict[str, tp.Any]:
    def cell(content: str | Figure) -> tp.Any:
        if isinstance(content, str):
            return content
        return [_estimate(content.estimate), content.digits, content.highest, content.overlaps]

    return {"caption": table.caption, "head": table.head, "rows": [[cell(c) for c in r] for r in table.rows]}


def _suite(suite: Suite, contestants: Sequence[str]) -> dict[str, tp.Any]:
    aggregates = suite.aggregates
    return {
        "name": suite.name,
        "tasks": [_task(task, contestants) for task in suite.tasks],
        "compared": aggregates.compared,
        "leader": aggregates.leader() if aggregates.improvement else None,
        "iqm": {name: _estimate(iqm) for name, iqm in aggregates.iqm.items()},
        "improvement": {
            name: {other: _estimate(chance) for other, chance in others.items()}
            for name, others in aggregates.improvement.items()
        },
        "profiles": {name: _line(shares, 3) for name, shares in aggregates.profiles.items()},
        "efficiency": {name: _line(returns, 4) for name, returns in aggregates.efficiency.items()},
        "steps": aggregates.steps,
    }


def _task(task: Task, contestants: Sequence[str]) -> dict[str, tp.Any]:
    return {
        "name": task.name,
        "decimals": tables.task_digits(task),
        "seeds": task.seeds,
        "winner": task.winner,
        "contested": sum(name in task.seeds for name in contestants) > 1,
        "summaries": {
            summary: {name: _estimate(estimate) for name, estimate in systems.items()}
            for summary, systems in task.summaries.items()
        },
        "curves": {name: _curve(curve) for name, curve in task.curves.items()},
        "references": {name: _estimate(one) for name, one in task.references.items()},
        "costs": {
            name: [round(cost.steps_per_second), _whole(cost.peak_memory_bytes), cost.seeds, cost.device]
            for name, cost in task.costs.items()
        },
    }


def _curve(curve: Curve) -> dict[str, tp.Any]:
    """Return a curve to draw: its points lie evenly between the ends of x, its numbers as fine as can be
    seen."""
    values = np.stack(list(curve.seeds.values()))
    digits = _digits(float(np.ptp(values)) or float(np.abs(values).max()))
    seeds = [_rounded(seed, digits) for seed in values] if len(values) > 1 else []
    return {"x": [curve.steps[0], curve.steps[-1]], "seeds": seeds} | _line(curve.value, digits)


def _line(estimate: Estimate, digits: int) -> dict[str, tp.Any]:
    return {name: _rounded(values, digits) for name, values in estimate._asdict().items()}


def _rounded(values: np.ndarray, digits: int) -> list[float]:
    """Round values; whole numbers have no point, and nan, as without an interval, stays."""
    rounded = np.round(values, digits).tolist()
    return [int(x) if math.isfinite(x) and x == int(x) else x for x in rounded]


def _whole(value: float) -> int | None:
    """Return the nearest whole number; None for what is not known."""
    return round(value) if math.isfinite(value) else None


def _digits(span: float) -> int:
    """Return decimals that divide a span into a few thousand."""
    return 3 - math.floor(math.log10(span)) if span > 0 else 3


def _estimate(estimate: Estimate) -> list[float]:
    return [float(f"{value:.6g}") for value in estimate]


def _file_names(analysis: Analysis) -> dict[str, str]:
    """Return a plain file name for every suite and task, no two alike on any file system."""
    names: dict[str, str] = {}
    for name in _all_names(analysis):
        plain = base = re.sub(r"[^a-z0-9._+=-]", "-", name.lower()).lstrip(".-") or "unnamed"
        number = 1
        while plain in names.values():
            number += 1
            plain = f"{base}-{number}"
        names[name] = plain
    return names


def _all_names(analysis: Analysis) -> Iterable[str]:
    for suite in analysis.suites:
        yield f"suite {suite.name}"
        yield from (task.name for task in suite.tasks)
    yield from (f"paper {chapter.key}" for chapter in analysis.chapters)
