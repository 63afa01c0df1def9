"""Placement by hand on small timelines, and on drawn graphs by searching the whole timeline."""

from __future__ import annotations

import pytest
from facts_builder import DRAWN, FactsBuilder, RegionBuilder, graph_facts
from hypothesis import given, settings

from offplan.errors import UsageError
from offplan.footprint import Footprint
from offplan.graph import GraphFacts, StorageId, ValueId, timeline
from offplan.plan import make_plan
from offplan.planner import IN_FLIGHT_BYTES, Move, Transfer, plan_transfers

# 1 GB exactly, as bool: half of what may be in flight.
GB = (1000, 1000, 1000)


def moves(facts: FactsBuilder, *values: ValueId, region: int = 0) -> list[Move]:
    found = []
    for value in values:
        storage = facts.values[value].storage
        assert storage is not None
        size_bytes = facts.storages[storage].size_bytes
        found.append(Move(region, storage, size_bytes, Footprint(0, size_bytes, size_bytes)))
    return found


def chain(facts: FactsBuilder, count: int) -> tuple[RegionBuilder, list[ValueId]]:
    """``count`` activations of 1 GB, each read by the next op only, all saved."""
    region = facts.region()
    value = region.input("x", (1,))
    values = []
    for _ in range(count):
        value = region.op("aten.relu.default", [value], GB, "bool")
        values.append(value)
    region.save(*values)
    return region, values


def windows(transfer: Transfer) -> tuple[int, int, int | None, int | None]:
    return (
        transfer.offload_after,
        transfer.release_by,
        transfer.reload_at,
        transfer.needed_by,
    )


def test_without_a_budget_nothing_moves() -> None:
    facts = FactsBuilder()
    _, values = chain(facts, 2)
    assert plan_transfers(facts.build(), moves(facts, *values), None) == ()


def test_a_budget_of_a_size_is_refused_and_says_what_can_be_planned() -> None:
    with pytest.raises(UsageError, match="--budget 0"):
        plan_transfers(FactsBuilder().build(), [], 1)


def test_releases_and_reloads_keep_two_storages_of_1_gb_in_flight() -> None:
    # Forward ops 0 to 4 make a..e; op i + 1 reads what op i made.  Backward ops 5 to 9 read e..a.
    facts = FactsBuilder()
    _, values = chain(facts, 5)
    found = plan_transfers(facts.build(), moves(facts, *values), 0)
    assert [windows(transfer) for transfer in found] == [
        # a: its last use is op 1; in flight with b after op 2; c makes it 3 GB after op 3.
        (1, 3, 7, 9),
        (2, 4, 6, 8),
        # d and e are both last used by op 4, which is the forward's end.
        (3, 4, 5, 7),
        (4, 4, 5, 6),
        (4, 4, 5, 5),
    ]


def test_a_storage_larger_than_the_window_is_waited_for_at_once_both_ways() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (1,))
    big = region.op("aten.relu.default", [x], (3, *GB), "bool")
    region.op("aten.sum.default", [x], (1,))
    region.save(big)
    region.reads = [(), (0,)]
    (transfer,) = plan_transfers(facts.build(), moves(facts, big), 0)
    # Made by op 0; ops 0 and 1 are the forward, 2 and 3 the backward.
    assert windows(transfer) == (0, 0, 3, 3)


def test_the_last_use_is_of_any_alias_saved_or_not() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (1,))
    y = region.op("aten.relu.default", [x], GB, "bool")
    alias = region.view(y, (1000**3,))
    region.op("aten.sum.default", [x], (1,))
    region.op("aten.sum.default", [alias], (1,))
    region.op("aten.sum.default", [x], (1,))
    region.save(y)
    (transfer,) = plan_transfers(facts.build(), moves(facts, y), 0)
    # Ops 0 to 4; op 3 reads the view.  The release waits for the forward's end.
    assert windows(transfer) == (3, 4, 5, 5)


@pytest.mark.parametrize("same_storages", [False, True])
def test_the_first_need_is_of_any_saved_view_of_the_storage(same_storages: bool) -> None:
    facts = FactsBuilder(same_storages=same_storages)
    region = facts.region()
    x = region.input("x", (1,))
    y = region.op("aten.relu.default", [x], GB, "bool")
    view = region.view(y, (1000**3,))
    region.save(y, view)
    region.reads = [(), (1,), (0,)]
    (transfer,) = plan_transfers(facts.build(), moves(facts, y), 0)
    # Forward 0, 1; backward 2, 3, 4: op 3 reads the view first.
    assert windows(transfer) == (1, 1, 2, 3)


