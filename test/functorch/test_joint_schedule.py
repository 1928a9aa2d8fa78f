# Owner(s): ["module: functorch"]

from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._functorch.partitioners as partitioners
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.common_utils import run_tests, TestCase

from torch_overlay._functorch._activation_checkpointing.joint_schedule import (
    JointSchedule,
)


MIB = 1 << 20


def schedule_of(function, *inputs):
    """The schedule of the joint graph that the partitioner gets."""
    found = []
    choose = partitioners.choose_saved_values_set

    def chosen(joint_graph, node_info, *args, **kwargs):
        found.append(JointSchedule(joint_graph, node_info))
        return choose(joint_graph, node_info, *args, **kwargs)

    def compiler(gm, inputs):
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=partitioners.min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    with (
        functorch_config.patch(activation_memory_budget=0.5),
        mock.patch.object(partitioners, "choose_saved_values_set", chosen),
    ):
        torch.compile(function, backend=backend)(*inputs).sum().backward()
    return found[0]


def calls(schedule, packet):
    """Nodes of the forward that call an operator."""
    nodes = schedule.nodes
    return [i for i in schedule.forward if nodes[i].target.overloadpacket is packet]


class TestJointSchedule(TestCase):
    def test_peaks_of_products(self):
        def products(x):
            return (x @ x) @ x

        x = torch.randn(512, 512, requires_grad=True)
        schedule = schedule_of(products, x)
        square, cube = calls(schedule, torch.ops.aten.mm)
        self.assertTrue(schedule.heavy[square] and schedule.heavy[cube])
        forward, backward = schedule.live_bytes([square]), schedule.live_bytes([])
        # Both products while the second runs; the backward's are three gradients of x,
        # the square's gradient and the tangent at most.
        self.assertEqual(max(forward[: len(schedule.forward)]), 2 * MIB)
        self.assertEqual(schedule.peak_bytes([square]), 4 * MIB)
        self.assertEqual(schedule.peak_bytes([]), max(backward))
        self.assertEqual(max(backward), 4 * MIB)

    def test_what_no_node_reads_is_left_out(self):
        def products(x, y):
            return (x @ x) + y.sin()

        x = torch.randn(512, 512, requires_grad=True)
        schedule = schedule_of(products, x, torch.randn(512, 512))
        (sine,) = calls(schedule, torch.ops.aten.sin)
        self.assertEqual(schedule.peak_bytes([sine]), schedule.peak_bytes([]))

    def test_one_pointwise_reader(self):
        def pointwise(x):
            y = x @ x
            return (y.sin().cos().exp() * 2) @ x

        x = torch.randn(512, 512, requires_grad=True)
        schedule = schedule_of(pointwise, x)
        (sine,) = calls(schedule, torch.ops.aten.sin)
        self.assertFalse(schedule.heavy[sine])
        forward = schedule.live_bytes([])[: len(schedule.forward)]
        # The sine and the cosine are computed with what reads them.
        self.assertEqual(max(forward), 2 * MIB)

    def test_heavy_nodes(self):
        def mixed(x, y):
            x = torch.nn.functional.dropout(x @ x, 0.5)
            return torch.softmax(x, -1).cumsum(0).reshape(-1, 4).t() @ y

        x = torch.randn(8, 8, requires_grad=True)
        schedule = schedule_of(mixed, x, torch.randn(16, 4, requires_grad=True))
        heavy = [
            schedule.nodes[i].target.overloadpacket
            for i in schedule.forward
            if schedule.heavy[i]
        ]
        aten = torch.ops.aten
        self.assertEqual(heavy[0], aten.mm)
        self.assertEqual(heavy[-1], aten.mm)
        (draw,) = heavy[1:-1]
        self.assertIn(draw, (aten.native_dropout, aten.bernoulli, aten.rand))


if __name__ == "__main__":
    run_tests()
