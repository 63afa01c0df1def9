"""Capture: what it handles, that autograd in Python equals the engine, and what facts say."""

from __future__ import annotations

import ast
import copy
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from offplan.graph import GraphFacts, digest, graphs, load_graph, save_graph, timeline
from offplan.trace import capture
from offplan.trace.autograd import python_backward
from offplan.trace.capture import TraceOptions, trace

TARGETS = Path(__file__).parent / "targets" / "working.py"
DEVICES = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]
# flex_attention has no backward on the CPU.
CUDA_ONLY = {"own_attention_graph"}
VIEWS = {"aten.view.default", "aten.transpose.int", "aten._unsafe_view.default"}
needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="needs a CUDA build of torch"
)


def _factories() -> list[str]:
    tree = ast.parse(TARGETS.read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if not name.startswith("_") and name != "scaled"]


def facts_of(name: str, device: str = "cpu", **options: str) -> GraphFacts:
    return trace(f"{TARGETS}:{name}", {}, TraceOptions(device=device, **options))


def provenance(facts: GraphFacts) -> list[tuple[str, ...]]:
    return [(op.name, op.target, op.module, op.source) for op in timeline(facts)]


def saved_names(facts: GraphFacts) -> set[str]:
    makers = {v: op.target for op in timeline(facts) for v in op.outputs}
    return {makers[s.value] for r in facts.regions for s in r.saved if s.value in makers}


def test_a_torch_compile_that_copies_its_options_traces_the_same(monkeypatch):
    """As Lightning's does, once it is imported."""
    compile_ = torch.compile

    def copying(*args, **options):
        compiled = compile_(*args, **options)
        copy.deepcopy(options)
        return compiled

    expected = facts_of("weight_norm")
    monkeypatch.setattr(torch, "compile", copying)
    assert facts_of("weight_norm") == expected


@pytest.mark.parametrize("name", [name for name in _factories() if name not in CUDA_ONLY])
def test_autograd_walked_from_python_records_what_the_engine_records(name, monkeypatch):
    by_engine = facts_of(name)

    @contextmanager
    def from_python(machine, compiler):
        with python_backward():
            yield

    monkeypatch.setattr(capture._Machine, "tracing", from_python)
    from_python_facts = facts_of(name)
    assert digest(from_python_facts) == digest(by_engine)
    # Not in the digest: source lines and module paths, which reach backward ops by other ways.
    assert provenance(from_python_facts) == provenance(by_engine)
    assert from_python_facts == by_engine


@needs_cuda_build
@pytest.mark.parametrize("name", _factories())
def test_traces_for_cuda_with_no_gpu(name):
    facts = facts_of(name, "cuda")
    # A few constants start on the host.
    on_device = [storage for storage in facts.storages if storage.device == "cuda"]
    assert len(on_device) > 2 * len(facts.storages) / 3
    assert any(region.backward and region.saved for region in facts.regions)


@pytest.mark.parametrize("name", ["plain", "checkpointed_dropout", "graph_break_in_loop"])
def test_a_saved_graph_loads_as_the_same_facts(name, tmp_path):
    facts = facts_of(name)
    path = tmp_path / "x.graph.json"
    path.write_bytes(save_graph(facts))
    assert load_graph(path) == facts
    assert digest(load_graph(path)) == digest(facts)


@pytest.mark.parametrize("device", DEVICES)
def test_tracing_twice_gives_the_same_bytes(device):
    assert save_graph(facts_of("multi_output", device)) == save_graph(
        facts_of("multi_output", device)
    )


def test_parameters_buffers_and_inputs_keep_their_names():
    names = {(i.kind, i.name) for i in facts_of("updated_buffer").regions[0].forward.inputs}
    assert {
        ("parameter", "linear.weight"),
        ("buffer", "count"),
        ("buffer", "average"),
        ("input", "x"),
    } <= names
    inputs = facts_of("keyword_arguments").regions[0].forward.inputs
    assert {"x", "mask['first'][0]", "extra"} <= {item.name for item in inputs}


def test_a_tied_weight_is_one_storage_with_both_names():
    facts = facts_of("tied")
    (tied,) = [t for t in facts.model if len(t.names) == 2]
    assert tied.names == ("linear.weight", "second.weight")
    named = [i for r in facts.regions for i in r.forward.inputs if i.name == "linear.weight"]
    assert len(named) == 1


def test_an_idle_expert_is_in_the_model_and_in_no_graph():
    facts = facts_of("idle_expert")
    assert any("experts.1.weight" in tensor.names for tensor in facts.model)
    used = {item.name for graph in graphs(facts) for item in graph.inputs}
    assert "experts.1.weight" not in used
    assert "experts.2.weight" in used


def test_a_frozen_weight_gets_no_gradient():
    facts = facts_of("frozen")
    (backward,) = [region.backward for region in facts.regions]
    gradients = {item.name: item.value for item in backward.outputs}
    assert gradients["gradient of linear.weight"] is None
    assert gradients["gradient of second.weight"] is not None


