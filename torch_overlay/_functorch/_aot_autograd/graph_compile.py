from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._overrides import overrides


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.fx as fx
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta


@overrides(
    "torch._functorch._aot_autograd.graph_compile:_aot_stage2a_partition",
    feature="peak",
    patch="save-by-peak",
    issue="pytorch/pytorch#197838",
)
def _aot_stage2a_partition(
    original: Callable[..., Any],
    fx_g: fx.GraphModule,
    joint_inputs: Any,
    maybe_subclass_meta: Any,
    fw_metadata: ViewAndMutationMeta,
    aot_config: Any,
    partition_fn: Callable[..., Any],
) -> Any:
    from .._activation_checkpointing.region_inputs import mark_activations

    mark_activations(fx_g.graph, fw_metadata)
    return original(
        fx_g, joint_inputs, maybe_subclass_meta, fw_metadata, aot_config, partition_fn
    )
