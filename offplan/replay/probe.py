"""Measure a device: what ``offplan device`` writes as a profile.

1.  Copies go through the runtime's own link and the pool's own pinned memory, so that what is
    measured is what a replay gets.
2.  A *timer* runs some work that is issued at once and returns its seconds: on the GPU between two
    events, after a piece of other work that keeps the device busy until all of it is issued, so
    that the host is not part of the result.  A rate is of the shortest of several runs.
3.  A rate with both directions at once is of one direction's copies while twice as many go the
    other way.
4.  *Overlap* is the part of the shorter of a copy and a computation that is hidden when both run:
    1 if they take as long as the longer one, 0 if as long as one after the other.
5.  *Ordering* holds if each of these sees the values that it must, again and again: a copy to the
    host issued right after the op that makes its source; a host copy after its source was
    overwritten once the copy was waited for; an op that reads what was reloaded, after the wait;
    a reload of host bytes whose own copy from the device was only just issued.
6.  What the host takes for a copy is by how much longer it takes to issue a small model's forward
    under a plan that moves all that it saves.
7.  Pinning is tried in doubling sizes up to a limit: the most that may be asked for, or 80% of what
    the limits on host memory leave (``replay.limits``).  Without a GPU, pages are locked only.

Nothing else should run on the device meanwhile.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from offplan.budget import EVERYTHING, Aim
from offplan.costs import VIEW_HOST_PART, AttentionRate, DeviceProfile, LinkRate, Versions
from offplan.decide import Decisions
from offplan.eligibility import DEFAULT_RULES
from offplan.errors import DeviceError
from offplan.gpus import gpu_key
from offplan.graph import GraphFacts
from offplan.measured import HostLimits, PinName
from offplan.plan import Plan
from offplan.replay.compiled import Replay, loss_of
from offplan.replay.host import HostPool, Slab
from offplan.replay.limits import HostMemoryError, ceiling_bytes, read_limits, with_trial
from offplan.replay.pinning import DEFAULT_PIN, Locked, Pageable, Pinning, Registered, choose
from offplan.replay.runtime import CpuLink, CudaLink, Link, Part
from offplan.roofline import is_view
from offplan.target import Target

KIB, MIB, GIB = 1024, 1024**2, 1024**3
DEFAULT_MAX_PIN_BYTES = 16 * GIB
# Without a GPU it only shows that pages can be locked.
_MAX_LOCK_BYTES = GIB

_LINK_SIZES = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
_FIRST_PIN_BYTES = GIB
_PART_OF_AVAILABLE = 0.8
_RUNS = 5
# Copies of one size are issued together until they are this long.
_BURST_BYTES = 256 * MIB
_MAX_BURST_COPIES = 64
_SMALL_OPS = 100
_HOST_RUNS = 30
_DEPTHS = (2, 32)
_ORDERING_TRIALS = 8
_ORDERING_BYTES = 64 * MIB
_MATMUL_SIZE = 8192
_ATTENTION = (4, 16, 4096, 128)  # batch, heads, rows, width

Work = Callable[[], Any]
Phase = Callable[[str], None]


class Timer(Protocol):
    """Definition 2."""

    def __call__(self, work: Work) -> float: ...


class ClockTimer:
    """For a device on which work is done when it has been issued: the CPU."""

    def __call__(self, work: Work) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start


class CudaTimer:
    """Between events on the compute stream, behind a computation of some milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.filler = torch.ones(4096, 4096, device=device)
        self.filled = torch.empty_like(self.filler)

    def __call__(self, work: Work) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        torch.mm(self.filler, self.filler, out=self.filled)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1000


def best_of(timer: Timer, work: Work, runs: int = _RUNS) -> float:
    """The shortest of ``runs``, after one that warms up."""
    work()
    return min(timer(work) for _ in range(runs))


# --- the whole ------------------------------------------------------------------------------------


def measure_device(
    phase: Phase = lambda name: None, *, max_pin_bytes: int | None = None
) -> DeviceProfile:
    """The profile of the current GPU.  Raises ``DeviceError`` if there is none."""
    return measure_with_limits(phase, max_pin_bytes=max_pin_bytes)[0]


