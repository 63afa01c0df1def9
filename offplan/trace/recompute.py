"""Partition a joint graph again, so that its backward computes again what was chosen.

1.  The *base* is what a partitioner made of the joint graph; a choice (``offplan.recompute``) names
    ops of its forward.  A node of the joint graph is the forward's if the base has it there, and
    the backward's *own* if the base has it in the backward only.
2.  Under a choice the backward has its own nodes, and of the forward's those that were chosen and
    that it needs; what these read of the forward's other values is saved, and nothing else.
3.  Torch's min-cut partitioner makes both graphs of that, whatever made the base; only what is
    saved is told to it instead of searched for.  Tags alone would not do: it takes no orders about
    views.
4.  Own ops that depend on a gradient, or write, stay in the order of the base.  Everything else
    comes just before the first of them that needs it: first what is the forward's, in its order,
    then the other own nodes in theirs.  (Torch would have a large constant live while what it is
    written to is computed again.)
5.  A random op is computed again only where the base does so, which then saves the state of the
    generator and uses it again.  There it always is, if it is needed.

Ops that write, collectives and random ops are refused, whoever chose them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from offplan.errors import PlanError, TraceError
from offplan.trace._torch import (
    MUST_RECOMPUTE,
    OpOverload,
    is_collective,
    partition_saving,
    tree_leaves,
)
from offplan.trace.facts import LocalGraph, RegionTemplate

_WRAPPERS = ("run_and_save_rng_state", "graphsafe_run_with_rng_state")
# What else torch goes by when it decides which random ops to wrap.
_TAGS = ("recompute", "ac_graph_id", "has_backward_hook")
_FIX = "plan without recomputation: --actions keep,offload"

Choose = Callable[[RegionTemplate], Collection[int] | None]
"""From the base to the positions of the chosen ops in its forward; None leaves it as it is."""


def chosen_ops(base: RegionTemplate) -> frozenset[int]:
    """The forward ops that the base's backward computes again."""
    if base.backward is None:
        return frozenset()
    again = {(op.name, op.target) for op in base.backward.ops}
    return frozenset(
        place for place, op in enumerate(base.forward.ops) if (op.name, op.target) in again
    )


def twins_differ(one: int, other: int) -> PlanError:
    """The refusal of choices that differ for two regions that are runs of one graph."""
    return PlanError(
        f"regions {one} and {other} are runs of one graph, but not the same is to be computed "
        "again in both",
        fix="choose the same ops for every run of a layer",
    )


