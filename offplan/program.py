"""Keep, recompute or offload as an integer program: what to do with each activation, and a bound.

1.  For each activation (``offplan.activations``) three choices: it is *kept*, it *moves* to the
    host and back, it is computed *again*; those of twin regions are one.  What the backward needs
    is there in one of these ways, and so is what an op that runs again reads.
2.  Memory is that of the traced step at a sample of its ops, without what the choices take away and
    with what they add: an activation that is kept or moves is there in its *window*, between its
    last use in the forward and its first need in the backward, and leaves when no view of it is
    taken any more; one that is computed again is there from when another is computed again from it.
3.  Of what moves, the bytes that are *away* during an op are at most those that can have left by
    then, and can be back in time: for any earlier op, what could leave before it and what the link
    carries since, delays included; likewise for any later op, and what must come back.
4.  Time is that of the traced step, the costs of what is computed again (less those that the traced
    backward has and the choice has not), and what the forward and the backward are *delayed* by
    copies: what they wait for these, or what these take of the device's time, if that is more.
5.  What the program leaves out makes memory or time less than they are: where recomputed values
    lie in the meantime, copies that a window keeps waiting, all ops that are not sampled.  One
    thing makes them more: that activations are there as in the traced backward once their windows
    have ended, and that a window ends with the last that an activation could be wanted for, which
    may not be computed again.  A program of what is *certain* leaves that out as well: after its
    window an activation is not there, and one that no other op of the backward wants counts in
    the forward only.  So its relaxed optimum is a bound of any plan's predicted time, under the
    same costs.
6.  Solved by HiGHS.  First without whole numbers, which gives the bound; what comes out whole then
    stays so, and what does not is decided by branch and bound, within a gap and a time limit.  Few
    are left: as many as there are limits that bind, not as many as there are activations.  Where
    there are only few choices, all are decided so.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import highspy
import numpy as np
import numpy.typing as npt

from offplan.activations import Activation
from offplan.schedule import Rates

Way = Literal["keep", "move", "again"]

# Ops that are looked at.
_POINTS = 64
# In how many parts the time is cut in which an activation can be wanted before its window ends.
_EARLY = 8
# Bytes of the program are megabytes, so that its numbers are of like size.
_UNIT = 1e6
# What is moved or computed again without need costs this little, in milliseconds.
_ANY = 1e-4
_INFINITE = float("inf")
# How far from whole a number is whole.
_WHOLE = 1e-6
# So few columns are decided together.
_FEW = 40
# How many megabytes a millisecond counts where the peak comes first.
_LATER = 1e-4
# HiGHS's word for a solution that is one.
_FEASIBLE = 2


@dataclass(frozen=True)
class Step:
    """The traced step: bytes ``during`` each op without a plan, and milliseconds of each op, of
    which ``forward_count`` come before the first of a backward.  ``twins`` has, for each region,
    the first one that computes the same."""

    during: Sequence[int]
    op_ms: Sequence[float]
    forward_count: int
    twins: Sequence[int]
    rates: Rates


class Solution(NamedTuple):
    """``ways`` of each activation that is needed; ``step_ms`` as the program counts it, and the
    least that it can prove of that.  ``peak_bytes`` likewise."""

    ways: Mapping[int, Way]
    step_ms: float
    least_ms: float
    peak_bytes: int


class Program:
    """The program of one step, for any number of limits; with ``is_certain``, of what is certain
    alone (definition 5)."""

    def __init__(
        self,
        step: Step,
        found: Sequence[Activation],
        *,
        may_move: bool,
        may_recompute: bool,
        is_certain: bool = False,
    ) -> None:
        self.step, self.found = step, found
        self.may_move, self.may_recompute = may_move, may_recompute
        self.is_certain = is_certain
        self.starts = np.concatenate(([0.0], np.cumsum(step.op_ms)))
        self.costs: list[float] = []
        self.uppers: list[float] = []
        self.integers: list[bool] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.columns: dict[tuple[object, Way], int] = {}
        firsts: dict[int, int] = {}
        for place, item in enumerate(found):
            firsts.setdefault(item.region, place)
        self.ways = [
            self._ways(item, place - firsts[item.region]) for place, item in enumerate(found)
        ]
        self.consumers: dict[int, list[int]] = defaultdict(list)
        for place, item in enumerate(found):
            for read in item.inputs:
                self.consumers[read].append(place)
        self.first_needs = self._first_needs()
        self.windows = [self._window(place) for place in range(len(found))]
        self.forward_delay = self._column(1.0)
        self.backward_delay = self._column(1.0)
        self._needs()
        self.early = self._early()
        self.points = self._points()
        self._sums()
        self.limit_rows = [self._memory(number) for number in range(len(self.points))]
        for number in range(len(self.points)):
            self._link(number)
        self._share()

    # --- columns ----------------------------------------------------------------------------------

    def _column(self, cost: float, upper: float = _INFINITE, *, integer: bool = False) -> int:
        self.costs.append(cost)
        self.uppers.append(upper)
        self.integers.append(integer)
        return len(self.costs) - 1

    def _choice(self, key: object, way: Way, cost: float) -> int:
        """The column of a choice; twins share it, and each adds its cost."""
        if (key, way) not in self.columns:
            self.columns[key, way] = self._column(0.0, 1.0, integer=True)
        column = self.columns[key, way]
        self.costs[column] += cost
        return column

    def _ways(self, item: Activation, number: int) -> dict[Way, int]:
        """The columns of the activation that is the region's ``number``-th, as its twins' is."""
        key = self.step.twins[item.region], number
        # No plan takes longer for that.
        any_ms = 0.0 if self.is_certain else _ANY
        ways: dict[Way, int] = {"keep": self._choice(key, "keep", 0.0)}
        if self.may_move and (item.can_move or (not item.is_saved and not item.refused)):
            ways["move"] = self._choice(key, "move", any_ms)
        if (self.may_recompute and not item.refused) or item.again_at is not None:
            ways["again"] = self._choice(key, "again", item.cost_ms + any_ms)
        return ways

    # --- rows -------------------------------------------------------------------------------------

    def _row(self, row: Mapping[int, float], least: float, most: float = _INFINITE) -> int:
        self.rows.append((dict(row), least, most))
        return len(self.rows) - 1

    def _needs(self) -> None:
        """Definition 1."""
        for place, item in enumerate(self.found):
            there = dict.fromkeys(self.ways[place].values(), 1.0)
            if item.needed_by is not None:
                self._row(there, 1.0)
                continue
            for consumer in self.consumers[place]:
                again = self.ways[consumer].get("again")
                if again is not None and again not in there:
                    self._row({**there, again: -1.0}, 0.0)

    def _first_needs(self) -> list[int]:
        """The first op of the backward that wants each activation; where only others are computed
        again from it, the one of them that comes last (5)."""
        found = [0] * len(self.found)
        for place in reversed(range(len(self.found))):
            item = self.found[place]
            needs = [need for need in (item.needed_by, item.again_at) if need is not None]
            readers = [found[reader] for reader in self.consumers[place] if reader > place]
            found[place] = min(needs) if needs else max(readers, default=len(self.step.during))
        return found

    def _window(self, place: int) -> tuple[int, int]:
        """The ops ``[start, stop)`` during which the activation can be absent."""
        item = self.found[place]
        if self.is_certain and item.needed_by is None:
            # In the forward only: it ends before anything can be wanted early.
            return item.last_use + 1, max(item.last_use + 1, self.step.forward_count)
        if item.is_saved and item.needed_by is None:
            # The traced backward reads it to compute others again.
            traced = [self.found[reader].again_at for reader in self.consumers[place]]
            needs = [need for need in traced if need is not None]
            return item.last_use + 1, min(needs, default=self.first_needs[place])
        return item.last_use + 1, self.first_needs[place]

    def _early(self) -> list[dict[int, int]]:
        """By op, a column for each time at which an activation that is not there can be wanted
        before its window ends, by one that is computed again from it (definition 2).  All but the
        last are of one grid, to which what is wanted before is rounded up.

        ``back`` has likewise columns for one that moves, and must be back by then.
        """
        found: list[dict[int, int]] = [{} for _ in self.found]
        self.back: list[dict[int, int]] = [{} for _ in self.found]
        needs = sorted({op for op in self.first_needs if op < len(self.step.during)})
        grid = needs[:: max(1, len(needs) // _EARLY)]
        for place in reversed(range(len(self.found))):
            start, stop = self.windows[place]
            readers = [
                reader
                for reader in self.consumers[place]
                if reader > place and "again" in self.ways[reader]
            ]
            asking = [(self.first_needs[reader], self.ways[reader]["again"]) for reader in readers]
            asking += [asked for reader in readers for asked in found[reader].items()]
            asking = [(op, asked) for op, asked in asking if start <= op < stop]
            times = _rounded({op for op, _ in asking}, grid)
            found[place] = {op: self._column(0.0, 1.0) for op in times}
            if "move" in self.ways[place]:
                self.back[place] = {op: self._column(0.0, 1.0) for op in times}
            for columns in (found[place], self.back[place]):
                for before, after in pairwise(times if columns else ()):
                    self._row({columns[after]: 1.0, columns[before]: -1.0}, 0.0)
            there = [self.ways[place][way] for way in ("keep", "move") if way in self.ways[place]]
            for op, asked in asking:
                time = times[bisect_left(times, op)]
                row = {found[place][time]: 1.0, **dict.fromkeys(there, 1.0)}
                self._row({**row, asked: -1.0}, 0.0)
                if self.back[place]:
                    moves, back = self.ways[place]["move"], self.back[place][time]
                    self._row({back: 1.0, moves: -1.0, asked: -1.0}, -1.0)
        return found

    def _points(self) -> list[int]:
        """The ops that are highest, in the traced step and with all computed again that can be, one
        each for each stretch."""
        during = np.asarray(self.step.during, dtype=float)
        count = len(during)
        if not count:
            return []
        change = np.zeros(count + 1)
        for place, item in enumerate(self.found):
            start, stop = self.windows[place]
            if "again" not in self.ways[place] or start >= stop:
                continue
            first = min(self.early[place], default=stop)
            change[[start, first]] += (-item.size_bytes, item.size_bytes)
            if not item.is_saved:
                change[[start, stop]] += (item.size_bytes, -item.size_bytes)
        recomputed = during + np.cumsum(change)[:count]
        edges = np.unique(np.linspace(0, count, _POINTS + 1).astype(int))
        points = {
            int(first + np.argmax(curve[first:last]))
            for curve in (during, recomputed)
            for first, last in pairwise(edges)
        }
        return sorted({*points, int(np.argmax(during)), self.step.forward_count - 1} - {-1})

    def _sums(self) -> None:
        """Columns with what is true at each point: megabytes that are kept or move and are in their
        window; that move and could have left, and have to come back after it; megabytes away;
        milliseconds of what has been computed again by then; and megabytes that did not come
        back."""
        count = len(self.points)
        self.held, self.gone, self.due, self.again, self.away, self.lost = (
            [self._column(0.0) for _ in range(count)] for _ in range(6)
        )
        held, gone, due, again, lost = (_changes(count) for _ in range(5))
        for place, item in enumerate(self.found):
            start, stop = (bisect_left(self.points, op) for op in self.windows[place])
            size, ways = item.size_bytes / _UNIT, self.ways[place]
            # What of it does not cross the link is not waited for.
            moved = item.transfer_bytes / _UNIT
            for way, there in (("keep", size), ("move", moved)):
                if way in ways and start < stop:
                    _add(held, start, ways[way], there)
                    _add(held, stop, ways[way], -there)
            times = sorted(self.early[place])
            for op, following in pairwise([*times, self.windows[place][1]]):
                column = self.early[place][op]
                _add(held, bisect_left(self.points, op), column, size)
                _add(held, bisect_left(self.points, following), column, -size)
            if "move" in ways and item.lost_bytes:
                after = bisect_left(self.points, item.lost_through + 1)
                _add(lost, stop, ways["move"], item.lost_bytes / _UNIT)
                _add(lost, max(stop, after), ways["move"], -item.lost_bytes / _UNIT)
            if "move" in ways and start < stop:
                _add(gone, bisect_left(self.points, item.last_view + 1), ways["move"], moved)
                _add(due, stop - 1, ways["move"], moved)
                for op, following in pairwise([*times, self.windows[place][1]]):
                    first, last = (bisect_left(self.points, at) for at in (op, following))
                    if first < last:
                        _add(due, last - 1, self.back[place][op], -moved)
                    if 0 < first < last:
                        _add(due, first - 1, self.back[place][op], moved)
            if "again" in ways and item.again_at is None:
                first = bisect_left(self.points, self.first_needs[place])
                _add(again, first, ways["again"], item.cost_ms)
        for columns, changes in (
            (self.held, held), (self.gone, gone), (self.again, again), (self.lost, lost),
        ):  # fmt: skip
            self._cumulate(columns, changes)
        self._cumulate(self.due[::-1], due[::-1])

    def _cumulate(self, columns: Sequence[int], changes: Sequence[Mapping[int, float]]) -> None:
        """Each of ``columns`` is the one before, and what changes."""
        for number, change in enumerate(changes):
            row = {column: -value for column, value in change.items()}
            row[columns[number]] = 1.0
            if number:
                row[columns[number - 1]] = -1.0
            self._row(row, 0.0, 0.0)

    def _memory(self, number: int) -> int:
        """Definition 2; the limit is filled in later."""
        point = self.points[number]
        fixed = self.step.during[point] / _UNIT
        for place, item in enumerate(self.found):
            start, stop = self.windows[place]
            begin = start if item.is_saved else None
            if self.is_certain:
                begin, stop = item.again_at if begin is None else begin, len(self.step.during)
            if begin is not None and begin <= point < stop:
                fixed -= item.size_bytes / _UNIT
        row = {self.held[number]: 1.0, self.away[number]: -1.0, self.lost[number]: -1.0}
        return self._row(row, -_INFINITE, -fixed)

    def _link(self, number: int) -> None:
        """Definition 3."""
        away, end = self.away[number], self.step.forward_count
        point = self.points[number]
        turn = bisect_left(self.points, end - 1)
        d2h = self.step.rates.d2h_bytes_per_s / _UNIT / 1000
        h2d = self.step.rates.h2d_bytes_per_s / _UNIT / 1000
        # What moves leaves in the forward only, and comes back in the backward only.
        self._row({self.gone[number]: 1.0, away: -1.0}, 0.0)
        self._row({self.due[number]: 1.0, away: -1.0}, 0.0)
        by, since = self.starts[min(point, end)], self.starts[max(point + 1, end)]
        # Before the first can leave and after the last is wanted, nothing crosses.
        first = min((w[0] for w in self.windows), default=0)
        last = max((w[1] for w in self.windows), default=0)
        self._row({self.forward_delay: d2h, away: -1.0}, -d2h * max(0.0, by - self.starts[first]))
        carried = h2d * max(0.0, self.starts[min(last, len(self.step.op_ms))] - since)
        row = {self.backward_delay: h2d, self.again[-1]: h2d, away: -1.0}
        if number > turn:
            row[self.again[number]] = row.get(self.again[number], 0.0) - h2d
        self._row(row, -carried)
        for earlier in range(min(number, turn + 1)):
            carried = d2h * max(0.0, by - self.starts[self.points[earlier] + 1])
            row = {self.gone[earlier]: 1.0, self.forward_delay: d2h, away: -1.0}
            self._row(row, -carried)
        for later in range(max(number, turn) + 1, len(self.points)):
            carried = h2d * max(0.0, self.starts[self.points[later]] - since)
            row = {self.due[later]: 1.0, self.backward_delay: h2d, away: -1.0}
            row[self.again[later]] = h2d
            if number > turn:
                row[self.again[number]] = -h2d
            self._row(row, -carried)

    def _share(self) -> None:
        """Definition 4: delays are no shorter than what copies take of the device's time.  They may
        be waits at the same time, in which the link carries on."""
        taken: dict[int, float] = defaultdict(float)
        for place, item in enumerate(self.found):
            column = self.ways[place].get("move")
            # Of what the traced pair does not save, a choice may save a part.
            if column is None or not item.can_move:
                continue
            taken[column] -= self.step.rates.taken_ms(item.transfer_bytes)
        for delay in (self.forward_delay, self.backward_delay):
            self._row({delay: 1.0, **taken}, 0.0)

    # --- solving ----------------------------------------------------------------------------------

    @property
    def own_ms(self) -> float:
        """The traced step without what its backward computes again."""
        return float(self.starts[-1]) - sum(
            item.cost_ms for item in self.found if item.again_at is not None
        )

    def solve(self, limit_bytes: int, *, gap_ms: float, seconds: float) -> Solution | None:
        """The ways for a peak within ``limit_bytes`` at the least time; None if there are none."""
        found = self._solved(self._limited(limit_bytes), gap_ms, seconds)
        if found is None:
            return None
        values, bound = found
        step_ms = self.own_ms + float(np.dot(self.costs, values))
        least_ms = min(self.own_ms + max(0.0, bound), step_ms)
        return Solution(self._chosen(values), step_ms, least_ms, limit_bytes)

    def bound_ms(self, limit_bytes: int, *, seconds: float) -> float | None:
        """The relaxed optimum for a peak within ``limit_bytes``, in milliseconds of a step; None if
        there is none, or none was found in time."""
        model = self._limited(limit_bytes)
        model.integrality_ = []
        found = _run(model, 0.0, seconds)
        return None if found is None else self.own_ms + max(0.0, found[1])

    def least_peak(self, *, seconds: float) -> Solution | None:
        """The ways for the least peak, and of those for one of the fastest."""
        model = self._model()
        # One more column, the peak, which each op's memory is within.
        peak = model.num_col_
        model.num_col_ += 1
        model.col_cost_ = np.append(_LATER * model.col_cost_, 1.0)
        model.col_lower_ = np.append(model.col_lower_, 0.0)
        model.col_upper_ = np.append(model.col_upper_, _INFINITE)
        model.integrality_ = [*model.integrality_, highspy.HighsVarType.kContinuous]
        limited = set(self.limit_rows)
        rows = [
            {**row, peak: -1.0} if number in limited else row
            for number, (row, _, _) in enumerate(self.rows)
        ]
        _fill(model, rows)
        found = self._solved(model, _LATER, seconds)
        if found is None:
            return None
        values, _ = found
        step_ms = self.own_ms + float(np.dot(self.costs, values[:peak]))
        return Solution(self._chosen(values), step_ms, 0.0, int(values[peak] * _UNIT))

    def _limited(self, limit_bytes: int) -> highspy.HighsLp:
        """The model with its limit."""
        model = self._model()
        upper = np.array([most for _, _, most in self.rows])
        upper[self.limit_rows] += limit_bytes / _UNIT
        model.row_upper_ = upper
        return model

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.costs), len(self.rows)
        model.col_cost_ = np.array(self.costs)
        model.col_lower_ = np.zeros(len(self.costs))
        model.col_upper_ = np.array(self.uppers)
        model.row_lower_ = np.array([least for _, least, _ in self.rows])
        model.row_upper_ = np.array([most for _, _, most in self.rows])
        kinds = highspy.HighsVarType
        model.integrality_ = [
            kinds.kInteger if integer else kinds.kContinuous for integer in self.integers
        ]
        _fill(model, [row for row, _, _ in self.rows])
        return model

    def _solved(
        self, model: highspy.HighsLp, gap: float, seconds: float
    ) -> tuple[npt.NDArray[np.float64], float] | None:
        """Values of the columns, and the bound of the objective (definition 6)."""
        integrality = model.integrality_
        model.integrality_ = []
        relaxed = _run(model, gap, seconds)
        if relaxed is None:
            return None
        values, bound = relaxed
        whole = np.array(self.integers + [False] * (len(values) - len(self.integers)))
        lower, upper = model.col_lower_, model.col_upper_
        model.integrality_ = integrality
        slacks = (-1.0,) if sum(self.integers) <= _FEW else (_WHOLE, -1.0)
        for slack in slacks:
            at_one, at_zero = whole & (values > 1 - slack), whole & (values < slack)
            model.col_lower_ = np.where(at_one, 1.0, lower)
            model.col_upper_ = np.where(at_zero, 0.0, upper)
            found = _run(model, gap, seconds)
            if found is not None:
                return found[0], bound
        return None

    def _chosen(self, values: npt.NDArray[np.float64]) -> dict[int, Way]:
        found: dict[int, Way] = {}
        for place, ways in enumerate(self.ways):
            order: tuple[Way, ...] = ("keep", "move", "again")
            way = next((way for way in order if way in ways and values[ways[way]] > 0.5), None)
            if way is not None:
                found[place] = way
        return found


def _fill(model: highspy.HighsLp, rows: Sequence[Mapping[int, float]]) -> None:
    """Give ``model`` the coefficients of its ``rows``."""
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.cumsum([0, *(len(row) for row in rows)])
    matrix.index_ = np.array([column for row in rows for column in row], dtype=np.int32)
    matrix.value_ = np.array([value for row in rows for value in row.values()])


def _run(
    model: highspy.HighsLp, gap: float, seconds: float
) -> tuple[npt.NDArray[np.float64], float] | None:
    """Values and objective of the best that was found; None if nothing was."""
    solver = _quiet_solver()
    for name, value in (
        ("threads", 1), ("mip_abs_gap", gap), ("mip_rel_gap", 0.0), ("time_limit", seconds),
    ):  # fmt: skip
        solver.setOptionValue(name, value)
    solver.passModel(model)
    solver.run()
    found = solver.getInfo()
    if found.primal_solution_status != _FEASIBLE:
        return None
    if not len(model.integrality_) and solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        # Out of time, what was found is no bound.
        return None
    return np.array(solver.getSolution().col_value), float(found.objective_function_value)


def _quiet_solver() -> highspy.Highs:
    """A solver that says nothing: the first one of a process prints its name and licence to the
    standard output, whatever its options, where a report or JSON may be written."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    solver.silent()
    return solver


def _rounded(times: Collection[int], grid: Sequence[int]) -> list[int]:
    """``times``, but for the last rounded up to those of ``grid``."""
    after = {grid[place] for op in times if (place := bisect_left(grid, op)) < len(grid)}
    return sorted({*(op for op in after if op < max(times)), *([max(times)] if times else ())})


def _changes(count: int) -> list[dict[int, float]]:
    return [defaultdict(float) for _ in range(count)]


def _add(changes: Sequence[dict[int, float]], number: int, column: int, value: float) -> None:
    if number < len(changes):
        changes[number][column] += value
