"""Trace one training step of a target and return what was found.

``torch.compile`` runs the model on fake tensors with a backend of ours.  For each graph that
Dynamo captures, AOTAutograd traces forward and backward and a partitioner splits them; the split
pair is read at once.  What the compiled graph then returns are fake outputs, so that nothing is
computed and the code between graphs goes on.  Each *run* of a compiled graph is one region.

A *traced step* keeps its joint graphs, to be partitioned again for other choices of what the
backward computes again (``offplan.recompute``), and with Inductor to be lowered again: neither
Dynamo nor AOTAutograd runs for that.

With a CUDA device that is not there, autograd is walked from Python (``trace.autograd``), attention
kernels are chosen by a table (``trace.attention``) and ``torch.cuda`` answers for the GPU named
(``trace.pretend``).  With a GPU present none of that is active, unless another GPU is named.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import fx

from offplan.errors import DeviceError, PlanError, TraceError
from offplan.gpus import DEFAULT_GPU, Gpu, find_gpu
from offplan.graph import Compiler, GraphFacts, Partitioner, TargetRef, ValueId
from offplan.overwritten import warnings_of
from offplan.recompute import Choice
from offplan.target import Target, load_target
from offplan.trace import failures
from offplan.trace._torch import (
    ENGINE_RUN_BACKWARD,
    FakeTensorMode,
    engine_run_backward,
    functorch_config,
    get_proxy_mode,
    inductor,
    reset_dynamo,
    saved_storages,
    tracing,
    tree_leaves,
)
from offplan.trace.attention import choose_attention
from offplan.trace.autograd import python_backward
from offplan.trace.backend import (
    Joint,
    Recorder,
    Run,
    compile_settings,
    local_paths,
    model_tensors,
    quiet_logs,
    read_without_gradient,
    split_and_read,
    step_of,
)
from offplan.trace.build import Placer, building, shadow
from offplan.trace.compilers import PARTITIONERS, Lower, compile_pair
from offplan.trace.facts import FactsBuilder, LocalGraph, RegionTemplate
from offplan.trace.lowering import lowered_template, with_lowering
from offplan.trace.pretend import on_host, pretend_gpu
from offplan.trace.recompute import chosen_ops, twins_differ
from offplan.trace.sources import SourceNames


@dataclass(frozen=True)
class TraceOptions:
    """How to trace.  ``gpu`` None: the one present, or the default; ``attention`` None: its choice.

    ``device`` is ``cuda`` or ``cpu``.
    """

    device: str = "cuda"
    gpu: str | None = None
    attention: str | None = None
    partitioner: Partitioner = "min-cut"
    compiler: Compiler = "aot_eager"


def default_device() -> str:
    """What this build of torch can trace for: ``cuda``, if it can."""
    return "cpu" if torch.version.cuda is None else "cuda"


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
    spec: str,
    params: Mapping[str, str],
    options: TraceOptions,
    clock: Clock | None = None,
    choices: Iterable[Choice] = (),
) -> GraphFacts:
    """Build ``spec`` and trace one step of it.  Nothing real is allocated on any device.

    ``choices`` say what the backward computes again, by region; without one, torch's partitioner
    does.

    Raises ``TargetError`` if the target cannot be built, ``DeviceError`` if this torch cannot trace
    for the device, ``TraceError`` if the model cannot be traced; each names the user's line.
    ``PlanError`` if ``choices`` are not for these graphs.
    """
    return traced(spec, params, options, clock).under(choices)


def trace_target(
    target: Target,
    options: TraceOptions,
    clock: Clock | None = None,
    choices: Iterable[Choice] = (),
) -> GraphFacts:
    """Trace one step of a target that is built already, and leave it as it is.

    Raises what ``trace`` raises; ``TargetError`` if its model cannot be copied without its tensors.
    """
    return traced_target(target, options, clock).under(choices)


def traced(
    spec: str, params: Mapping[str, str], options: TraceOptions, clock: Clock | None = None
) -> TracedStep:
    """What ``trace`` traces, to be partitioned again.  Raises what ``trace`` raises."""
    names = SourceNames()

    def build() -> tuple[Target, TargetRef]:
        loaded = load_target(spec, params)
        return loaded.target, TargetRef(spec, dict(params), names.of_text(loaded.source))

    return _traced(build, options, clock or Clock())


def traced_target(target: Target, options: TraceOptions, clock: Clock | None = None) -> TracedStep:
    """What ``trace_target`` traces, to be partitioned again.  Raises what that raises."""

    def build() -> tuple[Target, TargetRef]:
        model = shadow(target.model)
        return Target(model, target.args, target.kwargs, target.loss), TargetRef("", {})

    return _traced(build, options, clock or Clock())


class TracedStep:
    """A traced step, with its joint graphs.  ``facts`` are as torch partitions them by itself."""

    def __init__(self, facts: GraphFacts, capture: _Capture) -> None:
        self.facts = facts
        self._capture = capture

    def under(self, choices: Iterable[Choice]) -> GraphFacts:
        """The facts where the backward computes again what ``choices`` say, by region.

        A region that none names stays as it is.  Raises ``PlanError`` if they are not for these
        graphs, or not the same for regions that are runs of one graph.
        """
        wanted = self._wanted(choices)
        changed = {number for number, ops in wanted.items() if ops != self._chosen(number)}
        if not changed:
            return self.facts
        capture, builder = self._capture, FactsBuilder()
        with _settings(capture.machine), failures.explained(capture.recorder.sources), quiet_logs():
            templates = {
                capture.runs[number][0]: capture.runs[number][0].under(wanted[number])
                for number in sorted(changed)
            }
        for region, run in capture.runs:
            assert region.template is not None
            run.add(builder, templates.get(region, region.template))
        found = msgspec.structs.replace(
            self.facts,
            storages=tuple(builder.storages),
            values=tuple(builder.values),
            regions=tuple(builder.regions),
        )
        return _warned(found, capture)

    def _wanted(self, choices: Iterable[Choice]) -> dict[int, frozenset[int]]:
        """The ops to run again in each region; runs of one graph want the same."""
        count = len(self._capture.runs)
        wanted = {number: self._chosen(number) for number in range(count)}
        for choice in choices:
            if not 0 <= choice.region < count:
                raise PlanError(f"a choice names region {choice.region}, of {count}")
            self._check(choice)
            wanted[choice.region] = frozenset(choice.ops)
        first: dict[_CompiledRegion, int] = {}
        for number, (region, _) in enumerate(self._capture.runs):
            before = first.setdefault(region, number)
            if wanted[before] != wanted[number]:
                raise twins_differ(before, number)
        return wanted

    def _check(self, choice: Choice) -> None:
        template = self._capture.runs[choice.region][0].template
        assert template is not None
        if template.backward is None and choice.ops:
            raise PlanError(f"a choice is for region {choice.region}, which has no backward")
        count = len(template.forward.ops)
        for place in choice.ops:
            if not 0 <= place < count:
                raise PlanError(
                    f"a choice names op {place} of region {choice.region}, which has {count}"
                )

    def _chosen(self, number: int) -> frozenset[int]:
        template = self._capture.runs[number][0].template
        assert template is not None
        return chosen_ops(template)


def _traced(
    build: Callable[[], tuple[Target, TargetRef]], options: TraceOptions, clock: Clock
) -> TracedStep:
    machine = _Machine.of(options)
    with _settings(machine):
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with clock.phase("build"), building(fake_mode):
            built, ref = build()
        placer = Placer(fake_mode, torch.device(options.device, 0 if machine.is_cuda else None))
        placer.model(built.model)
        target = Target(
            built.model,
            placer.tree(tuple(built.args)),
            placer.tree(dict(built.kwargs)),
            built.loss,
        )
        capture = _Capture(target, options, machine, clock)
        with clock.phase("capture"):
            capture.run(fake_mode)
    # Partitioning happens inside the capture; the two are reported apart.
    for inner in ("partition", "lower"):
        clock.seconds["capture"] -= clock.seconds.get(inner, 0.0)
    facts = GraphFacts(
        target=ref,
        torch=torch.__version__.split("+")[0],
        device=options.device,
        gpu=machine.gpu_name,
        attention=options.attention or "auto",
        compiler=options.compiler,
        partitioner=options.partitioner,
        model=model_tensors(target.model),
        storages=tuple(capture.recorder.builder.storages),
        values=tuple(capture.recorder.builder.values),
        regions=tuple(capture.recorder.builder.regions),
        breaks=tuple(capture.recorder.breaks),
    )
    return TracedStep(_warned(facts, capture), capture)


def _warned(facts: GraphFacts, capture: _Capture) -> GraphFacts:
    """``facts`` with what was noticed in the capture, and what is wrong with the graphs."""
    return msgspec.structs.replace(facts, warnings=(*capture.warnings, *warnings_of(facts)))


@contextmanager
def _settings(machine: _Machine) -> Iterator[None]:
    """What holds while a step is traced, or partitioned again."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # What torch warns about while tracing concerns compiled execution, which does not happen.
        warnings.simplefilter("ignore")
        reset_dynamo()
        stack.callback(reset_dynamo)
        stack.enter_context(compile_settings())
        stack.enter_context(machine.active())
        yield


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
    def tracing(self, compiler: Compiler) -> Iterator[None]:
        """What has to be active while AOTAutograd traces: it takes gradients."""
        if self.pretended is None:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(python_backward())
            if compiler == "inductor":
                # It computes constants on the device.
                folder = inductor().ConstantFolder
                for name in ("__init__", "run"):
                    method = on_host(getattr(folder, name))
                    stack.enter_context(mock.patch.object(folder, name, method))
            yield


