"""Keeps Inductor to what the predicted peak of a planned saved set rests on.

Two of its habits lengthen live ranges without a look at the peak.  It makes one kernel
of kernels that are far apart, so that recomputed values of many layers are made at once
and held; and its wrapper keeps a dead buffer for a later one of the same layout, as
long as that does not exceed an estimated peak, which may be far above the real one.
Tier: ``peak``; graphs whose saved set was not planned are left alone.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch._inductor.virtualized import V

from torch_overlay._functorch._activation_checkpointing.joint_peak import (
    MAX_FUSION_DISTANCE,
)
from torch_overlay._functorch._activation_checkpointing.save_by_peak import (
    PLANNED_MARK,
)


if TYPE_CHECKING:
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import BaseSchedulerNode


_planned: weakref.WeakKeyDictionary[GraphLowering, bool] = weakref.WeakKeyDictionary()


def is_planned(graph: GraphLowering) -> bool:
    """Whether the saved set of the joint graph was planned that a graph is part of."""
    found = _planned.get(graph)
    if found is None:
        nodes = graph.module.graph.nodes
        found = _planned[graph] = any(PLANNED_MARK in n.meta for n in nodes)
    return found


def lengthens_live_ranges(node1: BaseSchedulerNode, node2: BaseSchedulerNode) -> bool:
    """Whether two kernels of a planned backward are too far apart to be made one.

    Distances are those of the order before fusion.
    """
    distance = max(
        abs(node1.min_order - node2.max_order), abs(node2.min_order - node1.max_order)
    )
    return (
        distance > MAX_FUSION_DISTANCE
        and getattr(V.graph, "is_backward", False)  # there may be no graph
        and is_planned(V.graph)
    )
