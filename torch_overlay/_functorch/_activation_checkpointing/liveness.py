"""Live-byte curve of a schedule, with cheap updates.

A schedule is a sequence of slots.  A value occupies bytes over a closed range of
slots.  ``LiveBytes`` holds the sum of all ranges and answers "how high is the curve
here" and "where is it highest" while ranges are shortened, lengthened and added.  It
knows nothing of FX: callers pass slot numbers and byte counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class LiveBytes:
    """Range-add, point and maximum queries over a curve of byte counts.

    A segment tree without push-down: ``_add[i]`` applies to the whole span of tree
    node ``i`` and ``_max[i]`` is the maximum of that span, own addend included.
    Every operation is O(log n); building is O(n).

    Args:
        heights: bytes live in each slot, in schedule order.
    """

    def __init__(self, heights: Sequence[int]) -> None:
        self.num_slots = len(heights)
        size = 1
        while size < max(self.num_slots, 1):
            size *= 2
        self._size = size
        floor = -(1 << 62)
        self._max = [0] * size + list(heights) + [floor] * (size - self.num_slots)
        self._add = [0] * (2 * size)
        self._area = sum(heights)
        for i in range(size - 1, 0, -1):
            self._max[i] = max(self._max[2 * i], self._max[2 * i + 1])

    @staticmethod
    def from_ranges(
        num_slots: int, ranges: Iterable[tuple[int, int, int]]
    ) -> LiveBytes:
        """Build the curve of ``(first_slot, last_slot, size_bytes)`` triples."""
        steps = [0] * (num_slots + 1)
        for first, last, size_bytes in ranges:
            steps[first] += size_bytes
            steps[last + 1] -= size_bytes
        heights, live = [], 0
        for step in steps[:num_slots]:
            live += step
            heights.append(live)
        return LiveBytes(heights)

    @property
    def area(self) -> int:
        """Sum of the curve over all slots, in byte-slots."""
        return self._area

    @property
    def peak(self) -> int:
        """Highest byte count of the curve; 0 for an empty schedule."""
        return self._max[1] if self.num_slots else 0

    def at(self, slot: int) -> int:
        """Bytes live in ``slot``."""
        i = slot + self._size
        height = self._max[i]
        i //= 2
        while i:
            height += self._add[i]
            i //= 2
        return height

    def peak_slot(self) -> int:
        """First slot at which the curve reaches its peak."""
        i = 1
        while i < self._size:
            left = 2 * i
            i = left if self._max[left] >= self._max[left + 1] else left + 1
        return i - self._size

    def add(self, first: int, last: int, delta_bytes: int) -> None:
        """Add ``delta_bytes`` to a closed range of slots; an empty one is a no-op."""
        if first > last or delta_bytes == 0:
            return
        self._area += (last - first + 1) * delta_bytes
        lo, hi = first + self._size, last + self._size + 1
        left, right = lo, hi - 1
        while lo < hi:
            if lo & 1:
                self._apply(lo, delta_bytes)
                lo += 1
            if hi & 1:
                hi -= 1
                self._apply(hi, delta_bytes)
            lo //= 2
            hi //= 2
        self._pull(left)
        self._pull(right)

    def _apply(self, i: int, delta_bytes: int) -> None:
        self._max[i] += delta_bytes
        if i < self._size:
            self._add[i] += delta_bytes

    def _pull(self, i: int) -> None:
        i //= 2
        while i:
            children = max(self._max[2 * i], self._max[2 * i + 1])
            self._max[i] = children + self._add[i]
            i //= 2
