"""What a GPU did in steps of a plan and in those without one beside them, and when it did nothing.

    KERNEL_TIMES=DIR python benchmarks/joint.py run --part plans    # a GPU; a file for each arm
    python benchmarks/kernels.py DIR                                # no GPU

For each arm the median of its steps and of those beside it, in milliseconds: the step, what the
compute stream was busy with (products, attention, kernels of the compiler, others), how long it was
idle between them, and what copies took in each direction.  A profiled step takes longer than
others, where the host is late with what it issues.  Writes ``<gpu>-kernels.json`` into
``benchmarks/results`` (``--out`` names another folder).
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# What a kernel's name has in it, the first that it has.
CLASSES = {
    "Memcpy DtoH": "to_host_ms",
    "Memcpy HtoD": "to_device_ms",
    "triton_": "compiler_ms",
    "sdpa": "attention_ms",
    "flash": "attention_ms",
    "fmha": "attention_ms",
    "cudnn::fusion": "attention_ms",
    "nvjet": "products_ms",
    "cutlass": "products_ms",
    "gemm": "products_ms",
}
COPIES = ("to_host_ms", "to_device_ms")


class Event(NamedTuple):
    name: str
    stream: int
    start_us: float
    length_us: float

    @property
    def kind(self) -> str:
        return next((kind for part, kind in CLASSES.items() if part in self.name), "others_ms")

    @property
    def end_us(self) -> float:
        return self.start_us + self.length_us


def steps_of(found: dict[str, Any]) -> Iterator[tuple[str, float, list[Event]]]:
    """Each profiled step: whose it is, its milliseconds, and what was done in it, in order."""
    names = found["names"]
    done = sorted(
        (Event(names[number], *rest) for number, *rest in found["done"]),
        key=lambda event: event.start_us,
    )
    for name, begin_ns, step_ms, end_ns in found["steps"]:
        within = [e for e in done if begin_ns / 1000 <= e.start_us <= end_ns / 1000]
        yield name, step_ms, within


def summed(step_ms: float, events: Sequence[Event]) -> dict[str, float]:
    """The milliseconds of one step."""
    found = dict.fromkeys((*CLASSES.values(), "others_ms"), 0.0)
    for event in events:
        found[event.kind] += event.length_us / 1000
    streams = Counter(event.stream for event in events if event.kind not in COPIES)
    compute = streams.most_common(1)[0][0]
    idle_us, end_us = 0.0, None
    for event in (event for event in events if event.stream == compute):
        if end_us is not None:
            idle_us += max(0.0, event.start_us - end_us)
        end_us = max(end_us or 0.0, event.end_us)
    return {"step_ms": step_ms, "idle_ms": idle_us / 1000, **found}


def of_arm(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        found = json.load(file)
    steps = [(name, summed(ms, events)) for name, ms, events in steps_of(found)]
    (arm, _), (beside, _) = steps[:2]
    file_name = path.name.removesuffix(".json.gz").rpartition("-")[0]
    return {
        "model": file_name.removesuffix(f"-{arm.replace('%', '')}"),
        "arm": arm,
        "is_beside_itself": arm == beside,
        "machine": found["machine"],
        "its": _median([found for _, found in steps[::2]]),
        "beside": _median([found for _, found in steps[1::2]]),
    }


def _median(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(s[name] for s in steps), 3) for name in steps[0]}


def line(arm: dict[str, Any]) -> str:
    its, beside = arm["its"], arm["beside"]
    cells = (f"{n.removesuffix('_ms')} {its[n]:7.2f} ({beside[n]:7.2f})" for n in its)
    return f"{arm['model']:24} {arm['arm']:8} " + "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what KERNEL_TIMES named")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--gpu", default="h200", help="what the result's name begins with")
    options = parser.parse_args()
    arms = [of_arm(path) for path in sorted(options.folder.glob("*.json.gz"))]
    # A step beside itself says nothing of plans.
    arms = [arm for arm in arms if not arm.pop("is_beside_itself")]
    machines = [arm.pop("machine") for arm in arms]
    if any(machine != machines[0] for machine in machines):
        raise SystemExit("the arms are of more than one machine")
    for arm in arms:
        print(line(arm))
    result = {"command": "python benchmarks/kernels.py DIR", "machine": machines[0], "arms": arms}
    text = json.dumps(result, indent=2)
    (options.out / f"{options.gpu}-kernels.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
