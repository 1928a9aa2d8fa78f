"""Saves more than one value at once where the forward is nowhere narrow.

Between the halves of a U-Net every level's result is kept for the way up.  There the
live values of a narrowest place make up a cut together.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .equal_values import may_run_again


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .joint_schedule import JointSchedule

# Wide places count where this part of the forward or more has no narrow cut.
_WIDE_RATIO = 1 / 4
# Places that are tried one by one; more would take too long.
_MAX_PLACES = 32
# Of two plans with the same peak the one that is as high at fewer nodes is better.
_HEIGHTS = 64


def _places_in_gaps(places: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    narrow = [k for k, place in enumerate(places) if len(place) == 1]
    found = OrderedSet(narrow)
    for before, after in zip([-1, *narrow], [*narrow, len(places)], strict=True):
        if after - before > len(places) * _WIDE_RATIO:
            found.update(range(before + 1, after))
    return [places[k] for k in sorted(found)]


def _improved(
    s: JointSchedule,
    saved: Sequence[int],
    planned: list[int],
    cuts: list[tuple[int, ...]],
) -> list[int]:
    """Add or leave out one place at a time as long as that lowers the peak."""

    def heights(nodes: list[int]) -> list[int]:
        return heapq.nlargest(_HEIGHTS, s.live_bytes(nodes))

    values = list(OrderedSet(i for cut in cuts for i in cut if i not in saved))
    best, lowest = planned, heights(planned)
    while True:
        tries = [
            [i for i in best if i != v] if v in best else [*best, v] for v in values
        ]
        found = [heights(nodes) for nodes in tries]
        if min(found, default=lowest) >= lowest:
            return best
        lowest = min(found)
        best = tries[found.index(lowest)]


def plan_wide_places(
    s: JointSchedule,
    saved: Sequence[int],
    planned: list[int],
    places: Sequence[tuple[int, ...]],
) -> list[int]:
    """``planned``, or wider places beside ``saved`` if these peak lower.

    A budget that saves fewer bytes than the lowest peak takes gets that lowest peak.
    """
    # That module imports this one.
    from .narrow_cuts import plan_saved_cuts

    cuts = _places_in_gaps(places)
    if len(cuts) > _MAX_PLACES or all(len(cut) == 1 for cut in cuts):
        return planned

    def saved_bytes(nodes: Sequence[int]) -> int:
        return sum(s.size_bytes[v] for v in s.storages(nodes) - s.resident)

    must = [
        i
        for i in saved
        if i in s.placeholders or not (s.may_save(i) and may_run_again(s, i))
    ]
    lowest = _improved(s, must, plan_saved_cuts(s, must, cuts), cuts)
    plans = [lowest] if saved_bytes(saved) <= saved_bytes(lowest) else []
    plans.append(_improved(s, saved, plan_saved_cuts(s, saved, cuts), cuts))
    return min([*plans, planned], key=s.peak_bytes)
