"""What the backward computes again instead of receiving it, and the graphs that this makes.

1.  A *choice* is a set of ops of one region's forward, by position, that run again in its backward.
    What they and the rest of the backward read of the forward's other values is saved, and nothing
    else: a choice decides the saved values, and with them both graphs.
2.  ``chosen`` is the choice that a traced pair already makes: an op of the backward that has the
    name and target of one in the forward is that op again.  The backward's *own* ops are the
    others, those that AOTAutograd has no need of in the forward among them.
3.  ``apply`` gives the facts of a trace that is partitioned under other choices, with the numbers
    that such a trace gives its values and storages, so that digests are equal.
4.  Own ops that depend on a gradient, or write, keep their order.  Everything else comes just
    before the first of them that needs it, with all that it needs itself: what runs again in the
    order of the forward, then other own ops in theirs.
5.  The forward keeps what its outputs and the saved values need, and ops with effects.  Saved
    values stand in the order of the forward, graph inputs first.
6.  ``refusal`` says why an op must not run again: what it computes would not be the same, or what
    it does would happen twice.
7.  A random op that the user has run again is *wrapped*: it draws the same numbers in the backward,
    from the state of the generator.  On the CPU the forward returns the state, which is saved; on
    the GPU both graphs are given one.  Whatever the choice, it runs again if the backward needs it;
    if not, it is in the forward without the state, as any other.

What the ops are lowered to is not known for other graphs than those that were traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

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
from offplan.workspaces import joined_arguments, split_arguments


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forward ops of ``region``, by position in its forward, that run again in its backward."""

    region: int
    ops: tuple[int, ...]


def chosen(facts: GraphFacts) -> tuple[Choice, ...]:
    """The choice of each region of ``facts`` (definition 2)."""
    return tuple(
        Choice(number, tuple(sorted(copies(region).values())))
        for number, region in enumerate(facts.regions)
    )


def apply(facts: GraphFacts, choices: Iterable[Choice]) -> GraphFacts:
    """``facts`` as traced under ``choices``; regions that none names stay (definition 3).

    Raises ``PlanError`` for a choice that names what is not there, or must not run again.
    """
    return applied(facts, choices).facts


class Origin(NamedTuple):
    """Where the graphs of a region come from, in terms of the base.

    ``forward`` and ``again`` have the new places of the base's forward ops in the new forward and
    in the new backward, ``own`` those of the backward's own ops; ``forward_values`` and
    ``backward_values`` the new values of the base's, which in the backward are the forward's
    where both graphs have them (``same``).
    """

    forward: dict[int, int]
    again: dict[int, int]
    own: dict[int, int]
    forward_values: dict[ValueId, ValueId]
    backward_values: dict[ValueId, ValueId]
    same: dict[ValueId, ValueId]


class Applied(NamedTuple):
    """Facts under choices, with the origin of each region; None where nothing changed at all."""

    facts: GraphFacts
    origins: tuple[Origin, ...] | None


def applied(facts: GraphFacts, choices: Iterable[Choice]) -> Applied:
    """The same as ``apply``, with where it all comes from."""
    wanted = {choice.region: frozenset(choice.ops) for choice in choices}
    before = {choice.region: frozenset(choice.ops) for choice in chosen(facts)}
    for number, ops in wanted.items():
        _check(facts, number, ops - before.get(number, frozenset()))
    if all(wanted.get(number, ops) == ops for number, ops in before.items()):
        return Applied(facts, None)
    writer = _Writer(facts)
    for number, region in enumerate(facts.regions):
        ops = wanted.get(number, before[number])
        writer.add(_kept(region) if ops == before[number] else _Repartition(region, ops).graphs())
    made = msgspec.structs.replace(
        facts,
        storages=tuple(writer.storages),
        values=tuple(writer.values),
        regions=tuple(writer.regions),
    )
    return Applied(made, tuple(writer.origins))


