"""Placement by hand on small timelines; on drawn steps, what every plan must keep to, and how far
it is from the best there is."""

from __future__ import annotations

import statistics
from itertools import pairwise
from random import Random

import msgspec
import pytest
from exact import least_step
from facts_builder import (
    DRAWN,
    DrawnOp,
    DrawnRegion,
    FactsBuilder,
    RegionBuilder,
    build_region,
    graph_facts,
    steps,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planned_steps import moves_of, planner_of, random_costs, random_step

from offplan import memory
from offplan.errors import BudgetError
from offplan.footprint import Footprint
from offplan.graph import GraphFacts, Op, StorageId, ValueId, timeline
from offplan.memory import Timeline
from offplan.plan import check_plan, make_plan
from offplan.planner import Costs, Planned, Planner
from offplan.schedule import Rates, step_time
from offplan.transfers import Move, Transfer

BLOCK = 512


def chain(facts: FactsBuilder, *blocks: int) -> tuple[RegionBuilder, list[ValueId]]:
    """Activations of so many allocator blocks, each read by the next op only, all saved."""
    region = facts.region()
    value = region.input("x", (1,))
    values = []
    for size in blocks:
        value = region.op("aten.relu.default", [value], (size * BLOCK,), "bool")
        values.append(value)
    region.save(*values)
    return region, values


def costs(facts: GraphFacts, op_ms: float = 1.0, blocks_per_ms: float = 1.0) -> Costs:
    rate = 1000 * BLOCK * blocks_per_ms
    return Costs([op_ms] * facts.op_count, Rates(rate, rate))


def planned(facts: GraphFacts, budget_bytes: int, **options: float) -> Planned:
    return planner_of(facts, costs(facts, **options)).plan(budget_bytes)


def windows(transfer: Transfer) -> tuple[int, int, int | None, int | None]:
    return transfer.offload_after, transfer.release_by, transfer.reload_at, transfer.needed_by


# --- windows --------------------------------------------------------------------------------------


def test_the_last_use_is_of_any_alias_saved_or_not() -> None:
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (1,))
    y = region.op("aten.relu.default", [x], (BLOCK,), "bool")
    alias = region.view(y, (BLOCK,))
    region.op("aten.sum.default", [x], (1,))
    region.op("aten.sum.default", [alias], (1,))
    region.op("aten.sum.default", [x], (1,))
    region.save(y)
    (transfer,) = planned(facts.build(), 0).transfers
    # Ops 0 to 4; op 3 reads the view.
    assert transfer.offload_after == 3
    assert transfer.needed_by == 5


@pytest.mark.parametrize("same_storages", [False, True])
def test_the_first_need_is_of_any_saved_view_of_the_storage(same_storages: bool) -> None:
    facts = FactsBuilder(same_storages=same_storages)
    region = facts.region()
    x = region.input("x", (1,))
    y = region.op("aten.relu.default", [x], (BLOCK,), "bool")
    view = region.view(y, (BLOCK,))
    region.save(y, view)
    region.reads = [(), (1,), (0,)]
    (transfer,) = planned(facts.build(), 0).transfers
    # Forward 0, 1; backward 2, 3, 4: op 3 reads the view first.
    assert (transfer.offload_after, transfer.needed_by) == (1, 3)


def test_a_storage_that_the_backward_only_returns_is_needed_by_its_end() -> None:
    facts = FactsBuilder()
    region, _ = chain(facts, 1)
    region.reads = [()]
    region.returned = (0,)
    (transfer,) = planned(facts.build(), 0).transfers
    # Forward 0; backward 1; the return is index 2.
    assert (transfer.offload_after, transfer.needed_by) == (0, 2)


def test_a_storage_that_the_backward_ignores_is_never_reloaded() -> None:
    facts = FactsBuilder()
    region, _ = chain(facts, 1)
    region.reads = [()]
    (transfer,) = planned(facts.build(), 0).transfers
    assert windows(transfer) == (0, 0, None, None)


def test_a_packed_footprint_says_so_in_the_transfer() -> None:
    facts = FactsBuilder()
    chain(facts, 1)
    built = facts.build()
    (move,) = moves_of(built)
    part = move._replace(footprint=Footprint(8, 108, 10, packed=True))
    found = Planner(built, [part], memory.timeline(built), costs(built)).plan(0)
    (transfer,) = found.transfers
    sizes = transfer.start, transfer.stop, transfer.transfer_bytes, transfer.packed
    assert sizes == (8, 108, 10, True)


