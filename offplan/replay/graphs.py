"""Compiled graphs that run under transfers.

1.  A *compiled graph* is what one captured graph became: a pair of forward and backward, with the
    transfers that its owner placed in it when it was partitioned, or a forward alone.
2.  Its owner, a set of ``Graphs``, says which transfers, and before that, when it has seen the
    *base* that the partitioner makes by itself, which ops of its forward the backward computes
    again; and it hears of runs while it records them.

Torch's compiler keeps what it compiled as long as the model's code lives; all that it holds of a
graph is a weak reference, so the owner decides how long graphs live.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from offplan.graph import Compiler, Partitioner
from offplan.replay.layout import Layout
from offplan.replay.operators import Operators
from offplan.replay.rewrite import Undo, insert_transfers
from offplan.replay.runtime import ReplayError, Runtime, TransferOps
from offplan.trace._torch import TracingContext
from offplan.trace.backend import (
    Joint,
    Recorder,
    local_paths,
    read_without_gradient,
    split_and_read,
)
from offplan.trace.compilers import PARTITIONERS, Lower, compile_pair
from offplan.trace.facts import RegionTemplate
from offplan.transfers import Transfer


class Placement(NamedTuple):
    """The transfers of one graph, as the plan's ``region``, and how their host bytes lie."""

    region: int | None
    transfers: Sequence[Transfer]
    layout: Layout | None


NOTHING_MOVES = Placement(None, (), None)


