"""A plan as one page for a browser: the step in time, what is saved, what it costs, what it is.

1.  The page is one file that needs nothing else: its style, its script and what it draws are in it,
    and its policy lets a browser fetch nothing and run no other script.
2.  What people read without looking closer (answer, predictions, ledger, notes) is HTML and needs
    no script; the timeline and the list of all storages are drawn by ``assets/page.js`` from what
    ``offplan.report.embed`` has.
3.  Beside what the plan predicts stands what a measurement of it found, without a plan and with it.
    A measurement of other graphs is refused.

The same plan and graphs give the same page.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template

from offplan.budget import CurvePoint, PredictedTime
from offplan.eligibility import RULE_SETS, LedgerRow
from offplan.errors import PlanError
from offplan.measured import Arm, Measurement
from offplan.memory import Prediction
from offplan.plan import Plan, analyze_command
from offplan.report.document import Block, Heading, Paragraph, Table, change, counted
from offplan.report.embed import Drawn, embedded
from offplan.report.html import escaped, to_html
from offplan.report.peak import Asked, Moved, budget_words, curve_blocks, predicted_blocks
from offplan.units import format_binary, format_size

# By which a page of ours is recognized when it is written again.
FIRST_LINE = "<!doctype html><!-- offplan report -->"

# Width and height of the curve's drawing, and the room for its axes.
_CURVE = (640, 260)
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 16, 44
_TICKS = 4
# Columns of the table of budgets that are not bars.
_FIGURES = 5


@dataclass(frozen=True)
class Page:
    """What a page shows.  ``drawn`` is empty where the plan's graphs are not there; ``curve`` where
    budgets were not compared.  ``notes`` are about how the page was made."""

    plan: Plan
    drawn: tuple[Drawn, ...] = ()
    measured: Measurement | None = None
    curve: tuple[CurvePoint, ...] = ()
    notes: tuple[str, ...] = ()


def render_page(page: Page) -> str:
    """The page as HTML.  Raises ``PlanError`` for a measurement of another plan."""
    if page.measured is not None:
        _check_measured(page.plan, page.measured)
    style, script = _asset("page.css"), _asset("page.js")
    title = _title(page.plan)
    return Template(_asset("page.html")).substitute(
        first_line=FIRST_LINE,
        policy=_policy(style, script),
        style=style,
        script=script,
        title=escaped(title),
        about=to_html([Paragraph(tuple(_about(page.plan)))]),
        answer="\n".join(_tiles(page)),
        timeline=_timeline(page),
        sections="\n".join(_sections(page)),
        embedded=embedded(page.plan, page.drawn).decode(),
    )


def _asset(name: str) -> str:
    return (resources.files("offplan.report") / "assets" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """What a browser may do with the page: apply this style, run this script, fetch nothing."""
    allowed = (
        "default-src 'none'",
        f"style-src 'sha256-{_sha256(style)}'",
        f"script-src 'sha256-{_sha256(script)}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(allowed)


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _check_measured(plan: Plan, measured: Measurement) -> None:
    if measured.digest != plan.digest:
        raise PlanError(
            f"the measurement is of other graphs than the plan: its digest is "
            f"{measured.digest[:19]}..., the plan's {plan.digest[:19]}...",
            where=f"measured: {measured.measured.spec}, plan: {plan.target.spec}",
            fix="measure this plan: offplan run PLAN -o measured.json",
        )
    ours, theirs = (plan.rules, plan.budget), (measured.rules, measured.budget)
    if ours != theirs:
        raise PlanError(
            f"the measurement is of a plan with rules {theirs[0]} and "
            f"{_budget_text(theirs[1])}, this one has {ours[0]} and {_budget_text(ours[1])}",
            fix="measure this plan: offplan run PLAN -o measured.json",
        )


def _budget_text(budget: int | None) -> str:
    return "no budget" if budget is None else f"a budget of {budget:,} bytes"


# --- the top --------------------------------------------------------------------------------------


def _title(plan: Plan) -> str:
    return " ".join((plan.target.spec, *(f"{k}={v}" for k, v in plan.target.params.items())))


def _about(plan: Plan) -> Iterator[tuple[str, str]]:
    device = f"{plan.device} ({plan.gpu})" if plan.gpu else plan.device
    attention = f", attention {plan.attention}" if plan.attention else ""
    yield (
        "traced for",
        f"{device}, torch {plan.torch}, {plan.compiler} compiler, {plan.partitioner} "
        f"partitioner{attention}",
    )
    saved = sum(region.saved for region in plan.regions)
    yield (
        "graphs",
        f"{counted(len(plan.regions), 'region')}, {counted(plan.op_count, 'op')}, "
        f"{counted(saved, 'saved value')}, {plan.digest[:19]}...",
    )
    yield "made with", analyze_command(plan)


def _tiles(page: Page) -> Iterator[str]:
    """The few figures that answer whether it fits, and what that costs."""
    plan = page.plan
    before, after = plan.predicted.no_plan.peak_bytes, plan.predicted.plan.peak_bytes
    if _moved(plan).nothing:
        yield _tile("Predicted peak", format_size(before), "nothing is moved or computed again")
    else:
        yield _tile("Predicted peak", format_size(after), _from(format_size(before), after, before))
    if plan.budget:
        left = plan.budget - after
        room = f"{format_size(left)} below it" if left >= 0 else f"{format_size(-left)} over it"
        asked = f"{plan.asked}: " if plan.asked and plan.asked != str(plan.budget) else ""
        yield _tile("Budget", format_size(plan.budget), f"{asked}{room}")
    yield _tile("Floor", format_size(plan.predicted.floor_bytes), "the least of any plan")
    if plan.predicted.time is not None:
        yield _step_tile(plan.predicted.time, _moved(plan))
    if plan.transfers:
        carried = sum(transfer.transfer_bytes for transfer in plan.transfers)
        of = f"each way, {counted(len(plan.transfers), 'storage')}"
        yield _tile("Offloaded", format_size(carried), of)
    if plan.recomputed:
        again = format_size(sum(each.size_bytes for each in plan.recomputed))
        of = f"{counted(len(plan.recomputed), 'storage')}, {plan.recompute_us / 1000:,.1f} ms"
        yield _tile("Computed again", again, of)
    if page.measured is not None:
        yield _measured_tile(page.measured.plan)


def _step_tile(time: PredictedTime, moved: Moved) -> str:
    if moved.nothing:
        return _tile("Predicted step", f"{time.no_plan_ms:,.1f} ms", "")
    note = _from(f"{time.no_plan_ms:,.1f} ms", time.step_ms, time.no_plan_ms)
    return _tile("Predicted step", f"{time.step_ms:,.1f} ms", note)


def _measured_tile(arm: Arm) -> str:
    if not arm.completed:
        return _tile("Measured peak", "out of memory", "")
    off, predicted = "", _expected(arm)
    share = None if predicted is None else change(arm.peak_allocated_bytes, predicted)
    if share is not None:
        off = f"{_percent(share, 2)} from predicted" if share else "as predicted"
    return _tile("Measured peak", format_size(arm.peak_allocated_bytes), off)


def _from(said: str, after: float, before: float) -> str:
    """What ``before``, which ``said`` says, has changed by."""
    share = change(after, before)
    return f"from {said}" if share is None else f"from {said}, {_percent(share)}"


def _tile(name: str, value: str, note: str) -> str:
    return (
        f'<div class="tile"><dt>{escaped(name)}</dt><dd><b>{escaped(value)}</b>'
        f"<span>{escaped(note)}</span></dd></div>"
    )


def _percent(share: float, digits: int = 1) -> str:
    text = f"{100 * share:+.{digits}f}%"
    return text.replace("-", "\N{MINUS SIGN}")


def _moved(plan: Plan) -> Moved:
    return Moved(
        storages=len(plan.transfers),
        transfer_bytes=sum(transfer.transfer_bytes for transfer in plan.transfers),
        never_reloaded=sum(transfer.reload_at is None for transfer in plan.transfers),
        recomputed=len(plan.recomputed),
        recompute_us=plan.recompute_us,
    )


# --- the timeline ---------------------------------------------------------------------------------


def _timeline(page: Page) -> str:
    """The place that the script draws in, and in words what is to be seen there."""
    if not page.drawn:
        notes = "".join(f"<p class=note>{escaped(note)}</p>" for note in page.notes)
        return f"<p>The timeline is drawn from the plan's graphs.</p>{notes}"
    summary = " ".join(_summary(page.plan, page.drawn))
    return Template(_asset("timeline.html")).substitute(summary=escaped(summary))


def _summary(plan: Plan, drawn: Sequence[Drawn]) -> Iterator[str]:
    predicted = plan.predicted
    for each in drawn:
        found = predicted.plan if each.is_plan else predicted.no_plan
        what = "With the plan" if each.is_plan else "Without a plan"
        when = ""
        if each.has_times and found.op < len(each.chart.ops):
            when = (
                f" at {each.chart.starts_ms[found.op]:,.1f} of {each.chart.starts_ms[-1]:,.1f} ms"
            )
        yield f"{what} memory is highest{when}: {format_size(found.peak_bytes)}{_at(found)}."


def _at(found: Prediction) -> str:
    module = f" of {found.op_module}" if found.op_module else ""
    source = f" ({found.op_source})" if found.op_source else ""
    return f", in {found.op_target}{module}{source}" if found.op_target else ""


# --- sections -------------------------------------------------------------------------------------


def _sections(page: Page) -> Iterator[str]:
    plan = page.plan
    if page.measured is not None:
        yield _section("measured", "Predicted and measured", _measured_blocks(page.measured))
    asked, moved = Asked(plan.budget, plan.asked), _moved(plan)
    predicted = [*predicted_blocks(plan.predicted, asked, moved)]
    yield _section("predicted", "Predicted", predicted)
    yield _budgets(page)
    yield _section("ledger", "Ledger: what is saved, under each rule set", [*_ledgers(plan)])
    notes = [*_notes(page)]
    if notes:
        yield _section("notes", "Notes and warnings", [Paragraph(tuple(notes))])


def _section(name: str, title: str, blocks: Sequence[Block], before: str = "") -> str:
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">'
        f'<h2 id="{name}-title">{escaped(title)}</h2>{before}\n{to_html(blocks)}</section>'
    )


def _ledgers(plan: Plan) -> Iterator[Block]:
    """Each rule set's ledger, that of the plan first."""
    for rules in sorted(RULE_SETS, key=lambda rules: rules != plan.rules):
        own = " (this plan's)" if rules == plan.rules else ""
        yield Heading(f"{rules}{own}")
        yield _ledger(plan.ledger[rules])
    yield Paragraph(
        (
            (
                "",
                f"Minimum {format_binary(plan.min_bytes)}. Logical: what the values carry; "
                "storage: each storage once.",
            ),
        )
    )


