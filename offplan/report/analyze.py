"""What ``offplan analyze`` prints: what was traced, what is saved, who holds it, what can leave.

1.  A *row* of the largest storages stands for all entries of a plan that are equal but for the
    integers in their module paths, holders and input names (see ``fold``); rows are ordered by
    total bytes.
2.  Storages that the backward computes again are rows of their own, of which the same holds.
3.  What an action costs is that of one storage: milliseconds of running its ops again, or of
    copying it, each way.  It is shown for the actions that were not taken.
4.  Everything but ``timing`` is the same for the same plan; ``timing`` is None for a saved graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from offplan.budget import Action, CurvePoint, Elsewhere, JointPoint, Predicted
from offplan.eligibility import RULE_SETS, RULES, LedgerRow, Outcome, RuleSet, holder_kind
from offplan.graph import GraphBreak, TargetRef
from offplan.plan import Entry, EntryAction, Plan, Prices, Recomputed, RegionSize, View
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
from offplan.report.fold import Group, fold
from offplan.report.peak import (
    Asked,
    Moved,
    curve_blocks,
    elsewhere_blocks,
    joint_blocks,
    predicted_blocks,
)
from offplan.units import format_binary, format_seconds, format_size

Format = Literal["text", "json", "markdown"]

_REASONS: Mapping[Outcome, str] = {
    "eligible": "can leave the device",
    "not_tensor": "a SymInt or Python value",
    "symbolic_size": "size unknown when traced",
    "host": "already on the CPU",
    "unsupported": "not a strided tensor",
    "empty": "zero bytes",
    "parameter": "a parameter or buffer",
    "input": "is a graph input",
    "output": "is returned",
    "alias": "its holder keeps it",
    "alias_layout": "layout would be lost",
    "rng_state": "random-number state",
    "not_float": "not floating point",
}

# More views of one storage than this are counted, not listed.
_MAX_VIEWS = 4


class Timing(msgspec.Struct, frozen=True):
    """Seconds of each phase of an analysis; ``lower_s`` is 0 unless Inductor was asked."""

    build_s: float
    capture_s: float
    partition_s: float
    analysis_s: float
    lower_s: float = 0.0


class Sums(msgspec.Struct, frozen=True):
    """Values under one outcome of a rule set, counted as the ledger counts them."""

    values: int = 0
    logical_bytes: int = 0
    storage_bytes: int = 0


class RuleSetSums(msgspec.Struct, frozen=True):
    rules: RuleSet
    eligible: Sums
    alias: Sums
    alias_layout: Sums


class SavedAs(msgspec.Struct, frozen=True):
    """``count`` saved views that are alike: what they are, and the op that made them."""

    count: int
    dtype: str
    shape: tuple[int, ...]
    op: str
    module: str
    source: str


class StorageRow(msgspec.Struct, frozen=True):
    """``count`` storages that are alike (definition 1), of ``size_bytes`` each.

    ``op``, ``module`` and ``source`` are of the op that allocated them; for graph inputs ``op`` is
    the kind of input and ``name`` its name.  ``transfer_bytes`` (of each, each way) and
    ``reload_bytes`` (allocated for each on reload) are None where they stay.  ``prices`` are those
    of each.
    """

    count: int
    size_bytes: int
    total_bytes: int
    action: EntryAction
    rule: Outcome
    holder: str
    op: str
    name: str
    module: str
    source: str
    transfer_bytes: int | None
    reload_bytes: int | None
    prices: Prices | None
    views: tuple[SavedAs, ...]


class RecomputedRow(msgspec.Struct, frozen=True):
    """``count`` storages that are alike (definition 2), of ``size_bytes`` each.

    ``recompute_us`` and ``link_us`` are those of each.
    """

    count: int
    size_bytes: int
    total_bytes: int
    dtype: str
    shape: tuple[int, ...]
    op: str
    module: str
    source: str
    recompute_us: int
    link_us: int | None
    reason: str
    inputs: tuple[str, ...]


class Taken(msgspec.Struct, frozen=True):
    """What ``action`` is taken for.  ``time_us``: of all ops that run again, each once, or of all
    copies to the host where their prices are known; None where there is none."""

    action: Action
    storages: int
    storage_bytes: int
    time_us: int | None


class Staying(msgspec.Struct, frozen=True):
    """Storages that no budget moves, under one rule and held by one kind of holder."""

    rule: Outcome
    holder: str
    storages: int
    storage_bytes: int


class Moving(msgspec.Struct, frozen=True):
    """What the plan's budget moves.  ``transfer_bytes`` cross the link each way."""

    storages: int = 0
    storage_bytes: int = 0
    transfer_bytes: int = 0
    never_reloaded: int = 0


