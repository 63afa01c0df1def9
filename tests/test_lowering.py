"""Tests of ``offplan.trace.lowering``: what Inductor says of its kernels and buffers, and that to
ask it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering

import offplan
from offplan.budget import EVERYTHING
from offplan.fusion import fused, is_fused
from offplan.graph import Graph, GraphFacts, Kernel, Lowering, decode_graph, save_graph
from offplan.memory import predict
from offplan.plan import check_plan, make_plan
from offplan.trace import lowering
from offplan.trace._torch import reset_dynamo
from offplan.trace.capture import TraceOptions, trace_target
from offplan.trace.compilers import _fused_as_without
from offplan.trace.lowering import read_lowering

# What is compiled is shared by the tests of one process.
pytestmark = pytest.mark.xdist_group("inductor")

DEVICES = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]
ROWS, WIDTH = 128, 64
# Of 32-bit floats.
HIDDEN_BYTES = 4 * ROWS * WIDTH

Read = Callable[..., Any]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    reset_dynamo()


class Chain(nn.Module):
    """A library's product, what is fused behind it into both parts of a concatenation, a product of
    that, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x) * 2 + 1)
        return self.second(torch.cat((hidden.sin(), hidden.cos()), 0)).sum()


class Norms(nn.Module):
    """Dropout and two normalizations: random numbers, and reductions in several steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = nn.functional.dropout(self.mix(self.norm(x)), 0.1)
        return torch.softmax(found + x, -1).square().mean()


class Waves(nn.Module):
    """What softmax reads twice: for the sum of a row, and to divide by it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.mix(x)
        for _ in range(6):
            found = found.sin() * found + found.cos() * x
        return torch.softmax(found, -1).square().sum()


class Scaled(nn.Module):
    """A norm whose weight's gradient adds up columns, where its input's adds up rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(1024)
        self.mix = nn.Linear(1024, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.norm(self.mix(x))).square().sum()


def traced(
    model: type[nn.Module], device: str = "cpu", shape: tuple[int, int] = (ROWS, WIDTH)
) -> GraphFacts:
    target = offplan.Target(model(), (torch.randn(shape, requires_grad=True),))
    return trace_target(target, TraceOptions(device=device, compiler="inductor"))


def graphs(facts: GraphFacts) -> tuple[Graph, Graph]:
    (region,) = facts.regions
    assert region.backward is not None
    return region.forward, region.backward


def lowering_of(graph: Graph) -> Lowering:
    assert graph.lowering is not None
    return graph.lowering


def targets(graph: Graph, kernel: Kernel) -> set[str]:
    return {graph.ops[place].target.split(".")[1] for place in kernel.ops}


@pytest.mark.parametrize("device", DEVICES)
def test_which_ops_one_kernel_fuses(device: str) -> None:
    forward, _ = graphs(traced(Chain, device))
    kernels = lowering_of(forward).kernels
    product, chain, second, total = kernels[0], kernels[1:-2], *kernels[-2:]
    assert (product.call, second.call, total.call) == ("aten.mm.out", "aten.mm.out", "")
    # On a GPU each part of the concatenation may be a kernel of its own.
    assert set().union(*(targets(forward, kernel) for kernel in chain)) >= {
        "mul", "add", "relu", "sin", "cos"
    }  # fmt: skip
    assert {kernel.call for kernel in chain} == {""}
    assert targets(forward, total) == {"sum"}
    assert [kernel.at for kernel in kernels] == sorted(kernel.at for kernel in kernels)


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_is_in_memory_is_a_buffer(device: str) -> None:
    facts = traced(Chain, device)
    forward, _ = graphs(facts)
    found = lowering_of(forward)
    made = {number for kernel in found.kernels for number in kernel.makes}
    sizes = sorted(found.buffers[number].size_bytes for number in made)
    # The sum, the second product, the first one, and the concatenation, which its parts are
    # written into: the values in between are never there.
    assert sizes == [4, HIDDEN_BYTES, HIDDEN_BYTES, 2 * HIDDEN_BYTES]
    # And what is said of them is consistent.
    assert decode_graph(save_graph(facts), "made") == facts
    op_by_op = {
        facts.values[value].storage
        for op in forward.ops
        for value in op.outputs
        if op.target not in ("aten.permute.default", "aten.mm.default")
    }
    assert len(op_by_op) > 6


@pytest.mark.skipif("cuda" not in DEVICES, reason="loops are those of GPU kernels")
def test_what_one_loop_makes_and_the_next_reads_is_in_memory() -> None:
    def made(*, at_once: bool) -> list[int]:
        with inductor_config.patch({"triton.persistent_reductions": at_once}):
            forward, _ = graphs(traced(Waves, "cuda", (512, 256)))
        found = lowering_of(forward)
        return sorted(found.buffers[n].size_bytes for kernel in found.kernels for n in kernel.makes)

    # Beside the product, a row's largest value and sum, and the loss: what softmax reads.
    assert made(at_once=False) == sorted([*made(at_once=True), 4 * 512 * 256])


@pytest.mark.skipif("cuda" not in DEVICES, reason="CPU kernels do not reduce in two orders")
def test_partial_sums_of_a_kernel_that_reduces_in_two_orders_are_in_memory() -> None:
    _, backward = graphs(traced(Scaled, "cuda", (2**15, 1024)))
    found = lowering_of(backward)
    read = {number for kernel in found.kernels for number in kernel.reads}
    (both,) = [kernel for kernel in found.kernels if len(kernel.makes) == 3]
    _, partial, scratch = (found.buffers[number].size_bytes for number in both.makes)
    # Of 16 rows each, in 4-byte floats; and what ATen allocates to add those up.
    assert partial == 2**15 // 16 * 1024 * 4
    assert scratch == 2 * partial + 32
    assert [number in read for number in both.makes] == [True, True, False]


@dataclass(eq=False)
class Node:
    """An operation as Inductor's scheduler has it."""

    node: Any
    min_order: float
    max_order: float


