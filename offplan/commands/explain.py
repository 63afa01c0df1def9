"""The command ``offplan explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from offplan.budget import Aim, Elsewhere, of_bytes
from offplan.costs import DeviceProfile
from offplan.errors import PlanError, UsageError
from offplan.explain import explain as explained
from offplan.opened import Opened, open_plan, profile_of
from offplan.options import DEFAULT_PLAN, ProfileText, reports_errors, width
from offplan.options import profile_of as given_profile
from offplan.plan import analyze_command
from offplan.progress import Progress
from offplan.report.explain import render_explanation


@reports_errors
def explain(
    plan: Annotated[Path, typer.Argument(metavar="[PLAN]", help="A plan file.")] = DEFAULT_PLAN,
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="A storage (#123), module path or pattern of one, op, parameter, or file:line; "
            "without one, the largest.",
        ),
    ] = "",
    format: Annotated[Literal["text", "json", "markdown"], typer.Option(help="Format.")] = "text",
    top: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many rows of the largest to show.")
    ] = 12,
    graph: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The plan's graphs, where they are not found by name."),
    ] = None,
    profile: ProfileText = None,
    elsewhere: Annotated[
        bool,
        typer.Option(
            "--elsewhere",
            help="Plan again for the same peak with a link twice as fast, and a GPU half as fast.",
        ),
    ] = False,
) -> None:
    """Say what a plan does with a storage and why: who holds it, what would unlock it, and what
    moving it or keeping it would do to the peak and the step."""
    opened = open_plan(plan, graph)
    rates = profile_of(opened.plan, given_profile(profile))
    others = _elsewhere(opened, rates) if elsewhere else ()
    found = explained(opened, name, rates, others)
    typer.echo(render_explanation(found, format, width(), top), nl=False)


def _elsewhere(opened: Opened, rates: DeviceProfile | None) -> tuple[Elsewhere, ...]:
    """New plans for the plan's peak, on other machines."""
    # Planning is needed here only, and slow to import.
    from offplan.decide import Decisions

    plan = opened.plan
    predicted = plan.predicted
    if plan.budget is None:
        raise UsageError(
            "--elsewhere plans for the same peak, and this plan was made for none",
            fix="analyze with --budget",
        )
    if opened.base is None:
        raise PlanError(
            "--elsewhere plans from the plan's graphs, which are not here",
            fix=f"{analyze_command(plan)} --graph FILE.graph.json, and name them with --graph",
        )
    aim = Aim(
        host_bytes=predicted.host_budget,
        conditions=predicted.conditions,
        profile=rates,
        actions=plan.actions,
    )
    with Progress() as progress:
        progress.phase("planning for other machines")
        decisions = Decisions(opened.base, plan.rules, plan.min_bytes, aim)
        # What everything away comes to is the peak to keep.
        limit = plan.budget or decisions.joint.base.with_band(predicted.plan.peak_bytes)
        return decisions.elsewhere(of_bytes(limit))
