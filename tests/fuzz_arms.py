"""One random program in every arm: eager, eager under hooks, compiled, and replays of plans.

1.  *Eager* is plain torch.  Under *hooks* the same kernels run, and everything that may leave is
    moved: no bit may differ.
2.  *Compiled* is a replay without a plan.  Its kernels are torch's choice: an op may be decomposed,
    or be given other strides, so it is held to eager by a tolerance, and what has other bits is
    counted.
3.  *Plans* are replays of the same graphs: at the floor, and under a random choice of what is
    computed again with a random part of the rest moved.  No bit may differ from the compiled arm,
    and the bytes moved must be those of the plan.
4.  The quick *door* records the program's calls of torch as the graph that Dynamo would make of
    it, and has AOTAutograd trace that graph once for all compiled arms, each of which partitions it
    as its own replay does.  The other door is ``torch.compile``, once for each arm.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import msgspec
import torch
from fuzz_programs import SELECTIVE, Found, Net, Program, eager, run, target_of
from torch import fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from offplan.errors import BudgetError, OffplanError, PlanError
from offplan.graph import GraphFacts, digest
from offplan.plan import ACTIONS, Plan, check_plan, make_plan
from offplan.recompute import Choice, Refusals, apply, chosen
from offplan.replay.compiled import Replay
from offplan.replay.eager import EagerReplay
from offplan.replay.graphs import CompiledGraph
from offplan.target import Target
from offplan.trace._torch import (
    FakeTensorMode,
    TracingContext,
    boxed_nop,
    reset_dynamo,
    tracing,
)
from offplan.trace.compilers import compile_pair

# Sums in another order, or one rounding more, at numbers around one.
CLOSE = 1e-3


# --- the quick door -------------------------------------------------------------------------------


class Recorder(TorchFunctionMode):
    """Records calls of torch as nodes; tensors that none of them made become placeholders.

    ``lifted`` has those tensors, in the order of the placeholders.
    """

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.nodes: dict[int, fx.Node] = {}
        self.lifted: list[torch.Tensor] = []
        # An id is a tensor's as long as the tensor lives.
        self.kept: list[torch.Tensor] = []
        self.last_placeholder: fx.Node | None = None
        # While what is inside a checkpoint is recorded apart.
        self.is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if func is torch._C._set_grad_enabled:
            self.graph.call_function(func, args)
            return func(*args)
        given = tree_map(self.node_of, (args, kwargs))
        made = func(*args, **kwargs)
        if _has_tensors(made) or _is_change(func):
            name = getattr(func, "__name__", "")
            if getattr(torch.Tensor, name, None) is func:
                node = self.graph.call_method(name, *given)
            else:
                node = self.graph.call_function(func, *given)
            self.keep(made, node)
        return made

    def node_of(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if id(item) not in self.nodes:
            self.lifted.append(item)
            self.keep(item, self._placeholder())
        return self.nodes[id(item)]

    def _placeholder(self) -> fx.Node:
        last = self.last_placeholder
        first = next(iter(self.graph.nodes), None)
        place = self.graph.inserting_after(last) if last else self.graph.inserting_before(first)
        with place:
            self.last_placeholder = self.graph.placeholder(f"given_{len(self.lifted)}")
        return self.last_placeholder

    def keep(self, made: Any, node: fx.Node) -> None:
        if isinstance(made, torch.Tensor):
            self.nodes.setdefault(id(made), node)
            self.kept.append(made)
        elif isinstance(made, tuple | list):
            for place, item in enumerate(made):
                self.keep(item, self.graph.call_function(operator.getitem, (node, place)))

    def in_checkpoint(self, body: Callable[..., Any], selective: bool, *given: Any) -> Any:
        """Records ``body`` as Dynamo records what is checkpointed."""
        inner = Recorder(self.net)
        for tensor in given:
            inner.node_of(tensor)
        self.is_paused = True
        self.net.in_checkpoint = inner.in_checkpoint
        with inner:
            made = body(*given)
        self.net.in_checkpoint = self.in_checkpoint
        self.is_paused = False
        module = inner.module((made,))
        if selective:
            module.meta["_checkpoint_context_fn"] = SELECTIVE
        name = f"body_{len(list(self.root.children()))}"
        self.root.add_module(name, module)
        args = [self.node_of(tensor) for tensor in inner.lifted]
        more = {"use_reentrant": False}
        node = self.graph.call_function(
            torch.ops.higher_order.tag_activation_checkpoint,
            (self.graph.get_attr(name), *args),
            more,
        )
        self.keep((made,), node)
        return made

    def module(self, outputs: Sequence[torch.Tensor]) -> fx.GraphModule:
        self.graph.output(tuple(self.node_of(output) for output in outputs))
        return fx.GraphModule(self.root, self.graph)


def _has_tensors(made: Any) -> bool:
    if isinstance(made, tuple | list):
        return any(_has_tensors(item) for item in made)
    return isinstance(made, torch.Tensor)


def _is_change(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__setitem__"


class Recorded(NamedTuple):
    """A program as one graph; ``given`` says what its placeholders are: a name, or a constant.

    The graph returns nothing twice, and nothing that it is given: ``outputs`` says of everything
    that the program returns which output of the graph it is, or what is given by that name.
    """

    module: fx.GraphModule
    given: tuple[str | torch.Tensor, ...]
    outputs: tuple[int | str, ...]

    def returned(self, target: Target, made: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        named = _named(target)
        return tuple(made[each] if isinstance(each, int) else named[each] for each in self.outputs)

    def arguments(self, target: Target) -> list[torch.Tensor]:
        named = _named(target)
        return [named[each] if isinstance(each, str) else each for each in self.given]


def _named(target: Target) -> dict[str, torch.Tensor]:
    found = {**dict(target.model.named_parameters()), **dict(target.model.named_buffers())}
    return found | {"x": target.args[0], "y": target.args[1]}


def recorded(program: Program) -> Recorded:
    target = target_of(program)
    model = target.model
    assert isinstance(model, Net)
    recorder = Recorder(model)
    model.in_checkpoint = recorder.in_checkpoint
    with recorder:
        outputs = model(*target.args)
    names = {id(tensor): name for name, tensor in _named(target).items()}
    made = list({id(t): t for t in outputs if id(t) not in names}.values())
    places = {id(tensor): place for place, tensor in enumerate(made)}
    return Recorded(
        recorder.module(made),
        tuple(names.get(id(t), t) for t in recorder.lifted),
        tuple(names.get(id(t), places.get(id(t), 0)) for t in outputs),
    )


class Door:
    """AOTAutograd's trace of a recorded program, for any number of replays (definition 4).

    What AOTAutograd keeps of the pair that it was given, for its own part of a run, is put in
    its place for each arm.
    """

    def __init__(self, program: Program) -> None:
        self.recorded = recorded(program)
        self.joint: Callable[[], fx.GraphModule] | None = None
        self.callable: Callable[..., Any] | None = None
        self.arm: _Arm | None = None

    def replay(self, target: Target, plan: Plan | None) -> Replay:
        """A replay that runs the recorded program."""
        replay = Replay(target, plan, device="cpu")
        arm = _Arm(self, replay)

        def compiled(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            # As Dynamo has it; code that nobody runs is then not written.
            with _use_lazy_graph_module(True):
                made = arm.run(self.recorded.arguments(target))
            return self.recorded.returned(target, made)

        replay._compiled = compiled
        return replay

    # --- as a pair, for AOTAutograd -----------------------------------------------------------

    has_transfers = False

    def compile(self, arm: _Arm, arguments: Sequence[torch.Tensor]) -> None:
        if self.callable is not None:
            arm.partition_again()
            return
        self.arm = arm
        context = TracingContext(FakeTensorMode(allow_non_fake_inputs=True))
        with tracing(context):
            self.callable = compile_pair("aot_eager", self.recorded.module, arguments, self)

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.joint, self.inputs = joint, joint_inputs
        self.options = {"num_fwd_outputs": num_fwd_outputs, **options}
        self.graph = copy.deepcopy(joint.graph)
        self.context = TracingContext.get()
        assert self.arm is not None
        return self.arm.partition(joint)

    def compile_forward(self, module: fx.GraphModule, inputs: Any, lower: Any) -> Any:
        assert self.arm is not None
        self.arm.lower_forward(module)
        self.metadata = TracingContext.get().fw_metadata

        def run(args: list[Any]) -> Any:
            return self.arm.forward(args)

        run._boxed_call = True
        return run

    def compile_backward(self, module: fx.GraphModule, inputs: Any, lower: Any) -> Any:
        def run(args: list[Any]) -> Any:
            return self.arm.backward(args)

        run._boxed_call = True
        return run


def saved_by(forward: fx.GraphModule, outputs: int) -> dict[str, Any]:
    """What AOTAutograd's metadata says of the values that a forward of fixed shapes saves, which
    are all tensors; newer torch has more of it."""
    saved = next(iter(forward.graph.find_nodes(op="output"))).args[0][outputs:]
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in saved)
    unchecked = [node.meta.get("saved_tensor_with_no_vc_check", False) for node in saved]
    return {
        "num_tensors_saved_with_no_vc_check": sum(unchecked),
        "saved_tensor_is_graph_input": [node.op == "placeholder" for node in saved],
    }


class _Arm:
    """One replay of the program, and what is its own of the compiled graphs."""

    def __init__(self, door: Door, replay: Replay) -> None:
        self.door = door
        self.replay = replay
        self.graph: CompiledGraph | None = None
        self.pair: tuple[fx.GraphModule, fx.GraphModule] | None = None
        self.kept: dict[str, Any] = {}

    def run(self, arguments: list[torch.Tensor]) -> Any:
        door = self.door
        if self.graph is None:
            step = self.replay._step
            self.graph = CompiledGraph(step, [], ())
            step.graphs.append(self.graph)
            door.compile(self, arguments)
            self.graph.callable = door.callable
        door.arm = self
        for name, value in self.kept.items():
            setattr(door.metadata, name, value)
        return self.graph.run(arguments)

    def partition(self, joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
        assert self.graph is not None
        self.pair = self.graph.partition(joint, self.door.inputs, **self.door.options)
        return self.pair

    def partition_again(self) -> None:
        door = self.door
        with tracing(door.context):
            if door.joint is not None:
                self.partition(fx.GraphModule(door.joint, copy.deepcopy(door.graph)))
            assert self.pair is not None
            self.lower_forward(self.pair[0])

    def lower_forward(self, module: fx.GraphModule) -> None:
        assert self.graph is not None
        self.forward = self.graph.compile_forward(module, (), boxed_nop)
        if self.pair is None:
            # No gradient is needed: AOTAutograd asks for nothing else.
            return
        self.backward = self.graph.compile_backward(self.pair[1], (), boxed_nop)
        self.kept = saved_by(self.pair[0], self.door.options["num_fwd_outputs"])


# --- arms -----------------------------------------------------------------------------------------

OpenDoor = Callable[[Target, Plan | None], Replay]


class Difference(AssertionError):
    """Two arms that have to have the same bits, or bytes, do not."""


@dataclass
class Outcome:
    """What the arms of one program came to.  ``eager`` says how the compiled arm compares with
    plain eager (definition 2); ``torch_own`` that torch's own compiler differs in the same way."""

    eager: str
    ops: int
    saved_bytes: int
    moved: int
    moved_again: int
    run_again: int
    hooked: int
    regions: int


