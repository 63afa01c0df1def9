"""What plans give where Inductor compiles the step, against what else lowers the peak there.

    python benchmarks/inductor.py slice    # eight Qwen3-14B-wide layers: no plan, 90 to 60%, the
                                           # floor, everything; checkpointing; torch's own pass
                                           # (--part plans|others: one of them)
    python benchmarks/inductor.py bits     # the same layers with kernels that repeat their bits:
                                           # losses and gradients against Inductor without a plan
    python benchmarks/inductor.py plan     # the plan of the whole model; no GPU needed
    python benchmarks/inductor.py whole    # all 40 layers with labels and plain SGD, 12 steps on
                                           # text: without a plan, with one, and accumulated
                                           # (--part none|plan|accumulated: one of them), with
                                           # PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    python benchmarks/inductor.py examples # the loops in examples/, with no budget and at the floor

Each writes ``<gpu>-inductor-<what>.json`` into ``benchmarks/results`` (``--out`` names another
folder).  Exit code 3 if a target was missed.  ``--device cpu --small`` tries the script out
anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

PARTS = ("none", "plan", "accumulated")
WHOLE = {"layers": "40", "seq": "4096", "labels": "true"}
SMALL_WHOLE = ("benchmarks/models.py:llama", {"layers": "1", "batch": "4", "seq": "1024"})
# Of the 150.1 GB of the device: a budget is for what is allocated, and the blocks that are reserved
# for it have gaps.  And of the 137 GB of the host.
WHOLE_BUDGET, WHOLE_HOST = "130GB", "90GB"
# Of how many rows, unless it is said: of multiples of four the most for which there is a plan.
WHOLE_ROWS = "16"
# And how many of them in reverse.
WHOLE_STEPS, REVERSE_STEPS = 12, 4
LEARNING_RATE = 1e-3
# Differences of rounding that are of one order of magnitude: gradients of all rows at once are
# rounded once, those of row by row as often as there are rows.
SAME_ORDER = 10


def plan_whole(options: argparse.Namespace) -> None:
    """Make the plan of the whole model; no GPU needed, but the same torch."""
    import offplan

    spec, params = _whole_target(options)
    budget = "floor" if options.small else WHOLE_BUDGET
    plan = offplan.analyze(
        spec, params=params, budget=budget, device=options.device, host_budget=WHOLE_HOST
    )
    options.plan.parent.mkdir(parents=True, exist_ok=True)
    plan.save(options.plan)
    print(f"wrote {options.plan.name}: peak {plan.predicted.plan.peak_bytes / 1e9:.2f} GB")


def _whole_target(options: argparse.Namespace) -> tuple[str, dict[str, str]]:
    if options.small:
        return SMALL_WHOLE
    return "sample_graphs/qwen3_14b.py", {**WHOLE, "batch": options.batch}


def measure_whole(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    """Parts that were measured before are kept, so that each can have a command of its own."""
    spec, params = _whole_target(options)
    before = json.loads(options.path.read_text()) if options.path.exists() else {}
    parts = before.get("parts", {})
    if options.part in (None, "plan") and not options.plan.exists():
        plan_whole(options)
    given = {"PLAN": str(options.plan), "AFTER": str(options.after or "")}
    for part in (options.part,) if options.part else PARTS:
        for found in streamed(__file__, f"whole-{part}", spec, params, options.device, given):
            parts[part] = {name: value for name, value in found.items() if name != "arms"}
            keep(_whole(parts, options))
        print(part, {name: parts[part].get(name) for name in ("outcome", "losses", "peak_bytes")})
    return _whole(parts, options)


def _whole(parts: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    planned = parts.get("plan", {}).get("losses", [])
    by_row = parts.get("accumulated", {})
    rows, turned = by_row.get("losses", []), by_row.get("losses_in_reverse", [])
    complete = [len(planned), len(rows), len(turned)] == [WHOLE_STEPS, WHOLE_STEPS, REVERSE_STEPS]
    off = _apart(planned, rows) if complete else None
    # What another order of the rows does by itself, with no offload at all.
    noise = _apart(turned, rows) if complete else None
    met = {
        "every part was measured": complete and "none" in parts,
        "out of memory without a plan": options.small
        or parts.get("none", {}).get("outcome") == "out of memory",
        "12 of 12 steps with it": len(planned) == WHOLE_STEPS,
        "losses as accumulated, within ten times what another order of the rows does": (
            off is not None and noise is not None and off <= SAME_ORDER * noise
        ),
    }
    return {"ok": all(met.values()), "met": met, "parts": parts, "apart": off, "noise": noise}


def _apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=False))


def whole_child(
    part: str, spec: str, params: dict[str, str], device_name: str
) -> Iterator[dict[str, Any]]:
    """Steps on text: with all rows at once, or row by row, in two orders."""
    from pydoc_data.topics import topics

    import torch
    from ready import Weights
    from turns import Gated, Turns

    import offplan
    from offplan.replay.arm import DrawnOn
    from offplan.replay.compiled import build_real

    start = time.perf_counter()
    device, turns = torch.device(device_name), Turns(os.environ.get("GPU_LOCK"))
    with turns.alone(), DrawnOn(device):
        target = build_real(spec, params, device)
        weights = Weights(target.model)
    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()
    rows, length = target.kwargs["input_ids"].shape
    piece_rows = 1 if part == "accumulated" else rows
    optimizer = torch.optim.SGD(target.model.parameters(), lr=LEARNING_RATE)

    def pieces_of(number: int) -> list[torch.Tensor]:
        drawn = torch.Generator().manual_seed(number)
        starts = torch.randint(len(text) - length, (rows,), generator=drawn)
        batch = torch.stack([text[start : start + length] for start in starts])
        return list(batch.to(device).split(piece_rows))

    def steps(name: str, order: int, count: int) -> Iterator[dict[str, Any]]:
        losses: list[float] = []
        times: list[float] = []
        for number in range(count):
            pieces = pieces_of(number)[::order]
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
            peak, moved = measured[0].peak_allocated_bytes, measured[0].offloaded_bytes
            yield {name: losses, f"{name}_ms": times, "peak_bytes": peak, "moved_bytes": moved}

    plan = offplan.Plan.load(os.environ["PLAN"]) if part == "plan" else None
    with offplan.backend(plan, device=device) as backend:
        model = Gated(target.model, backend)
        piece = pieces_of(0)[0]
        model.prepare(input_ids=piece, labels=piece)
        yield {"compile_s": round(time.perf_counter() - start, 1)}
        _wait_for(os.environ["AFTER"])
        with turns.alone():
            try:
                weights.draw()
                yield from steps("losses", 1, WHOLE_STEPS)
                if part == "accumulated":
                    weights.draw()
                    yield from steps("losses_in_reverse", -1, REVERSE_STEPS)
            except torch.OutOfMemoryError as error:
                yield {"outcome": "out of memory", "why": str(error).split("\n")[0][:300]}
                return
    if plan is not None:
        predicted = plan.predicted
        yield {"predicted": [predicted.plan.peak_bytes, predicted.no_plan.peak_bytes]}
    yield {"outcome": "completed"}


def _wait_for(path: str) -> None:
    """Until there is such a file: others have given the device's memory back."""
    while path and not Path(path).exists():
        time.sleep(0.5)


