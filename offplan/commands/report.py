"""The command ``offplan report``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from offplan.budget import NOMINAL, Aim, CurvePoint, Outlooks
from offplan.chart import chart
from offplan.charted import charts_of
from offplan.costs import DeviceProfile, profile_for
from offplan.errors import UsageError
from offplan.files import FileKind, check_writable, write_atomically
from offplan.graph import GraphFacts
from offplan.measured import load_measurement
from offplan.opened import Opened, open_plan, profile_of
from offplan.options import DEFAULT_PLAN, ProfileText, reports_errors
from offplan.options import profile_of as given_profile
from offplan.plan import Draft, Plan
from offplan.plotted import plotted
from offplan.report.embed import Drawn
from offplan.report.page import FIRST_LINE, Page, render_page
from offplan.units import format_size

PAGE_FILE = FileKind("a page by offplan report", FIRST_LINE.encode())
DEFAULT_PAGE = Path("offplan.report.html")

# Budgets of the curve.  Up to so many ops it takes a fraction of a second, and is always drawn.
_POINTS = 11
_FEW_OPS = 3000


@reports_errors
def report(
    plan: Annotated[Path, typer.Argument(metavar="[PLAN]", help="A plan file.")] = DEFAULT_PLAN,
    measured: Annotated[
        Path | None,
        typer.Argument(metavar="[MEASURED]", help="What offplan run -o measured of this plan."),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write the page.")
    ] = DEFAULT_PAGE,
    graph: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The plan's graphs, where they are not found by name."),
    ] = None,
    budgets: Annotated[
        bool,
        typer.Option("--budgets", help="Draw what every budget would cost, however long it takes."),
    ] = False,
    profile: ProfileText = None,
    plot: Annotated[
        bool,
        typer.Option("--plot", help="Draw the timeline in the terminal, and write no page."),
    ] = False,
) -> None:
    """Write one page for a browser: the memory timeline, every saved storage, the ledger.

    The page needs no network, and the command neither torch nor a GPU.
    """
    if plot:
        opened = open_plan(plan, graph)
        charts = charts_of(opened, given_profile(profile))
        typer.echo(plotted(charts, opened.plan.budget), nl=False)
        return
    if str(output) == "-":
        raise UsageError("-o names a file", fix=f"-o {DEFAULT_PAGE}")
    check_writable(output, PAGE_FILE)
    measurement = None if measured is None else load_measurement(measured)
    opened = open_plan(plan, graph)
    rates = profile_of(opened.plan, given_profile(profile))
    page = Page(
        plan=opened.plan,
        drawn=tuple(_drawn(opened, rates)),
        measured=measurement,
        curve=_curve(opened, rates, always=budgets),
        notes=(*opened.notes, *_notes(opened, rates)),
    )
    content = render_page(page).encode()
    write_atomically(output, content, PAGE_FILE)
    typer.echo(f"wrote {output} ({format_size(len(content))})", err=True)


def _drawn(opened: Opened, rates: DeviceProfile | None) -> Iterator[Drawn]:
    """The charts of no plan and of the plan, of the graphs that are there."""
    plan = opened.plan
    if opened.base is not None:
        yield _chart(plan, opened.base, rates, is_plan=False)
    if opened.facts is not None and (plan.transfers or plan.choices):
        yield _chart(plan, opened.facts, rates, is_plan=True)


def _chart(plan: Plan, facts: GraphFacts, rates: DeviceProfile | None, *, is_plan: bool) -> Drawn:
    transfers = plan.transfers if is_plan else ()
    # Memory does not depend on rates, and times by nominal ones are not shown.
    drawn = chart(facts, transfers, plan.predicted.conditions, rates or profile_for(NOMINAL))
    return Drawn(is_plan, drawn, rates is not None)


def _curve(opened: Opened, rates: DeviceProfile | None, *, always: bool) -> tuple[CurvePoint, ...]:
    """What budgets cost by offloading: of small graphs, and of others if asked for."""
    plan, base = opened.plan, opened.base
    if base is None or (base.op_count > _FEW_OPS and not always):
        return ()
    predicted = plan.predicted
    aim = Aim(host_bytes=predicted.host_budget, conditions=predicted.conditions, profile=rates)
    moves = Draft(base, plan.rules, plan.min_bytes).moves
    return Outlooks(base, moves, aim).curve(_POINTS)


def _notes(opened: Opened, rates: DeviceProfile | None) -> Iterator[str]:
    """Where what is drawn differs from what the plan was made with."""
    predicted = opened.plan.predicted
    if opened.base is None:
        return
    if rates is None:
        yield "no times are drawn, as the plan's device has no profile: ops are one unit each"
    elif predicted.profile and predicted.profile != rates.name:
        yield f"times are drawn with the profile {rates.name}, not with {predicted.profile}"
    if predicted.op_times == "measured":
        yield "times are drawn from the profile; the plan was made with measured op times"
