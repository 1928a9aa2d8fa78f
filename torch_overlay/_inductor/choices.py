from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay._overrides import overrides


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler


# Scheduler nodes between two kernels beyond which a use-site copy stays out of the
# other: about half a transformer layer's recompute.
MAX_COPY_FUSION_DISTANCE = 16


def holds_use_site_copy(node: BaseSchedulerNode) -> bool:
    """Whether a kernel computes a copy that use-site rematerialization made."""
    from torch_overlay._functorch._activation_checkpointing.use_site_rewrite import (
        COPY_MARK,
    )

    return any(
        origin.meta.get(COPY_MARK, False)
        for part in node.get_nodes()
        if part.node is not None
        for origin in part.node.get_origins()
    )


def pulls_copy_from_its_use(node1: BaseSchedulerNode, node2: BaseSchedulerNode) -> bool:
    """Whether fusing two kernels moves a use-site copy far away from its use.

    A copy reads what its original reads, so both could be one kernel, run at the
    earlier place: the copy would be held from there to its use, and so would the
    original's other copies.  Distances are those of the order before fusion.
    """
    distance = max(
        abs(node1.min_order - node2.max_order), abs(node2.min_order - node1.max_order)
    )
    return distance > MAX_COPY_FUSION_DISTANCE and (
        holds_use_site_copy(node1) or holds_use_site_copy(node2)
    )


@overrides(
    "torch._inductor.choices:InductorChoices.can_fuse_vertical",
    feature="remat",
    patch="use-site-remat",
    issue="pytorch/pytorch#197838",
    fingerprints={
        "2.13.0": "ce4ed150e43af00e8ca137e981ab6420c08c8e060a4ff76d9aef9a26567fcdc3",
        "2.14.1": "ce4ed150e43af00e8ca137e981ab6420c08c8e060a4ff76d9aef9a26567fcdc3",
        "2.15.0": "ce4ed150e43af00e8ca137e981ab6420c08c8e060a4ff76d9aef9a26567fcdc3",
    },
)
def can_fuse_vertical(
    original: Callable[..., bool],
    scheduler: Scheduler,
    node1: BaseSchedulerNode,
    node2: BaseSchedulerNode,
    shared_data_score: int,
) -> bool:
    if pulls_copy_from_its_use(node1, node2):
        return False
    return original(scheduler, node1, node2, shared_data_score)


@overrides(
    "torch._inductor.choices:InductorChoices.can_fuse_horizontal",
    feature="remat",
    patch="use-site-remat",
    issue="pytorch/pytorch#197838",
    fingerprints={
        "2.13.0": "241766867f5e27017e6391eb41a1a0dd3d95f6d5210c17f1de58e75f6245e08d",
        "2.14.1": "241766867f5e27017e6391eb41a1a0dd3d95f6d5210c17f1de58e75f6245e08d",
        "2.15.0": "241766867f5e27017e6391eb41a1a0dd3d95f6d5210c17f1de58e75f6245e08d",
    },
)
def can_fuse_horizontal(
    original: Callable[..., bool],
    scheduler: Scheduler,
    node1: BaseSchedulerNode,
    node2: BaseSchedulerNode,
    shared_data_score: int,
) -> bool:
    if pulls_copy_from_its_use(node1, node2):
        return False
    return original(scheduler, node1, node2, shared_data_score)
