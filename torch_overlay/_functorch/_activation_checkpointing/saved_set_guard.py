"""Values that must be saved, whatever the activation-memory budget says.

Before the partitioner chooses, every forward node that must not run twice is marked
``MUST_SAVE``, which its min-cut and its knapsack honour.  After it chose, the set is
completed: some of its ways out, budget 0 first of all, do not look at marks.

Besides the rule of ``recompute_safety`` this covers reads of graph inputs that the
forward writes later: the backward would read what was written
(pytorch/pytorch#197039, pytorch/pytorch#185497).
"""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING

import torch
import torch.fx as fx
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._logging import warning_once
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy

from .graph_storage import graph_storages, tensor_bytes, tensors_of, written_arguments
from .recompute_safety import COLLECTIVE, is_in_backward, RANDOM, recompute_hazard
from .rng_replay import (
    NO_STATE,
    POLICIES,
    random_devices,
    replay_refusal,
    state_bytes,
)


if TYPE_CHECKING:
    from torch._functorch.partitioners import NodeInfo


log = logging.getLogger(__name__)

_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _rng_policy(joint_graph: fx.Graph) -> str:
    policy = config.rng_recompute
    if policy not in POLICIES:
        raise RuntimeError(
            f"torch._functorch.config.rng_recompute is {policy!r}; accepted are "
            + ", ".join(map(repr, POLICIES))
        )
    for node in joint_graph.nodes:
        # Saved states would stand where the runtime expects these.
        value = node.meta.get("val")
        if node.meta.get("saved_tensor_with_no_vc_check") or isinstance(
            value, torch._library.fake_class_registry.FakeScriptObject
        ):
            return "save"
    return policy


def inputs_written_later(joint_graph: fx.Graph) -> list[fx.Node]:
    """Graph inputs that the forward, or the runtime after it, writes."""
    inputs = [n for n in joint_graph.nodes if n.op == "placeholder"]
    written: OrderedSet[fx.Node] = OrderedSet()
    for node in joint_graph.nodes:
        if not is_in_backward(node):
            written.update(n for n in written_arguments(node) if n.op == "placeholder")
    by_description = {n.meta["desc"]: n for n in inputs if "desc" in n.meta}
    for output in joint_graph.output_node().meta.get("desc", ()):
        if isinstance(output, InputMutationAOTOutput):
            source = by_description.get(output.mutated_input)
            if source is not None:
                written.add(source)
    return [n for n in inputs if n in written]


def _reads_of(inputs: list[fx.Node], joint_graph: fx.Graph) -> OrderedSet[fx.Node]:
    """Nodes that make a new value from one of ``inputs`` or from a view of it."""
    if not inputs:
        return OrderedSet()
    storages = graph_storages(joint_graph).of_node
    written = OrderedSet(s for n in inputs for s in storages[n])
    return OrderedSet(
        node
        for node in joint_graph.nodes
        if node.op == "call_function"
        and not written.intersection(storages[node])
        and any(written.intersection(storages[n]) for n in node.all_input_nodes)
    )


def _result_bytes(node: fx.Node) -> int:
    return sum(map(tensor_bytes, tensors_of(node.meta.get("val"))))


def _random_value_is_saved(
    node: fx.Node, asked: bool, policy: str, devices: OrderedSet[torch.device]
) -> bool:
    refused = replay_refusal(node, devices)
    if refused == NO_STATE:
        warning_once(
            log,
            "%s %s; its results are saved instead of recomputed (#190758)",
            node.target,
            refused,
        )
    if refused is not None:
        return True
    if asked:
        return False
    return policy == "save" or _result_bytes(node) <= (state_bytes(node) or 0)


def _why_saved(
    node: fx.Node,
    policy: str,
    devices: OrderedSet[torch.device],
    late_reads: OrderedSet[fx.Node],
) -> str | None:
    asked = node.meta.get("recompute") in _RECOMPUTE
    if node in late_reads:
        return "reads an input that is written later"
    why = recompute_hazard(node, config.recomputable_custom_ops)
    if why == RANDOM:
        return why if _random_value_is_saved(node, asked, policy, devices) else None
    if why == COLLECTIVE and config.unsafe_allow_optimization_of_collectives:
        return None
    return None if asked else why


def mark_values_to_save(joint_graph: fx.Graph, node_info: NodeInfo) -> None:
    """Mark forward nodes that must not be recomputed ``MUST_SAVE``.

    A recompute that a user asked for stands, except where its result would differ: a
    seed made anew, a state that cannot be replayed, a read after a write.

    Raises:
        RuntimeError: ``config.rng_recompute`` is not a policy.
    """
    policy = _rng_policy(joint_graph)
    devices = random_devices(joint_graph)
    late_reads = _reads_of(inputs_written_later(joint_graph), joint_graph)
    for node in joint_graph.nodes:
        if (
            node.op == "call_function"
            and node_info.is_required_fw(node)
            and not is_in_backward(node)
        ):
            why = _why_saved(node, policy, devices, late_reads)
            if why is not None:
                log.debug("%s is saved: it %s", node, why)
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_marked(node: fx.Node) -> bool:
    return node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE


def _comes_from_marked(node: fx.Node) -> bool:
    while True:
        if _is_marked(node):
            return True
        if node.target is not operator.getitem:
            return False
        node = node.args[0]  # pyrefly: ignore [bad-assignment]


def complete_saved_values(
    joint_graph: fx.Graph, node_info: NodeInfo, saved_values: list[fx.Node]
) -> list[fx.Node]:
    """``saved_values`` and what the backward would otherwise recompute against a mark.

    A node that returns several tensors is saved through its ``getitem`` nodes.
    Returns ``saved_values`` itself if it is complete.
    """

    def is_tuple(node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), (tuple, list))

    saved = OrderedSet(n for n in saved_values if not is_tuple(n))
    needed = OrderedSet(node_info.required_bw_nodes)
    added = []
    for node in reversed(joint_graph.nodes):
        if node not in needed or node in saved or node.op == "placeholder":
            continue
        forward = node not in node_info.tangents_closure
        if forward and not is_tuple(node) and _comes_from_marked(node):
            added.append(node)
        else:
            needed.update(node.all_input_nodes)
    if not added and len(saved) == len(saved_values):
        return saved_values
    log.debug("also saved: %s", added)
    return [*saved, *reversed(added)]