def _refuse_unsupported(gpu: Gpu) -> None:
    """Refuse a GPU older than any that this build of torch has kernels for."""
    built_for = [int("".join(filter(str.isdigit, arch))) for arch in torch.cuda.get_arch_list()]
    major, minor = gpu.capability
    if built_for and 10 * major + minor < min(built_for):
        raise DeviceError(
            f"torch {torch.__version__} does not run on {gpu.name}: it is built for compute "
            f"capability {min(built_for) / 10} and newer",
            fix="install a build of torch that supports it, or name another GPU with --gpu",
        )


class _Capture:
    """One traced step: the backend that Dynamo calls, and what it found."""

    def __init__(
        self, target: Target, options: TraceOptions, machine: _Machine, clock: Clock
    ) -> None:
        self.target = target
        self.compiler = options.compiler
        self.partition = PARTITIONERS[options.partitioner]
        self.machine = machine
        self.clock = clock
        self.recorder = Recorder(target)
        self.warnings: list[str] = []
        self.runs: list[tuple[_CompiledRegion, Run]] = []
        # What passes between graphs stays as alive as it is in a real step.
        self.kept: list[Any] = []

    def __deepcopy__(self, memo: Any) -> _Capture:
        # Lightning, once imported, has torch.compile copy its options, the backend among them.
        return self

    def run(self, fake_mode: FakeTensorMode) -> None:
        self.fake_mode = fake_mode
        with (
            failures.explained(self.recorder.sources),
            mock.patch.object(*ENGINE_RUN_BACKWARD, self._run_backward),
            quiet_logs(),
        ):
            compiled = torch.compile(step_of(self.target), backend=self.backend, dynamic=False)
            with fake_mode:
                output = compiled(*self.target.args, **self.target.kwargs)
            self.recorder.record_left_out()
        self.recorder.check()
        count, saved_bytes = _saved_outside(output)
        if saved_bytes:
            self.warnings.append(
                f"{count} tensors of {saved_bytes} bytes are saved by ops that run between the "
                "graphs; they are not part of this analysis (see the graph breaks)"
            )

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for the autograd engine in the code around compiled graphs."""
        if get_proxy_mode() is None:
            raise TraceError(
                "the forward takes a gradient itself, so the step needs a double backward, "
                "which AOTAutograd does not trace",
                fix="leave the gradient penalty out of the traced step",
            )
        # An op with a graph of its own (flex_attention) is being traced, backward included.
        with self._engine():
            return getattr(*ENGINE_RUN_BACKWARD)(*args, **kwargs)

    @contextmanager
    def _engine(self) -> Iterator[None]:
        """Autograd as torch has it, or walked from Python where there is no GPU."""
        with (
            mock.patch.object(*ENGINE_RUN_BACKWARD, engine_run_backward),
            self.machine.tracing(self.compiler),
        ):
            yield

    def backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo calls for each captured graph."""
        self.recorder.record_break(module)
        region = _CompiledRegion(self, local_paths(module))
        # A lowering is asked for now, where the pair is at hand.
        with self._engine(), functorch_config.patch(force_non_lazy_backward_lowering=True):
            region.callable = compile_pair(self.compiler, module, example_inputs, region)
        return region


