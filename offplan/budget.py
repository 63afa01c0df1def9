"""What a budget asks for, and the plan that meets it: as predicted, not only as planned.

1.  A *budget* is a number of bytes of peak (``80GiB``), a share of the peak without a plan
    (``80%``), ``auto`` (the GPU's memory less a margin), ``floor`` (the least peak there is, moving
    only what lowers it), or ``0`` (everything movable moves, placed for that same least peak).
2.  ``auto`` leaves a margin for the CUDA context and its libraries' code, and keeps within the rest
    what the caching allocator is predicted to *reserve*, not only what it hands out.
3.  The planner counts what ops ask for; the allocator hands out whole blocks.  A plan whose
    predicted peak exceeds the budget is planned again with the excess taken off, down to the floor,
    which is the predicted peak of the plan for the least limit (of what a compiler fuses, that of
    the plan that moves everything, or the least, if it is less).
4.  Where a compiler fuses ops (``offplan.fusion``), the planner counts with graphs that have
    transfers in them, and each plan is predicted as it is compiled.  Graphs without any can have
    a higher peak, for the compiler orders them itself: if nothing else has to move, the least does.
5.  Such predictions have a band, which a plan for a budget leaves free, and by which the budget of
    ``floor`` exceeds its predicted peak.
6.  Without a profile of the GPU, copies are placed as for ``NOMINAL`` rates, and no time is
    predicted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

import msgspec

from offplan.costs import DeviceProfile, link_rates, op_times, profile_for
from offplan.errors import BudgetError, UsageError
from offplan.fusion import BAND, as_run, fused, is_fused, landings
from offplan.graph import GraphFacts
from offplan.memory import Conditions, Memory, Prediction
from offplan.planner import Costs, Planned, Planner
from offplan.transfers import Move, Transfer
from offplan.units import format_size, parse_size

Action = Literal["keep", "recompute", "offload"]
BudgetKind = Literal["bytes", "share", "auto", "floor", "everything"]

# The CUDA context with its libraries takes 0.5 to 0.8 GB on recent GPUs.
MARGIN_BYTES = 1000**3

NO_CONDITIONS = Conditions()

# Rates by which copies are placed where the GPU is not known.
NOMINAL = "h200"
# Attempts to bring the prediction under the budget before the least limit is tried.
_ATTEMPTS = 6


@dataclass(frozen=True)
class Budget:
    """A budget as it was asked for (definition 1).  ``value`` is bytes, or a share of 1."""

    kind: BudgetKind
    value: float = 0
    text: str = ""


EVERYTHING = Budget("everything", 0, "0")
FLOOR = Budget("floor", 0, "floor")
AUTO = Budget("auto", 0, "auto")


def parse_budget(text: str) -> Budget | None:
    """The budget that the command line calls ``text``; None for ``none``.

    Raises ``UsageError`` for anything that is no budget.
    """
    words = {"none": None, "floor": FLOOR, "auto": AUTO}
    if text in words:
        return words[text]
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if share is not None:
        if not 0 < float(share[1]) <= 100:
            raise UsageError(f"--budget {text}: a share is over 0% and at most 100%")
        return Budget("share", float(share[1]) / 100, text)
    try:
        size_bytes = parse_size(text)
    except UsageError as error:
        raise UsageError(
            f"--budget {text}: not a budget",
            fix="a size (80GiB), a share of the peak (80%), auto, floor, or 0",
        ) from error
    return of_bytes(size_bytes, text)


def of_bytes(size_bytes: int, text: str = "") -> Budget:
    """The budget of ``size_bytes``; 0 moves everything."""
    if size_bytes == 0:
        return EVERYTHING
    return Budget("bytes", size_bytes, text or str(size_bytes))


def given_budget(budget: int | str | None) -> Budget | None:
    """What a budget given as bytes or as text means.  Raises ``UsageError`` for what means none."""
    if budget is None or isinstance(budget, str):
        return None if budget is None else parse_budget(budget)
    if budget < 0:
        raise UsageError(f"budget is {budget}", fix="give a number of bytes, or a size")
    return of_bytes(budget)


@dataclass(frozen=True)
class Aim:
    """What to plan for.  ``profile`` None: the one that is shipped for the GPU of the graphs.

    ``op_ms``: measured times by ``costs.op_key``.  ``host_bytes`` limits host memory.
    ``device_bytes`` is what ``auto`` may use of the device, by default all that the profile says.
    ``actions`` are what may be done with a saved storage; keeping it always may.
    """

    budget: Budget | None = None
    host_bytes: int | None = None
    conditions: Conditions = NO_CONDITIONS
    profile: DeviceProfile | None = None
    op_ms: Mapping[str, float] = field(default_factory=dict)
    device_bytes: int | None = None
    actions: tuple[Action, ...] = ("keep", "offload")


class PredictedTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds of a step, whole ones, so that a file says the same everywhere.

    ``least_us``: no plan with this peak takes less.
    """

    no_plan_us: int
    step_us: int
    forward_us: int
    stalled_us: int
    least_us: int

    @property
    def no_plan_ms(self) -> float:
        return self.no_plan_us / 1000

    @property
    def step_ms(self) -> float:
        return self.step_us / 1000

    @property
    def stalled_ms(self) -> float:
        return self.stalled_us / 1000

    @property
    def least_ms(self) -> float:
        return self.least_us / 1000


