"""Device profiles, and how long each op takes on a device that has such a profile.

1.  A *profile* is what a plan needs to know of a device: rates of the link to the host, of memory
    and of arithmetic, and what one op costs at the least.  ``published`` profiles hold the vendor's
    figures, which no program reaches; ``measured`` ones hold what ``offplan device`` reached.
2.  The *device time* of an op comes from a roofline over the rates that a device reaches
    (``roofline``), or was measured, under the op's *key*: its overload, constants, and the dtypes,
    shapes and strides of its inputs.
3.  A *view*, an op that only allocates, and one that works on the host take no device time.
4.  The host issues ops one after the other, ahead of the device where it can.  An op's *time* is
    from the end of the one before it to its own end, waiting for the host included, so that the
    times of all ops add up to the step.  The host is *ahead* of an op by how long it has been
    issued when the op before it ends.

Assumed: torch's default precision (float32 products as such, float32 convolutions in TF32), and a
step that begins with an idle device.  Not handled: ops whose time depends on values, and kernels of
other streams.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from offplan import schedule
from offplan.errors import FileFormatError, UsageError
from offplan.files import FileKind, YamlError, dump_yaml, parse_yaml, read_text, write_atomically
from offplan.gpus import GPUS, find_gpu, gpu_key
from offplan.graph import GraphFacts, Op, Value, timeline
from offplan.roofline import Rates, device_s, is_view

SCHEMA_VERSION = 1
PROFILE_FILE = FileKind("an offplan device profile", b"# offplan device profile")
_HEADER = (
    "# offplan device profile: rates in bytes, flops and seconds. See: offplan device --help\n"
)
_PROFILES = Path(__file__).parent / "profiles"

# A thousand times what any device does; beyond that, times come to nothing.
Rate = Annotated[int, msgspec.Meta(gt=0, le=10**18)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Source = Literal["published", "measured"]


# --- profiles -------------------------------------------------------------------------------------


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class LinkRate(_Record, frozen=True):
    """Rates of copies of ``size_bytes``, each way alone, one after the other."""

    size_bytes: Rate
    d2h_bytes_per_s: Rate
    h2d_bytes_per_s: Rate


class AttentionRate(_Record, frozen=True):
    """Rates of fused attention in 16-bit floats."""

    forward: Rate
    backward: Rate


class Versions(_Record, frozen=True):
    """Where a profile was measured."""

    processor: str
    torch: str
    cuda: str


class DeviceProfile(_Record, frozen=True, kw_only=True):
    """One device (definition 1).  Seconds are wall-clock; rates are per second.

    ``d2h_both_bytes_per_s`` and ``h2d_both_bytes_per_s`` hold while copies go both ways at once.
    ``matmul_flops_per_s`` has rates by dtype, and ``tf32``.  ``op_overhead_s`` is the least that a
    kernel takes, ``host_op_s`` what the host takes to issue one op of a graph that runs op by op,
    ``host_copy_s`` what it takes to issue one copy and to have it waited for, and ``host_start_s``
    what it takes before the first op of a forward.
    ``overlap`` is the part of the shorter of a copy and a computation that is hidden when they run
    together.  None where it is not known.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    gpu: str
    source: Source
    note: str = ""
    memory_bytes: Rate
    d2h_bytes_per_s: Rate
    h2d_bytes_per_s: Rate
    d2h_both_bytes_per_s: Rate
    h2d_both_bytes_per_s: Rate
    copy_latency_s: Seconds
    memory_bytes_per_s: Rate
    matmul_flops_per_s: dict[str, Rate]
    attention_flops_per_s: AttentionRate | None = None
    op_overhead_s: Seconds
    host_op_s: Seconds
    host_start_s: Seconds
    host_copy_s: Seconds = 0.0
    pin_s_per_byte: Seconds
    largest_pin_bytes: Rate | None = None
    overlap: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    ordering_ok: bool | None = None
    link_sizes: tuple[LinkRate, ...] = ()
    versions: Versions | None = None


def profile_for(gpu_name: str) -> DeviceProfile:
    """The shipped profile of the GPU that torch calls ``gpu_name``, or of a key of ``GPUS``.

    Raises ``UsageError`` if there is none.
    """
    try:
        gpu = find_gpu(gpu_name)
    except UsageError:
        raise UsageError(
            f"no profile is known for the GPU {gpu_name!r}",
            fix="--profile FILE, or make one: offplan device -o FILE",
        ) from None
    key = next(key for key, listed in GPUS.items() if listed is gpu)
    return load_profile(_PROFILES / f"{key}.yaml")


def with_arithmetic(profile: DeviceProfile, factor: float) -> DeviceProfile:
    """``profile`` of a device whose memory and arithmetic are ``factor`` times as fast."""
    attention = profile.attention_flops_per_s
    return msgspec.structs.replace(
        profile,
        memory_bytes_per_s=int(factor * profile.memory_bytes_per_s),
        matmul_flops_per_s={
            name: int(factor * rate) for name, rate in profile.matmul_flops_per_s.items()
        },
        attention_flops_per_s=attention
        and AttentionRate(int(factor * attention.forward), int(factor * attention.backward)),
    )


