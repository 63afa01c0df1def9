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
    (longest away first, in time; and others) while any op has a deficit that they can lower; then
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
    allows, for the same reason.

Pure and deterministic.  Takes time in proportion to ops, and to moved storages times the logarithm
of ops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import itemgetter
from typing import NamedTuple

from offplan.allocator import charged_bytes
from offplan.curve import Curve
from offplan.errors import BudgetError
from offplan.graph import GraphFacts, Op, Region, StorageId, ValueId, timeline
from offplan.memory import Timeline
from offplan.schedule import Absence, Rates, StepTime, least_step_ms, step_time
from offplan.transfers import (
    DEVICE_ALIGNMENT_BYTES,
    Move,
    Transfer,
    reloaded_bytes,
)
from offplan.units import format_size

# Limits under the one that is asked for, in steps of this share of the way from the floor to the
# peak: the same ones for any limit.  What is moved for one of them leaves room to bring copies back
# early, and can be faster.
_STEPS = 6
# A plan that moves fewer bytes is preferred unless another one is faster by more than this share.
_WORTH_IT = 0.001
# A plan this close to the lower bound is good enough not to look for another.
_CLOSE = 0.005
# How much is searched for a better choice: choices tried, times ops and storages of each.
_SEARCHED = 30_000
_MOST_TRIED = 100


@dataclass(frozen=True)
class Resources:
    """What a plan may use: ``budget_bytes`` of peak (0: the floor, and everything moves), and
    ``host_bytes`` of host memory (None: any)."""

    budget_bytes: int
    host_bytes: int | None = None


class Costs(NamedTuple):
    """Milliseconds of each op, and the rates of the link."""

    op_ms: Sequence[float]
    rates: Rates


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


@dataclass(frozen=True)
class _Span:
    """Where one region's ops lie: forward ``[forward, forward_end)``, backward likewise.

    ``returned`` is the op with which memory counts what the backward's return holds.
    """

    forward: int
    forward_end: int
    backward: int
    backward_end: int
    returned: int


@dataclass(frozen=True)
class _Uses:
    last_forward: Mapping[StorageId, int]
    first_backward: Mapping[tuple[int, StorageId], int]


class _Candidate(NamedTuple):
    """A movable storage with its window (definitions 1 and 2), in blocks of the allocator.

    Without a plan it is held through op ``last``.  During op ``back_by`` it must be back (None:
    never).  ``staging_bytes`` are a packed transfer's.  ``twins`` is the same for storages that are
    taken together (definition 6).
    """

    move: Move
    size_bytes: int
    back_bytes: int
    staging_bytes: int
    offload_after: int
    needed_by: int | None
    back_by: int | None
    last: int
    span: _Span
    twins: tuple[int, int]

    @property
    def away(self) -> tuple[int, int]:
        """The ops ``[start, stop)`` during which it can be away."""
        return self.offload_after + 1, self.last + 1 if self.back_by is None else self.back_by

    @property
    def lost_bytes(self) -> int:
        """What does not come back of it, at all."""
        return 0 if self.back_by is None else self.size_bytes - self.back_bytes


def plan_transfers(
    facts: GraphFacts,
    movable: Sequence[Move],
    memory: Timeline,
    costs: Costs,
    resources: Resources,
) -> Planned:
    """The transfers that keep the peak within ``resources`` at the least predicted step time.

    Raises ``BudgetError``, naming the floor, if no plan can.
    """
    return Planner(facts, movable, memory, costs, resources.host_bytes).plan(resources.budget_bytes)


