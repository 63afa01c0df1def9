"""Memory over a step as a picture: SVG, and PNG, of the same shapes.

1.  A picture is a row of *shapes* in pixels, painted in order: rectangles, areas (for each column
    of ``STEP`` pixels its upper and its lower edge), dashed lines and texts.
2.  The SVG is the shapes as elements.  Copies and waits say in a ``title``, which hovering shows,
    what moves and what waits.
3.  The PNG has one byte for each pixel, which indexes a palette, and letters of ``report.glyphs``:
    nothing but zlib is needed.
4.  What is drawn, columns, scales and words, is ``report.timeline``'s.

The same charts give the same bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple
from xml.sax.saxutils import escape, quoteattr

from offplan.chart import Chart
from offplan.files import FileKind
from offplan.graph import StorageId
from offplan.memory import Part
from offplan.report.document import plain
from offplan.report.glyphs import ADVANCE, GLYPH_HEIGHT, glyph
from offplan.report.timeline import (
    PART_WORDS,
    STACK,
    backward_ms,
    columns,
    format_ms,
    lane_words,
    listed_parts,
    panel_title,
    peak_moment,
    peak_ms,
    peak_words,
    span_of,
    ticks,
    wait_words,
)
from offplan.units import format_size

WIDTH, HEIGHT = 1600, 1000
STEP = 2

_LEFT, _RIGHT = 130, 30
_LANE, _LANE_GAP = 22, 6
_TEXT = 20
# Below a panel: the time axis and its numbers.
_AXIS = 46
_TITLE = 72

PART_COLOURS: dict[Part, str] = {
    "parameters": "#9aa0a6",
    "optimizer": "#b08d57",
    "inputs": "#cfd3d6",
    "gradients": "#e07b39",
    "saved": "#4477aa",
    "reloaded": "#44a16b",
    "in_flight": "#e5b83b",
    "temporaries": "#cc5577",
    "workspace": "#8e5ea2",
    "rounding": "#666666",
}
_PAPER, _INK, _PALE, _FAINT = "#ffffff", "#1f2328", "#59636e", "#d9dee3"
_BUDGET, _WAIT = "#c62828", "#c62828"


# --- shapes ---------------------------------------------------------------------------------------


class Rect(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""


class Area(NamedTuple):
    """From ``x`` on, columns of ``STEP`` pixels, each from ``tops`` to ``bottoms``."""

    x: int
    tops: tuple[float, ...]
    bottoms: tuple[float, ...]
    colour: str
    title: str


class Dashes(NamedTuple):
    x: int
    y: float
    width: int
    colour: str


class Text(NamedTuple):
    """``y`` is the line that letters stand on."""

    x: float
    y: float
    text: str
    colour: str = _INK
    anchor: Literal["start", "middle", "end"] = "start"


Shape = Rect | Area | Dashes | Text


@dataclass(frozen=True)
class Picture:
    title: str
    shapes: tuple[Shape, ...]


class _Panel(NamedTuple):
    """Where a panel's memory is drawn, and by which scales.  ``bottom`` is its lower edge."""

    chart: Chart
    name: str
    top: int
    bottom: int
    span_ms: float
    most_bytes: float
    budget_bytes: int | None

    @property
    def width(self) -> int:
        return WIDTH - _LEFT - _RIGHT

    def x(self, time_ms: float) -> float:
        return _LEFT + self.width * time_ms / self.span_ms

    def y(self, size_bytes: float) -> float:
        return self.bottom - (self.bottom - self.top) * size_bytes / self.most_bytes


def draw(
    title: str, no_plan: Chart | None, plan: Chart | None, budget_bytes: int | None
) -> Picture:
    """The picture of a step without and with a plan; a chart that is None has no panel."""
    named = [("no plan", no_plan), ("plan", plan)]
    charts = [(name, chart) for name, chart in named if chart is not None]
    found = [chart for _, chart in charts]
    peaks = [max(max(chart.totals), chart.prediction.peak_bytes) for chart in found]
    most_bytes, span_ms = 1.08 * max([budget_bytes or 1, *peaks]), span_of(*found)
    lanes_height = 3 * (_LANE + _LANE_GAP) if any(c.played.copies for c in found) else 0
    # The title above, the legend below, and the rest for the panels.
    least_top, below = 44, 114
    each = (HEIGHT - least_top - below - lanes_height) // max(len(charts), 1)
    shapes: list[Shape] = [Text(_LEFT, 34, plain(title))]
    top = least_top
    for name, chart in charts:
        panel = _Panel(
            chart, name, top + _TITLE, top + each - _AXIS, span_ms, most_bytes, budget_bytes
        )
        shapes += _panel_shapes(panel)
        top += each + (lanes_height if chart.played.copies else 0)
    shapes += _legend(found, HEIGHT - below + 34, most_bytes)
    return Picture(title, tuple(shapes))


