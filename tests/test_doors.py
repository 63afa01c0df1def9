"""``hf:``, ``timm:`` and traces of real runs as targets.

Configurations are small, and their steps run for real: that proves inputs and losses right.  The
trace is one that torch writes in a process of its own, and has to come to the facts that tracing
the same model comes to.  What a job's log may hold beyond that is written by hand.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offplan.cli import app
from offplan.doors import is_trace
from offplan.doors.graph_text import Sizes
from offplan.doors.torch_trace import read_trace
from offplan.errors import FileFormatError, OffplanError, TargetError, TraceError, UsageError
from offplan.graph import GraphFacts, TargetRef, digest
from offplan.plan import load_plan, make_plan
from offplan.target import LoadedTarget, load_target
from offplan.trace.capture import TraceOptions, trace

TARGETS = Path(__file__).parent / "targets"

pytestmark = [
    pytest.mark.xdist_group("doors"),
    # Theirs: deprecated names, and what a small configuration leaves unused.
    pytest.mark.filterwarnings("ignore"),
]


# --- hf: ------------------------------------------------------------------------------------------

TEXT = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
SPEECH = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**TEXT, "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": None},
    "bert": {**TEXT, "num_hidden_layers": 1, "max_position_embeddings": 40},
    "roberta": {**TEXT, "num_hidden_layers": 1, "max_position_embeddings": 34},
    "t5": {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    "vit": {**TEXT, "num_hidden_layers": 1, "image_size": 32, "patch_size": 16},
    "whisper": {
        **SPEECH,
        "vocab_size": 64,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
    },
    "wav2vec2": {
        **TEXT,
        "num_hidden_layers": 1,
        "conv_dim": [16, 16],
        "conv_kernel": [10, 3],
        "conv_stride": [5, 2],
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    },
    "audio-spectrogram-transformer": {
        **TEXT,
        "num_hidden_layers": 1,
        "max_length": 64,
        "num_mel_bins": 32,
    },
    "clip": {
        "projection_dim": 16,
        "text_config": {**TEXT, "num_hidden_layers": 1, "max_position_embeddings": 16},
        "vision_config": {**TEXT, "num_hidden_layers": 1, "image_size": 32, "patch_size": 16},
    },
}
# What each takes, and whether its own loss is used.
STEPS = {
    "llama": ({"input_ids", "labels"}, True),
    "bert": ({"input_ids", "labels"}, True),
    "roberta": ({"input_ids", "labels"}, True),
    "t5": ({"input_ids", "labels"}, True),
    "vit": ({"pixel_values", "labels"}, True),
    "whisper": ({"input_features", "labels"}, True),
    "wav2vec2": ({"input_values"}, False),
    "audio-spectrogram-transformer": ({"input_values", "labels"}, True),
    "clip": ({"input_ids", "pixel_values", "return_loss"}, True),
}


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The target ``hf:FILE`` for the configuration that the test asks for; llama's if none."""
    return written(tmp_path, getattr(request, "param", "llama"))


