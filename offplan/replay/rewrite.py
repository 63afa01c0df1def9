"""Insert transfers into a partitioned pair of graphs, and take them out again.

For each moved storage of a region:

1.  Forward: ``host = offload(value)`` after the planned op, where ``value`` is any value on the
    storage; ``release(host)`` after the planned op.  At every saved position of the storage the
    forward then returns that one host tensor.
2.  Backward: the placeholders of those positions receive it, and their recorded value is the host
    tensor's.  ``buffer = reload(host)`` stands before the planned op; ``wait(buffer)`` and the
    views stand before the first op that needs any of them.
3.  A *view* is rebuilt from the buffer by ``view.dtype`` and ``as_strided``, with the dtype, shape
    and strides that were traced (and the conjugate or negative bit), so views of one storage share
    one again.  The buffer begins at the range's first byte, rounded down to 512: offsets count from
    there, and every address keeps its alignment.
4.  An op of the backward that is given an offset into the storage itself (``as_strided`` called by
    the user) is given the offset into the buffer.
5.  Everything that makes a transfer unsafe is refused before any graph is touched: the rewriting
    relies on the graphs alone, not on the plan having been checked.

Inserted nodes call the functions in ``runtime.ops``: methods here, custom operators where a
compiler takes the graphs.  Indexes in transfers are relative to the region's own graphs, and
storages to its template.  Nothing else in the graphs is changed, and ``Undo`` restores them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from offplan.errors import PlanError
from offplan.footprint import Footprint, footprint
from offplan.graph import Op, StorageId, ValueId
from offplan.replay.host import Layout
from offplan.replay.packing import piece_bytes, pieces
from offplan.replay.runtime import Runtime, Slot, TransferOps
from offplan.trace.facts import LocalGraph, RegionTemplate
from offplan.transfers import Transfer

aten = torch.ops.aten


class Undo:
    """Takes the transfers out of the graphs that they were inserted into."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        self._steps.append(step)

    def __call__(self) -> None:
        while self._steps:
            self._steps.pop()()


def insert_transfers(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    template: RegionTemplate,
    transfers: Sequence[Transfer],
    layout: Layout,
    runtime: Runtime,
    ops: TransferOps | None = None,
) -> Undo:
    """Insert ``transfers``, whose host bytes lie as in ``layout``, and register them as slots.

    ``ops`` are what the graphs call: by default those of ``runtime`` for graphs run op by op.

    Raises ``PlanError`` for a transfer that the graphs do not allow; they are then unchanged.
    """
    moves = [_Move(template, transfer) for transfer in transfers]
    for move in moves:
        _check(template, move)
    slots = [move.slot(offset) for move, offset in zip(moves, layout.offsets, strict=True)]
    sides = (
        _Side(forward, template, template.forward),
        _Side(backward, template, template.backward),
    )
    ops = ops or runtime.ops
    if ops.graph_keeps:
        slots = [_rooted(sides[0], move, slot) for move, slot in zip(moves, slots, strict=True)]
    numbers = runtime.add_slots(slots)
    undo = Undo()
    placed = [_Placed(*all_of) for all_of in zip(moves, slots, numbers, strict=True)]
    _rewrite_forward(sides[0], placed, ops, undo)
    _rewrite_backward(sides[1], placed, ops, undo)
    for side in sides:
        side.graph.lint()
        side.module.recompile()
    undo.add(forward.recompile)
    undo.add(backward.recompile)
    return undo


def _rooted(side: _Side, move: _Move, slot: Slot) -> Slot:
    """``slot`` with the strides of the value that its storage was allocated for."""
    value = side.values_on(move.storage)[0].meta["val"]
    reach = sum((size - 1) * step for size, step in zip(value.size(), value.stride(), strict=True))
    if value.storage_offset() or (reach + 1) * value.itemsize < slot.stop:
        raise move.refused("no single value has all its bytes, as a compiler needs it")
    return replace(slot, stride=tuple(value.stride()))


# --- what is moved --------------------------------------------------------------------------------


