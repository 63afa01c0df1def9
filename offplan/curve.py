"""Bytes over the ops of a timeline, with range updates and range queries in logarithmic time.

A binary tree over the ops.  Each tree node holds the highest value below it, less what was added
to whole ranges above it.
"""

from __future__ import annotations

from collections.abc import Sequence

# Below any value, with whatever may be added: places of the tree past the last op.
_NOTHING = -(1 << 62)


class Curve:
    """``values`` by op.  Ranges are ``[start, stop)``; an empty range changes nothing."""

    def __init__(self, values: Sequence[int]) -> None:
        self.count = len(values)
        self._size = 1
        while self._size < max(1, self.count):
            self._size *= 2
        self._highest = [_NOTHING] * (2 * self._size)
        self._added = [0] * (2 * self._size)
        self._highest[self._size : self._size + self.count] = values
        for place in range(self._size - 1, 0, -1):
            self._highest[place] = max(self._highest[2 * place], self._highest[2 * place + 1])

    def add(self, start: int, stop: int, amount: int) -> None:
        """Add ``amount`` to every value of the range."""
        if start >= stop or amount == 0:
            return
        left, right = start + self._size, stop + self._size
        first, last = left, right - 1
        highest, added = self._highest, self._added
        while left < right:
            if left & 1:
                highest[left] += amount
                added[left] += amount
                left += 1
            if right & 1:
                right -= 1
                highest[right] += amount
                added[right] += amount
            left //= 2
            right //= 2
        self._settle(first)
        self._settle(last)

    def _settle(self, place: int) -> None:
        highest, added = self._highest, self._added
        place //= 2
        while place:
            below = max(highest[2 * place], highest[2 * place + 1])
            highest[place] = below + added[place]
            place //= 2

    def copy(self) -> Curve:
        """One like it, that changes by itself."""
        other = Curve(())
        other.count, other._size = self.count, self._size
        other._highest, other._added = [*self._highest], [*self._added]
        return other

    @property
    def top(self) -> int:
        """The highest value of all; 0 if there is none."""
        return self._highest[1] if self.count else 0

    def highest(self, start: int, stop: int) -> int | None:
        """The highest value of the range; None if it is empty."""
        found = self._over(start, stop)
        return max(value for _, value, _ in found) if found else None

    def last_above(self, start: int, stop: int, limit: int) -> int | None:
        """The last op of the range whose value exceeds ``limit``; None if there is none."""
        for place, value, outside in reversed(self._over(start, stop)):
            if value > limit:
                return self._descend(place, limit - outside)
        return None

    def _descend(self, place: int, limit: int) -> int:
        highest, added = self._highest, self._added
        while place < self._size:
            limit -= added[place]
            place = 2 * place + 1 if highest[2 * place + 1] > limit else 2 * place
        return place - self._size

    def _over(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """The range's tree nodes in order: place, highest value, and what is added above them."""
        if start >= stop:
            return []
        left, right = start + self._size, stop + self._size
        from_left: list[int] = []
        from_right: list[int] = []
        while left < right:
            if left & 1:
                from_left.append(left)
                left += 1
            if right & 1:
                right -= 1
                from_right.append(right)
            left //= 2
            right //= 2
        return [self._with_added(place) for place in (*from_left, *reversed(from_right))]

    def _with_added(self, place: int) -> tuple[int, int, int]:
        outside, above = 0, place // 2
        while above:
            outside += self._added[above]
            above //= 2
        return place, self._highest[place] + outside, outside
