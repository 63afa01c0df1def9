"""What ``offplan explain`` prints: one storage in full, or many folded over identical layers.

1.  A *row* stands for all storages that were found that are equal but for the integers in their
    module paths, names and reasons (see ``fold``); rows are ordered by total bytes.
2.  Parameters are summed and not listed, unless nothing else was found.
3.  Observations are folded in the same way, with the bytes that each could free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from offplan.effects import Effect
from offplan.eligibility import Outcome
from offplan.explain import Action, At, Explained, Explanation, Found, Origin, SavedView, Use
from offplan.observed import Kind, Observation
from offplan.report.document import (
    Block,
    Heading,
    Item,
    Listing,
    Paragraph,
    Table,
    counted,
    render_blocks,
)
from offplan.report.fold import fold
from offplan.report.peak import elsewhere_blocks
from offplan.units import format_size

# More uses than this in a phase are counted: the first and the last ones are shown.
_MOST_USES = 12
_MOST_VALUES = 12
# What shows in hundredths of a millisecond.
_LEAST_MS = 0.005
_MORE_ROWS = "--top shows more"
_NUMBER = re.compile(r"[\d.]+ (?:[kMGT]?B|ms)")


class FoundRow(msgspec.Struct, frozen=True):
    """``count`` storages that are alike (definition 1), of ``size_bytes`` each."""

    count: int
    ids: tuple[int, ...]
    size_bytes: int
    total_bytes: int
    action: Action
    rule: Outcome
    why: str
    name: str
    op: str
    module: str
    source: str
    dtype: str
    shape: tuple[int, ...]


class ObservedRow(msgspec.Struct, frozen=True):
    """``count`` storages of which the same is observed; ``freed_bytes`` are of all of them."""

    count: int
    ids: tuple[int, ...]
    kind: Kind
    said: str
    op: str
    module: str
    source: str
    total_bytes: int
    freed_bytes: int


def render_explanation(
    found: Explanation, format: str = "text", width: int = 80, top: int = 12
) -> str:
    """``found`` as ``text``, ``json`` or ``markdown``, with the ``top`` largest rows.

    ``UsageError`` for another format.
    """
    if format == "json":
        return (
            msgspec.json.format(msgspec.json.encode(_primitive(found, top)), indent=2).decode()
            + "\n"
        )
    return render_blocks(_document(found, top), format, width)


def _primitive(found: Explanation, top: int) -> dict[str, object]:
    whole: dict[str, object] = msgspec.to_builtins(found)
    listed, parameters = _listed(found.found)
    rows = found_rows(listed)
    hidden = rows[top:]
    whole["found"] = msgspec.to_builtins(rows[:top])
    whole["not_shown_rows"] = len(hidden)
    whole["not_shown_bytes"] = sum(row.total_bytes for row in hidden)
    whole["parameter_storages"] = len(parameters)
    whole["parameter_bytes"] = sum(each.size_bytes for each in parameters)
    if not found.storages:
        whole["observations"] = msgspec.to_builtins(observed_rows(found))
    return whole


# --- folding --------------------------------------------------------------------------------------


def found_rows(found: Sequence[Found]) -> tuple[FoundRow, ...]:
    """Rows of what was found, those first that take the most bytes together."""
    groups = fold((_found_key(each), _found_texts(each)) for each in found)
    rows = []
    for group in groups:
        members = [found[place] for place in group.places]
        first = members[0]
        module, holding, name = group.texts
        why = holding or first.why
        if len({each.why for each in members}) > 1 and not holding:
            # Prices of layers that are alike can differ by a little.
            why = f"{first.why}, or about that"
        rows.append(
            FoundRow(
                count=len(members),
                ids=tuple(each.id for each in members if each.id is not None),
                size_bytes=first.size_bytes,
                total_bytes=first.size_bytes * len(members),
                action=first.action,
                rule=first.rule,
                why=why,
                name=name,
                op=first.origin.op,
                module=module,
                source=first.origin.source,
                dtype=first.dtype,
                shape=first.shape,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.total_bytes))


def _found_key(each: Found) -> tuple[object, ...]:
    made = (each.size_bytes, each.action, each.rule, each.dtype, each.shape)
    said = "" if each.action == "skipped" else _NUMBER.sub("", each.why)
    return (*made, each.origin.op, each.origin.source, said)


def _found_texts(each: Found) -> tuple[str, str, str]:
    """What may differ by integers: a reason only where it names a holder."""
    holding = each.why if each.action == "skipped" else ""
    return each.origin.module, holding, _given(each.origin)


def _given(origin: Origin) -> str:
    """The name of a graph input: ops are overloads (aten.mm.default), kinds of input one word."""
    return "" if "." in origin.op else origin.name


def _listed(found: Sequence[Found]) -> tuple[list[Found], list[Found]]:
    """What to list, and the parameters that are only summed (definition 2)."""
    others = [each for each in found if each.rule != "parameter"]
    parameters = [each for each in found if each.rule == "parameter"]
    return (others, parameters) if others else (parameters, [])


def observed_rows(found: Explanation) -> tuple[ObservedRow, ...]:
    """Rows of observations, those first that could free the most."""
    origins = {(each.region, each.id): each.origin for each in found.found}
    observed = found.observations
    made = [origins.get((each.region, each.storage), Origin("", "")) for each in observed]
    groups = fold(
        ((each.kind, each.size_bytes, origin.op, origin.source), (origin.module, each.said))
        for each, origin in zip(observed, made, strict=True)
    )
    rows = []
    for group in groups:
        members = [observed[place] for place in group.places]
        module, said = group.texts
        rows.append(
            ObservedRow(
                count=len(members),
                ids=tuple(each.storage for each in members),
                kind=members[0].kind,
                said=said,
                op=made[group.places[0]].op,
                module=module,
                source=made[group.places[0]].source,
                total_bytes=sum(each.size_bytes for each in members),
                freed_bytes=sum(each.freed_bytes for each in members),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.freed_bytes))


# --- the document ---------------------------------------------------------------------------------


def _document(found: Explanation, top: int) -> Iterator[Block]:
    if found.storages:
        for each in found.storages:
            yield from _explained(found, each)
    else:
        yield from _found(found, top)
    if found.machines:
        yield from _machines(found)
    yield from elsewhere_blocks(found.elsewhere)
    if found.notes:
        yield Paragraph(tuple(("note", note) for note in found.notes))


# --- one storage ----------------------------------------------------------------------------------


def _explained(found: Explanation, each: Explained) -> Iterator[Block]:
    named = f"#{each.id}" if each.id is not None else each.origin.name
    size = format_size(each.size_bytes)
    where = f" of {each.origin.module}" if each.origin.module else ""
    yield Heading(f"{named}: {size}{where}, {each.action}")
    yield Paragraph(tuple(_lines(each)))
    if each.observations:
        yield Heading("Worth knowing")
        yield Paragraph(tuple(("", _observed(observed)) for observed in each.observations))
    if len(each.values) > 1 or any(value.roles for value in each.values):
        yield Heading("What is on it, and what keeps it past the forward")
        yield from _values(each)
    if each.verdicts:
        yield Heading("What each rule set says")
        yield _verdicts(each)
    if each.action == "skipped" and found.has_graphs:
        yield Heading("What would unlock it")
        yield _unlocks(each)
    yield from _effects(found, each)
    if each.uses:
        yield Heading("Ops that use it")
        yield _uses(each.uses)


def _lines(each: Explained) -> Iterator[tuple[str, str]]:
    yield "why", each.why
    yield "made by", _of(each.origin)
    for view in each.views:
        yield "saved as", _view(view, each)
    region = f", region {each.region}"
    if each.also_saved_by:
        others = ", ".join(map(str, each.also_saved_by))
        region += f"; saved by region {others}, too"
    yield "storage", f"{format_size(each.size_bytes)} on {each.device or 'no device'}{region}"
    if each.range_bytes is not None and each.transfer_bytes is not None:
        yield "a move", _move(each)
    if each.recompute_us is not None:
        yield "computing", _again(each)
    elif each.recompute_why:
        yield "computing", f"it cannot be computed again: {each.recompute_why}"
    if each.trip is not None:
        yield "leaves", f"after {_at(each.trip.offload_after)}"
        yield "released", f"after {_at(each.trip.release_by)}"
        if each.trip.reload_at is not None and each.trip.needed_by is not None:
            yield "comes back", f"from {_at(each.trip.reload_at)}"
            yield "needed by", _at(each.trip.needed_by)
        else:
            yield "comes back", "never: the backward does not read it"


def _of(origin: Origin) -> str:
    if "." not in origin.op:
        return f"{origin.op} {origin.name}".strip()
    module = f" in {origin.module}" if origin.module else ""
    source = f" ({origin.source})" if origin.source else ""
    return f"{origin.name}, {origin.op}{module}{source}"


def _view(view: SavedView, each: Explained) -> str:
    shape = f"{view.dtype}[{', '.join(map(str, view.shape))}]"
    layout = f", {view.layout}" if view.layout else ""
    strides = ""
    if view.layout not in ("contiguous", "scalar", "") or view.offset:
        strides = f" (strides {', '.join(map(str, view.stride))}, offset {view.offset})"
    positions = ", ".join(map(str, view.positions))
    made = "" if view.origin == each.origin else f", by {_of(view.origin)}"
    carried = format_size(view.logical_bytes)
    return f"{shape}{layout}{strides}: {carried}, position {positions}{made}"


def _move(each: Explained) -> str:
    assert each.transfer_bytes is not None
    assert each.range_bytes is not None
    link = f" in {_ms(each.link_us)}" if each.link_us is not None else ""
    said = f"carries {format_size(each.transfer_bytes)} each way{link}"
    if each.packed:
        said += ", packed"
    if each.range_bytes != each.size_bytes:
        said += f"; {format_size(each.range_bytes)} come back on the device"
    gap_bytes = each.range_bytes - (each.touched_bytes or 0)
    if gap_bytes > 0:
        said += f", {format_size(gap_bytes)} of them gaps between the views"
    return said


def _again(each: Explained) -> str:
    assert each.recompute_us is not None
    said = f"again takes {_ms(each.recompute_us)}"
    if each.recompute_ops:
        said += f", {counted(each.recompute_ops, 'op')}"
    if each.recompute_inputs:
        said += f", from {', '.join(each.recompute_inputs)}"
    return said


def _at(at: At) -> str:
    made = f", {_of(at.origin)}" if at.origin.name else ""
    return f"op {at.index:,} of the {at.phase}{made}"


def _ms(time_us: int) -> str:
    return f"{time_us / 1000:,.2f} ms"


def _observed(each: Observation) -> str:
    freed, size = format_size(each.freed_bytes), format_size(each.size_bytes)
    return f"it {each.said}; that could free {freed} of {size}"


def _values(each: Explained) -> Iterator[Block]:
    shown = each.values[:_MOST_VALUES]
    rows = [
        (
            value.origin.name,
            f"view of {value.of}" if value.of else "made" if "." in value.origin.op else "given",
            ", ".join(value.roles) or "gone with its last reader",
        )
        for value in shown
    ]
    if len(each.values) > len(shown):
        rows.append((f"{len(each.values) - len(shown)} more", "", ""))
    yield Table(("value", "", "why it stays"), tuple(rows))
    if each.paths:
        yield Paragraph(tuple((f"held by {path.holder}", path.path) for path in each.paths))


def _uses(uses: Sequence[Use]) -> Listing:
    shown = list(uses)
    items = []
    if len(shown) > 2 * _MOST_USES:
        shown = [*uses[:_MOST_USES], *uses[-_MOST_USES:]]
    for place, use in enumerate(shown):
        if place == _MOST_USES and len(uses) > 2 * _MOST_USES:
            items.append(Item(("...", "", f"{len(uses) - len(shown):,} more"), ()))
        at = use.at
        items.append(Item((f"{at.index:,}", f"{at.phase} {use.does}", _of(at.origin)), ()))
    return Listing(tuple(items), numeric=frozenset((0,)))


def _verdicts(each: Explained) -> Listing:
    several = len(each.views) > 1
    items = []
    for said in each.verdicts:
        names = (
            f"{', '.join(said.names)}: " if several and len(said.names) < len(each.views) else ""
        )
        items.append(Item((said.rules, said.rule, f"{names}{said.because}"), ()))
    return Listing(tuple(items))


def _unlocks(each: Explained) -> Paragraph:
    if not each.unlocks:
        return Paragraph((("", "nothing that is known here, short of not saving it"),))
    return Paragraph(tuple(("", f"{unlock.change}: {unlock.effect}") for unlock in each.unlocks))


# --- effects --------------------------------------------------------------------------------------


def _effects(found: Explanation, each: Explained) -> Iterator[Block]:
    if not each.effects:
        return
    first = each.effects[0]
    yield Heading("What another action would do, all else as planned")
    step = "" if first.step_ms is None else f"{first.step_ms:,.1f} ms"
    rows: list[tuple[str, ...]] = [
        (f"{each.action} (the plan)", format_size(first.peak_bytes), "", step, "")
    ]
    for effect in each.effects:
        times = ("", "")
        if effect.step_ms is not None and effect.other_step_ms is not None:
            change = effect.other_step_ms - effect.step_ms
            times = (f"{effect.other_step_ms:,.1f} ms", _signed_ms(change))
        bound = "about " if effect.is_bound else ""
        delta = effect.other_peak_bytes - effect.peak_bytes
        rows.append(
            (
                effect.action + (f" all {effect.count}" if effect.count > 1 else ""),
                bound + format_size(effect.other_peak_bytes),
                _signed(delta),
                *times,
            )
        )
    columns: tuple[str, ...] = ("action", "peak", "", "step", "")
    if first.step_ms is None:
        columns, rows = columns[:3], [row[:3] for row in rows]
    yield Table(columns, tuple(rows), frozenset(range(1, len(columns))))
    yield Paragraph(tuple(line for effect in each.effects for line in _said(found, each, effect)))
    yield from _elsewhere(each)


def _said(found: Explanation, each: Explained, effect: Effect) -> Iterator[tuple[str, str]]:
    there = "it is on the device then" if effect.at_peak else "it is not on the device then"
    if effect.still_there:
        there = effect.still_there
    delta = effect.other_peak_bytes - effect.peak_bytes
    if delta == 0 and effect.other_peak_op != effect.peak_op:
        yield (
            effect.action,
            f"leaves the peak as it is: it is reached in {effect.other_peak_op}, too",
        )
    elif delta == 0:
        yield effect.action, f"leaves the peak as it is, in {effect.peak_op}: {there}"
    elif effect.other_peak_op != effect.peak_op and abs(delta) < each.size_bytes:
        yield effect.action, f"takes the peak from {effect.peak_op} to {effect.other_peak_op}"
    elif delta < 0 and abs(delta) < each.size_bytes:
        yield effect.action, f"lowers the peak in {effect.peak_op}"
    else:
        side = "lowers" if delta < 0 else "raises"
        yield effect.action, f"{side} the peak, which is in {effect.other_peak_op}"
    if effect.laid_out_anew:
        yield "", "the compiler lays out a step without any transfer otherwise, which is part of it"
    over = effect.other_peak_bytes - (found.budget or 0)
    if found.budget and over > 0:
        yield "", f"{format_size(over)} over the budget"
    if effect.is_bound and effect.action == "recompute":
        yield "", "at best: what it is computed from has to be there, then"
    elif effect.is_bound:
        yield "", "at most: what it is computed from may not have to be saved, then"


def _elsewhere(each: Explained) -> Iterator[Block]:
    for effect in each.effects:
        changes = (m.other_ms - m.step_ms for m in effect.machines if m.other_ms is not None)
        if not any(abs(change) >= _LEAST_MS for change in changes):
            continue
        yield Heading(f"Its step on other machines: {each.action}, or {effect.action}")
        rows = [
            (
                machine.name,
                f"{machine.step_ms:,.1f} ms",
                f"{machine.other_ms:,.1f} ms",
                _signed_ms(machine.other_ms - machine.step_ms),
            )
            for machine in effect.machines
            if machine.other_ms is not None
        ]
        columns = ("machine", each.action, effect.action, "")
        yield Table(columns, tuple(rows), frozenset((1, 2, 3)))


def _signed(size_bytes: int) -> str:
    if size_bytes == 0:
        return "the same"
    return f"{'+' if size_bytes > 0 else ''}{format_size(size_bytes)}"


def _signed_ms(change_ms: float) -> str:
    return "the same" if abs(change_ms) < _LEAST_MS else f"{change_ms:+,.2f} ms"


# --- many storages --------------------------------------------------------------------------------


def _found(found: Explanation, top: int) -> Iterator[Block]:
    listed, parameters = _listed(found.found)
    rows = found_rows(listed)
    total = sum(row.total_bytes for row in rows)
    named = found.name or " ".join(
        (found.target.spec, *(f"{key}={value}" for key, value in found.target.params.items()))
    )
    yield Heading(f"{named}: {format_size(total)} in {counted(len(listed), 'storage')}")
    yield Paragraph(tuple(_summary(found, listed, parameters)))
    yield Heading("The largest, folded over identical layers")
    yield _rows(rows, top)
    narrow = next((row.ids[0] for row in rows if row.ids), None)
    if narrow is not None:
        said = (
            f"offplan explain PLAN '#{narrow}' explains one; a module path, op or file:line, some"
        )
        yield Paragraph((("", said),))
    observed = observed_rows(found)
    if observed:
        yield from _observations(observed, top)


def _summary(
    found: Explanation, listed: Sequence[Found], parameters: Sequence[Found]
) -> Iterator[tuple[str, str]]:
    for action in ("offload", "recompute", "keep", "skipped", "not saved"):
        sizes = [each.size_bytes for each in listed if each.action == action]
        if sizes:
            yield action, f"{format_size(sum(sizes))} in {counted(len(sizes), 'storage')}"
    if parameters:
        size = format_size(sum(each.size_bytes for each in parameters))
        yield "parameters", f"{size} in {counted(len(parameters), 'storage')}, which stay"
    if not found.name:
        peak, no_plan = format_size(found.peak_bytes), format_size(found.no_plan_peak_bytes)
        same = found.peak_bytes == found.no_plan_peak_bytes
        yield "peak", f"{peak}, as without a plan" if same else f"{peak}, {no_plan} without a plan"


def _rows(rows: Sequence[FoundRow], top: int) -> Listing:
    items = []
    for row in rows[:top]:
        times = f"{row.count} x {format_size(row.size_bytes)} " if row.count > 1 else ""
        made = row.name if "." not in row.op else row.op
        where = f" in {row.module}" if row.module else ""
        ids = f"#{row.ids[0]}" + (" and others" if len(row.ids) > 1 else "") if row.ids else ""
        shape = f"{row.dtype}[{', '.join(map(str, row.shape))}]" if row.dtype else ""
        if row.source:
            shape += f" at {row.source}"
        items.append(
            Item(
                (format_size(row.total_bytes), row.action, f"{times}{made}{where}"),
                (", ".join(part for part in (shape, ids) if part), row.why),
            )
        )
    hidden = rows[top:]
    if hidden:
        size = format_size(sum(row.total_bytes for row in hidden))
        items.append(Item((size, "", f"in {counted(len(hidden), 'more row')} ({_MORE_ROWS})"), ()))
    return Listing(tuple(items), numeric=frozenset((0,)))


def _observations(rows: Sequence[ObservedRow], top: int) -> Iterator[Block]:
    total = format_size(sum(row.freed_bytes for row in rows))
    yield Heading(f"What could be saved smaller: up to {total}")
    items = []
    for row in rows[:top]:
        where = f" in {row.module}" if row.module else ""
        times = f"{row.count} x " if row.count > 1 else ""
        size = format_size(row.total_bytes // row.count)
        items.append(
            Item(
                (format_size(row.freed_bytes), f"{times}{size} {row.op}{where}"),
                (f"{'each ' if row.count > 1 else ''}{row.said} (#{row.ids[0]})",),
            )
        )
    hidden = rows[top:]
    if hidden:
        size = format_size(sum(row.freed_bytes for row in hidden))
        items.append(Item((size, f"in {counted(len(hidden), 'more row')} ({_MORE_ROWS})"), ()))
    yield Listing(tuple(items), numeric=frozenset((0,)))


def _machines(found: Explanation) -> Iterator[Block]:
    yield Heading("This plan, on other machines")
    rows = []
    for machine in found.machines:
        no_plan = machine.no_plan_ms or 0.0
        cost = f"{100 * (machine.step_ms / no_plan - 1):+.1f}%" if no_plan else ""
        rows.append((machine.name, f"{no_plan:,.1f} ms", f"{machine.step_ms:,.1f} ms", cost))
    yield Table(("machine", "no plan", "step", "cost"), tuple(rows), frozenset((1, 2, 3)))
    if not found.elsewhere and found.budget is not None:
        yield Paragraph((("", "what a new plan for the same peak would do there: --elsewhere"),))
