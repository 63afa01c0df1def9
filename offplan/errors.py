"""The exceptions offplan raises on purpose, each with the exit code it ends in.

An error says three things: *what* failed, *where* (a file and line, an op, a field), and what to do
next (*fix*).  The command line prints them as one message without a traceback.  Exit codes: 1 an
error, 2 wrong usage, 3 the answer is no.
"""

from __future__ import annotations

# What a file says is repeated in messages, and files may say anything.
_MOST_SHOWN = 1000


class OffplanError(Exception):
    """Base of every deliberate error.  ``what`` is a sentence; ``where``, ``fix`` may be empty."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [_shown(self.what)]
        if self.where:
            lines.append(f"  at: {_shown(self.where)}")
        if self.fix:
            lines.append(f"  try: {_shown(self.fix)}")
        return "\n".join(lines)


def _shown(text: str) -> str:
    """``text`` as a terminal may be given it: nothing that it would act on, and not without end."""
    if len(text) > _MOST_SHOWN:
        half = _MOST_SHOWN // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


class UsageError(OffplanError):
    """The command was called wrongly: a bad option value or ``-p``, no threshold to check."""

    exit_code = 2


class TargetError(OffplanError):
    """The target cannot be found, imported or built."""


class DeviceError(OffplanError):
    """The device asked for cannot be traced for, or used, by this build of torch."""


class TraceError(OffplanError):
    """The model was built but cannot be traced; names the op and the user's line where known."""


class FileFormatError(OffplanError):
    """A file that offplan reads is not what it should be; names the file and the field."""


class OutputError(OffplanError):
    """A result cannot be written."""


class PlanError(OffplanError):
    """A plan is not valid for the graphs it claims to be for."""


class BudgetError(OffplanError):
    """No plan stays within the budget: the answer is no.  ``floor_bytes`` is the least peak."""

    exit_code = 3

    def __init__(self, what: str, *, floor_bytes: int = 0, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.floor_bytes = floor_bytes
