"""Saves narrow cuts of the forward beside what an activation-memory budget saves.

A narrow cut is a value that is, somewhere in the forward, the only large live value
that cannot be made again cheaply from the inputs: the residual stream between layers.
A backward that has the cuts recomputes from the last one, not from the inputs on.  The
budget's knapsack never saves them, because its items are operators that are expensive
to run again (pytorch/pytorch#197838).  Saving more values changes no result.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch._functorch import config
from torch.utils._ordered_set import OrderedSet

from .equal_values import latest_of_equal_values  # overlay only
from .held_at_peak import save_held_at_peak  # overlay only
from .joint_schedule import JointSchedule, NEARLY_EQUAL
from .saved_besides import values_not_to_recompute, values_read_expanded  # overlay only
from .traded_cuts import trade_cuts  # overlay only
from .wide_places import plan_wide_places  # overlay only


if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo


log = logging.getLogger(__name__)

# Large is what has a quarter of the median size or more; a value that is a thousand
# times smaller than the largest has no part in the median.
_LARGE_RATIO, _NEGLIGIBLE_RATIO = 1 / 4, 1 / 1024
# A plan that leaves cuts out, of which some may be in the middle of layers, must be
# better than every cut by more than this.
_EVERY_CUT = 1.0125


def _kept_values(s: JointSchedule) -> dict[int, int]:
    """Large values that are not cheap to make again, with the nodes that make them."""
    cheap: list[bool] = []
    for i, heavy in enumerate(s.heavy):
        cheap.append(not heavy and all([cheap[a] for a in s.inputs[i]]))
    kept = {
        v: i
        for i in reversed(s.forward)
        if not cheap[i] and not s.moves[i]
        for v in s.values[i]
        if v not in s.resident
    }
    sizes = sorted(s.size_bytes[v] for v in kept)
    sizes = [b for b in sizes if b >= max(sizes[-1] * _NEGLIGIBLE_RATIO, 1)]
    large = sizes[len(sizes) // 2] * _LARGE_RATIO if sizes else 0
    return {v: i for v, i in kept.items() if sizes and s.size_bytes[v] >= large}


def narrowest_places(s: JointSchedule) -> list[tuple[int, ...]]:
    """The nodes whose large values are live where the forward is narrowest.

    There is one place between two heavy operators: the first of those with the fewest
    live bytes.  With a single node it is a narrow cut.
    """
    kept = _kept_values(s)
    last = {v: i for i in s.forward for a in s.inputs[i] for v in s.values[a]}
    last.update(dict.fromkeys(s.storages(s.forward_outputs), len(s.nodes)))
    live: dict[int, int] = {}
    places: list[dict[int, int]] = []
    fresh = True
    for i in s.forward:
        fresh = fresh or s.heavy[i]
        made = {v: s.size_bytes[v] for v in s.values[i] if kept.get(v) == i}
        live = {v: b for v, b in {**live, **made}.items() if last.get(v, i) > i}
        if live and (fresh or sum(live.values()) < sum(places[-1].values())):
            places[len(places) - (not fresh) :] = [live]
            fresh = False
    found = OrderedSet(tuple(kept[v] for v in place) for place in places)
    return [place for place in found if all(map(s.may_save, place))]


def plan_saved_cuts(
    s: JointSchedule, saved: Sequence[int], cuts: Sequence[tuple[int, ...]]
) -> list[int]:
    """``saved`` and the cuts that lower the predicted peak most.

    Tried are every cut, every second one and so on as long as that helps, then every
    cut of an early part, which the backward reaches last, and the stride behind it.
    Every cut is taken where that is little above the lowest peak, else of nearly equal
    peaks the plan that recomputes the fewest heavy nodes.
    """
    plans = [(s.peak_bytes(saved), list(saved))]

    def attempt(early: int, stride: int, phase: int) -> int:
        taken = [c for k, c in enumerate(cuts) if k < early or k % stride == phase]
        nodes = [*OrderedSet([*saved, *(i for cut in taken for i in cut)])]
        plans.append((s.peak_bytes(nodes), nodes))
        return plans[-1][0]

    stride, coarse = 1, (2, 0)
    while stride <= len(cuts):
        lowest = min(peak for peak, _ in plans)
        phases = range(0, stride, max(stride // 4, 1))  # four at most
        peaks = [attempt(0, stride, phase) for phase in phases]
        if stride > 1:
            if min(peaks) >= lowest:
                break
            coarse = (stride, phases[peaks.index(min(peaks))])
        stride *= 2
    for early in OrderedSet(len(cuts) * eighth // 8 for eighth in range(1, 8)):
        if early > 0:
            attempt(early, *coarse)
    lowest = min(peak for peak, _ in plans)
    if cuts and plans[1][0] <= lowest * _EVERY_CUT:
        return plans[1][1]
    low = [nodes for peak, nodes in plans if peak <= lowest * NEARLY_EQUAL]
    return min(
        low, key=lambda nodes: sum(s.heavy[i] for i in s.emitted(s.backward, nodes))
    )


def save_narrow_cuts(
    joint_graph: fx.Graph,
    node_info: NodeInfo,
    saved_values: list[fx.Node],
    memory_budget: float,
) -> list[fx.Node]:
    """The values to save: ``saved_values`` and the cuts that lower the predicted peak.

    With budget 1 or ``torch._functorch.config.save_narrow_cuts`` off that is
    ``saved_values`` itself.  What the backward does not read is dropped on extraction.
    """
    if not config.save_narrow_cuts or memory_budget >= 1:
        return saved_values
    schedule = JointSchedule(joint_graph, node_info)
    # Other values may be recomputed from other inputs.  # overlay only
    saved_values = [*OrderedSet([*saved_values, *node_info.inputs])]  # overlay only
    saved = [schedule.number[n] for n in saved_values]
    places = narrowest_places(schedule)
    cuts = [place for place in places if len(place) == 1]
    stock = saved  # overlay only
    saved = latest_of_equal_values(schedule, stock, cuts)  # overlay only
    saved += values_read_expanded(schedule, saved)  # overlay only
    planned = plan_saved_cuts(schedule, saved, cuts)
    planned = plan_wide_places(schedule, stock, planned, places)  # overlay only
    planned = save_held_at_peak(schedule, planned)  # overlay only
    planned = trade_cuts(schedule, planned, cuts)  # overlay only
    planned += values_not_to_recompute(schedule, stock, planned)  # overlay only
    planned += values_read_expanded(schedule, planned)  # overlay only
    log.info("save_narrow_cuts: %d values, not %d", len(planned), len(saved_values))
    return [schedule.nodes[i] for i in planned]
