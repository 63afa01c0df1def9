"""A backend for ``torch.compile``: plans inside a training script of the user's own.

1.  Each graph that is compiled with a backward is planned when it is partitioned, from itself and
    from the device as it is then: a budget is for the peak of the whole process, so what other
    tensors take at that moment (*elsewhere*: other parameters, the optimizer's state, what earlier
    graphs of the step have saved) is not the graph's to spend.
2.  With a plan that was made before, a graph gets the transfers of the first region of the plan
    that it is, region by region; where the plan has ops run again, of the first that it becomes
    when they do.  A graph that is none of them is *unknown*: nothing of it is
    moved, which is said once, or it is planned by itself as in 1 where that was asked for.
3.  A graph with symbolic sizes is unknown too, whatever was asked for.
4.  What is compiled without a backward (evaluation) is left alone.
5.  Host memory and streams belong to the backend: one run's memory is used again by the next.

One process, one device.  Steps may accumulate gradients, run evaluations between, keep graphs, or
fail; a backend is closed after the last backward.  Not handled: of several graphs in one step, each
sees what earlier ones save, but not what later ones do, nor their gradients.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import msgspec
import torch
from torch import fx

from offplan.budget import Action, Aim, Budget, given_budget, of_bytes, parse_budget
from offplan.costs import DeviceProfile, find_profile
from offplan.decide import Decisions
from offplan.eligibility import DEFAULT_MIN_BYTES, DEFAULT_RULES, RULE_SETS, RuleSet
from offplan.errors import BudgetError, PlanError, UsageError
from offplan.graph import Compiler, GraphFacts, ModelTensor, Partitioner, Region, TargetRef
from offplan.measured import PinName
from offplan.memory import Conditions, Optimizer
from offplan.plan import ACTIONS, Plan, RegionSize, given_actions, load_plan
from offplan.recompute import Choice, apply
from offplan.replay.graphs import (
    NOTHING_MOVES,
    CompiledGraph,
    Graphs,
    Placement,
)
from offplan.replay.host import HostPool
from offplan.replay.layout import layouts
from offplan.replay.localize import localized, other_graphs, torch_version
from offplan.replay.pinning import DEFAULT_PIN, Pinning, choose
from offplan.replay.runtime import Runtime, RuntimeStats, link_for, present_device
from offplan.trace._torch import (
    TracingContext,
    count_aot_call,
    inductor,
    inductor_mode_options,
    inductor_option_names,
    storage_key,
)
from offplan.trace.backend import Split, compile_settings
from offplan.trace.facts import BoundInput, FactsBuilder, RegionTemplate
from offplan.trace.lowering import lowered_template
from offplan.units import format_size, parse_size

logger = logging.getLogger("offplan")

OnUnknown = Literal["keep", "replan"]
BUDGET_VARIABLE = "OFFPLAN_BUDGET"
_NO_CUDA_GRAPHS = "max-autotune-no-cudagraphs"


class StepStats(msgspec.Struct, frozen=True):
    """What one measured step did.

    ``peak_allocated_bytes`` and ``stalled_ms`` are None on the CPU; the latter also unless timed.
    """

    step_ms: float
    peak_allocated_bytes: int | None
    offload_count: int
    offloaded_bytes: int
    reload_count: int
    reloaded_bytes: int
    host_pinned_bytes: int
    stalled_ms: float | None


@dataclass(frozen=True)
class Choices:
    """How a backend plans; see ``backend``."""

    plan: Plan | None = None
    budget: Budget | None = None
    actions: tuple[Action, ...] = ACTIONS
    rules: RuleSet = DEFAULT_RULES
    min_bytes: int = DEFAULT_MIN_BYTES
    partitioner: Partitioner = "min-cut"
    conditions: Conditions = field(default_factory=Conditions)
    profile: DeviceProfile | None = None
    host_bytes: int | None = None
    on_unknown: OnUnknown = "keep"


class Backend:
    """What ``torch.compile`` takes as ``backend``.  A context manager, closed at its end.

    ``plans`` has one plan for each graph that was planned, in the order of their compilation.
    """

    def __init__(
        self,
        choices: Choices,
        compiler: Compiler,
        device: torch.device,
        pin: PinName | Pinning,
        *,
        timing: bool,
        inductor_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.device = device
        link = link_for(device, timing=timing)
        pool = HostPool((), choose(pin, device), choices.host_bytes)
        self.runtime = Runtime(link, pool)
        self._graphs = _TrainingGraphs(choices, compiler, self.runtime)
        self._graphs.inductor_options = {
            **_own_padding(choices, compiler),
            **(inductor_options or {}),
        }

    def __deepcopy__(self, memo: Any) -> Backend:
        # A copy would have host memory of its own; Lightning copies what torch.compile is given.
        return self

    def __call__(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        if options:
            raise UsageError(
                f"{', '.join(sorted(options))} given to torch.compile beside an offplan backend",
                fix="give options to offplan.backend(...), or name the backend: "
                'torch.compile(model, backend="offplan", options={...})',
            )
        return self._graphs.backend()(module, example_inputs)

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(self._graphs.plans)

    def stats(self) -> RuntimeStats:
        """What was moved since the backend was made, and the host memory held."""
        return self.runtime.stats()

    @contextmanager
    def measure(self) -> Iterator[list[StepStats]]:
        """Measure what runs inside, a step for one; its ``StepStats`` are added to the list.

        Waits for the device before and after, and resets torch's peak on a GPU.
        """
        found: list[StepStats] = []
        before = self.stats()
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        yield found
        if is_cuda:
            torch.cuda.synchronize(self.device)
        step_ms = 1000 * (time.perf_counter() - start)
        after = self.stats()
        stalled = None if after.stalled_ms is None else after.stalled_ms - (before.stalled_ms or 0)
        found.append(
            StepStats(
                step_ms=step_ms,
                peak_allocated_bytes=(
                    torch.cuda.max_memory_allocated(self.device) if is_cuda else None
                ),
                offload_count=after.offload_count - before.offload_count,
                offloaded_bytes=after.offloaded_bytes - before.offloaded_bytes,
                reload_count=after.reload_count - before.reload_count,
                reloaded_bytes=after.reloaded_bytes - before.reloaded_bytes,
                host_pinned_bytes=after.host_pinned_bytes,
                stalled_ms=stalled,
            )
        )

    def close(self) -> None:
        """Wait for copies in flight, and give host memory back.  A second call does nothing.

        What was compiled with the backend cannot run any more.
        """
        try:
            self.runtime.close()
        finally:
            self._graphs.close()

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def backend(
    plan: Plan | str | Path | None = None,
    *,
    budget: int | str | None = None,
    actions: str | Sequence[str] | None = None,
    compiler: Compiler | None = None,
    device: str | torch.device | None = None,
    rules: RuleSet = DEFAULT_RULES,
    min_size: int | str = DEFAULT_MIN_BYTES,
    partitioner: Partitioner = "min-cut",
    optimizer: Optimizer = "none",
    accumulate: bool = False,
    profile: str | DeviceProfile | None = None,
    host_budget: int | str | None = None,
    pin: PinName | Pinning = DEFAULT_PIN,
    on_unknown: OnUnknown = "keep",
    timing: bool = False,
    inductor_options: Mapping[str, Any] | None = None,
) -> Backend:
    """A backend for ``torch.compile(model, backend=...)`` that keeps the peak within a budget.

    ``plan`` is one that was made before (``offplan analyze``, ``offplan.analyze``), or its file;
    without one, each graph is planned when it is compiled, for ``budget``: bytes or ``"80GiB"`` of
    the process, ``"80%"`` of its peak without a plan, ``"auto"`` (what the device has), ``"floor"``
    or 0 (everything movable).  With neither, nothing is moved.  ``actions`` are those that may be
    taken, ``"keep"`` among them; all, or those of ``plan``, unless given.

    ``compiler`` is ``inductor`` unless a plan says otherwise.  ``optimizer`` and ``accumulate`` say
    what will be there that is not yet when the model is compiled: the optimizer's state, and
    gradients at the start of a step.  ``on_unknown``: what to do with a graph that ``plan`` does
    not have, ``keep`` all of it or ``replan`` it for ``budget``, or else for the plan's own.
    ``host_budget`` limits host memory, ``pin`` is how it is pinned, ``timing`` measures stalls.
    ``inductor_options`` are passed on to Inductor.

    Raises ``UsageError`` for options that make no sense, ``HostMemoryError`` if host memory cannot
    be pinned at all; and while the model is compiled, ``BudgetError`` if a graph cannot be kept
    within the budget, and ``PlanError`` if ``plan`` is not safe for the graphs.
    """
    found = load_plan(Path(plan)) if isinstance(plan, str | Path) else plan
    _check_words(
        compiler=compiler,
        rules=rules,
        partitioner=partitioner,
        optimizer=optimizer,
        on_unknown=on_unknown,
    )
    chosen: Compiler = compiler or ("inductor" if found is None else found.compiler)
    place = _device(device)
    _check_together(found, chosen, place, inductor_options or {})
    choices = Choices(
        plan=found,
        budget=_budget(budget, found, on_unknown),
        actions=_actions(actions, found),
        rules=rules if found is None else found.rules,
        min_bytes=_size("min_size", min_size) if found is None else found.min_bytes,
        partitioner=partitioner if found is None else found.partitioner,
        conditions=Conditions(optimizer=optimizer, accumulate=accumulate),
        profile=find_profile(profile) if isinstance(profile, str) else profile,
        host_bytes=None if host_budget is None else _size("host_budget", host_budget),
        on_unknown=on_unknown,
    )
    return Backend(choices, chosen, place, pin, timing=timing, inductor_options=inductor_options)


def by_name(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What ``torch.compile(model, backend="offplan", options=..., mode=...)`` calls for a graph.

    ``options`` are those of ``backend``, and any of Inductor's.  Where only the name can be given,
    the budget is that of the environment variable ``OFFPLAN_BUDGET``; and without that, ``auto`` on
    a GPU, which moves nothing of what fits.  The graph's backend lives, and holds its host memory,
    for as long as what was compiled.
    """
    own, inductor_options = _split_options(dict(options or {}))
    if own.get("plan") is None and own.get("budget") is None:
        own["budget"] = _default_budget(_device(own.get("device")))
    inductor_options = {**_mode_options(mode), **inductor_options}
    made = backend(**own, inductor_options=inductor_options)
    return _Owning(made, made(module, example_inputs))


