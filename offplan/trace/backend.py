"""What tracing a step and replaying it have in common: how it is compiled, and what is recorded.

1.  A step is compiled by ``torch.compile`` with static shapes and no fallback, each graph by
    AOTAutograd with a partitioner of ours, with fresh fake tensors for every op.
2.  A *compiled graph* is read once, into a template, when it is partitioned.
3.  Each *run* of a compiled graph is one region, in the order in which they ran.  A run binds the
    template to what it was given; tensors are told apart by their storages.
4.  The partitioner may merge equal nodes (common subexpressions): a view of the node that went then
    reads the one that stayed, but its fake tensor still lies on the storage of the one that went.
    What shares memory is therefore read off the joint graph, before that, and a fake tensor that
    disagrees afterwards is made again from what its op reads now.  Inductor has put nodes of its
    own in the place of others before (random ops): views of these are made again first.
5.  What the backward computes again may be chosen when the *base* is known, which is what the
    partitioner makes by itself: the joint graph is then partitioned again (``trace.recompute``).
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from offplan.errors import TraceError
from offplan.graph import GraphBreak, ModelTensor
from offplan.target import Target
from offplan.trace._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TracingContext,
    dynamo_config,
    functorch_config,
    graph_break_reasons,
    is_traceable_wrapper_subclass,
    mutated_input_count,
    storage_key,
    tree_leaves,
    tree_leaves_with_path,
)
from offplan.trace.compilers import Partition
from offplan.trace.facts import BoundInput, FactsBuilder, RegionTemplate, clean_path, read_region
from offplan.trace.recompute import Choose, chosen_ops, is_random, partition_again
from offplan.trace.sources import SourceNames


@contextmanager
def compile_settings() -> Iterator[None]:
    """Torch's settings while a step is compiled (definition 1)."""
    settings: dict[str, Any] = {
        # Falling back to eager would leave part of the model out without saying so.
        "recompile_limit": 1_000_000,
        "accumulated_recompile_limit": 1_000_000,
        "suppress_errors": False,
        # A fake tensor made from the cache can have a smaller storage than the op allocates (torch
        # 2.11 and 2.13: aten.copy onto a strided tensor), so one op would differ from call to call.
        "fake_tensor_cache_enabled": False,
    }
    # A custom op that returns its input shares its storage, which is read off as for any op; torch
    # would warn of it, and raise an error where the variable CI is set.
    aot_settings = {"enable_autograd_cache": False, "check_custom_op_aliasing": False}
    with (
        dynamo_config.patch(**_known(dynamo_config, settings)),
        functorch_config.patch(**_known(functorch_config, aot_settings)),
        # With a device, constants would be put there before they are traced, which cannot be done
        # without one; so they start on the host, and are copied in the graph, everywhere.
        mock.patch.object(FakeTensorMode, "avoid_device_init", property(lambda self: True)),
    ):
        yield


