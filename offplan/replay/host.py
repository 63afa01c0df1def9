"""Host memory for saved storages: laid out at plan time, pinned once, leased to each forward run.

1.  A *slot* is one transfer's bytes on the host.  It is in use from its offload until its reload is
    needed, or until its release if it is never reloaded.
2.  A *layout* places the slots of one region in as few bytes as first fit finds: slots whose uses
    do not overlap share bytes.  Slots start at multiples of 512 bytes; nothing else is rounded.
3.  An *arena* is memory for one layout.  A *lease* is one forward run's use of an arena.  It ends
    when the last host tensor of that run has died, however that came about: the backward ran, the
    loss was dropped, the forward failed.  The arena is then free for the next run.
4.  A *slab* is one allocation that arenas are cut from: anonymous memory of our own, whole pages,
    registered with CUDA if it is to be pinned.  The first slab holds one arena for each region of
    the plan; a run that finds no free arena (two forwards before two backwards) adds a slab.
5.  The *budget* limits the bytes of all slabs together, in whole pages, as they are pinned.

Pinning goes through ``cudaHostRegister`` on pages of our own, because torch's pinned allocator
rounds to powers of two and never returns memory.  It never falls back to pageable memory.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offplan.errors import OffplanError
from offplan.transfers import Transfer
from offplan.units import format_binary

SLOT_ALIGNMENT_BYTES = 512


class HostMemoryError(OffplanError):
    """Host memory for a replay cannot be had: over the budget, or refused by the system."""


# --- layout ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where each slot starts, and how many bytes they take together."""

    offsets: tuple[int, ...]
    size_bytes: int


def layout(transfers: Sequence[Transfer]) -> Layout:
    """The layout of one region's ``transfers``, slot by slot (definitions 1 and 2)."""
    offsets = [0] * len(transfers)
    placed: list[tuple[int, int, int]] = []  # (first byte, end, slot), by first byte
    for slot in sorted(range(len(transfers)), key=lambda s: -transfers[s].transfer_bytes):
        size = _round_up(transfers[slot].transfer_bytes, SLOT_ALIGNMENT_BYTES)
        start = 0
        for first, end, other in placed:
            if not _overlap(transfers[slot], transfers[other]):
                continue
            if start + size <= first:
                break
            start = max(start, end)
        offsets[slot] = start
        insort(placed, (start, start + size, slot))
    return Layout(tuple(offsets), max((end for _, end, _ in placed), default=0))


def _overlap(one: Transfer, other: Transfer) -> bool:
    return one.offload_after <= _last_use(other) and other.offload_after <= _last_use(one)


def _last_use(transfer: Transfer) -> int:
    return transfer.release_by if transfer.needed_by is None else transfer.needed_by


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# --- pinning --------------------------------------------------------------------------------------


