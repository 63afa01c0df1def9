"""Read partitioned FX graphs into the records of ``offplan.graph``.

A compiled graph can run several times in one step (a layer with a graph break inside, called in a
loop), so reading has two parts: ``read_region`` turns one forward/backward pair into a template
with local ids, and ``FactsBuilder`` places the template on the timeline once per run, bound to
the tensors that the run was given.

Aliasing is read off fake tensors (definition 3 of ``offplan.graph``): the partitioner copies nodes
between the two graphs with their fake tensors, so equal storages mean equal allocations only
between an op's output and that op's own inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import fx

from offplan.graph import (
    Graph,
    GraphInput,
    GraphOutput,
    InputKind,
    Lowering,
    Op,
    OutputKind,
    Region,
    SavedValue,
    Storage,
    StorageId,
    Value,
    ValueId,
)
from offplan.trace._torch import (
    FakeTensor,
    OpOverload,
    is_traceable_wrapper_subclass,
    storage_key,
    tree_leaves,
)
from offplan.workspaces import joined_arguments

# How op schemas name random-number state; attention kernels return it beside their output.
_RNG_RETURNS = {"philox_seed", "philox_offset", "rng_state"}
_RNG_TARGETS = {"run_and_save_rng_state"}
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# A decorated forward knows its module as the first of its ``args``.
_ROOT = re.compile(r"^[LG]\[['\"](?:args['\"]\]\[\d+\]|[^'\"]*['\"]\])")
_CONTAINERS = {"_modules", "_parameters", "_buffers", "_orig_mod"}
_PATH_STEP = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]|([A-Za-z0-9_]+)")

SourceName = Callable[[str, int], str]


@dataclass(frozen=True)
class LocalGraph:
    """One FX graph with ids local to its region."""

    inputs: tuple[ValueId, ...]
    input_names: tuple[str, ...]
    constants: tuple[GraphInput, ...]
    ops: tuple[Op, ...]
    outputs: tuple[ValueId | None, ...]
    lowering: Lowering | None = None
    lowering_alone: Lowering | None = None


@dataclass(frozen=True)
class RegionTemplate:
    """A traced forward and backward, not yet bound to the tensors of a run.

    ``output_count`` forward outputs go to the caller, the first ``mutated_count`` of them new
    values of inputs; the rest are saved.
    """

    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    forward: LocalGraph
    backward: LocalGraph | None
    saved: tuple[SavedValue, ...]
    output_count: int
    mutated_count: int


@dataclass(frozen=True)
class BoundInput:
    """What one run was given: its name, and an identity for its storage (None: not a tensor)."""

    kind: InputKind
    name: str
    storage_key: int | None


def read_region(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    *,
    output_count: int,
    mutated_count: int,
    source_name: SourceName,
) -> RegionTemplate:
    """Read one partitioned pair; ``backward`` is None for a region without gradients."""
    reader = _Reader(source_name)
    forward_graph = reader.read(forward, {})
    if backward is None:
        return reader.template(forward_graph, None, (), len(forward_graph.outputs), mutated_count)
    pairs = _saved_pairs(forward, backward, output_count)
    known = {
        backward_name: forward_graph.outputs[position] for position, backward_name in pairs.items()
    }
    backward_graph = reader.read(backward, known)
    position_of_name = dict(zip(backward_graph.input_names, backward_graph.inputs, strict=True))
    saved = tuple(
        SavedValue(value=value, backward_value=position_of_name[name])
        for name, value in known.items()
        if value is not None
    )
    return reader.template(forward_graph, backward_graph, saved, output_count, mutated_count)


def _saved_pairs(
    forward: fx.GraphModule, backward: fx.GraphModule, output_count: int
) -> dict[int, str]:
    """Forward output position -> name of the backward placeholder that receives it.

    Tensors and symbolic sizes each keep their order, but the backward takes the sizes first.
    """
    outputs = _output_nodes(forward)
    saved = list(enumerate(outputs))[output_count:]
    placeholders = backward.graph.find_nodes(op="placeholder")
    pairs: dict[int, str] = {}
    for is_tensor in (True, False):
        positions = [i for i, node in saved if _holds_tensor(node) == is_tensor]
        receivers = [node for node in placeholders if _holds_tensor(node) == is_tensor]
        # Tangents and random state follow the saved tensors, so the first ones are the saved ones.
        pairs.update((i, node.name) for i, node in zip(positions, receivers, strict=False))
    return dict(sorted(pairs.items()))


def _output_nodes(module: fx.GraphModule) -> list[Any]:
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0]) if isinstance(output.args[0], list | tuple) else [output.args[0]]


def _holds_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


class _Reader:
    """Reads the graphs of one region into shared tables of values and storages."""

    def __init__(self, source_name: SourceName) -> None:
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.keys: list[int | None] = []
        self.source_name = source_name

    def template(
        self,
        forward: LocalGraph,
        backward: LocalGraph | None,
        saved: tuple[SavedValue, ...],
        output_count: int,
        mutated_count: int,
    ) -> RegionTemplate:
        return RegionTemplate(
            tuple(self.storages),
            tuple(self.values),
            forward,
            backward,
            saved,
            output_count,
            mutated_count,
        )

    def read(self, module: fx.GraphModule, known: dict[str, ValueId | None]) -> LocalGraph:
        """Read one graph; placeholders in ``known`` live on the storage of that earlier value."""
        env: dict[fx.Node, Any] = {}
        inputs: list[ValueId] = []
        names: list[str] = []
        constants: list[GraphInput] = []
        ops: list[Op] = []
        shared: dict[int, StorageId] = {}
        outputs: tuple[ValueId | None, ...] = ()
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = self._placeholder(node, known.get(node.name), shared)
                inputs.append(env[node])
                names.append(node.name)
            elif node.op == "get_attr":
                env[node] = self._constant(module, node, shared)
                constants.append(GraphInput(env[node], "constant", str(node.target)))
            elif node.op == "output":
                outputs = tuple(
                    _single(env[out]) if isinstance(out, fx.Node) else None
                    for out in _output_nodes(module)
                )
            elif _is_getitem(node):
                env[node] = self._element(env[node.args[0]], node)
            else:
                op, env[node] = self._op(node, env)
                ops.append(op)
        return LocalGraph(tuple(inputs), tuple(names), tuple(constants), tuple(ops), outputs)

    def _placeholder(
        self, node: fx.Node, same_as: ValueId | None, shared: dict[int, StorageId]
    ) -> ValueId:
        value = node.meta.get("val")
        key = _key(value)
        if key is None:
            return self._add(value, None, None)
        if same_as is not None:
            storage = self.values[same_as].storage
            assert storage is not None
            shared[key] = storage
        elif key not in shared:
            shared[key] = self._new_storage(value)
        return self._add(value, key, shared[key])

    def _constant(
        self, module: fx.GraphModule, node: fx.Node, shared: dict[int, StorageId]
    ) -> ValueId:
        value = node.meta.get("val")
        if value is None:
            value = _attribute(module, str(node.target))
        key = _key(value)
        if key is not None and key not in shared:
            shared[key] = self._new_storage(value)
        return self._add(value, key, None if key is None else shared[key])

    def _op(self, node: fx.Node, env: dict[fx.Node, Any]) -> tuple[Op, Any]:
        inputs = tuple(_flat([env[arg] for arg in node.all_input_nodes]))
        of_inputs = {self.keys[i]: self.values[i].storage for i in inputs}
        own: dict[int, StorageId] = {}
        rng = _rng_positions(node)

        def place(value: Any, position: int) -> ValueId:
            key = _key(value)
            if key is None:
                return self._add(value, None, None)
            storage = of_inputs.get(key)
            if storage is None:
                if key not in own:
                    own[key] = self._new_storage(value)
                storage = own[key]
            return self._add(value, key, storage, rng_state=position in rng)

        placed = _map_structure(_node_value(node), place)
        op = Op(
            name=node.name,
            target=target_name(node.target),
            inputs=inputs,
            outputs=tuple(_flat(placed)),
            constants=_constants(node),
            mutates=tuple(_flat([env[arg] for arg in _mutated_nodes(node)])),
            declares_alias=_declares_alias(node),
            module=module_path(node),
            source=source_of(node.meta.get("stack_trace") or "", self.source_name),
        )
        return op, placed

    def _element(self, structure: Any, node: fx.Node) -> Any:
        if isinstance(structure, list):
            return structure[int(node.args[1])]  # type: ignore[arg-type]
        return structure

    def _new_storage(self, value: torch.Tensor) -> StorageId:
        size = value.untyped_storage().nbytes()
        if not isinstance(size, int):
            # A symbolic size: the rules skip its values before they ask for bytes.
            size = 0
        self.storages.append(Storage(size, value.device.type))
        return StorageId(len(self.storages) - 1)

    def _add(
        self, value: Any, key: int | None, storage: StorageId | None, rng_state: bool = False
    ) -> ValueId:
        self.values.append(_value(value, storage, rng_state))
        self.keys.append(key)
        return ValueId(len(self.values) - 1)


def _value(value: Any, storage: StorageId | None, rng_state: bool) -> Value:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
        return Value("symint")
    if not isinstance(value, torch.Tensor):
        return Value("python")
    dtype = str(value.dtype).removeprefix("torch.")
    if storage is None:
        return Value("tensor", dtype=dtype, layout=_layout(value))
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(size, int) for size in sizes):
        return Value(
            "tensor", storage, dtype, value.dtype.itemsize, symbolic=str(tuple(value.shape))
        )
    return Value(
        "tensor",
        storage,
        dtype,
        value.dtype.itemsize,
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        rng_state=rng_state,
    )


def _layout(value: torch.Tensor) -> str:
    if is_traceable_wrapper_subclass(value):
        return type(value).__name__
    if value.is_quantized:
        return "quantized"
    if value.is_nested:
        return "nested"
    return str(value.layout).removeprefix("torch.")


def _key(value: Any) -> int | None:
    """Identity of a plain strided tensor's storage; None for everything else."""
    if not isinstance(value, torch.Tensor) or _layout(value) != "strided":
        return None
    return storage_key(value)


