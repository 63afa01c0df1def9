"""What the backward computes again instead of receiving it, and the graphs that this makes.

1.  A *choice* is a set of ops of one region's forward, by position, that run again in its backward.
    What they and the rest of the backward read of the forward's other values is saved, and nothing
    else: a choice decides the saved values, and with them both graphs.
2.  ``chosen`` is the choice that a traced pair already makes: an op of the backward that has the
    name and target of one in the forward is that op again.  The backward's *own* ops are the
    others, those that AOTAutograd has no need of in the forward among them.
3.  ``apply`` gives the facts of a trace that is partitioned under other choices, with the numbers
    that such a trace gives its values and storages, so that digests are equal.
4.  Own ops keep their order.  An op that runs again comes just before the first op that needs it,
    with all that it needs itself, in the order of the forward; so do own ops that come before any
    gradient arrives, or that an op which runs again reads.
5.  The forward keeps what its outputs and the saved values need, and ops with effects.  Saved
    values stand in the order of the forward, graph inputs first.
6.  ``refusal`` says why an op must not run again: what it computes would not be the same, or what
    it does would happen twice.

What the ops are lowered to is not known for other graphs than those that were traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from offplan.errors import PlanError
from offplan.graph import (
    Graph,
    GraphFacts,
    GraphInput,
    GraphOutput,
    Op,
    Region,
    SavedValue,
    Storage,
    StorageId,
    Value,
    ValueId,
)


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forward ops of ``region``, by position in its forward, that run again in its backward."""

    region: int
    ops: tuple[int, ...]


def chosen(facts: GraphFacts) -> tuple[Choice, ...]:
    """The choice of each region of ``facts`` (definition 2)."""
    return tuple(
        Choice(number, tuple(sorted(_copies(region).values())))
        for number, region in enumerate(facts.regions)
    )


def apply(facts: GraphFacts, choices: Iterable[Choice]) -> GraphFacts:
    """``facts`` as traced under ``choices``; regions that none names stay (definition 3).

    Raises ``PlanError`` for a choice that names what is not there, or must not run again.
    """
    wanted = {choice.region: frozenset(choice.ops) for choice in choices}
    before = {choice.region: frozenset(choice.ops) for choice in chosen(facts)}
    for number, ops in wanted.items():
        _check(facts, number, ops - before.get(number, frozenset()))
    if all(wanted.get(number, ops) == ops for number, ops in before.items()):
        return facts
    writer = _Writer(facts)
    for number, region in enumerate(facts.regions):
        ops = wanted.get(number, before[number])
        writer.add(_kept(region) if ops == before[number] else _Repartition(region, ops).graphs())
    return msgspec.structs.replace(
        facts,
        storages=tuple(writer.storages),
        values=tuple(writer.values),
        regions=tuple(writer.regions),
    )


def _check(facts: GraphFacts, number: int, added: frozenset[int]) -> None:
    if not 0 <= number < len(facts.regions):
        raise PlanError(f"a choice names region {number}, of {len(facts.regions)}")
    ops = facts.regions[number].forward.ops
    for place in sorted(added):
        if not 0 <= place < len(ops):
            raise PlanError(f"a choice names op {place} of region {number}, which has {len(ops)}")
        why = refusal(facts, number, place)
        if why is not None:
            raise PlanError(f"{ops[place].name} ({ops[place].target}) must not run again: {why}")


# --- what may run again ---------------------------------------------------------------------------

# Namespaces of ops that compute their outputs from their inputs, and do nothing else.
_PURE = ("aten", "prims")
# Packets that draw numbers, or whose name says so.
_RANDOM = (
    "rand", "bernoulli", "native_dropout", "dropout", "multinomial", "normal", "uniform",
    "exponential", "geometric", "cauchy", "log_normal", "poisson", "binomial", "rrelu_with_noise",
    "philox", "inductor_seed", "_fused_dropout",
)  # fmt: skip
# Where attention has its dropout, as a position among the arguments.
_DROPOUT_AT = {
    "_scaled_dot_product_flash_attention": 3,
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_efficient_attention": 5,
    "_scaled_dot_product_cudnn_attention": 5,
    "_scaled_dot_product_fused_attention_overrideable": 4,
}


