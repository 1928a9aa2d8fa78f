from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay._overrides import overrides


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.fx as fx


@overrides(
    "torch._functorch.partitioners:reordering_to_mimic_autograd_engine",
    feature="remat",
    patch="use-site-remat",
    issue="pytorch/pytorch#197838",
)
def reordering_to_mimic_autograd_engine(
    original: Callable[[fx.GraphModule], fx.GraphModule], gm: fx.GraphModule
) -> fx.GraphModule:
    from torch._functorch import config

    from ._activation_checkpointing import use_site_remat

    mode = getattr(config, "use_site_remat", "off")
    # Both partitioners call raise_getitems next, which recompiles the graph.
    return use_site_remat.use_site_remat(original(gm), mode, recompile=False)
