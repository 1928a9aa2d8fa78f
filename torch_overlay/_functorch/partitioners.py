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
    fingerprints={
        "2.13.0": "a86ba67f649eec08e213b9a6eb2a734da64de4548e168c995ddea57d164d00fa",
        "2.14.1": "a86ba67f649eec08e213b9a6eb2a734da64de4548e168c995ddea57d164d00fa",
        "2.15.0": "a86ba67f649eec08e213b9a6eb2a734da64de4548e168c995ddea57d164d00fa",
    },
)
def reordering_to_mimic_autograd_engine(
    original: Callable[[fx.GraphModule], fx.GraphModule], gm: fx.GraphModule
) -> fx.GraphModule:
    from torch._functorch import config

    from ._activation_checkpointing import use_site_remat

    mode = getattr(config, "use_site_remat", "off")
    # Both partitioners call raise_getitems next, which recompiles the graph.
    return use_site_remat.use_site_remat(original(gm), mode, recompile=False)
