"""Blocks of a report as HTML: what ``report.document`` has as text and markdown.

Every text is escaped; nothing in it becomes markup.  Elements have classes and no styles of their
own, as a page's policy may forbid these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from offplan.report.document import Block, Heading, Listing, Paragraph, Table, plain


def to_html(blocks: Iterable[Block], level: int = 3) -> str:
    """``blocks`` with headings of ``level``."""
    return "\n".join(_block(block, level) for block in blocks)


def escaped(text: str) -> str:
    """``text`` on one line, as it may stand in HTML, in quotes too."""
    return escape(plain(text))


def _block(block: Block, level: int) -> str:
    if isinstance(block, Heading):
        return f"<h{level}>{escaped(block.text)}</h{level}>"
    if isinstance(block, Paragraph):
        return _paragraph(block)
    if isinstance(block, Table):
        return _table(block)
    return _listing(block)


def _paragraph(block: Paragraph) -> str:
    if not any(label for label, _ in block.lines):
        return "\n".join(f"<p>{escaped(said)}</p>" for _, said in block.lines)
    # A line without a label goes on with what the one before it is about.
    lines = []
    for label, said in block.lines:
        term = f"<dt>{escaped(label)}</dt>" if label else ""
        lines.append(f"{term}<dd>{escaped(said)}</dd>")
    return f'<dl class="lines">{"".join(lines)}</dl>'


def _table(block: Table) -> str:
    head = _row("th", block.columns, block.numeric, ' scope="col"')
    body = "\n".join(_row("td", row, block.numeric) for row in block.rows)
    return (
        f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div>"
    )


def _row(cell: str, texts: Sequence[str], numeric: frozenset[int], scope: str = "") -> str:
    cells = (
        f"<{cell}{scope}{' class=number' if place in numeric else ''}>{escaped(text)}</{cell}>"
        for place, text in enumerate(texts)
    )
    return f"<tr>{''.join(cells)}</tr>"


def _listing(block: Listing) -> str:
    lines = []
    for item in block.items:
        first, *rest = item.cells
        details = "".join(f"<li>{escaped(detail)}</li>" for detail in item.details)
        lines.append(
            f"<li><b class=number>{escaped(first)}</b> <span>{escaped(' '.join(rest))}</span>"
            + (f"<ul>{details}</ul>" if details else "")
            + "</li>"
        )
    return f'<ul class="listing">{"".join(lines)}</ul>'
