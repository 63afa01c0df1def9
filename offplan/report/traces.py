"""A predicted step as a trace that Perfetto and chrome://tracing open (Trace Event Format, JSON).

1.  Each chart is a process.  Its threads are *compute*, *waits*, *copies to host* and *copies to
    device*; its counters the bytes that are held, in all and by part.
2.  On compute, ops lie within the modules that they are of, and these within *forward* and
    *backward* of their region, one within the other as the module path says: ``layers.0`` holds
    ``layers.0.mlp``.  What stands between two ops of a module, waits too, is inside it.  Ops that
    take no time, such as views, are left out: viewers draw them inside what comes next.
3.  An arrow goes from each copy to the host to the copy that brings the same bytes back.
4.  Times are microseconds from the start of the forward, rounded to nanoseconds: begins and ends
    are rounded before their difference is taken, so that what touches in time touches in the file
    and slices nest exactly, as the format wants.
5.  A counter has for each op the most that is held in it, until the next op that takes time.

Events are ``X`` (complete), ``s`` and ``f`` (flow), ``C`` (counter) and ``M`` (metadata), sorted by
time; of slices that start together the outer one comes first.  The same charts give the same bytes.
"""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from offplan.chart import Chart
from offplan.files import FileKind
from offplan.graph import Op, StorageId, Value, graphs
from offplan.report.picture import storage_words
from offplan.report.timeline import PART_WORDS, STACK

COMPUTE, WAITS, TO_HOST, TO_DEVICE = range(1, 5)
_THREADS = {
    COMPUTE: "compute",
    WAITS: "waits for copies",
    TO_HOST: "copies to host",
    TO_DEVICE: "copies to device",
}
_NAME_IN_GZIP = b"offplan.trace.json"

TRACE_FILE = FileKind("an offplan trace", b'{"otherData":{"offplan":"trace"')
# Which the header mentions only if it is the least or the most.
_GZIP_LEVEL = 6
# No time in the header, so that the same trace gives the same bytes; the name is how it is known.
GZIP_TRACE_FILE = FileKind(
    "an offplan trace", b"\x1f\x8b\x08\x08\0\0\0\0\0\xff" + _NAME_IN_GZIP + b"\0"
)

Event = dict[str, Any]

# A component of a module path, with the number of a layer joined to the list that it is in.
_COMPONENT = re.compile(r"[^.]+(?:\.\d+(?![^.]))*")


def to_trace(charts: Mapping[str, Chart], about: Mapping[str, str]) -> bytes:
    """A trace file with a process for each of ``charts``, by name; ``about`` says what they are of.

    Sizes are bytes.
    """
    events: list[Event] = []
    for process, (name, chart) in enumerate(charts.items(), 1):
        events += _named(process, name)
        events += sorted(_timed(process, chart), key=_order)
    document = {
        "otherData": {"offplan": "trace", **about},
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }
    return msgspec.json.encode(document) + b"\n"


def zipped(trace: bytes) -> bytes:
    """``trace`` as both viewers open it compressed: gzip."""
    written = io.BytesIO()
    with gzip.GzipFile(_NAME_IN_GZIP.decode(), "wb", _GZIP_LEVEL, written, mtime=0) as file:
        file.write(trace)
    return written.getvalue()