def _node_value(node: fx.Node) -> Any:
    """What the node returned when traced.

    The partitioner wraps random ops that it recomputes, and leaves the wrappers without a value:
    it is then put together from the elements taken of it, or found by running the wrapped op on
    fake tensors.
    """
    if "val" in node.meta:
        return node.meta["val"]
    elements = {int(u.args[1]): u.meta.get("val") for u in node.users if _is_getitem(u)}  # type: ignore[arg-type]
    if elements:
        return [elements.get(i) for i in range(max(elements) + 1)]
    position = next((i for i, a in enumerate(node.args) if isinstance(a, OpOverload)), None)
    if position is None:
        return None
    args, kwargs = fx.map_arg((node.args[position + 1 :], node.kwargs), lambda n: n.meta["val"])
    kwargs = {name: value for name, value in kwargs.items() if name != "rng_state"}
    fake = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor))
    with fake.fake_mode:
        return node.args[position](*args, **kwargs)  # type: ignore[operator]


def _map_structure(value: Any, place: Callable[[Any, int], ValueId]) -> Any:
    """``place`` applied to each leaf with its position at the top level; tuples become lists."""
    if not isinstance(value, list | tuple):
        return place(value, 0)
    return [
        _map_structure(item, lambda leaf, _inner, p=position: place(leaf, p))
        for position, item in enumerate(value)
    ]


