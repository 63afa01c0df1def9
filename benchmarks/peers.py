"""offplan against every other way to lower the peak of activations, on the same models and GPU.

    python benchmarks/peers.py run             # every arm that is not there yet; what is, is kept
    python benchmarks/peers.py run --only llama --arm torchtune --again
    python benchmarks/peers.py run --stage peers --jobs 8 --minutes 9    # no arm is begun later
    python benchmarks/peers.py plans --out DIR # no GPU: plans at the peaks that peers reached
    python benchmarks/peers.py run --stage offplan --plans DIR
    python benchmarks/peers.py table           # or --markdown: the README's
    python benchmarks/peers.py plot            # peak against step, as a picture

Ways: no offload (eager, Inductor), ``save_on_cpu`` with pinned memory, torchtune's and TRL's
``OffloadActivations`` with streams, PyTorch's own pass, ``activation_memory_budget``, checkpointing
of all blocks, of every second and selective, DeepSpeed's DeepCompile with its activation offload,
and offplan: hooks, AOT graphs and Inductor, each at its lowest peak and at the peaks of peers.

A *part* is a process that measures a baseline and some ways (``peers_arms.py``); the stage
``peers`` comes before the stage ``offplan``, whose budgets are peaks of peers, and ``deepspeed``
last.  What the results come to, and which arms are taken from ``<gpu>-joint.json`` instead:
``peers_table.py``.  Writes ``<gpu>-peers.json`` into ``benchmarks/results`` (``--results`` names
another folder) after every arm.  Exit code 3 if the measuring went wrong; a peer that wins is a
result.  ``--device cpu --small`` tries the script out anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from children import streamed  # noqa: E402
from machine import Results  # noqa: E402
from peers_table import (  # noqa: E402
    BASELINES,
    GROUPS,
    NO_OFFLOAD,
    as_markdown,
    as_text,
    from_joint,
    judged,
    levels,
    points,
    with_joint,
)

MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "Qwen3-14B, 8 layers": (
        "sample_graphs/qwen3_14b.py",
        {"layers": "8", "batch": "4", "seq": "4096"},
    ),
    "Llama-3.2-1B": ("benchmarks/models.py:llama", {"layers": "16", "vocabulary": "128256"}),
    "Qwen3-1.7B": (
        "benchmarks/models.py:qwen3",
        {"layers": "28", "vocabulary": "151936", "tied": "true"},
    ),
    "encoder": ("benchmarks/models.py:encoder", {}),
    "U-Net": (
        "benchmarks/models.py:unet",
        {"width": "128", "batch": "48", "dtype": "bfloat16", "channels_last": "true"},
    ),
    "ViT-L": ("benchmarks/models.py:vit", {"layers": "24", "batch": "128"}),
}
SMALL: dict[str, tuple[str, dict[str, str]]] = {
    "encoder": (
        "benchmarks/models.py:encoder",
        {"layers": "2", "batch": "24", "seq": "128", "width": "128", "dtype": "float32"},
    ),
    "U-Net": (
        "benchmarks/models.py:unet",
        {"width": "32", "levels": "2", "batch": "2", "size": "160", "channels_last": "true"},
    ),
}
STAGES = ("peers", "offplan", "deepspeed")
# Threads that compile, of each process: there are as many processes as jobs.
COMPILE_THREADS = "2"
# Of a picture: how many times Inductor's step.
STEP_TICKS = (1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Part:
    """What one process measures: a baseline, and arms; or, with ``at``, what ``at`` begins the
    names of, at the levels of the peers of an engine.

    ``is_single``: it runs steps in company, so that there is one at a time, of such a part."""

    stage: str
    baseline: str
    arms: tuple[str, ...] = ()
    at: str = ""
    lowest: str = ""
    level_engine: str = ""
    is_single: bool = False


PARTS = {
    "eager": Part(
        "peers",
        BASELINES["eager"],
        (
            "save_on_cpu",
            "torchtune",
            "TRL",
            "eager checkpointing all layers",
            "eager checkpointing one of 2 layers",
            "eager checkpointing selective",
        ),
        is_single=True,
    ),
    "checkpoint": Part(
        "peers",
        BASELINES["inductor"],
        (
            "checkpointing all layers",
            "checkpointing one of 2 layers",
            "PyTorch's pass",
            "PyTorch's pass on streams",
            "checkpointing selective",
        ),
    ),
    "budgets": Part(
        "peers",
        BASELINES["inductor"],
        tuple(f"memory budget {share}" for share in (0.8, 0.6, 0.4, 0.2)),
    ),
    "deepcompile": Part("deepspeed", "", (BASELINES["deepcompile"],), is_single=True),
    "deepcompile-offload": Part("deepspeed", "", ("DeepCompile offload",), is_single=True),
    "hooks": Part(
        "offplan",
        BASELINES["eager"],
        at="offplan hooks",
        lowest="all",
        level_engine="eager",
        is_single=True,
    ),
    "plans": Part(
        "offplan",
        BASELINES["inductor"],
        at="offplan Inductor",
        lowest="lowest",
        level_engine="inductor",
    ),
    "aot": Part(
        "offplan",
        BASELINES["aot_eager"],
        at="offplan AOT",
        lowest="lowest",
        level_engine="eager",
    ),
}


# --- what is still to be measured -----------------------------------------------------------------


def wanted(part: Part, arms: Mapping[str, Mapping[str, Any]]) -> dict[str, int | None]:
    """The arms of a part, without its baseline: name, and budget where it has one.

    Nothing where offplan's levels wait for peers, or were measured by the joint benchmark.
    """
    if not part.at:
        return dict.fromkeys(part.arms)
    if any(name.startswith(part.at) and "from" in arm for name, arm in arms.items()):
        return {}
    if not any(arm["engine"] == part.level_engine for arm in arms.values()):
        return {}
    found = levels(arms.values(), part.level_engine)
    at = {f"{part.at} at {peer}": peak_bytes for peer, peak_bytes in found.items()}
    return {f"{part.at} {part.lowest}": None, **at}


@dataclass(frozen=True)
class Task:
    """One process: a part of a model, and the arms that it is to measure, baseline first."""

    model: str
    part: str
    budgets: Mapping[str, int | None]


def tasks(
    names: Sequence[str], found: Mapping[str, Mapping[str, Any]], options: argparse.Namespace
) -> Iterator[Task]:
    """What is asked for and not there, the parts of most importance first."""
    for part_name, part in PARTS.items():
        if part.stage not in options.stages or options.part not in (None, part_name):
            continue
        for model in names:
            arms = found[model]["arms"]
            known = arms.keys() | found[model]["not_measured"].keys()
            budgets = {
                name: budget
                for name, budget in wanted(part, arms).items()
                if (options.again or name not in known) and (options.arm or "") in name
            }
            if budgets:
                first = {part.baseline: None} if part.baseline else {}
                yield Task(model, part_name, {**first, **budgets})


# --- measuring ------------------------------------------------------------------------------------


class Measuring:
    """The result file while it grows."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options, self.results = options, results
        self.known = SMALL if options.small else MODELS
        before = json.loads(results.path.read_text()) if results.path.exists() else {}
        self.models: dict[str, dict[str, Any]] = before.get("models", {})
        self.lock = Lock()
        for name, (spec, params) in self.known.items():
            fresh = {"spec": spec, "params": params, "arms": {}, "not_measured": {}, "parts": {}}
            self.models.setdefault(name, fresh)
        # In the order of the table, whatever was measured first.
        self.models = {name: self.models[name] for name in self.known}
        path = results.path.with_name(results.path.name.replace("-peers", "-joint"))
        self.joint = from_joint(path, results.machine)

    @property
    def found(self) -> dict[str, dict[str, Any]]:
        return with_joint(self.models, self.joint)

    def result(self) -> dict[str, Any]:
        return {**judged(self.found), "models": self.models}

    def keep(self, task: Task, more: Mapping[str, Any]) -> None:
        """What a process has measured so far."""
        with self.lock:
            model = self.models[task.model]
            for arm in more["arms"]:
                model["not_measured"].pop(arm["name"], None)
                self._add(model["arms"], {**arm, "part": task.part})
            for name, why in more.get("not_measured", {}).items():
                model["arms"].pop(name, None)
                model["not_measured"][name] = why
            ended = ("wall_s", "exit_code", "said")
            model["parts"][task.part] = {name: more.get(name) for name in ended}
            self.results.keep(self.result())

    @staticmethod
    def _add(arms: dict[str, Any], arm: dict[str, Any]) -> None:
        """Baselines are those of the first part that measured them: its results are compared."""
        before = arms.get(arm["name"], arm)
        if arm["name"] == BASELINES[arm["engine"]] and before["part"] != arm["part"]:
            return
        arms[arm["name"]] = arm
        without, with_it = arms.get("DeepCompile"), arms.get("DeepCompile offload")
        if without and with_it:
            # They are a process each: two engines do not share one.
            with_it["baseline"] = without["baseline"]

    def run(self, task: Task) -> None:
        spec, params = self.known[task.model]
        asked = {"arms": task.budgets, "until_s": self.options.until_s}
        if self.options.plans is not None:
            asked["plans"] = str(self.options.plans.resolve())
        environment = {
            "PEERS_ASKED": json.dumps(asked),
            "TORCHINDUCTOR_COMPILE_THREADS": COMPILE_THREADS,
            "TOKENIZERS_PARALLELISM": "false",
        }
        device = self.options.device
        for more in streamed(__file__, task.part, spec, params, device, environment):
            self.keep(task, more)

    def stage(self, stage: str) -> None:
        """All tasks of a stage; of those that run in company, one at a time: the GPU's memory and
        the host's are theirs."""
        self.options.stages = (stage,)
        names = [n for n in self.known if (self.options.only or "").lower() in n.lower()]
        todo = list(tasks(names, self.found, self.options))
        with (
            ThreadPoolExecutor(1) as single,
            ThreadPoolExecutor(max(1, self.options.jobs - 1)) as compiled,
        ):
            started: list[Future[None]] = []
            for task in todo:
                pool = single if PARTS[task.part].is_single or self.options.jobs == 1 else compiled
                started.append(pool.submit(self._unless_late, task))
            for each in started:
                each.result()

    def _unless_late(self, task: Task) -> None:
        until_s = self.options.until_s
        if until_s is None or time.time() < until_s:
            self.run(task)


