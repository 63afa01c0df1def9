"""What a replay measured: the ``measured.json`` file.

1.  An *arm* is one fresh process that runs the same training steps: without a plan, with it, with
    the plan of another rule set, or once more without a plan (the *control*, whose differences from
    the first are noise of the kernels).
2.  Steps are numbered from 0; step 0 is the warm-up.  *Measured* steps are the others.  A peak of
    an arm is the largest of its measured steps, a time the median of them.
3.  On CUDA, bytes are what torch's caching allocator counts, and times are between CUDA events on
    the compute stream.  On the CPU, bytes are those of the live storages of tensors, nothing is
    reserved, and times are of the wall clock.
4.  ``forward_end_bytes`` are allocated when the last op of the forward has been issued,
    ``end_bytes`` when the step is over: parameters, gradients, inputs and what the arm keeps.
5.  The *parts* of a peak are counted in one further step, in which every storage is watched from
    the op that makes it to its end: see ``offplan.replay.parts``.
6.  The *engine* is what moved: ``compiled`` replays a plan; ``hooks`` is eager training under
    saved-tensor hooks, whose arms are ``no offload`` and ``hooks``, and beside them the replay.
7.  A *difference* is anything that verification found not to be as it has to be.  Bits of losses,
    gradients and buffers are compared through checksums, arm against arm, step by step.

Records are primitive facts; what they add up to is derived here, once, for every report.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from offplan.eligibility import RuleSet
from offplan.errors import FileFormatError
from offplan.files import FileKind, read_content, write_atomically
from offplan.graph import Compiler, TargetRef
from offplan.plan import Plan

SCHEMA_VERSION = 3
# Many times what a thousand steps take.
_MAX_FILE_BYTES = 256 * 1024**2
MEASURED_FILE = FileKind("an offplan measurement", b'{\n  "measured": {\n    "spec": ')

# Bytes, most of them: more than there is memory, and little enough for ratios to be numbers.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
Role = Literal["no plan", "plan", "control", "no offload", "hooks"]
Engine = Literal["compiled", "hooks"]
# How host memory is made fit for copies (``replay.pinning``).
PinName = Literal["torch", "register", "off", "auto"]
Outcome = Literal["completed", "out of memory"]
What = Literal[
    "loss",
    "gradient",
    "buffer",
    "bytes to the host",
    "bytes to the device",
    "transfers to the host",
    "transfers to the device",
    "device bytes",
    "host bytes",
]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Machine(_Record, frozen=True, kw_only=True):
    """Where it ran.  ``used_bytes`` of the GPU were taken before the first arm began."""

    processor: str
    cores: Count
    memory_bytes: Count
    python: str
    torch: str
    gpu: str = ""
    gpu_memory_bytes: Count = 0
    used_bytes: Count = 0
    cuda: str = ""
    cudnn: str = ""


class HostLimit(_Record, frozen=True, kw_only=True):
    """One limit on host memory (``replay.limits``): what it leaves; None if it does not hold."""

    name: Literal["free memory", "cgroup", "ulimit -l", "trial pin"]
    left_bytes: Count | None = None
    limit_bytes: Count | None = None
    used_bytes: Count | None = None
    where: str = ""
    note: str = ""


class HostLimits(_Record, frozen=True, kw_only=True):
    """All of them, and mappings in use and allowed; None where that cannot be read."""

    limits: tuple[HostLimit, ...] = ()
    map_count: Count | None = None
    max_map_count: Count | None = None


class Planned(_Record, frozen=True):
    """What a plan says that each step moves."""

    to_host_bytes: Count
    to_device_bytes: Count
    to_host_count: Count
    to_device_count: Count


class Expected(_Record, frozen=True, kw_only=True):
    """What was predicted of an arm; ``step_ms`` is None without a profile of the GPU."""

    peak_allocated_bytes: Count
    peak_reserved_bytes: Count
    forward_end_bytes: Count
    step_ms: float | None = None


class Step(_Record, frozen=True, kw_only=True):
    """One step.  ``forward_ms`` and ``backward_ms`` add up to ``step_ms``.

    ``stalled_ms`` is how long compute waited for transfers; None where that is not timed.
    ``loss`` is the shortest text that reads back as the same number.
    """

    loss: str
    step_ms: float
    forward_ms: float
    backward_ms: float
    peak_allocated_bytes: Count
    peak_reserved_bytes: Count | None = None
    forward_end_bytes: Count
    end_bytes: Count
    host_bytes: Count
    to_host_bytes: Count
    to_device_bytes: Count
    to_host_count: Count
    to_device_count: Count
    stalled_ms: float | None = None


class Parts(_Record, frozen=True, kw_only=True):
    """Bytes by category at the peak (definition 5); they add up to ``peak_bytes``.

    ``op`` is the op that ran at the peak.  ``parameters`` include buffers.  ``workspace`` is what
    is allocated for no tensor: scratch memory inside an op, and what libraries hold between ops.
    ``rounding`` is what the allocator adds to the sizes asked for.  Both are None on the CPU.
    """

    peak_bytes: Count
    op: str
    parameters: Count
    inputs: Count
    gradients: Count
    saved: Count
    temporaries: Count
    workspace: Count | None = None
    rounding: Count | None = None


class OutOfMemory(_Record, frozen=True, kw_only=True):
    """Where an arm ran out of memory: while it did what (``the forward of step 0``), in which op.

    ``allocated_bytes`` are the most that it had; ``asked_bytes`` and ``device_bytes`` are None
    where torch does not say.
    """

    during: str
    op: str = ""
    allocated_bytes: Count
    asked_bytes: Count | None = None
    device_bytes: Count | None = None


class Arm(_Record, frozen=True, kw_only=True):
    """One arm.  ``rules`` and ``planned`` are of the plan that it replayed, None without one.
    ``expected`` is what was predicted, without a plan too.

    ``build_s`` is what building the model took; the warm-up compiles it.  ``pin`` is the backend
    that pinned its host memory, empty where it had none.  ``engine`` is what ran the step.
    """

    role: Role
    engine: Engine = "compiled"
    rules: RuleSet | None = None
    planned: Planned | None = None
    expected: Expected | None = None
    outcome: Outcome
    out_of_memory: OutOfMemory | None = None
    build_s: float
    pin: str = ""
    steps: tuple[Step, ...] = ()
    parts: Parts | None = None

    @property
    def name(self) -> str:
        if self.role == "plan" and self.rules is not None:
            return f"plan ({self.rules})"
        if self.role == "control":
            return "no plan, again" if self.engine == "compiled" else "no offload, again"
        return self.role

    @property
    def moves(self) -> bool:
        """Whether it is there to move something."""
        return self.role in ("plan", "hooks")

    @property
    def completed(self) -> bool:
        return self.outcome == "completed"

    @property
    def measured(self) -> tuple[Step, ...]:
        return self.steps[1:]

    @property
    def peak_allocated_bytes(self) -> int:
        return max(step.peak_allocated_bytes for step in self.measured)

    @property
    def peak_reserved_bytes(self) -> int | None:
        found = [step.peak_reserved_bytes for step in self.measured]
        return max((size for size in found if size is not None), default=None)

    @property
    def forward_end_bytes(self) -> int:
        return max(step.forward_end_bytes for step in self.measured)

    @property
    def host_bytes(self) -> int:
        return max(step.host_bytes for step in self.measured)

    @property
    def to_host_bytes(self) -> int:
        return max(step.to_host_bytes for step in self.measured)

    @property
    def to_device_bytes(self) -> int:
        return max(step.to_device_bytes for step in self.measured)

    @property
    def step_ms(self) -> float:
        return statistics.median(step.step_ms for step in self.measured)

    @property
    def forward_ms(self) -> float:
        return statistics.median(step.forward_ms for step in self.measured)

    @property
    def backward_ms(self) -> float:
        return statistics.median(step.backward_ms for step in self.measured)

    @property
    def stalled_ms(self) -> float | None:
        found = [step.stalled_ms for step in self.measured if step.stalled_ms is not None]
        return statistics.median(found) if found else None


class Difference(_Record, frozen=True, kw_only=True):
    """One thing that is not as it has to be: what, in which arm, at which step."""

    what: What
    name: str = ""
    arm: str
    step: Count
    expected: str
    found: str


class Noise(_Record, frozen=True, kw_only=True):
    """A value whose bits the kernels do not repeat: how far off, relative to its norm.

    ``control`` is the largest distance of the control from the first run without a plan, ``plan``
    that of the replayed plans.
    """

    what: What
    name: str
    control: float
    plan: float


class Verification(_Record, frozen=True, kw_only=True):
    """What was compared, and what was found.

    ``compared`` arms were held against ``reference``, tensor by tensor; ``not_compared`` says why
    if there was nothing to hold them against.  ``control`` is whether a second run without a plan
    had the bits of the first; empty if there was none.  ``nondeterministic`` are torch's own words
    about ops for which it has no deterministic kernel.
    """

    reference: str = ""
    compared: tuple[str, ...] = ()
    not_compared: str = ""
    steps: Count = 0
    gradients: Count = 0
    buffers: Count = 0
    differences: tuple[Difference, ...] = ()
    control: Literal["", "same", "differs"] = ""
    noise: tuple[Noise, ...] = ()
    nondeterministic: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.differences


class Measurement(_Record, frozen=True, kw_only=True):
    """The file.  ``verification`` is None if it was not asked for."""

    measured: TargetRef
    schema_version: int
    device: str
    machine: Machine
    digest: str
    compiler: Compiler
    partitioner: str
    attention: str
    rules: RuleSet
    min_bytes: Count
    budget: Count | None
    asked: str = ""
    movable_bytes: Count
    engine: Engine = "compiled"
    arms: tuple[Arm, ...]
    verification: Verification | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Every check passed, the arms with a plan completed, and they kept to the budget."""
        verified = self.verification is None or self.verification.ok
        completed = all(arm.completed for arm in self.arms if arm.moves)
        return verified and completed and not self.over_budget_bytes

    @property
    def over_budget_bytes(self) -> int:
        """By how much the largest peak with a plan exceeds the budget; 0 if it does not."""
        peaks = [arm.peak_allocated_bytes for arm in self.arms if arm.role == "plan" and arm.steps]
        return max(0, max(peaks, default=0) - self.budget) if self.budget else 0

    @property
    def no_plan(self) -> Arm:
        """The arm that moves nothing."""
        role = "no plan" if self.engine == "compiled" else "no offload"
        return next(arm for arm in self.arms if arm.role == role)

    @property
    def plan(self) -> Arm:
        """The arm that the report is about: of the plan's own rule set, or of the hooks."""
        if self.engine == "hooks":
            return next(arm for arm in self.arms if arm.role == "hooks")
        replayed = [arm for arm in self.arms if arm.role == "plan"]
        return next((arm for arm in replayed if arm.rules == self.rules), replayed[0])


