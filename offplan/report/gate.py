"""What ``offplan gate`` prints: each check, and for one that fails, who to talk to.

Offenders that are alike but for layer numbers are one row (see ``findings``), with their holder and
source line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from offplan.errors import UsageError
from offplan.gate import Check, GateResult
from offplan.report.ci import github, gitlab, junit, sarif
from offplan.report.document import Block, Heading, Paragraph, Table, to_markdown, to_text
from offplan.report.findings import (
    Places,
    check_name,
    findings,
    findings_title,
    limit_and_actual,
    listing,
    title,
)
from offplan.units import format_size

_FOR_MACHINES: Mapping[str, Callable[[GateResult, Places], str]] = {
    "github": github,
    "gitlab": gitlab,
    "junit": junit,
    "sarif": sarif,
}
# What the first bytes of each are, by which a report of an earlier run is recognized in a file.
GATE_FORMATS: Mapping[str, bytes] = {
    "text": b"offplan gate ",
    "json": b'{\n  "ok": ',
    "markdown": b"### offplan gate ",
    "github": b"",
    "gitlab": b"[",
    "junit": b"<?xml ",
    "sarif": b'{\n  "$schema": ',
}


def render_gate(
    result: GateResult, format: str = "text", width: int = 80, places: Places | None = None
) -> str:
    """``result`` in one of ``GATE_FORMATS``; ``places`` finds source lines, by default as recorded.

    ``UsageError`` for another format.
    """
    if format == "json":
        return (
            msgspec.json.format(msgspec.json.encode(_primitive(result)), indent=2).decode() + "\n"
        )
    if format == "markdown":
        return to_markdown(_document(result))
    if format == "text":
        return to_text(_document(result), width)
    if format in _FOR_MACHINES:
        return _FOR_MACHINES[format](result, places or Places())
    raise UsageError(f"{format!r} is not a format", fix=f"one of: {', '.join(GATE_FORMATS)}")


# --- text and markdown ----------------------------------------------------------------------------


def _document(result: GateResult) -> Iterator[Block]:
    verdict = "ok" if result.ok else "failed"
    yield Heading(f"offplan gate {verdict}: {title(result)} ({result.rules})")
    if result.notes:
        yield Paragraph(tuple(("note", note) for note in result.notes))
    yield Table(
        columns=("check", "limit", "actual", "", ""),
        rows=tuple(_check_row(check) for check in result.checks),
        numeric=frozenset((1, 2)),
    )
    for check in result.checks:
        if findings(check):
            yield Heading(findings_title(check))
            yield listing(check)


def _check_row(check: Check) -> tuple[str, ...]:
    limit, actual = limit_and_actual(check)
    if check.ok:
        return (check_name(check), limit, actual, "ok", "")
    over = format_size(check.actual_bytes - check.limit_bytes)
    return (check_name(check), limit, actual, "FAILED", f"{over} too much")


# --- JSON -----------------------------------------------------------------------------------------


def _primitive(result: GateResult) -> dict[str, object]:
    checks = [{"ok": check.ok, **vars(check)} for check in result.checks]
    return {"ok": result.ok, **vars(result), "checks": checks}
