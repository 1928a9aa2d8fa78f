# Owner(s): ["module: inductor"]
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.memory as inductor_memory
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.wrapper import AllocateLine
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import run_tests, TestCase

import torch_overlay  # overlay only
from torch_overlay._functorch._activation_checkpointing.joint_peak import (
    MAX_FUSION_DISTANCE,
)
from torch_overlay._functorch._activation_checkpointing.save_by_peak import (
    PLANNED_MARK,
)


class FakeGraph:
    """A graph in lowering whose saved set was planned or not."""

    def __init__(self, is_backward, planned):
        self.is_backward = is_backward
        nodes = [mock.Mock(meta={PLANNED_MARK: True} if planned else {})]
        self.module = mock.Mock(graph=mock.Mock(nodes=nodes))


class FakeKernel:
    def __init__(self, first, last):
        self.min_order, self.max_order = first, last
        self.node = mock.Mock(get_origins=list)

    def get_nodes(self):
        return [self]


class FakeLine:
    """A line of the wrapper that allocates or frees at a place."""

    comm_buffer = False
    scheduler = None

    def __init__(self, place, peak=0, between=0):
        self.scheduler_node_index = place
        estimate = mock.Mock(overall_peak_memory=peak, peak_between=lambda *a: between)
        self.wrapper = mock.Mock(estimate_peak=estimate)


class TestPlannedGraph(TestCase):
    def can_fuse(self, is_backward, planned, distance):
        early, late = FakeKernel(3, 3), FakeKernel(3 + distance, 3 + distance)
        with (
            torch._inductor.config.patch({"triton.mix_order_reduction": False}),
            V.set_graph_handler(FakeGraph(is_backward, planned)),
        ):
            found = [
                InductorChoices.can_fuse_vertical(None, *pair, 1)
                for pair in ((early, late), (late, early))
            ]
        self.assertEqual(*found)
        return found[0]

    @torch_overlay.applied("peak")  # overlay only
    def test_far_kernels_of_a_planned_backward_stay_apart(self):
        far = MAX_FUSION_DISTANCE + 1
        self.assertFalse(self.can_fuse(True, True, far))
        self.assertTrue(self.can_fuse(True, True, far - 1))
        self.assertTrue(self.can_fuse(True, False, far))
        self.assertTrue(self.can_fuse(False, True, far))
        with V.set_graph_handler(FakeGraph(True, True)):
            pair = FakeKernel(0, 0), FakeKernel(far, far)
            self.assertFalse(InductorChoices.can_fuse_horizontal(None, *pair, 1))

    # overlay only: begin
    def test_torch_alone_fuses_them(self):
        self.assertTrue(self.can_fuse(True, True, MAX_FUSION_DISTANCE + 1))

    # overlay only: end

    def reuses(self, planned, place, peak=0, between=0):
        free, made = FakeLine(2), FakeLine(place, peak, between)
        with V.set_graph_handler(FakeGraph(True, planned)):
            return AllocateLine.should_reuse_buffer(made, free, 10)

    @torch_overlay.applied("peak")  # overlay only
    def test_a_dead_buffer_is_kept_for_the_next_kernel_alone(self):
        self.assertTrue(self.reuses(True, 3))
        self.assertFalse(self.reuses(True, 4, peak=100, between=50))
        self.assertTrue(self.reuses(False, 4, peak=100, between=50))
        self.assertFalse(self.reuses(False, 4, peak=100, between=95))

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_spans_of_kernels(self):
        """Of 24 layers whose backward makes everything again, no two are one kernel."""
        width, spans = 64, []
        original = inductor_memory.reorder_for_peak_memory

        def watch(nodes, *args, **kwargs):
            order = original(nodes, *args, **kwargs)
            if V.graph.is_backward:
                for kernel in order:
                    orders = [p.min_order for p in kernel.get_nodes()]
                    spans.append(max(orders) - min(orders))
            return order

        layers = [torch.randn(width, width, requires_grad=True) for _ in range(24)]

        def f(x):
            for w in layers:
                x = x + torch.nn.functional.silu(
                    torch.nn.functional.rms_norm(x, (width,)) @ w
                )
            return x.square().sum()

        gradients = []
        for budget in (0.0, 1.0):
            torch._dynamo.reset()
            x = torch.ones(256, width, requires_grad=True)
            with (
                functorch_config.patch(
                    activation_memory_budget=budget, save_by_peak=True
                ),
                torch._inductor.config.patch(force_disable_caches=True),
                mock.patch.object(inductor_memory, "reorder_for_peak_memory", watch),
            ):
                torch.compile(f)(x).backward()
            gradients.append([x.grad, *(w.grad for w in layers)])
            for w in layers:
                w.grad = None
            if not budget:
                planned, spans = spans, []
        self.assertEqual(*gradients)
        # A kernel grows by fusions that are each within the limit.
        self.assertLessEqual(max(planned), 2 * MAX_FUSION_DISTANCE)
        self.assertTrue(spans)


if __name__ == "__main__":
    run_tests()