def planned(plan: Plan) -> Planned:
    """What each step moves by ``plan``."""
    returning = [transfer for transfer in plan.transfers if transfer.reload_at is not None]
    return Planned(
        to_host_bytes=sum(transfer.transfer_bytes for transfer in plan.transfers),
        to_device_bytes=sum(transfer.transfer_bytes for transfer in returning),
        to_host_count=len(plan.transfers),
        to_device_count=len(returning),
    )


def expected(plan: Plan) -> Expected:
    """What ``plan`` predicts of a step."""
    found, time = plan.predicted.plan, plan.predicted.time
    return Expected(
        peak_allocated_bytes=found.peak_bytes,
        peak_reserved_bytes=found.reserved_bytes,
        forward_end_bytes=found.forward_end_bytes,
        step_ms=None if time is None else time.step_ms,
    )


# --- the file -------------------------------------------------------------------------------------


def dump_measurement(measurement: Measurement) -> bytes:
    """The ``measured.json`` file, indented for people."""
    return msgspec.json.format(msgspec.json.encode(measurement), indent=2) + b"\n"


class _Version(msgspec.Struct, frozen=True):
    """What is read first, to tell an old file from a broken one."""

    schema_version: int


def write_measurement(path: Path, measurement: Measurement) -> None:
    """Write ``measurement`` to ``path``, whole or not at all; only ever over a measurement.

    Raises ``OutputError``.
    """
    write_atomically(path, dump_measurement(measurement), MEASURED_FILE)


