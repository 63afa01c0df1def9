"""Keep, recompute and offload together, against each way alone, under Inductor.

    python benchmarks/joint.py run           # three models, all parts; what is there is kept
    python benchmarks/joint.py run --only llama --part plans
    python benchmarks/joint.py plot          # the results as a picture

Parts: ``plans`` with all actions, at 95 to 45% of the peak without a plan and at the lowest;
``offload`` the same with offload only; ``checkpoint`` all layers, and some of them; ``budgets``
``activation_memory_budget`` at every 0.1.  Each part is a process with a baseline of its own, to
which its step times are compared.  Writes ``<gpu>-joint.json`` into ``benchmarks/results``
(``--out`` names another folder), exit code 3 if a target was missed.  ``--device cpu --small``
tries the script out anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from children import line, streamed  # noqa: E402
from inductor import compiled  # noqa: E402
from machine import Results  # noqa: E402

from offplan.budget import FLOOR, of_bytes  # noqa: E402
from offplan.errors import BudgetError  # noqa: E402
from offplan.plan import ACTIONS  # noqa: E402

MODELS = {
    "Llama-3.2-1B": ("benchmarks/models.py:llama", {"layers": "16", "vocabulary": "128256"}),
    "Qwen3-1.7B": (
        "benchmarks/models.py:qwen3",
        {"layers": "28", "vocabulary": "151936", "tied": "true"},
    ),
    "Qwen3-14B, 8 layers": (
        "sample_graphs/qwen3_14b.py",
        {"layers": "8", "batch": "4", "seq": "4096"},
    ),
}
SMALL = {"llama": ("benchmarks/models.py:llama", {"layers": "2", "batch": "1", "seq": "128"})}
PARTS = ("plans", "offload", "checkpoint", "budgets")
LEVELS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45)
STEPS = 5
MOST_PEAK, MOST_STEP = 0.005, 0.10
# Better than all others by this much, at so many levels of each model.
BETTER_BY, BETTER_AT = 0.05, 3
# Peak lower by, step longer by: of a model.
MARKS = {
    "Llama-3.2-1B": ((0.336, 0.10), (0.477, 0.18)),
    "Qwen3-14B, 8 layers": ((0.23, 0.01), (0.46, 0.12)),
}

Keep = Callable[[dict[str, Any]], None]


# --- measuring ------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    """Parts that were measured before are kept, so that each can have a command of its own."""
    before = json.loads(options.path.read_text()) if options.path.exists() else {}
    models: dict[str, Any] = before.get("models", {})

    def one(name: str, part: str) -> None:
        spec, params = known[name]
        for found in streamed(__file__, part, spec, params, options.device):
            models[name][part] = found
            keep(judged(models))

    known = SMALL if options.small else MODELS
    asked = []
    for name in known:
        if options.only and options.only.lower() not in name.lower():
            continue
        parts = models.setdefault(name, {})
        for part in (options.part,) if options.part else PARTS:
            if parts.setdefault(part, {}).get("exit_code") != 0 or options.again:
                asked.append((name, part))
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in [pool.submit(one, *each) for each in asked]:
            done.result()
    return judged(models)


def judged(models: dict[str, Any]) -> dict[str, Any]:
    levels = {name: list(_levels(parts)) for name, parts in models.items()}
    arms = [arm for parts in models.values() for arm in parts.get("plans", {}).get("arms", [])]
    found = [level for all_of in levels.values() for level in all_of]
    met = {
        "every part was measured": len(models) == len(MODELS)
        and all(
            parts.get(part, {}).get("exit_code") == 0 for parts in models.values() for part in PARTS
        ),
        "under the budget": all(
            arm["peak_allocated_bytes"] <= arm["predicted"]["budget_bytes"]
            for arm in arms
            if arm["predicted"]["budget_bytes"]
        ),
        "peak as predicted within 0.5%": all(
            abs(arm["off"]["peak_allocated_bytes"]) <= MOST_PEAK for arm in arms
        ),
        "step as predicted within 10%": all(
            abs(arm["off"].get("step_ms", 0.0)) <= MOST_STEP for arm in arms
        ),
        "no slower than any other way within the budget": all(
            level["over_best"] is None or level["over_best"] <= 1.0 for level in found
        ),
        "better by 5% at three levels of each model": all(
            sum(_is_better(level) for level in all_of) >= BETTER_AT for all_of in levels.values()
        ),
        **{
            f"{name}: {-lower:.1%} peak at under {longer:+.0%}": _reaches(
                models.get(name, {}), lower, longer
            )
            for name, marks in MARKS.items()
            for lower, longer in marks
            if name in models
        },
    }
    return {"ok": all(met.values()), "met": met, "levels": levels, "models": models}


def _relative(part: dict[str, Any]) -> Iterator[tuple[str, int, float]]:
    """Name, peak, and step over the part's own baseline, of each arm."""
    arms = part.get("arms", [])
    for arm in arms[1:]:
        yield arm["name"], arm["peak_allocated_bytes"], arm["step_ms"] / arms[0]["step_ms"]


