"""The command ``offplan verify``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offplan.errors import UsageError
from offplan.files import check_writable
from offplan.graph import TargetRef
from offplan.options import CompilerName, NamedTarget, Params, Pin, reports_errors, width
from offplan.plan import Plan
from offplan.progress import Progress
from offplan.report.verify import render_cases, render_verified
from offplan.requests import source_of
from offplan.verified import VERIFIED_FILE, CaseResult, Verified, write_verified

if TYPE_CHECKING:
    from offplan.replay.cases import Case
    from offplan.replay.verifying import Trials


@reports_errors
def verify(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[PLAN or TARGET]",
            help="Your own target, as for analyze, or that of a plan, after the built-in cases.",
        ),
    ] = None,
    param: Params = None,
    named: NamedTarget = None,
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this built-in case; may be given several times."),
    ] = None,
    cases: Annotated[
        bool, typer.Option("--cases/--no-cases", help="Whether the built-in cases run at all.")
    ] = True,
    list_: Annotated[
        bool, typer.Option("--list", help="Name the built-in cases, and run none.")
    ] = False,
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="Device to replay on.")] = "cuda",
    compiler: CompilerName = "aot_eager",
    repeats: Annotated[
        int, typer.Option(min=1, help="How often each case runs at each pace of its copies.")
    ] = 2,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Cases at a time; by cores, up to 8, if not given."),
    ] = None,
    pin: Pin = "register",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Also write the results (JSON)."),
    ] = None,
    format: Annotated[
        Literal["text", "json", "markdown"], typer.Option(help="How to print the results.")
    ] = "text",
) -> None:
    """Self-test: replay alias cases, and your target, with everything moved, and compare bits.

    Each is trained for some steps without a plan and at the floor, with copies as they come, slowed
    and sped up: losses, gradients, buffers, inputs and outputs are the same bit for bit, and bytes
    moved are the plan's.  Exit code 3 if anything differs, 1 if a case cannot run.
    """
    if list_:
        typer.echo(_listed(), nl=False)
        return
    targets = _targets(target, param or [], named)
    if not cases and (case or not targets):
        raise UsageError(
            "--no-cases leaves nothing to verify" if not case else "--case and --no-cases differ",
            fix="name a target, or leave --no-cases out",
        )
    if output is not None:
        check_writable(output, VERIFIED_FILE)
    from offplan.replay.cases import find_cases
    from offplan.replay.verifying import Trials

    wanted = find_cases(case or ()) if cases else ()
    trials = Trials(device=device, compiler=compiler, repeats=repeats, pin=pin, jobs=jobs)
    found = _verified(wanted, targets, trials)
    if output is not None:
        write_verified(output, found)
    typer.echo(render_verified(found, format, width()), nl=False)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _listed() -> str:
    from offplan.replay.cases import CASES

    return render_cases([(case.name, case.about) for case in CASES], width())


def _targets(target: str | None, params: list[str], typed: str | None) -> list[TargetRef]:
    if target is None:
        if params:
            raise UsageError("-p is for a target, and none is named")
        if typed is not None:
            raise UsageError("--target is for plan files, and none is named")
        return []
    source = source_of(target, params, typed, "verify")
    return [source.target if isinstance(source, Plan) else source]


def _verified(cases: Sequence[Case], targets: Sequence[TargetRef], trials: Trials) -> Verified:
    from offplan.replay.verifying import verify_all

    total = len(cases) + len(targets)
    done: list[CaseResult] = []
    with Progress() as progress:

        def note(result: CaseResult) -> None:
            done.append(result)
            progress.phase(f"{len(done)} of {total}: {result.name}: {result.outcome}")

        progress.phase(f"0 of {total}")
        return verify_all(cases, targets, trials, note)
