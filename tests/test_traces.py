"""The trace: what the format demands holds, and times and bytes are the chart's."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from drawn_steps import STORAGE_BYTES, charts, layered, planned
from facts_builder import DRAWN, FactsBuilder, steps
from hypothesis import given
from typer.testing import CliRunner

from offplan.chart import Chart
from offplan.cli import app
from offplan.graph import GraphFacts, save_graph
from offplan.plan import write_plan
from offplan.report.traces import (
    COMPUTE,
    GZIP_TRACE_FILE,
    TO_DEVICE,
    TO_HOST,
    TRACE_FILE,
    WAITS,
    to_trace,
    zipped,
)

Event = dict[str, Any]


def events_of(facts: GraphFacts) -> tuple[Chart, Chart, list[Event]]:
    no_plan, plan = charts(facts)
    document = json.loads(to_trace({"no plan": no_plan, "plan": plan}, {"target": "model.py"}))
    assert document["otherData"] == {"offplan": "trace", "target": "model.py"}
    return no_plan, plan, document["traceEvents"]


def nanoseconds(time_us: float) -> int:
    return round(time_us * 1000)


def ends(event: Event) -> tuple[int, int]:
    begin = nanoseconds(event["ts"])
    return begin, begin + nanoseconds(event["dur"])


def slices(events: list[Event], process: int, thread: int) -> list[Event]:
    return [e for e in events if (e["ph"], e["pid"], e["tid"]) == ("X", process, thread)]


def ops(events: list[Event], process: int) -> list[Event]:
    return [e for e in slices(events, process, COMPUTE) if "op" in e["args"]]


@DRAWN
@given(steps())
def test_events_are_sorted_named_and_nest(facts: GraphFacts) -> None:
    _, _, events = events_of(facts)
    last: dict[int, float] = defaultdict(float)
    open_slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        assert {"ph", "pid", "tid", "ts", "name"} <= set(event)
        assert event["ts"] >= last[event["pid"]]
        last[event["pid"]] = event["ts"]
        if event["ph"] == "X":
            begin, end = ends(event)
            above = open_slices[event["pid"], event["tid"]]
            while above and above[-1][1] <= begin:
                above.pop()
            assert begin <= end
            assert not above or end <= above[-1][1]
            above.append((begin, end))


@DRAWN
@given(steps())
def test_ops_stand_where_the_chart_has_them_one_after_the_other(facts: GraphFacts) -> None:
    no_plan, plan, events = events_of(facts)
    for process, chart in enumerate((no_plan, plan), 1):
        ended = 0
        for event in ops(events, process):
            begin, end = ends(event)
            place = event["args"]["op"]
            assert begin == round(chart.starts_ms[place] * 1e6) >= ended
            assert end - begin == pytest.approx(chart.op_ms[place] * 1e6, abs=1)
            assert event["name"] == chart.ops[place].target
            ended = end
        timed = [time_ms for time_ms in chart.op_ms if time_ms > 1e-6]
        assert len(ops(events, process)) == len(timed)


def test_a_module_holds_the_modules_and_ops_that_are_in_it() -> None:
    _, _, events = events_of(layered())
    found = {e["name"]: ends(e) for e in slices(events, 1, COMPUTE) if not e["args"]}
    inside = [("forward", "layers.3"), ("layers.3", "layers.3.mlp")]
    inside.append(("layers.3.mlp", "layers.3.mlp.up"))
    for outer, inner in inside:
        assert found[outer][0] <= found[inner][0] <= found[inner][1] <= found[outer][1]
    assert "layers" not in found
    assert found["forward"][1] <= found["backward"][0]
    (product,) = [e for e in ops(events, 1) if e["args"].get("module") == "layers.3.mlp.up"]
    assert ends(product) == found["layers.3.mlp.up"]
    assert product["args"]["source"] == "model.py:13"
    assert product["args"]["outputs"] == "float32[8192, 8192]"
    assert product["args"]["bytes"] == STORAGE_BYTES


def test_regions_are_told_apart_and_views_are_left_out() -> None:
    facts = FactsBuilder()
    for _ in range(2):
        region = facts.region()
        x = region.op("aten.relu.default", [region.input("x", (1024, 1024))], (1024, 1024))
        region.save(region.view(x, (1024 * 1024,)))
    _, _, events = events_of(facts.build())
    names = [e["name"] for e in slices(events, 1, COMPUTE) if not e["args"]]
    assert names == [
        "forward of region 0",
        "forward of region 1",
        "backward of region 1",
        "backward of region 0",
    ]
    assert not [e for e in ops(events, 1) if "view" in e["name"]]


def test_copies_are_on_their_lanes_and_arrows_join_them() -> None:
    _, plan, events = events_of(layered())
    for thread, to in ((TO_HOST, "host"), (TO_DEVICE, "device")):
        copies = [copy for copy in plan.played.copies if copy.to == to]
        found = slices(events, 2, thread)
        assert len(found) == len(copies) == 6
        assert [ends(event)[0] for event in found] == [round(c.begin_ms * 1e6) for c in copies]
        assert {event["args"]["bytes"] for event in found} == {STORAGE_BYTES}
        assert slices(events, 1, thread) == []
    arrows: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in ("s", "f"):
            arrows[event["id"]][event["ph"]] = event
    assert len(arrows) == 6
    for number, arrow in arrows.items():
        start, finish = arrow["s"], arrow["f"]
        assert (start["tid"], finish["tid"], finish["bp"]) == (TO_HOST, TO_DEVICE, "e")
        assert (start["cat"], start["name"]) == (finish["cat"], finish["name"])
        assert start["ts"] < finish["ts"]
        storage = plan.transfers[number].storage
        for end in (start, finish):
            around = [
                event
                for event in slices(events, 2, end["tid"])
                if ends(event)[0] <= nanoseconds(end["ts"]) < ends(event)[1]
            ]
            assert [event["args"]["storage"] for event in around] == [storage]


def test_waits_end_when_the_copies_have_landed_and_before_the_op_that_waits() -> None:
    _, plan, events = events_of(layered())
    found = slices(events, 2, WAITS)
    assert len(found) == len(plan.played.stalls) > 0
    assert sum(event["dur"] for event in found) / 1000 == pytest.approx(
        plan.played.time.stalled_ms, abs=1e-3
    )
    landed = {round(copy.end_ms * 1e6) for copy in plan.played.copies}
    for event in found:
        assert event["args"]["op"] > 0
        assert ends(event)[1] in landed
        assert ends(event)[1] <= round(plan.starts_ms[event["args"]["op"]] * 1e6)


@DRAWN
@given(steps())
def test_counters_reach_the_highest_moment_and_parts_add_up(facts: GraphFacts) -> None:
    no_plan, plan, events = events_of(facts)
    for process, chart in enumerate((no_plan, plan), 1):
        counters = [e for e in events if (e["ph"], e["pid"]) == ("C", process)]
        total = {e["ts"]: e["args"]["in all"] for e in counters if e["name"] == "bytes held"}
        parts = {e["ts"]: e["args"] for e in counters if e["name"] == "bytes of"}
        assert max(total.values()) == max(chart.totals)
        assert {ts: sum(args.values()) for ts, args in parts.items()} == total
        # A series that is missing once would look as if it were 0 before.
        assert len({tuple(args) for args in parts.values()}) == 1


def test_processes_and_threads_have_names() -> None:
    _, _, events = events_of(layered(2))
    named = {
        (e["pid"], e["tid"], e["name"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and "name" in e["args"]
    }
    assert named[1, 0, "process_name"] == "no plan"
    assert named[2, 0, "process_name"] == "plan"
    assert named[2, TO_HOST, "thread_name"] == "copies to host"
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used <= {(process, thread) for process, thread, _ in named}


def test_a_compressed_trace_is_the_same_trace_and_gives_the_same_bytes() -> None:
    no_plan, _ = charts(layered(2))
    trace = to_trace({"no plan": no_plan}, {})
    assert trace == to_trace({"no plan": no_plan}, {})
    assert trace.startswith(TRACE_FILE.first_bytes)
    assert zipped(trace) == zipped(trace)
    assert zipped(trace).startswith(GZIP_TRACE_FILE.first_bytes)
    assert gzip.decompress(zipped(trace)) == trace


def test_a_plan_is_exported_as_a_trace_and_by_its_name_compressed(tmp_path: Path) -> None:
    facts = layered(2)
    (tmp_path / "m.graph.json").write_bytes(save_graph(facts))
    write_plan(tmp_path / "m.plan.yaml", planned(facts))
    arguments = ["export", str(tmp_path / "m.plan.yaml"), "--to", "perfetto"]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0, printed.stderr
    about = json.loads(printed.stdout)["otherData"]
    assert about["target"] == "model.py -p layers=2"
    output = tmp_path / "trace.json.gz"
    for _ in range(2):
        result = CliRunner().invoke(app, [*arguments, "-o", str(output)])
        assert result.exit_code == 0, result.stderr
    assert gzip.decompress(output.read_bytes()).decode() == printed.stdout