class Planner:
    """Plans for one step, for any number of budgets."""

    def __init__(
        self,
        facts: GraphFacts,
        movable: Sequence[Move],
        memory: Timeline,
        costs: Costs,
        host_bytes: int | None = None,
    ) -> None:
        self.during = memory.during
        self.unplanned = Curve(memory.during)
        self.costs = costs
        self.starts = [0.0, *accumulate(costs.op_ms)]
        self.spans = _spans(facts)
        self.forward_count = self.spans[-1].forward_end if self.spans else 0
        self.candidates = _candidates(facts, movable, memory.last, self.spans)
        self.affordable = self.candidates
        self.affordable = _within(self.by_time_away(), host_bytes)
        self.peak_bytes = max(self.during, default=0)
        self.everything_bytes = _with_all_away(self.unplanned, self.affordable).top
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

    def _least_peak(self) -> tuple[int, list[_Candidate]]:
        """The floor, and what is away for it: all but what raises the peak by being packed."""
        kept = _together(self.by_time_away())
        least = self.everything_bytes, list(self.affordable)
        curve = _with_all_away(self.unplanned, self.affordable)
        while True:
            peak = curve.last_above(0, len(self.during), curve.top - 1)
            raising = [group for group in kept if _raised_bytes(group, peak) > 0]
            if not raising:
                break
            dropped = max(raising, key=lambda group: _raised_bytes(group, peak))
            kept.remove(dropped)
            for candidate in dropped:
                _send_away(curve, candidate, -1)
            if curve.top < least[0]:
                least = curve.top, [candidate for group in kept for candidate in group]
        return least if least[0] < self.peak_bytes else (self.peak_bytes, [])

    def movable_within(self, limit: int) -> list[_Candidate]:
        """What can be away under ``limit``: together, it never breaks it."""
        return self.affordable if limit >= self.everything_bytes else self._at_floor

    def _best(self, limit: int, least_ms: float) -> tuple[Transfer, ...]:
        """The fastest of several choices placed under ``limit``; of equally fast ones the least."""
        movable = {candidate.move.storage for candidate in self.movable_within(limit)}
        orders = [
            [candidate for candidate in order if candidate.move.storage in movable]
            for order in (
                self.by_time_away(),
                self._by_offload(),
                self._by_worth(),
                self._by_size(),
            )
        ]
        tried = _Tried(self, limit, (1 + _CLOSE) * least_ms)
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
            _search(self, limit, tried, orders[0], count)
        _slim(self, limit, tried, count)
        return tried.best().transfers

    def chosen(self, order: Sequence[_Candidate], limit: int) -> list[_Candidate]:
        """Storages whose absence brings every op within ``limit`` (definition 4)."""
        curve = self.unplanned.copy()
        taken: list[list[_Candidate]] = []
        left = _together(order)
        found = True
        # Packing one storage can push an op over the limit that others then have to lower.
        while found and curve.top > limit:
            passed, found = [], False
            for group in left:
                if any(_lowers(curve, candidate, limit) for candidate in group):
                    for candidate in group:
                        _send_away(curve, candidate, 1)
                    taken.append(group)
                    found = True
                else:
                    passed.append(group)
            left = passed
        needed: list[_Candidate] = []
        for group in reversed(taken):
            for candidate in group:
                _send_away(curve, candidate, -1)
            if any((curve.highest(c.offload_after, c.last + 1) or 0) > limit for c in group):
                for candidate in group:
                    _send_away(curve, candidate, 1)
                needed += group
        return needed

    def by_time_away(self) -> list[_Candidate]:
        def time_away(candidate: _Candidate) -> float:
            start, stop = candidate.away
            return self.starts[max(start, stop)] - self.starts[start]

        return sorted(self.affordable, key=lambda c: (-time_away(c), c.move.region, c.move.storage))

    def _by_worth(self) -> list[_Candidate]:
        """Those that are longest away for what they carry first."""

        def cost(candidate: _Candidate) -> float:
            start, stop = candidate.away
            away_ms = self.starts[max(start, stop)] - self.starts[start]
            return candidate.move.footprint.transfer_bytes / away_ms if away_ms else float("inf")

        return sorted(self.affordable, key=lambda c: (cost(c), c.move.region, c.move.storage))

    def _by_size(self) -> list[_Candidate]:
        def size(candidate: _Candidate) -> int:
            return candidate.move.footprint.transfer_bytes

        return sorted(self.affordable, key=lambda c: (size(c), c.move.region, c.move.storage))

    def _by_offload(self) -> list[_Candidate]:
        return sorted(self.affordable, key=lambda c: (c.offload_after, c.move.storage))

    # --- placement --------------------------------------------------------------------------------

    def placed(
        self, chosen: Sequence[_Candidate], limit: int, close_ms: float
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

    def _latest_start_ms(self, candidate: _Candidate) -> float:
        """When its copy to the device has to start, if ops wait for nothing."""
        assert candidate.needed_by is not None
        copy_ms = self.costs.rates.h2d_ms(candidate.move.footprint.transfer_bytes)
        return self.starts[candidate.needed_by] - copy_ms

    def _releases(self, chosen: Sequence[_Candidate], limit: int) -> list[int]:
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
        chosen: Sequence[_Candidate],
        limit: int,
        by_need: Sequence[int],
        wanted: Sequence[int],
    ) -> list[int | None]:
        """``reload_at`` of each, at the same place in all twins; None for one that is not needed.

        They are issued in the order ``wanted``; but before one that would make another come too
        late goes the one that is needed first.
        """
        curve = _with_all_away(self.unplanned, chosen)
        reloads: list[int | None] = [None] * len(chosen)
        earliest = 0

        def opening(place: int) -> int:
            c = chosen[place]
            assert c.back_by is not None
            start = max(earliest, c.span.backward)
            full = curve.last_above(start, c.back_by, limit - c.back_bytes - c.staging_bytes)
            return start if full is None else full + 1

        turns, urgent = deque(wanted), deque(by_need)
        while turns:
            place = turns[0]
            at = opening(place)
            if at > (chosen[urgent[0]].needed_by or 0):
                place = urgent[0]
                at = opening(place)
            reloads[place] = earliest = at
            c = chosen[place]
            curve.add(at, c.back_by or 0, c.back_bytes + c.staging_bytes)
            while turns and reloads[turns[0]] is not None:
                turns.popleft()
            while urgent and reloads[urgent[0]] is not None:
                urgent.popleft()
        return _reloaded_alike(chosen, reloads)

    # --- what it comes to -------------------------------------------------------------------------

    def time(self, transfers: Sequence[Transfer]) -> StepTime:
        return step_time(self.costs.op_ms, self.forward_count, transfers, self.costs.rates)

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


