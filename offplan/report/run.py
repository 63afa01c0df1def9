"""What ``offplan run`` prints: what happened to the peak, what it cost, and whether it is the same.

1.  A *row* of the main table is one quantity without the plan, with it, the difference, what the
    plan predicted and how far off that was.  What is not known is empty.
2.  The comparison has a row for each rule set that was replayed, and one for no plan.  Where hooks
    were measured, the rows are without offload, under hooks, and what was replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

import msgspec

from offplan.measured import (
    Arm,
    Difference,
    Engine,
    Expected,
    Machine,
    Measurement,
    Noise,
    OutOfMemory,
    Planned,
    Verification,
)
from offplan.report.document import (
    Block,
    Heading,
    Paragraph,
    Table,
    change,
    counted,
    render_blocks,
)
from offplan.report.peak import Asked, budget_words
from offplan.units import format_binary, format_size

# Differences and noisy tensors beyond these are counted, not listed.
_MAX_DIFFERENCES = 12
_MAX_NOISE = 3
_MOVED_AS: dict[Engine, str] = {
    "compiled": "bytes and transfers of every step are the plan's",
    "hooks": "bytes and transfers do not change after the second step; a replay's are its plan's",
}
_RUN_BY = {
    "aot_eager": "aot_eager graphs op by op",
    "inductor": "graphs compiled by Inductor",
}
_PINNED_BY = {
    "register": "pinned (register)",
    "torch": "pinned (torch)",
    "off": "pageable (--pin off)",
}
# More step times than these are summed up by the shortest and the longest.
_MAX_SAMPLES = 10

# What CUDA itself takes when a process starts on the GPU, and some more.
_OWN_CONTEXT_BYTES = 2 * 1000**3
_PEAK = "peak allocated"

Unit = Literal["bytes", "ms"]
_Known = TypeVar("_Known", Expected, Planned)


class Row(msgspec.Struct, frozen=True):
    """One quantity (definition 1), in bytes or milliseconds."""

    name: str
    unit: Unit
    no_plan: float | None
    plan: float | None
    delta: float | None
    predicted: float | None = None
    error: float | None = None


class ArmRow(msgspec.Struct, frozen=True):
    """One arm of the comparison; None where it ran out of memory."""

    name: str
    peak_allocated_bytes: int | None
    moved_bytes: int | None
    step_ms: float | None


class RunReport(msgspec.Struct, frozen=True):
    ok: bool
    target: str
    params: dict[str, str]
    device: str
    machine: Machine
    engine: Engine
    compiler: str
    partitioner: str
    attention: str
    rules: str
    min_bytes: int
    budget: int | None
    asked: str
    over_budget_bytes: int
    movable_bytes: int
    rows: tuple[Row, ...]
    compared: tuple[ArmRow, ...]
    arms: tuple[Arm, ...]
    verification: Verification | None
    notes: tuple[str, ...]


# --- making ---------------------------------------------------------------------------------------


def run_report(measurement: Measurement) -> RunReport:
    """The report on ``measurement``."""
    replayed = [arm for arm in measurement.arms if arm.role == "plan"]
    if measurement.engine == "hooks":
        compared = [measurement.no_plan, measurement.plan, *replayed]
    else:
        compared = [measurement.no_plan, *replayed] if len(replayed) > 1 else []
    return RunReport(
        ok=measurement.ok,
        target=measurement.measured.spec,
        params=measurement.measured.params,
        device=measurement.device,
        machine=measurement.machine,
        engine=measurement.engine,
        compiler=measurement.compiler,
        partitioner=measurement.partitioner,
        attention=measurement.attention,
        rules=measurement.rules,
        min_bytes=measurement.min_bytes,
        budget=measurement.budget,
        asked=measurement.asked,
        over_budget_bytes=measurement.over_budget_bytes,
        movable_bytes=measurement.movable_bytes,
        rows=tuple(_rows(measurement.no_plan, measurement.plan)),
        compared=tuple(_arm_row(arm, measurement.engine) for arm in compared),
        arms=measurement.arms,
        verification=measurement.verification,
        notes=measurement.notes,
    )


def _rows(before: Arm, after: Arm) -> Iterator[Row]:
    """The main table."""
    planned, expected = after.planned, after.expected
    peak = _row(_PEAK, "bytes", before, after, lambda arm: arm.peak_allocated_bytes)
    yield _predicted(peak, expected, lambda found: found.peak_allocated_bytes)
    reserved = _row("peak reserved", "bytes", before, after, lambda arm: arm.peak_reserved_bytes)
    if (reserved.no_plan, reserved.plan) != (None, None):
        yield _predicted(reserved, expected, lambda found: found.peak_reserved_bytes)
    ended = _row("end of forward", "bytes", before, after, lambda arm: arm.forward_end_bytes)
    yield _predicted(ended, expected, lambda found: found.forward_end_bytes)
    step = _row("step", "ms", before, after, lambda arm: arm.step_ms)
    yield _predicted(step, expected, lambda found: found.step_ms)
    sent = _row("moved", "bytes", before, after, lambda arm: arm.to_host_bytes)
    back = _row("moved back", "bytes", before, after, lambda arm: arm.to_device_bytes)
    sent = _predicted(sent, planned, lambda found: found.to_host_bytes)
    back = _predicted(back, planned, lambda found: found.to_device_bytes)
    yield sent
    if (back.plan, back.predicted) != (sent.plan, sent.predicted):
        yield back


def _row(
    name: str, unit: Unit, before: Arm, after: Arm, read: Callable[[Arm], float | None]
) -> Row:
    no_plan, plan = (read(arm) if arm.completed else None for arm in (before, after))
    delta = None if no_plan is None or plan is None else plan - no_plan
    return Row(name, unit, no_plan, plan, delta)


def _predicted(row: Row, known: _Known | None, read: Callable[[_Known], float | None]) -> Row:
    """``row`` with what ``known`` says that it would be."""
    predicted = None if known is None else read(known)
    error = None if row.plan is None or predicted is None else row.plan - predicted
    return msgspec.structs.replace(row, predicted=predicted, error=error)


def _arm_row(arm: Arm, engine: Engine) -> ArmRow:
    name = arm.rules if arm.rules and engine == "compiled" else arm.name
    if not arm.completed:
        return ArmRow(name, None, None, None)
    return ArmRow(name, arm.peak_allocated_bytes, arm.to_host_bytes, arm.step_ms)


# --- rendering ------------------------------------------------------------------------------------


def render_run(report: RunReport, format: str = "text", width: int = 80) -> str:
    """``report`` as ``text``, ``json`` or ``markdown``.  ``UsageError`` for another format."""
    if format == "json":
        return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    return render_blocks(_document(report), format, width)


def _document(report: RunReport) -> Iterator[Block]:
    words = [report.target, *(f"{name}={value}" for name, value in report.params.items())]
    yield Heading(f"offplan run {'ok' if report.ok else 'failed'}: {' '.join(words)}")
    yield Paragraph(tuple(_about(report)))
    is_eager = report.engine == "hooks"
    yield Heading("Without offload and with it" if is_eager else "Without the plan and with it")
    yield _main_table(report)
    yield Paragraph(tuple(_beside_table(report)))
    if report.compared:
        yield Heading("Hooks and replay compared" if is_eager else "Rule sets compared")
        yield _compared_table(report)
    parts = [arm for arm in report.arms if arm.parts is not None]
    if parts:
        yield Heading("What the peak is made of")
        yield _parts_table(parts)
        yield Paragraph(tuple(_at_peak(parts)))
    yield from _verification(report)


def _about(report: RunReport) -> Iterator[tuple[str, str]]:
    machine = report.machine
    device = f"{report.device} ({machine.gpu})" if machine.gpu else report.device
    attention = f", attention {report.attention}" if report.attention else ""
    graphs = f"{_RUN_BY[report.compiler]}, {report.partitioner} partitioner{attention}"
    if report.engine == "hooks":
        yield "measured on", f"{device}, torch {machine.torch}, eager, saved-tensor hooks"
        yield "hooks", f"move saved storages from {format_binary(report.min_bytes)}"
        yield "beside it", f"the plan, replayed: {graphs}"
    else:
        yield "replayed on", f"{device}, torch {machine.torch}, {graphs}"
    yield "plan", _plan_line(report)
    yield (
        "arms",
        "one process each; one warm-up step, then "
        + counted(max(len(arm.measured) for arm in report.arms), "step"),
    )
    if machine.used_bytes > _OWN_CONTEXT_BYTES:
        used, of = format_size(machine.used_bytes), format_size(machine.gpu_memory_bytes)
        yield "note", f"{used} of the GPU's {of} were in use before the first arm began"
    for note in report.notes:
        yield "note", note


def _plan_line(report: RunReport) -> str:
    choices = f"{report.rules}, minimum {format_binary(report.min_bytes)}"
    if report.budget is None:
        return (
            f"{choices}, no budget: moves nothing (--budget 0 would move "
            f"{format_size(report.movable_bytes)})"
        )
    if report.budget == 0:
        return f"{choices}, budget 0: everything movable moves"
    return f"{choices}, budget {budget_words(Asked(report.budget, report.asked))}"


def _main_table(report: RunReport) -> Table:
    is_eager = report.engine == "hooks"
    columns = ("no offload", "hooks", "delta") if is_eager else ("no plan", "plan", "delta")
    # Nothing is predicted of eager training.
    predicted = () if is_eager else ("predicted", "error")
    return Table(
        columns=("", *columns, *predicted),
        rows=tuple(_main_row(row, is_eager=is_eager) for row in report.rows),
        numeric=frozenset(range(1, 1 + len(columns) + len(predicted))),
    )


def _main_row(row: Row, *, is_eager: bool) -> tuple[str, ...]:
    cells = (
        row.name,
        _measured(row, row.no_plan),
        _measured(row, row.plan),
        _change(row.delta, row.unit),
    )
    return cells if is_eager else (*cells, _cell(row.predicted, row.unit), _off(row))


def _off(row: Row) -> str:
    """How far measured is from predicted, as a share of predicted."""
    if row.error is None or row.predicted is None:
        return ""
    if not row.error:
        return "none"
    return f"{row.error / row.predicted:+.2%}" if row.predicted else _change(row.error, row.unit)


def _measured(row: Row, value: float | None) -> str:
    # Every arm that completed has a peak.
    if value is None and row.name == _PEAK:
        return "out of memory"
    return _cell(value, row.unit)


def _cell(value: float | None, unit: Unit) -> str:
    if value is None:
        return ""
    return format_size(int(value)) if unit == "bytes" else f"{value:,.1f} ms"


def _change(value: float | None, unit: Unit) -> str:
    text = _cell(value, unit)
    return f"+{text}" if value is not None and value > 0 else text


def _beside_table(report: RunReport) -> Iterator[tuple[str, str]]:
    if report.over_budget_bytes:
        over = format_size(report.over_budget_bytes)
        yield "budget", f"exceeded: the measured peak is {over} over it"
    for arm in report.arms:
        if arm.out_of_memory is not None:
            yield arm.name, _out_of_memory(arm.out_of_memory)
        else:
            yield arm.name, _spent(arm)
    before = report.arms[0]
    if before.expected is not None:
        yield "predicted", _without(before, before.expected)


def _without(arm: Arm, expected: Expected) -> str:
    """What was predicted of the arm without a plan, and how far that was off."""
    said = f"{format_size(expected.peak_allocated_bytes)} without a plan"
    if arm.completed:
        off = change(arm.peak_allocated_bytes, expected.peak_allocated_bytes)
        if off is not None:
            said += f" (measured: {off:+.2%})" if off else " (as measured)"
    if expected.step_ms is not None:
        said += f", in {expected.step_ms:,.1f} ms"
        off = change(arm.step_ms, expected.step_ms) if arm.completed else None
        if off is not None:
            said += f" (measured: {off:+.1%})"
    return said


def _out_of_memory(found: OutOfMemory) -> str:
    where = f" ({found.op})" if found.op else ""
    text = f"out of memory in {found.during}{where}, with {format_size(found.allocated_bytes)}"
    if found.device_bytes is not None:
        text += f" of {format_size(found.device_bytes)}"
    text += " allocated"
    if found.asked_bytes is not None:
        text += f", asking for {format_size(found.asked_bytes)} more"
    return text


def _spent(arm: Arm) -> str:
    samples = [f"{step.step_ms:,.1f}" for step in arm.measured]
    if len(samples) > _MAX_SAMPLES:
        times = sorted(step.step_ms for step in arm.measured)
        said = f"{counted(len(times), 'step')} of {times[0]:,.1f} to {times[-1]:,.1f} ms"
    else:
        said = f"{'steps' if len(samples) > 1 else 'step'} of {', '.join(samples)} ms"
    if not arm.moves:
        return said
    if arm.stalled_ms is not None:
        said += f"; compute waited {arm.stalled_ms:,.1f} ms a step for transfers"
    said += f"; {format_size(arm.host_bytes)} of host memory"
    return f"{said}, {_PINNED_BY[arm.pin]}" if arm.pin in _PINNED_BY else said


def _compared_table(report: RunReport) -> Table:
    return Table(
        columns=("arm" if report.engine == "hooks" else "rules", "peak", "moved", "step"),
        rows=tuple(
            (
                row.name,
                "out of memory"
                if row.peak_allocated_bytes is None
                else format_size(row.peak_allocated_bytes),
                _cell(row.moved_bytes, "bytes"),
                _cell(row.step_ms, "ms"),
            )
            for row in report.compared
        ),
        numeric=frozenset((1, 2, 3)),
    )


def _parts_table(arms: Sequence[Arm]) -> Table:
    names = ("parameters", "inputs", "gradients", "saved", "temporaries", "workspace", "rounding")
    rows = []
    for name in names:
        sizes = [getattr(arm.parts, name) for arm in arms]
        if any(sizes):
            rows.append((name, *("" if size is None else format_size(size) for size in sizes)))
    peaks = [format_size(arm.parts.peak_bytes) for arm in arms if arm.parts is not None]
    return Table(
        columns=("", *_column_names(arms)),
        rows=(*rows, ("peak", *peaks)),
        numeric=frozenset(range(1, len(arms) + 1)),
    )


def _column_names(arms: Sequence[Arm]) -> list[str]:
    """The arms' names; those of compared rule sets without a word that would fill 80 columns."""
    compared = sum(arm.role == "plan" for arm in arms) > 1
    return [str(arm.rules) if compared and arm.role == "plan" else arm.name for arm in arms]


