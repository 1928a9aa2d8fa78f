"""Chooses what the forward saves: least recompute work under a limit of the peak.

Candidates are values that are saved together or not at all.  They are ordered once by
the recompute work that giving them up takes for each byte; a plan keeps the end of that
order and a spine, values from places where the forward is narrow.  Starting from the
best of these and from what plain torch saves, single candidates are taken, given up or
exchanged while that makes the plan better.  Everything is counted in predicted bytes
and in seconds of a roofline; nothing is drawn, timed or hashed, so every process
finds the same plan (pytorch/pytorch#197838).
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .joint_peak import live_bytes_of_both
from .joint_schedule import INPUT, OPAQUE, VIEW
from .roofline import Roofline


if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from .joint_schedule import JointSchedule

# Places of a plan's curve of live bytes that are compared where it is above the limit:
# lowering the second of two equal peaks is an improvement that the peak does not show.
_HEIGHTS = 32


@dataclass(frozen=True)
class Candidate:
    """Nodes that are saved together: all results of one operator, or one value."""

    nodes: tuple[int, ...]
    values: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class SavedSetPlan:
    """What the forward saves, and what that is predicted to take.

    Attributes:
        saved: numbers of the saved nodes.
        reasons: for each of them "input", "must save", "cut" or "work".
        limit_bytes: the peak that was asked for.
        peak_bytes: predicted; above the limit only if it is the lowest that was found.
        lowest_bytes: lowest predicted peak of any plan that was tried.
        highest_bytes: predicted peak of plain torch at budget 1.
        work: seconds of a roofline that the backward takes to run things again.
        looks: plans whose peak was predicted.
    """

    saved: tuple[int, ...]
    reasons: tuple[str, ...]
    limit_bytes: int
    peak_bytes: int
    lowest_bytes: int
    highest_bytes: int
    work: float
    looks: int

    def __str__(self) -> str:
        counts = [f"{self.reasons.count(r)} {r}" for r in OrderedSet(self.reasons)]
        return (
            f"saved: {', '.join(counts)}\n"
            f"predicted peak {self.peak_bytes} bytes, limit {self.limit_bytes}, "
            f"lowest {self.lowest_bytes}, at budget 1 {self.highest_bytes}\n"
            f"recompute work {1e3 * self.work:.4g} ms, {self.looks} plans looked at"
        )


def _large_values(s: JointSchedule) -> dict[int, int]:
    """Values of the forward that may make a place wide, with the nodes that make them.

    Left out is what can be made again from the inputs without a heavy operator, what
    is live over more than half of the forward's heavy operators (it separates nothing),
    and what is small: below a quarter of the median size, where a value a thousand
    times smaller than the largest has no part in the median.  Which values are left out
    decides where a place is looked for, not whether it pays: that is predicted.
    """
    cheap = [True] * len(s.nodes)
    for i, heavy in enumerate(s.heavy):
        if s.kinds[i] != INPUT:
            makers = (s.maker[v] for v in s.operands[i])
            cheap[i] = not heavy and all([cheap[k] for k in makers])
    last = {v: i for i in s.forward for v in s.operands[i]}
    last.update(dict.fromkeys(s.results, len(s.nodes)))
    before, forward = [0], OrderedSet(s.forward)
    for i, heavy in enumerate(s.heavy):
        before.append(before[-1] + (heavy and i in forward))
    before.append(before[-1])
    maker = {
        v: i
        for i in reversed(s.forward)
        if not cheap[i]
        for v in s.makes[i]
        if 2 * (before[last.get(v, i)] - before[i]) <= before[-1]
    }
    sizes = sorted(s.size_bytes[v] for v in maker)
    sizes = [b for b in sizes if b >= max(sizes[-1] / 1024, 1)]
    large = sizes[len(sizes) // 2] / 4 if sizes else 1
    return {v: i for v, i in maker.items() if s.size_bytes[v] >= large}


def narrowest_places(s: JointSchedule) -> list[tuple[int, ...]]:
    """The large values that are live where the forward is narrowest.

    There is one place between two heavy operators: the first of those with the fewest
    live bytes.  With a single value it is a narrow cut.
    """
    maker = _large_values(s)
    last = {v: i for i in s.forward for v in s.operands[i]}
    last.update(dict.fromkeys(s.results, len(s.nodes)))
    live: dict[int, int] = {}
    places: list[dict[int, int]] = []
    fresh = True
    for i in s.forward:
        fresh = fresh or s.heavy[i]
        made = {v: s.size_bytes[v] for v in s.makes[i] if maker.get(v) == i}
        live = {v: b for v, b in {**live, **made}.items() if last.get(v, i) > i}
        if live and (fresh or sum(live.values()) < sum(places[-1].values())):
            places[len(places) - (not fresh) :] = [live]
            fresh = False
    return [*OrderedSet(tuple(place) for place in places)]


def must_save(
    s: JointSchedule, inputs: Sequence[int], plain: Sequence[int]
) -> list[int]:
    """Nodes that every plan saves: graph inputs, and what must not run twice.

    Plain torch's decision stands for values that a user's policy decides on, for what
    is no tensor, and for what it recomputes although a rule speaks against it.
    """
    kept = [i for i in plain if not (s.may_save(i) and s.may_run_again(i))]
    found = OrderedSet([*inputs, *kept])
    own = OrderedSet(s.backward)
    again = OrderedSet(s.emitted(s.backward, s.values_of(plain)))
    for i in s.emitted(s.backward, s.values_of(found)):
        if i not in own and i not in again and not s.may_run_again(i):
            found.update(s.parts(i))
    return [*found]


def recompute_seconds(s: JointSchedule, roofline: Roofline) -> list[float]:
    """Seconds that running each node in the backward adds; 0 for the backward's own.

    Of generated code it is the time of writing its result: what a generated kernel
    reads and hands on inside never meets memory.
    """
    own = OrderedSet(s.backward)
    seconds = []
    for i, node in enumerate(s.nodes):
        if i in own or s.kinds[i] in (INPUT, VIEW):
            seconds.append(0.0)
        elif s.kinds[i] == OPAQUE or not s.generated:
            seconds.append(roofline.seconds(node))
        else:
            written = sum(s.size_bytes[v] for v in s.makes[i])
            seconds.append(roofline.move_seconds(written))
    return seconds


@dataclass(frozen=True)
class _Look:
    """Highest live bytes of a plan, the peak first, and what it recomputes."""

    heights: list[int]
    work: float

    def score(self, limit: int) -> tuple[object, ...]:
        """Smaller is better: least work within the limit, else the lowest peak."""
        if self.heights[0] > limit:
            return (1, self.heights, self.work)
        return (0, self.work, self.heights)


class SavedSetSearch:
    """Plans over one joint graph; each is predicted once.

    Args:
        s: the joint graph.
        must: nodes that every plan saves.
        plains: saved sets of plain torch, as nodes; what they save is a candidate.
        roofline: of the device that the graphs run on.
    """

    def __init__(
        self,
        s: JointSchedule,
        must: Sequence[int],
        plains: Sequence[Sequence[int]],
        roofline: Roofline | None = None,
    ) -> None:
        self.s, self.must = s, must
        self._own = bytearray(len(s.nodes))
        for i in s.backward:
            self._own[i] = 1
        self._cost = recompute_seconds(s, roofline or Roofline())
        self.places = narrowest_places(s)
        self._must_values = s.values_of(must)
        self.items = self._candidates(plains)
        self._item_of = {v: c for c, item in enumerate(self.items) for v in item.values}
        self.cuts = [
            self._item_of[place[0]]
            for place in self.places
            if len(place) == 1 and place[0] in self._item_of
        ]
        kinds: dict[object, int] = {}
        self._kind = [
            kinds.setdefault(self._class_of(item), len(kinds)) for item in self.items
        ]
        self._price = [0.0] * len(self.items)
        self.order = self._giving_up_order()
        self._rank = {c: k for k, c in enumerate(self.order)}
        self._forward_bound = max(live_bytes_of_both(s, ())[0]) + max(s.size_bytes)
        self._known: dict[tuple[int, ...], _Look] = {}
        self._starts: list[tuple[int, ...]] = []
        self._lowest: tuple[int, ...] | None = None
        self.looks = 0
        # A look takes time with the graph: about as many nodes are walked for a graph
        # of any size, 2 seconds' worth.
        self.patience = max(8, 200_000 // max(len(s.nodes), 1))

    def _candidates(self, plains: Sequence[Sequence[int]]) -> list[Candidate]:
        s, taken = self.s, OrderedSet(self._must_values)
        again = s.emitted(s.backward, taken)
        groups = [s.parts(i) for i in again if s.heavy[i] and not self._own[i]]
        groups += [(s.maker[v],) for place in self.places for v in place]
        groups += [(i,) for plain in plains for i in plain]
        items = []
        for group in groups:
            values = s.values_of(group)
            size = s.saved_bytes(values)
            if (
                size
                and taken.isdisjoint(values)
                and not any(self._own[s.maker[v]] for v in values)
                and all(s.may_save(i) and s.may_run_again(i) for i in group)
            ):
                items.append(Candidate(group, tuple(values), size))
                taken.update(values)
        return items

    def _class_of(self, item: Candidate) -> object:
        """Equal for results of the same operator in equal layers."""
        node = self.s.nodes[item.nodes[0]]
        source = self.s.nodes[self.s.maker[item.values[0]]]
        return str(source.target), str(tuple(node.meta["val"].shape)), item.size_bytes

    def _closure(self, c: int, have: bytearray, again: bytearray) -> list[int]:
        """What runs again if a candidate is given up, besides what does already."""
        s, own = self.s, OrderedSet(self.items[c].values)
        found, stack, seen = [], [*own], OrderedSet(own)
        while stack:
            v = stack.pop()
            source = s.maker[v]
            if again[source] or (have[v] and v not in own):
                continue
            found.append(source)
            for u in s.operands[source]:
                if u not in seen:
                    seen.add(u)
                    stack.append(u)
        return found

    def _giving_up_order(self) -> list[int]:
        """Candidates by the work a byte that giving them up takes, earliest first.

        The price of one rises when what it is made from was given up before.
        """
        s = self.s
        have = bytearray(len(s.size_bytes))
        everything = [*self._must_values, *(v for c in self.items for v in c.values)]
        for v in [*everything, *s.arguments]:
            have[v] = 1
        again = bytearray(len(s.nodes))
        for i in s.emitted(s.backward, everything):
            again[i] = 1

        def price(c: int) -> tuple[float, list[int]]:
            found = self._closure(c, have, again)
            return sum(self._cost[i] for i in found) / self.items[c].size_bytes, found

        heap = [(price(c)[0], c) for c in range(len(self.items))]
        heapq.heapify(heap)
        order = []
        while heap:
            before, c = heapq.heappop(heap)
            now, found = price(c)
            if heap and now > max(before, heap[0][0]):
                heapq.heappush(heap, (now, c))
                continue
            order.append(c)
            self._price[c] = now * self.items[c].size_bytes
            for v in self.items[c].values:
                have[v] = 0
            for i in found:
                again[i] = 1
        return order

    def nodes(self, kept: Iterable[int]) -> list[int]:
        """Nodes that a plan saves."""
        return [*self.must, *(i for c in kept for i in self.items[c].nodes)]

    def look(self, kept: Iterable[int]) -> _Look:
        """Highest live bytes and work of a plan."""
        key = tuple(sorted(OrderedSet(kept)))
        found = self._known.get(key)
        if found is None:
            values = [v for c in key for v in self.items[c].values]
            found = self._known[key] = self.look_at([*self._must_values, *values])
        return found

    def look_at(self, saved: Collection[int]) -> _Look:
        """The same of any saved values."""
        self.looks += 1
        emitted = self.s.emitted(self.s.backward, saved)
        forward, backward = live_bytes_of_both(
            self.s, saved, emitted, self._forward_bound
        )
        return _Look(
            heapq.nlargest(_HEIGHTS, forward + backward),
            sum([self._cost[i] for i in emitted]),
        )

    def score(self, kept: Iterable[int], limit: int) -> tuple[object, ...]:
        return self.look(kept).score(limit)

    def spines(self) -> Iterator[tuple[int, ...]]:
        """Every place, every second one and so on; those with one value, then all.

        Of a stride two phases at most: more differ by little and cost a look each.
        """
        narrow = [p for p in self.places if len(p) == 1]
        yield ()
        for places in [narrow, self.places][: 1 + (2 * len(narrow) < len(self.places))]:
            stride = 1
            while stride <= len(places):
                for phase in range(0, stride, max(stride // 2, 1)):
                    values = OrderedSet(v for p in places[phase::stride] for v in p)
                    items = (self._item_of.get(v) for v in values)
                    yield tuple(OrderedSet(c for c in items if c is not None))
                stride *= 2

    def cheapest(self, spine: Sequence[int], limit: int) -> tuple[int, ...]:
        """The spine and as much of the order's end as the limit lets it keep.

        What is kept adds about its bytes to the peak, which tells where to look next;
        every third look halves what is left.
        """
        have = OrderedSet(spine)
        rest = [c for c in reversed(self.order) if c not in have]
        sizes = [0, *itertools.accumulate(self.items[c].size_bytes for c in rest)]
        room = limit - self.look(spine).heights[0]
        fits, above, count, looks = 0, len(sizes), 0, 0
        if room < 0:
            return tuple(spine)
        while above - fits > 1:
            looks += 1
            if looks % 3:
                count = bisect.bisect_right(sizes, sizes[count] + room) - 1
                count = min(max(count, fits + 1), above - 1)
            else:
                count = (fits + above) // 2
            room = limit - self.look([*spine, *rest[:count]]).heights[0]
            if room < 0:
                above = count
            else:
                fits = count
        return (*spine, *rest[:fits])

    def _moves(
        self, kept: OrderedSet[int], above: bool
    ) -> list[tuple[OrderedSet[int], OrderedSet[int]]]:
        """Changes of a plan: what is given up and what is taken.

        One candidate of each class on either side, the one that comes next in the
        order.  Above the limit every candidate may have to be looked at: where the
        peak is decides which one helps, not the order.
        """
        drop = [c for c in self.order if c in kept]
        take = [c for c in reversed(self.order) if c not in kept]
        first = {}
        for c in drop:
            first.setdefault((self._kind[c], True), c)
        for c in take:
            first.setdefault((self._kind[c], False), c)
        drops = [c for c in drop if first[self._kind[c], True] == c]
        takes = [c for c in take if first[self._kind[c], False] == c]
        none: OrderedSet[int] = OrderedSet()
        single = [(none, OrderedSet([t])) for t in takes]
        both = [
            (OrderedSet([d]), OrderedSet([t]))
            for t in takes
            for d in drops
            if above or self._price[t] > self._price[d]
        ]
        gives = [(OrderedSet([d]), none) for d in drops]
        if above:
            rest = [(none, OrderedSet([t])) for t in take if t not in takes]
            return [*single, *gives, *both, *rest]
        return [*single, *both, *gives]

    def improve(self, kept: Sequence[int], limit: int, looks: int) -> tuple[int, ...]:
        """Take, give up or exchange a candidate while the plan gets better."""
        stop = self.looks + looks
        best, kept = self.score(kept, limit), tuple(kept)
        better = True
        while better and self.looks < stop:
            better = False
            for gone, new in self._moves(OrderedSet(kept), best[0] == 1):
                if self.looks >= stop:
                    break
                plan = (*(c for c in kept if c not in gone), *new)
                score = self.score(plan, limit)
                if score < best:
                    best, kept, better = score, plan, True
                    break
        return kept

    def starts(self) -> list[tuple[int, ...]]:
        """Spines, the lowest first, each also with one of the largest candidates.

        A large value, like the logits of a vocabulary, makes two plans that no single
        change leads between: with it and without it.  Large is an eighth of the peak.
        """
        if not self._starts:
            spines = sorted(
                OrderedSet(self.spines()), key=lambda kept: self.look(kept).heights
            )
            every = tuple(OrderedSet(self.cuts))
            top = self.look(every).heights[0]
            large = [c for c in self.order if 8 * self.items[c].size_bytes >= top]
            found = OrderedSet([*spines[:3], every, ()])
            for spine in spines[:2]:
                found.update((*spine, c) for c in large[:3] if c not in spine)
            self._starts = [*found]
        return self._starts

    def lowest(self) -> tuple[int, ...]:
        """The plan with the lowest predicted peak that is found."""
        if self._lowest is None:
            best = min(self.starts(), key=lambda kept: self.score(kept, -1))
            self._lowest = self.improve(best, -1, self.patience)
        return self._lowest

    def plan(self, limit_bytes: int) -> tuple[int, ...]:
        """Least recompute work with a predicted peak within the limit."""
        starts = OrderedSet([*self.starts(), self.lowest()])
        within = [k for k in starts if self.look(k).heights[0] <= limit_bytes]
        plans = [self.cheapest(start, limit_bytes) for start in within or starts]
        plans.sort(key=lambda kept: self.score(kept, limit_bytes))
        best = self.improve(plans[0], limit_bytes, self.patience)
        return min(plans[-1], best, key=lambda kept: self.score(kept, limit_bytes))
