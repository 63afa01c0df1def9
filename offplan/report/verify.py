"""What ``offplan verify`` prints: a row for each case, and what is wrong with those that are not
the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from offplan.report.document import (
    Block,
    Heading,
    Paragraph,
    Table,
    counted,
    render_blocks,
    to_text,
)
from offplan.units import format_size
from offplan.verified import CaseResult, Difference, Outcome, Pace, Verified, encode

# Differences of a case at one pace beyond these are counted.
_MAX_SHOWN = 2
_WORDS: dict[Outcome, str] = {
    "same": "same",
    "different": "DIFFERENT",
    "does not repeat": "DOES NOT REPEAT",
    "does not test what it says": "NOT WHAT IT SAYS",
    "failed": "FAILED",
    "not here": "not here",
}


def render_verified(found: Verified, format: str, width: int) -> str:
    """``found`` as ``text``, ``json`` or ``markdown``.  ``UsageError`` for another format."""
    if format == "json":
        return encode(found).decode()
    return render_blocks(_blocks(found), format, width)


def render_cases(cases: Sequence[tuple[str, str]], width: int) -> str:
    """Names of cases, and what each is about."""
    return to_text([Paragraph(tuple(cases))], width)


def _blocks(found: Verified) -> Iterator[Block]:
    yield Heading("offplan verify")
    yield Paragraph(tuple(_about(found)))
    yield Heading(_summary(found))
    yield Table(
        ("case", "moved", "transfers", "steps", ""),
        tuple(_row(case) for case in found.cases),
        frozenset({1, 2, 3}),
    )
    yield Paragraph(tuple(_not_here(found)))
    for case in found.cases:
        if case.outcome not in ("same", "not here"):
            yield Heading(f"{case.name}: {_WORDS[case.outcome]}")
            yield Paragraph(tuple(_details(case)))


def _not_here(found: Verified) -> Iterator[tuple[str, str]]:
    """Why some did not run: each reason once."""
    reasons: dict[str, list[str]] = {}
    for case in found.of("not here"):
        reasons.setdefault(case.message, []).append(case.name)
    for reason, names in reasons.items():
        yield "not here", f"{', '.join(names)}: {reason}"


def _about(found: Verified) -> Iterator[tuple[str, str]]:
    machine = found.machine
    if machine is not None:
        where = machine.gpu or machine.processor
        yield "on", f"{found.device} ({where}), torch {machine.torch}, {found.compiler}"
    yield (
        "each case",
        f"everything movable moved; {counted(found.repeats, 'repeat')} of "
        f"{counted(found.steps_per_session, 'step')} with copies {', '.join(found.paces)}",
    )
    yield (
        "compared",
        "losses, gradients, buffers, inputs and outputs bit for bit; bytes moved with the plan's",
    )


def _row(case: CaseResult) -> tuple[str, ...]:
    if case.outcome == "not here":
        return case.name, "", "", "", _WORDS[case.outcome]
    counts = (format_size(case.moved_bytes), str(case.transfers), f"{case.steps:,}")
    return case.name, *counts, _WORDS[case.outcome]


def _details(case: CaseResult) -> Iterator[tuple[str, str]]:
    if case.about:
        yield "about", case.about
    yield "target", case.target.spec
    for line in case.message.splitlines():
        yield "", line.strip()
    for claim in case.unmet:
        yield "", f"its graphs do not have {claim}"
    if case.outcome == "does not repeat":
        yield "", "two runs without a plan differ, so that its bits prove nothing:"
    shown = [*_first_of_each_pace(case.differences)]
    for difference in shown:
        yield "", _difference(difference)
    if case.difference_count > len(shown):
        yield "", f"and {case.difference_count - len(shown):,} more"
    for words in case.nondeterministic:
        yield "torch says", words


def _first_of_each_pace(differences: Sequence[Difference]) -> Iterator[Difference]:
    seen: Counter[Pace] = Counter()
    for each in differences:
        seen[each.pace] += 1
        if seen[each.pace] <= _MAX_SHOWN:
            yield each


def _difference(each: Difference) -> str:
    where = f"{each.pace}, repeat {each.repeat}"
    if each.step is not None:
        where += f", step {each.step}"
    what = f"{each.what} {each.name}".strip()
    if each.elements is not None:
        far = "not a number" if each.off_by is None else f"off by up to {each.off_by:.3g}"
        return f"{where}: {what}: {each.elements:,} of {each.of_elements:,} elements, {far}"
    if each.off_by is not None:
        return f"{where}: {what}: off by {each.off_by:.3g} of its norm"
    if not each.expected:
        return f"{where}: {what}: {each.found}"
    return f"{where}: {what}: {each.found}, not {each.expected}"


def _summary(found: Verified) -> str:
    counts = [
        f"{len(found.of(outcome))} {words}"
        for outcome, words in _WORDS.items()
        if found.of(outcome)
    ]
    return f"{counted(len(found.cases), 'case')}: {', '.join(counts)}"
