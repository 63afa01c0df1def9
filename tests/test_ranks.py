"""Ranks plan for the least budget and the fullest device, all of them the same."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from facts_builder import FactsBuilder

from offplan.budget import AUTO, Aim, of_bytes
from offplan.errors import BudgetError
from offplan.graph import GraphFacts, save_graph
from offplan.plan import dump_plan, make_plan
from offplan.replay.ranks import plan_for_ranks

ROOT = Path(__file__).resolve().parent.parent
MB = 1000**2


def step(count: int = 6) -> GraphFacts:
    """``count`` activations of 64 MB, each read by the next op and by the backward."""
    facts = FactsBuilder()
    region = facts.region()
    value = region.input("x", (1,))
    values = []
    for _ in range(count):
        value = region.op("aten.relu.default", [value], (64, 1000, 1000), "bool")
        values.append(value)
    region.save(*values)
    return facts.build()


def test_alone_the_plan_is_that_of_make_plan() -> None:
    facts = step()
    budget = of_bytes(300 * MB)
    alone = plan_for_ranks(facts, aim=Aim(budget=budget), resting_bytes=0)
    assert dump_plan(alone) == dump_plan(make_plan(facts, budget=budget))
    assert alone.transfers


def test_what_is_on_the_device_already_is_taken_off_the_budget() -> None:
    facts = step()
    known_bytes = make_plan(facts).predicted.no_plan.parts["inputs"]
    found = plan_for_ranks(
        facts, aim=Aim(budget=of_bytes(330 * MB)), resting_bytes=known_bytes + 50 * MB
    )
    assert found.budget is not None
    # The input is one block of the allocator, of which the plan counts four bytes.
    assert 280 * MB - 512 <= found.budget <= 280 * MB + 512
    assert found.predicted.plan.peak_bytes <= found.budget


def test_a_budget_that_the_device_has_no_room_for_is_refused() -> None:
    with pytest.raises(BudgetError, match="the floor is"):
        plan_for_ranks(step(), aim=Aim(budget=of_bytes(300 * MB)), resting_bytes=10**9)


def test_without_a_budget_nothing_moves() -> None:
    assert plan_for_ranks(step(), resting_bytes=10**9).transfers == ()


RANK = """
import sys
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from offplan.budget import Aim, of_bytes
from offplan.errors import OffplanError
from offplan.graph import load_graph
from offplan.plan import dump_plan
from offplan.replay.ranks import plan_for_ranks

rank, budget, resting, graph, out = sys.argv[1:]
folder = Path(out)
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/rendezvous", rank=int(rank), world_size=2,
    timeout=timedelta(seconds=60),
)
aim = Aim(budget=of_bytes(int(budget)) if budget != "none" else None)
try:
    plan = plan_for_ranks(load_graph(Path(graph)), aim=aim, resting_bytes=int(resting))
    (folder / f"{rank}.plan").write_bytes(dump_plan(plan))
except OffplanError as error:
    (folder / f"{rank}.error").write_text(str(error))
dist.destroy_process_group()
"""


def two_ranks(folder: Path, *ranks: tuple[str, int, GraphFacts]) -> list[str]:
    """What two gloo processes plan, or the error that each got."""
    script = folder / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    processes = []
    for rank, (budget, resting_bytes, facts) in enumerate(ranks):
        graph = folder / f"{rank}.graph.json"
        graph.write_bytes(save_graph(facts))
        words = [str(rank), budget, str(resting_bytes), str(graph), str(folder)]
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *words], env={**os.environ, "PYTHONPATH": str(ROOT)}
            )
        )
    assert [process.wait(120) for process in processes] == [0, 0]
    return [
        next(folder.glob(f"{rank}.plan"), None) or next(folder.glob(f"{rank}.error"))
        for rank in range(2)
    ]  # type: ignore[return-value]


def test_two_ranks_take_the_least_budget_and_the_fullest_device(tmp_path: Path) -> None:
    facts = step()
    known_bytes = make_plan(facts).predicted.no_plan.parts["inputs"]
    found = two_ranks(
        tmp_path, (str(400 * MB), known_bytes + 20 * MB, facts), (str(330 * MB), 0, facts)
    )
    first, second = (Path(each).read_bytes() for each in found)
    assert first == second
    assert b"budget: 310" in first or b"budget: 309" in first


def test_ranks_with_other_graphs_are_both_told(tmp_path: Path) -> None:
    budget = str(300 * MB)
    found = two_ranks(tmp_path, (budget, 0, step()), (budget, 0, step(7)))
    for each in found:
        assert "rank 1 has other graphs than rank 0" in Path(each).read_text()


def test_auto_leaves_the_margin_on_every_rank() -> None:
    facts = step()
    plan = plan_for_ranks(facts, aim=Aim(budget=AUTO), resting_bytes=0)
    assert plan.transfers == ()
    assert plan.budget is not None
    assert plan.budget > 10**9
