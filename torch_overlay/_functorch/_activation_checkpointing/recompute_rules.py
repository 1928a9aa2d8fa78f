"""Which nodes of a graph may run a second time, and what that takes."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING

import torch
from torch.utils._ordered_set import OrderedSet

from .graph_storage import tensors_of, written_arguments
from .recompute_safety import recompute_hazard


if TYPE_CHECKING:
    import torch.fx as fx

    from .graph_storage import GraphStorages


NEVER, CHEAP, HEAVY = 0, 1, 2

_ATTENTION_FORWARD = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


# Pure data movement and normalization that the partitioner's own list leaves out.
_CHEAP_BESIDES = (
    "_log_softmax",
    "_softmax",
    "cat",
    "constant_pad_nd",
    "cumsum",
    "diagonal_scatter",
    "embedding",
    "flip",
    "index_select",
    "native_group_norm",
    "native_layer_norm",
    "repeat",
    "roll",
    "select_scatter",
    "slice_scatter",
    "tril",
    "upsample_nearest2d",
)


@functools.cache
def _operator_sets() -> tuple[OrderedSet[object], OrderedSet[object]]:
    aten = torch.ops.aten
    # The partitioner imports this module.
    from torch._functorch import partitioners

    types = partitioners.get_default_op_list()
    attention = OrderedSet(
        getattr(aten, name) for name in _ATTENTION_FORWARD if hasattr(aten, name)
    )
    heavy = (types.compute_intensive_ops | attention) - OrderedSet(
        [aten.convolution_backward]
    )
    cheap = types.recomputable_ops | OrderedSet(
        getattr(aten, name) for name in _CHEAP_BESIDES
    )
    return cheap - heavy, heavy | OrderedSet([aten.baddbmm])


def refusal(node: fx.Node, storages: GraphStorages, view: bool) -> str | None:
    """Why ``node`` must not run twice, or None if it may.

    ``view`` is what :func:`is_view` says of it; views need not be on the lists.
    """
    if node.op != "call_function":
        return f"is a graph {node.op}"
    if node.meta.get("recompute") is not None:
        return "carries a user's checkpoint decision"
    target = node.target
    if target is not operator.getitem:
        if isinstance(target, torch._ops.HigherOrderOperator):
            return "is a higher-order operator"
        if not isinstance(target, torch._ops.OpOverload):
            return "is not an operator of torch"
        hazard = recompute_hazard(node)
        if hazard is not None:
            return hazard
        if torch.Tag.nondeterministic_bitwise in target.tags:
            return "is not deterministic"
        cheap, heavy = _operator_sets()
        packet = target.overloadpacket
        if not view and packet not in cheap and packet not in heavy:
            return "is not a known recomputable operator"
    if "val" not in node.meta:
        return "has no value metadata"
    if (node.meta.get("custom") or {}).get("stream") is not None:
        return "runs on a stream of the user's choice"
    why = _value_refusal(node)
    if why is not None:
        return why
    if storages.mutated or storages.opaque:
        touched = OrderedSet(storages.of_node[node])
        for n in node.all_input_nodes:
            touched.update(storages.of_node[n])
        if touched & storages.mutated:
            return "touches storage that the graph writes"
        if touched & storages.opaque:
            return "touches a tensor without readable storage"
    return None


def _value_refusal(node: fx.Node) -> str | None:
    results = tensors_of(node.meta["val"])
    devices = OrderedSet(t.device for t in results)
    if any(t.is_conj() or t.is_neg() for t in results if not t.is_sparse):
        return "is a conjugate or negative view"
    for source in node.all_input_nodes:
        for tensor in tensors_of(source.meta.get("val")):
            if results and tensor.dim() > 0 and tensor.device not in devices:
                return "moves data between devices"
    return None


def is_view(node: fx.Node, storages: GraphStorages) -> bool:
    """Whether ``node`` only renames storage of its one tensor argument."""
    if node.op != "call_function" or written_arguments(node):
        return False
    own = storages.of_node[node]
    sources = [n for n in node.all_input_nodes if storages.of_node[n]]
    if not own or len(sources) != 1:
        return False
    return all(v in storages.of_node[sources[0]] for v in own)


def is_static(node: fx.Node) -> bool:
    """Whether a value is alive before and after the backward: parameters, constants."""
    return node.op == "get_attr" or (
        node.op == "placeholder" and node.name.startswith("primals")
    )


def is_heavy(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return packet in _operator_sets()[1]
