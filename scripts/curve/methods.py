"""Ways to trade recompute for memory that the curve compares."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
import torch._functorch.config as functorch_config
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from .models import repeated_layers


if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


# Methods that run at every budget, with the features that each needs; "memory" is what
# TORCH_OVERLAY=memory turns on.
BUDGET_METHODS: dict[str, tuple[str, ...]] = {
    "stock": (),
    "light": ("remat=light",),
    "all": ("remat=all",),
    "peak": ("peak",),
    "memory": ("remat=light", "peak"),
}
FIXED_METHODS = ("ac1", "ac2", "sac-attn", "sac-mm", "eager")
METHODS = (*BUDGET_METHODS, *FIXED_METHODS)


@dataclass(frozen=True)
class PlanPoint:
    """One point of a curve: a method at a budget, or with a target for its peak."""

    method: str
    budget: float | None = None
    target_bytes: int | None = None

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Set the keys of the overlay to the method's values; the rest of it is off."""
        features = BUDGET_METHODS.get(self.method, ())
        given = dict(f.partition("=")[::2] for f in features)
        wanted = {
            "use_site_remat": given.get("remat", "off"),
            "save_by_peak": "peak" in given,
            "activation_memory_peak_target": self.target_bytes,
        }
        there = {k: v for k, v in wanted.items() if hasattr(functorch_config, k)}
        if self.budget is not None:
            there["activation_memory_budget"] = self.budget
        with functorch_config.patch(there) if there else contextlib.nullcontext():
            yield


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
