"""Device memory of a training step: bytes at every op, the peak, and what it is made of.

1.  Which allocations a step makes, and when each is held, is ``offplan.lifetimes``'.  What the
    runtime allocates between ops is counted with the op beside it.
2.  *Resting* are parameters, buffers, inputs and constants, optimizer state, gradients of earlier
    steps (if accumulated), and what libraries keep.
3.  A moved storage is held until its release, and as long as the forward uses it (a compiler may
    run an op after the release that it stood before); its reload buffer from the reload to the last
    use in the backward; the packed bytes of a packed transfer while they wait for their copy.
4.  Each op's temporaries (``offplan.workspaces``) are held during that op, or a stage of it.
5.  Bytes at an op count every allocation as if it had a segment of its own.  The *peak* is what the
    caching allocator would count (``offplan.allocator``), which also reuses what is left of larger
    blocks, in a step after the first ones; *rounding* is the part of it that nobody asked for.
6.  The *reserved* peak is the allocator's, too.  How blocks fit into segments hangs on the size of
    every block and on where segments lie: it is predicted for a process that is new, with the
    hungriest algorithms where a library chooses.  The *range* of it is over a sample of what else
    could be: addresses that rise, and algorithms drawn for each call by a fixed seed.  It says how
    far the prediction can be off; it is no bound.

A step is a forward and a backward.  What an optimizer allocates while it steps, when activations
are gone, is not part of it; its state is.  On the CPU nothing is rounded and libraries keep
nothing: bytes are those of tensors.

Pure.  Takes time in proportion to ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Literal, NamedTuple, get_args

import msgspec

from offplan.allocator import Block, CachingAllocator, charged_bytes
from offplan.graph import GraphFacts, ModelTensor, Op, StorageId
from offplan.graph import timeline as ops_of
from offplan.lifetimes import Held, lifetimes
from offplan.transfers import Transfer, buffer_bytes
from offplan.workspaces import (
    THRIFTS,
    Scratch,
    chooses,
    kept_bytes,
    makes_last_first,
    temporaries,
    together,
)

Optimizer = Literal["none", "sgd", "adamw", "adafactor"]
Part = Literal[
    "parameters",
    "inputs",
    "gradients",
    "saved",
    "temporaries",
    "workspace",
    "optimizer",
    "in_flight",
    "reloaded",
    "rounding",
]
PARTS: tuple[Part, ...] = get_args(Part)
LARGEST_COUNT = 8

# Steps that run before the one whose peak is read.  The first one begins without the libraries'
# workspaces; from the third on, the allocator's blocks repeat.
WARM_UP_STEPS = 2

# Draws of algorithms from which the range of the reserved peak is taken.  Of ten measured peaks of
# convolutional networks, 8 draws missed one more often than not, 32 in some sets of seeds, 64 in
# none of the four that were tried.
DRAWS = 64


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a step runs under.

    ``accumulate``: every parameter has a gradient already, to which the new one is added.
    ``deterministic``: ``torch.use_deterministic_algorithms`` is on.
    """

    optimizer: Optimizer = "none"
    accumulate: bool = False
    expandable_segments: bool = False
    deterministic: bool = False


# Forward and backward by themselves, with torch's default allocator settings.
ALONE = Conditions()


@dataclass(frozen=True)
class Timeline:
    """Memory without a plan, by index of op (``graph.timeline``).

    ``during[k]`` are the bytes while op k runs.  ``last`` says, for each storage that a region
    saves, during which op it is held for the last time, and ``through`` which is the last that it
    is held all through: what counts with an op can come after the storage has gone.
    ``resting_bytes`` are always there.
    """

    during: tuple[int, ...]
    last: Mapping[tuple[int, StorageId], int]
    through: Mapping[tuple[int, StorageId], int]
    resting_bytes: int


class LargeStorage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``count`` storages at the peak that are alike, of ``size_bytes`` each.

    They count as ``part`` and were made by ``op``, at ``source``; ``storage`` and ``module`` are
    those of the first one.
    """

    storage: StorageId
    size_bytes: int
    part: Part
    count: int = 1
    op: str = ""
    module: str = ""
    source: str = ""


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The peak of a step: ``parts`` sum to ``peak_bytes``, in the op with index ``op``.

    ``forward_end_bytes`` are allocated when the loss is there.  ``largest`` has what ops made only,
    those first that take the most together.
    """

    peak_bytes: int
    reserved_bytes: int
    forward_end_bytes: int
    op: int
    op_name: str
    op_target: str
    op_module: str
    op_source: str
    parts: dict[Part, int]
    largest: tuple[LargeStorage, ...]