def _panel_shapes(panel: _Panel) -> Iterator[Shape]:
    chart = panel.chart
    yield Text(_LEFT, panel.top - 44, panel_title(panel.name, chart))
    yield Text(_LEFT, panel.top - 20, peak_words(chart), _PALE)
    for size in ticks(panel.most_bytes, 5):
        yield Rect(_LEFT, panel.y(size), panel.width, 1, _FAINT)
        yield Text(_LEFT - 10, panel.y(size) + 6, _size_label(size), _PALE, "end")
    yield from _areas(panel)
    yield from _lines(panel)
    bottom = panel.bottom
    if chart.played.copies:
        yield from _lanes(panel)
        bottom += 3 * (_LANE + _LANE_GAP)
    yield from _time_axis(panel, bottom)


def _size_label(size_bytes: float) -> str:
    number, unit = format_size(round(size_bytes)).split()
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def _areas(panel: _Panel) -> Iterator[Area]:
    drawn = columns(panel.chart, panel.span_ms, panel.width // STEP)
    # Not beyond the end of the step, which may be before that of the other panel.
    count = next(
        (place for place, moment in enumerate(drawn.moments) if moment is None), drawn.count
    )
    below = [0] * count
    for part in STACK:
        sizes = panel.chart.stacked[part]
        above = [
            size + sizes[moment]
            for size, moment in zip(below, drawn.moments, strict=False)
            if moment is not None
        ]
        if above != below:
            tops = tuple(round(panel.y(size), 1) for size in above)
            bottoms = tuple(round(panel.y(size), 1) for size in below)
            yield Area(_LEFT, tops, bottoms, PART_COLOURS[part], PART_WORDS[part])
        below = above


def _lines(panel: _Panel) -> Iterator[Shape]:
    """The peak, where it is and how high, and the budget."""
    chart = panel.chart
    peak, x = panel.y(max(chart.totals)), panel.x(peak_ms(chart))
    yield Dashes(_LEFT, peak, panel.width, _INK)
    for width, up in ((13, 13), (9, 10), (5, 7), (1, 4)):
        yield Rect(x - width // 2, peak - up, width, 3, _INK)
    size = format_size(chart.prediction.peak_bytes)
    yield Text(WIDTH - _RIGHT, peak - 8, f"peak {size}", _INK, "end")
    if panel.budget_bytes:
        y = panel.y(panel.budget_bytes)
        yield Dashes(_LEFT, y, panel.width, _BUDGET)
        # At the other end, as a plan's peak is often at its budget.
        yield Text(_LEFT + 8, y - 8, f"budget {format_size(panel.budget_bytes)}", _BUDGET)


def _lanes(panel: _Panel) -> Iterator[Shape]:
    chart = panel.chart
    colours = {"host": PART_COLOURS["in_flight"], "device": PART_COLOURS["reloaded"]}
    tops = {
        name: panel.bottom + _LANE_GAP + place * (_LANE + _LANE_GAP)
        for place, name in enumerate(("host", "device", "wait"))
    }
    words = {"host": "to host", "device": "to device", "wait": "waits"}
    for name, top in tops.items():
        yield Text(_LEFT - 10, top + _LANE - 5, words[name], _PALE, "end")
        yield Rect(_LEFT, top + _LANE, panel.width, 1, _FAINT)
    for copy in chart.played.copies:
        transfer = chart.transfers[copy.transfer]
        begin, end = panel.x(copy.begin_ms), panel.x(copy.end_ms)
        says = (
            f"{storage_words(chart, transfer.storage)}: {format_size(transfer.transfer_bytes)} "
            f"to {copy.to}, {copy.begin_ms:,.1f} to {copy.end_ms:,.1f} ms"
        )
        # A gap after each, so that copies one after the other can be told apart.
        width = max(end - begin - 1, 1)
        yield Rect(round(begin, 1), tops[copy.to], round(width, 1), _LANE, colours[copy.to], says)
    for stall in chart.played.stalls:
        begin, end = panel.x(stall.end_ms - stall.wait_ms), panel.x(stall.end_ms)
        before = chart.ops[stall.op].target if stall.op < len(chart.ops) else "the end"
        says = f"compute waits {format_ms(stall.wait_ms)} before {plain(before)}"
        width = max(round(end - begin, 1), 2)
        yield Rect(round(begin, 1), tops["wait"], width, _LANE, _WAIT, says)


def storage_words(chart: Chart, storage: StorageId) -> str:
    """What made ``storage``: the op, its module and its source line, as far as they are known."""
    place = chart.makers.get(storage)
    if place is None:
        return f"storage {storage}"
    op = chart.ops[place]
    return ", ".join(plain(text) for text in (op.target, op.module, op.source) if text)


def _time_axis(panel: _Panel, bottom: int) -> Iterator[Shape]:
    chart = panel.chart
    yield Rect(_LEFT, bottom, panel.width, 1, _INK)
    for time_ms in ticks(panel.span_ms, 8):
        x = panel.x(time_ms)
        yield Rect(x, bottom, 1, 6, _INK)
        label = f"{time_ms:,.6g}" + ("" if time_ms else " ms")
        yield Text(x, bottom + 26, label, _PALE, "middle")
    start_ms = backward_ms(chart)
    if start_ms is not None:
        x = panel.x(start_ms)
        yield Rect(x, panel.top, 1, bottom - panel.top, _PALE)
        yield Text(x + 8, panel.top + 2, "backward", _PALE)


def _legend(charts: Sequence[Chart], y: int, most_bytes: float) -> Iterator[Shape]:
    """Parts with their bytes at the peak of the last chart, and what crosses the link."""
    if not charts:
        return
    chart, x = charts[-1], float(_LEFT)
    moment = peak_moment(chart)
    for part in listed_parts(charts, round(most_bytes)):
        words = f"{PART_WORDS[part]} {format_size(chart.stacked[part][moment])}"
        width = 22 + len(words) * 2 * ADVANCE + 22
        if x + width > WIDTH:
            x, y = float(_LEFT), y + 22
        yield Rect(x, y - 13, 14, 14, PART_COLOURS[part])
        yield Text(x + 22, y, words)
        x += width
    if chart.played.copies:
        words = f"{lane_words(chart, 'host')}; {wait_words(chart)}"
        yield Text(_LEFT, HEIGHT - 34, words, _PALE)
        yield Text(_LEFT, HEIGHT - 10, lane_words(chart, "device"), _PALE)


# --- SVG ------------------------------------------------------------------------------------------

SVG_FILE = FileKind(
    "an offplan picture", b'<svg xmlns="http://www.w3.org/2000/svg" id="offplan-timeline"'
)


def to_svg(picture: Picture) -> bytes:
    """The picture as an SVG file, which needs nothing from anywhere else."""
    title = escape(plain(picture.title))
    head = (
        f'{SVG_FILE.first_bytes.decode()} viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{_TEXT}">'
        f'\n<title>{title}</title>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="{_PAPER}"/>'
    )
    lines = [head, *(_SVG[type(shape)](shape) for shape in picture.shapes), "</svg>"]
    return ("\n".join(lines) + "\n").encode()


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _rect_element(shape: Rect) -> str:
    place = (
        f'x="{_number(shape.x)}" y="{_number(shape.y)}" width="{_number(shape.width)}" '
        f'height="{_number(shape.height)}" fill="{shape.colour}"'
    )
    title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
    return f"<rect {place}>{title}</rect>" if title else f"<rect {place}/>"


def _area_element(shape: Area) -> str:
    """The upper edge from left to right, and the lower one back."""
    path = [f"M{shape.x},{_number(shape.bottoms[0])}"]
    path += _edge(shape.x, shape.tops, 1)
    path += _edge(shape.x + STEP * len(shape.tops), tuple(reversed(shape.bottoms)), -1)
    title = f"<title>{escape(shape.title)}</title>"
    return f'<path d="{"".join(path)}Z" fill="{shape.colour}">{title}</path>'


def _edge(x: int, heights: Sequence[float], direction: int) -> Iterator[str]:
    for height, alike in groupby(heights):
        x += direction * STEP * len(list(alike))
        yield f"V{_number(height)}H{x}"


def _dashes_element(shape: Dashes) -> str:
    y = _number(shape.y)
    return (
        f'<path d="M{shape.x},{y}h{shape.width}" stroke="{shape.colour}" stroke-width="2" '
        'stroke-dasharray="8 6"/>'
    )


def _text_element(shape: Text) -> str:
    # Words after a number in a row of labels, whatever font there is, in the room that is there.
    width = len(shape.text) * 2 * ADVANCE
    return (
        f'<text x="{_number(shape.x)}" y="{_number(shape.y)}" fill="{shape.colour}" '
        f'text-anchor={quoteattr(shape.anchor)} textLength="{width}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(shape.text)}</text>'
    )


_SVG: dict[type, Callable[..., str]] = {
    Rect: _rect_element,
    Area: _area_element,
    Dashes: _dashes_element,
    Text: _text_element,
}


# --- PNG ------------------------------------------------------------------------------------------

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)


# 8 bits for each pixel, by palette.
_HEADER = _chunk(b"IHDR", struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 3, 0, 0, 0))
_MADE_BY = _chunk(b"tEXt", b"Software\0offplan timeline")
PNG_FILE = FileKind("an offplan picture", _SIGNATURE + _HEADER + _MADE_BY)


