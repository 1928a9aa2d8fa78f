from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay._overrides import overrides


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler


@overrides(
    "torch._inductor.choices:InductorChoices.can_fuse_vertical",
    feature="remat",
    patch="use-site-remat",
    issue="pytorch/pytorch#197838",
)
def can_fuse_vertical(
    original: Callable[..., bool],
    scheduler: Scheduler,
    node1: BaseSchedulerNode,
    node2: BaseSchedulerNode,
    shared_data_score: int,
) -> bool:
    from .use_site_fusion import pulls_copy_from_its_use

    if pulls_copy_from_its_use(node1, node2):
        return False
    return original(scheduler, node1, node2, shared_data_score)


@overrides(
    "torch._inductor.choices:InductorChoices.can_fuse_horizontal",
    feature="remat",
    patch="use-site-remat",
    issue="pytorch/pytorch#197838",
)
def can_fuse_horizontal(
    original: Callable[..., bool],
    scheduler: Scheduler,
    node1: BaseSchedulerNode,
    node2: BaseSchedulerNode,
    shared_data_score: int,
) -> bool:
    from .use_site_fusion import pulls_copy_from_its_use

    if pulls_copy_from_its_use(node1, node2):
        return False
    return original(scheduler, node1, node2, shared_data_score)


@overrides(
    "torch._inductor.choices:InductorChoices.can_fuse_vertical",
    feature="peak",
    patch="save-by-peak",
    issue="pytorch/pytorch#197838",
)
def can_fuse_vertical_when_planned(
    original: Callable[..., bool],
    scheduler: Scheduler,
    node1: BaseSchedulerNode,
    node2: BaseSchedulerNode,
    shared_data_score: int,
) -> bool:
    from .planned_graph import lengthens_live_ranges

    if lengthens_live_ranges(node1, node2):
        return False
    return original(scheduler, node1, node2, shared_data_score)


@overrides(
    "torch._inductor.choices:InductorChoices.can_fuse_horizontal",
    feature="peak",
    patch="save-by-peak",
    issue="pytorch/pytorch#197838",
)
def can_fuse_horizontal_when_planned(
    original: Callable[..., bool],
    scheduler: Scheduler,
    node1: BaseSchedulerNode,
    node2: BaseSchedulerNode,
    shared_data_score: int,
) -> bool:
    from .planned_graph import lengthens_live_ranges

    if lengthens_live_ranges(node1, node2):
        return False
    return original(scheduler, node1, node2, shared_data_score)
