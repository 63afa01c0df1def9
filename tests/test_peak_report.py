"""What people read of a predicted peak: the answer to a budget, and the curve of all budgets."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from facts_builder import DRAWN, FactsBuilder, MiB, steps
from hypothesis import given, settings

from offplan.budget import (
    Aim,
    CurvePoint,
    Elsewhere,
    Outlooks,
    Predicted,
    PredictedTime,
    parse_budget,
)
from offplan.costs import DeviceProfile, profile_for
from offplan.graph import GraphFacts
from offplan.memory import PARTS, Conditions, Part, Prediction
from offplan.plan import Draft, make_plan
from offplan.report import analyze_report, render_analyze
from offplan.report.document import to_markdown, to_text
from offplan.report.peak import Asked, Moved, curve_blocks, elsewhere_blocks, predicted_blocks

replace = msgspec.structs.replace
GB = 1000**3


def prediction(op: int, target: str, reserved_bytes: int, ended_bytes: int, **parts: int):
    every: dict[Part, int] = {part: parts.get(part, 0) for part in PARTS}
    return Prediction(
        peak_bytes=sum(parts.values()),
        reserved_bytes=reserved_bytes,
        forward_end_bytes=ended_bytes,
        op=op,
        op_name=f"op_{op}",
        op_target=target,
        op_module="",
        op_source="",
        parts=every,
        largest=(),
    )


NO_PLAN = prediction(
    *(1204, "aten.mm.default", 49_500_000_000, 40_000_000_000),
    parameters=6_600_000_000,
    inputs=131_072,
    gradients=6_600_000_000,
    saved=32_700_000_000,
    temporaries=1_966_313_928,
    workspace=33_554_432,
    rounding=568,
)
PLAN = prediction(
    *(211, "aten._scaled_dot_product_cudnn_attention.default", 29_400_000_000, 24_000_000_000),
    parameters=6_600_000_000,
    inputs=131_072,
    saved=12_000_000_000,
    temporaries=6_000_000_000,
    workspace=33_554_432,
    in_flight=2_000_000_000,
    reloaded=1_500_000_000,
    rounding=568,
)
TIME = PredictedTime(
    no_plan_us=676_000, step_us=741_000, forward_us=200_000, stalled_us=62_500, least_us=735_000
)
PREDICTED = Predicted(
    no_plan=NO_PLAN, plan=PLAN, floor_bytes=21_600_000_000, profile="h200", time=TIME
)
MOVED = Moved(storages=23, transfer_bytes=10_100_000_000, never_reloaded=0)
NOTHING = Moved(0, 0, 0)


def text_of(predicted: Predicted, asked: Asked, moved: Moved) -> str:
    return to_text(predicted_blocks(predicted, asked, moved), 80)


def in_one_line(text: str) -> str:
    return " ".join(text.split())


# --- a plan ---------------------------------------------------------------------------------------

BUDGET = """\
Budget 60%: 28.74 GB
  predicted        no plan      plan      delta
  peak allocated  47.90 GB  28.13 GB  -19.77 GB
  peak reserved   49.50 GB  29.40 GB  -20.10 GB
  end of forward  40.00 GB  24.00 GB  -16.00 GB
  step            676.0 ms  741.0 ms   +65.0 ms
  moved each way            10.10 GB
  plan     offloads 23 storages, which costs 9.6% of the step; 606.31 MB under
           the budget
  step     at most 0.8% over the best possible for this peak (735.0 ms); 62.5 ms
           of it are spent waiting for copies
  peak     reached in aten._scaled_dot_product_cudnn_attention.default, op 211
  floor    21.60 GB is the least peak (--budget floor)
  profile  h200

What the predicted peak is made of
                 no plan       plan
  parameters     6.60 GB    6.60 GB
  inputs       131.07 kB  131.07 kB
  gradients      6.60 GB        0 B
  saved         32.70 GB   12.00 GB
  temporaries    1.97 GB    6.00 GB
  workspace     33.55 MB   33.55 MB
  in flight          0 B    2.00 GB
  reloaded           0 B    1.50 GB
  rounding         568 B      568 B
  peak          47.90 GB   28.13 GB
