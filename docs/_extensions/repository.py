"""Pages that the repository shows too: files of its root become pages of the site, and links follow."""

import posixpath
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "sable/benchmarks.md",
    "tests/README.md": "project/tests.md",
}
"""Where the site has the text of a file outside docs/."""
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<path>(?!\w+:)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_TEXT_OF = re.compile(r"<!-- The text of (\S+) -->")


def follow_links(text: str, file: str) -> str:
    """Return the Markdown of `file`, a path in the repository, with its links as the site has them. What the
    site does not have loses its link and keeps its words."""

    def follow(match: re.Match[str]) -> str:
        if match["path"].startswith("/"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), match["path"]))
        place = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path)
        return f"[{match['text']}](/{place}{match['anchor'] or ''})" if place else match["text"]

    return _LINK.sub(follow, text)


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace a page that only names a file by that file's text."""
    file, text = f"docs/{page}.md", source[0]
    if named := _TEXT_OF.search(text):
        file = named[1]
        app.env.note_dependency(str(ROOT / file))
        text = text.replace(named[0], (ROOT / file).read_text(encoding="utf-8"))
    source[0] = follow_links(text, file)


def setup(app: Sphinx) -> dict[str, bool]:
    """Follow links in every page that is read."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