def find_profile(text: str) -> DeviceProfile:
    """The profile that ``--profile`` names: a YAML file, or a listed GPU (``h100``).

    Raises what ``load_profile`` and ``profile_for`` raise.
    """
    path = Path(text)
    return load_profile(path) if path.suffix in (".yaml", ".yml") else profile_for(text)


def load_profile(path: Path) -> DeviceProfile:
    """Read a profile.  Raises ``FileFormatError`` naming the field for anything else."""
    text = read_text(path)
    try:
        document = parse_yaml(text)
    except YamlError as error:
        raise _not_a_profile(path, str(error)) from error
    if not isinstance(document, dict) or "schema_version" not in document:
        raise _not_a_profile(path, "it has no schema_version")
    version = document["schema_version"]
    if version != SCHEMA_VERSION:
        raise FileFormatError(
            f"{path} has schema version {version!r}, this offplan reads {SCHEMA_VERSION}",
            fix="measure the device again with this version of offplan",
        )
    try:
        # Not strict: what is no integer comes out of the YAML as text.
        profile = msgspec.convert(document, DeviceProfile, strict=False)
    except msgspec.ValidationError as error:
        raise _not_a_profile(path, str(error)) from error
    problem = next(_problems(profile), None)
    if problem is not None:
        raise _not_a_profile(path, problem)
    return profile


def save_profile(path: Path, profile: DeviceProfile) -> None:
    """Write ``profile`` to ``path``: whole or not at all, and over nothing but a profile."""
    write_atomically(path, profile_text(profile).encode(), PROFILE_FILE)


def profile_text(profile: DeviceProfile) -> str:
    """``profile`` as YAML."""
    document = {"schema_version": profile.schema_version, **msgspec.to_builtins(profile)}
    return _HEADER + dump_yaml(document)


def _not_a_profile(path: Path, problem: str) -> FileFormatError:
    return FileFormatError(
        f"{path} is not an offplan device profile: {problem}",
        fix=f"make one with: offplan device -o {shlex.quote(str(path))}",
    )


def _problems(profile: DeviceProfile) -> Iterator[str]:
    if "float32" not in profile.matmul_flops_per_s:
        yield "no rate for float32 - at `$.matmul_flops_per_s`"
    if not profile.name:
        yield "the name is empty - at `$.name`"


# --- op times -------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """How much of a profile's rates the ops of a step reach; attention forward and backward."""

    matmul: float
    float32: float
    memory: float
    attention: tuple[float, float]


# Of vendors' figures: what the steps of twelve models reached on an H200, over its figures.
_OF_PUBLISHED = _Parts(0.75, 0.76, 0.91, (1.0, 1.0))
# Of rates that ``offplan device`` measures, in products and attention run alone: the same steps,
# over what it measured there.  (Small tensors stay in the cache, and go faster than memory.)
_OF_MEASURED = _Parts(0.926, 1.0, 1.036, (0.884, 0.818))
_ATTENTION_OF_MATMUL = (0.70, 0.54)

# By how much ops in a step can be faster or slower than alone; beyond that something else is wrong.
_SCALED = (0.9, 1.2)
_HALVINGS = 12
# Of a device that is not listed.
_MULTIPROCESSORS = 108
# What the host takes for a view, as part of what it takes for an op that launches a kernel.
VIEW_HOST_PART = 0.8
# What the events that order a copy take of the device: what steps of two models on an H200 took
# longer for 16 to 60 transfers, but for their part of memory.
_ORDER_S = 4e-6
# By how much memory is slowed down to see how much of a step waits for it.
_SLOWER = 0.1
# What it takes to enter a backward, as part of what it takes to enter a forward.
_BACKWARD_START_PART = 0.5


def op_key(facts: GraphFacts, op: Op) -> str:
    """What the device time of ``op`` is cached by: equal for ops that do the same work."""
    values = [_signature(facts.values[value]) for value in op.inputs]
    return f"{op.target}({'; '.join(values)}) {op.constants}".rstrip()


def _signature(value: Value) -> str:
    if value.kind != "tensor":
        return value.kind
    sizes = "x".join(map(str, value.shape))
    return f"{value.dtype}[{sizes}]/{','.join(map(str, value.stride))}"


class OpTimes(NamedTuple):
    """Of each op of a timeline its time, and how far the host is ahead of it, in milliseconds; of
    one that takes the device no time, infinitely far."""

    op_ms: tuple[float, ...]
    ahead_ms: tuple[float, ...]


def op_times_ms(
    facts: GraphFacts, profile: DeviceProfile, measured: Mapping[str, float] | None = None
) -> tuple[float, ...]:
    """The time of each op of the timeline in milliseconds (definition 4).

    ``measured`` has device times in milliseconds by ``op_key``.
    """
    return op_times(facts, profile, measured).op_ms


