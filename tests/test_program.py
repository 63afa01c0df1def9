"""The integer program against all choices of small steps, and its parts by hand."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from facts_builder import DRAWN, MiB
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from joint_steps import every_choice, fastest_ms, joint, small_bytes
from trained_steps import PURE, Drawn, Layer, step, trained

from offplan.activations import Activation
from offplan.graph import StorageId
from offplan.joint import Joint
from offplan.program import Program, Solution, Step, Way
from offplan.schedule import Rates

replace = msgspec.structs.replace
SECONDS = 60.0
MB = 1_000_000
# A megabyte a millisecond.
RATES = Rates(1e9, 1e9)


def activation(place: int, **changes: object) -> Activation:
    """Of 10 MB, made by op ``place``; needed in reverse by the backward of ten ops from op 10."""
    found = {
        "region": 0,
        "storage": StorageId(place),
        "size_bytes": 10 * MB,
        "transfer_bytes": 10 * MB,
        "lost_bytes": 0,
        "lost_through": -1,
        "recipe": (place,),
        "inputs": (),
        "cost_ms": 1.0,
        "alone_ms": 1.0,
        "last_use": place,
        "last_view": place,
        "needed_by": 19 - place,
        "again_at": None,
        "is_saved": True,
        "can_move": True,
        "refused": "",
    }
    return Activation(**{**found, **changes})  # type: ignore[arg-type]


def a_step(*found: Activation, op_ms: float = 1.0, rates: Rates = RATES, regions: int = 1) -> Step:
    """Twenty ops, half of them forward; memory is of the activations that are saved."""
    during = [
        sum(
            item.size_bytes
            for item in found
            if item.is_saved and item.recipe[0] <= op <= (item.needed_by or 20)
        )
        for op in range(20)
    ]
    return Step(during, [op_ms] * 20, 10, [0] * regions, rates)


def program(*found: Activation, may_move: bool = True, may_recompute: bool = True,
            **step: object) -> Program:  # fmt: skip
    made = a_step(*found, **step)  # type: ignore[arg-type]
    return Program(made, found, may_move=may_move, may_recompute=may_recompute)


def solved(found: Program, limit: int) -> Solution | None:
    return found.solve(limit, gap_ms=0.0, seconds=SECONDS)


def ways(found: Program, limit: int) -> list[Way]:
    solution = solved(found, limit)
    assert solution is not None
    return [solution.ways[place] for place in sorted(solution.ways)]


# --- by hand --------------------------------------------------------------------------------------


def test_all_is_kept_where_it_fits() -> None:
    found = program(activation(0), activation(1), activation(2))
    solution = solved(found, 30 * MB)
    assert solution is not None
    assert set(solution.ways.values()) == {"keep"}
    assert solution.step_ms == pytest.approx(20.0)
    assert solution.least_ms == pytest.approx(20.0)
    assert solution.peak_bytes == 30 * MB


def test_the_cheapest_is_computed_again_where_nothing_moves() -> None:
    items = [activation(place, cost_ms=cost) for place, cost in enumerate((3.0, 1.0, 2.0))]
    found = program(*items, may_move=False)
    assert ways(found, 20 * MB) == ["keep", "again", "keep"]
    # During op 2 what it makes is there, whatever becomes of it.
    assert ways(found, 10 * MB) == ["again", "again", "keep"]
    solution = solved(found, 10 * MB)
    assert solution is not None
    assert solution.step_ms == pytest.approx(20.0 + 4.0, abs=0.01)
    assert solution.least_ms <= solution.step_ms
    assert solved(found, 9 * MB) is None


def test_what_has_time_to_move_costs_nothing_and_what_has_not_stalls() -> None:
    # 10 MB take 10 ms: from the end of op 0 to the start of op 3 there are 2.
    item = activation(0, cost_ms=5.0)
    other = activation(3, refused="it draws random numbers", can_move=False)
    found = program(item, other)
    solution = solved(found, 10 * MB)
    assert solution is not None
    assert solution.ways[0] == "again"
    fast = program(item, other, rates=Rates(1e10, 1e10))
    solution = solved(fast, 10 * MB)
    assert solution is not None
    assert solution.ways[0] == "move"
    assert solution.step_ms == pytest.approx(20.0, abs=0.01)


def test_what_is_viewed_later_leaves_later_and_is_computed_again_all_the_same() -> None:
    # A copy takes as long as an op, and has to be there before op 3.
    other = activation(3, refused="it draws random numbers", can_move=False)
    rates = Rates(1e10, 1e10)
    cases = ((0, "move", 20.0), (1, "move", 20.0), (2, "move", 21.0), (3, "again", 25.0))
    for last_view, expected, step_ms in (*cases, (9, "again", 25.0)):
        item = activation(0, cost_ms=5.0, last_view=last_view)
        solution = solved(program(item, other, rates=rates), 10 * MB)
        assert solution is not None
        assert solution.ways[0] == expected
        assert solution.step_ms == pytest.approx(step_ms, abs=0.01)


def test_what_moves_pays_for_the_memory_that_its_copies_take() -> None:
    # Each way 10 MB take 0.2 ms of the link, beside ops, and 0.1 ms of the device's memory.
    item = activation(0, cost_ms=0.5)
    other = activation(3, refused="it draws random numbers", can_move=False)
    rates = Rates(5e10, 5e10, memory_bytes_per_s=1e11)
    solution = solved(program(item, other, rates=rates), 10 * MB)
    assert solution is not None
    assert solution.ways[0] == "move"
    assert solution.step_ms == pytest.approx(20.2, abs=0.01)
    assert solution.least_ms == pytest.approx(20.2, abs=0.01)
    cheaper = activation(0, cost_ms=0.15)
    assert ways(program(cheaper, other, rates=rates), 10 * MB) == ["again", "keep"]
    assert ways(program(cheaper, other, rates=Rates(5e10, 5e10)), 10 * MB) == ["move", "keep"]


def test_stalls_are_no_longer_for_the_memory_that_copies_take_meanwhile() -> None:
    # 100 ms of copy each way, less the few that ops give it, and 10 ms of memory.
    given = {"may_recompute": False}
    plain = program(activation(0), activation(1), rates=Rates(1e8, 1e8), **given)
    shared = program(
        activation(0), activation(1), rates=Rates(1e8, 1e8, memory_bytes_per_s=1e9), **given
    )
    found = [solved(each, 10 * MB) for each in (plain, shared)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].step_ms == pytest.approx(found[1].step_ms, abs=0.01)


def test_where_nothing_is_computed_again_all_that_can_moves() -> None:
    found = program(activation(0), activation(1), may_recompute=False, rates=Rates(1e8, 1e8))
    solution = solved(found, 10 * MB)
    assert solution is not None
    assert sorted(solution.ways.values()) == ["keep", "move"]
    # 100 ms of copy each way, less the few that ops give it.
    assert solution.step_ms > 100


def test_no_plan_is_below_what_must_stay() -> None:
    stays = activation(0, refused="it writes to its input", can_move=False)
    found = program(stays, activation(1))
    assert solved(found, 20 * MB) is not None
    assert solved(found, 19 * MB) is None
    items = activation(0), activation(1)
    assert solved(program(*items), 10 * MB) is not None
    assert solved(program(*items, may_move=False, may_recompute=False), 19 * MB) is None


def test_what_runs_again_wants_its_inputs_there() -> None:
    # The second is computed from the first, which has to be there in one of the ways.
    given = activation(0, is_saved=False, needed_by=None, can_move=False, refused="it writes")
    rest = activation(1, inputs=(0,)), activation(2, refused="it writes", can_move=False)
    found = program(given, *rest, may_move=False)
    assert solved(found, 19 * MB) is None
    free = program(replace_item(given, refused=""), *rest, may_move=False)
    solution = solved(free, 10 * MB)
    assert solution is not None
    assert [solution.ways[place] for place in range(3)] == ["again", "again", "keep"]
    assert solution.step_ms == pytest.approx(22.0, abs=0.01)


def replace_item(item: Activation, **changes: object) -> Activation:
    return Activation(**{**item.__dict__, **changes})


def test_what_nothing_needs_is_left_alone() -> None:
    unneeded = activation(0, is_saved=False, needed_by=None)
    solution = solved(program(unneeded, activation(1)), 100 * MB)
    assert solution is not None
    assert solution.ways.get(0, "keep") == "keep"


def test_what_is_computed_again_already_can_be_kept_instead() -> None:
    found = program(activation(0, is_saved=False, again_at=18, cost_ms=4.0), may_move=False)
    kept = solved(found, 10 * MB)
    assert kept is not None
    assert kept.ways == {0: "keep"}
    # The step is faster than it was traced: what ran again does not.
    assert kept.step_ms == pytest.approx(16.0, abs=0.01)
    assert found.own_ms == pytest.approx(16.0)
    as_traced = solved(found, 0)
    assert as_traced is not None
    assert as_traced.ways == {0: "again"}
    assert as_traced.step_ms == pytest.approx(20.0, abs=0.01)


def test_twins_share_their_columns() -> None:
    items = [activation(0), activation(1)]
    second = [replace_item(item, region=1) for item in items]
    twins = program(*items, *second, regions=2)
    assert twins.ways[:2] == twins.ways[2:]
    assert twins.costs[twins.ways[0]["again"]] == pytest.approx(2.0, abs=0.01)
    solution = solved(twins, 20 * MB)
    assert solution is not None
    assert [solution.ways[0], solution.ways[1]] == [solution.ways[2], solution.ways[3]]
    others = Program(
        Step(twins.step.during, twins.step.op_ms, 10, [0, 1], RATES),
        [*items, *second],
        may_move=True,
        may_recompute=True,
    )
    assert len(set(map(repr, others.ways))) == 4


def test_part_of_a_storage_crosses_the_link_and_all_of_it_is_away() -> None:
    stays = activation(5, refused="it writes", can_move=False)
    # 10 ms each way, or one, less the 0.4 ms until what stays is made, and since it is needed.
    for transfer_bytes, stalled_ms in ((10 * MB, 9.6), (MB, 0.6)):
        item = activation(0, transfer_bytes=transfer_bytes)
        solution = solved(program(item, stays, may_recompute=False, op_ms=0.1), 10 * MB)
        assert solution is not None
        assert solution.step_ms == pytest.approx(2.0 + 2 * stalled_ms, abs=0.01)


def test_what_of_a_storage_does_not_come_back_is_not_there_after_its_need() -> None:
    # Of 10 MB, 6 are lost, which would be there until the end, where there are 4 MB more.
    item = activation(0, needed_by=12, lost_bytes=6 * MB, lost_through=19)
    during = [10 * MB] * 19 + [14 * MB]
    found = Program(
        Step(during, [100.0] * 20, 10, [0], RATES), [item], may_move=True, may_recompute=False
    )
    assert ways(found, 14 * MB) == ["keep"]
    assert ways(found, 10 * MB) == ["move"]


def test_what_moves_is_back_for_what_is_computed_again_from_it() -> None:
    # The first is needed by op 19, the second, computed from it, by op 11.
    first = activation(0, refused="it draws random numbers")
    second = activation(1, inputs=(0,), needed_by=11, can_move=False)
    # 20 MB are there until op 11, and 30 at op 14, where the first could still be away.
    during = [20 * MB] * 20
    during[14] = 30 * MB
    fast = Step(during, [1.0] * 20, 10, [0], Rates(1e12, 1e12))
    found = Program(fast, [first, second], may_move=True, may_recompute=True)
    assert ways(found, 20 * MB) == ["move", "keep"]
    # At op 5 neither is to be there: then both are back, or made again, by op 11.
    during[5] = 40 * MB
    assert solved(Program(fast, [first, second], may_move=True, may_recompute=True),
                  20 * MB) is None  # fmt: skip
    during[14] = 20 * MB
    both = Program(fast, [first, second], may_move=True, may_recompute=True)
    assert ways(both, 20 * MB) == ["move", "again"]


def test_the_least_peak_is_the_least_limit_that_there_are_ways_for() -> None:
    items = [
        activation(0, can_move=False),
        activation(1, refused="it draws random numbers"),
        activation(2, refused="it draws random numbers", can_move=False),
    ]
    found = program(*items)
    least = found.least_peak(seconds=SECONDS)
    assert least is not None
    assert least.peak_bytes == pytest.approx(10 * MB, abs=10)
    assert solved(found, 10 * MB + 10) is not None
    assert solved(found, 10 * MB - 1000) is None


def test_the_least_peak_leaves_the_program_as_it_was() -> None:
    found = program(*(activation(place, cost_ms=1.0 + place) for place in range(5)))
    fresh = program(*(activation(place, cost_ms=1.0 + place) for place in range(5)))
    before = solved(fresh, 25 * MB)
    first = found.least_peak(seconds=SECONDS)
    assert solved(found, 25 * MB) == before
    assert found.least_peak(seconds=SECONDS) == first
    counts = len(found.costs), len(found.uppers), len(found.integers), len(found.rows)
    assert counts == (len(fresh.costs), len(fresh.uppers), len(fresh.integers), len(fresh.rows))
    assert found.rows == fresh.rows
    assert found.costs == fresh.costs


def test_a_step_without_activations_or_ops() -> None:
    empty = Program(Step([], [], 0, [], RATES), [], may_move=True, may_recompute=True)
    solution = solved(empty, 0)
    assert solution is not None
    assert solution.ways == {}
    bare = Program(Step([5 * MB], [1.0], 1, [0], RATES), [], may_move=True, may_recompute=True)
    solution = solved(bare, 5 * MB)
    assert solution is not None
    assert solution.step_ms == pytest.approx(1.0)
    assert solved(bare, 4 * MB) is None


# --- all choices of small steps -------------------------------------------------------------------

SMALL = trained(PURE, most=7, least=3, most_regions=1, rows=(4096, 16384))
MOST = 6


@settings(DRAWN, max_examples=40)
@given(SMALL, st.sampled_from((0.02, 0.3, 0.6, 1.0)))
def test_no_choice_is_faster_than_the_bound(drawn: Drawn, share: float) -> None:
    facts = drawn.build()
    search = joint(facts)
    assume(1 <= len(search.found) <= MOST)
    applied = list(every_choice(search))
    top = search.base.no_plan.peak_bytes
    floor = min(outlooks.floor()[1].peak_bytes for _, outlooks in applied)
    limit = int(floor + share * (top - floor))
    fastest = min(fastest_ms(outlooks, limit) for _, outlooks in applied)
    asked = search.base.asked_bytes(limit) + small_bytes(facts)
    solution, bound_ms = solved(search.program, asked), certain_ms(search, asked)
    assert solution is not None
    assert bound_ms is not None
    assert bound_ms <= fastest * (1 + 1e-6) + 0.001
    assert solution.least_ms <= solution.step_ms
    # What is certain is part of what the program counts with.
    assert bound_ms <= solution.least_ms + 0.001


def certain_ms(search: Joint, asked_bytes: int) -> float | None:
    found, step = search.program, search.program.step
    may = {"may_move": found.may_move, "may_recompute": found.may_recompute}
    certain = Program(step, found.found, is_certain=True, **may)
    return certain.bound_ms(asked_bytes, seconds=SECONDS)


def test_only_what_is_certain_proves_a_bound() -> None:
    """The first is read by both others, but only the second is computed again: it could go with
    that, at op 12, not with the third, at op 18."""
    dear = {"can_move": False, "refused": "it draws random numbers"}
    found = (
        activation(0, size_bytes=5 * MB, needed_by=None, is_saved=False, can_move=False),
        activation(1, needed_by=12, inputs=(0,), can_move=False),
        activation(2, needed_by=18, inputs=(0,), **dear),
    )
    during = [10 * MB * (1 <= op <= 12) + 10 * MB * (2 <= op <= 18) for op in range(20)]
    during[9] += 5 * MB
    during[14] += 10 * MB
    step = Step(during, [1.0] * 20, 10, [0], RATES)
    counted, certain = (
        Program(step, found, may_move=False, may_recompute=True, is_certain=is_certain)
        for is_certain in (False, True)
    )
    # As it counts there is none: the first is there during op 14.
    assert solved(counted, 20 * MB) is None
    assert certain.bound_ms(20 * MB, seconds=SECONDS) == pytest.approx(21.0, abs=1e-6)
    assert certain.bound_ms(25 * MB, seconds=SECONDS) == pytest.approx(20.0, abs=1e-6)
    assert certain.bound_ms(9 * MB, seconds=SECONDS) is None


@settings(DRAWN, max_examples=40)
@given(SMALL)
def test_no_choice_has_a_lower_peak_than_the_least(drawn: Drawn) -> None:
    facts = drawn.build()
    search = joint(facts)
    assume(1 <= len(search.found) <= MOST)
    least = search.program.least_peak(seconds=SECONDS)
    assert least is not None
    floor = min(outlooks.planner.floor_bytes for _, outlooks in every_choice(search))
    # It stops where a thousandth could be left.
    assert least.peak_bytes <= 1.001 * floor + small_bytes(facts)


@settings(DRAWN, max_examples=30)
@given(SMALL, st.sampled_from((0.05, 0.4, 0.8)))
def test_more_ways_never_make_the_bound_worse(drawn: Drawn, share: float) -> None:
    search = joint(drawn.build())
    planner = search.base.planner
    step = search.program.step
    limit = int(planner.floor_bytes + share * (planner.peak_bytes - planner.floor_bytes)) + 10
    both, move, again = (
        solved(Program(step, search.found, may_move=m, may_recompute=r), limit)
        for m, r in ((True, True), (True, False), (False, True))
    )
    assert both is not None
    for alone in (move, again):
        if alone is not None:
            assert both.least_ms <= alone.least_ms + 0.001


@settings(DRAWN, max_examples=40)
@given(SMALL, st.sampled_from((0.02, 0.3, 0.6, 1.0)))
def test_without_computing_again_the_bound_is_one_of_what_the_planner_finds(
    drawn: Drawn, share: float
) -> None:
    """As the planner's own bound is: neither is above any plan."""
    search = joint(drawn.build())
    planner = search.base.planner
    found = Program(search.program.step, search.found, may_move=True, may_recompute=False)
    limit = int(planner.floor_bytes + share * (planner.peak_bytes - planner.floor_bytes))
    planned = planner.plan(max(1, limit))
    solution = solved(found, limit + small_bytes(search.facts) + 10)
    assert solution is not None
    assert solution.least_ms <= planned.time.step_ms + 0.001
    assert planned.least_step_ms <= planned.time.step_ms + 1e-6
    if limit >= planner.peak_bytes:
        assert solution.least_ms == pytest.approx(planned.least_step_ms, abs=0.001)


