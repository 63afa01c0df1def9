"""Replaying for real: bits and bytes on every target, and the life of a runtime.

Tests marked ``cuda`` are the same ones on a GPU.
"""

from __future__ import annotations

import ast
import gc
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from test_replay_rewrite import windows
from torch import nn
from torch.nn import functional as F

from offplan.errors import PlanError, TargetError
from offplan.graph import digest
from offplan.plan import Plan, make_plan
from offplan.replay import rewrite
from offplan.replay.compiled import Replay, build_real, loss_of
from offplan.replay.host import HostMemoryError, HostPool, Pageable, Registered, Slab, layout
from offplan.replay.live import LiveBytes
from offplan.replay.runtime import CpuLink, ReplayError, Runtime, Slot
from offplan.target import Target
from offplan.trace._torch import reset_dynamo
from offplan.trace.capture import TraceOptions, trace
from offplan.transfers import Transfer

WORKING = Path(__file__).parent / "targets" / "working.py"
SAMPLES = Path("sample_graphs")
# Small enough to run in seconds.
PARAMS = {
    "base_also_saved": {"rows": "64"},
    "checkpointed": {"rows": "64", "width": "64"},
    "conv_net": {"batch": "2"},
    "expanded_view": {},
    "fused_qkv": {"batch": "2", "seq": "64"},
    "graph_break": {"rows": "64", "width": "64"},
    "moe": {"tokens": "96", "width": "32"},
    "pass_through_op": {"rows": "64", "width": "64"},
    "saved_view": {"batch": "4", "channels": "8"},
    "small_view_of_large": {},
    "stepped_view": {},
    "tied_weights": {},
    "tiny_gpt": {"layers": "1", "batch": "2", "seq": "32", "width": "48"},
}
# Its backward exists on the GPU alone.
CUDA_ONLY = frozenset({"own_attention_graph"})
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
# What the sample shows; torch says so each time the op runs.
ALIAS_WARNING = "ignore:offplan_samples..pass_through:UserWarning"


def _factories() -> list[str]:
    tree = ast.parse(WORKING.read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if not name.startswith("_") and name != "scaled"]


def _targets(left_out: frozenset[str] = frozenset()) -> list[Any]:
    samples = sorted(path.stem for path in SAMPLES.glob("*.py") if path.stem != "qwen3_14b")
    found = [(f"{WORKING}:{name}", {}, name) for name in _factories() if name not in left_out]
    found += [(f"{SAMPLES / name}.py", PARAMS[name], f"sample-{name}") for name in samples]
    return [pytest.param(spec, params, id=name) for spec, params, name in found]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor's elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def state(target: Target, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bits of the losses, of every gradient and of every buffer."""
    found = {f"loss {place}": raw(loss) for place, loss in enumerate(losses)}
    inputs = {f"input {i}": a for i, a in enumerate(target.args) if isinstance(a, torch.Tensor)}
    for name, tensor in [*target.model.named_parameters(), *inputs.items()]:
        if tensor.grad is not None:
            found[f"gradient {name}"] = raw(tensor.grad)
    found.update({f"buffer {name}": raw(b) for name, b in target.model.named_buffers()})
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def three_steps(target: Target, plan: Plan | None, device: str) -> tuple[Any, ...]:
    """State after three steps, peak and end-of-forward bytes of the last, statistics, facts."""
    losses, peak_bytes, saved_bytes = [], 0, 0
    with Replay(target, plan, device=device) as replay:
        for step in range(3):
            torch.manual_seed(step)
            with LiveBytes() as live:
                loss = loss_of(replay.forward())
                saved_bytes = live.live_bytes
                loss.backward()
            losses.append(loss.detach())
            peak_bytes = live.peak_bytes
        return state(target, losses), peak_bytes, saved_bytes, replay.stats(), replay.facts


