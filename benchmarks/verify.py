"""Every built-in case of ``offplan verify``, many times over, for both compilers.

    python benchmarks/verify.py                  # on a GPU: 50 repeats
    python benchmarks/verify.py --device cpu     # the same where there is none

What ``offplan verify --repeats 50`` does, for op-by-op graphs and for those of Inductor: each case
is compiled once, and then runs at each pace of its copies in each repeat.  Cases run side by side
(``--jobs``).  Writes ``<gpu or cpu>-verify.json`` into ``benchmarks/results`` (``--out`` names
another folder) as often as a case is done; exit code 3 if anything differed or could not run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
from machine import Results

from offplan.graph import Compiler
from offplan.replay.cases import find_cases
from offplan.replay.verifying import OnDone, Trials, verify_all
from offplan.verified import PACES, CaseResult

ROOT = Path(__file__).resolve().parent.parent
COMPILERS: tuple[Compiler, ...] = get_args(Compiler)
RIGHT = ("same", "not here")


def measure(options: argparse.Namespace, results: Results) -> dict[str, Any]:
    """What became of each case, by compiler."""
    found: dict[str, Any] = {"repeats": options.repeats, "jobs": options.jobs, "paces": PACES}
    cases = find_cases(options.case)
    for compiler in options.compiler or COMPILERS:
        trials = Trials(
            device=options.device, compiler=compiler, repeats=options.repeats, jobs=options.jobs
        )
        found[compiler] = {"wall_s": 0.0, "cases": {}}
        all_of_them = verify_all(cases, (), trials, noting(found, compiler, results))
        found[compiler]["cases"] = {case.name: of_case(case) for case in all_of_them.cases}
    return found


def noting(found: dict[str, Any], compiler: Compiler, results: Results) -> OnDone:
    """What keeps each case in ``found`` as it is there, and on disk."""
    start = time.perf_counter()

    def note(case: CaseResult) -> None:
        found[compiler]["cases"][case.name] = of_case(case)
        found[compiler]["wall_s"] = round(time.perf_counter() - start, 1)
        print(f"{compiler} {case.name}: {case.outcome}", file=sys.stderr, flush=True)
        results.keep({"ok": False, "complete": False, **found})

    return note


def of_case(case: CaseResult) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(case)
    for name in ("name", "about", "target"):
        shown.pop(name)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--compiler", action="append", choices=COMPILERS)
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    results = Results("verify", "", options.device, options.out)
    results.command = f"python benchmarks/verify.py --device {options.device}"
    found = measure(options, results)
    met: dict[str, bool] = {}
    for compiler in options.compiler or COMPILERS:
        cases = found[compiler]["cases"].values()
        ran = [case for case in cases if case["outcome"] != "not here"]
        sessions = sum(case.get("sessions", 0) for case in ran)
        met[f"{compiler}: {len(ran)} cases, {sessions:,} sessions, no difference"] = all(
            case["outcome"] in RIGHT for case in cases
        )
        print(f"{compiler}: {found[compiler]['wall_s']:.0f} s")
    results.close({"ok": all(met.values()), "complete": True, "met": met, **found})


if __name__ == "__main__":
    main()