"""


def test_a_budget_that_is_met_reads_so_at_80_columns() -> None:
    assert text_of(PREDICTED, Asked(28_740_000_000, "60%"), MOVED) == BUDGET


NO_BUDGET = """\
No budget: nothing moves
  predicted        no plan
  peak allocated  47.90 GB
  peak reserved   49.50 GB
  end of forward  40.00 GB
  step            676.0 ms
  peak     reached in aten.mm.default, op 1,204
  floor    21.60 GB is the least peak (--budget floor)
  profile  h200

What the predicted peak is made of
                 no plan
  parameters     6.60 GB
  inputs       131.07 kB
  gradients      6.60 GB
  saved         32.70 GB
  temporaries    1.97 GB
  workspace     33.55 MB
  rounding         568 B
  peak          47.90 GB
"""
UNMOVED = replace(
    PREDICTED,
    plan=NO_PLAN,
    time=replace(TIME, step_us=676_000, stalled_us=0, least_us=676_000),
)


def test_without_a_budget_the_plan_is_no_plan_and_stands_there_once() -> None:
    assert text_of(UNMOVED, Asked(None, ""), NOTHING) == NO_BUDGET


def test_a_budget_that_fits_already_says_so_and_moves_nothing() -> None:
    text = text_of(UNMOVED, Asked(50 * GB, "50GB"), NOTHING)
    assert text.startswith("Budget 50.00 GB\n")
    assert "  plan     it fits already: nothing moves\n" in text
    assert "delta" not in text


def test_auto_states_its_margin_and_what_that_is_for() -> None:
    predicted = replace(UNMOVED, margin_bytes=GB)
    text = in_one_line(text_of(predicted, Asked(149_109_880_320, "auto"), NOTHING))
    assert text.startswith("Budget auto: 149.11 GB ")
    assert (
        "margin auto leaves 1.00 GB of the GPU to the CUDA context and its libraries, and keeps "
        "what the allocator reserves within the rest"
    ) in text


@pytest.mark.parametrize(
    ("asked", "title"),
    [
        (Asked(None, ""), "No budget: nothing moves"),
        (Asked(0, ""), "Budget 0: everything movable moves"),
        (Asked(21_600_000_000, "floor"), "Budget floor: the least peak"),
        (Asked(28_740_000_000, "60%"), "Budget 60%: 28.74 GB"),
        (Asked(30 * 1024**3, "30GiB"), "Budget 30GiB: 32.21 GB"),
        (Asked(30 * GB, "30GB"), "Budget 30.00 GB"),
        (Asked(30 * GB, "30 gb"), "Budget 30.00 GB"),
        (Asked(30 * GB, "30000000000"), "Budget 30.00 GB"),
    ],
)
def test_a_budget_is_named_as_it_was_asked_for_with_its_size(asked: Asked, title: str) -> None:
    assert text_of(PREDICTED, asked, MOVED).splitlines()[0] == title


def test_the_floor_is_not_said_to_be_under_itself() -> None:
    text = text_of(PREDICTED, Asked(PLAN.peak_bytes, "floor"), MOVED)
    assert "  plan     offloads 23 storages, which costs 9.6% of the step\n" in text
    assert "\n  floor " not in text


def test_moving_everything_says_what_moves_only_as_much_as_is_needed() -> None:
    text = in_one_line(text_of(PREDICTED, Asked(0, ""), MOVED))
    assert "of the step; --budget floor moves only what lowers the peak" in text
    assert "plan nothing can move" in in_one_line(text_of(UNMOVED, Asked(0, ""), NOTHING))


def test_where_no_plan_lowers_the_peak_that_is_said() -> None:
    at_the_floor = replace(UNMOVED, floor_bytes=NO_PLAN.peak_bytes)
    text = text_of(at_the_floor, Asked(None, ""), NOTHING)
    assert "  floor    no plan has a lower peak\n" in text
    text = text_of(at_the_floor, Asked(NO_PLAN.peak_bytes, "floor"), NOTHING)
    assert "  plan     nothing that can move lowers the peak\n" in text


def test_a_plan_that_hides_every_copy_costs_nothing_and_is_the_best_possible() -> None:
    hidden = replace(
        PREDICTED, time=replace(TIME, step_us=676_010, stalled_us=10, least_us=676_000)
    )
    text = text_of(hidden, Asked(30 * GB, "30GB"), MOVED)
    assert "  plan     offloads 23 storages, at no cost; 1.87 GB under the budget\n" in text
    assert "  step     the best possible for this peak\n" in text


def test_a_step_that_takes_no_time_costs_nothing() -> None:
    none = PredictedTime(no_plan_us=0, step_us=0, forward_us=0, stalled_us=0, least_us=0)
    text = text_of(replace(PREDICTED, time=none), Asked(30 * GB, "30GB"), MOVED)
    assert "  plan     offloads 23 storages, at no cost; 1.87 GB under the budget\n" in text
    assert "  step     the best possible for this peak\n" in text


def test_what_never_comes_back_is_counted() -> None:
    text = text_of(PREDICTED, Asked(30 * GB, "30GB"), MOVED._replace(never_reloaded=2))
    assert "2 of them never come back: the backward reads nothing on them" in in_one_line(text)


def test_one_storage_is_one_storage() -> None:
    text = text_of(PREDICTED, Asked(30 * GB, "30GB"), MOVED._replace(storages=1))
    assert "offloads 1 storage, which" in text


def test_host_memory_that_is_limited_is_stated() -> None:
    text = text_of(replace(PREDICTED, host_budget=64 * GB), Asked(30 * GB, "30GB"), MOVED)
    assert "  host     at most 64.00 GB of host memory\n" in text


def test_without_a_profile_no_time_is_shown() -> None:
    unknown = replace(PREDICTED, time=None, profile="")
    text = text_of(unknown, Asked(30 * GB, "30GB"), MOVED)
    assert " ms" not in text
    assert "profile" not in text
    assert "  plan   offloads 23 storages; 1.87 GB under the budget\n" in text


def test_op_times_that_were_measured_are_said_to_be() -> None:
    measured = replace(PREDICTED, op_times="measured")
    text = text_of(measured, Asked(30 * GB, "30GB"), MOVED)
    assert "  profile  h200, with measured op times\n" in text


def test_on_the_cpu_nothing_is_reserved() -> None:
    plan = replace(PLAN, reserved_bytes=PLAN.peak_bytes)
    no_plan = replace(NO_PLAN, reserved_bytes=NO_PLAN.peak_bytes)
    on_cpu = replace(PREDICTED, no_plan=no_plan, plan=plan)
    assert "peak reserved" not in text_of(on_cpu, Asked(30 * GB, "30GB"), MOVED)


def test_markdown_has_the_same_numbers() -> None:
    text = to_markdown(predicted_blocks(PREDICTED, Asked(28_740_000_000, "60%"), MOVED))
    assert "### Budget 60%: 28.74 GB" in text
    assert "| peak allocated | 47.90 GB | 28.13 GB | -19.77 GB |" in text


# --- the curve ------------------------------------------------------------------------------------


def point(name: str, peak_gb: float, moved_gb: float, step_ms: float | None) -> CurvePoint:
    peak_bytes, moved_bytes = int(peak_gb * GB), int(moved_gb * GB)
    return CurvePoint(
        name, peak_bytes, peak_bytes, moved_bytes, int(moved_gb * 2), step_ms, step_ms
    )


POINTS = (
    point("no plan", 47.9, 0, 676.0),
    point("", 43.01, 5.4, 676.2),
    point("", 34.1, 15.3, 741.0),
    point("floor", 21.6, 26.3, 1014.0),
)
CURVE = """\
What each budget would cost
      peak   budget     moved        step   cost  step time
  47.90 GB  no plan       0 B    676.0 ms   0.0%  █████████████
  43.01 GB      90%   5.40 GB    676.2 ms   0.0%  █████████████
  34.10 GB      72%  15.30 GB    741.0 ms   9.6%  ███████████████
  21.60 GB    floor  26.30 GB  1,014.0 ms  50.0%  ████████████████████
