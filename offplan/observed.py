"""Saved storages that carry less than their bytes, or what is there already.

Of each storage that an op of the forward allocates and that is saved, the first of these that holds
is an *observation*, with the bytes that saving it otherwise would free:

1.  ``parameters``: all saved of it is computed from parameters, buffers and constants alone, so
    that it is the same at each step until these change.  All bytes.
2.  ``twice``: another saved storage holds what the same op made of the same inputs.  All bytes.
3.  ``copied``: it is a cast or a copy of what another saved storage, or an input, holds.  All
    bytes: one cheap op makes it again.
4.  ``mask``: it is made of truth values, or of two values by a random mask: a bit would do for each
    element.
5.  ``expanded``: a copy of a value that was expanded or repeated.  All bytes but one of each.
6.  ``padded``: made by padding.  The padding.
7.  ``widened``: a cast of a narrower float.  What the cast added.

Only ops that may run again count (``offplan.recompute``): what is random, written to, or made by an
op that is not torch's own is never called the same as another.  Where a storage is saved as parts
only, bytes are still those of the whole.

Pure.  Takes time in proportion to ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from offplan.eligibility import RegionIndex, distinct_saved
from offplan.graph import Op, StorageId, Value, ValueId
from offplan.recompute import Refusals

Kind = Literal["parameters", "twice", "copied", "mask", "expanded", "padded", "widened"]

# Ops that change nothing but dtype, layout or place in memory.
_COPIES = ("aten._to_copy.", "aten.clone.", "aten.copy.", "prims.convert_element_type.")
# Ops that make no more than two values of two.
_TWO_TO_TWO = (*_COPIES, "aten.mul.Scalar", "aten.div.Scalar", "aten.mul.Tensor", "aten.div.Tensor")
_NAMED_PARAMETERS = 3


class Observation(msgspec.Struct, frozen=True):
    """What was observed of ``storage``, saved by ``region``, as a clause that its name starts.

    ``freed_bytes`` of its ``size_bytes`` would not be saved.  ``others`` name what it was compared
    with: the op that made that, or the parameter or input that it is.
    """

    region: int
    storage: StorageId
    kind: Kind
    said: str
    size_bytes: int
    freed_bytes: int
    others: tuple[str, ...] = ()


def observations(region: RegionIndex) -> tuple[Observation, ...]:
    """What is observed of the saved storages of ``region``, in the order in which they are saved,
    those of zero bytes and those of the host left out."""
    return tuple(_Reader(region).read())


@dataclass(frozen=True)
class _Source:
    """The op that allocated a storage, and its first output there."""

    op: Op
    value: ValueId


@dataclass
class _Traced:
    """What is known of values: the parameters they are computed from alone, if so; a key that is
    equal where the same is computed of the same; and whether they have two values at most."""

    roots: dict[ValueId, frozenset[str]] = field(default_factory=dict)
    keys: dict[ValueId, object] = field(default_factory=dict)
    two_valued: set[ValueId] = field(default_factory=set)


class _Reader:
    def __init__(self, region: RegionIndex) -> None:
        self.region = region
        self.saved: dict[StorageId, list[ValueId]] = {}
        for value in distinct_saved(region.region):
            storage = region.value(value).storage
            if storage is not None:
                self.saved.setdefault(storage, []).append(value)
        self.sources: dict[StorageId, _Source] = {}
        self.traced = _traced(region)
        for op in region.region.forward.ops:
            for output in op.outputs:
                storage = region.value(output).storage
                if storage is not None and region.origins.get(storage) is op:
                    self.sources.setdefault(storage, _Source(op, output))

    def read(self) -> Iterator[Observation]:
        first: dict[object, StorageId] = {}
        for storage in self.saved:
            source = self.sources.get(storage)
            known = self.region.facts.storages[storage]
            on_host = known.device == "cpu" and self.region.facts.device != "cpu"
            if source is None or not known.size_bytes or on_host:
                continue
            found = self._observed(storage, source, first)
            first.setdefault(self.traced.keys[source.value], storage)
            if found is not None and found.freed_bytes > 0:
                yield found

    def _observed(
        self, storage: StorageId, source: _Source, first: Mapping[object, StorageId]
    ) -> Observation | None:
        found = self._from_parameters(storage) or self._twice(storage, source, first)
        if found is not None:
            return found
        tests = (self._copied, self._mask, self._expanded, self._padded, self._widened)
        return next((made for test in tests if (made := test(storage, source)) is not None), None)

    def _made(
        self, storage: StorageId, kind: Kind, said: str, freed_bytes: int, *others: str
    ) -> Observation:
        size_bytes = self.region.facts.storages[storage].size_bytes
        freed_bytes = max(0, min(freed_bytes, size_bytes))
        return Observation(self.region.number, storage, kind, said, size_bytes, freed_bytes, others)

    def _size(self, storage: StorageId) -> int:
        return self.region.facts.storages[storage].size_bytes

    # --- what is there already --------------------------------------------------------------------

    def _from_parameters(self, storage: StorageId) -> Observation | None:
        roots = [self.traced.roots.get(value) for value in self.saved[storage]]
        if any(root is None for root in roots):
            return None
        names = sorted({name for root in roots if root is not None for name in root})
        shown = ", ".join(names[:_NAMED_PARAMETERS])
        if len(names) > _NAMED_PARAMETERS:
            shown += f" and {len(names) - _NAMED_PARAMETERS} more"
        said = (
            f"is computed from {shown} alone, so it is the same until that changes: it can be made "
            "once, or again in the backward without any activation"
            if names
            else "is computed from constants alone: it can be made once, or again in the backward"
        )
        return self._made(storage, "parameters", said, self._size(storage), *names)

    def _twice(
        self, storage: StorageId, source: _Source, first: Mapping[object, StorageId]
    ) -> Observation | None:
        other = first.get(self.traced.keys[source.value])
        if other is None:
            return None
        name = self._name(other)
        said = f"holds the same as {name}, which is saved too: {source.op.target} of the same"
        return self._made(storage, "twice", said, self._size(storage), name)

    def _copied(self, storage: StorageId, source: _Source) -> Observation | None:
        copied = self._copied_value(source)
        read = None if copied is None else self.region.value(copied).storage
        if copied is None or read is None or not (read in self.saved or read not in self.sources):
            return None
        if not self._holds_all(read, copied):
            return None
        name = self._name(read)
        before, after = self.region.value(copied), self.region.value(source.value)
        what = f"a {after.dtype} cast" if before.dtype != after.dtype else "a copy"
        where = "which is saved too" if read in self.sources else "which is there anyway"
        said = f"is {what} of {name}, {where}: one cheap op makes it again"
        return self._made(storage, "copied", said, self._size(storage), name)

    def _copied_value(self, source: _Source) -> ValueId | None:
        """What ``source`` copies element for element; None if it is no copy, or no pure one."""
        tensors = [v for v in source.op.inputs if self.region.value(v).kind == "tensor"]
        is_copy = source.op.target.startswith(_COPIES) and len(tensors) == 1
        return tensors[0] if is_copy and tensors[0] in self.traced.keys else None

    def _holds_all(self, storage: StorageId, copied: ValueId) -> bool:
        """Whether what is saved on ``storage`` reaches all that ``copied`` reads of it."""
        window = _window(self.region.value(copied))
        if storage not in self.sources:
            return True
        spans = [_window(self.region.value(value)) for value in self.saved[storage]]
        return any(start <= window[0] and window[1] <= stop for start, stop in spans)

    # --- what carries less than its bytes ---------------------------------------------------------

    def _mask(self, storage: StorageId, source: _Source) -> Observation | None:
        if source.value not in self.traced.two_valued:
            return None
        value = self.region.value(source.value)
        freed_bytes = self._size(storage) - -(-value.element_count // 8)
        if value.dtype == "bool":
            said = "is a mask that takes a byte for each bit"
        else:
            said = f"is a mask in {value.dtype}: two values, {8 * value.item_bytes} bits for each"
        return self._made(storage, "mask", said, freed_bytes)

    def _expanded(self, storage: StorageId, source: _Source) -> Observation | None:
        made = self.region.value(source.value)
        tensors = [
            self.region.value(v) for v in source.op.inputs if self.region.value(v).kind == "tensor"
        ]
        if len(tensors) != 1:
            return None
        if source.op.target.startswith("aten.repeat."):
            distinct = tensors[0].element_count
        elif source.op.target.startswith(_COPIES):
            distinct = _distinct(tensors[0])
        else:
            return None
        if not 0 < distinct < made.element_count:
            return None
        times = f"{made.element_count / distinct:,.4g}"
        said = f"is a copy of an expanded value: each element is there {times} times"
        return self._made(
            storage, "expanded", said, self._size(storage) - distinct * made.item_bytes
        )

    def _padded(self, storage: StorageId, source: _Source) -> Observation | None:
        if not source.op.target.startswith(("aten.constant_pad_nd.", "aten.pad.")):
            return None
        before, after = self.region.value(source.op.inputs[0]), self.region.value(source.value)
        freed_bytes = after.logical_bytes - before.element_count * after.item_bytes
        said = f"is {_shape(before)} padded to {_shape(after)}"
        return self._made(storage, "padded", said, freed_bytes)

    def _widened(self, storage: StorageId, source: _Source) -> Observation | None:
        copied = self._copied_value(source)
        if copied is None:
            return None
        before, after = self.region.value(copied), self.region.value(source.value)
        if not (before.is_float and before.item_bytes < after.item_bytes):
            return None
        freed_bytes = after.element_count * (after.item_bytes - before.item_bytes)
        said = f"is a {before.dtype} value that was cast to {after.dtype}"
        return self._made(storage, "widened", said, freed_bytes)

    def _name(self, storage: StorageId) -> str:
        origin = self.region.origins.get(storage)
        return f"storage {storage}" if origin is None else origin.name


# --- a walk over the forward ----------------------------------------------------------------------


def _traced(region: RegionIndex) -> _Traced:
    found = _Traced()
    for item in region.region.forward.inputs:
        found.keys[item.value] = item.value
        if item.kind in ("parameter", "buffer", "constant"):
            found.roots[item.value] = frozenset((item.name,) * (item.kind != "constant"))
    refusals = Refusals(region.facts, region.number)
    numbers: dict[object, int] = {}
    for place, op in enumerate(region.region.forward.ops):
        # Key by number: the keys of a deep graph would hold each other.
        is_pure = refusals(place) is None
        read = tuple(found.keys.get(value) for value in op.inputs)
        for position, output in enumerate(op.outputs):
            alike: object = (op.target, op.constants, read, position, region.value(output).shape)
            if not is_pure:
                alike = ("once", place, position)
            found.keys[output] = ("op", numbers.setdefault(alike, len(numbers)))
            if is_pure and all(value in found.roots for value in op.inputs):
                found.roots[output] = frozenset().union(*(found.roots[v] for v in op.inputs))
            if _is_two_valued(region, op, output, found.two_valued):
                found.two_valued.add(output)
    return found


def _is_two_valued(region: RegionIndex, op: Op, output: ValueId, two_valued: set[ValueId]) -> bool:
    value = region.value(output)
    if value.kind != "tensor":
        return False
    if value.dtype == "bool" or op.target.startswith("aten.bernoulli"):
        return True
    tensors = [v for v in op.inputs if region.value(v).kind == "tensor"]
    if len(tensors) != 1 or tensors[0] not in two_valued or op.mutates:
        return False
    is_view = value.storage == region.value(tensors[0]).storage
    return is_view or op.target.startswith(_TWO_TO_TWO)


def _distinct(value: Value) -> int:
    """Elements of ``value`` that are not there by expansion."""
    count = 1
    for size, stride in zip(value.shape, value.stride, strict=True):
        count *= 1 if stride == 0 and size else size
    return count


def _window(value: Value) -> tuple[int, int]:
    """The bytes between the first and the last that ``value`` reaches."""
    start = value.offset * value.item_bytes
    if not value.element_count:
        return start, start
    reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))
    return start, start + (reach + 1) * value.item_bytes


def _shape(value: Value) -> str:
    return f"[{', '.join(map(str, value.shape))}]"