def test_transfers_are_not_counted_between_operations_that_may_be_fused() -> None:
    class Scheduler:
        def fuse_nodes(self, nodes: list[Node]) -> list[Node]:
            return nodes

    transfer = SimpleNamespace(op_overload=SimpleNamespace(namespace="offplan_7"))
    other = SimpleNamespace(op_overload=SimpleNamespace(namespace="aten"))
    nodes = [Node(transfer if place in (0, 2, 3, 6) else other, place, place) for place in range(7)]
    nodes[5].max_order = 6
    with _fused_as_without(SimpleNamespace(Scheduler=Scheduler)):
        assert Scheduler().fuse_nodes(nodes) == nodes
    assert [(nodes[at].min_order, nodes[at].max_order) for at in (1, 4, 5)] == [
        (0, 0), (1, 1), (2, 3),
    ]  # fmt: skip
    assert sorted(nodes, key=lambda node: node.min_order) == nodes
    assert len({node.min_order for node in nodes}) == 7


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_can_write_over_what_it_reads(device: str) -> None:
    """Alone it may take any buffer that is free; with transfers, only what it reads itself."""
    _, backward = graphs(traced(Norms, device))
    assert backward.lowering_alone is not None
    for found in (lowering_of(backward), backward.lowering_alone):
        over = [kernel for kernel in found.kernels if kernel.writes and not kernel.makes]
        assert over
        assert all(set(kernel.writes) <= set(kernel.reads) for kernel in over)


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_says_what_it_writes_over_without_reading_it(device: str) -> None:
    _, backward = graphs(traced(Chain, device))
    alone = backward.lowering_alone
    assert alone is not None
    for found in (lowering_of(backward), alone):
        for kernel in found.kernels:
            # Alone it takes a buffer that is free, whoever had it.
            sizes = [found.buffers[number].size_bytes for number in kernel.writes]
            assert kernel.unread_bytes == sum(sizes)
    assert any(kernel.unread_bytes for kernel in alone.kernels)


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_says_whether_it_reduces(device: str) -> None:
    forward, _ = graphs(traced(Chain, device))
    # A product, a wave, a product, and the sum of all.
    found = [kernel.reduces for kernel in lowering_of(forward).kernels]
    assert found == [False, False, False, True]


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_are_made_once_and_read_afterwards(device: str) -> None:
    for model in (Chain, Norms):
        for graph in graphs(traced(model, device)):
            assert graph.lowering_alone is not None
            for found in (lowering_of(graph), graph.lowering_alone):
                known = set(range(len(graph.inputs)))
                for kernel in found.kernels:
                    assert known >= {*kernel.reads, *kernel.writes} - {*kernel.makes}
                    assert known.isdisjoint(kernel.makes)
                    known.update(kernel.makes)
                assert known >= {output for output in found.outputs if output is not None}


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_fused_takes_less_memory(device: str) -> None:
    facts = traced(Norms, device)
    assert predict(fused(facts), ()).peak_bytes < predict(facts, ()).peak_bytes


