"""The least step time of a small step under a limit, by mixed-integer programming (HiGHS).

The model is the planner's: memory as its candidates count it, queues as ``offplan.schedule`` runs
them.  What is decided is everything that a plan decides, and nothing of how the planner does it:

1.  Which storages move; until which op each is held, and from which op on it is there again.
2.  When each op starts and each copy lands.  Copies to the host run in the order of
    ``offload_after``, copies to the device in any order.
3.  Every op within the limit; the end of the step as early as it can be.

``until_ms`` is the time of some plan that is known: nothing later need be looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from offplan.planner import Planner
from offplan.schedule import Rates
from offplan.transfers import Transfer


class Exact(NamedTuple):
    """The least time, and transfers that take it."""

    step_ms: float
    transfers: tuple[Transfer, ...]


@dataclass
class _Program:
    """Variables, and rows ``low <= sum(coefficient * variable) <= high``."""

    highest: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    rows: list[tuple[Mapping[int, float], float, float]] = field(default_factory=list)

    def variable(self, highest: float, *, whole: bool = False) -> int:
        self.highest.append(highest)
        self.whole.append(int(whole))
        return len(self.highest) - 1

    def choice(self) -> int:
        return self.variable(1, whole=True)

    def at_least(self, low: float, *terms: tuple[float, int]) -> None:
        """``sum of coefficient * variable >= low``."""
        row: dict[int, float] = {}
        for coefficient, variable in terms:
            row[variable] = row.get(variable, 0.0) + coefficient
        self.rows.append((row, low, np.inf))

    def minimum(self, objective: int) -> Any:
        cost = np.zeros(len(self.highest))
        cost[objective] = 1
        entries = [
            (number, variable, coefficient)
            for number, (row, _, _) in enumerate(self.rows)
            for variable, coefficient in row.items()
        ]
        numbers, variables, coefficients = zip(*entries, strict=True)
        matrix = csr_array(
            (coefficients, (numbers, variables)), shape=(len(self.rows), len(self.highest))
        )
        limits = [low for _, low, _ in self.rows], [high for _, _, high in self.rows]
        return milp(
            cost,
            integrality=self.whole,
            bounds=Bounds(0, self.highest),
            constraints=LinearConstraint(matrix, *limits),
            options={"mip_rel_gap": 1e-6},
        )


class _Storage(NamedTuple):
    """Variables of one candidate: whether it moves; by op, whether it is released by then, and
    whether its reload is issued by then; when its copies land."""

    candidate: Any
    moves: int
    released: Mapping[int, int]
    back: Mapping[int, int]
    landed: int
    returned: int


def least_step(planner: Planner, limit: int, until_ms: float) -> Exact:
    """The optimum for one region, where every storage is its own twin."""
    program = _Program()
    storages = [
        _storage(program, candidate, until_ms)
        for candidate in sorted(
            planner.candidates, key=lambda c: (c.offload_after, c.move.region, c.move.storage)
        )
    ]
    _keep_within(program, planner.during, storages, limit)
    end = _run(program, planner, storages, until_ms)
    found = program.minimum(end)
    assert found.success, found.message
    return Exact(float(found.fun), tuple(_transfers(storages, found.x)))


def _storage(program: _Program, candidate: Any, until_ms: float) -> _Storage:
    moves = program.choice()
    span = candidate.span
    released = {op: program.choice() for op in range(candidate.offload_after, span.forward_end)}
    back = {}
    if candidate.needed_by is not None:
        back = {op: program.choice() for op in range(span.backward, candidate.needed_by + 1)}
    for placed in (released, back):
        for earlier, later in zip([*placed][:-1], [*placed][1:], strict=True):
            program.at_least(0, (1, placed[later]), (-1, placed[earlier]))
        if placed:
            # The last one is whether it moves: never later, and never without.
            last = placed[max(placed)]
            program.at_least(0, (1, last), (-1, moves))
            program.at_least(0, (1, moves), (-1, last))
    return _Storage(
        candidate, moves, released, back, program.variable(until_ms), program.variable(until_ms)
    )


def _keep_within(
    program: _Program, during: Sequence[int], storages: Sequence[_Storage], limit: int
) -> None:
    for op, held in enumerate(during):
        terms: list[tuple[float, int]] = []
        for storage in storages:
            terms += _held(storage, op)
        # In shares of the limit, so that the solver's tolerances mean something.
        program.at_least(held / limit - 1, *((-size / limit, variable) for size, variable in terms))


def _held(storage: _Storage, op: int) -> list[tuple[float, int]]:
    """What the variables of ``storage`` add to the bytes during ``op``."""
    c = storage.candidate
    if op < c.offload_after or op > c.last:
        return []
    if op == c.offload_after:
        return [(c.staging_bytes, storage.moves)]
    if op < c.span.forward_end:
        gone = storage.released[op - 1]
        return [(-c.size_bytes, gone), (c.staging_bytes, storage.moves), (-c.staging_bytes, gone)]
    gone_bytes = [(-c.size_bytes, storage.moves)]
    if c.back_by is None or op < c.span.backward:
        return gone_bytes
    if op >= c.back_by:
        staging_bytes = c.staging_bytes if op == c.back_by else 0
        return [*gone_bytes, (c.back_bytes + staging_bytes, storage.moves)]
    return [*gone_bytes, (c.back_bytes + c.staging_bytes, storage.back[op])]


def _run(program: _Program, planner: Planner, storages: Sequence[_Storage], until_ms: float) -> int:
    """Times of ops and copies; the variable of the end.

    ``free[k]`` is when the op before k, and what it waits for after it, is done; ``starts[k]`` when
    op k has waited for what it needs.
    """
    op_ms, rates = planner.costs.op_ms, planner.costs.rates
    free = [program.variable(until_ms) for _ in range(len(op_ms) + 1)]
    starts = [program.variable(until_ms) for _ in range(len(op_ms) + 1)]
    for op in range(len(op_ms) + 1):
        reading = [term for s in storages for term in _issued(s, op, rates)]
        program.at_least(0, (1, starts[op]), (-1, free[op]), *reading)
        if op < len(op_ms):
            writing = [
                (-rates.taken_ms(s.candidate.move.footprint.transfer_bytes), s.moves)
                for s in storages
                if s.candidate.offload_after == op
            ]
            program.at_least(op_ms[op], (1, free[op + 1]), (-1, starts[op]), *writing)
    _copy_out(program, storages, starts, op_ms, rates)
    # Rows that need not hold are loosened by more than any two times, and a copy, are apart.
    slack_ms = until_ms + max(
        (rates.d2h_ms(size) + rates.h2d_ms(size) for size in _copied(storages)), default=0.0
    )
    for storage in storages:
        for op, gone in storage.released.items():
            # free[op + 1] >= landed, if it is released by op.
            program.at_least(-slack_ms, (1, free[op + 1]), (-1, storage.landed), (-slack_ms, gone))
        _copy_back(program, storage, free, starts, rates, slack_ms)
    for one, other in combinations([s for s in storages if s.back], 2):
        _in_turn(program, one, other, rates, slack_ms)
    return starts[-1]


def _issued(storage: _Storage, op: int, rates: Rates) -> list[tuple[float, int]]:
    """What op is later by, if the reload is issued before it."""
    if op not in storage.back:
        return []
    taken_ms = rates.taken_ms(storage.candidate.move.footprint.transfer_bytes)
    before = storage.back.get(op - 1)
    issued = [(-taken_ms, storage.back[op])]
    return issued if before is None else [*issued, (taken_ms, before)]


def _copied(storages: Sequence[_Storage]) -> list[int]:
    return [storage.candidate.move.footprint.transfer_bytes for storage in storages]


def _copy_out(
    program: _Program,
    storages: Sequence[_Storage],
    starts: Sequence[int],
    op_ms: Sequence[float],
    rates: Rates,
) -> None:
    """One after the other.  A storage that stays takes no time, and ends no earlier than its op, at
    which no later one could start anyway."""
    before = None
    for storage in storages:
        c = storage.candidate
        copy_ms = rates.d2h_ms(c.move.footprint.transfer_bytes)
        after = c.offload_after
        program.at_least(
            op_ms[after], (1, storage.landed), (-1, starts[after]), (-copy_ms, storage.moves)
        )
        if before is not None:
            program.at_least(0, (1, storage.landed), (-1, before.landed), (-copy_ms, storage.moves))
        before = storage


def _copy_back(
    program: _Program,
    storage: _Storage,
    free: Sequence[int],
    starts: Sequence[int],
    rates: Rates,
    slack_ms: float,
) -> None:
    c = storage.candidate
    if c.needed_by is None:
        return
    copy_ms = rates.h2d_ms(c.move.footprint.transfer_bytes)
    late = (-slack_ms, storage.moves)
    program.at_least(copy_ms - slack_ms, (1, storage.returned), (-1, storage.landed), late)
    for op in storage.back:
        # returned >= free[op] + copy, if it moves and is not issued before op.
        terms = [(1.0, storage.returned), (-1.0, free[op]), late]
        if op - 1 in storage.back:
            terms.append((slack_ms, storage.back[op - 1]))
        program.at_least(copy_ms - slack_ms, *terms)
    program.at_least(-slack_ms, (1, starts[c.needed_by]), (-1, storage.returned), late)


def _in_turn(
    program: _Program, one: _Storage, other: _Storage, rates: Rates, slack_ms: float
) -> None:
    """Copies to the device of two storages, if both move: one before the other, as they are issued;
    of two that are issued by the same op, the one first that is needed first."""
    one_first = program.choice()
    both = one.moves, other.moves
    for earlier, later, sign in ((one, other, 1), (other, one, -1)):
        # Each row below holds anyway unless all three say that it has to.
        asked = [*both, one_first]
        signs = [1, 1, sign]
        slack = 3 if sign == 1 else 2
        copy_ms = rates.h2d_ms(later.candidate.move.footprint.transfer_bytes)
        program.at_least(
            copy_ms - slack * slack_ms,
            (1, later.returned),
            (-1, earlier.returned),
            *((-slack_ms * sign, variable) for variable, sign in zip(asked, signs, strict=True)),
        )
        lag = int(_need(earlier) > _need(later))
        for op, back in later.back.items():
            if op - lag <= max(earlier.back):
                issued = earlier.back.get(op - lag)
                program.at_least(
                    -slack,
                    (-1, back),
                    *([] if issued is None else [(1.0, issued)]),
                    *((-sign, variable) for variable, sign in zip(asked, signs, strict=True)),
                )


def _need(storage: _Storage) -> tuple[int, int, int]:
    c = storage.candidate
    return c.needed_by, c.offload_after, c.move.storage


def _transfers(storages: Sequence[_Storage], values: Sequence[float]) -> list[Transfer]:
    def first(placed: Mapping[int, int]) -> int | None:
        return next((op for op, variable in placed.items() if values[variable] > 0.5), None)

    found = []
    for storage in storages:
        if values[storage.moves] < 0.5:
            continue
        c = storage.candidate
        release = first(storage.released)
        assert release is not None
        footprint = c.move.footprint
        found.append(
            Transfer(
                region=c.move.region,
                storage=c.move.storage,
                start=footprint.start,
                stop=footprint.stop,
                transfer_bytes=footprint.transfer_bytes,
                offload_after=c.offload_after,
                release_by=release,
                reload_at=first(storage.back),
                needed_by=c.needed_by,
                packed=footprint.packed,
            )
        )
    return found
