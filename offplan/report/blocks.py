"""What the blocks of a measured memory snapshot are: predicted storages joined to allocations.

1.  Both are compared by what the allocator charges for a size (``allocator.charged_bytes``), which
    a prediction has already.
2.  What rests before the step is joined by size to what was there before the first event, and then
    to the first events.
3.  What the step allocates is joined in order: each storage to the next allocation of its size, few
    of others between them (``WINDOW``).  A run allocates besides what its libraries need, and does
    not always keep the order within an op, so that some are passed over, and up to ``SLACK`` are
    taken from before the last one that was joined.
4.  A snapshot can have several steps.  The join begins where it finds the most bytes: it is tried
    at each allocation that can be the step's rarest one among its first, and of equal places the
    last is taken.
5.  Without any events the blocks that are left are joined by size alone, which says what they can
    be.

What is not joined is listed: storages that the run did not allocate, and bytes of the run that no
storage of the graphs accounts for, between the first and the last that one does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import msgspec

from offplan.allocator import charged_bytes
from offplan.chart import Chart
from offplan.dumped import Allocated, Dumped
from offplan.files import FileKind
from offplan.memory import Part
from offplan.report.document import Block, Heading, Paragraph, Table, counted, to_text
from offplan.report.snapshot import Allocation, during, resting
from offplan.report.timeline import PART_WORDS, STACK
from offplan.units import format_size

JOIN_FILE = FileKind("an offplan join", b'{\n  "offplan_join":')
JOIN_TEXT_FILE = FileKind("an offplan join", b"  joined")

WINDOW, SLACK = 64, 8
# Where the join may begin: how many of the step's first allocations, and places, are tried.
_FIRST, _TRIED = 64, 48
# For each of what rests, so many events at the beginning can be it.
_EARLY = 4
_SAVED_PARTS = ("saved", "reloaded")
# Rows of each table in text.
_TOP = 12


class Joined(msgspec.Struct, frozen=True, omit_defaults=True):
    """A predicted storage, and the block that it was in.

    ``storage`` is None for what no graph makes.  ``allocated`` and ``freed`` are indexes of events;
    None if it was there before, or is still.  ``measured_source`` is the line that asked for it.
    """

    storage: int | None
    part: Part
    size_bytes: int
    op: str
    module: str
    source: str
    address: int | None = None
    allocated: int | None = None
    freed: int | None = None
    measured_source: str = ""


class JoinReport(msgspec.Struct, frozen=True, kw_only=True):
    """See the module docstring.  Sizes are bytes as the allocator charges them."""

    device: int
    event_count: int
    predicted_bytes: int
    joined_bytes: int
    other_count: int
    other_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    joined: tuple[Joined, ...]
    not_joined: tuple[Joined, ...]


def join_report(chart: Chart, dumped: Dumped, expandable_segments: bool = False) -> JoinReport:
    """Join what ``chart`` predicts to what ``dumped`` allocated."""
    there = tuple(resting(chart, expandable_segments))
    step = tuple(_in_order(chart))
    keys = [charged_bytes(each.size_bytes, expandable_segments) for each in dumped.allocated]
    found = _joined_places(there, step, dumped.allocated, keys, expandable_segments)
    predicted = (*there, *step)
    rows = [
        _row(each, None if place is None else dumped.allocated[place])
        for each, place in zip(predicted, found, strict=True)
    ]
    others = _others(found[len(there) :], found, keys)
    return JoinReport(
        device=dumped.device,
        event_count=dumped.event_count,
        predicted_bytes=sum(each.size_bytes for each in predicted),
        joined_bytes=sum(row.size_bytes for row in rows if row.address is not None),
        other_count=len(others),
        other_bytes=sum(others),
        predicted_peak_bytes=chart.prediction.peak_bytes,
        measured_peak_bytes=dumped.peak_bytes,
        joined=tuple(row for row in rows if row.address is not None),
        not_joined=tuple(row for row in rows if row.address is None),
    )


def _in_order(chart: Chart) -> Iterator[Allocation]:
    """What the step allocates, in the order in which it does."""
    allocations, held = during(chart), chart.spans.held
    for place in sorted(range(len(held)), key=lambda each: (held[each].start, each)):
        yield allocations[place]


def _row(predicted: Allocation, found: Allocated | None) -> Joined:
    texts = {frame.filename: frame.name for frame in predicted.frames}
    lines = [f for f in predicted.frames if not f.filename.startswith("<")]
    op = lines[0].name.partition(" (")[0] if lines else predicted.frames[0].name
    return Joined(
        storage=predicted.storage,
        part=predicted.part,
        size_bytes=predicted.size_bytes,
        op=op,
        module=texts.get("<module>", ""),
        source=f"{lines[0].filename}:{lines[0].line}" if lines else "",
        address=None if found is None else found.address,
        allocated=None if found is None else found.event,
        freed=None if found is None else found.freed,
        measured_source="" if found is None else found.source,
    )


# --- joining --------------------------------------------------------------------------------------


_Places = Mapping[int, Sequence[int]]


def _places(keys: Sequence[int]) -> _Places:
    """The places of each size, in order."""
    found: dict[int, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return found


class _Measured:
    """Places of allocations by size, and which are taken."""

    def __init__(self, places: _Places, taken: Iterable[int] = ()) -> None:
        self.places = places
        self.taken = set(taken)

    def take(self, key: int, first: int, last: int) -> int | None:
        """The first place of ``key`` from ``first`` to ``last`` that is not taken."""
        places = self.places.get(key, ())
        return self._take(places[bisect_left(places, first) : bisect_right(places, last)])

    def take_last(self, key: int, first: int, last: int) -> int | None:
        """The last one of them."""
        places = self.places.get(key, ())
        found = places[bisect_left(places, first) : bisect_right(places, last)]
        return self._take(reversed(found))

    def _take(self, places: Iterable[int]) -> int | None:
        for place in places:
            if place not in self.taken:
                self.taken.add(place)
                return place
        return None


def _joined_places(
    there: Sequence[Allocation],
    step: Sequence[Allocation],
    allocated: Sequence[Allocated],
    keys: Sequence[int],
    expandable_segments: bool,
) -> list[int | None]:
    """For what is there, then for what the step allocates, the place of its allocation, if any."""
    first = next((n for n, each in enumerate(allocated) if each.event is not None), len(keys))
    places = _places(keys)
    measured = _Measured(places)
    # A record that begins with the process has them among its first events.
    last = first + _EARLY * len(there) + WINDOW
    # What counts together was charged apart, and is one block in a snapshot of our own.
    charged = [charged_bytes(each.size_bytes, expandable_segments) for each in there]
    before = [measured.take(size, 0, last) for size in charged]
    sizes = [each.size_bytes for each in step]
    if first == len(keys):
        return [*before, *(measured.take(size, 0, first) for size in sizes)]
    return [*before, *_best_pass(sizes, places, first, measured.taken)]


def _best_pass(
    sizes: Sequence[int], places: _Places, first: int, taken: Set[int]
) -> list[int | None]:
    """The join of the step that has the most bytes (definition 4)."""
    best: list[int | None] = [None] * len(sizes)
    most = 0
    for anchor, place in _anchors(sizes, places, first, taken):
        found = _pass(sizes, _Measured(places, {place, *taken}), anchor, place, first)
        size = sum(sizes[each] for each, at in enumerate(found) if at is not None)
        if size >= most:
            best, most = found, size
    return best


def _anchors(
    sizes: Sequence[int], places: _Places, first: int, taken: Set[int]
) -> list[tuple[int, int]]:
    """Pairs of an allocation of the step and a place where it can be, in order of places."""
    free = {
        size: [place for place in places.get(size, ()) if place >= first and place not in taken]
        for size in set(sizes)
    }
    known = [each for each, size in enumerate(sizes) if free[size]]
    early = [each for each in known if each < _FIRST] or known[:_FIRST]
    if not early:
        return []
    # Of the rarest, the largest.
    anchor = min(early, key=lambda each: (len(free[sizes[each]]), -sizes[each], each))
    return [(anchor, place) for place in free[sizes[anchor]][-_TRIED:]]


def _pass(
    sizes: Sequence[int], measured: _Measured, anchor: int, place: int, first: int
) -> list[int | None]:
    """Join in order from the place of ``anchor`` on, and what comes before it backwards."""
    found: list[int | None] = [None] * len(sizes)
    found[anchor] = at = place
    for each in range(anchor - 1, -1, -1):
        taken = measured.take_last(sizes[each], max(first, at - WINDOW), at - 1)
        found[each] = taken
        at = at if taken is None else taken
    at, missed = place, 0
    for each in range(anchor + 1, len(sizes)):
        taken = measured.take(sizes[each], max(first, at - SLACK), at + WINDOW + missed)
        found[each] = taken
        if taken is None:
            missed += 1
        else:
            at, missed = max(at, taken), 0
    return found


def _others(
    in_step: Sequence[int | None], found: Sequence[int | None], keys: Sequence[int]
) -> list[int]:
    """Sizes of what was allocated during the step, and joined to nothing."""
    places = [place for place in in_step if place is not None]
    if not places:
        return []
    taken = {place for place in found if place is not None}
    return [keys[place] for place in range(min(places), max(places) + 1) if place not in taken]


# --- rendering ------------------------------------------------------------------------------------


def join_json(report: JoinReport) -> bytes:
    """The whole table as JSON."""
    return msgspec.json.format(
        msgspec.json.encode({"offplan_join": 1, **msgspec.to_builtins(report)})
    )


def join_text(report: JoinReport, width: int) -> str:
    """The report, with the largest rows of the table."""
    return to_text(_blocks(report), width)


def _blocks(report: JoinReport) -> Iterator[Block]:
    joined, missing = len(report.joined), len(report.not_joined)
    share = 100 * report.joined_bytes / max(report.predicted_bytes, 1)
    yield Paragraph(
        (
            (
                "joined",
                f"{joined:,} of {counted(joined + missing, 'allocation')}, "
                f"{format_size(report.joined_bytes)} of {format_size(report.predicted_bytes)} "
                f"({share:.1f}%)",
            ),
            (
                "not joined",
                f"{counted(missing, 'predicted allocation')}, "
                f"{format_size(report.predicted_bytes - report.joined_bytes)}",
            ),
            (
                "others",
                f"{counted(report.other_count, 'allocation')} of the run during the step, "
                f"{format_size(report.other_bytes)}: workspaces, and what the graphs do not have",
            ),
            (
                "peak",
                f"predicted {format_size(report.predicted_peak_bytes)}, the snapshot's events "
                f"reach {format_size(report.measured_peak_bytes)} (device {report.device}, "
                f"{counted(report.event_count, 'event')})",
            ),
        )
    )
    yield Heading("by what it counts as")
    yield _parts_table(report)
    moved = tuple(row for row in report.joined if row.part in _SAVED_PARTS)
    if moved:
        yield Heading("saved storages that are joined, the largest first")
        yield _table(moved)
    if report.not_joined:
        yield Heading("not joined, the largest first")
        yield _table(report.not_joined)


def _parts_table(report: JoinReport) -> Table:
    cells = []
    for part in STACK:
        found = [row.size_bytes for row in report.joined if row.part == part]
        missing = [row.size_bytes for row in report.not_joined if row.part == part]
        if found or missing:
            cells.append(
                (
                    PART_WORDS[part],
                    f"{len(found) + len(missing):,}",
                    format_size(sum(found) + sum(missing)),
                    f"{len(found):,}",
                    format_size(sum(found)),
                )
            )
    columns = ("part", "predicted", "bytes", "joined", "bytes")
    return Table(columns, tuple(cells), frozenset({1, 2, 3, 4}))


def _table(rows: Sequence[Joined]) -> Table:
    """Alike rows together; the module and the block are those of the first."""
    alike: dict[tuple[object, ...], list[Joined]] = {}
    for row in rows:
        alike.setdefault((row.size_bytes, row.part, row.op, row.source), []).append(row)
    largest = sorted(alike.values(), key=lambda each: -each[0].size_bytes * len(each))
    cells = [
        (
            format_size(same[0].size_bytes),
            f"{len(same):,}",
            "" if same[0].address is None else f"{same[0].address:x}",
            " ".join(filter(None, (same[0].op, same[0].module, _lines(same[0])))),
        )
        for same in largest[:_TOP]
    ]
    return Table(("each", "count", "block", "first"), tuple(cells), frozenset({0, 1}))


def _lines(row: Joined) -> str:
    """The source line, and the measured one where that is another."""
    if not row.measured_source or row.measured_source.endswith(row.source or "?"):
        return row.source
    return f"{row.source} (measured at {row.measured_source})"