def _ledger(ledger: Sequence[LedgerRow]) -> Table:
    rows = [(row.rule, row.holder, *_sums([row])) for row in ledger]
    return Table(
        columns=("rule", "held by", "values", "logical", "storage"),
        rows=(*rows, ("total", "", *_sums(ledger))),
        numeric=frozenset((2, 3, 4)),
    )


def _sums(ledger: Sequence[LedgerRow]) -> tuple[str, str, str]:
    return (
        f"{sum(row.count for row in ledger):,}",
        format_size(sum(row.logical_bytes for row in ledger)),
        format_size(sum(row.storage_bytes for row in ledger)),
    )


def _notes(page: Page) -> Iterator[tuple[str, str]]:
    for warning in page.plan.warnings:
        yield "warning", warning
    for found in page.plan.breaks:
        yield "graph break", f"{found.source}: {found.reason}" if found.source else found.reason
    for note in page.notes:
        yield "note", note
    for note in page.measured.notes if page.measured is not None else ():
        yield "measured", note


# --- measured -------------------------------------------------------------------------------------


def _measured_blocks(measured: Measurement) -> list[Block]:
    before, after = measured.no_plan, measured.plan
    rows = [*_arm_rows("no plan", before), *_arm_rows("plan", after)]
    machine = measured.machine
    device = f"{measured.device} ({machine.gpu})" if machine.gpu else measured.device
    steps = counted(max(len(arm.measured) for arm in measured.arms), "step")
    return [
        Table(("", "", "predicted", "measured", "error"), tuple(rows), frozenset((2, 3, 4))),
        Paragraph(
            (
                ("measured on", f"{device}, torch {machine.torch}, {steps} after a warm-up"),
                ("verified", _verified(measured)),
            )
        ),
    ]