def _known(config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Those of ``settings`` that this version of torch has."""
    return {name: value for name, value in settings.items() if hasattr(config, name)}


class Run(NamedTuple):
    """One run of a compiled graph, as it is recorded (definition 3)."""

    inputs: Sequence[BoundInput]
    output_keys: Sequence[int | None]
    output_names: Sequence[str]
    prefix: str

    def add(self, builder: FactsBuilder, template: RegionTemplate) -> None:
        """Place the run on the timeline of ``builder``, as one of ``template``.

        Partitioned otherwise, a graph has as many inputs, but for states of generators.
        """
        names = template.forward.input_names
        inputs = [*self.inputs[: len(names)]]
        inputs += [BoundInput("input", name, None) for name in names[len(inputs) :]]
        builder.add(template, inputs, self.output_keys, self.output_names, self.prefix)


class Recorder:
    """The regions of one step, as its compiled graphs run, and the breaks between them."""

    def __init__(self, target: Target) -> None:
        self.builder = FactsBuilder()
        self.breaks: list[GraphBreak] = []
        self.sources = SourceNames()
        self.names = _tensor_names(target)
        self.output_count = 0
        # A storage's key is its address.  A weak reference keeps that from being used again, but
        # not the storage's bytes.
        self.kept: list[StorageWeakRef] = []

    @property
    def region_count(self) -> int:
        return len(self.builder.regions)

    def record_break(self, module: fx.GraphModule) -> None:
        """Remember why Dynamo ended the graph ``module``, if it had to."""
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return
        frames = [(frame.filename, frame.lineno or 0) for frame in reason.user_stack]
        named = [self.sources(path, line) for path, line in reversed(frames)]
        text = next((line for line in str(reason.reason).splitlines() if line.strip()), "unknown")
        self.breaks.append(GraphBreak(text.strip(), next(filter(None, named), "")))

    def record_left_out(self) -> None:
        """Add the breaks that belong to no graph: Dynamo gave up a frame, and ran it as it is."""
        told = {graph_break.reason for graph_break in self.breaks}
        missing = [reason for reason in graph_break_reasons() if reason not in told]
        if missing:
            # Dynamo's word for having given up, where the counted reasons say why.
            self.breaks = [b for b in self.breaks if b.reason != "step_unsupported"]
        self.breaks += [GraphBreak(reason, "") for reason in missing]

    def keys(self, values: Sequence[Any]) -> list[int | None]:
        """The storage of each of ``values``, None for what is no tensor."""
        self.kept.extend(
            StorageWeakRef(value.untyped_storage())
            for value in values
            if isinstance(value, torch.Tensor)
        )
        return [storage_key(v) if isinstance(v, torch.Tensor) else None for v in values]

    def record(
        self,
        template: RegionTemplate,
        given_keys: Sequence[int | None],
        returned: Sequence[Any],
        prefix: str,
    ) -> Run:
        """Add one run of ``template``: what it was given, by key, and what it ``returned``."""
        outputs = self.keys(returned[: template.output_count])
        names = []
        for key in outputs:
            names.append(str(self.output_count))
            if key is not None:
                self.names.setdefault(key, BoundInput("handed", f"output {names[-1]}", key))
            self.output_count += 1
        inputs = [
            self._bind(key, name)
            for key, name in zip(given_keys, template.forward.input_names, strict=True)
        ]
        run = Run(inputs, outputs, names, prefix)
        run.add(self.builder, template)
        return run

    def _bind(self, key: int | None, placeholder: str) -> BoundInput:
        known = None if key is None else self.names.get(key)
        return known or BoundInput("input", placeholder, key)

    def module_prefix(self, local_paths: Sequence[str], args: Sequence[Any]) -> str:
        """The path of the module whose frame was compiled, from what its own parameters are called.

        A frame knows a parameter as ``linear.weight``; the model calls it
        ``layers.2.linear.weight``.
        """
        for path, value in zip(local_paths, args, strict=False):
            if not path or not isinstance(value, torch.Tensor):
                continue
            known = self.names.get(storage_key(value))
            if known is not None and known.name.endswith("." + path):
                return known.name.removesuffix("." + path)
            if known is not None and known.name == path:
                return ""
        return ""

    def check(self) -> None:
        """Raise ``TraceError`` if no graph ran, or none has a backward."""
        if not self.builder.regions:
            because = "; ".join(b.reason for b in self.breaks)
            raise TraceError(
                "nothing was traced: the model's forward runs no tensor op that can be compiled"
                + (f" ({because})" if because else ""),
                fix="take the code that Dynamo leaves out of its graphs out of the forward",
            )
        if not any(region.backward for region in self.builder.regions):
            raise TraceError(
                "no output needs a gradient, so there is no backward and nothing is saved",
                fix="check that parameters require gradients and the forward is not under no_grad",
            )


class Split(NamedTuple):
    """A partitioned joint graph, as it was read; ``base`` if it was chosen what runs again."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    template: RegionTemplate
    base: RegionTemplate | None = None


class Joint:
    """A joint graph that is to be partitioned: by AOTAutograd, and again as long as this lives."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Any,
        options: Mapping[str, Any],
        source_name: Callable[[str, int], str],
    ) -> None:
        self.module = module
        self.inputs = inputs
        self.options = options
        self.source_name = source_name
        self.base: Split | None = None
        self.context = TracingContext.get()
        self.mutated_count = mutated_input_count(module, options["num_fwd_outputs"])
        _make_views_again(module)
        self.shared: dict[str, _Sharing] = {
            node.name: _shared(node)
            for node in module.graph.nodes
            if isinstance(node.target, OpOverload)
        }

    def split(self, partition: Partition) -> Split:
        """The base (definition 5)."""
        self.base = self._read(*partition(self.module, self.inputs, **self.options))
        return self.base

    def split_again(self, base: RegionTemplate, ops: Collection[int]) -> Split:
        """The pair that computes ``ops`` of the forward of ``base`` again in the backward."""
        pair = partition_again(self.module, self.inputs, base, ops, **self.options)
        return self._read(*pair)._replace(base=base)

    def _read(self, forward: fx.GraphModule, backward: fx.GraphModule) -> Split:
        self._complete(forward, backward)
        for module in (forward, backward):
            _restore_sharing(module, self.shared)
        template = read_region(
            forward,
            backward,
            output_count=self.options["num_fwd_outputs"],
            mutated_count=self.mutated_count,
            source_name=self.source_name,
        )
        return Split(forward, backward, template)

    def _complete(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Give random ops that the partitioner has wrapped, and left without results, all of them:
        what a graph does not take too, so that no choice changes what an op makes."""
        left = {node.name for module in (forward, backward) for node in module.graph.nodes}
        drawn = [n for n in self.module.graph.nodes if is_random(n) and n.name not in left]
        for module in (forward, backward):
            wrappers = _wrappers(module)
            if len(wrappers) == len(drawn):
                for wrapper, node in zip(wrappers, drawn, strict=True):
                    if not _saves_state(wrapper):
                        wrapper.meta.setdefault("val", node.meta["val"])


def _wrappers(module: fx.GraphModule) -> list[fx.Node]:
    """Wrapped random ops, in the order of the joint graph: in a backward, of the states that they
    are given."""
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    found = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and any(isinstance(arg, OpOverload) for arg in node.args)
    ]
    return sorted(found, key=lambda node: order[_state(node) or node])


