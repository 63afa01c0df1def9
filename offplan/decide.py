"""The plan of a step, with what may be done to it: from facts to a Plan, whatever the actions.

1.  Where storages may be kept and moved only, a plan is one of ``offplan.budget`` for the graphs as
    they were traced.  Where they may be computed again, it is one of ``offplan.joint``, and has
    choices with it; each storage that was weighed then has its prices, and a reason.
2.  No budget, and budget 0, take the graphs as they were traced: nothing, or everything, moves.
3.  Another machine is this one with a link, or a GPU, of another speed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from offplan.activations import Activation
from offplan.budget import Aim, Budget, CurvePoint, Elsewhere, JointPoint, Outlooks, of_bytes
from offplan.costs import DeviceProfile, with_arithmetic
from offplan.eligibility import RuleSet
from offplan.fusion import is_fused
from offplan.graph import GraphFacts, digest
from offplan.joint import Confirm, Joint, Tried
from offplan.plan import Decided, Draft, Plan, Weighed
from offplan.relower import relowered
from offplan.units import format_size

if TYPE_CHECKING:
    from offplan.program import Way

_GUESSED = (
    "how the compiler lowers what is computed again is guessed: analyze the target instead of a "
    "saved graph to have it asked"
)
# How much faster a link, and slower a GPU, other machines have.
_TIMES = 2


class Decisions:
    """Plans of one step for any number of budgets.  ``aim`` says which actions there are.

    ``confirm`` gives the facts of a choice as a trace would; without it, how a compiler lowers them
    is guessed, and a plan says so.
    """

    def __init__(
        self,
        facts: GraphFacts,
        rules: RuleSet,
        min_bytes: int,
        aim: Aim,
        confirm: Confirm | None = None,
    ) -> None:
        self.facts, self.rules, self.min_bytes = facts, rules, min_bytes
        self.aim, self.confirm = aim, confirm
        self.draft = self._draft(facts)
        self._planned = {digest(facts): facts}

    def facts_of(self, plan: Plan) -> GraphFacts:
        """The graphs that a plan made here is for: as traced, or under its choices."""
        return self._planned[plan.digest]

    def _draft(self, facts: GraphFacts) -> Draft:
        return Draft(facts, self.rules, self.min_bytes, self.aim.actions)

    @cached_property
    def joint(self) -> Joint:
        return self._joint(self.aim)

    def _joint(self, aim: Aim) -> Joint:
        # Op by op the guess is exact.
        confirm = self.confirm if is_fused(self.facts) else None
        return Joint(self.facts, lambda facts: self._draft(facts).moves, aim, relowered, confirm)

    @cached_property
    def outlooks(self) -> Outlooks:
        """Plans for the graphs as they were traced."""
        if "recompute" in self.aim.actions:
            return self.joint.base
        return Outlooks(self.facts, self.draft.moves, self.aim)

    def plan(self, budget: Budget | None) -> Plan:
        """The plan for ``budget``.  Raises ``BudgetError`` if there is none."""
        is_traced = budget is None or budget.kind == "everything"
        if is_traced or "recompute" not in self.aim.actions:
            return self.draft.plan(self.outlooks.outlook_for(budget), budget)
        assert budget is not None
        tried = self.joint.at_floor() if budget.kind == "floor" else self.joint.best(budget)
        outlook = tried.outlook
        if tried.choices and self.confirm is None and is_fused(self.facts):
            outlook = replace(outlook, warnings=(*outlook.warnings, _GUESSED))
        self._planned[digest(tried.facts)] = tried.facts
        return self._draft(tried.facts).plan(outlook, budget, self._decided(tried))

    def curve(self, count: int) -> tuple[CurvePoint, ...]:
        """``count`` budgets with the actions that there are."""
        return self.outlooks.curve(count)

    def joint_curve(self, count: int) -> tuple[JointPoint, ...]:
        """The same beside each action alone; nothing where there is only one."""
        return self.joint.curve(count) if "recompute" in self.aim.actions else ()

    # --- another machine --------------------------------------------------------------------------

    def elsewhere(self, budget: Budget) -> tuple[Elsewhere, ...]:
        """What the plan for ``budget`` would be with a faster link, and on a slower GPU; nothing
        where the machine is not known.

        Raises ``BudgetError`` if there is no plan.
        """
        profile = self.joint.base.profile
        limit = self.joint.base.budget_bytes(budget)
        if profile is None or not limit:
            return ()
        slower_ms = {key: ms * _TIMES for key, ms in self.aim.op_ms.items()}
        aims = (
            ("as it is", self.aim),
            ("a link twice as fast", replace(self.aim, profile=_with_link(profile, _TIMES))),
            (
                "a GPU half as fast",
                replace(self.aim, profile=with_arithmetic(profile, 1 / _TIMES), op_ms=slower_ms),
            ),
        )
        found = []
        for name, aim in aims:
            joint = Joint(self.facts, self.joint.moves, aim, relowered)
            tried = joint.best(of_bytes(limit))
            time = tried.outlook.predicted.time
            assert time is not None
            again_bytes = sum(item.size_bytes for item in joint.recomputed(tried))
            found.append(
                Elsewhere(name, time.step_ms, time.no_plan_ms, tried.moved_bytes, again_bytes)
            )
        return tuple(found)

    # --- prices -----------------------------------------------------------------------------------

    def _decided(self, tried: Tried) -> Decided:
        ways = tried.solution.ways if tried.solution is not None and tried.choices else {}
        weighed = tuple(
            self._weighed(item, ways.get(place), tried)
            for place, item in enumerate(self.joint.found)
            if item.is_saved or item.again_at is not None or place in ways
        )
        again_ms = sum(item.cost_ms for item in self.joint.recomputed(tried))
        return Decided(self.facts, tried.choices, weighed, round(1000 * again_ms))

    def _weighed(self, item: Activation, way: Way | None, tried: Tried) -> Weighed:
        rates = self.joint.base.planner.costs.rates
        link_ms = rates.d2h_ms(item.size_bytes) if item.can_move else None
        return Weighed(
            region=item.region,
            storage=item.storage,
            ops=item.recipe,
            inputs=tuple(self.joint.found[place].storage for place in item.inputs),
            recompute_us=None if item.refused else round(1000 * item.cost_ms),
            recompute_why=item.refused,
            link_us=None if link_ms is None else round(1000 * link_ms),
            reason=_reason(item, way, tried),
        )


def _with_link(profile: DeviceProfile, factor: float) -> DeviceProfile:
    names = (
        "d2h_bytes_per_s",
        "h2d_bytes_per_s",
        "d2h_both_bytes_per_s",
        "h2d_both_bytes_per_s",
    )
    rates = {name: int(factor * getattr(profile, name)) for name in names}
    return msgspec.structs.replace(profile, **rates)


def _reason(item: Activation, way: Way | None, tried: Tried) -> str:
    """Why it is done, in words."""
    if way == "again":
        freed = format_size(round(item.size_bytes / max(item.cost_ms, 1e-3)))
        return f"computing it again frees {freed} a millisecond"
    moved = {(transfer.region, transfer.storage) for transfer in tried.outlook.transfers}
    if (item.region, item.storage) in moved:
        if not tried.choices:
            return "it is away while the peak is reached"
        return "the budget is met at the least time with it away"
    if item.needed_by is None and way == "keep":
        return "others are computed again from it"
    if item.refused and not item.can_move:
        return f"it cannot move, nor be computed again: {item.refused}"
    return "the budget is met at the least time with it there"


def decide(
    facts: GraphFacts,
    rules: RuleSet,
    min_bytes: int,
    budget: Budget | None,
    aim: Aim,
    confirm: Confirm | None = None,
) -> Plan:
    """The plan of ``facts`` for ``budget``.  Raises ``BudgetError`` if there is none."""
    return Decisions(facts, rules, min_bytes, replace(aim, budget=budget), confirm).plan(budget)
