"""A sweep as a heat map for the terminal, markdown, CSV or JSON.

One axis is a table with a row for each value; two are a map of what the step takes, or of the peak
where nothing was budgeted; more are a map for each combination of the rest.  What fits only with a
plan has a ``*``, so that it reads without colours as well.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from offplan.errors import UsageError
from offplan.report.document import Block, Heading, Paragraph, Table, to_markdown, to_text
from offplan.sweep import Axis, Outcome, Point, Sweep, combinations
from offplan.units import format_size

FORMATS = ("text", "json", "csv", "markdown")
_STYLES: dict[Outcome, str] = {
    "predicted": "",
    "fits": "black on green",
    "fits with a plan": "black on yellow",
    "does not fit": "white on red",
    "failed": "dim",
}
_COLUMNS = (
    "outcome",
    "budget_bytes",
    "no_plan_bytes",
    "floor_bytes",
    "peak_bytes",
    "no_plan_ms",
    "step_ms",
    "sample_ms",
    "moved_bytes",
    "recomputed_bytes",
    "message",
)


def render_sweep(
    found: Sweep, format: str = "text", width: int = 80, *, color: bool = False
) -> str:
    """``found`` in one of ``FORMATS``."""
    if format == "json":
        return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"
    if format == "csv":
        return _csv(found)
    if format == "markdown":
        return to_markdown(_document(found))
    if format != "text":
        raise UsageError(f"--format {format}: not one of {', '.join(FORMATS)}")
    maps = "".join(_rendered(each, width, color=color) + "\n" for each in _maps(found))
    tail = [*_tail(found)]
    text = to_text(_head(found), width) + maps.rstrip("\n") + "\n"
    return text + ("\n" + to_text(tail, width) if tail else "")


def _csv(found: Sweep) -> str:
    stream = io.StringIO()
    names = [axis.name for axis in found.axes]
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*names, *_COLUMNS])
    for point in found.points:
        values = [getattr(point, column) for column in _COLUMNS]
        cells = ["" if value is None else value for value in values]
        writer.writerow([*(point.params.get(name, "") for name in names), *cells])
    return stream.getvalue()


def _document(found: Sweep) -> Iterator[Block]:
    yield from _head(found)
    yield _points_table(found)
    yield from _tail(found)


def _head(found: Sweep) -> Iterator[Block]:
    budget = f"budget {found.budget}" if found.budget else "no budget: peaks without a plan"
    yield Heading(f"{found.target}: {budget}")


def _tail(found: Sweep) -> Iterator[Block]:
    said = []
    for each in found.largest:
        where = _words(each.params) or "of all"
        value = f"{found.along}={each.value}" if each.value is not None else "nothing fits"
        odd = (
            ""
            if each.is_monotone
            else " (more is not always more here, so a larger one may fit, too)"
        )
        said.append((where, f"{value}{odd}"))
    if said:
        yield Heading(f"The largest {found.along} that fits")
        yield Paragraph(tuple(said))
    failed = [point for point in found.points if point.outcome == "failed"]
    if failed:
        yield Heading("Failed")
        yield Paragraph(tuple((_words(point.params), _one_line(point.message)) for point in failed))
    marks = []
    if any(point.outcome == "fits with a plan" for point in found.points):
        marks.append(("", "* fits with a plan; without a mark it fits as it is"))
    if len(found.axes) > 1 and any(point.outcome == "does not fit" for point in found.points):
        marks.append(("", "no: does not fit, with the least peak that any plan has"))
    if marks:
        yield Paragraph(tuple(marks))


def _one_line(message: str) -> str:
    return "; ".join(line.strip() for line in message.splitlines())


def _words(params: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in params.items())


def _points_table(found: Sweep) -> Table:
    names = tuple(axis.name for axis in found.axes)
    columns = (*names, "outcome", "no plan", "floor", "peak", "step", "per sample")
    rows = tuple(
        (*(point.params.get(name, "") for name in names), point.outcome, *_cells(point))
        for point in found.points
    )
    return Table(columns, rows, frozenset(range(len(names) + 1, len(columns))))


def _cells(point: Point) -> tuple[str, ...]:
    sizes = (point.no_plan_bytes, point.floor_bytes, point.peak_bytes)
    times = (point.step_ms, point.sample_ms)
    return (
        *("" if size is None else format_size(size) for size in sizes),
        *("" if time is None else _time(time) for time in times),
    )


def _time(time_ms: float) -> str:
    return f"{time_ms:.1f} ms" if time_ms < 100 else f"{time_ms:.0f} ms"


# --- heat maps ------------------------------------------------------------------------------------


def _maps(found: Sweep) -> Iterator[RichTable]:
    if len(found.axes) < 2:
        yield _list_map(found)
        return
    *others, rows, columns = found.axes
    for rest in combinations(others):
        yield _heat_map(found, rest, rows, columns)


def _list_map(found: Sweep) -> RichTable:
    table = _points_table(found)
    drawn = RichTable(box=None, pad_edge=False, show_edge=False)
    for place, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if place in table.numeric else "left")
    for point, row in zip(found.points, table.rows, strict=True):
        style = _STYLES[point.outcome]
        at = len(found.axes)
        drawn.add_row(*(Text(cell, style if place == at else "") for place, cell in enumerate(row)))
    return drawn


def _heat_map(found: Sweep, rest: dict[str, str], rows: Axis, columns: Axis) -> RichTable:
    points = {tuple(sorted(point.params.items())): point for point in found.points}
    drawn = RichTable(
        title=_words(rest) or None, box=None, pad_edge=False, title_justify="left", title_style=""
    )
    drawn.add_column(f"{rows.name} \\ {columns.name}")
    for value in columns.values:
        drawn.add_column(value, justify="right")
    for row in rows.values:
        cells = [Text(row)]
        for column in columns.values:
            params = {**rest, rows.name: row, columns.name: column}
            point = points.get(tuple(sorted(params.items())))
            cells.append(Text("") if point is None else Text(_cell(point), _STYLES[point.outcome]))
        drawn.add_row(*cells)
    return drawn


def _cell(point: Point) -> str:
    if point.outcome == "failed":
        return "failed"
    if point.outcome == "does not fit":
        return f"no, {format_size(point.floor_bytes)}" if point.floor_bytes else "no"
    mark = "*" if point.outcome == "fits with a plan" else ""
    shown = (
        format_size(point.peak_bytes or 0)
        if point.outcome == "predicted" or point.step_ms is None
        else _time(point.step_ms)
    )
    return shown + mark


def _rendered(table: RichTable, width: int, *, color: bool) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
    )
    console.print(table)
    lines: Sequence[str] = [line.rstrip() for line in stream.getvalue().splitlines()]
    return "\n".join(lines) + "\n"
