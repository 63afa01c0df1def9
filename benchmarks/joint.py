"""Keep, recompute and offload together, against each way alone, under Inductor.

    python benchmarks/joint.py run      # measures three models, whatever is not there yet
    python benchmarks/joint.py run --only llama --part plans
    python benchmarks/joint.py plan     # makes only the plans, which needs no GPU
    python benchmarks/joint.py steps    # without a GPU: steps as predicted, beside those measured
    python benchmarks/joint.py plot     # the results as a picture

Parts: ``plans`` with all actions, at 95 to 45% of the peak that is predicted without a plan and at
the lowest; ``offload`` the same with offload only; ``checkpoint`` all layers, and some of them;
``budgets`` ``activation_memory_budget`` at every 0.1.  A part is measured in groups of a few arms:
a group is a process with a baseline of its own, the model as Inductor compiles it; each arm's steps
are timed in turn with the baseline's, and compared to these.  Several compile at a time
(``--jobs``); arms are timed when all of these are done with it.
Plans that are not in ``--plans`` yet are made meanwhile, from the shipped profile alone.
Writes ``<gpu>-joint.json`` into ``benchmarks/results`` (``--out`` names another folder), exit code
3 if a target was missed.  ``--device cpu --small`` tries the script out anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from children import line, streamed  # noqa: E402
from machine import Results  # noqa: E402

from offplan.budget import FLOOR, Aim, of_bytes  # noqa: E402
from offplan.costs import profile_for  # noqa: E402
from offplan.decide import Decisions  # noqa: E402
from offplan.eligibility import DEFAULT_MIN_BYTES, DEFAULT_RULES  # noqa: E402
from offplan.errors import BudgetError  # noqa: E402
from offplan.plan import ACTIONS, dump_plan  # noqa: E402

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
SMALL = {"llama": ("benchmarks/models.py:llama", {"layers": "2", "batch": "1", "seq": "1024"})}
LEVELS = ("95%", "90%", "80%", "70%", "60%", "50%", "45%", "lowest")
PARTS = {
    "plans": LEVELS,
    "offload": LEVELS,
    "checkpoint": ("1", "2", "3", "4"),
    "budgets": tuple(f"{tenths / 10}" for tenths in range(9, -1, -1)),
}
PLANNED = {"plans": ACTIONS, "offload": ("keep", "offload")}
# Arms of a group, beside its baseline.
GROUP = 4
MOST_PEAK, MOST_STEP = 0.005, 0.10
# Better than all others by this much, at so many levels of each model.
BETTER_BY, BETTER_AT = 0.05, 3
# Peak lower by, step longer by: of a model.
MARKS = {
    "Llama-3.2-1B": ((0.336, 0.10), (0.477, 0.18)),
    "Qwen3-14B, 8 layers": ((0.23, 0.01), (0.46, 0.12)),
}

Keep = Callable[[dict[str, Any]], None]
Models = dict[str, dict[str, Any]]


# --- plans ----------------------------------------------------------------------------------------


def plan_all(options: argparse.Namespace) -> None:
    for name in _asked(options):
        _plan(options, name)


def _plan(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Have the plans of a model made that are not there; returns what it took."""
    spec, params = _known(options)[name]
    levels = {part: " ".join(_arms(name, part)) for part in PLANNED}
    given = {"PLANS": str(_folder(options, name)), **levels}
    *_, found = streamed(__file__, "make", spec, params, options.device, given)
    return {key: found.get(key) for key in ("seconds", "exit_code", "said", "wall_s")}


