"""Joint graphs as the partitioner gets them, for tests of what is saved."""

from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._functorch.partitioners as partitioners
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from torch_overlay._functorch._activation_checkpointing.joint_schedule import (
    joint_schedule,
)


def boxed(gm, inputs):
    return make_boxed_func(gm.forward)


def joint_graphs(function, *inputs, decompositions=None):
    """Classified joint graphs of a program and what the partitioner knows of them."""
    found = []
    choose = partitioners.choose_saved_values_set

    def chosen(joint_graph, node_info, *args, **kwargs):
        found.append((joint_graph, node_info))
        return choose(joint_graph, node_info, *args, **kwargs)

    backend = aot_autograd(
        fw_compiler=boxed,
        bw_compiler=boxed,
        partition_fn=partitioners.min_cut_rematerialization_partition,
        decompositions=decompositions,
    )
    torch._dynamo.reset()
    with (
        functorch_config.patch(activation_memory_budget=0.5),
        mock.patch.object(partitioners, "choose_saved_values_set", chosen),
    ):
        torch.compile(function, backend=backend)(*inputs)
    return found


def schedule_of(function, *inputs, **kwargs):
    """The schedule of a program with one graph."""
    ((joint_graph, node_info),) = joint_graphs(function, *inputs, **kwargs)
    return joint_schedule(joint_graph, node_info)


def calls(schedule, packet):
    """Nodes of the forward that call an operator."""
    nodes = schedule.nodes
    return [i for i in schedule.forward if nodes[i].target.overloadpacket is packet]


def partitioned(function, *inputs):
    """Forward and backward that the partitioner makes of a program."""
    found = []

    def partition(joint, joint_inputs, **kwargs):
        graphs = partitioners.min_cut_rematerialization_partition(
            joint, joint_inputs, **kwargs
        )
        found.append(graphs)
        return graphs

    backend = aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=partition)
    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return found[-1]
