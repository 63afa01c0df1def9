"""What the backward needs of the forward, how each of it could be there, and at what price.

1.  An *activation* is a storage of the forward that the backward reads, or that could be read there
    to compute another again.  Small ones are left out: they stay as they are, and what of them is
    read by an op that runs again is saved.
2.  It *exists* if it is in memory: op by op every storage is, of what a compiler fuses only what
    its kernels make.  Its *recipe* are the ops that compute what is read of it from activations
    that exist and from what the graph is given.
3.  It is *saved* if the traced pair saves it, *again* if the traced backward computes it again.
4.  It *can move* if a plan for the traced pair could move it.
5.  The *cost* of its recipe is the time that the device takes for those of its ops that the forward
    has to run whatever is saved: others run once, in one graph or the other.  Of a fused kernel
    that makes more than is needed it is in proportion to bytes read and made; what kernels of the
    backward read anyway is not read once more, as the compiler has one of them make it too.
    *Alone* it costs what a kernel of its own takes.

Indexes are positions on the timeline; the positions in ``recipe`` are those in the region's
forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from offplan.allocator import charged_bytes
from offplan.fusion import KERNEL
from offplan.graph import Graph, GraphFacts, Kernel, StorageId, ValueId
from offplan.recompute import Refusals, copies
from offplan.roofline import is_view
from offplan.windows import Candidate, Span, spans_of


@dataclass(frozen=True)
class Activation:
    """One storage of the forward of ``region`` (definition 1), of ``size_bytes`` as allocated, of
    which ``transfer_bytes`` would cross the link.  If it moves, ``lost_bytes`` do not come back,
    which are there through op ``lost_through`` if it does not.

    ``inputs`` are the activations that its recipe reads, by position among all.  ``last_use`` is
    the last op of the forward that uses it; ``last_view`` likewise, views too that it takes only
    to hand them on, which it does last and only of what is saved; ``needed_by`` the first op of the
    backward that uses it, those aside that compute others again; ``again_at`` the op that makes it
    again in the traced backward.  ``refused`` says why its recipe must not run, or is empty.
    """

    region: int
    storage: StorageId
    size_bytes: int
    transfer_bytes: int
    lost_bytes: int
    lost_through: int
    recipe: tuple[int, ...]
    inputs: tuple[int, ...]
    cost_ms: float
    alone_ms: float
    last_use: int
    last_view: int
    needed_by: int | None
    again_at: int | None
    is_saved: bool
    can_move: bool
    refused: str


def activations(
    facts: GraphFacts,
    planned: GraphFacts,
    op_ms: Sequence[float],
    movable: Mapping[tuple[int, StorageId], Candidate],
    min_bytes: int,
) -> tuple[Activation, ...]:
    """The activations of all regions of at least ``min_bytes``, in the order of the forward.

    ``planned`` are ``facts`` as they are planned for (``fused``), whose ops take the device
    ``op_ms``: waiting for the host at the start of a step is no cost of its first op.
    ``movable`` has what could move, by region and storage.
    """
    found: list[Activation] = []
    for number, span in enumerate(spans_of(facts)):
        if facts.regions[number].backward is not None:
            reader = _Reader(facts, planned, number, span, op_ms, movable, min_bytes)
            found += reader.read(len(found))
    return tuple(found)


@dataclass
class _Uses:
    """Where a region uses each of its forward's storages."""

    last: dict[StorageId, int] = field(default_factory=dict)
    viewed: dict[StorageId, int] = field(default_factory=dict)
    needed: dict[StorageId, int] = field(default_factory=dict)
    again: dict[StorageId, int] = field(default_factory=dict)


