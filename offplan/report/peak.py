"""What is predicted of the peak and the step, for a plan and for every budget.

1.  The table sets no plan beside the plan: peaks, the end of the forward, the step time, bytes over
    the link.  What is not predicted (times, without a profile of the GPU) is left out, and so is a
    plan that moves and recomputes nothing: it is no plan.
2.  *Cost* of a budget is by how much its step is longer than without a plan.
3.  A row of the curve names the least whole share of the peak that it stays within; its bar is as
    long as its step takes, beside that of the slowest budget.
4.  The joint curve sets plans with all three actions beside those that only offload and those that
    only recompute, and each action's break-even.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from offplan.budget import CurvePoint, Elsewhere, JointPoint, Predicted, PredictedTime
from offplan.memory import PARTS, LargeStorage, Prediction
from offplan.report.document import (
    Block,
    Heading,
    Item,
    Listing,
    Paragraph,
    Table,
    change,
    counted,
)
from offplan.units import format_size

# Sizes that print as they are typed.
_DECIMAL = re.compile(r"[\d. ]+([kMGT]?B)?", re.IGNORECASE)
_BAR_WIDTH = 20
_LARGEST_SHOWN = 5
_BAR = "█"


class Asked(NamedTuple):
    """The budget: in bytes (None: none, 0: everything moves), and as it was asked for."""

    budget_bytes: int | None
    text: str


class Moved(NamedTuple):
    """What the plan moves: ``transfer_bytes`` each way, in ``storages``; and how many more it has
    the backward compute again, in ``recompute_us``."""

    storages: int
    transfer_bytes: int
    never_reloaded: int
    recomputed: int = 0
    recompute_us: int = 0

    @property
    def nothing(self) -> bool:
        return not self.storages and not self.recomputed


def predicted_blocks(predicted: Predicted, asked: Asked, moved: Moved) -> Iterator[Block]:
    """Heading, tables and lines on the peak."""
    yield Heading(_title(predicted, asked))
    yield _table(predicted, moved)
    yield Paragraph(tuple(_lines(predicted, asked, moved)))
    yield Heading("What the predicted peak is made of")
    yield _parts_table(predicted, moved)
    if predicted.plan.largest:
        yield _largest(predicted.plan.largest)


def curve_blocks(curve: Sequence[CurvePoint]) -> Iterator[Block]:
    """What each budget costs."""
    if len(curve) < 2:
        return
    yield Heading("What each budget would cost")
    top = curve[0]
    longest = max(point.step_ms or 0.0 for point in curve) or 1.0
    rows = []
    for point in curve:
        row = [
            format_size(point.peak_bytes),
            point.name or f"{-(-100 * point.peak_bytes // top.peak_bytes)}%",
            format_size(point.moved_bytes),
        ]
        if point.step_ms is not None and top.step_ms is not None:
            bar = _BAR * round(_BAR_WIDTH * point.step_ms / longest)
            row += [f"{point.step_ms:,.1f} ms", _share(change(point.step_ms, top.step_ms)), bar]
        rows.append(tuple(row))
    columns: tuple[str, ...] = ("peak", "budget", "moved")
    if top.step_ms is not None:
        columns = (*columns, "step", "cost", "step time")
    yield Table(columns, tuple(rows), numeric=frozenset((0, 1, 2, 3, 4)))


def joint_blocks(curve: Sequence[JointPoint]) -> Iterator[Block]:
    """What each budget costs with all actions, and with one alone."""
    if len(curve) < 2:
        return
    yield Heading("What each budget would cost, with all actions and with one alone")
    arms = (
        ("all", [point.joint for point in curve]),
        ("offload", [point.offload for point in curve]),
        ("recompute", [point.recompute for point in curve]),
    )
    shown = [(name, points) for name, points in arms if any(points)]
    rows = [
        (_budget(point, curve[0]), *(cell for _, points in shown for cell in _cells(points[place])))
        for place, point in enumerate(curve)
    ]
    columns = [cell for name, _ in shown for cell in (name, "peak")]
    yield Table(("budget", *columns), tuple(rows), frozenset(range(1 + len(columns))))
    yield from _break_even(curve)


def elsewhere_blocks(found: Sequence[Elsewhere]) -> Iterator[Block]:
    """What the plan for the same peak would be on other machines."""
    if not found:
        return
    yield Heading("The same peak with a faster link, and on a slower GPU")
    rows = [
        (
            each.name,
            f"{each.no_plan_ms:,.1f} ms",
            f"{each.step_ms:,.1f} ms",
            _share(change(each.step_ms, each.no_plan_ms)),
            format_size(each.moved_bytes),
            format_size(each.recomputed_bytes),
        )
        for each in found
    ]
    columns = ("machine", "no plan", "step", "cost", "offloaded", "recomputed")
    yield Table(columns, tuple(rows), frozenset(range(1, len(columns))))


def _budget(point: JointPoint, top: JointPoint) -> str:
    named = next((p.name for p in (point.joint, point.offload, point.recompute) if p), "")
    return named or f"{-(-100 * point.limit_bytes // top.limit_bytes)}%"


def _cells(point: CurvePoint | None) -> tuple[str, str]:
    """Step time and peak."""
    if point is None:
        return "none", ""
    step = "" if point.step_ms is None else f"{point.step_ms:,.1f} ms"
    return step, format_size(point.peak_bytes)


def _break_even(curve: Sequence[JointPoint]) -> Iterator[Block]:
    rows = [
        (_budget(point, curve[0]), *map(_rate, _rates(point)))
        for point in curve
        if any(_rates(point))
    ]
    if rows:
        yield Heading("Break-even: bytes freed by a millisecond of waiting or of computing again")
        yield Table(("budget", "offload", "recompute"), tuple(rows), frozenset((0, 1, 2)))


def _rates(point: JointPoint) -> tuple[float | None, float | None]:
    return point.offload_bytes_per_ms, point.recompute_bytes_per_ms


def _rate(bytes_per_ms: float | None) -> str:
    return "" if bytes_per_ms is None else f"{format_size(round(bytes_per_ms))}/ms"


def _title(predicted: Predicted, asked: Asked) -> str:
    if asked.budget_bytes is None:
        return "No budget: nothing moves"
    if asked.budget_bytes == 0:
        return "Budget 0: everything movable moves"
    if asked.text == "floor":
        return "Budget floor: the least peak"
    return f"Budget {budget_words(asked)}"


def budget_words(asked: Asked) -> str:
    """A budget of so many bytes: as it was asked for, and its size where that is something else."""
    size = format_size(asked.budget_bytes or 0)
    is_decimal = not asked.text or _DECIMAL.fullmatch(asked.text)
    return size if is_decimal else f"{asked.text}: {size}"


def _table(predicted: Predicted, moved: Moved) -> Table:
    before, after = predicted.no_plan, predicted.plan
    sizes = [("peak allocated", before.peak_bytes, after.peak_bytes)]
    # Nothing is reserved on the CPU: both are then the same.
    if (before.reserved_bytes, after.reserved_bytes) != (before.peak_bytes, after.peak_bytes):
        sizes.append(("peak reserved", before.reserved_bytes, after.reserved_bytes))
    sizes.append(("end of forward", before.forward_end_bytes, after.forward_end_bytes))
    rows = [
        (name, format_size(old), format_size(new), _signed(format_size(new - old), new - old))
        for name, old, new in sizes
    ]
    if predicted.time is not None:
        rows.append(("step", *_step_cells(predicted.time)))
    columns = ("predicted", "no plan", "plan", "delta")
    if moved.nothing:
        return Table(columns[:2], tuple(row[:2] for row in rows), frozenset((1,)))
    if moved.recomputed:
        rows.append(("computed again", "", f"{moved.recompute_us / 1000:,.1f} ms", ""))
    if moved.storages:
        rows.append(("moved each way", "", format_size(moved.transfer_bytes), ""))
    return Table(columns, tuple(rows), frozenset((1, 2, 3)))


def _step_cells(time: PredictedTime) -> tuple[str, str, str]:
    delta = time.step_ms - time.no_plan_ms
    return (
        f"{time.no_plan_ms:,.1f} ms",
        f"{time.step_ms:,.1f} ms",
        _signed(f"{delta:,.1f} ms", delta),
    )


def _signed(text: str, value: float) -> str:
    return f"+{text}" if value > 0 else text


def _lines(predicted: Predicted, asked: Asked, moved: Moved) -> Iterator[tuple[str, str]]:
    if asked.budget_bytes is not None:
        yield "plan", _answer(predicted, asked, moved)
    if moved.never_reloaded:
        yield (
            "",
            f"{moved.never_reloaded:,} of them never come back: the backward reads nothing on them",
        )
    if predicted.time is not None and not moved.nothing:
        yield "step", _time(predicted.time)
    if predicted.plan.op_target:
        yield "peak", _where(predicted.plan)
    if asked.text != "floor":
        yield "floor", _floor(predicted)
    if predicted.band_percent is not None:
        yield (
            "band",
            f"peaks are predicted to within {predicted.band_percent}%, of the kernels that the "
            "compiler makes; what libraries allocate within a call on the CPU is not counted",
        )
    if predicted.margin_bytes is not None:
        yield (
            "margin",
            f"auto leaves {format_size(predicted.margin_bytes)} of the GPU to the CUDA context and "
            "its libraries, and keeps what the allocator reserves within the rest",
        )
    if predicted.host_budget is not None:
        yield "host", f"at most {format_size(predicted.host_budget)} of host memory"
    if predicted.profile:
        measured = ", with measured op times" if predicted.op_times == "measured" else ""
        yield "profile", f"{predicted.profile}{measured}"


def _answer(predicted: Predicted, asked: Asked, moved: Moved) -> str:
    limit = asked.budget_bytes
    if moved.nothing:
        if limit == 0:
            return "nothing can move"
        if limit and asked.text != "floor" and predicted.no_plan.peak_bytes <= limit:
            return "it fits already: nothing moves"
        return "nothing that can move lowers the peak"
    actions = (("recomputes", moved.recomputed), ("offloads", moved.storages))
    done = [f"{action} {counted(count, 'storage')}" for action, count in actions if count]
    said = " and ".join(done)
    if predicted.time is not None:
        cost = change(predicted.time.step_ms, predicted.time.no_plan_ms) or 0.0
        said += f", which costs {_share(cost)} of the step" if cost >= 5e-4 else ", at no cost"
    if limit == 0:
        said += "; --budget floor moves only what lowers the peak"
    elif limit and limit > predicted.plan.peak_bytes:
        said += f"; {format_size(limit - predicted.plan.peak_bytes)} under the budget"
    return said


def _time(time: PredictedTime) -> str:
    gap = change(time.step_ms, time.least_ms) or 0.0
    said = "the best possible for this peak"
    if gap >= 5e-4:
        said = f"at most {_share(gap)} over {said} ({time.least_ms:,.1f} ms)"
    if time.stalled_ms >= 0.05:
        said += f"; {time.stalled_ms:,.1f} ms of it are spent waiting for copies"
    return said


def _floor(predicted: Predicted) -> str:
    if predicted.floor_bytes >= predicted.no_plan.peak_bytes:
        return "no plan has a lower peak"
    return f"{format_size(predicted.floor_bytes)} is the least peak (--budget floor)"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _where(found: Prediction) -> str:
    module = f" in {found.op_module}" if found.op_module else ""
    source = f" ({found.op_source})" if found.op_source else ""
    return f"reached in {found.op_target}{module}{source}, op {found.op:,}"


def _largest(rows: Sequence[LargeStorage]) -> Listing:
    """What takes the most at the peak, storages that are alike together."""
    items = []
    for row in rows[:_LARGEST_SHOWN]:
        times = f"{row.count:,} x {format_size(row.size_bytes)}, " if row.count > 1 else ""
        module = f" in {row.module}" if row.module else ""
        others = " and others" if row.count > 1 and module else ""
        made = f"{row.op}{module}{others}" if row.op else "a graph input"
        source = f" ({row.source})" if row.source else ""
        said = f"{times}{row.part.replace('_', ' ')}: {made}{source}"
        items.append(Item((format_size(row.count * row.size_bytes), said), ()))
    return Listing(tuple(items), numeric=frozenset((0,)))


def _parts_table(predicted: Predicted, moved: Moved) -> Table:
    arms = [("no plan", predicted.no_plan), ("plan", predicted.plan)]
    if moved.nothing:
        del arms[1:]
    rows = [
        (part.replace("_", " "), *(format_size(arm.parts.get(part, 0)) for _, arm in arms))
        for part in PARTS
        if any(arm.parts.get(part) for _, arm in arms)
    ]
    peaks = (format_size(arm.peak_bytes) for _, arm in arms)
    return Table(
        ("", *(name for name, _ in arms)),
        (*rows, ("peak", *peaks)),
        numeric=frozenset(range(1, len(arms) + 1)),
    )