def _state(node: fx.Node) -> fx.Node | None:
    """The state of a generator that a wrapped random op is given, if it is."""
    given = node.kwargs.get("rng_state") or (None if _saves_state(node) else node.args[0])
    return given if isinstance(given, fx.Node) else None


def _saves_state(node: fx.Node) -> bool:
    """Whether ``node`` returns the generator's state beside a result, which are both taken."""
    return str(getattr(node.target, "__name__", "")) == "run_and_save_rng_state"


def split_and_read(partition: Partition, joint: Joint, choose: Choose | None = None) -> Split:
    """Partition a joint graph, and again if other ops are chosen to run again; read the pair."""
    found = joint.split(partition)
    ops = None if choose is None else choose(found.template)
    if ops is None or frozenset(ops) == chosen_ops(found.template):
        return found
    return joint.split_again(found.template, ops)


_Sharing = list[tuple[int, int]]
"""Pairs of an output of a node and an argument of it on one storage, each by position."""


def _shared(node: fx.Node) -> _Sharing:
    """What the outputs of ``node`` share with its arguments, as its fake tensors have it."""
    outputs = [_key(value) for value in tree_leaves(node.meta.get("val"))]
    arguments = [_key(argument.meta.get("val")) for argument in _arguments(node)]
    return [
        (output, argument)
        for output, own in enumerate(outputs)
        for argument, given in enumerate(arguments)
        if own is not None and own == given
    ]


def _restore_sharing(module: fx.GraphModule, shared: Mapping[str, _Sharing]) -> None:
    """Make fake tensors again that lie on the storage of a node that was merged (definition 4)."""
    for node in module.graph.nodes:
        before = shared.get(node.name)
        if not before or not isinstance(node.target, OpOverload) or "val" not in node.meta:
            continue
        if not set(before) <= set(_shared(node)):
            _make_again(node)


def _make_views_again(module: fx.GraphModule) -> None:
    """Make fake tensors of views again that lie on the storage of a node that was replaced."""
    for node in module.graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target.is_view:
            continue
        given = [argument.meta.get("val") for argument in _arguments(node)]
        if given and all(isinstance(v, FakeTensor) for v in given) and not _shared(node):
            _make_again(node)


