"""The command ``offplan run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from offplan import gate as gates
from offplan.files import check_writable
from offplan.measured import MEASURED_FILE, write_measurement
from offplan.options import (
    DEFAULT_PLAN,
    ActionsText,
    BudgetText,
    HostBudget,
    NamedTarget,
    OpTimes,
    Params,
    Pin,
    ProfileText,
    Rules,
    budget_of,
    profile_of,
    reports_errors,
    width,
)
from offplan.plan import given_actions
from offplan.progress import Progress
from offplan.report.run import render_run, run_report
from offplan.requests import source_of
from offplan.units import parse_size


@reports_errors
def run(
    target: Annotated[
        str,
        typer.Argument(metavar="[PLAN or TARGET]", help="A plan file, or a target to plan for."),
    ] = str(DEFAULT_PLAN),
    param: Params = None,
    named: NamedTarget = None,
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
        budget=budget_of(budget),
        actions=None if actions is None else given_actions(actions),
        rules=rules,
        compare=compared,
        verify=verify,
        profile=profile_of(profile),
        host_budget_bytes=host_bytes,
        measured_op_times=op_times == "measured",
        pin=pin,
    )
    options = RunOptions(steps, repeat, verify, host_bytes, pin, engine)
    if output is not None:
        check_writable(output, MEASURED_FILE)
    with Progress() as progress:
        replays = plans_to_replay(source_of(target, param or [], named), wanted, progress.phase)
        measurement = measure(replays, options, progress.phase)
    if output is not None:
        write_measurement(output, measurement)
    typer.echo(render_run(run_report(measurement), format, width()), nl=False)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)
    if not measurement.ok:
        raise typer.Exit(3)
