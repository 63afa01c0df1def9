"""Steps with their charts, for tests of what is drawn in time."""

from __future__ import annotations

from facts_builder import FactsBuilder

from offplan.chart import Chart, chart
from offplan.costs import profile_for
from offplan.graph import GraphFacts
from offplan.memory import Conditions
from offplan.plan import Plan, make_plan

SHAPE = (8192, 8192)
# Of a storage of that shape.
STORAGE_BYTES = 8192 * 8192 * 4


def layered(count: int = 6) -> GraphFacts:
    """``count`` layers, each of which saves what its product makes, and makes something besides."""
    facts = FactsBuilder(params={"layers": str(count)})
    region = facts.region()
    region.gradient_shape = (1024, 8192)
    weight = region.input("weight", SHAPE, kind="parameter")
    x = region.input("x", SHAPE)
    for number in range(count):
        module = f"layers.{number}.mlp"
        x = region.op(
            "aten.mm.default",
            [x, weight],
            SHAPE,
            module=f"{module}.up",
            source=f"model.py:{10 + number}",
        )
        region.save(region.view(x, (8192 * 8192,), module=module))
        x = region.op("aten.mm.default", [x, weight], SHAPE, module=module)
        x = region.op("aten.relu.default", [x], SHAPE, module=module)
    return facts.build()


def planned(facts: GraphFacts, budget: int | None = 0) -> Plan:
    return make_plan(facts, budget=budget, min_bytes=0)


def charts(facts: GraphFacts, budget: int | None = 0) -> tuple[Chart, Chart]:
    """Without a plan, and with one."""
    rates = profile_for("h200")
    transfers = planned(facts, budget).transfers
    return chart(facts, (), Conditions(), rates), chart(facts, transfers, Conditions(), rates)