class _Owning:
    """A compiled graph that keeps the backend it belongs to."""

    def __init__(self, made: Backend, call: Callable[..., Any]) -> None:
        self.backend = made
        self.call = call

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)


def _own_padding(choices: Choices, compiler: Compiler) -> dict[str, Any]:
    """The user's own choice whether to pad, for graphs that are planned as they are compiled.

    Those of a plan made before are not padded (definition 5 of ``trace.compilers``).
    """
    if compiler != "inductor" or choices.plan is not None:
        return {}
    return {"shape_padding": inductor().config.shape_padding}


# --- options --------------------------------------------------------------------------------------

_OWN = frozenset(backend.__kwdefaults__ or {}) - {"inductor_options"} | {"plan"}


def _split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {name: options.pop(name) for name in list(options) if name in _OWN}
    known = inductor_option_names() if options else frozenset()
    for name in options:
        if name.replace("-", "_") not in known:
            raise UsageError(
                f"{name!r} is an option of neither offplan nor Inductor",
                fix=f"offplan's are {', '.join(sorted(_OWN))}",
            )
    return own, options


def _default_budget(device: torch.device) -> str | None:
    text = os.environ.get(BUDGET_VARIABLE)
    if not text:
        return "auto" if device.type == "cuda" else None
    try:
        given_budget(text)
    except UsageError as error:
        raise UsageError(f"{BUDGET_VARIABLE} is {text!r}: not a budget", fix=error.fix) from error
    return text


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode in (None, "default"):
        return {}
    try:
        found = inductor_mode_options(mode)
    except KeyError:
        raise UsageError(f"mode is {mode!r}", fix=f'mode="{_NO_CUDA_GRAPHS}", or none') from None
    if found.get("triton.cudagraphs"):
        raise UsageError(
            f"mode={mode!r} records CUDA graphs, which cannot have transfers in them",
            fix=f'mode="{_NO_CUDA_GRAPHS}"',
        )
    return found


