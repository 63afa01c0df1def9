"""From what a command line names to facts and a plan: a target, a saved graph, or a plan file.

Torch is imported where something is traced or measured, and not before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import typer

from offplan.budget import Aim, CurvePoint, Elsewhere, JointPoint, of_bytes
from offplan.decide import Decisions
from offplan.doors import is_trace, no_model
from offplan.eligibility import RuleSet
from offplan.errors import UsageError
from offplan.graph import Compiler, GraphFacts, Partitioner, TargetRef, load_graph
from offplan.kept import keep_graph
from offplan.options import GRAPH_SUFFIX, parse_params
from offplan.outside import check_target
from offplan.plan import ACTIONS, Plan, load_plan
from offplan.progress import Progress
from offplan.recompute import Choice
from offplan.report import Timing

# Points of the budget curve: with --budgets, and where no budget is given.
MANY_BUDGETS, FEW_BUDGETS = 17, 6


@dataclass(frozen=True)
class Request:
    """A target and how to trace it, as the command line gave them."""

    target: str
    params: list[str]
    device: str
    gpu: str | None
    attention: str | None
    compiler: Compiler
    partitioner: Partitioner


def plan_of(request: Request, rules: RuleSet, min_bytes: int) -> Plan:
    if Path(request.target).suffix in (".yaml", ".yml"):
        _refuse_params(request, "a plan file")
        return load_plan(Path(request.target))
    return analyzed(request, rules, min_bytes, Aim(actions=ACTIONS)).plan


def source_of(
    target: str, params: list[str], typed: str | None = None, command: str = "run"
) -> Plan | TargetRef:
    """What ``command`` replays: a plan, or a target to plan for.

    ``typed`` is the plan's target, where the user typed that beside the plan
    (``offplan.outside``).
    """
    if Path(target).suffix in (".yaml", ".yml"):
        if params:
            raise UsageError(f"{target} is a plan file, so it takes no -p")
        plan = load_plan(Path(target))
        if is_trace(plan.target.spec):
            raise no_model(plan.target.spec)
        note = check_target(Path(target), plan, typed, command)
        if note:
            typer.echo(f"note: {note}", err=True)
        return plan
    if typed is not None:
        raise UsageError(f"--target is for plan files, and {target} is none")
    if is_trace(target):
        raise no_model(target)
    if target.endswith(GRAPH_SUFFIX):
        raise UsageError(
            f"{target} is a saved graph, and a replay needs the model",
            fix="name the target or a plan of it",
        )
    return TargetRef(target, parse_params(params))


@dataclass(frozen=True)
class Analysis:
    facts: GraphFacts
    plan: Plan
    timing: Timing | None
    curve: tuple[CurvePoint, ...] = ()
    joint_curve: tuple[JointPoint, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()


def analyzed(
    request: Request,
    rules: RuleSet,
    min_bytes: int,
    aim: Aim,
    points: int = 0,
    *,
    measured: bool = False,
) -> Analysis:
    """The plan, and ``points`` budgets of the curve; with op times ``measured`` on the device."""
    if measured:
        _check_can_measure(request)
    with Progress() as progress:
        facts, seconds, under = step_of(request, progress)
        if measured:
            aim = replace(aim, op_ms=_measured_times(facts, progress))
        progress.phase("analysis")
        # What the search asks of the compiler counts as lowering, too.
        seconds = dict(seconds)
        start = time.perf_counter()
        decisions = Decisions(facts, rules, min_bytes, aim, under)
        plan = decisions.plan(aim.budget)
        # For commands that look into the plan, and would have to trace again.
        for each in {id(found): found for found in (facts, decisions.facts_of(plan))}.values():
            keep_graph(each)
        timing = _timing(seconds, time.perf_counter() - start)
        if not points:
            return Analysis(facts, plan, timing)
        if points < MANY_BUDGETS or "recompute" not in aim.actions:
            return Analysis(facts, plan, timing, curve=decisions.curve(points))
        joint_curve = decisions.joint_curve(points)
        budget = aim.budget or of_bytes(joint_curve[len(joint_curve) // 2].limit_bytes)
        return Analysis(
            facts, plan, timing, joint_curve=joint_curve, elsewhere=decisions.elsewhere(budget)
        )


def _check_can_measure(request: Request) -> None:
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


class Step(NamedTuple):
    """A traced step: the seconds that took, and the facts of other choices of what runs again."""

    facts: GraphFacts
    seconds: dict[str, float]
    under: Callable[[Sequence[Choice]], GraphFacts] | None


def step_of(request: Request, progress: Progress) -> Step:
    if request.target.endswith(GRAPH_SUFFIX):
        _refuse_params(request, "a saved graph")
        _refuse_trace_options(request)
        return Step(load_graph(Path(request.target)), {}, None)
    if Path(request.target).suffix in (".yaml", ".yml"):
        raise UsageError(
            f"{request.target} is not a target: plans are read by gate",
            fix=f"offplan gate {request.target} --max-alias-skipped 0",
        )
    if request.device == "cpu" and (request.attention or request.gpu):
        option = "--attention" if request.attention else "--gpu"
        raise UsageError(f"{option} is about CUDA kernels, so it needs --device cuda")
    progress.phase("starting torch")
    if is_trace(request.target):
        return _traced_before(request, progress)
    from offplan.trace.capture import Clock, TraceOptions, traced

    options = TraceOptions(
        request.device, request.gpu, request.attention, request.partitioner, request.compiler
    )
    clock = Clock(on_phase=progress.phase)
    step = traced(request.target, parse_params(request.params), options, clock)
    return Step(step.facts, clock.seconds, step.under)


def _traced_before(request: Request, progress: Progress) -> Step:
    """The graphs of a run that torch traced itself."""
    given = (request.attention, request.partitioner)
    if given != (None, "min-cut"):
        raise UsageError(
            f"{request.target} is a trace of a real run: it takes no --attention, --partitioner"
        )
    from offplan.doors.torch_trace import read_trace

    progress.phase("reading the trace")
    return Step(read_trace(request.target, parse_params(request.params), request.gpu), {}, None)


def _timing(seconds: dict[str, float], analysis_s: float) -> Timing | None:
    if not seconds:
        return None
    build_s, capture_s = seconds.get("build", 0.0), seconds.get("capture", 0.0)
    lower_s = seconds.get("lower", 0.0)
    return Timing(build_s, capture_s, seconds.get("partition", 0.0), analysis_s, lower_s)


def _refuse_params(request: Request, what: str) -> None:
    if request.params:
        raise UsageError(f"{request.target} is {what}, so it takes no -p")


def _refuse_trace_options(request: Request) -> None:
    given = (request.gpu, request.attention, request.compiler, request.partitioner)
    if given != (None, None, "aot_eager", "min-cut"):
        raise UsageError(
            f"{request.target} is traced already: it takes no --gpu, --attention, --compiler, "
            "--partitioner"
        )
