"""A report as blocks, and blocks as plain text or markdown.

A document is a sequence of headings, paragraphs of lines, tables and listings (for things that need
more than a row each).  Renderers know nothing of what a report is about.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from offplan.errors import UsageError

_MIN_WIDTH = 40
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[kMGT]?B|ms|s|min)\b)")
_MARKUP = re.compile(r"([\\`*_\[\]|#~])")
_NO_BREAK = "\N{NO-BREAK SPACE}"


class Heading(NamedTuple):
    text: str


class Paragraph(NamedTuple):
    """Lines, each with what it is about (may be empty) and what is said."""

    lines: tuple[tuple[str, str], ...]


class Table(NamedTuple):
    """``numeric`` columns are aligned to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()


class Item(NamedTuple):
    """One thing of a listing: its first cells, and lines of detail below them."""

    cells: tuple[str, ...]
    details: tuple[str, ...]


class Listing(NamedTuple):
    items: tuple[Item, ...]
    numeric: frozenset[int] = frozenset()


Block = Heading | Paragraph | Table | Listing


def counted(count: int, noun: str) -> str:
    """``count`` with ``noun``, in the plural unless it is one."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def change(new: float, old: float) -> float | None:
    """By which share of ``old`` the ``new`` is more; None where ``old`` is nothing."""
    return new / old - 1 if old else None


# --- text -----------------------------------------------------------------------------------------


def render_blocks(blocks: Iterable[Block], format: str, width: int) -> str:
    """``blocks`` as ``text`` or ``markdown``.  ``UsageError`` for a format no report has."""
    if format == "markdown":
        return to_markdown(blocks)
    if format == "text":
        return to_text(blocks, width)
    raise UsageError(f"{format!r} is not a format", fix="one of: text, json, markdown")


def to_text(blocks: Iterable[Block], width: int) -> str:
    """Plain text of at most ``width`` columns (40 at least), without escape codes."""
    width = max(width, _MIN_WIDTH)
    parts = [_block_text(block, width) for block in blocks]
    lines = "\n".join(parts).strip("\n").split("\n")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _block_text(block: Block, width: int) -> str:
    if isinstance(block, Heading):
        return f"\n{_wrapped(plain(block.text), width, '')}"
    if isinstance(block, Paragraph):
        return _paragraph_text(block, width)
    if isinstance(block, Table):
        return _table_text(block, width)
    return _listing_text(block, width)


def _paragraph_text(block: Paragraph, width: int) -> str:
    label_width = max((len(label) for label, _ in block.lines), default=0)
    lines = []
    for label, said in block.lines:
        first = f"  {label:<{label_width}}  " if label_width else "  "
        lines.append(_wrapped(first + plain(said), width, " " * len(first)))
    return "\n".join(lines)


def _table_text(block: Table, width: int) -> str:
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(block.columns):
        table.add_column(
            Text(column),
            justify="right" if index in block.numeric else "left",
            overflow="fold",
            no_wrap=index in block.numeric,
        )
    for row in block.rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return textwrap.indent(_rendered(table, width - 2), "  ")


def _listing_text(block: Listing, width: int) -> str:
    widths = [max(map(len, column)) for column in zip(*(i.cells for i in block.items), strict=True)]
    # Details line up under the last of the first cells.
    indent = 2 + sum(cell_width + 2 for cell_width in widths[:-1])
    lines = []
    for item in block.items:
        cells = [
            cell.rjust(widths[index]) if index in block.numeric else cell.ljust(widths[index])
            for index, cell in enumerate(item.cells)
        ]
        lines.append(_wrapped("  " + "  ".join(map(plain, cells)), width, " " * indent))
        lines += [
            _wrapped(" " * indent + plain(detail), width, " " * (indent + 2))
            for detail in item.details
        ]
    return "\n".join(lines)


def _wrapped(text: str, width: int, indent: str) -> str:
    """``text`` in lines of at most ``width``; a number and its unit stay together."""
    if len(text) <= width:
        return text
    joined = _BEFORE_UNIT.sub(_NO_BREAK, text)
    lines = textwrap.fill(joined, width, subsequent_indent=indent, break_on_hyphens=False)
    return lines.replace(_NO_BREAK, " ")


def _rendered(table: RichTable, width: int) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def plain(text: str) -> str:
    """``text`` on one line and without control characters, whatever a model or file is called."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "?" for char in text)


# --- markdown -------------------------------------------------------------------------------------


def to_markdown(blocks: Iterable[Block]) -> str:
    """GitHub-flavoured markdown."""
    return "\n\n".join(_block_markdown(block) for block in blocks) + "\n"


def _block_markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"### {_escaped(block.text)}"
    if isinstance(block, Paragraph):
        return "\n".join(f"- {_labelled(label, said)}" for label, said in block.lines)
    if isinstance(block, Table):
        rules = ["---:" if i in block.numeric else "---" for i in range(len(block.columns))]
        rows = (block.columns, *block.rows)
        head, *body = (_markdown_row([_escaped(cell) for cell in row]) for row in rows)
        return "\n".join((head, _markdown_row(rules), *body))
    return "\n".join(line for item in block.items for line in _item_markdown(item))


def _labelled(label: str, said: str) -> str:
    return f"**{_escaped(label)}** {_escaped(said)}" if label else _escaped(said)


def _item_markdown(item: Item) -> list[str]:
    head = " · ".join(_escaped(cell) for cell in item.cells if cell)
    return [f"- **{head}**", *(f"  - {_escaped(detail)}" for detail in item.details)]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """``text`` with what markdown or HTML would read as markup made literal."""
    return _MARKUP.sub(r"\\\1", plain(text)).replace("<", "&lt;")