@settings(DRAWN, max_examples=20)
@given(SMALL)
def test_a_lower_limit_is_never_faster_and_solving_again_says_the_same(drawn: Drawn) -> None:
    facts = drawn.build()
    one, other = joint(facts), joint(facts)
    top, floor = one.base.planner.peak_bytes, one.base.planner.floor_bytes
    limits = [top + 10 - (top - floor) * place // 4 for place in range(5)]
    found = [solved(one.program, limit) for limit in limits]
    assert found == [solved(other.program, limit) for limit in reversed(limits)][::-1]
    for looser, tighter in pairwise(found):
        assert looser is not None
        assert tighter is not None
        assert looser.least_ms <= tighter.least_ms + 0.001


def test_the_program_grows_with_the_activations_and_not_with_their_square() -> None:
    layers = [Layer("mm"), Layer("gelu"), Layer("norm"), Layer("mm"), Layer("mul", 0, 3)]
    sizes = []
    for count in (40, 80):
        found = joint(step(layers * count)).program
        sizes.append(sum(len(row) for row, _, _ in found.rows))
    assert sizes[1] < 2.5 * sizes[0]


def test_twin_regions_are_decided_alike() -> None:
    layers = [Layer("mm"), Layer("gelu"), Layer("mm"), Layer("norm")]
    search = joint(step(*[layers] * 4, rows=4096, writes_loss=False))
    count = len(search.found) // 4
    assert {item.size_bytes for item in search.found} >= {16 * MiB}
    ways = [search.program.ways[region * count : (region + 1) * count] for region in range(4)]
    # The last region returns what it hands on to nobody, as the others do.
    assert ways[1] == ways[2]