"""


def test_the_curve_reads_so_at_80_columns() -> None:
    assert to_text(curve_blocks(POINTS), 80) == CURVE


def test_the_share_that_a_row_names_is_a_budget_that_it_keeps() -> None:
    for peak_gb, share in ((47.89, "100%"), (23.95, "50%"), (23.96, "51%")):
        text = to_text(curve_blocks((POINTS[0], point("", peak_gb, 1, 680.0))), 80)
        row = text.splitlines()[-1].split()
        assert row[2] == share
        assert int(peak_gb * GB) <= int(share[:-1]) / 100 * POINTS[0].peak_bytes


def test_without_a_profile_the_curve_has_bytes_only() -> None:
    points = [replace(each, step_ms=None, least_ms=None) for each in POINTS]
    text = to_text(curve_blocks(points), 80)
    assert text.splitlines()[1].split() == ["peak", "budget", "moved"]
    assert "█" not in text


def test_of_a_step_that_takes_no_time_no_cost_is_said() -> None:
    points = [replace(each, step_ms=0.0, least_ms=0.0) for each in POINTS]
    rows = to_text(curve_blocks(points), 80).splitlines()
    assert rows[1].split() == ["peak", "budget", "moved", "step", "cost", "step", "time"]
    assert rows[-1].split() == ["21.60", "GB", "floor", "26.30", "GB", "0.0", "ms"]
    _, table = elsewhere_blocks([Elsewhere("slow", 0.0, 0.0, 0, 0)])
    assert table.rows == (("slow", "0.0 ms", "0.0 ms", "", "0 B", "0 B"),)


def test_a_curve_of_one_point_is_none() -> None:
    assert list(curve_blocks(POINTS[:1])) == []
    assert list(curve_blocks(())) == []


@pytest.mark.parametrize("profile", ["h200", "t4"])
@settings(DRAWN, max_examples=40)
@given(facts=steps())
def test_along_the_curve_less_peak_is_never_faster_and_its_ends_are_no_plan_and_floor(
    facts: GraphFacts, profile: str
) -> None:
    outlooks = outlooks_of(facts, profile_for(profile))
    curve = outlooks.curve(9)
    assert len(curve) in (1, 9)
    assert curve[0].name == "no plan"
    assert (curve[0].peak_bytes, curve[0].moved_bytes) == (outlooks.no_plan.peak_bytes, 0)
    if len(curve) == 1:
        return
    assert curve[-1].name == "floor"
    assert curve[-1].peak_bytes == outlooks.floor()[1].peak_bytes
    assert [each.name for each in curve[1:-1]] == [""] * 7
    limits = [each.limit_bytes for each in curve]
    assert limits == sorted(limits, reverse=True)
    times = [each.step_ms for each in curve]
    assert times == sorted(times)
    for each in curve:
        assert each.least_ms <= each.step_ms + 0.001


def outlooks_of(facts: GraphFacts, profile: DeviceProfile | None = None) -> Outlooks:
    return Outlooks(facts, Draft(facts, "whole-storage", 0).moves, Aim(profile=profile))


# --- in the report --------------------------------------------------------------------------------


def chain(length: int = 6) -> GraphFacts:
    facts = FactsBuilder()
    region = facts.region()
    value = region.input("x", (2 * MiB,))
    for _ in range(length):
        value = region.op("aten.relu.default", [value], (2 * MiB,))
        region.save(value)
    region.output(region.op("aten.sum.default", [value], (1,)))
    region.reads = [(position,) for position in reversed(range(length))]
    return facts.build()


def test_the_report_has_the_plans_predictions_and_the_curve_in_text_and_json() -> None:
    facts = chain()
    outlooks = outlooks_of(facts)
    plan = make_plan(facts, budget=parse_budget("80%"))
    report = analyze_report(plan, None, 12, outlooks.curve(4))
    text = render_analyze(report, "text", 80)
    assert re.search(r"^Budget 80%: ", text, re.MULTILINE)
    assert text.endswith(to_text(curve_blocks(report.curve), 80))
    document = json.loads(render_analyze(report, "json", 80))
    assert document["asked"] == "80%"
    assert document["predicted"]["plan"]["peak_bytes"] == plan.predicted.plan.peak_bytes
    assert [each["name"] for each in document["curve"]] == ["no plan", "", "", "floor"]


@settings(DRAWN, max_examples=40)
@given(facts=steps())
def test_parts_of_every_predicted_peak_add_up_to_it(facts: GraphFacts) -> None:
    for budget in (None, "0", "floor", "100%"):
        plan = make_plan(facts, min_bytes=0, budget=budget and parse_budget(budget))
        for found in (plan.predicted.no_plan, plan.predicted.plan):
            assert sum(found.parts.values()) == found.peak_bytes
        assert plan.predicted.floor_bytes <= plan.predicted.no_plan.peak_bytes
        # Whatever was drawn, it can be shown.
        render_analyze(analyze_report(plan), "text", 80)


def test_conditions_are_part_of_the_prediction() -> None:
    plan = make_plan(chain(), aim=Aim(conditions=Conditions("sgd", expandable_segments=True)))
    document = json.loads(render_analyze(analyze_report(plan), "json", 80))
    assert document["predicted"]["conditions"] == {"optimizer": "sgd", "expandable_segments": True}