def op_times(
    facts: GraphFacts, profile: DeviceProfile, measured: Mapping[str, float] | None = None
) -> OpTimes:
    """The same, with how far the host is ahead."""
    times, ahead = [], []
    issued_ms = ended_ms = 0.0
    host_ms = profile.host_op_s * 1000
    starts = _host_starts_ms(facts, profile)
    device = device_times_ms(facts, profile, measured)
    for place, (op, device_ms) in enumerate(zip(timeline(facts), device, strict=True)):
        issued_ms += starts.get(place, 0.0)
        if op.outputs or op.mutates:
            # An op without either is part of a kernel elsewhere.
            issued_ms += host_ms if device_ms else host_ms * VIEW_HOST_PART
        before_ms = ended_ms
        if device_ms:
            ended_ms = max(ended_ms, issued_ms) + device_ms
        times.append(ended_ms - before_ms)
        ahead.append(max(0.0, before_ms - issued_ms) if device_ms else inf)
    return OpTimes(tuple(times), tuple(ahead))


def _host_starts_ms(facts: GraphFacts, profile: DeviceProfile) -> dict[int, float]:
    """What the host takes to enter each graph, by the place of the graph's first op."""
    start_ms = profile.host_start_s * 1000
    found: dict[int, float] = {}
    place = 0
    for region in facts.regions:
        found[place] = found.get(place, 0.0) + start_ms
        place += len(region.forward.ops)
    for region in reversed(facts.regions):
        if region.backward is not None:
            found[place] = found.get(place, 0.0) + start_ms * _BACKWARD_START_PART
            place += len(region.backward.ops)
    return found


def device_times_ms(
    facts: GraphFacts, profile: DeviceProfile, measured: Mapping[str, float] | None = None
) -> tuple[float, ...]:
    """The device time of each op of the timeline in milliseconds, 0 for views."""
    rates = reached_rates(profile)
    known: dict[str, float] = dict(measured or {})
    times = []
    for op in timeline(facts):
        if is_view(facts, op):
            times.append(0.0)
            continue
        key = op_key(facts, op)
        if key not in known:
            known[key] = device_s(facts, op, rates) * 1000
        times.append(known[key])
    return tuple(times)


def as_in_a_step(
    facts: GraphFacts, profile: DeviceProfile, times_ms: Mapping[str, float], step_ms: float
) -> dict[str, float]:
    """``times_ms``, scaled so that the step takes ``step_ms``, as measured.

    An op that runs alone runs at clocks which a whole step, hot and at its power limit, does not
    reach: 4% on an H200.  A step that waits for the host is left as it is.
    """

    def step_with(factor: float) -> float:
        scaled = {key: factor * time_ms for key, time_ms in times_ms.items()}
        return sum(op_times_ms(facts, profile, scaled))

    low, high = _SCALED
    if not step_with(low) < step_ms < step_with(high):
        return dict(times_ms)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if step_with(middle) < step_ms else (low, middle)
    return {key: high * time_ms for key, time_ms in times_ms.items()}


def reached_rates(profile: DeviceProfile) -> Rates:
    """What the ops of a step reach of ``profile``."""
    parts = _OF_PUBLISHED if profile.source == "published" else _OF_MEASURED
    matmul = {
        name: (parts.float32 if name == "float32" else parts.matmul) * rate
        for name, rate in profile.matmul_flops_per_s.items()
    }
    memory = parts.memory * profile.memory_bytes_per_s
    known = profile.attention_flops_per_s
    half = matmul.get("bfloat16", matmul.get("float16", matmul["float32"]))
    forward, backward = (part * half for part in _ATTENTION_OF_MATMUL)
    return Rates(
        memory_bytes_per_s=memory,
        matmul_flops_per_s=matmul,
        attention_forward_flops_per_s=forward
        if known is None
        else parts.attention[0] * known.forward,
        attention_backward_flops_per_s=backward
        if known is None
        else parts.attention[1] * known.backward,
        kernel_s=profile.op_overhead_s,
        multiprocessor_count=_multiprocessors(profile.gpu),
    )


def link_rates(facts: GraphFacts, profile: DeviceProfile) -> schedule.Rates:
    """The link of ``profile``, and the memory that copies share with the ops of ``facts``: what
    computes while they run loses nothing to them, what waits for memory does."""
    part = _memory_part(facts, profile)
    memory = reached_rates(profile).memory_bytes_per_s
    return schedule.Rates(
        profile.d2h_bytes_per_s,
        profile.h2d_bytes_per_s,
        profile.copy_latency_s,
        memory / part if part else inf,
        _ORDER_S,
        profile.host_copy_s,
    )


def _memory_part(facts: GraphFacts, profile: DeviceProfile) -> float:
    """The part of a step in which it waits for memory: by how much it is longer with a slower one,
    of how much it would be if it did nothing else."""
    slower = msgspec.structs.replace(
        profile, memory_bytes_per_s=int(profile.memory_bytes_per_s / (1 + _SLOWER))
    )
    step_ms, slower_ms = (sum(op_times_ms(facts, each)) for each in (profile, slower))
    return max(0.0, slower_ms / step_ms - 1) / _SLOWER if step_ms else 1.0


def _multiprocessors(gpu: str) -> int:
    key = gpu_key(gpu)
    return _MULTIPROCESSORS if key is None else GPUS[key].multiprocessor_count
