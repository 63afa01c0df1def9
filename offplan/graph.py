"""GraphFacts: what a trace found, as plain values that need no torch to read.

1.  A *region* is one forward/backward graph pair.  Ops of all regions form one timeline: forward
    regions in the order they ran, then backward regions in reverse.
2.  A *value* is what one graph computes or receives: a tensor (a window on a storage) or something
    else.  Value ids and storage ids are positions in ``values`` and ``storages``, over all regions.
3.  A *storage* is one allocation.  An op's output shares a storage with an input of that op exactly
    if the fake tensors did when traced; every other output is an allocation of its own.  So a value
    that the backward recomputes is a new storage, although the trace reuses its fake tensor.
4.  A *saved value* joins the forward to the backward by saved position, never by name: the forward
    returns ``value``, and ``backward_value`` is the placeholder that receives it.
5.  The digest covers what the graphs compute: ops, their constants, tensors, storages, saved
    positions and the names of parameters, buffers and inputs.  Source lines, module paths and
    node names are left out, so that editing a comment does not turn a plan stale.

Sizes are bytes; offsets and strides are elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NewType

import msgspec

from offplan.errors import FileFormatError
from offplan.files import read_content

SCHEMA_VERSION = 1
# Many times what a model of a hundred layers takes.
_MAX_FILE_BYTES = 512 * 1024**2
# More than there is memory, and little enough for sums and products of sizes to stay numbers.
_MOST_BYTES = 2**60

ValueId = NewType("ValueId", int)
StorageId = NewType("StorageId", int)

ValueKind = Literal["tensor", "symint", "python"]
InputKind = Literal["parameter", "buffer", "input", "constant", "handed", "saved", "tangent"]
OutputKind = Literal["output", "mutated", "saved", "gradient"]
Compiler = Literal["aot_eager", "inductor"]
Partitioner = Literal["min-cut", "default"]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Frozen, and strict about unknown fields, so that a misspelt one is an error with its path.

    Defaults are written out: msgspec would compare them by identity, which an empty tuple does not
    always have, and the digest must not depend on that.
    """


class Storage(_Record, frozen=True):
    """One allocation of ``size_bytes`` on ``device`` (``cuda`` or ``cpu``)."""

    size_bytes: int
    device: str


class Value(_Record, frozen=True):
    """A tensor, or a ``symint``/``python`` value, for which only ``kind`` is set.

    ``layout`` is ``strided`` or names what the tensor is instead.  ``symbolic`` is set when a
    size is not known at trace time; ``shape`` and ``stride`` are then empty.
    """

    kind: ValueKind
    storage: StorageId | None = None
    dtype: str = ""
    item_bytes: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    layout: str = "strided"
    symbolic: str = ""
    rng_state: bool = False

    @property
    def element_count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def logical_bytes(self) -> int:
        """Bytes the value carries: elements times their size, whatever its strides."""
        return self.element_count * self.item_bytes

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))


class Op(_Record, frozen=True):
    """One call of the overload ``target`` (``aten.mm.default``).

    ``module`` is the module path (``layers.0.self_attn``), ``source`` the user's ``file:line``;
    either is empty where the trace does not say.  ``constants`` are the arguments that are not
    values, ``mutates`` the inputs written in place.  ``declares_alias``: the op's schema says that
    its outputs may be views of its inputs.  Storages say what really shares memory; the declaration
    is what passes that go by schema see (``_unsafe_view`` shares memory and declares nothing).
    """

    name: str
    target: str
    inputs: tuple[ValueId, ...] = ()
    outputs: tuple[ValueId, ...] = ()
    constants: str = ""
    mutates: tuple[ValueId, ...] = ()
    declares_alias: bool = False
    module: str = ""
    source: str = ""


class GraphInput(_Record, frozen=True):
    """A placeholder or constant.  ``name`` is the parameter's, buffer's or input's own name."""

    value: ValueId
    kind: InputKind
    name: str


class GraphOutput(_Record, frozen=True):
    """A returned value; None where a gradient is not computed."""

    value: ValueId | None
    kind: OutputKind
    name: str


class Buffer(_Record, frozen=True):
    """An allocation of a compiled graph, or an input of it.

    ``value`` is what it holds; None for what no op of the graph returns, such as the parts of a
    reduction in two steps.  ``over`` is the input's buffer that it takes the place of, once that is
    read, where the input is the graph's own: which holds for what a transfer brought back.
    """

    size_bytes: int
    value: ValueId | None
    over: int | None = None