class Span(NamedTuple):
    """Bytes that are held from moment ``start`` to moment ``end``, both included, as ``part``; as
    ``in_flight`` from moment ``leaves`` on, if any.

    ``storage`` is that of the graphs; None for what no graph makes.
    """

    size_bytes: int
    start: int
    end: int
    part: Part
    storage: StorageId | None
    leaves: int | None


@dataclass(frozen=True)
class Spans:
    """What is held when.  A step is a row of moments (``offplan.lifetimes``), more than it has ops:
    ``ops`` has the index of an op for each, ``places`` the moment of each op.

    ``resting`` are the bytes by part that are always there, ``temporary_bytes`` what each moment
    allocates and frees again.  Sizes are as the allocator charges them; what its blocks add beyond
    that is left out, so that the highest moment can be a little under the predicted peak.
    """

    ops: tuple[int, ...]
    places: tuple[int, ...]
    resting: Mapping[Part, int]
    temporary_bytes: tuple[int, ...]
    held: tuple[Span, ...]
    is_rounded: bool


class ReservedRange(NamedTuple):
    """The least and the most that was reserved in a sample of cases (definition 6)."""

    least_bytes: int
    most_bytes: int


class Memory:
    """Memory of one step, which is read once for any number of questions."""

    def __init__(self, facts: GraphFacts, conditions: Conditions = ALONE) -> None:
        self._step = _Step(facts, conditions)

    def timeline(self) -> Timeline:
        """Memory without a plan."""
        step = self._step
        return Timeline(
            step.during(step.allocations), step.last_ops(), step.through_ops(), step.resting_bytes
        )

    def curve(self, transfers: Sequence[Transfer]) -> tuple[int, ...]:
        """Bytes during each op under ``transfers``."""
        return self._step.during(self._step.under(transfers))

    def predict(self, transfers: Sequence[Transfer]) -> Prediction:
        """The peak under ``transfers``."""
        return _predicted(self._step, self._step.under(transfers))

    def spans(self, transfers: Sequence[Transfer]) -> Spans:
        """What is held when under ``transfers``."""
        return self._step.spans(self._step.under(transfers))

    def reserved_range(self, transfers: Sequence[Transfer]) -> ReservedRange:
        """The range of the reserved peak under ``transfers``: the time of two predictions, of
        ``DRAWS`` more where libraries choose."""
        return _reserved_range(self._step, self._step.under(transfers))


def timeline(facts: GraphFacts, conditions: Conditions = ALONE) -> Timeline:
    """Memory of ``facts`` without a plan."""
    return Memory(facts, conditions).timeline()


def curve(
    facts: GraphFacts, transfers: Sequence[Transfer], conditions: Conditions = ALONE
) -> tuple[int, ...]:
    """Bytes during each op under ``transfers``."""
    return Memory(facts, conditions).curve(transfers)


def predict(
    facts: GraphFacts, transfers: Sequence[Transfer], conditions: Conditions = ALONE
) -> Prediction:
    """The peak under ``transfers``."""
    return Memory(facts, conditions).predict(transfers)


def reserved_range(
    facts: GraphFacts, transfers: Sequence[Transfer], conditions: Conditions = ALONE
) -> ReservedRange:
    """The range of the reserved peak under ``transfers``."""
    return Memory(facts, conditions).reserved_range(transfers)


# --- a step ---------------------------------------------------------------------------------------


class _Allocation(NamedTuple):
    """Held from moment ``start`` to ``end``; in flight from ``leaves`` on."""

    size_bytes: int
    start: int
    end: int
    part: Part
    storage: StorageId | None
    leaves: int

    def part_at(self, moment: int) -> Part:
        return self.part if moment < self.leaves else "in_flight"