def make_child(
    part: str, spec: str, params: dict[str, str], device: str
) -> Iterator[dict[str, Any]]:
    """Write the plan of each part and level; yields how long each took."""
    from offplan.trace.capture import TraceOptions, traced

    folder = Path(os.environ["PLANS"])
    left = [
        (part, level, path)
        for part in PLANNED
        for level in os.environ[part].split()
        if not (path := folder / f"{part}-{level}.plan.yaml").exists()
    ]
    if not left:
        return
    start = time.perf_counter()
    step = traced(spec, params, TraceOptions(device=device, compiler="inductor"))
    seconds = {"capture": round(time.perf_counter() - start, 1)}
    folder.mkdir(parents=True, exist_ok=True)
    aim = Aim(profile=profile_for(step.facts.gpu) if step.facts.gpu else None)
    known = {
        part: Decisions(
            step.facts,
            DEFAULT_RULES,
            DEFAULT_MIN_BYTES,
            replace(aim, actions=actions),
            step.under,
        )
        for part, actions in PLANNED.items()
    }
    for part, level, path in left:
        start = time.perf_counter()
        top = known[part].outlooks.no_plan.peak_bytes
        budget = FLOOR if level == "lowest" else of_bytes(int(top * _share(level)))
        try:
            text = dump_plan(known[part].plan(budget))
        except BudgetError as error:
            text = json.dumps({"refused": str(error)}).encode()
        path.write_bytes(text)
        seconds[f"{part} {level}"] = round(time.perf_counter() - start, 1)
        yield {"seconds": seconds}


def _share(level: str) -> float:
    return float(level.removesuffix("%")) / 100


def _arms(name: str, part: str) -> tuple[str, ...]:
    """What is measured of a model: of its plans also those of its marks."""
    marks = MARKS.get(name, ()) if part == "plans" else ()
    return (*PARTS[part], *(f"{100 * (1 - lower):.1f}%" for lower, _ in marks))


# --- measuring ------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, keep: Keep) -> dict[str, Any]:
    """Arms that were measured before are kept, so that each run may be cut off."""
    before = json.loads(options.path.read_text()) if options.path.exists() else {}
    models: Models = before.get("models", {})

    def one(name: str, part: str, arms: tuple[str, ...]) -> None:
        if part in PLANNED:
            models[name]["made"] = planning[name].result()
        spec, params = _known(options)[name]
        given = {"PLANS": str(_folder(options, name)), "ARMS": " ".join(arms)}
        groups = models[name][part]
        place = len(groups)
        groups.append({})
        for found in streamed(__file__, part, spec, params, options.device, given):
            groups[place] = found
            keep(judged(models))

    asked = []
    for part in PARTS if options.part is None else (options.part,):
        for name in _asked(options):
            groups = models.setdefault(name, {}).setdefault(part, [])
            done = {arm for group in groups for arm in _seen(group)}
            left = [arm for arm in _arms(name, part) if options.again or arm not in done]
            size = options.group
            starts = range(0, len(left), size)
            asked += [(name, part, tuple(left[start : start + size])) for start in starts]
    with ThreadPoolExecutor(options.jobs) as pool:
        wanting = dict.fromkeys(name for name, part, _ in asked if part in PLANNED)
        planning = {name: pool.submit(_plan, options, name) for name in wanting}
        # What needs a plan comes last, when plans are there.
        asked.sort(key=lambda each: each[1] in PLANNED)
        for done in [pool.submit(one, *each) for each in asked]:
            done.result()
    return judged(models)


def _known(options: argparse.Namespace) -> dict[str, Any]:
    return SMALL if options.small else MODELS


def _asked(options: argparse.Namespace) -> list[str]:
    only = (options.only or "").lower()
    return [name for name in _known(options) if only in name.lower()]


def _folder(options: argparse.Namespace, name: str) -> Path:
    return options.plans / "".join(c if c.isalnum() else "-" for c in name.lower())


