"""What plans give where Inductor compiles the step, against what else lowers the peak there.

    python benchmarks/inductor.py slice    # eight Qwen3-14B-wide layers: no plan, 90 to 60%, the
                                           # floor, everything; checkpointing; torch's own pass
                                           # (--part plans|others: one of them)
    python benchmarks/inductor.py bits     # the same layers with kernels that repeat their bits:
                                           # losses and gradients against Inductor without a plan
    python benchmarks/inductor.py whole    # all 40 layers with labels and plain SGD, 12 steps on
                                           # text: without a plan, with one, and accumulated
                                           # (--part none|plan|accumulated|halves: one of them)
    python benchmarks/inductor.py examples # the loops in examples/, with no budget and at the floor

Each writes ``<gpu>-inductor-<what>.json`` into ``benchmarks/results`` (``--out`` names another
folder).  Exit code 3 if a target was missed.  ``--device cpu --small`` tries the script out
anywhere.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from children import REPEATABLE, line, streamed  # noqa: E402
from machine import Results  # noqa: E402
from peak import SLICE_SHARES, qwen  # noqa: E402

from offplan.budget import EVERYTHING, FLOOR, of_bytes  # noqa: E402
from offplan.errors import BudgetError  # noqa: E402
from offplan.fusion import BAND  # noqa: E402

SLICE_PARTS = ("plans", "others")
MOST_OVER_BOUND = 1.05
# As far as bits may differ where Inductor fuses other ops: of the largest element of a gradient.
MOST_DIFFERENT = 2.0**-6
STEPS = 5

Keep = Callable[[dict[str, Any]], None]


# --- against the bound, and against other ways ----------------------------------------------------


def measure_slice(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    """Parts that were measured before are kept, so that each can have a command of its own."""
    spec, params = qwen(options)
    result: dict[str, Any] = {"arms": [], "others": []}
    if options.part and options.path.exists():
        result |= json.loads(options.path.read_text())
    for what in (options.part,) if options.part else SLICE_PARTS:
        for found in streamed(__file__, what, spec, params, options.device):
            result = {**result, **found, "arms": result["arms"], "others": result["others"]}
            result["arms" if what == "plans" else "others"] = found["arms"]
            result["exit_codes"] = {
                **result.get("exit_codes", {}),
                what: found.get("exit_code", "running"),
            }
            keep(_judged(result))
    for arm in (*result["arms"], *result["others"]):
        print(line(arm))
    if result["said"]:
        print(result["said"])
    return _judged(result)


def _judged(found: dict[str, Any]) -> dict[str, Any]:
    budgets = [arm for arm in found["arms"] if arm["name"].startswith("budget")]
    over = {
        arm["name"]: arm["step_ms"] / arm["predicted"]["least_step_ms"]
        for arm in budgets
        if arm["predicted"]["least_step_ms"]
    }
    met = {
        "finished": [found.get("exit_codes", {}).get(part) for part in SLICE_PARTS] == [0, 0],
        "under the budget": all(
            arm["peak_allocated_bytes"] <= arm["predicted"]["budget_bytes"] for arm in budgets
        ),
        "at most 1.05 times the lower bound": all(
            share <= MOST_OVER_BOUND for share in over.values()
        ),
        f"peak within {BAND:.0%}": all(
            abs(arm["off"]["peak_allocated_bytes"]) <= BAND for arm in found["arms"]
        ),
        "moved as planned": all(
            arm["moved_bytes"] == arm["predicted"]["moved_bytes"] for arm in found["arms"]
        ),
    }
    return {**found, "ok": all(met.values()), "met": met, "over_bound": over}


def plans_child(spec: str, params: dict[str, str], device: str) -> Iterator[dict[str, Any]]:
    from arms import Arms

    arms = Arms(spec, params, device, STEPS, compiler="inductor")
    first = arms.no_plan()
    no_plan = arms.plan(None)
    yield {"build_s": arms.build_s}
    yield {"arm": {"name": "no plan", **arms.beside(first, no_plan)}}
    top = no_plan.predicted.no_plan.peak_bytes
    for share in SLICE_SHARES:
        try:
            plan = arms.plan(of_bytes(int(share * top)))
        except BudgetError as error:
            # Of the small stand-in, less can move.
            print(error, file=sys.stderr)
            continue
        yield {"arm": {"name": f"budget {share:.0%}", **arms.measure(plan)}}
    yield {"arm": {"name": "floor", **arms.measure(arms.plan(FLOOR))}}
    yield {"arm": {"name": "everything", **arms.measure(arms.plan(EVERYTHING))}}


def others_child(spec: str, params: dict[str, str], device: str) -> Iterator[dict[str, Any]]:
    """Inductor as torch has it: by itself, with every layer checkpointed, with its own pass."""
    import torch
    import torch._functorch.config as functorch_config
    from arms import Arms

    arms = Arms(spec, params, device, STEPS, compiler="inductor")
    model = arms.target.model
    yield {"arm": {"name": "inductor", **compiled(arms)}}
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        yield {"arm": {"name": "checkpointed", **compiled(arms)}}
        model.gradient_checkpointing_disable()
    if not hasattr(functorch_config, "enable_activation_offloading"):
        yield {"torch's pass": f"torch {torch.__version__} has none"}
        return
    try:
        with functorch_config.patch(enable_activation_offloading=True):
            found = compiled(arms)
    except Exception as error:
        yield {"torch's pass": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        return
    yield {"arm": {"name": "torch's pass", **found}}


def compiled(arms: Any) -> dict[str, Any]:
    import time

    import torch
    from arms import WARM_UP

    from offplan.replay.compiled import loss_of
    from offplan.trace.backend import step_of

    torch._dynamo.reset()
    arms.empty()
    step = torch.compile(step_of(arms.target), backend="inductor", dynamic=False)
    times, peak = [], 0

    def timed(number: int) -> None:
        nonlocal peak
        arms.target.model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss_of(step(*arms.target.args, **arms.target.kwargs)).backward()
        if on_gpu:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        times.append(1000 * (time.perf_counter() - start))

    on_gpu = arms.device.type == "cuda"
    for number in range(WARM_UP):
        timed(number)
    with arms.turns.alone():
        for number in range(WARM_UP, WARM_UP + STEPS):
            timed(number)
    steady = times[WARM_UP:]
    return {
        "step_ms": statistics.median(steady),
        "samples_ms": steady,
        "peak_allocated_bytes": peak,
    }


# --- bits -----------------------------------------------------------------------------------------


def measure_bits(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    spec, params = qwen(options)
    result: dict[str, Any] = {}
    for found in streamed(__file__, "bits", spec, params, options.device, REPEATABLE):
        differences = [arm["most_different"] for arm in found["arms"] if "most_different" in arm]
        met = {
            "finished": found.get("exit_code") == 0,
            "the bits repeat without a plan": bool(found.get("repeats")),
            "bits are the same, or differ as little as other fusions make them": all(
                most <= MOST_DIFFERENT for most in differences
            ),
        }
        result = {"ok": all(met.values()), "met": met, **found}
        keep(result)
    for arm in result["arms"]:
        print(line(arm))
    if result["exit_code"]:
        print(result["said"])
    return result


def bits_child(spec: str, params: dict[str, str], device: str) -> Iterator[dict[str, Any]]:
    from arms import Arms

    arms = Arms(spec, params, device, 1, deterministic=True, compiler="inductor")
    first = arms.no_plan()
    yield {"repeats": arms.repeats}
    no_plan = arms.plan(None)
    yield {"arm": {"name": "no plan", **arms.beside(first, no_plan)}}
    expected = arms.gradients(None)
    top = no_plan.predicted.no_plan.peak_bytes
    for name, budget in (("budget 70%", of_bytes(int(0.7 * top))), ("everything", EVERYTHING)):
        try:
            plan = arms.plan(budget)
        except BudgetError as error:
            print(error, file=sys.stderr)
            continue
        found = arms.measure(plan)
        most = 0.0 if found["same_bits"] else _most_different(expected, arms.gradients(plan))
        yield {"arm": {"name": name, **found, "most_different": most}}


def _most_different(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of an element, of the largest element of its gradient."""
    return max(
        float((one[name] - other[name].to(one[name].device)).abs().max())
        / max(float(one[name].abs().max()), 1e-30)
        for name in one
    )