_WORDS: Mapping[str, tuple[str | None, ...]] = {
    "compiler": (None, *get_args(Compiler)),
    "rules": RULE_SETS,
    "partitioner": get_args(Partitioner),
    "optimizer": get_args(Optimizer),
    "on_unknown": get_args(OnUnknown),
}


def _check_words(**given: str | None) -> None:
    for option, word in given.items():
        if word not in _WORDS[option]:
            known = ", ".join(repr(known) for known in _WORDS[option] if known)
            raise UsageError(f"{option} is {word!r}", fix=f"one of: {known}")


def _check_together(
    plan: Plan | None,
    compiler: Compiler,
    device: torch.device,
    inductor_options: Mapping[str, Any],
) -> None:
    if inductor_options and compiler != "inductor":
        names = ", ".join(sorted(inductor_options))
        raise UsageError(f"the options {names} are Inductor's, and compiler is {compiler}")
    if plan is None:
        return
    if compiler != plan.compiler:
        raise UsageError(
            f"the plan was made for graphs of {plan.compiler}, and compiler is {compiler}",
            fix="leave compiler out, or make the plan again",
        )
    if device.type != plan.device:
        raise other_graphs(plan, f"device was {plan.device}, is {device.type}")


def _budget(budget: int | str | None, plan: Plan | None, on_unknown: OnUnknown) -> Budget | None:
    if plan is not None and budget is not None and on_unknown != "replan":
        raise UsageError(
            "both a plan and a budget are given",
            fix="one of them; or on_unknown='replan', which plans other graphs for the budget",
        )
    if budget is None and plan is not None and plan.budget is not None:
        return parse_budget(plan.asked) if plan.asked else of_bytes(plan.budget)
    return given_budget(budget)