class _Move:
    """One transfer with what the template says of its storage."""

    def __init__(self, template: RegionTemplate, transfer: Transfer) -> None:
        self.transfer = transfer
        self.storage = transfer.storage
        self.views = [
            template.values[saved.value]
            for saved in template.saved
            if template.values[saved.value].storage == transfer.storage
        ]
        maker = next((op for op in template.forward.ops if self.touches(template, op)), None)
        self.name = f"the storage of {maker.name} ({maker.target})" if maker else "a storage"
        self.where = " ".join(filter(None, (maker.module, maker.source))) if maker else ""

    def touches(self, template: RegionTemplate, op: Op) -> bool:
        return any(template.values[v].storage == self.storage for v in (*op.inputs, *op.outputs))

    def writes(self, template: RegionTemplate, op: Op) -> bool:
        return any(template.values[v].storage == self.storage for v in op.mutates)

    def refused(self, why: str) -> PlanError:
        return PlanError(
            f"{self.name} cannot be moved as planned: {why}",
            where=self.where,
            fix="make the plan again for this target, with this version of torch",
        )

    def slot(self, host_offset: int) -> Slot:
        return Slot(
            name=self.name,
            start=self.transfer.start,
            stop=self.transfer.stop,
            transfer_bytes=self.transfer.transfer_bytes,
            pieces=pieces(self.views) if self.transfer.packed else (),
            item_bytes=max(view.item_bytes for view in self.views),
            host_offset=host_offset,
        )


class _Placed(NamedTuple):
    move: _Move
    slot: Slot
    number: int


def _check(template: RegionTemplate, move: _Move) -> None:
    """Refuse what would read a storage that is away, or lose a byte of it (definition 5)."""
    if not move.views:
        raise move.refused("the region does not save it")
    if template.backward is None:
        raise move.refused("the region has no backward")
    held = (*template.forward.inputs, *(item.value for item in template.forward.constants))
    returned = template.forward.outputs[: template.output_count]
    if any(value is not None and _storage(template, value) == move.storage for value in held):
        raise move.refused("it is an input's")
    if any(value is not None and _storage(template, value) == move.storage for value in returned):
        raise move.refused("it is returned to the caller")
    _check_forward(template, move)
    _check_backward(template, move)
    _check_range(template, move)


def _check_forward(template: RegionTemplate, move: _Move) -> None:
    ops, transfer = template.forward.ops, move.transfer
    if not 0 <= transfer.offload_after <= transfer.release_by < len(ops):
        raise move.refused(
            f"offload after op {transfer.offload_after} and release by op {transfer.release_by} "
            f"are not in order within the {len(ops)} ops of its forward"
        )
    uses = [place for place, op in enumerate(ops) if move.touches(template, op)]
    if transfer.offload_after < uses[0]:
        raise move.refused(f"it is copied before {ops[uses[0]].name} makes it")
    if transfer.release_by < uses[-1]:
        raise move.refused(f"{ops[uses[-1]].name} uses it after its release")
    for op in ops[transfer.offload_after + 1 :]:
        if move.writes(template, op):
            raise move.refused(f"{op.name} writes to it after it was copied")


def _check_backward(template: RegionTemplate, move: _Move) -> None:
    assert template.backward is not None
    ops, transfer = template.backward.ops, move.transfer
    uses = [place for place, op in enumerate(ops) if move.touches(template, op)]
    outputs = template.backward.outputs
    if any(value is not None and _storage(template, value) == move.storage for value in outputs):
        uses.append(len(ops))
    if (transfer.reload_at is None) != (transfer.needed_by is None):
        raise move.refused("it has only one of reload_at and needed_by")
    if transfer.reload_at is None or transfer.needed_by is None:
        if uses:
            raise move.refused("the backward uses it, but it is never reloaded")
        return
    if not 0 <= transfer.reload_at <= transfer.needed_by <= len(ops):
        raise move.refused(
            f"reload at op {transfer.reload_at} and first use at op {transfer.needed_by} are not "
            f"in order within the {len(ops)} ops of its backward"
        )
    if uses and uses[0] < transfer.needed_by:
        raise move.refused("the backward uses it before it is back")