def refusal(facts: GraphFacts, region: int, place: int) -> str | None:
    """Why op ``place`` of the forward of ``region`` must not run again; None if it may."""
    graph = facts.regions[region].forward
    op = graph.ops[place]
    namespace, _, rest = op.target.partition(".")
    packet = rest.partition(".")[0]
    if namespace == "_c10d_functional" or namespace == "c10d":
        return "it is a collective, which all processes take part in"
    if namespace not in _PURE:
        return "it is not one of torch's own ops, and may have effects"
    if op.mutates:
        return "it writes to its input"
    if _draws(op, packet):
        return "it draws random numbers"
    if any(facts.values[value].kind != "tensor" for value in op.outputs):
        return "it does not compute a tensor"
    written = {facts.values[value].storage for other in graph.ops for value in other.mutates}
    if any(facts.values[value].storage in written for value in op.inputs):
        return "what it reads is written to"
    if _reads_changed(facts, graph, op):
        return "it reads a buffer or input that the step changes"
    return None


def _draws(op: Op, packet: str) -> bool:
    if packet in _DROPOUT_AT:
        return _dropout(op, _DROPOUT_AT[packet]) != 0.0
    return packet.startswith(_RANDOM)


def _dropout(op: Op, place: int) -> float | None:
    """The probability of an attention op's dropout; None if it is not a number."""
    given = dict(enumerate(_arguments(op.constants)))
    named = next((text for text in given.values() if text.startswith("dropout_p=")), None)
    text = named.partition("=")[2] if named else given.get(place, "0.0")
    if "=" in text:
        text = "0.0"
    try:
        return float(text)
    except ValueError:
        return None


def _arguments(constants: str) -> Iterator[str]:
    depth, start = 0, 0
    for place, letter in enumerate(constants):
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0:
            yield constants[start:place].strip()
            start = place + 1
    yield constants[start:].strip()


def _reads_changed(facts: GraphFacts, graph: Graph, op: Op) -> bool:
    """Whether ``op`` reads an input that the step may change: which one a changed value belongs to
    is not recorded, so each of its shape and dtype counts."""
    changed = {
        (facts.values[output.value].dtype, facts.values[output.value].shape)
        for output in graph.outputs
        if output.kind == "mutated" and output.value is not None
    }
    if not changed:
        return False
    inputs = {
        facts.values[item.value].storage for item in graph.inputs if item.kind != "parameter"
    } - {None}
    read = (facts.values[value] for value in op.inputs)
    return any(v.storage in inputs and (v.dtype, v.shape) in changed for v in read)


# --- both graphs of a region ----------------------------------------------------------------------


def _copies(region: Region) -> dict[int, int]:
    """Positions of backward ops that are forward ops again, with the forward's (definition 2)."""
    if region.backward is None:
        return {}
    forward = {(op.name, op.target): place for place, op in enumerate(region.forward.ops)}
    found = {}
    for place, op in enumerate(region.backward.ops):
        if (op.name, op.target) in forward:
            found[place] = forward[op.name, op.target]
    return found


@dataclass(frozen=True, eq=False)
class _Node:
    """An op or a constant of a graph that is being put together, in values of the base region.

    ``turn`` orders nodes that come together; ``reads`` and ``makes`` are the values of the forward
    where it has them.
    """

    turn: tuple[int, float]
    reads: tuple[ValueId, ...]
    makes: tuple[ValueId, ...]
    what: Op | GraphInput
    mutates: tuple[ValueId, ...] = ()


@dataclass(frozen=True)
class _Graphs:
    """A region in terms of the base's values: of the forward, where both graphs have them."""

    region: Region
    forward: Sequence[_Node]
    backward: Sequence[_Node] | None
    saved: Sequence[ValueId]
    returned: Sequence[ValueId | None]
    # Of values of the base's backward, those of the forward that they are.
    same: dict[ValueId, ValueId]


def _forward_nodes(region: Region) -> list[_Node]:
    graph = region.forward
    nodes = [
        _Node((0, place), op.inputs, op.outputs, op, op.mutates)
        for place, op in enumerate(graph.ops)
    ]
    return _with_constants(nodes, graph, 0)


