"""The command ``offplan diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from offplan.diff import diff as difference_of
from offplan.options import reports_errors, width
from offplan.plan import load_plan
from offplan.report.diff import DEFAULT_TOP, render_diff


@reports_errors
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A plan file.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The plan to compare with it.")],
    format: Annotated[
        Literal["text", "json", "markdown"], typer.Option(help="How to print the differences.")
    ] = "text",
    top: Annotated[
        int, typer.Option(metavar="N", min=1, help="Rows of each kind, alike layers being one.")
    ] = DEFAULT_TOP,
    exit_code: Annotated[
        bool,
        typer.Option("--exit-code", help="Exit 3 if storages, verdicts or the ledger differ."),
    ] = False,
) -> None:
    """Say what changed from one plan to another: storages, verdicts, ledger, peak, settings.

    Storages are compared by module path, op and shape, so that plans of two torch versions,
    partitioners, budgets or shapes can be. Needs neither torch nor the graphs.
    """
    difference = difference_of(load_plan(old), load_plan(new))
    typer.echo(render_diff(difference, format, width(), top), nl=False)
    if exit_code and difference.differs:
        raise typer.Exit(3)
