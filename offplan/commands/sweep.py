"""The command ``offplan sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from offplan.budget import Aim
from offplan.eligibility import DEFAULT_RULES
from offplan.errors import UsageError
from offplan.files import FileKind, check_writable, write_atomically
from offplan.memory import Conditions
from offplan.options import (
    DEFAULT_MIN_SIZE,
    ActionsText,
    Attention,
    BudgetText,
    CompilerName,
    Device,
    GpuName,
    HostBudget,
    MinSize,
    Params,
    PartitionerName,
    ProfileText,
    Rules,
    actions_of,
    budget_of,
    parse_params,
    profile_of,
    reports_errors,
    width,
)
from offplan.plotted import has_colours
from offplan.progress import Progress
from offplan.report.document import counted
from offplan.report.sweep import render_sweep
from offplan.requests import Request
from offplan.sweep import Axis, Point, Sweep, ascending, axes_of, combinations
from offplan.units import parse_size
from offplan.workers import Task, default_jobs, grid, lines, workers

# A result of any format is replaced by one of another.
_ANY = FileKind("a sweep", b"")


@reports_errors
def sweep(
    target: Annotated[str, typer.Argument(help="As for analyze.")],
    param: Params = None,
    budget: BudgetText = None,
    largest: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Find the largest value of this parameter that fits, by bisection."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Traces at a time; by cores and free memory if not given."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Trace and plan all of it, whatever was kept.")
    ] = False,
    device: Device = "cuda",
    gpu: GpuName = None,
    attention: Attention = None,
    compiler: CompilerName = "aot_eager",
    partitioner: PartitionerName = "min-cut",
    rules: Rules = None,
    min_size: MinSize = DEFAULT_MIN_SIZE,
    actions: ActionsText = None,
    profile: ProfileText = None,
    host_budget: HostBudget = None,
    optimizer: Annotated[
        Literal["none", "sgd", "adamw", "adafactor"],
        typer.Option(help="Count the state of this optimizer."),
    ] = "none",
    accumulate: Annotated[
        bool, typer.Option("--accumulate", help="Gradients of an earlier micro-step are there.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Also write it: .json, .csv or .md."),
    ] = None,
    format: Annotated[
        Literal["text", "json", "csv", "markdown"], typer.Option(help="How to print the result.")
    ] = "text",
) -> None:
    """Try values of TARGET's parameters: what fits the budget, and at what step time.

    -p batch=1..16 -p seq=2048,4096 tries all of them (also 2..16:2, every second, and 1..64*2, each
    twice the last).  What was traced and planned is kept, so that a sweep goes on where it was
    stopped.  Exit code 3 if nothing fits.
    """
    axes, fixed = axes_of(parse_params(param or []))
    if not axes:
        raise UsageError("there is nothing to sweep over", fix="for example: -p batch=1..16")
    along = None if largest is None else _axis(axes, largest)
    if along is not None and budget is None:
        raise UsageError("--largest needs a --budget to fit")
    as_file = None if output is None else _format_of(output)
    if output is not None:
        check_writable(output, _ANY)
    task = Task(
        Request(target, [], device, gpu, attention, compiler, partitioner),
        fixed,
        rules or DEFAULT_RULES,
        parse_size(min_size),
        Aim(
            budget=budget_of(budget),
            host_bytes=None if host_budget is None else parse_size(host_budget),
            conditions=Conditions(optimizer, accumulate),
            profile=profile_of(profile),
            actions=actions_of(actions),
        ),
        again,
    )
    done: list[Point] = []
    try:
        found = _swept(task, axes, along, budget or "", jobs or default_jobs(), done)
    except KeyboardInterrupt:
        points = tuple(sorted(done, key=lambda point: _place(axes, point)))
        if output is not None and as_file is not None and points:
            part = Sweep(target, axes, budget or "", points)
            write_atomically(output, render_sweep(part, as_file).encode(), _ANY)
            typer.echo(f"wrote {output}", err=True)
        if points:
            typer.echo(f"{counted(len(points), 'point')} done: the same command goes on", err=True)
        raise
    typer.echo(render_sweep(found, format, width(), color=has_colours()), nl=False)
    if output is not None and as_file is not None:
        write_atomically(output, render_sweep(found, as_file).encode(), _ANY)
        typer.echo(f"wrote {output}", err=True)
    if not found.ok:
        raise typer.Exit(3)


def _place(axes: tuple[Axis, ...], point: Point) -> tuple[int, ...]:
    return tuple(axis.values.index(point.params[axis.name]) for axis in axes)


def _swept(
    task: Task,
    axes: tuple[Axis, ...],
    along: Axis | None,
    budget: str,
    jobs: int,
    done: list[Point],
) -> Sweep:
    """The sweep; ``done`` takes its points as they come."""
    with Progress() as progress:

        def note(point: Point) -> None:
            done.append(point)
            words = " ".join(f"{name}={value}" for name, value in point.params.items())
            progress.phase(f"{len(done)} of {most}: {words} {point.outcome}")

        most = len(combinations(axes)) if along is None else f"at most {len(combinations(axes))}"
        progress.phase(f"0 of {most}")
        with workers(task, jobs, note) as ask:
            if along is None:
                return Sweep(task.request.target, axes, budget, grid(axes, ask, jobs))
            others = tuple(axis for axis in axes if axis.name != along.name)
            points, largest = lines(others, ascending(along), ask, jobs)
            return Sweep(task.request.target, axes, budget, points, along.name, largest)


def _axis(axes: tuple[Axis, ...], name: str) -> Axis:
    for axis in axes:
        if axis.name == name:
            return axis
    listed = ", ".join(axis.name for axis in axes)
    raise UsageError(f"--largest {name}: not swept over", fix=f"one of: {listed}")


def _format_of(path: Path) -> str:
    found = {".json": "json", ".csv": "csv", ".md": "markdown"}.get(path.suffix)
    if found is None:
        raise UsageError(f"-o {path}: its name says no format", fix="end it in .json, .csv or .md")
    return found
