"""The command ``offplan device``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from offplan.costs import PROFILE_FILE, find_profile, save_profile
from offplan.errors import UsageError
from offplan.files import check_writable
from offplan.measured import HostLimits
from offplan.options import Pin, reports_errors, width
from offplan.progress import Progress
from offplan.report.device import render_device, render_host
from offplan.units import parse_size


@reports_errors
def device(
    show: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROFILE]", help="Show a profile instead: a file, or a GPU's name (h100)."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Also write the profile (YAML)."),
    ] = None,
    pin: Pin = "register",
    host: Annotated[
        bool,
        typer.Option("--host", help="Show only what limits host memory; this needs no GPU."),
    ] = False,
    max_pin: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most host memory that is pinned, as a trial; 16GiB, or 1GiB without a GPU.",
        ),
    ] = None,
    format: Annotated[
        Literal["text", "json", "markdown"], typer.Option(help="How to print the profile.")
    ] = "text",
) -> None:
    """Measure the GPU here: its link, pinning, compute, and whether copies and compute overlap.

    The profile is what plans for this GPU are made with: --profile FILE.  What limits the host
    memory that can be pinned is shown with it, or alone (--host).  Exit code 3 if copies and
    compute do not keep their order.
    """
    max_pin_bytes = None if max_pin is None else parse_size(max_pin)
    if max_pin_bytes == 0:
        raise UsageError(f"--max-pin {max_pin}: pinning nothing measures nothing")
    if host:
        if show is not None or output is not None:
            raise UsageError("--host is about this machine: it takes no PROFILE and writes none")
        typer.echo(render_host(_host_limits(max_pin_bytes), format, width()), nl=False)
        return
    if output is not None:
        check_writable(output, PROFILE_FILE)
    limits: HostLimits | None = None
    if show is not None:
        found = find_profile(show)
    else:
        from offplan.replay.probe import measure_with_limits

        with Progress() as progress:
            found, limits = measure_with_limits(
                progress.phase, max_pin_bytes=max_pin_bytes, pin=pin
            )
    if output is not None:
        save_profile(output, found)
    typer.echo(render_device(found, format, width(), limits), nl=False)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)
    if found.ordering_ok is False:
        raise typer.Exit(3)


def _host_limits(max_pin_bytes: int | None) -> HostLimits:
    from offplan.replay.probe import host_limits

    with Progress() as progress:
        return host_limits(progress.phase, max_pin_bytes=max_pin_bytes)