def _check(facts: GraphFacts, number: int, added: frozenset[int]) -> None:
    if not 0 <= number < len(facts.regions):
        raise PlanError(f"a choice names region {number}, of {len(facts.regions)}")
    if added and facts.regions[number].backward is None:
        raise PlanError(f"a choice names region {number}, which has no backward")
    ops = facts.regions[number].forward.ops
    refusals = Refusals(facts, number)
    for place in sorted(added):
        if not 0 <= place < len(ops):
            raise PlanError(f"a choice names op {place} of region {number}, which has {len(ops)}")
        why = refusals(place)
        if why is not None:
            raise PlanError(f"{ops[place].name} ({ops[place].target}) must not run again: {why}")


# --- what may run again ---------------------------------------------------------------------------

# Namespaces of ops that compute their outputs from their inputs, and do nothing else.
_PURE = ("aten", "prims")
# Packets that draw numbers, or whose name says so; recurrent ones have dropout between layers.
_RANDOM = (
    "rand", "bernoulli", "native_dropout", "dropout", "multinomial", "normal", "uniform",
    "exponential", "geometric", "cauchy", "log_normal", "poisson", "binomial", "rrelu_with_noise",
    "philox", "inductor_seed", "_fused_dropout", "_standard_gamma", "alpha_dropout",
    "_flash_attention_forward_no_dropout", "_cudnn_rnn", "miopen_rnn", "lstm", "gru", "rnn_tanh",
    "rnn_relu", "_lstm_mps", "_cudnn_init_dropout_state", "_fill_mem_eff_dropout_mask",
    "_nested_tensor_softmax_with_shape", "_sample_dirichlet", "feature_alpha_dropout",
    "feature_dropout", "rrelu",
)  # fmt: skip
# Where attention has its dropout, as a position among the arguments.
_DROPOUT_AT = {
    "_scaled_dot_product_flash_attention": 3,
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_efficient_attention": 5,
    "_scaled_dot_product_cudnn_attention": 5,
    "_scaled_dot_product_fused_attention_overrideable": 4,
    "_scaled_dot_product_attention_math": 4,
    "_scaled_dot_product_attention_math_for_mps": 4,
    "scaled_dot_product_attention": 4,
    "_fused_sdp_choice": 4,
    "_triton_scaled_dot_attention": 3,
    "_cudnn_attention_forward": 9,
    "_flash_attention_forward": 7,
    "_efficient_attention_forward": 8,
}


def refusal(facts: GraphFacts, region: int, place: int) -> str | None:
    """Why op ``place`` of the forward of ``region`` must not run again; None if it may."""
    return Refusals(facts, region)(place)


class Refusals:
    """Why ops of the forward of ``region`` must not run again (definition 6)."""

    def __init__(self, facts: GraphFacts, region: int) -> None:
        self.values = facts.values
        self.graph = facts.regions[region].forward
        self.written = {
            facts.values[value].storage
            for graph in (self.graph, facts.regions[region].backward)
            for op in (graph.ops if graph is not None else ())
            for value in op.mutates
        } - {None}
        # Which input a changed value is of is not recorded: each of its shape and dtype counts.
        self.changed = {
            (facts.values[output.value].dtype, facts.values[output.value].shape)
            for output in self.graph.outputs
            if output.kind == "mutated" and output.value is not None
        }
        self.given = {
            facts.values[item.value].storage
            for item in self.graph.inputs
            if item.kind != "parameter"
        } - {None}

    def __call__(self, place: int) -> str | None:
        op = self.graph.ops[place]
        namespace, _, rest = op.target.partition(".")
        if namespace in ("_c10d_functional", "c10d"):
            return "it is a collective, which all processes take part in"
        if namespace not in _PURE:
            return "it is not one of torch's own ops, and may have effects"
        if op.mutates:
            return "it writes to its input"
        if _draws(op, rest.partition(".")[0]):
            return "it draws random numbers"
        if not any(self.values[value].kind == "tensor" for value in op.outputs):
            return "it does not compute a tensor"
        read = [self.values[value] for value in op.inputs]
        if any(value.storage in self.written for value in read):
            return "what it reads is written to"
        if any(self.values[value].storage in self.written for value in op.outputs):
            return "what it makes is written to"
        if any(v.storage in self.given and (v.dtype, v.shape) in self.changed for v in read):
            return "it reads a buffer or input that the step changes"
        return None


