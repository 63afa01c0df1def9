"""Which movable storages leave the device, and when each copy is issued, released and brought back.

Indexes are positions of ops on the timeline (``graph.timeline``); an index one past the last op of
a backward stands for its return.

1.  A storage is *used* in the forward by each op that reads or makes any value on it, saved or not.
    ``offload_after`` is the last such op: the copy to the host is issued when it has run.
2.  ``release_by`` is the op by whose end the copy has landed and the device copy is dropped.
    Copies land in the order they were issued; one is left in flight until the storages in flight
    would exceed ``IN_FLIGHT_BYTES``, or the region's forward ends.
3.  ``needed_by`` is the first op of the region's backward that reads any value on the storage, or
    its return if it only returns one.
4.  ``reload_at`` is the op before which the copy to the device is issued: as early in the region's
    backward as keeps the storages that are reloaded but not yet needed within ``IN_FLIGHT_BYTES``.
    Copies are issued in the order they are needed.
5.  A storage that the backward neither reads nor returns leaves and is never reloaded:
    ``reload_at`` and ``needed_by`` are None.  (Partitioners do not save such values; a hand-written
    autograd function can.)

Budgets: None moves nothing; 0 moves every movable storage.  Pure, deterministic, and linear but for
one sort of the moved storages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from offplan.errors import UsageError
from offplan.graph import GraphFacts, Op, Region, StorageId, timeline
from offplan.transfers import Move, Transfer

# Bytes in flight, each way.  Waiting for each copy at once stalls the compute stream: eight
# Qwen3-14B-wide layers on an H200 took 1432 ms so, against 994 ms with 2 GB in flight each way, 2%
# over the bound of bandwidth (design.md, section 8).  More would only raise the peak.
IN_FLIGHT_BYTES = 2 * 1000**3


@dataclass(frozen=True)
class _Span:
    """Where one region's ops lie: forward ``[forward, forward_end)``, backward likewise."""

    forward: int
    forward_end: int
    backward: int
    backward_end: int


@dataclass(frozen=True)
class _Uses:
    last_forward: Mapping[StorageId, int]
    first_backward: Mapping[tuple[int, StorageId], int]


def plan_transfers(
    facts: GraphFacts, movable: Sequence[Move], budget_bytes: int | None
) -> tuple[Transfer, ...]:
    """Transfers for ``budget_bytes``, in the order that they are offloaded.

    Raises ``UsageError`` for a budget other than None and 0.
    """
    if budget_bytes is None:
        return ()
    if budget_bytes != 0:
        raise UsageError(
            "only --budget 0 (move everything movable) can be planned so far",
            fix="leave --budget out to move nothing; budgets of a size come with a later version",
        )
    spans = _spans(facts)
    uses = _uses(facts, spans)
    by_region: dict[int, list[Move]] = defaultdict(list)
    for move in movable:
        by_region[move.region].append(move)
    return tuple(
        transfer
        for region in sorted(by_region)
        for transfer in _place(by_region[region], region, spans[region], uses)
    )


def _place(moves: Iterable[Move], region: int, span: _Span, uses: _Uses) -> list[Transfer]:
    """Transfers of one region's ``moves``, in the order that they are offloaded."""
    moves = sorted(moves, key=lambda m: (uses.last_forward.get(m.storage, span.forward), m.storage))
    offloads = [uses.last_forward.get(move.storage, span.forward) for move in moves]
    needs = [uses.first_backward.get((region, move.storage)) for move in moves]
    releases = _releases(moves, offloads, span)
    reloads = _reloads(moves, needs, span)
    return [
        Transfer(
            region=region,
            storage=move.storage,
            start=move.footprint.start,
            stop=move.footprint.stop,
            transfer_bytes=move.footprint.transfer_bytes,
            packed=move.footprint.packed,
            offload_after=offloads[place],
            release_by=releases[place],
            reload_at=reloads[place],
            needed_by=needs[place],
        )
        for place, move in enumerate(moves)
    ]


