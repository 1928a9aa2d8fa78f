"""Work of running one node again, for comparing recompute candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.utils._pytree as pytree
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from .graph_storage import _hint, tensor_bytes


if TYPE_CHECKING:
    import torch.fx as fx


# Floating-point operations that take as long as moving one byte.  Between fp32 (about
# 12) and bf16 (about 160) on current data-center GPUs; only the order that it induces
# matters.
FLOPS_PER_BYTE = 16


def _shape(value: object) -> object:
    """What FLOP formulas take for an argument: the hinted shape of a tensor."""
    value = getattr(value, "meta", {}).get("val", value)
    if isinstance(value, torch.Tensor):
        return tuple(_hint(s) for s in value.shape)
    return _hint(value) if isinstance(value, torch.SymInt) else value


def node_flops(node: fx.Node) -> int:
    """FLOPs of a matmul, convolution or attention node by its shapes; else 0."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return sdpa_flop_count(*map(_shape, node.args[:3]))
    if packet not in flop_registry:
        return 0
    args, kwargs, out = pytree.tree_map(
        _shape, (node.args, node.kwargs, node.meta["val"])
    )
    return flop_registry[packet](*args, **kwargs, out_val=out)


def moved_bytes(node: fx.Node) -> int:
    """Bytes of a node's operands and results."""
    tensors = [
        t
        for n in [node, *node.all_input_nodes]
        for t in pytree.tree_leaves(n.meta.get("val"))
        if isinstance(t, torch.Tensor)
    ]
    return sum(tensor_bytes(t) for t in tensors)


def recompute_cost(node: fx.Node) -> float:
    """FLOPs plus bytes read and written, each byte as ``FLOPS_PER_BYTE`` FLOPs."""
    return node_flops(node) + FLOPS_PER_BYTE * moved_bytes(node)