def _draws(op: Op, packet: str) -> bool:
    if packet in _DROPOUT_AT:
        return _dropout(op, _DROPOUT_AT[packet]) != 0.0
    return packet.startswith(_RANDOM)


def _dropout(op: Op, place: int) -> float | None:
    """The probability of an attention op's dropout; None if it is not a number."""
    given = dict(enumerate(split_arguments(op.constants)))
    named = next((text for text in given.values() if text.startswith("dropout_p=")), None)
    text = named.partition("=")[2] if named else given.get(place, "0.0")
    if "=" in text:
        text = "0.0"
    try:
        return float(text)
    except ValueError:
        return None


# --- both graphs of a region ----------------------------------------------------------------------


def copies(region: Region) -> dict[int, int]:
    """Positions of backward ops that are forward ops again, with the forward's (definition 2)."""
    if region.backward is None:
        return {}
    forward = {(op.name, op.target): place for place, op in enumerate(region.forward.ops)}
    found = {}
    for place, op in enumerate(region.backward.ops):
        if (op.name, op.target) in forward:
            found[place] = forward[op.name, op.target]
    return found


class Wrapped(NamedTuple):
    """A random op that runs again with a state (definition 7), at ``twin`` in the backward.

    ``state`` is the forward's value of it, and ``given`` what the backward's op reads in its place:
    the same one if it is saved.
    """

    place: int
    twin: int
    state: ValueId
    given: ValueId

    def again(self, region: Region) -> Op:
        """What the op of the backward has to be, in terms of the forward's values."""
        assert region.backward is not None
        op, twin = region.forward.ops[self.place], region.backward.ops[self.twin]
        reads = tuple(self.given if value == self.state else value for value in op.inputs)
        constants = op.constants
        if self.state in op.outputs:
            reads, constants = (self.given, *reads), f"%, {constants}"
        makes = tuple(value for value in op.outputs if value != self.state)
        return msgspec.structs.replace(twin, inputs=reads, outputs=makes, constants=constants)

    def once(self, region: Region) -> Op:
        """The op of the forward where it does not run again."""
        op = region.forward.ops[self.place]
        overload, *constants = split_arguments(op.constants)
        return msgspec.structs.replace(
            op,
            name=_unwrapped_name(region.forward, self.place),
            target=f"aten.{overload}",
            constants=joined_arguments(text for text in constants if text != "rng_state=%"),
            inputs=tuple(value for value in op.inputs if value != self.state),
            outputs=tuple(value for value in op.outputs if value != self.state),
        )


_SAVES_STATE = "higher_order.run_and_save_rng_state"
_TAKES_SAVED_STATE = "higher_order.run_with_rng_state"
_TAKES_GIVEN_STATE = "higher_order.graphsafe_run_with_rng_state"


def wrapped(region: Region) -> list[Wrapped]:
    """The wrapped ops of ``region``, in the order of its forward."""
    if region.backward is None:
        return []
    saved = {item.backward_value: item.value for item in region.saved}
    again = {op: place for place, op in copies(region).items()}
    twins = {
        saved.get(op.inputs[0]): place
        for place, op in enumerate(region.backward.ops)
        if op.target == _TAKES_SAVED_STATE
    }
    found = []
    for place, op in enumerate(region.forward.ops):
        if op.target == _TAKES_GIVEN_STATE and place in again:
            # The state is the last that they read.
            given = region.backward.ops[again[place]].inputs[-1]
            found.append(Wrapped(place, again[place], op.inputs[-1], given))
        elif op.target == _SAVES_STATE and op.outputs[0] in twins:
            state = op.outputs[0]
            found.append(Wrapped(place, twins[state], state, state))
    return found


