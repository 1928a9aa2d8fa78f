from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay._overrides import overrides


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._inductor.codegen.wrapper import AllocateLine, FreeIfNotReusedLine


@overrides(
    "torch._inductor.codegen.wrapper:AllocateLine.should_reuse_buffer",
    feature="peak",
    patch="save-by-peak",
    issue="pytorch/pytorch#197838",
)
def should_reuse_buffer(
    original: Callable[..., bool],
    self: AllocateLine,
    free_line: FreeIfNotReusedLine,
    size: int,
) -> bool:
    from torch._inductor.virtualized import V

    from ..planned_graph import is_planned

    next_kernel = free_line.scheduler_node_index + 1 == self.scheduler_node_index
    if is_planned(V.graph) and not (self.comm_buffer or next_kernel):
        return False
    return original(self, free_line, size)
