"""A gate's result as rows: what each check is called, and what makes one fail.

1.  A *finding* is a row of offenders of one check that are alike but for layer numbers (see
    ``fold``), or of storages that are at the peak together.
2.  Its *fingerprint* stays the same as long as the check, the op, the module but for its numbers,
    the dtype and the file do: other sizes, lines or layer counts leave it as it is.  Rows that
    share all of these are numbered.
3.  Its *place* is where its source line is in the repository; None for a line of an installed
    package, which cannot be commented on there.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from offplan.gate import Check, GateResult, Offender
from offplan.memory import LargeStorage
from offplan.report.document import Item, Listing
from offplan.report.fold import Group, fold
from offplan.units import format_size

# Rows shown of one check; the rest are summed.
MAX_ROWS = 20
_SOURCE = re.compile(r"(?P<file>.+):(?P<line>\d+)", re.ASCII)
_INTEGERS = re.compile(r"\d+(?:[-,.]+\d+)*", re.ASCII)


@dataclass(frozen=True)
class Finding:
    """Definition 1: ``size`` of all ``count`` of them, what they are, and details of a line each.

    ``source`` is as recorded (``model.py:11``), or empty.
    """

    size_bytes: int
    count: int
    tensor: str
    details: tuple[str, ...]
    module: str
    source: str
    fingerprint: str

    @property
    def size(self) -> str:
        return format_size(self.size_bytes)

    @property
    def times(self) -> str:
        return f"x{self.count:,}"


class Place(NamedTuple):
    """A line of a file, by its path from the root of the repository."""

    path: str
    line: int


@dataclass(frozen=True)
class Places:
    """Where sources are, taking each as it was recorded; ``gated`` is the file that was checked."""

    gated: str = ""

    def place(self, source: str) -> Place | None:
        """Where ``source`` is, if it is a line of a file that can be pointed at."""
        found = _SOURCE.fullmatch(source)
        return None if found is None else Place(found["file"], int(found["line"]))

    def home(self, result: GateResult) -> Place:
        """Where to say what has no place of its own: the target's factory, else what was gated."""
        target = re.sub(r":\w+$", "", result.target)
        candidates = (result.source, f"{target}:1" if target else "", f"{self.gated}:1")
        places = (self.place(source) for source in candidates)
        found = next((place for place in places if place is not None), None)
        return found or Place(self.gated or target, 1)


@dataclass(frozen=True)
class Checkout(Places):
    """Sources relative to ``directory``, if they are files of the repository at ``root``."""

    root: Path = Path()
    directory: Path = Path()

    @staticmethod
    def around(directory: Path, gated: str = "") -> Checkout:
        """The repository that ``directory`` is in, or ``directory`` itself if it is in none."""
        absolute = Path(os.path.realpath(directory))
        parents = (absolute, *absolute.parents)
        root = next((each for each in parents if (each / ".git").exists()), absolute)
        return Checkout(gated, root, absolute)

    def place(self, source: str) -> Place | None:
        found = super().place(source)
        if found is None:
            return None
        path = Path(os.path.realpath(self.directory / found.path))
        if not path.is_relative_to(self.root) or not path.is_file():
            return None
        return Place(path.relative_to(self.root).as_posix(), found.line)


# --- checks ---------------------------------------------------------------------------------------


def title(result: GateResult) -> str:
    """The target and its parameters."""
    return " ".join((result.target, *(f"{name}={text}" for name, text in result.params.items())))


def check_id(check: Check) -> str:
    """The option that asks for a check, and its rule where the option takes one."""
    if check.rule is None or check.option == "max-alias-skipped":
        return check.option
    return f"{check.option} {check.rule}"


def check_name(check: Check) -> str:
    if check.rule is None:
        return "predicted peak"
    if check.baseline_bytes is None:
        return f"skipped under {check.rule}"
    return f"growth of {check.rule} from {format_size(check.baseline_bytes)}"


