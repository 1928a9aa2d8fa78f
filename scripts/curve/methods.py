"""Ways to trade recompute for memory that the curve compares."""

from __future__ import annotations

import functools
from typing import Any, TYPE_CHECKING

import torch
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from .models import repeated_layers


if TYPE_CHECKING:
    from torch import nn


# Methods that run at every budget, with the features that each needs; "memory" is what
# TORCH_OVERLAY=memory turns on, "mask-again" is boundaries without saving what
# attention's backward reads expanded.
BUDGET_METHODS: dict[str, tuple[str, ...]] = {
    "stock": (),
    "light": ("remat=light",),
    "all": ("remat=all",),
    "boundaries": ("boundaries",),
    "memory": ("remat=light", "boundaries"),
    "mask-again": ("boundaries",),
}
FIXED_METHODS = ("ac1", "ac2", "sac-attn", "sac-mm", "eager")
METHODS = (*BUDGET_METHODS, *FIXED_METHODS)

_MATMULS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
)


def _save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if "attention" in str(op):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in _MATMULS:
        return CheckpointPolicy.MUST_SAVE
    return _save_attention(ctx, op)


_POLICIES = {"sac-attn": _save_attention, "sac-mm": _save_matmuls}


def use_checkpointing(model: nn.Module, method: str) -> None:
    """Wrap the repeated layers of ``model`` in place as ``method`` says.

    ``ac1`` checkpoints every layer, ``ac2`` every second one; ``sac-attn`` every layer
    with attention outputs saved, ``sac-mm`` with matmul outputs saved as well.
    """
    extra: dict[str, Any] = {}
    if method in _POLICIES:
        extra["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _POLICIES[method]
        )
    for layer in list(repeated_layers(model))[:: 2 if method == "ac2" else 1]:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, **extra
        )
