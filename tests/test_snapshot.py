"""Snapshots: PyTorch's visualizer reads the predicted one; measured ones are read without running
anything, and joined to what was predicted."""

from __future__ import annotations

import collections
import copy
import json
import os
import pickle
import pickletools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from drawn_steps import STORAGE_BYTES, charts, layered, planned
from facts_builder import DRAWN, FactsBuilder, steps
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from offplan.chart import Chart
from offplan.cli import app
from offplan.dumped import Dumped, load_dumped
from offplan.errors import FileFormatError, UsageError
from offplan.graph import GraphFacts, ModelTensor, save_graph
from offplan.plainpickle import PickleError, read_pickle
from offplan.plan import write_plan
from offplan.report.blocks import JoinReport, join_json, join_report, join_text
from offplan.report.snapshot import SNAPSHOT_FILE, to_snapshot

Snapshot = dict[str, Any]

# What torch/utils/viz/MemoryViz.js knows of pickles.
VISUALIZER_OPCODES = set(
    """
    APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST FRAME LONG1 LONG_BINGET MARK MEMOIZE
    PROTO SETITEMS SHORT_BINUNICODE STOP TUPLE2 APPEND NEWFALSE BINPUT BINUNICODE EMPTY_TUPLE
    NEWTRUE NONE BINFLOAT TUPLE TUPLE1 TUPLE3 LONG_BINPUT LIST DICT SETITEM
    """.split()  # noqa: SIM905
)


def snapshot_of(chart: Chart, expandable: bool = False) -> Snapshot:
    found: Snapshot = pickle.loads(to_snapshot(chart, {"target": "model.py"}, expandable))
    return found


def highest(events: list[Snapshot]) -> int:
    most = now = 0
    for event in events:
        now += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        most = max(most, now)
    return most


def highest_predicted(chart: Chart) -> int:
    """What is left of larger blocks adds to the chart; where it is reused, it can take from it."""
    return max(chart.prediction.peak_bytes, *chart.totals)


# --- the predicted snapshot -----------------------------------------------------------------------


@DRAWN
@given(steps(), st.booleans())
def test_the_events_reach_the_predicted_peak(facts: GraphFacts, expandable: bool) -> None:
    for chart in charts(facts):
        (events,) = snapshot_of(chart, expandable)["device_traces"]
        assert highest(events) == highest_predicted(chart)


def test_the_peak_of_a_layered_model_is_the_predicted_one_to_the_byte() -> None:
    for chart in charts(layered()):
        (events,) = snapshot_of(chart)["device_traces"]
        assert highest(events) == chart.prediction.peak_bytes


@DRAWN
@given(steps(), st.booleans())
def test_no_two_blocks_overlap_and_what_is_left_is_in_the_segments(
    facts: GraphFacts, expandable: bool
) -> None:
    snapshot = snapshot_of(charts(facts)[1], expandable)
    live: dict[int, int] = {}
    requested = None
    for event in snapshot["device_traces"][0]:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert address not in live
            assert all(address + size <= at or at + other <= address for at, other in live.items())
            live[address] = size
        elif event["action"] == "free_requested":
            requested = address
            assert live[address] == size
        else:
            assert requested == address
            del live[address]
    left = {}
    for segment in snapshot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            if block["state"] == "active_allocated":
                left[at] = block["requested_size"]
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
    assert left == live


def test_the_viewer_has_every_opcode_of_the_file_and_every_file_starts_alike() -> None:
    first, second = (to_snapshot(chart, {}) for chart in charts(layered(2)))
    assert first != second
    assert first.startswith(SNAPSHOT_FILE.first_bytes)
    assert second.startswith(SNAPSHOT_FILE.first_bytes)
    assert {opcode.name for opcode, _, _ in pickletools.genops(second)} <= VISUALIZER_OPCODES


