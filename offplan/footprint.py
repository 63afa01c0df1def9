"""What a transfer of a storage carries, from the views of it that are saved.

Everything is in bytes from the start of the storage.

1.  The *pattern* of a view is a start byte and dimensions (count, step), innermost first, where the
    innermost has step 1.  Dimensions of size 1 and step 0 (expanded) drop out.  From the smallest
    step up, a dimension whose step is a multiple of the last one's and no larger than that one's
    reach joins it: contiguous dimensions become one run, and the windows of ``unfold`` count each
    byte once.
2.  A dimension that overlaps the ones inside it without joining (steps 2 and 3 over five elements)
    has no such form.  The whole view then counts as one run with no gaps: never under.
3.  *touched* bytes of one view: the product of its counts.
4.  *touched* bytes of several views: views with the same outer dimensions (the chunks of a fused
    qkv, shifted slices) are united exactly where together they fit in one period.  Of the rest,
    what lies inside a gapless view is dropped; what remains is summed, and capped at the bytes that
    the views span.  So it is exact for the cases above and never under.
5.  The *range* runs from the first byte touched to the last.  It is what the device has to allocate
    on reload, gaps included, since every view keeps its strides.
6.  The transfer is *packed* when fewer than half of the range's bytes are touched: it then carries
    the touched bytes; otherwise it carries the range.

Assumes plain strided views with non-negative strides.  Views of zero bytes touch nothing and come
back at any offset.  The range is not rounded: whoever restores it keeps the alignment of each view,
and may need up to an allocator block (512 bytes) more to do so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from offplan.graph import Value

_Interval = tuple[int, int]


class Footprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bytes ``start`` to ``stop`` of a storage; ``touched_bytes`` of them belong to saved views."""

    start: int
    stop: int
    touched_bytes: int
    packed: bool = False

    @property
    def transfer_bytes(self) -> int:
        """Bytes that cross the link, each way."""
        return self.touched_bytes if self.packed else self.device_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes allocated on the device when it is reloaded."""
        return self.stop - self.start


class Pattern(NamedTuple):
    """Bytes touched by one view (definition 1); ``outer`` holds (count, step) beyond the run."""

    start: int
    run: int
    outer: tuple[tuple[int, int], ...]

    @property
    def touched_bytes(self) -> int:
        total = self.run
        for count, _ in self.outer:
            total *= count
        return total

    @property
    def stop(self) -> int:
        return self.start + self.run + sum((count - 1) * step for count, step in self.outer)


def footprint(views: Iterable[Value]) -> Footprint:
    """The footprint of the saved ``views`` of one storage; empty if they touch no byte."""
    patterns = sorted({pattern(view) for view in views if view.logical_bytes})
    if not patterns:
        return Footprint(0, 0, 0)
    start = min(item.start for item in patterns)
    stop = max(item.stop for item in patterns)
    touched = _touched_bytes(patterns)
    return Footprint(start, stop, touched, packed=2 * touched < stop - start)


def pattern(view: Value) -> Pattern:
    """The bytes that ``view`` (not empty) touches."""
    start = view.offset * view.item_bytes
    dims = sorted(
        (stride * view.item_bytes, size)
        for size, stride in zip(view.shape, view.stride, strict=True)
        if size > 1 and stride > 0
    )
    merged = [(view.item_bytes, 1)]
    span = view.item_bytes
    for step, size in dims:
        count, last_step = merged[-1]
        if step % last_step == 0 and step <= count * last_step:
            merged[-1] = (count + (size - 1) * (step // last_step), last_step)
        elif step >= span:
            merged.append((size, step))
        else:
            reach = sum((size - 1) * step for step, size in dims)
            return Pattern(start, view.item_bytes + reach, ())
        span += (size - 1) * step
    return Pattern(start, merged[0][0], tuple(merged[1:]))


def is_dense(value: Value) -> bool:
    """Whether ``value`` has no gaps and no overlap, as torch's ``is_non_overlapping_and_dense``."""
    expected = 1
    for stride, size in sorted(zip(value.stride, value.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _touched_bytes(patterns: Sequence[Pattern]) -> int:
    """Distinct bytes touched by ``patterns``, or an upper bound of it (definition 4)."""
    gapless = united((item.start, item.stop) for item in patterns if not item.outer)
    groups: dict[tuple[tuple[int, int], ...], list[Pattern]] = defaultdict(list)
    for item in patterns:
        if item.outer and not _covers(gapless, item):
            groups[item.outer].append(item)
    total = _measure(gapless) + sum(_group_bytes(group) for group in groups.values())
    return min(total, _measure(united((item.start, item.stop) for item in patterns)))


def _group_bytes(group: Sequence[Pattern]) -> int:
    """Distinct bytes of patterns with the same outer dimensions.

    Their runs are united in one period and counted once for each.  Where together they are longer
    than a period, runs of neighbours overlap and are counted twice.
    """
    runs = united((item.start, item.start + item.run) for item in group)
    repeats = group[0].touched_bytes // group[0].run
    return _measure(runs) * repeats


def _covers(intervals: Sequence[_Interval], item: Pattern) -> bool:
    """Whether one of ``intervals``, sorted and apart, has all of ``item``."""
    place = bisect_right(intervals, item.start, key=lambda interval: interval[0])
    return place > 0 and item.stop <= intervals[place - 1][1]


def united(intervals: Iterable[_Interval]) -> list[_Interval]:
    """Sorted intervals that do not touch, with the same union."""
    joined: list[_Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def _measure(intervals: Sequence[_Interval]) -> int:
    return sum(stop - start for start, stop in intervals)
