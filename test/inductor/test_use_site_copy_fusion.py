# Owner(s): ["module: inductor"]
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.memory as inductor_memory
from torch._inductor.choices import InductorChoices
from torch.testing._internal.common_utils import run_tests, TestCase

import torch_overlay  # overlay only
from torch_overlay._functorch._activation_checkpointing.use_site_rewrite import (
    COPY_MARK,
)
from torch_overlay._inductor import use_site_fusion


class FakeKernel:
    """A scheduler node over origins that are copies or not."""

    def __init__(self, first, last, copy):
        self.min_order, self.max_order = first, last
        origin = mock.Mock(meta={COPY_MARK: True} if copy else {})
        self.node = mock.Mock(get_origins=lambda: [origin])

    def get_nodes(self):
        return [self]


class TestRule(TestCase):
    def test_distance_and_mark(self):
        limit = use_site_fusion.MAX_COPY_FUSION_DISTANCE
        for last, copy1, copy2, refused in [
            (limit, True, True, False),
            (limit + 1, True, False, True),
            (limit + 1, False, True, True),
            (limit + 1, False, False, False),
        ]:
            early, late = FakeKernel(0, 0, copy1), FakeKernel(last, last, copy2)
            for pair in [(early, late), (late, early)]:
                found = use_site_fusion.pulls_copy_from_its_use(*pair)
                self.assertEqual(found, refused)

    @torch_overlay.applied("remat")  # overlay only
    def test_choices_ask_the_rule_first(self):
        far = (FakeKernel(0, 0, True), FakeKernel(99, 99, False))
        near = (FakeKernel(0, 0, True), FakeKernel(1, 1, False))
        self.assertFalse(InductorChoices.can_fuse_vertical(None, *far, 1))
        self.assertFalse(InductorChoices.can_fuse_horizontal(None, *far, 1))
        self.assertTrue(InductorChoices.can_fuse_vertical(None, *near, 1))

    # overlay only: begin
    def test_torch_alone_fuses_them(self):
        far = (FakeKernel(0, 0, True), FakeKernel(99, 99, False))
        self.assertTrue(InductorChoices.can_fuse_vertical(None, *far, 1))

    # overlay only: end


class TestSchedule(TestCase):
    @torch_overlay.applied("remat=off")  # overlay only
    def schedule(self):
        """Compile a step; per backward kernel, (names of origins, copies in it)."""
        kernels = []
        original = inductor_memory.reorder_for_peak_memory

        def watch(nodes, *args, **kwargs):
            order = original(nodes, *args, **kwargs)
            for kernel in order:
                parts = [p.node for p in kernel.get_nodes() if p.node is not None]
                orders = [p.min_order for p in kernel.get_nodes()]
                copied = any(
                    o.meta.get(COPY_MARK) for p in parts for o in p.get_origins()
                )
                kernels.append((max(orders) - min(orders), copied))
            return order

        width = 64
        layers = [torch.randn(width, width, requires_grad=True) for _ in range(24)]

        def f(x):
            for w in layers:
                x = x + torch.nn.functional.silu(
                    torch.nn.functional.rms_norm(x, (width,)) @ w
                )
            return x.square().sum()

        torch._dynamo.reset()
        with (
            functorch_config.patch(activation_memory_budget=0.0, use_site_remat="all"),
            torch._inductor.config.patch(force_disable_caches=True),
            mock.patch.object(inductor_memory, "reorder_for_peak_memory", watch),
        ):
            torch.compile(f)(torch.randn(256, width, requires_grad=True)).backward()
        return kernels

    def test_copies_stay_near_their_use(self):
        kernels = self.schedule()
        spans = [span for span, copied in kernels if copied]
        self.assertGreater(len(spans), 10)
        with mock.patch.object(use_site_fusion, "MAX_COPY_FUSION_DISTANCE", 10**6):
            free = [span for span, copied in self.schedule() if copied]
        # A kernel grows by fusions that are each within the limit.
        limit = 2 * use_site_fusion.MAX_COPY_FUSION_DISTANCE
        self.assertLessEqual(max(spans), limit)
        self.assertGreater(max(free), limit)


if __name__ == "__main__":
    run_tests()