def _check_range(template: RegionTemplate, move: _Move) -> None:
    """Every byte that the backward may read is carried, and the byte counts agree."""
    assert template.backward is not None
    transfer = move.transfer
    seen = [
        template.values[value]
        for op in template.backward.ops
        for value in op.outputs
        if _storage(template, value) == move.storage
    ]
    needed = footprint([*move.views, *seen])
    carried = Footprint(transfer.start, transfer.stop, transfer.transfer_bytes, transfer.packed)
    if carried.start < 0 or needed.start < carried.start or needed.stop > carried.stop:
        raise move.refused(
            f"its bytes {needed.start} to {needed.stop} are used, {carried.start} to "
            f"{carried.stop} are carried"
        )
    if transfer.stop > template.storages[move.storage].size_bytes:
        raise move.refused(f"it ends before byte {transfer.stop}")
    expected = transfer.stop - transfer.start
    if transfer.packed:
        expected = piece_bytes(pieces(move.views))
        if piece_bytes(pieces([*move.views, *seen])) != expected:
            raise move.refused("the backward reads between its saved views, which are packed")
    if transfer.transfer_bytes != expected:
        raise move.refused(f"it carries {expected} bytes, not {transfer.transfer_bytes}")


def _storage(template: RegionTemplate, value: ValueId) -> StorageId | None:
    return template.values[value].storage


# --- graphs and their templates -------------------------------------------------------------------


class _Side:
    """One FX graph beside its records: which node is which op, and which storage each is on."""

    def __init__(
        self, module: fx.GraphModule, template: RegionTemplate, local: LocalGraph | None
    ) -> None:
        assert local is not None
        self.module = module
        self.graph = module.graph
        self.local = local
        nodes = list(self.graph.nodes)
        self.order = {node: place for place, node in enumerate(nodes)}
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.output = nodes[-1]
        self.ops = [node for node in nodes if _is_op(node)]
        if [node.name for node in self.ops] != [op.name for op in local.ops]:
            raise PlanError("the graphs changed after they were read", fix="report this to offplan")
        self.storages = _storages(nodes, self, template)

    def values_on(self, storage: StorageId) -> list[fx.Node]:
        """Nodes that are one tensor on ``storage``, in order."""
        return [node for node, found in self.storages.items() if found == storage]

    def before(self, op: int) -> fx.Node:
        """The node that marks the moment before op ``op``; one past the last is the return."""
        return self.ops[op] if op < len(self.ops) else self.output


def _is_op(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output") and not _is_getitem(node)


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node)


def _storages(
    nodes: Sequence[fx.Node], side: _Side, template: RegionTemplate
) -> dict[fx.Node, StorageId | None]:
    """The storage of each node that is one value, not a tuple of them."""
    placeholders, ops = iter(side.local.inputs), iter(side.local.ops)
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        if node.op == "placeholder":
            values[node] = next(placeholders)
        elif _is_op(node):
            values[node] = _structured(node, list(next(ops).outputs))
        elif _is_getitem(node):
            whole = values[node.args[0]]
            values[node] = whole[node.args[1]] if isinstance(whole, list) else whole
    return {
        node: template.values[value].storage
        for node, value in values.items()
        if not isinstance(value, list)
    }


def _structured(node: fx.Node, flat: list[ValueId]) -> Any:
    """An op's values in the structure that the op returns; ``getitem`` takes them from there."""
    if "val" not in node.meta:
        # A random op wrapped by the partitioner, which records nothing: read as its elements.
        return flat if any(map(_is_getitem, node.users)) or len(flat) != 1 else flat[0]
    remaining = iter(flat)

    def fill(value: Any) -> Any:
        return (
            [fill(item) for item in value] if isinstance(value, list | tuple) else next(remaining)
        )

    return fill(node.meta["val"])


# --- rewriting ------------------------------------------------------------------------------------


def _rewrite_forward(side: _Side, placed: Sequence[_Placed], ops: TransferOps, undo: Undo) -> None:
    hosts: dict[int, fx.Node] = {}
    # Copies are issued before anything at the same place waits for an older one.
    for item in sorted(placed, key=lambda p: (p.move.transfer.offload_after, p.number)):
        hosts[item.number] = _offload(side, item, ops, undo)
    for item in sorted(placed, key=_release_order):
        host = hosts[item.number]
        with side.graph.inserting_before(side.before(item.move.transfer.release_by + 1)):
            kept = (_root(side, item),) if ops.graph_keeps else ()
            _call(side, undo, ops.release, (host, *kept, item.number), None)
    _return_hosts(side, placed, hosts, undo)


