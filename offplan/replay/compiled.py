"""Run a target's training step for real, with or without the transfers of a plan.

1.  The step is compiled as a trace compiles it (``trace.backend``), on real tensors.  The graphs
    run op by op, and each value is freed when its last reader has run; or Inductor compiles them,
    with the transfers as operators (``replay.operators``).
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
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import torch

from offplan.errors import PlanError, TargetError
from offplan.graph import Compiler, GraphFacts, TargetRef, digest
from offplan.plan import Plan, check_plan
from offplan.recompute import apply
from offplan.replay.graphs import NOTHING_MOVES, CompiledGraph, Graphs, Placement
from offplan.replay.layout import Layout, layouts
from offplan.replay.localize import localized, other_graphs, torch_version
from offplan.replay.packing import window
from offplan.replay.pinning import DEFAULT_PIN, PinName, Pinning, choose
from offplan.replay.runtime import (
    CudaLink,
    ReplayError,
    Runtime,
    RuntimeStats,
    TimedCudaLink,
    cpu_runtime,
    cuda_runtime,
    present_device,
)
from offplan.target import Target, load_target
from offplan.trace import failures
from offplan.trace._torch import (
    TorchDynamoException,
    storage_key,
    tree_leaves,
)
from offplan.trace.attention import choose_attention
from offplan.trace.backend import (
    Recorder,
    Run,
    compile_settings,
    model_tensors,
    quiet_logs,
    step_of,
)
from offplan.trace.build import Placer
from offplan.trace.compilers import PARTITIONERS
from offplan.trace.facts import FactsBuilder, RegionTemplate
from offplan.trace.recompute import chosen_ops, twins_differ
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
    chosen already; on the CPU nothing is pinned.  ``timing`` measures stalls.  ``compiler`` is the
    plan's, if there is one.

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
        compiler: Compiler = "aot_eager",
    ) -> None:
        self.target = target
        self.plan = plan
        self.compiler = compiler if plan is None else plan.compiler
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
        self._step = _CompiledStep(self.compiler, plan, self._layouts, self.runtime)
        self._compiled = torch.compile(step_of(target), backend=self._step.backend(), dynamic=False)

    def close(self) -> None:
        """Wait for copies in flight, and give host memory back.  A second call does nothing."""
        try:
            self.runtime.close()
        finally:
            self._step.close()

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
        facts = self._facts_of(recorder.builder, recorder)
        if self.plan is not None:
            check_plan(facts, self.plan)
            self._check_base(self.plan, recorder)
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

    def _check_base(self, plan: Plan, recorder: Recorder) -> None:
        """Prove that the choices of the plan were made for these graphs, and are safe for them."""
        if not plan.choices:
            return
        builder = FactsBuilder()
        for graph, run in self._step.runs:
            template = graph.base or graph.template
            assert template is not None
            run.add(builder, template)
        base = self._facts_of(builder, recorder)
        if digest(base) != plan.base_digest:
            raise other_graphs(plan, "those that it has ops run again of are others")
        apply(base, plan.choices)

    def _facts_of(self, builder: FactsBuilder, recorder: Recorder) -> GraphFacts:
        plan, is_cuda = self.plan, self.device.type == "cuda"
        return GraphFacts(
            target=TargetRef("", {}) if plan is None else plan.target,
            torch=torch_version(),
            device=self.device.type,
            gpu=torch.cuda.get_device_name(self.device) if is_cuda else "",
            attention="auto" if plan is None else plan.attention,
            compiler=self.compiler,
            partitioner="min-cut" if plan is None else plan.partitioner,  # type: ignore[arg-type]
            model=model_tensors(self.target.model),
            storages=tuple(builder.storages),
            values=tuple(builder.values),
            regions=tuple(builder.regions),
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


# --- the graphs of a step -------------------------------------------------------------------------


class _CompiledStep(Graphs):
    """The compiled graphs of a step, and what is recorded of them while the first forward runs."""

    def __init__(
        self,
        compiler: Compiler,
        plan: Plan | None,
        layouts: Mapping[int, Layout],
        runtime: Runtime,
    ) -> None:
        super().__init__(compiler, "min-cut" if plan is None else plan.partitioner, runtime)
        self.plan = plan
        self.layouts = layouts
        self.choices = {} if plan is None else {c.region: frozenset(c.ops) for c in plan.choices}
        self.runs: list[tuple[CompiledGraph, Run]] = []

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        self.recorder = recorder
        self.runs.clear()
        try:
            yield
        finally:
            self.recorder = None

    def choice(self, graph: CompiledGraph, base: RegionTemplate) -> Collection[int] | None:
        """What the plan has run again of the region that a graph just compiled is first run as."""
        if self.plan is None or not self.choices:
            return None
        if self.recorder is None:
            before = self.compiled_before(base)
            return None if before is None else before.again
        region = self.recorder.region_count
        again, count = self.choices.get(region), len(base.forward.ops)
        if again and max(again) >= count:
            raise other_graphs(
                self.plan, f"op {max(again)} of region {region} is to run again, it has {count}"
            )
        return again

    def placement(self, graph: CompiledGraph, template: RegionTemplate) -> Placement:
        """The transfers of the region that a graph just compiled is first run as."""
        if self.plan is None:
            return NOTHING_MOVES
        if self.recorder is not None:
            region = self.recorder.region_count
            transfers = localized(self.plan, region, template)
            return Placement(region, transfers, self.layouts.get(region))
        return self.placed_before(template) or NOTHING_MOVES

    def record(
        self, graph: CompiledGraph, keys: Sequence[int | None], results: Sequence[Any]
    ) -> None:
        recorder, template = self.recorder, graph.template
        assert recorder is not None
        assert template is not None
        region = recorder.region_count
        if self.plan is not None and region != graph.region:
            self._check_twins(graph, region)
            again = localized(self.plan, region, template)
            if _moved(again) != _moved(graph.transfers):
                raise PlanError(
                    f"regions {graph.region} and {region} are runs of one graph, but the plan does "
                    "not move the same of both",
                    fix="plan so that all runs of a layer are treated alike (--budget 0)",
                )
        run = recorder.record(template, keys, results, graph.prefix)
        self.runs.append((graph, run))

    def _check_twins(self, graph: CompiledGraph, region: int) -> None:
        """Refuse a choice for a region that is another run of ``graph``, but not its own choice."""
        if graph.base is None or graph.region is None:
            return
        by_itself = chosen_ops(graph.base)
        if self.choices.get(region, by_itself) != self.choices.get(graph.region, by_itself):
            raise twins_differ(graph.region, region)


def _moved(transfers: Sequence[Transfer]) -> set[tuple[Any, ...]]:
    return {(t.storage, t.start, t.stop, t.transfer_bytes, t.packed) for t in transfers}


def _check_plan_alone(plan: Plan, device: torch.device) -> None:
    """Refuse what needs no graph to see, before host memory is taken for it."""
    if plan.device != device.type:
        raise other_graphs(plan, f"device was {plan.device}, is {device.type}")
    if plan.partitioner not in PARTITIONERS:
        raise PlanError(f"the plan names a partitioner that is not known: {plan.partitioner!r}")
    for transfer in plan.transfers:
        if not 0 < transfer.transfer_bytes <= transfer.stop - transfer.start:
            raise PlanError(
                f"the transfer of storage {transfer.storage} says {transfer.transfer_bytes} bytes "
                f"for the range {transfer.start} to {transfer.stop}"
            )


def _device(device: str | torch.device) -> torch.device:
    return present_device(
        device, doing="to replay on", fix="replay with --device cpu, or on a machine with a GPU"
    )


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
