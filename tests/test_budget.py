"""What budgets ask for, and that the predicted peak, as the allocator counts it, meets them."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest
from facts_builder import DRAWN, FactsBuilder, graph_facts, steps
from fused_steps import fused_step
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_steps import moves_of

from offplan.budget import (
    AUTO,
    EVERYTHING,
    FLOOR,
    MARGIN_BYTES,
    Aim,
    Budget,
    Outlook,
    Outlooks,
    of_bytes,
    parse_budget,
)
from offplan.costs import DeviceProfile, link_rates, profile_for
from offplan.errors import BudgetError, UsageError
from offplan.graph import GraphFacts
from offplan.memory import predict
from offplan.planner import Planner

GB = 1000**3


def layers(count: int = 8, gpu: str = "H200") -> GraphFacts:
    """A step with ``count`` activations of 1 GB, each read by the next op, all saved."""
    facts = FactsBuilder()
    region = facts.region()
    value = region.input("x", (1,))
    for _ in range(count):
        value = region.op("aten.relu.default", [value], (1000, 1000, 1000), "bool")
        region.save(value)
    return msgspec.structs.replace(facts.build(), gpu=gpu)


def outlooks(facts: GraphFacts, aim: Aim | None = None) -> Outlooks:
    return Outlooks(facts, moves_of(facts), aim or Aim())


def outlook(facts: GraphFacts, budget: Budget | None, **aim: object) -> Outlook:
    return outlooks(facts, Aim(budget=budget, **aim)).outlook()  # type: ignore[arg-type]


# --- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("none", None),
        ("0", EVERYTHING),
        ("0GiB", EVERYTHING),
        ("floor", FLOOR),
        ("auto", AUTO),
        ("80%", Budget("share", 0.8, "80%")),
        ("62.5 %", Budget("share", 0.625, "62.5 %")),
        ("100%", Budget("share", 1.0, "100%")),
        ("1.5GiB", Budget("bytes", 3 * 1024**3 // 2, "1.5GiB")),
        ("12345", Budget("bytes", 12345, "12345")),
    ],
)
def test_a_budget_is_a_size_a_share_or_a_word(text: str, budget: Budget | None) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "-1", "80 percent", "all", "Floor", "1e9", "nan", "5GiB%"])
def test_anything_else_is_refused_with_what_a_budget_can_be(text: str) -> None:
    with pytest.raises(UsageError, match="not a budget") as caught:
        parse_budget(text)
    assert "auto, floor, or 0" in caught.value.fix


@pytest.mark.parametrize("text", ["0%", "100.1%", "250%"])
def test_a_share_is_of_the_peak_without_a_plan(text: str) -> None:
    with pytest.raises(UsageError, match="over 0% and at most 100%"):
        parse_budget(text)


def test_bytes_keep_the_text_they_were_asked_in() -> None:
    assert of_bytes(7) == Budget("bytes", 7, "7")
    assert of_bytes(1024, "1KiB") == Budget("bytes", 1024, "1KiB")
    assert of_bytes(0, "0%") == EVERYTHING


# --- what comes of it -----------------------------------------------------------------------------


def test_without_a_budget_nothing_moves_and_the_floor_is_known() -> None:
    found = outlook(layers(), None)
    assert found.transfers == ()
    assert found.budget_bytes is None
    assert found.predicted.plan == found.predicted.no_plan
    assert found.predicted.floor_bytes < found.predicted.no_plan.peak_bytes


def test_a_budget_that_fits_already_moves_nothing() -> None:
    peak = outlook(layers(), None).predicted.no_plan.peak_bytes
    for budget in (of_bytes(peak), of_bytes(100 * peak), parse_budget("100%"), AUTO):
        found = outlook(layers(), budget)
        assert found.transfers == ()
        assert found.predicted.plan.peak_bytes == peak


def test_each_kind_of_budget_is_met() -> None:
    facts = layers()
    none = outlook(facts, None).predicted
    half = outlook(facts, parse_budget("60%"))
    assert half.budget_bytes == int(0.6 * none.no_plan.peak_bytes)
    assert half.predicted.plan.peak_bytes <= half.budget_bytes
    floor = outlook(facts, FLOOR)
    assert floor.budget_bytes == floor.predicted.plan.peak_bytes == none.floor_bytes
    everything = outlook(facts, EVERYTHING)
    assert everything.budget_bytes == 0
    assert len(everything.transfers) == 8
    assert everything.predicted.plan.peak_bytes == none.floor_bytes
    # No more than it takes: 8 GB, of which 60% may stay.
    moved = [sum(t.transfer_bytes for t in o.transfers) for o in (half, floor, everything)]
    assert moved[0] < moved[1] < moved[2] == 8 * GB


def small_gpu(memory_bytes: int) -> DeviceProfile:
    return msgspec.structs.replace(profile_for("h200"), name="small", memory_bytes=memory_bytes)


def test_auto_is_the_gpus_memory_less_its_context_reserved_blocks_included() -> None:
    found = outlook(layers(), AUTO, profile=small_gpu(8 * GB))
    assert found.predicted.margin_bytes == MARGIN_BYTES
    assert found.budget_bytes == 8 * GB - MARGIN_BYTES
    assert found.transfers
    assert found.predicted.plan.peak_bytes <= found.budget_bytes
    assert found.predicted.plan.reserved_bytes <= found.budget_bytes
    assert found.predicted.profile == "small"
    assert outlook(layers(), FLOOR).predicted.margin_bytes is None


def test_an_infeasible_budget_names_the_floor_and_what_it_is_made_of() -> None:
    facts = layers()
    floor = outlook(facts, FLOOR).predicted.plan
    with pytest.raises(BudgetError) as caught:
        outlook(facts, of_bytes(floor.peak_bytes - 1))
    error = caught.value
    assert error.exit_code == 3
    assert error.floor_bytes == floor.peak_bytes
    assert f"--budget {floor.peak_bytes}" in error.fix
    largest = max(floor.parts, key=lambda part: floor.parts[part])
    assert f"of {largest}" in str(error)
    assert floor.op_target in error.where
    assert outlook(facts, of_bytes(error.floor_bytes)).predicted.plan.peak_bytes <= floor.peak_bytes


def test_an_infeasible_share_says_how_many_bytes_it_is() -> None:
    with pytest.raises(BudgetError, match=r"within 1% \(80\.\d\d MB\)"):
        outlook(layers(), parse_budget("1%"))


def test_host_memory_raises_the_floor_and_the_refusal_says_so() -> None:
    facts = layers()
    free = outlook(facts, FLOOR).predicted.plan.peak_bytes
    limited = outlook(facts, FLOOR, host_bytes=2 * GB)
    assert len(limited.transfers) == 2
    assert limited.predicted.host_budget == 2 * GB
    assert limited.predicted.plan.peak_bytes > free
    with pytest.raises(BudgetError, match=r"with 2.00 GB of host memory"):
        outlook(facts, of_bytes(free), host_bytes=2 * GB)


def test_without_a_profile_there_is_a_plan_and_a_warning_but_no_time() -> None:
    unknown = layers(gpu="Imaginary X1")
    found = outlook(unknown, FLOOR)
    assert found.transfers == outlook(layers(), FLOOR).transfers
    assert found.predicted.time is None
    assert found.predicted.profile == ""
    (warning,) = found.warnings
    assert "no profile of Imaginary X1" in warning
    assert outlook(layers(), FLOOR).warnings == ()
    with pytest.raises(UsageError, match="auto needs to know the device's memory"):
        outlook(unknown, AUTO)
    assert all(point.step_ms is None for point in outlooks(unknown).curve(3))


def test_a_plan_for_the_cpu_has_no_time_and_no_warning() -> None:
    facts = msgspec.structs.replace(layers(), device="cpu", gpu="")
    cpu = msgspec.structs.replace(
        facts,
        storages=tuple(msgspec.structs.replace(s, device="cpu") for s in facts.storages),
    )
    found = outlook(cpu, EVERYTHING)
    assert found.predicted.time is None
    assert found.warnings == ()
    assert found.predicted.plan.peak_bytes <= found.predicted.no_plan.peak_bytes


def test_a_slower_link_costs_time_and_no_bytes() -> None:
    fast, slow = (
        outlook(
            layers(),
            FLOOR,
            profile=msgspec.structs.replace(
                profile_for("h200"), d2h_bytes_per_s=rate, h2d_bytes_per_s=rate
            ),
        )
        for rate in (50e9, 5e9)
    )
    assert fast.predicted.plan.peak_bytes == slow.predicted.plan.peak_bytes
    assert fast.predicted.time is not None
    assert slow.predicted.time is not None
    assert fast.predicted.time.step_ms < slow.predicted.time.step_ms
    for found in (fast, slow):
        time = found.predicted.time
        assert time is not None
        assert time.no_plan_ms <= time.least_ms <= time.step_ms
        # The rest is what copies take of the device's time.
        rates = link_rates(layers(), profile_for("h200"))
        taken_ms = 2 * sum(rates.taken_ms(each.transfer_bytes) for each in found.transfers)
        assert time.step_ms == pytest.approx(time.no_plan_ms + time.stalled_ms + taken_ms, abs=0.01)


# --- drawn steps ----------------------------------------------------------------------------------


@settings(DRAWN, max_examples=60)
@given(st.one_of(steps(), graph_facts()), st.integers(0, 2**32))
def test_the_predicted_peak_is_within_every_budget_that_is_not_refused(
    facts: GraphFacts, seed: int
) -> None:
    choice = Random(seed)
    found = outlooks(facts)
    floor, top = found.floor()[1].peak_bytes, found.no_plan.peak_bytes
    for _ in range(3):
        limit = choice.randint(max(1, min(floor, top) - 1000), max(top, 1) + 1000)
        if limit < min(floor, top):
            with pytest.raises(BudgetError) as caught:
                found.outlook_for(of_bytes(limit))
            assert caught.value.floor_bytes == floor
            continue
        planned = found.outlook_for(of_bytes(limit))
        assert planned.predicted.plan.peak_bytes <= limit
        assert planned.predicted.plan == predict(facts, planned.transfers)
        assert planned.budget_bytes == limit
        if top <= limit:
            assert planned.transfers == ()


@settings(DRAWN, max_examples=60)
@given(st.one_of(steps(), graph_facts()))
def test_outlooks_in_any_order_are_the_same(facts: GraphFacts) -> None:
    budgets = [None, FLOOR, EVERYTHING, parse_budget("90%")]

    def results(order: list[Budget | None]) -> dict[str, Outlook | int]:
        every = outlooks(facts)
        found: dict[str, Outlook | int] = {}
        for budget in order:
            try:
                found[str(budget)] = every.outlook_for(budget)
            except BudgetError as error:
                found[str(budget)] = error.floor_bytes
        return found

    assert results(budgets) == results(budgets[::-1])


@settings(DRAWN, max_examples=40)
@given(steps(), st.integers(2, 6))
def test_the_curve_runs_from_no_plan_to_the_floor_and_never_gets_slower_with_memory(
    facts: GraphFacts, count: int
) -> None:
    found = outlooks(facts, Aim(profile=profile_for("h200")))
    points = found.curve(count)
    assert points[0].name == "no plan"
    assert points[0].limit_bytes == found.planner.peak_bytes
    if found.planner.peak_bytes == found.planner.floor_bytes:
        assert len(points) == 1
        return
    assert len(points) == count
    assert points[-1].name == "floor"
    assert points[-1].limit_bytes == found.planner.floor_bytes
    for looser, tighter in pairwise(points):
        assert looser.limit_bytes >= tighter.limit_bytes
        assert looser.step_ms is not None
        assert tighter.step_ms is not None
        assert looser.step_ms <= tighter.step_ms
    for point in points:
        assert point.step_ms is not None
        assert point.least_ms is not None
        assert point.least_ms <= point.step_ms


def test_a_curve_without_anything_to_move_is_one_point() -> None:
    facts = FactsBuilder()
    region = facts.region()
    region.save(region.input("w", (1024,), kind="parameter"))
    (point,) = outlooks(facts.build()).curve(5)
    assert (point.name, point.transfer_count, point.moved_bytes) == ("no plan", 0, 0)


def test_the_planner_is_asked_for_what_the_allocator_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Blocks of 1 GB are handed out whole; the plan for the plain limit may be over it by a little.
    asked: list[int] = []
    plan = Planner.plan

    def noted(self: Planner, budget_bytes: int) -> object:
        asked.append(budget_bytes)
        return plan(self, budget_bytes)

    monkeypatch.setattr(Planner, "plan", noted)
    found = outlooks(layers())
    limit = found.no_plan.peak_bytes - 1
    planned = found.outlook_for(of_bytes(limit))
    assert planned.predicted.plan.peak_bytes <= limit
    assert all(size <= limit for size in asked)


# --- what a compiler orders by itself -------------------------------------------------------------


def worse_alone() -> GraphFacts:
    """A step whose backward takes more memory if the compiler may reorder it."""
    facts = fused_step()
    (region,) = facts.regions
    assert region.backward is not None
    assert region.backward.lowering_alone is not None
    alone = region.backward.lowering_alone
    buffers = (
        msgspec.structs.replace(buffer, size_bytes=8 * buffer.size_bytes)
        for buffer in alone.buffers
    )
    alone = msgspec.structs.replace(alone, buffers=tuple(buffers))
    backward = msgspec.structs.replace(region.backward, lowering_alone=alone)
    return msgspec.structs.replace(
        facts, regions=(msgspec.structs.replace(region, backward=backward),)
    )


def test_the_least_moves_where_a_graph_without_transfers_is_ordered_for_the_worse() -> None:
    facts = worse_alone()
    known = outlooks(facts)
    top = known.no_plan.peak_bytes
    assert known.planner.peak_bytes < known.without_band(9 * top // 10)
    found = known.outlook_for(of_bytes(9 * top // 10))
    (moved,) = found.transfers
    assert moved.transfer_bytes == min(m.footprint.transfer_bytes for m in moves_of(facts))
    assert found.predicted.plan.peak_bytes <= known.without_band(9 * top // 10)


def test_the_floor_is_one_of_graphs_with_transfers_where_it_is_lower() -> None:
    better, worse = (outlooks(facts).floor()[1] for facts in (fused_step(), worse_alone()))
    assert worse.peak_bytes == better.peak_bytes