def measure_with_limits(
    phase: Phase = lambda name: None,
    *,
    max_pin_bytes: int | None = None,
    pin: PinName = DEFAULT_PIN,
) -> tuple[DeviceProfile, HostLimits]:
    """The same, with the limits on host memory, and what pinning for the profile reached.

    Raises ``HostMemoryError`` if the backend ``pin`` cannot be used here.
    """
    device = _gpu()
    gpu = torch.cuda.get_device_name(device)
    timer = CudaTimer(device)
    phase("pinning host memory")
    most = max_pin_bytes or DEFAULT_MAX_PIN_BYTES
    pinning = choose(pin, device)
    pinned = pin_costs(pinning, pin_sizes(most, available_bytes(pin)))
    phase("copying")
    copies = _copies(device, timer, pinning, pinned)
    phase("issuing ops")
    host = host_costs(device)
    phase("computing")
    profile = DeviceProfile(
        name=gpu_key(gpu) or "-".join(gpu.lower().split()),
        gpu=gpu,
        source="measured",
        note="" if pin == DEFAULT_PIN else f"host memory by --pin {pin}",
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
        **copies,
        memory_bytes_per_s=memory_rate(device, timer),
        matmul_flops_per_s=matmul_rates(device, timer),
        attention_flops_per_s=attention_rate(device, timer),
        op_overhead_s=op_overhead_s(device, timer),
        host_op_s=host.op_s,
        host_start_s=host.start_s,
        host_copy_s=host.copy_s,
        pin_s_per_byte=_rounded(pinned.s_per_byte),
        largest_pin_bytes=pinned.largest_bytes,
        versions=Versions(_processor(), torch.__version__.split("+")[0], torch.version.cuda or ""),
    )
    return profile, _with_trial(pinned)


def _copies(
    device: torch.device, timer: Timer, pinning: Pinning, pinned: PinCosts
) -> dict[str, Any]:
    """What a profile says of copies, by the names of its fields."""
    link = CudaLink(device)
    # Where less can be pinned, by that; where nothing can, the pool says why.
    end_bytes = min(2 * _LINK_SIZES[-1], pinned.largest_bytes or _FIRST_PIN_BYTES)
    with _ends(link, pinning, end_bytes) as ends:
        sizes = link_rates(link, timer, ends, [s for s in _LINK_SIZES if s <= ends.size_bytes])
        d2h_both, h2d_both = rates_both_ways(link, timer, ends)
        busy = _busy_work(device)
        overlap = measured_overlap(link, timer, ends, busy)
        ordering_ok = ordering_holds(link, ends, busy)
    return {
        "d2h_bytes_per_s": sizes[-1].d2h_bytes_per_s,
        "h2d_bytes_per_s": sizes[-1].h2d_bytes_per_s,
        "d2h_both_bytes_per_s": d2h_both,
        "h2d_both_bytes_per_s": h2d_both,
        "copy_latency_s": copy_latency_s(sizes),
        "overlap": round(overlap, 3),
        "ordering_ok": ordering_ok,
        "link_sizes": sizes,
    }


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise DeviceError(
            "there is no GPU to measure",
            fix="use a profile that offplan ships: --profile h100 (a100, l40s, rtx4090, ...)",
        )
    return torch.device("cuda", torch.cuda.current_device())


# --- pinning --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PinCosts:
    """``largest_bytes`` is None if nothing could be pinned; ``s_per_byte`` is then 0.

    ``refusal`` is why more could not be; empty if all sizes could.
    """

    largest_bytes: int | None
    s_per_byte: float
    refusal: str = ""


def pin_sizes(max_bytes: int, available: int) -> list[int]:
    """The sizes to try (definition 7), the limit itself last."""
    limit = min(max_bytes, int(available * _PART_OF_AVAILABLE))
    sizes = []
    size = min(_FIRST_PIN_BYTES, limit)
    while size < limit:
        sizes.append(size)
        size *= 2
    return [*sizes, limit]


