"""How long planning takes once the graphs are there, by number of layers.

    python benchmarks/planning.py
    python benchmarks/planning.py --joint

Traces a decoder of 10 to 160 layers (``--layers``), each in a fresh process, then plans it for
several budgets, several times, step by step:

    timeline   op times, bytes at every op, and the windows of what can move
    no plan    the peak without a plan, allocator included
    plan       the transfers
    predict    their peak, allocator included
    floor      the least peak there is, and its plan, which every report names

``total_s`` is what ``offplan analyze --budget`` does between the trace and the report.  Results go
to ``benchmarks/results/cpu-planning.json`` (``--out`` names another folder).

``--joint`` plans 40 layers with all actions, op by op and as Inductor lowers them, at 95 to 40% of
the peak without a plan: seconds, and how far the plan is from the proven bound.  What Inductor
makes of the plan is guessed there; asking it takes as long as it took when the step was traced.
Results go to ``cpu-planning-joint.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from machine import Results, describe_machine

from offplan import eligibility
from offplan.budget import Aim, Outlooks, of_bytes
from offplan.decide import decide
from offplan.graph import GraphFacts, load_graph
from offplan.memory import predict
from offplan.plan import ACTIONS, Draft
from offplan.transfers import Move

ROOT = Path(__file__).resolve().parent.parent
TARGET = ["sample_graphs/qwen3_14b.py", "-p", "batch=4", "-p", "seq=4096"]
LAYERS = (10, 20, 40, 80, 160)
# Budgets, as shares of the way from the floor to the peak without a plan.
SHARES = (75, 50, 0)
REPEATS = 3

Found = TypeVar("Found")


def traced(layers: int, folder: Path, compiler: str = "aot_eager") -> GraphFacts:
    path = folder / f"{layers}-{compiler}.graph.json"
    if path.exists():
        return load_graph(path)
    command = [sys.executable, "-m", "offplan", "analyze", *TARGET, "-p", f"layers={layers}"]
    subprocess.run(
        [
            *command,
            "--compiler",
            compiler,
            "--graph",
            str(path),
            "-o",
            str(folder / f"{layers}.plan.yaml"),
        ],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return load_graph(path)


def timed(seconds: dict[str, float], name: str, work: Callable[[], Found]) -> Found:
    start = time.perf_counter()
    found = work()
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
    return found


def movable(facts: GraphFacts) -> tuple[Move, ...]:
    return Draft(facts, eligibility.DEFAULT_RULES, eligibility.DEFAULT_MIN_BYTES).moves


def plan_once(facts: GraphFacts, share: int) -> dict[str, Any]:
    """Seconds of one whole plan, and of its steps done again by themselves."""
    total: dict[str, float] = {}
    moves = movable(facts)
    known = Outlooks(facts, moves, Aim())
    floor_bytes, peak_bytes = known.floor()[1].peak_bytes, known.no_plan.peak_bytes
    budget = of_bytes(floor_bytes + share * (peak_bytes - floor_bytes) // 100)
    outlook = timed(
        total, "total_s", lambda: Outlooks(facts, movable(facts), Aim()).outlook_for(budget)
    )
    steps: dict[str, float] = {}
    again = timed(steps, "timeline_and_no_plan_s", lambda: Outlooks(facts, moves, Aim()))
    timed(steps, "of_which_no_plan_s", lambda: predict(facts, ()))
    limit = min(outlook.budget_bytes, again.planner.peak_bytes)
    planned = timed(steps, "plan_s", lambda: again.planner.plan(limit))
    timed(steps, "predict_s", lambda: predict(facts, planned.transfers))
    timed(steps, "floor_s", again.floor)
    predicted = outlook.predicted
    return {
        "share_percent": share,
        **total,
        **steps,
        "peak_bytes": predicted.plan.peak_bytes,
        "budget_bytes": outlook.budget_bytes,
        "transfers": len(outlook.transfers),
        "step_ms": predicted.time.step_ms,
        "over_the_lower_bound": predicted.time.step_ms / predicted.time.least_ms,
    }


def measure(layers: int, folder: Path) -> dict[str, Any]:
    facts = traced(layers, folder)
    plans = []
    for share in SHARES:
        runs = [plan_once(facts, share) for _ in range(REPEATS)]
        plans.append(
            {
                name: statistics.median(run[name] for run in runs)
                if name.endswith("_s")
                else runs[0][name]
                for name in runs[0]
            }
        )
    return {"layers": layers, "ops": facts.op_count, "plans": [rounded(plan) for plan in plans]}


JOINT_LAYERS = 40
JOINT_LEVELS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4)
# Seconds of a plan, and its gap to the bound.
MOST_SECONDS, MOST_GAP = 20, 0.02


def measure_joint(compiler: str, folder: Path) -> dict[str, Any]:
    facts = traced(JOINT_LAYERS, folder, compiler)
    plans = []
    for level in JOINT_LEVELS:
        seconds: dict[str, float] = {}
        top = Outlooks(facts, (), Aim()).no_plan.peak_bytes
        budget = of_bytes(int(level * top))
        aim = Aim(budget=budget, actions=ACTIONS)
        rules, least = eligibility.DEFAULT_RULES, eligibility.DEFAULT_MIN_BYTES
        plan = timed(seconds, "total_s", partial(decide, facts, rules, least, budget, aim))
        predicted = plan.predicted
        plans.append(
            {
                "level": level,
                **seconds,
                "peak_bytes": predicted.plan.peak_bytes,
                "budget_bytes": plan.budget,
                "offloaded_bytes": plan.moved_bytes,
                "recomputed_bytes": sum(each.size_bytes for each in plan.recomputed),
                "no_plan_ms": predicted.time.no_plan_ms,
                "step_ms": predicted.time.step_ms,
                "gap": predicted.time.step_ms / predicted.time.least_ms - 1,
            }
        )
        print(json.dumps(rounded(plans[-1])), file=sys.stderr)
    return {"compiler": compiler, "ops": facts.op_count, "plans": [rounded(p) for p in plans]}


def joint(folder: Path) -> dict[str, Any]:
    cases = [measure_joint(compiler, folder) for compiler in ("aot_eager", "inductor")]
    plans = [plan for case in cases for plan in case["plans"]]
    met = {
        f"each plan in under {MOST_SECONDS} s": all(p["total_s"] < MOST_SECONDS for p in plans),
        f"each within {MOST_GAP:.0%} of the bound": all(p["gap"] < MOST_GAP for p in plans),
        "each within its budget": all(p["peak_bytes"] <= p["budget_bytes"] for p in plans),
    }
    return {"ok": all(met.values()), "met": met, "cases": cases}


def rounded(plan: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in plan.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--graphs", type=Path, help="folder that keeps the traces for a next run")
    parser.add_argument("--joint", action="store_true", help="plan with all actions instead")
    options = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as passing:
        folder = options.graphs or Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        if options.joint:
            results = Results("planning", "joint", "cpu", options.out)
            results.command = "python benchmarks/planning.py --joint"
            results.close(joint(folder))
            return
        for layers in options.layers:
            cases.append(measure(layers, folder))
            print(json.dumps(cases[-1]), file=sys.stderr)
    result = {
        "command": "python benchmarks/planning.py",
        "target": "offplan analyze " + " ".join(TARGET) + " -p layers=N",
        "machine": describe_machine(),
        "repeats": REPEATS,
        "cases": cases,
        "seconds_per_1000_ops": [
            round(1000 * max(plan["total_s"] for plan in case["plans"]) / case["ops"], 4)
            for case in cases
        ],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "cpu-planning.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