def _arm_rows(name: str, arm: Arm) -> Iterator[tuple[str, ...]]:
    """Peak, reserved, end of forward, step, and what moved: predicted, measured, error."""
    if not arm.completed:
        yield name, "peak allocated", _bytes(_expected(arm)), "out of memory", ""
        return
    expected, planned = arm.expected, arm.planned
    yield name, "peak allocated", *_pair(_expected(arm), arm.peak_allocated_bytes)
    if arm.peak_reserved_bytes is not None:
        reserved = None if expected is None else expected.peak_reserved_bytes
        yield "", "peak reserved", *_pair(reserved, arm.peak_reserved_bytes)
    ended = None if expected is None else expected.forward_end_bytes
    yield "", "end of forward", *_pair(ended, arm.forward_end_bytes)
    step_ms = None if expected is None else expected.step_ms
    predicted = "" if step_ms is None else f"{step_ms:,.1f} ms"
    yield "", "step", predicted, f"{arm.step_ms:,.1f} ms", _error(step_ms, arm.step_ms)
    if arm.moves:
        to_host = None if planned is None else planned.to_host_bytes
        to_device = None if planned is None else planned.to_device_bytes
        yield "", "moved to the host", *_pair(to_host, arm.to_host_bytes)
        yield "", "moved back", *_pair(to_device, arm.to_device_bytes)


