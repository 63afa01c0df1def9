"""Exports: what a marked graph moves is what the plan moves, said by torch's own pass."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._functorch import partitioners
from torch.utils.checkpoint import CheckpointPolicy
from typer.testing import CliRunner, Result

from offplan import export
from offplan.cli import app
from offplan.errors import PlanError
from offplan.graph import GraphFacts, save_graph, timeline
from offplan.plan import Plan, dump_plan, make_plan
from offplan.target import load_target
from offplan.trace import compilers
from offplan.trace.capture import TraceOptions, trace

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "exported_saved_view.txt"
pytestmark = pytest.mark.skipif(
    not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD")
    or not hasattr(functorch_config, "enable_activation_offloading"),
    reason=f"torch {torch.__version__} has no activation offloading, or no MUST_CPU_OFFLOAD",
)
needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="traces for cuda: needs a CUDA build of torch"
)

# Every way of saving that an export tells apart.
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Mixed(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        x = torch.tanh(self.first(x))              # saved as it is, and as a view
        b, s, w = x.shape
        qkv = self.qkv(x).view(b, s, 3, 4, w // 4)  # three views of one storage
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, w))
        x = torch.sin(x.transpose(0, 1) * 2)        # saved with strides of its own
        x = self.norm(x.transpose(0, 1).contiguous()).cos()
        for layer in self.layers:
            x = torch.sin(layer(x))
        return torch.sigmoid(x)

class Fused(nn.Module):
    # Saved whole, and read through views that the plan does not show.
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return q.sin() * k.sin() * v.sin()

class Half(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.sin(self.linear(x)).cos()

class Halves(nn.Module):
    # The same graph twice, with a break between.
    def __init__(self, width):
        super().__init__()
        self.halves = nn.ModuleList(Half(width) for _ in range(2))

    def forward(self, x):
        for half in self.halves:
            x = half(x)
            torch._dynamo.graph_break()
        return x

def build(batch: int = 4, rows: int = 16, width: int = 32, layers: int = 2):
    return Mixed(width, layers), (torch.randn(batch, rows, width),)

def fused(rows: int = 64, width: int = 32):
    return Fused(width), (torch.randn(rows, width),)

def halves(rows: int = 64, width: int = 32):
    return Halves(width), (torch.randn(rows, width),)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("export") / "model.py"
    path.write_text(MODEL)
    return str(path)


@cache
def facts_of(spec: str, device: str = "cpu", partitioner: str = "min-cut", **params) -> GraphFacts:
    return trace(spec, params, TraceOptions(device, partitioner=partitioner))  # type: ignore[arg-type]


@cache
def inductor_facts(spec: str) -> GraphFacts:
    return trace(spec, {}, TraceOptions("cpu", compiler="inductor"))


def plan_of(spec: str, device: str = "cpu", partitioner: str = "min-cut", **params) -> Plan:
    """A plan that moves all that may move, however small."""
    return make_plan(facts_of(spec, device, partitioner, **params), min_bytes=1, budget=0)


def module_of(exported: export.Export) -> types.ModuleType:
    module = types.ModuleType("marks")
    sys.modules["marks"] = module
    exec(compile(exported.text, "marks.py", "exec"), module.__dict__)
    return module


def moved_names(plan: Plan, exported: export.Export) -> set[str]:
    """The one saved value of each storage that moves."""
    left_out = {(each.region, each.name, each.op, each.size_bytes) for each in exported.left_out}
    return {
        view.name
        for entry in plan.storages
        for view in entry.views
        if entry.action == "offload"
        and (entry.region, entry.name, entry.op, entry.size_bytes) not in left_out
    }


Spy = Callable[..., None]


def traced_with(spy: Spy, spec: str, monkeypatch, device="cpu", partitioner="min-cut", **params):
    """Trace ``spec``, and show ``spy`` a copy of each joint graph that is partitioned."""
    original = compilers.PARTITIONERS[partitioner]

    def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        spy(copy.deepcopy(joint), joint_inputs, **options)
        return original(joint, joint_inputs, **options)

    with monkeypatch.context() as patched:
        patched.setitem(compilers.PARTITIONERS, partitioner, partition)
        trace(spec, params, TraceOptions(device, partitioner=partitioner))


def chosen_in(forward: fx.GraphModule) -> set[str]:
    """What torch's pass decided to offload, and what it then does."""
    nodes = list(forward.graph.nodes)
    chosen = {node.name for node in nodes if node.meta.get("saved_for_offloading")}
    (output,) = forward.graph.find_nodes(op="output")
    copied = {node.name for node in output.args[0] if node.name.startswith("cpu_offload_")}
    assert copied == {f"cpu_offload_{name}" for name in chosen}
    return chosen