def _with_constants(nodes: list[_Node], graph: Graph, part: int) -> list[_Node]:
    """``nodes`` with the graph's constants, where their numbers say that they stand."""
    constants = [item for item in graph.inputs if item.kind == "constant"]
    if not constants:
        return nodes
    firsts = [(node.what.outputs[0], place) for place, node in enumerate(nodes)
              if isinstance(node.what, Op) and node.what.outputs]  # fmt: skip
    for number, item in enumerate(constants):
        place = next((place for first, place in firsts if first > item.value), len(nodes))
        turn = place - 1 + (number + 1) / (len(constants) + 1)
        nodes.append(_Node((part, turn), (), (item.value,), item))
    return sorted(nodes, key=lambda node: node.turn)


def _kept(region: Region) -> _Graphs:
    """The region as it is."""
    same = {item.backward_value: item.value for item in region.saved}
    backward = None
    if region.backward is not None:
        nodes = [
            _Node((1, place), _all(op.inputs, same), op.outputs, op, _all(op.mutates, same))
            for place, op in enumerate(region.backward.ops)
        ]
        backward = _with_constants(nodes, region.backward, 1)
    return _Graphs(
        region,
        _forward_nodes(region),
        backward,
        [item.value for item in region.saved],
        _returned(region, same),
        same,
    )


def _all(values: Iterable[ValueId], same: dict[ValueId, ValueId]) -> tuple[ValueId, ...]:
    return tuple(same.get(value, value) for value in values)


def _returned(region: Region, same: dict[ValueId, ValueId]) -> list[ValueId | None]:
    outputs = region.backward.outputs if region.backward else ()
    return [None if o.value is None else same.get(o.value, o.value) for o in outputs]


class _Repartition:
    """One region under another choice."""

    def __init__(self, region: Region, again: frozenset[int]) -> None:
        assert region.backward is not None
        self.region, self.again = region, again
        self.backward = region.backward
        self.copies = _copies(region)
        self.same = {item.backward_value: item.value for item in region.saved}
        for place, original in self.copies.items():
            made = zip(
                self.backward.ops[place].outputs, region.forward.ops[original].outputs, strict=True
            )
            self.same.update(made)
        self._match_constants()
        self.forward_nodes = _forward_nodes(region)
        self.own = self._own()
        self.makers = self._makers()

    def _match_constants(self) -> None:
        """A constant of both graphs is one."""
        known = {i.name: i.value for i in self.region.forward.inputs if i.kind == "constant"}
        for item in self.backward.inputs:
            if item.kind == "constant" and item.name in known:
                self.same[item.value] = known[item.name]

    def _own(self) -> list[_Node]:
        """The backward's own ops, in order."""
        nodes = [
            _Node(
                (1, place), _all(op.inputs, self.same), op.outputs, op, _all(op.mutates, self.same)
            )
            for place, op in enumerate(self.backward.ops)
        ]
        placed = _with_constants(nodes, self.backward, 1)
        return [
            node
            for node in placed
            if node.turn[1] not in self.copies and self.same.keys().isdisjoint(node.makes)
        ]

    def _makers(self) -> dict[ValueId, _Node]:
        """What can make a value in the backward."""
        found = {value: node for node in self.own for value in node.makes}
        for node in self.forward_nodes:
            if isinstance(node.what, GraphInput) or int(node.turn[1]) in self.again:
                found.update((value, node) for value in node.makes)
        return found

    def graphs(self) -> _Graphs:
        returned = _returned(self.region, self.same)
        placed: dict[_Node, None] = {}
        wanted: set[ValueId] = set()
        for root in self._roots():
            self._place([root], placed, wanted)
        last = [self.makers[v] for v in returned if v is not None and v in self.makers]
        wanted |= {v for v in returned if v is not None and v not in self.makers}
        self._place(last, placed, wanted)
        saved = self._in_order(wanted)
        return _Graphs(self.region, self._forward(saved), list(placed), saved, returned, self.same)

    def _roots(self) -> Iterator[_Node]:
        """Own ops from the first that reads a gradient on, but for what copies read (4)."""
        tangents = {i.value for i in self.backward.inputs if i.kind == "tangent"}
        late = set(tangents)
        reached = False
        read_again = {value for place in self.copies for value in self.backward.ops[place].inputs}
        for node in self.own:
            if isinstance(node.what, GraphInput):
                continue
            is_late = not late.isdisjoint(node.reads)
            if is_late:
                late |= set(node.makes)
            reached |= not tangents.isdisjoint(node.reads)
            if (reached and (is_late or read_again.isdisjoint(node.makes))) or node.mutates:
                yield node

    def _place(
        self, roots: Sequence[_Node], placed: dict[_Node, None], wanted: set[ValueId]
    ) -> None:
        """Place ``roots`` with all that they need and is not there; note what must be saved."""
        found: dict[_Node, None] = {}
        left = [*roots]
        tangents = {i.value for i in self.backward.inputs if i.kind == "tangent"}
        while left:
            node = left.pop()
            if node in found or node in placed:
                continue
            found[node] = None
            for value in node.reads:
                maker = self.makers.get(value)
                if maker is not None:
                    left.append(maker)
                elif value not in tangents:
                    wanted.add(value)
        for node in sorted(found, key=lambda node: node.turn):
            placed[node] = None

    def _in_order(self, wanted: set[ValueId]) -> list[ValueId]:
        """Saved values, in the order of the forward; the base's last ones that are not in it are
        those that autograd does not watch, and stay last (5)."""
        order: dict[ValueId, int] = {}
        for item in self.region.forward.inputs:
            order.setdefault(item.value, len(order))
        for op in self.region.forward.ops:
            for value in op.outputs:
                order.setdefault(value, len(order))
        before = [item.value for item in self.region.saved]
        unwatched: set[ValueId] = set()
        for place, (one, other) in enumerate(pairwise(before)):
            if order[one] > order[other]:
                unwatched = set(before[place + 1 :])
                break
        return sorted(wanted, key=lambda value: (value in unwatched, order[value]))

    def _forward(self, saved: Sequence[ValueId]) -> list[_Node]:
        """What of the forward is left (definition 5)."""
        returned = [
            output.value
            for output in self.region.forward.outputs
            if output.kind != "saved" and output.value is not None
        ]
        needed: set[ValueId] = {*returned, *saved}
        kept = []
        for node in reversed(self.forward_nodes):
            if node.mutates or not needed.isdisjoint(node.makes) or _has_effects(node):
                needed |= {*node.reads}
                kept.append(node)
        return kept[::-1]


