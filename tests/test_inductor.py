"""Graphs that Inductor compiles: captured as it lowers them, and replayed with transfers.

What it compiles is compared with what it compiles without a plan, bit for bit, under deterministic
kernels.  Every comparison has a control: a second run without the plan has the same bits.
"""

from __future__ import annotations

import ast
import gc
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch._inductor.config as inductor_config
from test_replay_runtime import assert_same, planned_both_ways, state
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.utils import run_and_get_code
from typer.testing import CliRunner, Result

from offplan.budget import EVERYTHING
from offplan.cli import app
from offplan.errors import TraceError, UsageError
from offplan.files import GRAPH_FILE, write_atomically
from offplan.graph import GraphFacts, TargetRef, digest, save_graph, timeline
from offplan.measured import load_measurement
from offplan.memory import predict
from offplan.plan import Plan, analyze_command, load_plan, make_plan, write_plan
from offplan.replay import measure as measuring
from offplan.replay.compiled import Replay, build_real, loss_of
from offplan.replay.generated import heard_allocations
from offplan.replay.live import LiveBytes
from offplan.replay.measure import Wanted, op_times, plans_to_replay
from offplan.replay.operators import Operators
from offplan.replay.runtime import ReplayError, RuntimeStats, Slot, cpu_runtime
from offplan.target import Target
from offplan.trace._torch import generated_modules, reset_dynamo
from offplan.trace.capture import TraceOptions, trace, trace_target

SAMPLES = Path(__file__).parent.parent / "sample_graphs"
MODELS = Path(__file__).parent / "inductor_models.py"
NAMES = ["dropout", "checkpointed", "views", "conv", "transcendental"]

# What is compiled is shared by the tests of one process.
pytestmark = pytest.mark.xdist_group("inductor")


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Kernels that repeat their bits, as ``offplan run`` asks for; and code generated afresh."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with inductor_config.patch(fx_graph_cache=False):
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    reset_dynamo()


_planned: dict[str, tuple[GraphFacts, Plan]] = {}


def facts_and_plan(name: str) -> tuple[GraphFacts, Plan]:
    """The graphs that Inductor lowers of a model here, and a plan that moves everything."""
    if name not in _planned:
        facts = trace(f"{MODELS}:{name}", {}, TraceOptions(device="cpu", compiler="inductor"))
        _planned[name] = facts, make_plan(facts, budget=EVERYTHING, min_bytes=1)
    return _planned[name]


def built(name: str) -> Target:
    torch.manual_seed(0)
    return build_real(f"{MODELS}:{name}", {}, "cpu")


@contextmanager
def replaying(target: Target, plan: Plan | None) -> Iterator[Replay]:
    """A replay of code that is compiled here and now."""
    reset_dynamo()
    with Replay(target, plan, device="cpu", compiler="inductor") as replay:
        yield replay


@dataclass
class Ran:
    """What a loop left behind."""

    state: dict[str, torch.Tensor]
    stats: RuntimeStats
    facts: GraphFacts | None
    graph_breaks: int
    frames: int


Loop = Callable[[Replay, Target], Sequence[torch.Tensor]]


def ran(name: str, plan: Plan | None, loop: Loop) -> Ran:
    target = built(name)
    with replaying(target, plan) as replay:
        losses = [loss.detach() for loss in loop(replay, target)]
        found = state(target, losses)
        breaks, frames = len(counters["graph_break"]), counters["frames"]["total"]
        return Ran(found, replay.stats(), replay.facts, breaks, frames)


def assert_replays(name: str, loop: Loop) -> tuple[Ran, Ran]:
    """The loop without the plan, twice, and with it: same bits, nothing compiled beyond it."""
    _, plan = facts_and_plan(name)
    assert plan.transfers
    bare, again, moved = (ran(name, each, loop) for each in (None, None, plan))
    assert_same(again.state, bare.state)
    assert_same(moved.state, bare.state)
    assert moved.graph_breaks == bare.graph_breaks == 0
    assert moved.frames == bare.frames
    assert bare.stats.offload_count == 0
    return bare, moved


