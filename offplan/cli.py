"""The ``offplan`` command: read options, call one function, print, map errors to exit codes.

Exit codes: 0 fine, 1 error, 2 usage, 3 the answer is no, 130 interrupted.  Results go to stdout,
everything else to stderr.  Torch is imported inside the commands that trace: ``--help`` and
``gate`` on a plan file start without it.
"""

from __future__ import annotations

import functools
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

import offplan
from offplan import gate as gates
from offplan.budget import (
    Action,
    Aim,
    Budget,
    CurvePoint,
    Elsewhere,
    JointPoint,
    of_bytes,
    parse_budget,
)
from offplan.costs import PROFILE_FILE, DeviceProfile, find_profile, save_profile
from offplan.decide import Decisions
from offplan.eligibility import DEFAULT_MIN_BYTES, DEFAULT_RULES, RuleSet
from offplan.errors import OffplanError, UsageError
from offplan.export import Format, LeftOut, export_plan
from offplan.files import GRAPH_FILE, PLAN_FILE, check_writable, write_atomically
from offplan.graph import Compiler, GraphFacts, Partitioner, TargetRef, load_graph, save_graph
from offplan.measured import MEASURED_FILE, HostLimits, write_measurement
from offplan.memory import Conditions
from offplan.plan import ACTIONS, Plan, given_actions, load_plan, write_plan
from offplan.progress import Progress
from offplan.recompute import Choice
from offplan.report import Timing, analyze_report, render_analyze, render_gate
from offplan.report.device import render_device, render_host
from offplan.report.run import render_run, run_report
from offplan.units import format_binary, parse_size

DEFAULT_PLAN = Path("offplan.plan.yaml")
DEFAULT_MIN_SIZE = format_binary(DEFAULT_MIN_BYTES)
GRAPH_SUFFIX = ".graph.json"
# Points of the budget curve: with --budgets, and where no budget is given.
MANY_BUDGETS, FEW_BUDGETS = 17, 6
# How many storages that an export leaves out are said one by one.
MANY_LEFT_OUT = 12

app = typer.Typer(
    name="offplan",
    help="Plan which activations of a PyTorch training step leave the GPU. Analysis needs no GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Entry point of the ``offplan`` command."""
    app()


def _reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print a deliberate error as one message, and end with its exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        show_traceback = bool(kwargs.pop("traceback_", False))
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except OffplanError as error:
            _fail(str(error), error.exit_code, show_traceback)
        except KeyboardInterrupt:
            _fail("interrupted", 130, show_traceback)
        except BrokenPipeError:
            # The reader (head, less) has what it wanted; closing keeps Python from flushing again.
            sys.stderr.close()
            raise typer.Exit(0) from None
        except Exception as error:
            _fail(
                f"offplan failed: {type(error).__name__}: {error}\n"
                "  try: run again with --traceback, and report what it prints",
                1,
                show_traceback,
            )

    return run


def _fail(message: str, exit_code: int, show_traceback: bool) -> None:
    if show_traceback:
        traceback.print_exc()
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(exit_code)


# --- options --------------------------------------------------------------------------------------

Params = Annotated[
    list[str] | None,
    typer.Option("-p", "--param", metavar="KEY=VALUE", help="A parameter of the factory."),
]
Device = Annotated[
    Literal["cuda", "cpu"], typer.Option(help="Device to trace for; cuda needs no GPU.")
]
GpuName = Annotated[
    str | None,
    typer.Option("--gpu", help="GPU to trace for: h200 (default), h100, a100, l40s, rtx4090, ..."),
]
Attention = Annotated[
    Literal["flash", "cudnn", "efficient", "math"] | None,
    typer.Option(help="Attention kernel to trace, in place of the one that the GPU would choose."),
]
CompilerName = Annotated[
    Literal["aot_eager", "inductor"],
    typer.Option(
        help="What compiles the graphs: AOTAutograd alone, or Inductor, whose passes run."
    ),
]
PartitionerName = Annotated[
    Literal["min-cut", "default"], typer.Option(help="Which AOTAutograd partitioner to use.")
]
Rules = Annotated[
    Literal["no-view", "last-holder", "whole-storage"] | None,
    typer.Option(help=f"Rule set; {DEFAULT_RULES} if not given."),
]
MinSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Storages under this size stay on the device.")
]
BudgetText = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE|N%|auto|floor|0",
        help="The peak to stay within; 0 moves everything movable; without one nothing moves.",
    ),
]
ActionsText = Annotated[
    str | None,
    typer.Option(
        "--actions",
        metavar="ACTION,ACTION",
        help="What may be done with what is saved: keep, and any of recompute and offload; all of "
        "them if not given.",
    ),
]
ProfileText = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE|NAME",
        help="Rates of the GPU and its link: a file by offplan device, or a GPU's name.",
    ),
]
OpTimes = Annotated[
    Literal["roofline", "measured"],
    typer.Option(help="Op times from the profile, or measured on the GPU (cached by shape)."),
]
HostBudget = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most host memory that may be taken.")
]
Pin = Annotated[
    Literal["register", "torch", "off", "auto"],
    typer.Option(
        help="How host memory is pinned: pages of our own, torch's allocator, not at all, or the "
        "first of them that works."
    ),
]
ShowTraceback = Annotated[
    bool, typer.Option("--traceback", help="Print a Python traceback with an error.")
]