def _at_peak(arms: Sequence[Arm]) -> Iterator[tuple[str, str]]:
    for arm in arms:
        if arm.parts is not None and arm.parts.op:
            yield arm.name, f"reached in {arm.parts.op}"


# --- verification ---------------------------------------------------------------------------------


def _verification(report: RunReport) -> Iterator[Block]:
    found = report.verification
    if found is None:
        yield Heading("Not verified (--no-verify)")
        return
    yield Heading(_verdict(found))
    lines = [*_verified_lines(report, found)]
    if lines:
        yield Paragraph(tuple(lines))
    if found.differences:
        yield _differences_table(found.differences)


def _verdict(found: Verification) -> str:
    if not found.ok:
        return f"Verification failed: {counted(len(found.differences), 'difference')}"
    if found.not_compared:
        return f"Bits not compared: {found.not_compared}"
    return "Verified: same bits" if not found.noise else "Verified, as far as kernels repeat"


def _verified_lines(report: RunReport, found: Verification) -> Iterator[tuple[str, str]]:
    if found.ok and found.compared:
        what = f"losses, {counted(found.gradients, 'gradient')}, {counted(found.buffers, 'buffer')}"
        yield "same", f"{what}, over {counted(found.steps, 'step')}: {', '.join(found.compared)}"
    if report.engine == "hooks":
        yield "not compared", "the replay: graphs may round otherwise than eager training does"
    if found.ok:
        yield "moved", _MOVED_AS[report.engine]
        yield "flat", "device and host bytes do not change after the second step"
    if found.control == "same":
        yield "control", f"a second run without {_what(report)} has the same bits"
    if found.noise:
        yield "noise", _noise(found.noise, _what(report))
    for words in found.nondeterministic:
        yield "torch says", words


def _what(report: RunReport) -> str:
    return "a plan" if report.engine == "compiled" else "offload"


def _noise(rows: Sequence[Noise], what: str) -> str:
    largest = ", ".join(
        f"{row.what} {row.name}".strip() + f" {row.control:.1e} (with {what} {row.plan:.1e})"
        for row in rows[:_MAX_NOISE]
    )
    more = f" and {len(rows) - _MAX_NOISE:,} more" if len(rows) > _MAX_NOISE else ""
    return (
        f"a second run without {what} differs from the first too, relative to the norm by: "
        f"{largest}{more}"
    )


def _differences_table(found: Sequence[Difference]) -> Table:
    rows = [
        (each.arm, f"{each.what} {each.name}".strip(), str(each.step), each.expected, each.found)
        for each in found[:_MAX_DIFFERENCES]
    ]
    if len(found) > _MAX_DIFFERENCES:
        more = f"and {len(found) - _MAX_DIFFERENCES:,} more (see --format json)"
        rows.append(("", more, "", "", ""))
    return Table(
        columns=("arm", "what", "step", "expected", "found"),
        rows=tuple(rows),
        numeric=frozenset((2,)),
    )
