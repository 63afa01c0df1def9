"""What a replay costs and gives on one GPU, and whether every bit stays the same.

    python benchmarks/replay.py samples    # every sample, all movable moved, verified     (2 min)
    python benchmarks/replay.py full       # all 40 layers: without a plan, and with it     (4 min)
    python benchmarks/replay.py flat       # 200 steps: do device and host bytes stay flat  (1 min)

Each is one command of less than nine minutes on an H200 with 16 cores, and writes its own
``<gpu>-replay-<what>.json`` into ``benchmarks/results`` (``--out`` names another folder).  Exit
code 3 if a target was missed.  ``--device cpu --small`` tries the scripts out anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from machine import Results

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SAMPLES = sorted(path.stem for path in (ROOT / "sample_graphs").glob("*.py"))
QWEN = "sample_graphs/qwen3_14b.py"
# At batch 3 the graphs save so little that 150 GB hold the step without a plan.
FULL = {"layers": "40", "batch": "4", "seq": "4096"}
FULL_STEPS = 12
# Samples are small and their times are not reported, so several share the GPU.
JOBS = 4


def replay(spec: str, params: dict[str, str], *words: str) -> dict[str, Any]:
    """``offplan run`` in a process: its JSON report, exit code, what it said, and its wall time."""
    given = [word for name, value in params.items() for word in ("-p", f"{name}={value}")]
    command = [sys.executable, "-m", "offplan", "run", spec, *given, *words, "--format", "json"]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    wall_s = round(time.perf_counter() - start, 1)
    print(f"{wall_s:7.1f} s  exit {done.returncode}  {' '.join(command[2:])}", file=sys.stderr)
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    report = json.loads(done.stdout) if done.stdout else None
    return {
        "command": "python " + " ".join(command[1:]),
        "exit_code": done.returncode,
        "said": done.stderr.strip(),
        "wall_s": wall_s,
        "report": report,
    }


# --- the benchmarks -------------------------------------------------------------------------------


def measure_samples(options: argparse.Namespace) -> dict[str, Any]:
    def run(name: str) -> dict[str, Any]:
        params = {"layers": "2", "batch": "1", "seq": "1024"} if name == "qwen3_14b" else {}
        words = ("--budget", "0", "--device", options.device, "--steps", "3")
        found = replay(f"sample_graphs/{name}.py", params, *words)
        report = found["report"] or {}
        return {
            "sample": name,
            "params": params,
            "ok": found["exit_code"] == 0,
            "said": found["said"],
            "wall_s": found["wall_s"],
            "rows": report.get("rows"),
            "verification": report.get("verification"),
        }

    # On a CPU, fingerprints of a billion parameters take minutes.
    small = [name for name in SAMPLES if name != "qwen3_14b"] if options.small else SAMPLES
    names = options.only.split(",") if options.only else small
    with ThreadPoolExecutor(options.jobs) as pool:
        cases = list(pool.map(run, names))
    for case in cases:
        print(f"{'verified' if case['ok'] else 'FAILED':8}  {case['sample']}")
    return {"ok": all(case["ok"] for case in cases), "cases": cases}


def measure_full(options: argparse.Namespace) -> dict[str, Any]:
    """All layers, without a plan and with the one that analysis makes meanwhile, with no GPU."""
    spec, params = _model(FULL, options)
    budget = "80%" if options.small else "auto"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        path = options.plan or Path(folder) / "full.plan.yaml"
        if options.plan is None:
            analysis = pool.submit(_analyze, spec, params, budget, path, options)
        no_plan = in_a_process(spec, params, options)
        if options.plan is None:
            analysis.result()
        plan = in_a_process(spec, params, options, path)
    planned = plan["planned"]
    steady = plan["steps"][1:]
    met = {
        "out of memory without a plan": no_plan["outcome"] == "out of memory" or options.small,
        "12 of 12 steps with it": len(steady) == FULL_STEPS,
        "moved as planned": all(
            step["to_host_bytes"] == planned["to_host_bytes"]
            and step["to_device_bytes"] == planned["to_device_bytes"]
            for step in steady
        ),
        "flat": len({(step["end_bytes"], step["host_bytes"]) for step in steady}) == 1,
        "under the budget": max(step["peak_allocated_bytes"] for step in steady)
        <= planned["budget_bytes"],
    }
    return {"ok": all(met.values()), "met": met, "no_plan": no_plan, "plan": plan}


def _analyze(
    spec: str, params: dict[str, str], budget: str, path: Path, options: argparse.Namespace
) -> None:
    """The plan, traced as on a machine without a GPU."""
    words = [sys.executable, "-m", "offplan", "analyze", spec, "--budget", budget, "-o", str(path)]
    words += [word for name, value in params.items() for word in ("-p", f"{name}={value}")]
    words += ["--device", options.device]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"the analysis failed:\n{done.stderr}")


def steps_child(
    spec: str, params: dict[str, str], device_name: str, path: Path | None
) -> Iterator[dict[str, Any]]:
    """``FULL_STEPS`` steps after a warm-up, under the plan in ``path``; or where memory ran out."""
    import torch

    from offplan.measured import planned
    from offplan.plan import load_plan
    from offplan.replay.compiled import Replay, build_real, loss_of
    from offplan.replay.gauge import CpuGauge, CudaGauge

    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    start = time.perf_counter()
    # Drawn where it is used: a CPU takes minutes for 14 billion numbers.
    with torch.device(device):
        target = build_real(spec, params, device)
    plan = None if path is None else load_plan(path)
    gauge = CudaGauge(device) if device_name == "cuda" else CpuGauge()
    gauge.settle(target)
    yield {"build_s": round(time.perf_counter() - start, 1)}
    if plan is not None:
        expected = plan.predicted.plan
        moved = msgspec.to_builtins(planned(plan)) | {
            "budget_bytes": plan.budget,
            "peak_allocated_bytes": expected.peak_bytes,
            "peak_reserved_bytes": expected.reserved_bytes,
        }
        yield {"planned": moved}
    try:
        with Replay(target, plan, device=device) as replay:
            for number in range(1 + FULL_STEPS):
                target.model.zero_grad(set_to_none=True)
                torch.manual_seed(number)
                before = replay.stats()
                with gauge.watching():
                    gauge.begin()
                    loss = loss_of(replay.forward())
                    gauge.forward_ended()
                    loss.backward()
                    reading = gauge.ended()
                after = replay.stats()
                step = reading._asdict() | {
                    "step_ms": reading.forward_ms + reading.backward_ms,
                    "loss": repr(loss.item()),
                    "end_bytes": gauge.held_bytes(),
                    "host_bytes": after.host_pinned_bytes,
                    "to_host_bytes": after.offloaded_bytes - before.offloaded_bytes,
                    "to_device_bytes": after.reloaded_bytes - before.reloaded_bytes,
                }
                del loss
                yield {"step": step}
    except torch.OutOfMemoryError as error:
        yield {"outcome": "out of memory", "said": str(error).split("\n")[0][:400]}
        return
    yield {"outcome": "completed"}


def measure_flat(options: argparse.Namespace) -> dict[str, Any]:
    steps = "10" if options.small else "200"
    words = ("--budget", "0", "--device", options.device, "--steps", steps)
    found = replay("sample_graphs/tiny_gpt.py", {}, *words)
    (plan,) = (arm for arm in found["report"]["arms"] if arm["role"] == "plan")
    held = {
        name: sorted({step[name] for step in plan["steps"][1:]})
        for name in ("end_bytes", "host_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
        if name in plan["steps"][1]
    }
    flat = len(held["end_bytes"]) == len(held["host_bytes"]) == 1
    return {"ok": flat and found["exit_code"] == 0, "distinct": held, "run": found}


def _model(params: dict[str, str], options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Qwen3-14B with ``params``; to try the scripts out, a model that a CPU can train."""
    if options.small:
        return "sample_graphs/tiny_gpt.py", {"layers": "1", "batch": "4"}
    return QWEN, params