class Graphs(ABC):
    """Compiled graphs on one runtime.  A callable backend for them is ``backend``."""

    def __init__(self, compiler: Compiler, partitioner: Partitioner, runtime: Runtime) -> None:
        self.compiler = compiler
        self.inductor_options: Mapping[str, Any] = {}
        self.split = PARTITIONERS[partitioner]
        self.runtime = runtime
        self.recorder: Recorder | None = None
        self.graphs: list[CompiledGraph] = []
        self.operators = Operators(runtime) if compiler == "inductor" else None

    @abstractmethod
    def placement(self, graph: CompiledGraph, template: RegionTemplate) -> Placement:
        """The transfers of a graph that is being compiled."""

    def choice(self, graph: CompiledGraph, base: RegionTemplate) -> Collection[int] | None:
        """The ops of the forward of ``base`` that the backward of a graph that is being compiled
        computes again; None leaves that to torch."""
        return None

    def compiled_before(self, base: RegionTemplate) -> CompiledGraph | None:
        """A graph compiled before that has the same base, if there is one."""
        for known in self.graphs:
            if known.base is not None and is_equal(known.base, base):
                return known
        return None

    def placed_before(self, template: RegionTemplate) -> Placement | None:
        """The placement of a graph compiled before that computes the same, if there is one."""
        for known in self.graphs:
            if known.template is not None and is_equal(known.template, template):
                return Placement(known.region, known.transfers, known.layout)
        return None

    def record(
        self, graph: CompiledGraph, keys: Sequence[int | None], results: Sequence[Any]
    ) -> None:
        """Hear of a run of ``graph``; called while there is a recorder."""
        raise NotImplementedError

    @property
    def ops(self) -> TransferOps:
        """What the graphs call."""
        return self.runtime.ops if self.operators is None else self.operators.ops

    def backend(self) -> WeakBackend:
        """For ``torch.compile``."""
        return WeakBackend(weakref.ref(self))

    def compile(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        graph = CompiledGraph(self, local_paths(module), example_inputs)
        if self.recorder is not None:
            self.recorder.record_break(module)
        graph.callable = compile_pair(
            self.compiler, module, example_inputs, graph, self.inductor_options
        )
        graph.example_inputs = ()
        self.graphs.append(graph)
        return graph

    def close(self) -> None:
        """Let go of all graphs, and with them of what they were compiled to."""
        self.graphs.clear()
        if self.operators is not None:
            self.operators.close()

    def source_name(self, filename: str, line: int) -> str:
        return "" if self.recorder is None else self.recorder.sources(filename, line)


class WeakBackend:
    """What ``torch.compile`` holds of the graphs."""

    def __init__(self, graphs: weakref.ref[Graphs]) -> None:
        self.graphs = graphs

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return Call(weakref.ref(alive(self.graphs).compile(module, example_inputs)))


class Call:
    """What compiled code holds of one graph."""

    def __init__(self, graph: weakref.ref[CompiledGraph]) -> None:
        self.graph = graph

    def __call__(self, *args: Any) -> Any:
        return alive(self.graph).run(args)


def alive(reference: weakref.ref[Any]) -> Any:
    found = reference()
    if found is None:
        raise closed()
    return found


def closed() -> ReplayError:
    return ReplayError("the replay is closed", fix="make a new one")


class CompiledGraph:
    """One compiled graph, with the transfers that were inserted into it.

    ``example_inputs`` are those of the captured graph, while it is compiled.
    """

    def __init__(self, owner: Graphs, paths: list[str], example_inputs: Sequence[Any]) -> None:
        self._owner = weakref.ref(owner)
        self.runtime = owner.runtime
        self.paths = paths
        self.example_inputs = example_inputs
        self.callable: Callable[..., Any] | None = None
        self.base: RegionTemplate | None = None
        self.again: Collection[int] | None = None
        self.template: RegionTemplate | None = None
        self.region: int | None = None
        self.transfers: Sequence[Transfer] = ()
        self.layout: Layout | None = None
        self.undo: Undo | None = None
        self.prefix = ""
        # While it is chosen what runs again, and what moves.
        self.joint: Joint | None = None

    @property
    def owner(self) -> Graphs:
        found: Graphs = alive(self._owner)
        return found

    @property
    def has_transfers(self) -> bool:
        return bool(self.transfers)

    def run(self, args: Sequence[Any]) -> Any:
        assert self.callable is not None
        if self.runtime.is_closed:
            raise closed()
        recorder = self.owner.recorder
        if recorder is not None:
            self.prefix = recorder.module_prefix(self.paths, args)
        return self.callable(*args)

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        owner = self.owner
        options = {"num_fwd_outputs": num_fwd_outputs, **options}
        self.joint = Joint(joint, joint_inputs, options, owner.source_name)
        found = split_and_read(owner.split, self.joint, self._choose)
        forward, backward, self.template, _ = found
        self.region, self.transfers, self.layout = owner.placement(self, self.template)
        self.joint = None
        if self.transfers:
            assert self.layout is not None
            self.undo = insert_transfers(
                forward,
                backward,
                self.template,
                self.transfers,
                self.layout,
                self.runtime,
                owner.ops,
            )
        return forward, backward

    def _choose(self, base: RegionTemplate) -> Collection[int] | None:
        self.base = base
        self.again = self.owner.choice(self, base)
        return self.again

    def compile_forward(self, module: fx.GraphModule, inputs: Sequence[Any], lower: Lower) -> Any:
        if self.template is None:
            self.template = read_without_gradient(module, self.owner.source_name)
            self.region, self.transfers, self.layout = self.owner.placement(self, self.template)
        metadata = TracingContext.get().fw_metadata
        if metadata is not None:
            # None would mean "not known", and refuse a backward that keeps its graph.
            metadata.bw_donated_idxs = []
        compiled = lower(module, inputs)

        def run(args: list[Any]) -> list[Any]:
            recorder = self.owner.recorder
            if recorder is None:
                return self._run_forward(compiled, args)
            keys = recorder.keys(args)
            results = self._run_forward(compiled, args)
            self.owner.record(self, keys, results)
            return results

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compile_backward(self, module: fx.GraphModule, inputs: Sequence[Any], lower: Lower) -> Any:
        compiled = lower(module, inputs)
        if not self.transfers:
            return compiled
        runtime = self.runtime

        def run(args: list[Any]) -> Any:
            with runtime.backward_run():
                return compiled(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _run_forward(self, compiled: Callable[..., Any], args: list[Any]) -> Any:
        if not self.transfers:
            return compiled(args)
        assert self.layout is not None
        with self.runtime.forward_run(self.layout.size_bytes):
            return compiled(args)


def is_equal(one: RegionTemplate, other: RegionTemplate) -> bool:
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
