"""Links whose copies are slowed down, or sped up, so that a missing wait changes bits.

A small step moves kilobytes, and its copies land long before anything reads them: errors of order
would pass by luck.  A paced link wraps the one of a runtime, and gives each copy another time.

1.  *as they come*: the wrapped link as it is.
2.  *slow*: each copy lands late; *slow to the host*, *slow to the device*: those of one direction,
    and the others early.  *fast*: the compute falls behind, and copies run as soon as they may.
3.  On a GPU a copy is slowed by a kernel that spins before it on its stream, and half of the time
    by another behind it, before its event.  The compute stream is slowed by one that spins before a
    forward and a backward.  Lengths are drawn, from a seed.
4.  On the CPU a late copy runs when the compute waits for it, or for one behind it in the same
    direction, or for one that has to come after it: as late as the rules allow.  From the second
    repeat on some are drawn that run before, at the next call of the link.  An early one runs when
    it is issued.  No thread does this: it could only land a copy somewhere between, by luck.
5.  A late copy of the CPU holds on to nothing.  If its source is gone by then, it carries ones
    (not-a-number in every float); if its target is gone, it is lost.  Host bytes that a late copy
    is going to fill are filled with ones when it is issued, if nothing reads them any more.
6.  On the CPU each step is taken to run on another compute stream than the one before, with nothing
    to order them.  A copy to host bytes that an earlier reload may then still read, as far as
    anything has waited for it, is *misordered*.  (The bits of that reload cannot show it: the
    compute of the CPU is done when it has waited.)

Nothing here changes what a runtime does; only when.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from offplan.replay.runtime import Copy, CpuLink, CudaLink, Link, Part
from offplan.trace._torch import spin
from offplan.verified import Pace

# Many times what the host takes to issue an op, so that what does not wait comes too early.
_LONGEST_SPIN_MS = 0.2
# About what the host takes to issue a small step: the compute falls behind all of it.
_LAG_MS = 1.5
# How often a late copy of the CPU runs before it has to.
_EARLIER = 0.3

_SLOW_TO_HOST: frozenset[Pace] = frozenset({"slow", "slow to the host"})
_SLOW_TO_DEVICE: frozenset[Pace] = frozenset({"slow", "slow to the device"})


class PacedLink(Link, Protocol):
    """A link with a pace.  ``misordered`` says what definition 6 found."""

    misordered: list[str]

    def set_pace(self, pace: Pace, repeat: int) -> None:
        """From here on.  The ``repeat`` is the seed of what is drawn."""

    def begin_step(self) -> None: ...

    def fall_behind(self) -> None:
        """Before a forward, and a backward: the compute falls behind, where the pace says so."""


def paced(link: Link) -> PacedLink:
    """``link``, with a pace that can be set."""
    if isinstance(link, CudaLink):
        return PacedCudaLink(link)
    assert isinstance(link, CpuLink)
    return PacedCpuLink(link)


class _Wrapped:
    """What a pace leaves to the link that it wraps."""

    link: Link

    def begin_run(self) -> None:
        self.link.begin_run()

    def buffer(self, size_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return self.link.buffer(size_bytes, dtype)

    def part(self, storage: torch.UntypedStorage, first: int, size_bytes: int) -> Part:
        return self.link.part(storage, first, size_bytes)

    def still_held(self, name: str, key: int) -> None:
        self.link.still_held(name, key)

    def stalled_ms(self) -> float | None:
        return self.link.stalled_ms()


# --- on a GPU -------------------------------------------------------------------------------------


class PacedCudaLink(_Wrapped):
    """Definition 3."""

    link: CudaLink

    def __init__(self, link: CudaLink) -> None:
        self.link = link
        self.misordered: list[str] = []
        self._pace: Pace = "as they come"
        self._random = random.Random(0)
        self._cycles_per_ms = _cycles_per_ms(link.device)

    @property
    def device(self) -> torch.device:
        return self.link.device

    def set_pace(self, pace: Pace, repeat: int) -> None:
        self._pace = pace
        self._random = random.Random(repeat)

    def begin_step(self) -> None:
        pass

    def fall_behind(self) -> None:
        if self._pace == "fast":
            self._spin(torch.cuda.current_stream(self.device), _LAG_MS)

    def send(self, source: Part, host: torch.Tensor, after: Copy | None) -> Copy:
        if self._pace not in _SLOW_TO_HOST:
            return self.link.send(source, host, after)
        return self._slowed(self.link.to_host, lambda: self.link.send(source, host, after))

    def fetch(self, host: torch.Tensor, target: Part, after: Copy | None) -> Copy:
        if self._pace not in _SLOW_TO_DEVICE:
            return self.link.fetch(host, target, after)
        return self._slowed(self.link.to_device, lambda: self.link.fetch(host, target, after))

    def arrive(self, host: torch.Tensor, target: Part, copy: Copy) -> None:
        self.link.arrive(host, target, copy)

    def wait(self, copy: Copy) -> None:
        self.link.wait(copy)

    def drain(self) -> None:
        self.link.drain()

    def _slowed(self, stream: torch.cuda.Stream, issue: Callable[[], Copy]) -> Copy:
        self._spin(stream, self._random.uniform(0, _LONGEST_SPIN_MS))
        copy = issue()
        if self._random.random() < 0.5:
            return copy
        self._spin(stream, self._random.uniform(0, _LONGEST_SPIN_MS))
        # Nobody has seen it yet: it ends later than it did.
        self.link.calls.record_event(copy.event, copy.lane.stream)
        return copy

    def _spin(self, stream: torch.cuda.Stream, length_ms: float) -> None:
        with torch.cuda.stream(stream):
            spin(int(length_ms * self._cycles_per_ms))


def _cycles_per_ms(device: torch.device) -> float:
    """How many cycles a spin of one millisecond takes, from one that is timed."""
    cycles = 1_000_000
    with torch.cuda.device(device):
        # The first launch loads the kernel.
        spin(cycles)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        spin(cycles)
        end.record()
        end.synchronize()
    return cycles / max(begin.elapsed_time(end), 1e-3)


# --- on the CPU -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Late:
    """A copy that was issued.  ``number`` counts in its direction; ``source`` and ``target`` give
    the tensors, or None if they are gone."""

    lane: _Lane
    number: int
    source: Callable[[], torch.Tensor | None]
    target: Callable[[], torch.Tensor | None]
    after: _Late | None
    has_landed: bool = False

    def land(self) -> None:
        """Run, after those before it on its lane, each after what it has to follow."""
        while not self.has_landed:
            first = self.lane.waiting.popleft()
            if first.after is not None:
                first.after.land()
            _carry(first.source(), first.target())
            first.has_landed = True
            # What a copy holds of another would be a chain of all that ever were.
            first.after = None

    def synchronize(self) -> None:
        """The host waits for it, as for an event: what it issues from now on comes after it."""
        self.land()
        self.lane.synchronized = max(self.lane.synchronized, self.number)


@dataclass
class _Lane:
    """The copies of one direction that have not landed, in the order in which they were issued."""

    waiting: deque[_Late] = field(default_factory=deque)
    count: int = 0
    # The last that the host has waited for.
    synchronized: int = 0


@dataclass(frozen=True)
class _Read:
    """Host bytes, by address, that the reload of that number reads."""

    start: int
    stop: int
    number: int


class PacedCpuLink(_Wrapped):
    """Definitions 4 to 6."""

    device = torch.device("cpu")

    def __init__(self, link: CpuLink) -> None:
        self.link = link
        self.misordered: list[str] = []
        self._pace: Pace = "as they come"
        self._random = random.Random(0)
        self._earlier = 0.0
        self._to_host, self._to_device = _Lane(), _Lane()
        # The last reload that each of two compute streams has waited for.
        self._stream = 0
        self._waited = [0, 0]
        self._reads: list[_Read] = []

    def set_pace(self, pace: Pace, repeat: int) -> None:
        self.drain()
        self._pace = pace
        self._random = random.Random(repeat)
        self._earlier = _EARLIER if repeat else 0.0

    def begin_step(self) -> None:
        self._stream = 1 - self._stream

    def fall_behind(self) -> None:
        # The compute of the CPU is always done when the host comes by: copies are early instead.
        pass

    def send(self, source: torch.Tensor, host: torch.Tensor, after: Copy | None) -> Copy:
        self._check_order(host, after)
        if self._pace == "as they come":
            return self.link.send(source, host, after)
        bytes_ = _unleased(host)
        if self._pace in _SLOW_TO_HOST and (after is None or after.has_landed):
            bytes_.fill_(0xFF)
        copy = self._issue(self._to_host, weakref.ref(source), lambda: bytes_, after)
        return self._landed_if(copy, self._pace not in _SLOW_TO_HOST)

    def fetch(self, host: torch.Tensor, target: torch.Tensor, after: Copy | None) -> Copy:
        bytes_ = _unleased(host)
        first = host.data_ptr()
        self._reads.append(_Read(first, first + host.numel(), self._to_device.count + 1))
        copy = self._issue(self._to_device, lambda: bytes_, weakref.ref(target), after)
        # As it comes, the link has the bytes when they are waited for, as a late copy does.
        return self._landed_if(copy, self._pace in ("fast", "slow to the host"))

    def arrive(self, host: torch.Tensor, target: torch.Tensor, copy: Copy) -> None:
        self.wait(copy)

    def wait(self, copy: Copy) -> None:
        if copy is None:
            return
        copy.land()
        if copy.lane is self._to_device:
            self._waited[self._stream] = max(self._waited[self._stream], copy.number)
        self._land_some()

    def drain(self) -> None:
        for lane in (self._to_host, self._to_device):
            while lane.waiting:
                lane.waiting[-1].land()
        self._waited = [self._to_device.count] * 2
        self._reads.clear()

    def _issue(
        self,
        lane: _Lane,
        source: Callable[[], torch.Tensor | None],
        target: Callable[[], torch.Tensor | None],
        after: Copy | None,
    ) -> _Late:
        lane.count += 1
        copy = _Late(lane, lane.count, source, target, after)
        lane.waiting.append(copy)
        self._land_some()
        return copy

    def _landed_if(self, copy: _Late, is_early: bool) -> _Late:
        if is_early:
            copy.land()
        return copy

    def _land_some(self) -> None:
        for lane in (self._to_host, self._to_device):
            while lane.waiting and self._random.random() < self._earlier:
                lane.waiting[0].land()

    def _check_order(self, host: torch.Tensor, after: Copy | None) -> None:
        """Definition 6, of a copy to ``host`` that comes ``after`` a reload."""
        first = host.data_ptr()
        last = first + host.numel()
        waited = max(self._waited[self._stream], self._to_device.synchronized)
        known = max(waited, 0 if after is None else after.number)
        for read in [each for each in self._reads if each.start < last and first < each.stop]:
            if read.number > known:
                self.misordered.append(
                    f"{host.numel()} bytes were copied to host memory that a reload of an earlier "
                    "step may still read"
                )
            self._reads.remove(read)


def _unleased(host: torch.Tensor) -> torch.Tensor:
    """The bytes of ``host``, without keeping the lease on them: a copy knows an address alone."""
    memory = (ctypes.c_ubyte * host.numel()).from_address(host.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8)


def _carry(source: torch.Tensor | None, target: torch.Tensor | None) -> None:
    if target is None:
        return
    if source is None:
        target.fill_(0xFF)
    else:
        target.copy_(source)