@dataclass(frozen=True)
class _Request:
    """A target and how to trace it, as the command line gave them."""

    target: str
    params: list[str]
    device: str
    gpu: str | None
    attention: str | None
    compiler: Compiler
    partitioner: Partitioner


def _version(show: bool) -> None:
    if show:
        typer.echo(f"offplan {offplan.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# --- commands -------------------------------------------------------------------------------------


@app.command()
@_reports_errors
def analyze(
    target: Annotated[
        str,
        typer.Argument(
            help="model.py, model.py:factory, package.module:factory, or a saved *.graph.json."
        ),
    ],
    param: Params = None,
    device: Device = "cuda",
    gpu: GpuName = None,
    attention: Attention = None,
    compiler: CompilerName = "aot_eager",
    partitioner: PartitionerName = "min-cut",
    rules: Rules = None,
    min_size: MinSize = DEFAULT_MIN_SIZE,
    budget: BudgetText = None,
    actions: ActionsText = None,
    budgets: Annotated[
        bool, typer.Option("--budgets", help="Show what every budget would cost.")
    ] = False,
    profile: ProfileText = None,
    op_times: OpTimes = "roofline",
    host_budget: HostBudget = None,
    optimizer: Annotated[
        Literal["none", "sgd", "adamw", "adafactor"],
        typer.Option(help="Count the state of this optimizer."),
    ] = "none",
    accumulate: Annotated[
        bool, typer.Option("--accumulate", help="Gradients of an earlier micro-step are there.")
    ] = False,
    expandable_segments: Annotated[
        bool, typer.Option(help="Predict reserved bytes for expandable_segments:True.")
    ] = False,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write the plan.")
    ] = DEFAULT_PLAN,
    graph: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Also write the traced graphs (*{GRAPH_SUFFIX})."),
    ] = None,
    format: Annotated[
        Literal["text", "json", "markdown"], typer.Option(help="How to print the report.")
    ] = "text",
    top: Annotated[int, typer.Option(min=1, help="How many of the largest storages to list.")] = 12,
    traceback_: ShowTraceback = False,
) -> None:
    """Trace TARGET, report what it saves and what may leave the device, write the plan."""
    aim = Aim(
        budget=_parse_budget(budget),
        host_bytes=None if host_budget is None else parse_size(host_budget),
        conditions=Conditions(optimizer, accumulate, expandable_segments),
        profile=_profile(profile),
        actions=_actions(actions),
    )
    min_bytes = parse_size(min_size)
    request = _Request(target, param or [], device, gpu, attention, compiler, partitioner)
    # A trace can take a minute: what would fail at its end is refused at its beginning.
    if str(output) == "-":
        raise UsageError("-o names a file; the report on stdout is chosen by --format")
    check_writable(output, PLAN_FILE)
    if graph is not None:
        _check_graph_name(graph)
        check_writable(graph, GRAPH_FILE)
    points = MANY_BUDGETS if budgets else FEW_BUDGETS if aim.budget is None else 0
    found = _analyzed(
        request, rules or DEFAULT_RULES, min_bytes, aim, points, measured=op_times == "measured"
    )
    if graph is not None:
        write_atomically(graph, save_graph(found.facts), GRAPH_FILE)
    write_plan(output, found.plan)
    report = analyze_report(
        found.plan, found.timing, top, found.curve, found.joint_curve, found.elsewhere
    )
    typer.echo(render_analyze(report, format, _width()), nl=False)
    for path in (graph, output):
        if path is not None:
            typer.echo(f"wrote {path}", err=True)


