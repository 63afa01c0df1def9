"""The simulated caching allocator: its rules one by one, and against one that searches everything.

The expected numbers are those of torch's own allocator for the same requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from facts_builder import DRAWN
from hypothesis import given
from hypothesis import strategies as st

from offplan.allocator import Block, CachingAllocator, rounded

KiB, MiB = 1024, 1024**2


def sizes(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


@pytest.mark.parametrize(
    ("asked", "block"),
    [(0, 0), (1, 512), (512, 512), (513, 1024), (MiB, MiB), (MiB + 1, MiB + 512)],
)
def test_a_request_is_rounded_up_to_512_bytes(asked: int, block: int) -> None:
    assert rounded(asked) == block


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        # What is left of the segment is 1 MiB or less, and stays with the block.
        (13 * MiB, 14 * MiB, 14 * MiB),
        (13 * MiB + 512, 14 * MiB, 14 * MiB),
        (13 * MiB - 512, 13 * MiB - 512, 14 * MiB),
        (19 * MiB, 20 * MiB, 20 * MiB),
    ],
)
def test_a_first_request_reserves_a_segment(asked: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert sizes(allocator) == (allocated, reserved)


def test_small_and_large_requests_do_not_share_segments() -> None:
    allocator = CachingAllocator()
    allocator.allocate(2 * MiB)
    allocator.allocate(512)
    assert sizes(allocator) == (2 * MiB + 512, 22 * MiB)


def test_the_rest_of_a_block_serves_the_next_request() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(8 * MiB)
    second = allocator.allocate(8 * MiB)
    assert second.address == first.address + 8 * MiB
    assert sizes(allocator) == (16 * MiB, 20 * MiB)
    # 4 MiB are left: too few.
    allocator.allocate(8 * MiB)
    assert sizes(allocator) == (24 * MiB, 40 * MiB)


def test_the_smallest_free_block_is_taken_and_of_equal_ones_that_of_the_latest_segment() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MiB) for size in (40, 24, 32, 24, 12)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        allocator.release(block)
    assert allocator.allocate(20 * MiB).address == addresses[3]
    assert allocator.allocate(20 * MiB).address == addresses[1]
    assert allocator.allocate(20 * MiB).address == addresses[2]
    assert allocator.reserved_bytes == 132 * MiB


def test_where_addresses_rise_the_block_of_the_earliest_segment_is_taken() -> None:
    for rising in (False, True):
        allocator = CachingAllocator(rising=rising)
        first, second = allocator.allocate(24 * MiB), allocator.allocate(24 * MiB)
        assert (second.address > first.address) == rising
        allocator.release(first)
        allocator.release(second)
        taken = allocator.allocate(12 * MiB)
        assert taken.address == (first if rising else second).address
        assert allocator.reserved_bytes == 48 * MiB


def test_free_neighbours_become_one_block_again() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(6 * MiB) for _ in range(3)]
    for place in (0, 2, 1):
        allocator.release(blocks[place])
    allocator.allocate(20 * MiB)
    assert sizes(allocator) == (20 * MiB, 20 * MiB)


def test_blocks_of_different_segments_are_not_joined() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(20 * MiB) for _ in range(2)]
    for block in blocks:
        allocator.release(block)
    allocator.allocate(40 * MiB)
    assert allocator.reserved_bytes == 80 * MiB


def test_peaks_are_of_the_time_since_they_were_reset() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(30 * MiB))
    assert allocator.peaks().allocated_bytes == 30 * MiB
    allocator.reset_peaks()
    allocator.allocate(10 * MiB)
    assert allocator.peaks().allocated_bytes == 10 * MiB
    assert allocator.peaks().reserved_bytes == 30 * MiB


def test_expandable_segments_map_what_is_missing_at_the_end() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    first = allocator.allocate(13 * MiB)
    assert sizes(allocator) == (13 * MiB, 20 * MiB)
    # 7 MiB are free at the end; the other 20 come in one granule.
    allocator.allocate(27 * MiB)
    assert sizes(allocator) == (40 * MiB, 40 * MiB)
    allocator.release(first)
    allocator.allocate(14 * MiB)
    assert sizes(allocator) == (41 * MiB, 60 * MiB)


def test_expandable_segments_use_the_end_only_if_nothing_else_fits() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    first = allocator.allocate(14 * MiB)
    allocator.allocate(2 * MiB)
    # Free: 14 MiB at the beginning, 4 MiB at the end, which counts as the largest.
    allocator.release(first)
    assert allocator.allocate(3 * MiB).address == 0


# --- against a search of everything ---------------------------------------------------------------


@dataclass
class Piece:
    segment: int
    start: int
    size: int
    is_small: bool
    is_free: bool


class Searching:
    """The same rules on a plain list of pieces, in address order."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.segments: list[int] = []

    def allocate(self, asked: int) -> Piece:
        size = (asked + 511) // 512 * 512
        is_small = size <= MiB
        fitting = [
            p for p in self.pieces if p.is_free and p.is_small == is_small and p.size >= size
        ]
        if not fitting:
            length = 2 * MiB if is_small else 20 * MiB
            if size >= 10 * MiB:
                length = (size + 2 * MiB - 1) // (2 * MiB) * 2 * MiB
            self.segments.append(length)
            start = -sum(self.segments)
            fitting = [Piece(len(self.segments), start, length, is_small, True)]
            self.pieces += fitting
        piece = min(fitting, key=lambda p: (p.size, p.start))
        rest = piece.size - size
        if rest >= 512 if is_small else rest > MiB:
            place = self.pieces.index(piece)
            follower = Piece(piece.segment, piece.start + size, rest, is_small, True)
            self.pieces.insert(place + 1, follower)
            piece.size = size
        piece.is_free = False
        return piece

    def release(self, piece: Piece) -> None:
        piece.is_free = True
        joined: list[Piece] = []
        for found in self.pieces:
            last = joined[-1] if joined else None
            if last and last.is_free and found.is_free and last.segment == found.segment:
                last.size += found.size
            else:
                joined.append(found)
        self.pieces = joined

    @property
    def allocated(self) -> int:
        return sum(piece.size for piece in self.pieces if not piece.is_free)


