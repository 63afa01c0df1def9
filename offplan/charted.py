"""The charts of a plan: its step without any plan, and with it.

1.  Both are drawn by the profile that the plan was made with, or by the one that is given.
2.  A plan that moves nothing and computes nothing again has one chart, that of no plan.
3.  What cannot be drawn is refused with what to do: graphs that are not there, and a device of
    which no profile is known, as nobody knows when its ops start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from offplan.chart import Chart, chart
from offplan.costs import DeviceProfile
from offplan.errors import PlanError, UsageError
from offplan.graph import GraphFacts, digest
from offplan.memory import Conditions
from offplan.opened import Opened, profile_of
from offplan.plan import Plan, analyze_command
from offplan.relower import relowered
from offplan.transfers import Transfer


@dataclass(frozen=True)
class Charts:
    """The charts, each made when it is asked for.  Without ``planned`` there is none of the plan
    (definition 2)."""

    base: GraphFacts
    planned: GraphFacts | None
    transfers: tuple[Transfer, ...]
    conditions: Conditions
    rates: DeviceProfile
    notes: tuple[str, ...] = ()

    @cached_property
    def no_plan(self) -> Chart:
        return chart(self.base, (), self.conditions, self.rates)

    @cached_property
    def plan(self) -> Chart | None:
        if self.planned is None:
            return None
        return chart(self.planned, self.transfers, self.conditions, self.rates)

    @property
    def last(self) -> Chart:
        """That of the plan, which says what will happen."""
        return self.plan or self.no_plan

    def by_name(self) -> dict[str, Chart]:
        named = {"no plan": self.no_plan}
        return named if self.plan is None else {**named, "plan": self.plan}


def charts_of(opened: Opened, given: DeviceProfile | None = None) -> Charts:
    """The charts of ``opened``, by the profile ``given`` or else the plan's.

    Raises ``PlanError`` without graphs, and ``UsageError`` without a profile (definition 3).
    """
    plan = opened.plan
    changes = bool(plan.transfers or plan.choices)
    if opened.base is None or (changes and opened.facts is None):
        raise PlanError(
            "a timeline is drawn from the plan's graphs, which are not here",
            fix=f"{analyze_command(plan)} --graph FILE.graph.json, and name them with --graph",
        )
    rates = profile_of(plan, given)
    if rates is None:
        raise UsageError(
            f"no profile of {plan.gpu or 'this device'} is known, so that nobody knows when its "
            "ops start",
            fix="--profile FILE, by offplan device; or the name of a GPU: --profile h200",
        )
    return Charts(
        base=opened.base,
        planned=opened.facts if changes else None,
        transfers=plan.transfers,
        conditions=plan.predicted.conditions,
        rates=rates,
        notes=tuple(_notes(opened, rates)),
    )


def opened_of(plan: Plan, base: GraphFacts) -> Opened:
    """A plan that was just made for ``base``."""
    if not plan.choices:
        return Opened(plan, base, base)
    facts = relowered(base, plan.choices)
    if digest(facts) != plan.digest:
        return Opened(plan, base, None, ("this offplan makes other graphs of the plan's choices",))
    return Opened(plan, base, facts)


def _notes(opened: Opened, rates: DeviceProfile) -> Iterator[str]:
    """Where what is drawn differs from what the plan was made with."""
    yield from opened.notes
    predicted = opened.plan.predicted
    if predicted.profile and predicted.profile != rates.name:
        yield f"times are by the profile {rates.name}, the plan's are by {predicted.profile}"
    if predicted.op_times == "measured":
        yield "times are by the profile; the plan was made with measured op times"
