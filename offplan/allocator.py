"""The CUDA caching allocator of torch, simulated: blocks, segments, allocated and reserved bytes.

1.  A request is rounded up to 512 bytes.  One of at most 1 MiB is *small*; small and large requests
    are served from pools of their own.
2.  It gets the smallest free block of its pool that holds it, of equal ones the one at the lowest
    address.  The rest of the block stays free if it is worth keeping: 512 bytes or more in the
    small pool, more than 1 MiB in the large one.  If not, the whole block counts as allocated.
3.  Without such a block, a segment is *reserved*: 2 MiB for a small request, 20 MiB for one under
    10 MiB, else the request rounded up to 2 MiB.
4.  A freed block is merged with its free neighbours in the segment.  Segments are never given back:
    that happens only when the device is full, or is asked for (``torch.cuda.empty_cache``).
5.  With *expandable segments*, a pool is one segment without end, of which 2 MiB (small) or 20 MiB
    (large) at a time are mapped; mapped bytes are the reserved ones.  What is left of a block is
    then kept from 512 bytes on, in either pool.

6.  Where segments lie is the driver's choice, and decides between equal blocks.  In a process that
    is new, a later segment has a lower address, so that blocks of the latest one are chosen.  Where
    segments were given back before, later ones fill the gaps, in an order that nothing here knows;
    *rising* addresses, by which blocks of the earliest one are chosen, stand for those.

Constants and rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.11, with its default
settings, for one stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import msgspec

MIB = 1024 * 1024

BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
LEAST_OWN_SEGMENT_BYTES = 10 * MIB
OWN_SEGMENT_GRANULE_BYTES = 2 * MIB
LARGE_REST_BYTES = MIB


def rounded(size_bytes: int) -> int:
    """Bytes of the block that a request needs; nothing is allocated for zero bytes."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def charged_bytes(size_bytes: int, expandable_segments: bool = False) -> int:
    """Bytes by which a request raises what is allocated, if it gets a segment of its own.

    That is more than ``rounded`` where the rest of the segment is too little to be kept apart.  A
    block that was part of a larger one can count more, or less.
    """
    size = rounded(size_bytes)
    if size < LEAST_OWN_SEGMENT_BYTES or expandable_segments:
        return size
    segment = -(-size // OWN_SEGMENT_GRANULE_BYTES) * OWN_SEGMENT_GRANULE_BYTES
    return segment if segment - size <= LARGE_REST_BYTES else size


class AllocatorPeaks(msgspec.Struct, frozen=True):
    """The most bytes since the peaks were reset."""

    allocated_bytes: int
    reserved_bytes: int


class Block:
    """Part of a segment; ``before`` and ``after`` are its neighbours there."""

    __slots__ = ("address", "after", "before", "is_free", "pool", "size_bytes")

    def __init__(self, pool: _Pool, address: int, size_bytes: int) -> None:
        self.pool = pool
        self.address = address
        self.size_bytes = size_bytes
        self.is_free = False
        self.before: Block | None = None
        self.after: Block | None = None


class _Pool:
    """Free blocks of one pool, by size, then address."""

    def __init__(self, segment_bytes: int, least_rest_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.least_rest_bytes = least_rest_bytes
        self.free: list[tuple[int, int, Block]] = []
        # The block at the end of what is mapped, where segments are expandable.
        self.last: Block | None = None

    def add(self, block: Block) -> None:
        block.is_free = True
        insort(self.free, (block.size_bytes, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size_bytes, block.address))]


class CachingAllocator:
    """The blocks of one device and stream.

    ``allocated_bytes`` and ``reserved_bytes`` are what ``torch.cuda.memory_allocated`` and
    ``memory_reserved`` say.  ``rising``: later segments have higher addresses (definition 6).
    """

    def __init__(self, expandable_segments: bool = False, rising: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.rising = rising
        large_rest_bytes = BLOCK_BYTES if expandable_segments else LARGE_REST_BYTES + 1
        self._small = _Pool(SMALL_SEGMENT_BYTES, BLOCK_BYTES)
        self._large = _Pool(LARGE_SEGMENT_BYTES, large_rest_bytes)
        self._next_address = 0
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._peak_allocated_bytes = 0
        self._peak_reserved_bytes = 0

    def reset_peaks(self) -> None:
        self._peak_allocated_bytes = self.allocated_bytes
        self._peak_reserved_bytes = self.reserved_bytes

    def peaks(self) -> AllocatorPeaks:
        return AllocatorPeaks(self._peak_allocated_bytes, self._peak_reserved_bytes)

    def allocate(self, size_bytes: int) -> Block:
        """A block for ``size_bytes``, which are more than 0."""
        size = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        pool = self._small if size <= SMALL_REQUEST_BYTES else self._large
        place = bisect_left(pool.free, (size,))
        if place + 1 < len(pool.free) and pool.free[place][2] is pool.last:
            # The block at the end can grow, so it counts as the largest.
            place += 1
        if place < len(pool.free):
            block = pool.free.pop(place)[2]
            block.is_free = False
        elif self.expandable_segments:
            block = self._expand(pool, size)
        else:
            block = self._reserve(pool, size)
        if block.size_bytes - size >= pool.least_rest_bytes:
            self._split(block, size)
        self.allocated_bytes += block.size_bytes
        if self.allocated_bytes > self._peak_allocated_bytes:
            self._peak_allocated_bytes = self.allocated_bytes
        return block

    def release(self, block: Block) -> None:
        """Take an allocated block back."""
        pool = block.pool
        self.allocated_bytes -= block.size_bytes
        after, before = block.after, block.before
        if after is not None and after.is_free:
            pool.remove(after)
            _merge(block, after)
        if before is not None and before.is_free:
            pool.remove(before)
            _merge(before, block)
            block = before
        if block.after is None and pool.last is not None:
            pool.last = block
        pool.add(block)

    def _split(self, block: Block, size: int) -> None:
        """Keep ``size`` bytes of ``block``; the rest is free."""
        rest = Block(block.pool, block.address + size, block.size_bytes - size)
        block.size_bytes = size
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        elif block.pool.last is not None:
            block.pool.last = rest
        block.after = rest
        block.pool.add(rest)

    def _reserve(self, pool: _Pool, size: int) -> Block:
        """A new segment, as one block that is not free (definition 3)."""
        segment_bytes = pool.segment_bytes
        if size >= LEAST_OWN_SEGMENT_BYTES:
            granules = -(-size // OWN_SEGMENT_GRANULE_BYTES)
            segment_bytes = granules * OWN_SEGMENT_GRANULE_BYTES
        if self.rising:
            address, self._next_address = self._next_address, self._next_address + segment_bytes
        else:
            address = self._next_address = self._next_address - segment_bytes
        block = Block(pool, address, segment_bytes)
        self._count_reserved(segment_bytes)
        return block

    def _expand(self, pool: _Pool, size: int) -> Block:
        """As many bytes more at the pool's end as ``size`` needs, joined with what is free there
        (definition 5)."""
        last = pool.last
        if last is not None and last.is_free:
            pool.remove(last)
            last.is_free = False
            block, missing = last, size - last.size_bytes
        else:
            address = 0 if last is None else last.address + last.size_bytes
            block, missing = Block(pool, address, 0), size
            block.before = last
            if last is not None:
                last.after = block
        mapped_bytes = -(-missing // pool.segment_bytes) * pool.segment_bytes
        block.size_bytes += mapped_bytes
        pool.last = block
        self._count_reserved(mapped_bytes)
        return block

    def _count_reserved(self, more_bytes: int) -> None:
        self.reserved_bytes += more_bytes
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, self.reserved_bytes)


def _merge(block: Block, after: Block) -> None:
    """Make ``after``, the next one, part of ``block``."""
    block.size_bytes += after.size_bytes
    block.after = after.after
    if after.after is not None:
        after.after.before = block
