"""Predicts the peak memory of a saved set from the joint graph.

The rules are those by which Inductor lowers a graph and its wrapper allocates, read
from its sources and checked against the code that it emits (pytorch/pytorch#197838):

1. A pointwise value is computed inside its readers' kernels, and what it reads lives
   until the last of them, unless it is returned, an opaque operator reads it, or it
   reads or computes too much.
2. A generated kernel's result takes over the storage of an operand that dies there, has
   its layout, was allocated by the same graph and is read by that kernel once.  Graph
   inputs and saved values are never taken over.
3. A scatter into a fresh value writes it in place.
4. An opaque operator has a computed operand that repeats storage, like an expanded
   mask, written out in full where it reads it first.
5. Pointwise kernels that read the same value and are near each other become one.
6. Some kernels allocate scratch memory.

Without a backend that generates kernels every operator allocates its results and frees
what it reads last, and none of these rules holds.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .joint_schedule import OPAQUE, POINTWISE


if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .joint_schedule import JointSchedule


# Kernels between two that are made one.  The memory feature keeps Inductor to it in
# backwards whose saved set was planned, see ``torch/_inductor/planned_graph.py``.
MAX_FUSION_DISTANCE = 8


# Values that an inlined one may be computed from, fewer if it has several readers, and
# operations: Inductor's own limits for a GPU (``realize_acc_reads_threshold``,
# ``realize_reads_threshold`` and ``realize_opcount_threshold`` of its configuration).
MOST_READS, MOST_READS_REUSED, MOST_OPERATIONS = 8, 4, 30


class _Kernels:
    """The kernels of one graph: which values each reads, and which it allocates.

    ``order`` are nodes that are no views; a node whose result is computed inside its
    readers' kernels keeps its place and allocates nothing.
    """

    def __init__(
        self, s: JointSchedule, order: Sequence[int], end: Collection[int]
    ) -> None:
        self.s, self.order = s, order
        self.reads: list[Sequence[int]] = [()] * len(order)
        self.makes: list[Sequence[int]] = [()] * len(order)
        self.extra: dict[int, int] = {}
        # What a kernel reads in another order than it writes.
        self.turned: dict[int, Collection[int]] = {}
        self._leaves: dict[int, dict[int, bool]] = {}
        self._at: dict[int, int] = {}
        if s.generated:
            self._inline(end)
        else:
            self.reads = [s.operands[i] for i in order]
            self.makes = [s.makes[i] for i in order]

    def _realize(self, v: int) -> None:
        k = self._at[v]
        self._set_reads(k, self._leaves.pop(v))
        self.makes[k] = (v,)

    def _set_reads(self, k: int, found: dict[int, bool]) -> None:
        self.reads[k] = tuple(found)
        if True in found.values():
            self.turned[k] = [v for v, turned in found.items() if turned]

    def _inline(self, end: Collection[int]) -> None:
        s, kinds, operands = self.s, self.s.kinds, self.s.operands
        count = len(s.size_bytes)
        readers, opaque_reads = [0] * count, bytearray(count)
        for i in self.order:
            opaque = kinds[i] == OPAQUE
            for v in operands[i]:
                readers[v] += 1
                if opaque:
                    opaque_reads[v] = 1
        returned = bytearray(count)
        for v in end:
            returned[v] = 1
        leaves, work_of = self._leaves, [0] * count
        for k, i in enumerate(self.order):
            if kinds[i] == OPAQUE:
                for v in operands[i]:
                    if v in leaves:
                        written = s.written_out.get((i, v), 0)
                        if written:
                            self.extra[k] = self.extra.get(k, 0) + written
                        self._realize(v)
                self.reads[k], self.makes[k] = operands[i], s.makes[i]
                continue
            found: dict[int, bool] = {}
            work = 1
            turned_here = s.turned.get(i, ())
            for v in operands[i]:
                inside, turned = leaves.get(v), v in turned_here
                if inside is None:
                    found[v] = turned or found.get(v, False)
                else:
                    work += work_of[v]
                    for u, inner in inside.items():
                        found[u] = turned or inner or found.get(u, False)
            if kinds[i] == POINTWISE:
                v = s.makes[i][0]
                inlined = (
                    not returned[v]
                    and len(found) <= MOST_READS
                    and work <= MOST_OPERATIONS
                )
                if readers[v] > 1 and (
                    (opaque_reads[v] and not s.repeated[v])
                    or len(found) > MOST_READS_REUSED
                ):
                    inlined = False
                if inlined:
                    leaves[v], work_of[v], self._at[v] = found, work, k
                    continue
            self._set_reads(k, found)
            self.makes[k] = s.makes[i]

    def made_with_later(self) -> dict[int, int]:
        """Places of pointwise kernels that run at a later one's place, and that place.

        Both read the same large value and make results of one size, and the later one
        does not depend on the earlier.
        """
        s, order, reads, makes = self.s, self.order, self.reads, self.makes
        kinds, sizes, is_held = s.kinds, s.size_bytes, s.is_held
        pointwise: dict[int, list[int]] = {}
        number, seen = [], 0
        for k, i in enumerate(order):
            number.append(seen)
            if makes[k]:
                seen += 1
                if kinds[i] == POINTWISE:
                    size = sizes[makes[k][0]]
                    for v in reads[k]:
                        if sizes[v] >= size and not is_held[v]:
                            pointwise.setdefault(v, []).append(k)
        later: dict[int, int] = {}
        for places in pointwise.values():
            for k, q in itertools.pairwise(places):
                # The next one of equal size; ``later`` holds the first over all values.
                size = sizes[makes[k][0]]
                if sizes[makes[q][0]] != size:
                    fitting = (p for p in places if p > k)
                    q = next((p for p in fitting if sizes[makes[p][0]] == size), k)
                if k < q and number[q] - number[k] <= MAX_FUSION_DISTANCE:
                    later[k] = min(q, later.get(k, q))
        found: dict[int, int] = {}
        if later:
            readers: dict[int, list[int]] = {}
            for k, values in enumerate(reads):
                if makes[k]:
                    for v in values:
                        readers.setdefault(v, []).append(k)
            for k in sorted(later, reverse=True):
                at = found.get(later[k], later[k])
                if not self._reaches(k, at, found, readers):
                    found[k] = at
        return found

    def _reaches(
        self, k: int, at: int, moved: dict[int, int], readers: dict[int, list[int]]
    ) -> bool:
        """Whether what runs at a place depends on a kernel."""
        stack, reached = [*self.makes[k]], OrderedSet([k])
        while stack:
            for r in readers.get(stack.pop(), ()):
                if moved.get(r, r) == at:
                    return True
                if r < at and r not in reached:
                    reached.add(r)
                    stack += self.makes[r]
        return False


def live_bytes(
    s: JointSchedule,
    order: Sequence[int],
    start: Collection[int],
    end: Collection[int],
) -> list[int]:
    """Live bytes at each kernel of a graph, by the rules of this module.

    Args:
        s: the joint graph.
        order: the graph's calls in the order in which it runs them, without views.
        start: values that are alive before; those that the caller does not hold are
            freed after their last reader.
        end: values that the graph returns.

    Returns:
        Bytes at each place of ``order``, before what dies there is freed; where there
        is no kernel, the bytes that are live.
    """
    kernels = _Kernels(s, order, end)
    moved = kernels.made_with_later() if s.generated else {}
    count, places = len(s.size_bytes), len(order)
    last, shared = [-1] * count, bytearray(count)
    ready: dict[int, int] = {}
    makes, kinds = kernels.makes, s.kinds
    # What runs behind a place because it waits for a kernel that was moved there.
    after: dict[int, Sequence[int]] = {}
    for k, values in enumerate(kernels.reads):
        if not values and not makes[k]:
            continue
        turned = kernels.turned.get(k, ())
        at = moved.get(k, k)
        if ready:
            for v in values:
                at = max(at, ready.get(v, 0))
        pointwise = kinds[order[k]] == POINTWISE
        for v in values:
            if last[v] < at:
                last[v], shared[v] = at, v in turned
            elif last[v] == at and pointwise:
                shared[v] = 1
        if at > k:
            ready.update(dict.fromkeys(makes[k], at))
            if k in moved:
                makes[at] = (*makes[at], *makes[k])
            else:
                after[at] = (*after.get(at, ()), *makes[k])
            makes[k] = ()
    for v in end:
        last[v] = places
    sizes, layout, is_held = s.size_bytes, s.layout, s.is_held
    live, fresh = 0, bytearray(count)
    # The values that die at a place: the last one found, and for each the one before.
    dying, before = [-1] * (places + 1), [-1] * count

    def dies(v: int, k: int) -> None:
        before[v], dying[k] = dying[k], v

    for v in start:
        fresh[v] = 3  # alive before: nothing takes its storage over
        if not is_held[v]:
            live += sizes[v]
            dies(v, min(max(last[v], 0), places))
    heights = []
    for k, i in enumerate(order):
        opaque = kinds[i] == OPAQUE
        made = makes[k]
        # An operator that runs again for one result makes a saved one once more.
        twice = 0
        for v in made:
            if is_held[v] or fresh[v]:
                twice += sizes[v] if fresh[v] == 3 else 0
                continue
            live += sizes[v]
            u = -1 if opaque or not s.generated else dying[k]
            while u >= 0:
                if fresh[u] == 1 and not shared[u] and layout[u] == layout[v]:
                    fresh[u] = 2  # its storage is another's now
                    live -= sizes[v]
                    break
                u = before[u]
        for v in made:
            if not is_held[v] and not fresh[v]:
                fresh[v] = 1
                dies(v, max(last[v], k))
        height = live + twice
        if opaque:
            height += kernels.extra.get(k, 0)
            if s.generated:
                height += s.scratch[i]
        heights.append(height)
        v = dying[k]
        while v >= 0:
            if fresh[v] != 2:
                live -= sizes[v]
            v = before[v]
        for v in after.get(k, ()):
            if not is_held[v] and not fresh[v] and last[v] > k:
                fresh[v] = 1
                dies(v, last[v])
                live += sizes[v]
    return heights or [live]


def live_bytes_of_both(
    s: JointSchedule,
    saved: Collection[int],
    backward: Sequence[int] | None = None,
    forward_bound: int | None = None,
) -> tuple[list[int], list[int]]:
    """Live bytes of the forward and of the backward that a saved set leads to.

    Args:
        s: the joint graph.
        saved: saved values; what the backward does not read is left out.
        backward: ``s.emitted(s.backward, saved)`` where it is known.
        forward_bound: what the forward takes at most besides what is saved.  With it a
            forward that is lower than the backward is left out.
    """
    if backward is None:
        backward = s.emitted(s.backward, saved)
    read = bytearray(len(s.size_bytes))
    for i in backward:
        for v in s.operands[i]:
            read[v] = 1
    for v in s.gradients:
        read[v] = 1
    kept = OrderedSet(v for v in saved if read[v])
    backward_bytes = live_bytes(s, backward, s.arguments | kept, s.gradients)
    if forward_bound is not None and (
        forward_bound + s.saved_bytes(kept) <= max(backward_bytes)
    ):
        return [], backward_bytes
    forward = s.emitted([*s.forward, *s.makers_of(kept)], ())
    forward.sort()
    results = s.results | kept
    return live_bytes(s, forward, s.arguments & s.held, results), backward_bytes


def peak_bytes(s: JointSchedule, saved: Collection[int]) -> int:
    """Predicted peak with these values saved, the larger one of both graphs'."""
    return max(map(max, live_bytes_of_both(s, saved)))
