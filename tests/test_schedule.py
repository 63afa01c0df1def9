"""The time of a step against a simulation by events, and the lower bound against any plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from math import inf

import pytest
from exact import least_step
from facts_builder import DRAWN, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_steps import planner_of, random_costs

from offplan import memory
from offplan.graph import GraphFacts, StorageId
from offplan.planner import Planner
from offplan.schedule import Absence, Rates, least_step_ms, play, step_time
from offplan.transfers import Transfer

# 1 byte takes 1 ms, each way.
PLAIN = Rates(1000, 1000)


def transfer(
    size_bytes: int,
    offload_after: int,
    release_by: int,
    reload_at: int | None = None,
    needed_by: int | None = None,
) -> Transfer:
    return Transfer(
        region=0,
        storage=StorageId(0),
        start=0,
        stop=size_bytes,
        transfer_bytes=size_bytes,
        offload_after=offload_after,
        release_by=release_by,
        reload_at=reload_at,
        needed_by=needed_by,
    )


# --- by hand --------------------------------------------------------------------------------------


def test_a_copy_that_fits_beside_the_ops_takes_no_time() -> None:
    # Out during op 1, back during op 2.
    found = step_time([5, 5, 5, 5], 2, [transfer(5, 0, 1, 2, 3)], PLAIN)
    assert found == (20, 10, 0)


def test_a_release_waits_for_its_copy_and_so_does_everything_after_it() -> None:
    # Out from 5 to 13; op 1 ends at 10; op 2 starts at 13.
    found = step_time([5, 5, 5], 3, [transfer(8, 0, 1)], PLAIN)
    assert found == (18, 18, 3)


def test_the_need_of_the_first_op_of_a_backward_counts_as_forward() -> None:
    # Out from 1 to 5, back from 5 to 9: the forward's last release ends at 5.
    found = step_time([1, 1], 1, [transfer(4, 0, 0, 1, 1)], PLAIN)
    assert (found.step_ms, found.forward_ms, found.stalled_ms) == (10, 9, 8)
    assert found.backward_ms == 1


def test_copies_of_one_direction_queue_in_the_order_of_their_ops() -> None:
    # a out from 1 to 7; b, ready at 2, only from 7 to 10: op 3 starts at 10.
    moved = [transfer(6, 0, 2), transfer(3, 1, 2)]
    assert step_time([1, 1, 1, 1], 4, moved, PLAIN) == (11, 11, 7)


def test_directions_do_not_queue_for_each_other() -> None:
    # a out 1..3; op 1 until 10; b out 10..20, released by op 2 that ends at 20: no wait.
    # Back at op 3: a 20..22, needed by op 4 at 30; b 22..32, needed by op 5 at 40.
    moved = [transfer(2, 0, 1, 3, 4), transfer(10, 1, 2, 3, 5)]
    assert step_time([1, 9, 10, 10, 10, 1], 3, moved, PLAIN) == (41, 20, 0)


def test_a_reload_waits_for_the_storages_own_copy_and_holds_up_the_next() -> None:
    # Two regions: b's own forward ends with op 0, a's with op 1.  b is out from 1 to 9 and waited
    # for; a from 9 to 11.  Issued at op 2: a, needed first, then b.
    a, b = transfer(2, 1, 1, 2, 3), transfer(8, 0, 0, 2, 4)
    found = step_time([1, 1, 1, 1, 1], 2, [b, a], PLAIN)
    # Op 0 ends at 1, waits to 9; op 1 ends at 10, waits for a to 12; a is back at 14, b at 22.
    assert (found.step_ms, found.forward_ms) == (23, 12)
    assert found.stalled_ms == 8 + 2 + 1 + 7


def test_reloads_issued_by_one_op_run_in_the_order_of_their_needs() -> None:
    late, soon = transfer(5, 0, 1, 2, 4), transfer(1, 0, 1, 2, 3)
    # Out: 1..6 and 6..7; op 1 ends at 8.  Back from 8: soon until 9, late until 14.
    assert step_time([1, 7, 1, 1, 1], 2, [late, soon], PLAIN) == (15, 8, 4)


def test_each_copy_has_its_latency() -> None:
    rates = Rates(1000, 500, latency_s=0.001)
    # Out 1..4 (1 + 2 ms); back 4..9 (1 + 4 ms).
    assert step_time([1, 1], 1, [transfer(2, 0, 0, 1, 1)], rates) == (10, 9, 8)


def test_a_copy_needed_by_the_return_is_waited_for_after_the_last_op() -> None:
    assert step_time([1, 1], 1, [transfer(3, 0, 0, 1, 2)], PLAIN) == (7, 4, 5)


def test_copies_take_their_part_of_the_memorys_rate_from_ops() -> None:
    # 4 ms each way beside ops, and 1 ms of memory each way: ops 1 and 2 start as much later.
    rates = Rates(1000, 1000, memory_bytes_per_s=4000)
    assert step_time([5, 5, 5, 5], 2, [transfer(4, 0, 1, 2, 3)], rates) == (22, 12, 0)


def test_what_waits_for_a_copy_loses_nothing_to_its_memory() -> None:
    # The same as without: out from 5 to 13, and op 2 starts then.
    rates = Rates(1000, 1000, memory_bytes_per_s=4000)
    found = step_time([5, 5, 5], 3, [transfer(8, 0, 1)], rates)
    assert (found.step_ms, found.stalled_ms) == (18, 1)


def test_a_wait_for_a_release_ends_before_a_reload_takes_memory() -> None:
    # Out from 1 to 5, which op 0's release waits for; 2 ms of memory at each end, the first of them
    # meanwhile.  Back from 5 to 9.
    rates = Rates(1000, 1000, memory_bytes_per_s=2000)
    found = play([1, 1], 1, [transfer(4, 0, 0, 1, 1)], rates)
    assert found.stalls == ((1, 2, 5), (1, 2, 9))
    assert found.starts_ms == (0, 9, 10)


def test_each_copy_takes_time_of_the_device_for_its_events() -> None:
    # 4 ms each way beside ops, and 1 ms each way: ops 1 and 2 start as much later.
    rates = Rates(1000, 1000, order_s=0.001)
    assert step_time([5, 5, 5, 5], 2, [transfer(4, 0, 1, 2, 3)], rates) == (22, 12, 0)
    # Two copies take twice as much, of however few bytes.
    halves = [transfer(2, 0, 1, 2, 3), transfer(2, 0, 1, 2, 3)]
    assert step_time([5, 5, 5, 5], 2, halves, rates) == (24, 14, 0)


def test_an_op_waits_for_a_host_that_is_not_far_enough_ahead() -> None:
    moved = [transfer(1, 0, 1, 2, 3)]
    rates = Rates(1000, 1000, host_s=0.003)
    # Op 1 was issued 1 ms before it starts, and is issued 3 ms later.
    assert play([5, 5, 5, 5], 2, moved, rates, [0, 1, 9, 9]).starts_ms == (0, 7, 12, 17, 22)
    # Op 2 comes after the second copy, whose 3 ms add up: 6 ms later, of which 2 have passed.
    assert play([5, 5, 5, 5], 2, moved, rates, [0, 1, 1, 9]).starts_ms == (0, 7, 15, 20, 25)
    assert step_time([5, 5, 5, 5], 2, moved, rates, [9, 9, 9, 9]) == (20, 10, 0)
    assert step_time([5, 5, 5, 5], 2, moved, rates) == (20, 10, 0)


# --- against events -------------------------------------------------------------------------------


def simulated(
    op_ms: Sequence[float],
    forward_count: int,
    transfers: Sequence[Transfer],
    rates: Rates,
    ahead_ms: Sequence[float],
) -> tuple[float, float]:
    """The end of the step and of the forward: what can start does, until nothing is left to do.

    Every event has the events that must have ended before it, and starts when they have.
    """

    def taken_ms(copies: Sequence[Transfer]) -> float:
        return sum(rates.taken_ms(copy.transfer_bytes) for copy in copies)

    plain_ms = [0.0, *accumulate(op_ms)]
    after: dict[object, list[object]] = {}
    takes: dict[object, float] = {}

    def event(name: object, ms: float, *before: object) -> None:
        takes[name] = ms
        after[name] = list(before)

    numbered = list(enumerate(transfers))
    out_queue = sorted(numbered, key=lambda item: (item[1].offload_after, item[0]))
    back_queue = sorted(
        ((n, t) for n, t in numbered if t.reload_at is not None),
        key=lambda item: (item[1].reload_at, item[1].needed_by, item[0]),
    )
    for op in range(len(op_ms) + 1):
        before: list[object] = [("done", op - 1)] if op else []
        event(("come", op), 0.0, *before)
        reloaded = [t for t in transfers if t.reload_at == op]
        event(("memory read", op), taken_ms(reloaded), ("come", op))
        needed = [("back", n) for n, t in numbered if t.needed_by == op]
        event(("begin", op), 0.0, ("memory read", op), *needed)
        # All copies that the host issues before the op.
        before_it = sum(t.offload_after < op for t in transfers)
        before_it += sum(t.reload_at is not None and t.reload_at <= op for t in transfers)
        late_ms = plain_ms[op] - ahead_ms[op] + before_it * rates.host_ms if op < len(op_ms) else 0
        event(("issued", op), max(0.0, late_ms))
        event(("op", op), op_ms[op] if op < len(op_ms) else 0.0, ("begin", op), ("issued", op))
        offloaded = [t for t in transfers if t.offload_after == op]
        event(("memory written", op), taken_ms(offloaded), ("op", op))
        released = [("out", n) for n, t in numbered if t.release_by == op]
        event(("done", op), 0.0, ("memory written", op), *released)
    last: object = None
    for number, item in out_queue:
        before = [("op", item.offload_after), *([last] if last else [])]
        last = ("out", number)
        event(last, rates.d2h_ms(item.transfer_bytes), *before)
    last = None
    for number, item in back_queue:
        before = [("come", item.reload_at), ("out", number), *([last] if last else [])]
        last = ("back", number)
        event(last, rates.h2d_ms(item.transfer_bytes), *before)
    ended: dict[object, float] = {}
    while len(ended) < len(takes):
        ready = [
            name for name in takes if name not in ended and all(b in ended for b in after[name])
        ]
        assert ready, "events wait for each other"
        for name in ready:
            ended[name] = takes[name] + max((ended[b] for b in after[name]), default=0.0)
    return ended["begin", len(op_ms)], ended["begin", forward_count]


@st.composite
def timed_steps(
    draw: st.DrawFn,
) -> tuple[list[float], int, list[Transfer], Rates, list[float]]:
    forward = draw(st.integers(1, 6))
    backward = draw(st.integers(0, 6))
    times = st.sampled_from((0.0, 0.5, 1.0, 3.0))
    op_ms = draw(st.lists(times, min_size=forward + backward, max_size=forward + backward))
    found = []
    for _ in range(draw(st.integers(0, 6))):
        after = draw(st.integers(0, forward - 1))
        release = draw(st.integers(after, forward - 1))
        at = need = None
        if draw(st.booleans()):
            need = draw(st.integers(forward, forward + backward))
            at = draw(st.integers(forward, need))
        found.append(transfer(draw(st.integers(1, 9)), after, release, at, need))
    rate = st.sampled_from((500.0, 1000.0, 4000.0))
    latency, memory_rate = st.sampled_from((0.0, 0.001)), st.sampled_from((inf, 8000.0, 2000.0))
    order, host = st.sampled_from((0.0, 0.0005)), st.sampled_from((0.0, 0.001))
    rates = Rates(draw(rate), draw(rate), draw(latency), draw(memory_rate), draw(order), draw(host))
    ahead = st.sampled_from((0.0, 1.0, 2.5, inf))
    return op_ms, forward, found, rates, [draw(ahead) for _ in op_ms]


@settings(DRAWN, max_examples=300)
@given(timed_steps())
def test_a_step_takes_as_long_as_its_events(
    drawn: tuple[list[float], int, list[Transfer], Rates, list[float]],
) -> None:
    op_ms, forward_count, moved, rates, ahead_ms = drawn
    found = step_time(op_ms, forward_count, moved, rates, ahead_ms)
    step_ms, forward_ms = simulated(op_ms, forward_count, moved, rates, ahead_ms)
    assert found.step_ms == pytest.approx(step_ms)
    assert found.forward_ms == pytest.approx(forward_ms)
    copies = [t for t in moved for _ in range(1 + (t.reload_at is not None))]
    taken_ms = sum(rates.taken_ms(copy.transfer_bytes) for copy in copies)
    waits_ms = step_ms - sum(op_ms) - taken_ms
    if rates.host_s:
        # Waits for the host are not for copies.
        assert found.stalled_ms <= waits_ms + 1e-9
    else:
        assert found.stalled_ms == pytest.approx(waits_ms)


# --- the lower bound ------------------------------------------------------------------------------


def test_what_must_leave_before_an_op_crosses_the_link_before_it() -> None:
    # Op 2 may hold 6 of 10 bytes, and both storages are only there after op 1: 4 ms between.
    absences = [Absence(1, 4, 5, 5), Absence(1, 5, 5, 5)]
    found = least_step_ms([1] * 6, 3, [0, 10, 10, 0, 0, 0], absences, 10, PLAIN)
    assert found == 6
    found = least_step_ms([1] * 6, 3, [0, 6, 10, 0, 0, 0], absences, 6, PLAIN)
    # Op 0 and 1, then 4 ms, then op 2; back within ops 3 and 4 only 2 ms, so 2 more to wait.
    assert found == 2 + 4 + 1 + 4 + 1


def test_what_may_leave_earlier_covers_what_is_needed_later() -> None:
    absences = [Absence(0, 5, 4, 4), Absence(1, 4, 6, 6)]
    # The first one covers all 4 bytes, during op 1 and back during ops 3 and 4.
    assert least_step_ms([4] * 6, 3, [0, 0, 10, 0, 0, 0], absences, 6, PLAIN) == 24


def test_the_cheapest_bytes_are_what_must_cross() -> None:
    # A packed storage frees 8 for 2 across the link.
    absences = [Absence(0, None, 8, 2), Absence(0, None, 8, 8)]
    found = least_step_ms([1, 1, 1], 2, [0, 12, 0], absences, 4, PLAIN)
    assert found == 1 + 2 + 2


def test_bytes_that_never_come_back_can_lower_an_op_after_the_reload() -> None:
    # 8 of 10 bytes are lost; op 4, after the need, is 8 over the limit: nothing else has to move.
    lost = Absence(0, 3, 10, 2, lost_bytes=8, last=4)
    other = Absence(0, 5, 8, 8)
    found = least_step_ms([2] * 6, 2, [0, 0, 0, 0, 16, 0], [lost, other], 8, PLAIN)
    assert found == 12


def test_the_bound_of_moving_everything_counts_every_byte_in_each_phase() -> None:
    absences = [Absence(0, 3, 10, 10), Absence(1, 2, 5, 5)]
    found = least_step_ms([1] * 4, 2, [0] * 4, absences, 100, PLAIN, everything_moves=True)
    # 15 out after op 0; then 5 back before op 2, and 15 before op 3.
    assert found == 1 + 15 + 15 + 1


def drawn_transfers(planner: Planner, choice: random.Random) -> list[Transfer]:
    """Any subset, released anywhere and reloaded anywhere that its windows allow."""
    found = []
    for candidate in planner.candidates:
        if choice.random() < 0.3:
            continue
        span, need = candidate.span, candidate.needed_by
        at = None if need is None else choice.randint(span.backward, need)
        footprint = candidate.move.footprint
        last = max(span.forward_end - 1, candidate.offload_after)
        found.append(
            Transfer(
                region=candidate.move.region,
                storage=candidate.move.storage,
                start=footprint.start,
                stop=footprint.stop,
                transfer_bytes=footprint.transfer_bytes,
                offload_after=candidate.offload_after,
                release_by=choice.randint(candidate.offload_after, last),
                reload_at=at,
                needed_by=need,
                packed=footprint.packed,
            )
        )
    return found


@settings(DRAWN, max_examples=80)
@given(steps(), st.integers(0, 2**32))
def test_no_plan_is_faster_than_the_bound_for_its_own_peak(facts: GraphFacts, seed: int) -> None:
    choice = random.Random(seed)
    planner = planner_of(facts, random_costs(facts, choice))
    absences = [
        Absence(
            c.offload_after,
            c.needed_by,
            c.size_bytes,
            c.move.footprint.transfer_bytes,
            c.lost_bytes,
            c.last,
        )
        for c in planner.candidates
    ]
    op_ms, rates = planner.costs.op_ms, planner.costs.rates
    for _ in range(4):
        moved = drawn_transfers(planner, choice)
        limit = max(memory.curve(facts, moved), default=0)
        time = step_time(op_ms, planner.forward_count, moved, rates)
        found = least_step_ms(op_ms, planner.forward_count, planner.during, absences, limit, rates)
        assert found <= time.step_ms * (1 + 1e-9)
        assert found >= sum(op_ms) * (1 - 1e-9)


@settings(DRAWN, max_examples=30)
@given(steps(most_regions=1, most_ops=5), st.integers(0, 2**32))
def test_the_exact_optimum_is_no_faster_than_the_bound(facts: GraphFacts, seed: int) -> None:
    choice = random.Random(seed)
    planner = planner_of(facts, random_costs(facts, choice))
    if planner.floor_bytes == planner.peak_bytes:
        return
    limit = choice.randint(planner.floor_bytes, planner.peak_bytes - 1)
    planned = planner.plan(limit)
    found = least_step(planner, limit, 1.02 * planned.time.step_ms + 0.01)
    assert planned.least_step_ms <= found.step_ms * (1 + 1e-6)


def test_what_must_cross_takes_its_part_of_the_memorys_rate_at_least() -> None:
    # One of two storages of 5 bytes must be away during op 2, the cheaper there and back: 2 ms each
    # way.  Or both, of which the other never comes back.
    absences = [Absence(1, 4, 5, 5), Absence(0, None, 5, 9)]
    rates = Rates(1e9, 1e9, memory_bytes_per_s=2500)
    step = [1.0] * 6, 3, [0, 10, 10, 0, 0, 0], absences
    assert least_step_ms(*step, 5, rates) == pytest.approx(6 + 9 / 2.5)
    assert least_step_ms(*step, 6, rates) == pytest.approx(6 + 0.8 * 9 / 2.5)
    both = least_step_ms(*step, 5, rates, everything_moves=True)
    assert both == pytest.approx(6 + (10 + 9) / 2.5)


def test_a_looser_limit_has_no_higher_bound() -> None:
    absences = [Absence(op, 19 - op, 10, 10) for op in range(10)]
    held = [*accumulate([10] * 10), *reversed([*accumulate([10] * 10)])]
    bounds = [least_step_ms([1] * 20, 10, held, absences, limit, PLAIN) for limit in range(20, 101)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1] == 20
