"""Backwards that read a tensor after their forward wrote to it, and mean what was in it before.

A step that computes with a buffer and then writes to it is right in eager mode, which saves what
was computed.  Compiled, the write comes last in the forward, and torch's min-cut partitioner may
save the buffer itself, for the backward to compute the rest again: from what is in it by then, so
that gradients are wrong.  Torch says nothing of it (2.11 and 2.14.1).

1.  A forward *overwrites* a tensor that it is given if ops of it write there, and no others read it
    from then on.  AOTAutograd puts all writes last: every other op of the forward, and of the
    backward, means what was in the tensor before.
2.  A value of the backward is *stale* if it is saved on the storage of such a tensor, or is a view
    of one that is, or is one into which new elements were put.
3.  An op that reads a stale value reads *wrongly*, unless

    a.  it takes nothing but its shape;
    b.  what it reads lies wholly before or behind each part of the tensor that is written;
    c.  it puts new elements into it, which makes another stale value, or else what the forward
        wrote: to put the same ones there again, or to limit what is within the limits, changes
        nothing.

Not handled: what is written as it was, and columns, which lie between each other (3b), are told as
wrong.  Not looked for: writes in a later region, where autograd itself refuses the backward, and
what Inductor writes in place of its own accord.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from offplan.graph import Graph, GraphFacts, GraphInput, Op, Region, StorageId, Value, ValueId

# Of their first argument these take the shape (3a).
_SHAPE_ONLY = {"copy", "fill", "zero", "new_empty", "new_full", "new_ones", "new_zeros"}
_SHAPE_ONLY |= {f"{name}_like" for name in ("empty", "full", "ones", "zeros", "rand", "randn")}
# These put elements into their first argument; ``where`` into one of its last two (3c).
_PUT = {f"{name}_scatter" for name in ("as_strided", "diagonal", "select", "slice")}
_PUT |= {"index_copy", "index_fill", "index_put", "masked_fill", "where"}
# What is within the limits stays as it is (3c).
_LIMIT = {"abs", "clamp", "clamp_max", "clamp_min", "relu"}


@dataclass(frozen=True)
class WrongRead:
    """``op`` reads the tensor ``given`` wrongly; ``source`` is the user's line of it, if any."""

    given: GraphInput
    op: str
    source: str


