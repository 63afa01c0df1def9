"""The command ``offplan export``."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args

import typer

from offplan.dumped import load_dumped
from offplan.errors import UsageError
from offplan.export import Format, LeftOut, export_plan
from offplan.files import FileKind, check_writable, write_atomically
from offplan.graph import load_graph
from offplan.options import (
    DEFAULT_PLAN,
    GRAPH_SUFFIX,
    ProfileText,
    profile_of,
    reports_errors,
    width,
)
from offplan.plan import Plan, load_plan
from offplan.report.blocks import JOIN_FILE, JOIN_TEXT_FILE, join_json, join_report, join_text
from offplan.report.picture import PNG_FILE, SVG_FILE, draw, to_png, to_svg
from offplan.report.snapshot import SNAPSHOT_FILE, to_snapshot
from offplan.report.traces import GZIP_TRACE_FILE, TRACE_FILE, to_trace, zipped
from offplan.units import format_binary

if TYPE_CHECKING:
    from offplan.charted import Charts

# How many storages that an export leaves out are said one by one.
MANY_LEFT_OUT = 12

# What is made of the plan's graphs, and not of the plan alone.
DrawnFormat = Literal["svg", "png", "perfetto", "memory-snapshot", "blocks"]
AnyFormat = Literal[Format, DrawnFormat]
_PLAN_FORMATS: dict[str, Format] = {name: name for name in get_args(Format)}
_DRAWN_FORMATS: dict[str, DrawnFormat] = {name: name for name in get_args(DrawnFormat)}


@reports_errors
def export(
    plan: Annotated[Path, typer.Argument(metavar="[PLAN]", help="A plan file.")] = DEFAULT_PLAN,
    to: Annotated[
        AnyFormat,
        typer.Option(
            "--to",
            help="A module that marks joint graphs for PyTorch's activation offloading, or with "
            "MUST_CPU_OFFLOAD tags; a list of what moves; a picture of the timeline; a trace for "
            "Perfetto or chrome://tracing; a predicted snapshot for PyTorch's memory visualizer; "
            "what the blocks of a measured snapshot are.",
        ),
    ] = ...,  # type: ignore[assignment]
    graph: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"The plan's graphs (*{GRAPH_SUFFIX}), where they are not found by name.",
        ),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For --to blocks: what torch.cuda.memory._dump_snapshot wrote in a run.",
        ),
    ] = None,
    profile: ProfileText = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write; stdout if not given."),
    ] = None,
) -> None:
    """Write PLAN in a form that other tools take.

    For other runtimes: what moves, and what the form leaves out.  For people: the memory timeline.

    Examples:

      offplan export --to svg -o timeline.svg

      offplan export --to perfetto -o trace.json.gz

      offplan export --to memory-snapshot -o predicted.pickle

      offplan export --to blocks --snapshot measured.pickle
    """
    _check_options(to, graph, snapshot, profile, output)
    if to in _DRAWN_FORMATS:
        _export_drawn(plan, _DRAWN_FORMATS[to], graph, snapshot, profile, output)
        return
    facts = None if graph is None else load_graph(graph)
    exported = export_plan(load_plan(plan), _PLAN_FORMATS[to], facts)
    if output is not None:
        write_atomically(output, exported.text.encode(), exported.kind)
    else:
        typer.echo(exported.text, nl=False)
    _say_left_out(exported.left_out)
    size = format_binary(exported.moved_bytes)
    typer.echo(f"moves: {exported.moved_count} of {exported.planned_count}, {size}", err=True)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)


def _check_options(
    to: str,
    graph: Path | None,
    snapshot: Path | None,
    profile: str | None,
    output: Path | None,
) -> None:
    if to in _PLAN_FORMATS:
        if graph is not None and to != "json":
            raise UsageError(f"--graph names ops for --to json; --to {to} does not need it")
        if profile is not None:
            raise UsageError(f"--profile is for times, and --to {to} has none")
    if snapshot is not None and to != "blocks":
        raise UsageError("--snapshot is for --to blocks", fix=f"--to blocks --snapshot {snapshot}")
    if to == "blocks" and snapshot is None:
        raise UsageError(
            "--to blocks joins the plan to a measured snapshot, and none is given",
            fix="--snapshot FILE, written in a run by torch.cuda.memory._dump_snapshot(FILE)",
        )
    if output is None and to in ("png", "memory-snapshot"):
        suffix = {"png": "png", "memory-snapshot": "pickle"}[to]
        raise UsageError(f"--to {to} is no text", fix=f"-o FILE.{suffix}")


def _say_left_out(left_out: tuple[LeftOut, ...]) -> None:
    for each in left_out[:MANY_LEFT_OUT]:
        typer.echo(f"left out: {each}", err=True)
    more = left_out[MANY_LEFT_OUT:]
    if more:
        size = format_binary(sum(each.size_bytes for each in more))
        typer.echo(f"left out: {len(more)} more, {size}, as the file says", err=True)


# --- the timeline ---------------------------------------------------------------------------------


class _Written(NamedTuple):
    content: bytes
    kind: FileKind


def _export_drawn(
    path: Path,
    to: DrawnFormat,
    graph: Path | None,
    snapshot: Path | None,
    profile: str | None,
    output: Path | None,
) -> None:
    # Not at once: other formats are of the plan alone.
    from offplan.charted import charts_of
    from offplan.opened import open_plan

    with _keeping_all():
        opened = open_plan(path, graph)
        charts = charts_of(opened, profile_of(profile))
        for note in charts.notes:
            typer.echo(f"note: {note}", err=True)
        written = _drawn(opened.plan, charts, to, snapshot, output)
    if output is None:
        typer.echo(written.content.decode(), nl=False)
        return
    check_writable(output, written.kind)
    write_atomically(output, written.content, written.kind)
    typer.echo(f"wrote {output}", err=True)


@contextmanager
def _keeping_all() -> Iterator[None]:
    """Without looking for garbage, which takes a fifth of the time: all is needed to the end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _drawn(
    plan: Plan, charts: Charts, to: DrawnFormat, snapshot: Path | None, output: Path | None
) -> _Written:
    expandable = plan.predicted.conditions.expandable_segments
    if to in ("svg", "png"):
        picture = draw(_title(plan), charts.no_plan, charts.plan, plan.budget)
        if to == "svg":
            return _Written(to_svg(picture), SVG_FILE)
        return _Written(to_png(picture), PNG_FILE)
    if to == "perfetto":
        trace = to_trace(charts.by_name(), _about(plan))
        if output is not None and output.suffix == ".gz":
            return _Written(zipped(trace), GZIP_TRACE_FILE)
        return _Written(trace, TRACE_FILE)
    if to == "memory-snapshot" or snapshot is None:
        return _Written(to_snapshot(charts.last, _about(plan), expandable), SNAPSHOT_FILE)
    if plan.device != "cuda":
        raise UsageError(f"--to blocks is about CUDA memory, and the plan is for {plan.device}")
    report = join_report(charts.last, load_dumped(snapshot), expandable)
    if output is not None and output.suffix == ".json":
        return _Written(join_json(report), JOIN_FILE)
    return _Written(join_text(report, width()).encode(), JOIN_TEXT_FILE)


def _title(plan: Plan) -> str:
    params = "".join(f" {name}={value}" for name, value in plan.target.params.items())
    device = plan.gpu or plan.device
    asked = f", budget {plan.asked}" if plan.asked else ""
    return f"{Path(plan.target.spec).name}{params} on {device}{asked}"


def _about(plan: Plan) -> dict[str, str]:
    params = (f"-p {name}={shlex.quote(value)}" for name, value in plan.target.params.items())
    return {
        "target": " ".join((Path(plan.target.spec).name, *params)),
        "gpu": plan.gpu,
        "torch": plan.torch,
        "digest": plan.digest,
        "predicted_peak_bytes": str(plan.predicted.plan.peak_bytes),
    }