REQUESTS = st.one_of(
    st.sampled_from([1, 512, 4 * KiB, MiB - 1, MiB, MiB + 1, 4 * MiB, 9 * MiB, 10 * MiB, 13 * MiB]),
    st.integers(1, 64 * MiB),
)


@DRAWN
@given(st.lists(st.tuples(st.booleans(), REQUESTS, st.integers(0, 1000)), max_size=60))
def test_it_gives_the_blocks_that_a_search_gives(steps: list[tuple[bool, int, int]]) -> None:
    allocator, searching = CachingAllocator(), Searching()
    live: list[tuple[Block, Piece]] = []
    for frees, asked, pick in steps:
        if frees and live:
            block, piece = live.pop(pick % len(live))
            allocator.release(block)
            searching.release(piece)
        else:
            block, piece = allocator.allocate(asked), searching.allocate(asked)
            live.append((block, piece))
            assert (block.address, block.size_bytes) == (piece.start, piece.size)
        assert sizes(allocator) == (searching.allocated, sum(searching.segments))


@DRAWN
@given(st.lists(st.tuples(st.booleans(), REQUESTS, st.integers(0, 1000)), max_size=60))
def test_expandable_blocks_never_overlap_and_stay_mapped(
    steps: list[tuple[bool, int, int]],
) -> None:
    allocator = CachingAllocator(expandable_segments=True)
    live: list[Block] = []
    most = {True: 0, False: 0}
    for frees, asked, pick in steps:
        if frees and live:
            allocator.release(live.pop(pick % len(live)))
            continue
        live.append(allocator.allocate(asked))
        assert live[-1].size_bytes == rounded(asked)
        for is_small in (True, False):
            spans = sorted(
                (block.address, block.address + block.size_bytes)
                for block in live
                if (block.size_bytes <= MiB) == is_small
            )
            assert all(one[1] <= other[0] for one, other in pairwise(spans))
            most[is_small] = max(most[is_small], *(stop for _, stop in spans), 0)
    needed = sum(
        -(-stop // unit) * unit for stop, unit in ((most[True], 2 * MiB), (most[False], 20 * MiB))
    )
    assert allocator.reserved_bytes == needed
    assert allocator.allocated_bytes == sum(block.size_bytes for block in live)
