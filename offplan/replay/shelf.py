"""Host memory for storages whose sizes are not known beforehand: blocks cut from slabs.

1.  A *block* is one storage's bytes on the host.  It is in use until the last host tensor made from
    it has died, however that came about.
2.  A *gap* is a stretch of a slab that no block has.  A block is cut from the front of the smallest
    gap that it fits in; gaps that touch become one.  So a step that asks for what the step before
    it asked for finds its blocks again, and takes no new memory.
3.  A *slab* is one allocation of a backend of ``replay.pinning``.  A block that fits in no gap adds
    one of its own size, or of ``SLAB_BYTES`` if it is smaller than that: nothing else is rounded,
    and 60 GB are a few thousand mappings at most.
4.  The *budget* limits what all slabs together really take.  Where it has no room for another slab,
    as many of those without any block are given back first as it takes; if all of them would not be
    enough, none is, and there is no block.
5.  Blocks that are *reserved* are cut from the gaps that there are, the largest first, or none is:
    no slab comes or goes for them.
6.  A gap knows the last copy that may still read its bytes: a reload whose block has gone.  Whoever
    writes to them next waits for it.

One thread takes blocks at a time; blocks may die on any.  What is pinned is unpinned as ``Pages``
says, and a pool belongs to the process that made it.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from offplan.errors import OffplanError
from offplan.replay.layout import SLOT_ALIGNMENT_BYTES, round_up
from offplan.replay.limits import reserved_bytes
from offplan.replay.pinning import Pages, Pinning

# Small against the host memory of a run, large against what the system counts mappings for.
SLAB_BYTES = 16 * 2**20


class _Read(NamedTuple):
    """A reload that may still run; copies back are done in the order of ``number``."""

    number: int
    copy: Any


_NOTHING_READS = _Read(-1, None)


class _Gap(NamedTuple):
    """Bytes ``start`` to ``stop`` of a slab, free; sorted by size first."""

    size_bytes: int
    slab: int
    start: int
    last_read: _Read

    @property
    def stop(self) -> int:
        return self.start + self.size_bytes


class Block:
    """``size_bytes`` from ``address`` for one storage (definition 1)."""

    def __init__(self, slab: int, pages: Pages, gap: _Gap, free: Callable[[_Gap], None]) -> None:
        # Keeps the mapping for as long as a host tensor points into it.
        self.pages = pages
        self.after = gap.last_read.copy
        # With its last read: a block may die before anything was written to it.
        self._gap = gap
        self._free = free

    def host_tensor(self, size_bytes: int) -> torch.Tensor:
        """The first ``size_bytes`` as a flat uint8 tensor, which keeps the block."""
        assert size_bytes <= self._gap.size_bytes
        memory = (ctypes.c_ubyte * size_bytes).from_address(self.pages.address + self._gap.start)
        memory.block = self
        # The tensor's storage keeps ``memory``, through any detach or view, until it dies.
        return torch.frombuffer(memory, dtype=torch.uint8)

    def read_by(self, number: int, copy: Any) -> None:
        """The ``number``-th reload of all, ``copy``, reads the block from now on."""
        self._gap = self._gap._replace(last_read=_Read(number, copy))

    def __del__(self) -> None:
        self._free(self._gap)


class Shelf:
    """Blocks of any size, within ``budget_bytes`` (None: no limit)."""

    def __init__(self, pinning: Pinning, budget_bytes: int | None = None) -> None:
        self.pinning = pinning
        self.budget_bytes = budget_bytes
        self.slabs: dict[int, Pages] = {}
        self.asked_bytes = 0
        self.is_closed = False
        self._slab_count = 0
        self._used_bytes = 0
        self._gaps: list[_Gap] = []
        self._by_end: dict[tuple[int, int], _Gap] = {}
        self._by_start: dict[tuple[int, int], _Gap] = {}
        # Blocks die on any thread and at any moment: appending and popping are each atomic.
        self._returned: deque[_Gap] = deque()
        self._owner = os.getpid()

    @property
    def pinned_bytes(self) -> int:
        """Bytes that all slabs really take."""
        return sum(pages.reserved_bytes for pages in self.slabs.values() if pages.is_held)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in use."""
        self._collect()
        return self._used_bytes

    def take(self, size_bytes: int) -> Block | None:
        """A block of ``size_bytes`` (more than none); None where the budget has no room for it.

        Raises ``HostMemoryError`` if the system refuses the memory.
        """
        self.check_usable()
        self._collect()
        size = round_up(size_bytes, SLOT_ALIGNMENT_BYTES)
        block = self._cut(size)
        if block is None and self._add_slab(size):
            block = self._cut(size)
        return block

    def reserve(self, sizes: Sequence[int]) -> list[Block] | None:
        """A block of each of ``sizes``, in their order; None where the gaps have no room for all
        of them (definition 5)."""
        self.check_usable()
        self._collect()
        found: dict[int, Block] = {}
        for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
            block = self._cut(round_up(sizes[number], SLOT_ALIGNMENT_BYTES))
            if block is None:
                return None
            found[number] = block
        return [found[number] for number in range(len(sizes))]

    def _cut(self, size_bytes: int) -> Block | None:
        """A block of the smallest gap that it fits in; None if there is none."""
        place = bisect_left(self._gaps, (size_bytes,))
        if place == len(self._gaps):
            return None
        gap = self._gaps[place]
        self._remove(gap)
        if gap.size_bytes > size_bytes:
            rest_bytes = gap.size_bytes - size_bytes
            self._insert(gap._replace(size_bytes=rest_bytes, start=gap.start + size_bytes))
        self._used_bytes += size_bytes
        # What was laid out at most: ``used_bytes`` falls again in every backward.
        self.asked_bytes = max(self.asked_bytes, self._used_bytes)
        own = gap._replace(size_bytes=size_bytes)
        return Block(gap.slab, self.slabs[gap.slab], own, self._returned.append)

    def close(self) -> None:
        """Give every slab back.  Copies in flight must have been waited for."""
        self.is_closed = True
        self._gaps.clear()
        self.asked_bytes = 0
        # Each of them, whatever becomes of another.
        with ExitStack() as all_of_them:
            while self.slabs:
                all_of_them.callback(self.slabs.popitem()[1].give_back)

    def check_usable(self) -> None:
        """Raise ``OffplanError`` once closed, and in a forked child."""
        if self.is_closed:
            raise OffplanError("the offload is closed", fix="make a new one")
        if os.getpid() != self._owner:
            raise OffplanError(
                "host memory of another process cannot be used in its forked child",
                fix="start the process with spawn, or make the offload in it",
            )

    def _collect(self) -> None:
        """Make gaps of the blocks that have died."""
        while self._returned and not self.is_closed:
            gap = self._returned.popleft()
            self._used_bytes -= gap.size_bytes
            before = self._by_end.get((gap.slab, gap.start))
            after = self._by_start.get((gap.slab, gap.stop))
            for other in (before, after):
                if other is not None:
                    self._remove(other)
                    gap = _joined(gap, other)
            self._insert(gap)

    def _insert(self, gap: _Gap) -> None:
        insort(self._gaps, gap, key=_order)
        self._by_start[gap.slab, gap.start] = gap
        self._by_end[gap.slab, gap.stop] = gap

    def _remove(self, gap: _Gap) -> None:
        del self._gaps[bisect_left(self._gaps, _order(gap), key=_order)]
        del self._by_start[gap.slab, gap.start]
        del self._by_end[gap.slab, gap.stop]

    def _add_slab(self, size_bytes: int) -> bool:
        """Whether there is another slab with room for ``size_bytes``."""
        size = max(size_bytes, SLAB_BYTES)
        if self._missing_bytes(size):
            size = size_bytes
        if self._missing_bytes(size) and not self._make_room(size):
            return False
        pages = self.pinning.take(size)
        self.slabs[self._slab_count] = pages
        self._insert(_Gap(pages.size_bytes, self._slab_count, 0, _NOTHING_READS))
        self._slab_count += 1
        return True

    def _missing_bytes(self, more_bytes: int) -> int:
        """What the budget is short of for a slab of ``more_bytes``."""
        if self.budget_bytes is None:
            return 0
        how = "torch" if self.pinning.name == "torch" else "off"
        return max(0, self.pinned_bytes + reserved_bytes(more_bytes, how) - self.budget_bytes)

    def _make_room(self, size_bytes: int) -> bool:
        """Whether slabs that are one gap could be given back for one of ``size_bytes``.

        Where they cannot make room they stay: a step would pin again what it gave back in vain, and
        so would each one after it.
        """
        idle = [gap for gap in self._gaps if gap.size_bytes == self.slabs[gap.slab].size_bytes]
        idle_bytes = sum(self.slabs[gap.slab].reserved_bytes for gap in idle)
        if self._missing_bytes(size_bytes) > idle_bytes:
            return False
        for gap in idle:
            if not self._missing_bytes(size_bytes):
                break
            self._give_back(gap)
        return True

    def _give_back(self, gap: _Gap) -> None:
        """Give back the slab that is one ``gap``.  A copy that may still read it has its end."""
        if gap.last_read.copy is not None:
            gap.last_read.copy.synchronize()
        self._remove(gap)
        self.slabs.pop(gap.slab).give_back()


def _joined(one: _Gap, other: _Gap) -> _Gap:
    return _Gap(
        one.size_bytes + other.size_bytes,
        one.slab,
        min(one.start, other.start),
        max(one.last_read, other.last_read, key=lambda read: read.number),
    )


def _order(gap: _Gap) -> tuple[int, int, int]:
    return gap.size_bytes, gap.slab, gap.start
