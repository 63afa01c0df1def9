"""How long an analysis takes, how it scales, and whether no GPU and a GPU give the same plan.

    python benchmarks/trace.py                  # time and scaling, on any machine
    python benchmarks/trace.py same-as-gpu      # on a machine with a GPU: every sample, both ways

Each analysis is a fresh process of the ``offplan`` command.  Results go to ``benchmarks/results``
(``--out`` names another folder), as ``cpu-trace.json`` and ``<gpu>-trace.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = sorted(path.stem for path in (ROOT / "sample_graphs").glob("*.py"))
QWEN = "sample_graphs/qwen3_14b.py"
LAYERS = (10, 20, 40, 80)
# The longest first: several run at once.
GPU_CASES = [
    [QWEN, "-p", "layers=40", "-p", "batch=4", "-p", "seq=4096"],
    [QWEN, "-p", "layers=2", "-p", "labels=true"],
    ["sample_graphs/tiny_gpt.py", "--partitioner", "default"],
    *([f"sample_graphs/{name}.py"] for name in SAMPLES if name != "qwen3_14b"),
]


def analyze(arguments: list[str], plan: Path, **environment: str) -> dict[str, Any]:
    """Run ``offplan analyze``; its JSON report, wall time and peak memory of the process."""
    command = [sys.executable, "-m", "offplan", "analyze", *arguments, "-o", str(plan)]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--format", "json"],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate()
    wall_s = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors}")
    return {"report": json.loads(output), "wall_s": round(wall_s, 2)}


def peak_rss_bytes(arguments: list[str], plan: Path) -> int:
    """Peak resident memory of one analysis, by the kernel's account of the process."""
    code = (
        "import resource, subprocess, sys; "
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    )
    command = [sys.executable, "-m", "offplan", "analyze", *arguments, "-o", str(plan)]
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout.split()[-1])


def skipped_alias(report: dict[str, Any]) -> dict[str, int]:
    """Logical bytes skipped under ``alias``, by rule set."""
    return {sums["rules"]: sums["alias"]["logical_bytes"] for sums in report["rule_sets"]}


def measure_time() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.yaml"
        full = [QWEN, "-p", "batch=4", "-p", "seq=4096"]
        runs = [analyze(full, plan) for _ in range(3)]
        larger = analyze([QWEN, "-p", "batch=5", "-p", "seq=4096"], plan)
        scaling = []
        for layers in LAYERS:
            found = analyze([*full, "-p", f"layers={layers}"], plan)
            scaling.append(
                {"layers": layers, "wall_s": found["wall_s"], **found["report"]["timing"]}
            )
            print(scaling[-1], file=sys.stderr)
        return {
            "command": "offplan analyze " + " ".join(full),
            "wall_s": [run["wall_s"] for run in runs],
            "median_wall_s": statistics.median(run["wall_s"] for run in runs),
            "timing": runs[-1]["report"]["timing"],
            "peak_rss_bytes": peak_rss_bytes(full, plan),
            "plan_bytes": plan.stat().st_size,
            "skipped_alias_bytes": {
                "batch=4": skipped_alias(runs[0]["report"]),
                "batch=5": skipped_alias(larger["report"]),
            },
            "scaling": scaling,
        }


def measure_same() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("same-as-gpu needs a GPU")
    # Nothing is timed here, so several at once.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        cases = list(pool.map(compare_plans, GPU_CASES))
    return {"all_same": all(case["same"] for case in cases), "cases": cases}


def compare_plans(case: list[str]) -> dict[str, Any]:
    """One analysis with the GPU and one that cannot see it: the same plan, byte for byte?"""
    plans, walls = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for where, environment in (("gpu", {}), ("no_gpu", {"CUDA_VISIBLE_DEVICES": ""})):
            plan = Path(folder) / f"{where}.plan.yaml"
            walls[where] = analyze(case, plan, **environment)["wall_s"]
            plans[where] = plan.read_bytes()
    digests = {k: re.search(rb"sha256:\w+", v).group().decode() for k, v in plans.items()}
    same = plans["gpu"] == plans["no_gpu"]
    print(f"{'same' if same else 'DIFFERENT'}  {' '.join(case)}", flush=True)
    return {"case": " ".join(case), "same": same, "digests": digests, "wall_s": walls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("time", "same-as-gpu"), default="time")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    machine = describe_machine()
    if options.what == "time":
        name, found = "cpu-trace.json", measure_time()
    else:
        gpu = re.sub(r"^nvidia-", "", machine["gpu"].lower().replace(" ", "-"))
        name, found = f"{gpu}-trace.json", measure_same()
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"command": f"python benchmarks/trace.py {options.what}", "machine": machine, **found}
    (options.out / name).write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {options.out / name}")
    if options.what == "same-as-gpu" and not found["all_same"]:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
