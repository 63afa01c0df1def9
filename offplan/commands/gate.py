"""The command ``offplan gate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from offplan import gate as gates
from offplan.eligibility import DEFAULT_RULES
from offplan.options import (
    DEFAULT_MIN_SIZE,
    DEFAULT_PLAN,
    Attention,
    CompilerName,
    Device,
    GpuName,
    MinSize,
    Params,
    PartitionerName,
    Rules,
    ShowTraceback,
    reports_errors,
    width,
)
from offplan.plan import load_plan
from offplan.report import render_gate
from offplan.requests import Request, plan_of
from offplan.units import parse_size


@reports_errors
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
    request = Request(target, param or [], device, gpu, attention, compiler, partitioner)
    plan = plan_of(request, thresholds.rules or DEFAULT_RULES, parse_size(min_size))
    result = gates.check(plan, thresholds, thresholds.rules, old)
    typer.echo(render_gate(result, format, width()), nl=False)
    if not result.ok:
        raise typer.Exit(3)