def through_the_quick_door(program: Program) -> OpenDoor:
    return Door(program).replay


def through_dynamo(program: Program) -> OpenDoor:
    def replay(target: Target, plan: Plan | None) -> Replay:
        reset_dynamo()
        return Replay(target, plan, device="cpu")

    return replay


def outcome(program: Program, choice: Random, door: Callable[[Program], OpenDoor]) -> Outcome:
    """Run every arm of ``program``.  Raises ``Difference``, or what an arm raises."""
    plain = eager(program)
    hooked = _hooked(program, choice, plain)
    replay = door(program)
    try:
        base, facts, _ = _replayed(program, replay, None)
    except (RuntimeError, ValueError, OffplanError):
        if not _torch_refuses(program):
            raise
        return Outcome("torch refuses", 0, 0, 0, 0, 0, hooked, 0)
    compared = _compared(program, plain, base)
    floor = make_plan(facts, budget=0, min_bytes=1)
    _assert_same_as((base,), program, replay, floor, facts, "the floor")
    drawn = drawn_plan(facts, floor, choice)
    # What does not compute again from what the step has written to has eager's gradients then.
    own = (base, plain) if compared == "torch differs" else (base,)
    try:
        _assert_same_as(own, program, replay, drawn, facts, "a random plan")
    except PlanError as error:
        if "has written to" not in error.what or not _reads_what_changed(facts):
            raise
    return Outcome(
        eager=compared,
        ops=facts.op_count,
        saved_bytes=floor.saved_bytes,
        moved=len(floor.transfers),
        moved_again=len(drawn.transfers),
        run_again=sum(len(choice.ops) for choice in drawn.choices),
        hooked=hooked,
        regions=len(facts.regions),
    )