def reading(monkeypatch: pytest.MonkeyPatch, read: Read) -> list[Any]:
    """Have captures ask by ``read``, and list what they hear."""
    heard: list[Any] = []

    def hear(*args: Any) -> Any:
        heard.append(read(*args))
        return heard[-1]

    monkeypatch.setattr(lowering, "read_lowering", hear)
    return heard


def described(module: fx.GraphModule) -> tuple[Any, ...]:
    return module.code, [(node.name, sorted(node.meta)) for node in module.graph.nodes]


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_stay_as_they_are_and_no_code_is_generated(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated: list[Any] = []
    for name in ("write", "load_by_key_path"):
        monkeypatch.setattr(PyCodeCache, name, lambda *args, **rest: generated.append(args))
    before_and_after: list[tuple[Any, Any]] = []

    def read(module: fx.GraphModule, *rest: Any) -> Any:
        before = described(module)
        found = read_lowering(module, *rest)
        before_and_after.append((before, described(module)))
        return found

    heard = reading(monkeypatch, read)
    settings = inductor_config.fx_graph_cache, inductor_config.max_autotune
    methods = GraphLowering.compile_to_module, GraphLowering.codegen
    traced(Norms, device)
    assert all(heard)
    assert len(before_and_after) == 2
    assert all(before == after for before, after in before_and_after)
    assert not generated
    assert settings == (inductor_config.fx_graph_cache, inductor_config.max_autotune)
    assert methods == (GraphLowering.compile_to_module, GraphLowering.codegen)


@pytest.mark.parametrize("raises", [True, False])
def test_it_is_read_whatever_becomes_of_what_stops_inductor(
    raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(module: fx.GraphModule, inputs: Sequence[Any], lower: Any, *rest: Any) -> Any:
        def wrapping(graph: fx.GraphModule, given: Sequence[Any]) -> None:
            with suppress(Exception):
                lower(graph, given)
            if raises:
                raise RuntimeError("which says nothing of its cause")

        return read_lowering(module, inputs, wrapping, *rest)

    heard = reading(monkeypatch, read)
    facts = traced(Chain)
    assert len(heard) == 2
    assert is_fused(facts)
    monkeypatch.undo()
    assert facts == traced(Chain)


def _fail(*args: Any, **options: Any) -> Any:
    raise RuntimeError("not here")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (GraphLowering, "run"),
        (GraphLowering, "_update_scheduler"),
        (lowering._Reader, "read"),
        (lowering, "inductor_lowering"),
    ],
)
def test_a_graph_that_cannot_be_lowered_is_planned_op_by_op(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, _fail)
    facts = traced(Chain)
    monkeypatch.undo()
    assert [graph.lowering for graph in graphs(facts)] == [None, None]
    assert not is_fused(facts)
    plan = make_plan(facts, budget=EVERYTHING, min_bytes=1)
    check_plan(facts, plan)
    assert plan.predicted.no_plan.peak_bytes == predict(facts, ()).peak_bytes
    assert plan.transfers