def run(options: argparse.Namespace) -> None:
    results = Results("peers", "", options.device, options.results)
    minutes = options.minutes
    options.until_s = None if minutes is None else time.time() + 60 * minutes
    measuring = Measuring(options, results)
    for stage in (options.stage,) if options.stage else STAGES:
        measuring.stage(stage)
    print(as_text(measuring.found))
    results.close(measuring.result())


# --- plans without a GPU --------------------------------------------------------------------------


def plans(options: argparse.Namespace) -> None:
    """A plan file for each arm of offplan that a compiler runs, at the levels of each result file.

    The graphs are those of this torch: a plan of other graphs is made anew where it runs.
    """
    from peers_arms import ACTIONS_OF, plan_name

    from offplan.errors import OffplanError

    for path in sorted(options.results.glob("*-peers.json")):
        result = json.loads(path.read_text())
        joint = from_joint(path.with_name(path.name.replace("-peers", "-joint")), result["machine"])
        options.out.mkdir(parents=True, exist_ok=True)
        for model, found in with_joint(result["models"], joint).items():
            if (options.only or "").lower() not in model.lower():
                continue
            for part in (PARTS["plans"], PARTS["aot"]):
                engine = "inductor" if part is PARTS["plans"] else "aot_eager"
                left = {
                    name: budget
                    for name, budget in wanted(part, found["arms"]).items()
                    if name not in found["arms"]
                }
                files = {
                    options.out / plan_name(found["spec"], found["params"], name): budget
                    for name, budget in left.items()
                }
                files = {file: b for file, b in files.items() if not file.exists()}
                if not files:
                    continue
                try:
                    _write_plans(found, engine, ACTIONS_OF[engine], files, options.device)
                except OffplanError as error:
                    print(f"{model}, {engine}: {error}", file=sys.stderr)