# --- PyTorch's activation offloading --------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "partitioner"),
    [
        ("cpu", "min-cut"),
        ("cpu", "default"),
        pytest.param("cuda", "min-cut", marks=needs_cuda_build),
    ],
)
def test_torch_offloads_exactly_what_the_plan_moves_and_it_can(
    model, device, partitioner, monkeypatch
):
    plan = plan_of(model, device, partitioner)
    exported = export.export_plan(plan, "saved-for-offloading")
    marks = module_of(exported)
    found: list[set[str]] = []

    def spy(joint, joint_inputs, **options):
        forward, _ = marks.partition(joint, joint_inputs, **options)
        found.append(chosen_in(forward))

    traced_with(spy, model, monkeypatch, device, partitioner)
    assert found == [moved_names(plan, exported)]
    assert exported.moved_count == len(found[0]) >= 1
    assert exported.left_out


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda_build)])
def test_what_is_left_out_is_what_torch_refuses(model, device, monkeypatch):
    """With every saved node marked, torch takes what moves, and of the rest only shared storages
    and what the plan keeps."""
    plan = plan_of(model, device)
    exported = export.export_plan(plan, "saved-for-offloading")
    found: set[str] = set()

    def spy(joint, joint_inputs, **options):
        for node in joint.graph.nodes:
            node.meta["should_offload"] = True
        with functorch_config.patch(enable_activation_offloading=True):
            forward, _ = partitioners.min_cut_rematerialization_partition(
                joint, joint_inputs, **options
            )
        found.update(chosen_in(forward))

    traced_with(spy, model, monkeypatch, device)
    moves = moved_names(plan, exported)
    assert moves <= found
    alone = {
        entry.views[0].name
        for entry in plan.storages
        if entry.action == "offload" and len(entry.views) == 1
    }
    assert found & (alone - moves) == set()
    reasons = " / ".join(each.why for each in exported.left_out)
    for reason in ("view (aten.view", "saved values share it", "not contiguous", "several outputs"):
        assert reason in reasons, reasons


