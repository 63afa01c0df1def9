"""``trace:FOLDER``: the graphs of a real run, as facts, without the model's code.

1.  AOTAutograd's forward and backward are read as torch printed them (``doors.graph_text``), and
    built as FX graphs again.  What the forward returns last is what the backward takes first.
2.  Each op is looked up by name and run on fake tensors, for what shares memory with what; only ops
    of torch itself, and none on values.  What comes out must be what the log says of it.
3.  An op of another library is refused by name; with ``-p unknown=logged`` its outputs are what the
    log says, each on a storage of its own, which torch demands of a custom op.
4.  Symbolic sizes have the values with which they were compiled, or those given (``-p s0=8``).
5.  Each compiled graph is one region; those handed from one to the next are not joined.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import fx
from torch.fx.graph import dtype_abbrs

from offplan.doors import TRACE_PREFIX
from offplan.doors.graph_text import GraphText, Line, Sizes, TensorText, combine, read_graph
from offplan.doors.torch_log import LoggedGraph, LoggedInput, TraceLog, read_log
from offplan.errors import OffplanError, TraceError, UsageError
from offplan.gpus import DEFAULT_GPU, find_gpu
from offplan.graph import Compiler, GraphFacts, InputKind, ModelTensor, TargetRef
from offplan.overwritten import warnings_of
from offplan.target import arguments, describe
from offplan.trace._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    inductor,
    storage_key,
    tree_leaves,
)
from offplan.trace.backend import compile_settings, quiet_logs
from offplan.trace.facts import BoundInput, FactsBuilder, RegionTemplate, clean_path, read_region
from offplan.trace.sources import SourceNames

# Ops of torch itself, which have fake kernels that compute nothing.
_OWN_NAMESPACES = (
    "aten",
    "prims",
    "rngprims",
    "inductor",
    "_c10d_functional",
    "quantized_decomposed",
)
_RNG_WRAPPERS = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")
_NOT_SAVED = ("tangents_", "bwd_rng_state", "bwd_seed", "bwd_base_offset", "tokens")
_LOCAL = re.compile(r"""^L(?:\[['"]kwargs['"]\])?\[['"](?P<name>[^'"]*)['"]\]""")
_DTYPES = {short: dtype for dtype, short in dtype_abbrs.items()}


@dataclass(frozen=True)
class Options:
    """What ``-p`` takes, beside the symbols in the graphs."""

    rank: int | None = None
    graphs: str | None = None
    unknown: Literal["refuse", "logged"] = "refuse"


def read_trace(target: str, params: Mapping[str, str], gpu: str | None = None) -> GraphFacts:
    """The facts of the run that ``target`` (``trace:FOLDER``, a folder or a log) is a trace of.

    ``gpu`` is the one that it ran on, which a trace does not say.  Raises ``TargetError`` if there
    is no trace, ``TraceError`` naming the op for a graph that cannot be read, ``UsageError`` for a
    parameter that makes no sense.
    """
    options, sizes = _read(params)
    log = read_log(target, options.rank)
    chosen = log.chosen(options.graphs)
    unused = set(sizes) - {symbol for graph in chosen for symbol in graph.sizes}
    if unused:
        listed = ", ".join(sorted({s for g in chosen for s in g.sizes if s.startswith("s")}))
        raise UsageError(
            f"a trace takes no parameter {min(unused)!r}",
            fix="its parameters: rank, graphs, unknown" + (f", {listed}" if listed else ""),
        )
    spec = target if target.startswith(TRACE_PREFIX) else TRACE_PREFIX + target
    steps = _Steps(options, sizes, SourceNames())
    with _settings():
        for graph in chosen:
            steps.add(graph)
    return steps.facts(TargetRef(spec, dict(params)), log, chosen, gpu)


def _read(params: Mapping[str, str]) -> tuple[Options, dict[str, int]]:
    own = {key: text for key, text in params.items() if key in Options.__dataclass_fields__}
    sizes: dict[str, int] = {}
    for key, text in params.items():
        if key in own:
            continue
        if not text.isdigit():
            raise UsageError(
                f"a trace takes no parameter {key!r}",
                fix="its parameters: rank, graphs, unknown, and sizes that its graphs name (s0)",
            )
        sizes[key] = int(text)
    return Options(**arguments(Options, "trace:", own)), sizes


@contextmanager
def _settings() -> Iterator[None]:
    with warnings.catch_warnings(), compile_settings(), quiet_logs(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


class _Steps:
    """The regions of a step, one a graph, in the order in which they were compiled."""

    def __init__(self, options: Options, sizes: Mapping[str, int], sources: SourceNames) -> None:
        self.options = options
        self.sizes = sizes
        self.sources = sources
        self.builder = FactsBuilder()
        self.keys: dict[str, int] = {}
        self.model: dict[str, ModelTensor] = {}
        self.unnamed_count = 0
        self.symbolic: dict[str, int | float] = {}
        self.taken: set[str] = set()

    def add(self, graph: LoggedGraph) -> None:
        texts = _Texts.of(graph, self.sizes)
        pair = _pair(graph, texts, self.options.unknown == "logged")
        self.taken |= pair.unknown
        self.symbolic |= texts.symbols()
        template = read_region(
            pair.forward,
            pair.backward,
            output_count=pair.output_count,
            mutated_count=texts.forward.mutated_count,
            source_name=self._source,
        )
        inputs = self._inputs(graph, texts, template)
        returned = template.output_count
        first = sum(o.kind == "output" for r in self.builder.regions for o in r.forward.outputs)
        names = [str(first + place) for place in range(returned)]
        self.builder.add(template, inputs, [None] * returned, names)

    def _source(self, file: str, line: int) -> str:
        # Where torch was installed on the machine that ran.
        return "" if "-packages/torch/" in file else self.sources(file, line)

    def _inputs(
        self, graph: LoggedGraph, texts: _Texts, template: RegionTemplate
    ) -> list[BoundInput]:
        bound: list[BoundInput] = []
        for place, (local, placeholder) in enumerate(
            zip(template.forward.inputs, texts.forward.placeholders, strict=True)
        ):
            value = template.values[local]
            logged = graph.inputs[place] if place < len(graph.inputs) else None
            if value.kind != "tensor":
                bound.append(BoundInput("input", placeholder.name, None))
            elif logged is None:
                self.unnamed_count += 1
                bound.append(BoundInput("input", placeholder.name, self._key(f"?{len(self.keys)}")))
            else:
                bound.append(self._bound(graph, logged))
                self._remember(bound[-1], logged, value)
        return bound

    def _bound(self, graph: LoggedGraph, logged: LoggedInput) -> BoundInput:
        kind = _kind(logged)
        if kind == "input":
            return BoundInput(kind, _input_name(logged.source), self._key(logged.storage))
        name = clean_path(logged.source)
        # Described anew for every graph; one name in one piece of code is one tensor.
        return BoundInput(kind, name, self._key(f"{graph.scope} {name} {logged.storage_bytes}"))

    def _key(self, identity: str) -> int:
        return self.keys.setdefault(identity, len(self.keys))

    def _remember(self, bound: BoundInput, logged: LoggedInput, value: Any) -> None:
        if bound.kind not in ("parameter", "buffer"):
            return
        self.model.setdefault(
            f"{bound.storage_key} {bound.name}",
            ModelTensor(
                kind=bound.kind,
                names=(bound.name,),
                dtype=value.dtype,
                shape=value.shape,
                size_bytes=value.logical_bytes,
                requires_grad=logged.requires_grad,
            ),
        )

    def facts(
        self, target: TargetRef, log: TraceLog, chosen: Sequence[LoggedGraph], gpu: str | None
    ) -> GraphFacts:
        devices = {storage.device for storage in self.builder.storages}
        device = "cuda" if "cuda" in devices else "cpu"
        compiler: Compiler = "inductor" if any(g.by_inductor for g in chosen) else "aot_eager"
        facts = GraphFacts(
            target=target,
            torch=log.torch or "unknown",
            device=device,
            gpu=find_gpu(gpu or DEFAULT_GPU).name if device == "cuda" else "",
            attention="auto",
            compiler=compiler,
            partitioner="min-cut",
            model=tuple(self.model.values()),
            storages=tuple(self.builder.storages),
            values=tuple(self.builder.values),
            regions=tuple(self.builder.regions),
        )
        left_open = self._warnings(log, chosen, device, gpu)
        return msgspec.structs.replace(facts, warnings=(*left_open, *warnings_of(facts)))

    def _warnings(
        self, log: TraceLog, chosen: Sequence[LoggedGraph], device: str, gpu: str | None
    ) -> Iterator[str]:
        """What a trace leaves open."""
        yield (
            f"these are the graphs that torch {log.torch or '(unknown)'} compiled in a real run, "
            "attention kernels included; a trace does not say which modules ops belong to, nor "
            "which parameters no graph uses, and its source lines are those of that run"
        )
        if device == "cuda" and gpu is None:
            yield "a trace does not say on which GPU it ran: times are for the default (see --gpu)"
        if self.unnamed_count:
            yield (
                f"it is not known which {self.unnamed_count} inputs of the graphs are parameters: "
                "they count as inputs"
            )
        if any(graph.by_inductor for graph in chosen):
            yield "Inductor fused these graphs; peaks are predicted as if each op ran by itself"
        if len(chosen) > 1:
            yield (
                f"{len(chosen)} graphs, each counted once, in the order of their compilation; a "
                "trace does not say how often each ran, nor what they hand to each other"
            )
        left = [g.compile_id for g in log.graphs if g not in chosen]
        if left:
            yield (
                f"left out: {', '.join(dict.fromkeys(left))}, which have no backward or were "
                "compiled again (-p graphs=... takes others)"
            )
        if self.symbolic:
            listed = ", ".join(f"{name}={value}" for name, value in sorted(self.symbolic.items()))
            yield f"sizes were not fixed when it was compiled: taken are {listed} (-p sets them)"
        if self.taken:
            yield (
                f"not known to torch here, so taken as the log has them: "
                f"{', '.join(sorted(self.taken))}"
            )


def _kind(logged: LoggedInput) -> InputKind:
    if logged.is_parameter or "._parameters[" in logged.source:
        return "parameter"
    return "buffer" if "._buffers[" in logged.source else "input"


def _input_name(source: str) -> str:
    """``x['mask']`` for ``L['x']['mask']``, and for what a wrapper of the forward calls kwargs."""
    match = _LOCAL.match(source)
    return match["name"] + source[match.end() :] if match else source


# From text to graphs (definition 1)


@dataclass(frozen=True)
class _Texts:
    """A pair as it was printed; ``sizes`` evaluates what it says of shapes."""

    forward: GraphText
    backward: GraphText | None
    sizes: Sizes

    @staticmethod
    def of(graph: LoggedGraph, given: Mapping[str, int]) -> _Texts:
        name = graph.compile_id
        sizes = Sizes({**graph.sizes, **given}, name)
        forward = read_graph(graph.forward, f"the forward graph {name}")
        backward = graph.backward and read_graph(graph.backward, f"the backward graph {name}")
        return _Texts(forward, backward or None, sizes)

    def symbols(self) -> dict[str, int | float]:
        """The symbols that inputs are named by, with their values."""
        names = {p.annotation.removeprefix("Sym(").rstrip(")") for p in self.forward.placeholders}
        return {name: value for name, value in self.sizes.values.items() if name in names}


class _Pair(NamedTuple):
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    output_count: int
    unknown: frozenset[str]


def _pair(graph: LoggedGraph, texts: _Texts, takes_unknown: bool) -> _Pair:
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    if "prims.inductor_" in graph.forward or "prims.inductor_" in (graph.backward or ""):
        # Importing it registers its ops.
        inductor()
    forward = _Rebuilt(texts.forward, texts.sizes, fake_mode, takes_unknown)
    forward.inputs(_values(graph, texts, fake_mode))
    forward.ops()
    if texts.backward is None:
        return _Pair(forward.module(), None, 0, frozenset(forward.unknown))
    received = [p.name for p in texts.backward.placeholders if not p.name.startswith(_NOT_SAVED)]
    output_count = len(texts.forward.outputs) - len(received)
    if output_count < 0:
        raise TraceError(
            f"the backward graph {graph.compile_id} takes {len(received)} saved values, and the "
            f"forward returns {len(texts.forward.outputs)} in all"
        )
    backward = _Rebuilt(texts.backward, texts.sizes, fake_mode, takes_unknown)
    backward.inputs(dict(zip(received, _saved(forward, output_count), strict=True)))
    backward.ops()
    unknown = frozenset(forward.unknown | backward.unknown)
    return _Pair(forward.module(), backward.module(), output_count, unknown)


def _saved(forward: _Rebuilt, output_count: int) -> list[Any]:
    """What the forward hands over, in the order in which the backward takes it: sizes first."""
    saved = [forward.result(output) for output in forward.text.outputs[output_count:]]
    numbers = [value for value in saved if not isinstance(value, torch.Tensor)]
    return numbers + [value for value in saved if isinstance(value, torch.Tensor)]


def _values(graph: LoggedGraph, texts: _Texts, fake_mode: FakeTensorMode) -> dict[str, Any]:
    """The tensors that the forward is given, on the storages that they had."""
    bases: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for place, placeholder in enumerate(texts.forward.placeholders):
        text = texts.sizes.tensor(placeholder.annotation)
        logged = graph.inputs[place] if place < len(graph.inputs) else None
        if text is None or logged is None or not logged.storage_bytes:
            continue
        dtype, device = _dtype(text), torch.device(text.device)
        count = logged.storage_bytes // dtype.itemsize
        if logged.offset + _span(text) > count:
            # Logged for other sizes than those asked for.
            continue
        with fake_mode:
            base = bases.setdefault(
                f"{logged.storage} {dtype}", torch.empty(count, dtype=dtype, device=device)
            )
            values[placeholder.name] = base.as_strided(text.shape, text.stride, logged.offset)
    return values


def _span(text: TensorText) -> int:
    if 0 in text.shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(text.shape, text.stride, strict=True))


def _dtype(text: TensorText) -> torch.dtype:
    dtype = _DTYPES.get(text.dtype)
    if dtype is None:
        raise TraceError(f"a graph has a tensor of type {text.dtype!r}, which torch does not have")
    return dtype


class _Opaque:
    """Stands for an op that is not run: it has a name, and outputs that the log tells."""

    def __init__(self, name: str) -> None:
        self.__module__, _, self.__name__ = name.removeprefix("torch.ops.").partition(".")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it is never run")


class _Rebuilt:
    """A printed graph as an FX graph, each node with the fake value that it has."""

    def __init__(
        self, text: GraphText, sizes: Sizes, fake_mode: FakeTensorMode, takes_unknown: bool
    ) -> None:
        self.text = text
        self.sizes = sizes
        self.fake_mode = fake_mode
        self.takes_unknown = takes_unknown
        self.unknown: set[str] = set()
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        # What a name stands for: a node, or a number.
        self.names: dict[str, Any] = {}
        self.elements: dict[str, dict[int, str]] = {}
        for line in text.lines:
            if isinstance(line.expression, ast.Subscript):
                parent, index = _element(line)
                self.elements.setdefault(parent, {})[index] = line.annotation

    def inputs(self, values: Mapping[str, Any]) -> None:
        """Placeholders; those in ``values`` have the value that is there."""
        for placeholder in self.text.placeholders:
            node = self.graph.placeholder(placeholder.name)
            number = self.sizes.number(placeholder.annotation)
            value = values.get(placeholder.name, number)
            if value is None:
                value = self._fresh(placeholder.annotation)
            node.meta["val"] = value
            self.names[placeholder.name] = node if number is None else number

    def ops(self) -> None:
        for line in self.text.lines:
            try:
                made = self._made(line)
            except OffplanError as error:
                error.where = error.where or self._where(line)
                raise
            self.names[line.name] = made
            if isinstance(made, fx.Node) and line.file:
                made.meta["stack_trace"] = f'File "{line.file}", line {line.line}, in forward'
        self.graph.output(tuple(self._argument(output) for output in self.text.outputs))

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(self.attributes, self.graph)

    def result(self, expression: ast.expr) -> Any:
        """The value of a returned name."""
        found = self._argument(expression)
        return found.meta.get("val") if isinstance(found, fx.Node) else found

    def _where(self, line: Line) -> str:
        place = f", {line.file}:{line.line}" if line.file else ""
        return f"graph {self.sizes.graph}, {line.name}{place}"

    def _fresh(self, annotation: str) -> Any:
        """A tensor on a storage of its own; None if the annotation is no tensor's."""
        text = self.sizes.tensor(annotation)
        if text is None:
            return None
        with self.fake_mode:
            return torch.empty_strided(
                text.shape, text.stride, dtype=_dtype(text), device=torch.device(text.device)
            )

    def _made(self, line: Line) -> Any:
        expression = line.expression
        if isinstance(expression, ast.Name | ast.Constant | ast.BinOp | ast.UnaryOp):
            return self._argument(expression)
        if isinstance(expression, ast.Subscript):
            return self._getitem(line)
        if isinstance(expression, ast.Attribute):
            return self._attribute(line, expression)
        if isinstance(expression, ast.Call):
            return self._call(line, expression)
        raise TraceError(f"not an op: {ast.unparse(expression)[:80]}")

    def _getitem(self, line: Line) -> Any:
        parent, index = _element(line)
        of = self.names.get(parent)
        if not isinstance(of, fx.Node):
            raise TraceError(f"not an op: {ast.unparse(line.expression)[:80]}")
        values = list(of.meta["val"])
        if index >= len(values):
            raise TraceError(f"{of.target} has {len(values)} outputs here, and more in the log")
        node = self._node(line, operator.getitem, (of, index), {})
        node.meta["val"] = values[index]
        self._check(line, node, [leaf for n in of.all_input_nodes for leaf in _tensors(n)])
        if node.meta["val"] is not values[index]:
            values[index] = node.meta["val"]
            of.meta["val"] = values
        return node

    def _attribute(self, line: Line, expression: ast.Attribute) -> Any:
        name = _dotted(expression)
        if not name.startswith("self."):
            raise TraceError(f"not an op: {name}")
        target = name.removeprefix("self.")
        value = self._fresh(line.annotation)
        # A graph that an op takes is no tensor; only an op that is not run can take it.
        self.attributes[target] = torch.nn.Module() if value is None else value
        node = self.graph.create_node("get_attr", target, name=line.name)
        node.meta["val"] = value
        return node

    def _node(self, line: Line, target: Any, args: Any, kwargs: Any) -> fx.Node:
        return self.graph.create_node("call_function", target, args, kwargs, name=line.name)

    # Ops (definitions 2 and 3)

    def _call(self, line: Line, call: ast.Call) -> Any:
        name = _dotted(call.func)
        args = tuple(self._argument(argument) for argument in call.args)
        kwargs = {str(k.arg): self._argument(k.value) for k in call.keywords}
        target = _own_op(name)
        if target is None:
            return self._opaque(line, name, args, kwargs)
        node = self._node(line, target, args, kwargs)
        node.meta["val"] = self._run(name, target, args, kwargs, line)
        self._check(line, node, [leaf for n in node.all_input_nodes for leaf in _tensors(n)])
        return node

    def _run(self, name: str, target: Any, args: Any, kwargs: Any, line: Line) -> Any:
        """What the op returns, on fake tensors."""
        state = None
        if not isinstance(target, OpOverload):
            place = next((i for i, a in enumerate(args) if isinstance(a, OpOverload)), None)
            if place is None:
                raise TraceError(f"{name} wraps no op")
            if name.endswith("run_and_save_rng_state"):
                state = self._fresh(self.elements.get(line.name, {}).get(0, ""))
            target, args = args[place], args[place + 1 :]
            kwargs = {key: value for key, value in kwargs.items() if key != "rng_state"}
        args, kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        try:
            with self.fake_mode:
                made = target(*args, **kwargs)
        except Exception as error:
            raise TraceError(
                f"{name} cannot be run on fake tensors here: {describe(error)}",
                fix="use the version of torch that wrote the trace",
            ) from error
        return made if not name.endswith("run_and_save_rng_state") else [state, made]

    def _check(self, line: Line, node: fx.Node, given: Collection[torch.Tensor]) -> None:
        """Hold what was computed against what the log says, which is what ran."""
        text = self.sizes.tensor(line.annotation)
        value = node.meta["val"]
        if text is None or not isinstance(value, torch.Tensor) or _is_as(value, text):
            return
        if storage_key(value) in {storage_key(tensor) for tensor in given}:
            raise TraceError(
                f"{ast.unparse(line.expression)[:80]} is {line.annotation} in the log, and "
                f"{_described(value)} here",
                fix="use the version of torch that wrote the trace",
            )
        # An allocation: the log's layout is the one that it had.
        node.meta["val"] = self._fresh(line.annotation)

    def _opaque(self, line: Line, name: str, args: Any, kwargs: Any) -> Any:
        if not self.takes_unknown:
            raise TraceError(
                f"{name} is an op that torch itself does not have",
                fix="add -p unknown=logged: its outputs are then what the log says, each on a "
                "storage of its own",
            )
        self.unknown.add(name)
        node = self._node(line, _Opaque(name), args, kwargs)
        elements = self.elements.get(line.name)
        if elements is None:
            node.meta["val"] = self._fresh(line.annotation)
        else:
            node.meta["val"] = [
                self._fresh(elements.get(place, "")) for place in range(max(elements) + 1)
            ]
        return node

    # Arguments

    def _argument(self, expression: ast.expr) -> Any:
        if isinstance(expression, ast.Constant):
            return expression.value
        if isinstance(expression, ast.Name):
            return self._named(expression.id)
        if isinstance(expression, ast.List):
            return [self._argument(item) for item in expression.elts]
        if isinstance(expression, ast.Tuple):
            return tuple(self._argument(item) for item in expression.elts)
        if isinstance(expression, ast.Dict):
            keys = [self._argument(key) for key in expression.keys if key is not None]
            return dict(zip(keys, map(self._argument, expression.values), strict=True))
        if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
            return combine(ast.Mult(), -1, self._argument(expression.operand))
        if isinstance(expression, ast.BinOp):
            sides = (self._argument(expression.left), self._argument(expression.right))
            return combine(expression.op, *sides)
        return _constant(expression)

    def _named(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        found = {"inf": math.inf, "nan": math.nan}.get(name)
        if found is None:
            raise TraceError(f"graph {self.sizes.graph} uses {name}, which nothing makes")
        return found


def _constant(expression: ast.expr) -> Any:
    """A device, a dtype, a layout, or an op that another op is given."""
    name = _dotted(expression.func if isinstance(expression, ast.Call) else expression)
    if isinstance(expression, ast.Call):
        words = [getattr(k.value, "value", None) for k in expression.keywords]
        words += [getattr(argument, "value", None) for argument in expression.args]
        if name in ("device", "torch.device"):
            return torch.device(*words)
        if name == "float":
            return float(str(words[0]))
    elif name.startswith("torch.ops."):
        return _own_op(name) or _Opaque(name)
    elif name.count(".") == 1 and name.startswith("torch."):
        found = getattr(torch, name.removeprefix("torch."), None)
        if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            return found
    raise TraceError(f"an argument cannot be read: {ast.unparse(expression)[:80]}")


def _own_op(name: str) -> Any:
    """The op of torch itself that a log calls ``name``; None if it has none such."""
    parts = name.split(".")
    if parts[:2] != ["torch", "ops"] or len(parts) not in (4, 5):
        return None
    namespace, *steps = parts[2:]
    if namespace == "higher_order":
        return getattr(torch.ops.higher_order, steps[0]) if steps[0] in _RNG_WRAPPERS else None
    if namespace not in _OWN_NAMESPACES or len(steps) != 2:
        return None
    packet = getattr(getattr(torch.ops, namespace), steps[0], None)
    found = getattr(packet, steps[1], None)
    return found if isinstance(found, OpOverload) else None


def _dotted(expression: ast.expr) -> str:
    names: list[str] = []
    while isinstance(expression, ast.Attribute):
        names.append(expression.attr)
        expression = expression.value
    if not isinstance(expression, ast.Name):
        raise TraceError(f"not an op: {ast.unparse(expression)[:80]}")
    return ".".join([expression.id, *reversed(names)])


def _element(line: Line) -> tuple[str, int]:
    """``("unbind", 2)`` for ``unbind[2]``."""
    expression = line.expression
    assert isinstance(expression, ast.Subscript)
    index = expression.slice
    if (
        not isinstance(expression.value, ast.Name)
        or not isinstance(index, ast.Constant)
        or not isinstance(index.value, int)
    ):
        raise TraceError(f"not an op: {ast.unparse(expression)[:80]}")
    return expression.value.id, index.value


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    leaves = tree_leaves(node.meta.get("val"))
    return [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]


def _is_as(value: torch.Tensor, text: TensorText) -> bool:
    return (
        tuple(value.shape) == text.shape
        and value.stride() == text.stride
        and value.dtype == _dtype(text)
        and value.device.type == torch.device(text.device).type
    )


def _described(value: torch.Tensor) -> str:
    shape, stride = list(value.shape), list(value.stride())
    return f"{dtype_abbrs.get(value.dtype, value.dtype)}{shape}{stride}{value.device}"
