"""The command ``offplan gate``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from offplan import gate as gates
from offplan.eligibility import DEFAULT_RULES
from offplan.errors import UsageError
from offplan.files import FileKind, check_writable, write_atomically
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
    reports_errors,
    width,
)
from offplan.plan import load_plan
from offplan.report import GATE_FORMATS, render_gate
from offplan.report.findings import Checkout
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
    max_peak: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most that the predicted peak of the plan may be."),
    ] = None,
    param: Params = None,
    device: Device = "cuda",
    gpu: GpuName = None,
    attention: Attention = None,
    compiler: CompilerName = "aot_eager",
    partitioner: PartitionerName = "min-cut",
    min_size: MinSize = DEFAULT_MIN_SIZE,
    format: Annotated[
        Literal["text", "json", "markdown", "github", "gitlab", "junit", "sarif"],
        typer.Option(help="How to print the result; github prints annotations."),
    ] = "text",
    report: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMAT=FILE", help="Also write the result to a file, as junit=gate.xml."
        ),
    ] = None,
) -> None:
    """Fail (exit 3) if a plan skips more bytes than allowed, or its peak is too high.

    Thresholds not given here are read from [tool.offplan] in pyproject.toml. With --format github
    the report is also appended to the file that GITHUB_STEP_SUMMARY names.
    """
    given = gates.Thresholds(
        max_alias_skipped=None if max_alias_skipped is None else parse_size(max_alias_skipped),
        max_skipped=dict(gates.parse_max_skipped(text) for text in max_skipped or []),
        rules=rules,
        baseline=baseline,
        max_growth=None if max_growth is None else gates.parse_growth(max_growth),
        max_peak=None if max_peak is None else parse_size(max_peak),
    )
    thresholds = given.or_else(gates.read_config(Path.cwd()))
    reports = tuple(_report_file(text) for text in report or [])
    old = None if thresholds.baseline is None else load_plan(thresholds.baseline)
    request = Request(target, param or [], device, gpu, attention, compiler, partitioner)
    plan = plan_of(request, thresholds.rules or DEFAULT_RULES, parse_size(min_size))
    result = gates.check(plan, thresholds, thresholds.rules, old)
    places = Checkout.around(Path.cwd(), gated=target)
    for each in reports:
        text = render_gate(result, each.format, width(), places)
        write_atomically(each.path, text.encode(), each.kind)
    typer.echo(render_gate(result, format, width(), places), nl=False)
    if format == "github":
        _add_step_summary(render_gate(result, "markdown"))
    for each in reports:
        typer.echo(f"wrote {each.path}", err=True)
    if not result.ok:
        raise typer.Exit(3)


class _ReportFile(NamedTuple):
    format: str
    path: Path
    kind: FileKind


def _report_file(text: str) -> _ReportFile:
    """``FORMAT=FILE``, if it can be written: a trace can take a minute."""
    format, separator, name = text.partition("=")
    if not separator or not name or format not in GATE_FORMATS:
        raise UsageError(
            f"--report {text}: not FORMAT=FILE",
            fix=f"for example junit=gate.xml; formats: {', '.join(GATE_FORMATS)}",
        )
    kind = FileKind(f"a report by offplan gate --report {format}=", GATE_FORMATS[format])
    check_writable(Path(name), kind)
    return _ReportFile(format, Path(name), kind)


def _add_step_summary(markdown: str) -> None:
    """Append to the page of a GitHub job, if this runs in one."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return
    try:
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(f"{markdown}\n")
    except OSError as error:
        # The answer is on stdout all the same.
        typer.echo(f"note: no step summary: cannot write {name}: {error.strerror}", err=True)
