"""Builds GraphFacts for tests: by hand, one region at a time, and as hypothesis strategies.

    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (1024, 1024))
    y = region.op("aten.relu.default", [x], (1024, 1024))
    v = region.view(y, (1024 * 1024,))
    region.save(v)
    facts.build()

Every saved value is read by one op of the backward unless ``region.reads`` says otherwise, last
saved first, as a real backward does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from offplan.graph import (
    Graph,
    GraphBreak,
    GraphFacts,
    GraphInput,
    GraphOutput,
    InputKind,
    Op,
    OutputKind,
    Region,
    SavedValue,
    Storage,
    StorageId,
    TargetRef,
    Value,
    ValueId,
)

MiB = 1024**2
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1, "float64": 8}


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])


def count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@dataclass
class RegionBuilder:
    facts: FactsBuilder
    inputs: list[GraphInput] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    outputs: list[GraphOutput] = field(default_factory=list)
    saved: list[ValueId] = field(default_factory=list)
    # Saved positions read by each backward op; None stands for one op per saved value.
    reads: list[tuple[int, ...]] | None = None
    # Saved positions that the backward returns as gradients.
    returned: tuple[int, ...] = ()
    # What each backward op makes, and nobody reads.
    gradient_shape: tuple[int, ...] = (4,)

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "float32",
        kind: InputKind = "input",
        device: str | None = None,
    ) -> ValueId:
        value = self.facts.tensor(shape, dtype, device=device)
        return self.receive(value, name, kind)

    def receive(self, value: ValueId, name: str, kind: InputKind) -> ValueId:
        self.inputs.append(GraphInput(value, kind, name))
        return value

    def op(
        self,
        target: str,
        inputs: Sequence[ValueId],
        shape: Sequence[int],
        dtype: str = "float32",
        *,
        name: str = "",
        module: str = "",
        source: str = "model.py:1",
        device: str | None = None,
        rng_state: bool = False,
        stride: Sequence[int] | None = None,
        mutates: Sequence[ValueId] = (),
    ) -> ValueId:
        """An op that allocates its output."""
        output = self.facts.tensor(shape, dtype, device=device, rng_state=rng_state, stride=stride)
        self.call(target, inputs, output, name, module, source, mutates)
        return output

    def view(
        self,
        base: ValueId,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        offset: int | None = None,
        *,
        dtype: str | None = None,
        target: str = "aten.view.default",
        name: str = "",
        module: str = "",
        source: str = "model.py:2",
        rng_state: bool = False,
        declares_alias: bool = True,
    ) -> ValueId:
        """An op whose output shares its input's storage."""
        seen = self.facts.values[base]
        output = self.facts.value(
            seen.storage,
            shape,
            dtype or seen.dtype,
            stride=stride,
            offset=seen.offset if offset is None else offset,
            rng_state=rng_state,
        )
        self.call(target, [base], output, name, module, source, declares_alias=declares_alias)
        return output

    def call(
        self,
        target: str,
        inputs: Sequence[ValueId],
        output: ValueId,
        name: str = "",
        module: str = "",
        source: str = "",
        mutates: Sequence[ValueId] = (),
        declares_alias: bool = False,
    ) -> None:
        short = target.split(".")[1] if "." in target else target
        self.ops.append(
            Op(
                name=name or f"{short}_{self.facts.next_name()}",
                target=target,
                inputs=tuple(inputs),
                outputs=(output,),
                mutates=tuple(mutates),
                declares_alias=declares_alias,
                module=module,
                source=source,
            )
        )

    def output(self, value: ValueId, name: str = "0", kind: OutputKind = "output") -> None:
        self.outputs.append(GraphOutput(value, kind, name))

    def save(self, *values: ValueId) -> None:
        self.saved.extend(values)