class _Try(NamedTuple):
    """One choice, placed."""

    step_ms: float
    moved_bytes: int
    chosen: Sequence[_Candidate]
    transfers: tuple[Transfer, ...]


class _Tried:
    """Choices for one limit, each placed once.  ``close_ms``: a time that is good enough."""

    def __init__(self, planner: Planner, limit: int, close_ms: float) -> None:
        self.planner = planner
        self.limit = limit
        self.close_ms = close_ms
        self.fastest_ms = float("inf")
        self._found: dict[frozenset[StorageId], _Try] = {}

    @property
    def is_close(self) -> bool:
        return self.fastest_ms <= self.close_ms

    def add(self, chosen: Sequence[_Candidate]) -> None:
        key = frozenset(candidate.move.storage for candidate in chosen)
        if key in self._found:
            return
        step_ms, transfers = self.planner.placed(chosen, self.limit, self.close_ms)
        moved_bytes = sum(transfer.transfer_bytes for transfer in transfers)
        self._found[key] = _Try(step_ms, moved_bytes, chosen, transfers)
        self.fastest_ms = min(self.fastest_ms, step_ms)

    def best(self) -> _Try:
        """The one that moves the least, of those that are about as fast as any."""
        enough = (1 + _WORTH_IT) * self.fastest_ms
        fast = [found for found in self._found.values() if found.step_ms <= enough]
        return min(fast, key=lambda found: (found.moved_bytes, found.step_ms))


