"""Steps to plan, with op times and a link."""

from __future__ import annotations

from random import Random

from facts_builder import DrawnOp, DrawnRegion, FactsBuilder, SavedAs, build_region

from offplan import memory
from offplan.graph import GraphFacts
from offplan.plan import Draft
from offplan.planner import Costs, Planner
from offplan.schedule import Rates
from offplan.transfers import Move


def moves_of(facts: GraphFacts) -> tuple[Move, ...]:
    """Everything that may leave, however small."""
    return Draft(facts, "whole-storage", 1).moves


def planner_of(facts: GraphFacts, costs: Costs, host_bytes: int | None = None) -> Planner:
    return Planner(facts, moves_of(facts), memory.timeline(facts), costs, host_bytes)


def random_costs(facts: GraphFacts, choice: Random) -> Costs:
    """Op times, and a link that copies everything in a tenth of them, or in four times as long."""
    op_ms = [choice.choice((0.0, 0.5, 1.0, 2.0, 5.0)) for _ in range(facts.op_count)]
    moved_bytes = sum(move.footprint.transfer_bytes for move in moves_of(facts))
    rate = 1000 * (1 + moved_bytes) / (1 + sum(op_ms))
    out, back = (rate * choice.choice((0.25, 0.5, 1, 2, 10)) for _ in range(2))
    latency = choice.choice((0.0, 1e-5))
    # Copies take from all of the memory's rate to a twentieth, by what is drawn anyway.
    memory = max(out, back) * (1, 3, 20)[facts.op_count % 3]
    # And what is drawn says whether events take as much as a tenth of an op.
    order = (0.0, 1e-4)[int(2 * sum(op_ms)) % 2]
    return Costs(op_ms, Rates(out, back, latency, memory, order))


def random_step(choice: Random, most_ops: int = 7, regions: int = 1) -> GraphFacts:
    """Regions whose ops make most of the memory: each as the one before, or of its own."""
    facts = FactsBuilder()
    drawn, handed = random_region(choice, most_ops), None
    for _ in range(regions):
        handed = build_region(facts, drawn, handed)
        drawn = choice.choice((drawn, random_region(choice, most_ops)))
    return facts.build()


def random_region(choice: Random, most_ops: int) -> DrawnRegion:
    """Saved values are read in reverse, as a backward does: now and then in another order, or
    never."""
    ways: tuple[SavedAs, ...] = (*(["whole"] * 6), "part", "stepped", "not")
    ops = tuple(
        DrawnOp(choice.randint(4, 64), choice.choice(ways), choice.random() < 0.8)
        for _ in range(choice.randint(3, most_ops))
    )
    order = list(reversed(range(sum(op.saved_as != "not" for op in ops))))
    if choice.random() < 0.3:
        choice.shuffle(order)
    reads: list[tuple[int, ...]] = []
    for position in order:
        if choice.random() < 0.2:
            reads.append(())
        if choice.random() > 0.1:
            reads.append((position,))
    return DrawnRegion(ops, tuple(reads), (), choice.choice((0, 8)))