class _Step:
    """The allocations of a step, by moment, and what rests."""

    def __init__(self, facts: GraphFacts, conditions: Conditions) -> None:
        self.facts = facts
        self.conditions = conditions
        self.expandable = conditions.expandable_segments
        self.found = lifetimes(facts, conditions.accumulate)
        self.ops = tuple(ops_of(facts))
        self.allocations = [_unmoved(held) for held in self.found.held]
        self.is_rounded = facts.device == "cuda"
        self.temporaries = self._temporaries()
        forward_count = sum(len(region.forward.ops) for region in facts.regions)
        self.libraries = (
            tuple(kept_bytes(self.ops, forward_count, facts.gpu)) if self.is_rounded else ()
        )
        self.resting: tuple[tuple[int, Part], ...] = (
            *((item.size_bytes, item.role) for item in self.found.residents),
            *_kept_between_steps(facts.model, conditions),
        )
        self.resting_bytes = sum(self.block_bytes(size) for size, _ in self.resting)
        self.resting_bytes += sum(self.block_bytes(size) for _, size in self.libraries)

    def block_bytes(self, size_bytes: int) -> int:
        return charged_bytes(size_bytes, self.expandable) if self.is_rounded else size_bytes

    def _temporaries(self) -> dict[int, tuple[Scratch, ...]]:
        """What each moment allocates and frees again."""
        if not self.is_rounded:
            return {}
        values, gpu, places = self.facts.values, self.facts.gpu, self.found.moments.places
        found = (
            (place, temporaries(op, values, gpu, self.conditions.deterministic))
            for place, op in zip(places, self.ops, strict=True)
        )
        return {place: stages for place, stages in found if stages}

    def drawn_temporaries(self, count: int) -> Iterator[dict[int, tuple[Scratch, ...]]]:
        """The same ``count`` times, with algorithms drawn where libraries choose: one for each
        stage of all calls that are alike, as a library would."""
        places: dict[object, list[int]] = defaultdict(list)
        for place in self.temporaries:
            op = self.ops[self.found.moments.ops[place]]
            if chooses(op):
                values = [self.facts.values[value] for value in op.inputs]
                given = tuple((value.shape, value.stride) for value in values)
                places[op.target, op.constants, given].append(place)
        choices = [(alike, self._by_stage(alike[0])) for alike in places.values()]
        for seed in range(count if choices else 0):
            random, drawn = Random(seed), dict(self.temporaries)
            for alike, stages in choices:
                drawn |= dict.fromkeys(alike, tuple(map(random.choice, stages)))
            yield drawn

    def _by_stage(self, place: int) -> list[tuple[Scratch, ...]]:
        """What each stage of the op at ``place`` allocates, by thrift."""
        values, gpu = self.facts.values, self.facts.gpu
        op, deterministic = self.ops[self.found.moments.ops[place]], self.conditions.deterministic
        found = [temporaries(op, values, gpu, deterministic, thrift) for thrift in THRIFTS]
        return [*zip(*found, strict=True)]

    def temporary_bytes(self, moment: int, count: Callable[[int], int]) -> int:
        """The most that is allocated at ``moment`` beyond all outputs of its op, ``count`` being
        what a size counts."""
        most = 0
        for stage in together(self.temporaries.get(moment, ())):
            total = sum(map(count, stage.sizes))
            if stage.missing_count:
                # Less the outputs that are missing then.
                op = self.ops[self.found.moments.ops[moment]]
                sizes = [self.facts.values[value].logical_bytes for value in op.outputs]
                total -= sum(map(count, [size for size in sizes if size][-stage.missing_count :]))
            most = max(most, total)
        return most

    def under(self, transfers: Sequence[Transfer]) -> list[_Allocation]:
        """The allocations with storages moved (definition 3)."""
        moved = list(self.allocations)
        between: list[_Allocation] = []
        for transfer in transfers:
            place = self.found.saved.get((transfer.region, transfer.storage))
            if place is None:
                continue
            # What a compiler runs later than traced keeps it beyond its release.
            last = self.found.last_forward[transfer.region, transfer.storage]
            release = max(self._moment(transfer.release_by), last)
            leaves = self._moment(transfer.offload_after) + 1
            moved[place] = moved[place]._replace(end=release, leaves=leaves)
            if transfer.packed:
                size, start = transfer.transfer_bytes, min(leaves, release)
                between.append(_Allocation(size, start, release, "in_flight", None, 0))
        for transfer in sorted(transfers, key=_reload_order):
            if (transfer.region, transfer.storage) in self.found.saved:
                between += self._reload(transfer)
        # They come before the op that stands at the same place.
        return between + moved

    def _reload(self, transfer: Transfer) -> Iterator[_Allocation]:
        if transfer.reload_at is None or transfer.needed_by is None:
            return
        key = transfer.region, transfer.storage
        start, needed = (
            self._moment_in(transfer, op) for op in (transfer.reload_at, transfer.needed_by)
        )
        item_bytes = self.found.item_bytes[key]
        size = buffer_bytes(transfer.start, transfer.stop, item_bytes)
        last = max(self.found.last_use[key], needed)
        yield _Allocation(size, start, last, "reloaded", transfer.storage, _NEVER)
        if transfer.packed:
            # Scattered by the wait, just before the op that needs it.
            yield _Allocation(
                transfer.transfer_bytes, start, max(start, needed - 1), "reloaded", None, _NEVER
            )

    def _moment(self, op: int) -> int:
        return self.found.moments.places[op]

    def _moment_in(self, transfer: Transfer, op: int) -> int:
        """The moment of ``op`` in the backward of the transfer's region, or of its return."""
        at = self.found.moments.backwards[transfer.region]
        assert at is not None
        if op < len(self.ops) and at.call < self._moment(op) < at.returned:
            return self._moment(op)
        return at.returned

    def by_moment(self, allocations: Sequence[_Allocation]) -> list[int]:
        """Bytes at each moment."""
        change = [0] * (len(self.found.moments.ops) + 1)
        change[0] = self.resting_bytes
        for item in allocations:
            size = self.block_bytes(item.size_bytes)
            change[item.start] += size
            change[item.end + 1] -= size
        bytes_at = list(accumulate(change))
        for moment in self.temporaries:
            bytes_at[moment] += self.temporary_bytes(moment, self.block_bytes)
        return bytes_at[:-1]

    def during(self, allocations: Sequence[_Allocation]) -> tuple[int, ...]:
        """Bytes at each op, and at the moments that count with it."""
        found = [0] * len(self.ops)
        for op, size in zip(self.found.moments.ops, self.by_moment(allocations), strict=True):
            if op < len(found) and size > found[op]:
                found[op] = size
        return tuple(found)

    def spans(self, allocations: Sequence[_Allocation]) -> Spans:
        resting: dict[Part, int] = dict.fromkeys(PARTS, 0)
        for size, part in self.resting:
            resting[part] += self.block_bytes(size)
        resting["workspace"] += sum(self.block_bytes(size) for _, size in self.libraries)
        moments = self.found.moments
        return Spans(
            ops=moments.ops,
            places=moments.places,
            resting=resting,
            temporary_bytes=tuple(
                self.temporary_bytes(moment, self.block_bytes) for moment in range(len(moments.ops))
            ),
            held=tuple(
                Span(
                    self.block_bytes(item.size_bytes),
                    item.start,
                    item.end,
                    item.part,
                    item.storage,
                    item.leaves if item.leaves <= item.end else None,
                )
                for item in allocations
                if item.size_bytes
            ),
            is_rounded=self.is_rounded,
        )

    def last_ops(self) -> dict[tuple[int, StorageId], int]:
        ops = self.found.moments.ops
        return {key: ops[self.found.held[place].end] for key, place in self.found.saved.items()}

    def through_ops(self) -> dict[tuple[int, StorageId], int]:
        ops = self.found.moments.ops
        ends = {key: self.found.held[place].end for key, place in self.found.saved.items()}
        return {
            key: ops[end] - (ops[end + 1 : end + 2] == (ops[end],)) for key, end in ends.items()
        }