def _unwrapped_name(graph: Graph, place: int) -> str:
    """As torch names the op that is wrapped at ``place``: by its number among those of its kind."""

    def kind(op: Op) -> str:
        is_wrapped = op.target in (_SAVES_STATE, _TAKES_GIVEN_STATE)
        text = op.constants if is_wrapped else op.target.partition(".")[2]
        return text.partition(".")[0]

    name = kind(graph.ops[place])
    number = sum(kind(op) == name for op in graph.ops[:place])
    return f"{name}_{number}" if number else name


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
    # Forward ops whose op in the backward is another, which its place in the base stands for.
    twins: dict[int, int] = field(default_factory=dict)


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
        self.region = region
        self.wrapped = {item.place: item for item in wrapped(region)}
        self.again = again | self.wrapped.keys()
        self.backward = region.backward
        self.copies = copies(region)
        self.same = {item.backward_value: item.value for item in region.saved}
        for place, original in self.copies.items():
            made = zip(
                self.backward.ops[place].outputs, region.forward.ops[original].outputs, strict=True
            )
            self.same.update(made)
        self.twins: dict[int, _Node] = {}
        for place, item in self.wrapped.items():
            op = item.again(region)
            self.twins[place] = _Node((0, place), op.inputs, op.outputs, op)
            self.same.update(zip(self.backward.ops[item.twin].outputs, op.outputs, strict=True))
        self._match_constants()
        self.forward_nodes = _forward_nodes(region)
        self.own = self._own()
        self.makers = self._makers()
        self.tangents = {item.value for item in self.backward.inputs if item.kind == "tangent"}

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
            if isinstance(node.what, GraphInput):
                found.update((value, node) for value in node.makes)
            elif int(node.turn[1]) in self.again:
                made = self.twins.get(int(node.turn[1]), node)
                found.update((value, made) for value in made.makes)
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
        once = [item for p, item in self.wrapped.items() if self.twins[p] not in placed]
        left = (p for p, node in self.twins.items() if node in placed)
        numbers = {place: number for number, place in enumerate(left)}
        return _Graphs(
            _without_states(self.region, once),
            [_numbered(node, numbers) for node in self._forward(saved, once)],
            [_numbered(node, numbers) for node in placed],
            saved,
            returned,
            self.same,
            {p: item.twin for p, item in self.wrapped.items() if item.twin not in self.copies},
        )

    def _roots(self) -> Iterator[_Node]:
        """Own ops that depend on a gradient, or write, in order (definition 4)."""
        late = {i.value for i in self.backward.inputs if i.kind == "tangent"}
        for node in self.own:
            is_late = not late.isdisjoint(node.reads)
            if is_late:
                late |= set(node.makes)
            if is_late or node.mutates:
                yield node

    def _place(
        self, roots: Sequence[_Node], placed: dict[_Node, None], wanted: set[ValueId]
    ) -> None:
        """Place ``roots`` with all that they need and is not there; note what must be saved."""
        found: dict[_Node, None] = {}
        left = [*roots]
        while left:
            node = left.pop()
            if node in found or node in placed:
                continue
            found[node] = None
            for value in node.reads:
                maker = self.makers.get(value)
                if maker is not None:
                    left.append(maker)
                elif value not in self.tangents:
                    wanted.add(value)
        for node in sorted(found, key=lambda node: node.turn):
            placed[node] = None

    def _in_order(self, wanted: set[ValueId]) -> list[ValueId]:
        """Saved values, in the order of the forward; the base's last ones that are not in it are
        those that autograd does not watch, and stay last (5); behind all are states (7)."""
        order: dict[ValueId, int] = {}
        for item in self.region.forward.inputs:
            order.setdefault(item.value, len(order))
        for op in self.region.forward.ops:
            for value in op.outputs:
                order.setdefault(value, len(order))
        states = {item.state for item in self.wrapped.values()}
        before = [item.value for item in self.region.saved if item.value not in states]
        unwatched: set[ValueId] = set()
        for place, (one, other) in enumerate(pairwise(before)):
            if order[one] > order[other]:
                unwatched = set(before[place + 1 :])
                break
        return sorted(wanted, key=lambda v: (v in states, v in unwatched, order[v]))

    def _forward(self, saved: Sequence[ValueId], once: Sequence[Wrapped]) -> list[_Node]:
        """What of the forward is left (definition 5); ``once`` do not run again."""
        returned = [
            output.value
            for output in self.region.forward.outputs
            if output.kind != "saved" and output.value is not None
        ]
        needed: set[ValueId] = {*returned, *saved}
        kept = []
        alone = {item.place for item in once}
        for node in reversed(self.forward_nodes):
            if node.mutates or not needed.isdisjoint(node.makes) or _has_effects(node):
                if node.turn[1] in alone:
                    op = self.wrapped[int(node.turn[1])].once(self.region)
                    node = _Node(node.turn, op.inputs, op.outputs, op)
                needed |= {*node.reads}
                kept.append(node)
        return kept[::-1]