@dataclass
class FactsBuilder:
    """``same_storages`` gives the backward's placeholders the forward's storage ids."""

    device: str = "cuda"
    same_storages: bool = False
    spec: str = "model.py"
    params: dict[str, str] = field(default_factory=dict)
    breaks: tuple[GraphBreak, ...] = ()
    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    regions: list[RegionBuilder] = field(default_factory=list)
    names: int = 0

    def next_name(self) -> int:
        self.names += 1
        return self.names

    def region(self) -> RegionBuilder:
        self.regions.append(RegionBuilder(self))
        return self.regions[-1]

    def add(self, value: Value) -> ValueId:
        self.values.append(value)
        return ValueId(len(self.values) - 1)

    def storage(self, size_bytes: int, device: str | None = None) -> StorageId:
        self.storages.append(Storage(size_bytes, device or self.device))
        return StorageId(len(self.storages) - 1)

    def tensor(
        self,
        shape: Sequence[int],
        dtype: str = "float32",
        *,
        device: str | None = None,
        rng_state: bool = False,
        stride: Sequence[int] | None = None,
    ) -> ValueId:
        """A tensor with a storage of its own."""
        strides = contiguous(shape) if stride is None else tuple(stride)
        reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        elements = reach if count(shape) else 0
        storage = self.storage(elements * ITEM_BYTES[dtype], device)
        return self.value(storage, shape, dtype, stride=strides, rng_state=rng_state)

    def value(
        self,
        storage: StorageId | None,
        shape: Sequence[int],
        dtype: str,
        *,
        stride: Sequence[int] | None = None,
        offset: int = 0,
        rng_state: bool = False,
    ) -> ValueId:
        return self.add(
            Value(
                kind="tensor",
                storage=storage,
                dtype=dtype,
                item_bytes=ITEM_BYTES[dtype],
                shape=tuple(shape),
                stride=contiguous(shape) if stride is None else tuple(stride),
                offset=offset,
                rng_state=rng_state,
            )
        )

    def build(self) -> GraphFacts:
        regions = tuple(self._region(region) for region in self.regions)
        return GraphFacts(
            target=TargetRef(self.spec, dict(self.params)),
            torch="2.14.1",
            device=self.device,
            gpu="H200" if self.device == "cuda" else "",
            attention="auto",
            compiler="aot_eager",
            partitioner="min-cut",
            model=(),
            storages=tuple(self.storages),
            values=tuple(self.values),
            regions=regions,
            breaks=self.breaks,
        )

    def _region(self, region: RegionBuilder) -> Region:
        placeholders = self._placeholders(region)
        outputs = (
            *region.outputs,
            *(GraphOutput(value, "saved", f"saved {i}") for i, value in enumerate(region.saved)),
        )
        return Region(
            forward=Graph(tuple(region.inputs), tuple(region.ops), outputs),
            backward=self._backward(region, placeholders),
            saved=tuple(SavedValue(v, p) for v, p in zip(region.saved, placeholders, strict=True)),
        )

    def _placeholders(self, region: RegionBuilder) -> list[ValueId]:
        received: dict[StorageId, StorageId] = {}
        placeholders = []
        for value_id in region.saved:
            value = self.values[value_id]
            storage = value.storage
            if storage is not None and not self.same_storages:
                if storage not in received:
                    sent = self.storages[storage]
                    received[storage] = self.storage(sent.size_bytes, sent.device)
                storage = received[storage]
            placeholders.append(
                self.add(
                    Value(
                        kind=value.kind,
                        storage=storage,
                        dtype=value.dtype,
                        item_bytes=value.item_bytes,
                        shape=value.shape,
                        stride=value.stride,
                        offset=value.offset,
                        layout=value.layout,
                        symbolic=value.symbolic,
                        rng_state=value.rng_state,
                    )
                )
            )
        return placeholders

    def _backward(self, region: RegionBuilder, placeholders: list[ValueId]) -> Graph:
        tangent = self.tensor((4,))
        reads = region.reads
        if reads is None:
            reads = [(position,) for position in reversed(range(len(placeholders)))]
        ops = [
            Op(
                name=f"grad_{self.next_name()}",
                target="aten.mul.Tensor",
                inputs=(tangent, *(placeholders[position] for position in read)),
                outputs=(self.tensor(region.gradient_shape),),
            )
            for read in reads
        ]
        inputs = [
            *(GraphInput(value, "saved", f"saved {i}") for i, value in enumerate(placeholders)),
            GraphInput(tangent, "tangent", "tangent 0"),
        ]
        returned = [placeholders[position] for position in region.returned]
        outputs = [GraphOutput(value, "gradient", f"g{i}") for i, value in enumerate(returned)]
        return Graph(tuple(inputs), tuple(ops), tuple(outputs))


# --- hypothesis -----------------------------------------------------------------------------------

# Drawing a graph is slow on a busy machine, which is not what these tests are about.
DRAWN = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Sizes around the 5 MiB minimum and the planner's 2 GB window; nothing is ever allocated.
SHAPES = ((), (0,), (3, 0), (7,), (1024,), (1024, 1280), (1024, 1281), (4096, 40960), (8192, 81920))
DTYPES = ("float32", "bfloat16", "int64", "bool")