def _flat(structure: Any) -> Iterator[ValueId]:
    if isinstance(structure, list):
        for item in structure:
            yield from _flat(item)
    else:
        yield structure


def _single(structure: Any) -> ValueId:
    return next(_flat(structure))


def _attribute(module: fx.GraphModule, target: str) -> Any:
    found: Any = module
    for step in target.split("."):
        found = getattr(found, step)
    return found


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node)


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def _rng_positions(node: fx.Node) -> set[int]:
    schema = _schema(node)
    if schema is not None:
        return {i for i, item in enumerate(schema.returns) if item.name in _RNG_RETURNS}
    return {0} if target_name(node.target).split(".")[-1] in _RNG_TARGETS else set()


def _declares_alias(node: fx.Node) -> bool:
    schema = _schema(node)
    return schema is not None and any(item.alias_info is not None for item in schema.returns)


def _mutated_nodes(node: fx.Node) -> list[fx.Node]:
    schema = _schema(node)
    if schema is None or not schema.is_mutable:
        return []
    found: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        fx.map_arg(given, found.append)
    return found


def target_name(target: Any) -> str:
    """``aten.mm.default`` for an overload; ``module.function`` for anything else."""
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", "") or ""
    return f"{module.split('.')[-1]}.{getattr(target, '__name__', type(target).__name__)}"