# --- every target ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings(ALIAS_WARNING)
@pytest.mark.parametrize(("spec", "params"), _targets(CUDA_ONLY))
def test_a_replay_gives_the_same_bits_and_moves_what_was_planned(spec, params):
    facts = trace(spec, params, TraceOptions(device="cpu"))
    plan = make_plan(facts, budget=0, min_bytes=1)
    torch.manual_seed(0)
    expected, peak, saved, _, plain_facts = three_steps(
        build_real(spec, params, "cpu"), None, "cpu"
    )
    assert digest(plain_facts) == digest(facts)
    torch.manual_seed(0)
    found, low_peak, low_saved, stats, _ = three_steps(build_real(spec, params, "cpu"), plan, "cpu")
    assert_same(found, expected)
    assert (stats.offload_count, stats.offloaded_bytes) == planned_both_ways(plan)[0]
    assert (stats.reload_count, stats.reloaded_bytes) == planned_both_ways(plan)[1]
    assert low_peak <= peak
    assert low_saved == saved - plan.moved_bytes


def planned_both_ways(plan: Plan, steps: int = 3) -> list[tuple[int, int]]:
    out = [transfer.transfer_bytes for transfer in plan.transfers]
    back = [t.transfer_bytes for t in plan.transfers if t.reload_at is not None]
    return [(steps * len(sizes), steps * sum(sizes)) for sizes in (out, back)]