def _reload_order(transfer: Transfer) -> tuple[int, int]:
    """Copies to the device are issued in the order in which they are needed."""
    return transfer.reload_at or 0, transfer.needed_by or 0


# Later than any moment.
_NEVER = 1 << 62


def _unmoved(held: Held) -> _Allocation:
    return _Allocation(held.size_bytes, held.start, held.end, held.role, held.storage, _NEVER)


def _kept_between_steps(
    model: Sequence[ModelTensor], conditions: Conditions
) -> Iterator[tuple[int, Part]]:
    for tensor in model:
        if tensor.kind != "parameter" or not tensor.requires_grad:
            continue
        if conditions.accumulate:
            yield tensor.size_bytes, "gradients"
        for size_bytes in _state_bytes(tensor, conditions.optimizer):
            yield size_bytes, "optimizer"


def _state_bytes(tensor: ModelTensor, optimizer: Optimizer) -> tuple[int, ...]:
    """Optimizer state of one parameter, as torch.optim allocates it: in the parameter's type, step
    counts on the host."""
    if optimizer == "none":
        return ()
    if optimizer == "sgd":
        # With momentum; without it there is no state.
        return (tensor.size_bytes,)
    if optimizer == "adamw":
        return tensor.size_bytes, tensor.size_bytes
    # Adafactor: a row and a column of each matrix; all of a vector.
    if len(tensor.shape) < 2 or not tensor.size_bytes:
        return (tensor.size_bytes,)
    return tensor.size_bytes // tensor.shape[-1], tensor.size_bytes // tensor.shape[-2]


