"""Choose use-site copies that lower the peak of a fixed schedule.

Plain numbers in, plain numbers out: nodes are schedule slots, values are storage ids.
A *cut* ends a value's live range at its last use before the peak and starts a new
range at its first use after it, where the nodes that compute it run a second time.
Cuts are taken one by one; each must lower the pair (peak, area under the live-bytes
curve), which keeps the predicted peak from ever rising.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from itertools import accumulate

from torch.utils._ordered_set import OrderedSet

from .liveness import LiveBytes


@dataclass(frozen=True)
class Schedule:
    """A straight-line program: slot ``i`` runs node ``i``.

    Attributes:
        inputs: per node, the earlier nodes that it reads.
        values: per node, the values (storages) that its result touches.
        allocates: per node, the values that come into being with it.
        level: per node, 0 if it must not run twice, 1 if it is cheap, 2 if it is heavy.
        cost: per node, work of running it once (any unit).
        size_bytes: per value, its bytes.
        first_slot: per value, the slot in which it becomes live.
        uses: per value, sorted slots that read it, directly or through a view.
        producer: per value, the node that allocates it.
        cuttable: per value, whether its live range may be split.
        pinned: per value, whether it is live during the whole schedule anyway.
    """

    inputs: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]
    allocates: tuple[tuple[int, ...], ...]
    level: tuple[int, ...]
    cost: tuple[float, ...]
    size_bytes: tuple[int, ...]
    first_slot: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    producer: tuple[int, ...]
    cuttable: tuple[bool, ...]
    pinned: tuple[bool, ...]

    @property
    def num_slots(self) -> int:
        return len(self.inputs)

    def live_bytes(self) -> LiveBytes:
        """Curve of the schedule as it stands; pinned values are not counted."""
        return LiveBytes.from_ranges(
            self.num_slots,
            [
                (first, max([first, *self.uses[v][-1:]]), self.size_bytes[v])
                for v, first in enumerate(self.first_slot)
                if not self.pinned[v]
            ],
        )


@dataclass(frozen=True)
class Cut:
    """Value ``value`` is computed again in ``slot``, by the nodes in ``cone``."""

    value: int
    slot: int
    cone: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What to copy where.

    Attributes:
        cuts: accepted cuts in the order in which they were accepted.
        copies: per slot (ascending), the nodes to run again just before it.
        peak_before_bytes, peak_after_bytes: peak of the live-bytes curve.
        area_before, area_after: area under it, in byte-slots.
        added_cost: work that the copies add, in the unit of ``Schedule.cost``.
    """

    cuts: tuple[Cut, ...]
    copies: tuple[tuple[int, tuple[int, ...]], ...]
    peak_before_bytes: int
    peak_after_bytes: int
    area_before: int
    area_after: int
    added_cost: float


@dataclass(frozen=True)
class PlanOptions:
    """Limits of the search.

    Attributes:
        max_level: 1 copies cheap nodes only, 2 heavy ones too.
        max_cone_nodes: longest cone that one cut may copy.
        min_size_ratio: values smaller than this share of the peak are left alone.
        round_ratio: a round works on one peak slot until the curve there has fallen by
            this share of the peak.
        cheap_gap_ratio, heavy_gap_ratio: a cut without (with) heavy nodes may add at
            most this share of the work that the schedule does between the two uses.
        max_cost_ratio: heavy cuts together may add at most this share of the
            schedule's work.
    """

    max_level: int = 1
    max_cone_nodes: int = 96
    min_size_ratio: float = 1e-4
    round_ratio: float = 0.02
    cheap_gap_ratio: float = 1.0
    heavy_gap_ratio: float = 0.125
    max_cost_ratio: float = 0.25


@dataclass
class _Range:
    """One live range of a value: uses are sorted, ``start`` is not among them."""

    start: int
    uses: list[int]
    copied: bool = False

    @property
    def end(self) -> int:
        return self.uses[-1] if self.uses else self.start


@dataclass
class _Slot:
    """Nodes that run again just before one slot, and what they leave behind."""

    nodes: list[int] = field(default_factory=list)
    kept: OrderedSet[int] = field(default_factory=OrderedSet)
    kept_bytes: int = 0
    extra_bytes: int = 0


