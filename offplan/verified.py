"""What ``offplan verify`` found: a result for each case, and what they come to.

1.  A *case* is a small target that shows one thing, or the user's own.  It is replayed at the
    floor, with everything movable moved, and compared with the same graphs that move nothing.
2.  A *session* is a few training steps from the same beginning.  The plan runs one at every *pace*
    of its copies in each *repeat*; without a plan there is one, and a second as a control.
3.  *Outcomes*: ``same``; ``different``: bits, bytes or the order of copies are not as they have to
    be; ``does not repeat``: the control differs, so that bits prove nothing; ``does not test what
    it says``: the graphs do not contain the case's subject; ``failed``: an error; ``not here``: the
    device has not what the case needs.
4.  ``off_by`` of a difference is the largest absolute one of its elements; for tensors that were
    compared by fingerprint an estimate of the whole distance, relative to the norm; None where one
    of the two is not finite or there is no number.

Records are primitive facts, and strict; this is the format of ``offplan verify -o FILE``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from offplan.files import FileKind, write_atomically
from offplan.graph import Compiler, TargetRef
from offplan.measured import Machine

SCHEMA_VERSION = 1
VERIFIED_FILE = FileKind("an offplan verification", b'{\n  "verified": ')

Count = Annotated[int, msgspec.Meta(ge=0)]
Pace = Literal["as they come", "slow", "slow to the host", "slow to the device", "fast"]
PACES: tuple[Pace, ...] = get_args(Pace)
Outcome = Literal[
    "same", "different", "does not repeat", "does not test what it says", "failed", "not here"
]
What = Literal[
    "loss",
    "gradient",
    "buffer",
    "input",
    "output",
    "output, a step later",
    "bytes to the host",
    "bytes to the device",
    "transfers to the host",
    "transfers to the device",
    "order of copies",
]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Difference(_Record, frozen=True, kw_only=True):
    """One thing that is not as it is without a plan, or not as the plan says.

    ``step`` counts from 0; None where it is of the whole session.  ``elements`` of ``of_elements``
    have other bits.
    """

    what: What
    name: str = ""
    pace: Pace
    repeat: Count
    step: Count | None = None
    expected: str = ""
    found: str = ""
    elements: Count | None = None
    of_elements: Count | None = None
    off_by: float | None = None


class CaseResult(_Record, frozen=True, kw_only=True):
    """What became of one case.  ``tensors`` were compared after each step.

    ``differences`` are the first ones of ``difference_count``.  ``unmet`` is what the case claims
    and its graphs do not have.  ``message`` says what failed, or what is missing here.
    """

    name: str
    about: str
    target: TargetRef
    outcome: Outcome
    message: str = ""
    unmet: tuple[str, ...] = ()
    moved_bytes: Count = 0
    transfers: Count = 0
    sessions: Count = 0
    steps: Count = 0
    tensors: Count = 0
    difference_count: Count = 0
    differences: tuple[Difference, ...] = ()
    nondeterministic: tuple[str, ...] = ()
    wall_s: float = 0.0


class Verified(_Record, frozen=True, kw_only=True):
    """The file, and what commands print."""

    verified: str
    schema_version: int
    device: str
    machine: Machine | None
    compiler: Compiler
    repeats: Count
    steps_per_session: Count
    paces: tuple[Pace, ...]
    cases: tuple[CaseResult, ...]

    def of(self, outcome: Outcome) -> tuple[CaseResult, ...]:
        return tuple(case for case in self.cases if case.outcome == outcome)

    @property
    def exit_code(self) -> int:
        """3 if something differs, or cannot be told; 1 if a case failed; 0 if all is the same."""
        if self.of("different") or self.of("does not repeat"):
            return 3
        return 1 if self.of("failed") or self.of("does not test what it says") else 0


def verified(
    cases: Sequence[CaseResult],
    *,
    device: str,
    machine: Machine | None,
    compiler: Compiler,
    repeats: int,
    steps_per_session: int,
    version: str,
) -> Verified:
    """The record of ``cases``, all of which ran on one machine."""
    return Verified(
        verified=f"offplan {version}",
        schema_version=SCHEMA_VERSION,
        device=device,
        machine=machine,
        compiler=compiler,
        repeats=repeats,
        steps_per_session=steps_per_session,
        paces=PACES,
        cases=tuple(cases),
    )


def encode(found: Verified) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def write_verified(path: Path, found: Verified) -> None:
    """Write the file, whole or not at all.  Raises ``OutputError``."""
    write_atomically(path, encode(found), VERIFIED_FILE)