def step(model: torch.nn.Module, args: Any, backend: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model.zero_grad()
    loss = torch.compile(model, backend=backend)(*args).sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def examples(module: types.ModuleType) -> list[str]:
    """The indented blocks of a docstring."""
    blocks = re.split(r"\n(?=\S)", module.__doc__ or "")
    found = ["\n".join(re.findall(r"^    (.*)$|^$", block, re.MULTILINE)) for block in blocks]
    return [block for block in found if block.strip()]


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_run_and_change_no_bit(model, number):
    target = load_target(model, {}).target
    expected = step(target.model, target.args, "aot_eager")
    plan = plan_of(model)
    exported = export.export_plan(plan, "saved-for-offloading")
    marks = module_of(exported)
    forwards: list[fx.GraphModule] = []

    def spying(forward, backward, *rest):
        forwards.append(forward)
        return original(forward, backward, *rest)

    from torch._functorch._activation_offloading import activation_offloading

    original = activation_offloading.enable_activation_offloading
    torch._dynamo.reset()
    target.model.zero_grad()
    names = {"marks": marks, "model": target.model, "args": target.args}
    with (
        functorch_config.patch(enable_activation_offloading=False, joint_custom_pass=None),
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr(activation_offloading, "enable_activation_offloading", spying)
        code = examples(marks)[number]
        if "backward()" not in code:
            code += "\nstep(*args).sum().backward()"
        exec(code, names)
    (forward,) = forwards
    assert chosen_in(forward) == moved_names(plan, exported)
    grads = [p.grad for p in target.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[1:], strict=True))


@pytest.mark.parametrize("to", ["saved-for-offloading", "must-cpu-offload"])
def test_the_examples_of_a_plan_for_inductor_run(model, to, tmp_path):
    plan = make_plan(inductor_facts(model), min_bytes=1, budget=0)
    exported = export.export_plan(plan, to)
    marks = module_of(exported)
    marks.__file__ = str(tmp_path / "marks.py")
    Path(marks.__file__).write_text(exported.text)
    target = load_target(model, {}).target
    found: list[set[str]] = []

    def reader(graph: fx.Graph) -> None:
        found.append({node.name for node in tags_in(graph)})

    original = marks.partition if to == "saved-for-offloading" else None

    def partition(*args: Any, **options: Any) -> Any:
        assert original is not None
        forward, backward = original(*args, **options)
        found.append(chosen_in(forward))
        return forward, backward

    marks.partition = partition
    names = {"marks": marks, "model": target.model, "args": target.args, "reader": reader}
    torch._dynamo.reset()
    (code,) = examples(marks)
    with (
        inductor_config.patch(custom_partitioner_fn=None, joint_custom_post_pass=None),
        warnings.catch_warnings(record=True) as heard,
    ):
        warnings.simplefilter("always")
        exec(code, names)
    # The plan does not say which of two equal outputs it is: mean or variance.
    stay = [str(each.message) for each in heard if " stays, " in str(each.message)]
    assert all("look the same" in text or "a partition" in text for text in stay)
    assert not stay or to == "must-cpu-offload"
    assert [len(each) for each in found] == [exported.moved_count - len(stay)]
    assert exported.moved_count > len(stay)


# --- tags -----------------------------------------------------------------------------------------


def tags_in(graph: fx.Graph) -> list[fx.Node]:
    policy = CheckpointPolicy.MUST_CPU_OFFLOAD
    return [node for node in graph.nodes if node.meta.get("recompute") is policy]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda_build)])