class Planner:
    """Search state; use :func:`plan_use_site_copies`."""

    def __init__(self, schedule: Schedule, options: PlanOptions) -> None:
        self.schedule = schedule
        self.options = options
        self.curve = schedule.live_bytes()
        self.ranges = [
            [_Range(schedule.first_slot[v], list(schedule.uses[v]))]
            for v in range(len(schedule.size_bytes))
        ]
        self.last_use = [max(u, default=-1) for u in schedule.uses]
        self.slots: dict[int, _Slot] = {}
        # Work of the cone of (value, slot, nodes present there, level).  Live ranges
        # only shrink, so later cones only grow: an entry is a lower bound.
        self.known_cost: dict[tuple[int, int, int, int], float | None] = {}
        self.cuts: list[Cut] = []
        self.added_cost = 0.0
        self.work_before = list(accumulate(schedule.cost, initial=0.0))
        self.own_bytes = [
            sum(schedule.size_bytes[v] for v in allocated if not schedule.pinned[v])
            for allocated in schedule.allocates
        ]
        min_bytes = max(1, int(self.curve.peak * options.min_size_ratio))
        self.candidates = [
            v
            for v, size in enumerate(schedule.size_bytes)
            if schedule.cuttable[v] and size >= min_bytes and len(schedule.uses[v]) > 1
        ]

    def range_at(self, value: int, slot: int) -> _Range | None:
        """The range of ``value`` that copies running just before ``slot`` can read."""
        for r in self.ranges[value]:
            if r.start > slot:
                return None
            if r.end >= slot and (r.start < slot or r.copied):
                return r
        return None

    def gap(self, value: int, slot: int) -> tuple[_Range, int, int] | None:
        """The use-free stretch of ``value`` around ``slot``: its two bounding slots."""
        for r in self.ranges[value]:
            if r.start >= slot:
                return None
            if r.end > slot:
                i = bisect_left(r.uses, slot)
                if r.uses[i] == slot:
                    return None
                return r, (r.uses[i - 1] if i else r.start), r.uses[i]
        return None

    def cone(
        self, value: int, slot: int, level: int
    ) -> tuple[list[int], OrderedSet[int]] | None:
        """Nodes that compute ``value`` before ``slot`` and the live values they read.

        None when the cone holds a node that may not run twice or reads a value that is
        dead there and cannot be computed again.
        """
        s = self.schedule
        there = self.slots.get(slot)
        present = OrderedSet(there.nodes if there else ())
        nodes: OrderedSet[int] = OrderedSet()
        leaves: OrderedSet[int] = OrderedSet()
        stack = [s.producer[value]]
        while stack:
            node = stack.pop()
            if node in nodes or node in present:
                continue
            if not 0 < s.level[node] <= level or len(nodes) >= (
                self.options.max_cone_nodes
            ):
                return None
            nodes.add(node)
            for read in s.inputs[node]:
                for v in s.values[read]:
                    if s.pinned[v]:
                        continue
                    if v != value and self.range_at(v, slot) is not None:
                        leaves.add(v)
                    elif not s.cuttable[v]:
                        return None
                    else:
                        stack.append(s.producer[v])
        return sorted(nodes), leaves

    def slot_peak(self, nodes: list[int], kept: OrderedSet[int]) -> int:
        """Most bytes that copies in one slot hold at once, beside what lives around."""
        s = self.schedule
        made: dict[int, int] = {}
        for i, node in enumerate(nodes):
            for v in s.allocates[node]:
                made[v] = i
        last = dict(made)
        for i, node in enumerate(nodes):
            for read in s.inputs[node]:
                for v in s.values[read]:
                    if v in made:
                        last[v] = i
        free: list[int] = [0] * len(nodes)
        for v, i in last.items():
            if v not in kept:
                free[i] += s.size_bytes[v]
        live = peak = 0
        for i, node in enumerate(nodes):
            live += self.own_bytes[node]
            peak = max(peak, live)
            live -= free[i]
        return peak

    def new_cost(self, nodes: list[int]) -> float:
        return sum(self.schedule.cost[n] for n in nodes)

    def cost_at_least(self, value: int, slot: int, level: int) -> float | None:
        """Lower bound of the work of a cut; None if it was impossible before."""
        there = self.slots.get(slot)
        key = (value, slot, len(there.nodes) if there else 0, level)
        if key not in self.known_cost:
            made = self.cone(value, slot, level)
            self.known_cost[key] = None if made is None else self.new_cost(made[0])
        return self.known_cost[key]

    def worth(self, nodes: list[int], before: int, after: int) -> bool:
        """Whether running ``nodes`` again costs little enough for the gap it opens."""
        options = self.options
        cost = self.new_cost(nodes)
        work = self.work_before[after] - self.work_before[before + 1]
        if all(self.schedule.level[n] < 2 for n in nodes):
            return cost <= work * options.cheap_gap_ratio
        limit = self.work_before[-1] * options.max_cost_ratio
        return (
            cost <= work * options.heavy_gap_ratio and self.added_cost + cost <= limit
        )

    def try_cut(self, value: int, peak_slot: int, level: int) -> bool:
        """Cut the gap of ``value`` around ``peak_slot`` if (peak, area) falls by it."""
        s = self.schedule
        found = self.gap(value, peak_slot)
        if found is None:
            return False
        live_range, before, after = found
        made = self.cone(value, after, level)
        if made is None:
            return False
        nodes, leaves = made
        if not self.worth(nodes, before, after):
            return False
        size = s.size_bytes[value]
        there = self.slots.get(after, _Slot())
        merged = sorted([*there.nodes, *nodes])
        kept = OrderedSet([*there.kept, value])
        kept_bytes = there.kept_bytes + size
        extra = max(
            0, self.slot_peak(merged, kept) - self.own_bytes[after] - kept_bytes
        )
        rise = extra - there.extra_bytes
        peak = self.curve.peak
        if rise > 0 and self.curve.at(after) + rise >= peak:
            return False
        if rise - size * (after - before - 1) >= 0:
            return False
        self.curve.add(before + 1, after - 1, -size)
        self.curve.add(after, after, rise)
        self.slots[after] = _Slot(merged, kept, kept_bytes, extra)
        i = bisect_right(live_range.uses, before)
        tail = _Range(after, live_range.uses[i:], copied=True)
        del live_range.uses[i:]
        self.ranges[value].insert(self.ranges[value].index(live_range) + 1, tail)
        for leaf in leaves:
            r = self.range_at(leaf, after)
            if r is not None and after not in r.uses:
                insort(r.uses, after)
        self.cuts.append(Cut(value, after, tuple(nodes)))
        self.added_cost += self.new_cost(nodes)
        return True

    def run_round(self, peak_slot: int, level: int) -> int:
        """Cut values around one slot, cheapest work per byte first; return how many."""
        s = self.schedule
        target = self.curve.at(peak_slot) * (1 - self.options.round_ratio)
        heap: list[tuple[float, int, int, int]] = []
        for v in self.candidates:
            if not s.first_slot[v] < peak_slot < self.last_use[v]:
                continue
            found = self.gap(v, peak_slot)
            if found is None:
                continue
            cost = self.cost_at_least(v, found[2], level)
            if cost is not None:
                price = cost / s.size_bytes[v]
                heap.append((price, found[1] - found[2], v, found[2]))
        heapq.heapify(heap)
        taken = 0
        while heap and self.curve.at(peak_slot) > target:
            price, span, v, after = heapq.heappop(heap)
            made = self.cone(v, after, level)
            if made is None:
                continue
            now = self.new_cost(made[0]) / s.size_bytes[v]
            if heap and now > price and now > heap[0][0]:
                heapq.heappush(heap, (now, span, v, after))
                continue
            taken += self.try_cut(v, peak_slot, level)
        return taken

    def run(self) -> None:
        for level in range(1, self.options.max_level + 1):
            while self.run_round(self.curve.peak_slot(), level):
                pass


def plan_use_site_copies(schedule: Schedule, options: PlanOptions) -> Plan:
    """Plan second copies for values that are live across the peak.

    Deterministic: depends on the numbers alone.  Returns a plan without cuts when
    nothing lowers (peak, area).
    """
    planner = Planner(schedule, options)
    peak, area = planner.curve.peak, planner.curve.area
    if planner.candidates:
        planner.run()
    return Plan(
        cuts=tuple(planner.cuts),
        copies=tuple(
            (slot, tuple(planner.slots[slot].nodes)) for slot in sorted(planner.slots)
        ),
        peak_before_bytes=peak,
        peak_after_bytes=planner.curve.peak,
        area_before=area,
        area_after=planner.curve.area,
        added_cost=planner.added_cost,
    )
