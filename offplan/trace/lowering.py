"""What Inductor makes of a graph: its kernels and buffers, found without generating code.

1.  Inductor lowers the graph and schedules what it has lowered, which decides what is fused, what
    is in memory and in which order kernels run; it is stopped before it writes any kernel.
2.  A *buffer* is an allocation.  What is written into part of another buffer (the inputs of a
    concatenation) or over one (a mutation), and what an op returns of its inputs, is that buffer.
    A buffer that is used inside one kernel only is none: the kernel keeps it in registers.  One
    that is written in place of another, which nobody reads any more, is that one.  On the CPU the
    kernels between two calls of a library run as one: what they read is freed after all of them.
3.  On the GPU a kernel that reduces long rows loops over them, once for each reduction that another
    needs.  What it makes in one loop and reads in the next is a buffer after all.  One that reduces
    the same in two orders (weights' gradients of norms) has partial sums of the second in a buffer,
    which ATen then adds, with memory of its own.
4.  A kernel stands where the first of its parts was lowered: where an op is, or where another needs
    in memory what it returns.
5.  With transfers in it, a graph is neither reordered, nor do buffers that are allocated later take
    the memory of others (``trace.compilers``); without any, both.

A graph that Inductor cannot lower has no lowering.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import msgspec
from torch import fx

from offplan.graph import Buffer, Kernel, Lowering, Value, ValueId
from offplan.trace._torch import inductor, inductor_lowering, unset_fake_temporarily
from offplan.trace.compilers import Lower
from offplan.trace.facts import LocalGraph, RegionTemplate, target_name
from offplan.workspaces import reduction_bytes

logger = logging.getLogger("offplan")

# So that a lowering is of the graph as it is, and is seen: cached code would come without one.
# Nothing is timed: that would compile candidates, and run them on the device.
_SETTINGS = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "benchmark_fusion": False,
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
}


# Kernels in one call; Inductor ends one after 500 arguments.
_MOST_TOGETHER = 100
_FLOAT_BYTES = 4


class Lowerings(NamedTuple):
    """What is made of a graph with transfers in it, and without."""

    with_transfers: Lowering
    alone: Lowering


class _Stopped(Exception):
    """Ends what Inductor does, when it has lowered a graph."""


def lowered_template(
    template: RegionTemplate, forward: fx.GraphModule, backward: fx.GraphModule
) -> RegionTemplate:
    """``template`` with how Inductor lowers the pair that it was read from, which it will compile.

    For graphs that are just being partitioned: Inductor says what is visible to the user later.
    """
    names = inductor()
    visible = range(template.mutated_count, template.output_count)
    _show_outputs(forward, visible)
    _show_outputs(backward, range(len(_outputs(backward))) if _shows_gradients(names) else ())
    received = {saved.backward_value for saved in template.saved}
    assert template.backward is not None
    return replace(
        template,
        forward=with_lowering(
            template.forward, forward, _examples(forward), names.compile_fx_inner
        ),
        backward=with_lowering(
            template.backward,
            backward,
            _examples(backward),
            partial(names.compile_fx_inner, is_backward=True),
            received,
        ),
    )


def with_lowering(
    local: LocalGraph,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    lower: Lower,
    received: Collection[ValueId] = (),
) -> LocalGraph:
    """``local`` with how ``lower`` lowers ``module``, or as it is if that cannot be read."""
    found = read_lowering(module, inputs, lower, local, received)
    if found is None:
        return local
    return replace(local, lowering=found.with_transfers, lowering_alone=found.alone)


def _examples(module: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]


def _outputs(module: fx.GraphModule) -> Sequence[Any]:
    (output,) = module.graph.find_nodes(op="output")
    found: Sequence[Any] = output.args[0]
    return found


def _show_outputs(module: fx.GraphModule, places: Iterable[int]) -> None:
    """Tell Inductor which outputs keep their strides."""
    (output,) = module.graph.find_nodes(op="output")
    returned = _outputs(module)
    output.meta["user_visible_output_idxs"] = [
        place for place in places if isinstance(returned[place], fx.Node)
    ]


def _shows_gradients(names: Any) -> bool:
    return bool(getattr(names.config, "bw_outputs_user_visible", True))


def read_lowering(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    lower: Lower,
    local: LocalGraph,
    received: Collection[ValueId] = (),
) -> Lowerings | None:
    """How ``lower`` lowers ``module``, which was read as ``local`` and stays as it is.

    ``received`` are inputs that were saved by a forward.
    """
    own = [place for place, value in enumerate(local.inputs) if value in received]
    try:
        names = inductor_lowering()
        lowered = _lowered(names, module, inputs, lower, own)
        if lowered is None:
            return None
        with names.V.set_graph_handler(lowered):
            return _read(names, lowered, local)
    except Exception:
        # These are private parts of it, in the version that is here.
        logger.debug("a graph's lowering cannot be read", exc_info=True)
        return None


def _lowered(
    names: Any, module: fx.GraphModule, inputs: Sequence[Any], lower: Lower, own: Sequence[int]
) -> Any:
    """Inductor's graph, scheduled; None if there is nothing to lower.

    It is noted where Inductor stops: what is raised there may come out as something else, or not.
    """
    stopped: list[Any] = []
    try:
        with _stopping(names, own, stopped):
            with unset_fake_temporarily():
                copied = copy.deepcopy(module)
            lower(copied, inputs)
    except Exception:
        if not stopped:
            raise
    return stopped[0] if stopped else None


def _read(names: Any, lowered: Any, local: LocalGraph) -> Lowerings:
    scheduler = lowered.scheduler
    with_transfers = _Reader(names, lowered, local, is_alone=False).read()
    scheduler.nodes = names.reorder_for_peak_memory(
        scheduler.nodes,
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        names.OrderedSet(lowered.graph_inputs.keys()),
        names.OrderedSet(lowered.get_output_names()),
    )
    scheduler.compute_last_usage()
    alone = _Reader(names, lowered, local, is_alone=True).read()
    return Lowerings(with_transfers, alone)


@contextmanager
def _stopping(names: Any, own: Sequence[int], stopped: list[Any]) -> Iterator[None]:
    """Inductor stops where it would generate code, and remembers where operations come from.

    The graph is then in ``stopped``.  It takes the inputs at the places ``own`` to be its own.
    """
    kind = names.GraphLowering
    register = kind.register_operation

    def stop(graph: Any) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        stopped.append(graph)
        raise _Stopped

    def register_operation(graph: Any, operation: Any) -> Any:
        found = register(graph, operation)
        graph.__dict__.setdefault("lowered_at", {})[found] = graph.current_node
        return found

    with ExitStack() as stack:
        stack.enter_context(names.config.patch(**_SETTINGS))
        for name in ("compile_to_module", "codegen", "codegen_with_cpp_wrapper"):
            stack.enter_context(mock.patch.object(kind, name, stop))
        stack.enter_context(mock.patch.object(kind, "register_operation", register_operation))
        # No kernel is compiled, so it may be missing; and what is said of it would be remembered.
        stack.enter_context(mock.patch.object(names.scheduler, "has_triton", return_value=True))
        donated = mock.patch.object(names.graph, "get_donated_idxs", return_value=list(own))
        stack.enter_context(donated)
        yield


class _Reader:
    """Reads the kernels and buffers of one lowered graph."""

    def __init__(self, names: Any, lowered: Any, local: LocalGraph, *, is_alone: bool) -> None:
        self.names = names
        self.is_alone = is_alone
        self.lowered = lowered
        self.local = local
        self.scheduler = lowered.scheduler
        self.op_of = {op.name: place for place, op in enumerate(local.ops)}
        self.places = self._places()
        self.kept = set(lowered.get_output_names())
        self.partial_bytes: dict[str, int] = {}
        self.scratch_bytes = {
            node.get_name(): self._partial_sums(node)
            for node in self.scheduler.nodes
            if names.MixOrder is not None and isinstance(node, names.MixOrder)
        }
        self.inside = set(self._inside())
        self.groups = list(self._groups())
        self.over, self.replaces = self._taken_over()
        self.roots: dict[str, str] = {}
        self.numbers: dict[str, int] = {}
        self.buffers: list[Buffer] = []
        self.claimed: set[ValueId] = set()
        self.returned = self._returned()

    def read(self) -> Lowering:
        for name, value in zip(self.lowered.graph_input_names, self.local.inputs, strict=False):
            self._add(name, 0, value)
        found = [kernel for nodes in self.groups for kernel in self._joined(nodes)]
        outputs = [self._output(name) for name in self._output_names()]
        return Lowering(tuple(self.buffers), tuple(found), tuple(outputs))

    # --- where things come from -------------------------------------------------------------------

    def _places(self) -> dict[str, int]:
        """For each node of the graph as it was lowered, the op that stands there, or the last one
        before it."""
        places, last = {}, 0
        for node in self.lowered.graph.nodes:
            last = self.op_of.get(node.name, last)
            places[node.name] = len(self.local.ops) - 1 if node.op == "output" else last
        return places

    def _place(self, operation: Any) -> int:
        node = self.lowered.lowered_at.get(operation.get_operation_name())
        return 0 if node is None else self.places.get(node.name, 0)

    def _origins(self, operation: Any) -> set[int]:
        names = (getattr(node, "name", "") for node in operation.origins or ())
        return {self.op_of[name] for name in names if name in self.op_of}

    def _output_names(self) -> Iterator[str]:
        """The buffer of each output, empty for what is no tensor."""
        ir = self.names.ir
        for output in self.lowered.graph_outputs:
            is_other = isinstance(output, ir.NoneAsConstantBuffer | ir.ShapeAsConstantBuffer)
            yield "" if is_other else output.get_name()

    def _returned(self) -> Mapping[str, ValueId]:
        """What the graph returns, by its buffer: the first one where several lie on it."""
        found: dict[str, ValueId] = {}
        for name, value in zip(self._output_names(), self.local.outputs, strict=False):
            if name and value is not None:
                found.setdefault(self._root(name), value)
        return found

    def _groups(self) -> Iterator[list[Any]]:
        """What runs in one call: on the CPU all kernels between two of a library (definition 2)."""
        group: list[Any] = []
        for node in self.scheduler.nodes:
            device = node.get_device()
            is_alone = node.is_extern() or node.is_template() or not device or device.type != "cpu"
            if group and is_alone:
                yield group
                group = []
            group.append(node)
            if is_alone or len(group) == _MOST_TOGETHER:
                yield group
                group = []
        if group:
            yield group

    # --- memory that is used again ----------------------------------------------------------------

    def _taken_over(self) -> tuple[dict[str, str], dict[str, str]]:
        """The buffer in whose memory each is written; and those that would be in an input's."""
        scheduler = self.scheduler
        own, scheduler.name_to_donated_buffer = scheduler.name_to_donated_buffer, {}
        over = self._planned()
        scheduler.name_to_donated_buffer = own
        if self.is_alone:
            return over, {}
        replaces = {name: read for name, read in self._planned().items() if read in own}
        return over, {name: read for name, read in replaces.items() if name not in over}

    def _planned(self) -> dict[str, str]:
        """What Inductor plans, kernel by kernel, when it generates their code."""
        names, lowered, scheduler = self.names, self.lowered, self.scheduler
        kernel = SimpleNamespace(
            args=SimpleNamespace(make_inplace=lambda read, written: None),
            inplace_update_buffers={},
            mutations=set(),
        )
        # A new one each time: what it has allocated and freed is its own.
        lowered.init_wrapper_code()
        wrapper = lowered.wrapper_code
        scheduler.completed_operations.clear()
        scheduler.buffer_names_to_free.clear()
        removed = names.OrderedSet(lowered.removed_buffers)
        with (
            names.V.set_kernel_handler(kernel),
            names.config.patch(allow_buffer_reuse=self.is_alone),
        ):
            for nodes in self.groups:
                for node in nodes:
                    scheduler.current_node = node
                    over = kernel.inplace_update_buffers = {}
                    for part in node.get_nodes():
                        part.decide_inplace_update()
                        part.mark_run()
                    lowered.removed_buffers.update(self._removed(node, over))
                    scheduler.buffer_names_to_free.update(node.last_usage)
                    scheduler.completed_operations.update(node.get_operation_names())
                # Stands for the kernel's call.
                wrapper.writeline("")
                scheduler.free_buffers()
            wrapper.run_wrapper_ir_passes(False)
        scheduler.current_node = None
        lowered.removed_buffers = removed
        return {
            line.reused_as.get_name(): line.node.get_name()
            for line in wrapper.lines
            if isinstance(line, names.ReuseLine)
        }

    def _removed(self, node: Any, over: Mapping[str, str]) -> set[str]:
        """The buffers that the kernel of ``node`` keeps in registers: of those that are written one
        over the other either all or none, as the first may be there before, or the last be used
        after."""
        removed = {buffer.get_name() for buffer in node.get_outputs()} & self.inside
        for written, read in over.items():
            if read not in removed:
                removed.discard(written)
        for written, read in reversed(over.items()):
            if written not in removed:
                removed.discard(read)
        return removed

    # --- buffers ----------------------------------------------------------------------------------

    def _inside(self) -> Iterator[str]:
        """Buffers that one kernel makes and alone uses, in registers."""
        for node in self.scheduler.nodes:
            parts = {part.get_name() for part in node.get_nodes()}
            across = self._across_loops(node) if len(parts) > 1 else ()
            for buffer in node.get_outputs() if len(parts) > 1 else ():
                name = buffer.get_name()
                is_free = self.scheduler.can_buffer_be_removed_through_fusion(name, parts)
                if is_free and name not in self.kept and name not in across:
                    yield name

    def _across_loops(self, node: Any) -> Collection[str]:
        """What the kernel of ``node`` makes in one loop and reads in another (definition 3)."""
        names, device = self.names, node.get_device()
        is_loops = type(node) is names.scheduler.FusedSchedulerNode and not node.is_template()
        if not is_loops or device is None or device.type == "cpu":
            return ()
        parts = list(node.get_nodes())
        _, (count, reduced) = max(parts, key=lambda part: bool(part.is_reduction())).group
        if reduced == 1:
            return ()
        backend = self.scheduler.get_backend(device)
        backend = getattr(backend, "_triton_scheduling", backend)
        schedule = backend.generate_node_schedule(parts, count, reduced)
        features = names.SIMDKernelFeatures(schedule, count, reduced)
        if names.V.choices.should_use_persistent_reduction(features, False):
            return ()
        sizes = features.numel, features.reduction_numel
        found: Collection[str] = names.MemoryEstimator(features, sizes).must_keep_buffers
        return found

    def _partial_sums(self, node: Any) -> int:
        """Note how large the partial sums of a kernel that reduces in two orders are; returns what
        is allocated beside them (definition 3)."""
        sizes = self.names.scheduler.MixOrderReduction.get_numel_rnumel(node.node1)
        rows, columns = map(self._hint, sizes)
        properties = self.names.DeviceProperties.create(node.get_device())
        count = -(-rows // self._rows_together(rows, properties.multi_processor_count))
        sums = [part for part in node.node2.get_nodes() if part.is_reduction()]
        size_bytes = _FLOAT_BYTES * count * columns
        partial = Value("tensor", None, "float32", _FLOAT_BYTES, (count, columns), (columns, 1))
        scratch_bytes = sum(reduction_bytes(partial, {0}, properties.multi_processor_count))
        if not getattr(sums[0].node, "_split_size", None):
            return scratch_bytes + size_bytes * len(sums)
        # What Inductor took for the first of two stages is not run, and the partial sums are there.
        self.partial_bytes.update((part.get_outputs()[0].get_name(), size_bytes) for part in sums)
        return scratch_bytes

    def _rows_together(self, rows: int, multiprocessor_count: int) -> int:
        """Of how many rows Inductor makes one partial sum."""
        forced = self.names.config.triton.mix_order_reduction_split_size
        if forced is not None:
            return int(forced)
        share = max(1, rows // (8 * multiprocessor_count))
        return int(min(128, max(16, 1 << (share.bit_length() - 1))))

    def _hint(self, size: Any) -> int:
        return int(self.lowered.sizevars.optimization_hint(size, fallback=0))

    def _root(self, name: str) -> str:
        """The buffer that has the memory of ``name`` (definition 2)."""
        seen = []
        while name not in self.roots:
            seen.append(name)
            below = self._below(name)
            if below is None or below in seen:
                self.roots[name] = name
                break
            name = below
        for one in seen:
            self.roots[one] = self.roots[name]
        return self.roots[name]

    def _below(self, name: str) -> str | None:
        renamed = self.scheduler.mutation_real_name.get(name) or self.over.get(name)
        if renamed is not None:
            return str(renamed)
        buffer = self.scheduler.name_to_buf.get(name)
        if buffer is None:
            return None
        layout, ir = buffer.node.layout, self.names.ir
        if isinstance(layout, ir.NonOwningLayout):
            return str(layout.view.get_name())
        if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
            return str(layout.get_buffer().get_name())
        aliased = buffer.node.get_inputs_that_alias_output()
        return str(aliased[0]) if aliased else None

    def _size_bytes(self, node: Any) -> int:
        ir = self.names.ir
        if isinstance(node.layout, ir.NoneLayout | ir.MultiOutputLayout):
            return 0
        count = self.lowered.get_allocation_storage_size(node)
        return self._hint(count) * int(node.get_dtype().itemsize)

    def _add(self, name: str, size_bytes: int, value: ValueId | None) -> int:
        if value in self.claimed:
            value = None
        if value is not None:
            self.claimed.add(value)
        replaced = None if name in self.returned else self.replaces.get(name)
        over = None if replaced is None else self.numbers.get(replaced)
        self.numbers[name] = len(self.buffers)
        self.buffers.append(Buffer(size_bytes, value, over))
        return self.numbers[name]

    def _value(self, name: str, node: Any) -> ValueId | None:
        """The value that the buffer ``name`` holds: what is returned of it, or what made it."""
        if name in self.returned:
            return self.returned[name]
        origin = node.get_origin_node()
        place = None if origin is None else self.op_of.get(self._maker(origin).name)
        if place is None:
            return None
        outputs = self.local.ops[place].outputs
        index = node.indices[0][1] if isinstance(node, self.names.ir.MultiOutput) else 0
        is_one = len(outputs) == 1 or isinstance(node, self.names.ir.MultiOutput)
        value = outputs[index] if is_one and index < len(outputs) else None
        # What is returned of it may be a copy in another layout.
        return None if value in self.returned.values() else value

    def _maker(self, node: Any) -> Any:
        """The op whose result ``node`` takes an element of; or ``node``."""
        is_element = getattr(node.target, "__name__", "") == "getitem"
        return node.args[0] if is_element and isinstance(node.args[0], fx.Node) else node

    def _output(self, name: str) -> int | None:
        return self.numbers.get(self._root(name)) if name else None

    # --- kernels ----------------------------------------------------------------------------------

    def _joined(self, nodes: Sequence[Any]) -> Iterator[Kernel]:
        found = [kernel for node in nodes for kernel in self._kernel(node)]
        for place, kernel in enumerate(found):
            yield msgspec.structs.replace(kernel, joined=place > 0)

    def _kernel(self, node: Any) -> Iterator[Kernel]:
        parts = [part.node for part in node.get_nodes()]
        ir = self.names.ir
        if all(isinstance(part, ir.MultiOutput) for part in parts):
            return
        makes = [self._made(buffer) for buffer in self._allocated(node)]
        scratch_bytes = self.scratch_bytes.get(node.get_name())
        if scratch_bytes:
            makes.append(len(self.buffers))
            self.buffers.append(Buffer(scratch_bytes, None))
        used = (self._root(name) for name in node.used_or_aliased_buffer_names())
        reads = {self.numbers[name] for name in used if name in self.numbers} - set(makes)
        if isinstance(node, self.names.NopKernel) and not makes:
            return
        place = min(self._place(part) for part in parts)
        origins = {op for part in parts for op in self._origins(part)}
        ops = tuple(sorted(origins)) or (place,)
        extern = next((part for part in parts if isinstance(part, ir.ExternKernel)), None)
        made = {self._root(buffer.get_name()) for buffer in node.get_outputs()}
        is_returned = extern is None and not made.isdisjoint(self.returned)
        early = ops[-1] if is_returned and not self.is_alone and ops[-1] < place else None
        if extern is not None:
            own = self._own(extern, ops)
            ops = (*(op for op in ops if op != own), own)
        roots = (
            self._root(n) for b in node.get_outputs() if (n := b.get_name()) not in self.inside
        )
        writes = {self.numbers[name] for name in roots if name in self.numbers} - set(makes)
        yield Kernel(
            place,
            ops,
            tuple(sorted(reads)),
            tuple(makes),
            tuple(sorted(writes)),
            self._call(extern),
            early=early,
            unread_bytes=0 if extern is not None else self._unread_bytes(node, reads),
            reduces=extern is None and any(part.is_reduction() for part in node.get_nodes()),
        )

    def _unread_bytes(self, node: Any, reads: Collection[int]) -> int:
        """Of the buffers ``reads``, the bytes of those that no loop of ``node`` reads."""
        # A weak one says only what runs before what.
        found = (d for d in node.read_writes.reads if not isinstance(d, self.names.WeakDep))
        read = {self.numbers.get(self._root(dep.name)) for dep in found}
        return sum(self.buffers[number].size_bytes for number in reads if number not in read)

    def _own(self, extern: Any, ops: tuple[int, ...]) -> int:
        """Which of ``ops`` the library call stands for."""
        origin = extern.get_origin_node()
        own = None if origin is None else self.op_of.get(self._maker(origin).name)
        return ops[-1] if own is None else own

    def _call(self, extern: Any) -> str:
        if extern is None:
            return ""
        overload = getattr(extern, "op_overload", None)
        origin = extern.get_origin_node()
        if overload is None and origin is not None:
            overload = self._maker(origin).target
        return target_name(overload) if overload is not None else type(extern).__name__

    def _allocated(self, node: Any) -> Iterator[Any]:
        """The buffers that ``node`` is the first to need; a tuple's elements are made with it."""
        for made in node.get_outputs():
            for buffer in (made, *self._elements(made)):
                name = buffer.get_name()
                root = self._root(name)
                if root not in self.numbers and name not in self.inside:
                    found = self.scheduler.name_to_buf.get(root)
                    if found is not None and self._size_bytes(found.node):
                        yield found

    def _elements(self, buffer: Any) -> Iterator[Any]:
        if not isinstance(buffer.node.layout, self.names.ir.MultiOutputLayout):
            return
        for user in buffer.users:
            for found in user.node.get_outputs() if hasattr(user.node, "get_outputs") else ():
                if isinstance(found.node, self.names.ir.MultiOutput):
                    yield found

    def _made(self, buffer: Any) -> int:
        name, node = buffer.get_name(), buffer.node
        size_bytes = self.partial_bytes.get(name, self._size_bytes(node))
        return self._add(name, size_bytes, self._value(name, node))