def test_the_tags_are_on_the_ops_that_allocate_what_moves(model, device, monkeypatch):
    plan = plan_of(model, device, "default")
    exported = export.export_plan(plan, "must-cpu-offload")
    marks = module_of(exported)
    tagged: list[fx.Node] = []
    counts: list[int] = []

    def spy(joint, joint_inputs, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            counts.append(marks.mark(joint))
        tagged.extend(tags_in(joint.graph))

    traced_with(spy, model, monkeypatch, device, "default")
    assert counts == [len(tagged)] == [exported.moved_count]
    # An output of one of several is a node of its own, of the op's node.
    names = [n.args[0].name if "getitem" in n.name else n.name for n in tagged]
    left_out = {(each.name, each.size_bytes) for each in exported.left_out}
    expected = [
        entry.name
        for entry in plan.storages
        if entry.action == "offload" and (entry.name, entry.size_bytes) not in left_out
    ]
    assert sorted(names) == sorted(expected)
    # Tagged storages have views that are saved, which PyTorch's pass cannot move.
    offloading = export.export_plan(plan, "saved-for-offloading")
    assert exported.moved_bytes > offloading.moved_bytes
    assert any("cannot compute again" in each.why for each in exported.left_out)


def test_what_only_a_partition_makes_the_backward_read_is_not_tagged(model, monkeypatch):
    exported = export.export_plan(plan_of(model), "must-cpu-offload")
    marks = module_of(exported)
    found: list[int] = []

    def spy(joint, joint_inputs, **options):
        with pytest.warns(UserWarning, match="a partition") as heard:
            found.append(marks.mark(joint) + len(heard))
        for node in tags_in(joint.graph):
            assert node.meta["partitioner_tag"] != "is_backward"

    traced_with(spy, model, monkeypatch)
    assert found == [exported.moved_count]


def test_a_tag_does_not_change_what_is_saved(model, monkeypatch):
    marks = module_of(export.export_plan(plan_of(model, partitioner="default"), "must-cpu-offload"))
    saved: list[list[str]] = []

    def spy(joint, joint_inputs, **options):
        for graph in (copy.deepcopy(joint), marks.joint_pass(joint)):
            forward, _ = partitioners.default_partition(graph, joint_inputs, **options)
            (output,) = forward.graph.find_nodes(op="output")
            saved.append([node.name for node in output.args[0]])

    traced_with(spy, model, monkeypatch, "cpu", "default")
    assert len(saved) == 2
    assert saved[0] == saved[1]


def test_the_example_of_tags_runs_with_a_reader(model):
    plan = plan_of(model, partitioner="default")
    exported = export.export_plan(plan, "must-cpu-offload")
    marks = module_of(exported)
    target = load_target(model, {}).target
    read: list[fx.Node] = []

    def reader(joint: fx.GraphModule) -> fx.GraphModule:
        read.extend(tags_in(joint.graph))
        return joint

    names = {"marks": marks, "model": target.model, "args": target.args, "reader": reader}
    torch._dynamo.reset()
    with functorch_config.patch(joint_custom_pass=None):
        exec("\n".join(examples(marks)), names)
    assert len(read) == exported.moved_count


def test_a_storage_that_is_read_through_other_views_is_not_tagged(model, monkeypatch):
    """The plan shows what is saved; the joint graph, before a partition, what will be read."""
    spec = f"{model}:fused"
    plan = plan_of(spec)
    exported = export.export_plan(plan, "must-cpu-offload")
    assert "addmm" in {entry.name for entry in plan.storages if entry.action == "offload"}
    marks = module_of(exported)
    counts = []

    def spy(joint, joint_inputs, **options):
        with pytest.warns(UserWarning, match=r"addmm stays, 24576 bytes: getitem.* shares it"):
            counts.append(marks.mark(joint))
        assert "addmm" not in {node.name for node in tags_in(joint.graph)}

    traced_with(spy, spec, monkeypatch)
    assert counts[0] < exported.moved_count


# --- another graph is refused ---------------------------------------------------------------------


@pytest.mark.parametrize("to", ["saved-for-offloading", "must-cpu-offload"])
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"batch": "8"}, r"is float32 \[8, 16, 32\].* in the plan float32 \[4, 16, 32\]"),
        ({"layers": "1"}, r"there is no "),
        ({"width": "64"}, r"made with torch 2\.\d+\.\d+.*aot_eager"),
    ],
)
def test_another_graph_is_refused_with_what_differs(model, to, params, message, monkeypatch):
    marks = module_of(export.export_plan(plan_of(model), to))
    tried = []

    def spy(joint, joint_inputs, **options):
        with pytest.raises(ValueError, match=message):
            marks.mark(joint)
        tried.append(any("should_offload" in node.meta for node in joint.graph.nodes))

    traced_with(spy, model, monkeypatch, **params)
    assert tried == [False]


def test_a_graph_that_goes_on_after_the_plan_is_refused_once_it_is_partitioned(model, monkeypatch):
    marks = module_of(export.export_plan(plan_of(model), "saved-for-offloading"))
    tried = []

    def spy(joint, joint_inputs, **options):
        with pytest.raises(ValueError, match=r"in the plan"):
            marks.partition(joint, joint_inputs, **options)
        tried.append(joint)

    traced_with(spy, model, monkeypatch, layers="3")
    assert tried


def test_another_partition_is_refused(model, monkeypatch):
    marks = module_of(export.export_plan(plan_of(model), "saved-for-offloading"))
    marks.min_cut_rematerialization_partition = partitioners.default_partition
    tried = []

    def spy(joint, joint_inputs, **options):
        with pytest.raises(ValueError, match=r"saves \d+ values, in the plan \d+"):
            marks.partition(joint, joint_inputs, **options)
        tried.append(joint)

    traced_with(spy, model, monkeypatch)
    assert tried