class _CompiledRegion:
    """One compiled graph.  Calling it records a region and returns fake outputs."""

    def __init__(self, capture: _Capture, paths: list[str]) -> None:
        self.capture = capture
        self.paths = paths
        self.joint: Joint | None = None
        self.template: RegionTemplate | None = None
        self.callable: Callable[..., Any] | None = None
        self.prefix = ""

    def __call__(self, *args: Any) -> Any:
        assert self.callable is not None
        self.prefix = self.capture.recorder.module_prefix(self.paths, args)
        return self.callable(*args)

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        options = {"num_fwd_outputs": num_fwd_outputs, **options}
        self.joint = Joint(joint, joint_inputs, options, self.capture.recorder.sources)
        found = split_and_read(self._timed_partition, self.joint)
        self.template = found.template
        return found.forward, found.backward

    def under(self, ops: Collection[int]) -> RegionTemplate:
        """The template where the backward computes ``ops`` of the forward again."""
        assert self.joint is not None
        assert self.template is not None
        with tracing(self.joint.context), self.capture.clock.phase("partition"):
            found = self.joint.split_again(self.template, ops)
        if self.capture.compiler != "inductor":
            return found.template
        with tracing(self.joint.context), self.capture.clock.phase("lower"):
            return lowered_template(found.template, found.forward, found.backward)

    def _timed_partition(self, *args: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        with self.capture.clock.phase("partition"):
            return self.capture.partition(*args, **options)

    has_transfers = False

    def compile_forward(self, module: fx.GraphModule, inputs: Sequence[Any], lower: Lower) -> Any:
        if self.template is None:
            self.template = read_without_gradient(module, self.capture.recorder.sources)
        forward = self._lowered(module, inputs, lower, self.template.forward)
        self.template = replace(self.template, forward=forward)
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

    def compile_backward(self, module: fx.GraphModule, inputs: Sequence[Any], lower: Lower) -> Any:
        assert self.template is not None
        assert self.template.backward is not None
        received = {saved.backward_value for saved in self.template.saved}
        backward = self._lowered(module, inputs, lower, self.template.backward, received)
        self.template = replace(self.template, backward=backward)

        def run(*args: Any) -> Any:
            raise AssertionError("the backward of a traced step is never run")

        return run

    def _lowered(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        lower: Lower,
        local: LocalGraph,
        received: Collection[ValueId] = (),
    ) -> LocalGraph:
        """``local``, with what the compiler makes of it."""
        if self.capture.compiler != "inductor":
            return local
        with self.capture.clock.phase("lower"):
            return with_lowering(local, module, inputs, lower, received)

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
        assert self.template is not None
        recorder = self.capture.recorder
        self.capture.kept.extend((given, results))
        run = recorder.record(self.template, recorder.keys(given), results, self.prefix)
        self.capture.runs.append((self, run))


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
            storages.update(saved_storages(node))
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return len(storages), sum(storages.values())