# --- placement by hand ----------------------------------------------------------------------------


def flat_timeline(during: list[int], last: dict[int, int]) -> Timeline:
    """A timeline in blocks; ``last`` by storage of region 0."""
    ends = {(0, StorageId(storage)): op for storage, op in last.items()}
    return Timeline(tuple(size * BLOCK for size in during), ends, ends, 0)


def by_hand() -> tuple[GraphFacts, tuple[Move, ...], Timeline]:
    """Forward ops 0 to 3 make a, b, c, d of 4 blocks; op i + 1 reads what op i made.  Backward ops
    4 to 7 read d to a, each for the last time.  Nothing else is there."""
    facts = FactsBuilder()
    _, values = chain(facts, 4, 4, 4, 4)
    built = facts.build()
    numbers = [built.values[value].storage or 0 for value in values]
    last = dict(zip(numbers, (7, 6, 5, 4), strict=True))
    held = flat_timeline([4, 8, 12, 16, 16, 12, 8, 4], last)
    return built, moves_of(built), held


def test_releases_are_as_late_and_reloads_as_early_as_the_limit_allows() -> None:
    built, moves, held = by_hand()
    found = Planner(built, moves, held, costs(built, 10)).plan(12 * BLOCK)
    # Ops 3 and 4 are 4 blocks over.  a can be away longest: held through op 2, for op 3 would be
    # over; while d is there, through op 4, it cannot come back.
    (transfer,) = found.transfers
    assert transfer.storage == moves[0].storage
    assert windows(transfer) == (1, 2, 5, 7)
    assert found.time.step_ms == 80


def test_a_plan_that_fits_moves_nothing() -> None:
    built, moves, held = by_hand()
    planner = Planner(built, moves, held, costs(built))
    found = planner.plan(16 * BLOCK)
    assert found.transfers == ()
    assert found.time.step_ms == found.least_step_ms == 8
    assert planner.plan(1 << 60).transfers == ()


def test_the_floor_is_what_is_left_when_all_are_away_that_can_be() -> None:
    # During op 3 c and d are used, during op 4 only d, but c has just been made: a and b can be
    # away from ops 2 and 3 on, c during op 4.
    built, moves, held = by_hand()
    planner = Planner(built, moves, held, costs(built))
    assert planner.floor_bytes == 8 * BLOCK
    assert max(memory_of(planner, planner.plan(8 * BLOCK))) == 8 * BLOCK
    with pytest.raises(BudgetError, match=r"moved it is 4\.10 kB"):
        planner.plan(8 * BLOCK - 1)


def test_budget_0_moves_everything_that_can_move_at_the_floor() -> None:
    built, moves, held = by_hand()
    planner = Planner(built, moves, held, costs(built))
    found = planner.plan(0)
    assert len(found.transfers) == 4
    assert max(memory_of(planner, found)) == planner.floor_bytes


def test_copies_that_hide_are_preferred_to_those_that_stall() -> None:
    # a is made first and needed last: it has 5 ms out and 3 back.  c has 1.
    built, moves, held = by_hand()
    found = Planner(built, moves, held, costs(built, 1, blocks_per_ms=2)).plan(12 * BLOCK)
    assert [transfer.storage for transfer in found.transfers] == [moves[0].storage]
    assert found.time.stalled_ms < 2


def test_the_longer_copy_can_come_back_before_the_one_that_is_needed_first() -> None:
    # a has 6 blocks, b 2.  Op 3 has room for neither, op 4 for either, op 5 for both; b is needed
    # by op 5, a by op 6.
    facts = FactsBuilder()
    region, values = chain(facts, 6, 2, 1)
    region.reads = [(2,), (), (1,), (0,)]
    built = facts.build()
    numbers = [built.values[value].storage or 0 for value in values]
    held = flat_timeline([6, 8, 8, 15, 10, 8, 6], dict(zip(numbers, (6, 5, 3), strict=True)))
    rate = BLOCK * 1000.0
    op_costs = Costs([20.0, 20.0, 20.0, 1.0, 4.0, 1.0, 1.0], Rates(rate, rate))
    found = Planner(built, moves_of(built)[:2], held, op_costs).plan(8 * BLOCK)
    # b is out at 62; op 4 runs from 63 to 67.  b first: back at 65, a from 67 to 73, end at 74.
    # a first: from 63 to 69, b to 71, end at 73.
    assert [windows(transfer) for transfer in found.transfers] == [(1, 2, 4, 6), (2, 2, 5, 5)]
    assert found.time.step_ms == 73


