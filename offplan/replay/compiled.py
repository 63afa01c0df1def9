"""Run a target's training step for real, with or without the transfers of a plan.

1.  The step is compiled as a trace compiles it (``trace.backend``), on real tensors; the graphs run
    op by op, and each value is freed when its last reader has run.
2.  In the first forward, the n-th run of a compiled graph is region n.  A graph is compiled just
    before its first run, and its transfers are inserted then: those that the plan has for that
    region, in terms of the graph's own ops.  If it runs again in the step, the plan must move the
    same bytes in those later regions too.
3.  When the first forward ends, the facts of what ran are put together and the plan is proved
    against them (``check_plan``), before any backward.  Until then the rewriting has refused by
    itself whatever would be unsafe.
4.  A graph that is compiled later (again, or for another mode or shape) gets the transfers of the
    planned graph that it equals, or none.
5.  Without a loss of its own, a target's loss is the output if it is a scalar, else ``.loss``, else
    the sum of its floating outputs.

Torch's compiler keeps what it compiled as long as the model's code lives; all it holds of a replay
is a weak reference.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import torch
from torch import fx

from offplan.errors import DeviceError, PlanError, TargetError
from offplan.graph import GraphFacts, StorageId, TargetRef
from offplan.plan import Entry, Plan, analyze_command, check_plan
from offplan.replay.layout import Layout, layouts
from offplan.replay.packing import window
from offplan.replay.pinning import DEFAULT_PIN, PinName, Pinning, choose
from offplan.replay.rewrite import Undo, insert_transfers
from offplan.replay.runtime import (
    CudaLink,
    ReplayError,
    Runtime,
    RuntimeStats,
    TimedCudaLink,
    cpu_runtime,
    cuda_runtime,
)
from offplan.target import Target, load_target
from offplan.trace import failures
from offplan.trace._torch import (
    TorchDynamoException,
    TracingContext,
    aot_module_simplified,
    boxed_nop,
    functorch_config,
    storage_key,
    tree_leaves,
)
from offplan.trace.attention import choose_attention
from offplan.trace.backend import (
    COMPILER,
    PARTITIONERS,
    Recorder,
    compile_settings,
    local_paths,
    model_tensors,
    quiet_logs,
    read_without_gradient,
    split_and_read,
    step_of,
)
from offplan.trace.build import Placer
from offplan.trace.facts import RegionTemplate
from offplan.transfers import Transfer


def build_real(spec: str, params: Mapping[str, str], device: str | torch.device) -> Target:
    """Build ``spec`` with real tensors, and place its model and inputs on ``device``.

    Tensors keep their strides, offsets and shared storages, and parameters their ties, as in a
    trace.  Raises what ``load_target`` raises.
    """
    target = load_target(spec, params).target
    placer = _RealPlacer(torch.device(device))
    placer.model(target.model)
    args, kwargs = placer.tree(tuple(target.args)), placer.tree(dict(target.kwargs))
    return Target(target.model, args, kwargs, target.loss)


class _RealPlacer(Placer):
    """Copies the tensors that a trace would only describe."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(nullcontext(), device)  # type: ignore[arg-type]

    def _window(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == tensor.device.type:
            return tensor.detach()
        key = storage_key(tensor)
        if key not in self.bases:
            storage = tensor.untyped_storage()
            flat = window(storage, 0, (storage.nbytes(),), (1,))
            self.bases[key] = flat.to(self.device)
        placed = self.bases[key].untyped_storage()
        return window(placed, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)


_S = TypeVar("_S", bound="Steps")


class Steps(ABC):
    """What runs a target's training step, until it is closed.  A context manager."""

    @abstractmethod
    def forward(self) -> Any:
        """Run the forward; returns what the model, or its loss, returned."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the steps took."""

    def step(self) -> torch.Tensor:
        """One forward and backward; gradients accumulate in ``.grad``.  Returns the loss."""
        loss = loss_of(self.forward())
        loss.backward()
        return loss.detach()

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Replay(Steps):
    """A target's training step on ``device``, under ``plan`` (None: nothing is moved).

    A context manager: ``close`` gives streams and host memory back.  ``host_budget`` limits host
    memory in bytes.  ``pin`` names how it is pinned (``replay.pinning``), or is a backend that was
    chosen already; on the CPU nothing is pinned.  ``timing`` measures stalls.

    Raises ``HostMemoryError`` if host memory cannot be had, ``PlanError`` (here, or from the first
    step) if the plan is not for this target, ``TraceError`` if the step cannot be compiled.
    """

    def __init__(
        self,
        target: Target,
        plan: Plan | None,
        *,
        device: str | torch.device,
        host_budget: int | None = None,
        pin: PinName | Pinning = DEFAULT_PIN,
        timing: bool = False,
    ) -> None:
        self.target = target
        self.plan = plan
        self.device = _device(device)
        if plan is not None:
            _check_plan_alone(plan, self.device)
        self._layouts = layouts(plan.transfers) if plan is not None else {}
        sizes = [found.size_bytes for _, found in sorted(self._layouts.items())]
        if self.device.type == "cpu":
            self.runtime: Runtime = cpu_runtime(sizes, host_budget)
        else:
            # What moves nothing needs no host memory, and fails for none.
            pinning = choose(pin if sizes else "off", self.device, sum(sizes))
            link = TimedCudaLink if timing else CudaLink
            self.runtime = cuda_runtime(self.device, sizes, host_budget, pinning, link)
        self.facts: GraphFacts | None = None
        self._step = _CompiledStep(target, plan, self._layouts, self.runtime)
        self._compiled = torch.compile(
            step_of(target), backend=_Backend(weakref.ref(self._step)), dynamic=False
        )

    def close(self) -> None:
        """Wait for copies in flight, and give host memory back.  A second call does nothing."""
        self.runtime.close()
        self._step.forget()

    def stats(self) -> RuntimeStats:
        """What was moved so far, and the host memory held.  Waits for the device if timed."""
        return self.runtime.stats()

    def forward(self) -> Any:
        """Run the forward; returns what the model, or its loss, returned.

        The first one compiles, and proves the plan against the graphs that ran.
        """
        if self.runtime.is_closed:
            raise ReplayError("the replay is closed", fix="make a new one")
        with compile_settings():
            if self.facts is None:
                return self._first_forward()
            return self._compiled(*self.target.args, **self.target.kwargs)

    def _first_forward(self) -> Any:
        recorder = Recorder(self.target)
        with (
            self._step.recording(recorder),
            _explained(recorder),
            self._attention(),
            quiet_logs(),
            warnings.catch_warnings(),
        ):
            # Dynamo sets off warnings by what it looks at.  Those of the step itself come again.
            warnings.simplefilter("ignore")
            output = self._compiled(*self.target.args, **self.target.kwargs)
        recorder.check()
        facts = self._facts_of(recorder)
        if self.plan is not None:
            check_plan(facts, self.plan)
        self.facts = facts
        return output

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """The attention kernel that the plan was traced with, if it names one."""
        override = None if self.plan is None else self.plan.attention
        if override in (None, "", "auto") or self.device.type != "cuda":
            yield
            return
        with choose_attention(torch.cuda.get_device_capability(self.device), override):
            yield

    def _facts_of(self, recorder: Recorder) -> GraphFacts:
        plan, is_cuda = self.plan, self.device.type == "cuda"
        return GraphFacts(
            target=TargetRef("", {}) if plan is None else plan.target,
            torch=_torch_version(),
            device=self.device.type,
            gpu=torch.cuda.get_device_name(self.device) if is_cuda else "",
            attention="auto" if plan is None else plan.attention,
            compiler=COMPILER,
            partitioner="min-cut" if plan is None else plan.partitioner,  # type: ignore[arg-type]
            model=model_tensors(self.target.model),
            storages=tuple(recorder.builder.storages),
            values=tuple(recorder.builder.values),
            regions=tuple(recorder.builder.regions),
            breaks=tuple(recorder.breaks),
        )


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a step that returned ``output`` (definition 5).

    Raises ``TargetError`` if nothing in it can be differentiated.
    """
    if isinstance(output, torch.Tensor) and output.numel() == 1 and output.dim() == 0:
        return output
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    sums = [
        leaf.sum()
        for leaf in tree_leaves(_plain(output))
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    if not sums:
        raise TargetError(
            "the model's output has no floating tensor that needs a gradient",
            fix="give the target a loss: offplan.Target(model, args, loss=fn)",
        )
    return torch.stack([part.double() for part in sums]).sum() if len(sums) > 1 else sums[0]


def _plain(output: Any) -> Any:
    """A dataclass, which tree functions do not look into, as the list of its fields."""
    fields = getattr(output, "__dataclass_fields__", None)
    if fields is None or isinstance(output, Mapping):
        return output
    return [_plain(getattr(output, name)) for name in fields]


# --- the backend ----------------------------------------------------------------------------------


class _Backend:
    """What ``torch.compile`` holds."""

    def __init__(self, step: weakref.ref[_CompiledStep]) -> None:
        self.step = step

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        step = _alive(self.step)
        return _Call(weakref.ref(step.compile(module, example_inputs)))


class _Call:
    """What the compiled code holds of one graph."""

    def __init__(self, graph: weakref.ref[_CompiledGraph]) -> None:
        self.graph = graph

    def __call__(self, *args: Any) -> Any:
        return _alive(self.graph).run(args)


def _alive(reference: weakref.ref[Any]) -> Any:
    found = reference()
    if found is None:
        raise ReplayError("the replay is closed", fix="make a new one")
    return found


class _CompiledStep:
    """The compiled graphs of a step, and what is recorded of them while the first forward runs."""

    def __init__(
        self, target: Target, plan: Plan | None, layouts: Mapping[int, Layout], runtime: Runtime
    ) -> None:
        self.target = target
        self.plan = plan
        self.layouts = layouts
        self.runtime = runtime
        self.split = PARTITIONERS["min-cut" if plan is None else plan.partitioner]
        self.recorder: Recorder | None = None
        self.graphs: list[_CompiledGraph] = []

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        self.recorder = recorder
        try:
            yield
        finally:
            self.recorder = None

    def forget(self) -> None:
        """Let go of all graphs, and with them of what they were compiled to."""
        self.graphs.clear()

    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> _CompiledGraph:
        graph = _CompiledGraph(self, local_paths(module))
        if self.recorder is not None:
            self.recorder.record_break(module)
        # Donated buffers would refuse a backward that keeps its graph; op by op they save nothing.
        with functorch_config.patch(donated_buffer=False):
            graph.callable = aot_module_simplified(
                module,
                example_inputs,
                fw_compiler=graph.compile_forward,
                bw_compiler=graph.compile_backward,
                partition_fn=graph.partition,
                keep_inference_input_mutations=True,
            )
        self.graphs.append(graph)
        return graph

    def source_name(self, filename: str, line: int) -> str:
        return "" if self.recorder is None else self.recorder.sources(filename, line)

    def planned(self, template: RegionTemplate) -> tuple[int | None, Sequence[Transfer]]:
        """The region that a graph just compiled is first run as, and its transfers."""
        if self.plan is None:
            return None, ()
        if self.recorder is not None:
            region = self.recorder.region_count
            return region, localized(self.plan, region, template)
        for graph in self.graphs:
            if graph.template is not None and _is_equal(graph.template, template):
                return graph.region, graph.transfers
        return None, ()


class _CompiledGraph:
    """One compiled graph, with the transfers that were inserted into it."""

    def __init__(self, step: _CompiledStep, paths: list[str]) -> None:
        self._step = weakref.ref(step)
        self.runtime = step.runtime
        self.paths = paths
        self.callable: Callable[..., Any] | None = None
        self.template: RegionTemplate | None = None
        self.region: int | None = None
        self.transfers: Sequence[Transfer] = ()
        self.arena_bytes = 0
        self.undo: Undo | None = None
        self.prefix = ""

    @property
    def step(self) -> _CompiledStep:
        return _alive(self._step)

    def run(self, args: Sequence[Any]) -> Any:
        assert self.callable is not None
        recorder = self.step.recorder
        if recorder is not None:
            self.prefix = recorder.module_prefix(self.paths, args)
        return self.callable(*args)

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        step = self.step
        forward, backward, template = split_and_read(
            step.split,
            step.source_name,
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            **options,
        )
        self.template = template
        self.region, self.transfers = step.planned(template)
        if self.transfers:
            assert self.region is not None
            found = step.layouts[self.region]
            self.arena_bytes = found.size_bytes
            self.undo = insert_transfers(
                forward, backward, template, self.transfers, found, self.runtime
            )
        return forward, backward

    def compile_forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if self.template is None:
            self.template = read_without_gradient(module, self.step.source_name)
            self.region, self.transfers = self.step.planned(self.template)
        metadata = TracingContext.get().fw_metadata
        if metadata is not None:
            # None would mean "not known", and refuse a backward that keeps its graph.
            metadata.bw_donated_idxs = []
        compiled = boxed_nop(module, inputs)

        def run(args: list[Any]) -> list[Any]:
            recorder = self.step.recorder
            if recorder is None:
                return self._run_forward(compiled, args)
            keys = recorder.keys(args)
            results = self._run_forward(compiled, args)
            self._record(recorder, keys, results)
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compile_backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled = boxed_nop(module, inputs)
        if not self.transfers:
            return compiled
        runtime = self.runtime

        def run(args: list[Any]) -> Any:
            with runtime.backward_run():
                return compiled(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _run_forward(self, compiled: Callable[..., Any], args: list[Any]) -> list[Any]:
        if not self.transfers:
            return compiled(args)
        with self.runtime.forward_run(self.arena_bytes):
            return compiled(args)

    def _record(
        self, recorder: Recorder, keys: Sequence[int | None], results: Sequence[Any]
    ) -> None:
        assert self.template is not None
        plan, region = self.step.plan, recorder.region_count
        if plan is not None and region != self.region:
            again = localized(plan, region, self.template)
            if _moved(again) != _moved(self.transfers):
                raise PlanError(
                    f"regions {self.region} and {region} are runs of one graph, but the plan does "
                    "not move the same of both",
                    fix="plan so that all runs of a layer are treated alike (--budget 0)",
                )
        recorder.record(self.template, keys, results, self.prefix)


def _moved(transfers: Sequence[Transfer]) -> set[tuple[Any, ...]]:
    return {(t.storage, t.start, t.stop, t.transfer_bytes, t.packed) for t in transfers}


def _is_equal(one: RegionTemplate, other: RegionTemplate) -> bool:
    """Whether two graphs compute the same (definition 5 of ``offplan.graph``)."""
    return _computed(one) == _computed(other)


def _computed(template: RegionTemplate) -> tuple[Any, ...]:
    graphs = [
        None
        if graph is None
        else (
            graph.inputs,
            graph.outputs,
            [(op.target, op.inputs, op.outputs, op.constants, op.mutates) for op in graph.ops],
        )
        for graph in (template.forward, template.backward)
    ]
    return template.storages, template.values, template.saved, template.output_count, graphs


# --- from a plan to one region's transfers --------------------------------------------------------


def localized(plan: Plan, region: int, template: RegionTemplate) -> list[Transfer]:
    """The plan's transfers of ``region``, in terms of its own graphs and of ``template``.

    Raises ``PlanError`` if the region is not the one that the plan describes.
    """
    if region >= len(plan.regions):
        raise _other_graphs(plan, f"{len(plan.regions)} regions were planned, there are more")
    size, backward = plan.regions[region], template.backward
    found = (len(template.forward.ops), len(backward.ops) if backward else 0, len(template.saved))
    expected = (size.forward_ops, size.backward_ops, size.saved)
    if found != expected:
        raise _other_graphs(
            plan,
            f"region {region} has {found[0]} forward ops, {found[1]} backward ops and {found[2]} "
            f"saved values; it had {expected[0]}, {expected[1]} and {expected[2]}",
        )
    storages = {
        entry.id: _local_storage(plan, entry, template)
        for entry in plan.storages
        if entry.region == region and entry.action == "moved"
    }
    transfers = [transfer for transfer in plan.transfers if transfer.region == region]
    for transfer in transfers:
        if transfer.storage not in storages:
            raise PlanError(f"storage {transfer.storage} has a transfer, but no entry as moved")
    first_forward, first_backward = _first_ops(plan, region)
    return [
        msgspec.structs.replace(
            transfer,
            storage=storages[transfer.storage],
            offload_after=transfer.offload_after - first_forward,
            release_by=transfer.release_by - first_forward,
            reload_at=_minus(transfer.reload_at, first_backward),
            needed_by=_minus(transfer.needed_by, first_backward),
        )
        for transfer in transfers
    ]


def _local_storage(plan: Plan, entry: Entry, template: RegionTemplate) -> StorageId:
    """The template's storage for a moved entry of the plan, whose views must be its saved ones."""
    found = set()
    for view in entry.views:
        if view.position >= len(template.saved):
            raise _other_graphs(plan, f"region {entry.region} saves less than {view.position + 1}")
        value = template.values[template.saved[view.position].value]
        traced = (value.dtype, value.shape, value.stride, value.offset)
        if traced != (view.dtype, view.shape, view.stride, view.offset):
            raise _other_graphs(plan, f"saved value {view.name} of region {entry.region} differs")
        found.add(value.storage)
    storage = found.pop() if len(found) == 1 else None
    if storage is None or template.storages[storage].size_bytes != entry.size_bytes:
        raise _other_graphs(plan, f"storage {entry.id} of region {entry.region} differs")
    return storage


def _first_ops(plan: Plan, region: int) -> tuple[int, int]:
    """Where the forward and the backward of ``region`` begin on the plan's timeline."""
    first_forward = sum(size.forward_ops for size in plan.regions[:region])
    first_backward = sum(size.forward_ops for size in plan.regions)
    first_backward += sum(size.backward_ops for size in plan.regions[region + 1 :])
    return first_forward, first_backward


def _minus(place: int | None, first: int) -> int | None:
    return None if place is None else place - first


def _check_plan_alone(plan: Plan, device: torch.device) -> None:
    """Refuse what needs no graph to see, before host memory is taken for it."""
    if plan.device != device.type:
        raise _other_graphs(plan, f"device was {plan.device}, is {device.type}")
    if plan.compiler != COMPILER:
        raise _other_graphs(plan, f"compiler was {plan.compiler}, is {COMPILER}")
    if plan.partitioner not in PARTITIONERS:
        raise PlanError(f"the plan names a partitioner that is not known: {plan.partitioner!r}")
    for transfer in plan.transfers:
        if not 0 < transfer.transfer_bytes <= transfer.stop - transfer.start:
            raise PlanError(
                f"the transfer of storage {transfer.storage} says {transfer.transfer_bytes} bytes "
                f"for the range {transfer.start} to {transfer.stop}"
            )


def _other_graphs(plan: Plan, difference: str) -> PlanError:
    reasons = [difference]
    if plan.torch != _torch_version():
        reasons.append(f"torch was {plan.torch}, is {_torch_version()}")
    return PlanError(
        f"the plan was made for other graphs: {'; '.join(reasons)}",
        fix=f"make it again with: {analyze_command(plan)}",
    )


def _torch_version() -> str:
    return str(torch.__version__).split("+")[0]


def _device(device: str | torch.device) -> torch.device:
    found = torch.device(device)
    if found.type == "cpu":
        return found
    if found.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(
            f"there is no {found.type} device to replay on",
            fix="replay with --device cpu, or on a machine with a GPU",
        )
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


@contextmanager
def _explained(recorder: Recorder) -> Iterator[None]:
    """Errors of the compiler as one plain message; those of the running step as they are."""
    try:
        yield
    except TorchDynamoException as error:
        out_of_memory = _out_of_memory(error)
        if out_of_memory is not None:
            raise out_of_memory from error
        with failures.explained(recorder.sources):
            raise


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error
