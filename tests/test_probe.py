"""Measuring a device and its ops: on the CPU where that is possible, the rest on a GPU."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from offplan.cli import app
from offplan.costs import LinkRate, load_profile, op_key, profile_for, save_profile
from offplan.errors import DeviceError, UsageError
from offplan.graph import timeline
from offplan.measured import HostLimit, HostLimits
from offplan.replay import optimes, probe
from offplan.replay.compiled import Replay, build_real
from offplan.replay.host import HostMemoryError, Pageable
from offplan.replay.optimes import (
    cache_op_times,
    cached_op_times,
    measured_op_times,
    timeable_keys,
)
from offplan.replay.runtime import CpuLink
from offplan.report.device import render_device
from offplan.roofline import is_view

WORKING = Path(__file__).parent / "targets" / "working.py"
MIB = 1024**2
CPU = torch.device("cpu")


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copy_s", "compute_s", "together_s", "expected"),
    [(2, 2, 2, 1), (2, 2, 4, 0), (1, 3, 3.5, 0.5), (1, 3, 2.9, 1), (1, 3, 5, 0)],
)
def test_overlap_is_the_hidden_part_of_the_shorter_one(copy_s, compute_s, together_s, expected):
    assert probe.overlap_of(copy_s, compute_s, together_s) == pytest.approx(expected)


def test_the_order_of_the_cpu_link_holds():
    with probe.cpu_ends(2 * MIB) as ends:
        assert probe.ordering_holds(CpuLink(), ends, lambda: None)


class _StaleSend(CpuLink):
    """A copy to the host that runs before the op that makes its source."""

    def __init__(self) -> None:
        self.before: dict[int, torch.Tensor] = {}

    def send(self, source, host, after):
        host.copy_(self.before.get(source.data_ptr(), torch.zeros_like(source)))
        self.before[source.data_ptr()] = source.clone()


class _LateSend(CpuLink):
    """A copy to the host that nobody waits for: it sees what its source holds at the end."""

    def __init__(self) -> None:
        self.late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def send(self, source, host, after):
        host.copy_(source)
        self.late.append((source, host))

    def drain(self):
        for source, host in self.late:
            host.copy_(source)
        self.late.clear()


class _EarlyRead(CpuLink):
    """A reload that has not arrived when it was waited for."""

    def arrive(self, host, target, copy):
        pass


class _OvertakenFetch(CpuLink):
    """A reload that overtakes the copy to the host that it has to come after."""

    def fetch(self, host, target, after):
        return torch.zeros_like(host) if after is not None else None

    def send(self, source, host, after):
        super().send(source, host, after)
        return "sent"

    def arrive(self, host, target, copy):
        target.copy_(host if copy is None else copy)


@pytest.mark.parametrize("link_type", [_StaleSend, _LateSend, _EarlyRead, _OvertakenFetch])
def test_each_broken_order_is_noticed(link_type):
    with probe.cpu_ends(2 * MIB) as ends:
        assert not probe.ordering_holds(link_type(), ends, lambda: None)


# --- pinning --------------------------------------------------------------------------------------


class _UpTo(Pageable):
    """Refuses to pin more than ``limit`` bytes; counts what is pinned."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}

    def pin(self, address: int, size_bytes: int) -> None:
        if size_bytes > self.limit:
            raise HostMemoryError("refused")
        self.held[address] = size_bytes

    def unpin(self, address: int) -> None:
        del self.held[address]


@pytest.mark.parametrize(
    ("most", "available", "expected"),
    [
        (16, 100, [1, 2, 4, 8, 16]),
        (12, 100, [1, 2, 4, 8, 12]),
        (16, 10, [1, 2, 4, 8]),
        (1, 100, [1]),
    ],
)
def test_pins_double_up_to_the_limit(most, available, expected):
    gib = 1024**3
    assert probe.pin_sizes(most * gib, available * gib) == [size * gib for size in expected]