def pin_costs(
    pinning: Pinning, sizes: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> PinCosts:
    """Pin each of ``sizes`` and give it back, until one is refused."""
    largest, s_per_byte, refusal = None, 0.0, ""
    if not any(sizes):
        return PinCosts(None, 0.0, "the limits leave nothing to try it with")
    for size in sizes:
        start = clock()
        try:
            slab = Slab(size, pinning)
        except HostMemoryError as error:
            refusal = error.what
            break
        largest, s_per_byte = size, (clock() - start) / size
        slab.give_back()
        # Torch's own goes with its last reference.
        del slab
    return PinCosts(largest, s_per_byte, refusal)


def available_bytes(pin: PinName = DEFAULT_PIN) -> int:
    """Host memory that can still be pinned, as far as the limits say."""
    found = ceiling_bytes(read_limits(), pin)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if found is None else found


def host_limits(
    phase: Phase = lambda name: None, *, max_pin_bytes: int | None = None
) -> HostLimits:
    """The limits on host memory here, with a trial pin; without a GPU, pages are locked only."""
    phase("pinning host memory")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        sizes = pin_sizes(max_pin_bytes or DEFAULT_MAX_PIN_BYTES, available_bytes())
        return _with_trial(pin_costs(Registered(device), sizes))
    sizes = pin_sizes(max_pin_bytes or _MAX_LOCK_BYTES, available_bytes())
    return _with_trial(pin_costs(Locked(), sizes), "locked, not pinned: there is no GPU")


def _with_trial(pinned: PinCosts, note: str = "") -> HostLimits:
    notes = [note, pinned.refusal or "no size was refused"]
    return with_trial(
        read_limits(),
        pinned.largest_bytes or 0,
        is_limit=bool(pinned.refusal),
        note="; ".join(filter(None, notes)),
    )


# --- the link -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ends:
    """Two flat buffers of one size on each side, so that both directions can run at once."""

    device: tuple[torch.Tensor, torch.Tensor]
    host: tuple[torch.Tensor, torch.Tensor]

    @property
    def size_bytes(self) -> int:
        return self.host[0].numel()


@contextmanager
def _ends(link: Link, pinning: Pinning, size_bytes: int) -> Iterator[Ends]:
    """Buffers that take ``size_bytes`` on each side."""
    half = size_bytes // 2
    pool = HostPool([2 * half], pinning)
    lease = pool.lease(2 * half)
    host = lease.host_tensor(0, half), lease.host_tensor(half, half)
    try:
        yield Ends((link.buffer(half).fill_(1), link.buffer(half).fill_(2)), host)
    finally:
        link.drain()
        pool.close()


def cpu_ends(size_bytes: int) -> Any:
    """Ends on the CPU, for which ``CpuLink`` is the link."""
    return _ends(CpuLink(), Pageable(), size_bytes)


def link_rates(link: Link, timer: Timer, ends: Ends, sizes: Sequence[int]) -> tuple[LinkRate, ...]:
    """Rates each way alone, of copies that are issued one after the other."""
    found = []
    for size in sizes:
        count = min(max(1, _BURST_BYTES // size), _MAX_BURST_COPIES)
        out_s = best_of(timer, lambda s=size, n=count: _send(link, ends, s, n))
        back_s = best_of(timer, lambda s=size, n=count: _fetch(link, ends, s, n))
        total = size * count
        found.append(LinkRate(size, _rate(total, out_s), _rate(total, back_s)))
    return tuple(found)


def rates_both_ways(
    link: Link,
    timer: Timer,
    ends: Ends,
    size_bytes: int | None = None,
    count: int = 4,
    runs: int = _RUNS,
) -> tuple[int, int]:
    """Rates to the host and to the device while the other direction is busy (definition 3).

    Of ``count`` copies of ``size_bytes``, by default a quarter of what the ends have.
    """
    size = size_bytes or ends.size_bytes // 4

    def send() -> None:
        _fetch(link, ends, size, 2 * count, wait=False)
        _send(link, ends, size, count)

    def fetch() -> None:
        _send(link, ends, size, 2 * count, wait=False)
        _fetch(link, ends, size, count)

    return (
        _rate(count * size, best_of(timer, send, runs)),
        _rate(count * size, best_of(timer, fetch, runs)),
    )


def copy_latency_s(rates: Sequence[LinkRate]) -> float:
    """What a copy takes beyond its bytes, from the smallest and the largest that were timed."""
    small, large = rates[0], rates[-1]
    found = [
        small.size_bytes / small.d2h_bytes_per_s - small.size_bytes / large.d2h_bytes_per_s,
        small.size_bytes / small.h2d_bytes_per_s - small.size_bytes / large.h2d_bytes_per_s,
    ]
    return _rounded(max(*found, 0.0))


def _send(link: Link, ends: Ends, size: int, count: int, wait: bool = True) -> None:
    source, host = _part(link, ends.device[0][:size]), ends.host[0][:size]
    for _ in range(count):
        copy = link.send(source, host, None)
    if wait:
        link.wait(copy)


def _fetch(link: Link, ends: Ends, size: int, count: int, wait: bool = True) -> None:
    host, target = ends.host[1][:size], _part(link, ends.device[1][:size])
    for _ in range(count):
        copy = link.fetch(host, target, None)
    if wait:
        link.arrive(host, target, copy)


def _part(link: Link, flat: torch.Tensor) -> Part:
    """All of ``flat``, as ``link`` copies it."""
    return link.part(flat.untyped_storage(), flat.storage_offset(), flat.numel())


# --- overlap and order ----------------------------------------------------------------------------


def overlap_of(copy_s: float, compute_s: float, together_s: float) -> float:
    """Definition 4."""
    hidden = copy_s + compute_s - together_s
    return min(max(hidden / min(copy_s, compute_s), 0.0), 1.0)


def measured_overlap(link: Link, timer: Timer, ends: Ends, compute: Work) -> float:
    """Overlap of copies both ways with ``compute``, repeated until it takes as long as they do."""

    def copy() -> None:
        _send(link, ends, ends.size_bytes, 1, wait=False)
        _fetch(link, ends, ends.size_bytes, 1, wait=False)

    def wait() -> None:
        # A copy of nothing much, behind the others of its direction.
        _send(link, ends, 1, 1)
        _fetch(link, ends, 1, 1)

    copy_s = best_of(timer, lambda: (copy(), wait()))
    count = max(1, round(copy_s / best_of(timer, compute)))
    compute_s = best_of(timer, lambda: [compute() for _ in range(count)])
    together_s = best_of(timer, lambda: (copy(), [compute() for _ in range(count)], wait()))
    return overlap_of(copy_s, compute_s, together_s)


def ordering_holds(link: Link, ends: Ends, busy: Work) -> bool:
    """Definition 5, tried with other values each time.  ``busy`` keeps the device from idling."""
    # Large enough for a copy to be under way when the next op could start.
    size = min(ends.size_bytes, _ORDERING_BYTES)
    device, host = (tuple(end[:size] for end in side) for side in (ends.device, ends.host))
    part = Ends(device, host)  # type: ignore[arg-type]
    return all(_trial(link, part, busy, 2 * trial + 3) for trial in range(_ORDERING_TRIALS))


def _trial(link: Link, ends: Ends, busy: Work, value: int) -> bool:
    source, target = ends.device
    landed, host = ends.host
    landed.zero_()
    host.fill_(value)
    busy()
    source.fill_(value)
    out, back = _part(link, source), _part(link, target)
    sent = link.send(out, landed, None)
    # Back from the same host bytes: only behind the copy that fills them.
    again = link.fetch(landed, back, sent)
    link.arrive(landed, back, again)
    returned = target.eq(value).all()
    link.wait(sent)
    busy()
    source.fill_(value + 1)
    target.zero_()
    fetched = link.fetch(host, back, None)
    link.arrive(host, back, fetched)
    read = (target + 1).eq(value + 1).all()
    seen = [bool(returned), bool(read), bool(source.eq(value + 1).all())]
    link.drain()
    return all(seen) and bool(landed.eq(value).all())


def _busy_work(device: torch.device) -> Work:
    """A matrix product of a millisecond or so."""
    factor = torch.ones(4096, 4096, device=device)
    product = torch.empty_like(factor)
    return lambda: torch.mm(factor, factor, out=product)


# --- compute --------------------------------------------------------------------------------------


def matmul_rates(device: torch.device, timer: Timer, size: int = _MATMUL_SIZE) -> dict[str, int]:
    """Rates of large square products by dtype; ``tf32`` where the device has it."""
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        if _is_native(device, dtype):
            found[str(dtype).removeprefix("torch.")] = _matmul_rate(device, timer, size, dtype)
    if _is_native(device, torch.bfloat16):
        with _float32_precision("high"):
            found["tf32"] = _matmul_rate(device, timer, size, torch.float32)
    with _float32_precision("highest"):
        found["float32"] = _matmul_rate(device, timer, size, torch.float32)
    return found


def _matmul_rate(device: torch.device, timer: Timer, size: int, dtype: torch.dtype) -> int:
    # Random values: the clock of a device depends on the power that it draws, and that on them.
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(one)
    count = 4
    seconds = best_of(timer, lambda: [torch.mm(one, other, out=product) for _ in range(count)])
    return _rate(2 * size**3 * count, seconds)


def attention_rate(
    device: torch.device, timer: Timer, shape: tuple[int, int, int, int] = _ATTENTION
) -> AttentionRate:
    """Rates of causal attention, with the kernel that torch chooses."""
    dtype = torch.bfloat16 if _is_native(device, torch.bfloat16) else torch.float16
    query, key, value = (
        torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    output = forward()
    gradient = torch.randn_like(output)

    def backward() -> None:
        torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

    batch, heads, rows, width = shape
    # One product under a causal mask; two of them go forward, five backward.
    product = batch * heads * rows * rows * width
    return AttentionRate(
        _rate(2 * product, best_of(timer, forward)), _rate(5 * product, best_of(timer, backward))
    )


def memory_rate(device: torch.device, timer: Timer, size_bytes: int = GIB) -> int:
    """Bytes read and written by an elementwise op."""
    source = torch.ones(size_bytes // 4, device=device)
    result = torch.empty_like(source)
    return _rate(2 * size_bytes, best_of(timer, lambda: torch.mul(source, 2.0, out=result)))


def op_overhead_s(device: torch.device, timer: Timer) -> float:
    """What a kernel that does next to nothing takes on the device, behind others."""
    small = torch.ones(16, device=device)

    def work() -> None:
        for _ in range(_SMALL_OPS):
            small.mul_(1.0)

    return _rounded(best_of(timer, work) / _SMALL_OPS)


@dataclass(frozen=True)
class HostCosts:
    """``op_s`` for each op that launches a kernel, after ``start_s`` for the forward itself, and
    ``copy_s`` for each copy."""

    op_s: float
    start_s: float
    copy_s: float


def host_costs(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> HostCosts:
    """What the host takes to issue a forward, from replays of a small model in two depths, and of
    the deeper one under a plan (definition 6)."""
    few, many = (_small(device, depth) for depth in _DEPTHS)
    (few_s, facts), (many_s, deep) = (_issued(target, None, clock) for target in (few, many))
    few_ops, many_ops = _issued_ops(facts), _issued_ops(deep)
    op_s = max(many_s - few_s, 0.0) / (many_ops - few_ops)
    start_s = max(few_s - few_ops * op_s, 0.0)
    plan = Decisions(deep, DEFAULT_RULES, 1, Aim()).plan(EVERYTHING)
    moving_s, _ = _issued(many, plan, clock)
    copy_s = max(moving_s - many_s, 0.0) / len(plan.transfers)
    return HostCosts(_rounded(op_s), _rounded(start_s), _rounded(copy_s))


class _SmallLayers(nn.Module):
    """Ops so small that the device waits for the host."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.view(4, 8, 32)).sigmoid() * x.view(4, 8, 32)
        return x


def _small(device: torch.device, depth: int) -> Target:
    return Target(_SmallLayers(depth).to(device), (torch.ones(4, 8, 32, device=device),))


def _issued(
    target: Target, plan: Plan | None, clock: Callable[[], float]
) -> tuple[float, GraphFacts]:
    """Seconds to issue a forward, and what it issues."""
    device = target.args[0].device
    seconds = []
    with Replay(target, plan, device=device) as replay:
        replay.step()
        for _ in range(_HOST_RUNS):
            _synchronize(device)
            start = clock()
            output = replay.forward()
            seconds.append(clock() - start)
            # As in a step: what the forward finds in caches is what a backward leaves there.
            loss_of(output).backward()
        facts = replay.facts
    assert facts is not None
    return statistics.median(seconds), facts


def _issued_ops(facts: GraphFacts) -> float:
    """Ops of the forward, views as the part of one that they cost."""
    ops = [op for region in facts.regions for op in region.forward.ops]
    return sum(VIEW_HOST_PART if is_view(facts, op) else 1.0 for op in ops)


def _is_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device computes in ``dtype`` rather than emulate it."""
    if device.type == "cpu" or dtype != torch.bfloat16:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def _float32_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rate(amount: float, seconds: float) -> int:
    """Per second, to four digits: more than that does not repeat."""
    return max(1, int(float(f"{amount / max(seconds, 1e-12):.4g}")))


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "unknown"