def warnings_of(facts: GraphFacts) -> Iterator[str]:
    """A sentence for each op and line that reads overwritten tensors wrongly."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for region in facts.regions:
        for wrong in wrong_reads(facts, region):
            names = found.setdefault((wrong.op, wrong.source), {})
            names[f"{wrong.given.kind} {wrong.given.name}"] = None
    for (op, source), names in found.items():
        first, *others = names
        also = f" and {len(others)} others" if others else ""
        line = f" ({source})" if source else ""
        yield (
            f"torch compiles this step to wrong gradients: in the backward, {op}{line} reads "
            f"{first}{also} after the forward wrote there, and means what was there before; write "
            "to it after the backward, or assign a new tensor in its place"
        )


def wrong_reads(facts: GraphFacts, region: Region) -> Iterator[WrongRead]:
    """For each tensor, the first op of the backward of ``region`` that reads it wrongly."""
    if region.backward is None:
        return
    reader = _Reader(facts, region)
    told: set[ValueId] = set()
    for op in region.backward.ops:
        for value in reader.wrong(op):
            given = reader.stale[value].given
            if given.value not in told:
                told.add(given.value)
                yield WrongRead(given, op.target, reader.line_of(op, given))


@dataclass(frozen=True)
class _Write:
    """What a forward writes to what it is given.

    ``made`` is the storage that is copied there, and ``parts`` the elements that are written, as
    they lie in the storage, each part from its first to its last; None where that is not known.
    """

    given: GraphInput
    made: StorageId | None = None
    parts: Sequence[range] | None = None


class _Reader:
    """The ops of a backward, asked in order.  ``stale`` are the stale values so far."""

    def __init__(self, facts: GraphFacts, region: Region) -> None:
        self.values, self.forward = facts.values, region.forward
        self.twins = {(op.name, op.target): op for op in region.forward.ops}
        # What a write returns has the new elements.
        new = {value for op in region.forward.ops if op.mutates for value in op.outputs}
        old = [saved for saved in region.saved if saved.value not in new]
        kept = {self.values[saved.value].storage for saved in old}
        writes = {
            storage: self._write(storage, ops)
            for storage, ops in _overwritten(self.values, self.forward).items()
            if storage in kept
        }
        self.stale: dict[ValueId, _Write] = {
            saved.backward_value: writes[self.values[saved.value].storage]
            for saved in old
            if self.values[saved.value].storage in writes
        }
        # Those of them into which elements were put, with views of these.
        self.put: set[ValueId] = set()

    def wrong(self, op: Op) -> Collection[ValueId]:
        """The stale values that ``op`` reads wrongly (definition 3)."""
        read = [value for value in op.inputs if value in self.stale]
        if not read or self._views(op, read):
            return ()
        name = _name(op)
        if name in _SHAPE_ONLY:
            read = [value for value in read if value != op.inputs[0]]
        read = [value for value in read if not self._is_apart(value)]
        if not read:
            return ()
        base = read[0] if name == "where" else op.inputs[0]
        if base not in read or any(v != base and v not in self.put for v in read):
            return read
        # Where index_put adds up, it makes something else every time.
        puts = name in _PUT and not (name == "index_put" and "True" in op.constants)
        if (puts or name in _LIMIT) and self._makes_what_was_written(op, self.stale[base]):
            return ()
        if not puts:
            return read
        self.stale.update((value, self.stale[base]) for value in op.outputs)
        self.put.update(op.outputs)
        return ()

    def line_of(self, op: Op, given: GraphInput) -> str:
        """The user's line of ``op``: its own, its twin's, or that of the first reader of it."""
        twin = self.twins.get((op.name, op.target), op)
        readers = (each for each in self.forward.ops if given.value in each.inputs)
        return next((each.source for each in (op, twin, *readers) if each.source), "")

    def _write(self, storage: StorageId | None, ops: Sequence[Op]) -> _Write:
        given = next(i for i in self.forward.inputs if self.values[i.value].storage == storage)
        if len(ops) > 1 or _name(ops[0]) != "copy_" or len(ops[0].inputs) < 2:
            return _Write(given)
        source = ops[0].inputs[1]
        parts = _parts(self.values, self.forward, self.values[given.value], source)
        return _Write(given, self.values[source].storage, parts)

    def _views(self, op: Op, read: Sequence[ValueId]) -> bool:
        """Whether ``op`` only makes views of what it reads, which are stale then."""
        origins = {self.values[value].storage: value for value in read}
        found = {value: origins.get(self.values[value].storage) for value in op.outputs}
        for value, origin in found.items():
            if origin is not None:
                self.stale[value] = self.stale[origin]
                self.put.update({value} if origin in self.put else ())
        return bool(found) and None not in found.values()

    def _is_apart(self, value: ValueId) -> bool:
        parts, window = self.stale[value].parts, self.values[value]
        if parts is None or value in self.put or window.symbolic:
            return False
        own = _elements(window)
        return all(own.stop <= part.start or part.stop <= own.start for part in parts)

    def _makes_what_was_written(self, op: Op, write: _Write) -> bool:
        twin = self.twins.get((op.name, op.target))
        made = () if twin is None else twin.outputs
        return write.made is not None and write.made in {self.values[v].storage for v in made}


def _overwritten(values: Sequence[Value], forward: Graph) -> dict[StorageId | None, list[Op]]:
    """The ops that write to each storage that ``forward`` overwrites (definition 1)."""
    given = {values[item.value].storage for item in forward.inputs} - {None}
    written: dict[StorageId | None, list[Op]] = {}
    for op in forward.ops:
        targets = {values[value].storage for value in op.mutates}
        for storage in {values[value].storage for value in op.inputs} - targets:
            if written.pop(storage, None):
                given.remove(storage)
        for storage in targets & given:
            written.setdefault(storage, []).append(op)
    return written


def _parts(
    values: Sequence[Value], forward: Graph, into: Value, source: ValueId
) -> Sequence[range] | None:
    """Where ``source`` differs from ``into``, if it is made by putting parts into that."""
    makers = {value: op for op in forward.ops for value in op.outputs}
    parts = []
    while values[source].storage != into.storage:
        op = makers.get(source)
        part = None if op is None else _part(op, into)
        if op is None or part is None or values[op.inputs[0]].shape != into.shape:
            return None
        parts.append(part)
        source = op.inputs[0]
    return parts


def _part(op: Op, into: Value) -> range | None:
    """Which elements of the storage ``op`` puts into ``into``; None if it does not say."""
    name = _name(op)
    if name not in ("select_scatter", "slice_scatter") or not into.shape:
        return None
    numbers = [_number(text) for text in op.constants.split(", ") if text != "%"]
    if None in numbers:
        return None
    dim, *bounds = numbers or [0]
    assert dim is not None
    size = into.shape[dim]
    chosen = range(size)[slice(*bounds[:2])] if bounds else range(size)
    if name == "select_scatter":
        (at,) = bounds
        chosen = range(size)[at:][:1]
    shape = list(into.shape)
    shape[dim] = len(chosen)
    offset = into.offset + chosen.start * into.stride[dim]
    return _elements(Value("tensor", shape=tuple(shape), stride=into.stride, offset=offset))


def _number(text: str) -> int | None:
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return found if isinstance(found, int) else None


def _elements(window: Value) -> range:
    """From the first element of its storage that it has, to the last."""
    if window.element_count == 0:
        return range(0)
    last = sum((n - 1) * s for n, s in zip(window.shape, window.stride, strict=True))
    return range(window.offset, window.offset + last + 1)


def _name(op: Op) -> str:
    """``mul`` of ``aten.mul.Tensor``; nothing of what is not torch's own."""
    namespace, _, rest = op.target.partition(".")
    return rest.partition(".")[0] if namespace == "aten" else ""