def _expected(arm: Arm) -> int | None:
    return None if arm.expected is None else arm.expected.peak_allocated_bytes


def _pair(predicted: int | None, measured: int) -> tuple[str, str, str]:
    return _bytes(predicted), format_size(measured), _error(predicted, measured)


def _bytes(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)


def _error(predicted: float | None, measured: float) -> str:
    if predicted is None:
        return ""
    if predicted == measured:
        return "none"
    share = change(measured, predicted)
    return "" if share is None else _percent(share, 2)


def _verified(measured: Measurement) -> str:
    found = measured.verification
    if found is None:
        return "not asked for (--no-verify)"
    if found.not_compared:
        return f"bits are not compared: {found.not_compared}"
    if not found.ok:
        return f"no: {counted(len(found.differences), 'difference')}"
    return f"losses, {counted(found.gradients, 'gradient')} and buffers have the same bits"


# --- budgets --------------------------------------------------------------------------------------


def _budgets(page: Page) -> str:
    if len(page.curve) < 2:
        missing = "offplan report --budgets draws what each budget would cost."
        if not page.drawn:
            missing = "What each budget would cost is computed from the plan's graphs."
        return _section("budgets", "Budgets", [*_known(page.plan), Paragraph((("", missing),))])
    drawing = _curve(page.plan, page.curve)
    # The section has its heading already, and its drawing says what bars would.
    tables = [block for block in curve_blocks(page.curve) if isinstance(block, Table)]
    blocks = [
        Table(each.columns[:_FIGURES], tuple(row[:_FIGURES] for row in each.rows), each.numeric)
        for each in tables
    ]
    title = "What each budget would cost, by offloading alone"
    return _section("budgets", title, blocks, drawing)


def _known(plan: Plan) -> Iterator[Block]:
    """The budgets whose plans are in the file."""
    predicted = plan.predicted
    time = predicted.time
    rows = [("no plan", predicted.no_plan.peak_bytes, time and time.no_plan_ms)]
    if not _moved(plan).nothing:
        name = "this plan"
        if plan.budget:
            name += f" ({budget_words(Asked(plan.budget, plan.asked))})"
        rows.append((name, predicted.plan.peak_bytes, time and time.step_ms))
    rows.append(("floor", predicted.floor_bytes, None))
    yield Table(
        ("", "peak", "step"),
        tuple((name, format_size(size), f"{ms:,.1f} ms" if ms else "") for name, size, ms in rows),
        frozenset((1, 2)),
    )