@app.command()
@_reports_errors
def gate(
    target: Annotated[
        str,
        typer.Argument(metavar="[PLAN or TARGET]", help="A plan file, or a target to analyze."),
    ] = str(DEFAULT_PLAN),
    max_alias_skipped: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most bytes that may be skipped under `alias`."),
    ] = None,
    max_skipped: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE=SIZE", help="The same for another rule; repeatable."),
    ] = None,
    rules: Rules = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="PLAN", help="An older plan; fail if more is skipped than in it."),
    ] = None,
    max_growth: Annotated[
        str | None,
        typer.Option(metavar="SIZE|N%", help="How much more than the baseline is fine."),
    ] = None,
    param: Params = None,
    device: Device = "cuda",
    gpu: GpuName = None,
    attention: Attention = None,
    compiler: CompilerName = "aot_eager",
    partitioner: PartitionerName = "min-cut",
    min_size: MinSize = DEFAULT_MIN_SIZE,
    format: Annotated[
        Literal["text", "json", "markdown", "github"],
        typer.Option(help="How to print the result; github prints annotations."),
    ] = "text",
    traceback_: ShowTraceback = False,
) -> None:
    """Fail (exit 3) if a plan skips more bytes than allowed.

    Thresholds not given here are read from [tool.offplan] in pyproject.toml.
    """
    given = gates.Thresholds(
        max_alias_skipped=None if max_alias_skipped is None else parse_size(max_alias_skipped),
        max_skipped=dict(gates.parse_max_skipped(text) for text in max_skipped or []),
        rules=rules,
        baseline=baseline,
        max_growth=None if max_growth is None else gates.parse_growth(max_growth),
    )
    thresholds = given.or_else(gates.read_config(Path.cwd()))
    old = None if thresholds.baseline is None else load_plan(thresholds.baseline)
    request = _Request(target, param or [], device, gpu, attention, compiler, partitioner)
    plan = _plan_of(request, thresholds.rules or DEFAULT_RULES, parse_size(min_size))
    result = gates.check(plan, thresholds, thresholds.rules, old)
    typer.echo(render_gate(result, format, _width()), nl=False)
    if not result.ok:
        raise typer.Exit(3)


