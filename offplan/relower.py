"""What a compiler would make of graphs under other choices, guessed from what it made of before.

1.  What stays in a graph is in the kernels that it is in now; what goes leaves them.  A kernel that
    makes nothing that is used goes too.
2.  Ops that run again are one kernel for each kernel of the forward that they come from, which
    makes what of it is used.  It stands before the first kernel that uses it.
3.  Where it is one that the compiler writes, and all that use it are too, it becomes part of those.

So the guess has at least the kernels of the real thing, which fuses further: a plan is only made
from it, and predicted from what the compiler says when it is asked again (``offplan.trace``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from offplan.graph import (
    Buffer,
    Graph,
    GraphFacts,
    Kernel,
    Lowering,
    Region,
    StorageId,
    ValueId,
)
from offplan.recompute import Choice, Origin, applied, copies


def relowered(facts: GraphFacts, choices: Iterable[Choice]) -> GraphFacts:
    """``facts`` under ``choices``, lowered as guessed where ``facts`` are lowered."""
    made = applied(facts, choices)
    if made.origins is None:
        return facts
    regions = [
        _Region(facts, before, made.facts, after, origin).region()
        for before, after, origin in zip(
            facts.regions, made.facts.regions, made.origins, strict=True
        )
    ]
    return msgspec.structs.replace(made.facts, regions=tuple(regions))


@dataclass
class _Kernels:
    """A lowering that is being put together."""

    buffers: list[Buffer]
    kernels: list[Kernel]
    outputs: list[int | None] = field(default_factory=list)

    def lowering(self) -> Lowering:
        return Lowering(tuple(self.buffers), tuple(self.kernels), tuple(self.outputs))


class _Region:
    def __init__(
        self, facts: GraphFacts, before: Region, made: GraphFacts, after: Region, origin: Origin
    ) -> None:
        self.facts, self.before = facts, before
        self.made, self.after, self.origin = made, after, origin
        self.new_storage = [value.storage for value in made.values]
        self.old_storage = [value.storage for value in facts.values]

    def region(self) -> Region:
        forward, backward = self.after.forward, self.after.backward
        if self.before.forward.lowering is not None:
            lowering = self._forward(self.before.forward.lowering)
            forward = _lowered(forward, lowering)
        if backward is not None and self.before.backward is not None:
            found = self.before.backward.lowering
            if found is not None:
                backward = _lowered(backward, self._backward(found))
        return msgspec.structs.replace(self.after, forward=forward, backward=backward)

    # --- the forward ------------------------------------------------------------------------------

    def _forward(self, base: Lowering) -> Lowering:
        values = self.origin.forward_values
        buffers = [_moved(buffer, values) for buffer in base.buffers]
        found = _Kernels(buffers, [_placed(kernel, self.origin.forward) for kernel in base.kernels])
        number_of = _numbers(buffers, self.new_storage)
        returned = sum(output.kind != "saved" for output in self.before.forward.outputs)
        found.outputs = [*base.outputs[:returned]]
        for output in self.after.forward.outputs[returned:]:
            assert output.value is not None
            found.outputs.append(self._saved_buffer(found, number_of, output.value))
        found.kernels = _needed(found.kernels, found.outputs)
        return found.lowering()

    def _saved_buffer(
        self, found: _Kernels, number_of: dict[StorageId | None, int], value: ValueId
    ) -> int | None:
        """The buffer of a saved value: a new one of the kernel it is in, if there is none."""
        storage = self.new_storage[value]
        if storage is None:
            return None
        if storage not in number_of:
            number_of[storage] = len(found.buffers)
            found.buffers.append(Buffer(self.made.storages[storage].size_bytes, value))
            place = next(
                p for p, op in enumerate(self.after.forward.ops)
                if any(self.new_storage[v] == storage for v in op.outputs)
            )  # fmt: skip
            owner = next((n for n, k in enumerate(found.kernels) if place in k.ops), None)
            if owner is not None:
                kernel = found.kernels[owner]
                makes = (*kernel.makes, number_of[storage])
                found.kernels[owner] = msgspec.structs.replace(kernel, makes=makes)
        return number_of[storage]

    # --- the backward -----------------------------------------------------------------------------

    def _backward(self, base: Lowering) -> Lowering:
        origin = self.origin
        values = self._values_now()
        traced = copies(self.before)
        places = {**origin.own}
        places |= {p: origin.again[f] for p, f in traced.items() if f in origin.again}
        found = _Kernels(
            [_moved(buffer, values) for buffer in base.buffers],
            [_placed(kernel, places) for kernel in base.kernels],
            [*base.outputs],
        )
        self._merge(found)
        self._drop(found, base)
        self._read_saved(found, base)
        self._add(found)
        found.kernels = _needed(found.kernels, found.outputs)
        self._order(found)
        return found.lowering()

    def _values_now(self) -> dict[ValueId, ValueId]:
        """Of the backward's values before, those of now: another on the same storage, if only that
        is there."""
        now = self.origin.backward_values
        on: dict[StorageId | None, ValueId] = {}
        for known, value in now.items():
            on.setdefault(self.old_storage[known], value)
        found = {}
        for before in self._backward_ids():
            known = self.origin.same.get(before, before)
            here = now.get(known, on.get(self.old_storage[known]))
            if here is not None and self.old_storage[known] is not None:
                found[before] = here
        return found

    def _backward_ids(self) -> Iterable[ValueId]:
        assert self.before.backward is not None
        for item in self.before.backward.inputs:
            yield item.value
        for op in self.before.backward.ops:
            yield from op.outputs

    def _merge(self, found: _Kernels) -> None:
        """One buffer for what was saved as several values, and is one storage now."""
        first = _numbers(found.buffers, self.new_storage)
        made = {number for kernel in found.kernels for number in kernel.makes}
        same = {
            number: first[storage]
            for number, buffer in enumerate(found.buffers)
            if buffer.value is not None
            and number not in made
            and (storage := self.new_storage[buffer.value]) in first
            and first[storage] != number
        }
        found.kernels = [_renamed(kernel, same) for kernel in found.kernels]
        found.outputs = [None if n is None else same.get(n, n) for n in found.outputs]

    def _drop(self, found: _Kernels, base: Lowering) -> None:
        """Kernels all of whose ops went, and what others made and is saved now."""
        assert self.before.backward is not None
        was_given = {self.old_storage[item.value] for item in self.before.backward.inputs}

        def is_saved_now(number: int) -> bool:
            before, value = base.buffers[number].value, found.buffers[number].value
            return (
                before is not None
                and value is not None
                and self.old_storage[before] not in was_given
                and self.new_storage[value] in self.given
            )

        found.kernels = [
            msgspec.structs.replace(
                kernel, makes=tuple(n for n in kernel.makes if not is_saved_now(n))
            )
            for kernel in found.kernels
            if kernel.ops
        ]

    def _read_saved(self, found: _Kernels, base: Lowering) -> None:
        """Kernels that computed what is saved now read that, and not what they computed it from."""
        assert self.after.backward is not None
        ops = self.after.backward.ops
        gone = {
            number
            for number, buffer in enumerate(base.buffers)
            if buffer.value is not None and found.buffers[number].value is None
        }
        number_of = _numbers(found.buffers, self.new_storage)
        for place, kernel in enumerate(found.kernels):
            reads = dict.fromkeys(number for number in kernel.reads if number not in gone)
            for value in (value for op in kernel.ops for value in ops[op].inputs):
                storage = self.new_storage[value]
                if storage is None or storage not in self.given:
                    continue
                if storage not in number_of:
                    number_of[storage] = len(found.buffers)
                    found.buffers.append(Buffer(0, value))
                if len(reads) < len(kernel.reads) or number_of[storage] >= len(base.buffers):
                    reads[number_of[storage]] = None
            found.kernels[place] = msgspec.structs.replace(kernel, reads=tuple(reads))

    @cached_property
    def given(self) -> set[StorageId | None]:
        """Storages of what the backward is given."""
        assert self.after.backward is not None
        return {self.new_storage[item.value] for item in self.after.backward.inputs}

    def _add(self, found: _Kernels) -> None:
        """Kernels for what is read and is not there (definition 2), until all is."""
        groups = self._groups()
        while True:
            made = {number for kernel in found.kernels for number in kernel.makes}
            wanted = dict.fromkeys(n for n in found.outputs if n is not None)
            for kernel in reversed(found.kernels):
                wanted |= dict.fromkeys((*kernel.reads, *kernel.writes))
            missing = next(
                (
                    number
                    for number in wanted
                    if number not in made
                    and (value := found.buffers[number].value) is not None
                    and self.new_storage[value] not in self.given
                    and self.new_storage[value] in groups
                ),
                None,
            )
            if missing is None:
                return
            value = found.buffers[missing].value
            assert value is not None
            self._insert(found, made, *groups[self.new_storage[value]])

    def _groups(self) -> dict[StorageId | None, tuple[list[int], str]]:
        """Where each storage of the backward is made: the ops that one kernel of the forward makes
        together, and what that calls; or its own op."""
        assert self.after.backward is not None
        source = self.before.forward.lowering
        made_in: dict[StorageId | None, int] = {}
        for number, kernel in enumerate(source.kernels if source else ()):
            for buffer in kernel.makes:
                assert source is not None
                value = source.buffers[buffer].value
                if value is not None:
                    made_in[self.old_storage[value]] = number
        together: dict[int, list[int]] = {}
        found: dict[StorageId | None, tuple[list[int], str]] = {}
        for before, place in sorted(self.origin.again.items()):
            for value in self.before.forward.ops[before].outputs:
                maker = made_in.get(self.old_storage[value])
                if maker is not None and source is not None:
                    places = together.setdefault(maker, [])
                    places += [] if place in places else [place]
                    made = self.new_storage[self.origin.backward_values[value]]
                    found[made] = (places, source.kernels[maker].call)
        for place, op in enumerate(self.after.backward.ops):
            read = {self.new_storage[value] for value in op.inputs}
            for value in op.outputs:
                storage = self.new_storage[value]
                if storage is not None and storage not in read:
                    found.setdefault(storage, ([place], ""))
        return found

    def _insert(self, found: _Kernels, made: set[int], places: Sequence[int], call: str) -> None:
        """A kernel for ``places``, which makes what of it is read and is not there."""
        assert self.after.backward is not None
        ops = self.after.backward.ops
        number_of = _numbers(found.buffers, self.new_storage)
        read = {number for kernel in found.kernels for number in (*kernel.reads, *kernel.writes)}
        read |= {number for number in found.outputs if number is not None}
        makes: dict[int, None] = {}
        for place in places:
            inputs = {self.new_storage[value] for value in ops[place].inputs}
            for value in ops[place].outputs:
                storage = self.new_storage[value]
                number = None if storage is None else number_of.get(storage)
                if number is None or storage in inputs or number not in read - made:
                    continue
                size_bytes = self.made.storages[storage].size_bytes  # type: ignore[index]
                found.buffers[number] = Buffer(size_bytes, value)
                makes[number] = None
        parts, reads = self._parts(places, set(makes), found, number_of)
        kernel = Kernel(max(places), tuple(sorted(parts)), tuple(reads), tuple(makes), call=call)
        users = [n for n, k in enumerate(found.kernels) if not makes.keys().isdisjoint(k.reads)]
        is_inside = not call and users and not any(found.kernels[n].call for n in users)
        if is_inside and makes.keys().isdisjoint(found.outputs):
            for user in users:
                found.kernels[user] = _within(found.kernels[user], kernel)
            return
        found.kernels.insert(min(users, default=len(found.kernels)), kernel)

    def _order(self, found: _Kernels) -> None:
        """Each kernel after those that make what it uses.

        Some may wait for each other: one that makes two things did so while it could read what one
        is computed to, which is now computed again of the other.  The other gets its own kernel.
        """
        while True:
            order, waiting = _ordered(found.kernels)
            if not waiting:
                found.kernels = [found.kernels[place] for place in order]
                return
            for place, number in waiting:
                kernel = found.kernels[place]
                if len(kernel.makes) > 1 and not kernel.call:
                    found.kernels[place : place + 1] = self._apart(found, kernel, number)
                    break
            else:
                # Reads, or writes, that are guessed too widely.
                _, number = waiting[0]
                found.kernels = [_not_using(kernel, number) for kernel in found.kernels]

    def _apart(self, found: _Kernels, kernel: Kernel, number: int) -> tuple[Kernel, Kernel]:
        """What makes the buffer ``number``, and what of ``kernel`` makes all else and reads it."""
        left = tuple(each for each in kernel.makes if each != number)
        reading = msgspec.structs.replace(kernel, reads=(*kernel.reads, number))
        alone = msgspec.structs.replace(kernel, writes=())
        return self._only(found, alone, (number,)), self._only(found, reading, left)

    def _only(self, found: _Kernels, kernel: Kernel, makes: tuple[int, ...]) -> Kernel:
        """``kernel`` with the ops that ``makes`` need, back to what it reads, and the reads."""
        assert self.after.backward is not None
        ops = self.after.backward.ops

        def on(numbers: Iterable[int]) -> set[StorageId | None]:
            values = [found.buffers[number].value for number in numbers]
            return {self.new_storage[value] for value in values if value is not None}

        given, wanted = on(kernel.reads), on((*makes, *kernel.writes))
        parts: list[int] = []
        for place in reversed(kernel.ops):
            makes_here = {self.new_storage[value] for value in ops[place].outputs}
            if not makes_here.isdisjoint(wanted - given):
                parts.append(place)
                wanted |= {self.new_storage[value] for value in ops[place].inputs}
        reads = tuple(n for n in kernel.reads if on([n]) <= wanted)
        placed = tuple(sorted(parts)) or kernel.ops
        return msgspec.structs.replace(kernel, at=placed[-1], ops=placed, reads=reads, makes=makes)

    def _parts(
        self,
        places: Sequence[int],
        makes: set[int],
        found: _Kernels,
        number_of: dict[StorageId | None, int],
    ) -> tuple[set[int], list[int]]:
        """The ops that a kernel has, back to what is in memory, and the buffers of that."""
        assert self.after.backward is not None
        ops = self.after.backward.ops
        makers = {value: place for place, op in enumerate(ops) for value in op.outputs}
        forward_exists = self._in_memory()
        parts: set[int] = set()
        reads: dict[int, None] = {}
        left = [*places]
        while left:
            place = left.pop()
            if place in parts:
                continue
            parts.add(place)
            for value in ops[place].inputs:
                storage = self.new_storage[value]
                if storage is None or number_of.get(storage) in makes:
                    continue
                maker = makers.get(value)
                if maker is None or storage in forward_exists:
                    if storage not in number_of:
                        number_of[storage] = len(found.buffers)
                        found.buffers.append(Buffer(0, value))
                    reads[number_of[storage]] = None
                else:
                    left.append(maker)
        return parts, list(reads)

    def _in_memory(self) -> set[StorageId | None]:
        """What is computed again of what is in memory in the forward."""
        source = self.before.forward.lowering
        made = {n for kernel in source.kernels for n in kernel.makes} if source else set()
        values = [source.buffers[n].value for n in made] if source else []
        old = {self.old_storage[value] for value in values if value is not None}
        env = self.origin.backward_values
        return {
            self.new_storage[env[value]]
            for op in self.before.forward.ops
            for value in op.outputs
            if self.old_storage[value] in old and value in env
        }


def _lowered(graph: Graph, lowering: Lowering) -> Graph:
    return msgspec.structs.replace(graph, lowering=lowering, lowering_alone=lowering)


def _moved(buffer: Buffer, values: dict[ValueId, ValueId]) -> Buffer:
    value = None if buffer.value is None else values.get(buffer.value)
    return msgspec.structs.replace(buffer, value=value)


def _placed(kernel: Kernel, places: dict[int, int]) -> Kernel:
    """``kernel`` with the new places of its ops; without any if all of them went."""
    ops = tuple(sorted(places[op] for op in kernel.ops if op in places))
    last = ops[-1] if ops else 0
    early = None if kernel.early is None else places.get(kernel.early)
    return msgspec.structs.replace(kernel, at=places.get(kernel.at, last), ops=ops, early=early)


def _renamed(kernel: Kernel, same: dict[int, int]) -> Kernel:
    if not same:
        return kernel
    reads = tuple(dict.fromkeys(same.get(number, number) for number in kernel.reads))
    writes = tuple(dict.fromkeys(same.get(number, number) for number in kernel.writes))
    return msgspec.structs.replace(kernel, reads=reads, writes=writes)


def _within(user: Kernel, kernel: Kernel) -> Kernel:
    """``user``, which computes what ``kernel`` made by itself (definition 3)."""
    reads = dict.fromkeys(number for number in user.reads if number not in kernel.makes)
    reads |= dict.fromkeys(number for number in kernel.reads if number not in user.makes)
    return msgspec.structs.replace(
        user, ops=tuple(sorted({*user.ops, *kernel.ops})), reads=tuple(reads)
    )


def _numbers(
    buffers: Sequence[Buffer], storage_of: Sequence[StorageId | None]
) -> dict[StorageId | None, int]:
    """The first buffer on each storage."""
    found: dict[StorageId | None, int] = {}
    for number, buffer in enumerate(buffers):
        if buffer.value is not None and storage_of[buffer.value] is not None:
            found.setdefault(storage_of[buffer.value], number)
    return found


def _needed(kernels: Sequence[Kernel], outputs: Sequence[int | None]) -> list[Kernel]:
    """Those of ``kernels`` that make or write what is used, and only what of it is used."""
    used = {number for number in outputs if number is not None}
    kept = []
    for kernel in reversed(kernels):
        makes = tuple(number for number in kernel.makes if number in used)
        if makes or not used.isdisjoint(kernel.writes):
            used |= {*kernel.reads, *kernel.writes}
            kept.append(msgspec.structs.replace(kernel, makes=makes))
    return kept[::-1]


def _not_using(kernel: Kernel, number: int) -> Kernel:
    """``kernel`` without the buffer ``number`` among those that it reads or writes to."""
    reads, writes = (
        tuple(each for each in numbers if each != number)
        for numbers in (kernel.reads, kernel.writes)
    )
    return msgspec.structs.replace(kernel, reads=reads, writes=writes)


def _ordered(kernels: Sequence[Kernel]) -> tuple[list[int], list[tuple[int, int]]]:
    """The places of ``kernels`` in their order, but each after those that make what it uses; and
    of kernels that wait for each other, if any do, the places, each with the buffer that it makes
    and another of them waits for."""
    makers = {number: place for place, kernel in enumerate(kernels) for number in kernel.makes}
    placed: dict[int, None] = {}
    for first in range(len(kernels)):
        waits: dict[int, int] = {first: -1}
        while waits:
            place = next(reversed(waits))
            kernel = kernels[place]
            need = next(
                (
                    number
                    for number in (*kernel.reads, *kernel.writes)
                    if makers.get(number, place) != place and makers[number] not in placed
                ),
                None,
            )
            if need is None or place in placed:
                placed[place] = None
                waits.popitem()
            elif makers[need] in waits:
                cycle = [*waits][[*waits].index(makers[need]) :]
                return [*placed], [(cycle[0], need), *((each, waits[each]) for each in cycle[1:])]
            else:
                waits[makers[need]] = need
    return [*placed], []
