"""How `make docs` builds the site: Markdown by MyST, the furo theme, nothing loaded from elsewhere."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

from sable.installation import VERSION  # noqa: E402

project, author, release = "Sable", "The Sable authors", VERSION
copyright = "The Sable authors. Apache License 2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "generated", "mathml", "repository"]
exclude_patterns = ["_build", "_extensions", "_static"]

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Sable {VERSION}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay readable; types are in the text and in the editor
default_role = "code"  # docstrings are plain text with `names` in it
nitpick_ignore_regex = [(r"py:.*", r"(jax|numpy)\..*")]  # types of others, which no page here has
