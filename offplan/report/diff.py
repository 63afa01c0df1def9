"""What ``offplan diff`` prints: settings that differ, then numbers, storages and the ledger.

1.  Changes that are alike but for layer numbers are one row (see ``fold``) with their count and
    what they add up to: the bytes that appeared or went, by which they grew, or, where only what is
    said of them changed, their bytes.
2.  Rows come largest first; of each kind the first ``top`` are printed, and the rest is counted.
3.  JSON has everything, unfolded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from offplan.diff import Change, Deciding, Difference, Item, LedgerChange, Quantity, Unit
from offplan.report.document import (
    Block,
    Heading,
    Listing,
    Paragraph,
    Table,
    counted,
    render_blocks,
)
from offplan.report.document import (
    Item as Listed,
)
from offplan.report.fold import fold
from offplan.units import format_size

DEFAULT_TOP = 20

# Always printed, equal or not.
_MAIN = ("peak, no plan", "peak, plan", "floor", "saved", "moved")
_RESIZED = frozenset(("grown", "shrunk", "reshaped"))
_TITLES = {"appeared": "Appeared", "gone": "Gone", "changed": "Changed"}


def render_diff(
    difference: Difference, format: str = "text", width: int = 80, top: int = DEFAULT_TOP
) -> str:
    """``difference`` as ``text``, ``json`` or ``markdown``.  ``UsageError`` for another format."""
    if format == "json":
        shown = {"differs": difference.differs, **msgspec.to_builtins(difference)}
        return msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n"
    return render_blocks(_document(difference, top), format, width)


def _document(difference: Difference, top: int) -> Iterator[Block]:
    if difference.is_identical:
        yield Heading(f"offplan diff: no difference: {difference.new_target}")
        return
    yield Heading(f"offplan diff: {_summary(difference)}: {difference.new_target}")
    lines = [(each.name, f"{each.old} -> {each.new}") for each in difference.settings]
    lines += [("note", note) for note in difference.notes]
    if lines:
        yield Paragraph(tuple(lines))
    yield Heading("Predicted")
    yield _numbers(difference.quantities)
    for kind in ("appeared", "gone", "changed"):
        found = [change for change in difference.changes if change.kind == kind]
        if found:
            yield from _changes(kind, found, top)
    if difference.ledger:
        yield Heading("Ledger: values, and the bytes of their storages")
        yield _ledger(difference.ledger)


def _summary(difference: Difference) -> str:
    counts = [
        f"{count:,} {kind}"
        for kind in ("appeared", "gone", "changed")
        if (count := sum(change.kind == kind for change in difference.changes))
    ]
    if not counts:
        return f"all {counted(difference.matched_count, 'storage')} alike"
    unchanged = difference.matched_count - sum(c.kind == "changed" for c in difference.changes)
    return f"storages: {', '.join(counts)}, {unchanged:,} alike"


# --- numbers and ledger ---------------------------------------------------------------------------


def _numbers(quantities: Sequence[Quantity]) -> Table:
    shown = [row for row in quantities if row.name in _MAIN or _signed(row) or _is_partial(row)]
    return Table(
        columns=("", "old", "new", "delta"),
        rows=tuple(
            (row.name, _cell(row.old, row.unit), _cell(row.new, row.unit), _signed(row))
            for row in shown
        ),
        numeric=frozenset((1, 2, 3)),
    )


def _cell(value: float | None, unit: Unit) -> str:
    if value is None:
        return ""
    if unit == "bytes":
        return format_size(int(value))
    return f"{value:,.1f} ms" if unit == "ms" else f"{int(value):,}"


def _is_partial(row: Quantity) -> bool:
    return (row.old is None) != (row.new is None)


def _signed(row: Quantity) -> str:
    if not row.delta or _cell(abs(row.delta), row.unit) == _cell(0, row.unit):
        return ""
    return ("+" if row.delta > 0 else "") + _cell(row.delta, row.unit)


def _ledger(rows: Sequence[LedgerChange]) -> Table:
    return Table(
        columns=("rules", "rule", "holder", "count", "delta", "storage", "delta"),
        rows=tuple(
            (
                row.rules,
                row.rule,
                "" if row.holder == row.rule else row.holder,
                f"{row.new_count:,}",
                _plus(row.new_count - row.old_count, "count"),
                format_size(row.new_storage_bytes),
                _plus(row.new_storage_bytes - row.old_storage_bytes, "bytes"),
            )
            for row in rows
        ),
        numeric=frozenset((3, 4, 5, 6)),
    )


def _plus(delta: int, unit: Unit) -> str:
    return _signed(Quantity("", unit, 0, delta))


# --- storages -------------------------------------------------------------------------------------


def _changes(kind: str, found: Sequence[Change], top: int) -> Iterator[Block]:
    total_bytes = sum(change.delta_bytes for change in found)
    said = f" ({_plus(total_bytes, 'bytes')})" if total_bytes else ""
    yield Heading(f"{_TITLES[kind]}: {counted(len(found), 'storage')}{said}")
    rows = sorted(_rows(found), key=lambda row: -abs(row[0]))
    yield Listing(tuple(row for _, row in rows[:top]), frozenset((0, 1)))
    if len(rows) > top:
        hidden = sum(abs(size) for size, _ in rows[top:])
        more = f"and {counted(len(rows) - top, 'row')} more of {format_size(hidden)} (--top)"
        yield Paragraph((("", more),))


def _rows(found: Sequence[Change]) -> Iterator[tuple[int, Listed]]:
    texts = [(_alike(change), (_where(change.item), *_details(change))) for change in found]
    for group in fold(texts):
        members = [found[place] for place in group.places]
        delta_bytes = sum(change.delta_bytes for change in members)
        size_bytes = delta_bytes or sum(change.item.size_bytes for change in members)
        shown = _plus(delta_bytes, "bytes") or format_size(size_bytes)
        where, *details = group.texts
        count = f"x{len(members):,}" if len(members) > 1 else ""
        yield size_bytes, Listed((shown, count, where), tuple(details))


def _alike(change: Change) -> tuple[object, ...]:
    """What must be equal for two changes to be folded, beside their texts."""
    sides = tuple(
        None if item is None else (item.op, item.dtype, item.shape, item.size_bytes, item.action)
        for item in (change.old, change.new)
    )
    return (change.facets, sides)


def _where(item: Item) -> str:
    if item.place[1] == item.name:
        return f"{item.op} {item.name}"
    return item.module or "(no module)"


def _details(change: Change) -> Iterator[str]:
    item, old, new = change.item, change.old, change.new
    source = f" ({item.source})" if item.source else ""
    if old is None or new is None:
        yield f"{item.op} {_typed(item)}, {item.action}{source}"
        return
    # What differs has its own line.
    typed = "" if _RESIZED.intersection(change.facets) else f" {_typed(item)}"
    action = "" if "action" in change.facets else f", {item.action}"
    yield f"{item.op}{typed}{action}{source}"
    if "grown" in change.facets or "shrunk" in change.facets:
        yield (
            f"{change.facets[0]}: {_typed(old)} of {format_size(old.size_bytes)} -> {_typed(new)} "
            f"of {format_size(new.size_bytes)}"
        )
    if "reshaped" in change.facets:
        yield f"saved as: {_typed(old)} -> {_typed(new)}"
    if "action" in change.facets:
        yield f"action: {old.action} -> {new.action}"
    for before, after in zip(old.deciding, new.deciding, strict=False):
        if before.verdicts != after.verdicts:
            yield f"{before.rules}: {_verdicts(before)} -> {_verdicts(after)}"


def _typed(item: Item) -> str:
    return f"{item.dtype}[{', '.join(map(str, item.shape))}]"


def _verdicts(deciding: Deciding) -> str:
    return ", ".join(f"{rule} ({holder})" if holder else rule for rule, holder in deciding.verdicts)