# --- the peak -------------------------------------------------------------------------------------


class _Peaks(NamedTuple):
    moment: int
    allocated_bytes: int
    reserved_bytes: int
    forward_end_bytes: int


def _predicted(step: _Step, allocations: Sequence[_Allocation]) -> Prediction:
    peaks = _simulated(step, allocations) if step.is_rounded else _summed(step, allocations)
    moment = peaks.moment
    there = [item for item in allocations if item.start <= moment <= item.end]
    parts: dict[Part, int] = dict.fromkeys(PARTS, 0)
    for size, part in step.resting:
        parts[part] += size
    for item in there:
        parts[item.part_at(moment)] += item.size_bytes
    parts["workspace"] += sum(size for _, size in step.libraries)
    parts["workspace"] += step.temporary_bytes(moment, int)
    parts["rounding"] = peaks.allocated_bytes - sum(parts.values())
    index = step.found.moments.ops[moment]
    op = step.ops[index] if step.ops else None
    return Prediction(
        peak_bytes=peaks.allocated_bytes,
        reserved_bytes=peaks.reserved_bytes,
        forward_end_bytes=peaks.forward_end_bytes,
        op=index,
        op_name=op.name if op else "",
        op_target=op.target if op else "",
        op_module=op.module if op else "",
        op_source=op.source if op else "",
        parts=parts,
        largest=tuple(_largest(step, there, moment)),
    )


class _Kind(NamedTuple):
    """What makes storages alike."""

    size_bytes: int
    part: Part
    op: str
    source: str


def _largest(step: _Step, there: Sequence[_Allocation], moment: int) -> Iterator[LargeStorage]:
    """What takes the most of ``there``, storages that are alike together."""
    makers = _makers(step, {item.storage for item in there if item.storage is not None})
    alike: dict[_Kind, list[StorageId]] = defaultdict(list)
    for item in there:
        if item.storage is not None and item.size_bytes:
            op = makers.get(item.storage)
            target, source = (op.target, op.source) if op else ("", "")
            kind = _Kind(item.size_bytes, item.part_at(moment), target, source)
            alike[kind].append(item.storage)
    rows = sorted(alike.items(), key=lambda row: (-row[0].size_bytes * len(row[1]), row[1][0]))
    for kind, storages in rows[:LARGEST_COUNT]:
        first = makers.get(storages[0])
        yield LargeStorage(
            storage=storages[0],
            size_bytes=kind.size_bytes,
            part=kind.part,
            count=len(storages),
            op=kind.op,
            module=first.module if first else "",
            source=kind.source,
        )


def _makers(step: _Step, storages: set[StorageId]) -> dict[StorageId, Op]:
    """The op that made each of ``storages``."""
    values = step.facts.values
    makers: dict[StorageId, Op] = {}
    for op in step.ops:
        for value in op.outputs:
            storage = values[value].storage
            if storage in storages and storage not in makers:
                makers[storage] = op
    return makers


def _summed(step: _Step, allocations: Sequence[_Allocation]) -> _Peaks:
    """Peaks where nothing is rounded, nor reserved."""
    bytes_at = step.by_moment(allocations)
    most = max(bytes_at)
    ended = step.found.moments.loss
    ended_bytes = step.resting_bytes + sum(
        item.size_bytes for item in allocations if item.start <= ended < item.end
    )
    return _Peaks(bytes_at.index(most), most, most, ended_bytes)