def memory_of(planner: Planner, found: Planned) -> list[int]:
    """Bytes by op under a plan, as definitions 1 to 3 of the planner say."""
    held = list(planner.during)
    by_storage = {(c.move.region, c.move.storage): c for c in planner.candidates}
    for transfer in found.transfers:
        c = by_storage[transfer.region, transfer.storage]
        for op in range(transfer.release_by + 1, c.last + 1):
            held[op] -= c.size_bytes
            if transfer.reload_at is not None and op >= min(transfer.reload_at, c.span.returned):
                held[op] += c.back_bytes
    return held


# --- regions --------------------------------------------------------------------------------------


def test_each_region_releases_in_its_own_forward_and_reloads_in_its_own_backward() -> None:
    # Forwards: region 0 ops 0-1, region 1 ops 2-4; backwards: region 1 ops 5-7, region 0 ops 8-9.
    facts = FactsBuilder()
    chain(facts, 1, 2)
    chain(facts, 3, 4, 5)
    found = planned(facts.build(), 0).transfers
    assert [t.region for t in found] == [0, 0, 1, 1, 1]
    for transfer in found:
        assert transfer.release_by <= (1, 4)[transfer.region]
        assert (8, 5)[transfer.region] <= (transfer.reload_at or 0) <= (transfer.needed_by or 0)


def twins() -> GraphFacts:
    """The same region three times, and then another one."""
    facts = FactsBuilder()
    ops = (DrawnOp(8, "whole", True), DrawnOp(5, "stepped", True), DrawnOp(9, "whole", True))
    same = DrawnRegion(ops, ((2,), (1,), (0,)), (), 4)
    handed = None
    for _ in range(3):
        handed = build_region(facts, same, handed)
    build_region(facts, same._replace(gradient_units=3), handed)
    return facts.build()


