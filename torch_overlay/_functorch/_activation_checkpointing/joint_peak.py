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
            for v in operands[i]:
                inside, turned = leaves.get(v), (i, v) in s.turned
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
        kinds, sizes, held = self.s.kinds, self.s.size_bytes, self.s.held
        order, reads, makes = self.order, self.reads, self.makes
        readers: dict[int, list[int]] = {}
        number, seen = [], 0
        for k, values in enumerate(reads):
            number.append(seen)
            if makes[k]:
                seen += 1
                for v in values:
                    readers.setdefault(v, []).append(k)
        found: dict[int, int] = {}
        for k in range(len(order) - 1, -1, -1):
            if kinds[order[k]] != POINTWISE or not makes[k]:
                continue
            size = sizes[makes[k][0]]
            later = [
                q
                for v in reads[k]
                if sizes[v] >= size and v not in held
                for q in readers[v]
                if k < q
                and number[q] - number[k] <= MAX_FUSION_DISTANCE
                and kinds[order[q]] == POINTWISE
                and sizes[makes[q][0]] == size
            ]
            if later:
                at = found.get(min(later), min(later))
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
    makes = [list(m) for m in kernels.makes]
    # What runs behind a place because it waits for a kernel that was moved there.
    after: list[list[int]] = [[] for _ in order]
    for k, i in enumerate(order):
        if not makes[k] and not kernels.reads[k]:
            continue
        turned = kernels.turned.get(k, ())
        at = moved.get(k, k)
        if ready:
            for v in kernels.reads[k]:
                at = max(at, ready.get(v, 0))
        pointwise = s.kinds[i] == POINTWISE
        for v in kernels.reads[k]:
            if last[v] < at:
                last[v], shared[v] = at, v in turned
            elif last[v] == at and pointwise:
                shared[v] = 1
        if at > k:
            ready.update(dict.fromkeys(makes[k], at))
            (makes if k in moved else after)[at] += makes[k]
            makes[k] = []
    for v in end:
        last[v] = places
    sizes, layout, held = s.size_bytes, s.layout, s.held
    live, fresh = 0, bytearray(count)
    dies: list[list[int]] = [[] for _ in range(places + 1)]
    for v in start:
        if v not in held:
            live += sizes[v]
            dies[min(max(last[v], 0), places)].append(v)
    heights = []
    for k, i in enumerate(order):
        opaque = s.kinds[i] == OPAQUE
        scratch = s.scratch[i] if s.generated else 0
        taken: list[int] = []
        made = [v for v in makes[k] if v not in held and not fresh[v]]
        for v in made:
            dies[max(last[v], k)].append(v)
            live += sizes[v]
            for u in () if opaque or not s.generated else dies[k]:
                if fresh[u] == 1 and not shared[u] and layout[u] == layout[v]:
                    fresh[u] = 2
                    taken.append(u)
                    live -= sizes[v]
                    break
        for v in made:
            fresh[v] = 1
        heights.append(live + kernels.extra.get(k, 0) + scratch)
        for v in dies[k]:
            if v not in taken:
                live -= sizes[v]
        for v in after[k]:
            if v not in held and not fresh[v] and last[v] > k:
                fresh[v] = 1
                dies[last[v]].append(v)
                live += sizes[v]
    return heights or [live]


def live_bytes_of_both(
    s: JointSchedule, saved: Collection[int], forward_bound: int | None = None
) -> tuple[list[int], list[int]]:
    """Live bytes of the forward and of the backward that a saved set leads to.

    Args:
        s: the joint graph.
        saved: saved values; what the backward does not read is left out.
        forward_bound: what the forward takes at most besides what is saved.  With it a
            forward that is lower than the backward is left out.
    """
    backward = s.emitted(s.backward, saved)
    read = OrderedSet(v for i in backward for v in s.operands[i])
    read.update(s.gradients)
    kept = OrderedSet(v for v in saved if v in read)
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