def test_frames_say_what_a_block_is_and_what_becomes_of_it() -> None:
    _, plan = charts(layered())
    (events,) = snapshot_of(plan)["device_traces"]
    storage = plan.transfers[3].storage
    mine = [e for e in events if e["frames"][0]["line"] == storage and e["action"] == "alloc"]
    made, reloaded = mine
    assert [made["category"], reloaded["category"]] == ["saved activations", "reloaded"]
    assert "offloaded after op" in made["frames"][0]["name"]
    assert made["frames"][1]["filename"] == "model.py"
    assert made["frames"][1]["line"] in range(10, 16)
    assert made["frames"][1]["name"].startswith("aten.mm.default (")
    assert made["frames"][2]["name"].endswith(".mlp.up")
    # The viewer stops at a file whose categories lack this one.
    assert "unknown" in {event["category"] for event in events}


def test_parameters_are_blocks_of_their_own_by_name() -> None:
    facts = FactsBuilder()
    region = facts.region()
    weight = region.input("a.weight", (1024, 1024), kind="parameter")
    x = region.input("x", (256, 1024))
    region.save(region.op("aten.mm.default", [x, weight], (256, 1024)))
    built = facts.build()
    tensor = ModelTensor("parameter", ("a.weight",), "float32", (1024, 1024), 4 * 1024**2, True)
    chart, _ = charts(GraphFacts(**{**as_fields(built), "model": (tensor,)}))
    (events,) = snapshot_of(chart)["device_traces"]
    named = {e["frames"][0]["name"]: e["size"] for e in events if e["time_us"] == 0}
    assert named["a.weight"] == 4 * 1024**2
    assert named["x"] == 1024**2


def as_fields(facts: GraphFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__struct_fields__}


def test_pytorchs_own_tool_reads_it() -> None:
    pytest.importorskip("torch")
    from torch.cuda import _memory_viz

    for expandable in (False, True):
        snapshot = snapshot_of(charts(layered())[1], expandable)
        # It checks that the blocks of each segment add up.
        text = _memory_viz.segsum(copy.deepcopy(snapshot))
        assert f"segments: {len(snapshot['segments'])}" in text
        listed = _memory_viz.trace(copy.deepcopy(snapshot))
        assert listed.startswith("Device 0")
        assert f"{len(snapshot['device_traces'][0])} entries" in listed
        assert "Active Memory Timeline" in _memory_viz.trace_plot(copy.deepcopy(snapshot))
        flames = _memory_viz.memory(snapshot, format_flamegraph=lambda lines: lines)
        assert "active_allocated" in flames


# --- plain pickles --------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    assert read_pickle(pickle.dumps([value, value], protocol=protocol)) == [value, value]


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/this-would-be-made",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("value", [RunsCode(), collections.OrderedDict(a=1), Path("x"), 1j])
def test_what_can_run_code_is_refused_by_name(value: object, protocol: int) -> None:
    with pytest.raises(PickleError, match=r"opcode (STACK_)?GLOBAL, which can run code"):
        read_pickle(pickle.dumps({"segments": [value]}, protocol=protocol))
    assert not Path("/tmp/this-would-be-made").exists()


def test_every_opcode_gives_a_value_or_is_refused() -> None:
    plain = (list, dict, tuple, str, bytes, int, float, bool, type(None))
    values = 0
    for opcode in pickletools.opcodes:
        for before in (b"", b"]", b"(", b"]]", b"}(K\0K\0"):
            content = before + opcode.code.encode("latin-1") + b"1\n1\n" + bytes(12) + b"."
            for code in (content, before + opcode.code.encode("latin-1") + b"."):
                try:
                    assert isinstance(read_pickle(code), plain)
                    values += 1
                except PickleError:
                    continue
    assert values > 10