class Predicted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a plan is predicted to do.  ``floor_bytes`` is the least peak of any plan.

    ``profile`` names what times are predicted for; without one there is no ``time``.  ``op_times``
    says where those of the ops come from.  ``margin_bytes``: what ``auto`` left free.
    ``band_percent``: what peaks can be off by where a compiler fuses ops; None where it does not.
    """

    no_plan: Prediction
    plan: Prediction
    floor_bytes: int
    conditions: Conditions = Conditions()
    profile: str = ""
    op_times: Literal["roofline", "measured"] = "roofline"
    time: PredictedTime | None = None
    host_budget: int | None = None
    margin_bytes: int | None = None
    band_percent: int | None = None


@dataclass(frozen=True)
class Outlook:
    """Transfers, the budget in bytes (None: none was asked, 0: everything), what is predicted.

    ``step_ms`` is what copies were placed by: by nominal rates where the device is not known, and
    no time is predicted.
    """

    transfers: tuple[Transfer, ...]
    budget_bytes: int | None
    predicted: Predicted
    warnings: tuple[str, ...] = ()
    step_ms: float = 0.0


class CurvePoint(msgspec.Struct, frozen=True):
    """One budget of the curve.  Times are None without a profile."""

    name: str
    limit_bytes: int
    peak_bytes: int
    moved_bytes: int
    transfer_count: int
    step_ms: float | None
    least_ms: float | None


class JointPoint(msgspec.Struct, frozen=True):
    """A budget, and the best plans for it: with all actions, offload only, recompute only; None
    where there is none.

    Break-evens: the bytes that a copy carries in a millisecond that compute waits for it, and the
    fewest that a millisecond of what is computed again frees; None where the action is not taken.
    """

    limit_bytes: int
    joint: CurvePoint | None
    offload: CurvePoint | None
    recompute: CurvePoint | None
    offload_bytes_per_ms: float | None
    recompute_bytes_per_ms: float | None


class Elsewhere(msgspec.Struct, frozen=True):
    """A plan for the same peak on another machine: its step, and that without a plan there; bytes
    that move each way, and that are computed again."""

    name: str
    step_ms: float
    no_plan_ms: float
    moved_bytes: int
    recomputed_bytes: int


class Outlooks:
    """Plans for one step and any number of budgets."""

    def __init__(self, facts: GraphFacts, movable: Sequence[Move], aim: Aim) -> None:
        self.facts = facts
        self.aim = aim
        self.warnings: list[str] = []
        # As they run with any transfers in them; the same facts if they run op by op.
        self.planned_facts = fused(facts, with_transfers=True)
        self.profile = aim.profile or self._shipped_profile()
        profile = self.profile or profile_for(NOMINAL)
        times = op_times(self.planned_facts, profile, aim.op_ms)
        self.memory = Memory(self.planned_facts, aim.conditions)
        without = self.memory.timeline()
        self.resting_bytes = without.resting_bytes
        # A storage of which the compiler saves a copy stays.
        movable = [move for move in movable if (move.region, move.storage) in without.last]
        self.planner = Planner(
            self.planned_facts,
            movable,
            without,
            Costs(times.op_ms, link_rates(self.planned_facts, profile), times.ahead_ms),
            aim.host_bytes,
            landings(facts),
        )
        self.no_plan = self._prediction(())
        self._floor: tuple[Planned, Prediction] | None = None

    def _shipped_profile(self) -> DeviceProfile | None:
        if self.facts.device == "cpu":
            return None
        try:
            return profile_for(self.facts.gpu)
        except UsageError:
            self.warnings.append(
                f"no profile of {self.facts.gpu or 'this GPU'}: no times are predicted, and copies "
                "are placed as for an H200 (offplan device -o FILE measures one, --profile FILE)"
            )
            return None

    # --- one budget -------------------------------------------------------------------------------

    def outlook(self) -> Outlook:
        """The plan for the budget that is aimed at.  Raises ``BudgetError`` if there is none."""
        return self.outlook_for(self.aim.budget)

    def outlook_for(self, budget: Budget | None) -> Outlook:
        """The same for ``budget``."""
        limit = self.budget_bytes(budget)
        if budget is None:
            planned, prediction = self.planner.plan(self.planner.peak_bytes), self.no_plan
        elif budget.kind == "everything":
            planned = self.planner.plan(0)
            prediction = self._predict(planned)
        elif budget.kind == "floor":
            planned, prediction = self.floor()
        else:
            assert limit is not None
            planned, prediction = self._within(limit, budget)
        margin_bytes = MARGIN_BYTES if budget is not None and budget.kind == "auto" else None
        return self._outlook(planned, prediction, limit, margin_bytes)

    def budget_bytes(self, budget: Budget | None) -> int | None:
        """The peak that ``budget`` allows; None without one, 0 if everything moves."""
        if budget is None:
            return None
        if budget.kind == "floor":
            return self.with_band(self.floor()[1].peak_bytes)
        if budget.kind == "share":
            return int(budget.value * self.no_plan.peak_bytes)
        if budget.kind == "auto":
            return self._device_bytes() - MARGIN_BYTES
        return int(budget.value)

    def asked_bytes(self, limit: int) -> int:
        """What ops may ask for together, for a predicted peak within ``limit`` (definition 3)."""
        # What blocks add without a plan is the best guess of what they add with one.
        rounding_bytes = max(0, self.no_plan.peak_bytes - self.planner.peak_bytes)
        if is_fused(self.facts):
            # That is also how much better or worse the compiler orders graphs without transfers.
            rounding_bytes = min(rounding_bytes, self.no_plan.parts["rounding"])
        return min(self.without_band(limit) - rounding_bytes, self.planner.peak_bytes)

    def without_band(self, limit: int) -> int:
        """The highest predicted peak that keeps within ``limit`` (definition 5)."""
        return int(limit / (1 + self._band))

    def with_band(self, peak_bytes: int) -> int:
        """The least budget that a plan of this predicted peak keeps within (definition 5)."""
        return ceil(peak_bytes * (1 + self._band))

    @property
    def _band(self) -> float:
        """What a peak can be off by (definition 5)."""
        return BAND if is_fused(self.facts) else 0.0

    def floor(self) -> tuple[Planned, Prediction]:
        """The plan with the least peak, and its prediction."""
        if self._floor is None:
            planned = self.planner.plan(self.planner.floor_bytes)
            self._floor = planned, self._predict(planned)
            if is_fused(self.facts):
                # What is released and runs late can be worse than the planner counts.
                others = (self.planner.plan_least(), self.planner.plan(0))
                found = (self._floor, *((each, self._predict(each)) for each in others))
                self._floor = min(
                    found, key=lambda each: (each[1].peak_bytes, each[0].time.step_ms)
                )
        return self._floor

    def _device_bytes(self) -> int:
        if self.aim.device_bytes is not None:
            return self.aim.device_bytes
        if self.profile is None:
            raise UsageError(
                "--budget auto needs to know the device's memory",
                fix="name a profile with --profile FILE, or a size",
            )
        return self.profile.memory_bytes

    def _within(self, limit: int, budget: Budget) -> tuple[Planned, Prediction]:
        """The plan that is predicted to stay within ``limit`` (definitions 2, 3 and 5)."""
        asked = limit
        limit = self.without_band(limit)

        def excess_bytes(found: Prediction) -> int:
            held = found.reserved_bytes if budget.kind == "auto" else found.peak_bytes
            return max(held, found.peak_bytes) - limit

        if excess_bytes(self.no_plan) <= 0:
            return self.planner.plan(self.planner.peak_bytes), self.no_plan
        inner = self.asked_bytes(asked)
        for _ in range(_ATTEMPTS):
            if inner < self.planner.floor_bytes:
                break
            planned = self.planner.plan(inner)
            if not planned.transfers and is_fused(self.facts):
                planned = self.planner.plan_least()
            prediction = self._predict(planned)
            if excess_bytes(prediction) <= 0:
                return planned, prediction
            inner -= excess_bytes(prediction)
        planned, prediction = self.floor()
        if excess_bytes(prediction) > 0:
            raise self.refusal(asked, budget, prediction)
        return planned, prediction

    def refusal(self, limit: int, budget: Budget, floor: Prediction) -> BudgetError:
        """That no plan keeps within ``limit``, as ``budget`` asks, ``floor`` being the lowest."""
        least_bytes, band = self.with_band(floor.peak_bytes), self._band
        room = f" with {100 * band:g}% to spare" if band else ""
        parts = sorted(((size, part) for part, size in floor.parts.items() if size), reverse=True)
        made_of = ", ".join(
            f"{format_size(size)} of {part.replace('_', ' ')}" for size, part in parts[:4]
        )
        named = f"{budget.text} ({format_size(limit)})" if budget.kind != "bytes" else budget.text
        host = (
            ""
            if self.aim.host_bytes is None
            else f" with {format_size(self.aim.host_bytes)} of host memory"
        )
        return BudgetError(
            f"no plan keeps the peak within {named}{host}{room}: the floor is "
            f"{format_size(floor.peak_bytes)}, made of {made_of}",
            floor_bytes=floor.peak_bytes,
            where=f"{floor.op_target}, op {floor.op}",
            fix=f"--budget {least_bytes} is the least; below it only a smaller step helps",
        )

    def _predict(self, planned: Planned) -> Prediction:
        return self._prediction(planned.transfers) if planned.transfers else self.no_plan

    def _prediction(self, transfers: Sequence[Transfer]) -> Prediction:
        if not is_fused(self.facts):
            return self.memory.predict(transfers)
        ran = as_run(self.facts, transfers)
        return Memory(ran.facts, self.aim.conditions).predict(ran.transfers)

    def _outlook(
        self,
        planned: Planned,
        prediction: Prediction,
        budget_bytes: int | None,
        margin_bytes: int | None,
    ) -> Outlook:
        predicted = Predicted(
            no_plan=self.no_plan,
            plan=prediction,
            floor_bytes=self.floor()[1].peak_bytes,
            conditions=self.aim.conditions,
            profile="" if self.profile is None else self.profile.name,
            op_times="measured" if self.aim.op_ms else "roofline",
            time=self._time(planned),
            host_budget=self.aim.host_bytes,
            margin_bytes=margin_bytes,
            band_percent=round(100 * BAND) if is_fused(self.facts) else None,
        )
        return Outlook(
            planned.transfers,
            budget_bytes,
            predicted,
            tuple(self.warnings),
            planned.time.step_ms,
        )

    def _time(self, planned: Planned) -> PredictedTime | None:
        if self.profile is None:
            return None
        return PredictedTime(
            no_plan_us=round(1000 * self.planner.starts[-1]),
            step_us=round(1000 * planned.time.step_ms),
            forward_us=round(1000 * planned.time.forward_ms),
            stalled_us=round(1000 * planned.time.stalled_ms),
            least_us=round(1000 * planned.least_step_ms),
        )

    # --- all budgets ------------------------------------------------------------------------------

    def curve(self, count: int) -> tuple[CurvePoint, ...]:
        """``count`` budgets from the peak without a plan down to the floor, both included.

        A point never takes longer than one with a lower peak: that one's plan would do.
        """
        top, floor = self.planner.peak_bytes, self.planner.floor_bytes
        if top == floor or not self.planner.candidates:
            return (self._point(self.planner.plan(top), top),)
        limits = [floor + (top - floor) * place // (count - 1) for place in range(count)]
        points: list[CurvePoint] = []
        best: Planned | None = None
        for limit in limits:
            planned = self.planner.plan(limit)
            if best is None or planned.time.step_ms <= best.time.step_ms:
                best = planned
            points.append(self._point(best, limit))
        return tuple(reversed(points))

    def _point(self, planned: Planned, limit: int) -> CurvePoint:
        top, floor = self.planner.peak_bytes, self.planner.floor_bytes
        name = "no plan" if limit == top else "floor" if limit == floor else ""
        time = self._time(planned)
        return CurvePoint(
            name=name,
            limit_bytes=limit,
            peak_bytes=self._predict(planned).peak_bytes,
            moved_bytes=sum(transfer.transfer_bytes for transfer in planned.transfers),
            transfer_count=len(planned.transfers),
            step_ms=None if time is None else time.step_ms,
            least_ms=None if time is None else time.least_ms,
        )