# --- capture --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", ["base_also_saved", "conv_net", "fused_qkv"])
def test_what_inductor_lowers_is_captured_for_a_gpu_without_one(sample):
    spec = f"{SAMPLES / sample}.py"
    plain, lowered = (
        trace(spec, {}, TraceOptions(device="cuda", gpu="h200", compiler=compiler))
        for compiler in ("aot_eager", "inductor")
    )
    assert (plain.compiler, lowered.compiler) == ("aot_eager", "inductor")
    assert lowered.gpu == plain.gpu == "NVIDIA H200"
    # Inductor has decompositions of its own, and its passes take out what they can.
    names = [{op.target for op in timeline(facts)} for facts in (plain, lowered)]
    assert not {target for target in names[1] if "threshold_backward" in target}
    assert not {target for target in names[1] if target == "aten.native_batch_norm.default"}
    assert names[0] != names[1]
    saved = [[len(region.saved) for region in facts.regions] for facts in (plain, lowered)]
    assert sum(saved[1]) < sum(saved[0])
    plan = make_plan(lowered, budget=EVERYTHING)
    assert plan.compiler == "inductor"
    assert plan.digest != make_plan(plain, budget=EVERYTHING).digest
    assert plan.transfers


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_sample_is_captured_as_inductor_lowers_it(path):
    small = {"qwen3_14b": {"layers": "1"}, "tiny_gpt": {"layers": "1"}}
    facts = trace(
        str(path), small.get(path.stem, {}), TraceOptions(device="cpu", compiler="inductor")
    )
    plan = make_plan(facts, budget=EVERYTHING)
    assert plan.compiler == "inductor"
    assert " --compiler inductor" in analyze_command(plan)
    assert any(region.backward for region in facts.regions)