def _search(
    planner: Planner, limit: int, tried: _Tried, movable: Sequence[_Candidate], count: int
) -> None:
    """Try choices that differ from the best one by one group: with it, without it, or beside it;
    then with it instead of another.

    Until none is better, or ``count`` are tried.
    """
    improved = True
    while improved:
        improved = False
        for differing, group in product((_beside, _instead), _together(movable)):
            best = tried.best()
            for chosen in differing(planner, limit, best.chosen, group, movable):
                if count == 0 or tried.is_close:
                    return
                tried.add(chosen)
                count -= 1
            improved = improved or tried.best() is not best


def _slim(planner: Planner, limit: int, tried: _Tried, count: int) -> None:
    """Give up what was moved for speed and does not speed up, trying ``count`` times at most."""
    kept = list(tried.best().chosen)
    curve = _with_all_away(planner.unplanned, kept)
    groups = _together(kept)
    groups.sort(key=lambda group: -sum(c.move.footprint.transfer_bytes for c in group))
    for group in groups:
        if count == 0:
            return
        for candidate in group:
            _send_away(curve, candidate, -1)
        if curve.top <= limit:
            rest = [c for c in kept if c.twins != group[0].twins]
            tried.add(rest)
            count -= 1
            if {c.move.storage for c in tried.best().chosen} == {c.move.storage for c in rest}:
                kept = rest
                continue
        for candidate in group:
            _send_away(curve, candidate, 1)


def _beside(
    planner: Planner,
    limit: int,
    chosen: Sequence[_Candidate],
    group: Sequence[_Candidate],
    movable: Sequence[_Candidate],
) -> Iterator[Sequence[_Candidate]]:
    """Choices that differ from ``chosen`` by ``group``."""
    taken = {candidate.move.storage for candidate in chosen}
    others = [c for c in movable if c.move.storage not in taken]
    if group[0].move.storage in taken:
        rest = [c for c in chosen if c.twins != group[0].twins]
        if _with_all_away(planner.unplanned, rest).top <= limit:
            yield rest
        order = [*rest, *others, *group]
    else:
        if _with_all_away(planner.unplanned, [*chosen, *group]).top <= limit:
            yield [*chosen, *group]
        order = [*group, *chosen, *(c for c in others if c.twins != group[0].twins)]
    yield planner.chosen(order, limit)


def _instead(
    planner: Planner,
    limit: int,
    chosen: Sequence[_Candidate],
    group: Sequence[_Candidate],
    movable: Sequence[_Candidate],
) -> Iterator[Sequence[_Candidate]]:
    """Choices with ``group`` instead of one of ``chosen``."""
    taken = {candidate.move.storage for candidate in chosen}
    if group[0].move.storage in taken:
        return
    others = [c for c in movable if c.move.storage not in taken and c.twins != group[0].twins]
    for last in _together(chosen):
        rest = [c for c in chosen if c.twins != last[0].twins]
        yield planner.chosen([*group, *rest, *others, *last], limit)


def _within(order: Sequence[_Candidate], host_bytes: int | None) -> list[_Candidate]:
    """Those of ``order`` that fit into the host memory, taken in that order."""
    if host_bytes is None:
        return list(order)
    taken: list[_Candidate] = []
    left = host_bytes
    for group in _together(order):
        size_bytes = sum(candidate.move.footprint.transfer_bytes for candidate in group)
        if size_bytes <= left:
            left -= size_bytes
            taken += group
    return taken


def _together(order: Iterable[_Candidate]) -> list[list[_Candidate]]:
    """Candidates that are taken together, in the order of the first of them (definition 6)."""
    groups: dict[tuple[int, int], list[_Candidate]] = {}
    for candidate in order:
        groups.setdefault(candidate.twins, []).append(candidate)
    return list(groups.values())