@pytest.mark.cuda
@pytest.mark.filterwarnings(ALIAS_WARNING, "ignore:.*deterministic:UserWarning")
@pytest.mark.parametrize(("spec", "params"), _targets())
def test_a_replay_on_the_gpu_gives_the_same_bits(spec, params, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plan = make_plan(trace(spec, params, TraceOptions()), budget=0, min_bytes=1)
        arms = []
        for arm_plan in (None, plan):
            torch.manual_seed(0)
            arms.append(three_steps(build_real(spec, params, "cuda"), arm_plan, "cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(arms[1][0], arms[0][0])
    stats = arms[1][3]
    assert (stats.offload_count, stats.offloaded_bytes) == planned_both_ways(plan)[0]
    assert (stats.reload_count, stats.reloaded_bytes) == planned_both_ways(plan)[1]


# --- the life of a runtime ------------------------------------------------------------------------


class Failing:
    """Where an op fails, if it is to."""

    place = ""


@torch.library.custom_op("offplan_tests::may_fail", mutates_args=())
def may_fail(x: torch.Tensor, place: str) -> torch.Tensor:
    if Failing.place == place:
        raise ValueError(f"failed in {place}")
    return x.clone()


may_fail.register_fake(lambda x, place: torch.empty_like(x))
may_fail.register_autograd(
    lambda ctx, grad: (torch.ops.offplan_tests.may_fail(grad, "backward"), None),
    setup_context=lambda ctx, inputs, output: None,
)


class Layers(nn.Module):
    """GELU layers, an op that can be made to fail between them, and two outputs."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for number, layer in enumerate(self.layers):
            x = F.gelu(layer(x))
            if number == 1:
                x = may_fail(x, "forward")
        return x.square().mean(), x.sin().sum()


def layers(device: str) -> Target:
    torch.manual_seed(0)
    return Target(Layers().to(device), (torch.randn(128, 64).to(device),))


def plan_for(make: Callable[[str], Target], device: str) -> Plan:
    with Replay(make(device), None, device=device) as replay:
        replay.forward()
        assert replay.facts is not None
        return make_plan(replay.facts, budget=0, min_bytes=1)


def test_the_plans_have_transfers_of_every_kind():
    """Placed for the least peak, releases and reloads lie all over the graphs: some copies are let
    wait while others are issued, some are waited for at once."""
    of_layers, of_regions = windows(plan_for(layers, "cpu")), windows(plan_for(loop, "cpu"))
    for found in (of_layers, of_regions):
        assert min(found) >= 2
    # More leave at once than the last layer's.
    assert of_layers.leaving >= 3


@pytest.fixture(params=DEVICES)
def device(request):
    yield request.param
    Failing.place = ""


def gradients(
    use: Callable[[Replay, Target], None], plan: Plan | None, device: str
) -> dict[str, torch.Tensor]:
    """The state that ``use`` leaves behind, and a check that all host memory is free again."""
    target = layers(device)
    with Replay(target, plan, device=device) as replay:
        use(replay, target)
        gc.collect()
        free = sum(size * len(arenas) for size, arenas in replay.runtime.pool.free.items())
        assert free == replay.stats().host_asked_bytes
    assert replay.stats().host_pinned_bytes == 0
    return state(target, [])


def assert_planned_equals_plain(use: Callable[[Replay, Target], None], device: str) -> None:
    plan = plan_for(layers, device)
    assert len(plan.transfers) >= 4
    assert_same(gradients(use, plan, device), gradients(use, None, device))


def test_forwards_without_backward_give_their_host_memory_back(device):
    def use(replay, target):
        replay.forward()
        replay.step()
        output = replay.forward()
        replay.step()
        del output

    assert_planned_equals_plain(use, device)


def test_evaluation_without_gradients_between_steps_moves_nothing(device):
    plan = plan_for(layers, device)
    with Replay(layers(device), plan, device=device) as replay:
        replay.step()
        before = replay.stats()
        with torch.no_grad():
            replay.forward()
        assert replay.stats() == before
        replay.step()
        assert replay.stats().offload_count == 2 * before.offload_count


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("first", [True, False])
def test_an_exception_leaves_nothing_in_flight_and_the_next_step_is_right(device, place, first):
    def use(replay, target):
        if not first:
            replay.step()
        Failing.place = place
        with pytest.raises(ValueError, match=f"failed in {place}"):
            replay.step()
        Failing.place = ""
        assert not replay.runtime._sending
        assert not replay.runtime._arriving
        target.model.zero_grad()
        replay.step()

    assert_planned_equals_plain(use, device)


def test_two_forwards_before_two_backwards(device):
    def use(replay, target):
        losses = [replay.forward()[0] for _ in range(2)]
        for loss in losses:
            loss.backward()
        losses = [replay.forward()[1] for _ in range(2)]
        for loss in reversed(losses):
            loss.backward()

    assert_planned_equals_plain(use, device)


def test_gradient_accumulation(device):
    def use(replay, target):
        for _ in range(3):
            (replay.forward()[0] / 3).backward()

    assert_planned_equals_plain(use, device)


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_two_losses_backwarded(device, which):
    def use(replay, target):
        for _ in range(2):
            replay.forward()[which].backward()

    assert_planned_equals_plain(use, device)


def test_a_backward_that_keeps_its_graph_can_run_again(device):
    def use(replay, target):
        first, second = replay.forward()
        first.backward(retain_graph=True)
        first.backward(retain_graph=True)
        second.backward()

    assert_planned_equals_plain(use, device)


def test_two_replays_of_one_model_at_once(device):
    plan = plan_for(layers, device)
    plain, target = layers(device), layers(device)
    with Replay(plain, None, device=device) as reference:
        for _ in range(4):
            reference.step()
    with (
        Replay(target, plan, device=device) as one,
        Replay(target, plan, device=device) as other,
    ):
        first, second = loss_of(one.forward()), loss_of(other.forward())
        second.backward()
        first.backward()
        one.step()
        other.step()
        assert one.stats() == other.stats()
    assert_same(state(target, []), state(plain, []))


def test_a_step_compiled_again_gets_the_same_transfers(device):
    def use(replay, target):
        replay.step()
        count = replay.stats().offload_count
        reset_dynamo()
        replay.step()
        assert replay.stats().offload_count == 2 * count

    assert_planned_equals_plain(use, device)


def test_an_output_that_outlives_the_replay_says_so(device):
    plan = plan_for(layers, device)
    replay = Replay(layers(device), plan, device=device)
    loss = loss_of(replay.forward())
    assert replay.stats().host_pinned_bytes > 0
    replay.close()
    replay.close()
    assert replay.stats().host_pinned_bytes == 0
    with pytest.raises(ReplayError, match="the replay is closed"):
        loss.backward()
    with pytest.raises(ReplayError, match="the replay is closed"):
        replay.step()


def test_a_replay_that_is_dropped_gives_everything_back(device):
    plan = plan_for(layers, device)
    target = layers(device)
    replay = Replay(target, plan, device=device)
    loss = loss_of(replay.forward())
    runtime, (slab,) = weakref.ref(replay.runtime), replay.runtime.pool.slabs
    pages = slab.pages.mapping
    del replay, slab
    gc.collect()
    assert runtime() is not None  # the loss can still be backwarded
    loss.backward()
    del loss
    gc.collect()
    assert runtime() is None
    pages.close()  # nothing points into it


def test_a_closed_replay_keeps_neither_model_nor_graphs(device):
    plan = plan_for(layers, device)
    target = layers(device)
    with Replay(target, plan, device=device) as replay:
        replay.step()
        held = [weakref.ref(target.model), weakref.ref(replay.runtime), weakref.ref(replay._step)]
    del target, replay
    gc.collect()
    assert [reference() for reference in held] == [None, None, None]


def test_the_host_budget_is_honoured_exactly(device):
    plan = plan_for(layers, device)
    with Replay(layers(device), plan, device=device) as replay:
        needed = replay.stats().host_pinned_bytes
    with Replay(layers(device), plan, device=device, host_budget=needed) as replay:
        replay.step()
        kept = replay.forward()
        with pytest.raises(HostMemoryError, match="a forward ran before the backward") as raised:
            replay.forward()
        assert f"raise the host budget to {2 * needed}" in raised.value.fix
        del kept
        replay.step()
        assert replay.stats().host_pinned_bytes == needed
    with pytest.raises(HostMemoryError) as raised:
        Replay(layers(device), plan, device=device, host_budget=needed - 1)
    assert f"needs {needed} bytes" in raised.value.what
    assert f"budget is {needed - 1}" in raised.value.what
    assert str(needed) in raised.value.fix


@pytest.mark.parametrize("pin", ["register", "torch", "off", "auto"])
def test_steps_hold_no_more_and_no_less_over_time(device, pin):
    plan = plan_for(layers, device)
    with Replay(layers(device), plan, device=device, pin=pin, timing=True) as replay:
        held = []
        for _ in range(6):
            replay.step()
            live = torch.cuda.memory_allocated() if device == "cuda" else 0
            held.append((live, replay.stats().host_pinned_bytes))
        stalled = replay.stats().stalled_ms
    assert len(set(held[1:])) == 1
    assert (stalled is None) == (device == "cpu")


@pytest.mark.cuda
# torch says so whenever parameters outlive a change of streams, which is what is tried here.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_a_step_under_another_stream():
    def use(replay, target):
        stream = torch.cuda.Stream()
        replay.step()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            replay.step()
            first, second = replay.forward()
            first.backward(retain_graph=True)
            second.backward()
        torch.cuda.current_stream().wait_stream(stream)
        replay.step()
        torch.cuda.synchronize()

    assert_planned_equals_plain(use, "cuda")


@pytest.mark.cuda
def test_copies_that_lag_behind_compute_change_nothing():
    """Each copy is held up behind a long kernel on its own stream; the waits must hold it off."""

    def use(replay, target):
        if not replay.plan:
            for _ in range(3):
                replay.step()
            return
        replay.step()
        for _ in range(2):
            for stream in (replay.runtime.link.to_host, replay.runtime.link.to_device):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(200_000_000)
            replay.step()

    assert_planned_equals_plain(use, "cuda")


@pytest.mark.cuda
def test_refused_pinning_is_a_clear_error_and_the_gpu_stays_usable():
    pages = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    Registered().pin(address, 1 << 20)
    try:
        with pytest.raises(HostMemoryError, match="host pinned memory") as raised:
            Registered().pin(address, 1 << 20)
        assert "1MiB" in raised.value.what
        assert torch.ones(4, device="cuda").sum().item() == 4
    finally:
        Registered().unpin(address)


def test_refused_pinning_leaves_nothing_behind():
    class Refusing(Pageable):
        def pin(self, address: int, size_bytes: int) -> None:
            raise HostMemoryError("host pinned memory was refused")

    def slabs() -> int:
        gc.collect()
        return sum(type(item) is Slab for item in gc.get_objects())

    before = slabs()
    with pytest.raises(HostMemoryError):
        HostPool([4096], Refusing())
    assert slabs() == before


# --- plans that do not fit ------------------------------------------------------------------------


def test_a_plan_for_another_target_is_refused():
    def wider(device: str) -> Target:
        return Target(Layers(96).to(device), (torch.randn(128, 96).to(device),))

    plan = plan_for(layers, "cpu")
    with (
        Replay(wider("cpu"), plan, device="cpu") as replay,
        pytest.raises(PlanError, match="the plan was made for other graphs"),
    ):
        replay.step()
    with pytest.raises(PlanError, match="device was cuda, is cpu"):
        Replay(layers("cpu"), msgspec.structs.replace(plan, device="cuda"), device="cpu")


def test_a_plan_whose_digest_differs_is_refused_before_any_backward():
    plan = msgspec.structs.replace(plan_for(layers, "cpu"), digest="sha256:0")
    target = layers("cpu")
    with (
        Replay(target, plan, device="cpu") as replay,
        pytest.raises(PlanError, match="other graph"),
    ):
        replay.step()
    assert all(parameter.grad is None for parameter in target.model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"release_by": 0, "offload_after": 0}, "cannot be moved as planned"),
        ({"offload_after": -3}, "not in order"),
        ({"release_by": 10_000}, "not in order"),
        ({"needed_by": None, "reload_at": None}, "never reloaded"),
        ({"reload_at": 10_000, "needed_by": 10_000}, "not in order"),
        ({"stop": 100, "transfer_bytes": 100}, "are carried"),
        ({"transfer_bytes": 7}, "it carries"),
        ({"transfer_bytes": 0}, "says 0 bytes"),
    ],
)
def test_a_plan_edited_by_hand_is_refused(change, message):
    plan = plan_for(layers, "cpu")
    first, *rest = plan.transfers
    edited = (msgspec.structs.replace(first, **change), *rest)
    plan = msgspec.structs.replace(plan, transfers=edited)
    with pytest.raises(PlanError, match=message), Replay(layers("cpu"), plan, device="cpu") as r:
        r.step()


def test_an_output_without_a_loss_is_refused():
    with pytest.raises(TargetError, match="no floating tensor"):
        loss_of({"tokens": torch.ones(3, dtype=torch.long)})


# --- several regions ------------------------------------------------------------------------------


class Broken(nn.Module):
    """Two layers with a graph break after them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(F.gelu(self.first(x)).sin())
        torch._dynamo.graph_break()
        return x.cos()


def loop(device: str) -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(Broken(), Broken(), Broken())
    return Target(model.to(device), (torch.randn(128, 64).to(device),))


def test_regions_and_repeated_runs_of_one_graph_move_what_is_planned(device):
    plan = plan_for(loop, device)
    moving = [transfer.region for transfer in plan.transfers]
    assert len(set(moving)) >= 3
    plain, target = loop(device), loop(device)
    expected = three_steps(plain, None, device)
    found = three_steps(target, plan, device)
    assert_same(found[0], expected[0])
    stats = found[3]
    assert (stats.offload_count, stats.offloaded_bytes) == planned_both_ways(plan)[0]
    assert stats.lease_count == 3 * len(set(moving))
    assert stats.host_asked_bytes == sum(
        -(-transfer.transfer_bytes // 512) * 512 for transfer in plan.transfers
    )


def test_runs_of_one_graph_that_are_planned_differently_are_refused():
    plan = plan_for(loop, "cpu")
    last = max(transfer.region for transfer in plan.transfers)
    kept = tuple(t for t in plan.transfers if t.region != last)
    entries = tuple(
        msgspec.structs.replace(entry, action="keep") if entry.region == last else entry
        for entry in plan.storages
    )
    plan = msgspec.structs.replace(plan, transfers=kept, storages=entries)
    with (
        Replay(loop("cpu"), plan, device="cpu") as replay,
        pytest.raises(PlanError, match="runs of one graph"),
    ):
        replay.step()


# --- the parts ------------------------------------------------------------------------------------


def transfer(offload: int, size: int, needed: int | None, release: int = 0) -> Transfer:
    return Transfer(0, 0, 0, size, size, offload, max(offload, release), needed, needed)  # type: ignore[arg-type]


def test_slots_whose_uses_overlap_lie_apart_and_others_share():
    found = layout([transfer(0, 1000, 9), transfer(1, 100, None, 2), transfer(3, 200, None, 4)])
    assert found.offsets == (0, 1024, 1024)
    assert found.size_bytes == 1024 + 512


def test_a_layout_is_not_rounded_beyond_512_bytes():
    found = layout([transfer(i, 512 * 3, 20) for i in range(5)])
    assert sorted(found.offsets) == [i * 1536 for i in range(5)]
    assert found.size_bytes == 5 * 1536


def test_a_lease_ends_when_its_last_tensor_dies_however_it_was_viewed():
    pool = HostPool([1024], Pageable())
    lease = pool.lease(1024)
    kept = lease.host_tensor(512, 100).detach()[10:]
    del lease
    assert not pool.free[1024]
    del kept
    assert len(pool.free[1024]) == 1


def test_host_memory_that_is_given_back_stays_addressable():
    pool = HostPool([1024], Pageable())
    tensor = pool.lease(1024).host_tensor(0, 1024)
    tensor.fill_(7)
    pool.close()
    assert pool.pinned_bytes == 0
    assert tensor.sum() == 0


def test_a_reload_cannot_be_read_before_its_wait():
    runtime = Runtime(CpuLink(), HostPool([1024], Pageable()))
    (number,) = runtime.add_slots([Slot("x", 0, 64, 64, (), 4, 0)])
    with runtime.forward_run(1024):
        value = torch.arange(16, dtype=torch.float32)
        host = runtime.offload(value, number)
        del value
        runtime.release(host, number)
    buffer = runtime.reload(host, number)
    assert buffer.view(torch.float32).isnan().all()
    runtime.wait(buffer)
    assert torch.equal(buffer.view(torch.float32), torch.arange(16.0))


def test_a_storage_that_something_holds_after_its_release_is_named():
    runtime = Runtime(CpuLink(), HostPool([1024], Pageable()))
    (number,) = runtime.add_slots([Slot("the storage of relu", 0, 64, 64, (), 4, 0)])
    value = torch.ones(16)
    with runtime.forward_run(1024):
        host = runtime.offload(value, number)
        with pytest.raises(ReplayError, match=r"the storage of relu .* a float32\[16\] tensor"):
            runtime.release(host, number)


def test_live_bytes_counts_storages_until_they_die():
    before = torch.ones(1000)
    with LiveBytes() as live:
        kept = before + 1
        view = kept[10:]
        (kept * 2).sum()
        assert live.live_bytes == 4000
        del kept
        assert live.live_bytes == 4000
        del view
        assert live.live_bytes == 0
    assert live.peak_bytes == 8004


def test_of_copies_waited_for_at_one_place_the_last_that_is_issued_comes_first():
    """Those before it need no wait then.  (Offloaded, released, reloaded, needed; by number.)"""
    placed = [
        (transfer(0, 64, 9, 5), 0),
        (transfer(3, 64, 9, 5), 1),
        (transfer(3, 64, 7, 5), 2),
        (transfer(0, 64, 7, 3), 3),
    ]
    items = [rewrite._Placed(SimpleNamespace(transfer=each), None, n) for each, n in placed]  # type: ignore[arg-type]
    assert [item.number for item in sorted(items, key=rewrite._release_order)] == [3, 2, 1, 0]
    assert [item.number for item in sorted(items, key=rewrite._reload_order)] == [2, 3, 0, 1]
    assert [item.number for item in sorted(items, key=rewrite._wait_order)] == [3, 2, 1, 0]