def _releases(moves: Sequence[Move], offloads: Sequence[int], span: _Span) -> list[int]:
    """``release_by`` of each move; ``offloads`` ascend (definition 2)."""
    releases = [max(span.forward_end - 1, offload) for offload in offloads]
    in_flight: deque[int] = deque()
    in_flight_bytes = 0
    for place, (move, offload) in enumerate(zip(moves, offloads, strict=True)):
        in_flight.append(place)
        in_flight_bytes += move.size_bytes
        while in_flight_bytes > IN_FLIGHT_BYTES:
            oldest = in_flight.popleft()
            releases[oldest] = offload
            in_flight_bytes -= moves[oldest].size_bytes
    return releases


def _reloads(moves: Sequence[Move], needs: Sequence[int | None], span: _Span) -> list[int | None]:
    """``reload_at`` of each move, None for one that is not needed (definitions 4 and 5)."""
    reloads: list[int | None] = [None] * len(moves)
    order = sorted((need, place) for place, need in enumerate(needs) if need is not None)
    first = 0
    ahead_bytes = 0
    for _, place in order:
        ahead_bytes += moves[place].footprint.device_bytes
        # Passes ``place`` itself if it alone exceeds the window: it is then issued when needed.
        while ahead_bytes > IN_FLIGHT_BYTES:
            ahead_bytes -= moves[order[first][1]].footprint.device_bytes
            first += 1
        reloads[place] = span.backward if first == 0 else order[first - 1][0]
    return reloads


def _spans(facts: GraphFacts) -> tuple[_Span, ...]:
    forward_sizes = [len(region.forward.ops) for region in facts.regions]
    backward_sizes = [
        len(region.backward.ops) if region.backward else 0 for region in facts.regions
    ]
    forward_starts = list(accumulate(forward_sizes, initial=0))
    # Backwards run in reverse: a region's starts when those of all later regions have run.
    backward_ends = [facts.op_count - before for before in accumulate(backward_sizes, initial=0)]
    return tuple(
        _Span(
            forward=forward_starts[number],
            forward_end=forward_starts[number + 1],
            backward=backward_ends[number + 1],
            backward_end=backward_ends[number],
        )
        for number in range(len(facts.regions))
    )


def _uses(facts: GraphFacts, spans: Sequence[_Span]) -> _Uses:
    """Last uses in the forwards and first uses in each region's own backward, of every storage."""
    ops = list(timeline(facts))
    last_forward: dict[StorageId, int] = {}
    first_backward: dict[tuple[int, StorageId], int] = {}
    for number, (region, span) in enumerate(zip(facts.regions, spans, strict=True)):
        for place in range(span.forward, span.forward_end):
            for storage in _touched(facts, ops[place]):
                last_forward[storage] = place
        received = _received(facts, region)
        for place in range(span.backward, span.backward_end):
            for storage in _touched(facts, ops[place]):
                if storage in received:
                    first_backward.setdefault((number, received[storage]), place)
        for output in region.backward.outputs if region.backward else ():
            returned = None if output.value is None else facts.values[output.value].storage
            if returned in received:
                first_backward.setdefault((number, received[returned]), span.backward_end)
    return _Uses(last_forward, first_backward)


def _touched(facts: GraphFacts, op: Op) -> set[StorageId]:
    found = (facts.values[value].storage for value in (*op.inputs, *op.outputs))
    return {storage for storage in found if storage is not None}


def _received(facts: GraphFacts, region: Region) -> dict[StorageId, StorageId]:
    """The forward's storage for each storage that the backward receives saved values on."""
    received: dict[StorageId, StorageId] = {}
    for saved in region.saved:
        sent = facts.values[saved.value].storage
        placeholder = facts.values[saved.backward_value].storage
        if sent is not None:
            received[sent] = sent
            if placeholder is not None:
                received[placeholder] = sent
    return received
