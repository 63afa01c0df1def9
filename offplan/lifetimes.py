"""Which allocations a training step makes, and from when to when each is held.

1.  A step is a row of *moments*: for each graph its *call*, its ops and its *return*, where the
    runtime and the autograd engine allocate and free; after a backward one moment for each
    gradient that the engine clones; between forwards and backwards the *loss*; at last the *end*.
2.  An allocation is *held* from one moment to another, both included.  An op's outputs are held
    from the op on; a value that no op reads goes after the op that made it, any other after its
    last reader; a storage lives as long as a value on it.
3.  What a graph returns is held to its return.  Beyond that are held
      an output               until the loss is computed, and every region that receives it returns;
      the loss                until the end;
      a saved value           until its last reader in the backward; until that returns, if none;
      a parameter's gradient  until the end, as ``.grad``.
4.  *Tangents*, the gradients of outputs, are there before a backward is called.  They are dense:
    AOTAutograd copies the expanded gradient of a sum, and the engine makes zeros for an output that
    the loss does not use.  Before torch 2.13, what the engine hands over is held until the backward
    returns, else until its last reader.
5.  The engine keeps a gradient as ``.grad`` if nothing else refers to that tensor and its strides
    are the parameter's (or, for one with gaps, contiguous).  Otherwise it clones it.  Of a gradient
    that is returned several times, all but the last are clones.
6.  Gradients of one parameter from several regions are added, in place if possible, when the last
    of them is there; a gradient handed to an earlier region is that one's tangent.  Where there is
    a ``.grad`` of earlier steps, the new one is added to it when the backward has returned.
7.  *Resident* are parameters, buffers, inputs and constants, used or not.

Assumes what ``offplan.replay`` does: ``loss.backward()`` once, on graphs that run op by op.
Inputs that a region receives from code outside all regions count as resident.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offplan.footprint import is_dense
from offplan.graph import Graph, GraphFacts, GraphInput, Region, StorageId, Value, ValueId

Role = Literal["parameters", "inputs", "gradients", "saved", "temporaries"]

# Kinds of graph inputs that are there before the step.
_RESIDENT: dict[str, Role] = {
    "parameter": "parameters",
    "buffer": "parameters",
    "constant": "parameters",
    "input": "inputs",
}


# From here on AOTAutograd is handed tangents in a list that it empties (``boxed_grads_call``);
# before, the engine held them until the backward had returned.
_FREES_TANGENTS = (2, 13)


class Held(NamedTuple):
    """One allocation, held from moment ``start`` to moment ``end``.

    ``storage`` is None for one that no graph makes: a cloned gradient, or the loss.
    """

    size_bytes: int
    start: int
    end: int
    role: Role
    storage: StorageId | None


class Resident(NamedTuple):
    size_bytes: int
    role: Role


@dataclass(frozen=True)
class GraphMoments:
    """Ops are at ``first`` and on; ``clones`` follow ``returned``."""

    call: int
    first: int
    returned: int
    clones: int


@dataclass(frozen=True)
class Moments:
    """Where the moments of a step lie (definition 1).

    ``ops`` has the index of an op for each moment, and ``places`` the moment of each op.
    """

    forwards: tuple[GraphMoments, ...]
    backwards: tuple[GraphMoments | None, ...]
    loss: int
    end: int
    ops: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Lifetimes:
    """Allocations, and for each region and saved storage that is not resident its place in
    ``held``, the moments of its last use in the forward and in the backward (-1: none), and the
    size of the largest element of its saved values."""

    moments: Moments
    held: tuple[Held, ...]
    residents: tuple[Resident, ...]
    saved: dict[tuple[int, StorageId], int]
    last_forward: dict[tuple[int, StorageId], int]
    last_use: dict[tuple[int, StorageId], int]
    item_bytes: dict[tuple[int, StorageId], int]


def lifetimes(facts: GraphFacts, accumulates: bool = False) -> Lifetimes:
    """Every allocation of one step of ``facts`` on its device.

    ``accumulates``: there are gradients of earlier steps, to which those of this one are added.
    """
    return _Reader(facts, accumulates).read()


# --- moments --------------------------------------------------------------------------------------


def _moments(facts: GraphFacts, clone_counts: Sequence[int]) -> Moments:
    ops: list[int] = []
    places: list[int] = []
    last_index = max(facts.op_count - 1, 0)

    def graph_moments(graph: Graph | None, first_index: int, clones: int) -> GraphMoments | None:
        if graph is None:
            return None
        call, count = len(ops), len(graph.ops)
        final = min(first_index + max(count - 1, 0), last_index)
        ops.append(min(first_index, last_index))
        places.extend(range(call + 1, call + 1 + count))
        ops.extend(range(first_index, first_index + count))
        ops.extend([final] * (1 + clones))
        return GraphMoments(call, call + 1, call + 1 + count, call + 2 + count)

    first_index = 0
    forwards = []
    for region in facts.regions:
        placed = graph_moments(region.forward, first_index, 0)
        assert placed is not None
        forwards.append(placed)
        first_index += len(region.forward.ops)
    loss = len(ops)
    ops.append(max(first_index - 1, 0))
    backwards: list[GraphMoments | None] = []
    for region, clones in reversed([*zip(facts.regions, clone_counts, strict=True)]):
        backwards.insert(0, graph_moments(region.backward, first_index, clones))
        first_index += len(region.backward.ops) if region.backward else 0
    end = len(ops)
    ops.append(last_index)
    return Moments(tuple(forwards), tuple(backwards), loss, end, tuple(ops), tuple(places))


def _version(torch: str) -> tuple[int, ...]:
    return tuple(int(part) for part in torch.split("+")[0].split(".")[:2] if part.isdigit())


# --- gradients ------------------------------------------------------------------------------------


class _Gradient(NamedTuple):
    """A gradient that a backward returns for a leaf: a parameter or an input."""

    value: ValueId
    leaf: GraphInput
    is_cloned: bool


def _gradients(facts: GraphFacts, accumulates: bool) -> list[list[_Gradient]]:
    """The gradients of leaves that each region returns, in order (definitions 5 and 6)."""
    pairs = [list(_leaf_pairs(region)) for region in facts.regions]
    sources = Counter(leaf.name for found in pairs for _, leaf in found)
    # One of several is added to the others instead, and so is one to that of an earlier step.
    alone = set() if accumulates else {name for name, count in sources.items() if count == 1}
    return [_in_region(facts, found, alone) for found in pairs]


def _in_region(
    facts: GraphFacts, pairs: Sequence[tuple[ValueId, GraphInput]], alone: set[str]
) -> list[_Gradient]:
    remaining = Counter(value for value, _ in pairs)
    found = []
    for value, leaf in pairs:
        remaining[value] -= 1
        keeps = remaining[value] == 0 and _fits(facts.values[value], facts.values[leaf.value])
        found.append(_Gradient(value, leaf, leaf.name in alone and not keeps))
    return found


def _leaf_pairs(region: Region) -> Iterator[tuple[ValueId, GraphInput]]:
    outputs = region.backward.outputs if region.backward else ()
    for output, given in zip(outputs, region.forward.inputs, strict=False):
        if output.value is not None and given.kind != "handed":
            yield output.value, given


def _tangents(facts: GraphFacts, region: Region) -> list[tuple[ValueId, ValueId]]:
    """Outputs of the forward with their tangents, which come in the same order."""
    found = []
    inputs = region.backward.inputs if region.backward else ()
    outputs = iter([o.value for o in region.forward.outputs if o.kind in ("output", "mutated")])
    for item in inputs:
        tangent = facts.values[item.value]
        if item.kind != "tangent" or tangent.kind != "tensor":
            continue
        for output in outputs:
            if output is None:
                continue
            value = facts.values[output]
            if (value.shape, value.dtype) == (tangent.shape, tangent.dtype):
                found.append((output, item.value))
                break
    return found


def _fits(gradient: Value, leaf: Value) -> bool:
    """Whether the gradient's layout is one that the engine keeps for ``leaf``."""
    strides = leaf.stride if is_dense(leaf) else _contiguous(leaf.shape)
    return all(
        size == 1 or one == other
        for size, one, other in zip(gradient.shape, gradient.stride, strides, strict=False)
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])