class _Reader:
    def __init__(
        self,
        facts: GraphFacts,
        planned: GraphFacts,
        number: int,
        span: Span,
        op_ms: Sequence[float],
        movable: Mapping[tuple[int, StorageId], Candidate],
        min_bytes: int,
    ) -> None:
        self.facts, self.number, self.span, self.op_ms = facts, number, span, op_ms
        self.planned = planned
        self.movable, self.min_bytes = movable, min_bytes
        self.region = facts.regions[number]
        self.ran = planned.regions[number]
        self.ran_values, self.ran_storages = planned.values, planned.storages
        self.refusals = Refusals(facts, number)
        self.makers = _makers(self.region.forward)
        self.given = {facts.values[item.value].storage for item in self.region.forward.inputs}
        self.copies = copies(self.region)
        self.runs_anyway = _running_anyway(self.region.forward)
        self.made_at = self._made_at()
        self.exists = self._existing()
        self.saved = {facts.values[item.value].storage for item in self.region.saved}
        self.uses = self._uses()
        self.read_of = self._read_values()
        self.on: dict[StorageId, list[int]] = {}
        for place, op in enumerate(self.region.forward.ops):
            for storage in {self._storage(value) for value in op.outputs} - {None}:
                self.on.setdefault(storage, []).append(place)  # type: ignore[arg-type]

    def _storage(self, value: ValueId) -> StorageId | None:
        return self.facts.values[value].storage

    def _existing(self) -> set[StorageId | None]:
        """What is in memory in the forward (definition 2)."""
        if self.region.forward.lowering is None:
            return {self._storage(value) for value in self.makers} - {None}
        return set(self.made_at)

    def _made_at(self) -> dict[StorageId | None, int]:
        """Where each storage is made as the forward is run."""
        found: dict[StorageId | None, int] = {}
        given = self.given
        for place, op in enumerate(self.ran.forward.ops):
            for value in op.outputs:
                storage = self.ran_values[value].storage
                if storage is not None and storage not in given:
                    found.setdefault(storage, place)
        return found

    def _again(self) -> dict[int, int]:
        """Copies in the backward that make what is in memory there, or are views of it."""
        assert self.region.backward is not None
        lowering = self.region.backward.lowering
        if lowering is None:
            return self.copies
        made = {number for kernel in lowering.kernels for number in kernel.makes}
        values = {lowering.buffers[number].value for number in made} - {None}
        ops = self.region.backward.ops
        return {
            place: original
            for place, original in self.copies.items()
            if not values.isdisjoint(ops[place].outputs) or not self._made(original)
        }

    def _made(self, place: int) -> set[StorageId]:
        """What an op of the forward allocates."""
        op = self.region.forward.ops[place]
        read = {self._storage(value) for value in op.inputs}
        return {s for v in op.outputs if (s := self._storage(v)) is not None and s not in read}

    def _uses(self) -> _Uses:
        assert self.region.backward is not None
        uses = _Uses()
        handed_on = _handed_on(self.region.forward)
        for place, op in enumerate(self.ran.forward.ops):
            is_use = place not in handed_on or not is_view(self.planned, op)
            for value in (*op.inputs, *op.outputs):
                storage = self.ran_values[value].storage
                if storage is not None:
                    uses.viewed[storage] = self.span.forward + place
                    if is_use:
                        uses.last[storage] = self.span.forward + place
        self.again = self._again()
        same = self._same()
        ops = self.region.backward.ops
        turns = _turns(self.region.backward)
        kernels = _kernels_of(self.region.backward)
        self.read_anyway: set[StorageId | None] = set()
        for place, op in enumerate(ops):
            if place in self.again:
                for storage in self._made(self.again[place]) & self.exists:
                    uses.again.setdefault(storage, self.span.backward + turns[place])
                continue
            for value in op.inputs:
                self._need(uses, same.get(value), self.span.backward + turns[place])
            if any(not kernel.call for kernel in kernels.get(place, ())):
                self.read_anyway |= {self._storage(same[v]) for v in op.inputs if v in same}
        for output in self.region.backward.outputs:
            if output.value is not None:
                self._need(uses, same.get(output.value), self.span.backward_end)
        return uses

    def _need(self, uses: _Uses, value: ValueId | None, moment: int) -> None:
        storage = None if value is None else self._storage(value)
        if storage is not None:
            uses.needed[storage] = min(moment, uses.needed.get(storage, moment))

    def _same(self) -> dict[ValueId, ValueId]:
        """Of values of the backward, those of the forward that they are."""
        assert self.region.backward is not None
        same = {item.backward_value: item.value for item in self.region.saved}
        for place, original in self.again.items():
            made = self.region.forward.ops[original].outputs
            same.update(zip(self.region.backward.ops[place].outputs, made, strict=True))
        return same

    def _read_values(self) -> dict[StorageId, list[ValueId]]:
        """What is read of each storage: saved values, and those that are computed again."""
        found: dict[StorageId, list[ValueId]] = {}
        values = [item.value for item in self.region.saved]
        for original in self.again.values():
            values += self.region.forward.ops[original].outputs
        for value in values:
            storage = self._storage(value)
            if storage is not None:
                found.setdefault(storage, []).append(value)
        return found

    # --- activations ------------------------------------------------------------------------------

    def read(self, first: int) -> list[Activation]:
        """The region's activations; ``first`` is the position of the first."""
        wanted = [s for s in self.read_of if self._is_large(s)]
        recipes: dict[StorageId, tuple[tuple[int, ...], tuple[StorageId, ...]]] = {}
        while wanted:
            storage = wanted.pop()
            if storage in recipes:
                continue
            recipes[storage] = self._recipe(storage)
            wanted += [s for s in recipes[storage][1] if s not in recipes]
        order = sorted(recipes, key=lambda storage: self.on[storage][0])
        place_of = {storage: first + place for place, storage in enumerate(order)}
        return [self._activation(storage, *recipes[storage], place_of) for storage in order]

    def _is_large(self, storage: StorageId) -> bool:
        found = self.facts.storages[storage]
        return (
            found.size_bytes >= self.min_bytes
            and (found.device != "cpu" or self.facts.device == "cpu")
            and storage not in self.given
            and storage in self.exists
            and storage in self.on
        )

    def _recipe(self, storage: StorageId) -> tuple[tuple[int, ...], tuple[StorageId, ...]]:
        """The ops that compute what is read of ``storage``, and the large ones that they read."""
        left = list(self.read_of.get(storage, ())) or [
            value
            for value in self.region.forward.ops[self.on[storage][0]].outputs
            if self._storage(value) == storage
        ]
        ops: set[int] = set()
        read: dict[StorageId, None] = {}
        while left:
            place = self.makers.get(left.pop())
            if place is None or place in ops:
                continue
            ops.add(place)
            for value in self.region.forward.ops[place].inputs:
                other = self._storage(value)
                if other is None or other in self.given:
                    continue
                if other == storage or other not in self.exists:
                    left.append(value)
                elif self._is_large(other):
                    read[other] = None
        return tuple(sorted(ops)), tuple(read)

    def _activation(
        self,
        storage: StorageId,
        recipe: tuple[int, ...],
        inputs: tuple[StorageId, ...],
        place_of: Mapping[StorageId, int],
    ) -> Activation:
        known = set(self.copies.values())
        refused = next(filter(None, (self.refusals(p) for p in recipe if p not in known)), "")
        size_bytes = self.facts.storages[storage].size_bytes
        move = self.movable.get((self.number, storage))
        return Activation(
            region=self.number,
            storage=storage,
            size_bytes=charged_bytes(size_bytes) if self.facts.device == "cuda" else size_bytes,
            transfer_bytes=move.move.footprint.transfer_bytes if move else size_bytes,
            lost_bytes=move.lost_bytes if move else 0,
            lost_through=move.last if move else -1,
            recipe=recipe,
            inputs=tuple(place_of[other] for other in inputs),
            cost_ms=self._cost_ms(storage, recipe, self.read_anyway),
            alone_ms=self._cost_ms(storage, recipe, set()),
            last_use=self.uses.last.get(storage, self.span.forward + self.on[storage][0]),
            last_view=self.uses.viewed.get(storage, self.span.forward + self.on[storage][-1]),
            needed_by=self.uses.needed.get(storage),
            again_at=self.uses.again.get(storage),
            is_saved=storage in self.saved,
            can_move=move is not None,
            refused=refused,
        )

    def _cost_ms(
        self, storage: StorageId, recipe: Sequence[int], read_anyway: set[StorageId | None]
    ) -> float:
        """Definition 5."""
        anyway = [place for place in recipe if place in self.runs_anyway]
        if self.region.forward.lowering is None:
            return sum(self.op_ms[self.span.forward + place] for place in anyway)
        if not anyway:
            return 0.0
        place = self.made_at[storage]
        kernel, kernel_ms = self.ran.forward.ops[place], self.op_ms[self.span.forward + place]
        values = [self.ran_values[value] for value in (*kernel.inputs, *kernel.outputs)]
        # What it only holds it does not read (``offplan.fusion``).
        used = {value.storage for value in values if value.kind == "tensor"}
        total = self._bytes(used)
        if kernel.target != KERNEL or not total:
            return kernel_ms
        ops = self.region.forward.ops
        read = {self._storage(value) for place in recipe for value in ops[place].inputs}
        read -= read_anyway
        return kernel_ms * self._bytes({storage, *read} & used) / total

    def _bytes(self, storages: Collection[StorageId | None]) -> int:
        return sum(
            self.ran_storages[storage].size_bytes for storage in storages if storage is not None
        )


