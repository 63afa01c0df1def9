"""What fits, and how fast, over values of a target's parameters.

1.  ``-p batch=1..16`` is an *axis*: ``1..16`` all of them, ``2..16:2`` every second, ``1..64*2``
    each twice the last, and lists of values or ranges with commas.  Any other value stays fixed.
2.  A *point* has one value of each axis.  It *fits* if its peak without a plan is within the
    budget, *fits with a plan* if there is one, and *does not fit* otherwise; a point whose trace
    fails has *failed*, with the message.  Without a budget points are *predicted* only.
3.  The *largest* value of an axis, for each combination of the others, is found by bisection: more
    is taken to need more.  Where a point that was looked at needs less than one before it, the line
    is not *monotone*, and what is found is a value that fits whose next one does not.
4.  ``key`` names all that a point depends on, so that points can be kept by content: the graphs
    with all that they say, for two GPUs can have the same ones, and what was asked.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from offplan.budget import Aim
from offplan.decide import Decisions
from offplan.eligibility import RuleSet
from offplan.errors import BudgetError, UsageError
from offplan.graph import GraphFacts, save_graph
from offplan.joint import Confirm

Outcome = Literal["predicted", "fits", "fits with a plan", "does not fit", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# A range of more values is a mistake.
_MOST_VALUES = 1000


class Axis(NamedTuple):
    name: str
    values: tuple[str, ...]


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One combination of values (definition 2).  Bytes and milliseconds are predicted; None where
    there are none.  ``peak_bytes`` and ``step_ms`` are with the plan, if there is one."""

    params: dict[str, str]
    outcome: Outcome
    budget_bytes: int | None = None
    no_plan_bytes: int | None = None
    floor_bytes: int | None = None
    peak_bytes: int | None = None
    no_plan_ms: float | None = None
    step_ms: float | None = None
    moved_bytes: int = 0
    recomputed_bytes: int = 0
    message: str = ""

    @property
    def does_fit(self) -> bool:
        return self.outcome in ("fits", "fits with a plan")

    @property
    def sample_ms(self) -> float | None:
        """The step per sample, where a parameter is the batch."""
        batch = self.params.get("batch", "")
        return (
            self.step_ms / int(batch) if self.step_ms and batch.isdecimal() and int(batch) else None
        )


class Largest(msgspec.Struct, frozen=True):
    """The largest ``value`` of an axis that fits with ``params``; None if none does."""

    params: dict[str, str]
    value: str | None
    is_monotone: bool


class Sweep(msgspec.Struct, frozen=True):
    """All points that were looked at, in the order of the axes."""

    target: str
    axes: tuple[Axis, ...]
    budget: str
    points: tuple[Point, ...]
    along: str = ""
    largest: tuple[Largest, ...] = ()

    @property
    def ok(self) -> bool:
        """Something fits, or nothing was asked to."""
        return not self.budget or any(point.does_fit for point in self.points)


# --- axes -----------------------------------------------------------------------------------------


def axes_of(params: Mapping[str, str]) -> tuple[tuple[Axis, ...], dict[str, str]]:
    """The axes among ``params``, and what is fixed (definition 1).  Raises ``UsageError``."""
    found = {name: _values(name, text) for name, text in params.items()}
    axes = tuple(Axis(name, values) for name, values in found.items() if len(values) > 1)
    fixed = {name: values[0] for name, values in found.items() if len(values) == 1}
    return axes, fixed


def _values(name: str, text: str) -> tuple[str, ...]:
    # A value that is a list or a mapping of its own is not several.
    if text[:1] in ("[", "{"):
        return (text,)
    found = dict.fromkeys(
        value for part in text.split(",") for value in _range(f"-p {name}={text}", part.strip())
    )
    return tuple(found)


