"""The command ``offplan analyze``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from offplan.budget import Aim
from offplan.eligibility import DEFAULT_RULES
from offplan.errors import UsageError
from offplan.files import GRAPH_FILE, PLAN_FILE, check_writable, write_atomically
from offplan.graph import save_graph
from offplan.memory import Conditions
from offplan.options import (
    DEFAULT_MIN_SIZE,
    DEFAULT_PLAN,
    GRAPH_SUFFIX,
    ActionsText,
    Attention,
    BudgetText,
    CompilerName,
    Device,
    GpuName,
    HostBudget,
    MinSize,
    OpTimes,
    Params,
    PartitionerName,
    ProfileText,
    Rules,
    actions_of,
    budget_of,
    check_graph_name,
    profile_of,
    reports_errors,
    width,
)
from offplan.plan import write_plan
from offplan.report import analyze_report, render_analyze
from offplan.requests import FEW_BUDGETS, MANY_BUDGETS, Request, analyzed
from offplan.units import parse_size


@reports_errors
def analyze(
    target: Annotated[
        str,
        typer.Argument(
            help="model.py, model.py:factory, package.module:factory, hf:CONFIG, timm:NAME, "
            "trace:FOLDER (of TORCH_TRACE), or a saved *.graph.json."
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
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw memory over time, and the copies below it.")
    ] = False,
) -> None:
    """Trace TARGET, report what it saves and what may leave the device, write the plan."""
    aim = Aim(
        budget=budget_of(budget),
        host_bytes=None if host_budget is None else parse_size(host_budget),
        conditions=Conditions(optimizer, accumulate, expandable_segments),
        profile=profile_of(profile),
        actions=actions_of(actions),
    )
    min_bytes = parse_size(min_size)
    request = Request(target, param or [], device, gpu, attention, compiler, partitioner)
    # A trace can take a minute: what would fail at its end is refused at its beginning.
    if str(output) == "-":
        raise UsageError("-o names a file; the report on stdout is chosen by --format")
    if plot and format != "text":
        raise UsageError(f"--plot is drawn in text, and --format is {format}")
    check_writable(output, PLAN_FILE)
    if graph is not None:
        check_graph_name(graph)
        check_writable(graph, GRAPH_FILE)
    points = MANY_BUDGETS if budgets else FEW_BUDGETS if aim.budget is None else 0
    found = analyzed(
        request, rules or DEFAULT_RULES, min_bytes, aim, points, measured=op_times == "measured"
    )
    if graph is not None:
        write_atomically(graph, save_graph(found.facts), GRAPH_FILE)
    write_plan(output, found.plan)
    report = analyze_report(
        found.plan, found.timing, top, found.curve, found.joint_curve, found.elsewhere
    )
    typer.echo(render_analyze(report, format, width()), nl=False)
    if plot:
        # Not at once: most analyses draw nothing.
        from offplan.charted import charts_of, opened_of
        from offplan.plotted import plotted

        charts = charts_of(opened_of(found.plan, found.facts), aim.profile)
        typer.echo(f"\n{plotted(charts, found.plan.budget)}", nl=False)
    for path in (graph, output):
        if path is not None:
            typer.echo(f"wrote {path}", err=True)
