"""Which bytes a packed transfer carries, and how they are gathered and scattered.

1.  The *pieces* of a storage's saved views are the ones that ``offplan.footprint`` counts
    (definition 4): gapless views united, then views with the same outer dimensions united within
    one period; or the spans of all views, where those are fewer bytes.
2.  The pieces lie one after the other in the packed buffer.  Each is copied in the widest unit that
    divides its start, its run and its steps; wider units come first, so that all are aligned.

A byte that two pieces share is carried twice, with the same value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from offplan.footprint import Pattern, pattern, united
from offplan.graph import Value

_Interval = tuple[int, int]
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pieces(views: Iterable[Value]) -> tuple[Pattern, ...]:
    """What a packed transfer of a storage with those saved ``views`` carries (definition 1)."""
    patterns = sorted({pattern(view) for view in views if view.logical_bytes})
    gapless = united((item.start, item.stop) for item in patterns if not item.outer)
    found = [Pattern(start, stop - start, ()) for start, stop in gapless]
    groups: dict[tuple[tuple[int, int], ...], list[_Interval]] = defaultdict(list)
    for item in patterns:
        if item.outer and not any(a <= item.start and item.stop <= b for a, b in gapless):
            groups[item.outer].append((item.start, item.start + item.run))
    for outer, runs in groups.items():
        found += [Pattern(start, stop - start, outer) for start, stop in united(runs)]
    spans = united((item.start, item.stop) for item in patterns)
    if piece_bytes(found) > sum(stop - start for start, stop in spans):
        found = [Pattern(start, stop - start, ()) for start, stop in spans]
    return tuple(sorted(found, key=lambda piece: (-_unit(piece), piece)))


def piece_bytes(found: Iterable[Pattern]) -> int:
    return sum(piece.touched_bytes for piece in found)


def gather(storage: torch.UntypedStorage, found: Sequence[Pattern], first: int = 0) -> torch.Tensor:
    """The pieces of what begins at byte ``first`` of ``storage``, packed, as a flat uint8 tensor on
    its device."""
    if first % max(_UNITS):
        stop = max(piece.stop for piece in found)
        storage, first = window(storage, first, (stop,), (1,)).clone().untyped_storage(), 0
    packed = torch.empty(piece_bytes(found), dtype=torch.uint8, device=storage.device)
    for inside, outside in _windows(storage, -first, packed, found):
        outside.copy_(inside)
    return packed


def scatter(
    packed: torch.Tensor, storage: torch.UntypedStorage, first_byte: int, found: Sequence[Pattern]
) -> None:
    """Put the pieces back; ``storage`` begins at byte ``first_byte`` of the one they are of."""
    for inside, outside in _windows(storage, first_byte, packed, found):
        inside.copy_(outside)


def window(
    storage: torch.UntypedStorage,
    start: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype = torch.uint8,
) -> torch.Tensor:
    """A view on ``storage``; ``start`` counts elements."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, start, tuple(size), tuple(stride))


def _windows(
    storage: torch.UntypedStorage, first_byte: int, packed: torch.Tensor, found: Sequence[Pattern]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece as it lies in ``storage`` and as it lies in ``packed``."""
    place = 0
    for piece in found:
        unit = _unit(piece)
        dtype = _UNITS[unit]
        counts = (*(count for count, _ in piece.outer), piece.run // unit)
        steps = (*(step // unit for _, step in piece.outer), 1)
        inside = window(storage, (piece.start - first_byte) // unit, counts, steps, dtype)
        length = piece.touched_bytes
        outside = packed[place : place + length].view(dtype).view(counts)
        yield inside, outside
        place += length


def _unit(piece: Pattern) -> int:
    return math.gcd(8, piece.start, piece.run, *(step for _, step in piece.outer))