def written(folder: Path, name: str, **more: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": name, **CONFIGS[name], **more}))
    return f"hf:{path}"


def load(spec: str, **params: str) -> LoadedTarget:
    return load_target(spec, params)


def run(loaded: LoadedTarget) -> Any:
    target = loaded.target
    return target.model(*target.args, **target.kwargs)


@pytest.mark.parametrize("config", CONFIGS, indirect=True)
def test_a_step_of_every_kind_of_model_runs(config: str, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["config"]
    names, has_loss = STEPS[name]
    loaded = load(config, batch="2", **({"seconds": "0.05"} if name == "wav2vec2" else {}))
    assert set(loaded.target.kwargs) == names
    output = run(loaded)
    assert loaded.target.model.training
    assert (getattr(output, "loss", None) is not None) == has_loss
    if has_loss:
        assert output.loss.shape == ()
        output.loss.backward()
        gradients = [p.grad is not None for p in loaded.target.model.parameters()]
        assert sum(gradients) > len(gradients) / 2


def test_a_configuration_is_named_by_its_file_or_its_folder_and_says_where_it_is(
    config: str, tmp_path: Path
) -> None:
    assert load(config, seq="8").source == f"{tmp_path}/config.json:1"
    assert load(f"hf:{tmp_path}", seq="8").source == f"{tmp_path}/config.json:1"


def test_positions_limit_the_default_length(tmp_path: Path) -> None:
    # RoBERTa counts from the padding's position: 34 rows, of which it uses 32.
    loaded = load(written(tmp_path, "roberta"), batch="1")
    assert loaded.target.kwargs["input_ids"].shape == (1, 32)
    run(loaded)


def test_sizes_are_what_they_are_asked_to_be(tmp_path: Path) -> None:
    kwargs = load(written(tmp_path, "t5"), batch="3", seq="8", target_seq="4").target.kwargs
    assert kwargs["input_ids"].shape == (3, 8)
    assert kwargs["labels"].shape == (3, 4)
    kwargs = load(written(tmp_path, "vit"), batch="3", image_size="64").target.kwargs
    assert kwargs["pixel_values"].shape == (3, 3, 64, 64)
    kwargs = load(written(tmp_path, "llama"), batch="1", seq="8", mask="true").target.kwargs
    assert kwargs["attention_mask"].tolist() == [[1] * 8]


def test_layers_are_those_of_every_stack(tmp_path: Path) -> None:
    model = load(written(tmp_path, "whisper"), layers="2").target.model
    assert (model.config.encoder_layers, model.config.decoder_layers) == (2, 2)
    model = load(written(tmp_path, "clip"), layers="3").target.model
    assert model.config.text_config.num_hidden_layers == 3
    assert model.config.vision_config.num_hidden_layers == 3


def test_lists_by_layer_follow_the_number_of_layers(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    spec = written(tmp_path, "llama", model_type="qwen3", layer_types=kinds, sliding_window=4)
    model = load(spec, layers="2", seq="8").target.model
    assert model.config.layer_types == kinds[:2]
    assert len(model.model.layers) == 2


def test_attributes_of_the_configuration_keep_their_types(config: str) -> None:
    params = {"hidden_act": "gelu", "attention_dropout": "0.5", "tie_word_embeddings": "true"}
    found = load(config, seq="8", num_hidden_layers="1", **params).target.model.config
    assert (found.num_hidden_layers, found.hidden_act) == (1, "gelu")
    assert (found.attention_dropout, found.tie_word_embeddings) == (0.5, True)


def test_the_step_is_one_of_training(config: str) -> None:
    model = load(
        config, seq="8", dtype="bfloat16", attention="eager", checkpoint="true"
    ).target.model
    assert model.dtype == torch.bfloat16
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "eager"
    assert model.is_gradient_checkpointing


def test_no_layer_is_dropped_unless_it_is_asked_for(tmp_path: Path) -> None:
    spec = written(tmp_path, "wav2vec2")
    assert load(spec, seconds="0.05").target.model.config.layerdrop == 0.0
    assert load(spec, seconds="0.05", layerdrop="0.5").target.model.config.layerdrop == 0.5


def test_a_task_can_be_forced(config: str, tmp_path: Path) -> None:
    loaded = load(config, seq="8", task="base")
    assert type(loaded.target.model).__name__ == "LlamaModel"
    assert set(loaded.target.kwargs) == {"input_ids"}
    with pytest.raises(TargetError, match="no image model of type 'llama'"):
        load(config, task="image")


def test_a_model_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv", "hidden_size": 8}')
    with pytest.raises(TargetError, match="cannot be built: ZeroDivisionError"):
        load(f"hf:{tmp_path}", layers="1")


def test_the_architecture_that_a_file_names_decides_the_task(tmp_path: Path) -> None:
    spec = written(tmp_path, "bert", architectures=["BertLMHeadModel"], is_decoder=True)
    assert type(load(spec, seq="8").target.model).__name__ == "BertLMHeadModel"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"hiden_size": "2"}, "hidden_size"),
        ({"hiden_size": "2"}, "batch, seq, target_seq"),
        ({"batch": "many"}, "not a whole number"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"layers": "0"}, "one layer at least"),
        ({"size": "64"}, "LlamaForCausalLM takes nothing"),
        ({"task": "poetry"}, "one of causal"),
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused(
    config: str, params: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load(config, **params)


def test_the_depths_of_stages_are_not_layers(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "swin"}))
    with pytest.raises(UsageError, match=r"depths=\[1,1,1,1\]"):
        load(f"hf:{path}", layers="2")