class _Replaced(torch.nn.Module):
    """Views of a random op, and of a copy: Inductor makes another op of the one, and removes the
    other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return (h.sin() * torch.rand(4, 64)[1]).square().sum() + (h @ h.clone().t()).sin().sum()


def test_a_view_of_what_inductor_has_replaced_lies_on_the_storage_of_what_it_reads():
    target = Target(_Replaced(), (torch.randn(16, 64),))
    facts = trace_target(target, TraceOptions("cpu", compiler="inductor", partitioner="default"))
    views = [
        (op.target, [facts.values[value].storage for value in (*op.inputs, *op.outputs)])
        for op in facts.regions[0].forward.ops
        if op.target in ("aten.select.int", "aten.permute.default")
    ]
    assert [target for target, _ in views].count("aten.select.int") == 1
    assert len(views) == 3
    assert all(len(set(storages)) == 1 for _, storages in views)


def test_passes_of_the_user_stay_active():
    seen = []

    def joint_pass(graph: torch.fx.Graph) -> None:
        seen.append("joint")

    def post_grad_pass(graph: torch.fx.Graph) -> None:
        seen.append("post")

    passes = {"joint_custom_post_pass": joint_pass, "post_grad_custom_post_pass": post_grad_pass}
    spec = f"{MODELS}:views"
    _, plan = facts_and_plan("views")
    with inductor_config.patch(passes):
        trace(spec, {}, TraceOptions(device="cpu", compiler="inductor"))
        assert "joint" in seen
        seen.clear()
        with replaying(built("views"), plan) as replay:
            replay.step()
    assert sorted(set(seen)) == ["joint", "post"]


class Partitioner(CustomPartitionerFn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it is refused before it is called")

    def uuid(self) -> Any:
        return b"the user's"


def test_a_partitioner_of_the_user_is_refused():
    with (
        inductor_config.patch(custom_partitioner_fn=Partitioner()),
        pytest.raises(TraceError, match=r"custom_partitioner_fn is set[\s\S]*--compiler aot_eager"),
    ):
        trace(f"{MODELS}:views", {}, TraceOptions(device="cpu", compiler="inductor"))


# --- replay ---------------------------------------------------------------------------------------


def three_steps(replay: Replay, target: Target) -> list[torch.Tensor]:
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        losses.append(replay.step())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_of_what_inductor_compiles_gives_the_same_bits_and_moves_what_was_planned(name):
    facts, plan = facts_and_plan(name)
    bare, moved = assert_replays(name, three_steps)
    # A replay compiles the graphs that were captured, with the plan and without.
    for found in (bare, moved):
        assert found.facts is not None
        assert digest(found.facts) == digest(facts) == plan.digest
    out, back = planned_both_ways(plan)
    assert (moved.stats.offload_count, moved.stats.offloaded_bytes) == out
    assert (moved.stats.reload_count, moved.stats.reloaded_bytes) == back


def test_values_move_as_they_were_traced_where_inductor_would_lay_them_out_otherwise():
    """It computes convolutions in another memory format, and so rounds otherwise."""
    _, plan = facts_and_plan("contiguous_conv")
    bare, again, moved = (ran("contiguous_conv", each, three_steps) for each in (None, None, plan))
    assert_same(again.state, bare.state)
    assert moved.state.keys() == bare.state.keys()
    for name, expected in bare.state.items():
        # Counts of batches are integers.
        dtype = torch.int64 if "num_batches" in name else torch.float32
        torch.testing.assert_close(
            moved.state[name].view(dtype), expected.view(dtype), rtol=1e-4, atol=1e-4
        )
    assert moved.stats.offloaded_bytes == 3 * plan_bytes(plan)


def test_the_views_model_has_packed_transfers():
    _, plan = facts_and_plan("views")
    assert any(transfer.packed for transfer in plan.transfers)
    assert any(not transfer.packed for transfer in plan.transfers)


def micro_steps(replay: Replay, target: Target) -> list[torch.Tensor]:
    """Gradient accumulation; an evaluation and an optimizer's step between steps."""
    optimizer = torch.optim.SGD(target.model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        for micro_step in range(2):
            torch.manual_seed(10 * step + micro_step)
            losses.append(replay.step())
        optimizer.step()
        with torch.no_grad():
            torch.manual_seed(step)
            losses.append(loss_of(replay.forward()))
    return losses


def test_gradients_accumulate_and_evaluation_runs_between_steps():
    _, plan = facts_and_plan("views")
    _, moved = assert_replays("views", micro_steps)
    # The evaluations saved nothing.
    assert moved.stats.offload_count == 4 * len(plan.transfers)


def interleaved(replay: Replay, target: Target) -> list[torch.Tensor]:
    """Two forwards before two backwards, the first of which runs twice."""
    losses = [loss_of(replay.forward()) for _ in range(2)]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    losses[0].backward()
    return losses


def test_two_forwards_run_before_two_backwards_and_a_graph_is_retained():
    _, plan = facts_and_plan("views")
    _, moved = assert_replays("views", interleaved)
    returning = sum(transfer.reload_at is not None for transfer in plan.transfers)
    assert moved.stats.offload_count == 2 * len(plan.transfers)
    assert moved.stats.reload_count == 3 * returning
    assert moved.stats.lease_count == 2


@pytest.mark.parametrize("name", ["chain", "views"])
def test_storages_are_gone_when_the_forward_ends(name):
    _, plan = facts_and_plan(name)
    live_bytes = []
    for each in (None, plan):
        target = built(name)
        with replaying(target, each) as replay:
            replay.step()
            with LiveBytes() as live:
                loss = loss_of(replay.forward())
                live_bytes.append(live.live_bytes)
                loss.backward()
    moved = sum(entry.size_bytes for entry in plan.storages if entry.action == "offload")
    assert moved == plan.moved_bytes
    assert live_bytes[0] - live_bytes[1] == moved


# --- generated code -------------------------------------------------------------------------------

# A dimension of one element may be given another stride, which is another view of the buffer.
OFFLOAD = re.compile(
    r"(\w+) = torch\.ops\.offplan_\d+\.offload\.default\((?:reinterpret_tensor\()?(\w+), "
    r"(?:\(.*\), 0\), )?(\d+), \d+\)"
)
RELEASE = re.compile(r"torch\.ops\.offplan_\d+\.release_\.default\((\w+), (\w+), (\d+)\)")
RELOAD = re.compile(r"(\w+) = torch\.ops\.offplan_\d+\.reload\.default\((\w+), (\d+), ")
WAIT = re.compile(r"torch\.ops\.offplan_\d+\.wait_\.default\((\w+)\)")


def raw_lines_of(code: str) -> list[str]:
    """The lines of the function that runs a graph."""
    body = code[code.index("def call(") : code.index("runner = Runner")]
    lines = [line.strip() for line in body.splitlines()[1:]]
    return [line for line in lines if line and not line.startswith("#")]


def lines_of(code: str) -> list[str]:
    """The lines, with what an operator returns under the name by which it is used.

    Torch 2.11 gives it another name on the next line, and drops the first.
    """
    lines = raw_lines_of(code)
    for place, line in enumerate(lines):
        alias = re.fullmatch(r"(buf\d+) = (buf\d+)", line)
        if alias is None:
            continue
        new, old = alias.groups()
        made = [n for n in range(place) if lines[n].startswith(f"{old} = torch.ops.offplan")]
        if made:
            lines[made[-1]] = lines[made[-1]].replace(f"{old} =", f"{new} =", 1)
            lines[place] = ""
            lines[lines.index(f"del {old}", place)] = ""
    return [line for line in lines if line]


_code: dict[str, tuple[list[str], list[str]]] = {}


def code_of(name: str) -> tuple[list[str], list[str]]:
    """The code of the forward and of the backward, with the plan's transfers."""
    if name not in _code:
        _, plan = facts_and_plan(name)
        with replaying(built(name), plan) as replay:
            _, code = run_and_get_code(replay.step)
        forward, backward = (lines_of(each) for each in code)
        _code[name] = forward, backward
    return _code[name]


def mentions(line: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", line) is not None


@pytest.mark.parametrize("name", ["chain", "views"])
def test_a_storage_lives_in_generated_code_until_its_release_and_not_longer(name):
    _, plan = facts_and_plan(name)
    forward, _ = code_of(name)
    offloads = {m[3]: (place, m[1], m[2]) for place, m in matches(OFFLOAD, forward)}
    releases = {m[3]: (place, m[1], m[2]) for place, m in matches(RELEASE, forward)}
    assert offloads.keys() == releases.keys()
    assert len(offloads) == len(plan.transfers)
    for slot, (sent, host, value) in offloads.items():
        released, *given = releases[slot]
        assert given == [host, value]
        assert sent < released
        later = [line for line in forward[released + 1 :] if mentions(line, value)]
        # It goes at once, or with the function, whose last line does not return it.
        assert later in ([f"del {value}"], [])
        if later:
            assert forward[released + 1] == f"del {value}"
        else:
            after = [line for line in forward[released + 1 :] if not RELEASE.search(line)]
            assert [line.split()[0] for line in after if not line.startswith("del ")] == ["return"]


@pytest.mark.parametrize("name", ["chain", "views", "dropout"])
def test_memory_that_a_copy_reads_goes_to_no_other_buffer_before_the_release(name):
    forward, _ = code_of(name)
    releases = {m[3]: place for place, m in matches(RELEASE, forward)}
    for sent, match in matches(OFFLOAD, forward):
        value, slot = match[2], match[3]
        while_copied = forward[sent + 1 : releases[slot]]
        assert f"del {value}" not in while_copied
        # An alias is how generated code hands memory on, in place or for another buffer.
        alias = re.compile(rf"= (reinterpret_tensor\()?{value}\b")
        assert not any(alias.search(line) for line in while_copied)


@pytest.mark.parametrize("name", ["chain", "views", "dropout"])
def test_generated_code_reads_a_reloaded_buffer_after_its_wait(name):
    _, plan = facts_and_plan(name)
    _, backward = code_of(name)
    reloads = {m[1]: place for place, m in matches(RELOAD, backward)}
    waits = {m[1]: place for place, m in matches(WAIT, backward)}
    assert reloads.keys() == waits.keys()
    assert len(reloads) == sum(transfer.reload_at is not None for transfer in plan.transfers)
    checks = ("assert_", "# ")
    for buffer, issued in reloads.items():
        between = [
            line for line in backward[issued + 1 : waits[buffer]] if not line.startswith(checks)
        ]
        assert not any(mentions(line, buffer) for line in between)
        assert any(mentions(line, buffer) for line in backward[waits[buffer] + 1 :])


def matches(pattern: re.Pattern[str], lines: Sequence[str]) -> list[tuple[int, re.Match[str]]]:
    found = ((place, pattern.search(line)) for place, line in enumerate(lines))
    return [(place, match) for place, match in found if match is not None]


def test_copies_and_compute_keep_the_order_of_the_plan():
    """The chain's values leave and come back one by one, between the computations."""
    _, plan = facts_and_plan("chain")
    forward, backward = code_of("chain")
    computes = re.compile(r"^(extern_kernels\.|cpp_fused)")
    assert any(computes.search(line) for line in between(forward, OFFLOAD))
    assert any(computes.search(line) for line in between(backward, WAIT))
    slots = [match[3] for _, match in matches(OFFLOAD, forward)]
    in_order = sorted(plan.transfers, key=lambda transfer: transfer.offload_after)
    assert slots == [str(plan.transfers.index(transfer)) for transfer in in_order]


def between(lines: Sequence[str], pattern: re.Pattern[str]) -> Sequence[str]:
    places = [place for place, _ in matches(pattern, lines)]
    return lines[places[0] : places[-1]]


def test_reloaded_buffers_are_taken_to_be_aligned():
    _, backward = code_of("chain")
    assert matches(RELOAD, backward)
    for _, match in matches(RELOAD, backward):
        assert any(f"assert_alignment({match[1]}, 16" in line for line in backward)


# --- caches ---------------------------------------------------------------------------------------


def widened(facts: GraphFacts, plan: Plan) -> Plan:
    """``plan`` with each transfer that carries a part of a storage carrying all of it."""
    sizes = {entry.id: entry.size_bytes for entry in plan.storages}
    transfers = tuple(
        t
        if t.packed
        else msgspec.structs.replace(
            t, start=0, stop=sizes[t.storage], transfer_bytes=sizes[t.storage]
        )
        for t in plan.transfers
    )
    peak = predict(facts, transfers, plan.predicted.conditions)
    return msgspec.structs.replace(
        plan,
        transfers=transfers,
        predicted=msgspec.structs.replace(plan.predicted, plan=peak),
    )


def test_cached_code_is_taken_for_the_same_transfers_only(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    facts, plan = facts_and_plan("part")
    wide = widened(facts, plan)
    assert sum(t.transfer_bytes for t in wide.transfers) > plan_bytes(plan)
    hits, states = [], []
    with inductor_config.patch(fx_graph_cache=True, fx_graph_remote_cache=False):
        for each in (plan, wide, plan):
            found = ran("part", each, three_steps)
            hits.append(counters["inductor"]["fxgraph_cache_hit"])
            states.append(found.state)
            assert found.stats.offloaded_bytes == 3 * plan_bytes(each)
    assert hits == [0, 0, 2]
    for other in states[1:]:
        assert_same(other, states[0])


def plan_bytes(plan: Plan) -> int:
    return sum(transfer.transfer_bytes for transfer in plan.transfers)


# --- refused --------------------------------------------------------------------------------------


def test_cuda_graphs_with_transfers_are_refused_by_name():
    _, plan = facts_and_plan("chain")
    with (
        inductor_config.patch({"triton.cudagraphs": True}),
        replaying(built("chain"), plan) as replay,
        pytest.raises(UsageError, match=r"CUDA graphs are on[\s\S]*max-autotune-no-cudagraphs"),
    ):
        replay.step()


def slot(**changes: Any) -> Slot:
    given = {
        "name": "the storage of exp",
        "start": 0,
        "stop": 256,
        "transfer_bytes": 256,
        "pieces": (),
        "item_bytes": 4,
        "host_offset": 0,
        "stride": (8, 1),
    }
    return Slot(**(given | changes))


def test_a_value_with_other_strides_than_planned_is_refused():
    runtime = cpu_runtime([4096], None)
    (number,) = runtime.add_slots([slot()])
    with (
        runtime.forward_run(4096),
        pytest.raises(ReplayError, match=r"the storage of exp was compiled with the strides \(1"),
    ):
        runtime.offload_value(torch.zeros(8, 8).t(), number)
    runtime.close()


def test_bytes_count_from_the_value_within_a_larger_buffer():
    runtime = cpu_runtime([4096], None)
    (number,) = runtime.add_slots([slot(start=32, stop=96, transfer_bytes=64)])
    buffer = torch.arange(128.0)
    value = buffer[48:112].view(8, 8)
    with runtime.forward_run(4096):
        host = runtime.offload_value(value, number)
        assert runtime.let_go(number) is value
    # 32 bytes are 8 elements: 48 + 8 and on.
    assert torch.equal(host.view(torch.float32), torch.arange(56.0, 72.0))
    runtime.close()


# --- what a replay leaves behind ------------------------------------------------------------------


def first_free_namespace() -> str:
    runtime = cpu_runtime([], None)
    operators = Operators(runtime)
    operators.close()
    runtime.close()
    return operators.namespace


def test_close_gives_the_operators_back():
    _, plan = facts_and_plan("chain")
    free = first_free_namespace()
    with replaying(built("chain"), plan) as replay:
        replay.step()
        loss = loss_of(replay.forward())
        assert first_free_namespace() != free
    assert first_free_namespace() == free
    with pytest.raises(ReplayError, match="closed"):
        loss.backward()
    with pytest.raises(ReplayError, match="closed"):
        replay.forward()


def test_a_replay_that_is_dropped_gives_everything_back():
    _, plan = facts_and_plan("chain")
    free = first_free_namespace()
    target = built("chain")
    replay = Replay(target, plan, device="cpu")
    replay.step()
    runtime = weakref.ref(replay.runtime)
    del replay
    gc.collect()
    assert runtime() is None
    assert first_free_namespace() == free


# --- what watches it ------------------------------------------------------------------------------


def test_buffers_of_generated_code_are_heard_and_only_while_asked_for():
    sizes: list[int] = []
    with replaying(built("chain"), None) as replay:
        replay.step()
        before = [dict(vars(module)) for module in generated_modules()]
        with heard_allocations(lambda tensor: sizes.append(tensor.nbytes)):
            replay.step()
        assert [dict(vars(module)) for module in generated_modules()] == before
        count = len(sizes)
        replay.step()
    # Each layer makes its output and the sine of it, of 256 x 64 floats.
    assert sizes.count(256 * 64 * 4) >= 6
    assert len(sizes) == count


# --- the command line -----------------------------------------------------------------------------


def offplan(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "model.py").write_text(MODELS.read_text())
    return tmp_path


@pytest.fixture
def traced(monkeypatch) -> list[str]:
    """Traces are made in this process; the compilers that they were for."""
    compilers = []

    def trace_here(choices: Any, verify: bool, on_phase: Any) -> GraphFacts:
        compilers.append(choices.compiler)
        options = TraceOptions(choices.device, compiler=choices.compiler)
        return trace(choices.target.spec, choices.target.params, options)

    monkeypatch.setattr(measuring, "_traced", trace_here)
    return compilers


def test_analyze_says_and_records_the_compiler(folder):
    made = offplan(
        *("analyze", "model.py:views", "--device", "cpu"),
        *("--compiler", "inductor", "--budget", "0", "--min-size", "1B"),
    )
    assert made.exit_code == 0, made.stderr
    assert "inductor compiler" in made.stdout
    assert re.search(r"lowering\s+[\d.]+\s+m?s", made.stdout)
    plan = load_plan(folder / "offplan.plan.yaml")
    assert plan.compiler == "inductor"
    assert "--compiler inductor" in (folder / "offplan.plan.yaml").read_text().splitlines()[0]


@pytest.mark.parametrize("command", ["analyze", "gate", "run"])
def test_a_compiler_that_is_not_known_is_wrong_usage(folder, command):
    found = offplan(command, "model.py:views", "--device", "cpu", "--compiler", "tvm")
    assert found.exit_code == 2
    assert "tvm" in found.stderr


def test_a_plan_file_with_a_compiler_that_is_not_known_is_refused(folder):
    _, plan = facts_and_plan("views")
    write_plan(folder / "plan.yaml", plan)
    text = (folder / "plan.yaml").read_text()
    (folder / "plan.yaml").write_text(text.replace("compiler: inductor", "compiler: tvm"))
    found = offplan("gate", "plan.yaml", "--max-alias-skipped", "0")
    assert found.exit_code == 1
    assert "$.compiler" in found.stderr


def test_a_saved_graph_takes_no_compiler(folder):
    facts, _ = facts_and_plan("views")
    write_atomically(folder / "views.graph.json", save_graph(facts), GRAPH_FILE)
    found = offplan("analyze", "views.graph.json", "--compiler", "inductor")
    assert found.exit_code == 2
    assert "--compiler" in found.stderr
    assert offplan("analyze", "views.graph.json").exit_code == 0
    assert load_plan(folder / "offplan.plan.yaml").compiler == "inductor"


def test_a_plan_keeps_its_compiler_and_another_one_plans_again(folder, traced):
    facts, _ = facts_and_plan("views")
    plan = make_plan(
        msgspec.structs.replace(facts, target=TargetRef("model.py:views", {})),
        budget=EVERYTHING,
        min_bytes=1,
    )
    assert plans_to_replay(plan, Wanted(compiler="inductor")).plans == (plan,)
    assert traced == []
    found = plans_to_replay(plan, Wanted(compiler="aot_eager"))
    assert traced == ["aot_eager"]
    assert found.plan.compiler == "aot_eager"
    assert found.plan.transfers
    assert found.notes == ("the plan is for inductor; it was planned again for aot_eager",)


def test_a_target_is_planned_for_the_compiler_that_is_wanted(folder, traced):
    source = TargetRef("model.py:views", {})
    for wanted in ("inductor", None):
        found = plans_to_replay(source, Wanted(device="cpu", compiler=wanted, budget=EVERYTHING))
        assert found.plan.compiler == (wanted or "aot_eager")
    assert traced == ["inductor", "aot_eager"]


def test_op_times_of_graphs_that_inductor_fuses_are_not_measured(folder, traced):
    arguments = ("model.py:views", "--device", "cpu", "--compiler", "inductor")
    for command in ("analyze", "run"):
        found = offplan(command, *arguments, "--op-times", "measured")
        assert found.exit_code == 2
        assert "Inductor fuses the ops" in found.stderr
        assert "--profile" in found.stderr
    assert traced == []
    facts, _ = facts_and_plan("views")
    with pytest.raises(UsageError, match="Inductor fuses"):
        op_times(facts)


@pytest.mark.slow
def test_run_measures_and_verifies_what_inductor_compiles(folder):
    found = offplan(
        *("run", "model.py:dropout", "--device", "cpu", "--compiler", "inductor"),
        *("--budget", "0", "--steps", "2", "--output", "measured.json"),
    )
    assert found.exit_code == 0, found.stdout + found.stderr
    measurement = load_measurement(folder / "measured.json")
    assert measurement.compiler == "inductor"
    assert "graphs compiled by Inductor" in found.stdout
    assert measurement.verification is not None
    assert measurement.verification.ok
    assert measurement.verification.control == ""


def test_this_file_reads_the_models_that_it_names():
    tree = ast.parse(MODELS.read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {name for name in functions if not name.startswith("_")}
    assert {*NAMES, "chain", "contiguous_conv", "part"} == names
