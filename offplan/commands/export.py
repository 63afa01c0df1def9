"""The command ``offplan export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offplan.errors import UsageError
from offplan.export import Format, LeftOut, export_plan
from offplan.files import write_atomically
from offplan.graph import load_graph
from offplan.options import DEFAULT_PLAN, GRAPH_SUFFIX, ShowTraceback, reports_errors
from offplan.plan import load_plan
from offplan.units import format_binary

# How many storages that an export leaves out are said one by one.
MANY_LEFT_OUT = 12


@reports_errors
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