def test_a_storage_that_the_backward_only_returns_is_needed_by_its_end() -> None:
    facts = FactsBuilder()
    region, (y,) = chain(facts, 1)
    region.reads = [()]
    region.returned = (0,)
    (transfer,) = plan_transfers(facts.build(), moves(facts, y), 0)
    # Forward 0; backward 1; the return is index 2.
    assert windows(transfer) == (0, 0, 1, 2)


def test_a_storage_that_the_backward_ignores_is_never_reloaded() -> None:
    facts = FactsBuilder()
    region, (y,) = chain(facts, 1)
    region.reads = [()]
    (transfer,) = plan_transfers(facts.build(), moves(facts, y), 0)
    assert windows(transfer) == (0, 0, None, None)


def test_each_region_releases_by_its_own_forward_and_reloads_in_its_own_backward() -> None:
    # Forwards: region 0 ops 0-1, region 1 ops 2-3; backwards: region 1 ops 4-5, region 0 ops 6-7.
    facts = FactsBuilder()
    _, first = chain(facts, 2)
    _, second = chain(facts, 2)
    found = plan_transfers(
        facts.build(), [*moves(facts, *first), *moves(facts, *second, region=1)], 0
    )
    assert [windows(transfer) for transfer in found] == [
        (1, 1, 6, 7),
        (1, 1, 6, 6),
        (3, 3, 4, 5),
        (3, 3, 4, 4),
    ]


def test_a_packed_footprint_says_so_in_the_transfer() -> None:
    facts = FactsBuilder()
    _, (y,) = chain(facts, 1)
    (move,) = moves(facts, y)
    part = move._replace(footprint=Footprint(8, 108, 10, packed=True))
    (transfer,) = plan_transfers(facts.build(), [part], 0)
    assert (transfer.start, transfer.stop, transfer.transfer_bytes, transfer.packed) == (
        8,
        108,
        10,
        True,
    )


# --- drawn graphs ---------------------------------------------------------------------------------


def reads_of(facts: GraphFacts, transfer: Transfer) -> tuple[int, int | None]:
    """Last forward use and first backward need of a transfer's storage, by searching everything."""
    ops = list(timeline(facts))
    forward_count = sum(len(region.forward.ops) for region in facts.regions)
    region = facts.regions[transfer.region]
    received = {
        facts.values[saved.backward_value].storage
        for saved in region.saved
        if facts.values[saved.value].storage == transfer.storage
    } | {transfer.storage}

    def touches(values: tuple[ValueId, ...], storages: set[StorageId | None]) -> bool:
        return any(facts.values[value].storage in storages for value in values)

    last = max(
        place
        for place, op in enumerate(ops[:forward_count])
        if touches((*op.inputs, *op.outputs), {transfer.storage})
    )
    start = forward_count + sum(
        len(later.backward.ops)
        for later in facts.regions[transfer.region + 1 :]
        if later.backward is not None
    )
    assert region.backward is not None
    needs = [
        start + place
        for place, op in enumerate(region.backward.ops)
        if touches(op.inputs, received)
    ]
    returned = tuple(o.value for o in region.backward.outputs if o.value is not None)
    if touches(returned, received):
        needs.append(start + len(region.backward.ops))
    return last, min(needs, default=None)


@settings(DRAWN, max_examples=50)
@given(graph_facts())
def test_transfers_are_offloaded_at_the_last_use_and_needed_at_the_first(facts: GraphFacts) -> None:
    for transfer in make_plan(facts, min_bytes=0, budget=0).transfers:
        assert (transfer.offload_after, transfer.needed_by) == reads_of(facts, transfer)


@settings(DRAWN, max_examples=50)
@given(graph_facts())
def test_no_more_than_the_window_is_in_flight_at_any_op(facts: GraphFacts) -> None:
    plan = make_plan(facts, min_bytes=0, budget=0)
    sizes = {entry.id: entry.size_bytes for entry in plan.storages}
    for place in range(facts.op_count + 1):
        leaving = sum(
            sizes[transfer.storage]
            for transfer in plan.transfers
            if transfer.offload_after <= place < transfer.release_by
        )
        ahead = sum(
            transfer.stop - transfer.start
            for transfer in plan.transfers
            if transfer.reload_at is not None
            and transfer.needed_by is not None
            and transfer.reload_at <= place < transfer.needed_by
        )
        assert leaving <= IN_FLIGHT_BYTES
        assert ahead <= IN_FLIGHT_BYTES


@settings(DRAWN, max_examples=50)
@given(graph_facts())
def test_the_floor_moves_every_movable_storage_once(facts: GraphFacts) -> None:
    plan = make_plan(facts, budget=0)
    movable = {(entry.region, entry.id) for entry in plan.storages if entry.footprint is not None}
    assert sorted((t.region, t.storage) for t in plan.transfers) == sorted(movable)
    assert plan.moved_bytes == plan.movable_bytes