class Kernel(_Record, frozen=True):
    """A kernel of a compiled graph, in place of ``ops`` (positions in the graph), the last of which
    is the one that it is known by.

    It runs where the op at position ``at`` stands, or just before the kernels that come next;
    ``reads`` and ``makes`` are buffers, ``writes`` those made before that it writes to.  ``call``
    names what it calls in a library, and is empty for a kernel that the compiler writes.  It runs
    in one call with the kernel before it if ``joined``, and no transfer stands between them: what
    they read is freed together.

    ``at`` is where what it makes is first needed in memory.  Where that can be before, as an
    offload of it needs it as soon as it is there, the position is ``early``.

    Of the bytes of ``reads``, it has no use for ``unread_bytes``: it comes after what does, or
    writes over them.  It ``reduces`` if it sums, or the like, over a dimension.
    """

    at: int
    ops: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...] = ()
    call: str = ""
    joined: bool = False
    early: int | None = None
    unread_bytes: int = 0
    reduces: bool = False


class Lowering(_Record, frozen=True):
    """What a compiler makes of a graph: kernels in the order in which they run.  A value that no
    buffer holds is never in memory.  ``outputs`` has the buffer of each output of the graph; None
    where that is no tensor."""

    buffers: tuple[Buffer, ...]
    kernels: tuple[Kernel, ...]
    outputs: tuple[int | None, ...]


class Graph(_Record, frozen=True):
    """``lowering`` is there if a compiler fuses the ops, and was asked how: with transfers in the
    graph.  Without any, the compiler reorders kernels and reuses buffers: ``lowering_alone``."""

    inputs: tuple[GraphInput, ...]
    ops: tuple[Op, ...]
    outputs: tuple[GraphOutput, ...]
    lowering: Lowering | None = None
    lowering_alone: Lowering | None = None


class SavedValue(_Record, frozen=True):
    """The value that the forward hands to the backward at one saved position."""

    value: ValueId
    backward_value: ValueId


class Region(_Record, frozen=True):
    """One traced forward, and its backward unless nothing in it needs a gradient."""

    forward: Graph
    backward: Graph | None
    saved: tuple[SavedValue, ...]


class GraphBreak(_Record, frozen=True):
    reason: str
    source: str


class ModelTensor(_Record, frozen=True):
    """A parameter or buffer of the model, used or not; ``names`` has all names of a tied one."""

    kind: Literal["parameter", "buffer"]
    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    requires_grad: bool = False


class TargetRef(_Record, frozen=True):
    """What was traced: the target as the user typed it, with its ``-p`` parameters."""

    spec: str
    params: dict[str, str] = {}
    source: str = ""


class GraphFacts(_Record, frozen=True):
    target: TargetRef
    torch: str
    device: str
    gpu: str
    attention: str
    compiler: Compiler
    partitioner: Partitioner
    model: tuple[ModelTensor, ...]
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    regions: tuple[Region, ...]
    breaks: tuple[GraphBreak, ...] = ()
    warnings: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def op_count(self) -> int:
        return sum(len(graph.ops) for graph in graphs(self))


def graphs(facts: GraphFacts) -> Iterator[Graph]:
    """Every graph in timeline order: forwards as they ran, then backwards in reverse."""
    yield from (region.forward for region in facts.regions)
    yield from (region.backward for region in reversed(facts.regions) if region.backward)


def timeline(facts: GraphFacts) -> Iterator[Op]:
    """Every op in timeline order; its position is what plans call the op's index."""
    for graph in graphs(facts):
        yield from graph.ops


def digest(facts: GraphFacts) -> str:
    """``sha256:`` of what the graphs compute (definition 5)."""
    state = hashlib.sha256()
    encode = msgspec.msgpack.Encoder().encode
    state.update(encode((facts.device, facts.compiler, facts.storages, facts.values)))
    for region in facts.regions:
        state.update(encode(region.saved))
        for graph in (region.forward, region.backward):
            state.update(encode(None if graph is None else (graph.inputs, graph.outputs)))
            for op in graph.ops if graph is not None else ():
                state.update(encode((op.target, op.inputs, op.outputs, op.constants, op.mutates)))
    return "sha256:" + state.hexdigest()


def save_graph(facts: GraphFacts) -> bytes:
    """The ``*.graph.json`` file for ``facts``: the same bytes for the same facts."""
    return msgspec.json.encode(facts) + b"\n"


def load_graph(path: Path) -> GraphFacts:
    """Read a ``*.graph.json`` file.

    Raises ``FileFormatError`` naming the field for anything that is not one, ids that point nowhere
    included, so that later steps can index without checking.
    """
    return decode_graph(read_content(path, _MAX_FILE_BYTES, "a graph file"), str(path))