class _Scale:
    """Where a value from ``low`` to ``high`` is drawn, from ``start`` to ``end``."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        return [self.low + (self.high - self.low) * i / _TICKS for i in range(_TICKS + 1)]


def _curve(plan: Plan, curve: Sequence[CurvePoint]) -> str:
    """Peak against step time, or against what moves where no times are predicted; the plan and its
    budget marked."""
    timed = all(point.step_ms is not None for point in curve)
    costs = {point: float((point.step_ms if timed else point.moved_bytes) or 0) for point in curve}
    peaks = [point.peak_bytes for point in curve]
    own = _own_cost(plan, timed)
    low, high = min(*costs.values(), own), max(*costs.values(), own)
    room = 0.1 * (high - low) or 1
    width, height = _CURVE
    ends = [*peaks, plan.predicted.plan.peak_bytes, *([plan.budget] if plan.budget else [])]
    x = _Scale(min(ends), max(ends), _LEFT, width - _RIGHT)
    y = _Scale(max(0, low - room), high + room, height - _BOTTOM, _TOP)
    axis = f"{'step, ms' if timed else 'moved each way'}"
    points = " ".join(f"{x(point.peak_bytes)},{y(costs[point])}" for point in curve)
    dots = "".join(
        f'<circle class="point" cx="{x(point.peak_bytes)}" cy="{y(cost)}" r="4"><title>'
        f"{escaped(_said(point))}</title></circle>"
        for point, cost in costs.items()
    )
    said = f"Peak against {axis} for {len(curve)} budgets, from {_said(curve[0])} to "
    said += _said(curve[-1])
    return (
        f'<svg class="curve" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escaped(said)}">{_axes(x, y, axis, timed)}'
        f'<polyline class="line" points="{points}"/>{dots}{_chosen(plan, x, y, own)}</svg>'
    )


def _own_cost(plan: Plan, timed: bool) -> float:
    if not timed:
        return float(_moved(plan).transfer_bytes)
    time = plan.predicted.time
    return 0.0 if time is None else time.step_ms


def _said(point: CurvePoint) -> str:
    step = "" if point.step_ms is None else f" in {point.step_ms:,.1f} ms"
    name = f"{point.name}: " if point.name else ""
    return f"{name}{format_size(point.peak_bytes)}{step}, {format_size(point.moved_bytes)} moved"


def _axes(x: _Scale, y: _Scale, axis: str, timed: bool) -> str:
    width, height = _CURVE
    parts = []
    for place, tick in enumerate(x.ticks()):
        anchor = "end" if place == _TICKS else "middle"
        text = escaped(format_size(round(tick)))
        parts.append(
            f'<line class="grid" x1="{x(tick)}" x2="{x(tick)}" y1="{_TOP}" '
            f'y2="{height - _BOTTOM}"/><text x="{x(tick)}" y="{height - _BOTTOM + 16}" '
            f'text-anchor="{anchor}">{text}</text>'
        )
    for tick in y.ticks():
        text = f"{tick:,.1f}" if timed else escaped(format_size(round(tick)))
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y(tick)}" '
            f'y2="{y(tick)}"/><text x="{_LEFT - 6}" y="{y(tick) + 4}" '
            f'text-anchor="end">{text}</text>'
        )
    parts.append(f'<text class="axis" x="{_LEFT}" y="{_TOP - 4}">{axis}</text>')
    middle = (_LEFT + width - _RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{height - 8}" text-anchor="middle">peak</text>'
    )
    return "".join(parts)


def _chosen(plan: Plan, x: _Scale, y: _Scale, own: float) -> str:
    """The plan's own point, and a line at its budget."""
    size = plan.predicted.plan.peak_bytes
    marks = ""
    if plan.budget:
        budget = x(plan.budget)
        marks = (
            f'<line class="budget" x1="{budget}" x2="{budget}" y1="{_TOP}" '
            f'y2="{_CURVE[1] - _BOTTOM}"><title>budget {escaped(format_size(plan.budget))}</title>'
            "</line>"
        )
    end = "end" if x(size) > _CURVE[0] / 2 else "start"
    shift = -10 if end == "end" else 10
    return (
        f'{marks}<circle class="chosen" cx="{x(size)}" cy="{y(own)}" r="6"><title>this plan: '
        f'{escaped(format_size(size))}</title></circle><text class="mark" x="{x(size) + shift}" '
        f'y="{y(own) - 8}" text-anchor="{end}">this plan</text>'
    )