def _offload(side: _Side, item: _Placed, ops: TransferOps, undo: Undo) -> fx.Node:
    """The offload of one storage, given the latest value on it, or its root."""
    anchor = side.before(item.move.transfer.offload_after + 1)
    values = side.values_on(item.move.storage)
    made = [node for node in values if side.order[node] < side.order[anchor]]
    if not made:
        # Only as part of a tuple; the first element taken of it stands further on.
        made, anchor = values[:1], values[0].next if values else anchor
        release = side.before(item.move.transfer.release_by + 1)
        if not made or side.order[made[0]] > side.order[release]:
            raise item.move.refused("no value on it can be copied before its release")
    value = _root(side, item) if ops.graph_keeps else made[-1]
    fake = _fake_bytes(value.meta["val"], item.slot.transfer_bytes, torch.device("cpu"))
    if not ops.graph_keeps:
        with side.graph.inserting_before(anchor):
            return _call(side, undo, ops.offload, (value, item.number), fake)
    given = (value, item.number, item.slot.transfer_bytes)
    with side.graph.inserting_before(anchor):
        node = _call(side, undo, ops.offload, given, fake)
    # Inductor then allocates the value with the strides that were traced, as it does for what a
    # graph returns; and, where it has not, copies it to those for the operator.
    _set_meta(value, "inductor_realize_to_strides", True, undo)
    node.meta["eager_input_vals"] = (fx.map_arg(given, lambda each: each.meta["val"]), {})
    return node


def _root(side: _Side, item: _Placed) -> fx.Node:
    """The value that the storage was allocated for, which has all its bytes."""
    return side.values_on(item.move.storage)[0]


def _return_hosts(
    side: _Side, placed: Sequence[_Placed], hosts: dict[int, fx.Node], undo: Undo
) -> None:
    by_storage = {item.move.storage: hosts[item.number] for item in placed}
    returned = side.output.args[0]
    swapped = [
        by_storage.get(side.storages.get(node), node) if isinstance(node, fx.Node) else node
        for node in returned
    ]
    _set_args(side.output, (type(returned)(swapped), *side.output.args[1:]), undo)


def _rewrite_backward(side: _Side, placed: Sequence[_Placed], ops: TransferOps, undo: Undo) -> None:
    receivers: dict[int, list[fx.Node]] = {}
    traced: dict[fx.Node, torch.Tensor] = {}
    for item in placed:
        nodes = [node for node in side.placeholders if side.storages[node] == item.move.storage]
        receivers[item.number] = nodes
        traced.update({node: node.meta["val"] for node in nodes})
        _shift_offsets(side, item, undo)
    needed = [item for item in placed if item.move.transfer.needed_by is not None]
    buffers: dict[int, fx.Node] = {}
    for item in sorted(needed, key=_reload_order):
        host = receivers[item.number][0]
        dtype = _buffer_dtype([traced[node] for node in receivers[item.number]])
        fake = _fake_bytes(traced[host], item.slot.buffer_bytes, traced[host].device, dtype)
        with side.graph.inserting_before(side.before(item.move.transfer.reload_at)):
            size = (item.slot.buffer_bytes,) if ops.graph_keeps else ()
            given = (host, item.number, *size, dtype)
            buffers[item.number] = _call(side, undo, ops.reload, given, fake)
    for item in sorted(needed, key=_wait_order):
        buffer = buffers[item.number]
        with side.graph.inserting_before(side.before(item.move.transfer.needed_by)):
            _call(side, undo, ops.wait, (buffer,), None)
            _rebuild(side, item, buffer, receivers[item.number], traced, undo)
    for item in placed:
        for node in receivers[item.number]:
            fake = _fake_bytes(traced[node], item.slot.transfer_bytes, torch.device("cpu"))
            _set_value(node, fake, undo)


def _buffer_dtype(views: Sequence[torch.Tensor]) -> torch.dtype:
    """What the buffer is typed as: the one dtype of all views, else bytes."""
    dtypes = {view.dtype for view in views}
    return dtypes.pop() if len(dtypes) == 1 else torch.uint8