def _transfers(
    chosen: Sequence[_Candidate], releases: Sequence[int], reloads: Sequence[int | None]
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


def _alike(chosen: Sequence[_Candidate], releases: Sequence[int]) -> list[int]:
    """``releases``, at the same place in all twins: where the first of them has to be."""
    first: dict[tuple[int, int], int] = {}
    for candidate, release in zip(chosen, releases, strict=True):
        place = release - candidate.span.forward
        first[candidate.twins] = min(first.get(candidate.twins, place), place)
    return [first[candidate.twins] + candidate.span.forward for candidate in chosen]


def _reloaded_alike(
    chosen: Sequence[_Candidate], reloads: Sequence[int | None]
) -> list[int | None]:
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


def _with_all_away(unplanned: Curve, candidates: Sequence[_Candidate]) -> Curve:
    curve = unplanned.copy()
    for candidate in candidates:
        _send_away(curve, candidate, 1)
    return curve


def _send_away(curve: Curve, candidate: _Candidate, sign: int) -> None:
    """Take the storage away for as long as can be (or, with -1, leave it there after all)."""
    start, stop = candidate.away
    curve.add(start, stop, -sign * candidate.size_bytes)
    curve.add(candidate.offload_after, start, sign * candidate.staging_bytes)
    if candidate.back_by is not None:
        # A backward without ops returns during the last op of the forward.
        curve.add(max(start, candidate.back_by), candidate.last + 1, -sign * candidate.lost_bytes)
        curve.add(candidate.back_by, candidate.back_by + 1, sign * candidate.staging_bytes)


def _raised_bytes(group: Sequence[_Candidate], op: int | None) -> int:
    """How much higher op is for packing ``group``."""
    return sum(
        c.staging_bytes * (op == c.offload_after)
        + (c.staging_bytes - c.lost_bytes) * (op == c.back_by)
        for c in group
    )


def _lowers(curve: Curve, candidate: _Candidate, limit: int) -> bool:
    """Whether ``candidate`` lowers an op that exceeds ``limit``."""
    start, stop = candidate.away
    if candidate.lost_bytes:
        stop = candidate.last + 1
    return (curve.highest(start, stop) or 0) > limit


def _candidates(
    facts: GraphFacts,
    movable: Sequence[Move],
    last: Mapping[tuple[int, StorageId], int],
    spans: Sequence[_Span],
) -> list[_Candidate]:
    uses = _uses(facts, spans)
    twins = _twins(facts)
    positions: dict[tuple[int, StorageId | None], int] = {}
    item_bytes: dict[tuple[int, StorageId | None], int] = {}
    for number, region in enumerate(facts.regions):
        for position, saved in enumerate(region.saved):
            value = facts.values[saved.value]
            key = number, value.storage
            positions.setdefault(key, position)
            item_bytes[key] = max(item_bytes.get(key, 1), value.item_bytes)

    def candidate(move: Move) -> _Candidate:
        key = move.region, move.storage
        span = spans[move.region]
        needed_by = uses.first_backward.get(key)
        sizes = _sizes(move, item_bytes[key], is_rounded=facts.device == "cuda")
        return _Candidate(
            move=move,
            size_bytes=sizes[0],
            back_bytes=sizes[1],
            staging_bytes=sizes[2],
            offload_after=uses.last_forward.get(move.storage, span.forward),
            needed_by=needed_by,
            back_by=None if needed_by is None else min(needed_by, span.returned),
            last=last[key],
            span=span,
            twins=(twins[move.region], positions[key]),
        )

    return [candidate(move) for move in movable]


def _sizes(move: Move, item_bytes: int, *, is_rounded: bool) -> tuple[int, int, int]:
    """Bytes of the storage, of its reload buffer, and of a packed transfer's staging, as the
    device allocates them: in whole elements and, on a GPU, whole blocks."""
    footprint = move.footprint
    staging_bytes = footprint.transfer_bytes if footprint.packed else 0
    if is_rounded:
        back_bytes = reloaded_bytes(footprint.start, footprint.stop)
        return charged_bytes(move.size_bytes), back_bytes, charged_bytes(staging_bytes)
    first = footprint.start // DEVICE_ALIGNMENT_BYTES * DEVICE_ALIGNMENT_BYTES
    back_bytes = -(-(footprint.stop - first) // item_bytes) * item_bytes
    return move.size_bytes, back_bytes, staging_bytes


def _twins(facts: GraphFacts) -> list[int]:
    """For each region the first one that computes the same."""
    if len(facts.regions) == 1:
        return [0]
    first: dict[object, int] = {}
    return [
        first.setdefault(_computed(facts, region), number)
        for number, region in enumerate(facts.regions)
    ]


def _computed(facts: GraphFacts, region: Region) -> object:
    """What ``region`` computes, with its values and storages numbered as they appear."""
    values: dict[ValueId | None, int] = {}
    storages: dict[StorageId | None, int] = {}
    described: list[object] = []

    def number(value: ValueId | None) -> int:
        if value is not None and value not in values:
            found = facts.values[value]
            on = storages.setdefault(found.storage, len(storages))
            described.append((on, found.kind, found.dtype, found.shape, found.stride, found.offset))
        return values.setdefault(value, len(values))

    for graph in (region.forward, region.backward):
        if graph is None:
            continue
        described.append([number(item.value) for item in graph.inputs])
        for op in graph.ops:
            used = [number(value) for value in (*op.inputs, *op.outputs, *op.mutates)]
            described.append((op.target, op.constants, used))
        described.append([(item.kind, number(item.value)) for item in graph.outputs])
    described.append([number(saved.value) for saved in region.saved])
    return repr(described)


def _spans(facts: GraphFacts) -> tuple[_Span, ...]:
    forward_sizes = [len(region.forward.ops) for region in facts.regions]
    backward_sizes = [
        len(region.backward.ops) if region.backward else 0 for region in facts.regions
    ]
    forward_starts = list(accumulate(forward_sizes, initial=0))
    # Backwards run in reverse: a region's starts when those of all later regions have run.
    backward_ends = [facts.op_count - before for before in accumulate(backward_sizes, initial=0)]
    return tuple(
        _Span(
            forward=forward_starts[number],
            forward_end=forward_starts[number + 1],
            backward=backward_ends[number + 1],
            backward_end=backward_ends[number],
            returned=min(
                max(backward_ends[number] - 1, backward_ends[number + 1]),
                max(facts.op_count - 1, 0),
            ),
        )
        for number in range(len(facts.regions))
    )


def _uses(facts: GraphFacts, spans: Sequence[_Span]) -> _Uses:
    """Last uses in the forwards and first uses in each region's own backward, of every storage."""
    ops = list(timeline(facts))
    last_forward: dict[StorageId, int] = {}
    first_backward: dict[tuple[int, StorageId], int] = {}
    for number, (region, span) in enumerate(zip(facts.regions, spans, strict=True)):
        for place in range(span.forward, span.forward_end):
            for storage in _touched(facts, ops[place]):
                last_forward[storage] = place
        received = _received(facts, region)
        for place in range(span.backward, span.backward_end):
            for storage in _touched(facts, ops[place]):
                if storage in received:
                    first_backward.setdefault((number, received[storage]), place)
        for output in region.backward.outputs if region.backward else ():
            returned = None if output.value is None else facts.values[output.value].storage
            if returned in received:
                first_backward.setdefault((number, received[returned]), span.backward_end)
    return _Uses(last_forward, first_backward)


def _touched(facts: GraphFacts, op: Op) -> set[StorageId]:
    found = (facts.values[value].storage for value in (*op.inputs, *op.outputs))
    return {storage for storage in found if storage is not None}


def _received(facts: GraphFacts, region: Region) -> dict[StorageId, StorageId]:
    """The forward's storage for each storage that the backward receives saved values on."""
    received: dict[StorageId, StorageId] = {}
    for saved in region.saved:
        sent = facts.values[saved.value].storage
        placeholder = facts.values[saved.backward_value].storage
        if sent is not None:
            received[sent] = sent
            if placeholder is not None:
                received[placeholder] = sent
    return received
