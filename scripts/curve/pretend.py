"""Stand-ins that let a machine without a GPU trace and lower for CUDA.

Attention is traced as the kernel that CUDA would run, and the traced joint graph is
moved to fake CUDA tensors.  Inductor then lowers it for a device that only has
properties; nothing can run on it.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch._guards import detect_fake_mode
from torch._inductor.fx_passes import fuse_attention
from torch.fx.passes.fake_tensor_prop import FakeTensorProp


if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.fx as fx


DEVICE = torch.device("cuda", 0)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Memory-efficient attention, or the operators of plain attention where CUDA's
    kernels refuse the mask, because it is expanded along keys.  With dropout the plain
    operators too: to draw again, a kernel needs a device's generator.

    Flash attention, which CUDA prefers for half precision without a mask, holds the
    same tensors.
    """
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    plain = dropout_p or (attn_mask is not None and attn_mask.stride(-1) != 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        kept, masked = (
            torch.scalar_tensor(x, dtype=query.dtype, device=query.device)
            for x in (0.0, float("-inf"))
        )
        attn_mask = torch.where(attn_mask, kept, masked)
    if plain:
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, 0.0, is_causal, scale=scale
    )[0]


def pretend_cuda() -> contextlib.AbstractContextManager[None]:
    """Inductor sees a CUDA device; needs Triton, which generates its kernels."""
    folder = str(Path(__file__).resolve().parents[2] / "test" / "inductor")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import pretend_cuda as device

    return device.pretend_cuda()


@contextlib.contextmanager
def traced_for_cuda() -> Iterator[None]:
    """What is traced inside calls the attention kernel of CUDA.

    Inductor's search for attention in the graph would put in that of the CPU.
    """
    with (
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
        mock.patch.object(fuse_attention, "_sfdp_init", lambda *args: None),
    ):
        yield


def move_to_cuda(gm: fx.GraphModule) -> None:
    """Give a traced graph fake CUDA tensors, with the layouts that CUDA would have."""

    def on_cuda(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        layout = (value.shape, value.stride())
        return torch.empty_strided(*layout, dtype=value.dtype, device=DEVICE)

    def device(value: Any) -> Any:
        return DEVICE if isinstance(value, torch.device) else value

    inputs = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    mode = detect_fake_mode(inputs)
    for node in gm.graph.nodes:
        node.args, node.kwargs = pytree.tree_map(device, (node.args, node.kwargs))
    with mode, torch.no_grad():
        moved = [on_cuda(value) for value in inputs]
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*moved)
    gm.recompile()