def test_the_largest_pin_is_the_last_that_was_not_refused():
    pinning = _UpTo(4 * MIB)
    ticks = iter(range(100))
    found = probe.pin_costs(pinning, [MIB, 2 * MIB, 4 * MIB, 8 * MIB], lambda: next(ticks))
    assert found == probe.PinCosts(4 * MIB, 1 / (4 * MIB), "refused")
    assert pinning.held == {}


def test_nothing_pinned_is_no_size():
    assert probe.pin_costs(_UpTo(0), [MIB]) == probe.PinCosts(None, 0.0, "refused")


def test_some_host_memory_is_available():
    assert 0 < probe.available_bytes() <= torch.iinfo(torch.int64).max


# --- rates ----------------------------------------------------------------------------------------


class _Ticks:
    """A timer by which everything takes one second; ``count`` is how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, work):
        work()
        self.count += 1
        return 1.0


def test_link_rates_are_the_bytes_of_all_copies_over_their_time():
    with probe.cpu_ends(4 * MIB) as ends:
        found = probe.link_rates(CpuLink(), _Ticks(), ends, (MIB, 2 * MIB))
    # 64 copies at the most are issued together.
    assert found == (
        LinkRate(MIB, 67_110_000, 67_110_000),
        LinkRate(2 * MIB, 134_200_000, 134_200_000),
    )


def test_a_copy_has_a_latency_where_small_ones_are_slower_than_their_bytes():
    rates = (LinkRate(1000, 10**7, 10**8), LinkRate(10**6, 10**9, 10**9))
    assert probe.copy_latency_s(rates) == pytest.approx(100e-6 - 1e-6)
    assert probe.copy_latency_s((rates[1], rates[1])) == 0


def test_compute_rates_are_flops_and_bytes_over_their_time():
    assert probe.matmul_rates(CPU, _Ticks(), 16)["float32"] == 32_770  # of 32,768, to four digits
    assert probe.memory_rate(CPU, _Ticks(), 4096) == 2 * 4096
    attention = probe.attention_rate(CPU, _Ticks(), (2, 3, 10, 8))
    product = 2 * 3 * 10 * 10 * 8
    assert (attention.forward, attention.backward) == (2 * product, 5 * product)


def test_matmul_rates_leave_the_precision_as_it_was():
    before = torch.get_float32_matmul_precision()
    probe.matmul_rates(CPU, _Ticks(), 4)
    assert torch.get_float32_matmul_precision() == before


def test_an_op_takes_its_part_of_the_time_of_many():
    assert probe.op_overhead_s(CPU, _Ticks()) == 1 / 100


def test_host_time_is_by_op_and_by_forward():
    # A clock that goes on by one second whenever it is read: each forward takes one.
    ticks = iter(range(10_000))
    assert probe.host_costs(CPU, lambda: next(ticks)) == probe.HostCosts(0.0, 1.0, 0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_measure():
    with pytest.raises(DeviceError, match="no GPU") as caught:
        probe.measure_device()
    assert "--profile" in caught.value.fix


@pytest.mark.cuda
def test_a_gpu_is_measured(tmp_path):
    phases = []
    profile = probe.measure_device(phases.append, max_pin_bytes=2 * 1024**3)
    assert phases
    assert profile.ordering_ok
    assert profile.overlap is not None
    assert profile.overlap > 0.5
    assert profile.d2h_both_bytes_per_s <= 1.1 * profile.d2h_bytes_per_s
    save_profile(tmp_path / "gpu.yaml", profile)
    assert load_profile(tmp_path / "gpu.yaml") == profile


@pytest.mark.cuda
@pytest.mark.parametrize("pin", ["torch", "off"])
def test_each_way_to_pin_is_measured(pin):
    profile, limits = probe.measure_with_limits(max_pin_bytes=MIB * 1024, pin=pin)
    assert profile.note == f"host memory by --pin {pin}"
    assert limits.limits[-1].name == "trial pin"


# --- limits on host memory ------------------------------------------------------------------------


def test_a_trial_says_what_it_reached_and_why_no_more():
    pinned = probe.pin_costs(_UpTo(4 * MIB), [MIB, 2 * MIB, 4 * MIB, 8 * MIB])
    trial = probe._with_trial(pinned).limits[-1]
    assert (trial.name, trial.left_bytes, trial.note) == ("trial pin", 4 * MIB, "refused")
    pinned = probe.pin_costs(_UpTo(8 * MIB), [MIB])
    trial = probe._with_trial(pinned, "locked").limits[-1]
    assert (trial.left_bytes, trial.limit_bytes) == (None, MIB)
    assert trial.note == "locked; no size was refused"


def test_the_limits_on_host_memory_are_shown_without_a_gpu():
    found = CliRunner().invoke(app, ["device", "--host", "--max-pin", "1MiB", "--format", "json"])
    assert found.exit_code == 0, found.stderr
    host = json.loads(found.stdout)["host"]
    names = [limit["name"] for limit in host["limits"]]
    assert names[0] == "free memory"
    assert names[-2:] == ["ulimit -l", "trial pin"]
    assert host["limits"][-1]["limit_bytes"] <= MIB
    assert 0 < host["map_count"] < host["max_map_count"]
    found = CliRunner().invoke(app, ["device", "--host", "--max-pin", "1MiB"])
    assert found.stdout.startswith("Host memory\n")
    assert "vm.max_map_count" in found.stdout


@pytest.mark.parametrize("more", [["h100"], ["-o", "gpu.yaml"]])
def test_the_limits_alone_are_no_profile(more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["device", "--host", *more])
    assert found.exit_code == 2
    assert list(tmp_path.iterdir()) == []


# --- the report -----------------------------------------------------------------------------------


def test_the_report_has_every_format():
    profile = msgspec.structs.replace(
        profile_for("h200"), overlap=0.5, ordering_ok=False, link_sizes=(LinkRate(MIB, 10, 10),)
    )
    text = render_device(profile, "text", 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "DOES NOT HOLD" in text
    assert "1MiB" in text
    assert "50%" in text
    assert "| memory |" in render_device(profile, "markdown", 80)
    assert json.loads(render_device(profile, "json", 80))["name"] == "h200"
    limits = HostLimits(limits=(HostLimit(name="cgroup", left_bytes=5, limit_bytes=10),))
    with_limits = json.loads(render_device(profile, "json", 80, limits))
    assert with_limits["host"]["limits"] == [{"name": "cgroup", "left_bytes": 5, "limit_bytes": 10}]
    assert "ceiling  5 B (cgroup)" in render_device(profile, "text", 80, limits)
    with pytest.raises(UsageError):
        render_device(profile, "html", 80)


# --- op times -------------------------------------------------------------------------------------

TARGETS = [
    *("plain", "in_place", "autocast", "dropout", "tied", "batch_norm_train", "rms_norm"),
    *("conv_depthwise_transposed", "attention_bf16", "checkpointed", "multi_output"),
    *("custom_op", "returns_its_input", "embedding_cross_entropy", "index_and_scatter"),
    *("graph_break_in_loop", "constants_on_the_device", "no_grad_part"),
]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.filterwarnings("ignore:.*returned the input.*:UserWarning", "ignore:offplan_tests")
def test_the_ops_of_a_step_are_found_by_the_keys_of_its_facts(name):
    with Replay(build_real(f"{WORKING}:{name}", {}, "cpu"), None, device="cpu") as replay:
        times = measured_op_times(replay)
        facts = replay.facts
    assert facts is not None
    timed = {op_key(facts, op) for op in timeline(facts) if not (op.mutates or is_view(facts, op))}
    assert timed
    assert timed == set(times) == timeable_keys(facts)


def test_what_runs_inside_a_higher_order_op_is_passed_over():
    target = build_real(f"{WORKING}:checkpointed_dropout", {}, "cpu")
    with Replay(target, None, device="cpu") as replay:
        times = measured_op_times(replay)
    assert times
    assert not any("rng_state" in key for key in times)


def test_each_op_is_timed_once_and_known_ones_not_at_all():
    runs = []
    with Replay(
        build_real(f"{WORKING}:graph_break_in_loop", {}, "cpu"), None, device="cpu"
    ) as replay:
        first = measured_op_times(replay, timed=lambda run: float(runs.append(run) or len(runs)))
        count = len(runs)
        again = measured_op_times(replay, first, timed=lambda run: 1 / 0)
    assert again == first
    assert len(first) * 5 == count


def test_measuring_leaves_the_random_state_and_the_loss_as_they_were():
    losses = []
    for measure in (False, True):
        torch.manual_seed(3)
        with Replay(build_real(f"{WORKING}:dropout", {}, "cpu"), None, device="cpu") as replay:
            replay.step()
            if measure:
                measured_op_times(replay)
            losses.append(replay.step())
    assert torch.equal(*losses)


def test_an_op_that_runs_out_of_memory_has_no_time():
    def timed(run):
        raise torch.OutOfMemoryError

    with Replay(build_real(f"{WORKING}:plain", {}, "cpu"), None, device="cpu") as replay:
        assert measured_op_times(replay, timed=timed) == {}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFPLAN_CACHE", str(tmp_path / "cache" / "offplan"))
    return tmp_path / "cache"


def test_op_times_are_cached_by_gpu_and_version(cache):
    assert cached_op_times("NVIDIA H200", "2.14.1") == {}
    cache_op_times("NVIDIA H200", "2.14.1", {"a": 1.0})
    cache_op_times("NVIDIA H200", "2.14.1", {"b": 2.5})
    assert cached_op_times("NVIDIA H200", "2.14.1") == {"a": 1.0, "b": 2.5}
    assert cached_op_times("NVIDIA H200", "2.11.0") == {}
    assert cached_op_times("NVIDIA H100", "2.14.1") == {}


def test_a_cache_that_is_no_cache_is_as_good_as_none(cache):
    cache_op_times("gpu", "2", {"a": 1.0})
    (path,) = cache.rglob("*.json")
    for content in (b"", b"{", b'{"op_times_of": "other", "torch": "2", "times_ms": {"a": 1.0}}'):
        path.write_bytes(content)
        assert cached_op_times("gpu", "2") == {}


def test_a_cache_that_cannot_be_written_is_done_without(cache):
    cache.write_text("a file where the directory would be")
    cache_op_times("gpu", "2", {"a": 1.0})
    assert cached_op_times("gpu", "2") == {}


def test_many_writers_leave_a_whole_file(cache):
    def write(number: int) -> None:
        for step in range(20):
            cache_op_times("gpu", "2", {f"{number} {step}": 1.0})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = cached_op_times("gpu", "2")
    # The last one to write has read what was there before, its own times included.
    assert any(all(f"{number} {step}" in found for step in (19,)) for number in range(4))
    assert len(list(cache.rglob("*"))) == 3


@pytest.mark.cuda
def test_op_times_are_measured_on_the_gpu():
    with Replay(build_real(f"{WORKING}:plain", {}, "cuda"), None, device="cuda") as replay:
        times = measured_op_times(replay)
        facts = replay.facts
    assert facts is not None
    timed = [op for op in timeline(facts) if not op.mutates and not is_view(facts, op)]
    assert {op_key(facts, op) for op in timed} == set(times)
    assert all(time >= 0 for time in times.values())


def test_the_cache_is_recognized_by_its_first_bytes():
    encoded = msgspec.json.encode(optimes.OpTimes("gpu", "2", {}))
    assert encoded.startswith(optimes.TIMES_FILE.first_bytes)


def test_pageable_memory_is_measured_like_pinned():
    assert probe.pin_costs(Pageable(), [MIB]).largest_bytes == MIB
