"""Host memory for saved storages: laid out at plan time, pinned once, leased to each forward run.

1.  *Slots* and their *layout* are those of ``replay.layout``.
2.  An *arena* is memory for one layout.  A *lease* is one forward run's use of an arena.  It ends
    when the last host tensor of that run has died, however that came about: the backward ran, the
    loss was dropped, the forward failed.  The arena is then free for the next run.
3.  A *slab* is one allocation that arenas are cut from: pages of a backend of ``replay.pinning``.
    The first slab holds one arena for each region of the plan; a run that finds no free arena (two
    forwards before two backwards) adds a slab.  No tensor lies on two slabs.
4.  The *budget* limits the bytes of all slabs together, in whole pages or as the backend rounds
    them.

What is pinned is unpinned when the pool is closed, when nothing refers to it any more, and when
the interpreter exits.  A pool belongs to the process that made it, and shares nothing with others.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from offplan.errors import OffplanError
from offplan.replay.layout import SLOT_ALIGNMENT_BYTES as SLOT_ALIGNMENT_BYTES
from offplan.replay.layout import Layout as Layout
from offplan.replay.layout import layout as layout
from offplan.replay.limits import HostMemoryError as HostMemoryError
from offplan.replay.limits import reserved_bytes
from offplan.replay.pinning import Pageable as Pageable
from offplan.replay.pinning import Pinning as Pinning
from offplan.replay.pinning import Registered as Registered
from offplan.units import format_binary


class Slab:
    """One allocation, for ``asked_bytes``: unpinned by ``give_back``, and unmapped when nothing
    points into it."""

    def __init__(self, asked_bytes: int, pinning: Pinning) -> None:
        self.asked_bytes = asked_bytes
        self.pages = pinning.take(asked_bytes)
        # Of the backend that took them: another may be next.
        self.is_pinned = pinning.is_pinned

    @property
    def address(self) -> int:
        return self.pages.address

    @property
    def size_bytes(self) -> int:
        """Bytes that are really taken."""
        return self.pages.reserved_bytes

    @property
    def is_held(self) -> bool:
        return self.pages.is_held

    def give_back(self) -> None:
        """Unpin the pages and return them to the system (``Pages.give_back``)."""
        self.pages.give_back()

    def covers(self, first: int, end: int) -> bool:
        """Whether the addresses from ``first`` to ``end`` are all in it."""
        return self.address <= first and end <= self.address + self.pages.size_bytes


# --- arenas and leases ----------------------------------------------------------------------------


class Arena:
    """``size_bytes`` of a slab, for one lease at a time.

    ``last_reload`` is the copy that reads it, if one may still; ``sent`` has the last copy to the
    host of each slot.  One of no bytes needs no slab.
    """

    def __init__(self, slab: Slab | None, start: int, size_bytes: int) -> None:
        self.slab = slab
        self.address = 0 if slab is None else slab.address + start
        self.size_bytes = size_bytes
        self.last_reload: Any = None
        self.sent: dict[int, Any] = {}
        # How ctypes knows so many bytes, which takes it long to find out.
        self._types: dict[int, type[ctypes.Array[ctypes.c_ubyte]]] = {}

    def memory(self, offset: int, size_bytes: int) -> Any:
        """``size_bytes`` from ``offset``, as ctypes sees them."""
        found = self._types.get(size_bytes)
        if found is None:
            found = self._types[size_bytes] = ctypes.c_ubyte * size_bytes
        return found.from_address(self.address + offset)


class Lease:
    """One forward run's use of an arena; ends when the last host tensor made from it has died."""

    def __init__(self, arena: Arena, free: Callable[[Arena], None]) -> None:
        self.arena = arena
        self._free = free

    def host_tensor(self, offset: int, size_bytes: int) -> torch.Tensor:
        """``size_bytes`` of the arena as a flat uint8 tensor, which keeps the lease."""
        if not size_bytes:
            return torch.empty(0, dtype=torch.uint8)
        memory = self.arena.memory(offset, size_bytes)
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
        self._owner = os.getpid()
        # Leases end wherever a tensor dies, on any thread and at any moment: appending and popping
        # are the only operations, and each is atomic.
        self.free: dict[int, deque[Arena]] = {}
        # Where a host tensor lies that was made from a lease: whoever has it has the lease, which
        # is the only one of its arena.
        self.by_address: dict[int, Arena] = {}
        self.is_closed = False
        self._add([size for size in sizes if size])

    @property
    def asked_bytes(self) -> int:
        """Bytes that were laid out."""
        return sum(slab.asked_bytes for slab in self.slabs if slab.is_held)

    @property
    def pinned_bytes(self) -> int:
        """Bytes that all slabs really take: whole pages, or as the backend rounds."""
        return sum(slab.size_bytes for slab in self.slabs if slab.is_held)

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the process that the pool belongs to."""
        return os.getpid() != self._owner

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether all bytes of ``tensor``, a view or slice too, are pinned memory of this pool.

        Unlike ``tensor.is_pinned()`` it asks no driver, and is right when the pool was closed.
        """
        if not tensor.numel():
            return False
        reach = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        first = tensor.data_ptr()
        end = first + (reach + 1) * tensor.element_size()
        return any(
            slab.is_pinned and slab.is_held and slab.covers(first, end) for slab in self.slabs
        )

    def lease(self, size_bytes: int) -> Lease:
        """A lease on an arena of that size.

        Raises ``HostMemoryError`` if another arena is needed and the budget has no room for it.
        """
        if self.is_closed:
            raise OffplanError("the replay is closed", fix="keep it open until its last step ends")
        if self.is_inherited:
            raise OffplanError(
                "host memory of another process cannot be used in its forked child",
                fix="start the process with spawn, or make the replay in it",
            )
        if not size_bytes:
            return Lease(Arena(None, 0, 0), lambda arena: None)
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
        self.by_address.clear()
        # Each of them, whatever becomes of another.
        with ExitStack() as all_of_them:
            while self.slabs:
                all_of_them.callback(self.slabs.pop().give_back)

    def _free_arenas(self, size_bytes: int) -> deque[Arena]:
        return self.free.setdefault(size_bytes, deque())

    def _take_back(self, arena: Arena) -> None:
        if not self.is_closed:
            self._free_arenas(arena.size_bytes).append(arena)

    def _add(self, sizes: Sequence[int]) -> None:
        """One more slab, with an arena of each of ``sizes``."""
        if not sizes:
            return
        self._check_budget(self._taken_bytes(sum(sizes)))
        slab = Slab(sum(sizes), self.pinning)
        try:
            # What a backend that was fallen back to takes is only known now.
            self._check_budget(slab.size_bytes)
        except HostMemoryError:
            slab.give_back()
            raise
        self.slabs.append(slab)
        start = 0
        for size in sizes:
            self._free_arenas(size).append(Arena(slab, start, size))
            start += size

    def _taken_bytes(self, asked_bytes: int) -> int:
        return reserved_bytes(asked_bytes, "torch" if self.pinning.name == "torch" else "off")

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