def _simulated(step: _Step, allocations: Sequence[_Allocation]) -> _Peaks:
    """Peaks as the caching allocator counts them, in a step after the first ones."""
    allocator = CachingAllocator(step.expandable)
    return _steady(step, allocations, step.temporaries, allocator)


def _reserved_range(step: _Step, allocations: Sequence[_Allocation]) -> ReservedRange:
    """The range over both orders of addresses and what libraries choose (definition 6)."""
    if not step.is_rounded:
        reserved_bytes = _summed(step, allocations).reserved_bytes
        return ReservedRange(reserved_bytes, reserved_bytes)
    drawn = [step.temporaries, step.temporaries, *step.drawn_temporaries(DRAWS)]
    found = [
        _steady(
            step, allocations, scratch, CachingAllocator(step.expandable, rising=number % 2 > 0)
        )
        for number, scratch in enumerate(drawn)
    ]
    sizes = [peaks.reserved_bytes for peaks in found]
    return ReservedRange(min(sizes), max(sizes))


def _steady(
    step: _Step,
    allocations: Sequence[_Allocation],
    scratch: Mapping[int, tuple[Scratch, ...]],
    allocator: CachingAllocator,
) -> _Peaks:
    """Peaks of a step after the first ones, with the temporaries in ``scratch``."""
    for size, _ in step.resting:
        if size:
            allocator.allocate(size)
    moments = _schedule(step, allocations, scratch)
    libraries: dict[int, list[int]] = {}
    for op, size in step.libraries:
        libraries.setdefault(step.found.moments.places[op], []).append(size)
    for _ in range(WARM_UP_STEPS):
        _run(allocator, moments, allocations, libraries)
        # Kept from the first step on.
        libraries = {}
    return _run(allocator, moments, allocations, libraries, step.found.moments.loss)


class _AtMoment(NamedTuple):
    """What one moment allocates, allocates and frees again, and frees in the end."""

    starting: list[int]
    stages: tuple[Scratch, ...]
    ending: list[int]


def _schedule(
    step: _Step,
    allocations: Sequence[_Allocation],
    scratch: Mapping[int, tuple[Scratch, ...]],
) -> list[_AtMoment]:
    count = len(step.found.moments.ops)
    moments = [_AtMoment([], scratch.get(moment, ()), []) for moment in range(count)]
    for place, item in enumerate(allocations):
        if item.size_bytes:
            moments[item.start].starting.append(place)
            moments[item.end].ending.append(place)
    for place, op in zip(step.found.moments.places, step.ops, strict=True):
        if makes_last_first(op):
            # What transfers allocate there comes before the op all the same.
            starting = moments[place].starting
            starting.reverse()
            starting.sort(key=lambda one: allocations[one].part not in _TRANSFERRED)
    return moments


# Parts of what transfers allocate.
_TRANSFERRED: tuple[Part, ...] = ("in_flight", "reloaded")


def _run(
    allocator: CachingAllocator,
    moments: Sequence[_AtMoment],
    allocations: Sequence[_Allocation],
    libraries: Mapping[int, Sequence[int]],
    loss: int = -1,
) -> _Peaks:
    """One step.  ``libraries``: bytes that a library allocates at a moment and keeps."""
    blocks: dict[int, Block] = {}
    allocate, release = allocator.allocate, allocator.release
    most, most_at, ended_bytes = 0, 0, 0
    for moment, (starting, stages, ending) in enumerate(moments):
        made = 0
        leaving: dict[int, list[Block]] = {}
        for number, stage in enumerate(stages):
            until = max(made, len(starting) - stage.missing_count)
            for place in starting[made:until]:
                blocks[place] = allocate(allocations[place].size_bytes)
            made = until
            last = number + stage.stage_count - 1
            leaving.setdefault(last, []).extend(map(allocate, stage.sizes))
            if allocator.allocated_bytes > most:
                most, most_at = allocator.allocated_bytes, moment
            for block in leaving.pop(number, ()):
                release(block)
        for place in starting[made:]:
            blocks[place] = allocate(allocations[place].size_bytes)
        for size in libraries.get(moment, ()):
            allocate(size)
        if allocator.allocated_bytes > most:
            most, most_at = allocator.allocated_bytes, moment
        for place in ending:
            release(blocks.pop(place))
        if moment == loss:
            ended_bytes = allocator.allocated_bytes
    return _Peaks(most_at, most, allocator.reserved_bytes, ended_bytes)