def to_png(picture: Picture) -> bytes:
    """The picture as a PNG file of ``WIDTH`` by ``HEIGHT`` pixels."""
    canvas = _Canvas()
    for shape in picture.shapes:
        canvas.paint(shape)
    rows = canvas.pixels
    scanlines = b"".join(
        # No filter: long runs of one colour are what zlib is good at.
        b"\0" + bytes(rows[start : start + WIDTH])
        for start in range(0, len(rows), WIDTH)
    )
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in canvas.colours)
    return b"".join(
        (
            PNG_FILE.first_bytes,
            _chunk(b"PLTE", palette),
            _chunk(b"IDAT", zlib.compress(scanlines, 9)),
            _chunk(b"IEND", b""),
        )
    )


class _Canvas:
    """Pixels as indexes of ``colours``, row by row."""

    def __init__(self) -> None:
        self.colours: dict[str, int] = {_PAPER: 0}
        self.pixels = bytearray(WIDTH * HEIGHT)

    def paint(self, shape: Shape) -> None:
        if isinstance(shape, Text):
            self._text(shape)
        elif isinstance(shape, Area):
            self._area(shape)
        elif isinstance(shape, Dashes):
            for x in range(shape.x, shape.x + shape.width, 14):
                width = min(8, shape.x + shape.width - x)
                self._fill(x, round(shape.y) - 1, width, 2, shape.colour)
        else:
            left, top = round(shape.x), round(shape.y)
            right, bottom = round(shape.x + shape.width), round(shape.y + shape.height)
            width, height = max(right - left, 1), max(bottom - top, 1)
            self._fill(left, top, width, height, shape.colour)

    def _index(self, colour: str) -> bytes:
        return bytes((self.colours.setdefault(colour, len(self.colours)),))

    def _fill(self, x: int, y: int, width: int, height: int, colour: str) -> None:
        x, right = max(x, 0), min(x + width, WIDTH)
        if right <= x:
            return
        run = self._index(colour) * (right - x)
        for row in range(max(y, 0), min(y + height, HEIGHT)):
            start = row * WIDTH + x
            self.pixels[start : start + len(run)] = run

    def _area(self, shape: Area) -> None:
        index = self._index(shape.colour)
        for place, (top, bottom) in enumerate(zip(shape.tops, shape.bottoms, strict=True)):
            first, end = round(top), round(bottom)
            for x in range(shape.x + place * STEP, shape.x + (place + 1) * STEP):
                # A column at once: every WIDTH-th pixel.
                self.pixels[first * WIDTH + x : end * WIDTH + x : WIDTH] = index * (end - first)

    def _text(self, shape: Text) -> None:
        """Letters of twice the size that they are designed in."""
        width = len(shape.text) * 2 * ADVANCE
        x = round(shape.x) - {"start": 0, "middle": width // 2, "end": width}[shape.anchor]
        # The seventh of eight dots stands on the line.
        y = round(shape.y) - 2 * (GLYPH_HEIGHT - 1)
        for place, character in enumerate(shape.text):
            for column, dots in enumerate(glyph(character)):
                for row in range(GLYPH_HEIGHT):
                    if dots >> row & 1:
                        left = x + 2 * (place * ADVANCE + column)
                        self._fill(left, y + 2 * row, 2, 2, shape.colour)
