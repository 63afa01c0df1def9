"""How long a step takes under transfers, and how long it must take for a peak.

The model: ops run one after the other on the compute stream.  Each direction of the link is a queue
of its own, first in, first out, at a constant rate, with a latency for each copy.

1.  A copy to the host starts when its ``offload_after`` op has ended and the queue is free.  Ops
    after ``release_by`` start when it has landed.
2.  A copy to the device starts when the op before ``reload_at`` has ended, the queue is free, and
    the storage's own copy to the host has landed.  Op ``needed_by`` starts when it has landed.
3.  *Stalled* is the time that ops wait for copies.
4.  A copy reads or writes the device's memory, whose rate it shares with ops that need all of it,
    and is ordered with ops by events, which take a moment: what comes after the place where a copy
    is issued starts later by as much, unless it waits for longer.
5.  The host issues ops, and between them copies; it is *ahead* of the device by as much as is known
    of each op.  An op starts no earlier than it is issued: later than without a plan by what the
    host took for the copies before it.

The lower bound holds for every plan under the limit, wherever it places its copies:

6.  If op k may hold ``limit`` bytes and holds ``during[k]`` without a plan, storages of the
    difference must be away.  Those last used by op j or later can only be copied after op j: what
    the others cannot cover must cross the link between the end of j and the start of k.
7.  Storages away during op k that are needed by op m must come back between the end of k and the
    start of m; so must what those needed later cannot cover.  What of them never comes back, as no
    saved view touches it, covers some of the difference as long as the storage would be held.
8.  The least bytes that cross the link for a number of bytes in memory are those of the storages
    that carry the fewest for their size, fractions allowed.
9.  Nothing is copied back before the forward has ended, nor out after that.
10. The bound is the longest path through ops, by their times and these gaps, over a sample of the
    pairs of ops: leaving pairs out only lowers it; or all ops and what the least bytes that must
    cross take of memory, if that is longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from operator import add
from typing import Literal, NamedTuple

from offplan.transfers import Transfer

# Pairs of ops that the lower bound looks at: at most this number squared, each way.
_SAMPLES = 40


class Rates(NamedTuple):
    """The link, each way, and the device's memory, at the rate that copies take of the time of ops.

    Of each copy, ``order_s`` is what events take of the device, and ``host_s`` what the host takes
    to issue it and to have it waited for.
    """

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    latency_s: float = 0.0
    memory_bytes_per_s: float = inf
    order_s: float = 0.0
    host_s: float = 0.0

    def times(self, speed: float) -> Rates:
        """A link of ``speed`` times the speed, with the same latency."""
        return self._replace(
            d2h_bytes_per_s=speed * self.d2h_bytes_per_s,
            h2d_bytes_per_s=speed * self.h2d_bytes_per_s,
        )

    def memory_ms(self, size_bytes: float) -> float:
        """What ``size_bytes`` that are copied, one way, take of the time of ops for memory."""
        return 1000 * size_bytes / self.memory_bytes_per_s

    def taken_ms(self, size_bytes: float) -> float:
        """What a copy of ``size_bytes``, one way, takes of the time of ops (definition 4)."""
        return self.memory_ms(size_bytes) + 1000 * self.order_s

    @property
    def host_ms(self) -> float:
        return 1000 * self.host_s

    def d2h_ms(self, size_bytes: float) -> float:
        return 1000 * (self.latency_s + size_bytes / self.d2h_bytes_per_s)

    def h2d_ms(self, size_bytes: float) -> float:
        return 1000 * (self.latency_s + size_bytes / self.h2d_bytes_per_s)


class StepTime(NamedTuple):
    """Milliseconds of one step, and of its parts; ``stalled_ms`` is in both phases."""

    step_ms: float
    forward_ms: float
    stalled_ms: float

    @property
    def backward_ms(self) -> float:
        return self.step_ms - self.forward_ms


class Copied(NamedTuple):
    """A copy of ``transfer`` (its place among the transfers), from ``begin_ms`` to ``end_ms``."""

    transfer: int
    to: Literal["host", "device"]
    begin_ms: float
    end_ms: float


class Stall(NamedTuple):
    """Compute waits for ``wait_ms``, until ``end_ms``, before op ``op``: the step's end, if there
    is no such op."""

    op: int
    wait_ms: float
    end_ms: float


class Played(NamedTuple):
    """A step under transfers: its time, when each op starts (and the end of the step), all copies
    as they begin, and every wait for one."""

    time: StepTime
    starts_ms: tuple[float, ...]
    copies: tuple[Copied, ...]
    stalls: tuple[Stall, ...]


def step_time(
    op_ms: Sequence[float],
    forward_count: int,
    transfers: Iterable[Transfer],
    rates: Rates,
    ahead_ms: Sequence[float] = (),
) -> StepTime:
    """The time of a step under ``transfers`` (definitions 1 to 5), of which ``forward_count`` ops
    come before the first op of a backward.

    ``ahead_ms`` has how long each op was issued before it starts without a plan; if it is empty,
    the host is always early enough.
    """
    return play(op_ms, forward_count, transfers, rates, ahead_ms).time


def play(
    op_ms: Sequence[float],
    forward_count: int,
    transfers: Iterable[Transfer],
    rates: Rates,
    ahead_ms: Sequence[float] = (),
) -> Played:
    """The same, with what happens when."""
    offloads, releases = defaultdict(list), defaultdict(list)
    reloads, needs = defaultdict(list), defaultdict(list)
    for place, transfer in enumerate(transfers):
        offloads[transfer.offload_after].append((place, transfer.transfer_bytes))
        releases[transfer.release_by].append(place)
        if transfer.reload_at is not None and transfer.needed_by is not None:
            reloads[transfer.reload_at].append((transfer.needed_by, place, transfer.transfer_bytes))
            needs[transfer.needed_by].append(place)
    now = stalled = to_host = to_device = forward = 0.0
    # When an op starts without a plan, and what copies have taken of the host's time.
    plain = host = 0.0
    landed: dict[int, float] = {}
    back: dict[int, float] = {}
    starts: list[float] = []
    copies: list[Copied] = []
    stalls: list[Stall] = []
    # Most ops have no copy: look only where there is one.
    for op in range(len(op_ms) + 1):
        if op in reloads:
            issued = now
            for _, place, size_bytes in sorted(reloads[op]):
                begin = max(issued, to_device, landed[place])
                now += rates.taken_ms(size_bytes)
                host += rates.host_ms
                to_device = back[place] = begin + rates.h2d_ms(size_bytes)
                copies.append(Copied(place, "device", begin, to_device))
        if op in needs:
            ready = max(now, *(back[place] for place in needs[op]))
            stalls.append(Stall(op, ready - now, ready))
            stalled += ready - now
            now = ready
        if op == forward_count:
            forward = now
        if op == len(op_ms):
            starts.append(now)
            break
        if ahead_ms:
            now = max(now, plain + host - ahead_ms[op])
        starts.append(now)
        now += op_ms[op]
        plain += op_ms[op]
        if op in offloads:
            issued = now
            for place, size_bytes in offloads[op]:
                begin = max(issued, to_host)
                now += rates.taken_ms(size_bytes)
                host += rates.host_ms
                to_host = landed[place] = begin + rates.d2h_ms(size_bytes)
                copies.append(Copied(place, "host", begin, to_host))
        if op in releases:
            ready = max(now, *(landed[place] for place in releases[op]))
            stalls.append(Stall(op + 1, ready - now, ready))
            stalled += ready - now
            now = ready
    waits = tuple(stall for stall in stalls if stall.wait_ms > 0)
    return Played(StepTime(now, forward, stalled), tuple(starts), tuple(copies), waits)


class Absence(NamedTuple):
    """A storage of ``size_bytes`` that can be away after op ``offload_after``, before ``needed_by``
    (None: it never comes back).  ``transfer_bytes`` cross the link each way.  ``lost_bytes`` of it
    do not come back, and would be held through op ``last`` without a plan."""

    offload_after: int
    needed_by: int | None
    size_bytes: int
    transfer_bytes: int
    lost_bytes: int = 0
    last: int = -1

    @property
    def back_bytes(self) -> int:
        return self.size_bytes - self.lost_bytes

    @property
    def crossing_bytes(self) -> int:
        """What crosses the link, both ways together."""
        return self.transfer_bytes * (1 if self.needed_by is None else 2)


def least_step_ms(
    op_ms: Sequence[float],
    forward_count: int,
    during: Sequence[int],
    absences: Sequence[Absence],
    limit_bytes: int,
    rates: Rates,
    *,
    everything_moves: bool = False,
) -> float:
    """A lower bound on the step time of any plan with a peak under ``limit_bytes``.

    If ``everything_moves``, of any such plan that moves all of ``absences``.
    """
    starts = [0.0, *accumulate(op_ms)]
    over = _over(during, absences, limit_bytes)
    out = _Carried((a.size_bytes, a.transfer_bytes) for a in absences)
    back = _Carried((a.back_bytes, a.transfer_bytes) for a in absences)
    gaps = _gaps_of_all(forward_count, absences, rates) if everything_moves else []
    for op in _samples([*over], over):
        gaps += _gaps_to(op, over[op], forward_count, absences, out, rates)
        gaps += _gaps_from(op, over[op], forward_count, absences, back, rates)
    through = _Carried((a.size_bytes, a.crossing_bytes) for a in absences)
    most = max(over.values(), default=0)
    crossing = sum(a.crossing_bytes for a in absences) if everything_moves else through(most)
    return max(_longest(gaps, starts, op_ms), starts[-1] + rates.memory_ms(crossing))


def _over(during: Sequence[int], absences: Sequence[Absence], limit_bytes: int) -> dict[int, int]:
    """What each op exceeds the limit by, with all that can be lost by then gone."""
    change = [0] * (len(during) + 1)
    for absence in absences:
        if absence.needed_by is not None and absence.lost_bytes:
            change[min(absence.needed_by, len(during))] -= absence.lost_bytes
            change[min(max(absence.needed_by, absence.last + 1), len(during))] += absence.lost_bytes
    least = map(add, during, accumulate(change))
    return {op: size - limit_bytes for op, size in enumerate(least) if size > limit_bytes}


class _Gap(NamedTuple):
    """``gap_ms`` between the end of point ``after`` and the start of ``before``.

    Op k is point 2k; the end of the forward, between two ops, is the odd number between theirs.
    """

    after: int
    before: int
    gap_ms: float


class _Carried:
    """The least bytes that cross the link for bytes in memory (definition 8)."""

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        """``pairs``: for each storage its bytes in memory, and those that cross the link."""
        cheapest = sorted((pair for pair in pairs if pair[0]), key=lambda pair: pair[1] / pair[0])
        self.sizes = [0, *accumulate(size for size, _ in cheapest)]
        self.bytes = [0, *accumulate(crossing for _, crossing in cheapest)]

    def __call__(self, size_bytes: int) -> float:
        if size_bytes <= 0:
            return 0.0
        place = min(bisect_left(self.sizes, size_bytes), len(self.sizes) - 1)
        if place == 0:
            return 0.0
        step = self.sizes[place] - self.sizes[place - 1]
        share = min(1.0, (size_bytes - self.sizes[place - 1]) / step)
        return self.bytes[place - 1] + share * (self.bytes[place] - self.bytes[place - 1])


def _gaps_of_all(forward_count: int, absences: Sequence[Absence], rates: Rates) -> list[_Gap]:
    """What must cross the link within each phase if all of ``absences`` move."""
    out = sorted((a.offload_after, a.transfer_bytes) for a in absences)
    back = sorted((a.needed_by, a.transfer_bytes) for a in absences if a.needed_by is not None)
    gaps, end = [], 2 * forward_count - 1
    remaining = sum(size for _, size in out)
    for after, size in out:
        gaps.append(_Gap(2 * after, end, 1000 * remaining / rates.d2h_bytes_per_s))
        remaining -= size
    returned = 0
    for need, size in back:
        returned += size
        gaps.append(_Gap(end, 2 * need, 1000 * returned / rates.h2d_bytes_per_s))
    return gaps


def _samples(ops: Sequence[int], over: dict[int, int]) -> list[int]:
    """Some of ``ops``: the one most over the limit, and the others spread evenly."""
    if not ops:
        return []
    step = max(1, len(ops) // _SAMPLES)
    chosen = {*ops[::step], ops[-1], max(ops, key=lambda op: over[op])}
    # In each stretch the op that is most over says the most.
    for first in range(0, len(ops), step):
        chosen.add(max(ops[first : first + step], key=lambda op: over[op]))
    return sorted(chosen)


def _can_be_away(absence: Absence, op: int) -> bool:
    return absence.offload_after < op and (absence.needed_by is None or op < absence.needed_by)


def _gaps_to(
    op: int,
    over_bytes: int,
    forward_count: int,
    absences: Sequence[Absence],
    carried: _Carried,
    rates: Rates,
) -> list[_Gap]:
    """What must be copied out between the end of op j and the start of op k."""
    away = sorted((a for a in absences if _can_be_away(a, op)), key=lambda a: a.offload_after)
    sums = [0, *accumulate(a.size_bytes for a in away)]
    by = min(2 * op, 2 * forward_count - 1)
    lasts = sorted({a.offload_after for a in away})
    firsts = [a.offload_after for a in away]
    gaps = []
    for after in lasts[:: max(1, len(lasts) // _SAMPLES)]:
        covered = sums[bisect_left(firsts, after)]
        needed = carried(over_bytes - covered)
        if needed > 0:
            gaps.append(_Gap(2 * after, by, 1000 * needed / rates.d2h_bytes_per_s))
    return gaps


def _gaps_from(
    op: int,
    over_bytes: int,
    forward_count: int,
    absences: Sequence[Absence],
    carried: _Carried,
    rates: Rates,
) -> list[_Gap]:
    """What must come back between the end of op k and the start of op m."""
    away = [a for a in absences if _can_be_away(a, op)]
    # What of them does not come back is away even if the rest is back already.
    over_bytes -= sum(a.lost_bytes for a in away)
    lasting = sum(a.size_bytes for a in away if a.needed_by is None)
    back = sorted((a.needed_by, a.back_bytes) for a in away if a.needed_by is not None)
    sums = [0, *accumulate(size for _, size in back)]
    needs = [need for need, _ in back]
    after = max(2 * op, 2 * forward_count - 1)
    gaps = []
    points = sorted(set(needs))
    for need in {*points[:: max(1, len(points) // _SAMPLES)], *points[-1:]}:
        later = sums[-1] - sums[bisect_right(needs, need)] + lasting
        needed = carried(over_bytes - later)
        if needed > 0:
            gaps.append(_Gap(after, 2 * need, 1000 * needed / rates.h2d_bytes_per_s))
    return gaps


def _longest(gaps: Iterable[_Gap], starts: Sequence[float], op_ms: Sequence[float]) -> float:
    """The longest path from the first op's start to the last one's end."""
    into: dict[int, list[_Gap]] = defaultdict(list)
    for gap in gaps:
        into[gap.before].append(gap)
    # By how much each point starts later than it would without any gap; all later ones do too.
    delays: dict[int, float] = {}
    delay = 0.0
    for point in sorted({*into, *(gap.after for found in into.values() for gap in found)}):
        for gap in into.get(point, ()):
            ends = starts[(gap.after + 1) // 2] + delays[gap.after]
            ends += op_ms[gap.after // 2] if gap.after % 2 == 0 else 0.0
            delay = max(delay, ends + gap.gap_ms - starts[(point + 1) // 2])
        delays[point] = delay
    return starts[-1] + delay