def test_a_loss_that_cannot_be_traced_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"CTC loss .* cannot be traced"):
        load(written(tmp_path, "wav2vec2"), labels="true")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("", "names no configuration"),
        ("qwn3", "did you mean qwen3"),
        ("./config.json", "there is no configuration at"),
        ("someone/else", "nothing is downloaded"),
    ],
)
def test_where_there_is_no_configuration_it_says_what_to_do(
    where: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def connect(*args: Any) -> None:
        raise AssertionError("something is looked up over the network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(TargetError, match=message):
        load(f"hf:{where}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "has no model_type"),
        ('{"model_type": "of-its-own"}', "no type of model that the installed transformers knows"),
        ('{"model_type": "llama", "num_hidden_layers": "many"}', "is refused"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TargetError, match=message):
        load(f"hf:{tmp_path}")


def test_a_configuration_is_analyzed_as_any_target(config: str, tmp_path: Path) -> None:
    plan = tmp_path / "a.plan.yaml"
    arguments = ["analyze", config, "-p", "batch=1", "-p", "seq=8", "--device", "cpu"]
    done = CliRunner().invoke(app, [*arguments, "--format", "json", "-o", str(plan)])
    assert done.exit_code == 0, done.output
    assert load_plan(plan).target == TargetRef(config, {"batch": "1", "seq": "8"})
    assert "LlamaForCausalLM" not in done.stderr


# --- timm: ----------------------------------------------------------------------------------------

needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None, reason="timm is not installed"
)


@needs_timm
def test_a_classifier_of_timm_has_a_cross_entropy() -> None:
    loaded = load("timm:resnet18", batch="2", size="64", classes="5", channels_last="true")
    target = loaded.target
    assert target.args[0].shape == (2, 3, 64, 64)
    assert target.args[0].is_contiguous(memory_format=torch.channels_last)
    output = run(loaded)
    assert output.shape == (2, 5)
    assert target.loss is not None
    expected = torch.nn.functional.cross_entropy(output, torch.zeros(2, dtype=torch.long))
    assert torch.equal(target.loss(output), expected)
    assert torch.equal(target.loss((output, output)), expected)


@needs_timm
def test_a_size_reaches_the_layers_that_depend_on_it() -> None:
    loaded = load("timm:vit_tiny_patch16_224", batch="1", size="64", checkpoint="true")
    assert run(loaded).shape == (1, 1000)
    assert loaded.target.model.grad_checkpointing


@needs_timm
def test_timm_says_what_it_takes() -> None:
    with pytest.raises(TargetError, match="did you mean resnet18"):
        load("timm:resnet1B")
    with pytest.raises(UsageError, match="batch, size, classes"):
        load("timm:resnet18", seq="8")


def test_timm_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(TargetError, match="pip install timm"):
        load("timm:resnet18")


# --- a trace of a real run ------------------------------------------------------------------------

# What is traced: the target file compiled once for these sizes, once for any, and once more.
JOB = """
import torch
from traced_net import Net, build

model, args = build()
torch.compile(model, backend="aot_eager")(*args).backward()
model, args = Net(), build(batch=3)[1]
step = torch.compile(lambda x, y: model(x, y), backend="aot_eager", dynamic=True)
step(*args).backward()
with torch.no_grad():
    torch.compile(torch.nn.Linear(4, 4), backend="aot_eager")(torch.ones(2, 4))
"""
STATIC, DYNAMIC, FORWARD_ONLY = "0/0", "1/0", "2/0"


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    environment = {**os.environ, "TORCH_TRACE": str(folder), "PYTHONPATH": str(TARGETS)}
    subprocess.run(
        [sys.executable, "-c", JOB], env=environment, check=True, capture_output=True, timeout=300
    )
    return folder


@pytest.fixture(scope="module")
def traced() -> GraphFacts:
    return traced_net()


def traced_net(**params: str) -> GraphFacts:
    return trace(str(TARGETS / "traced_net.py"), params, TraceOptions(device="cpu"))


def test_a_trace_comes_to_the_facts_of_its_model(trace_folder: Path, traced: GraphFacts) -> None:
    found = read_trace(str(trace_folder), {"graphs": STATIC})
    assert digest(found) == digest(traced)
    assert set(found.model) == set(traced.model)
    assert (found.torch, found.device, found.compiler) == (traced.torch, "cpu", "aot_eager")
    lines = [op.source.rpartition("/")[2] for op in found.regions[0].forward.ops]
    assert lines == [op.source.rpartition("/")[2] for op in traced.regions[0].forward.ops]
    assert "traced_net.py" in lines[0]


def test_a_plan_of_a_trace_is_that_of_its_model(trace_folder: Path, traced: GraphFacts) -> None:
    found = make_plan(read_trace(str(trace_folder), {"graphs": STATIC}), min_bytes=1, budget=0)
    expected = make_plan(traced, min_bytes=1, budget=0)
    assert found.transfers == expected.transfers
    assert found.transfers
    for name in ("no_plan", "plan"):
        one, other = getattr(found.predicted, name), getattr(expected.predicted, name)
        assert (one.peak_bytes, one.op) == (other.peak_bytes, other.op)
    assert found.ledger == expected.ledger


def test_sizes_that_were_not_fixed_are_those_of_the_run_or_given(
    trace_folder: Path,
) -> None:
    found = read_trace(str(trace_folder), {"graphs": DYNAMIC})
    (taken,) = [warning for warning in found.warnings if warning.startswith("sizes were not")]
    symbol = re.search(r"(\w+)=3", taken)
    assert symbol is not None
    for batch, params in (("3", {}), ("5", {symbol[1]: "5"})):
        found = read_trace(str(trace_folder), {"graphs": DYNAMIC, **params})
        plans = [make_plan(facts, min_bytes=1) for facts in (found, traced_net(batch=batch))]
        assert plans[0].saved_bytes == plans[1].saved_bytes
        assert plans[0].movable_bytes == plans[1].movable_bytes


def test_graphs_without_a_backward_are_left_out_and_named(trace_folder: Path) -> None:
    found = read_trace(f"trace:{trace_folder}", {})
    assert len(found.regions) == 2
    assert any(w.startswith(f"left out: {FORWARD_ONLY}") for w in found.warnings)
    assert any("how often each ran" in warning for warning in found.warnings)
    only = read_trace(str(trace_folder), {"graphs": FORWARD_ONLY})
    assert [region.backward for region in only.regions] == [None]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"graphs": "7/0"}, "has no graph 7/0"),
        ({"rank": "1"}, "name no ranks"),
        ({"batch": "4"}, "takes no parameter 'batch'"),
        ({"batch": "large"}, "rank, graphs, unknown"),
        ({"unknown": "ignored"}, "one of refuse, logged"),
    ],
)
def test_a_parameter_that_no_trace_takes_is_refused(
    trace_folder: Path, params: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_trace(str(trace_folder), params)


def test_a_trace_is_analyzed_and_gated_and_never_run(trace_folder: Path, tmp_path: Path) -> None:
    plan = str(tmp_path / "a.plan.yaml")
    runner = CliRunner()
    done = runner.invoke(app, ["analyze", str(trace_folder), "-p", f"graphs={STATIC}", "-o", plan])
    assert done.exit_code == 0, done.output
    assert "graphs that torch" in " ".join(done.stdout.split())
    assert runner.invoke(app, ["gate", plan, "--max-alias-skipped", "0"]).exit_code == 0
    for target in (plan, str(trace_folder), f"trace:{trace_folder}"):
        done = runner.invoke(app, ["run", target])
        assert done.exit_code == 1
        assert "is a trace of a real run" in done.stderr
        assert "try:" in done.stderr
    done = runner.invoke(app, ["analyze", str(trace_folder), "--attention", "math", "-o", plan])
    assert done.exit_code == 2


# --- a trace written by hand ----------------------------------------------------------------------

FORWARD = """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[4, 8][8, 1]cpu", primals_2: "f32[8, 8][8, 1]cpu"):
        # File: /job/model.py:7 in forward, code: h = x @ w
        mm: "f32[4, 8][8, 1]cpu" = torch.ops.aten.mm.default(primals_1, primals_2);  x = None
        {line}
        return (cos, primals_2, mm)
"""
BACKWARD = """\
class GraphModule(torch.nn.Module):
    def forward(self, primals_2, mm: "f32[4, 8][8, 1]cpu", tangents_1: "f32[4, 8][8, 1]cpu"):
        mul: "f32[4, 8][8, 1]cpu" = torch.ops.aten.mul.Tensor(tangents_1, mm);  tangents_1 = None
        return (None, mul)
"""
COS = 'cos: "f32[4, 8][8, 1]cpu" = torch.ops.aten.cos.default(mm)'


def event(payload: str = "", **content: Any) -> str:
    head = f"V0101 00:00:00.000000 1 torch/x.py:1] {json.dumps(content)}\n"
    return head + "".join(f"\t{line}\n" for line in payload.splitlines())


def pair(forward: str, backward: str = BACKWARD, frame: int = 0, compiled: int = 0) -> str:
    where = {"frame_id": frame, "frame_compile_id": compiled, "attempt": 0}
    return event(forward, aot_forward_graph={}, **where) + event(
        backward, aot_backward_graph={}, **where
    )


def of_rows(rows: int, compiled: int = 0) -> str:
    texts = [FORWARD.format(line=COS), BACKWARD]
    return pair(*(text.replace("[4, 8]", f"[{rows}, 8]") for text in texts), compiled=compiled)


def log(folder: Path, text: str, name: str = "") -> str:
    path = folder / f"dedicated_log_torch_trace_{name}x.log"
    path.write_text(text)
    return str(path)


def read_line(folder: Path, line: str, **params: str) -> GraphFacts:
    return read_trace(log(folder, pair(FORWARD.format(line=line))), params)


def test_a_graph_by_hand_is_read(tmp_path: Path) -> None:
    found = read_line(tmp_path, COS)
    region = found.regions[0]
    assert [op.target for op in region.forward.ops] == ["aten.mm.default", "aten.cos.default"]
    assert region.forward.ops[0].source == "/job/model.py:7"
    assert [item.kind for item in region.forward.outputs] == ["output", "saved", "saved"]
    # The weight, which no annotation of the backward describes, and the product.
    storages = [found.values[s.value].storage for s in region.saved]
    assert storages == [found.values[s.backward_value].storage for s in region.saved]
    assert [found.storages[s].size_bytes for s in storages if s is not None] == [256, 128]
    assert any("which 2 inputs of the graphs are parameters" in w for w in found.warnings)


@pytest.mark.parametrize(
    "line",
    [
        "cos = __import__('os').system('true')",
        "cos = torch.load('weights.pt')",
        "cos = torch.ops.load_library('other.so')",
        "cos = torch.ops.aten.cos.__class__(mm)",
        "cos = (lambda: mm)()",
        "cos = [mm for _ in range(9)]",
        "cos = torch.ops.aten.cos.default(mm.grad_fn)",
        "cos = torch.ops.aten.cos.default(torch.hub)",
        "cos = torch.ops.aten.cos.default(unmade)",
        "import os",
    ],
)
def test_nothing_but_ops_of_torch_is_looked_up(tmp_path: Path, line: str) -> None:
    with pytest.raises((TraceError, FileFormatError)):
        read_line(tmp_path, line)


def test_an_op_of_another_library_is_refused_or_taken_as_logged(tmp_path: Path) -> None:
    line = (
        "own = torch.ops.flash_own.forward.default(mm, 0.5)\n"
        '        cos: "f32[4, 8][8, 1]cpu" = own[1]'
    )
    with pytest.raises(TraceError, match=r"torch\.ops\.flash_own\.forward\.default") as refused:
        read_line(tmp_path, line)
    assert "unknown=logged" in refused.value.fix
    assert refused.value.where == "graph 0/0, own, /job/model.py:7"
    found = read_line(tmp_path, line, unknown="logged")
    op = found.regions[0].forward.ops[-1]
    assert op.target == "flash_own.forward.default"
    assert [found.values[v].kind for v in op.outputs] == ["python", "tensor"]
    # No storage of an input's.
    assert found.values[op.outputs[1]].storage not in {found.values[v].storage for v in op.inputs}
    assert any("torch.ops.flash_own.forward.default" in warning for warning in found.warnings)


def test_a_view_that_is_another_in_the_log_is_refused(tmp_path: Path) -> None:
    line = 'cos: "f32[4, 8][1, 4]cpu" = torch.ops.aten.view.default(mm, [4, 8])'
    with pytest.raises(TraceError, match="version of torch that wrote the trace"):
        read_line(tmp_path, line)


def test_an_allocation_has_the_layout_that_the_log_says(tmp_path: Path) -> None:
    found = read_line(tmp_path, 'cos: "f32[4, 8][1, 4]cpu" = torch.ops.aten.cos.default(mm)')
    (output,) = found.regions[0].forward.ops[-1].outputs
    assert found.values[output].stride == (1, 4)


def test_a_random_op_that_runs_again_gives_its_state(tmp_path: Path) -> None:
    forward = FORWARD.format(
        line="drawn = torch.ops.higher_order.run_and_save_rng_state("
        "torch.ops.aten.rand_like.default, mm)\n"
        '        state: "u8[16][1]cpu" = drawn[0]\n'
        '        cos: "f32[4, 8][8, 1]cpu" = drawn[1]'
    ).replace("primals_2, mm)\n", "primals_2, mm, state)\n")
    backward = BACKWARD.replace('mm: "f32', 'mm, state, unused: "f32').replace(
        "        mul:",
        '        again: "f32[4, 8][8, 1]cpu" = torch.ops.higher_order.run_with_rng_state('
        "state, torch.ops.aten.rand_like.default, mm)\n        mul:",
    )
    backward = backward.replace(', unused: "f32[4, 8][8, 1]cpu"', "")
    found = read_trace(log(tmp_path, pair(forward, backward)), {})
    region = found.regions[0]
    assert found.values[region.forward.ops[1].outputs[0]].rng_state
    assert len(region.saved) == 3
    assert region.backward is not None
    assert "run_with_rng_state" in region.backward.ops[0].target


def test_the_last_compilation_of_a_frame_counts(tmp_path: Path) -> None:
    path = log(tmp_path, of_rows(4) + of_rows(6, compiled=1))
    assert read_trace(path, {}).values[0].shape == (6, 8)
    assert read_trace(path, {"graphs": "0/0"}).values[0].shape == (4, 8)


def test_the_log_of_a_rank_is_taken(tmp_path: Path) -> None:
    for rank in (0, 1):
        log(tmp_path, of_rows(4 + rank), f"rank_{rank}_")
    assert read_trace(str(tmp_path), {}).values[0].shape == (4, 8)
    assert read_trace(str(tmp_path), {"rank": "1"}).values[0].shape == (5, 8)
    with pytest.raises(UsageError, match="no log of rank 2"):
        read_trace(str(tmp_path), {"rank": "2"})
    log(tmp_path, of_rows(4), "rank_1_again")
    with pytest.raises(TargetError, match="2 logs of rank 1"):
        read_trace(str(tmp_path), {"rank": "1"})


@pytest.mark.parametrize(
    ("text", "message", "kind"),
    [
        ("not a log\n", "no log of torch.compile", FileFormatError),
        (event(dynamo_start={}, frame_id=0), "no graphs", TargetError),
        (pair("def f(: pass"), "not a printed graph", FileFormatError),
        (pair("x = 1"), "no forward that returns", FileFormatError),
    ],
)
def test_a_file_that_is_no_trace_says_so(
    tmp_path: Path, text: str, message: str, kind: type[OffplanError]
) -> None:
    with pytest.raises(kind, match=message):
        read_trace(log(tmp_path, text), {})


def test_a_target_is_a_trace_by_what_it_holds(tmp_path: Path) -> None:
    assert not is_trace(str(tmp_path))
    assert is_trace(f"trace:{tmp_path}")
    with pytest.raises(TargetError, match="TORCH_TRACE="):
        read_trace(f"trace:{tmp_path}", {})
    path = log(tmp_path, "")
    assert is_trace(str(tmp_path))
    assert is_trace(path)
    assert not is_trace("model.py")
    assert not is_trace("hf:qwen3")
    with pytest.raises(TargetError, match="is a trace of a real run"):
        load_target(path, {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Sym(s0)", 6),
        ("Sym(2*s0 + 1)", 13),
        ("Sym((s0//4))", 1),
        ("Sym(-s0)", -6),
        ("Sym(Max(1, s0) - Mod(s0, 4))", 4),
        ("Sym(FloorDiv(s0, 4) + CeilDiv(s0, 4))", 3),
        ("f32[6][1]cpu", None),
    ],
)
def test_sizes_are_computed_from_those_of_the_run(text: str, value: int | None) -> None:
    assert Sizes({"s0": 6}, "0/0").number(text) == value


@pytest.mark.parametrize("text", ["Sym(s1)", "Sym(f(s0))", "Sym(s0**s0**s0)", "Sym(s0//0)"])
def test_a_size_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(TraceError):
        Sizes({"s0": 6}, "0/0").number(text)


def test_an_annotation_is_a_tensor() -> None:
    found = Sizes({"s0": 6}, "0/0").tensor("bf16[s0, 8][8, 1]cuda:0")
    assert found is not None
    assert (found.dtype, found.shape, found.stride, found.device) == (
        "bf16",
        (6, 8),
        (8, 1),
        "cuda:0",
    )
    scalar = Sizes({}, "0/0").tensor("f32[][]cpu")
    assert scalar is not None
    assert scalar.shape == ()
    assert Sizes({}, "0/0").tensor("") is None
