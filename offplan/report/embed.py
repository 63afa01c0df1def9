"""What the page draws, as the JSON that it carries: columns of integers, and each text once.

1.  ``strings`` and ``sizes`` hold each text and each number of bytes once; everything else names
    them by position.  Position 0 of ``strings`` is the empty text.
2.  A *panel* is one chart.  ``starts`` are the nanoseconds from each op to the next, the last of
    them to the end of the step; ``moments`` the steps from the op of one moment to that of the
    next, the first of them from op 0.  Both add up to what ``offplan.chart`` has.
3.  A *span* is a column of each of: size, first moment, moments until it ends, part, op that made
    it (-1: none), moments until it leaves (-1: it does not), and row of the storage (-1: none).
    The page stacks them up itself, so that what it shows at a moment is exact however it is zoomed.
4.  A copy goes from ``begin`` to ``begin`` + ``length``, in nanoseconds.  Where the device has no
    profile (a CPU) no op has a time: ``times`` is false, every op takes one unit, and a copy has
    its whole window, from the op after which it may begin to the one before which it must be done.
5.  *Storages* are the plan's entries, then what the backward computes again, a row each.

Pure.  Makes about 100 bytes for an op with its spans, and 100 for a storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec

from offplan.chart import Chart
from offplan.eligibility import RULE_SETS
from offplan.graph import StorageId
from offplan.memory import Part
from offplan.plan import Entry, Plan, PlanVerdict, Prices, Recomputed, View
from offplan.report.document import plain
from offplan.report.timeline import PART_WORDS, STACK
from offplan.transfers import Transfer

_NS_PER_MS = 1_000_000

Row = tuple[object, ...]


class Drawn(NamedTuple):
    """The chart of the plan, or of no plan; ``has_times`` if its times are of the plan's device."""

    is_plan: bool
    chart: Chart
    has_times: bool

    @property
    def name(self) -> str:
        return "plan" if self.is_plan else "no plan"


class _Texts:
    """Each text once (definition 1), on one line and printable."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))

    def all(self) -> list[str]:
        return [plain(text) for text in self.places]


class _Sizes:
    """Each number of bytes once."""

    def __init__(self) -> None:
        self.places: dict[int, int] = {}

    def __call__(self, size_bytes: int) -> int:
        return self.places.setdefault(size_bytes, len(self.places))


@dataclass(frozen=True)
class _Tables:
    """``rows`` has the row of each storage of the plan's graphs."""

    texts: _Texts
    sizes: _Sizes
    rows: Mapping[StorageId, int]


def embedded(plan: Plan, drawn: Sequence[Drawn]) -> bytes:
    """``plan`` and its charts as JSON that is safe in a script element of a page."""
    rows = {entry.id: place for place, entry in enumerate(plan.storages) if entry.id is not None}
    tables = _Tables(_Texts(), _Sizes(), rows)
    panels = [_panel(each, plan, tables) for each in drawn]
    storages = [_entry_row(entry, tables) for entry in plan.storages]
    storages += [_recomputed_row(each, tables) for each in plan.recomputed]
    content = {
        "device": plan.device,
        "budget": plan.budget or None,
        "floor": plan.predicted.floor_bytes,
        "parts": [PART_WORDS[part] for part in STACK],
        "keys": list(STACK),
        "rules": list(RULE_SETS),
        "panels": panels,
        "storages": storages,
        "strings": tables.texts.all(),
        "sizes": list(tables.sizes.places),
    }
    return script_safe(msgspec.json.encode(content))


def script_safe(json_text: bytes) -> bytes:
    """``json_text`` without what would end a script element, or a line of JavaScript.

    These characters stand in texts only, where an escape means the same.
    """
    for char in "<>&\u2028\u2029":
        json_text = json_text.replace(char.encode(), b"\\u%04x" % ord(char))
    return json_text


# --- a panel --------------------------------------------------------------------------------------


def _panel(drawn: Drawn, plan: Plan, tables: _Tables) -> dict[str, object]:
    chart, texts, sizes = drawn.chart, tables.texts, tables.sizes
    # The peaks are those of the file: what the page says is what the plan says.
    found = plan.predicted.plan if drawn.is_plan else plan.predicted.no_plan
    if not drawn.has_times:
        starts = list(range(len(chart.ops) + 1))
    else:
        starts = [round(_NS_PER_MS * start) for start in chart.starts_ms]
    held = [(moment, size) for moment, size in enumerate(chart.spans.temporary_bytes) if size]
    return {
        "name": drawn.name,
        "times": drawn.has_times,
        "peak": found.peak_bytes,
        "at": found.op,
        "forward": chart.forward_count,
        "starts": [after - before for before, after in pairwise(starts)],
        "ops": [
            [texts(op.name) for op in chart.ops],
            [texts(op.target) for op in chart.ops],
            [texts(op.module) for op in chart.ops],
            [texts(op.source) for op in chart.ops],
        ],
        "moments": [after - before for before, after in pairwise((0, *chart.spans.ops))],
        "resting": [chart.spans.resting.get(part, 0) for part in STACK],
        "temporary": _columns(((moment, sizes(size)) for moment, size in held), 2),
        "spans": _columns(_spans(chart, tables, _rows(drawn, plan, tables)), 7),
        "copies": _columns(_copies(drawn, tables), 7),
        "waits": _columns(_waits(drawn), 2),
    }


def _columns(rows: Iterable[tuple[int, ...]], count: int) -> list[list[int]]:
    columns = [list(column) for column in zip(*rows, strict=True)]
    return columns or [[] for _ in range(count)]