def test_every_op_names_its_source_line_and_module():
    facts = facts_of("graph_break_in_loop")
    for op in timeline(facts):
        assert op.source.startswith("tests/targets/working.py:"), op
    modules = [{op.module for op in region.forward.ops} for region in facts.regions]
    assert modules[0] == {"layers.0.linear", "layers.0"}
    assert modules[2] == {"layers.1.linear", "layers.1"}
    assert modules[4] == {"layers.2.linear", "layers.2"}


def test_a_graph_break_gives_regions_on_one_timeline_and_its_reason():
    facts = facts_of("graph_break")
    assert len(facts.regions) == 3
    first, second = facts.breaks
    assert "graph_break" in first.reason
    assert first.source.startswith("tests/targets/working.py:")
    # What one region returns is what the next receives: one storage, one id.
    handed = [i for i in facts.regions[1].forward.inputs if i.kind == "handed"]
    outputs = {facts.values[o.value].storage for o in facts.regions[0].forward.outputs}
    assert handed
    assert all(facts.values[item.value].storage in outputs for item in handed)
    assert second.source


def test_a_loop_over_a_layer_with_a_break_gives_a_region_for_each_run():
    facts = facts_of("graph_break_in_loop")
    assert len(facts.regions) == 6
    weights = [i.name for r in facts.regions for i in r.forward.inputs if i.kind == "parameter"]
    assert [name for name in weights if name.endswith("weight")] == [
        f"layers.{i}.linear.weight" for i in range(3)
    ]


def test_a_break_that_belongs_to_no_graph_is_reported_too():
    facts = facts_of("abandoned_frame")
    assert len(facts.regions) >= 2
    assert facts.breaks
    assert all(graph_break.reason != "step_unsupported" for graph_break in facts.breaks)


def test_module_paths_are_the_models_own_where_forwards_are_decorated():
    modules = {op.module for op in facts_of("decorated_forward").regions[0].forward.ops}
    assert modules == {"inner.linear", ""}


def test_tensors_inside_a_batch_object_are_inputs_by_name():
    names = {item.name for item in facts_of("batch_object").regions[0].forward.inputs}
    assert {"batch['x']", "batch['mask']"} <= names


def test_saved_tensors_behind_hooks_are_not_unpacked_to_count_them(tmp_path):
    target = tmp_path / "m.py"
    target.write_text(
        "import torch\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "@torch.compiler.disable\n"
        "def eager(layer, x):\n"
        "    return checkpoint(lambda t: layer(t).exp().sin(), x, use_reentrant=False)\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.l = torch.nn.Linear(64, 64)\n"
        "        self.m = torch.nn.Linear(64, 64)\n"
        "    def forward(self, x):\n"
        "        return eager(self.m, self.l(x)).relu()\n"
        "def build():\n"
        "    return M(), (torch.randn(32, 64),)\n"
    )
    facts = trace(str(target), {}, TraceOptions(device="cpu"))
    # Recomputing would run the layer's graph again, as one more region.
    assert len(facts.regions) == 2


def test_checkpointing_saves_the_input_and_not_what_is_recomputed():
    facts = facts_of("checkpointed")
    forward, backward = facts.regions[0].forward, facts.regions[0].backward
    assert "aten.relu.default" in {op.target for op in forward.ops}
    assert "aten.relu.default" in {op.target for op in backward.ops}
    assert not {"aten.relu.default", "aten.sin.default"} & saved_names(facts)


def test_a_recomputed_value_is_a_storage_of_its_own():
    facts = facts_of("checkpointed")
    by_graph = [
        {facts.values[v].storage for op in graph.ops for v in op.outputs if op.target == target}
        for graph in graphs(facts)
        for target in ["aten.relu.default"]
    ]
    assert by_graph[0].isdisjoint(by_graph[1])


def test_values_saved_keep_their_storage_across_the_partition():
    for name in ("attention_bf16", "multi_output", "conv_channels_last"):
        facts = facts_of(name)
        for region in facts.regions:
            for saved in region.saved:
                forward, backward = facts.values[saved.value], facts.values[saved.backward_value]
                assert forward.storage == backward.storage
                assert (forward.shape, forward.stride) == (backward.shape, backward.stride)


def test_views_share_their_bases_storage_and_fresh_outputs_do_not():
    facts = facts_of("attention_bf16")
    for graph in graphs(facts):
        for op in graph.ops:
            read = {facts.values[v].storage for v in op.inputs}
            written = {facts.values[v].storage for v in op.outputs} - {None}
            if op.target in VIEWS:
                assert written <= read, op
            if op.target in {"aten.mm.default", "aten.clone.default", "aten.addmm.default"}:
                assert not written & read, op