def decode_graph(content: bytes, name: str) -> GraphFacts:
    """The same of a file's ``content``; messages call it ``name``."""
    try:
        facts = msgspec.json.decode(content, type=GraphFacts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(
            f"{name} is not an offplan graph file: {error}",
            fix="write one with: offplan analyze model.py --graph FILE",
        ) from error
    if facts.schema_version != SCHEMA_VERSION:
        raise FileFormatError(
            f"{name} has schema version {facts.schema_version}; this offplan reads "
            f"{SCHEMA_VERSION}",
            fix="write it again with this version of offplan",
        )
    problem = next(_problems(facts), None)
    if problem is not None:
        raise FileFormatError(f"{name} is not a consistent graph: {problem}")
    return facts


def _problems(facts: GraphFacts) -> Iterator[str]:
    """What makes ``facts`` inconsistent, as sentences."""
    for index, storage in enumerate(facts.storages):
        if storage.size_bytes < 0:
            yield f"storages[{index}] has a negative size"
        if storage.size_bytes > _MOST_BYTES:
            yield f"storages[{index}] is larger than any memory"
    for index, tensor in enumerate(facts.model):
        sizes = (tensor.size_bytes, *tensor.shape)
        if not 0 <= min(sizes) <= max(sizes) <= _MOST_BYTES or (tensor.size_bytes and 0 in sizes):
            yield f"model[{index}] has a size that no tensor has"
        if not tensor.names:
            yield f"model[{index}] has no name"
    for index, value in enumerate(facts.values):
        yield from _value_problems(facts, index, value)
    value_count = len(facts.values)
    for region_index, region in enumerate(facts.regions):
        used = [*_used_ids(region)]
        missing = [value for value in used if not 0 <= value < value_count]
        if missing:
            yield f"regions[{region_index}] uses value {missing[0]}, of {value_count}"
            return
        for graph in filter(None, (region.forward, region.backward)):
            for lowering in _lowerings(graph):
                for problem in _lowering_problems(facts, graph, lowering):
                    yield f"regions[{region_index}] has a lowering {problem}"
        for problem in _region_problems(facts, region):
            yield f"regions[{region_index}] {problem}"
    yield from _allocation_problems(facts)


def _value_problems(facts: GraphFacts, index: int, value: Value) -> Iterator[str]:
    numbers = (value.item_bytes, value.offset, *value.shape, *value.stride)
    if value.storage is not None and not 0 <= value.storage < len(facts.storages):
        yield f"values[{index}] has no storage {value.storage}, of {len(facts.storages)}"
        return
    if not -_MOST_BYTES <= min(numbers) <= max(numbers) <= _MOST_BYTES:
        yield f"values[{index}] has a size, stride or offset that no tensor has"
        return
    if value.kind != "tensor" or value.symbolic or value.layout != "strided":
        return
    if value.storage is None:
        yield f"values[{index}] has no storage"
        return
    if len(value.shape) != len(value.stride):
        yield f"values[{index}] has {len(value.shape)} sizes and {len(value.stride)} strides"
        return
    if value.item_bytes <= 0 or value.offset < 0 or min((*value.shape, *value.stride, 0)) < 0:
        yield f"values[{index}] has a negative size, stride or offset, or no item size"
        return
    if value.element_count == 0:
        return
    last = value.offset + sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))
    if (last + 1) * value.item_bytes > facts.storages[value.storage].size_bytes:
        yield f"values[{index}] reaches past the end of its storage"


def _region_problems(facts: GraphFacts, region: Region) -> Iterator[str]:
    """What makes the graphs of a region no program, or no pair (definitions 3 and 4)."""
    forward, backward = region.forward, region.backward
    for name, graph in (("forward", forward), ("backward", backward)):
        if graph is not None:
            yield from (f"{problem} in its {name}" for problem in _order_problems(facts, graph))
    returned = [item.value for item in forward.outputs if item.kind == "saved"]
    if returned != [saved.value for saved in region.saved]:
        yield "does not save what its forward returns to be saved"
    if backward is None:
        return
    received = [item.value for item in backward.inputs if item.kind == "saved"]
    if received != [saved.backward_value for saved in region.saved]:
        yield "does not receive what it saves"
    values = facts.values
    own = {values[item.value].storage for item in forward.inputs}
    own.update(values[value].storage for op in forward.ops for value in op.outputs)
    came: dict[StorageId, StorageId | None] = {}
    for position, saved in enumerate(region.saved):
        storage, before = values[saved.backward_value].storage, values[saved.value].storage
        if storage is None:
            continue
        if came.setdefault(storage, before) != before or (storage != before and storage in own):
            yield f"receives another storage than it saves, at saved position {position}"


