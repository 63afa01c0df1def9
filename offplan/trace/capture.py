"""Trace one training step of a target and return what was found.

``torch.compile`` runs the model on fake tensors with a backend of ours.  For each graph that
Dynamo captures, AOTAutograd traces forward and backward and a partitioner splits them; the split
pair is read at once.  What the compiled graph then returns are fake outputs, so that nothing is
computed and the code between graphs goes on.  Each *run* of a compiled graph is one region.

With a CUDA device that is not there, autograd is walked from Python (``trace.autograd``), attention
kernels are chosen by a table (``trace.attention``) and ``torch.cuda`` answers for the GPU named
(``trace.pretend``).  With a GPU present none of that is active, unless another GPU is named.
"""

from __future__ import annotations

import inspect
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx

from offplan.errors import DeviceError, TraceError
from offplan.gpus import DEFAULT_GPU, Gpu, find_gpu
from offplan.graph import GraphBreak, GraphFacts, ModelTensor, Partitioner, TargetRef
from offplan.target import Target, load_target
from offplan.trace import failures
from offplan.trace._torch import (
    ENGINE_RUN_BACKWARD,
    FakeTensorMode,
    TracingContext,
    aot_module_simplified,
    default_partition,
    dynamo_config,
    engine_run_backward,
    functorch_config,
    min_cut_rematerialization_partition,
    reset_dynamo,
    storage_key,
    tree_leaves,
    tree_leaves_with_path,
)
from offplan.trace.attention import choose_attention
from offplan.trace.autograd import python_backward
from offplan.trace.build import Placer, building
from offplan.trace.facts import BoundInput, FactsBuilder, RegionTemplate, clean_path, read_region
from offplan.trace.pretend import pretend_gpu
from offplan.trace.sources import SourceNames

COMPILER = "aot_eager"
_PARTITIONERS = {"min-cut": min_cut_rematerialization_partition, "default": default_partition}


@dataclass(frozen=True)
class TraceOptions:
    """How to trace.  ``gpu`` None: the one present, or the default; ``attention`` None: its choice.

    ``device`` is ``cuda`` or ``cpu``.
    """

    device: str = "cuda"
    gpu: str | None = None
    attention: str | None = None
    partitioner: Partitioner = "min-cut"


