"""Facts as a compiler runs them: which values are in memory, from when to when.

1.  The ops of a graph are what was traced.  A compiler that fuses them runs *kernels* instead, and
    allocates *buffers* (``graph.Lowering``); whatever else the ops return is never in memory.
2.  ``fused`` says this as facts again, with as many ops at the same positions, so that indexes of
    transfers hold: where a kernel runs stands an op that reads and makes its buffers, and all other
    ops do nothing.  Storages have the sizes of the buffers.
3.  A kernel that calls a library keeps the op that it stands for, with the values that this takes
    and returns: its time and its workspace are those.  Any other is ``KERNEL``, which moves bytes.
4.  A *hold* is an input that keeps a storage but is no operand: it is of kind ``python``.  An op
    holds what its kernel reads in other shapes than the op says, and a saved storage wherever the
    traced op uses it: transfers are inserted among the ops as traced.  In a backward, only up to
    the first kernel that reads the storage, for it goes after the last one.
5.  A storage that was brought back is the backward's own, so that what is written in place of it
    lies on it, and holds it.  Which storages those are depends on the plan.
6.  A graph without a lowering is left as it is.
7.  A kernel runs *early* if a transfer takes what it makes away.  Before it is known what is moved,
    each that can be early is, and holds until its later position what it reads.
8.  Each kernel has a position of its own, unless there are more than ops: one that runs just before
    another, as that needs it, takes one of the positions before it.  Its *turn* is the other's.
9.  A transfer comes before the kernels whose turn is not earlier, and so before the positions that
    they take.  For releases this is left out: they would only be sooner.

Pure.  What is measured of a plan is still compared with these facts; verdicts, digests and proofs
are of the facts as traced.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from offplan.graph import (
    Graph,
    GraphFacts,
    Kernel,
    Lowering,
    Op,
    Region,
    SavedValue,
    Storage,
    StorageId,
    Value,
    ValueId,
)
from offplan.transfers import Transfer

# The target of what the compiler writes itself.
KERNEL = "inductor.kernel"
# How far a predicted peak can be off, and the room that plans leave above it.  Measured on the CPU,
# less what its libraries allocate and free within a call: of 15 models without a plan, 13 peaks
# were within 0.4% and two up to 1% over (a convolution net, which copies to other layouts, and
# attention that is checkpointed); 29 peaks of 10 models with everything moved, at 75% and at the
# floor were all within 0.1%.  That memory is up to 1.5 MB in these steps of 20 to 330 MB, and 9 MB
# in one of them.  For a GPU it is predicted (``offplan.workspaces``): seven peaks of eight
# transformer layers on an H200 were at most 0.5% under the measured, five of them not at all.
BAND = 0.02
# How many ops the name of a kernel names.
_NAMED = 6


def fused(
    facts: GraphFacts, transfers: Sequence[Transfer] = (), *, with_transfers: bool = False
) -> GraphFacts:
    """``facts`` as its compiler runs them (definition 2) under ``transfers``; the same facts if no
    graph has a lowering.

    ``with_transfers``: for a plan that is not made yet, and may move something in every region.
    """
    if not is_fused(facts):
        return facts
    return _Fuser(facts, transfers, with_transfers).fused()


class AsRun(NamedTuple):
    """A step under transfers as its compiler runs it, for ``offplan.memory``."""

    facts: GraphFacts
    transfers: tuple[Transfer, ...]


def as_run(facts: GraphFacts, transfers: Sequence[Transfer]) -> AsRun:
    """``facts`` as their compiler runs them under ``transfers``, which are moved to where they run
    (definition 9)."""
    if not is_fused(facts):
        return AsRun(facts, tuple(transfers))
    fuser = _Fuser(facts, transfers, with_transfers=False)
    made = fuser.fused()
    return AsRun(made, tuple(fuser.as_run(transfer) for transfer in transfers))


def landings(facts: GraphFacts) -> list[int]:
    """By position on the timeline, where a reload that stands before the op there runs
    (definition 9): the same place, or the one of an earlier kernel."""
    found = list(range(facts.op_count + 1))
    for region, (_, first) in zip(facts.regions, _firsts(facts), strict=True):
        graph = region.backward
        if graph is None or graph.lowering is None:
            continue
        count = len(graph.ops)
        kernels, turns = _placed(graph.lowering.kernels, (), count)
        found[first : first + count] = (
            first + _landing(place, kernels, turns) for place in range(count)
        )
    return found


# What is said of a kernel beside what it takes and returns, for its price.
_UNREAD = " bytes unread"
_REDUCES = "reduces"


def _said_of(kernels: Sequence[Kernel]) -> str:
    """Of several as one it is not said what is unread: another may make or read it."""
    unread_bytes = kernels[0].unread_bytes if len(kernels) == 1 else 0
    said = [f"{unread_bytes}{_UNREAD}"] if unread_bytes else []
    return ", ".join([*said, *([_REDUCES] if any(kernel.reduces for kernel in kernels) else [])])


def kernel_said(op: Op) -> tuple[int, bool]:
    """Of a ``KERNEL``: the bytes among its inputs that it does not read, and whether it reduces."""
    said = op.constants.split(", ")
    unread = (part.removesuffix(_UNREAD) for part in said if part.endswith(_UNREAD))
    return int(next(unread, "0")), _REDUCES in said


def is_fused(facts: GraphFacts) -> bool:
    """Whether a compiler runs ``facts`` otherwise than op by op, and it is known how."""
    return any(
        graph is not None and graph.lowering is not None
        for region in facts.regions
        for graph in (region.forward, region.backward)
    )


class _Fuser:
    """Rewrites the graphs of one step, with values and storages added to those of the facts."""

    def __init__(
        self, facts: GraphFacts, transfers: Sequence[Transfer], with_transfers: bool
    ) -> None:
        self.facts = facts
        self.moved = {(transfer.region, transfer.storage) for transfer in transfers}
        self.moving = {transfer.region for transfer in transfers}
        self.with_transfers = with_transfers
        # Positions on the timeline before which a transfer issues or waits for a copy.
        self.stops = {
            place
            for transfer in transfers
            for place in (
                transfer.offload_after + 1,
                transfer.release_by + 1,
                transfer.reload_at,
                transfer.needed_by,
            )
            if place is not None
        }
        # Where those run instead (definition 9).
        self.stands: dict[int, int] = {}
        self.values = list(facts.values)
        self.storages = list(facts.storages)
        self.nowhere = self._new_storage(0)
        self.holds: dict[StorageId, ValueId] = {}
        self.shown: dict[ValueId, ValueId] = {}
        # Of the graph at hand, the ops that no kernel names.
        self.unnamed: set[int] = set()

    def fused(self) -> GraphFacts:
        regions = tuple(
            self._region(number, region, firsts)
            for number, (region, firsts) in enumerate(
                zip(self.facts.regions, _firsts(self.facts), strict=True)
            )
        )
        return msgspec.structs.replace(
            self.facts,
            values=tuple(self.values),
            storages=tuple(self.storages),
            regions=regions,
        )

    def as_run(self, transfer: Transfer) -> Transfer:
        """``transfer``, whose reload is where it runs; call ``fused`` first."""
        if transfer.reload_at is None:
            return transfer
        reload_at = self.stands.get(transfer.reload_at, transfer.reload_at)
        return msgspec.structs.replace(transfer, reload_at=reload_at)

    def _region(self, number: int, region: Region, firsts: tuple[int, int]) -> Region:
        saved = {
            storage
            for item in region.saved
            for value in (item.value, item.backward_value)
            if (storage := self.values[value].storage) is not None
        }
        is_alone = not self.with_transfers and number not in self.moving
        own = {
            self.values[item.backward_value].storage
            for item in region.saved
            if (number, self.values[item.value].storage) in self.moved
        }
        moved = {storage for of, storage in self.moved if of == number}
        forward, held = self._graph(region.forward, firsts[0], is_alone, saved, moved)
        items = tuple(self._saved(item, held) for item in region.saved)
        pairs = zip(region.saved, items, strict=True)
        received = {old.backward_value: new.backward_value for old, new in pairs}
        backward = region.backward
        if backward is not None:
            inputs = tuple(
                msgspec.structs.replace(item, value=received.get(item.value, item.value))
                for item in backward.inputs
            )
            backward = msgspec.structs.replace(backward, inputs=inputs)
            backward, _ = self._graph(backward, firsts[1], is_alone, saved, (), own, received)
        return Region(forward, backward, items)

    def _saved(self, item: SavedValue, held: Mapping[ValueId, ValueId]) -> SavedValue:
        """``item``, with what the compiler saves: a copy, where it wants another layout."""
        value = self._kept(item.value, held)
        if value == item.value:
            return item
        received = self.values[item.backward_value]
        storage = self.values[value].storage
        return SavedValue(value, self._new(msgspec.structs.replace(received, storage=storage)))

    def _kept(self, value: ValueId, held: Mapping[ValueId, ValueId]) -> ValueId:
        """The value that is saved: the same, unless another storage has its bytes."""
        other = held.get(value, value)
        same = self.values[other].storage == self.values[value].storage
        return value if same else other

    def _graph(
        self,
        graph: Graph,
        first: int,
        is_alone: bool,
        saved: set[StorageId],
        moved: Collection[StorageId],
        own: Collection[StorageId | None] | None = None,
        received: Mapping[ValueId, ValueId] | None = None,
    ) -> tuple[Graph, dict[ValueId, ValueId]]:
        """``graph``, whose first op is at ``first``, rewritten, and what holds each value that it
        returns.

        A forward has ``moved`` offloaded.  A backward is given ``own`` back, and receives other
        values than were traced.
        """
        lowering = graph.lowering_alone if is_alone else graph.lowering
        if lowering is None:
            return graph, {}
        buffers = self._buffers(_received(lowering, received or {}), own or ())
        early = set() if own is not None else self._early(lowering, moved)
        kernels, turns = _placed(lowering.kernels, early, len(graph.ops))
        self._note_stands(first, len(graph.ops), kernels, turns)
        late = self._late_reads(lowering, buffers, early) if self.with_transfers else {}
        at: dict[int, list[Kernel]] = defaultdict(list)
        for kernel in kernels:
            at[kernel.at].append(kernel)
        first_read = self._first_reads(kernels, buffers) if own is not None else {}
        together = self._together(kernels, first, buffers)
        self.unnamed = set(range(len(graph.ops))).difference(*(kernel.ops for kernel in kernels))
        ops = []
        for place, op in enumerate(graph.ops):
            made = self._op(graph.ops, op, at[place], buffers)
            uses = (self._uses(op) | late.get(place, set())) & saved
            kept = {s for s in uses if place < first_read.get(s, len(graph.ops))}
            ops.append(self._holding(made, kept | together.get(place, set())))
        if own is not None:
            self._use_inputs(graph, first_read, at, ops)
        held: dict[ValueId, ValueId] = {}
        outputs = []
        for output, buffer in zip(graph.outputs, lowering.outputs, strict=True):
            if output.value is None or buffer is None:
                outputs.append(output)
                continue
            held[output.value] = self._kept(output.value, {output.value: buffers[buffer]})
            outputs.append(msgspec.structs.replace(output, value=held[output.value]))
        return msgspec.structs.replace(graph, ops=tuple(ops), outputs=tuple(outputs)), held

    def _note_stands(
        self, first: int, op_count: int, kernels: Sequence[Kernel], turns: Sequence[int]
    ) -> None:
        """Where transfers in the graph at ``first`` run: before all kernels whose turn is then."""
        for stop in self.stops & set(range(first, first + op_count)):
            self.stands[stop] = first + _landing(stop - first, kernels, turns)

    def _use_inputs(
        self,
        graph: Graph,
        first_read: Mapping[StorageId | None, int],
        at: Mapping[int, Sequence[Kernel]],
        ops: list[Op],
    ) -> None:
        """Have each input that a kernel reads be used: the others stay until the graph returns.

        A library's call has it as a hold; the op before it that does nothing uses it as well.
        """
        used = {value for op in ops for value in op.inputs}
        for item in graph.inputs:
            place = first_read.get(self.values[item.value].storage)
            if place is None or item.value in used:
                continue
            place = next((p for p in range(place, -1, -1) if not at.get(p)), place)
            ops[place] = msgspec.structs.replace(
                ops[place], inputs=(*ops[place].inputs, item.value)
            )

    # --- buffers ----------------------------------------------------------------------------------

    def _buffers(self, lowering: Lowering, own: Collection[StorageId | None]) -> list[ValueId]:
        """The value of each buffer, whose storage has its size if a kernel makes it.

        ``own`` are storages of inputs that may be written over.
        """
        made = {number for kernel in lowering.kernels for number in kernel.makes}
        taken: set[StorageId | None] = set()
        for number, buffer in enumerate(lowering.buffers):
            if number not in made and buffer.value is not None:
                taken.add(self.values[buffer.value].storage)
        found: list[ValueId] = []
        for number, buffer in enumerate(lowering.buffers):
            if buffer.over is not None and self.values[found[buffer.over]].storage in own:
                found.append(self._over(found[buffer.over], buffer.size_bytes))
                continue
            value = buffer.value
            storage = None if value is None else self.values[value].storage
            if number in made and (storage is None or storage in taken):
                value = self._new_value(buffer.size_bytes)
            elif number in made and storage is not None:
                taken.add(storage)
                device = self.storages[storage].device
                self.storages[storage] = Storage(buffer.size_bytes, device)
            elif value is None:
                value = self._new_value(0)
            assert value is not None
            found.append(value)
        return found

    def _new_storage(self, size_bytes: int) -> StorageId:
        self.storages.append(Storage(size_bytes, self.facts.device))
        return StorageId(len(self.storages) - 1)

    def _new(self, value: Value) -> ValueId:
        self.values.append(value)
        return ValueId(len(self.values) - 1)

    def _new_value(self, size_bytes: int) -> ValueId:
        storage = self._new_storage(size_bytes)
        return self._new(Value("tensor", storage, "uint8", 1, (size_bytes,), (1,)))

    def _over(self, replaced: ValueId, size_bytes: int) -> ValueId:
        """A value in the place of ``replaced``."""
        storage = self.values[replaced].storage
        return self._new(Value("tensor", storage, "uint8", 1, (size_bytes,), (1,)))

    def _early(self, lowering: Lowering, moved: Collection[StorageId]) -> set[int]:
        """The kernels that run early (definition 7)."""
        found = set()
        for number, kernel in enumerate(lowering.kernels):
            values = (lowering.buffers[n].value for n in kernel.makes)
            made = {self.facts.values[value].storage for value in values if value is not None}
            if kernel.early is not None and (self.with_transfers or not made.isdisjoint(moved)):
                found.add(number)
        return found

    def _late_reads(
        self, lowering: Lowering, buffers: Sequence[ValueId], early: Collection[int]
    ) -> dict[int, set[StorageId]]:
        """What kernels read if they do not run early after all, by position."""
        found: dict[int, set[StorageId]] = defaultdict(set)
        for number in early:
            kernel = lowering.kernels[number]
            storages = (self.values[buffers[n]].storage for n in kernel.reads)
            found[kernel.at] |= {storage for storage in storages if storage is not None}
        return found

    def _first_reads(
        self, kernels: Sequence[Kernel], buffers: Sequence[ValueId]
    ) -> dict[StorageId | None, int]:
        found: dict[StorageId | None, int] = {}
        for kernel in kernels:
            for number in kernel.reads:
                found.setdefault(self.values[buffers[number]].storage, kernel.at)
        return found

    def _together(
        self, kernels: Sequence[Kernel], first: int, buffers: Sequence[ValueId]
    ) -> dict[int, set[StorageId]]:
        """What the last of the kernels that run in one call holds for the others."""
        found: dict[int, set[StorageId]] = {}
        group: set[StorageId] = set()
        stops = {self.stands.get(stop, stop) for stop in self.stops}
        before = 0
        for kernel in kernels:
            storages = (self.values[buffers[n]].storage for n in (*kernel.reads, *kernel.makes))
            used = {storage for storage in storages if storage is not None}
            between = range(first + before + 1, first + kernel.at + 1)
            if kernel.joined and stops.isdisjoint(between):
                group |= used
                found.pop(before, None)
                found[kernel.at] = set(group)
            else:
                group = used
            before = kernel.at
        return found

    # --- ops --------------------------------------------------------------------------------------

    def _op(
        self, ops: Sequence[Op], op: Op, kernels: Sequence[Kernel], buffers: Sequence[ValueId]
    ) -> Op:
        """What stands at the position of ``op``: its kernel, several as one, or nothing."""
        if not kernels:
            return _idle(op)
        if len(kernels) == 1 and kernels[0].call:
            return self._call(self._called(ops, kernels[0], buffers), kernels[0], buffers)
        parts = sorted({part for kernel in kernels for part in kernel.ops})
        known = ops[kernels[-1].ops[-1]]
        made = dict.fromkeys(n for kernel in kernels for n in kernel.makes)
        written = [n for kernel in kernels for n in kernel.writes]
        read = dict.fromkeys(n for kernel in kernels for n in kernel.reads if n not in made)
        return Op(
            name=_name([ops[part] for part in parts]),
            target=KERNEL,
            inputs=tuple(buffers[number] for number in read),
            outputs=tuple(buffers[number] for number in made),
            mutates=tuple(buffers[n] for n in dict.fromkeys(written) if n not in made),
            constants=_said_of(kernels),
            module=known.module,
            source=known.source,
        )

    def _called(self, ops: Sequence[Op], kernel: Kernel, buffers: Sequence[ValueId]) -> Op:
        """The op that a library's kernel is called for: where it does several at once, as ``addmm``
        a product and a sum, the last of them that it is named after.

        A compiler that puts a product and a sum together itself names the sum alone: the product is
        then one that no kernel names, of as many elements as the kernel makes.
        """
        name = _packet(kernel.call)
        parts = [ops[part] for part in kernel.ops]
        for op in reversed(parts):
            if name.endswith(_packet(op.target)):
                return op
        made = {self.values[buffers[n]].element_count for n in (*kernel.makes, *kernel.writes)}
        for place in range(kernel.at, -1, -1):
            op = ops[place]
            counts = {self.values[value].element_count for value in op.outputs}
            if place in self.unnamed and name.endswith(_packet(op.target)) and counts & made:
                return op
        return parts[-1]

    def _call(self, op: Op, kernel: Kernel, buffers: Sequence[ValueId]) -> Op:
        """A library's kernel in place of ``op`` (definition 3)."""
        reads, makes, writes = (
            tuple(buffers[n] for n in of) for of in (kernel.reads, kernel.makes, kernel.writes)
        )
        made = [self.values[value].storage for value in makes]
        inputs = [self._shown(value, made) for value in op.inputs]
        outputs = [
            value if self.values[value].storage in made else self._shown(value, ())
            for value in op.outputs
        ]
        on = {self.values[value].storage for value in (*inputs, *outputs)}
        others = [value for value in makes if self.values[value].storage not in on]
        held = {storage for value in reads if (storage := self.values[value].storage) is not None}
        target = kernel.call if "." in kernel.call else op.target
        named = msgspec.structs.replace(
            op, target=target, inputs=tuple(inputs), outputs=(*outputs, *others), mutates=writes
        )
        return self._holding(named, held)

    def _shown(self, value: ValueId, made: Sequence[StorageId | None]) -> ValueId:
        """``value`` with its shape, on a storage without bytes: its buffer is held beside it."""
        if value not in self.shown:
            shown = msgspec.structs.replace(self.values[value], storage=self.nowhere)
            self.shown[value] = self._new(shown)
        return self.shown[value]

    def _uses(self, op: Op) -> set[StorageId]:
        found = (self.facts.values[value].storage for value in (*op.inputs, *op.outputs))
        return {storage for storage in found if storage is not None}

    def _holding(self, op: Op, storages: set[StorageId]) -> Op:
        """``op``, holding ``storages`` as well (definition 4)."""
        if not storages:
            return op
        holds = []
        for storage in sorted(storages):
            if storage not in self.holds:
                self.holds[storage] = self._new(Value("python", storage))
            holds.append(self.holds[storage])
        return msgspec.structs.replace(op, inputs=(*op.inputs, *holds))


