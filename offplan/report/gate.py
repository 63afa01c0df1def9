"""What ``offplan gate`` prints: each check, and for one that fails, who to talk to.

Offenders that are alike but for layer numbers are one row (see ``fold``), with their holder and
source line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from offplan.errors import UsageError
from offplan.gate import Check, GateResult, Offender
from offplan.report.document import (
    Block,
    Heading,
    Item,
    Listing,
    Paragraph,
    Table,
    plain,
    to_markdown,
    to_text,
)
from offplan.report.fold import Group, fold
from offplan.units import format_size

# Rows of offenders under one check; the rest are summed.
_MAX_ROWS = 20
_SOURCE = re.compile(r"(?P<file>.+):(?P<line>\d+)", re.ASCII)


def render_gate(result: GateResult, format: str = "text", width: int = 80) -> str:
    """``result`` as ``text``, ``json``, ``markdown`` or ``github``.

    ``UsageError`` for another format.
    """
    if format == "json":
        return (
            msgspec.json.format(msgspec.json.encode(_primitive(result)), indent=2).decode() + "\n"
        )
    if format == "markdown":
        return to_markdown(_document(result))
    if format == "github":
        return "".join(f"{line}\n" for line in _annotations(result))
    if format == "text":
        return to_text(_document(result), width)
    raise UsageError(f"{format!r} is not a format", fix="one of: text, json, markdown, github")


# --- text and markdown ----------------------------------------------------------------------------


def _document(result: GateResult) -> Iterator[Block]:
    words = [result.target, *(f"{name}={value}" for name, value in result.params.items())]
    verdict = "ok" if result.ok else "failed"
    yield Heading(f"offplan gate {verdict}: {' '.join(words)} ({result.rules})")
    if result.notes:
        yield Paragraph(tuple(("note", note) for note in result.notes))
    yield Table(
        columns=("check", "limit", "actual", "", ""),
        rows=tuple(_check_row(check) for check in result.checks),
        numeric=frozenset((1, 2)),
    )
    for check in result.checks:
        if not check.ok:
            yield Heading(_offenders_title(check))
            yield _offenders(check.offenders)


def _check_row(check: Check) -> tuple[str, ...]:
    limit, actual = _exact_where_close(check.limit_bytes, check.actual_bytes)
    if check.ok:
        return (_check_name(check), limit, actual, "ok", "")
    over = format_size(check.actual_bytes - check.limit_bytes)
    return (_check_name(check), limit, actual, "FAILED", f"{over} too much")


def _exact_where_close(limit_bytes: int, actual_bytes: int) -> tuple[str, str]:
    """Both sizes; in bytes where rounding would make different ones look the same."""
    limit, actual = format_size(limit_bytes), format_size(actual_bytes)
    if limit == actual and limit_bytes != actual_bytes:
        return f"{limit_bytes:,} B", f"{actual_bytes:,} B"
    return limit, actual


def _check_name(check: Check) -> str:
    if check.baseline_bytes is None:
        return f"skipped under {check.rule}"
    return f"growth of {check.rule} from {format_size(check.baseline_bytes)}"


def _offenders_title(check: Check) -> str:
    found = len(check.offenders)
    new = "" if check.baseline_bytes is None else "new or larger, "
    values = "value" if found == 1 else "values"
    total = format_size(sum(offender.logical_bytes for offender in check.offenders))
    return f"{check.rule}: {new}{found:,} {values}, {total}"


def _offenders(offenders: Sequence[Offender]) -> Listing:
    rows = _folded(offenders)
    items = [_item(offenders, group) for group in rows[:_MAX_ROWS]]
    hidden = [offenders[place] for group in rows[_MAX_ROWS:] for place in group.places]
    if hidden:
        total = format_size(sum(offender.logical_bytes for offender in hidden))
        items.append(Item((total, f"x{len(hidden):,}", "in further rows (see --format json)"), ()))
    return Listing(tuple(items), numeric=frozenset((0, 1)))


def _folded(offenders: Sequence[Offender]) -> list[Group]:
    """Rows of offenders, the largest total first."""
    groups = fold(
        (
            (each.rule, each.logical_bytes, each.dtype, each.shape, each.op, each.source),
            (each.holder, each.module, _input_name(each)),
        )
        for each in offenders
    )
    return sorted(groups, key=lambda group: -_group_bytes(offenders, group))


def _input_name(offender: Offender) -> str:
    return "" if "." in offender.op else offender.name


def _group_bytes(offenders: Sequence[Offender], group: Group) -> int:
    return sum(offenders[place].logical_bytes for place in group.places)


def _item(offenders: Sequence[Offender], group: Group) -> Item:
    first = offenders[group.places[0]]
    holder, module, name = group.texts
    shape = ", ".join(map(str, first.shape))
    made = f"{first.op} {name}" if name else first.op
    where = " ".join(
        (f"in {module}" if module else "", f"({first.source})" if first.source else "")
    )
    details = [f"held by {holder}"] if holder else []
    if where.strip():
        details.insert(0, where.strip())
    return Item(
        cells=(
            format_size(_group_bytes(offenders, group)),
            f"x{len(group.places):,}",
            f"{first.dtype}[{shape}] from {made}",
        ),
        details=tuple(details),
    )


# --- GitHub ---------------------------------------------------------------------------------------


def _annotations(result: GateResult) -> Iterator[str]:
    """One workflow command per row of offenders, on its source line, then one for each check."""
    for note in result.notes:
        yield _command("notice", {"title": "offplan gate"}, note)
    for check in result.checks:
        limit, actual = _exact_where_close(check.limit_bytes, check.actual_bytes)
        said = f"{_check_name(check)}: {actual}, limit {limit}"
        if check.ok:
            yield plain(f"ok: {said}")
            continue
        yield _command("error", {"title": "offplan gate"}, said)
        for group in _folded(check.offenders)[:_MAX_ROWS]:
            yield _annotation(check, group)


def _annotation(check: Check, group: Group) -> str:
    first = check.offenders[group.places[0]]
    cells, details = _item(check.offenders, group)
    size, times, tensor = cells
    message = f"{size} {times} skipped under {check.rule}: {', '.join((tensor, *details))}"
    properties = {"title": f"offplan gate: {check.rule}"}
    source = _SOURCE.fullmatch(first.source)
    if source is not None:
        properties = {"file": source["file"], "line": source["line"], **properties}
    return _command("error", properties, message)


def _command(name: str, properties: dict[str, str], message: str) -> str:
    """A workflow command, escaped as GitHub's toolkit does."""
    listed = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{name} {listed}::{_message(message)}"


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


# --- JSON -----------------------------------------------------------------------------------------


def _primitive(result: GateResult) -> dict[str, object]:
    checks = [{"ok": check.ok, **vars(check)} for check in result.checks]
    return {"ok": result.ok, **vars(result), "checks": checks}