def test_a_value_that_torch_refuses_after_all_is_said(model, monkeypatch):
    """As if the plan's table were wrong."""
    text = export.export_plan(plan_of(model), "saved-for-offloading").text
    marks = module_of(export.Export(text.replace(", False)", ", True)"), None, 0, 0, ()))  # type: ignore[arg-type]
    rows = [v._replace(moves=v.op == "aten.view.default") for v in marks.GRAPHS[0].values]
    marks.GRAPHS = (marks.GRAPHS[0]._replace(values=tuple(rows)),)
    tried = []

    def spy(joint, joint_inputs, **options):
        with pytest.raises(ValueError, match="PyTorch does not offload view"):
            marks.partition(joint, joint_inputs, **options)
        tried.append(joint)

    traced_with(spy, model, monkeypatch)
    assert tried


# --- several regions ------------------------------------------------------------------------------


def test_each_graph_of_a_broken_model_is_marked_by_its_own_table(model, monkeypatch):
    spec = f"{model}:halves"
    plan = plan_of(spec)
    assert len(plan.regions) == 2
    exported = export.export_plan(plan, "saved-for-offloading")
    marks = module_of(exported)
    counts: list[int] = []
    traced_with(lambda joint, *_, **__: counts.append(marks.mark(joint)), spec, monkeypatch)
    assert len(counts) in (1, 2)
    assert exported.moved_count == 2 * counts[0] > 0


def test_what_another_run_of_the_graph_keeps_is_left_out(model):
    plan = plan_of(f"{model}:halves")
    rows = [
        [(v.name, v.shape) for e in plan.storages if e.region == n for v in e.views if "." in v.op]
        for n in (0, 1)
    ]
    assert rows[0] == rows[1], "the two halves are one graph"
    kept = next(entry for entry in plan.storages if entry.action == "offload" and entry.region == 1)
    changed = msgspec.structs.replace(
        plan,
        storages=tuple(
            msgspec.structs.replace(e, action="keep") if e is kept else e for e in plan.storages
        ),
        transfers=tuple(t for t in plan.transfers if t.storage != kept.id),
    )
    whole = export.export_plan(plan, "saved-for-offloading")
    found = export.export_plan(changed, "saved-for-offloading")
    assert [(each.region, each.name) for each in found.left_out] == [(0, kept.name)]
    assert found.left_out[0].why == "its graph runs again, and keeps it there"
    assert found.moved_count == whole.moved_count - 2


# --- what no mechanism can say --------------------------------------------------------------------


@pytest.mark.parametrize("to", ["saved-for-offloading", "must-cpu-offload"])
def test_packed_and_unread_transfers_are_left_out(model, to):
    plan = plan_of(model)
    before = export.export_plan(plan, to)
    names = moved_names(plan, before)
    places = [
        place
        for place, transfer in enumerate(plan.transfers)
        for entry in plan.storages
        if (entry.region, entry.id) == (transfer.region, transfer.storage)
        and {view.name for view in entry.views} <= names
    ]
    transfers = list(plan.transfers)
    packed, unread = places[:2]
    transfers[packed] = msgspec.structs.replace(
        transfers[packed], packed=True, transfer_bytes=transfers[packed].transfer_bytes // 4
    )
    transfers[unread] = msgspec.structs.replace(transfers[unread], reload_at=None, needed_by=None)
    found = export.export_plan(msgspec.structs.replace(plan, transfers=tuple(transfers)), to)
    why = {each.why for each in found.left_out} - {each.why for each in before.left_out}
    assert any(
        re.match(r"the plan copies only \d+(KiB)? of it, in pieces", text) for text in why
    ), why
    assert "the backward never reads it, and nothing brings it back" in why
    assert found.moved_count == before.moved_count - 2
    assert found.planned_count == before.planned_count


def test_pytorchs_views_are_those_of_its_partitioner():
    names = {str(op) for op in partitioners.get_default_op_list().view_ops}
    assert names == export.PYTORCH_VIEWS


