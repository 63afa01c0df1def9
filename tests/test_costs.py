"""Device profiles and op times: files, the roofline, and the host that issues the ops."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import msgspec
import pytest
from facts_builder import FactsBuilder, MiB

from offplan.costs import (
    AttentionRate,
    DeviceProfile,
    LinkRate,
    Versions,
    as_in_a_step,
    device_times_ms,
    find_profile,
    link_rates,
    load_profile,
    op_key,
    op_times,
    op_times_ms,
    profile_for,
    profile_text,
    reached_rates,
    save_profile,
)
from offplan.errors import FileFormatError, OutputError, UsageError
from offplan.gpus import GPUS
from offplan.graph import GraphFacts, Op, timeline
from offplan.roofline import is_view

ROOT = Path(__file__).resolve().parent.parent

# Round numbers, and a host that takes no time.
ROUND = DeviceProfile(
    name="round",
    gpu="Round",
    source="measured",
    memory_bytes=10**9,
    d2h_bytes_per_s=10**9,
    h2d_bytes_per_s=10**9,
    d2h_both_bytes_per_s=10**9,
    h2d_both_bytes_per_s=10**9,
    copy_latency_s=1e-5,
    memory_bytes_per_s=10**9,
    matmul_flops_per_s={"float32": 10**9, "tf32": 4 * 10**9, "bfloat16": 16 * 10**9},
    attention_flops_per_s=AttentionRate(8 * 10**9, 4 * 10**9),
    op_overhead_s=2e-6,
    host_op_s=0.0,
    host_start_s=0.0,
    pin_s_per_byte=4.3e-10,
)


def with_constants(facts: GraphFacts, **constants: str) -> GraphFacts:
    """``facts`` with the constants of the ops that have these names."""
    region = facts.regions[0]
    ops = tuple(
        msgspec.structs.replace(op, constants=constants.get(op.name, op.constants))
        for op in region.forward.ops
    )
    forward = msgspec.structs.replace(region.forward, ops=ops)
    return msgspec.structs.replace(
        facts, regions=(msgspec.structs.replace(region, forward=forward), *facts.regions[1:])
    )


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", GPUS)
def test_every_listed_gpu_has_a_profile(key):
    profile = profile_for(GPUS[key].name)
    assert profile == profile_for(key)
    assert (profile.name, profile.gpu) == (key, GPUS[key].name)
    assert profile.d2h_both_bytes_per_s <= profile.d2h_bytes_per_s
    assert profile.h2d_both_bytes_per_s <= profile.h2d_bytes_per_s


def test_only_the_h200_is_measured_and_says_with_what():
    measured = [key for key in GPUS if profile_for(key).source == "measured"]
    assert measured == ["h200"]
    assert profile_for("h200").versions is not None


def test_the_shipped_files_are_what_saving_them_would_write(tmp_path):
    from offplan import costs

    for path in sorted((Path(costs.__file__).parent / "profiles").glob("*.yaml")):
        assert path.read_text() == profile_text(load_profile(path))


def test_an_unlisted_gpu_is_refused_with_what_to_do():
    with pytest.raises(UsageError, match="Quadro") as caught:
        profile_for("Quadro 9000")
    assert caught.value.fix == "--profile FILE, or make one: offplan device -o FILE"


def test_a_profile_is_read_back_as_it_was(tmp_path):
    full = msgspec.structs.replace(
        ROUND,
        note="say: 'so'",
        largest_pin_bytes=16 * 1024**3,
        overlap=0.98,
        ordering_ok=True,
        link_sizes=(LinkRate(1024, 10**8, 2 * 10**8), LinkRate(MiB, 10**9, 10**9)),
        versions=Versions("Some CPU", "2.14.1", "13.0"),
    )
    for profile in (ROUND, full):
        save_profile(tmp_path / "gpu.yaml", profile)
        assert load_profile(tmp_path / "gpu.yaml") == profile


def test_a_profile_is_found_by_file_or_by_gpu(tmp_path):
    save_profile(tmp_path / "gpu.yaml", ROUND)
    assert find_profile(str(tmp_path / "gpu.yaml")) == ROUND
    assert find_profile("A100") == profile_for("a100")


def test_a_file_that_is_no_profile_is_not_replaced(tmp_path):
    path = tmp_path / "notes.yaml"
    path.write_text("mine: true\n")
    with pytest.raises(OutputError, match="not an offplan device profile"):
        save_profile(path, ROUND)
    assert path.read_text() == "mine: true\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory_bytes: 1000000000", "memory_bytes: -1", "$.memory_bytes"),
        ("memory_bytes: 1000000000", "memory_byts: 1", "memory_byts"),
        ("op_overhead_s: 2e-06", "op_overhead_s: nan", "$.op_overhead_s"),
        ("op_overhead_s: 2e-06", "op_overhead_s: soon", "$.op_overhead_s"),
        ("source: measured", "source: guessed", "$.source"),
        ("float32: 1000000000", "float32: fast", "$.matmul_flops_per_s"),
        ("float32: 1000000000", "float64: 1", "no rate for float32"),
        ("name: round", "name: ''", "$.name"),
        ("schema_version: 1", "schema_version: 99", "schema version 99"),
        ("schema_version: 1\n", "", "no schema_version"),
        ("source: measured", "source: [", "line"),
    ],
)
def test_a_bad_profile_is_refused_with_the_field(tmp_path, old, new, said):
    text = profile_text(ROUND)
    assert old in text
    path = tmp_path / "gpu.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(FileFormatError) as caught:
        load_profile(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_profile_is_named(tmp_path):
    with pytest.raises(FileFormatError, match=r"none\.yaml"):
        load_profile(tmp_path / "none.yaml")


# --- what is reached ------------------------------------------------------------------------------


def test_a_published_figure_is_not_taken_for_what_is_reached():
    built = FactsBuilder()
    region = built.region()
    a = region.input("a", (3000, 3000))
    region.op("aten.mm.default", [a, a], (3000, 3000))
    region.op("aten.add.Tensor", [a, a], (3000, 3000))
    facts = built.build()
    published = msgspec.structs.replace(ROUND, source="published")
    slower, faster = (device_times_ms(facts, profile)[:2] for profile in (published, ROUND))
    assert slower[0] > faster[0]
    assert slower[1] > faster[1]


def test_attention_rates_that_are_not_known_follow_the_products():
    bare = msgspec.structs.replace(ROUND, attention_flops_per_s=None)
    found = reached_rates(bare)
    assert found.attention_forward_flops_per_s < bare.matmul_flops_per_s["bfloat16"]
    assert found.attention_backward_flops_per_s < found.attention_forward_flops_per_s
    # A step reaches a little less than attention run alone.
    found = reached_rates(ROUND).attention_forward_flops_per_s
    assert 0.8 * 8 * 10**9 < found < 8 * 10**9


# --- measured times, and the host -----------------------------------------------------------------


def _chain(count: int, size: int) -> GraphFacts:
    built = FactsBuilder()
    region = built.region()
    x = region.input("x", (size,))
    for _ in range(count):
        x = region.op("aten.add.Tensor", [x], (size,))
        region.view(x, (size, 1))
    return built.build()


def test_a_measured_time_replaces_the_roofline_but_not_a_view():
    facts = _chain(1, 1024)
    add, view = list(timeline(facts))[:2]
    times = device_times_ms(facts, ROUND, {op_key(facts, add): 7.5, op_key(facts, view): 9.0})
    assert times[:2] == (7.5, 0.0)


def test_keys_tell_strides_dtypes_and_constants_apart_and_nothing_else():
    built = FactsBuilder()
    region = built.region()
    x = region.input("x", (8, 8))
    turned = region.view(x, (8, 8), (1, 8), target="aten.t.default")
    for value, name in ((x, "one"), (x, "same"), (turned, "turned"), (x, "other")):
        region.op("aten.add.Tensor", [value], (8, 8), name=name, module=name)
    facts = with_constants(built.build(), other="%, 2")
    keys = {op.name: op_key(facts, op) for op in timeline(facts)}
    assert keys["one"] == keys["same"]
    assert len({keys["one"], keys["turned"], keys["other"]}) == 3


def test_times_add_up_to_the_device_where_it_is_busy():
    facts = _chain(20, 10**6)
    assert sum(op_times_ms(facts, ROUND)) == pytest.approx(sum(device_times_ms(facts, ROUND)))


def test_times_add_up_to_the_host_where_the_device_waits_for_it():
    facts = _chain(20, 4)
    profile = msgspec.structs.replace(ROUND, host_op_s=100e-6)
    total = sum(op_times_ms(facts, profile))
    views = sum(is_view(facts, op) for op in timeline(facts))
    assert facts.op_count - views < total / 0.1 < facts.op_count + 1


def test_the_host_runs_ahead_behind_a_long_op():
    built = FactsBuilder()
    region = built.region()
    region.op("aten.add.Tensor", [region.input("x", (10**6,))], (10**6,))
    small = region.input("small", (4,))
    for _ in range(5):
        small = region.op("aten.add.Tensor", [small], (4,))
    facts = built.build()
    profile = msgspec.structs.replace(ROUND, host_op_s=100e-6)
    # Milliseconds on the device; all others were issued meanwhile.
    assert op_times_ms(facts, profile)[1:6] == pytest.approx(device_times_ms(facts, profile)[1:6])


def test_the_host_is_ahead_by_what_the_device_has_to_do():
    built = FactsBuilder()
    region = built.region()
    big = region.op("aten.add.Tensor", [region.input("x", (10**6,))], (10**6,))
    region.op("aten.add.Tensor", [big], (10**6,))
    region.view(big, (10**6, 1))
    facts = built.build()
    profile = msgspec.structs.replace(ROUND, host_op_s=100e-6)
    first_ms, second_ms, _ = device_times_ms(facts, profile)[:3]
    assert first_ms > 0.1
    found = op_times(facts, profile)
    # The first is issued when it can start; the second while the first runs; a view waits for none.
    assert found.ahead_ms[:3] == pytest.approx((0.0, first_ms - 0.1, inf))
    assert found.op_ms[:3] == pytest.approx((0.1 + first_ms, second_ms, 0.0))
    assert found.op_ms == op_times_ms(facts, profile)


def test_copies_take_memory_from_what_waits_for_it_and_nothing_from_what_computes():
    built = FactsBuilder()
    region = built.region()
    region.op("aten.mm.default", [region.input(name, (8192, 8192)) for name in "ab"], (8192, 8192))
    products = built.build()
    waiting = _chain(20, 10**7)
    assert link_rates(waiting, ROUND).memory_bytes_per_s == pytest.approx(
        reached_rates(ROUND).memory_bytes_per_s, rel=0.02
    )
    assert link_rates(products, ROUND).memory_bytes_per_s > 1e16
    # The host is what this one waits for.
    late = msgspec.structs.replace(ROUND, host_op_s=100e-6)
    assert link_rates(_chain(20, 4), late).memory_bytes_per_s > 1e13


def test_the_host_takes_time_to_enter_a_graph():
    facts = _chain(1, 4)
    profile = msgspec.structs.replace(ROUND, host_start_s=500e-6)
    assert op_times_ms(facts, profile)[0] == pytest.approx(0.5, rel=0.01)


@pytest.mark.slow
def test_a_step_that_was_measured_is_predicted_within_a_tenth():
    from offplan.trace.capture import TraceOptions, trace

    measured = json.loads((ROOT / "benchmarks" / "results" / "h200-replay-slice.json").read_text())
    params = {"layers": "8", "batch": "4", "seq": "4096"}
    assert all(f"-p {name}={value}" in str(measured) for name, value in params.items())
    facts = trace(str(ROOT / "sample_graphs" / "qwen3_14b.py"), params, TraceOptions())
    times = op_times_ms(facts, profile_for("h200"))
    forward_count = sum(len(region.forward.ops) for region in facts.regions)
    forward_ms, backward_ms = sum(times[:forward_count]), sum(times[forward_count:])
    assert forward_ms == pytest.approx(measured["no_plan"]["forward_ms"], rel=0.1)
    assert backward_ms == pytest.approx(measured["no_plan"]["backward_ms"], rel=0.1)


def test_no_op_has_a_negative_time():
    for op_time in op_times_ms(_chain(5, 1024), profile_for("h200")):
        assert op_time >= 0


def test_an_op_can_be_keyed_whatever_its_target():
    facts = _chain(1, 4)
    assert op_key(facts, Op("x", "operator.add")) == "operator.add()"


def test_times_alone_are_scaled_to_what_a_step_takes() -> None:
    facts = FactsBuilder()
    region = facts.region()
    value = region.input("x", (1000, 1000))
    for _ in range(5):
        value = region.op("aten.relu.default", [value], (1000, 1000), "float32")
    region.save(value)
    built = facts.build()
    alone = {op_key(built, op): 100.0 for op in timeline(built)}
    step_ms = sum(op_times_ms(built, ROUND, alone))
    slower = as_in_a_step(built, ROUND, alone, 1.05 * step_ms)
    assert sum(op_times_ms(built, ROUND, slower)) == pytest.approx(1.05 * step_ms, rel=1e-3)
    # Twice as long is not the clock's doing.
    assert as_in_a_step(built, ROUND, alone, 2 * step_ms) == alone