def _order_problems(facts: GraphFacts, graph: Graph) -> Iterator[str]:
    """Tensors that an op uses before they are there, makes again, or writes to without reading."""
    # Sizes and other values may be there from the beginning.
    made = {number for number, value in enumerate(facts.values) if value.kind != "tensor"}
    others = frozenset(made)
    made.update(item.value for item in graph.inputs)
    for place, op in enumerate(graph.ops):
        if not made.issuperset(op.inputs):
            yield f"has op {place} ({op.name}) use what is not made before"
        # Plans go by what ops read and make, and would not see a write to anything else.
        if not set(op.inputs).issuperset(op.mutates):
            yield f"has op {place} ({op.name}) write to what is no input of it"
        if not made.isdisjoint(set(op.outputs) - others):
            yield f"has op {place} ({op.name}) make what is there already"
        made.update(op.outputs)
    if not made.issuperset(item.value for item in graph.outputs if item.value is not None):
        yield "returns what is not made"


def _allocation_problems(facts: GraphFacts) -> Iterator[str]:
    """Outputs on storages that are there, and are not of an input of their op (definition 3)."""
    there: set[StorageId | None] = set()
    values = facts.values
    for number, region in enumerate(facts.regions):
        for graph in filter(None, (region.forward, region.backward)):
            there.update(values[item.value].storage for item in graph.inputs)
            for place, op in enumerate(graph.ops):
                made = {values[value].storage for value in op.outputs} - {None}
                made.difference_update(values[value].storage for value in op.inputs)
                if not made.isdisjoint(there):
                    yield (
                        f"regions[{number}] has op {place} ({op.name}) make storage "
                        f"{min(made & there, key=str)} again"
                    )
                there.update(made)


def _lowerings(graph: Graph) -> Iterator[Lowering]:
    yield from filter(None, (graph.lowering, graph.lowering_alone))


def _lowering_problems(facts: GraphFacts, graph: Graph, lowering: Lowering) -> Iterator[str]:
    buffer_count, op_count = len(lowering.buffers), len(graph.ops)
    if len(lowering.outputs) != len(graph.outputs):
        yield f"with {len(lowering.outputs)} outputs, of {len(graph.outputs)}"
    used = [output for output in lowering.outputs if output is not None]
    used += [
        buffer
        for kernel in lowering.kernels
        for buffer in (*kernel.reads, *kernel.makes, *kernel.writes)
    ]
    used += [buffer.over for buffer in lowering.buffers if buffer.over is not None]
    if used and not 0 <= min(used) <= max(used) < buffer_count:
        yield f"that uses buffers beyond its {buffer_count}"
        return
    for number, buffer in enumerate(lowering.buffers):
        if not 0 <= buffer.size_bytes <= _MOST_BYTES:
            yield "with a buffer of a size that no memory has"
        if buffer.over is not None and buffer.over >= number:
            yield "with a buffer in place of a later one"
    yield from _kernel_problems(facts, graph, lowering)
    for kernel in lowering.kernels:
        if not kernel.ops:
            yield "with a kernel of no ops"
        most = sum(lowering.buffers[number].size_bytes for number in kernel.reads)
        if not 0 <= kernel.unread_bytes <= most:
            yield "with a kernel that leaves more unread than it takes"
        early = () if kernel.early is None else (kernel.early,)
        if not all(0 <= op < op_count for op in (kernel.at, *early, *kernel.ops)):
            yield f"with a kernel of ops beyond its {op_count}"


def _kernel_problems(facts: GraphFacts, graph: Graph, lowering: Lowering) -> Iterator[str]:
    """Buffers that are used before they are there, or made again."""
    there = set(range(len(lowering.buffers)))
    there.difference_update(number for kernel in lowering.kernels for number in kernel.makes)
    used = {number for kernel in lowering.kernels for number in (*kernel.reads, *kernel.writes)}
    used.update(number for number in lowering.outputs if number is not None)
    given = {facts.values[item.value].storage for item in graph.inputs}
    values = (lowering.buffers[number].value for number in used & there)
    if not given.issuperset(facts.values[value].storage for value in values if value is not None):
        yield "with a buffer that no kernel makes"
    for kernel in lowering.kernels:
        if not there.issuperset((*kernel.reads, *kernel.writes)):
            yield "with a kernel that uses what is not made before"
        if not there.isdisjoint(kernel.makes) or len(set(kernel.makes)) < len(kernel.makes):
            yield "with a kernel that makes what is there already"
        there.update(kernel.makes)


def _used_ids(region: Region) -> Iterator[int]:
    for saved in region.saved:
        yield saved.value
        yield saved.backward_value
    for graph in (region.forward, region.backward):
        if graph is None:
            continue
        yield from (item.value for item in graph.inputs)
        yield from (item.value for item in graph.outputs if item.value is not None)
        for op in graph.ops:
            yield from (*op.inputs, *op.outputs, *op.mutates)
        for lowering in _lowerings(graph):
            yield from (b.value for b in lowering.buffers if b.value is not None)
