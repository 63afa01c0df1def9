"""The transfers of a replay as they run: streams, events, host memory, and what is counted.

The compute stream is the one that is current where a transfer is called.  Each direction has a
stream of its own, on which copies run in the order in which they were issued.

1.  *offload* makes the device-to-host stream wait for the compute stream as it stands, and for the
    last reload that may still read the same host bytes; then issues the copy.  The runtime holds
    the device storage from here to its release.
2.  *release* makes the compute stream wait for that copy, and lets go of the storage.  Whatever the
    compute stream allocates in its place runs after the copy, so the allocator needs no
    ``record_stream``.
3.  *reload* allocates on the compute stream, makes the host-to-device stream wait for the compute
    stream as it stands (the allocation's former user) and for the slot's own offload; then issues
    the copy.
4.  *wait* makes the compute stream wait for that copy.  Copies of one direction end in the order in
    which they were issued: what has waited for one is not made to wait for those before it.
5.  Nothing here blocks the host, except for a pool that has to grow, for ``close``, and after a
    failure: then the host waits until nothing is in flight, before anything is let go that a copy
    may still use.
6.  A packed transfer gathers its bytes on the compute stream, into a buffer that the copy reads; on
    the way back they are scattered by the wait.
7.  On the CPU, offload copies at once, release checks that the storage is really gone, reload fills
    the new storage with ones (not-a-number in every float), and wait copies.  So a read of a
    released storage, or of a reloaded one before its wait, cannot pass by luck.

One thread uses a runtime at a time; a backward may run on another one than its forward.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offplan.errors import DeviceError, OffplanError
from offplan.footprint import Pattern
from offplan.replay.cudart import DeviceCalls, Event, device_calls
from offplan.replay.host import HostPool, Lease, Pageable, Pinning
from offplan.replay.packing import gather, scatter, window
from offplan.trace._torch import is_current_device, storage_key
from offplan.transfers import buffer_bytes, first_byte

# A copy that was issued: ``CudaCopy`` on a GPU; None on the CPU, where nothing is left to wait for.
Copy = Any
# Bytes of a storage of the device, which it keeps: what ``Link.part`` returns.
Part = Any


class ReplayError(OffplanError):
    """A transfer cannot be done: its storage is held elsewhere, or the replay is closed."""


class RuntimeStats(msgspec.Struct, frozen=True):
    """Totals since the runtime was made.

    ``lease_count`` counts forward runs that moved something.  ``host_asked_bytes`` were laid out,
    ``host_pinned_bytes`` reserved for that, in whole pages; both are 0 once closed.
    ``stalled_ms`` is the time that the compute stream waited for copies; None unless it is timed.
    """

    offload_count: int
    offloaded_bytes: int
    reload_count: int
    reloaded_bytes: int
    lease_count: int
    host_asked_bytes: int
    host_pinned_bytes: int
    stalled_ms: float | None


@dataclass(frozen=True)
class Slot:
    """One transfer, in bytes from the start of its storage.

    ``pieces`` is what is carried if the transfer is packed, else empty.  ``item_bytes`` is the size
    of the largest element of its views.  ``stride`` is that of the value that the storage was
    allocated for.  ``name`` is for messages.
    """

    name: str
    start: int
    stop: int
    transfer_bytes: int
    pieces: tuple[Pattern, ...]
    item_bytes: int
    host_offset: int
    stride: tuple[int, ...] = ()

    @cached_property
    def first_byte(self) -> int:
        """Where in the storage the reloaded buffer begins: rounded down, to keep its alignment."""
        return first_byte(self.start)

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes allocated on reload; whole elements, so that it can be viewed as any dtype."""
        return buffer_bytes(self.start, self.stop, self.item_bytes)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes from the first that is carried to the last."""
        return self.stop - self.start


class TransferOps(NamedTuple):
    """What a graph calls: ``offload(value, slot) -> host``, ``release(host, slot)``,
    ``reload(host, slot, dtype) -> buffer`` and ``wait(buffer)``, with slots as numbers.

    ``graph_keeps``: the graph, not the runtime, keeps a storage until its release, which is then
    ``release(host, value, slot)``; ``value`` is the one that the storage was allocated for.
    ``offload(value, slot, size_bytes)`` and ``reload(host, slot, size_bytes, dtype)`` then say what
    they return.
    """

    offload: Callable[..., Any]
    release: Callable[..., Any]
    reload: Callable[..., Any]
    wait: Callable[..., Any]
    graph_keeps: bool = False


# --- links ----------------------------------------------------------------------------------------


class Link(Protocol):
    """How bytes cross between the host and ``device``, in both directions."""

    @property
    def device(self) -> torch.device: ...

    def begin_run(self) -> None:
        """A forward or a backward begins."""

    def buffer(self, size_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor: ...

    def part(self, storage: torch.UntypedStorage, first: int, size_bytes: int) -> Part: ...

    def send(self, source: Part, host: torch.Tensor, after: Copy | None) -> Copy: ...

    def fetch(self, host: torch.Tensor, target: Part, after: Copy | None) -> Copy: ...

    def arrive(self, host: torch.Tensor, target: Part, copy: Copy) -> None: ...

    def wait(self, copy: Copy) -> None: ...

    def drain(self) -> None: ...

    def still_held(self, name: str, key: int) -> None: ...

    def stalled_ms(self) -> float | None: ...


class CpuLink:
    """Copies done by the host (definition 7)."""

    device = torch.device("cpu")

    def begin_run(self) -> None:
        pass

    def buffer(self, size_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.full((size_bytes,), 0xFF, dtype=torch.uint8).view(dtype)

    def part(self, storage: torch.UntypedStorage, first: int, size_bytes: int) -> torch.Tensor:
        return window(storage, first, (size_bytes,), (1,))

    def send(self, source: torch.Tensor, host: torch.Tensor, after: Copy | None) -> Copy:
        host.copy_(source)

    def fetch(self, host: torch.Tensor, target: torch.Tensor, after: Copy | None) -> Copy:
        return None

    def arrive(self, host: torch.Tensor, target: torch.Tensor, copy: Copy) -> None:
        target.copy_(host)

    def wait(self, copy: Copy) -> None:
        pass

    def drain(self) -> None:
        pass

    def still_held(self, name: str, key: int) -> None:
        raise ReplayError(
            f"{name} is still there after its release: {_holder(key)} holds it",
            fix="report it with the target; until then, plan without this storage (--min-size)",
        )

    def stalled_ms(self) -> float | None:
        return None


# No copy has that number, and nothing is said of any stream.
_NOTHING_SEEN = (None, 0)


class _Lane:
    """The copies of one direction, numbered from 1 in the order in which they are issued."""

    __slots__ = ("count", "events", "followed", "seen", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.count = 0
        # Of copies that nobody has any more.
        self.events: list[Event] = []
        # The last copy of the other direction that this one has waited for.
        self.followed = 0
        # A compute stream, and the last copy that it has waited for: of the last such stream alone,
        # and within one run.  A stream of the user's may be destroyed, and its handle be another's;
        # inside a run that is as safe as torch's allocator, to which a handle is a stream too.
        self.seen: tuple[Any, int] = _NOTHING_SEEN


class CudaCopy:
    """A copy that was issued on ``lane``; it has ended where ``event`` was recorded.

    The event is another copy's once nobody has this one, and so nobody can come to wait for it.  A
    stream that waits already does so for what the event said then.
    """

    __slots__ = ("event", "lane", "number")

    def __init__(self, lane: _Lane, number: int, event: Event) -> None:
        self.lane, self.number, self.event = lane, number, event

    def synchronize(self) -> None:
        """The host waits for it."""
        self.event.synchronize()

    def __del__(self) -> None:
        # Copies die on any thread and at any moment: appending and popping are each atomic.
        self.lane.events.append(self.event)


class CudaLink:
    """Copies by the copy engines, on one stream each way (definitions 1 to 5).

    A step's host issues them between its kernels, and where it takes long over that the device runs
    out of these; so each costs as few calls as it can.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host = torch.cuda.Stream(device)
        self.to_device = torch.cuda.Stream(device)
        self._index = device.index
        if device.type == "cuda" and device.index is None:
            self._index = torch.cuda.current_device()
        self.calls: DeviceCalls = device_calls(self._index)
        self._out = _Lane(self.calls.named(self.to_host))
        self._back = _Lane(self.calls.named(self.to_device))
        # Where the compute stream stands.  A stream that waits for it waits for what it says at
        # that moment, so that one event does for all copies.
        self._here = _made_on(self.to_host)

    def begin_run(self) -> None:
        self._out.seen = self._back.seen = _NOTHING_SEEN

    def buffer(self, size_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(size_bytes // dtype.itemsize, dtype=dtype, device=self.device)

    def part(self, storage: torch.UntypedStorage, first: int, size_bytes: int) -> Part:
        return self.calls.part(storage, first, size_bytes)

    def send(self, source: Part, host: torch.Tensor, after: Copy | None) -> Copy:
        if not is_current_device(self._index):
            with torch.cuda.device(self.device):
                return self.send(source, host, after)
        event = self._begin(self._out, after) or _made_on(self.to_host)
        self.calls.copy_to_host(host, source, self._out.stream)
        return self._issued(self._out, event)

    def fetch(self, host: torch.Tensor, target: Part, after: Copy | None) -> Copy:
        if not is_current_device(self._index):
            with torch.cuda.device(self.device):
                return self.fetch(host, target, after)
        event = self._begin(self._back, after) or _made_on(self.to_device)
        self.calls.copy_to_device(target, host, self._back.stream)
        return self._issued(self._back, event)

    def arrive(self, host: torch.Tensor, target: Part, copy: Copy) -> None:
        self.wait(copy)

    def wait(self, copy: Copy) -> None:
        if not is_current_device(self._index):
            with torch.cuda.device(self.device):
                self.wait(copy)
            return
        stream = self.calls.current()
        seen_by, seen = copy.lane.seen
        if seen_by != stream or copy.number > seen:
            self._wait(stream, copy)
            # Both at once: an interrupt between them would let one stream pass for another.
            copy.lane.seen = stream, copy.number

    def drain(self) -> None:
        self.to_host.synchronize()
        self.to_device.synchronize()

    def still_held(self, name: str, key: int) -> None:
        # The result is right all the same, and the measured peak shows the bytes.
        pass

    def stalled_ms(self) -> float | None:
        return None

    def _wait(self, stream: Any, copy: CudaCopy) -> None:
        self.calls.wait_event(stream, copy.event)

    def _begin(self, lane: _Lane, after: CudaCopy | None) -> Event | None:
        """Make ``lane`` wait for the compute stream, and for the copy ``after``.  An event for the
        copy that comes next, if one is left."""
        calls, stream = self.calls, lane.stream
        calls.record_event(self._here, calls.current())
        calls.wait_event(stream, self._here)
        if after is not None and after.lane is not lane and after.number > lane.followed:
            calls.wait_event(stream, after.event)
            lane.followed = after.number
        try:
            return lane.events.pop()
        except IndexError:
            return None

    def _issued(self, lane: _Lane, event: Event) -> CudaCopy:
        self.calls.record_event(event, lane.stream)
        lane.count += 1
        return CudaCopy(lane, lane.count, event)


def _made_on(stream: torch.cuda.Stream) -> Event:
    """An event of the device of ``stream``, as CUDA knows it."""
    event = Event()
    stream.record_event(event)
    event.address = event.cuda_event
    return event


# Pairs of events that a timed link keeps before it asks which are over.
_MOST_WAITS = 256


class TimedCudaLink(CudaLink):
    """The same, with the time that the compute stream spends waiting measured."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.waits: deque[tuple[Event, Event]] = deque()
        self.total_ms = 0.0

    def _wait(self, stream: Any, copy: CudaCopy) -> None:
        before, after = (Event(enable_timing=True) for _ in range(2))
        compute = torch.cuda.current_stream(self.device)
        before.record(compute)
        super()._wait(stream, copy)
        after.record(compute)
        self.waits.append((before, after))
        # Whether or not anybody ever asks, there are no more of them than are under way.
        while len(self.waits) > _MOST_WAITS and self.waits[0][1].query():
            self._add_first()

    def stalled_ms(self) -> float | None:
        while self.waits:
            self.waits[0][1].synchronize()
            self._add_first()
        return self.total_ms

    def _add_first(self) -> None:
        before, after = self.waits.popleft()
        self.total_ms += before.elapsed_time(after)


def present_device(device: str | torch.device | None, *, doing: str, fix: str) -> torch.device:
    """The CPU, or the GPU with its number; None: the current GPU, or else the CPU.

    Raises ``DeviceError`` that there is none for ``doing``.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cpu":
        return found
    if found.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(f"there is no {found.type} device {doing}", fix=fix)
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def link_for(device: torch.device, *, timing: bool) -> Link:
    """The link of ``device``; on a GPU, one that measures stalls if ``timing``."""
    if device.type == "cpu":
        return CpuLink()
    return cuda_link(device, TimedCudaLink if timing else CudaLink)


def cuda_link(device: torch.device, link_type: type[CudaLink]) -> CudaLink:
    """Raises ``DeviceError`` if no streams can be made on ``device``."""
    try:
        return link_type(device)
    except RuntimeError as error:
        raise DeviceError(
            f"no stream can be made on {device}: {_first_line(error)}",
            fix="see nvidia-smi for who uses the GPU",
        ) from error


# --- failures -------------------------------------------------------------------------------------


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """What CUDA refuses as one plain message; running out of memory stays what torch says of it."""
    try:
        yield
    except RuntimeError as error:
        _explain(error, doing)
        raise


class Guarded:
    """``failed`` around one transfer."""

    __slots__ = ("doing", "link")

    def __init__(self, link: Link, doing: str) -> None:
        self.link, self.doing = link, doing

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            failed(self.link, error, self.doing)


def failed(link: Link, error: BaseException, doing: str) -> None:
    """One transfer has failed, or was interrupted: all copies have ended before the error leaves
    here, since then no memory can go that one of them still uses; and it is ``explained``."""
    end_copies(link)
    _explain(error, doing)


def _explain(error: BaseException, doing: str) -> None:
    """Raise what CUDA refuses as a ``ReplayError`` from it."""
    if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
        raise ReplayError(
            f"{doing} failed: {_first_line(error)}",
            fix="run the step again; if that fails too, an earlier kernel may have been what "
            "failed, which CUDA_LAUNCH_BLOCKING=1 shows",
        ) from error


def end_copies(link: Link) -> None:
    """After a failure: wait for all copies.  A device that takes no more orders copies nothing."""
    with suppress(RuntimeError):
        link.drain()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _holder(key: int) -> str:
    """Names a tensor on the storage ``key``, where Python can see one."""
    for item in gc.get_objects():
        if type(item) is torch.Tensor and item.layout == torch.strided and storage_key(item) == key:
            return f"a {str(item.dtype).removeprefix('torch.')}{list(item.shape)} tensor"
    return "something outside the graph"


# --- the runtime ----------------------------------------------------------------------------------


class _Sending(NamedTuple):
    """An offload that is not released: the storage, what is copied of it, and the copy."""

    value: torch.Tensor
    source: Part
    copy: Copy


class _Arriving(NamedTuple):
    """A reload that has not been waited for.  ``target`` is what the copy fills: a part of
    ``buffer``, or all of ``packed``, which is still to be scattered into it."""

    slot: Slot
    host: torch.Tensor
    target: Part
    packed: torch.Tensor | None
    buffer: torch.Tensor
    copy: Copy


@dataclass
class _Totals:
    offload_count: int = 0
    offloaded_bytes: int = 0
    reload_count: int = 0
    reloaded_bytes: int = 0
    lease_count: int = 0


class Runtime:
    """Runs transfers on one device.  Owns its streams and host memory until ``close``."""

    def __init__(self, link: Link, pool: HostPool) -> None:
        self.link = link
        self.pool = pool
        self.slots: list[Slot] = []
        self.is_closed = False
        self._totals = _Totals()
        self._lease: Lease | None = None
        self._sending: dict[int, _Sending] = {}
        # By the address of the buffer, which is held here.
        self._arriving: dict[int, _Arriving] = {}

    @property
    def device(self) -> torch.device:
        return self.link.device

    @property
    def ops(self) -> TransferOps:
        """What a graph's nodes call, for graphs that run op by op."""
        return TransferOps(self.offload, self.release, self.reload, self.wait)

    def add_slots(self, slots: Sequence[Slot]) -> range:
        """Make ``slots`` known; returns their numbers."""
        first = len(self.slots)
        self.slots.extend(slots)
        return range(first, len(self.slots))

    def stats(self) -> RuntimeStats:
        """Totals so far.  Where stalls are timed, waits for the device."""
        with explained("reading how long copies were waited for"):
            stalled_ms = self.link.stalled_ms()
        return RuntimeStats(
            **vars(self._totals),
            host_asked_bytes=self.pool.asked_bytes,
            host_pinned_bytes=self.pool.pinned_bytes,
            stalled_ms=stalled_ms,
        )

    def close(self) -> None:
        """Wait for copies in flight and give the host memory back.  What was saved on it by a
        forward whose backward has not run is lost: that backward raises ``ReplayError``."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            # CUDA does not run in a forked child, and the copies are the parent's.
            if not self.pool.is_inherited:
                with explained("waiting for the copies in flight"):
                    self.link.drain()
        finally:
            self._sending.clear()
            self._arriving.clear()
            self.pool.close()

    def __del__(self) -> None:
        # Nobody hears an error from here.
        if not sys.is_finalizing():
            with suppress(OffplanError):
                self.close()

    # --- around a graph ---------------------------------------------------------------------------

    @contextmanager
    def forward_run(self, arena_bytes: int) -> Iterator[None]:
        """One forward run, with a lease of its own on host memory.

        If it fails, its copies end before their storages go.
        """
        self._check_open()
        try:
            self.link.begin_run()
            self._lease = self.pool.lease(arena_bytes)
            self._totals.lease_count += 1
            yield
        finally:
            self._lease = None
            self._abandon(self._sending)

    @contextmanager
    def backward_run(self) -> Iterator[None]:
        """One backward run.

        If it fails, its reloads end before their buffers go.
        """
        self._check_open()
        self.link.begin_run()
        try:
            yield
        finally:
            self._abandon(self._arriving)

    def _abandon(self, in_flight: dict[int, Any]) -> None:
        """Let go of what a run has left in flight, as only one does that failed."""
        if in_flight:
            end_copies(self.link)
            in_flight.clear()

    # --- in a graph -------------------------------------------------------------------------------

    def offload(self, value: torch.Tensor, number: int) -> torch.Tensor:
        """Issue the copy of a slot's bytes of ``value``'s storage.  The host tensor they go to."""
        return self._offload(value, number, 0)

    def offload_value(self, value: torch.Tensor, number: int) -> torch.Tensor:
        """The same where the slot's bytes count from the first one of ``value``."""
        if value.stride() != self.slots[number].stride:
            self._check_strides(value, self.slots[number])
        return self._offload(value, number, value.storage_offset() * value.element_size())

    def _check_strides(self, value: torch.Tensor, slot: Slot) -> None:
        # That of a dimension of one element says nothing.
        steps = zip(value.size(), value.stride(), slot.stride, strict=True)
        if any(size > 1 and step != planned for size, step, planned in steps):
            raise ReplayError(
                f"{slot.name} was compiled with the strides {value.stride()}, and planned with "
                f"{slot.stride}",
                fix="report it with the target; until then, plan for --compiler aot_eager",
            )

    def _offload(self, value: torch.Tensor, number: int, first: int) -> torch.Tensor:
        assert self._lease is not None
        slot, lease, link = self.slots[number], self._lease, self.link
        host = lease.host_tensor(slot.host_offset, slot.transfer_bytes)
        arena = lease.arena
        try:
            storage = value.untyped_storage()
            if slot.pieces:
                packed = gather(storage, slot.pieces, first).untyped_storage()
                source = link.part(packed, 0, slot.transfer_bytes)
            else:
                source = link.part(storage, first + slot.start, slot.size_bytes)
            copy = link.send(source, host, arena.last_reload)
            self._sending[number] = _Sending(value, source, copy)
        except BaseException as error:
            failed(link, error, f"the offload of {slot.name}")
            raise
        self.pool.by_address[host.data_ptr()] = arena
        arena.sent[number] = copy
        self._totals.offload_count += 1
        self._totals.offloaded_bytes += slot.transfer_bytes
        return host

    def release(self, host: torch.Tensor, number: int) -> None:
        """Let go of the device storage, from where on the compute stream its copy has landed."""
        value = self.let_go(number)
        key, reference = storage_key(value), StorageWeakRef(value.untyped_storage())
        del value
        if not reference.expired():
            self.link.still_held(self.slots[number].name, key)

    def let_go(self, number: int) -> torch.Tensor:
        """The same for a storage that the graph still has: it is not checked to be gone."""
        try:
            value, _, copy = self._sending.pop(number)
            self.link.wait(copy)
        except BaseException as error:
            failed(self.link, error, f"the release of {self.slots[number].name}")
            raise
        return value

    def reload(
        self, host: torch.Tensor, number: int, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """Issue the copy back.  The flat buffer it goes to, not to be read before ``wait``."""
        slot, arena, link = self.slots[number], self.pool.by_address[host.data_ptr()], self.link
        try:
            buffer = link.buffer(slot.buffer_bytes, dtype)
            packed = None
            if slot.pieces:
                packed = link.buffer(slot.transfer_bytes)
                target = link.part(packed.untyped_storage(), 0, slot.transfer_bytes)
            else:
                first = slot.start - slot.first_byte
                target = link.part(buffer.untyped_storage(), first, slot.size_bytes)
            copy = link.fetch(host, target, arena.sent[number])
            arena.last_reload = copy
            address = buffer.data_ptr()
            self._arriving[address] = _Arriving(slot, host, target, packed, buffer, copy)
        except BaseException as error:
            failed(link, error, f"the reload of {slot.name}")
            raise
        self._totals.reload_count += 1
        self._totals.reloaded_bytes += slot.transfer_bytes
        return buffer

    def wait(self, buffer: torch.Tensor) -> None:
        """Have the compute stream wait until ``buffer`` is filled."""
        slot, host, target, packed, _, copy = self._arriving[buffer.data_ptr()]
        try:
            del self._arriving[buffer.data_ptr()]
            self.link.arrive(host, target, copy)
            if packed is not None:
                scatter(packed, buffer.untyped_storage(), slot.first_byte, slot.pieces)
        except BaseException as error:
            failed(self.link, error, f"the wait for {slot.name}")
            raise

    def _check_open(self) -> None:
        if self.is_closed:
            raise ReplayError(
                "the replay is closed, and what it had saved on the host is gone",
                fix="close it after the last backward",
            )


def cpu_runtime(arena_sizes: Sequence[int], host_budget: int | None) -> Runtime:
    """A runtime that replays on the CPU."""
    return Runtime(CpuLink(), HostPool(arena_sizes, Pageable(), host_budget))


def cuda_runtime(
    device: torch.device,
    arena_sizes: Sequence[int],
    host_budget: int | None,
    pinning: Pinning,
    link_type: type[CudaLink],
) -> Runtime:
    """A runtime for a GPU, with its host memory pinned at once."""
    with torch.cuda.device(device):
        link = cuda_link(device, link_type)
        return Runtime(link, HostPool(arena_sizes, pinning, host_budget))