@app.command()
@_reports_errors
def run(
    target: Annotated[
        str,
        typer.Argument(metavar="[PLAN or TARGET]", help="A plan file, or a target to plan for."),
    ] = str(DEFAULT_PLAN),
    param: Params = None,
    budget: BudgetText = None,
    actions: ActionsText = None,
    profile: ProfileText = None,
    op_times: OpTimes = "roofline",
    device: Annotated[
        Literal["cuda", "cpu"] | None,
        typer.Option(help="Where to replay; the plan's device if not given, cuda for a target."),
    ] = None,
    compiler: Annotated[
        Literal["aot_eager", "inductor"] | None,
        typer.Option(
            help="What compiles the graphs; the plan's compiler if not given, aot_eager for a "
            "target."
        ),
    ] = None,
    rules: Rules = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="RULES,RULES", help="Measure the plans of several rule sets."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure, after a warm-up.")] = 5,
    repeat: Annotated[
        bool, typer.Option("--repeat", help="Run once more without a plan: the noise of kernels.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Compare losses and gradients, bit for bit."),
    ] = True,
    host_budget: HostBudget = None,
    pin: Pin = "register",
    engine: Annotated[
        Literal["compiled", "hooks"],
        typer.Option(
            help="What moves: a replay of the plan, or eager training under saved-tensor hooks, "
            "measured beside it."
        ),
    ] = "compiled",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Also write the measurement (JSON)."),
    ] = None,
    format: Annotated[
        Literal["text", "json", "markdown"], typer.Option(help="How to print the report.")
    ] = "text",
    traceback_: ShowTraceback = False,
) -> None:
    """Replay a plan for real, next to no plan: peak, time, and whether every bit is the same.

    Exit code 3 if something is not the same, or the plan ran out of memory.
    """
    from offplan.replay.measure import RunOptions, Wanted, measure, plans_to_replay

    compared = tuple(gates.parse_rules(name) for name in compare.split(",")) if compare else ()
    host_bytes = None if host_budget is None else parse_size(host_budget)
    wanted = Wanted(
        device=device,
        compiler=compiler,
        budget=_parse_budget(budget),
        actions=None if actions is None else given_actions(actions),
        rules=rules,
        compare=compared,
        verify=verify,
        profile=_profile(profile),
        host_budget_bytes=host_bytes,
        measured_op_times=op_times == "measured",
        pin=pin,
    )
    options = RunOptions(steps, repeat, verify, host_bytes, pin, engine)
    if output is not None:
        check_writable(output, MEASURED_FILE)
    with Progress() as progress:
        replays = plans_to_replay(_source_of(target, param or []), wanted, progress.phase)
        measurement = measure(replays, options, progress.phase)
    if output is not None:
        write_measurement(output, measurement)
    typer.echo(render_run(run_report(measurement), format, _width()), nl=False)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)
    if not measurement.ok:
        raise typer.Exit(3)


@app.command()
@_reports_errors
def device(
    show: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROFILE]", help="Show a profile instead: a file, or a GPU's name (h100)."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Also write the profile (YAML)."),
    ] = None,
    pin: Pin = "register",
    host: Annotated[
        bool,
        typer.Option("--host", help="Show only what limits host memory; this needs no GPU."),
    ] = False,
    max_pin: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most host memory that is pinned, as a trial; 16GiB, or 1GiB without a GPU.",
        ),
    ] = None,
    format: Annotated[
        Literal["text", "json", "markdown"], typer.Option(help="How to print the profile.")
    ] = "text",
    traceback_: ShowTraceback = False,
) -> None:
    """Measure the GPU here: its link, pinning, compute, and whether copies and compute overlap.

    The profile is what plans for this GPU are made with: --profile FILE.  What limits the host
    memory that can be pinned is shown with it, or alone (--host).  Exit code 3 if copies and
    compute do not keep their order.
    """
    max_pin_bytes = None if max_pin is None else parse_size(max_pin)
    if max_pin_bytes == 0:
        raise UsageError(f"--max-pin {max_pin}: pinning nothing measures nothing")
    if host:
        if show is not None or output is not None:
            raise UsageError("--host is about this machine: it takes no PROFILE and writes none")
        typer.echo(render_host(_host_limits(max_pin_bytes), format, _width()), nl=False)
        return
    if output is not None:
        check_writable(output, PROFILE_FILE)
    limits: HostLimits | None = None
    if show is not None:
        found = find_profile(show)
    else:
        from offplan.replay.probe import measure_with_limits

        with Progress() as progress:
            found, limits = measure_with_limits(
                progress.phase, max_pin_bytes=max_pin_bytes, pin=pin
            )
    if output is not None:
        save_profile(output, found)
    typer.echo(render_device(found, format, _width(), limits), nl=False)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)
    if found.ordering_ok is False:
        raise typer.Exit(3)