# --- an arm in a process of its own -----------------------------------


def in_a_process(
    spec: str, params: dict[str, str], options: argparse.Namespace, plan: Path | None = None
) -> dict[str, Any]:
    """What ``steps_child`` finds in a process of its own; its lines stay if this one is killed."""
    given = [spec, *(f"{name}={value}" for name, value in params.items())]
    command = [sys.executable, __file__, "child", "--device", options.device]
    command += [] if plan is None else ["--plan", str(plan)]
    options.out.mkdir(parents=True, exist_ok=True)
    lines = options.out / f"{'no-plan' if plan is None else 'plan'}.jsonl"
    start = time.perf_counter()
    with lines.open("w") as output:
        done = subprocess.run(
            [*command, *given], cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True
        )
    wall_s = round(time.perf_counter() - start, 1)
    print(f"{wall_s:7.1f} s  {plan or 'no plan'}", file=sys.stderr)
    if done.returncode:
        raise SystemExit(f"the steps failed:\n{done.stderr}")
    found: dict[str, Any] = {"wall_s": wall_s, "steps": []}
    for line in lines.read_text().splitlines():
        if line.startswith("{"):
            more = json.loads(line)
            found["steps"] += [more.pop("step")] if "step" in more else []
            found |= more
    lines.unlink()
    return found


def child(options: argparse.Namespace) -> None:
    params = dict(text.split("=", 1) for text in options.params)
    for found in steps_child(options.spec, params, options.device, options.plan):
        print(json.dumps(found), flush=True)


BENCHMARKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "samples": measure_samples,
    "full": measure_full,
    "flat": measure_flat,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name in BENCHMARKS:
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
        command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        command.add_argument("--small", action="store_true", help="tiny sizes, to try it out")
        if name == "full":
            command.add_argument("--plan", type=Path, help="made before, where there is no GPU")
        if name == "samples":
            command.add_argument("--only", help="comma-separated names of samples")
            command.add_argument("--jobs", type=int, default=JOBS)
    hidden = commands.add_parser("child")
    hidden.add_argument("--plan", type=Path)
    hidden.add_argument("--device", default="cuda")
    hidden.add_argument("spec")
    hidden.add_argument("params", nargs="*")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.benchmark == "child":
        child(options)
        return
    results = Results("replay", options.benchmark, options.device, options.out)
    results.close(BENCHMARKS[options.benchmark](options))


if __name__ == "__main__":
    main()
