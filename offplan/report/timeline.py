"""Memory over a step, drawn in the terminal: stacked by part, with both copy lanes below it.

1.  Time is divided into *columns* of equal length.  A column shows the moment in it at which the
    most is held, so that no peak is lost however narrow the drawing.  What is held at an op is held
    to the start of the next, waits included.
2.  Parts are stacked from what stays longest to what goes soonest (``STACK``).  A cell shows the
    part that fills most of it, as a colour or, without colours, as a letter; only the highest cell
    of a column is drawn in eighths, and at least one eighth where anything reaches into it.
3.  A *lane* shows for each column the part of it during which a copy is under way.
4.  Both panels, without and with the plan, have the same scales.

Bytes are as in ``offplan.chart``: the highest moment can be a little under the predicted peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from offplan.chart import Chart
from offplan.memory import Part
from offplan.report.document import counted, plain
from offplan.units import format_size

STACK: tuple[Part, ...] = (
    "parameters",
    "optimizer",
    "inputs",
    "gradients",
    "saved",
    "reloaded",
    "in_flight",
    "temporaries",
    "workspace",
    "rounding",
)
PART_WORDS: dict[Part, str] = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "inputs": "inputs",
    "gradients": "gradients",
    "saved": "saved activations",
    "reloaded": "reloaded",
    "in_flight": "in flight",
    "temporaries": "temporaries",
    "workspace": "workspaces",
    "rounding": "rounding",
}

LEAST_WIDTH, LEAST_HEIGHT = 60, 6
DEFAULT_HEIGHT = 24
_MOST_ROWS = 16

_LETTERS: dict[Part, str] = {
    "parameters": "P",
    "optimizer": "O",
    "inputs": "I",
    "gradients": "G",
    "saved": "S",
    "reloaded": "R",
    "in_flight": "F",
    "temporaries": "T",
    "workspace": "W",
    "rounding": "+",
}
# Of the 256 colours of terminals: readable on dark and on light, and apart for most eyes.
_COLOURS: dict[Part, int] = {
    "parameters": 246,
    "optimizer": 137,
    "inputs": 252,
    "gradients": 173,
    "saved": 68,
    "reloaded": 71,
    "in_flight": 179,
    "temporaries": 168,
    "workspace": 134,
    "rounding": 240,
}
# Lanes have the colours of what they bring about.
_LANES: dict[str, Part] = {"host": "in_flight", "device": "reloaded", "wait": "temporaries"}
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_SHADES = " ░▒▓█"
_MARGIN = 10
_RIGHT = 9
# A part that never takes this share of the scale is drawn, but not listed.
_LISTED_SHARE = 0.002
# A part of the scale is left free above the highest point.
_SCALE_STEPS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


# --- columns --------------------------------------------------------------------------------------


class Busy(NamedTuple):
    """From ``begin_ms`` to ``end_ms``, of a copy or a wait."""

    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Columns:
    """A chart in ``count`` columns over ``span_ms`` (definition 1).

    ``moments`` has the moment that each column shows; None after the end of the step.
    """

    chart: Chart
    span_ms: float
    count: int
    moments: tuple[int | None, ...]

    @cached_property
    def stacks(self) -> tuple[tuple[tuple[Part, int], ...], ...]:
        """Parts and their bytes in each column, from the lowest to the highest."""
        stacked = self.chart.stacked
        return tuple(
            ()
            if moment is None
            else tuple((part, stacked[part][moment]) for part in STACK if stacked[part][moment])
            for moment in self.moments
        )

    def totals(self) -> tuple[int, ...]:
        return tuple(sum(size for _, size in stack) for stack in self.stacks)

    def share(self, spans: Iterable[Busy]) -> tuple[float, ...]:
        """How much of each column lies within ``spans``, from 0 to 1 (definition 3)."""
        each_ms = self.span_ms / self.count
        found = [0.0] * self.count
        for begin_ms, end_ms in spans:
            first = min(int(begin_ms / each_ms), self.count - 1)
            last = min(int(end_ms / each_ms), self.count - 1)
            for column in range(first, last + 1):
                inside = min(end_ms, (column + 1) * each_ms) - max(begin_ms, column * each_ms)
                found[column] += max(inside, 0.0) / each_ms
        return tuple(min(share, 1.0) for share in found)


def columns(chart: Chart, span_ms: float, count: int) -> Columns:
    """``chart`` in ``count`` columns over the first ``span_ms`` milliseconds."""
    starts, totals = chart.starts_ms, chart.totals
    best: list[int | None] = [None] * count
    # Wide columns first see the moment that takes the most anywhere in them.
    each_ms = span_ms / count
    for moment, op in enumerate(chart.spans.ops):
        if op + 1 >= len(starts):
            continue
        first = min(int(starts[op] / each_ms), count - 1)
        last = min(max(int(starts[op + 1] / each_ms - 1e-9), first), count - 1)
        for column in range(first, last + 1):
            other = best[column]
            if other is None or totals[moment] > totals[other]:
                best[column] = moment
    return Columns(chart, span_ms, count, tuple(best))


def peak_moment(chart: Chart) -> int:
    """The moment at which the most is held: of the predicted op if it is one of those."""
    most = max(chart.totals)
    found = [moment for moment, total in enumerate(chart.totals) if total == most]
    op = chart.prediction.op
    return next((moment for moment in found if chart.spans.ops[moment] == op), found[0])


def peak_ms(chart: Chart) -> float:
    """When the peak is, in the middle of its op."""
    op = chart.spans.ops[peak_moment(chart)]
    return chart.starts_ms[op] + chart.op_ms[op] / 2


def backward_ms(chart: Chart) -> float | None:
    """When the last op of the forward has ended; what compute waits for then is of the backward."""
    if not 0 < chart.forward_count < len(chart.op_ms):
        return None
    last = chart.forward_count - 1
    return chart.starts_ms[last] + chart.op_ms[last]


def lanes(chart: Chart) -> dict[str, tuple[Busy, ...]]:
    """When copies are under way to the host, to the device, and when compute waits for them."""
    found: dict[str, list[Busy]] = {"host": [], "device": [], "wait": []}
    for copy in chart.played.copies:
        found[copy.to].append(Busy(copy.begin_ms, copy.end_ms))
    for stall in chart.played.stalls:
        found["wait"].append(Busy(stall.end_ms - stall.wait_ms, stall.end_ms))
    return {name: tuple(spans) for name, spans in found.items()}


def span_of(*charts: Chart | None) -> float:
    """The time that the longest of ``charts`` takes, in milliseconds, and never 0."""
    return max([chart.starts_ms[-1] for chart in charts if chart is not None] + [1e-6])


def ticks(most: float, about: int) -> tuple[float, ...]:
    """Round numbers from 0 up to ``most``, some ``about`` of them."""
    if most <= 0:
        return (0.0,)
    least, power = most / max(about, 1), 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    step = next((power * each for each in _SCALE_STEPS if power * each >= least), power * 10)
    return tuple(number * step for number in range(int(most / step + 1e-9) + 1))


def listed_parts(charts: Iterable[Chart], most_bytes: int) -> tuple[Part, ...]:
    """Parts that are large enough to be listed, in the order of the stack."""
    taken = {part: max(max(chart.stacked[part]) for chart in charts) for part in STACK}
    return tuple(part for part in STACK if taken[part] > most_bytes * _LISTED_SHARE)


# --- words ----------------------------------------------------------------------------------------


def format_ms(time_ms: float) -> str:
    """A time with as many digits as say something: ``3,242 ms``, ``53.9 ms``, ``0.02 ms``."""
    digits = 0 if time_ms >= 100 else 1 if time_ms >= 1 else 2
    return f"{time_ms:,.{digits}f} ms"


def panel_title(name: str, chart: Chart) -> str:
    """What a panel is of: the peak that is predicted, and how long the step takes."""
    peak = format_size(chart.prediction.peak_bytes)
    return f"{name}: peak {peak}, step {format_ms(chart.starts_ms[-1])}"


def peak_words(chart: Chart) -> str:
    """When the peak is, and in which op."""
    found = chart.prediction
    if not found.op_target:
        return f"peak at {format_ms(peak_ms(chart))}"
    where = f" of {plain(found.op_module)}" if found.op_module else ""
    return f"peak at {format_ms(peak_ms(chart))}: {plain(found.op_target)}{where}"


def lane_words(chart: Chart, to: str) -> str:
    """What crosses the link one way: bytes, copies, and how long the link is busy."""
    found = [copy for copy in chart.played.copies if copy.to == to]
    size = sum(chart.transfers[copy.transfer].transfer_bytes for copy in found)
    busy_ms = sum(copy.end_ms - copy.begin_ms for copy in found)
    part = 100 * busy_ms / max(chart.starts_ms[-1], 1e-9)
    copies = f"{len(found):,} " + ("copy" if len(found) == 1 else "copies")
    return f"to {to}: {format_size(size)} in {copies}, link busy {part:.0f}% of the step"


def wait_words(chart: Chart) -> str:
    """How long compute waits for copies, and how often."""
    stalls = chart.played.stalls
    if not stalls:
        return "compute waits for no copy"
    waited_ms = sum(stall.wait_ms for stall in stalls)
    return f"compute waits {format_ms(waited_ms)}, before {counted(len(stalls), 'op')}"


# --- the terminal ---------------------------------------------------------------------------------


class _Cell(NamedTuple):
    """A character with a part in front, and one behind it (None: the terminal's own)."""

    text: str
    front: Part | None = None
    behind: Part | None = None


@dataclass(frozen=True)
class _Frame:
    """What both panels share: scales and sizes.  ``rows`` are those of one panel."""

    span_ms: float
    most_bytes: float
    budget_bytes: int | None
    width: int
    rows: int
    color: bool

    @property
    def count(self) -> int:
        return self.width - _MARGIN - _RIGHT

    @property
    def row_bytes(self) -> float:
        return self.most_bytes / self.rows

    def row_of(self, size_bytes: float) -> int:
        """The row, from the lowest, that the highest byte of ``size_bytes`` is in."""
        # Less the rounding of floats, by which the highest point would reach into one row more.
        rows = ceil(size_bytes / self.row_bytes - 1e-9)
        return min(max(rows - 1, 0), self.rows - 1)


def render_timeline(
    no_plan: Chart | None,
    plan: Chart | None,
    budget_bytes: int | None,
    width: int,
    height: int = DEFAULT_HEIGHT,
    color: bool = False,
) -> str:
    """Memory over time without and with a plan, as text of ``width`` columns (60 at least).

    ``height`` are the rows for memory, of both panels together, 16 at most for each; a lane below
    the plan's takes one each.  A chart that is None has no panel.  ``color``: with escape codes for
    256 colours, else letters.  ``budget_bytes`` draws a line.
    """
    charts = [chart for chart in (no_plan, plan) if chart is not None]
    if not charts:
        return "no graphs, no timeline\n"
    peaks = [max(max(chart.totals), chart.prediction.peak_bytes) for chart in charts]
    rows = min(max(height // len(charts), LEAST_HEIGHT), _MOST_ROWS)
    # One row more than the highest point needs, for its mark.
    most_bytes = max(*peaks, budget_bytes or 0) * rows / (rows - 1)
    frame = _Frame(span_of(*charts), most_bytes, budget_bytes, max(width, LEAST_WIDTH), rows, color)
    lines: list[str] = []
    if no_plan is not None:
        lines += [*_panel("no plan", no_plan, frame), *_time_axis(no_plan, frame), ""]
    if plan is not None:
        lines += _panel("plan", plan, frame)
        lines += [*_lane_lines(plan, frame), *_time_axis(plan, frame), ""]
    lines += _legend(charts, frame)
    if plan is not None and plan.played.copies:
        lines += [f"  {lane_words(plan, to)}" for to in ("host", "device")]
        lines.append(f"  {wait_words(plan)}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _panel(name: str, chart: Chart, frame: _Frame) -> list[str]:
    drawn = columns(chart, frame.span_ms, frame.count)
    grid = _cells(drawn, frame)
    peak_row = frame.row_of(max(drawn.totals()))
    _mark_peak(grid, drawn, peak_row)
    marks = {peak_row: " ◂ peak"}
    if frame.budget_bytes:
        budget_row = frame.row_of(frame.budget_bytes)
        _draw_line(grid[budget_row])
        marks[budget_row] = " ◂ budget"
    labels = _labels(frame)
    lines = [
        _fitted(text, frame.width) for text in (panel_title(name, chart), f"  {peak_words(chart)}")
    ]
    for row in reversed(range(frame.rows)):
        label, tick = labels.get(row, ""), "┤" if row in labels else "│"
        cells = _painted(grid[row], frame.color)
        lines.append(f"{label:>{_MARGIN - 1}}{tick}{cells}{marks.get(row, '')}")
    return lines


def _labels(frame: _Frame) -> dict[int, str]:
    """Sizes at the upper edge of rows; a row has one at most."""
    found: dict[int, str] = {}
    for size in ticks(frame.most_bytes, max(frame.rows // 3, 2))[1:]:
        row = round(size / frame.row_bytes) - 1
        if 0 <= row < frame.rows:
            found[row] = _short_size(size)
    return found


def _short_size(size_bytes: float) -> str:
    """A round size without the digits that say nothing: ``50 GB``."""
    number, unit = format_size(round(size_bytes)).split()
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def _cells(drawn: Columns, frame: _Frame) -> list[list[_Cell]]:
    """Rows of cells from the lowest."""
    grid = [[_Cell(" ")] * drawn.count for _ in range(frame.rows)]
    for place, stack in enumerate(drawn.stacks):
        for row, cell in enumerate(_column(stack, frame)):
            grid[row][place] = cell
    return grid


def _column(stack: Sequence[tuple[Part, int]], frame: _Frame) -> list[_Cell]:
    total = sum(size for _, size in stack)
    if not total:
        return []
    top = frame.row_of(total)
    shares: list[dict[Part, float]] = [{} for _ in range(top + 1)]
    below = 0.0
    for part, size in stack:
        first, last = int(below // frame.row_bytes), frame.row_of(below + size)
        for row in range(min(first, top), min(last, top) + 1):
            low, high = row * frame.row_bytes, (row + 1) * frame.row_bytes
            inside = min(below + size, high) - max(below, low)
            if inside > 0:
                shares[row][part] = shares[row].get(part, 0.0) + inside
        below += size
    paint = _colour_cell if frame.color else _letter_cell
    return [paint(share, frame.row_bytes, row == top) for row, share in enumerate(shares)]


def _letter_cell(share: dict[Part, float], row_bytes: float, is_top: bool) -> _Cell:
    part = max(share, key=lambda each: share[each], default=None)
    if part is None:
        return _Cell(_EIGHTHS[1])
    filled = _eighths(sum(share.values()), row_bytes)
    if is_top and filled < 7:
        return _Cell(_EIGHTHS[filled], part)
    return _Cell(_LETTERS[part], part)


def _colour_cell(share: dict[Part, float], row_bytes: float, is_top: bool) -> _Cell:
    """The two parts that take the most of the cell, the lower one in front."""
    order = sorted(share, key=lambda each: -share[each])[:2]
    if not order:
        return _Cell(_EIGHTHS[1])
    if is_top:
        filled = _eighths(sum(share.values()), row_bytes)
        return _Cell(_EIGHTHS[filled], order[0])
    if len(order) == 1:
        return _Cell(_EIGHTHS[8], order[0])
    low, high = sorted(order, key=STACK.index)
    part_of = share[low] / (share[low] + share[high])
    eighths = round(8 * part_of)
    if eighths in (0, 8):
        return _Cell(_EIGHTHS[8], low if eighths else high)
    return _Cell(_EIGHTHS[eighths], low, high)


def _eighths(size: float, row_bytes: float) -> int:
    return min(max(round(8 * size / row_bytes), 1), 8)


def _mark_peak(grid: list[list[_Cell]], drawn: Columns, peak_row: int) -> None:
    totals = drawn.totals()
    moment = peak_moment(drawn.chart)
    column = drawn.moments.index(moment) if moment in drawn.moments else totals.index(max(totals))
    if peak_row + 1 < len(grid):
        grid[peak_row + 1][column] = _Cell("▼")


def _draw_line(row: list[_Cell]) -> None:
    for place, cell in enumerate(row):
        if cell.text == " ":
            row[place] = _Cell("╌")


def _painted(cells: Sequence[_Cell], color: bool) -> str:
    if not color:
        return "".join(cell.text for cell in cells)
    text, now = "", ""
    for cell in cells:
        code = _code(cell)
        if code != now:
            text += code or "\x1b[0m"
            now = code
        text += cell.text
    return text + ("\x1b[0m" if now else "")


def _code(cell: _Cell) -> str:
    if cell.front is None:
        return ""
    code = f"\x1b[0;38;5;{_COLOURS[cell.front]}"
    return f"{code};48;5;{_COLOURS[cell.behind]}m" if cell.behind else f"{code}m"


def _lane_lines(chart: Chart, frame: _Frame) -> list[str]:
    drawn = columns(chart, frame.span_ms, frame.count)
    if not chart.played.copies:
        return []
    found = lanes(chart)
    names = {"host": "to host", "device": "to device", "wait": "waits"}
    shown = {name: spans for name, spans in found.items() if spans or name != "wait"}
    return [
        f"{names[name]:>{_MARGIN - 1}}│{_lane(drawn.share(spans), _LANES[name], frame.color)}"
        for name, spans in shown.items()
    ]


def _lane(shares: Sequence[float], part: Part, color: bool) -> str:
    cells = [_Cell(_SHADES[_shade(share)], part if share else None) for share in shares]
    return _painted(cells, color)


def _shade(share: float) -> int:
    """Of four shades; a copy however short is seen."""
    return 0 if share <= 0 else max(1, min(round(4 * share), 4))


def _time_axis(chart: Chart, frame: _Frame) -> list[str]:
    """A line with ticks, and their times below it; where the backward starts is a cross."""
    each_ms = frame.span_ms / frame.count
    line = ["─"] * frame.count
    texts: dict[int, str] = {}
    for time_ms in ticks(frame.span_ms, max(frame.count // 12, 2)):
        place = min(int(time_ms / each_ms), frame.count - 1)
        line[place] = "┴"
        texts[place] = f"{time_ms:,.6g}"
    backward = _backward_place(chart, each_ms, frame.count)
    if backward is not None:
        line[backward] = "┼"
    return [
        f"{'':>{_MARGIN - 1}}└{''.join(line)} ms",
        _placed(texts, frame) if backward is None else _with_phase(texts, backward, frame),
    ]


def _backward_place(chart: Chart, each_ms: float, count: int) -> int | None:
    start_ms = backward_ms(chart)
    return None if start_ms is None else min(int(start_ms / each_ms), count - 1)


def _with_phase(texts: dict[int, str], backward: int, frame: _Frame) -> str:
    word = "backward"
    kept = {
        place: text
        for place, text in texts.items()
        if place + len(text) // 2 < backward - 1 or place - len(text) // 2 > backward + len(word)
    }
    # The word starts at the cross, which is where the backward does.
    return _placed({**kept, backward + len(word) // 2: word}, frame)


def _placed(texts: dict[int, str], frame: _Frame) -> str:
    """Texts centred at their places, as far as there is room."""
    line = " " * frame.width
    for place, text in sorted(texts.items()):
        start = min(max(_MARGIN + place - len(text) // 2, 0), frame.width - len(text))
        if not line[max(start - 1, 0) : start + len(text) + 1].strip():
            line = line[:start] + text + line[start + len(text) :]
    return line


def _legend(charts: Sequence[Chart], frame: _Frame) -> list[str]:
    """The parts with the bytes that each takes at the peak of the last chart."""
    chart = charts[-1]
    moment = peak_moment(chart)
    entries = []
    for part in listed_parts(charts, round(frame.most_bytes)):
        mark = _painted([_Cell("█", part)], True) if frame.color else _LETTERS[part]
        words = f"{PART_WORDS[part]} {format_size(chart.stacked[part][moment])}"
        entries.append((f"{mark} {words}", 2 + len(words)))
    lines = ["  at the peak:"]
    used = len(lines[0])
    for text, length in entries:
        if used + 2 + length > frame.width:
            lines.append("   ")
            used = 3
        lines[-1] += f"  {text}"
        used += 2 + length
    return lines


def _fitted(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