@st.composite
def strided_windows(draw: st.DrawFn, elements: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset of any window (expanded, stepped, overlapping) on ``elements``."""
    if elements == 0:
        return (0,), (1,), 0
    offset = draw(st.integers(0, elements - 1))
    room = elements - 1 - offset
    shape, strides = [], []
    for _ in range(draw(st.integers(0, 3))):
        stride = draw(st.integers(0, min(room, 12)))
        most = 4 if stride == 0 else 1 + room // stride
        size = draw(st.integers(1, min(most, 5)))
        room -= (size - 1) * stride
        shape.append(size)
        strides.append(stride)
    return tuple(shape), tuple(strides), offset


@st.composite
def graph_facts(draw: st.DrawFn) -> GraphFacts:
    """Consistent facts of one to three regions, each handed outputs of the ones before."""
    facts = FactsBuilder(
        device=draw(st.sampled_from(("cuda", "cuda", "cuda", "cpu"))),
        same_storages=draw(st.booleans()),
    )
    handed: list[ValueId] = []
    for _ in range(draw(st.integers(1, 3))):
        region = facts.region()
        handed += _draw_region(draw, facts, region, handed)
    return facts.build()


def _draw_region(
    draw: st.DrawFn, facts: FactsBuilder, region: RegionBuilder, handed: list[ValueId]
) -> list[ValueId]:
    values = []
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(("input", "parameter", "buffer", "constant")))
        shape = draw(st.sampled_from(SHAPES))
        values.append(region.input(f"{kind}{number}", shape, draw(st.sampled_from(DTYPES)), kind))
    for number, value in enumerate(
        draw(st.lists(st.sampled_from(handed), unique=True, max_size=2)) if handed else ()
    ):
        values.append(region.receive(value, f"handed{number}", "handed"))
    for _ in range(draw(st.integers(1, 8))):
        values.append(_draw_op(draw, facts, region, values))
    picks = st.lists(st.sampled_from(values), max_size=3)
    outputs = draw(picks)
    for number, value in enumerate(dict.fromkeys(outputs)):
        region.output(value, str(number), draw(st.sampled_from(("output", "output", "mutated"))))
    region.save(*draw(st.lists(st.sampled_from(values), max_size=8)))
    if draw(st.booleans()):
        region.save(facts.add(Value(kind=draw(st.sampled_from(("symint", "python"))))))
    positions = range(len(region.saved))
    if positions and draw(st.booleans()):
        read = st.lists(st.sampled_from(positions), max_size=3, unique=True).map(tuple)
        region.reads = draw(st.lists(read, max_size=5))
        region.returned = tuple(draw(st.lists(st.sampled_from(positions), max_size=2)))
    return list(dict.fromkeys(outputs))


def _draw_op(
    draw: st.DrawFn, facts: FactsBuilder, region: RegionBuilder, values: list[ValueId]
) -> ValueId:
    rng_state = draw(st.integers(0, 9)) == 0
    base = draw(st.sampled_from(values))
    storage = facts.values[base].storage
    kind = draw(st.sampled_from(("op", "op", "view", "view", "view", "odd")))
    if kind == "odd":
        return _draw_odd(draw, facts, region, base)
    if kind == "view" and storage is not None and facts.values[base].layout == "strided":
        dtype = draw(st.sampled_from((facts.values[base].dtype, "bfloat16")))
        elements = facts.storages[storage].size_bytes // ITEM_BYTES[dtype]
        shape, strides, offset = draw(
            st.one_of(strided_windows(elements), st.just(((elements,), (1,), 0)))
        )
        return region.view(
            base,
            shape,
            strides,
            offset,
            dtype=dtype,
            rng_state=rng_state,
            declares_alias=draw(st.integers(0, 3)) > 0,
        )
    return region.op(
        "aten.mul.Tensor",
        draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)),
        draw(st.sampled_from(SHAPES)),
        draw(st.sampled_from(DTYPES)),
        device=draw(st.sampled_from((None, None, None, None, "cpu"))),
        rng_state=rng_state,
    )


def _draw_odd(
    draw: st.DrawFn, facts: FactsBuilder, region: RegionBuilder, base: ValueId
) -> ValueId:
    """A tensor that is sparse or of unknown size, with a storage of its own, shared or none."""
    storage = draw(st.sampled_from((None, facts.values[base].storage, facts.storage(8 * MiB))))
    layout, symbolic = draw(st.sampled_from((("sparse_coo", ""), ("strided", "s0*8"))))
    value = facts.add(
        Value(
            kind="tensor",
            storage=storage,
            dtype="float32",
            item_bytes=4,
            shape=() if symbolic else (2, 2),
            stride=() if symbolic else (2, 1),
            layout=layout,
            symbolic=symbolic,
        )
    )
    region.call("aten.odd.default", [base], value)
    return value


# --- steps to plan --------------------------------------------------------------------------------

# Bytes that are no multiple of an allocator block, and one that is.
UNIT_BYTES = (1000, 1024, 3 * 1024 + 7)
SavedAs = Literal["whole", "part", "stepped", "twice", "not"]


class DrawnOp(NamedTuple):
    """An op that makes ``units`` of memory; how its output is saved, and who reads it."""

    units: int
    saved_as: SavedAs
    reads_last: bool


class DrawnRegion(NamedTuple):
    """Several regions can be built from one of these: they are twins."""

    ops: tuple[DrawnOp, ...]
    # Saved positions read by each op of the backward.
    reads: tuple[tuple[int, ...], ...]
    returned: tuple[int, ...]
    gradient_units: int


@st.composite
def drawn_regions(draw: st.DrawFn, most_ops: int) -> DrawnRegion:
    ways: tuple[SavedAs, ...] = ("whole", "whole", "whole", "part", "stepped", "twice", "not")
    ops = draw(
        st.lists(
            st.builds(DrawnOp, st.integers(1, 64), st.sampled_from(ways), st.booleans()),
            min_size=1,
            max_size=most_ops,
        )
    )
    count = sum({"not": 0, "twice": 2}.get(op.saved_as, 1) for op in ops)
    order = list(reversed(range(count)))
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    # Some are read by nobody, some together, and some ops read nothing.
    reads: list[tuple[int, ...]] = []
    for position in order:
        how = draw(st.sampled_from(("alone", "alone", "alone", "after", "with", "never")))
        if how == "after":
            reads.append(())
        if how == "with" and reads:
            reads[-1] = (*reads[-1], position)
        elif how != "never":
            reads.append((position,))
    returned = draw(st.lists(st.sampled_from(order), max_size=1)) if order else []
    return DrawnRegion(tuple(ops), tuple(reads), tuple(returned), draw(st.integers(0, 16)))


def build_region(facts: FactsBuilder, drawn: DrawnRegion, given: ValueId | None) -> ValueId:
    """Add a region to ``facts``; what it hands on."""
    unit_bytes = UNIT_BYTES[sum(op.units for op in drawn.ops) % len(UNIT_BYTES)]
    region = facts.region()
    last = (
        region.input("x", (unit_bytes,), "bool")
        if given is None
        else region.receive(given, "x", "handed")
    )
    for op in drawn.ops:
        size = op.units * unit_bytes
        made = region.op("aten.relu.default", [last] if op.reads_last else [], (size,), "bool")
        if op.saved_as in ("whole", "twice"):
            region.save(made)
        if op.saved_as in ("part", "twice"):
            region.save(region.view(made, (max(1, size // 3),), offset=size // 2))
        if op.saved_as == "stepped":
            region.save(region.view(made, (size // 8,), (8,)))
        last = made
    handed = region.op("aten.relu.default", [last], (unit_bytes,), "bool")
    region.output(handed)
    region.reads = list(drawn.reads)
    region.returned = drawn.returned
    region.gradient_shape = (drawn.gradient_units * unit_bytes // 4,)
    return handed


@st.composite
def steps(draw: st.DrawFn, most_regions: int = 3, most_ops: int = 8) -> GraphFacts:
    """A step of one or more regions, some of them twins, with most of its memory in saved values:
    whole storages, parts of them, stepped ones that are packed, some that never come back."""
    facts = FactsBuilder(
        device=draw(st.sampled_from(("cuda", "cuda", "cuda", "cpu"))),
        same_storages=draw(st.booleans()),
    )
    kinds = draw(st.lists(drawn_regions(most_ops), min_size=1, max_size=2))
    handed = None
    for _ in range(draw(st.integers(1, most_regions))):
        handed = build_region(facts, draw(st.sampled_from(kinds)), handed)
    return facts.build()