def test_damaged_files_are_errors_and_nothing_else() -> None:
    chosen = random.Random(0)
    whole = pickle.dumps({"a": [1, 2.5, {"b": ("c", None)}], "d": (1, 2, 3, 4)})
    refused = 0
    for _ in range(3000):
        content = bytearray(whole)
        for _ in range(chosen.randint(1, 4)):
            content[chosen.randrange(len(content))] = chosen.randrange(256)
        try:
            read_pickle(bytes(content[: chosen.randint(1, len(content))]))
        except PickleError:
            refused += 1
    assert 0 < refused < 3000


# --- measured snapshots ---------------------------------------------------------------------------


def dumped(tmp_path: Path, snapshot: object) -> Dumped:
    path = tmp_path / "measured.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    return load_dumped(path)


def test_a_snapshot_is_read_from_json_as_from_a_pickle(tmp_path: Path) -> None:
    snapshot = snapshot_of(charts(layered(2))[1])
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(snapshot))
    found = load_dumped(path)
    assert found == dumped(tmp_path, snapshot)
    assert found.event_count == len(snapshot["device_traces"][0])
    assert found.peak_bytes == highest(snapshot["device_traces"][0])


def event(action: str, address: int, size: int, **more: object) -> Snapshot:
    return {"action": action, "addr": address, "size": size, "stream": 0, **more}


def test_what_was_there_before_the_first_event_comes_first(tmp_path: Path) -> None:
    frames = [
        {"filename": "/x/torch/nn/modules/linear.py", "line": 1, "name": "forward"},
        {"filename": "model.py", "line": 7, "name": "forward"},
    ]
    blocks = [
        {"size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": frames},
        {"size": 512, "requested_size": 0, "state": "inactive"},
        {"size": 2048, "requested_size": 2048, "state": "active_allocated"},
    ]
    events = [
        {"action": "oom", "size": 5, "device_free": 1},
        event("free_requested", 64, 512),
        event("free_completed", 64, 512),
        event("alloc", 4096 + 1536, 2048, frames=frames),
        event("alloc", 64, 300),
        event("free_requested", 64, 300),
    ]
    segment = {"address": 4096, "device": 1, "blocks": blocks, "total_size": 3584}
    found = dumped(tmp_path, {"segments": [segment], "device_traces": [[], events]})
    assert found.device == 1
    rows = [(a.size_bytes, a.address, a.event, a.freed, a.source) for a in found.allocated]
    assert rows == [
        (512, 64, None, 1, ""),
        (1000, 4096, None, None, "model.py:7"),
        (2048, 5632, 3, None, "model.py:7"),
        (300, 64, 4, 5, ""),
    ]
    assert found.peak_bytes == 1000 + 2048 + 300


def test_segments_alone_are_a_snapshot_too(tmp_path: Path) -> None:
    segment = {"address": 0, "blocks": [{"size": 512, "state": "active_allocated"}]}
    found = dumped(tmp_path, [segment])
    assert [each.size_bytes for each in found.allocated] == [512]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "damaged"),
        (b"no pickle", "not a memory snapshot"),
        (pickle.dumps("text"), "no segments"),
        (pickle.dumps({"segments": 3}), r"\$\.segments"),
        (pickle.dumps({"segments": [{"address": "x", "blocks": []}]}), r"segments\[0\]\.address"),
        (pickle.dumps({"segments": [RunsCode()]}), "can run code"),
        (b"[", "truncated"),
        (b"{}", "segments"),
    ],
)
def test_what_is_no_snapshot_is_an_error_with_its_place(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=says) as raised:
        load_dumped(path)
    assert "x.pickle" in str(raised.value)
    assert "_dump_snapshot" in raised.value.fix


def test_a_small_file_that_unfolds_without_end_is_refused(tmp_path: Path) -> None:
    blocks = [{"size": 512, "state": "inactive"}] * 5000
    segment = {"address": 0, "blocks": blocks}
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment] * 5000}))
    assert path.stat().st_size < 50_000
    with pytest.raises(FileFormatError, match="more than 20,000,000"):
        load_dumped(path)


