"""Where the transfers of a region lie in host memory, decided before there is any.

1.  A *slot* is one transfer's bytes on the host.  It is in use from its offload until its reload is
    needed, or until its release if it is never reloaded.
2.  A *layout* places the slots of one region in as few bytes as first fit finds: slots whose uses
    do not overlap share bytes.  Slots start at multiples of 512 bytes; nothing else is rounded.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from offplan.transfers import Transfer

SLOT_ALIGNMENT_BYTES = 512


@dataclass(frozen=True)
class Layout:
    """Where each slot starts, and how many bytes they take together."""

    offsets: tuple[int, ...]
    size_bytes: int


def layout(transfers: Sequence[Transfer]) -> Layout:
    """The layout of one region's ``transfers``, slot by slot."""
    offsets = [0] * len(transfers)
    placed: list[tuple[int, int, int]] = []  # (first byte, end, slot), by first byte
    for slot in sorted(range(len(transfers)), key=lambda s: -transfers[s].transfer_bytes):
        size = round_up(transfers[slot].transfer_bytes, SLOT_ALIGNMENT_BYTES)
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


def layouts(transfers: Sequence[Transfer]) -> dict[int, Layout]:
    """The layout of each region that has transfers, by region."""
    regions = sorted({transfer.region for transfer in transfers})
    return {
        region: layout([transfer for transfer in transfers if transfer.region == region])
        for region in regions
    }


def laid_out_bytes(transfers: Sequence[Transfer]) -> int:
    """Host memory that ``transfers`` take, in one slab."""
    return sum(found.size_bytes for found in layouts(transfers).values())


def _overlap(one: Transfer, other: Transfer) -> bool:
    return one.offload_after <= _last_use(other) and other.offload_after <= _last_use(one)


def _last_use(transfer: Transfer) -> int:
    return transfer.release_by if transfer.needed_by is None else transfer.needed_by


def round_up(size: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not under ``size``."""
    return -(-size // multiple) * multiple