def limit_and_actual(check: Check) -> tuple[str, str]:
    """Both sizes; in bytes where rounding would make different ones look the same."""
    limit, actual = format_size(check.limit_bytes), format_size(check.actual_bytes)
    if limit == actual and check.limit_bytes != check.actual_bytes:
        return f"{check.limit_bytes:,} B", f"{check.actual_bytes:,} B"
    return limit, actual


def check_line(check: Check) -> str:
    limit, actual = limit_and_actual(check)
    return f"{check_name(check)}: {actual}, limit {limit}"


def findings_title(check: Check) -> str:
    if check.rule is None:
        return "largest of what is live at the peak"
    found = len(check.offenders)
    new = "" if check.baseline_bytes is None else "new or larger, "
    values = "value" if found == 1 else "values"
    total = format_size(sum(offender.logical_bytes for offender in check.offenders))
    return f"{check.rule}: {new}{found:,} {values}, {total}"


# --- findings -------------------------------------------------------------------------------------


def findings(check: Check) -> list[Finding]:
    """Rows of what makes ``check`` fail, the largest total first."""
    if check.rule is None:
        # What is under a hundredth of the peak has not made it too high.
        rows = [
            _at_the_peak(each)
            for each in check.largest
            if each.count * each.size_bytes * 100 >= check.actual_bytes
        ]
    else:
        rows = [_skipped(check.offenders, group) for group in _folded(check.offenders)]
    return list(_with_fingerprints(check, rows))


def message(check: Check, finding: Finding) -> str:
    """A finding in one line."""
    what = "at the peak" if check.rule is None else f"skipped under {check.rule}"
    said = ", ".join((finding.tensor, *finding.details))
    return f"{finding.size} {finding.times} {what}: {said}"


def listing(check: Check) -> Listing:
    """What makes ``check`` fail, as a report shows it."""
    rows = findings(check)
    items = [
        Item((finding.size, finding.times, finding.tensor), finding.details)
        for finding in rows[:MAX_ROWS]
    ]
    hidden = rows[MAX_ROWS:]
    if hidden:
        size = format_size(sum(finding.size_bytes for finding in hidden))
        times = f"x{sum(finding.count for finding in hidden):,}"
        items.append(Item((size, times, "in further rows (see --format json)"), ()))
    return Listing(tuple(items), numeric=frozenset((0, 1)))


def _folded(offenders: Sequence[Offender]) -> list[Group]:
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


def _skipped(offenders: Sequence[Offender], group: Group) -> Finding:
    first = offenders[group.places[0]]
    holder, module, name = group.texts
    shape = ", ".join(map(str, first.shape))
    made = f"{first.op} {name}" if name else first.op
    return Finding(
        size_bytes=_group_bytes(offenders, group),
        count=len(group.places),
        tensor=f"{first.dtype}[{shape}] from {made}",
        details=(*_where(module, first.source), *([f"held by {holder}"] if holder else [])),
        module=module,
        source=first.source,
        fingerprint="\n".join((first.op, name, first.dtype)),
    )


def _at_the_peak(large: LargeStorage) -> Finding:
    module = f"{large.module} and others" if large.module and large.count > 1 else large.module
    return Finding(
        size_bytes=large.count * large.size_bytes,
        count=large.count,
        tensor=f"{large.part.replace('_', ' ')}, from {large.op or 'a graph input'}",
        details=_where(module, large.source),
        module=large.module,
        source=large.source,
        fingerprint="\n".join((large.op, large.part)),
    )


def _where(module: str, source: str) -> tuple[str, ...]:
    parts = (f"in {module}" if module else "", f"({source})" if source else "")
    text = " ".join(part for part in parts if part)
    return (text,) if text else ()


def _with_fingerprints(check: Check, rows: Sequence[Finding]) -> Iterator[Finding]:
    seen: Counter[str] = Counter()
    for row in rows:
        file = row.source.rpartition(":")[0]
        module = _INTEGERS.sub("#", row.module)
        key = "\n".join((check_id(check), row.fingerprint, module, file))
        seen[key] += 1
        yield replace(row, fingerprint=fingerprint(key, str(seen[key])))


def fingerprint(*parts: str) -> str:
    """A name of 32 hexadecimal digits for ``parts``."""
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]