# --- the whole model ------------------------------------------------------------------------------

PARTS = ("none", "plan", "accumulated", "halves")
WHOLE = {"layers": "40", "batch": "4", "seq": "4096", "labels": "true"}
WHOLE_STEPS = 12
LEARNING_RATE = 1e-3
# Differences of rounding that are of one order of magnitude: a whole batch and its rows are further
# apart than halves of it and its rows (four times, of a small model on a CPU).
SAME_ORDER = 10


def measure_whole(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    """Parts that were measured before are kept, so that each can have a command of its own."""
    spec, params = ("sample_graphs/qwen3_14b.py", WHOLE)
    if options.small:
        spec, params = "benchmarks/models.py:llama", {"layers": "1", "batch": "4", "seq": "64"}
    before = json.loads(options.path.read_text()) if options.path.exists() else {}
    parts = before.get("parts", {})
    for part in (options.part,) if options.part else PARTS:
        for found in streamed(__file__, f"whole-{part}", spec, params, options.device):
            parts[part] = {name: value for name, value in found.items() if name != "arms"}
            keep(_whole(parts, options))
        print(part, {name: parts[part].get(name) for name in ("outcome", "losses", "peak_bytes")})
    return _whole(parts, options)


def _whole(parts: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    losses = {name: part.get("losses", []) for name, part in parts.items()}
    complete = all(len(losses.get(name, ())) == WHOLE_STEPS for name in PARTS[1:])
    off = _apart(losses["plan"], losses["accumulated"]) if complete else None
    # What other pieces do by themselves, with no offload at all.
    noise = _apart(losses["halves"], losses["accumulated"]) if complete else None
    met = {
        "every part was measured": complete and "none" in parts,
        "out of memory without a plan": options.small
        or parts.get("none", {}).get("outcome") == "out of memory",
        "12 of 12 steps with it": len(losses.get("plan", ())) == WHOLE_STEPS,
        "losses as accumulated, within ten times what other pieces do": complete
        and off <= SAME_ORDER * noise,
    }
    return {"ok": all(met.values()), "met": met, "parts": parts, "apart": off, "noise": noise}


def _apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def whole_child(
    part: str, spec: str, params: dict[str, str], device_name: str
) -> Iterator[dict[str, Any]]:
    from pydoc_data.topics import topics

    import torch

    import offplan
    from offplan.replay.arm import DrawnOn
    from offplan.replay.compiled import build_real

    device = torch.device(device_name)
    torch.manual_seed(0)
    with DrawnOn(device):
        target = build_real(spec, params, device)
    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
    rows, length = target.kwargs["input_ids"].shape
    optimizer = torch.optim.SGD(target.model.parameters(), lr=LEARNING_RATE)
    budget = ("floor" if device_name == "cpu" else "auto") if part == "plan" else None
    piece_rows = {"accumulated": 1, "halves": max(1, rows // 2)}.get(part, rows)
    losses: list[float] = []
    times: list[float] = []
    peak = None
    with offplan.backend(budget=budget, device=device) as backend:
        model = torch.compile(target.model, backend=backend, dynamic=False)
        try:
            for _ in range(WHOLE_STEPS):
                starts = torch.randint(len(text) - length, (rows,))
                batch = torch.stack([text[start : start + length] for start in starts]).to(device)
                pieces = batch.split(piece_rows)
                with backend.measure() as measured:
                    loss = 0.0
                    for piece in pieces:
                        found = model(input_ids=piece, labels=piece).loss / len(pieces)
                        found.backward()
                        loss += float(found.detach())
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss)
                times.append(measured[0].step_ms)
                peak = measured[0].peak_allocated_bytes
                moved = measured[0].offloaded_bytes
                yield {"losses": losses, "samples_ms": times, "peak_bytes": peak, "moved": moved}
        except torch.OutOfMemoryError as error:
            yield {"outcome": "out of memory", "why": str(error).split("\n")[0][:300]}
            return
        plans = [
            (p.predicted.plan.peak_bytes, p.predicted.no_plan.peak_bytes) for p in backend.plans
        ]
    yield {"outcome": "completed", "predicted": plans}


# --- the examples ---------------------------------------------------------------------------------

# Losses are printed with four digits.
PRINTED = 1e-3
EXAMPLES = {
    "train_loop.py": ["--layers=8", "--width=1024", "--batch=8", "--length=1024", "--steps=5"],
    "trainer.py": ["--layers=4", "--width=2048", "--batch=4", "--length=2048", "--bf16"],
}


def measure_examples(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    """What the loops in ``examples/`` print, with the same losses at a lower peak."""
    result: dict[str, Any] = {"examples": {}}
    for name, words in EXAMPLES.items():
        arms = result["examples"][name] = {}
        for budget in ([], ["--budget=floor"]):
            command = [
                sys.executable,
                f"examples/{name}",
                *budget,
                *([] if options.small else words),
            ]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            said = "" if done.returncode == 0 else done.stderr[-3000:]
            arms["floor" if budget else "no plan"] = {
                "command": " ".join(["python", *command[1:]]),
                "exit_code": done.returncode,
                "printed": done.stdout.splitlines(),
                "losses": [float(x) for x in re.findall(r"loss\D*([\d.]+)", done.stdout)],
                "peaks_gb": [
                    float(found) for found in re.findall(r"peak ([\d.]+) GB", done.stdout)
                ],
                "said": said,
            }
            print(done.stdout + said)
            keep(_examples(result, options))
    return _examples(result, options)


def _examples(result: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    pairs = [
        (arms.get("no plan", {}), arms.get("floor", {})) for arms in result["examples"].values()
    ]
    met = {
        "both ran": len(pairs) == len(EXAMPLES)
        and all(arm.get("exit_code") == 0 for pair in pairs for arm in pair),
        "the same losses, as far as kernels repeat": all(
            len(one.get("losses", ())) == len(other.get("losses", ())) > 0
            and _apart(other["losses"], one["losses"]) <= PRINTED
            for one, other in pairs
        ),
        "a lower peak": options.device == "cpu"
        or all(
            one.get("peaks_gb")
            and other.get("peaks_gb")
            and max(other["peaks_gb"]) < max(one["peaks_gb"])
            for one, other in pairs
        ),
    }
    return {"ok": all(met.values()), "met": met, **result}


# --- the command ----------------------------------------------------------------------------------


CHILDREN: dict[str, Callable[[str, dict[str, str], str], Iterator[dict[str, Any]]]] = {
    "plans": plans_child,
    "others": others_child,
    "bits": bits_child,
    **{f"whole-{part}": partial(whole_child, part) for part in PARTS},
}
MEASURES = {
    "slice": measure_slice,
    "bits": measure_bits,
    "whole": measure_whole,
    "examples": measure_examples,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name in MEASURES:
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
        command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        command.add_argument("--small", action="store_true", help="tiny sizes, to try it out")
        if name in ("slice", "whole"):
            parts = PARTS if name == "whole" else SLICE_PARTS
            command.add_argument("--part", choices=parts, help="measure only this; keep the others")
    hidden = commands.add_parser("child")
    hidden.add_argument("--what", choices=tuple(CHILDREN), required=True)
    hidden.add_argument("--device", default="cuda")
    hidden.add_argument("spec")
    hidden.add_argument("params", nargs="*")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.benchmark == "child":
        params = dict(text.split("=", 1) for text in options.params)
        for found in CHILDREN[options.what](options.spec, params, options.device):
            print(json.dumps(found), flush=True)
        return
    results = Results("inductor", options.benchmark, options.device, options.out)
    options.path = results.path
    results.close(MEASURES[options.benchmark](options, results.keep))


if __name__ == "__main__":
    main()