@app.command()
@_reports_errors
def export(
    plan: Annotated[Path, typer.Argument(metavar="[PLAN]", help="A plan file.")] = DEFAULT_PLAN,
    to: Annotated[
        Format,
        typer.Option(
            "--to",
            help="A module that marks joint graphs for PyTorch's activation offloading, or with "
            "MUST_CPU_OFFLOAD tags; or a list of what moves.",
        ),
    ] = ...,  # type: ignore[assignment]
    graph: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"The plan's graphs (*{GRAPH_SUFFIX}): json names ops."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write; stdout if not given."),
    ] = None,
    traceback_: ShowTraceback = False,
) -> None:
    """Write what PLAN moves in a form that other runtimes take, and say what that leaves out."""
    if graph is not None and to != "json":
        raise UsageError(f"--graph names ops for --to json; --to {to} does not need it")
    facts = None if graph is None else load_graph(graph)
    exported = export_plan(load_plan(plan), to, facts)
    if output is not None:
        write_atomically(output, exported.text.encode(), exported.kind)
    else:
        typer.echo(exported.text, nl=False)
    _say_left_out(exported.left_out)
    size = format_binary(exported.moved_bytes)
    typer.echo(f"moves: {exported.moved_count} of {exported.planned_count}, {size}", err=True)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)


def _say_left_out(left_out: tuple[LeftOut, ...]) -> None:
    for each in left_out[:MANY_LEFT_OUT]:
        typer.echo(f"left out: {each}", err=True)
    more = left_out[MANY_LEFT_OUT:]
    if more:
        size = format_binary(sum(each.size_bytes for each in more))
        typer.echo(f"left out: {len(more)} more, {size}, as the file says", err=True)


def _host_limits(max_pin_bytes: int | None) -> HostLimits:
    from offplan.replay.probe import host_limits

    with Progress() as progress:
        return host_limits(progress.phase, max_pin_bytes=max_pin_bytes)


# --- from a request to a plan ---------------------------------------------------------------------


def _plan_of(request: _Request, rules: RuleSet, min_bytes: int) -> Plan:
    if Path(request.target).suffix in (".yaml", ".yml"):
        _refuse_params(request, "a plan file")
        return load_plan(Path(request.target))
    return _analyzed(request, rules, min_bytes, Aim(actions=ACTIONS)).plan


def _source_of(target: str, params: list[str]) -> Plan | TargetRef:
    """What ``run`` replays: a plan, or a target to plan for."""
    if Path(target).suffix in (".yaml", ".yml"):
        if params:
            raise UsageError(f"{target} is a plan file, so it takes no -p")
        return load_plan(Path(target))
    if target.endswith(GRAPH_SUFFIX):
        raise UsageError(
            f"{target} is a saved graph, and a replay needs the model",
            fix="name the target or a plan of it",
        )
    return TargetRef(target, _parse_params(params))