def _numbered(node: _Node, numbers: dict[int, int]) -> _Node:
    """``node`` as torch names it, if it is one of the wrapped ops of ``numbers``."""
    number = None if node.turn[0] else numbers.get(int(node.turn[1]))
    if number is None or not isinstance(node.what, Op):
        return node
    name = node.what.target.partition(".")[2] + (f"_{number}" if number else "")
    return replace(node, what=msgspec.structs.replace(node.what, name=name))


def _without_states(region: Region, once: Sequence[Wrapped]) -> Region:
    """``region`` whose graphs are not given the states of ``once``; the others' are numbered."""
    assert region.backward is not None
    left_out = {value for item in once for value in (item.state, item.given)}

    def of(graph: Graph, name: str) -> Graph:
        inputs, number = [], 0
        for item in graph.inputs:
            if item.value in left_out:
                continue
            if item.name.startswith(name) and item.kind in ("input", "tangent"):
                item = msgspec.structs.replace(item, name=f"{name}{number}")
                number += 1
            inputs.append(item)
        return msgspec.structs.replace(graph, inputs=tuple(inputs))

    if not once:
        return region
    return msgspec.structs.replace(
        region,
        forward=of(region.forward, "fwd_rng_state_"),
        backward=of(region.backward, "bwd_rng_state_"),
    )


def _has_effects(node: _Node) -> bool:
    if not isinstance(node.what, Op):
        return False
    namespace, _, rest = node.what.target.partition(".")
    return namespace not in _PURE or rest.startswith(_RANDOM)


def _ops(nodes: Iterable[_Node]) -> list[_Node]:
    return [node for node in nodes if isinstance(node.what, Op)]


# --- as a trace numbers them ----------------------------------------------------------------------


@dataclass
class _Writer:
    """Numbers values and storages as a trace does (definition 3)."""

    base: GraphFacts
    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
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
        env: dict[ValueId, ValueId] = {}
        if region.backward is not None and graphs.backward is not None:
            backward, saved = self._backward(graphs, region.backward, forward, env)
        self.regions.append(Region(made, backward, saved))
        places = [_ops(graphs.forward), _ops(graphs.backward or ())]
        again = {int(n.turn[1]): p for p, n in enumerate(places[1]) if not n.turn[0]}
        twins = {twin: again.pop(place) for place, twin in graphs.twins.items() if place in again}
        self.origins.append(
            Origin(
                forward={int(node.turn[1]): place for place, node in enumerate(places[0])},
                again=again,
                own={int(n.turn[1]): p for p, n in enumerate(places[1]) if n.turn[0]} | twins,
                forward_values=forward,
                backward_values=env,
                same=graphs.same,
            )
        )

    def _backward(
        self,
        graphs: _Graphs,
        base: Graph,
        forward: dict[ValueId, ValueId],
        env: dict[ValueId, ValueId],
    ) -> tuple[Graph, tuple[SavedValue, ...]]:
        inputs = []
        # Sizes come first here, and last among what the forward returns.
        numbered = sorted(
            enumerate(graphs.saved), key=lambda pair: self.base.values[pair[1]].kind == "tensor"
        )
        number_of = {value: n for n, value in enumerate(self._saved_in_order(graphs.saved))}
        for _, value in numbered:
            env[value] = self._value(value, self.known)
            # What the backward receives is a tensor like any other.
            self.values[env[value]] = msgspec.structs.replace(
                self.values[env[value]], rng_state=False
            )
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