class Pinning(Protocol):
    """How a slab's pages are made fit for copies."""

    def pin(self, address: int, size_bytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...


class Pageable:
    """Ordinary memory: for the CPU, or where it was asked for."""

    def pin(self, address: int, size_bytes: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass


class Registered:
    """Pages locked and registered with CUDA, for the device that is current."""

    def pin(self, address: int, size_bytes: int) -> None:
        error = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)
        if int(error):
            reason = torch.cuda.cudart().cudaGetErrorString(error)
            _forget_cuda_error()
            raise HostMemoryError(
                f"{format_binary(size_bytes)} of host pinned memory were refused: {reason}",
                fix="move less (a larger budget for the peak), raise `ulimit -l` or the memory "
                "limit of the container, or end what else pins memory on this machine",
            )

    def unpin(self, address: int) -> None:
        if int(torch.cuda.cudart().cudaHostUnregister(address)):
            _forget_cuda_error()


def _forget_cuda_error() -> None:
    # CUDA keeps the error of a refused call for whoever asks next, which is the next kernel launch.
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return


class Slab:
    """One allocation: unpinned by ``give_back``, and unmapped when nothing points into it."""

    def __init__(self, size_bytes: int, pinning: Pinning) -> None:
        self.size_bytes = _round_up(size_bytes, mmap.PAGESIZE)
        self.pinning = pinning
        try:
            # Private: shared memory would outlive madvise, and be seen by forked children.
            self.pages = mmap.mmap(-1, self.size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise HostMemoryError(
                f"{format_binary(self.size_bytes)} of host memory were refused: {error}",
                fix="move less: plan with a larger budget for the peak",
            ) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        pinning.pin(self.address, self.size_bytes)
        self.is_held = True

    def give_back(self) -> None:
        """Unpin the pages and return them to the system.

        Their addresses stay valid, and read as zeros, until the last host tensor on them is gone.
        """
        if self.is_held:
            self.is_held = False
            self.pinning.unpin(self.address)
            self.pages.madvise(mmap.MADV_DONTNEED)


# --- arenas and leases ----------------------------------------------------------------------------


class Arena:
    """``size_bytes`` of a slab.  ``last_reload`` is the copy that reads it, if one may still."""

    def __init__(self, slab: Slab, start: int, size_bytes: int) -> None:
        self.slab = slab
        self.address = slab.address + start
        self.size_bytes = size_bytes
        self.last_reload: Any = None


class Lease:
    """One forward run's use of an arena; ends when the last host tensor made from it has died.

    ``sent`` has the copies to the host that were issued, by slot.
    """

    def __init__(self, arena: Arena, free: Callable[[Arena], None]) -> None:
        self.arena = arena
        self.sent: dict[int, Any] = {}
        self._free = free

    def host_tensor(self, offset: int, size_bytes: int) -> torch.Tensor:
        """``size_bytes`` of the arena as a flat uint8 tensor, which keeps the lease."""
        memory = (ctypes.c_ubyte * size_bytes).from_address(self.arena.address + offset)
        memory.lease = self
        # The tensor's storage keeps ``memory``, through any detach or view, until it dies.
        return torch.frombuffer(memory, dtype=torch.uint8)

    def __del__(self) -> None:
        self._free(self.arena)


class HostPool:
    """Arenas by size, cut from slabs within ``budget_bytes`` (None: no limit)."""

    def __init__(
        self, sizes: Iterable[int], pinning: Pinning, budget_bytes: int | None = None
    ) -> None:
        self.pinning = pinning
        self.budget_bytes = budget_bytes
        self.slabs: list[Slab] = []
        self.asked_bytes = 0
        # Leases end wherever a tensor dies, on any thread and at any moment: appending and popping
        # are the only operations, and each is atomic.
        self.free: dict[int, deque[Arena]] = {}
        self.is_closed = False
        self._add([size for size in sizes if size])

    @property
    def pinned_bytes(self) -> int:
        """Bytes of all slabs: whole pages."""
        return sum(slab.size_bytes for slab in self.slabs if slab.is_held)

    def lease(self, size_bytes: int) -> Lease:
        """A lease on an arena of that size.

        Raises ``HostMemoryError`` if another arena is needed and the budget has no room for it.
        """
        if self.is_closed:
            raise OffplanError("the replay is closed", fix="keep it open until its last step ends")
        try:
            arena = self._free_arenas(size_bytes).popleft()
        except IndexError:
            self._add([size_bytes])
            arena = self._free_arenas(size_bytes).popleft()
        return Lease(arena, self._take_back)

    def close(self) -> None:
        """Give every slab back.  Copies in flight must have been waited for."""
        self.is_closed = True
        self.free.clear()
        for slab in self.slabs:
            slab.give_back()

    def _free_arenas(self, size_bytes: int) -> deque[Arena]:
        return self.free.setdefault(size_bytes, deque())

    def _take_back(self, arena: Arena) -> None:
        if not self.is_closed:
            self._free_arenas(arena.size_bytes).append(arena)

    def _add(self, sizes: Sequence[int]) -> None:
        """One more slab, with an arena of each of ``sizes``."""
        if not sizes:
            return
        self._check_budget(_round_up(sum(sizes), mmap.PAGESIZE))
        slab = Slab(sum(sizes), self.pinning)
        self.slabs.append(slab)
        self.asked_bytes += sum(sizes)
        start = 0
        for size in sizes:
            self._free_arenas(size).append(Arena(slab, start, size))
            start += size

    def _check_budget(self, more_bytes: int) -> None:
        needed = self.pinned_bytes + more_bytes
        if self.budget_bytes is None or needed <= self.budget_bytes:
            return
        if not self.slabs:
            raise HostMemoryError(
                f"the plan needs {needed} bytes ({format_binary(needed)}) of host memory; the host "
                f"budget is {self.budget_bytes} ({format_binary(self.budget_bytes)})",
                fix=f"raise the host budget to {needed}, or plan with a larger budget for the peak",
            )
        raise HostMemoryError(
            "a forward ran before the backward of an earlier one, so that both need host memory: "
            f"{needed} bytes ({format_binary(needed)}) together; the host budget is "
            f"{self.budget_bytes} ({format_binary(self.budget_bytes)})",
            fix=f"raise the host budget to {needed}, or let go of the earlier output first",
        )