def _measured(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The arms of a group, its baseline first; none if that is missing."""
    return group.get("arms", [])


def judged(models: Models) -> dict[str, Any]:
    levels = {name: list(_levels(parts)) for name, parts in models.items()}
    arms = [each for parts in models.values() for each in _relative(parts, "plans")]
    found = [level for all_of in levels.values() for level in all_of]
    noise = {name: _noise(parts) for name, parts in models.items()}
    met = {
        "every arm was measured": set(models) == set(MODELS)
        and all(
            set(_arms(name, part)) == {arm for group in parts.get(part, ()) for arm in _seen(group)}
            for name, parts in models.items()
            for part in PARTS
        ),
        "under the budget": all(
            arm["peak_allocated_bytes"] <= arm["predicted"]["budget_bytes"] for _, arm in arms
        ),
        "moved as planned": all(
            arm["moved_bytes"] == arm["predicted"]["moved_bytes"] for _, arm in arms
        ),
        "peak as predicted within 0.5%": all(
            abs(arm["off"]["peak_allocated_bytes"]) <= MOST_PEAK
            for _, arm in arms
            # On a CPU it is not measured.
            if arm["peak_allocated_bytes"]
        ),
        "step as predicted within 10%": all(
            abs(arm["off"].get("step_ms", 0.0)) <= MOST_STEP for _, arm in arms
        ),
        "no slower than any other way within the budget": all(
            level["over_best"] is None or level["over_best"] <= 1.0 for level in found
        ),
        "no slower but for what a step without a plan differs from itself": all(
            level["over_best"] is None or level["over_best"] <= _same(noise[name])
            for name, all_of in levels.items()
            for level in all_of
        ),
        "better by 5% at three levels of each model": all(
            sum(_is_better(level) for level in all_of) >= BETTER_AT for all_of in levels.values()
        ),
        **{
            f"{name}: {-lower:.1%} peak at under {longer:+.0%}": _reaches(
                models[name], lower, longer
            )
            for name, marks in MARKS.items()
            for lower, longer in marks
            if name in models
        },
    }
    return {"ok": all(met.values()), "met": met, "noise": noise, "levels": levels, "models": models}


def _seen(group: dict[str, Any]) -> list[str]:
    return [arm["name"] for arm in _measured(group)[1:]] + list(group.get("refused", ()))


def _relative(parts: dict[str, Any], part: str) -> Iterator[tuple[float, dict[str, Any]]]:
    """Step over that of the baseline beside it, and the arm."""
    for group in parts.get(part, ()):
        for arm in _measured(group)[1:]:
            yield arm["step_ms"] / _baseline_ms(group, arm), arm


def _baseline_ms(group: dict[str, Any], arm: dict[str, Any]) -> float:
    """Of the steps in turn with the arm's; earlier results have those of the group alone."""
    return arm.get("beside", group["arms"][0])["step_ms"]


def _noise(parts: dict[str, Any]) -> dict[str, Any]:
    """How far the baselines of the groups are apart: the same step, in one process and another."""
    baselines = [
        arms[0] for part in PARTS for group in parts.get(part, ()) if (arms := _measured(group))
    ]
    if not baselines:
        return {}
    steps = [arm["step_ms"] for arm in baselines]
    found = {"baselines": len(steps), "least_ms": min(steps), "most_ms": max(steps)}
    itself = [arm["step_ms"] / arm["beside"]["step_ms"] for arm in baselines if "beside" in arm]
    return found | (
        {"least_beside_itself": min(itself), "most_beside_itself": max(itself)} if itself else {}
    )


def _same(noise: dict[str, Any]) -> float:
    """How far apart ratios of equal steps can be, by what was seen of a step beside itself."""
    return noise.get("most_beside_itself", 1.0) / noise.get("least_beside_itself", 1.0)


def _levels(parts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each budget, with the fastest other way whose peak is within it."""
    others = [
        (over, arm, part)
        for part in PARTS
        if part != "plans"
        for over, arm in _relative(parts, part)
    ]
    plans = sorted(
        _relative(parts, "plans"), key=lambda each: -each[1]["predicted"]["budget_bytes"]
    )
    for over, arm in plans:
        budget = arm["predicted"]["budget_bytes"]
        within = [each for each in others if each[1]["peak_allocated_bytes"] <= budget]
        best = min(within, key=lambda each: each[0], default=None)
        # A plan that only moves can be the one that there is without recomputation: it is timed
        # twice, and no slower than itself.
        is_same = best is not None and "does" in arm and best[1].get("does") == arm["does"]
        yield {
            "name": arm["name"],
            "budget_bytes": budget,
            "peak_bytes": arm["peak_allocated_bytes"],
            "over_no_plan": over,
            "best_other": None if best is None else f"{best[2]} {best[1]['name']}",
            "over_best": None if best is None else 1.0 if is_same else over / best[0],
            "is_best_other": is_same,
        }


def _is_better(level: dict[str, Any]) -> bool:
    """Nothing else gets there at all, or it takes that much longer."""
    return level["over_best"] is None or level["over_best"] <= 1 - BETTER_BY


def _reaches(parts: dict[str, Any], lower: float, longer: float) -> bool:
    """Whether a plan lowers the peak of its baseline, and lengthens its step, by no more."""
    return any(
        arm["peak_allocated_bytes"] <= (1 - lower) * group["arms"][0]["peak_allocated_bytes"]
        and arm["step_ms"] <= (1 + longer) * _baseline_ms(group, arm)
        for group in parts.get("plans", ())
        for arm in _measured(group)[1:]
    )


# --- one group ------------------------------------------------------------------------------------


def group_child(
    part: str, spec: str, params: dict[str, str], device: str
) -> Iterator[dict[str, Any]]:
    """Compile the baseline and all arms, then measure one after the other."""
    from ready import Ready

    ready = Ready(spec, params, device)
    yield {"build_s": ready.build_s}
    with ready.turns.compiling():
        baseline = ready.by_itself("no plan")
        prepared, refused = [], []
        for name in os.environ["ARMS"].split():
            arm = _prepared(ready, part, name)
            if arm is None:
                refused.append(name)
            else:
                prepared.append(arm)
    yield {"compile_s": ready.seconds(), "refused": refused}
    with ready.turns.quiet():
        for arm in [baseline, *prepared]:
            with closing(arm):
                yield {"arm": ready.measure(arm, beside=baseline)}


def _prepared(ready: Any, part: str, name: str) -> Any:
    """A compiled arm; None where there is no such plan."""
    from offplan.plan import load_plan

    if part == "budgets":
        import torch._functorch.config as functorch_config

        with functorch_config.patch(activation_memory_budget=float(name)):
            return ready.by_itself(name)
    if part == "checkpoint":
        return ready.checkpointed(name, int(name))
    path = Path(os.environ["PLANS"]) / f"{part}-{name}.plan.yaml"
    if path.read_bytes().startswith(b"{"):
        return None
    return ready.planned(name, load_plan(path))


# --- what is predicted of steps without a plan ----------------------------------------------------

# Of ``activation_memory_budget``, beside none.
SHARES = ("0.9", "0.6", "0.3", "0.0")


def predict(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Steps of Inductor alone, as predicted by this version and as measured on the GPU before.

    Of models that are not asked for, what ``path`` has of them."""
    before = json.loads(path.read_text())["models"] if path.exists() else {}
    found: dict[str, Any] = {name: before[name] for name in MODELS if name in before}
    measured = json.loads((options.out / "h200-joint.json").read_text())["models"]
    for name in _asked(options):
        spec, params = _known(options)[name]
        *_, got = streamed(__file__, "steps", spec, params, "cuda")
        if got["exit_code"]:
            raise SystemExit(got["said"])
        found[name] = {
            share: _beside(got["steps_ms"][share], list(_steps_ms(measured[name], share)))
            for share in got["steps_ms"]
        }
        for share, step in found[name].items():
            print(f"{name:20} {share:8} {step}", flush=True)
    off = [abs(each["off"]) for steps in found.values() for each in steps.values()]
    return {"ok": max(off) <= MOST_STEP, "most_off": max(off), "models": found}


def _beside(predicted_ms: float, measured_ms: list[float]) -> dict[str, Any]:
    mean_ms = sum(measured_ms) / len(measured_ms)
    return {
        "predicted_ms": round(predicted_ms, 2),
        "measured_ms": [round(each, 2) for each in measured_ms],
        "off": round(predicted_ms / mean_ms - 1, 4),
    }


def _steps_ms(parts: dict[str, Any], share: str) -> Iterator[float]:
    """Every measured step of the arm; of the one without a budget, of each group."""
    for group in (group for part in PARTS for group in parts[part]):
        arms = _measured(group)
        if share == "none":
            yield from (arm["step_ms"] for arm in arms[:1])
        elif group in parts["budgets"]:
            yield from (arm["step_ms"] for arm in arms[1:] if arm["name"] == share)


def predict_child(
    part: str, spec: str, params: dict[str, str], device: str
) -> Iterator[dict[str, Any]]:
    """The predicted step without a budget, and at each of ``SHARES``."""
    import torch._functorch.config as functorch_config

    from offplan.budget import Outlooks
    from offplan.trace.capture import TraceOptions, traced

    steps: dict[str, float] = {}
    for share in ("none", *SHARES):
        budget = 1.0 if share == "none" else float(share)
        with functorch_config.patch(activation_memory_budget=budget):
            step = traced(spec, params, TraceOptions(device=device, compiler="inductor"))
        aim = Aim(profile=profile_for(step.facts.gpu or ""))
        steps[share] = Outlooks(step.facts, (), aim).planner.starts[-1]
        yield {"steps_ms": steps}


# --- a picture ------------------------------------------------------------------------------------

_LABELS = {
    "plans": ("offplan, all actions", "o-"),
    "offload": ("offplan, offload only", "s--"),
    "checkpoint": ("checkpointed layers", "^:"),
    "budgets": ("activation_memory_budget", "x"),
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
            found = sorted(
                (arm["peak_allocated_bytes"] / 1e9, over) for over, arm in _relative(parts, part)
            )
            if found:
                axis.plot(*zip(*found, strict=True), style, label=label, markersize=5)
        axis.set(title=name, xlabel="peak allocated, GB", ylabel="step, of that without a plan")
        axis.set_ylim(0.97, 1.45)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    print(f"wrote {path.with_suffix('.svg').name}")


# --- the command ----------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name in ("plan", "run", "steps", "plot"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
        command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        if name == "plot":
            continue
        if name != "steps":
            command.add_argument("--plans", type=Path, default=ROOT / "build" / "joint")
        command.add_argument("--small", action="store_true", help="tiny, to try it out")
        command.add_argument("--only", help="models whose name has this in it")
        if name == "run":
            command.add_argument("--part", choices=PARTS, help="measure only this")
            command.add_argument("--again", action="store_true", help="measure what is there, too")
            command.add_argument("--jobs", type=int, default=1, help="groups at a time")
            command.add_argument("--group", type=int, default=GROUP, help="arms of a group")
    hidden = commands.add_parser("child")
    hidden.add_argument("--what", choices=("make", "steps", *PARTS), required=True)
    hidden.add_argument("--device", default="cuda")
    hidden.add_argument("spec")
    hidden.add_argument("params", nargs="*")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.benchmark == "child":
        params = dict(text.split("=", 1) for text in options.params)
        child = {"make": make_child, "steps": predict_child}.get(options.what, group_child)
        for found in child(options.what, options.spec, params, options.device):
            print(json.dumps(found), flush=True)
        return
    if options.benchmark == "steps":
        results = Results("joint", "steps", "cpu", options.out)
        results.close(predict(options, results.path))
        return
    if options.benchmark == "plot":
        # Those of planning alone have a longer name.
        for path in sorted(options.out.glob("*-joint.json")):
            if path.stem.count("-") == 1:
                plot(path)
        return
    if options.benchmark == "plan":
        plan_all(options)
        return
    results = Results("joint", "", options.device, options.out)
    options.path = results.path
    found = measure(options, results.keep)
    for name, parts in found["models"].items():
        for part in PARTS:
            print(name, part)
            for group in parts.get(part, ()):
                for arm in _measured(group):
                    print("   ", line(arm))
    results.close(found)


if __name__ == "__main__":
    main()
