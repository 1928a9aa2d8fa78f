"""Tells a region of a larger program from a whole one.

A graph whose inputs are activations of a program around it is a region: what it saves
is held while the rest of the program runs (blocks compiled one by one, graph breaks).
The caller may drop such inputs once the forward has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._functorch._aot_autograd.descriptors import (
    DifferentiableAOTInput,
    TangentAOTInput,
)


if TYPE_CHECKING:
    import torch.fx as fx
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
    from torch._functorch.partitioners import NodeInfo

_MARK = "is_activation_of_the_program"


def _is_primal(node: fx.Node) -> bool:
    described = node.meta.get("desc")
    return isinstance(described, DifferentiableAOTInput) and not isinstance(
        described, TangentAOTInput
    )


def mark_activations(joint_graph: fx.Graph, fw_metadata: ViewAndMutationMeta) -> None:
    """Mark the inputs that need gradients and are no leaves of autograd.

    Inputs that were taken apart, as tensor subclasses are, are not marked.
    """
    primals = [n for n in joint_graph.find_nodes(op="placeholder") if _is_primal(n)]
    if len(primals) != len(fw_metadata.input_info):
        return
    for node, info in zip(primals, fw_metadata.input_info, strict=True):
        if info.requires_grad and not info.is_leaf:
            node.meta[_MARK] = True


def inputs_of_a_region(joint_graph: fx.Graph, node_info: NodeInfo) -> list[fx.Node]:
    """Inputs that are activations of a program around the graph; static ones are not.

    Where nothing is known of an input's history, as in a graph that AOTAutograd did not
    trace, it counts as a leaf.
    """
    return [
        node
        for node in joint_graph.find_nodes(op="placeholder")
        if _MARK in node.meta and node not in node_info.static_lifetime_input_nodes
    ]