def test_an_op_that_shares_memory_without_declaring_it_is_told_apart():
    facts = facts_of("attention_bf16")
    declared = {op.target: op.declares_alias for op in timeline(facts)}
    assert declared["aten.view.default"]
    assert declared["aten.transpose.int"]
    assert not declared["aten.mm.default"]


def test_in_place_updates_of_buffers_are_recorded_as_writes():
    facts = facts_of("updated_buffer")
    region = facts.regions[0]
    buffers = {i.value for i in region.forward.inputs if i.kind == "buffer"}
    written = {v for op in region.forward.ops for v in op.mutates}
    assert written
    assert written <= buffers


def test_the_partitioner_changes_what_is_saved():
    default, min_cut = facts_of("plain", partitioner="default"), facts_of("plain")
    assert default.partitioner == "default"
    assert digest(default) != digest(facts_of("layer_norm_softmax", partitioner="default"))
    assert sum(len(r.saved) for r in default.regions) >= sum(len(r.saved) for r in min_cut.regions)


def test_random_state_is_marked_by_the_ops_own_schema():
    if torch.version.cuda is None:
        pytest.skip("needs a CUDA build of torch: its attention kernels return the state")
    facts = facts_of("multi_head_attention", "cuda")
    marked = [value for value in facts.values if value.rng_state]
    assert marked
    assert all(value.element_count <= 2 for value in marked)


def test_what_eager_code_between_graphs_saves_is_warned_about(tmp_path):
    target = tmp_path / "m.py"
    target.write_text(
        "import torch\n"
        "@torch.compiler.disable\n"
        "def eager(x):\n"
        "    return x.exp().sin()\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.l = torch.nn.Linear(64, 64)\n"
        "    def forward(self, x):\n"
        "        return eager(self.l(x)).relu()\n"
        "def build():\n"
        "    return M(), (torch.randn(32, 64),)\n"
    )
    facts = trace(str(target), {}, TraceOptions(device="cpu"))
    # exp saves its output, which is sin's saved input: one storage of 32 * 64 * 4 bytes.
    assert facts.warnings == (
        "1 tensors of 8192 bytes are saved by ops that run between the graphs; "
        "they are not part of this analysis (see the graph breaks)",
    )


@needs_cuda_build
def test_autocast_is_not_lost_without_a_gpu():
    targets = {op.target: op for op in timeline(facts_of("autocast", "cuda"))}
    assert "aten._to_copy.default" in targets
    dtypes = {v.dtype for v in facts_of("autocast", "cuda").values if v.kind == "tensor"}
    assert "bfloat16" in dtypes


@needs_cuda_build
@pytest.mark.parametrize(
    ("dtype", "gpu", "is_channels_last"),
    [
        ("float32", "t4", True),
        ("float16", "t4", True),
        # cuDNN has it from Ampere on, and torch's own kernels have contiguous outputs.
        ("bfloat16", "t4", False),
        ("bfloat16", "a100", True),
        ("bfloat16", "h200", True),
    ],
)
def test_convolutions_have_the_layout_that_the_gpu_gives_them(dtype, gpu, is_channels_last):
    options = TraceOptions(device="cuda", gpu=gpu)
    facts = trace(f"{TARGETS}:conv_channels_last", {"dtype": dtype}, options)
    found = [op.outputs[0] for op in timeline(facts) if op.target == "aten.convolution.default"]
    strides = [facts.values[value].stride for value in found]
    assert len(strides) == 2
    assert all((stride[1] == 1) == is_channels_last for stride in strides), strides


@needs_cuda_build
def test_torch_is_left_as_it_was():
    import torch.nn.init as init

    before = (
        torch.cuda.is_available,
        torch._C._cuda_getDeviceCount,
        torch.nn.Module._apply,
        torch.nn.Parameter.__new__,
        init._no_grad_trunc_normal_,
        torch.cuda.is_available(),
    )
    facts_of("checkpointed_dropout", "cuda")
    after = (
        torch.cuda.is_available,
        torch._C._cuda_getDeviceCount,
        torch.nn.Module._apply,
        torch.nn.Parameter.__new__,
        init._no_grad_trunc_normal_,
        torch.cuda.is_available(),
    )
    assert after == before
    x = torch.randn(4, 4, requires_grad=True)
    torch.autograd.grad(x.sum(), x)


@pytest.mark.cuda
@pytest.mark.parametrize("name", _factories())
def test_pretending_the_gpu_gives_what_the_real_one_gives(name, monkeypatch):
    real = facts_of(name, "cuda")
    assert torch.cuda.is_available()
    # The same process, as if nothing were there: GPU calls by name, autograd from Python.
    machine = capture._Machine.of
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pretended = machine(TraceOptions(gpu="h200"))
    monkeypatch.undo()
    assert pretended.pretended is not None
    monkeypatch.setattr(capture._Machine, "of", lambda options: pretended)
    assert digest(facts_of(name, "cuda")) == digest(real)