def _running_anyway(graph: Graph) -> set[int]:
    """The ops that are for more than what is saved."""
    needed = {output.value for output in graph.outputs if output.kind != "saved"}
    found = set()
    for place, op in reversed(list(enumerate(graph.ops))):
        if op.mutates or not needed.isdisjoint(op.outputs):
            needed |= set(op.inputs)
            found.add(place)
    return found


def _handed_on(graph: Graph) -> set[int]:
    """The ops whose results are returned and, but for others such, not read."""
    read: set[ValueId] = set()
    found = set()
    for place, op in reversed(list(enumerate(graph.ops))):
        if op.declares_alias and read.isdisjoint(op.outputs):
            found.add(place)
        else:
            read |= set(op.inputs)
    return found


def _makers(graph: Graph) -> dict[ValueId, int]:
    return {value: place for place, op in enumerate(graph.ops) for value in op.outputs}


def _kernels_of(graph: Graph) -> dict[int, list[Kernel]]:
    """The kernels that each op is part of."""
    found: dict[int, list[Kernel]] = {}
    for kernel in graph.lowering.kernels if graph.lowering else ():
        for place in kernel.ops:
            found.setdefault(place, []).append(kernel)
    return found


def _turns(graph: Graph) -> list[int]:
    """Where each op runs: with the first of the kernels that it is part of."""
    turns = list(range(len(graph.ops)))
    for place, kernels in _kernels_of(graph).items():
        turns[place] = min(kernel.at for kernel in kernels)
    return turns
