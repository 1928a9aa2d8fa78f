"""Recomputed random operators draw the forward's numbers again.

After the joint graph is split, a random operator that stands in both halves is
recomputed.  Each such pair, in forward order, goes to the partitioner's
``functionalize_rng_ops``, as if a checkpoint had asked for the recompute: the forward
saves the generator's state (or, on CUDA, draws from a generator that the backward
follows) and the backward draws from that.  The global generator moves in the forward
only.

Answers pytorch/pytorch#190758 and pytorch/pytorch#190717.
"""

from __future__ import annotations

import logging

import torch
import torch.fx as fx
from torch._functorch import config
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy

from .graph_storage import tensors_of
from .recompute_safety import (
    argument_of,
    draws_random_numbers,
    is_collective,
    is_in_backward,
    is_tagged_random,
    seed_operators,
)


log = logging.getLogger(__name__)

POLICIES = ("replay", "save")
# Bytes of a saved generator state: Mersenne Twister on the CPU, Philox elsewhere.
STATE_BYTES = {"cpu": 5056, "cuda": 16, "hpu": 16, "xpu": 16}
NO_STATE = "draws from a generator whose state cannot be read and set"


def _is_current_device_needed() -> bool:
    """Whether a state is read and set by functions that know one device only."""
    import torch._inductor.config as inductor_config

    # The partitioner shares generators across CUDA graphs only under these.
    return not config.graphsafe_rng_functionalization or (
        inductor_config.fallback_random
        and not inductor_config.test_configs.graphsafe_rng_func_ignores_fallback_random
    )


def random_devices(graph: fx.Graph) -> OrderedSet[torch.device]:
    """Devices other than the CPU whose generators the graph's operators draw from."""
    return OrderedSet(
        tensor.device
        for node in graph.nodes
        if node.op == "call_function" and draws_random_numbers(node)
        for tensor in tensors_of(node.meta.get("val"))
        if tensor.device.type != "cpu"
    )


def state_bytes(node: fx.Node) -> int | None:
    """Bytes of the generator state that a random node starts from, None if unknown."""
    types = OrderedSet(t.device.type for t in tensors_of(node.meta.get("val")))
    return STATE_BYTES.get(next(iter(types))) if len(types) == 1 else None


def replay_refusal(node: fx.Node, devices: OrderedSet[torch.device]) -> str | None:
    """Why a random node's numbers cannot be drawn again, or None if they can.

    Args:
        devices: what :func:`random_devices` says of the node's graph.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return "is not an operator"
    if target in seed_operators():
        return "makes a seed"
    if target._schema.is_mutable:
        return "mutates an argument"
    if argument_of(node, "generator") is not None:
        return "draws from a generator of the user's"
    if state_bytes(node) is None:
        return NO_STATE
    has_tensors = any(tensors_of(n.meta.get("val")) for n in node.all_input_nodes)
    if not has_tensors and not node.kwargs.get("device"):
        return "does not name its device"
    own = tensors_of(node.meta.get("val"))[0].device
    if own.type == "cpu":
        return None
    if len(devices) > 1:
        return "is one of several devices that draw in this graph"
    if _is_current_device_needed():
        current = torch.get_device_module(own).current_device()
        if own.index not in (None, current):
            return "draws on a device that is not the current one"
    return None


def drop_dead_draws(graph: fx.Graph, subgraph: str | None) -> None:
    """Erase unused random operators and collectives that belong to the other half.

    Dead code elimination keeps them because they have effects, and so a half whose
    inputs reach one runs it although nobody reads it (pytorch/pytorch#172730).
    """
    if subgraph not in ("forward", "backward"):
        return
    dropped = False
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.users:
            continue
        foreign = is_in_backward(node) == (subgraph == "forward")
        if foreign and (draws_random_numbers(node) or is_collective(node.target)):
            graph.erase_node(node)
            dropped = True
        elif dropped and not node.is_impure():
            graph.erase_node(node)


def replay_recomputed_random_ops(
    joint_module: fx.GraphModule,
    fw_module: fx.GraphModule,
    bw_module: fx.GraphModule,
    num_sym_nodes: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Pair the random operators that stand in both halves and share their states.

    Args:
        num_sym_nodes: symbolic sizes that the forward returns last.
    """
    halves = [
        OrderedSet(n.name for n in module.graph.nodes if n.op == "call_function")
        for module in (fw_module, bw_module)
    ]
    pairs = 0
    for node in joint_module.graph.nodes:
        if node.op != "call_function":
            continue
        if not draws_random_numbers(node):
            if is_tagged_random(node.target):
                # Some releases would share a state for attention without dropout.
                node.meta.pop("recompute", None)
        elif all(node.name in half for half in halves):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            pairs += 1
    if not pairs:
        return fw_module, bw_module
    # The partitioner imports this module.
    from torch._functorch.partitioners import functionalize_rng_ops

    log.info("%d recomputed random operators replay the forward's numbers", pairs)
    return functionalize_rng_ops(joint_module, fw_module, bw_module, num_sym_nodes)
