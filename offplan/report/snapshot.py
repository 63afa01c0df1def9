"""A predicted step as a memory snapshot, which PyTorch's memory visualizer opens.

1.  The file is what ``torch.cuda.memory._dump_snapshot`` writes: ``segments``, their blocks as they
    are in the end, and ``device_traces``, the allocations and frees of a step in order.  It is read
    by pytorch.org/memory_viz and by ``python -m torch.cuda._memory_viz``.
2.  Before the step everything that rests is allocated: each parameter, buffer and input as a block
    of its own.  Then, moment by moment (``offplan.lifetimes``), what an op makes, what it needs
    besides while it runs, and what is freed after it.  What is held in the end stays.
3.  Sizes are bytes as the allocator charges them, so that the highest sum of the events is the
    highest point of the chart.  Where that is under the predicted peak, as blocks that are reused
    whole add to it (``memory.Spans``), the difference is allocated at that point, as *rounding*.
    Where it is above, as parts of larger blocks count less than blocks alone, it is left so: up to
    0.5% in the models that were tried, and nothing in most.
4.  Addresses are those that a caching allocator (``offplan.allocator``) gives to these sizes in the
    step after two others.  How they fit into segments is one way they can; the reserved bytes that
    a plan predicts come from the sizes before they are charged, and can differ from the segments'.
5.  A block says by its *frames*, innermost first, what it is: the storage and what becomes of it;
    the source line with the op; the module.  Its *category* is the part that it counts as.

The file is plain dicts, lists, text and integers, in protocol 2 of pickle, which begins with the
same bytes for every file.  offplan writes such files; it never unpickles any.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from offplan.allocator import SMALL_REQUEST_BYTES, Block, CachingAllocator, charged_bytes
from offplan.chart import Chart
from offplan.files import FileKind
from offplan.graph import Op, StorageId
from offplan.memory import Part, Span
from offplan.report.document import plain
from offplan.report.timeline import PART_WORDS, STACK, peak_moment
from offplan.transfers import Transfer

SNAPSHOT_FILE = FileKind("an offplan snapshot", b"\x80\x02}q\x00(X\x07\x00\x00\x00offplanq\x01")

# Where the driver places what it gives; any large address is as good.  The pools of expandable
# segments, each without end, are kept apart.
_BASE_ADDRESS, _POOL_BYTES = 0x7F00_0000_0000, 1 << 40
_WARM_UP_STEPS = 2
# The visualizer adds this category to those of the events, by a misspelt name that ends it, unless
# one of them has it already.
_UNKNOWN = "unknown"

Plain = dict[str, Any]


class Frame(NamedTuple):
    filename: str
    line: int
    name: str


class Allocation(NamedTuple):
    """Predicted bytes: what they are, and for a storage of the graphs which (definition 5)."""

    size_bytes: int
    part: Part
    frames: tuple[Frame, ...]
    storage: StorageId | None = None


def to_snapshot(chart: Chart, about: Mapping[str, str], expandable_segments: bool = False) -> bytes:
    """The snapshot of ``chart`` as a pickle; ``about`` says what it is of."""
    recorder = _Recorder(chart, expandable_segments)
    recorder.run()
    document = {
        "offplan": dict(about),
        "segments": recorder.segments(),
        "device_traces": [recorder.events],
        "allocator_settings": {"expandable_segments": expandable_segments},
    }
    return pickle.dumps(document, protocol=2)


# --- what is allocated ----------------------------------------------------------------------------


def resting(chart: Chart, expandable_segments: bool = False) -> Iterator[Allocation]:
    """What is there before the step: tensors by name, as far as they are known, and the rest."""
    left = {part: chart.spans.resting.get(part, 0) for part in STACK}
    for name, part, size in _resident_tensors(chart):
        charged = charged_bytes(size, expandable_segments) if chart.spans.is_rounded else size
        if 0 < charged <= left[part]:
            left[part] -= charged
            yield Allocation(charged, part, (Frame(f"<{part}>", 0, plain(name)),))
    for part, size in left.items():
        if size:
            yield Allocation(size, part, (Frame(f"<{part}>", 0, f"{PART_WORDS[part]}, together"),))


def _resident_tensors(chart: Chart) -> Iterator[tuple[str, Part, int]]:
    for tensor in chart.facts.model:
        yield tensor.names[0], "parameters", tensor.size_bytes
    seen: set[StorageId] = set()
    for region in chart.facts.regions:
        for item in region.forward.inputs:
            storage = chart.facts.values[item.value].storage
            if item.kind == "input" and storage is not None and storage not in seen:
                seen.add(storage)
                yield item.name, "inputs", chart.facts.storages[storage].size_bytes


def during(chart: Chart) -> tuple[Allocation, ...]:
    """What the step allocates, in the order of ``chart.spans.held``."""
    transfers = {transfer.storage: transfer for transfer in chart.transfers}
    return tuple(
        Allocation(span.size_bytes, span.part, tuple(_frames(chart, span, transfers)), span.storage)
        for span in chart.spans.held
    )


def _frames(chart: Chart, span: Span, transfers: Mapping[StorageId, Transfer]) -> Iterator[Frame]:
    words = PART_WORDS[span.part]
    if span.storage is None:
        yield Frame("<offplan>", 0, f"{words}, made beside the graphs")
        yield from _op_frames(_op_at(chart, span.start))
        return
    transfer = transfers.get(span.storage)
    yield Frame("<storage>", span.storage, words + ("" if transfer is None else _fate(transfer)))
    place = chart.makers.get(span.storage)
    if place is not None:
        yield from _op_frames(chart.ops[place])


def _fate(transfer: Transfer) -> str:
    """What becomes of a storage that moves."""
    back = "" if transfer.reload_at is None else f", reloaded at op {transfer.reload_at}"
    left = f"offloaded after op {transfer.offload_after}, released by op {transfer.release_by}"
    return f", {left}{back}"


def _op_at(chart: Chart, moment: int) -> Op | None:
    return chart.ops[chart.spans.ops[moment]] if chart.ops else None


def _op_frames(op: Op | None) -> Iterator[Frame]:
    if op is None:
        return
    filename, _, line = op.source.rpartition(":")
    known = filename != "" and line.isascii() and line.isdigit()
    where = (plain(filename), int(line)) if known else ("<no source>", 0)
    yield Frame(*where, f"{plain(op.target)} ({plain(op.name)})")
    if op.module:
        yield Frame("<module>", 0, plain(op.module))


# --- recording ------------------------------------------------------------------------------------


class _Held(NamedTuple):
    block: Block
    allocation: Allocation
    frames: list[Plain]


class _Recorder:
    """Runs a step on an allocator three times, and notes what the last one does (definition 4)."""

    def __init__(self, chart: Chart, expandable: bool) -> None:
        self.chart = chart
        self.expandable = expandable
        self.allocator = CachingAllocator(expandable)
        self.allocations = during(chart)
        self.starting: dict[int, list[int]] = defaultdict(list)
        self.ending: dict[int, list[int]] = defaultdict(list)
        for place, span in enumerate(chart.spans.held):
            self.starting[span.start].append(place)
            self.ending[span.end].append(place)
        self.is_recording = True
        self.events: list[Plain] = []
        self.held: dict[int, _Held] = {}
        # Bytes by the address at which a segment starts.
        self.reserved: dict[int, int] = defaultdict(int)

    def run(self) -> None:
        self._note_unknown()
        for allocation in resting(self.chart, self.expandable):
            self._allocate(allocation, 0)
        self.is_recording = False
        for _ in range(_WARM_UP_STEPS):
            self._release_all(self._step(), 0)
        self.is_recording = True
        self._step()

    def _note_unknown(self) -> None:
        """Nothing is allocated, and freed again, in the category that there has to be."""
        event = {"addr": _BASE_ADDRESS, "size": 0, "stream": 0, "time_us": 0}
        frame = {"filename": "<offplan>", "line": 0, "name": "no bytes: predicted from here on"}
        for action in ("alloc", "free_requested", "free_completed"):
            self.events.append({"action": action, **event, "frames": [frame], "category": _UNKNOWN})

    def _step(self) -> list[_Held]:
        """One step; what is held at its end is returned, and not freed."""
        blocks: dict[int, _Held] = {}
        last = len(self.chart.spans.ops) - 1
        rounding, highest = self._rounding()
        for moment, op in enumerate(self.chart.spans.ops):
            time_us = round(1000 * self.chart.starts_ms[op])
            for place in self.starting.get(moment, ()):
                blocks[place] = self._allocate(self.allocations[place], time_us)
            passing = [self._temporary(moment)]
            if moment == highest:
                passing.append(rounding)
            held = [self._allocate(each, time_us) for each in passing if each.size_bytes]
            self._release_all(held, time_us)
            if moment < last:
                ending = [blocks.pop(place) for place in self.ending.get(moment, ())]
                self._release_all(ending, time_us)
        return list(blocks.values())

    def _temporary(self, moment: int) -> Allocation:
        op = _op_at(self.chart, moment)
        frames = (Frame("<offplan>", 0, "workspace, while the op runs"), *_op_frames(op))
        return Allocation(self.chart.spans.temporary_bytes[moment], "workspace", frames)

    def _rounding(self) -> tuple[Allocation, int]:
        """What the highest moment lacks of the predicted peak (definition 3), and that moment."""
        lacking = max(self.chart.prediction.peak_bytes - max(self.chart.totals), 0)
        frame = Frame("<offplan>", 0, "rounding: blocks that are reused whole")
        return Allocation(lacking, "rounding", (frame,)), peak_moment(self.chart)

    def _allocate(self, allocation: Allocation, time_us: int) -> _Held:
        before = self.allocator.reserved_bytes
        block = self.allocator.allocate(allocation.size_bytes)
        more = self.allocator.reserved_bytes - before
        if more:
            # A new block is at the start of its segment; an expandable one has all of its pool.
            start = self._address(block)
            self.reserved[start - block.address if self.expandable else start] += more
        frames = [frame._asdict() for frame in allocation.frames] if self.is_recording else []
        held = _Held(block, allocation, frames)
        self.held[self._address(block)] = held
        self._note("alloc", held, time_us)
        return held

    def _release_all(self, ending: list[_Held], time_us: int) -> None:
        for held in ending:
            del self.held[self._address(held.block)]
            self._note("free_requested", held, time_us)
            self._note("free_completed", held, time_us)
            self.allocator.release(held.block)

    def _note(self, action: str, held: _Held, time_us: int) -> None:
        if self.is_recording:
            event = {
                "action": action,
                "addr": self._address(held.block),
                "size": held.allocation.size_bytes,
                "stream": 0,
                "time_us": time_us,
                "frames": held.frames,
                "category": PART_WORDS[held.allocation.part],
            }
            self.events.append(event)

    def _address(self, block: Block) -> int:
        if not self.expandable:
            return _BASE_ADDRESS + block.address
        # Both pools count from 0.
        is_small = block.pool.segment_bytes <= 2 * SMALL_REQUEST_BYTES
        return _BASE_ADDRESS + block.address + (0 if is_small else _POOL_BYTES)

    # --- segments ---------------------------------------------------------------------------------

    def segments(self) -> list[Plain]:
        """All segments with their blocks, as they are now, by address."""
        starts = sorted(self.reserved)
        inside: dict[int, list[int]] = {start: [] for start in starts}
        current = iter(starts)
        start = next(current, 0)
        for address in sorted(self.held):
            while address >= start + self.reserved[start]:
                start = next(current)
            inside[start].append(address)
        return [self._segment(start, inside[start]) for start in starts]

    def _segment(self, start: int, addresses: list[int]) -> Plain:
        size = self.reserved[start]
        held = [self.held[address] for address in addresses]
        allocated = sum(each.block.size_bytes for each in held)
        return {
            "device": 0,
            "address": start,
            "total_size": size,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": sum(each.allocation.size_bytes for each in held),
            "stream": 0,
            "segment_type": "small" if size <= 2 * SMALL_REQUEST_BYTES else "large",
            "is_expandable": self.expandable,
            "frames": [],
            "blocks": list(self._blocks(start, size, addresses)),
        }

    def _blocks(self, start: int, size: int, addresses: list[int]) -> Iterator[Plain]:
        at = start
        for address in addresses:
            if address > at:
                yield _block(at, address - at, 0, "inactive", [])
            held = self.held[address]
            at = address + held.block.size_bytes
            requested = held.allocation.size_bytes
            yield _block(address, at - address, requested, "active_allocated", held.frames)
        if at < start + size:
            yield _block(at, start + size - at, 0, "inactive", [])


def _block(
    address: int, size_bytes: int, requested_bytes: int, state: str, frames: list[Plain]
) -> Plain:
    return {
        "address": address,
        "size": size_bytes,
        "requested_size": requested_bytes,
        "state": state,
        "frames": frames,
    }