def _write_plans(
    found: Mapping[str, Any],
    engine: Any,
    actions: Any,
    files: Mapping[Path, int | None],
    device: str,
) -> None:
    """One trace, and a plan of it for each budget (None: the lowest peak)."""
    from offplan.budget import FLOOR, Aim, of_bytes
    from offplan.decide import decide
    from offplan.eligibility import DEFAULT_MIN_BYTES, DEFAULT_RULES
    from offplan.errors import BudgetError
    from offplan.plan import write_plan
    from offplan.trace.capture import TraceOptions, traced

    start = time.perf_counter()
    options = TraceOptions(device=device, compiler=engine)
    step = traced(found["spec"], found["params"], options)
    print(f"{found['spec']} {engine}: traced in {time.perf_counter() - start:.1f} s")
    for file, budget_bytes in files.items():
        start = time.perf_counter()
        budget = FLOOR if budget_bytes is None else of_bytes(budget_bytes)
        try:
            plan = decide(
                step.facts,
                DEFAULT_RULES,
                DEFAULT_MIN_BYTES,
                budget,
                Aim(actions=actions),
                step.under if "recompute" in actions else None,
            )
        except BudgetError as error:
            print(f"  {file.name}: {error}")
            continue
        write_plan(file, plan)
        print(f"  {file.name}: {time.perf_counter() - start:.1f} s")