def _received(lowering: Lowering, received: Mapping[ValueId, ValueId]) -> Lowering:
    buffers = (
        buffer
        if buffer.value is None
        else msgspec.structs.replace(buffer, value=received.get(buffer.value, buffer.value))
        for buffer in lowering.buffers
    )
    return msgspec.structs.replace(lowering, buffers=tuple(buffers))


def _firsts(facts: GraphFacts) -> list[tuple[int, int]]:
    """Where the forward and the backward of each region begin on the timeline."""
    first = facts.op_count
    backwards = []
    for region in facts.regions:
        first -= len(region.backward.ops) if region.backward else 0
        backwards.append(first)
    sizes = [len(region.forward.ops) for region in facts.regions]
    return list(zip(accumulate(sizes, initial=0), backwards, strict=False))


def _packet(target: str) -> str:
    """``mm`` of ``aten.mm.out``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def _idle(op: Op) -> Op:
    """An op that is part of a kernel elsewhere."""
    return msgspec.structs.replace(op, inputs=(), outputs=(), mutates=())


def _name(ops: Sequence[Op]) -> str:
    names = dict.fromkeys(op.target.split(".")[1 if "." in op.target else 0] for op in ops)
    return "_".join(("fused", *list(names)[:_NAMED]))


def _placed(
    kernels: Sequence[Kernel], early: Collection[int], op_count: int
) -> tuple[list[Kernel], list[int]]:
    """``kernels``, with those of the numbers ``early``, in the order in which they run, and the
    turn of each (definitions 7 and 8)."""
    ordered = _ordered(kernels, early) if early else kernels
    turns = [*accumulate((kernel.at for kernel in reversed(ordered)), min)][::-1]
    at = [*turns]
    next_at = op_count
    for place in reversed(range(len(at))):
        at[place] = next_at = max(0, min(at[place], next_at - 1))
    placed = [
        msgspec.structs.replace(kernel, at=min(max(found, place), op_count - 1))
        for place, (kernel, found) in enumerate(zip(ordered, at, strict=True))
    ]
    return placed, turns


def _landing(place: int, kernels: Sequence[Kernel], turns: Sequence[int]) -> int:
    """Where in a graph a transfer runs that stands before the op at ``place``."""
    following = bisect_left(turns, place)
    return min(place, kernels[following].at) if following < len(kernels) else place


def _ordered(kernels: Sequence[Kernel], early: Collection[int]) -> list[Kernel]:
    """``kernels`` by position, each after those that make or write what it uses."""
    moved = [
        msgspec.structs.replace(kernel, at=kernel.early)
        if number in early and kernel.early is not None
        else kernel
        for number, kernel in enumerate(kernels)
    ]
    makers: dict[int, list[int]] = defaultdict(list)
    readers: dict[int, list[int]] = defaultdict(list)
    needs: list[list[int]] = []
    for number, kernel in enumerate(moved):
        before = [one for n in (*kernel.reads, *kernel.writes) for one in makers[n]]
        needs.append(before + [one for n in kernel.writes for one in readers[n]])
        for n in (*kernel.makes, *kernel.writes):
            makers[n].append(number)
        for n in kernel.reads:
            readers[n].append(number)
    order: dict[int, None] = {}
    for number in sorted(range(len(moved)), key=lambda number: (moved[number].at, number)):
        for one in sorted(_with_needs(number, needs, order)):
            order[one] = None
    return _joined([moved[number] for number in order])


def _with_needs(number: int, needs: Sequence[Sequence[int]], known: Collection[int]) -> set[int]:
    """``number``, and what it needs beyond ``known``."""
    found: set[int] = set()
    left = [number]
    while left:
        one = left.pop()
        if one not in found and one not in known:
            found.add(one)
            left += needs[one]
    return found


def _joined(kernels: Sequence[Kernel]) -> list[Kernel]:
    """``kernels`` in another order, of which those join that stand together now."""
    if not any(kernel.joined for kernel in kernels):
        return [*kernels]
    before = [None, *kernels]
    return [
        msgspec.structs.replace(
            kernel, joined=last is not None and not last.call and not kernel.call
        )
        for last, kernel in zip(before, kernels, strict=False)
    ]