def test_every_functional_op_with_several_outputs_is_known():
    """But those of other devices and of quantization, and backwards, which no forward saves."""
    other = re.compile("backward|foreach|_fused_|_amp_|mps|miopen|mkldnn|quantize|_nested_")
    missing = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.replace("::", ".")
        writes = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        if not name.startswith(("aten.", "prims.")) or writes or other.search(name):
            continue
        overload = f"{schema.name}.{schema.overload_name}".rstrip(".")
        if not torch._C._dispatch_has_kernel(overload):
            continue  # of TorchScript
        key = "CompositeImplicitAutograd"
        if torch._C._dispatch_has_kernel_for_dispatch_key(overload, key):
            continue
        types = [str(each.type) for each in schema.returns]
        tensors = [each for each in types if "Tensor" in each]
        if len(tensors) > 1 or any(each.startswith("List") for each in tensors):
            missing.add(name)
    assert missing - export.SEVERAL_OUTPUTS == {"aten.dequantize"} & missing


# --- json -----------------------------------------------------------------------------------------


def test_json_lists_every_moved_storage_with_its_ops(model):
    facts, plan = facts_of(model), plan_of(model)
    text = export.export_plan(plan, "json", facts).text
    document = msgspec.json.decode(text, type=export.Document)
    assert json.loads(text)["offplan_export"] == 1
    assert document.digest == plan.digest
    assert sum(each.bytes for each in document.storages) == plan.moved_bytes
    ops = list(timeline(facts))
    backward_start = plan.regions[0].forward_ops
    for moved, transfer in zip(
        sorted(document.storages, key=lambda each: each.storage),
        sorted(plan.transfers, key=lambda each: each.storage),
        strict=True,
    ):
        assert moved.range == (transfer.start, transfer.stop)
        assert moved.transfer_bytes == transfer.transfer_bytes
        assert moved.offload_after.index == transfer.offload_after
        assert moved.release_by.index == transfer.release_by
        assert (moved.offload_after.graph, moved.offload_after.region) == ("forward", 0)
        assert moved.reload_at is not None
        assert moved.reload_at.index == transfer.reload_at
        assert moved.reload_at.position == moved.reload_at.index - backward_start
        for place in (moved.offload_after, moved.release_by, moved.reload_at):
            assert (place.name, place.target) == (ops[place.index].name, ops[place.index].target)
        # It is copied when the op that makes it has run.
        maker = next(i for i, op in enumerate(ops) if op.name == moved.name)
        assert maker <= moved.offload_after.index


def test_json_without_the_graphs_has_indexes_and_no_names(model):
    document = msgspec.json.decode(
        export.export_plan(plan_of(model), "json").text, type=export.Document
    )
    assert {each.offload_after.name for each in document.storages} == {None}


def test_json_places_the_ops_of_several_regions(model):
    spec = f"{model}:halves"
    plan = plan_of(spec)
    text = export.export_plan(plan, "json", facts_of(spec)).text
    document = msgspec.json.decode(text, type=export.Document)
    for moved in document.storages:
        reload_at = moved.reload_at
        assert reload_at is not None
        assert (reload_at.graph, reload_at.region) == ("backward", moved.region)
        assert 0 <= reload_at.position < plan.regions[moved.region].backward_ops


def test_graphs_of_another_plan_are_refused(model):
    with pytest.raises(PlanError, match="not made from these graphs"):
        export.export_plan(plan_of(model), "json", facts_of(model, batch="8"))


# --- the text of a module -------------------------------------------------------------------------


def exports(model: str) -> list[tuple[str, str]]:
    plans = [plan_of(model), plan_of(f"{model}:halves"), make_plan(facts_of(model))]
    odd = msgspec.structs.replace(
        plans[0],
        target=msgspec.structs.replace(plans[0].target, spec="a\"\"\"b\\\n<<tables>>'''.py"),
        torch='2"\\\n<<left_out>>',
    )
    return [
        (f"{to}-{number}", export.export_plan(plan, to).text)
        for to in ("saved-for-offloading", "must-cpu-offload")
        for number, plan in enumerate([*plans, odd])
    ]


