"""Keep use-site copies out of kernels that run far from their use.

A copy reads what its original reads, so a scheduler would gladly make one kernel of
both, run at the earlier place: the copy would be held from there to its use, and so
would the original's other copies.  Tier: ``remat``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay._functorch._activation_checkpointing.use_site_rewrite import (
    COPY_MARK,
)


if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode


# Scheduler nodes between two kernels beyond which a use-site copy stays out of the
# other: about half a transformer layer's recompute.
MAX_COPY_FUSION_DISTANCE = 16


def holds_use_site_copy(node: BaseSchedulerNode) -> bool:
    """Whether a kernel computes a copy that use-site rematerialization made."""
    return any(
        origin.meta.get(COPY_MARK, False)
        for part in node.get_nodes()
        if part.node is not None
        for origin in part.node.get_origins()
    )


def pulls_copy_from_its_use(node1: BaseSchedulerNode, node2: BaseSchedulerNode) -> bool:
    """Whether fusing two kernels moves a use-site copy far away from its use.

    Distances are those of the order before fusion.
    """
    distance = max(
        abs(node1.min_order - node2.max_order), abs(node2.min_order - node1.max_order)
    )
    return distance > MAX_COPY_FUSION_DISTANCE and (
        holds_use_site_copy(node1) or holds_use_site_copy(node2)
    )
