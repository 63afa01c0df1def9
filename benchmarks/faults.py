"""Every allocation, copy, pin, stream and event of a runtime fails in turn, on one GPU.

    python benchmarks/faults.py          # 1 minute

Runs the lives of ``tests/fault_lives.py`` on the real link: each point that they reach (as found in
the source) fails the first, the second and the last time that it is reached, or is interrupted
before or after.  What each ended in, and what was wrong then (nothing may be in flight, allocated,
leased or pinned, and the next step gives the same bits) goes into ``<gpu>-faults.json`` in
``benchmarks/results`` (``--out`` names another folder); exit code 3 if anything was.  ``--device
cpu`` plays a device whose copies lag.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from machine import Results

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fault_lives import LIVES, allocated, outcome_of, place  # noqa: E402
from fault_points import HOWS  # noqa: E402
from test_faults import faults, is_tolerated, plain, reached  # noqa: E402

PINS = ("register", "torch", "off")


def tried(kind: str, pin: str, make: Any) -> dict[str, Any]:
    """Each fault of one life: how many there were, what they ended in, and what was wrong."""
    counts = reached(make, kind, pin)
    points: dict[str, dict[str, int]] = {}
    wrong: list[str] = []
    with place(kind, pin) as found:
        expected = plain(make(found))
        before = allocated(kind)
        for how in HOWS:
            for fault in faults(counts, how):
                said, complaints = outcome_of(make(found), fault, expected)
                if said == "fine" and not is_tolerated(fault, pin):
                    complaints.append("nobody hears of it")
                ended = Counter(points.setdefault(str(fault.point), {}))
                ended[f"{how}: {said}"] += 1
                points[str(fault.point)] = dict(ended)
                wrong += [f"{fault}: {said}: {each}" for each in complaints]
        left_bytes = allocated(kind) - before
    return {
        "life": make.__name__,
        "pin": pin,
        "faults": sum(sum(ended.values()) for ended in points.values()),
        "left_bytes": left_bytes,
        "points": points,
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    results = Results("faults", "", options.device, options.out)
    results.command = f"python benchmarks/faults.py --device {options.device}"
    kind = "cuda" if options.device == "cuda" else "lagging"
    found: list[dict[str, Any]] = []
    for pin in PINS:
        for make in LIVES:
            found.append(tried(kind, pin, make))
            print(f"{make.__name__} {pin}: {found[-1]['faults']} faults")
            print(*found[-1]["wrong"], sep="\n", end="")
            results.keep({"ok": False, "found": found})
    met = {
        "every fault was reached and heard of, and left nothing": not any(
            each["wrong"] for each in found
        ),
        "every byte of the device came back": not any(each["left_bytes"] for each in found),
        "hundreds of faults": sum(each["faults"] for each in found) > 500,
    }
    results.close({"ok": all(met.values()), "met": met, "found": found})


if __name__ == "__main__":
    main()