def _named(process: int, name: str) -> Iterator[Event]:
    head = {"ph": "M", "pid": process, "ts": 0}
    yield {**head, "tid": 0, "name": "process_name", "args": {"name": name}}
    # The last process is the one with the plan, which is what one looks for.
    yield {**head, "tid": 0, "name": "process_sort_index", "args": {"sort_index": -process}}
    for thread, words in _THREADS.items():
        yield {**head, "tid": thread, "name": "thread_name", "args": {"name": words}}
        yield {**head, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _timed(process: int, chart: Chart) -> Iterator[Event]:
    for event in (*_compute(chart), *_waits(chart), *_copies(chart), *_counters(chart)):
        event["pid"] = process
        yield event


def _order(event: Event) -> tuple[float, int]:
    """By time; counters before slices, arrows after the slices that they are at.

    Sorting keeps the order of what is equal, and so slices after those that they are in.
    """
    return event["ts"], {"C": 0, "X": 1}.get(event["ph"], 2)


def _nanoseconds(time_ms: float) -> int:
    return round(time_ms * 1e6)


def _slice(thread: int, name: str, begin_ms: float, end_ms: float, args: Event) -> Event:
    begin, end = _nanoseconds(begin_ms), _nanoseconds(end_ms)
    return {
        "ph": "X",
        "tid": thread,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "cat": _THREADS[thread],
        "name": name,
        "args": args,
    }


# --- compute --------------------------------------------------------------------------------------


class _Open(NamedTuple):
    """A slice that is not ended yet: a phase or a module, and its place among the events."""

    name: str
    place: int


def _compute(chart: Chart) -> list[Event]:
    """Ops within modules within phases, in the order in which they begin."""
    events: list[Event] = []
    path: list[_Open] = []
    ended_ms = 0.0
    rows = zip(_phases(chart), chart.ops, chart.starts_ms, chart.op_ms, strict=False)
    for place, (phase, op, start_ms, op_ms) in enumerate(rows):
        if _nanoseconds(start_ms) == _nanoseconds(start_ms + op_ms):
            continue
        names = [phase, *_modules(op.module)]
        kept = len(
            [*takewhile(lambda pair: pair[0].name == pair[1], zip(path, names, strict=False))]
        )
        _end(events, path[kept:], ended_ms)
        del path[kept:]
        for name in names[kept:]:
            path.append(_Open(name, len(events)))
            events.append(_slice(COMPUTE, name, start_ms, start_ms, {}))
        ended_ms = start_ms + op_ms
        events.append(_slice(COMPUTE, op.target, start_ms, ended_ms, _said(chart, op, place)))
    _end(events, path, ended_ms)
    return events


def _end(events: list[Event], ending: Sequence[_Open], ended_ms: float) -> None:
    for each in ending:
        event = events[each.place]
        event["dur"] = (_nanoseconds(ended_ms) - round(event["ts"] * 1000)) / 1000


def _phases(chart: Chart) -> Iterator[str]:
    """For each op, which forward or backward it is in."""
    count = len(chart.facts.regions)
    backwards = [
        number for number in reversed(range(count)) if chart.facts.regions[number].backward
    ]
    numbers = [*range(count), *backwards]
    for place, (number, graph) in enumerate(zip(numbers, graphs(chart.facts), strict=True)):
        name = "forward" if place < count else "backward"
        yield from [name if count == 1 else f"{name} of region {number}"] * len(graph.ops)


def _modules(path: str) -> list[str]:
    """``layers.0``, ``layers.0.mlp`` for ``layers.0.mlp``."""
    return [path[: found.end()] for found in _COMPONENT.finditer(path)]


def _said(chart: Chart, op: Op, place: int) -> Event:
    values = chart.facts.values
    shapes = [_shape(values[value]) for value in op.outputs]
    said = {
        "op": place,
        "name": op.name,
        "module": op.module,
        "source": op.source,
        "outputs": ", ".join(filter(None, shapes)),
        "bytes": sum(values[value].logical_bytes for value in op.outputs),
    }
    return {name: text for name, text in said.items() if text != ""}


def _shape(value: Value) -> str:
    if value.kind != "tensor":
        return value.kind
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


# --- copies and waits -----------------------------------------------------------------------------


def _waits(chart: Chart) -> Iterator[Event]:
    for stall in chart.played.stalls:
        args = {"wait_ms": round(stall.wait_ms, 6), "op": stall.op}
        before = chart.ops[stall.op].target if stall.op < len(chart.ops) else "the end"
        yield _slice(WAITS, f"before {before}", stall.end_ms - stall.wait_ms, stall.end_ms, args)


def _copies(chart: Chart) -> Iterator[Event]:
    """Copies one after the other on each lane, and an arrow for each storage that comes back."""
    back = {copy.transfer for copy in chart.played.copies if copy.to == "device"}
    for copy in chart.played.copies:
        transfer = chart.transfers[copy.transfer]
        thread = TO_HOST if copy.to == "host" else TO_DEVICE
        args = {
            "storage": transfer.storage,
            "bytes": transfer.transfer_bytes,
            "made_by": storage_words(chart, transfer.storage),
            "offload_after_op": transfer.offload_after,
            "release_by_op": transfer.release_by,
            "reload_at_op": transfer.reload_at,
            "needed_by_op": transfer.needed_by,
        }
        name = _short_name(chart, transfer.storage)
        found = _slice(thread, name, copy.begin_ms, copy.end_ms, args)
        yield found
        if copy.transfer in back:
            flow = {"tid": thread, "ts": found["ts"], "cat": "transfer", "name": "transfer"}
            # bp "e": bound to the slice around it, not to the next one.
            end = {"ph": "s"} if copy.to == "host" else {"ph": "f", "bp": "e"}
            yield {**flow, **end, "id": copy.transfer}


def _short_name(chart: Chart, storage: StorageId) -> str:
    place = chart.makers.get(storage)
    if place is None:
        return f"storage {storage}"
    op = chart.ops[place]
    return f"{op.module}: {op.target}" if op.module else str(op.target)


# --- counters -------------------------------------------------------------------------------------


def _counters(chart: Chart) -> Iterator[Event]:
    """Bytes held, where they change (definition 5)."""
    parts = [part for part in STACK if any(chart.stacked[part])]
    before: tuple[int, ...] = ()
    for start, moment in _highest(chart).items():
        sizes = tuple(chart.stacked[part][moment] for part in parts)
        if sizes == before:
            continue
        before = sizes
        head = {"ph": "C", "tid": 0, "ts": start / 1000}
        yield {**head, "name": "bytes held", "args": {"in all": sum(sizes)}}
        named = {PART_WORDS[part]: size for part, size in zip(parts, sizes, strict=True)}
        yield {**head, "name": "bytes of", "args": named}


def _highest(chart: Chart) -> dict[int, int]:
    """The moment at which the most is held, of those that start at the same nanosecond."""
    best: dict[int, int] = {}
    totals, starts = chart.totals, [_nanoseconds(start_ms) for start_ms in chart.starts_ms]
    for moment, op in enumerate(chart.spans.ops):
        other = best.setdefault(starts[op], moment)
        if totals[moment] > totals[other]:
            best[starts[op]] = moment
    return best
