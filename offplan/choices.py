"""Which of many choices of storages is the fastest under a limit.

Definition 4 of ``offplan.planner``: choices are tried until one is close to the lower bound, or
until a fixed amount of work is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple, Protocol

from offplan.curve import Curve
from offplan.graph import StorageId
from offplan.transfers import Transfer
from offplan.windows import Candidate, send_away, together, with_all_away

# A plan that moves less, in few copies, is preferred unless another is faster by more than this.
_WORTH_IT = 0.001
# As how many bytes a copy counts: what a link of 55 GB/s carries in the 85 microseconds that a copy
# takes the host of an H200 in a compiled step, where little of what it needs is in its caches.
_EACH_BYTES = 5_000_000


class Placer(Protocol):
    """What chooses storages under a limit, and places them."""

    unplanned: Curve

    def placed(
        self, chosen: Sequence[Candidate], limit: int, close_ms: float
    ) -> tuple[float, tuple[Transfer, ...]]: ...

    def chosen(self, order: Sequence[Candidate], limit: int) -> list[Candidate]: ...


class Try(NamedTuple):
    """One choice, placed."""

    step_ms: float
    chosen: Sequence[Candidate]
    transfers: tuple[Transfer, ...]

    @property
    def effort_bytes(self) -> int:
        """What moves; each copy counts as what the link carries while the host issues it, too."""
        return sum(transfer.transfer_bytes + _EACH_BYTES for transfer in self.transfers)


class Tried:
    """Choices for one limit, each placed once.  ``close_ms``: a time that is good enough."""

    def __init__(self, planner: Placer, limit: int, close_ms: float) -> None:
        self.planner = planner
        self.limit = limit
        self.close_ms = close_ms
        self.fastest_ms = float("inf")
        self._found: dict[frozenset[StorageId], Try] = {}

    @property
    def is_close(self) -> bool:
        return self.fastest_ms <= self.close_ms

    def add(self, chosen: Sequence[Candidate]) -> None:
        key = frozenset(candidate.move.storage for candidate in chosen)
        if key in self._found:
            return
        step_ms, transfers = self.planner.placed(chosen, self.limit, self.close_ms)
        self._found[key] = Try(step_ms, chosen, transfers)
        self.fastest_ms = min(self.fastest_ms, step_ms)

    def best(self) -> Try:
        """The one with the least effort, of those that are about as fast as any."""
        enough = (1 + _WORTH_IT) * self.fastest_ms
        fast = [found for found in self._found.values() if found.step_ms <= enough]
        return min(fast, key=lambda found: (found.effort_bytes, found.step_ms))


def search(
    planner: Placer, limit: int, tried: Tried, movable: Sequence[Candidate], count: int
) -> None:
    """Try choices that differ from the best one by one group: with it, without it, or beside it;
    then with it instead of another.

    Until none is better, or ``count`` are tried.
    """
    improved = True
    while improved:
        improved = False
        for differing, group in product((_beside, _instead), together(movable)):
            best = tried.best()
            for chosen in differing(planner, limit, best.chosen, group, movable):
                if count == 0 or tried.is_close:
                    return
                tried.add(chosen)
                count -= 1
            improved = improved or tried.best() is not best


def slim(planner: Placer, limit: int, tried: Tried, count: int) -> None:
    """Give up what was moved for speed and does not speed up, trying ``count`` times at most."""
    kept = list(tried.best().chosen)
    curve = with_all_away(planner.unplanned, kept)
    groups = together(kept)
    groups.sort(key=lambda group: -sum(c.move.footprint.transfer_bytes for c in group))
    for group in groups:
        if count == 0:
            return
        for candidate in group:
            send_away(curve, candidate, -1)
        if curve.top <= limit:
            rest = [c for c in kept if c.twins != group[0].twins]
            tried.add(rest)
            count -= 1
            if {c.move.storage for c in tried.best().chosen} == {c.move.storage for c in rest}:
                kept = rest
                continue
        for candidate in group:
            send_away(curve, candidate, 1)


def _beside(
    planner: Placer,
    limit: int,
    chosen: Sequence[Candidate],
    group: Sequence[Candidate],
    movable: Sequence[Candidate],
) -> Iterator[Sequence[Candidate]]:
    """Choices that differ from ``chosen`` by ``group``."""
    taken = {candidate.move.storage for candidate in chosen}
    others = [c for c in movable if c.move.storage not in taken]
    if group[0].move.storage in taken:
        rest = [c for c in chosen if c.twins != group[0].twins]
        if with_all_away(planner.unplanned, rest).top <= limit:
            yield rest
        order = [*rest, *others, *group]
    else:
        if with_all_away(planner.unplanned, [*chosen, *group]).top <= limit:
            yield [*chosen, *group]
        order = [*group, *chosen, *(c for c in others if c.twins != group[0].twins)]
    yield planner.chosen(order, limit)


def _instead(
    planner: Placer,
    limit: int,
    chosen: Sequence[Candidate],
    group: Sequence[Candidate],
    movable: Sequence[Candidate],
) -> Iterator[Sequence[Candidate]]:
    """Choices with ``group`` instead of one of ``chosen``."""
    taken = {candidate.move.storage for candidate in chosen}
    if group[0].move.storage in taken:
        return
    others = [c for c in movable if c.move.storage not in taken and c.twins != group[0].twins]
    for last in together(chosen):
        rest = [c for c in chosen if c.twins != last[0].twins]
        yield planner.chosen([*group, *rest, *others, *last], limit)