def _actions(actions: str | Sequence[str] | None, plan: Plan | None) -> tuple[Action, ...]:
    if actions is not None:
        return given_actions(actions)
    return ACTIONS if plan is None else plan.actions


def _size(name: str, size: int | str) -> int:
    found = parse_size(size) if isinstance(size, str) else size
    if found < 0:
        raise UsageError(f"{name} is {size}", fix="give a number that is not negative")
    return found


def _device(device: str | torch.device | None) -> torch.device:
    try:
        return present_device(
            device,
            doing="to run on",
            fix="device='cpu' runs a plan on the CPU, which saves nothing and shows that it works",
        )
    except RuntimeError as error:
        raise UsageError(f"device is {device!r}", fix="'cuda', 'cuda:1' or 'cpu'") from error


# --- the graphs -----------------------------------------------------------------------------------


class _TrainingGraphs(Graphs):
    """The graphs of a backend, each planned as it is compiled (definitions 1 to 4)."""

    def __init__(self, choices: Choices, compiler: Compiler, runtime: Runtime) -> None:
        super().__init__(compiler, choices.partitioner, runtime)
        self.choices = choices
        self.plans: list[Plan] = []
        # Those of graphs that are being compiled.
        self._made: weakref.WeakKeyDictionary[CompiledGraph, Plan | None] = (
            weakref.WeakKeyDictionary()
        )
        self._taken: set[int] = set()
        self._said: set[str] = set()
        self._layouts = {} if choices.plan is None else layouts(choices.plan.transfers)

    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        if self.compiler == "aot_eager":
            # Inductor's own entry point says so.
            count_aot_call()
        taken, plan_count = set(self._taken), len(self.plans)
        try:
            with compile_settings():
                return super().compile(module, example_inputs)
        except BaseException:
            # The graph that could not be compiled has nothing: the next that is like it may.
            self._taken = taken
            del self.plans[plan_count:]
            raise

    def choice(self, graph: CompiledGraph, base: RegionTemplate) -> Collection[int] | None:
        """What the plan that was given has run again, or else one that is made for the graph."""
        if base.backward is None or _is_symbolic(base):
            return None
        plan = self.choices.plan
        if plan is not None:
            before = self.compiled_before(base)
            if before is not None and before.region is not None:
                return before.again
            region = self._region_of(plan, graph, base)
            if region is not None or self.choices.on_unknown == "keep":
                again = {choice.region: choice.ops for choice in plan.choices}
                return None if region is None else again.get(region)
        made = self._made[graph] = self._make(graph, base)
        return made.choices[0].ops if made is not None and made.choices else None

    def _region_of(self, plan: Plan, graph: CompiledGraph, base: RegionTemplate) -> int | None:
        """The first region of the plan that ``base`` becomes by it (definition 2)."""
        again = {choice.region: choice.ops for choice in plan.choices}
        facts = self._facts(graph, base)
        for region, size in enumerate(plan.regions):
            if region in self._taken:
                continue
            ops = again.get(region)
            try:
                found = apply(facts, () if ops is None else (Choice(0, ops),))
            except PlanError:
                continue
            if _region_size(found.regions[0]) == size:
                return region
        return None

    def _make(self, graph: CompiledGraph, base: RegionTemplate) -> Plan | None:
        """A plan for the budget, of the graph alone; None where there is no budget."""
        budget, choices, joint = self.choices.budget, self.choices, graph.joint
        if budget is None:
            return None
        assert joint is not None
        assert joint.base is not None
        split = _split()
        elsewhere = _elsewhere_bytes(graph.example_inputs, self.runtime.device, split.saved_bytes)
        aim = Aim(
            budget=budget,
            host_bytes=choices.host_bytes,
            conditions=choices.conditions,
            profile=choices.profile,
            device_bytes=_device_bytes(self.runtime.device, elsewhere),
            actions=choices.actions,
        )
        decisions = Decisions(
            self._lowered(graph, joint.base),
            choices.rules,
            choices.min_bytes,
            aim,
            lambda asked: self._lowered(graph, joint.split_again(base, asked[0].ops)),
        )
        own = _own_budget(budget, decisions.outlooks.no_plan.peak_bytes, elsewhere)
        try:
            plan = decisions.plan(own)
        except BudgetError as error:
            raise _with_elsewhere(error, budget, elsewhere) from error
        held_bytes = plan.predicted.plan.forward_end_bytes
        split.saved_bytes += held_bytes - decisions.outlooks.resting_bytes
        self.plans.append(plan)
        logger.info("%s", _planned_words(plan, elsewhere))
        return plan

    def _lowered(self, graph: CompiledGraph, found: Split) -> GraphFacts:
        """The facts of what runs: with Inductor, fused kernels and their buffers."""
        if self.compiler != "inductor":
            return self._facts(graph, found.template)
        lowered = lowered_template(found.template, found.forward, found.backward)
        return self._facts(graph, lowered)

    def placement(self, graph: CompiledGraph, template: RegionTemplate) -> Placement:
        if template.backward is None:
            return NOTHING_MOVES
        if _is_symbolic(template):
            self._say_once(
                "a graph has symbolic sizes, so nothing of it is moved: compile with "
                "dynamic=False to have each shape planned"
            )
            return NOTHING_MOVES
        if self.choices.plan is not None:
            found = self._of_the_plan(self.choices.plan, template)
            if found is not None:
                return found
            if self.choices.on_unknown == "keep":
                self._say_once(
                    "a graph was compiled that the plan does not have, so nothing of it is moved; "
                    "on_unknown='replan' plans it by itself"
                )
                return NOTHING_MOVES
        return self._planned(graph, template)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning(text)

    def _of_the_plan(self, plan: Plan, template: RegionTemplate) -> Placement | None:
        """The placement of the first region that ``template`` is (definition 2)."""
        before = self.placed_before(template)
        if before is not None:
            return before
        for region in range(len(plan.regions)):
            if region in self._taken:
                continue
            try:
                transfers = localized(plan, region, template)
            except PlanError:
                continue
            self._taken.add(region)
            return Placement(region, transfers, self._layouts.get(region))
        return None

    def _planned(self, graph: CompiledGraph, template: RegionTemplate) -> Placement:
        plan = self._made.get(graph)
        if plan is None or not plan.transfers:
            return NOTHING_MOVES
        return Placement(0, localized(plan, 0, template), layouts(plan.transfers)[0])

    def _facts(self, graph: CompiledGraph, template: RegionTemplate) -> GraphFacts:
        """The facts of a step that is this graph alone."""
        builder = FactsBuilder()
        bound = list(_bound(graph, template))
        output_names = [str(number) for number in range(template.output_count)]
        builder.add(template, bound, [None] * template.output_count, output_names)
        device = self.runtime.device
        return GraphFacts(
            target=TargetRef("", {}),
            torch=torch_version(),
            device=device.type,
            gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
            attention="auto",
            compiler=self.compiler,
            partitioner=self.choices.partitioner,
            model=tuple(_model_tensors(graph, bound)),
            storages=tuple(builder.storages),
            values=tuple(builder.values),
            regions=tuple(builder.regions),
        )