def _make_again(node: fx.Node) -> None:
    """The fake tensors of ``node``, from those that its arguments have now."""
    assert isinstance(node.target, OpOverload)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    fake = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor))
    with fake.fake_mode:
        node.meta["val"] = node.target(*args, **kwargs)
    for user in node.users:
        if user.target is operator.getitem:
            user.meta["val"] = node.meta["val"][user.args[1]]


def _arguments(node: fx.Node) -> list[fx.Node]:
    """Every node among the arguments, repeated ones too: merging does not change positions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _key(value: Any) -> int | None:
    """The storage of a plain strided tensor."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return None if is_traceable_wrapper_subclass(value) or value.is_nested else storage_key(value)


def read_without_gradient(
    module: fx.GraphModule, source_name: Callable[[str, int], str]
) -> RegionTemplate:
    """Read a graph that AOTAutograd did not partition, since no gradient is needed."""
    _make_views_again(module)
    return read_region(module, None, output_count=0, mutated_count=0, source_name=source_name)


def step_of(target: Target) -> Callable[..., Any]:
    """What is compiled: the model, with the user's loss if there is one."""
    model, loss = target.model, target.loss
    if loss is None:
        return model

    def step(*args: Any, **kwargs: Any) -> Any:
        return loss(model(*args, **kwargs))

    return step


def local_paths(module: fx.GraphModule) -> list[str]:
    """For each input of a captured graph, how its frame calls that parameter or buffer, or ''."""
    return [_local_path(node) for node in module.graph.find_nodes(op="placeholder")]


def _local_path(node: fx.Node) -> str:
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    text = str(name() if callable(name) else name)
    return clean_path(text) if "_parameters" in text or "_buffers" in text else ""


def _tensor_names(target: Target) -> dict[int, BoundInput]:
    """Storage key -> name, for every parameter, buffer and input tensor."""
    names: dict[int, BoundInput] = {}
    model = target.model
    for name, parameter in model.named_parameters():
        names.setdefault(
            storage_key(parameter), BoundInput("parameter", name, storage_key(parameter))
        )
    for name, buffer in model.named_buffers():
        names.setdefault(storage_key(buffer), BoundInput("buffer", name, storage_key(buffer)))
    for name, tensor in _named_inputs(target):
        names.setdefault(storage_key(tensor), BoundInput("input", name, storage_key(tensor)))
    return names


def _named_inputs(target: Target) -> Iterator[tuple[str, torch.Tensor]]:
    positional = [
        name
        for name, p in inspect.signature(target.model.forward).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    given = {
        positional[i] if i < len(positional) else f"args[{i}]": value
        for i, value in enumerate(target.args)
    }
    for name, value in (given | dict(target.kwargs)).items():
        for path, leaf in tree_leaves_with_path(value):
            if isinstance(leaf, torch.Tensor):
                yield name + path, leaf


def model_tensors(model: torch.nn.Module) -> tuple[ModelTensor, ...]:
    """Every parameter and buffer of ``model``, a tied one once with all its names."""
    found: dict[int, list[str]] = {}
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    named = [("parameter", n, p) for n, p in model.named_parameters(remove_duplicate=False)]
    named += [("buffer", n, b) for n, b in model.named_buffers(remove_duplicate=False)]
    for kind, name, tensor in named:
        found.setdefault(id(tensor), []).append(name)
        tensors.setdefault(id(tensor), (kind, tensor))
    return tuple(
        ModelTensor(
            kind=kind,  # type: ignore[arg-type]
            names=tuple(found[key]),
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            size_bytes=tensor.numel() * tensor.itemsize,
            requires_grad=tensor.requires_grad,
        )
        for key, (kind, tensor) in tensors.items()
    )


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Silence torch's loggers: what they say reaches the user as breaks, warnings or an error."""
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    with ExitStack() as stack:
        for logger in map(logging.getLogger, names):
            stack.callback(setattr, logger, "disabled", logger.disabled)
            logger.disabled = True
        yield