def _reads_what_changed(facts: GraphFacts) -> bool:
    """Whether torch's own partitioner has the backward compute again from what the step has written
    to: a plan that says so is refused, whether or not it shows in the gradients."""
    for number, again in enumerate(chosen(facts)):
        refusals = Refusals(facts, number)
        if any(refusals(place) not in (None, "it draws random numbers") for place in again.ops):
            return True
    return False


def _replayed(
    program: Program, replay: OpenDoor, plan: Plan | None
) -> tuple[Found, GraphFacts, int]:
    target = target_of(program)
    with replay(target, plan) as arm:
        found = run(program, target, arm.forward)
        assert arm.facts is not None
        return found, arm.facts, arm.stats().offloaded_bytes


def _assert_same_as(
    own: Sequence[Found],
    program: Program,
    replay: OpenDoor,
    plan: Plan,
    facts: GraphFacts,
    name: str,
) -> None:
    check_plan(facts, plan)
    found, _, moved_bytes = _replayed(program, replay, plan)
    different = found.different(own[0])
    if different and not any(_is_close(found, other) for other in own[1:]):
        raise Difference(f"{name} changes bits of {', '.join(different)}")
    # Each of the two steps moves what the plan says.
    carried = 2 * sum(transfer.transfer_bytes for transfer in plan.transfers)
    if moved_bytes != carried:
        raise Difference(f"{name} moved {moved_bytes} bytes, its plan says {carried}")