def partition_again(
    joint: fx.GraphModule,
    joint_inputs: Any,
    base: RegionTemplate,
    ops: Collection[int],
    *,
    num_fwd_outputs: int,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The pair whose backward computes ``ops`` again, and of the forward's nothing else.

    ``joint`` is as partitioning it left it, which made ``base``, and stays so.  ``options`` are
    what else AOTAutograd gave the partitioner.  Raises ``PlanError`` for an op that must not run
    again.
    """
    places = _places(joint, base)
    again = frozenset(ops) | places.wrapped
    for node in _refused(joint, places, frozenset(ops) - chosen_ops(base)):
        raise PlanError(
            f"{node.name} ({node.target}) must not run again in the backward",
            fix=_FIX,
        )
    split = _Split(joint, places, again, num_fwd_outputs)
    with _tagged(joint, split.random):
        forward, backward = partition_saving(
            joint, joint_inputs, split.received, num_fwd_outputs=num_fwd_outputs, **options
        )
    _check_random(forward, backward)
    _Order(split, base, backward).restore()
    backward.recompile()
    return forward, backward


def _check_random(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """No numbers are drawn again that the forward has drawn."""
    drawn = {node.name for node in forward.graph.nodes if is_random(node) and _draws(node)}
    for node in backward.graph.nodes:
        if node.op == "call_function" and node.name in drawn:
            raise TraceError(
                f"torch would draw the random numbers of {node.name} ({node.target}) again",
                fix=_FIX,
            )


# --- the nodes of the joint graph -----------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """For each node of the forward (definition 1) what orders it: the position of its op, then
    which element of it.  A constant stands between the ops around it.

    ``wrapped`` are the positions of random ops that the base computes again.
    """

    of: Mapping[fx.Node, tuple[float, ...]]
    wrapped: frozenset[int]


def _places(joint: fx.GraphModule, base: RegionTemplate) -> _Places:
    assert base.backward is not None
    named = {op.name: place for place, op in enumerate(base.forward.ops)}
    own = {op.name for op in base.backward.ops}
    wrappers = [
        (place, op)
        for place, op in enumerate(base.forward.ops)
        if op.target.rpartition(".")[2] in _WRAPPERS
    ]
    left = iter(wrappers)
    of: dict[fx.Node, tuple[float, ...]] = {}
    last = -1
    for node in joint.graph.nodes:
        if node.op == "get_attr":
            of[node] = (last + 0.5,)
        if node.op != "call_function":
            continue
        if _is_getitem(node):
            if node.args[0] in of:
                of[node] = (*of[node.args[0]], node.args[1])
            continue
        place = named.get(node.name)
        if place is None and is_random(node) and node.name not in own:
            place = _wrapper_of(node, left)
        if place is not None:
            last = place
            of[node] = (place,)
    _drop_own_constants(of)
    return _Places(of, frozenset(place for place, _ in wrappers))


def _wrapper_of(node: fx.Node, left: Iterator[tuple[int, Any]]) -> int | None:
    """The position of what the base has in place of a random op: they stand in the same order."""
    place, op = next(left, (None, None))
    if op is not None and not op.constants.startswith(str(node.target.__name__)):  # type: ignore[union-attr]
        raise TraceError(
            f"{node.name} ({node.target}) is not found again in the forward, where its random "
            "numbers are to be drawn once",
            fix=_FIX,
        )
    return place


def _drop_own_constants(of: dict[fx.Node, tuple[float, ...]]) -> None:
    """Leave out constants that no op of the forward reads, unless it reads the same by another."""
    constants = [node for node in of if node.op == "get_attr"]
    read = {node.target for node in constants if any(user in of for user in node.users)}
    for node in constants:
        if node.target not in read:
            del of[node]


def _is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def is_random(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _refused(joint: fx.GraphModule, places: _Places, added: Collection[int]) -> Iterator[fx.Node]:
    """Nodes of ``added`` ops, which the base does not compute again, that must not be."""
    for node in joint.graph.nodes:
        place = places.of.get(node)
        if place is not None and place[0] in added and node.op == "call_function":
            if _is_getitem(node):
                continue
            target = node.target
            is_op = isinstance(target, OpOverload) and not target._schema.is_mutable
            if not is_op or is_collective(target) or (is_random(node) and _draws(node)):
                yield node


def _draws(node: fx.Node) -> bool:
    """Whether a random op is one as it is called: attention without dropout draws nothing."""
    arguments = {a.name: place for place, a in enumerate(node.target._schema.arguments)}  # type: ignore[union-attr]
    place = arguments.get("dropout_p")
    if place is None:
        return True
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return given != 0.0


@contextmanager
def _tagged(joint: fx.GraphModule, random: Collection[fx.Node]) -> Iterator[None]:
    """``joint`` with ``random`` tagged to be computed again, and nothing else tagged."""
    before = {
        node: {tag: node.meta[tag] for tag in _TAGS if tag in node.meta}
        for node in joint.graph.nodes
    }
    try:
        for node in joint.graph.nodes:
            for tag in _TAGS:
                node.meta.pop(tag, None)
        for node in random:
            node.meta["recompute"] = MUST_RECOMPUTE
        yield
    finally:
        for node, tags in before.items():
            for tag in _TAGS:
                node.meta.pop(tag, None)
            node.meta.update(tags)


# --- what is saved --------------------------------------------------------------------------------


class _Split:
    """Which nodes the backward computes, and which it receives (definition 2)."""

    def __init__(
        self, joint: fx.GraphModule, places: _Places, again: frozenset[int], output_count: int
    ) -> None:
        self.joint = joint
        self.places = places
        self.again = again
        self.order = {node: number for number, node in enumerate(joint.graph.nodes)}
        self.computed, received = self._reached(self._roots(output_count))
        self.received = sorted(received, key=self._saved_order)
        # Random ops that run again, in the order in which torch wraps them.
        self.random = [
            node
            for node in joint.graph.nodes
            if node in self.computed and is_random(node) and self._is_wrapped(node)
        ]

    def is_again(self, node: fx.Node) -> bool:
        """Whether ``node`` is the forward's, and runs in the backward if that needs it."""
        place = self.places.of.get(node)
        return place is not None and (node.op == "get_attr" or place[0] in self.again)

    def _is_wrapped(self, node: fx.Node) -> bool:
        place = self.places.of.get(node)
        return place is not None and place[0] in self.places.wrapped

    def _roots(self, output_count: int) -> Iterator[fx.Node]:
        (output,) = self.joint.graph.find_nodes(op="output")
        returned = tree_leaves(output.args)[output_count:]
        yield from (node for node in returned if isinstance(node, fx.Node))
        yield from filter(_writes_in_backward, self.joint.graph.nodes)

    def _reached(self, roots: Iterable[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
        """What the backward computes for ``roots``, and what of the forward it reads."""
        computed: set[fx.Node] = set()
        received: set[fx.Node] = set()
        left = list(roots)
        while left:
            node = left.pop()
            if node in computed or node in received:
                continue
            if node.op == "placeholder":
                if not _is_given_to_backward(node):
                    received.add(node)
            elif node in self.places.of and not self.is_again(node):
                received.add(node)
            else:
                computed.add(node)
                left += node.all_input_nodes
        return computed, received

    def _saved_order(self, node: fx.Node) -> tuple[float, ...]:
        return self.places.of.get(node, (-1.0, self.order[node]))


def _is_given_to_backward(node: fx.Node) -> bool:
    """As the partitioners tell placeholders apart."""
    name = str(node.target)
    return "tangents" in name or name.startswith(("bwd_seed", "bwd_base_offset"))


def _writes_in_backward(node: fx.Node) -> bool:
    tag, target = node.meta.get("partitioner_tag"), node.target
    writes = isinstance(target, OpOverload) and target._schema.is_mutable
    return tag == "must_be_in_backward" or (tag == "is_backward" and writes)


# --- the order of the backward --------------------------------------------------------------------


class _Order:
    """The order of a backward (definition 4)."""

    def __init__(self, split: _Split, base: RegionTemplate, backward: fx.GraphModule) -> None:
        assert base.backward is not None
        self.graph = backward.graph
        self.number = {node: number for number, node in enumerate(self.graph.nodes)}
        self.turns = {**self._own_turns(base.backward), **self._forward_turns(split)}
        self.placed: dict[fx.Node, None] = {}

    def restore(self) -> None:
        (output,) = self.graph.find_nodes(op="output")
        for node in sorted(self._roots(), key=self._turn):
            self._place(node)
        self._place(output)
        for node in self.placed:
            output.prepend(node)

    def _own_turns(self, base: LocalGraph) -> dict[fx.Node, tuple[float, ...]]:
        """Of ops that the base's backward has, and of constants, which stand between ops there."""
        places = {op.name: place for place, op in enumerate(base.ops)}
        firsts = [op.outputs[0] for op in base.ops]
        constants: dict[str, list[float]] = {}
        for item in base.constants:
            before = sum(first < item.value for first in firsts)
            constants.setdefault(item.name, []).append(before - 0.5)
        found: dict[fx.Node, tuple[float, ...]] = {}
        for node in self.graph.nodes:
            if node.op == "get_attr" and constants.get(str(node.target)):
                found[node] = (math.inf, constants[str(node.target)].pop(0))
            elif node.op == "call_function" and node.name in places:
                found[node] = (math.inf, places[node.name])
        return found

    def _forward_turns(self, split: _Split) -> dict[fx.Node, tuple[float, ...]]:
        """Of what is the forward's, by its name; of wrapped random ops, which have another, by the
        states that they are given."""
        by_name = {node.name: place for node, place in split.places.of.items()}
        known = {node.name for node in split.joint.graph.nodes}
        found = {node: by_name[node.name] for node in self.graph.nodes if node.name in by_name}
        states = [n for n in self.graph.find_nodes(op="placeholder") if n.name not in known]
        for state, node in zip(states, split.random, strict=True):
            (wrapper,) = state.users
            found[wrapper] = split.places.of[node]
        return found

    def _roots(self) -> Iterator[fx.Node]:
        late = set(filter(_is_given_to_backward, self.graph.find_nodes(op="placeholder")))
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            if not late.isdisjoint(node.all_input_nodes):
                late.add(node)
            elif not _writes_in_backward(node):
                continue
            if not _is_getitem(node):
                yield node

    def _place(self, root: fx.Node) -> None:
        """Place ``root`` after all that it needs and that is not there."""
        found: set[fx.Node] = set()
        left = list(root.all_input_nodes)
        while left:
            node = left.pop()
            if node.op != "placeholder" and node not in found and node not in self.placed:
                found.add(node)
                left += node.all_input_nodes
        found = {node for node in found if not _is_getitem(node)}
        for node in sorted(found, key=self._turn):
            self._put(node)
        if root.op != "output" and root not in self.placed:
            self._put(root)

    def _turn(self, node: fx.Node) -> tuple[float, ...]:
        if node not in self.turns:
            raise TraceError(
                f"torch has {node.name} ({node.target}) in the backward, where it was not", fix=_FIX
            )
        return (*self.turns[node], self.number[node])

    def _put(self, node: fx.Node) -> None:
        """Place ``node``, and the elements taken of it just behind it."""
        self.placed[node] = None
        for user in sorted(filter(_is_getitem, node.users), key=self.number.__getitem__):
            self._put(user)
