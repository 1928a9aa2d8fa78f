# Owner(s): ["module: functorch"]

import random
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._functorch.partitioners as partitioners
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._ordered_set import OrderedSet

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


def live_by_definition(s, order, start, end):
    """Live bytes at each node of ``order``, from where every storage is read."""

    def readers(v):
        return [k for k, i in enumerate(order) for a in s.inputs[i] if v in s.values[a]]

    def kernel(k):
        """Where a node runs: inside the kernel of its only reader if both can."""
        values = s.values[order[k]]
        if s.fusible[order[k]] and len(values) == 1 and values[0] not in end:
            found = [*OrderedSet(readers(values[0]))]
            if len(found) == 1 and s.fusible[order[found[0]]]:
                return kernel(found[0])
        return k

    made = dict.fromkeys(start, 0)
    for k, i in enumerate(order):
        for v in s.values[i] if kernel(k) == k else ():
            made.setdefault(v, k)
    live = [0] * len(order)
    for v, first in made.items():
        last = max([first, *map(kernel, readers(v))])
        for k in range(first, len(order) if v in end else last + 1):
            live[k] += 0 if v in s.resident else s.size_bytes[v]
    return live


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

    def test_live_bytes_are_those_of_their_definition(self):
        def layers(x, w, table):
            x = x + table[:4].repeat(2, 1)
            for _ in range(3):
                y = torch.nn.functional.layer_norm(x, (8,)) @ w
                a, b = y.t().split(4)
                y = torch.cat([a.sin() * b, b.exp() + a.clone().mul_(2)]).t()
                x = x + torch.nn.functional.gelu(y @ w).relu()
            return x

        shapes = ((8, 8), (8, 8), (16, 8))
        s = schedule_of(layers, *(torch.randn(n, requires_grad=True) for n in shapes))
        choice = random.Random(0)
        for share in (0, 0.1, 0.3, 0.5, 0.9, 1) * 4:
            given = s.storages(s.placeholders)
            saved = [i for i in s.forward if choice.random() < share and s.may_save(i)]
            backward = s.emitted(s.backward, saved)
            used = s.used(saved, backward)
            forward = sorted(OrderedSet(s.emitted([*s.forward_outputs, *used], ())))
            kept = s.storages(used)
            results = s.storages(s.forward_outputs) | kept
            gradients = s.storages(s.backward_outputs)
            expected = [
                live_by_definition(s, s.makers(forward), OrderedSet(), results),
                live_by_definition(s, s.makers(backward), given | kept, gradients),
            ]
            self.assertEqual(s.live_bytes(saved), [*expected[0], *expected[1]])
            self.assertEqual(s.peak_bytes(saved), max(map(max, expected)))

    def backward_below_forward(self, s, saved):
        """Highest live bytes of the backward; the peak must be in the forward."""
        live = s.live_bytes(saved)
        count = len(live) - len(s.makers(s.emitted(s.backward, saved)))
        forward, backward = max(live[:count]), max(live[count:])
        self.assertGreater(forward, backward)
        self.assertEqual(s.peak_bytes(saved), forward)
        return backward

    def test_peak_in_the_forward_by_what_is_kept(self):
        def wide_last(x, y):
            z = x
            for _ in range(9):
                z = z @ x
            return z * torch.cat([y @ y] * 4).cumsum(0).sum()

        x, y = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
        s = schedule_of(wide_last, x, y)
        kept = [*calls(s, torch.ops.aten.mm), *calls(s, torch.ops.aten.sum)]
        backward = self.backward_below_forward(s, kept)
        nothing_kept = s.live_bytes([])[: len(s.makers(s.forward))]
        self.assertLess(max(nothing_kept), backward)

    def test_peak_in_the_forward_by_what_it_runs_besides(self):
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                ctx.save_for_backward(y)
                return x.sin()

            @staticmethod
            def backward(ctx, gradient):
                (y,) = ctx.saved_tensors
                return gradient * torch.cat([y @ y] * 4).cumsum(0).sum(), None

        x, y = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
        s = schedule_of(Scaled.apply, x, y)
        aten = torch.ops.aten
        (total,) = (i for i, n in enumerate(s.nodes) if n.target is aten.sum.default)
        self.assertNotIn(total, s.forward)
        self.backward_below_forward(s, [total])

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