def _is_close(found: Found, other: Found) -> bool:
    different = found.different(other)
    return all(found.distance(other, name) <= CLOSE for name in different)


def _hooked(program: Program, choice: Random, plain: Found) -> int:
    """Plain eager under hooks; returns how many storages were moved."""
    target = target_of(program)
    arm = EagerReplay(
        target,
        device="cpu",
        min_offload_bytes=1,
        keep_last_count=choice.choice((0, 0, 1)),
        in_flight_bytes=choice.choice((0, 256, 2**30)),
        checkpointed_inputs_only=choice.random() < 0.2,
    )
    with arm:
        found = run(program, target, arm.forward)
        moved = arm.stats().offload_count
    different = found.different(plain)
    if different:
        raise Difference(f"eager under hooks changes bits of {', '.join(different)}")
    return moved


def _torch_refuses(program: Program) -> bool:
    """Whether torch's own compiler does not take a program that eager torch runs: such as one that
    changes what a checkpoint returned, which its last op has saved."""
    reset_dynamo()
    target = target_of(program)
    compiled = torch.compile(target.model, backend="aot_eager", dynamic=False)
    try:
        run(program, target, lambda: compiled(*target.args))
    except (RuntimeError, ValueError):
        return True
    return False


def _compared(program: Program, plain: Found, base: Found) -> str:
    """How the compiled arm compares with eager (definition 2)."""
    different = base.different(plain)
    if not different:
        return "same"
    if "random numbers" in different:
        # A draw that nothing uses is compiled to nothing, and shifts all that come after it.
        return "drew other numbers"
    furthest = max(base.distance(plain, name) for name in different)
    if furthest <= CLOSE:
        return "close" if furthest else "same but for gradients of zeros"
    reset_dynamo()
    target = target_of(program)
    compiled = torch.compile(target.model, backend="aot_eager", dynamic=False)
    own = run(program, target, lambda: compiled(*target.args))
    if max((base.distance(own, name) for name in base.different(own)), default=0.0) <= CLOSE:
        return "torch differs"
    raise Difference(f"compiled differs from eager in {', '.join(different)} by {furthest:.3g}")


def drawn_plan(facts: GraphFacts, floor: Plan, choice: Random) -> Plan:
    """A plan with random choices of what runs again, and a random part of the rest moved."""
    share = choice.choice((0.0, 0.2, 0.5, 1.0))
    choices = _choices(facts, choice, share)
    under = apply(facts, choices)
    peak, least = floor.predicted.no_plan.peak_bytes, floor.predicted.plan.peak_bytes
    budget: Any = choice.choice((0, 0, None, choice.randint(min(least, peak), peak)))
    min_bytes = choice.choice((1, 64, 512))
    try:
        plan = make_plan(under, budget=budget, min_bytes=min_bytes)
    except BudgetError:
        plan = make_plan(under, budget=0, min_bytes=min_bytes)
    if digest(under) == digest(facts):
        return plan
    return msgspec.structs.replace(
        plan, choices=choices, base_digest=digest(facts), actions=ACTIONS
    )


def _choices(facts: GraphFacts, choice: Random, share: float) -> tuple[Choice, ...]:
    again, found = chosen(facts), []
    for number, region in enumerate(facts.regions):
        if region.backward is None:
            continue
        refusals = Refusals(facts, number)
        ops = tuple(
            place
            for place in range(len(region.forward.ops))
            if (place in again[number].ops or refusals(place) is None) and choice.random() < share
        )
        found.append(Choice(number, ops))
    return tuple(found)
