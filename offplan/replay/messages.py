"""What ``offplan run`` and the processes it starts say to each other, as JSON files.

A request is a ``TraceRequest``, an ``OpTimesRequest`` or an ``ArmRequest``; the answer is a
``Traced``, a ``Timed``, an ``ArmResult`` or a ``Failure``.  They live no longer than the command
does, so they have no versions.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from offplan.files import FileKind, write_atomically
from offplan.graph import Compiler, Partitioner
from offplan.measured import Arm, Engine, Machine, PinName, What
from offplan.recompute import Choice

MESSAGE_FILE = FileKind("a message between processes of offplan", b'{"type":')


class TraceRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Trace ``spec`` for ``device`` and write its graphs, under ``choices``, to ``graph``.

    ``verify``: as the arms will trace it, which ask for deterministic kernels then.
    """

    spec: str
    params: dict[str, str]
    device: str
    compiler: Compiler
    partitioner: Partitioner
    attention: str | None
    graph: Path
    verify: bool
    choices: tuple[Choice, ...] = ()


class OpTimesRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Measure the ops of the step that the plan at ``plan``, which moves nothing, describes."""

    plan: Path
    graph: Path
    device: str
    seed: int
    verify: bool


class ArmRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Replay the plan at ``plan`` for a warm-up and ``steps`` more steps; or, with the engine
    ``hooks``, train its target eagerly, under hooks that move something if it is ``enabled``.

    ``verify``: deterministic kernels where there are any, and a fingerprint of every step.
    """

    plan: Path
    device: str
    steps: int
    seed: int
    host_budget_bytes: int | None
    verify: bool
    pin: PinName = "register"
    engine: Engine = "compiled"
    enabled: bool = False


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor after one step: its bits, and what tells how far two of them are apart.

    ``bits`` are equal only for tensors of equal type, shape and bits.  ``sketch`` are projections
    of its values on fixed pseudo-random signs (see ``replay.fingerprint``); ``norm`` is the
    Euclidean norm.  JSON has no infinity and no NaN: both are None.
    """

    what: What
    name: str
    bits: str
    norm: float | None = None
    sketch: tuple[float | None, ...] = ()


class Traced(msgspec.Struct, frozen=True, tag=True):
    """The graphs were written."""


class Timed(msgspec.Struct, frozen=True, tag=True):
    """Milliseconds by ``costs.op_key``; ``note`` says what could not be measured."""

    times_ms: dict[str, float]
    note: str = ""


class ArmResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """``arm`` has the role "plan", whatever was replayed; ``fingerprints`` are by step.

    ``notes`` are on how host memory was pinned.
    """

    arm: Arm
    machine: Machine
    fingerprints: tuple[tuple[Fingerprint, ...], ...] = ()
    nondeterministic: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Failure(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What went wrong in the process, as an ``OffplanError`` says it."""

    exit_code: int
    what: str
    where: str = ""
    fix: str = ""


Request = TraceRequest | OpTimesRequest | ArmRequest
Answer = Traced | Timed | ArmResult | Failure


def write_message(path: Path, message: Request | Answer) -> None:
    """Write ``message``, whole or not at all.  Raises ``OutputError``."""
    write_atomically(path, msgspec.json.encode(message, enc_hook=str), MESSAGE_FILE)


def read_request(path: Path) -> Request:
    return msgspec.json.decode(path.read_bytes(), type=Request, dec_hook=_path)


def read_answer(path: Path) -> Answer:
    return msgspec.json.decode(path.read_bytes(), type=Answer)


def _path(kind: type, value: object) -> object:
    return kind(value)