class AnalyzeReport(msgspec.Struct, frozen=True):
    target: TargetRef
    torch: str
    device: str
    gpu: str
    attention: str
    compiler: str
    partitioner: str
    digest: str
    regions: tuple[RegionSize, ...]
    breaks: tuple[GraphBreak, ...]
    warnings: tuple[str, ...]
    rules: RuleSet
    min_bytes: int
    budget: int | None
    asked: str
    predicted: Predicted
    saved_bytes: int
    movable_bytes: int
    moved_bytes: int
    staying_bytes: int
    saved_storages: int
    movable_storages: int
    ledger: tuple[LedgerRow, ...]
    rule_sets: tuple[RuleSetSums, ...]
    largest: tuple[StorageRow, ...]
    parameter_bytes: int
    parameter_storages: int
    not_shown_rows: int
    not_shown_bytes: int
    staying: tuple[Staying, ...]
    moving: Moving
    actions: tuple[Action, ...]
    taken: tuple[Taken, ...]
    recomputed: tuple[RecomputedRow, ...]
    not_shown_recomputed_rows: int
    not_shown_recomputed_bytes: int
    curve: tuple[CurvePoint, ...] = ()
    joint_curve: tuple[JointPoint, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()
    timing: Timing | None = None


# --- making ---------------------------------------------------------------------------------------


def analyze_report(
    plan: Plan,
    timing: Timing | None = None,
    top: int = 12,
    curve: tuple[CurvePoint, ...] = (),
    joint_curve: tuple[JointPoint, ...] = (),
    elsewhere: tuple[Elsewhere, ...] = (),
) -> AnalyzeReport:
    """The report on ``plan``, with the ``top`` largest rows of storages and the budget curve."""
    entries = [entry for entry in plan.storages if entry.id is not None]
    # Parameters are there in any case; what a reader can act on are the activations.
    activations = [entry for entry in entries if entry.rule != "parameter"]
    parameters = [entry for entry in entries if entry.rule == "parameter"]
    rows = _storage_rows(activations)
    hidden = rows[top:]
    again = _recomputed_rows(plan.recomputed)
    return AnalyzeReport(
        target=plan.target,
        torch=plan.torch,
        device=plan.device,
        gpu=plan.gpu,
        attention=plan.attention,
        compiler=plan.compiler,
        partitioner=plan.partitioner,
        digest=plan.digest,
        regions=plan.regions,
        breaks=plan.breaks,
        warnings=plan.warnings,
        rules=plan.rules,
        min_bytes=plan.min_bytes,
        budget=plan.budget,
        asked=plan.asked,
        predicted=plan.predicted,
        curve=curve,
        joint_curve=joint_curve,
        elsewhere=elsewhere,
        actions=plan.actions,
        taken=tuple(_taken(plan)),
        recomputed=tuple(again[:top]),
        not_shown_recomputed_rows=len(again[top:]),
        not_shown_recomputed_bytes=sum(row.total_bytes for row in again[top:]),
        saved_bytes=plan.saved_bytes,
        movable_bytes=plan.movable_bytes,
        moved_bytes=plan.moved_bytes,
        staying_bytes=plan.staying_bytes,
        saved_storages=len(entries),
        parameter_bytes=sum(entry.size_bytes for entry in parameters),
        parameter_storages=len(parameters),
        movable_storages=sum(entry.action != "skipped" for entry in entries),
        ledger=plan.ledger[plan.rules],
        rule_sets=tuple(_rule_set_sums(plan, name) for name in RULE_SETS),
        largest=tuple(rows[:top]),
        not_shown_rows=len(hidden),
        not_shown_bytes=sum(row.total_bytes for row in hidden),
        staying=tuple(_staying(plan, entries)),
        moving=_moving(plan),
        timing=timing,
    )


def _rule_set_sums(plan: Plan, rules: RuleSet) -> RuleSetSums:
    sums: dict[str, Sums] = {}
    for row in plan.ledger[rules]:
        before = sums.get(row.rule, Sums())
        sums[row.rule] = Sums(
            values=before.values + row.count,
            logical_bytes=before.logical_bytes + row.logical_bytes,
            storage_bytes=before.storage_bytes + row.storage_bytes,
        )
    found = [sums.get(name, Sums()) for name in ("eligible", "alias", "alias_layout")]
    return RuleSetSums(rules, *found)


def _storage_rows(entries: Sequence[Entry]) -> list[StorageRow]:
    groups = fold((_row_key(entry), _row_texts(entry)) for entry in entries)
    rows = [_storage_row(entries, group) for group in groups]
    # A stable sort: rows of equal size stay in the order of their first storage.
    return sorted(rows, key=lambda row: -row.total_bytes)


def _row_key(entry: Entry) -> tuple[object, ...]:
    views = tuple(
        (view.dtype, view.shape, view.stride, view.offset, view.op, view.source)
        for view in entry.views
    )
    same = (entry.size_bytes, entry.action, entry.rule, entry.op, entry.source, entry.footprint)
    return (*same, entry.prices, views)


def _row_texts(entry: Entry) -> list[str]:
    modules = [view.module for view in entry.views]
    return [entry.holder, _input_name(entry), entry.module, *modules]


def _input_name(entry: Entry) -> str:
    # Ops are overloads (aten.mm.default); kinds of input are one word.
    return "" if "." in entry.op else entry.name


def _storage_row(entries: Sequence[Entry], group: Group) -> StorageRow:
    first = entries[group.places[0]]
    holder, name, module, *view_modules = group.texts
    return StorageRow(
        count=len(group.places),
        size_bytes=first.size_bytes,
        total_bytes=first.size_bytes * len(group.places),
        action=first.action,
        rule=first.rule,
        holder=holder,
        op=first.op,
        name=name,
        module=module,
        source=first.source,
        transfer_bytes=first.footprint.transfer_bytes if first.footprint else None,
        reload_bytes=first.footprint.device_bytes if first.footprint else None,
        prices=first.prices,
        views=tuple(_saved_as(first.views, view_modules)),
    )


def _saved_as(views: Sequence[View], modules: Sequence[str]) -> Iterator[SavedAs]:
    """The views of one storage, those that are alike counted once."""
    alike: dict[tuple[str, tuple[int, ...], str, str, str], int] = {}
    for view, module in zip(views, modules, strict=True):
        key = (view.dtype, view.shape, view.op, module, view.source)
        alike[key] = alike.get(key, 0) + 1
    for key, count in alike.items():
        yield SavedAs(count, *key)


def _staying(plan: Plan, entries: Sequence[Entry]) -> Iterator[Staying]:
    """Sizes of skipped storages by rule and holder kind, in the order of the rules."""
    seen: set[int | None] = set()
    sums: dict[tuple[Outcome, str], list[int]] = {}
    for entry in entries:
        on_host = entry.device == "cpu" and plan.device != "cpu"
        if entry.action != "skipped" or entry.id in seen or on_host:
            continue
        seen.add(entry.id)
        row = sums.setdefault((entry.rule, holder_kind(entry.holder)), [0, 0])
        row[0] += 1
        row[1] += entry.size_bytes
    for rule in RULES:
        for (found, holder), (count, size_bytes) in sorted(sums.items()):
            if found == rule:
                yield Staying(rule, holder, count, size_bytes)


def _recomputed_rows(storages: Sequence[Recomputed]) -> list[RecomputedRow]:
    groups = fold((_recomputed_key(each), [each.module, *each.inputs]) for each in storages)
    rows = [_recomputed_row(storages, group) for group in groups]
    return sorted(rows, key=lambda row: -row.total_bytes)


def _recomputed_key(each: Recomputed) -> tuple[object, ...]:
    made = (each.size_bytes, each.dtype, each.shape, each.op, each.source)
    return (*made, each.recompute_us, each.link_us, each.reason)


def _recomputed_row(storages: Sequence[Recomputed], group: Group) -> RecomputedRow:
    first = storages[group.places[0]]
    module, *inputs = group.texts
    return RecomputedRow(
        count=len(group.places),
        size_bytes=first.size_bytes,
        total_bytes=first.size_bytes * len(group.places),
        dtype=first.dtype,
        shape=first.shape,
        op=first.op,
        module=module,
        source=first.source,
        recompute_us=first.recompute_us,
        link_us=first.link_us,
        reason=first.reason,
        inputs=tuple(inputs),
    )


def _taken(plan: Plan) -> Iterator[Taken]:
    """Movable storages by what is done with them, and what is not saved at all."""
    kept = {entry.id for entry in plan.storages if entry.action == "keep"}
    moved = [entry for entry in plan.storages if entry.action == "offload"]
    yield Taken("keep", len(kept), plan.movable_bytes - plan.moved_bytes, None)
    again_bytes = sum(each.size_bytes for each in plan.recomputed)
    again_us = plan.recompute_us if plan.recomputed else None
    yield Taken("recompute", len(plan.recomputed), again_bytes, again_us)
    links = [entry.prices.link_us for entry in moved if entry.prices is not None]
    known = [link_us for link_us in links if link_us is not None]
    copied_us = sum(known) if known and len(known) == len(moved) else None
    yield Taken("offload", len(moved), plan.moved_bytes, copied_us)


def _moving(plan: Plan) -> Moving:
    return Moving(
        storages=len(plan.transfers),
        storage_bytes=plan.moved_bytes,
        transfer_bytes=sum(transfer.transfer_bytes for transfer in plan.transfers),
        never_reloaded=sum(transfer.reload_at is None for transfer in plan.transfers),
    )


# --- rendering ------------------------------------------------------------------------------------


def render_analyze(report: AnalyzeReport, format: str = "text", width: int = 80) -> str:
    """``report`` as ``text``, ``json`` or ``markdown``.  ``UsageError`` for another format."""
    if format == "json":
        return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    return render_blocks(_document(report), format, width)


def _document(report: AnalyzeReport) -> Iterator[Block]:
    yield Heading(" ".join((report.target.spec, *_parameters(report.target))))
    yield Paragraph(tuple(_traced(report)))
    yield Heading(
        f"Saved for backward: {format_size(report.saved_bytes - report.parameter_bytes)} of "
        f"activations, {format_size(report.parameter_bytes)} of parameters"
    )
    yield _ledger_table(report.ledger, report.min_bytes)
    yield Paragraph(
        (
            (
                "",
                f"under {report.rules}, minimum {format_binary(report.min_bytes)}; "
                "logical: what the values carry; storage: each storage once",
            ),
        )
    )
    yield Heading(f"The three rule sets (this plan: {report.rules})")
    yield _rule_sets_table(report.rule_sets)
    if report.largest:
        yield Heading("Largest saved activations")
        yield _largest(report)
    yield Heading(
        f"Stays at any budget: {format_size(report.staying_bytes)} of "
        f"{format_size(report.saved_bytes)} saved ({report.rules})"
    )
    if report.staying:
        yield _staying_table(report.staying)
    if report.recomputed:
        yield Heading("Largest that the backward computes again")
        yield _recomputed(report)
    _, recompute, offload = report.taken
    if recompute.storages or offload.storages:
        yield Heading("Keep, recompute, offload: what is done with the rest")
        yield _taken_table(report.taken)
    yield from predicted_blocks(
        report.predicted, Asked(report.budget, report.asked), _moved(report, recompute)
    )
    yield from curve_blocks(report.curve)
    yield from joint_blocks(report.joint_curve)
    yield from elsewhere_blocks(report.elsewhere)


def _moved(report: AnalyzeReport, recompute: Taken) -> Moved:
    moving = report.moving
    return Moved(
        moving.storages,
        moving.transfer_bytes,
        moving.never_reloaded,
        recompute.storages,
        recompute.time_us or 0,
    )


def _parameters(target: TargetRef) -> list[str]:
    return [f"{name}={value}" for name, value in target.params.items()]


def _traced(report: AnalyzeReport) -> Iterator[tuple[str, str]]:
    device = f"{report.device} ({report.gpu})" if report.gpu else report.device
    attention = f", attention {report.attention}" if report.attention else ""
    yield (
        "traced for",
        f"{device}, torch {report.torch}, {report.compiler} compiler, {report.partitioner} "
        f"partitioner{attention}",
    )
    forward = sum(region.forward_ops for region in report.regions)
    backward = sum(region.backward_ops for region in report.regions)
    saved = sum(region.saved for region in report.regions)
    yield (
        "graphs",
        f"{counted(len(report.regions), 'region')}, {counted(forward, 'forward op')}, "
        f"{counted(backward, 'backward op')}, {counted(saved, 'saved value')}",
    )
    for found in report.breaks:
        yield "graph break", f"{found.source}: {found.reason}" if found.source else found.reason
    for warning in report.warnings:
        yield "warning", warning
    if report.timing is not None:
        yield "took", _took(report.timing)


def _took(timing: Timing) -> str:
    phases = (
        ("build", timing.build_s),
        ("capture", timing.capture_s),
        ("partition", timing.partition_s),
        *([("lowering", timing.lower_s)] if timing.lower_s else []),
        ("analysis", timing.analysis_s),
    )
    total = format_seconds(sum(seconds for _, seconds in phases))
    return f"{total}: " + ", ".join(f"{name} {format_seconds(spent)}" for name, spent in phases)


def _ledger_table(ledger: Sequence[LedgerRow], min_bytes: int) -> Table:
    rows = [
        (row.rule, _reason(row.rule, min_bytes), row.holder, *_ledger_sums([row])) for row in ledger
    ]
    return Table(
        columns=("rule", "because", "held by", "values", "logical", "storage"),
        rows=(*rows, ("total", "", "", *_ledger_sums(ledger))),
        numeric=frozenset((3, 4, 5)),
    )


def _ledger_sums(rows: Sequence[LedgerRow]) -> tuple[str, str, str]:
    return (
        f"{sum(row.count for row in rows):,}",
        format_size(sum(row.logical_bytes for row in rows)),
        format_size(sum(row.storage_bytes for row in rows)),
    )


def _reason(rule: Outcome, min_bytes: int) -> str:
    return f"storage under {format_binary(min_bytes)}" if rule == "too_small" else _REASONS[rule]


def _rule_sets_table(rule_sets: Sequence[RuleSetSums]) -> Table:
    rows = []
    for sums in rule_sets:
        found = (sums.eligible, sums.alias, sums.alias_layout)
        rows.append((sums.rules, "logical", *(format_size(each.logical_bytes) for each in found)))
        rows.append(("", "storage", *(format_size(each.storage_bytes) for each in found)))
    return Table(
        columns=("rules", "bytes", "eligible", "skipped: alias", "skipped: alias_layout"),
        rows=tuple(rows),
        numeric=frozenset((2, 3, 4)),
    )


def _largest(report: AnalyzeReport) -> Listing:
    items = [
        Item(
            cells=(format_size(row.total_bytes), _times(row) + _verdict(row)),
            details=tuple(_storage_lines(row)),
        )
        for row in report.largest
    ]
    if report.not_shown_rows:
        more = f"in {report.not_shown_rows:,} more rows (--top shows more)"
        items.append(Item((format_size(report.not_shown_bytes), more), ()))
    return Listing(tuple(items), numeric=frozenset((0,)))


def _times(row: StorageRow | RecomputedRow) -> str:
    return f"{row.count:,} x {format_size(row.size_bytes)}, " if row.count > 1 else ""


def _verdict(row: StorageRow) -> str:
    if row.action != "skipped":
        return row.action
    if row.rule in ("unsupported", "symbolic_size"):
        return f"skipped under {row.rule}: {row.holder}"
    # What it is held by is the storage itself, named on the next line.
    itself = row.rule in ("parameter", "input") and row.holder == f"{row.op} {row.name}"
    if not row.holder or itself:
        return f"skipped under {row.rule}"
    return f"skipped under {row.rule}, held by {row.holder}"


def _storage_lines(row: StorageRow) -> Iterator[str]:
    """Who allocated it and what is saved of it, in one line where that is the same op."""
    if _saved_as_made(row):
        view = row.views[0]
        yield f"{_tensor(view.dtype, view.shape)} from {_made_by(row)}"
    else:
        yield f"made by {_made_by(row)}"
        yield from _view_lines(row.views)
    if row.transfer_bytes is not None and row.reload_bytes is not None:
        carried, back = format_size(row.transfer_bytes), format_size(row.reload_bytes)
        if carried != format_size(row.size_bytes):
            yield f"transfers {carried} each way, takes {back} when reloaded"
    if row.prices is not None:
        if row.prices.reason:
            yield row.prices.reason
        yield from _not_taken(row)


def _not_taken(row: StorageRow) -> Iterator[str]:
    """What the other two actions would cost (definition 3)."""
    prices = row.prices
    assert prices is not None
    others = []
    if row.action != "keep":
        others.append(f"keep {format_size(row.size_bytes)}")
    if prices.recompute_us is not None:
        others.append(f"recompute {_duration(prices.recompute_us)}")
    if row.action != "offload" and prices.link_us is not None:
        others.append(f"offload {_duration(prices.link_us)} each way")
    if others:
        yield f"instead: {', '.join(others)}"
    if prices.recompute_why:
        yield f"cannot be recomputed: {prices.recompute_why}"


def _duration(time_us: int) -> str:
    return f"{time_us / 1000:,.2f} ms"


def _recomputed(report: AnalyzeReport) -> Listing:
    items = [
        Item(
            (format_size(row.total_bytes), _times(row) + f"recompute, {_recompute_price(row)}"),
            tuple(_recomputed_lines(row)),
        )
        for row in report.recomputed
    ]
    if report.not_shown_recomputed_rows:
        more = f"in {report.not_shown_recomputed_rows:,} more rows (--top shows more)"
        items.append(Item((format_size(report.not_shown_recomputed_bytes), more), ()))
    return Listing(tuple(items), numeric=frozenset((0,)))


def _recompute_price(row: RecomputedRow) -> str:
    return f"{_duration(row.recompute_us)}{' each' if row.count > 1 else ''}"


def _recomputed_lines(row: RecomputedRow) -> Iterator[str]:
    yield f"{_tensor(row.dtype, row.shape)} from {_where(row)}"
    if row.inputs:
        yield f"reads {', '.join(row.inputs)}"
    if row.reason:
        yield row.reason
    others = [f"keep {format_size(row.size_bytes)}"]
    if row.link_us is not None:
        others.append(f"offload {_duration(row.link_us)} each way")
    yield f"instead: {', '.join(others)}"


def _taken_table(taken: Sequence[Taken]) -> Table:
    words = {"keep": "", "recompute": " computed again", "offload": " copied, each way"}
    return Table(
        columns=("action", "storages", "bytes", "time"),
        rows=tuple(
            (
                each.action,
                f"{each.storages:,}",
                format_size(each.storage_bytes),
                "" if each.time_us is None else _duration(each.time_us) + words[each.action],
            )
            for each in taken
        ),
        numeric=frozenset((1, 2)),
    )


def _view_lines(views: Sequence[SavedAs]) -> Iterator[str]:
    for view in views[:_MAX_VIEWS]:
        times = f" {view.count:,} times" if view.count > 1 else ""
        yield f"saved{times} as {_tensor(view.dtype, view.shape)} from {_where(view)}"
    if len(views) > _MAX_VIEWS:
        yield f"and {len(views) - _MAX_VIEWS:,} more kinds of view"


def _saved_as_made(row: StorageRow) -> bool:
    if len(row.views) != 1 or row.views[0].count != 1:
        return False
    view = row.views[0]
    return (view.op, view.module, view.source) == (row.op, row.module, row.source)


def _made_by(row: StorageRow) -> str:
    return f"{row.op} {row.name}" if row.name else _where(row)


def _where(made: StorageRow | SavedAs | RecomputedRow) -> str:
    module = f" in {made.module}" if made.module else ""
    source = f" ({made.source})" if made.source else ""
    return f"{made.op}{module}{source}"


def _tensor(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _staying_table(staying: Sequence[Staying]) -> Table:
    return Table(
        columns=("rule", "held by", "storages", "bytes"),
        rows=tuple(
            (row.rule, row.holder, f"{row.storages:,}", format_size(row.storage_bytes))
            for row in staying
        ),
        numeric=frozenset((2, 3)),
    )