# --- tables and pictures --------------------------------------------------------------------------


def found_in(path: Path) -> dict[str, dict[str, Any]]:
    """The models of a result file, with arms of the joint benchmark beside it."""
    result = json.loads(path.read_text())
    joint = from_joint(path.with_name(path.name.replace("-peers", "-joint")), result["machine"])
    return with_joint(result["models"], joint)


def table(options: argparse.Namespace) -> None:
    for path in sorted(options.results.glob("*-peers.json")):
        print(as_markdown(found_in(path)) if options.markdown else as_text(found_in(path)))


def plot(options: argparse.Namespace) -> None:
    for path in sorted(options.results.glob("*-peers.json")):
        _plot(found_in(path), path.with_suffix(".svg"))
        print(f"wrote {path.with_suffix('.svg').name}")


def _plot(models: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Step time over peak, of each model; needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "offplan"
    from matplotlib import pyplot

    shown = {name: points(found["arms"]) for name, found in models.items()}
    shown = {name: groups for name, groups in shown.items() if groups}
    columns = min(3, max(1, len(shown)))
    row_count = max(1, -(-len(shown) // columns))
    figure, axes = pyplot.subplots(
        row_count, columns, figsize=(5.2 * columns, 4.2 * row_count), squeeze=False
    )
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    named: dict[str, Any] = {}
    for axis, (name, groups) in zip(axes.flat, shown.items(), strict=False):
        for group, found in groups.items():
            style = GROUPS[group][1]
            # One colour for one way in every picture.
            colour = "black" if group == NO_OFFLOAD else f"C{list(GROUPS).index(group) % 10}"
            peaks, steps = zip(*found, strict=True)
            (drawn,) = axis.plot(peaks, steps, style, color=colour, markersize=7, linewidth=1)
            named.setdefault(group, drawn)
        axis.set(title=name, xlabel="peak allocated, GB", ylabel="step, of Inductor's")
        axis.set_yscale("log")
        axis.set_yticks(STEP_TICKS, [f"{tick:g}" for tick in STEP_TICKS])
        axis.minorticks_off()
        most = max(step for found in groups.values() for _, step in found)
        axis.set_ylim(0.9, 1.1 * max(2.0, most))
        axis.grid(alpha=0.3)
    figure.legend(named.values(), named, loc="lower center", ncols=6, fontsize=8)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


# --- the command ----------------------------------------------------------------------------------

COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "run": run,
    "plans": plans,
    "table": table,
    "plot": plot,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name in COMMANDS:
        command = commands.add_parser(name)
        command.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
        if name in ("run", "plans"):
            command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
            command.add_argument("--only", help="models whose name has this in it")
        if name == "plans":
            command.add_argument("--out", type=Path, required=True, help="a folder for the plans")
        if name == "table":
            command.add_argument("--markdown", action="store_true", help="the README's table")
        if name == "run":
            _add_run_options(command)
    hidden = commands.add_parser("child")
    hidden.add_argument("--what", choices=tuple(PARTS), required=True)
    hidden.add_argument("--device", default="cuda")
    hidden.add_argument("spec")
    hidden.add_argument("params", nargs="*")
    return parser.parse_args()


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--small", action="store_true", help="tiny models, to try it out")
    command.add_argument("--stage", choices=STAGES, help="only this one")
    command.add_argument("--part", choices=tuple(PARTS), help="measure only this")
    command.add_argument("--arm", help="arms whose name has this in it")
    command.add_argument("--again", action="store_true", help="measure what is there, too")
    command.add_argument("--plans", type=Path, help="a folder of plans that `plans` made")
    command.add_argument("--minutes", type=float, help="begin no arm after so long")
    command.add_argument(
        "--jobs", type=int, default=1, help="processes; they compile together and measure alone"
    )


def main() -> None:
    options = parse()
    if options.benchmark != "child":
        COMMANDS[options.benchmark](options)
        return
    from peers_arms import measure_part

    params = dict(text.split("=", 1) for text in options.params)
    for found in measure_part(options.spec, params, options.device):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
