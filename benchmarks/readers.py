"""How long commands take that read a plan, and how much memory: all 40 layers of Qwen3-14B.

    python benchmarks/readers.py

Traces once, plans for 60% and 80% of the peak, and then runs each command five times in a process
of its own: wall-clock time and the most resident memory of the slowest, and whether torch was
imported.  Writes ``cpu-readers.json`` into ``benchmarks/results`` (``--out`` names another folder);
exit code 3 if a command took 2 s or 300 MiB, or imported torch.  ``--layers 2`` tries it out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import Results

ROOT = Path(__file__).resolve().parent.parent

MOST_S, MOST_BYTES = 2.0, 300 * 1024**2
REPEATS = 5
COMMANDS = {
    "explain": ["explain", "60.plan.yaml"],
    "explain, one": ["explain", "60.plan.yaml", "layers.0.mlp.gate_proj"],
    "diff": ["diff", "80.plan.yaml", "60.plan.yaml"],
    "report": ["report", "60.plan.yaml", "-o", "report.html"],
    "gate": ["gate", "60.plan.yaml", "--max-alias-skipped", "0"],
    "export to Perfetto": ["export", "60.plan.yaml", "--to", "perfetto", "-o", "trace.json.gz"],
    "export to a picture": ["export", "60.plan.yaml", "--to", "svg", "-o", "timeline.svg"],
}


def measure(folder: Path, layers: str) -> dict[str, Any]:
    variables = {**os.environ, "OFFPLAN_CACHE": str(folder / "kept"), "PYTHONPATH": str(ROOT)}

    def offplan(*words: str) -> list[str]:
        return [sys.executable, "-m", "offplan", *words]

    def plan(target: list[str], percent: int, *more: str) -> None:
        name = f"{percent}.plan.yaml"
        command = offplan("analyze", *target, "--budget", f"{percent}%", "-o", name, *more, "-q")
        subprocess.run(
            command, cwd=folder, env=variables, check=True, stdout=subprocess.DEVNULL, timeout=900
        )

    target = [str(ROOT / "sample_graphs" / "qwen3_14b.py"), "-p", f"layers={layers}"]
    plan(target, 60, "--graph", "traced.graph.json")
    plan(["traced.graph.json"], 80)
    return {name: _slowest(offplan(*words), folder, variables) for name, words in COMMANDS.items()}


def _slowest(command: list[str], folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    runs = [_once(command, folder, variables) for _ in range(REPEATS)]
    listed = subprocess.run(
        [command[0], "-X", "importtime", *command[1:]],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": " ".join(["offplan", *command[3:]]),
        "wall_s": [round(run["wall_s"], 3) for run in runs],
        "most_s": round(max(run["wall_s"] for run in runs), 3),
        "resident_bytes": max(run["resident_bytes"] for run in runs),
        "exit_codes": sorted({run["exit_code"] for run in runs}),
        "imports_torch": "| torch\n" in listed.stderr,
    }


# A process counts what its parent had when it was made, so a small one makes it.
_WATCH = """
import json, os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
found = {"wall_s": time.perf_counter() - start, "resident_bytes": used.ru_maxrss * 1024}
print(json.dumps({**found, "exit_code": os.waitstatus_to_exitcode(status)}))
"""


def _once(command: list[str], folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    words = [sys.executable, "-S", "-c", _WATCH, *command]
    done = subprocess.run(
        words, cwd=folder, env=variables, check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--layers", default="40")
    options = parser.parse_args()
    results = Results("readers", "", "cpu", options.out)
    results.command = "python benchmarks/readers.py"
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.layers)
    met = {
        "every command ran": all(each["exit_codes"] == [0] for each in found.values()),
        "under 2 s": all(each["most_s"] < MOST_S for each in found.values()),
        "under 300 MiB": all(each["resident_bytes"] < MOST_BYTES for each in found.values()),
        "without torch": not any(each["imports_torch"] for each in found.values()),
    }
    for name, each in found.items():
        size = each["resident_bytes"] / 1024**2
        print(f"{name:20} {each['most_s']:6.2f} s {size:6.0f} MiB")
    results.close({"ok": all(met.values()), "met": met, "layers": options.layers, "found": found})


if __name__ == "__main__":
    main()