def load_measurement(path: Path) -> Measurement:
    """Read a ``measured.json`` file.  Raises ``FileFormatError`` naming the field."""
    try:
        content = read_content(path, _MAX_FILE_BYTES, "a measurement")
        version = msgspec.json.decode(content, type=_Version).schema_version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_a_measurement(path, error) from error
    if version != SCHEMA_VERSION:
        raise FileFormatError(
            f"{path} has schema version {version}; this offplan reads {SCHEMA_VERSION}",
            fix="measure again with this version of offplan",
        )
    try:
        found = msgspec.json.decode(content, type=Measurement)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_a_measurement(path, error) from error
    problem = next(_problems(found), None)
    if problem is not None:
        raise _not_a_measurement(path, problem)
    return found


def _problems(measurement: Measurement) -> Iterator[str]:
    """What a schema cannot say: the arms that a report is about are there, with steps to count."""
    roles = [arm.role for arm in measurement.arms]
    is_compiled = measurement.engine == "compiled"
    for role in ("no plan", "plan") if is_compiled else ("no offload", "hooks"):
        if role not in roles:
            yield f"no arm of the role {role} - at `$.arms`"
    for place, arm in enumerate(measurement.arms):
        if arm.completed and not arm.measured:
            yield f"a completed arm without a step after its warm-up - at `$.arms[{place}].steps`"


def _not_a_measurement(path: Path, problem: Exception | str) -> FileFormatError:
    return FileFormatError(
        f"{path} is not an offplan measurement: {problem}",
        fix="make one with: offplan run --budget 0 -o measured.json",
    )