@dataclass
class Clock:
    """Seconds spent in each phase; ``on_phase`` hears the name of each phase as it begins."""

    on_phase: Callable[[str], None] = lambda name: None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.on_phase(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


def trace(
    spec: str, params: Mapping[str, str], options: TraceOptions, clock: Clock | None = None
) -> GraphFacts:
    """Build ``spec`` and trace one step of it.  Nothing real is allocated on any device.

    Raises ``TargetError`` if the target cannot be built, ``DeviceError`` if this torch cannot trace
    for the device, ``TraceError`` if the model cannot be traced; each names the user's line.
    """
    clock = clock or Clock()
    machine = _Machine.of(options)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # What torch warns about while tracing concerns compiled execution, which does not happen.
        warnings.simplefilter("ignore")
        reset_dynamo()
        stack.callback(reset_dynamo)
        stack.enter_context(_exact_fakes())
        stack.enter_context(machine.active())
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with clock.phase("build"), building(fake_mode):
            loaded = load_target(spec, params)
        placer = Placer(fake_mode, torch.device(options.device, 0 if machine.is_cuda else None))
        placer.model(loaded.target.model)
        target = Target(
            loaded.target.model,
            placer.tree(tuple(loaded.target.args)),
            placer.tree(dict(loaded.target.kwargs)),
            loaded.target.loss,
        )
        capture = _Capture(target, options.partitioner, machine, clock)
        with clock.phase("capture"):
            capture.run(fake_mode)
    # Partitioning happens inside the capture; the two are reported apart.
    clock.seconds["capture"] -= clock.seconds.get("partition", 0.0)
    names = SourceNames()
    return GraphFacts(
        target=TargetRef(spec, dict(params), names.of_text(loaded.source)),
        torch=torch.__version__.split("+")[0],
        device=options.device,
        gpu=machine.gpu_name,
        attention=options.attention or "auto",
        compiler=COMPILER,
        partitioner=options.partitioner,
        model=_model_tensors(target.model),
        storages=tuple(capture.builder.storages),
        values=tuple(capture.builder.values),
        regions=tuple(capture.builder.regions),
        breaks=tuple(capture.breaks),
        warnings=tuple(capture.warnings),
    )


def _exact_fakes() -> Any:
    # A fake tensor made from the cache can have a smaller storage than the op allocates (torch 2.11
    # and 2.13: aten.copy onto a strided tensor), so the same op would differ from call to call.
    return dynamo_config.patch(fake_tensor_cache_enabled=False)


@dataclass(frozen=True)
class _Machine:
    """The device traced for: a real GPU, a pretended one (``pretended`` set), or the CPU."""

    is_cuda: bool
    gpu_name: str
    pretended: Gpu | None
    attention: str | None

    @staticmethod
    def of(options: TraceOptions) -> _Machine:
        if options.device == "cpu":
            return _Machine(False, "", None, None)
        if torch.version.cuda is None:
            # Checked first: without CUDA's part of torch, a fake CUDA tensor that needs a gradient
            # ends the process.
            raise DeviceError(
                f"torch {torch.__version__} is not a CUDA build, so it cannot trace for cuda",
                fix="install the default build (pip install torch), or trace with --device cpu",
            )
        present = torch.cuda.is_available()
        wanted = find_gpu(options.gpu or DEFAULT_GPU)
        if present and (options.gpu is None or wanted.name == torch.cuda.get_device_name()):
            return _Machine(True, torch.cuda.get_device_name(), None, options.attention)
        return _Machine(True, wanted.name, wanted, options.attention)

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.pretended is not None:
                stack.enter_context(pretend_gpu(self.pretended))
                _refuse_unsupported(self.pretended)
            if self.is_cuda and (self.pretended is not None or self.attention is not None):
                capability = (
                    self.pretended.capability
                    if self.pretended is not None
                    else torch.cuda.get_device_capability()
                )
                stack.enter_context(choose_attention(capability, self.attention))
            yield

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """What has to be active while AOTAutograd traces: it takes gradients."""
        if self.pretended is None:
            yield
            return
        with python_backward():
            yield


def _refuse_unsupported(gpu: Gpu) -> None:
    """Torch's own word on whether this build runs on ``gpu``, which is being pretended."""
    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        reason = str(error).split(". ")[0]
        raise DeviceError(
            f"torch {torch.__version__} does not run on {gpu.name}: {reason}",
            fix="install a build of torch that supports it, or name another GPU with --gpu",
        ) from error


class _Capture:
    """One traced step: the backend that Dynamo calls, and what it found."""

    def __init__(
        self, target: Target, partitioner: Partitioner, machine: _Machine, clock: Clock
    ) -> None:
        self.target = target
        self.partition = _PARTITIONERS[partitioner]
        self.machine = machine
        self.clock = clock
        self.builder = FactsBuilder()
        self.breaks: list[GraphBreak] = []
        self.warnings: list[str] = []
        self.sources = SourceNames()
        self.names = _tensor_names(target)
        self.output_count = 0
        # Keeps every tensor whose storage key is recorded alive, so that no key is used again.
        self.kept: list[Any] = []

    def run(self, fake_mode: FakeTensorMode) -> None:
        self.fake_mode = fake_mode
        settings: dict[str, Any] = {
            # Falling back to eager would leave part of the model out without saying so.
            "recompile_limit": 1_000_000,
            "accumulated_recompile_limit": 1_000_000,
            "suppress_errors": False,
        }
        step = _step(self.target)
        with (
            dynamo_config.patch(**{k: v for k, v in settings.items() if hasattr(dynamo_config, k)}),
            functorch_config.patch(enable_autograd_cache=False),
            failures.explained(self.sources),
            mock.patch.object(*ENGINE_RUN_BACKWARD, _refuse_backward),
            _quiet_logs(),
        ):
            compiled = torch.compile(step, backend=self.backend, dynamic=False)
            with fake_mode:
                output = compiled(*self.target.args, **self.target.kwargs)
        self._check_regions()
        count, saved_bytes = _saved_outside(output)
        if saved_bytes:
            self.warnings.append(
                f"{count} tensors of {saved_bytes} bytes are saved by ops that run between the "
                "graphs; they are not part of this analysis (see the graph breaks)"
            )

    def _check_regions(self) -> None:
        if not self.builder.regions:
            raise TraceError(
                "nothing was traced: the model's forward runs no tensor op that can be compiled",
                fix="check that the forward is not wrapped in torch.compiler.disable",
            )
        if not any(region.backward for region in self.builder.regions):
            raise TraceError(
                "no output needs a gradient, so there is no backward and nothing is saved",
                fix="check that parameters require gradients and the forward is not under no_grad",
            )

    def backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo calls for each captured graph."""
        self._record_break(module)
        placeholders = module.graph.find_nodes(op="placeholder")
        region = _CompiledRegion(self, [_local_path(node) for node in placeholders])
        with (
            mock.patch.object(*ENGINE_RUN_BACKWARD, engine_run_backward),
            self.machine.tracing(),
        ):
            region.callable = aot_module_simplified(
                module,
                example_inputs,
                fw_compiler=region.compile_forward,
                bw_compiler=region.compile_backward,
                partition_fn=region.partition,
                keep_inference_input_mutations=True,
            )
        return region

    def _record_break(self, module: fx.GraphModule) -> None:
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return
        frames = [(frame.filename, frame.lineno or 0) for frame in reason.user_stack]
        named = [self.sources(path, line) for path, line in reversed(frames)]
        text = next((line for line in str(reason.reason).splitlines() if line.strip()), "unknown")
        self.breaks.append(GraphBreak(text.strip(), next(filter(None, named), "")))


class _CompiledRegion:
    """One compiled graph.  Calling it records a region and returns fake outputs."""

    def __init__(self, capture: _Capture, local_paths: list[str]) -> None:
        self.capture = capture
        self.local_paths = local_paths
        self.template: RegionTemplate | None = None
        self.callable: Callable[..., Any] | None = None
        self.prefix = ""

    def __call__(self, *args: Any) -> Any:
        assert self.callable is not None
        self.prefix = self._module_prefix(args)
        return self.callable(*args)

    def _module_prefix(self, args: Sequence[Any]) -> str:
        """The path of the module whose frame was compiled, from what its own parameters are called.

        A frame knows a parameter as ``linear.weight``; the model calls it
        ``layers.2.linear.weight``.
        """
        for path, value in zip(self.local_paths, args, strict=False):
            if not path or not isinstance(value, torch.Tensor):
                continue
            known = self.capture.names.get(storage_key(value))
            if known is not None and known.name.endswith("." + path):
                return known.name.removesuffix("." + path)
            if known is not None and known.name == path:
                return ""
        return ""

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        with self.capture.clock.phase("partition"):
            forward, backward = self.capture.partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options
            )
        metadata = TracingContext.get().fw_metadata
        self.template = read_region(
            forward,
            backward,
            output_count=num_fwd_outputs,
            mutated_count=metadata.num_mutated_inp_runtime_indices if metadata else 0,
            source_name=self.capture.sources,
        )
        return forward, backward

    def compile_forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if self.template is None:
            # No gradient is needed, so AOTAutograd did not partition.
            self.template = read_region(
                module, None, output_count=0, mutated_count=0, source_name=self.capture.sources
            )
        (output,) = module.graph.find_nodes(op="output")
        placeholders = module.graph.find_nodes(op="placeholder")
        positions = {node: i for i, node in enumerate(placeholders)}
        returned = list(output.args[0])

        def run(args: list[Any]) -> list[Any]:
            given = list(args)
            args.clear()
            with self.capture.fake_mode, torch.no_grad():
                results = [
                    given[positions[node]] if node in positions else self._fresh(node)
                    for node in returned
                ]
            self._record(given, results)
            return results

        # AOTAutograd then hands over its arguments in a list that the callee may empty.
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compile_backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def run(*args: Any) -> Any:
            raise AssertionError("the backward of a traced step is never run")

        return run

    def _fresh(self, node: Any) -> Any:
        """A new fake tensor, in the mode of the code around the graph, like the node's value."""
        if not isinstance(node, fx.Node):
            return node
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=value.device
        )

    def _record(self, given: list[Any], results: list[Any]) -> None:
        template = self.template
        assert template is not None
        capture = self.capture
        capture.kept.extend((given, results))
        names = []
        for result in results[: template.output_count]:
            names.append(str(capture.output_count))
            if isinstance(result, torch.Tensor):
                handed = BoundInput("handed", f"output {names[-1]}", storage_key(result))
                capture.names.setdefault(storage_key(result), handed)
            capture.output_count += 1
        capture.builder.add(
            template,
            [
                self._bind(value, name)
                for value, name in zip(given, template.forward.input_names, strict=True)
            ],
            [storage_key(r) if isinstance(r, torch.Tensor) else None for r in results],
            names,
            self.prefix,
        )

    def _bind(self, value: Any, placeholder: str) -> BoundInput:
        if not isinstance(value, torch.Tensor):
            return BoundInput("input", placeholder, None)
        key = storage_key(value)
        known = self.capture.names.get(key)
        if known is not None:
            return known
        return BoundInput("input", placeholder, key)


