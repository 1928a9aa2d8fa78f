from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._overrides import overrides


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.fx as fx


@overrides(
    "torch._inductor.compile_fx:partition_fn",
    feature="peak",
    patch="save-by-peak",
    issue="pytorch/pytorch#197838",
)
def partition_fn(
    original: Callable[..., Any],
    gm: fx.GraphModule,
    joint_inputs: Any,
    *,
    partitioner_fn_override: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    from torch_overlay._functorch._activation_checkpointing.save_by_peak import (
        GENERATED_MARK,
    )

    gm.meta[GENERATED_MARK] = True
    return original(
        gm, joint_inputs, partitioner_fn_override=partitioner_fn_override, **kwargs
    )
