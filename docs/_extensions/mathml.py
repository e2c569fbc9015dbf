"""Equations as MathML, which browsers draw themselves: no script and no request to another host."""

import typing as tp

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx


def _draw(writer: tp.Any, node: nodes.Element, *, as_block: bool) -> tp.NoReturn:
    writer.body.append(tex2mathml(node.astext(), as_block=as_block))
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer under the name `mathml`."""
    inline = lambda writer, node: _draw(writer, node, as_block=False)  # noqa: E731
    block = lambda writer, node: _draw(writer, node, as_block=True)  # noqa: E731
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