def test_twins_are_treated_alike_whatever_the_budget() -> None:
    facts = twins()
    planner = planner_of(facts, costs(facts, 2))
    spans = planner.spans
    room = planner.peak_bytes - planner.floor_bytes
    for share in range(0, 101, 4):
        found = planner.plan(planner.floor_bytes + room * share // 100).transfers
        placed: dict[int, list[tuple[int, ...]]] = {0: [], 1: [], 2: [], 3: []}
        for t in found:
            span = spans[t.region]
            assert t.reload_at is not None
            assert t.needed_by is not None
            placed[t.region].append(
                (
                    t.transfer_bytes,
                    t.offload_after - span.forward,
                    t.release_by - span.forward,
                    t.reload_at - span.backward,
                    t.needed_by - span.backward,
                )
            )
        # The first one's handed input is an input, those of the others are not: all four keep it.
        assert placed[0] == placed[1] == placed[2]


def test_a_backward_without_ops_holds_what_it_saved_during_no_op() -> None:
    """It returns before the op that comes next, which is no cheaper for what was moved of it."""
    facts = FactsBuilder()
    first = facts.region()
    x = first.input("x", (2 * BLOCK,), "bool")
    saved = first.op("aten.relu.default", [x], (2 * BLOCK,), "bool")
    y = first.op("aten.relu.default", [saved], (2 * BLOCK,), "bool")
    first.output(y)
    first.save(saved)
    first.gradient_shape = (256,)
    second = facts.region()
    second.receive(y, "x", "handed")
    other = second.op("aten.relu.default", [y], (2 * BLOCK,), "bool")
    second.output(second.op("aten.relu.default", [other], (2 * BLOCK,), "bool"))
    second.save(other)
    second.reads = []
    built = facts.build()
    planner = planner_of(built, costs(built))
    for limit in (planner.floor_bytes, planner.peak_bytes - 1):
        found = memory.curve(built, planner.plan(limit).transfers)
        assert max(found) <= limit


# --- drawn steps: what every plan keeps to --------------------------------------------------------


def limits(planner: Planner, choice: Random, count: int) -> list[int]:
    """The floor, and budgets between it and the peak, from small to large."""
    drawn = (choice.randint(planner.floor_bytes, planner.peak_bytes) for _ in range(count))
    return sorted([planner.floor_bytes, *drawn])


def drawn_planner(facts: GraphFacts, seed: int) -> tuple[Planner, Random]:
    choice = Random(seed)
    return planner_of(facts, random_costs(facts, choice)), choice


@settings(DRAWN, max_examples=80)
@given(st.one_of(steps(), steps(1, 5), graph_facts()), st.integers(0, 2**32))
def test_every_op_is_within_the_limit_as_memory_predicts_it(facts: GraphFacts, seed: int) -> None:
    planner, choice = drawn_planner(facts, seed)
    assert planner.during == memory.curve(facts, ())
    for limit in (*limits(planner, choice, 3), 0):
        found = memory.curve(facts, planner.plan(limit).transfers)
        assert max(found, default=0) <= (limit or planner.everything_bytes)


@settings(DRAWN, max_examples=80)
@given(steps(), st.integers(0, 2**32))
def test_no_plan_is_faster_than_its_lower_bound(facts: GraphFacts, seed: int) -> None:
    planner, choice = drawn_planner(facts, seed)
    for limit in (*limits(planner, choice, 3), 0):
        found = planner.plan(limit)
        again = step_time(
            planner.costs.op_ms, planner.forward_count, found.transfers, rates(planner)
        )
        assert found.time == again
        assert found.least_step_ms <= found.time.step_ms * (1 + 1e-9)


def rates(planner: Planner) -> Rates:
    return planner.costs.rates


def test_a_larger_budget_is_not_slower_and_moves_more_only_to_be_faster() -> None:
    """Of 5000 pairs of budgets for small steps like these, 8 were slower by more than 0.5%, the
    worst by 4.5%: choices are searched for, not all tried."""
    slower, heavier = [], []
    for seed in range(80):
        choice = Random(seed)
        facts = random_step(choice, choice.choice((5, 7, 12)), choice.choice((1, 1, 2, 3)))
        planner = planner_of(facts, random_costs(facts, choice))
        found = [planner.plan(limit) for limit in limits(planner, choice, 4)]
        for tighter, looser in pairwise(found):
            slower.append(looser.time.step_ms / tighter.time.step_ms)
            # The bound of the looser one holds for the tighter one as well.
            assert looser.least_step_ms <= tighter.least_step_ms * (1 + 1e-9)
            heavier.append(
                moved_bytes(looser) > moved_bytes(tighter)
                and looser.time.step_ms >= tighter.time.step_ms
            )
    assert max(slower) < 1.1
    assert sum(ratio > 1.0051 for ratio in slower) <= 0.01 * len(slower)
    assert sum(heavier) <= 0.01 * len(heavier)


def moved_bytes(found: Planned) -> int:
    return sum(transfer.transfer_bytes for transfer in found.transfers)


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


@settings(DRAWN, max_examples=80)
@given(st.one_of(steps(), graph_facts()), st.integers(0, 2**32))
def test_copies_lie_between_the_last_use_and_the_first_need(facts: GraphFacts, seed: int) -> None:
    planner, choice = drawn_planner(facts, seed)
    for limit in (*limits(planner, choice, 2), 0):
        for transfer in planner.plan(limit).transfers:
            span = planner.spans[transfer.region]
            assert (transfer.offload_after, transfer.needed_by) == reads_of(facts, transfer)
            assert transfer.offload_after <= transfer.release_by < span.forward_end
            if transfer.needed_by is None:
                assert transfer.reload_at is None
            else:
                assert span.backward <= (transfer.reload_at or 0) <= transfer.needed_by


def with_writes(facts: GraphFacts, choice: Random) -> GraphFacts:
    """``facts`` with ops of forwards that write to what was made before."""
    regions = []
    for region in facts.regions:
        ops: list[Op] = []
        for op in region.forward.ops:
            made = [value for before in ops for value in before.outputs]
            if made and choice.random() < 0.5:
                written = choice.choice(made)
                inputs = tuple(dict.fromkeys((*op.inputs, written)))
                op = msgspec.structs.replace(op, inputs=inputs, mutates=(written,))
            ops.append(op)
        forward = msgspec.structs.replace(region.forward, ops=tuple(ops))
        regions.append(msgspec.structs.replace(region, forward=forward))
    return msgspec.structs.replace(facts, regions=tuple(regions))


@settings(DRAWN, max_examples=40)
@given(st.integers(0, 2**32))
def test_what_is_written_to_leaves_with_what_was_written(seed: int) -> None:
    choice = Random(seed)
    facts = with_writes(random_step(choice, regions=choice.randint(1, 3)), choice)
    writes = [
        (place, facts.values[value].storage)
        for place, op in enumerate(timeline(facts))
        for value in op.mutates
    ]
    least = make_plan(facts, min_bytes=1, budget=0).predicted.floor_bytes
    for budget in (0, least):
        plan = make_plan(facts, min_bytes=1, budget=budget)
        check_plan(facts, plan)
        for transfer in plan.transfers:
            places = [place for place, storage in writes if storage == transfer.storage]
            assert transfer.offload_after >= max(places, default=0)


@settings(DRAWN, max_examples=60)
@given(st.one_of(steps(), graph_facts()), st.integers(0, 2**32))
def test_every_plan_is_proved_by_check_plan(facts: GraphFacts, seed: int) -> None:
    least = make_plan(facts, min_bytes=1, budget=0).predicted.floor_bytes
    most = make_plan(facts, min_bytes=1).predicted.no_plan.peak_bytes
    for budget in (0, least, Random(seed).randint(least, max(least, most)), most, None):
        check_plan(facts, make_plan(facts, min_bytes=1, budget=budget))


@settings(DRAWN, max_examples=60)
@given(st.one_of(steps(), graph_facts()))
def test_budget_0_moves_every_movable_storage_once(facts: GraphFacts) -> None:
    found = planner_of(facts, random_costs(facts, Random(0))).plan(0).transfers
    expected = sorted((move.region, move.storage) for move in moves_of(facts))
    assert sorted((t.region, t.storage) for t in found) == expected


@settings(DRAWN, max_examples=60)
@given(st.one_of(steps(), graph_facts()), st.integers(0, 2**32))
def test_a_limit_under_the_floor_is_refused_and_the_floor_is_not(
    facts: GraphFacts, seed: int
) -> None:
    planner, _ = drawn_planner(facts, seed)
    floor = planner.floor_bytes
    if floor > 1:
        with pytest.raises(BudgetError) as caught:
            planner.plan(floor - 1)
        assert str(floor) in caught.value.fix
    found = memory.curve(facts, planner.plan(floor).transfers)
    assert max(found, default=0) <= floor


def gradient_for_what_goes() -> GraphFacts:
    """The return copies a saved view, as a gradient, when another saved value has gone."""
    facts = FactsBuilder()
    region = facts.region()
    x = region.input("x", (1000,))
    first = region.op("aten.relu.default", [x], (1000,))
    second = region.op("aten.relu.default", [x], (8000,))
    region.output(region.op("aten.relu.default", [second], (1000,)))
    region.save(first, region.view(second, (1000,), (8,)))
    region.reads, region.returned = [(1,)], (1,)
    return facts.build()


@settings(DRAWN, max_examples=80)
@given(steps())
@example(gradient_for_what_goes())
def test_a_storage_that_goes_lowers_all_ops_that_it_was_held_all_through(facts: GraphFacts) -> None:
    planner, _ = drawn_planner(facts, 0)
    for c in planner.candidates:
        gone = Transfer(
            region=c.move.region,
            storage=c.move.storage,
            start=0,
            stop=c.move.size_bytes,
            transfer_bytes=c.move.size_bytes,
            offload_after=c.offload_after,
            release_by=c.offload_after,
            reload_at=None,
            needed_by=None,
        )
        lowered = memory.curve(facts, [gone])
        for op in range(c.offload_after + 1, c.last + 1):
            assert lowered[op] == planner.during[op] - c.size_bytes


@settings(DRAWN, max_examples=80)
@given(steps(), st.integers(0, 2**32))
def test_every_move_is_needed_for_the_limit_or_makes_the_step_faster(
    facts: GraphFacts, seed: int
) -> None:
    planner, choice = drawn_planner(facts, seed)
    candidates = {(c.move.region, c.move.storage): c for c in planner.candidates}
    for limit in limits(planner, choice, 2):
        found = planner.plan(limit)
        taken = [candidates[t.region, t.storage] for t in found.transfers]
        for group in {c.twins for c in taken}:
            rest = [c for c in taken if c.twins != group]
            if highest_without(planner, rest) > limit:
                continue
            # There is room for it.  Then moving it must be faster than leaving it.
            step_ms, _ = planner.placed(rest, limit, 0)
            assert step_ms > found.time.step_ms


def highest_without(planner: Planner, taken: list) -> int:
    """The peak with ``taken`` away whenever they can be, op by op."""
    held = list(planner.during)
    for c in taken:
        start, stop = c.away
        for op in range(start, c.last + 1):
            held[op] -= c.size_bytes if op < stop else c.lost_bytes
        if c.staging_bytes:
            held[c.offload_after] += c.staging_bytes
            if c.back_by is not None:
                held[c.back_by] += c.staging_bytes
    return max(held, default=0)


@settings(DRAWN, max_examples=60)
@given(steps(), st.integers(0, 2**32))
def test_plans_do_not_depend_on_the_order_of_what_can_move(facts: GraphFacts, seed: int) -> None:
    planner, choice = drawn_planner(facts, seed)
    moves = list(moves_of(facts))
    choice.shuffle(moves)
    shuffled = Planner(facts, moves, memory.timeline(facts), planner.costs)
    for limit in (*limits(planner, choice, 2), 0):
        assert shuffled.plan(limit) == planner.plan(limit) == planner.plan(limit)


@settings(DRAWN, max_examples=80)
@given(steps(), st.integers(0, 2**32))
def test_host_memory_is_never_exceeded(facts: GraphFacts, seed: int) -> None:
    free, choice = drawn_planner(facts, seed)
    needed = sum(t.transfer_bytes for t in free.plan(0).transfers)
    host_bytes = choice.randint(0, needed)
    limited = planner_of(facts, free.costs, host_bytes)
    assert limited.floor_bytes >= free.floor_bytes or any(c.staging_bytes for c in free.candidates)
    for limit in (*limits(limited, choice, 2), 0):
        found = limited.plan(limit)
        assert sum(t.transfer_bytes for t in found.transfers) <= host_bytes
        curve = memory.curve(facts, found.transfers)
        assert max(curve, default=0) <= (limit or limited.everything_bytes)
    # All of it is enough for all of them.
    assert planner_of(facts, free.costs, needed).plan(0) == free.plan(0)


def test_host_memory_is_counted_for_twins_together() -> None:
    facts = twins()
    largest = max(move.footprint.transfer_bytes for move in moves_of(facts))
    # Enough for two of the three largest, and the fourth region's: none of the three moves.
    planner = planner_of(facts, costs(facts), host_bytes=2 * largest)
    moved = [t.region for t in planner.plan(0).transfers if t.transfer_bytes == largest]
    assert not set(moved) & {0, 1, 2}


# --- how far from the best ------------------------------------------------------------------------


def test_plans_are_close_to_the_exact_optimum() -> None:
    """Over 588 of these steps planned / exact had a median of 1.000, 97 of 100 under 1.007, and
    1.12 at worst; exact / bound had a median of 1.26: the bound knows nothing of whole storages, of
    which these steps have few."""
    ratios, bounds = [], []
    for seed in range(150):
        choice = Random(seed)
        facts = random_step(choice)
        planner = planner_of(facts, random_costs(facts, choice))
        if planner.floor_bytes == planner.peak_bytes:
            continue
        room = planner.peak_bytes - planner.floor_bytes
        limit = planner.floor_bytes + int(choice.choice((0, 0.1, 0.3, 0.5, 0.8)) * room)
        found = planner.plan(limit)
        exact = least_step(planner, limit, 1.02 * found.time.step_ms + 0.01)
        # What the program found is a plan: it takes that long, and is within the limit.
        again = step_time(
            planner.costs.op_ms, planner.forward_count, exact.transfers, rates(planner)
        )
        assert again.step_ms == pytest.approx(exact.step_ms, rel=1e-4)
        assert max(memory.curve(facts, exact.transfers)) <= limit
        ratios.append(found.time.step_ms / exact.step_ms)
        bounds.append(exact.step_ms / found.least_step_ms)
    assert len(ratios) > 100
    assert min(ratios) > 1 - 1e-4
    assert min(bounds) > 1 - 1e-4
    assert statistics.median(ratios) < 1.001
    assert sorted(ratios)[int(0.95 * len(ratios))] < 1.02
    assert max(ratios) < 1.15
