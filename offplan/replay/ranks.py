"""One plan for many ranks: they all plan for the least budget, and for the fullest device.

1.  Ranks that train one model trace equal graphs, and plans are a pure function of graphs, profile
    and budget: if those agree, so do the plans, without being sent around.
2.  The *resting* memory of a rank is what is allocated on its device before the step.  It can be
    more than the plan knows of, and differ by rank (communication buffers, another model).  What
    the fullest rank has beyond the plan's own resting bytes is taken off the budget of all.
3.  The least budget of all ranks counts; a rank without one does not lower it.
4.  Ranks whose graphs differ have no common plan: all of them are told, rather than one of them
    waiting for a collective that never comes.

Without ``torch.distributed`` initialized there is one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from offplan.budget import EVERYTHING, Aim, Budget, Outlooks, of_bytes
from offplan.costs import DeviceProfile
from offplan.eligibility import DEFAULT_MIN_BYTES, DEFAULT_RULES, RuleSet
from offplan.errors import PlanError
from offplan.graph import GraphFacts, digest
from offplan.plan import Draft, Plan

_T = TypeVar("_T")


class _Rank(msgspec.Struct, frozen=True):
    """What one rank brings.  Rank 0's profile and measured op times are used by all."""

    digest: str
    resting_bytes: int
    profile: DeviceProfile | None
    op_ms: dict[str, float]


def plan_for_ranks(
    facts: GraphFacts,
    *,
    rules: RuleSet = DEFAULT_RULES,
    min_bytes: int = DEFAULT_MIN_BYTES,
    aim: Aim | None = None,
    resting_bytes: int | None = None,
) -> Plan:
    """The plan that every rank makes for ``facts``, the graphs of its own step.

    A collective: every rank of the default group calls it.  ``resting_bytes`` is what is allocated
    on this rank's device now, by torch's count if not given.  Raises ``PlanError`` on every rank if
    their graphs differ, ``BudgetError`` if no plan keeps to the budget that is left.
    """
    aim = aim or Aim()
    if resting_bytes is None:
        resting_bytes = torch.cuda.memory_allocated() if facts.device == "cuda" else 0
    ranks = _gathered(_Rank(digest(facts), resting_bytes, aim.profile, dict(aim.op_ms)), _Rank)
    _check_same(ranks)
    draft = Draft(facts, rules, min_bytes)
    common = replace(aim, profile=ranks[0].profile, op_ms=ranks[0].op_ms)
    outlooks = Outlooks(facts, draft.moves, common)
    asked = _gathered(_Asked(outlooks.budget_bytes(aim.budget)), _Asked)
    fullest_bytes = max(rank.resting_bytes for rank in ranks)
    extra_bytes = max(0, fullest_bytes - outlooks.resting_bytes)
    budget = _least(asked, extra_bytes)
    return draft.plan(outlooks.outlook_for(budget), budget)


class _Asked(msgspec.Struct, frozen=True):
    """One rank's budget: None for none, 0 for everything moved."""

    budget_bytes: int | None


def _gathered(own: _T, kind: type[_T]) -> list[_T]:
    """What every rank brings, in the order of the ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, msgspec.msgpack.encode(own))
    return [msgspec.msgpack.decode(each, type=kind) for each in found]


def _check_same(ranks: Sequence[_Rank]) -> None:
    other = next((place for place, r in enumerate(ranks) if r.digest != ranks[0].digest), None)
    if other is not None:
        raise PlanError(
            f"rank {other} has other graphs than rank 0, so there is no plan for both",
            fix="build the same model with the same shapes on every rank",
        )


def _least(asked: Sequence[_Asked], extra_bytes: int) -> Budget | None:
    """The budget of all ranks (definitions 2 and 3)."""
    found = [each.budget_bytes for each in asked if each.budget_bytes is not None]
    if not found:
        return None
    # Not 0, which would mean that everything moves.
    return of_bytes(max(1, min(found) - extra_bytes)) if min(found) else EVERYTHING