def _region_size(region: Region) -> RegionSize:
    backward_ops = len(region.backward.ops) if region.backward else 0
    return RegionSize(len(region.forward.ops), backward_ops, len(region.saved))


def _is_symbolic(template: RegionTemplate) -> bool:
    """Whether a size is not known.  Numbers that ops return are: attention's lengths, for one."""
    return any(value.symbolic for value in template.values) or any(
        template.values[value].kind == "symint" for value in template.forward.inputs
    )


def _bound(graph: CompiledGraph, template: RegionTemplate) -> Iterator[BoundInput]:
    """What the graph is given, by kind and name; tensors are told apart by their storages."""
    for place, name in enumerate(template.forward.input_names):
        example = graph.example_inputs[place] if place < len(graph.example_inputs) else None
        path = graph.paths[place] if place < len(graph.paths) else ""
        if not isinstance(example, torch.Tensor):
            yield BoundInput("input", name, None)
        elif isinstance(example, torch.nn.Parameter):
            yield BoundInput("parameter", path or name, storage_key(example))
        else:
            yield BoundInput("buffer" if path else "input", path or name, storage_key(example))


def _model_tensors(graph: CompiledGraph, bound: Sequence[BoundInput]) -> Iterator[ModelTensor]:
    seen: set[int] = set()
    for item, example in zip(bound, graph.example_inputs, strict=False):
        if item.kind not in ("parameter", "buffer") or id(example) in seen:
            continue
        seen.add(id(example))
        yield ModelTensor(
            kind="parameter" if item.kind == "parameter" else "buffer",
            names=(item.name,),
            dtype=str(example.dtype).removeprefix("torch."),
            shape=tuple(example.shape),
            size_bytes=example.numel() * example.itemsize,
            requires_grad=example.requires_grad,
        )