def _rows(drawn: Drawn, plan: Plan, tables: _Tables) -> Mapping[StorageId, int]:
    """The row of each storage of a chart.

    Storages have other numbers in the base graphs than in those that the plan's choices make of
    them: there, they are the same if the same op of the same forward makes them, as large.
    """
    if drawn.is_plan or not plan.choices:
        return tables.rows
    chart = drawn.chart
    listed: tuple[Entry | Recomputed, ...] = (*plan.storages, *plan.recomputed)
    found: dict[StorageId, int] = {}
    counts = (len(region.forward.ops) for region in chart.facts.regions)
    regions = [number for number, count in enumerate(counts) for _ in range(count)]
    named = {
        (each.region, each.name, each.op, each.size_bytes): place
        for place, each in enumerate(listed)
    }
    for storage, place in chart.makers.items():
        if place < len(regions):
            op, size_bytes = chart.ops[place], chart.facts.storages[storage].size_bytes
            row = named.get((regions[place], op.name, op.target, size_bytes))
            if row is not None:
                found[storage] = row
    return found


def _spans(
    chart: Chart, tables: _Tables, rows: Mapping[StorageId, int]
) -> Iterator[tuple[int, ...]]:
    """Definition 3."""
    makers = chart.makers
    places: dict[Part, int] = {part: place for place, part in enumerate(STACK)}
    for span in chart.spans.held:
        storage = span.storage
        yield (
            tables.sizes(span.size_bytes),
            span.start,
            span.end - span.start,
            places[span.part],
            -1 if storage is None else makers.get(storage, -1),
            -1 if span.leaves is None else max(span.leaves - span.start, 0),
            -1 if storage is None else rows.get(storage, -1),
        )


def _copies(drawn: Drawn, tables: _Tables) -> Iterator[tuple[int, ...]]:
    """Begin, length, 0 to the host or 1 to the device, size, row of the storage, and the ops after
    which and before which it is issued and waited for."""
    chart = drawn.chart
    for copy in chart.played.copies:
        transfer = chart.transfers[copy.transfer]
        issued, awaited = _window(transfer, copy.to == "host")
        begin, end = (
            (round(_NS_PER_MS * copy.begin_ms), round(_NS_PER_MS * copy.end_ms))
            if drawn.has_times
            else (issued, awaited)
        )
        yield (
            begin,
            end - begin,
            int(copy.to == "device"),
            tables.sizes(transfer.transfer_bytes),
            tables.rows.get(transfer.storage, -1),
            issued,
            awaited,
        )


def _window(transfer: Transfer, is_to_host: bool) -> tuple[int, int]:
    """From the start of which op to that of which a copy may be under way."""
    if is_to_host:
        return transfer.offload_after + 1, transfer.release_by + 1
    assert transfer.reload_at is not None
    assert transfer.needed_by is not None
    return transfer.reload_at, transfer.needed_by


def _waits(drawn: Drawn) -> Iterator[tuple[int, ...]]:
    """When each wait ends, and how long it is."""
    if not drawn.has_times:
        return
    for stall in drawn.chart.played.stalls:
        yield round(_NS_PER_MS * stall.end_ms), round(_NS_PER_MS * stall.wait_ms)


# --- storages -------------------------------------------------------------------------------------


def _entry_row(entry: Entry, tables: _Tables) -> Row:
    """Action, size, region, name, op, module, source, rule, holder, reason, why it cannot be
    computed again, microseconds of that and of a copy, bytes that cross the link, views."""
    texts = tables.texts
    prices = entry.prices or Prices()
    return (
        texts(entry.action),
        tables.sizes(entry.size_bytes),
        entry.region,
        *map(texts, (entry.name, entry.op, entry.module, entry.source)),
        texts("" if entry.rule == "eligible" else entry.rule),
        *map(texts, (entry.holder, prices.reason, prices.recompute_why)),
        prices.recompute_us,
        prices.link_us,
        entry.footprint.transfer_bytes if entry.footprint else None,
        tuple(_view_row(view, texts) for view in entry.views),
    )


def _view_row(view: View, texts: _Texts) -> Row:
    """Name, op, module, source, tensor, bytes, times that it is saved, and the verdict and holder
    of each rule set."""
    verdicts = (view.verdicts.get(rules, PlanVerdict("eligible")) for rules in RULE_SETS)
    return (
        *map(texts, (view.name, view.op, view.module, view.source)),
        texts(_tensor(view)),
        view.logical_bytes,
        1 + len(view.also_at),
        *(texts(said) for verdict in verdicts for said in (verdict.rule, verdict.holder)),
    )


def _tensor(view: View) -> str:
    shape = ", ".join(map(str, view.shape))
    where = f", offset {view.offset:,}" if view.offset else ""
    stride = ", ".join(map(str, view.stride))
    return f"{view.dtype}[{shape}] stride ({stride}){where}" if view.stride else view.dtype


def _recomputed_row(each: Recomputed, tables: _Tables) -> Row:
    """The same for what the backward computes again; its holder says what it is computed from."""
    texts = tables.texts
    reads = f"computed from {', '.join(each.inputs)}" if each.inputs else ""
    return (
        texts("recompute"),
        tables.sizes(each.size_bytes),
        each.region,
        *map(texts, (each.name, each.op, each.module, each.source)),
        0,
        *map(texts, (reads, each.reason, "")),
        each.recompute_us,
        each.link_us,
        None,
        (),
    )