def _sent_storages(facts: GraphFacts) -> dict[StorageId, StorageId]:
    """The forward's storage for each on which a backward receives saved values."""
    found = {}
    for region in facts.regions:
        for saved in region.saved:
            sent = facts.values[saved.value].storage
            received = facts.values[saved.backward_value].storage
            if sent is not None and received is not None:
                found[received] = sent
    return found


# --- reading --------------------------------------------------------------------------------------


class _Reader:
    """Reads the lifetimes off the graphs, in the order in which a step runs them.

    ``tracked`` has the storage of each value, as the forward knows it; -1 for values without one,
    and for those that are resident, on another device, or empty.
    """

    def __init__(self, facts: GraphFacts, accumulates: bool) -> None:
        self.facts = facts
        self.accumulates = accumulates
        self.gradients = _gradients(facts, accumulates)
        clone_counts = [sum(g.is_cloned for g in gradients) for gradients in self.gradients]
        self.moments = _moments(facts, clone_counts)
        self.frees_tangents = _version(facts.torch) >= _FREES_TANGENTS
        self.roles: dict[int, Role] = {}
        self.resident = self._resident_storages()
        self.tracked = self._tracked()
        # The last region that receives a storage from an earlier one.
        self.receivers: dict[int, int] = defaultdict(lambda: -1)
        for number, region in enumerate(facts.regions):
            for item in region.forward.inputs:
                self.receivers[self.tracked[item.value]] = number
        self.starts = [-1] * len(facts.storages)
        self.ends = [-1] * len(facts.storages)
        self.extra: list[Held] = []
        self.last_forward: dict[tuple[int, StorageId], int] = {}
        self.last_use: dict[tuple[int, StorageId], int] = {}
        # By storage of a handed output: the gradients that later regions return for it.
        self.arriving: dict[int, list[ValueId]] = defaultdict(list)
        self.pending: dict[str, list[ValueId]] = defaultdict(list)
        self.awaited = Counter(g.leaf.name for found in self.gradients for g in found)
        self.tangents = [_tangents(facts, region) for region in facts.regions]
        self.loss_output = self._find_loss()

    def read(self) -> Lifetimes:
        for number in range(len(self.facts.regions)):
            self._forward(number)
        self._loss()
        for number in reversed(range(len(self.facts.regions))):
            self._backward(number)
        return self._found()

    def _resident_storages(self) -> dict[StorageId, Role]:
        found: dict[StorageId, Role] = {}
        for region in self.facts.regions:
            for graph in (region.forward, region.backward):
                for item in graph.inputs if graph else ():
                    storage = self.facts.values[item.value].storage
                    if storage is not None and item.kind in _RESIDENT:
                        found.setdefault(storage, _RESIDENT[item.kind])
        return found

    def _tracked(self) -> list[int]:
        facts = self.facts
        sent = _sent_storages(facts)
        ids = [
            sent.get(StorageId(number), number)
            if storage.size_bytes > 0 and storage.device == facts.device
            else -1
            for number, storage in enumerate(facts.storages)
        ]
        for resident in self.resident:
            ids[resident] = -1
        ids = [-1 if found in self.resident else found for found in ids]
        return [-1 if value.storage is None else ids[value.storage] for value in facts.values]

    def _hold(self, value: ValueId, moment: int) -> None:
        """Hold the storage of ``value`` at least to ``moment``."""
        storage = self.tracked[value]
        if storage >= 0:
            self.ends[storage] = max(self.ends[storage], moment)

    def _make(self, value: ValueId, moment: int) -> None:
        storage = self.tracked[value]
        if storage >= 0:
            if self.starts[storage] < 0:
                self.starts[storage] = moment
            self.ends[storage] = max(self.ends[storage], moment)

    def _run(self, graph: Graph, first: int) -> None:
        """Make what the ops of ``graph`` make, and hold what they read."""
        tracked, starts, ends = self.tracked, self.starts, self.ends
        for moment, op in enumerate(graph.ops, first):
            for value in op.inputs:
                storage = tracked[value]
                if storage >= 0 and ends[storage] < moment:
                    ends[storage] = moment
            for value in op.outputs:
                storage = tracked[value]
                if storage >= 0:
                    if starts[storage] < 0:
                        starts[storage] = moment
                    if ends[storage] < moment:
                        ends[storage] = moment

    def _forward(self, number: int) -> None:
        graph, at = self.facts.regions[number].forward, self.moments.forwards[number]
        for item in graph.inputs:
            # A region that is handed what an earlier one returned holds it while it runs.
            self._make(item.value, at.call)
            self._hold(item.value, at.returned)
        self._run(graph, at.first)
        for saved in self.facts.regions[number].saved:
            used = StorageId(self.tracked[saved.value])
            self.last_forward[number, used] = self.ends[used] if used >= 0 else -1
        for output in graph.outputs:
            if output.value is not None:
                self._make(output.value, at.returned)
                if output.kind == "output" and self.receivers[self.tracked[output.value]] <= number:
                    self._hold(output.value, self.moments.loss)
                if output.kind == "saved":
                    self.roles[self.tracked[output.value]] = "saved"

    def _loss(self) -> None:
        """The loss, and the gradient of it that starts the backward."""
        at, end = self.moments.loss, self.moments.end
        loss = self.loss_output
        if loss is None:
            # A sum, made after the forwards.
            self.extra.append(Held(self._scalar_bytes(), at, end, "temporaries", None))
        else:
            self._hold(loss, end)
        self.extra.append(Held(self._scalar_bytes(), at + 1, end, "temporaries", None))

    def _find_loss(self) -> ValueId | None:
        """The output that is the loss: the first scalar that has a tangent; None for a sum."""
        for number in range(len(self.facts.regions)):
            for output, _ in self.tangents[number]:
                value = self.facts.values[output]
                if not value.shape and self.receivers[self.tracked[output]] <= number:
                    return output
        return None

    def _scalar_bytes(self) -> int:
        if self.loss_output is not None:
            return self.facts.values[self.loss_output].item_bytes
        final = [
            self.facts.values[output.value].item_bytes
            for number, region in enumerate(self.facts.regions)
            for output in region.forward.outputs
            if output.kind == "output"
            and output.value is not None
            and self.facts.values[output.value].is_float
            and self.receivers[self.tracked[output.value]] <= number
        ]
        # Sums of several outputs are added in double precision.
        return final[0] if len(final) == 1 else 8

    def _backward(self, number: int) -> None:
        region, at = self.facts.regions[number], self.moments.backwards[number]
        if region.backward is None or at is None:
            return
        for output, tangent in self.tangents[number]:
            self._tangent(region.backward, output, tangent, at)
        known = {tangent for _, tangent in self.tangents[number]}
        for item in region.backward.inputs:
            if item.kind == "tangent" and item.value not in known:
                self._make(item.value, at.call)
                self._hold(item.value, self._handed_until(at))
        self._run(region.backward, at.first)
        self._note_last_uses(number, region, at)
        used = {value for op in region.backward.ops for value in op.inputs}
        for item in region.backward.inputs:
            if item.value not in used:
                # The graph's code has it as a variable, which only a use would drop.
                self._hold(item.value, at.returned)
        for returned in region.backward.outputs:
            if returned.value is not None:
                self._make(returned.value, at.returned)
        self._hand_back(region)
        self._settle(number, at)

    def _tangent(
        self, backward: Graph, output: ValueId, tangent: ValueId, at: GraphMoments
    ) -> None:
        """The gradient of one output (definition 4)."""
        arrived = self.arriving.pop(self.tracked[output], [])
        if output == self.loss_output:
            # Started in ``_loss``.
            self._place(backward, tangent, -1)
            return
        until = self._handed_until(at)
        for gradient in arrived:
            self._hold(gradient, until)
        values = self.facts.values
        if arrived and values[arrived[0]].stride == values[tangent].stride:
            self._place(backward, tangent, self.tracked[arrived[0]])
            return
        self._make(tangent, at.call)
        if not arrived and self.loss_output is not None:
            # Zeros; of a sum it is the expanded gradient that is held, not the copy.
            self._hold(tangent, until)

    def _handed_until(self, at: GraphMoments) -> int:
        """When the engine lets go of what it hands to a backward."""
        return at.call if self.frees_tangents else at.returned

    def _place(self, graph: Graph, value: ValueId, storage: int) -> None:
        """Put ``value``, its views and what else holds it in ``graph`` on another storage."""
        before = self.tracked[value]
        self.tracked[value] = storage
        for op in graph.ops:
            for used in (*op.inputs, *op.outputs):
                if self.tracked[used] == before >= 0:
                    self.tracked[used] = storage

    def _note_last_uses(self, number: int, region: Region, at: GraphMoments) -> None:
        assert region.backward is not None
        received = {self.tracked[saved.value] for saved in region.saved} - {-1}
        for moment, op in enumerate(region.backward.ops, at.first):
            for value in (*op.inputs, *op.outputs):
                if self.tracked[value] in received:
                    self.last_use[number, StorageId(self.tracked[value])] = moment
        for output in region.backward.outputs:
            if output.value is not None and self.tracked[output.value] in received:
                self.last_use[number, StorageId(self.tracked[output.value])] = at.returned
        for storage in received:
            self.last_use.setdefault((number, StorageId(storage)), -1)

    def _hand_back(self, region: Region) -> None:
        """Gradients of what earlier regions handed over become their tangents."""
        assert region.backward is not None
        for output, given in zip(region.backward.outputs, region.forward.inputs, strict=False):
            if output.value is not None and given.kind == "handed":
                self.arriving[self.tracked[given.value]].append(output.value)

    def _settle(self, number: int, at: GraphMoments) -> None:
        """The gradients of leaves become ``.grad`` (definitions 5 and 6)."""
        moment = at.clones
        for gradient in self.gradients[number]:
            name = gradient.leaf.name
            self.awaited[name] -= 1
            self.pending[name].append(gradient.value)
            if gradient.is_cloned:
                self._hold(gradient.value, moment)
                size = self.facts.values[gradient.value].logical_bytes
                last = self.moments.end if self.awaited[name] == 0 else moment
                self.extra.append(Held(size, moment, last, "gradients", None))
                moment += 1
                continue
            first = self.pending[name][0]
            stays = self.awaited[name] == 0 and not self.accumulates
            self._hold(first, self.moments.end if stays else at.returned)
            self.roles[self.tracked[first]] = "gradients"

    def _found(self) -> Lifetimes:
        sizes = [storage.size_bytes for storage in self.facts.storages]
        places: dict[int, int] = {}
        held = list(self.extra)
        for number, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            if start < 0:
                continue
            storage = StorageId(number)
            places[number] = len(held)
            role = self.roles.get(number, "temporaries")
            held.append(Held(sizes[number], start, end, role, storage))
        saved: dict[tuple[int, StorageId], int] = {}
        item_bytes: dict[tuple[int, StorageId], int] = {}
        for region_number, region in enumerate(self.facts.regions):
            for item in region.saved:
                key = region_number, StorageId(self.tracked[item.value])
                if key[1] in places:
                    saved[key] = places[key[1]]
                    size = self.facts.values[item.value].item_bytes
                    item_bytes[key] = max(size, item_bytes.get(key, 1))
        residents = tuple(self._residents())
        return Lifetimes(
            self.moments,
            tuple(held),
            residents,
            saved,
            self.last_forward,
            self.last_use,
            item_bytes,
        )

    def _residents(self) -> Iterator[Resident]:
        """In the order of the model, as they were allocated; inputs last."""
        facts = self.facts
        named = {
            item.name: facts.values[item.value].storage
            for region in facts.regions
            for item in region.forward.inputs
        }
        left = dict(self.resident)
        for tensor in facts.model:
            known = [s for n in tensor.names if (s := named.get(n)) is not None]
            if not known:
                yield Resident(tensor.size_bytes, "parameters")
            elif left.pop(known[0], None):
                yield Resident(facts.storages[known[0]].size_bytes, "parameters")
        for storage, role in left.items():
            if facts.storages[storage].device == facts.device:
                yield Resident(facts.storages[storage].size_bytes, role)