def _refuse_backward(*args: Any, **kwargs: Any) -> Any:
    """Stands for the autograd engine in the code around compiled graphs."""
    raise TraceError(
        "the forward takes a gradient itself, so the step needs a double backward, "
        "which AOTAutograd does not trace",
        fix="leave the gradient penalty out of the traced step",
    )


def _local_path(node: fx.Node) -> str:
    """How the compiled frame calls a parameter or buffer (``linear.weight``); else empty."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    text = str(name() if callable(name) else name)
    return clean_path(text) if "_parameters" in text or "_buffers" in text else ""


def _step(target: Target) -> Callable[..., Any]:
    """What is compiled: the model, with the user's loss if there is one."""
    model, loss = target.model, target.loss
    if loss is None:
        return model

    def step(*args: Any, **kwargs: Any) -> Any:
        return loss(model(*args, **kwargs))

    return step


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


def _model_tensors(model: torch.nn.Module) -> tuple[ModelTensor, ...]:
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


def _saved_outside(output: Any) -> tuple[int, int]:
    """Count and bytes of tensors that autograd saved for ops between the compiled graphs.

    Such ops ran eagerly after a graph break; what they save is on the device, but in no region.
    """
    roots = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    stack = [root for root in roots if root is not None]
    seen: set[Any] = set(stack)
    storages: dict[int, int] = {}
    while stack:
        node = stack.pop()
        if "CompiledFunction" not in node.name():
            storages.update(_saved_storages(node))
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return len(storages), sum(storages.values())


def _saved_storages(node: Any) -> dict[int, int]:
    saved = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
    tensors = [leaf for leaf in tree_leaves(list(saved)) if isinstance(leaf, torch.Tensor)]
    return {storage_key(t): t.untyped_storage().nbytes() for t in tensors}


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Silence torch's loggers: what they say reaches the user as breaks, warnings or an error."""
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