# --- the device -----------------------------------------------------------------------------------


@dataclass
class _Split:
    """The graphs that one captured graph was split into: what those that are planned will save."""

    saved_bytes: int = 0


def _split() -> _Split:
    """That of the captured graph that is being compiled.

    Where Dynamo splits a graph (for DistributedDataParallel), it compiles all parts before any
    runs, in one tracing context, which is all that a backend by name sees of the others.
    """
    context = TracingContext.get()
    if not hasattr(context, "offplan_split"):
        context.offplan_split = _Split()
    found: _Split = context.offplan_split
    return found


def _elsewhere_bytes(
    example_inputs: Sequence[Any], device: torch.device, saved_bytes: int = 0
) -> int:
    """Bytes of the device that are taken by what the graph is not given (definition 1).

    ``saved_bytes`` will be, once graphs run that are compiled and have not run yet.
    """
    if device.type != "cuda":
        return 0
    own = {
        storage_key(tensor): tensor.untyped_storage().nbytes()
        for tensor in example_inputs
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"
    }
    return max(0, torch.cuda.memory_allocated(device) + saved_bytes - sum(own.values()))


def _device_bytes(device: torch.device, elsewhere: int) -> int | None:
    """What ``auto`` may count on: what is free, or already this process's, less elsewhere."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - elsewhere


def _own_budget(budget: Budget, no_plan_bytes: int, elsewhere: int) -> Budget:
    """What is left of a budget of the process for the graph."""
    if budget.kind == "share":
        limit = int(budget.value * (no_plan_bytes + elsewhere))
    elif budget.kind == "bytes":
        limit = int(budget.value)
    else:
        return budget
    return replace(of_bytes(max(1, limit - elsewhere)), text=budget.text)


def _with_elsewhere(error: BudgetError, budget: Budget, elsewhere: int) -> BudgetError:
    floor = error.floor_bytes + elsewhere
    return BudgetError(
        f"{error.what}; other tensors of the process take {format_size(elsewhere)}",
        floor_bytes=floor,
        where=error.where,
        fix=f"budget={floor} is the least; below it only a smaller step helps",
    )


def _planned_words(plan: Plan, elsewhere: int) -> str:
    predicted = plan.predicted
    peaks = [format_size(p.peak_bytes + elsewhere) for p in (predicted.no_plan, predicted.plan)]
    return (
        f"planned a graph of {plan.op_count} ops: peak {peaks[1]} instead of {peaks[0]}, "
        f"{format_size(plan.moved_bytes)} in {len(plan.transfers)} transfers each way"
    )