def test_a_module_needs_torch_alone_and_keeps_what_it_is_told_as_text(model):
    for name, text in exports(model):
        imported = {
            (alias.name if isinstance(node, ast.Import) else node.module).split(".")[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert imported <= {"__future__", "operator", "warnings", "typing", "torch"}, name
        assert "<<moved>>" not in text
        module = module_of(export.Export(text, export.MODULE_FILE, 0, 0, ()))
        assert module.COMPILER == "aot_eager"


def test_a_module_is_as_black_and_ruff_want_it(model, tmp_path):
    pytest.importorskip("ruff", reason="needs ruff")
    for name, text in exports(model):
        (tmp_path / f"{name.replace('-', '_')}.py").write_text(text)
    for command in (["format", "--diff"], ["check", "--select", "E4,E7,E9,F,I,B,UP,SIM,C4,N"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_plan_that_moves_nothing_marks_nothing(model, monkeypatch):
    exported = export.export_plan(make_plan(facts_of(model)), "saved-for-offloading")
    assert (exported.moved_count, exported.left_out) == (0, ())
    counts: list[int] = []
    marks = module_of(exported)
    traced_with(lambda joint, *_, **__: counts.append(marks.mark(joint)), model, monkeypatch)
    assert counts == [0]


def test_the_module_of_a_sample_is_the_one_committed(monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = make_plan(facts_of("sample_graphs/saved_view.py"), budget=0)
    text = export.export_plan(plan, "must-cpu-offload").text
    if os.environ.get("OFFPLAN_UPDATE_EXPECTED"):
        GOLDEN.write_text(text)
    shown = GOLDEN.read_text()
    if f'TORCH = "{plan.torch}"' not in shown:
        pytest.skip("the committed module is for another torch")
    assert text == shown


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def folder(model, tmp_path, monkeypatch) -> Path:
    """The plan and the graphs of the model, in the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("offplan.plan.yaml").write_bytes(dump_plan(plan_of(model)))
    Path("model.txt").write_text("a plan")
    Path("a.graph.json").write_bytes(save_graph(facts_of(model)))
    return tmp_path


def offplan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["export", *arguments])


def test_the_command_writes_the_file_and_says_what_it_leaves_out(folder, model):
    expected = export.export_plan(plan_of(model), "saved-for-offloading")
    result = offplan("--to", "saved-for-offloading", "-o", "marks.py")
    assert result.exit_code == 0, result.stderr
    assert Path("marks.py").read_text() == expected.text
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[: len(expected.left_out)] == [f"left out: {each}" for each in expected.left_out]
    assert lines[-2].startswith(f"moves: {expected.moved_count} of {expected.planned_count}, ")
    assert lines[-1] == "wrote marks.py"
    for each in expected.left_out:
        assert f'"{each.why}"' in expected.text


def test_stdout_is_the_export_alone(folder):
    result = offplan("--to", "json", "--graph", "a.graph.json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["storages"][0]["offload_after"]["name"]


def test_an_export_is_written_over_an_export_only(folder):
    Path("train.py").write_text("print('mine')\n")
    refused = offplan("--to", "must-cpu-offload", "-o", "train.py")
    assert refused.exit_code == 1
    assert "not an offplan export" in refused.stderr
    assert Path("train.py").read_text() == "print('mine')\n"
    for _ in range(2):
        assert offplan("--to", "must-cpu-offload", "-o", "marks.py").exit_code == 0
        assert offplan("--to", "json", "-o", "moved.json").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--to", "deepspeed"], 2, ""),
        ([], 2, ""),
        (["--to", "must-cpu-offload", "--graph", "a.graph.json"], 2, "--graph names ops"),
        (["no.plan.yaml", "--to", "json"], 1, "cannot read no.plan.yaml"),
        (["model.txt", "--to", "json"], 1, "model.txt is not an offplan plan"),
        (["--to", "json", "-o", "no/such/folder.json"], 1, "there is no directory"),
    ],
)
def test_errors_are_one_message_and_an_exit_code(folder, arguments, exit_code, message):
    result = offplan(*arguments)
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