def _range(given: str, part: str) -> tuple[str, ...]:
    match = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:([:*])(\d+))?", part)
    if match is None:
        return (part,)
    first, last, kind = int(match[1]), int(match[2]), match[3] or ":"
    step = int(match[4] or 1)
    if last < first or step < (2 if kind == "*" else 1) or (kind == "*" and first < 1):
        raise UsageError(
            f"{given}: {part} has no values", fix="for example: 1..16, 2..16:2, 1..64*2"
        )
    if kind == ":":
        found = range(first, last + 1, step)
        if len(found) > _MOST_VALUES:
            raise UsageError(f"{given}: {part} has {len(found)} values", fix="take larger steps")
        return tuple(map(str, found))
    doubled = itertools.takewhile(
        lambda value: value <= last, (first * step**power for power in itertools.count())
    )
    return tuple(map(str, doubled))


def combinations(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """One value of each of ``axes``, the last axis first to change."""
    names = [axis.name for axis in axes]
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(axis.values for axis in axes))
    ]


# --- points ---------------------------------------------------------------------------------------


def key(facts: GraphFacts, rules: RuleSet, min_bytes: int, aim: Aim) -> bytes:
    """What the point of ``facts`` depends on (definition 4)."""
    given = (
        aim.budget,
        aim.host_bytes,
        aim.conditions,
        aim.profile,
        sorted(aim.op_ms.items()),
        aim.actions,
    )
    content = hashlib.sha256(save_graph(facts)).hexdigest()
    return msgspec.json.encode((content, rules, min_bytes, msgspec.to_builtins(given)))


def point(
    params: dict[str, str],
    facts: GraphFacts,
    rules: RuleSet,
    min_bytes: int,
    aim: Aim,
    confirm: Confirm | None,
) -> Point:
    """The point of ``facts``, which were traced with ``params``."""
    decisions = Decisions(facts, rules, min_bytes, aim, confirm)
    without = decisions.outlooks
    common = Point(
        params=params,
        outcome="predicted",
        no_plan_bytes=without.no_plan.peak_bytes,
        no_plan_ms=round(without.planner.starts[-1], 3) if without.profile else None,
    )
    change = msgspec.structs.replace
    try:
        plan = decisions.plan(aim.budget)
    except BudgetError as error:
        limit = without.budget_bytes(aim.budget)
        return change(
            common, outcome="does not fit", floor_bytes=error.floor_bytes, budget_bytes=limit
        )
    predicted = plan.predicted
    is_plan = bool(plan.transfers or plan.choices)
    fits: Outcome = "fits with a plan" if is_plan else "fits"
    return change(
        common,
        outcome="predicted" if aim.budget is None else fits,
        budget_bytes=plan.budget,
        floor_bytes=predicted.floor_bytes,
        peak_bytes=predicted.plan.peak_bytes,
        step_ms=predicted.time.step_ms if predicted.time else None,
        moved_bytes=sum(transfer.transfer_bytes for transfer in plan.transfers),
        recomputed_bytes=sum(each.size_bytes for each in plan.recomputed),
    )


# --- the largest ----------------------------------------------------------------------------------


def largest(axis: Axis, look: Callable[[str], Point]) -> tuple[str | None, bool, list[Point]]:
    """The largest value of ``axis`` that fits, whether the points seen are monotone, and these
    points, by bisection (definition 3)."""
    seen: dict[int, Point] = {}
    low, high = -1, len(axis.values)
    while high - low > 1:
        # The whole range may fit: look at its end first.
        middle = high - 1 if not seen else (low + high) // 2
        seen[middle] = look(axis.values[middle])
        low, high = (middle, high) if seen[middle].does_fit else (low, middle)
    points = [seen[place] for place in sorted(seen)]
    # Bisection itself never sees one that fits above one that does not.
    needed = [each.no_plan_bytes for each in points if each.no_plan_bytes is not None]
    return (axis.values[low] if low >= 0 else None), needed == sorted(needed), points


def ascending(axis: Axis) -> Axis:
    """``axis`` by number.  Raises ``UsageError`` for values that are none."""
    try:
        return Axis(axis.name, tuple(sorted(axis.values, key=float)))
    except ValueError as error:
        raise UsageError(
            f"--largest {axis.name}: its values are not all numbers", fix="name another axis"
        ) from error
