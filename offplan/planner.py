"""Which movable storages leave the device, and when each copy is issued, released and brought back.

Indexes are positions of ops on the timeline (``graph.timeline``); an index one past the last op of
a backward stands for its return.

Windows
1.  A storage is *used* in the forward by each op that reads or makes any value on it, saved or not.
    ``offload_after`` is the last such op: the copy to the host is issued when it has run.
2.  ``needed_by`` is the first op of the region's backward that reads any value on the storage, or
    its return if it only returns one; None if it does neither: it then leaves and is never
    reloaded.  (Partitioners save no such values; a hand-written autograd function can.)
3.  A storage *can be away* during every op between the two.  The *floor* is the peak if every
    movable storage is away whenever it can be.  No plan has a lower one, if none is packed: packing
    takes memory of its own, next to the storage.  The floor leaves out what raises it so.

Choice, for a limit on the peak
4.  A *deficit* is what an op exceeds the limit by without a plan.  Storages are taken in an order
    (longest away first, in time; and others; always last those whose copies the host issues when it
    is not far enough ahead) while any op has a deficit that they can lower; then
    those that the others make unnecessary are given up, in the opposite order.  So bytes that do
    not lower the peak under the limit stay, unless moving them makes the step faster.
    Of all that is tried the least predicted step time wins.  As long as that is not close to the
    lower bound, choices under tighter limits are tried, and ones that differ by one or two storages
    from the best, as far as a fixed amount of work goes.  So a larger budget can in rare cases get
    a slightly slower plan.
5.  A limit under the floor is refused.  Budget 0 takes every movable storage, and what peak that
    leaves as the limit.

Several runs of one graph
6.  Regions that compute the same can be runs of one compiled graph, in which a transfer is there or
    not, and at one place.  Storages saved at the same position of such *twins* are taken together;
    they are released where the first of them has to be, and reloaded where the last one can be.

Placement
7.  Copies to the host are issued at once, in the order of ``offload_after``, and run in that order.
    ``release_by`` is as late as the limit allows: just before the op that would exceed it, and
    at the latest at the end of the region's forward.  A late release costs no memory that is asked
    for, and waits the least.
8.  Copies to the device are issued in the order in which they are needed, or in which they would
    have to start to be in time, whichever is faster.  ``reload_at`` is as early as the limit
    allows, for the same reason.  A compiler can run a copy earlier than it stands: before the op
    of its ``landings``, where its memory then counts.

Pure and deterministic.  Takes time in proportion to ops, and to moved storages times the logarithm
of ops.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from math import inf
from operator import itemgetter
from typing import NamedTuple

from offplan.choices import Tried, search, slim
from offplan.curve import Curve
from offplan.errors import BudgetError
from offplan.graph import GraphFacts
from offplan.memory import Timeline
from offplan.schedule import Absence, Rates, StepTime, least_step_ms, step_time
from offplan.transfers import Move, Transfer
from offplan.units import format_size
from offplan.windows import Candidate, candidates, send_away, spans_of, together, with_all_away

# Limits under the one that is asked for, in steps of this share of the way from the floor to the
# peak: the same ones for any limit.  What is moved for one of them leaves room to bring copies back
# early, and can be faster.
_STEPS = 6
# A plan this close to the lower bound is good enough not to look for another.
_CLOSE = 0.005
# How much is searched for a better choice: choices tried, times ops and storages of each.
_SEARCHED = 30_000
_MOST_TRIED = 100


class Costs(NamedTuple):
    """Milliseconds of each op, the rates of the link, and how far the host is ahead of each op, in
    milliseconds (empty: far enough)."""

    op_ms: Sequence[float]
    rates: Rates
    ahead_ms: Sequence[float] = ()


@dataclass(frozen=True)
class Planned:
    """Transfers in the order that they are offloaded, and what they are predicted to do.

    ``peak_bytes`` is the peak without a plan and ``floor_bytes`` the least of any plan (definition
    3), both of what ops ask for; ``least_step_ms`` is a lower bound on the step time of any plan
    within the limit.
    """

    transfers: tuple[Transfer, ...]
    peak_bytes: int
    floor_bytes: int
    time: StepTime
    least_step_ms: float


class Planner:
    """Plans for one step, for any number of budgets."""

    def __init__(
        self,
        facts: GraphFacts,
        movable: Sequence[Move],
        memory: Timeline,
        costs: Costs,
        host_bytes: int | None = None,
        landings: Sequence[int] | None = None,
    ) -> None:
        self.landings = range(facts.op_count + 1) if landings is None else landings
        self.during = memory.during
        self.unplanned = Curve(memory.during)
        self.costs = costs
        self.starts = [0.0, *accumulate(costs.op_ms)]
        self.spans = spans_of(facts)
        self.forward_count = self.spans[-1].forward_end if self.spans else 0
        self.candidates = candidates(facts, movable, memory.through, self.spans, self.landings)
        self.affordable = self.candidates
        self.affordable = _within(self.by_time_away(), host_bytes)
        self.peak_bytes = max(self.during, default=0)
        self.everything_bytes = with_all_away(self.unplanned, self.affordable).top
        self.floor_bytes, self._at_floor = self._least_peak()

    def plan(self, budget_bytes: int) -> Planned:
        """The plan for ``budget_bytes``; 0 moves everything, at the floor."""
        if budget_bytes == 0:
            limit = self.everything_bytes
            least_ms = self._least_ms(limit, everything_moves=True)
            _, everything = self.placed(self.affordable, limit, (1 + _CLOSE) * least_ms)
            return self._planned(everything, least_ms)
        least_ms = self._least_ms(budget_bytes)
        if budget_bytes >= self.peak_bytes:
            return self._planned((), least_ms)
        if budget_bytes < self.floor_bytes:
            raise self._infeasible(budget_bytes)
        return self._planned(self._best(budget_bytes, least_ms), least_ms)

    def plan_least(self) -> Planned:
        """The plan that moves the least; of as little, what is longest away.  Where nothing can
        move, it moves nothing."""
        groups = together(self.by_time_away())
        least = min(groups, key=_moved_bytes, default=[])
        _, transfers = self.placed(least, max(self.peak_bytes, self.everything_bytes), inf)
        return self._planned(transfers, self.starts[-1])

    def _least_peak(self) -> tuple[int, list[Candidate]]:
        """The floor, and what is away for it: all but what raises the peak by being packed."""
        kept = together(self.by_time_away())
        least = self.everything_bytes, list(self.affordable)
        curve = with_all_away(self.unplanned, self.affordable)
        while True:
            peak = curve.last_above(0, len(self.during), curve.top - 1)
            raising = [group for group in kept if _raised_bytes(group, peak) > 0]
            if not raising:
                break
            dropped = max(raising, key=lambda group: _raised_bytes(group, peak))
            kept.remove(dropped)
            for candidate in dropped:
                send_away(curve, candidate, -1)
            if curve.top < least[0]:
                least = curve.top, [candidate for group in kept for candidate in group]
        return least if least[0] < self.peak_bytes else (self.peak_bytes, [])

    def movable_within(self, limit: int) -> list[Candidate]:
        """What can be away under ``limit``: together, it never breaks it."""
        return self.affordable if limit >= self.everything_bytes else self._at_floor

    def _best(self, limit: int, least_ms: float) -> tuple[Transfer, ...]:
        """The fastest of several choices placed under ``limit``; of equally fast ones the least."""
        movable = {candidate.move.storage for candidate in self.movable_within(limit)}
        by_size = self._by_size()
        orders = [
            sorted((c for c in order if c.move.storage in movable), key=self._comes_early)
            for order in (
                self.by_time_away(),
                self._by_offload(),
                self._by_worth(),
                by_size,
                by_size[::-1],
            )
        ]
        tried = Tried(self, limit, (1 + _CLOSE) * least_ms)
        for order in orders:
            tried.add(self.chosen(order, limit))
        step = (self.peak_bytes - self.floor_bytes) / _STEPS
        for number, order in product(range(_STEPS), orders):
            inner = self.floor_bytes + int(number * step)
            if inner >= limit or tried.is_close:
                break
            tried.add(self.chosen(order, inner))
        effort = len(self.during) + 10 * len(movable)
        count = min(_MOST_TRIED, _SEARCHED // max(1, effort))
        if not tried.is_close:
            search(self, limit, tried, orders[0], count)
        slim(self, limit, tried, count)
        return tried.best().transfers

    @cached_property
    def _late_after(self) -> set[int]:
        """The ops behind which a copy is issued when the host is not far enough ahead."""
        found, following_ms = set(), inf
        for op, ahead_ms in reversed(list(enumerate(self.costs.ahead_ms))):
            if following_ms < self.costs.rates.host_ms:
                found.add(op)
            following_ms = ahead_ms if ahead_ms < inf else following_ms
        return found

    def _comes_early(self, candidate: Candidate) -> bool:
        """Whether the op after its offload would wait for the host that issues the copy."""
        return candidate.offload_after in self._late_after

    def chosen(self, order: Sequence[Candidate], limit: int) -> list[Candidate]:
        """Storages whose absence brings every op within ``limit`` (definition 4)."""
        curve = self.unplanned.copy()
        taken: list[list[Candidate]] = []
        left = together(order)
        found = True
        # Packing one storage can push an op over the limit that others then have to lower.
        while found and curve.top > limit:
            passed, found = [], False
            for group in left:
                if any(_lowers(curve, candidate, limit) for candidate in group):
                    for candidate in group:
                        send_away(curve, candidate, 1)
                    taken.append(group)
                    found = True
                else:
                    passed.append(group)
            left = passed
        needed: list[Candidate] = []
        for group in reversed(taken):
            for candidate in group:
                send_away(curve, candidate, -1)
            if any((curve.highest(c.offload_after, c.last + 1) or 0) > limit for c in group):
                for candidate in group:
                    send_away(curve, candidate, 1)
                needed += group
        return needed

    def by_time_away(self) -> list[Candidate]:
        def time_away(candidate: Candidate) -> float:
            start, stop = candidate.away
            return self.starts[max(start, stop)] - self.starts[start]

        return sorted(self.affordable, key=lambda c: (-time_away(c), c.move.region, c.move.storage))

    def _by_worth(self) -> list[Candidate]:
        """Those that are longest away for what they carry first."""

        def cost(candidate: Candidate) -> float:
            start, stop = candidate.away
            away_ms = self.starts[max(start, stop)] - self.starts[start]
            return candidate.move.footprint.transfer_bytes / away_ms if away_ms else float("inf")

        return sorted(self.affordable, key=lambda c: (cost(c), c.move.region, c.move.storage))

    def _by_size(self) -> list[Candidate]:
        def size(candidate: Candidate) -> int:
            return candidate.move.footprint.transfer_bytes

        return sorted(self.affordable, key=lambda c: (size(c), c.move.region, c.move.storage))

    def _by_offload(self) -> list[Candidate]:
        return sorted(self.affordable, key=lambda c: (c.offload_after, c.move.storage))

    # --- placement --------------------------------------------------------------------------------

    def placed(
        self, chosen: Sequence[Candidate], limit: int, close_ms: float
    ) -> tuple[float, tuple[Transfer, ...]]:
        """Transfers of ``chosen`` with a peak within ``limit`` (definitions 6 to 8), and the time
        of the step.  A time of ``close_ms`` is good enough."""
        chosen = sorted(chosen, key=lambda c: (c.offload_after, c.move.storage))
        releases = _alike(chosen, self._releases(chosen, limit))
        back = [place for place, c in enumerate(chosen) if c.needed_by is not None]
        by_need = sorted(back, key=lambda place: (chosen[place].needed_by, place))
        transfers = _transfers(chosen, releases, self._reloads(chosen, limit, by_need, by_need))
        step_ms = self.time(transfers).step_ms
        by_start = sorted(back, key=lambda place: (self._latest_start_ms(chosen[place]), place))
        if step_ms <= close_ms or by_start == by_need:
            return step_ms, transfers
        others = _transfers(chosen, releases, self._reloads(chosen, limit, by_need, by_start))
        return min((step_ms, transfers), (self.time(others).step_ms, others), key=itemgetter(0))

    def _latest_start_ms(self, candidate: Candidate) -> float:
        """When its copy to the device has to start, if ops wait for nothing."""
        assert candidate.needed_by is not None
        copy_ms = self.costs.rates.h2d_ms(candidate.move.footprint.transfer_bytes)
        return self.starts[candidate.needed_by] - copy_ms

    def _releases(self, chosen: Sequence[Candidate], limit: int) -> list[int]:
        """``release_by`` of each; ``chosen`` is in the order of offloads."""
        releases = [max(c.span.forward_end - 1, c.offload_after) for c in chosen]
        in_flight: deque[int] = deque()
        issued, gone_bytes, staging_bytes = 0, 0, 0
        last = max(releases, default=-1)
        for op in range(last + 1):
            first = issued
            while issued < len(chosen) and chosen[issued].offload_after == op:
                staging_bytes += chosen[issued].staging_bytes
                issued += 1
            while in_flight and self.during[op] - gone_bytes + staging_bytes > limit:
                place = in_flight.popleft()
                releases[place] = min(releases[place], op - 1)
                gone_bytes += chosen[place].size_bytes
                staging_bytes -= chosen[place].staging_bytes
            in_flight.extend(range(first, issued))
            while in_flight and releases[in_flight[0]] == op:
                place = in_flight.popleft()
                gone_bytes += chosen[place].size_bytes
                staging_bytes -= chosen[place].staging_bytes
        return releases

    def _reloads(
        self,
        chosen: Sequence[Candidate],
        limit: int,
        by_need: Sequence[int],
        wanted: Sequence[int],
    ) -> list[int | None]:
        """``reload_at`` of each, at the same place in all twins; None for one that is not needed.

        They are issued in the order ``wanted``; but before one that would make another come too
        late goes the one that is needed first.
        """
        curve = with_all_away(self.unplanned, chosen)
        reloads: list[int | None] = [None] * len(chosen)
        earliest = 0

        def opening(place: int) -> int:
            c = chosen[place]
            assert c.back_by is not None
            start = max(earliest, c.span.backward)
            room = limit - c.back_bytes - c.staging_bytes
            full = curve.last_above(self.landings[start], c.back_by, room)
            # The first place from which it does not run as early as that.
            return start if full is None else bisect_left(self.landings, full + 1, start)

        turns, urgent = deque(wanted), deque(by_need)
        while turns:
            place = turns[0]
            at = opening(place)
            if at > (chosen[urgent[0]].needed_by or 0):
                place = urgent[0]
                at = opening(place)
            reloads[place] = earliest = at
            c = chosen[place]
            curve.add(self.landings[at], c.back_by or 0, c.back_bytes + c.staging_bytes)
            while turns and reloads[turns[0]] is not None:
                turns.popleft()
            while urgent and reloads[urgent[0]] is not None:
                urgent.popleft()
        return _reloaded_alike(chosen, reloads)

    # --- what it comes to -------------------------------------------------------------------------

    def time(self, transfers: Sequence[Transfer], speed: float = 1.0) -> StepTime:
        """The step's time under ``transfers``, with ``speed`` times the link's speed."""
        rates = self.costs.rates.times(speed)
        return step_time(
            self.costs.op_ms, self.forward_count, transfers, rates, self.costs.ahead_ms
        )

    def _least_ms(self, limit: int, *, everything_moves: bool = False) -> float:
        absences = [
            Absence(
                c.offload_after,
                c.needed_by,
                c.size_bytes,
                c.move.footprint.transfer_bytes,
                c.lost_bytes,
                c.last,
            )
            for c in self.affordable
        ]
        return least_step_ms(
            self.costs.op_ms,
            self.forward_count,
            self.during,
            absences,
            limit,
            self.costs.rates,
            everything_moves=everything_moves,
        )

    def _planned(self, transfers: tuple[Transfer, ...], least_ms: float) -> Planned:
        time = self.time(transfers)
        return Planned(transfers, self.peak_bytes, self.floor_bytes, time, least_ms)

    def _infeasible(self, budget_bytes: int) -> BudgetError:
        return BudgetError(
            f"no plan keeps the peak under {format_size(budget_bytes)}: with everything movable "
            f"moved it is {format_size(self.floor_bytes)}",
            fix=f"--budget {self.floor_bytes}, or a smaller batch",
        )


def _within(order: Sequence[Candidate], host_bytes: int | None) -> list[Candidate]:
    """Those of ``order`` that fit into the host memory, taken in that order."""
    if host_bytes is None:
        return list(order)
    taken: list[Candidate] = []
    left = host_bytes
    for group in together(order):
        size_bytes = _moved_bytes(group)
        if size_bytes <= left:
            left -= size_bytes
            taken += group
    return taken


def _transfers(
    chosen: Sequence[Candidate], releases: Sequence[int], reloads: Sequence[int | None]
) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(
            region=candidate.move.region,
            storage=candidate.move.storage,
            start=candidate.move.footprint.start,
            stop=candidate.move.footprint.stop,
            transfer_bytes=candidate.move.footprint.transfer_bytes,
            packed=candidate.move.footprint.packed,
            offload_after=candidate.offload_after,
            release_by=release,
            reload_at=reload,
            needed_by=candidate.needed_by,
        )
        for candidate, release, reload in zip(chosen, releases, reloads, strict=True)
    )


def _alike(chosen: Sequence[Candidate], releases: Sequence[int]) -> list[int]:
    """``releases``, at the same place in all twins: where the first of them has to be."""
    first: dict[tuple[int, int], int] = {}
    for candidate, release in zip(chosen, releases, strict=True):
        place = release - candidate.span.forward
        first[candidate.twins] = min(first.get(candidate.twins, place), place)
    return [first[candidate.twins] + candidate.span.forward for candidate in chosen]


def _reloaded_alike(chosen: Sequence[Candidate], reloads: Sequence[int | None]) -> list[int | None]:
    """``reloads``, at the same place in all twins: where the last of them can be."""
    last: dict[tuple[int, int], int] = {}
    for candidate, reload in zip(chosen, reloads, strict=True):
        if reload is not None:
            place = reload - candidate.span.backward
            last[candidate.twins] = max(last.get(candidate.twins, place), place)
    return [
        None if reload is None else last[candidate.twins] + candidate.span.backward
        for candidate, reload in zip(chosen, reloads, strict=True)
    ]


def _moved_bytes(group: Sequence[Candidate]) -> int:
    return sum(candidate.move.footprint.transfer_bytes for candidate in group)


def _raised_bytes(group: Sequence[Candidate], op: int | None) -> int:
    """How much higher op is for packing ``group``."""
    return sum(
        c.staging_bytes * (op == c.offload_after)
        + (c.staging_bytes - c.lost_bytes) * (op == c.back_by)
        for c in group
    )


def _lowers(curve: Curve, candidate: Candidate, limit: int) -> bool:
    """Whether ``candidate`` lowers an op that exceeds ``limit``."""
    start, stop = candidate.away
    if candidate.lost_bytes:
        stop = candidate.last + 1
    return (curve.highest(start, stop) or 0) > limit