@dataclass(frozen=True)
class _Analysis:
    facts: GraphFacts
    plan: Plan
    timing: Timing | None
    curve: tuple[CurvePoint, ...] = ()
    joint_curve: tuple[JointPoint, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()


def _analyzed(
    request: _Request,
    rules: RuleSet,
    min_bytes: int,
    aim: Aim,
    points: int = 0,
    *,
    measured: bool = False,
) -> _Analysis:
    """The plan, and ``points`` budgets of the curve; with op times ``measured`` on the device."""
    if measured:
        _check_can_measure(request)
    with Progress() as progress:
        facts, seconds, under = _step_of(request, progress)
        if measured:
            aim = replace(aim, op_ms=_measured_times(facts, progress))
        progress.phase("analysis")
        # What the search asks of the compiler counts as lowering, too.
        seconds = dict(seconds)
        start = time.perf_counter()
        decisions = Decisions(facts, rules, min_bytes, aim, under)
        plan = decisions.plan(aim.budget)
        timing = _timing(seconds, time.perf_counter() - start)
        if not points:
            return _Analysis(facts, plan, timing)
        if points < MANY_BUDGETS or "recompute" not in aim.actions:
            return _Analysis(facts, plan, timing, curve=decisions.curve(points))
        joint_curve = decisions.joint_curve(points)
        budget = aim.budget or of_bytes(joint_curve[len(joint_curve) // 2].limit_bytes)
        return _Analysis(
            facts, plan, timing, joint_curve=joint_curve, elsewhere=decisions.elsewhere(budget)
        )


def _check_can_measure(request: _Request) -> None:
    if request.target.endswith(GRAPH_SUFFIX):
        raise UsageError(
            f"--op-times measured: {request.target} is a saved graph, and its ops cannot be run",
            fix="name the target",
        )
    from offplan.replay.measure import check_can_measure

    check_can_measure(request.compiler)


def _measured_times(facts: GraphFacts, progress: Progress) -> dict[str, float]:
    from offplan.replay.measure import op_times

    found, note = op_times(facts, on_phase=progress.phase)
    if note:
        typer.echo(f"note: {note}", err=True)
    return found


class _Step(NamedTuple):
    """A traced step: the seconds that took, and the facts of other choices of what runs again."""

    facts: GraphFacts
    seconds: dict[str, float]
    under: Callable[[Sequence[Choice]], GraphFacts] | None


def _step_of(request: _Request, progress: Progress) -> _Step:
    if request.target.endswith(GRAPH_SUFFIX):
        _refuse_params(request, "a saved graph")
        _refuse_trace_options(request)
        return _Step(load_graph(Path(request.target)), {}, None)
    if Path(request.target).suffix in (".yaml", ".yml"):
        raise UsageError(
            f"{request.target} is not a target: plans are read by gate",
            fix=f"offplan gate {request.target} --max-alias-skipped 0",
        )
    if request.device == "cpu" and (request.attention or request.gpu):
        option = "--attention" if request.attention else "--gpu"
        raise UsageError(f"{option} is about CUDA kernels, so it needs --device cuda")
    progress.phase("starting torch")
    from offplan.trace.capture import Clock, TraceOptions, traced

    options = TraceOptions(
        request.device, request.gpu, request.attention, request.partitioner, request.compiler
    )
    clock = Clock(on_phase=progress.phase)
    step = traced(request.target, _parse_params(request.params), options, clock)
    return _Step(step.facts, clock.seconds, step.under)


def _timing(seconds: dict[str, float], analysis_s: float) -> Timing | None:
    if not seconds:
        return None
    build_s, capture_s = seconds.get("build", 0.0), seconds.get("capture", 0.0)
    lower_s = seconds.get("lower", 0.0)
    return Timing(build_s, capture_s, seconds.get("partition", 0.0), analysis_s, lower_s)


def _refuse_params(request: _Request, what: str) -> None:
    if request.params:
        raise UsageError(f"{request.target} is {what}, so it takes no -p")


def _refuse_trace_options(request: _Request) -> None:
    given = (request.gpu, request.attention, request.compiler, request.partitioner)
    if given != (None, None, "aot_eager", "min-cut"):
        raise UsageError(
            f"{request.target} is traced already: it takes no --gpu, --attention, --compiler, "
            "--partitioner"
        )


def _check_graph_name(path: Path) -> None:
    if not path.name.endswith(GRAPH_SUFFIX):
        raise UsageError(
            f"--graph {path}: the name must end in {GRAPH_SUFFIX}, by which it is recognized",
            fix=f"--graph {path.with_suffix('')}{GRAPH_SUFFIX}",
        )


def _parse_params(texts: list[str]) -> dict[str, str]:
    params: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier():
            raise UsageError(f"-p {text}: not KEY=VALUE", fix="for example: -p batch=8")
        if key in params:
            raise UsageError(f"-p {key} is given twice")
        params[key] = value
    return params


def _parse_budget(text: str | None) -> Budget | None:
    return None if text is None else parse_budget(text)


def _actions(text: str | None) -> tuple[Action, ...]:
    return ACTIONS if text is None else given_actions(text)


def _profile(text: str | None) -> DeviceProfile | None:
    return None if text is None else find_profile(text)


def _width() -> int:
    return shutil.get_terminal_size(fallback=(80, 24)).columns