def _release_order(item: _Placed) -> tuple[Any, ...]:
    """Of those at one place the last copy first: whoever has waited for it has for the others."""
    transfer = item.move.transfer
    return transfer.release_by, -transfer.offload_after, -item.number


def _reload_order(item: _Placed) -> tuple[Any, ...]:
    return item.move.transfer.reload_at, item.move.transfer.needed_by, item.number


def _wait_order(item: _Placed) -> tuple[Any, ...]:
    """As ``_release_order``."""
    return item.move.transfer.needed_by, -item.move.transfer.reload_at, -item.number


def _rebuild(
    side: _Side,
    item: _Placed,
    buffer: fx.Node,
    receivers: Sequence[fx.Node],
    traced: dict[fx.Node, torch.Tensor],
    undo: Undo,
) -> None:
    """A view of ``buffer`` in place of each receiver that is used (definition 3)."""
    typed: dict[torch.dtype, fx.Node] = {buffer.meta["val"].dtype: buffer}
    for node in receivers:
        users = [user for user in node.users if user is not buffer and user in side.order]
        if not users:
            continue
        val = traced[node]
        if val.dtype not in typed:
            typed[val.dtype] = _call_aten(side, undo, aten.view.dtype, (buffer, val.dtype))
        offset = max(0, val.storage_offset() - item.slot.first_byte // val.itemsize)
        arguments = (typed[val.dtype], list(val.size()), list(val.stride()), offset)
        view = _call_aten(side, undo, aten.as_strided.default, arguments)
        if val.is_conj():
            view = _call_aten(side, undo, aten._conj.default, (view,))
        if val.is_neg():
            view = _call_aten(side, undo, aten._neg_view.default, (view,))
        view.meta["val"] = val
        for user in users:
            _replace_input(user, node, view, undo)


def _shift_offsets(side: _Side, item: _Placed, undo: Undo) -> None:
    """Turn offsets into the storage into offsets into the buffer (definition 4)."""
    first_byte = item.slot.first_byte
    for node in side.ops if first_byte else ():
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema else []
        if "storage_offset" not in names or side.storages.get(node.args[0]) != item.move.storage:
            continue
        place = names.index("storage_offset")
        shift = first_byte // node.args[0].meta["val"].itemsize
        if len(node.args) > place and node.args[place] is not None:
            args = list(node.args)
            args[place] -= shift
            _set_args(node, tuple(args), undo)
        elif node.kwargs.get("storage_offset") is not None:
            raise item.move.refused(f"{node.name} names its storage offset by keyword")


# --- edits, each with its undoing -----------------------------------------------------------------


def _call(side: _Side, undo: Undo, target: Any, args: tuple[Any, ...], val: Any) -> fx.Node:
    """A new node at the graph's insertion point, with its recorded value."""
    node = side.graph.call_function(target, args)
    node.meta["val"] = val
    undo.add(lambda: side.graph.erase_node(node))
    return node


def _call_aten(side: _Side, undo: Undo, target: Any, args: tuple[Any, ...]) -> fx.Node:
    given = fx.map_arg(args, lambda node: node.meta["val"])
    with given[0].fake_mode:
        val = target(*given)
    return _call(side, undo, target, args, val)


def _set_args(node: fx.Node, args: tuple[Any, ...], undo: Undo) -> None:
    before = node.args
    node.args = args
    undo.add(lambda: setattr(node, "args", before))


def _replace_input(user: fx.Node, old: fx.Node, new: fx.Node, undo: Undo) -> None:
    args, kwargs = user.args, user.kwargs
    user.replace_input_with(old, new)

    def restore() -> None:
        user.args, user.kwargs = args, kwargs

    undo.add(restore)


def _set_meta(node: fx.Node, name: str, value: Any, undo: Undo) -> None:
    node.meta[name] = value
    undo.add(lambda: node.meta.pop(name))


def _set_value(node: fx.Node, val: Any, undo: Undo) -> None:
    before = node.meta["val"]
    node.meta["val"] = val
    undo.add(lambda: node.meta.__setitem__("val", before))


def _fake_bytes(
    like: Any, size_bytes: int, device: torch.device, dtype: torch.dtype = torch.uint8
) -> Any:
    with like.fake_mode:
        return torch.empty(size_bytes // dtype.itemsize, dtype=dtype, device=device)
