"""When each movable storage can be away, in ops of the timeline and in bytes of the device.

Definitions 1 to 3 and 6 of ``offplan.planner``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from offplan.allocator import charged_bytes
from offplan.curve import Curve
from offplan.graph import GraphFacts, Op, Region, StorageId, ValueId, timeline
from offplan.transfers import Move, buffer_bytes


@dataclass(frozen=True)
class Span:
    """Where one region's ops lie: forward ``[forward, forward_end)``, backward likewise.

    ``returned`` is the op with which memory counts what the backward's return holds.
    """

    forward: int
    forward_end: int
    backward: int
    backward_end: int
    returned: int


@dataclass(frozen=True)
class _Uses:
    last_forward: Mapping[StorageId, int]
    first_backward: Mapping[tuple[int, StorageId], int]


class Candidate(NamedTuple):
    """A movable storage with its window (definitions 1 and 2), in blocks of the allocator.

    Without a plan it is held all through op ``last``.  During op ``back_by`` it must be back (None:
    never).  ``staging_bytes`` are a packed transfer's.  ``twins`` is the same for storages that are
    taken together (definition 6).
    """

    move: Move
    size_bytes: int
    back_bytes: int
    staging_bytes: int
    offload_after: int
    needed_by: int | None
    back_by: int | None
    last: int
    span: Span
    twins: tuple[int, int]

    @property
    def away(self) -> tuple[int, int]:
        """The ops ``[start, stop)`` during which it can be away."""
        return self.offload_after + 1, self.last + 1 if self.back_by is None else self.back_by

    @property
    def lost_bytes(self) -> int:
        """What does not come back of it, at all."""
        return 0 if self.back_by is None else self.size_bytes - self.back_bytes


def together(order: Iterable[Candidate]) -> list[list[Candidate]]:
    """Candidates that are taken together, in the order of the first of them (definition 6)."""
    groups: dict[tuple[int, int], list[Candidate]] = {}
    for candidate in order:
        groups.setdefault(candidate.twins, []).append(candidate)
    return list(groups.values())


def with_all_away(unplanned: Curve, candidates: Sequence[Candidate]) -> Curve:
    curve = unplanned.copy()
    for candidate in candidates:
        send_away(curve, candidate, 1)
    return curve


def send_away(curve: Curve, candidate: Candidate, sign: int) -> None:
    """Take the storage away for as long as can be (or, with -1, leave it there after all)."""
    start, stop = candidate.away
    curve.add(start, stop, -sign * candidate.size_bytes)
    curve.add(candidate.offload_after, start, sign * candidate.staging_bytes)
    if candidate.back_by is not None:
        # A backward without ops returns during the last op of the forward.
        curve.add(max(start, candidate.back_by), candidate.last + 1, -sign * candidate.lost_bytes)
        curve.add(candidate.back_by, candidate.back_by + 1, sign * candidate.staging_bytes)


def candidates(
    facts: GraphFacts,
    movable: Sequence[Move],
    last: Mapping[tuple[int, StorageId], int],
    spans: Sequence[Span],
    landings: Sequence[int],
) -> list[Candidate]:
    """The windows of what is ``movable``.  A reload before op n runs before op ``landings[n]``."""
    uses = _uses(facts, spans)
    twin_of = twins(facts)
    positions: dict[tuple[int, StorageId | None], int] = {}
    item_bytes: dict[tuple[int, StorageId | None], int] = {}
    for number, region in enumerate(facts.regions):
        for position, saved in enumerate(region.saved):
            value = facts.values[saved.value]
            key = number, value.storage
            positions.setdefault(key, position)
            item_bytes[key] = max(item_bytes.get(key, 1), value.item_bytes)

    def candidate(move: Move) -> Candidate:
        key = move.region, move.storage
        span = spans[move.region]
        needed_by = uses.first_backward.get(key)
        sizes = _sizes(move, item_bytes[key], is_rounded=facts.device == "cuda")
        return Candidate(
            move=move,
            size_bytes=sizes[0],
            back_bytes=sizes[1],
            staging_bytes=sizes[2],
            offload_after=uses.last_forward.get(move.storage, span.forward),
            needed_by=needed_by,
            back_by=None if needed_by is None else min(landings[needed_by], span.returned),
            last=_held_through(last[key], span),
            span=span,
            twins=(twin_of[move.region], positions[key]),
        )

    return [candidate(move) for move in movable]


def _held_through(last: int, span: Span) -> int:
    """The last op during all of which the storage is held.

    A backward without ops returns just before the op that comes next, which memory counts it with.
    """
    return min(last, span.backward - 1) if span.backward == span.backward_end else last


def _sizes(move: Move, item_bytes: int, *, is_rounded: bool) -> tuple[int, int, int]:
    """Bytes of the storage, of its reload buffer, and of a packed transfer's staging, as the
    device allocates them: in whole elements and, on a GPU, whole blocks."""
    footprint = move.footprint
    staging_bytes = footprint.transfer_bytes if footprint.packed else 0
    back_bytes = buffer_bytes(footprint.start, footprint.stop, item_bytes)
    asked = move.size_bytes, back_bytes, staging_bytes
    if not is_rounded:
        return asked
    size_bytes, back_bytes, staging_bytes = map(charged_bytes, asked)
    return size_bytes, back_bytes, staging_bytes


def twins(facts: GraphFacts) -> list[int]:
    """For each region the first one that computes the same."""
    if len(facts.regions) == 1:
        return [0]
    first: dict[object, int] = {}
    return [
        first.setdefault(_computed(facts, region), number)
        for number, region in enumerate(facts.regions)
    ]


def _computed(facts: GraphFacts, region: Region) -> object:
    """What ``region`` computes, with its values and storages numbered as they appear."""
    values: dict[ValueId | None, int] = {}
    storages: dict[StorageId | None, int] = {}
    described: list[object] = []

    def number(value: ValueId | None) -> int:
        if value is not None and value not in values:
            found = facts.values[value]
            on = storages.setdefault(found.storage, len(storages))
            described.append((on, found.kind, found.dtype, found.shape, found.stride, found.offset))
        return values.setdefault(value, len(values))

    for graph in (region.forward, region.backward):
        if graph is None:
            continue
        described.append([number(item.value) for item in graph.inputs])
        for op in graph.ops:
            used = [number(value) for value in (*op.inputs, *op.outputs, *op.mutates)]
            described.append((op.target, op.constants, used))
        described.append([(item.kind, number(item.value)) for item in graph.outputs])
    described.append([number(saved.value) for saved in region.saved])
    return repr(described)


def spans_of(facts: GraphFacts) -> tuple[Span, ...]:
    forward_sizes = [len(region.forward.ops) for region in facts.regions]
    backward_sizes = [
        len(region.backward.ops) if region.backward else 0 for region in facts.regions
    ]
    forward_starts = list(accumulate(forward_sizes, initial=0))
    # Backwards run in reverse: a region's starts when those of all later regions have run.
    backward_ends = [facts.op_count - before for before in accumulate(backward_sizes, initial=0)]
    return tuple(
        Span(
            forward=forward_starts[number],
            forward_end=forward_starts[number + 1],
            backward=backward_ends[number + 1],
            backward_end=backward_ends[number],
            returned=min(
                max(backward_ends[number] - 1, backward_ends[number + 1]),
                max(facts.op_count - 1, 0),
            ),
        )
        for number in range(len(facts.regions))
    )


def _uses(facts: GraphFacts, spans: Sequence[Span]) -> _Uses:
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
