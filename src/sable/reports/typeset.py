"""Tables as text: Markdown to read, LaTeX to put into a paper."""

import re
import typing as tp
from collections.abc import Callable, Sequence

from sable.reports.looks import interval, number
from sable.reports.stats import Estimate

_LATEX = {
    "\\": r"\textbackslash{}",
    "|": r"\textbar{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
_LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}"} | {sign: f"\\{sign}" for sign in "&%$#_{}"}
PREAMBLE = r"""% Made by sable report. Needs \usepackage{booktabs,graphicx}; then \input this file.
% What is wider than the text is made as wide.
\providecommand{\fitted}[1]{\sbox0{#1}\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi}
"""

LONG = 25
"""In a table of more rows a figure stands beside its interval, not over it, so that it fits a page."""


class Table(tp.NamedTuple):
    """Cells are text or figures; those of the first column name the rows."""

    caption: str
    head: list[str]
    rows: list[list[tp.Any]]


class Figure(tp.NamedTuple):
    """An estimate as a table shows it, in bold where it is the highest, with an asterisk where its interval
    overlaps that of the highest."""

    estimate: Estimate
    digits: int
    highest: bool
    overlaps: bool = False


def to_markdown(table: Table) -> str:
    def cell(content: str | Figure) -> str:
        if isinstance(content, str):
            return escape(content)
        value = number(content.estimate.value, content.digits)
        value = f"**{value}**" if content.highest else value + r"\*" * content.overlaps
        return f"{value} {interval(content.estimate, content.digits)}".strip()

    rule = ["---", *["---:"] * (len(table.head) - 1)]
    lines = [[escape(text) for text in table.head], rule, *([cell(c) for c in row] for row in table.rows)]
    return f"{escape(table.caption)}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape(text: str) -> str:
    """Return text that Markdown and HTML show as it is."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", flat)


def to_latex(table: Table) -> str:
    def cell(content: str | Figure) -> str:
        if isinstance(content, str):
            return _tex(content)
        value = number(content.estimate.value, content.digits).replace("-", "$-$")
        value = rf"\textbf{{{value}}}" if content.highest else value
        value += "$^{*}$" * content.overlaps
        around = interval(content.estimate, content.digits).replace("-", "$-$")
        if len(table.rows) > LONG:
            return rf"{value} {{\tiny {around}}}" if around else value
        # Value over interval: seven systems fit a page's width.
        return rf"\shortstack{{\rule{{0pt}}{{2.6ex}}{value}\\{{\tiny {around}}}}}" if around else value

    def lines(rows: Sequence[Sequence[tp.Any]], cell: Callable[[tp.Any], str]) -> str:
        return "".join("  " + " & ".join(map(cell, row)) + r" \\" + "\n" for row in rows)

    def head(text: str) -> str:
        first, _, rest = _tex(text).partition(" ")
        return rf"\shortstack{{{first}\\{rest}}}" if rest else first

    return (
        "\\begin{table}[htbp]\n\\centering\\footnotesize\\setlength{\\tabcolsep}{3pt}\n"
        f"\\caption{{{_tex(table.caption)}}}\n"
        f"\\fitted{{\\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}\n"
        f"\\toprule\n{lines([table.head], head)}\\midrule\n{lines(table.rows, cell)}"
        "\\bottomrule\n\\end{tabular}}\n\\end{table}\n"
    )


def _tex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