def _constants(node: fx.Node) -> str:
    """The op's arguments with ``%`` for each value: what tells two calls of one op apart."""
    parts = [_render(arg) for arg in node.args]
    parts += [f"{name}={_render(arg)}" for name, arg in sorted(node.kwargs.items())]
    return joined_arguments(parts)


def _render(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return "%"
    if isinstance(argument, list | tuple):
        return "[" + ", ".join(_render(item) for item in argument) + "]"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{k}: {_render(v)}" for k, v in argument.items()) + "}"
    if isinstance(argument, fx.GraphModule):
        return argument.print_readable(print_output=False)
    if isinstance(argument, str | int | float | bool | complex) or argument is None:
        return repr(argument)
    if callable(argument) and hasattr(argument, "__name__"):
        return str(argument.__name__)
    text = str(argument)
    # An object that prints its address would make the digest differ from run to run.
    return type(argument).__name__ if " at 0x" in text else text


def module_path(node: fx.Node) -> str:
    """The innermost module's path (``layers.0.self_attn``); empty at the root."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return clean_path(str(path))


def clean_path(path: str) -> str:
    """A module's or parameter's path below the object that the traced frame calls it by.

    ``L['self']._modules['layers']._modules['0'].mlp`` -> ``layers.0.mlp``.
    """
    steps = [quoted or plain for quoted, plain in _PATH_STEP.findall(_ROOT.sub("", path))]
    return ".".join(step for step in steps if step not in _CONTAINERS)


def source_of(stack_trace: str, source_name: SourceName) -> str:
    """The innermost line outside torch, as ``file:line``; empty when the trace has none."""
    frames = [(path, int(line)) for path, line in _FRAME.findall(stack_trace)]
    for path, line in reversed(frames):
        name = source_name(path, line)
        if name:
            return name
    return ""


@dataclass
class FactsBuilder:
    """Places region templates on one timeline, with ids over all regions."""

    storages: list[Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    by_key: dict[int, StorageId] = field(default_factory=dict)

    def add(
        self,
        template: RegionTemplate,
        inputs: Sequence[BoundInput],
        output_keys: Sequence[int | None],
        output_names: Sequence[str],
        prefix: str = "",
    ) -> None:
        """Add one run of ``template``.

        ``inputs`` has one entry per forward placeholder.  ``output_keys`` are the storages of what
        the run returned, under which a later region receives them.  ``prefix`` is the path of the
        module whose frame was compiled, below which the template's module paths are.
        """
        placed = self._place_storages(template, inputs)
        first = len(self.values)
        self.values.extend(
            value
            if value.storage is None
            else msgspec.structs.replace(value, storage=placed[value.storage])
            for value in template.values
        )

        def shift(value: ValueId) -> ValueId:
            return ValueId(first + value)

        self._remember_outputs(template, placed, output_keys)
        forward = self._graph(
            template.forward,
            shift,
            [
                GraphInput(shift(v), b.kind, b.name)
                for v, b in _zip(template.forward.inputs, inputs)
            ],
            _forward_outputs(template, output_names),
            prefix,
        )
        backward = template.backward and self._graph(
            template.backward,
            shift,
            _backward_inputs(template, shift),
            [("gradient", f"gradient of {item.name}") for item in inputs],
            prefix,
        )
        saved = tuple(SavedValue(shift(s.value), shift(s.backward_value)) for s in template.saved)
        self.regions.append(Region(forward, backward, saved))

    def _place_storages(
        self, template: RegionTemplate, inputs: Sequence[BoundInput]
    ) -> list[StorageId]:
        placed: dict[int, StorageId] = {}
        for local, bound in _zip(template.forward.inputs, inputs):
            storage = template.values[local].storage
            if storage is None or bound.storage_key is None:
                continue
            if bound.storage_key not in self.by_key:
                self.by_key[bound.storage_key] = self._new(template.storages[storage])
            placed.setdefault(storage, self.by_key[bound.storage_key])
        for index, storage in enumerate(template.storages):
            if index not in placed:
                placed[index] = self._new(storage)
        return [placed[index] for index in range(len(template.storages))]

    def _new(self, storage: Storage) -> StorageId:
        self.storages.append(storage)
        return StorageId(len(self.storages) - 1)

    def _remember_outputs(
        self,
        template: RegionTemplate,
        placed: list[StorageId],
        output_keys: Sequence[int | None],
    ) -> None:
        returned = template.forward.outputs[: template.output_count]
        for value, key in zip(returned, output_keys, strict=False):
            storage = None if value is None else template.values[value].storage
            if storage is not None and key is not None:
                self.by_key.setdefault(key, placed[storage])

    def _graph(
        self,
        local: LocalGraph,
        shift: Callable[[ValueId], ValueId],
        inputs: list[GraphInput],
        outputs: list[tuple[OutputKind, str]],
        prefix: str,
    ) -> Graph:
        constants = [GraphInput(shift(c.value), c.kind, c.name) for c in local.constants]
        # A backward may return more (tokens) or fewer (no gradient of a generator) than inputs.
        described = outputs + [("gradient", "")] * (len(local.outputs) - len(outputs))
        return Graph(
            inputs=(*inputs, *constants),
            ops=tuple(
                msgspec.structs.replace(
                    op,
                    inputs=tuple(map(shift, op.inputs)),
                    outputs=tuple(map(shift, op.outputs)),
                    mutates=tuple(map(shift, op.mutates)),
                    module=".".join(filter(None, (prefix, op.module))),
                )
                for op in local.ops
            ),
            outputs=tuple(
                GraphOutput(None if value is None else shift(value), kind, name)
                for value, (kind, name) in zip(local.outputs, described, strict=False)
            ),
            lowering=local.lowering and _shifted(local.lowering, shift),
            lowering_alone=local.lowering_alone and _shifted(local.lowering_alone, shift),
        )


def _shifted(lowering: Lowering, shift: Callable[[ValueId], ValueId]) -> Lowering:
    buffers = tuple(
        buffer
        if buffer.value is None
        else msgspec.structs.replace(buffer, value=shift(buffer.value))
        for buffer in lowering.buffers
    )
    return msgspec.structs.replace(lowering, buffers=buffers)


def _zip(
    values: Sequence[ValueId], inputs: Sequence[BoundInput]
) -> Iterator[tuple[ValueId, BoundInput]]:
    return zip(values, inputs, strict=True)


def _forward_outputs(
    template: RegionTemplate, output_names: Sequence[str]
) -> list[tuple[OutputKind, str]]:
    described: list[tuple[OutputKind, str]] = []
    for position in range(len(template.forward.outputs)):
        if position < template.mutated_count:
            described.append(("mutated", output_names[position]))
        elif position < template.output_count:
            described.append(("output", output_names[position]))
        else:
            described.append(("saved", f"saved {position - template.output_count}"))
    return described


def _backward_inputs(
    template: RegionTemplate, shift: Callable[[ValueId], ValueId]
) -> list[GraphInput]:
    assert template.backward is not None
    saved = {s.backward_value: i for i, s in enumerate(template.saved)}
    items: list[GraphInput] = []
    for value, name in zip(template.backward.inputs, template.backward.input_names, strict=True):
        if value in saved:
            items.append(GraphInput(shift(value), "saved", f"saved {saved[value]}"))
        else:
            items.append(GraphInput(shift(value), "tangent", name))
    return items