def _levels(parts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each budget, with the fastest other way whose peak is within it."""
    others = [found for name in PARTS[1:] for found in _relative(parts.get(name, {}))]
    arms = parts.get("plans", {}).get("arms", [])
    for arm in arms[1:]:
        budget = arm["predicted"]["budget_bytes"]
        over = arm["step_ms"] / arms[0]["step_ms"]
        within = [found for found in others if found[1] <= budget]
        best = min(within, key=lambda found: found[2], default=None)
        yield {
            "name": arm["name"],
            "budget_bytes": budget,
            "peak_bytes": arm["peak_allocated_bytes"],
            "over_no_plan": over,
            "best_other": None if best is None else best[0],
            "over_best": None if best is None else over / best[2],
        }


def _is_better(level: dict[str, Any]) -> bool:
    """Nothing else gets there at all, or it takes that much longer."""
    return level["over_best"] is None or level["over_best"] <= 1 - BETTER_BY


def _reaches(parts: dict[str, Any], lower: float, longer: float) -> bool:
    arms = parts.get("plans", {}).get("arms", [])
    if not arms:
        return False
    top, step_ms = arms[0]["peak_allocated_bytes"], arms[0]["step_ms"]
    return any(
        arm["peak_allocated_bytes"] <= (1 - lower) * top
        and arm["step_ms"] <= (1 + longer) * step_ms
        for arm in arms[1:]
    )


# --- one part -------------------------------------------------------------------------------------


def plans_child(spec: str, params: dict[str, str], device: str) -> Iterator[dict[str, Any]]:
    yield from _plans(spec, params, device, ACTIONS)


def offload_child(spec: str, params: dict[str, str], device: str) -> Iterator[dict[str, Any]]:
    yield from _plans(spec, params, device, ("keep", "offload"))


def _plans(
    spec: str, params: dict[str, str], device: str, actions: Any
) -> Iterator[dict[str, Any]]:
    from arms import Arms

    arms = Arms(spec, params, device, STEPS, compiler="inductor")
    first = arms.no_plan()
    no_plan = arms.plan(None)
    yield {"build_s": arms.build_s}
    yield {"arm": {"name": "no plan", **arms.beside(first, no_plan)}}
    top = no_plan.predicted.no_plan.peak_bytes
    for level in LEVELS:
        try:
            plan = arms.joint_plan(of_bytes(int(level * top)), actions)
        except BudgetError as error:
            print(error, file=sys.stderr)
            continue
        yield {"arm": _arm(arms, f"{level:.0%}", plan)}
    yield {"arm": _arm(arms, "lowest", arms.joint_plan(FLOOR, actions))}


def _arm(arms: Any, name: str, plan: Any) -> dict[str, Any]:
    again_bytes = sum(each.size_bytes for each in plan.recomputed)
    return {"name": name, **arms.measure(plan), "recomputed_bytes": again_bytes}


def checkpoint_child(spec: str, params: dict[str, str], device: str) -> Iterator[dict[str, Any]]:
    """All layers checkpointed, and every second, third and fourth one only."""
    from arms import Arms
    from transformers.modeling_layers import GradientCheckpointingLayer

    arms = Arms(spec, params, device, STEPS, compiler="inductor")
    model = arms.target.model
    yield {"arm": {"name": "no plan", **compiled(arms)}}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for every in (1, 2, 3, 4):
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = number % every == 0
        name = "all layers" if every == 1 else f"one of {every} layers"
        yield {"arm": {"name": name, **compiled(arms)}}


def budgets_child(spec: str, params: dict[str, str], device: str) -> Iterator[dict[str, Any]]:
    import torch._functorch.config as functorch_config
    from arms import Arms

    arms = Arms(spec, params, device, STEPS, compiler="inductor")
    yield {"arm": {"name": "no plan", **compiled(arms)}}
    for tenths in range(9, -1, -1):
        with functorch_config.patch(activation_memory_budget=tenths / 10):
            yield {"arm": {"name": f"memory budget {tenths / 10}", **compiled(arms)}}


# --- a picture ------------------------------------------------------------------------------------

_LABELS = {
    "plans": ("offplan, all actions", "o-"),
    "offload": ("offplan, offload only", "s--"),
    "checkpoint": ("checkpointed layers", "^:"),
    "budgets": ("activation_memory_budget", "x:"),
}


def plot(path: Path) -> None:
    """Step time over peak, of each model; needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "offplan"
    from matplotlib import pyplot

    models = json.loads(path.read_text())["models"]
    figure, axes = pyplot.subplots(1, len(models), figsize=(5.2 * len(models), 4.2), squeeze=False)
    for axis, (name, parts) in zip(axes[0], models.items(), strict=True):
        for part, (label, style) in _LABELS.items():
            found = sorted((peak / 1e9, over) for _, peak, over in _relative(parts.get(part, {})))
            if found:
                axis.plot(*zip(*found, strict=True), style, label=label, markersize=5)
        axis.set(title=name, xlabel="peak allocated, GB", ylabel="step, of that without a plan")
        axis.set_ylim(0.95, 1.8)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    print(f"wrote {path.with_suffix('.svg').name}")


# --- the command ----------------------------------------------------------------------------------

CHILDREN = {
    "plans": plans_child,
    "offload": offload_child,
    "checkpoint": checkpoint_child,
    "budgets": budgets_child,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name in ("run", "plot"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
        command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        if name == "run":
            command.add_argument("--small", action="store_true", help="tiny, to try it out")
            command.add_argument("--only", help="models whose name has this in it")
            command.add_argument("--part", choices=PARTS, help="measure only this")
            command.add_argument("--again", action="store_true", help="measure what is there, too")
            command.add_argument(
                "--jobs", type=int, default=1, help="parts at a time; they time steps in turns"
            )
    hidden = commands.add_parser("child")
    hidden.add_argument("--what", choices=PARTS, required=True)
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
    if options.benchmark == "plot":
        for path in sorted(options.out.glob("*-joint.json")):
            plot(path)
        return
    results = Results("joint", "", options.device, options.out)
    options.path = results.path
    found = measure(options, results.keep)
    for name, parts in found["models"].items():
        for part in PARTS:
            print(name, part)
            for arm in parts.get(part, {}).get("arms", []):
                print("   ", line(arm))
    results.close(found)


if __name__ == "__main__":
    main()