def _has_effects(node: _Node) -> bool:
    if not isinstance(node.what, Op):
        return False
    namespace, _, rest = node.what.target.partition(".")
    return namespace not in _PURE or rest.startswith(_RANDOM)


# --- as a trace numbers them ----------------------------------------------------------------------


@dataclass
class _Writer:
    """Numbers values and storages as a trace does (definition 3)."""

    base: GraphFacts
    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    # Of storages of the base, those of inputs and of forwards, over all regions.
    known: dict[StorageId, StorageId] = field(default_factory=dict)

    def add(self, graphs: _Graphs) -> None:
        region = graphs.region
        given = [item for item in region.forward.inputs if item.kind != "constant"]
        for item in given:
            storage = self.base.values[item.value].storage
            if storage is not None:
                self._storage(storage)
        forward: dict[ValueId, ValueId] = {}
        for item in given:
            forward[item.value] = self._value(item.value, self.known)
        ops = self._nodes(graphs.forward, forward)
        outputs = self._outputs(graphs, forward)
        constants = self._constants(graphs.forward, forward)
        inputs = [msgspec.structs.replace(i, value=forward[i.value]) for i in given]
        made = Graph((*inputs, *constants), ops, outputs)
        backward: Graph | None = None
        saved: tuple[SavedValue, ...] = ()
        if region.backward is not None and graphs.backward is not None:
            backward, saved = self._backward(graphs, region.backward, forward)
        self.regions.append(Region(made, backward, saved))

    def _backward(
        self, graphs: _Graphs, base: Graph, forward: dict[ValueId, ValueId]
    ) -> tuple[Graph, tuple[SavedValue, ...]]:
        env: dict[ValueId, ValueId] = {}
        inputs = []
        # Sizes come first here, and last among what the forward returns.
        numbered = sorted(
            enumerate(graphs.saved), key=lambda pair: self.base.values[pair[1]].kind == "tensor"
        )
        number_of = {value: n for n, value in enumerate(self._saved_in_order(graphs.saved))}
        for _, value in numbered:
            env[value] = self._value(value, self.known)
            inputs.append(GraphInput(env[value], "saved", f"saved {number_of[value]}"))
        for item in base.inputs:
            if item.kind == "tangent":
                storage = self.base.values[item.value].storage
                if storage is not None:
                    self._storage(storage)
                env[item.value] = self._value(item.value, self.known)
                inputs.append(msgspec.structs.replace(item, value=env[item.value]))
        assert graphs.backward is not None
        ops = self._nodes(graphs.backward, env, is_backward=True)
        outputs = tuple(
            msgspec.structs.replace(output, value=None if value is None else env[value])
            for output, value in zip(base.outputs, graphs.returned, strict=True)
        )
        constants = self._constants(graphs.backward, env)
        saved = tuple(
            SavedValue(forward[value], env[value]) for value in self._saved_in_order(graphs.saved)
        )
        return Graph((*inputs, *constants), ops, outputs), saved

    def _saved_in_order(self, saved: Sequence[ValueId]) -> list[ValueId]:
        return sorted(saved, key=lambda value: self.base.values[value].kind != "tensor")

    def _nodes(
        self, nodes: Sequence[_Node], env: dict[ValueId, ValueId], *, is_backward: bool = False
    ) -> tuple[Op, ...]:
        ops = []
        for node in nodes:
            own = {} if is_backward else self.known
            if isinstance(node.what, GraphInput):
                env[node.what.value] = self._value(node.what.value, own, fresh=is_backward)
                continue
            ops.append(self._op(node, node.what, env, own, is_backward))
        return tuple(ops)

    def _op(
        self,
        node: _Node,
        op: Op,
        env: dict[ValueId, ValueId],
        own: dict[StorageId, StorageId],
        is_backward: bool,
    ) -> Op:
        shared = dict(own)
        if is_backward:
            for before, value in zip(op.inputs, node.reads, strict=True):
                there, here = self.base.values[before].storage, self.values[env[value]].storage
                if there is not None and here is not None:
                    shared[there] = here
        outputs = []
        for value in node.makes:
            env[value] = self._value(value, shared, fresh=is_backward)
            outputs.append(env[value])
            storage = self.base.values[value].storage
            if storage is not None:
                made = self.values[env[value]].storage
                assert made is not None
                shared[storage] = made
                if not is_backward:
                    self.known[storage] = made
        return msgspec.structs.replace(
            op,
            inputs=tuple(env[value] for value in node.reads),
            outputs=tuple(outputs),
            mutates=tuple(env[value] for value in node.mutates),
        )

    def _value(
        self, value: ValueId, known: dict[StorageId, StorageId], *, fresh: bool = False
    ) -> ValueId:
        found = self.base.values[value]
        if found.storage is not None:
            if found.storage not in known and fresh:
                placed = self._new(self.base.storages[found.storage])
            else:
                placed = known[found.storage] if fresh else self._storage(found.storage)
            found = msgspec.structs.replace(found, storage=placed)
        self.values.append(found)
        return ValueId(len(self.values) - 1)

    def _storage(self, storage: StorageId) -> StorageId:
        if storage not in self.known:
            self.known[storage] = self._new(self.base.storages[storage])
        return self.known[storage]

    def _new(self, storage: Storage) -> StorageId:
        self.storages.append(storage)
        return StorageId(len(self.storages) - 1)

    def _constants(self, nodes: Sequence[_Node], env: dict[ValueId, ValueId]) -> list[GraphInput]:
        return [
            msgspec.structs.replace(node.what, value=env[node.what.value])
            for node in nodes
            if isinstance(node.what, GraphInput)
        ]

    def _outputs(self, graphs: _Graphs, env: dict[ValueId, ValueId]) -> tuple[GraphOutput, ...]:
        returned = [
            msgspec.structs.replace(o, value=None if o.value is None else env[o.value])
            for o in graphs.region.forward.outputs
            if o.kind != "saved"
        ]
        saved = [
            GraphOutput(env[value], "saved", f"saved {number}")
            for number, value in enumerate(self._saved_in_order(graphs.saved))
        ]
        return (*returned, *saved)