# --- the examples ---------------------------------------------------------------------------------

# Losses are printed with four digits.
PRINTED = 1e-3
EXAMPLES = {
    "train_loop.py": ["--layers=8", "--width=1024", "--batch=8", "--length=1024", "--steps=5"],
    "trainer.py": ["--layers=4", "--width=2048", "--batch=4", "--length=2048", "--bf16"],
}


def measure_examples(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    """What the loops in ``examples/`` print, with the same losses at a lower peak."""
    result: dict[str, Any] = {"examples": {name: {} for name in EXAMPLES}}

    def one(name: str, budget: list[str]) -> None:
        words = [] if options.small else EXAMPLES[name]
        command = [sys.executable, f"examples/{name}", *budget, *words]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        said = "" if done.returncode == 0 else done.stderr[-3000:]
        result["examples"][name]["floor" if budget else "no plan"] = {
            "command": " ".join(["python", *command[1:]]),
            "exit_code": done.returncode,
            "wall_s": round(time.perf_counter() - start, 1),
            "printed": done.stdout.splitlines(),
            "losses": [float(x) for x in re.findall(r"loss\D*([\d.]+)", done.stdout)],
            "peaks_gb": [float(found) for found in re.findall(r"peak ([\d.]+) GB", done.stdout)],
            "said": said,
        }
        print(done.stdout + said)
        keep(_examples(result, options))

    with ThreadPoolExecutor(options.jobs) as pool:
        asked = [(name, budget) for budget in ([], ["--budget=floor"]) for name in EXAMPLES]
        for done in [pool.submit(one, *each) for each in asked]:
            done.result()
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
    for name in ("plan", *MEASURES):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
        command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        command.add_argument("--small", action="store_true", help="tiny sizes, to try it out")
        if name == "examples":
            command.add_argument("--jobs", type=int, default=1, help="loops at a time")
        if name in ("plan", "whole"):
            path = ROOT / "build" / "whole.plan.yaml"
            command.add_argument("--plan", type=Path, default=path, help="the whole model's")
            command.add_argument("--batch", default=WHOLE_ROWS, help="rows of the whole model")
        if name == "whole":
            command.add_argument("--after", type=Path, help="run when there is such a file")
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
    if options.benchmark == "plan":
        plan_whole(options)
        return
    results = Results("inductor", options.benchmark, options.device, options.out)
    options.path = results.path
    results.close(MEASURES[options.benchmark](options, results.keep))


if __name__ == "__main__":
    main()