def test_another_device_is_chosen_by_number(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    traces = [[event("alloc", 0, 512)], [event("alloc", 0, 1024), event("alloc", 9, 1)]]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": traces}))
    assert load_dumped(path).device == 1
    assert load_dumped(path, 0).peak_bytes == 512
    with pytest.raises(UsageError, match="no device 2"):
        load_dumped(path, 2)


# --- the join -------------------------------------------------------------------------------------


def joined(tmp_path: Path, chart: Chart, snapshot: Snapshot) -> JoinReport:
    return join_report(chart, dumped(tmp_path, snapshot))


def saved_addresses(chart: Chart, snapshot: Snapshot) -> dict[int, int]:
    """The address of each storage that moves, off the frames of our own snapshot."""
    moved = {transfer.storage for transfer in chart.transfers}
    found: dict[int, int] = {}
    for each in snapshot["device_traces"][0]:
        frame = each["frames"][0]
        kind = (frame["filename"], each["category"], each["action"])
        if kind == ("<storage>", "saved activations", "alloc") and frame["line"] in moved:
            found.setdefault(frame["line"], each["addr"])
    return found


def anonymous(snapshot: Snapshot) -> Snapshot:
    """As a run writes it: without what our frames say."""
    measured = copy.deepcopy(snapshot)
    for each in measured["device_traces"][0]:
        each["frames"] = []
    for segment in measured["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    return measured


def test_a_run_as_predicted_is_joined_whole(tmp_path: Path) -> None:
    for chart in charts(layered()):
        snapshot = snapshot_of(chart)
        report = joined(tmp_path, chart, anonymous(snapshot))
        assert report.not_joined == ()
        assert report.joined_bytes == report.predicted_bytes
        assert report.measured_peak_bytes == report.predicted_peak_bytes
        saved = {row.storage: row.address for row in report.joined if row.part == "saved"}
        for storage, address in saved_addresses(chart, snapshot).items():
            assert saved[storage] == address


def several_steps(snapshot: Snapshot, count: int) -> Snapshot:
    """The step ``count`` times: what is left of one is freed before the next."""
    measured = copy.deepcopy(snapshot)
    (events,) = measured["device_traces"]
    start = next(place for place, each in enumerate(events) if each["time_us"] > 0)
    # The first op stands at 0; parameters and inputs come before the first storage.
    start = min(
        start,
        next(
            place
            for place, each in enumerate(events)
            if each["frames"][0]["filename"] == "<storage>"
        ),
    )
    step = events[start:]
    live = Counter(e["addr"] for e in step if e["action"] == "alloc")
    live.subtract(e["addr"] for e in step if e["action"] == "free_completed")
    last = {e["addr"]: e for e in step if e["action"] == "alloc"}
    freed = [
        {**last[address], "action": action}
        for address, number in live.items()
        if number
        for action in ("free_requested", "free_completed")
    ]
    measured["device_traces"] = [events[:start] + [*step, *freed] * (count - 1) + step]
    return measured


def test_of_several_steps_the_last_is_joined_among_what_libraries_take(tmp_path: Path) -> None:
    _, plan = charts(layered())
    measured = several_steps(snapshot_of(plan), 3)
    events: list[Snapshot] = []
    for number, each in enumerate(measured["device_traces"][0]):
        events.append(each)
        if number % 3 == 0:
            # A workspace that nothing predicts, and a size that no storage has.
            address = 0x1000_0000 + 4096 * number
            events += [
                event(action, address, 3584, frames=[], time_us=0)
                for action in ("alloc", "free_requested", "free_completed")
            ]
    measured["device_traces"] = [events]
    report = joined(tmp_path, plan, anonymous(measured))
    saved = [row for row in report.joined if row.part in ("saved", "reloaded")]
    assert len(saved) == 12
    third = 2 * len(events) // 3
    assert all(row.allocated is not None and row.allocated >= third - 100 for row in saved)
    assert sum(row.size_bytes for row in saved) == 12 * STORAGE_BYTES
    assert report.other_count > 0
    assert report.other_bytes % 512 == 0


def test_what_the_run_did_not_allocate_is_named(tmp_path: Path) -> None:
    no_plan, _ = charts(layered())
    snapshot = snapshot_of(no_plan)
    storages = [t.storage for t in planned(layered()).transfers]
    measured = copy.deepcopy(snapshot)
    measured["device_traces"] = [
        [e for e in measured["device_traces"][0] if e["frames"][0]["line"] != storages[2]]
    ]
    report = joined(tmp_path, no_plan, anonymous(measured))
    missing = sum(row.size_bytes for row in report.not_joined)
    assert missing == STORAGE_BYTES
    assert report.predicted_bytes - report.joined_bytes == STORAGE_BYTES


def test_without_events_blocks_are_joined_by_size(tmp_path: Path) -> None:
    no_plan, _ = charts(layered())
    blocks = [
        {"size": STORAGE_BYTES, "requested_size": STORAGE_BYTES, "state": "active_allocated"}
    ] * 3
    segment = {"address": 1 << 30, "blocks": blocks}
    report = joined(tmp_path, no_plan, {"segments": [segment]})
    assert len(report.joined) == 3
    assert {row.size_bytes for row in report.joined} == {STORAGE_BYTES}
    assert report.event_count == 0


def test_another_models_snapshot_joins_little(tmp_path: Path) -> None:
    _, plan = charts(layered())
    other = FactsBuilder()
    region = other.region()
    x = region.input("x", (512, 512))
    region.save(region.op("aten.relu.default", [x], (512, 512)))
    report = joined(tmp_path, plan, anonymous(snapshot_of(charts(other.build())[0])))
    assert report.joined_bytes < 0.1 * report.predicted_bytes


def test_the_join_is_reported_with_the_largest_first(tmp_path: Path) -> None:
    _, plan = charts(layered())
    report = joined(tmp_path, plan, anonymous(snapshot_of(plan)))
    text = join_text(report, 80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "(100.0%)" in text
    assert "not joined  0 predicted allocations, 0 B" in text
    assert "layers.0.mlp.up" in text
    document = json.loads(join_json(report))
    assert document["offplan_join"] == 1
    assert len(document["joined"]) == len(report.joined)
    assert sum(row["size_bytes"] for row in document["joined"]) == report.joined_bytes


# --- the command ----------------------------------------------------------------------------------


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    facts = layered()
    (tmp_path / "m.graph.json").write_bytes(save_graph(facts))
    write_plan(tmp_path / "m.plan.yaml", planned(facts))
    return tmp_path / "m.plan.yaml"


def test_a_snapshot_is_exported_and_joined_by_the_command(plan_file: Path, tmp_path: Path) -> None:
    snapshot, table = tmp_path / "predicted.pickle", tmp_path / "joined.json"
    for _ in range(2):
        result = run(plan_file, "--to", "memory-snapshot", "-o", snapshot)
        assert result.exit_code == 0, result.stderr
    result = run(plan_file, "--to", "blocks", "--snapshot", snapshot)
    assert result.exit_code == 0, result.stderr
    assert "(100.0%)" in result.stdout
    for output in (table, tmp_path / "joined.txt"):
        for _ in range(2):
            result = run(plan_file, "--to", "blocks", "--snapshot", snapshot, "-o", output)
            assert result.exit_code == 0, result.stderr
    assert json.loads(table.read_text())["not_joined"] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "blocks"], "--snapshot FILE"),
        (["--to", "memory-snapshot"], "-o FILE.pickle"),
        (["--to", "svg", "--snapshot", "x"], "--to blocks --snapshot x"),
        (["--to", "must-cpu-offload", "--profile", "h200"], "--profile is for times"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    plan_file: Path, arguments: list[str], says: str
) -> None:
    result = run(plan_file, *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
