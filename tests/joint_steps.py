"""Steps for the search over all actions: their times are those of the device alone, and what of
them is less than a megabyte stays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec

from offplan.budget import Action, Aim, Outlooks, of_bytes
from offplan.costs import profile_for
from offplan.errors import BudgetError
from offplan.graph import GraphFacts
from offplan.joint import MIN_BYTES, Joint
from offplan.plan import Draft
from offplan.program import Solution, Way
from offplan.recompute import Choice
from offplan.transfers import Move

ALL: tuple[Action, ...] = ("keep", "recompute", "offload")
# Without a host that ops wait for: what runs again then takes what it takes.
DEVICE = msgspec.structs.replace(
    profile_for("h200"), name="device", host_op_s=0.0, host_start_s=0.0
)


def moves_of(facts: GraphFacts) -> tuple[Move, ...]:
    return Draft(facts, "whole-storage", MIN_BYTES).moves


def joint(facts: GraphFacts, actions: tuple[Action, ...] = ALL, **aim: object) -> Joint:
    return Joint(facts, moves_of, Aim(actions=actions, profile=DEVICE, **aim))  # type: ignore[arg-type]


def small_bytes(facts: GraphFacts) -> int:
    """What the program leaves as it is: what is too small to be looked at."""
    return sum(s.size_bytes for s in facts.storages if s.size_bytes < MIN_BYTES)


def every_choice(search: Joint) -> Iterator[tuple[tuple[Choice, ...], Outlooks]]:
    """Each choice of what to compute again that the program could make, applied."""
    options: list[list[Way]] = [
        [way for way in ways if way != "move"] for ways in search.program.ways
    ]
    known = set()
    for ways in product(*options):
        choices = search.choices(Solution(dict(enumerate(ways)), 0.0, 0.0, 0))
        if choices not in known:
            known.add(choices)
            yield choices, search._outlooks(choices)[1]


def fastest_ms(outlooks: Outlooks, limit: int) -> float:
    """The step time under one choice, whatever moves; infinite if it cannot keep to the limit."""
    try:
        return outlooks.outlook_for(of_bytes(limit)).step_ms
    except BudgetError:
        return float("inf")
