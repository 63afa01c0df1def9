"""Plans from all three actions: what is kept, computed again and moved, for a peak at least time.

1.  An integer program (``offplan.program``) says what to do with each activation, and proves how
    fast any plan could be.  It leaves out where recomputed values lie and how copies are placed, so
    what it says is tried: the choice is applied to the graphs, their memory read off the new
    timeline, and copies planned for it as for any graphs (``offplan.budget``).
2.  If the new timeline is higher than the program had it, the limit is lowered by the excess, and
    the program solved again, down to the lowest limit that it can meet.  The first program counts
    with a link that is a little slower than it is (definition 7); if its plan is not close to the
    bound, ones that count with the whole link or with half of it are tried too.  One without a
    link is tried wherever it may be as fast: its plan waits for no copy, and for no host.
3.  Where it takes long to ask what a compiler makes of a choice, choices are tried with a guess
    (``offplan.relower``).  It can be off in times (of a Llama-3.2-1B, 156 ms for 139) and in peaks
    (of eight Qwen3-14B layers by 68 MB for one choice, and by 0.44 GB for another), so it only
    says which are worth asking for.  Those few are asked for, and the fastest by that is taken; if
    all exceed the budget then, the limit is lowered by as much, and the search repeated.
4.  Of all that was tried, plans that only move among them, the fastest within the budget is taken
    (and see definition 7): never one whose predicted peak exceeds the budget, nor the peak without
    a plan.
5.  Where no budget can be met, the floor is the lowest peak of all that was tried, the program's
    least peak among them.
6.  With actions that do not include moving, nothing moves; with ones that do not include computing
    again, the traced graphs stay.
7.  A plan that fills the link to its last byte waits as soon as anything else is on it, other GPUs
    or a data loader.  So of plans that are as fast as each other, within what predictions are
    worth, the one is taken that is fastest with the slower link; and of those that are the same
    then, the one with the fewest copies, as what waits for nothing cannot be late.  Predicted times
    are with the whole link, and so is the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import msgspec

from offplan.activations import Activation, activations
from offplan.budget import (
    FLOOR,
    NOMINAL,
    Aim,
    Budget,
    CurvePoint,
    JointPoint,
    Outlook,
    Outlooks,
    of_bytes,
)
from offplan.costs import device_times_ms, profile_for
from offplan.errors import BudgetError
from offplan.graph import GraphFacts
from offplan.recompute import Choice, apply, copies
from offplan.roofline import is_view
from offplan.transfers import Move
from offplan.windows import twins

if TYPE_CHECKING:
    from offplan.program import Program, Solution

# Activations smaller than this stay as they are.
MIN_BYTES = 1024**2
# The program may stop this close to its bound, of the step's time; and after this many seconds.
_GAP = 0.002
_SECONDS = 6.0
_ATTEMPTS = 5
# What programs are given more than the limit, so that rounding does not refuse the least peak.
_MORE_BYTES = 1000
# Parts of the link's speed that programs count with, as copies are placed worse than they say, and
# how close to the bound is good enough not to solve another.  The first is what may be left of it,
# and plans are as fast as each other within so much (definition 7).
_SPEEDS = (0.85, 1.0, 0.5, 0.0)
_CLOSE = 0.01
_ALIKE = 0.005
# How close to that fastest with the slower link one has to be to be chosen for what it moves.
_SAME = 0.001
# By how much the program may be off for a plan that moves nothing, which is tried all the same.
_UNSURE = 0.02
# How close to the bound is good enough not to look at plans of the floor, nor on where choices
# exceeded the budget when they were confirmed; and how many are asked for at most.
_NEAR = 0.05
_MOST_ASKED = 6
# By what part of a budget it is lowered at least, at first, where what was confirmed exceeds it.
_LOWER = 0.004
# By what parts it is raised then, where what was found is still far from the bound.
_HIGHER = (0.0, 0.005, 0.02)

Moves = Callable[[GraphFacts], Sequence[Move]]
"""What may leave the device of a step."""


Relower = Callable[[GraphFacts, Sequence[Choice]], GraphFacts]
"""The facts of a step under choices."""
Confirm = Callable[[Sequence[Choice]], GraphFacts]
"""The facts that a trace of the step has under choices."""


@dataclass(frozen=True)
class Tried:
    """A choice that was applied: the graphs under it, and a plan for them, which takes
    ``slowed_ms`` with the slower link of definition 7."""

    choices: tuple[Choice, ...]
    facts: GraphFacts
    planned: Outlook | None
    solution: Solution | None
    slowed_ms: float = 0.0

    @property
    def outlook(self) -> Outlook:
        assert self.planned is not None
        return self.planned

    @property
    def step_ms(self) -> float:
        return self.outlook.step_ms

    @property
    def moved_bytes(self) -> int:
        return sum(transfer.transfer_bytes for transfer in self.outlook.transfers)

    @property
    def peak_bytes(self) -> int:
        return self.outlook.predicted.plan.peak_bytes


class Joint:
    """Plans of all three actions for one step, and any number of budgets.

    ``relower`` gives the facts of any choice that is tried; ``confirm`` those that a trace has of
    the one that is taken, where that takes long.
    """

    def __init__(
        self,
        facts: GraphFacts,
        moves: Moves,
        aim: Aim,
        relower: Relower = apply,
        confirm: Confirm | None = None,
    ) -> None:
        self.facts, self.moves, self.aim = facts, moves, aim
        self.relower, self.confirm = relower, confirm
        self.may_move = "offload" in aim.actions
        self.base = self._outlooks_of(facts, may_move=self.may_move)
        # Whether programs count what computing again costs alone.
        self._is_alone = False
        self._programs: dict[tuple[float, bool], Program] = {}
        self._solutions: dict[tuple[int, float, bool], Solution | None] = {}
        self._known: dict[tuple[tuple[Choice, ...], bool], tuple[GraphFacts, Outlooks]] = {}
        self._traces: dict[tuple[Choice, ...], tuple[GraphFacts, Outlooks]] = {}

    @cached_property
    def found(self) -> tuple[Activation, ...]:
        planner = self.base.planner
        movable = {(c.move.region, c.move.storage): c for c in planner.candidates}
        planned = self.base.planned_facts
        device_ms = device_times_ms(
            planned, self.base.profile or profile_for(NOMINAL), self.aim.op_ms
        )
        return activations(self.facts, planned, device_ms, movable, MIN_BYTES)

    @cached_property
    def program(self) -> Program:
        return self._program(1.0)

    @cached_property
    def _certain(self) -> Program:
        """The program that proves bounds."""
        return self._made(1.0, is_certain=True)

    def _program(self, speed: float) -> Program:
        """The program with a link of this part of the speed; without any, nothing moves."""
        key = speed, self._is_alone
        if key not in self._programs:
            self._programs[key] = self._made(speed)
        return self._programs[key]

    def _made(self, speed: float, *, is_certain: bool = False) -> Program:
        # A solver takes a third of a second to import, and commands that read plans need none.
        from offplan.program import Program, Step

        planner = self.base.planner
        step = Step(
            during=planner.during,
            op_ms=planner.costs.op_ms,
            forward_count=planner.forward_count,
            twins=twins(self.facts),
            rates=planner.costs.rates.times(speed),
        )
        found = self.found
        if self._is_alone and not is_certain:
            found = tuple(replace(item, cost_ms=item.alone_ms) for item in found)
        return Program(
            step,
            found,
            may_move=self.may_move and speed > 0,
            may_recompute="recompute" in self.aim.actions,
            is_certain=is_certain,
        )

    # --- one budget -------------------------------------------------------------------------------

    def best(self, budget: Budget) -> Tried:
        """The plan for ``budget``.  Raises ``BudgetError`` if there is none."""
        limit = self.base.budget_bytes(budget)
        assert limit is not None
        inner, best, known = limit, self._as_traced(limit, budget), len(self._traces)
        near_ms = (1 + _NEAR) * self._bound_ms(limit)
        were_refused = False
        for attempt in range(_ATTEMPTS if "recompute" in self.aim.actions else 0):
            found = list(self._applied(inner, limit, budget))
            best = _fastest([best, *found])
            excess = [more for more in found if isinstance(more, int)]
            were_refused |= bool(excess) and self.confirm is not None
            is_enough = len(self._traces) - known >= _MOST_ASKED or self.confirm is None
            if best is not None and best.choices and (best.step_ms <= near_ms or is_enough):
                break
            if not excess:
                break
            # Only another choice helps, and a little lower the program makes the same one.
            inner -= max(min(excess), int(_LOWER * limit)) << attempt
        for more in _HIGHER if were_refused else ():
            is_enough = len(self._traces) - known >= _MOST_ASKED
            if is_enough or (best is not None and best.step_ms <= near_ms):
                break
            # Lower there is no other choice.  With other costs there is, and copies may make up for
            # one that is a little higher.
            self._is_alone = True
            try:
                best = _fastest([best, *self._applied(int((1 + more) * limit), limit, budget)])
            finally:
                self._is_alone = False
        if best is None:
            raise self.base.refusal(limit, budget, self.floor.outlook.predicted.plan)
        return self._beside_traced(best, limit)

    def _confirmed(self, found: Tried, limit: int, budget: Budget) -> Tried | int:
        """``found`` with the facts that a trace has; or by how much it exceeds the limit then."""
        if not found.choices or self.confirm is None:
            return found
        facts, outlooks = self._asked(found.choices)
        return self._planned(found, facts, outlooks, limit, budget)

    def _asked(self, choices: tuple[Choice, ...]) -> tuple[GraphFacts, Outlooks]:
        """What a trace has under ``choices``, asked once."""
        assert self.confirm is not None
        if choices not in self._traces:
            facts = self.confirm(choices)
            self._traces[choices] = facts, self._outlooks_of(facts, may_move=self.may_move)
        return self._traces[choices]

    def _applied(self, inner: int, limit: int, budget: Budget) -> Iterator[Tried | int]:
        """What programs say for ``inner``, tried until one is close to the bound (definition 2);
        or by how much it exceeds ``limit``."""
        fastest_ms = inf
        for speed in _SPEEDS if self.may_move else (0.0,):
            is_close = fastest_ms <= (1 + _CLOSE) * self._bound_ms(inner)
            most_ms = fastest_ms if speed else (1 + _UNSURE) * fastest_ms
            if (is_close and speed) or self._least_ms(inner, speed) >= most_ms:
                continue
            found = self._within(inner, budget, speed)
            if found is None:
                continue
            confirmed = self._confirmed(found, limit, budget)
            yield confirmed
            if isinstance(confirmed, Tried):
                fastest_ms = min(fastest_ms, confirmed.step_ms)
        if fastest_ms > (1 + _NEAR) * self._bound_ms(inner):
            for lowest, outlooks in self._floors:
                yield self._planned(lowest, lowest.facts, outlooks, limit, budget)

    def _bound_ms(self, limit: int) -> float:
        """The least step time for ``limit`` as the program counts it; 0 if it is not known."""
        return self._least_ms(limit, 1.0 if self.may_move else 0.0)

    def _proven_ms(self, limit: int) -> float:
        """The bound on the step time of any plan for ``limit``; 0 if it is not known."""
        # As much more as programs are given.
        asked = self.base.asked_bytes(limit) + _MORE_BYTES
        return self._certain.bound_ms(asked, seconds=_SECONDS) or 0.0

    def _least_ms(self, limit: int, speed: float) -> float:
        """The same with a link of that part of the speed."""
        solution = self._solved(self.base.asked_bytes(limit), speed)
        return 0.0 if solution is None else solution.least_ms

    def _solved(self, inner: int, speed: float) -> Solution | None:
        key = inner, speed, self._is_alone
        if key not in self._solutions:
            gap_ms = _GAP * self.base.planner.starts[-1]
            self._solutions[key] = self._program(speed).solve(
                inner + _MORE_BYTES, gap_ms=gap_ms, seconds=_SECONDS
            )
        return self._solutions[key]

    def _beside_traced(self, found: Tried, limit: int) -> Tried:
        """``found``, with the traced step as what is without a plan, and the bound of all plans."""
        predicted, time = found.outlook.predicted, found.outlook.predicted.time
        if time is not None:
            least_ms = self._proven_ms(limit)
            time = msgspec.structs.replace(
                time,
                no_plan_us=round(1000 * self.base.planner.starts[-1]),
                least_us=min(round(1000 * least_ms) or time.least_us, time.step_us),
            )
        predicted = msgspec.structs.replace(predicted, no_plan=self.base.no_plan, time=time)
        return replace(found, planned=replace(found.outlook, predicted=predicted))

    def _as_traced(self, limit: int, budget: Budget) -> Tried | None:
        traced = Tried((), self.facts, None, None)
        found = self._planned(traced, self.facts, self.base, limit, budget)
        return found if isinstance(found, Tried) else None

    def _within(self, limit: int, budget: Budget, speed: float) -> Tried | None:
        """What the program says for ``limit``, tried (definitions 1 and 2)."""
        inner, failed = self.base.asked_bytes(limit), None
        most = self.base.without_band(limit)
        for _ in range(_ATTEMPTS):
            solution = self._solved(inner, speed)
            if solution is not None:
                # Where the program moves nothing, the plan does not have to make up for it.
                found = self._try(solution, limit, budget, may_move=speed > 0)
                if isinstance(found, Tried):
                    return found
                inner, failed = inner - found, inner
            elif inner < most and failed is None:
                # Blocks may add less than is expected.
                inner = most
            elif failed is None:
                break
            else:
                # Too low: half the way back.
                inner = (inner + failed) // 2
        return None

    def _try(
        self, solution: Solution, limit: int, budget: Budget, *, may_move: bool = True
    ) -> Tried | int:
        """The plan for the choice of ``solution``; or by how much it exceeds the limit."""
        choices = self.choices(solution)
        facts, outlooks = self._outlooks(choices, may_move=may_move)
        return self._planned(Tried(choices, facts, None, solution), facts, outlooks, limit, budget)

    def _planned(
        self, tried: Tried, facts: GraphFacts, outlooks: Outlooks, limit: int, budget: Budget
    ) -> Tried | int:
        # A share is one of the peak of the traced step.
        same = budget if budget.kind == "auto" else of_bytes(limit, budget.text)
        try:
            outlook = outlooks.outlook_for(same)
        except BudgetError as error:
            return max(1, outlooks.with_band(error.floor_bytes or limit) - limit)
        slowed_ms = outlooks.planner.time(outlook.transfers, _SPEEDS[0]).step_ms
        return replace(tried, facts=facts, planned=outlook, slowed_ms=slowed_ms)

    def _outlooks(
        self, choices: tuple[Choice, ...], *, may_move: bool = True
    ) -> tuple[GraphFacts, Outlooks]:
        key = choices, may_move and self.may_move
        if key not in self._known:
            facts = self.relower(self.facts, choices)
            self._known[key] = facts, self._outlooks_of(facts, may_move=key[1])
        return self._known[key]

    def _outlooks_of(self, facts: GraphFacts, *, may_move: bool) -> Outlooks:
        return Outlooks(facts, self.moves(facts) if may_move else (), self.aim)

    def choices(self, solution: Solution) -> tuple[Choice, ...]:
        """The choice of each region that ``solution`` makes; none for regions that stay."""
        made = []
        for number, region in enumerate(self.facts.regions):
            if region.backward is None:
                continue
            before = set(copies(region).values())
            ops = set(before)
            for place, item in enumerate(self.found):
                if item.region != number:
                    continue
                way = solution.ways.get(place)
                if way == "again":
                    ops |= set(item.recipe)
                elif item.again_at is not None and way is not None:
                    ops -= {item.recipe[-1], *self._makers(item)}
            if ops != before:
                made.append(Choice(number, tuple(sorted(ops | self._views(number)))))
        return tuple(made)

    def _makers(self, item: Activation) -> set[int]:
        """The ops of its recipe that write to the activation."""
        ops = self.facts.regions[item.region].forward.ops
        return {
            place
            for place in item.recipe
            if any(self.facts.values[v].storage == item.storage for v in ops[place].outputs)
        }

    def _views(self, number: int) -> set[int]:
        """Views that the region does not save: they cost nothing to take again."""
        region = self.facts.regions[number]
        saved = {item.value for item in region.saved}
        return {
            place
            for place, op in enumerate(region.forward.ops)
            if saved.isdisjoint(op.outputs) and is_view(self.facts, op) and op.declares_alias
        }

    # --- the floor --------------------------------------------------------------------------------

    @cached_property
    def floor(self) -> Tried:
        """The lowest peak of all that is tried (definition 5)."""
        tried = [found for found, _ in self._floors]
        return min(tried, key=lambda found: (found.peak_bytes, found.step_ms))

    @cached_property
    def _floors(self) -> tuple[tuple[Tried, Outlooks], ...]:
        """Plans with low peaks: with all actions, and with each alone."""
        tried: list[tuple[Tried, Outlooks]] = []
        for speed in {1.0 if self.may_move else 0.0: None, 0.0: None}:
            solution = self._program(speed).least_peak(seconds=_SECONDS)
            if solution is not None:
                ways = {speed > 0: None, self.may_move: None}
                tried += [self._lowest(solution, may_move=way) for way in ways]
        return (*tried, (Tried((), self.facts, _at_floor(self.base), None), self.base))

    def _lowest(self, solution: Solution, *, may_move: bool) -> tuple[Tried, Outlooks]:
        """The plan with the lowest peak for the choice of ``solution``."""
        choices = self.choices(solution)
        facts, outlooks = self._outlooks(choices, may_move=may_move)
        if self.confirm is not None and choices:
            facts, outlooks = self._asked(choices)
            if may_move != self.may_move:
                outlooks = self._outlooks_of(facts, may_move=may_move)
        return Tried(choices, facts, _at_floor(outlooks), solution), outlooks

    def at_floor(self) -> Tried:
        """The fastest plan that is tried with a peak no higher than the floor."""
        limit = self.base.with_band(self.floor.peak_bytes)
        found = self._tried(limit)
        if found is None or found.step_ms > self.floor.step_ms:
            found = self._beside_traced(self.floor, limit)
        return found

    # --- all budgets ------------------------------------------------------------------------------

    def curve(self, count: int) -> tuple[JointPoint, ...]:
        """``count`` budgets from the peak without a plan down to the floor, both included, with
        what each action could do alone.

        A point never takes longer than one with a lower peak: that one's plan would do.
        """
        top, floor = self.base.no_plan.peak_bytes, self.base.with_band(self.floor.peak_bytes)
        limits = (
            [top]
            if floor >= top
            else [top + (floor - top) * place // (count - 1) for place in range(count)]
        )
        alone = {
            action: Joint(
                self.facts, self.moves, replace(self.aim, actions=("keep", action)), self.relower
            )
            for action in self.aim.actions
            if action != "keep"
        }
        arms: dict[str, list[Tried | None]] = {}
        for name, joint in (("all", self), *alone.items()):
            found = [joint._nothing, *(joint._tried(limit) for limit in limits[1:])]
            for place in reversed(range(len(found) - 1)):
                one, lower = found[place], found[place + 1]
                if lower is not None and (one is None or lower.step_ms < one.step_ms):
                    found[place] = lower
            arms[name] = found
        nothing: list[Tried | None] = [None] * len(limits)
        return tuple(
            self._joint_point(limit, place, len(limits), all_of, *alone_at)
            for place, (limit, all_of, *alone_at) in enumerate(
                zip(
                    limits,
                    arms["all"],
                    arms.get("offload", nothing),
                    arms.get("recompute", nothing),
                    strict=True,
                )
            )
        )

    @cached_property
    def _nothing(self) -> Tried:
        """The traced step, as it is."""
        return Tried((), self.facts, self.base.outlook_for(None), None)

    def _tried(self, limit: int) -> Tried | None:
        try:
            return self.best(of_bytes(limit))
        except BudgetError:
            return None

    def _joint_point(
        self,
        limit: int,
        place: int,
        count: int,
        found: Tried | None,
        offload: Tried | None,
        recompute: Tried | None,
    ) -> JointPoint:
        name = "no plan" if place == 0 else "floor" if place == count - 1 else ""
        is_moving = found is not None and bool(found.outlook.transfers)
        return JointPoint(
            limit_bytes=limit,
            joint=_point(found, name, limit),
            offload=_point(offload, name, limit),
            recompute=_point(recompute, name, limit),
            offload_bytes_per_ms=(
                self.base.planner.costs.rates.d2h_bytes_per_s / 1000 if is_moving else None
            ),
            recompute_bytes_per_ms=None if found is None else self._least_freed(found),
        )

    def _least_freed(self, tried: Tried) -> float | None:
        """The fewest bytes a millisecond that computing something again frees."""
        freed = [item.size_bytes / item.cost_ms for item in self.recomputed(tried) if item.cost_ms]
        return min(freed, default=None)

    def recomputed(self, tried: Tried) -> list[Activation]:
        """What the traced step saves and ``tried`` computes again."""
        ways = tried.solution.ways if tried.solution is not None and tried.choices else {}
        return [
            self.found[place]
            for place, way in ways.items()
            if way == "again" and self.found[place].is_saved
        ]


def _fastest(found: Sequence[Tried | int | None]) -> Tried | None:
    """The fastest plan; of those as fast as that, the fastest with a slower link, and of those as
    fast with it to a thousandth, the one with the fewest copies (definition 7)."""
    plans = [each for each in found if isinstance(each, Tried)]
    least_ms = min((each.step_ms for each in plans), default=0.0)
    alike = [each for each in plans if each.step_ms <= (1 + _ALIKE) * least_ms]
    slowed_ms = min((each.slowed_ms for each in alike), default=0.0)
    same = [each for each in alike if each.slowed_ms <= (1 + _SAME) * slowed_ms]
    return min(same, key=lambda each: (len(each.outlook.transfers), each.slowed_ms), default=None)


def _point(found: Tried | None, name: str, limit: int) -> CurvePoint | None:
    if found is None:
        return None
    time = found.outlook.predicted.time
    return CurvePoint(
        name=name,
        limit_bytes=limit,
        peak_bytes=found.peak_bytes,
        moved_bytes=found.moved_bytes,
        transfer_count=len(found.outlook.transfers),
        step_ms=None if time is None else time.step_ms,
        least_ms=None if time is None else time.least_ms,
    )


def _at_floor(outlooks: Outlooks) -> Outlook:
    return outlooks.outlook_for(FLOOR)
