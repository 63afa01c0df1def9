"""Whether ``hf:`` and ``timm:`` targets can be analyzed: many families, one small step of each.

    python benchmarks/front_doors.py            # everything, one after the other, in one process
    python benchmarks/front_doors.py --only hf:t5

Each case keeps the widths of the real model and has few layers.  It works, or fails with the
message that a user would see.  The table goes to ``benchmarks/results/cpu-front-doors.json``
(``--out`` names another folder).  Exit code 3 if a case fails that is not expected to, or the other
way round.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import Results

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TEXT = {"layers": "2", "batch": "1", "seq": "512"}
SMALL = {"layers": "2", "batch": "2"}
HF: dict[str, dict[str, str]] = {
    "llama": TEXT,
    "mistral": TEXT,
    "qwen3": TEXT,
    "qwen3_moe": TEXT | {"dtype": "bfloat16"},
    "gemma3_text": TEXT,
    "phi3": TEXT,
    "gpt2": TEXT,
    "gpt_neox": TEXT,
    "falcon": TEXT,
    "mamba": TEXT | {"seq": "64"},
    "bert": TEXT | {"mask": "true"},
    "roberta": TEXT | {"seq": "256"},
    "deberta-v2": TEXT,
    "electra": TEXT,
    "modernbert": TEXT,
    "t5": TEXT,
    "bart": TEXT,
    "vit": SMALL,
    "swin": {"batch": "2", "depths": "[1,1,1,1]"},
    "convnext": {"batch": "2", "depths": "[1,1,1,1]"},
    "clip": SMALL | {"seq": "64"},
    "whisper": SMALL,
    "wav2vec2": SMALL,
    "audio-spectrogram-transformer": SMALL,
    "detr": {"batch": "1"},
}
IMAGES = {"batch": "2"}
TIMM: dict[str, dict[str, str]] = {
    "resnet50": IMAGES,
    "resnext50_32x4d": IMAGES,
    "seresnet50": IMAGES,
    "regnety_016": IMAGES,
    "densenet121": IMAGES,
    "vgg16_bn": IMAGES,
    "efficientnet_b0": IMAGES,
    "mobilenetv3_large_100": IMAGES,
    "convnext_tiny": IMAGES | {"channels_last": "true"},
    "vit_base_patch16_224": IMAGES | {"checkpoint": "true"},
    "deit_base_distilled_patch16_224": IMAGES,
    "beit_base_patch16_224": IMAGES,
    "eva02_tiny_patch14_224": IMAGES,
    "swin_tiny_patch4_window7_224": IMAGES,
    "swinv2_tiny_window8_256": IMAGES,
    "maxvit_tiny_tf_224": IMAGES,
    "mixer_b16_224": IMAGES,
    "levit_128": IMAGES,
    "poolformer_s12": IMAGES,
    "fastvit_t8": IMAGES,
}
# What torch cannot trace, with what its message has to say.
EXPECTED_FAILURES: dict[str, str] = {"hf:detr": "reads a value of a tensor"}


def analyze(spec: str, params: dict[str, str], device: str) -> dict[str, Any]:
    """One case: what was found, or why there is nothing."""
    from offplan.errors import OffplanError
    from offplan.trace.capture import TraceOptions, trace

    start = time.perf_counter()
    row: dict[str, Any] = {"target": spec, "params": params}
    try:
        found = summary(trace(spec, params, TraceOptions(device=device)))
        row |= {"status": "works", **found}
    except OffplanError as error:
        row |= {"status": "fails", "message": str(error)}
    except Exception as error:
        # No user should see one of these, so it counts as a failure of ours.
        row |= {"status": "crashes", "message": f"{type(error).__name__}: {error}"}
    row["seconds"] = round(time.perf_counter() - start, 2)
    gc.collect()
    return row


def summary(facts: Any) -> dict[str, Any]:
    from offplan.plan import make_plan

    plan = make_plan(facts)
    return {
        "regions": len(facts.regions),
        "breaks": len(facts.breaks),
        "ops": facts.op_count,
        "parameter_bytes": sum(t.size_bytes for t in facts.model if t.kind == "parameter"),
        "saved_bytes": plan.saved_bytes,
        "movable_bytes": plan.movable_bytes,
        "peak_bytes": plan.predicted.plan.peak_bytes,
    }


def line(row: dict[str, Any]) -> str:
    """One row, for people."""
    if row["status"] != "works":
        return f"{row['status']:8} {row['target']:40} {row['seconds']:6.1f} s\n{row['message']}"
    return (
        f"{row['status']:8} {row['target']:40} {row['seconds']:6.1f} s  {row['ops']:5} ops  "
        f"{row['regions']} regions  saved {row['saved_bytes'] / 1e6:9.1f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="one target, such as hf:t5")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    cases = [(f"hf:{name}", params) for name, params in HF.items()]
    cases += [(f"timm:{name}", params) for name, params in TIMM.items()]
    if options.only:
        cases = [case for case in cases if case[0] in options.only]
    # The machine is the CPU, whatever device is traced for.
    results = Results("front-doors", "", "cpu", options.out)
    results.command = "python benchmarks/front_doors.py"
    results.machine["versions"]["timm"] = version("timm")
    rows: list[dict[str, Any]] = []
    for spec, params in cases:
        rows.append(analyze(spec, params, options.device))
        print(line(rows[-1]), file=sys.stderr, flush=True)
        results.keep(found_in(rows, options.device))
    results.close(found_in(rows, options.device))


def found_in(rows: list[dict[str, Any]], device: str) -> dict[str, Any]:
    surprises = [
        row["target"]
        for row in rows
        if (row["status"] != "works") != (row["target"] in EXPECTED_FAILURES)
        or EXPECTED_FAILURES.get(row["target"], "") not in row.get("message", "")
    ]
    counts = {
        door: sum(row["status"] == "works" for row in rows if row["target"].startswith(door))
        for door in ("hf:", "timm:")
    }
    return {
        "device": device,
        "works": counts,
        "surprises": surprises,
        "ok": not surprises,
        "cases": rows,
    }


if __name__ == "__main__":
    main()
