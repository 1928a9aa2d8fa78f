# Owner(s): ["module: aotdispatch"]
import dataclasses

from torch.testing._internal.common_utils import run_tests, TestCase

from torch_overlay._functorch._activation_checkpointing.remat_planner import (
    plan_use_site_copies,
    PlanOptions,
    Schedule,
)


def schedule(nodes, sizes, *, level=None, cuttable=None, pinned=(), outputs=()):
    """A schedule in which node ``i`` makes value ``i``; ``nodes[i]`` are its inputs."""
    count = len(nodes)
    uses = [[] for _ in range(count)]
    for slot, inputs in enumerate(nodes):
        for read in inputs:
            uses[read].append(slot)
    level = level or [1] * count
    return Schedule(
        inputs=tuple(map(tuple, nodes)),
        values=tuple((i,) for i in range(count)),
        allocates=tuple((i,) for i in range(count)),
        level=tuple(level),
        cost=tuple(float(s) for s in sizes),
        size_bytes=tuple(sizes),
        first_slot=tuple(range(count)),
        uses=tuple(map(tuple, uses)),
        producer=tuple(range(count)),
        cuttable=tuple(
            level[i] > 0 and i not in outputs if cuttable is None else cuttable[i]
            for i in range(count)
        ),
        pinned=tuple(i in pinned for i in range(count)),
    )


class TestPlanner(TestCase):
    def chain(self, **changes):
        # 0 input (pinned), 1 = f(0) held over the peak, 2..3 the peak, 4 uses 1 again
        #   slot     1   2   3   4
        #   live    10  30  50  11+...
        return schedule(
            [[], [0], [1], [2], [3, 1]],
            [10, 10, 20, 20, 1],
            pinned=(0,),
            outputs=(4,),
            **changes,
        )

    def test_value_used_early_and_late(self):
        plan = plan_use_site_copies(self.chain(), PlanOptions())
        self.assertEqual(plan.copies, ((4, (1,)),))
        # slot 3 holds value 2 (20), value 3 (20) and, before the cut, value 1 (10).
        self.assertEqual((plan.peak_before_bytes, plan.peak_after_bytes), (50, 40))
        # the gap between the uses in slots 2 and 4 is slot 3
        self.assertEqual(plan.area_before - plan.area_after, 10)
        self.assertEqual(plan.added_cost, 10.0)

    def test_same_plan_again(self):
        plans = {plan_use_site_copies(self.chain(), PlanOptions()) for _ in range(3)}
        self.assertEqual(len(plans), 1)

    def test_no_candidate(self):
        for level in ([0, 0, 1, 1, 1], [0, 2, 1, 1, 1]):
            plan = plan_use_site_copies(self.chain(level=level), PlanOptions())
            self.assertEqual((plan.cuts, plan.copies), ((), ()))
            self.assertEqual(plan.peak_after_bytes, plan.peak_before_bytes)

    def test_heavy_needs_its_level_and_a_long_gap(self):
        heavy = self.chain(level=[0, 2, 1, 1, 1])
        allowed = PlanOptions(max_level=2, heavy_gap_ratio=0.5, max_cost_ratio=1.0)
        self.assertEqual(len(plan_use_site_copies(heavy, allowed).cuts), 1)
        # The gap holds work 20; half of it covers the 10 of the copy, a third does not.
        short = dataclasses.replace(allowed, heavy_gap_ratio=1 / 3)
        self.assertEqual(plan_use_site_copies(heavy, short).cuts, ())
        # All nodes together do work 61.
        poor = dataclasses.replace(allowed, max_cost_ratio=9 / 61)
        self.assertEqual(plan_use_site_copies(heavy, poor).cuts, ())

    def test_dead_leaf_is_refused(self):
        # Node 1 reads node 0, which is an input that dies before the late use.
        s = schedule(
            [[], [0], [1], [2], [3, 1]],
            [10, 10, 20, 20, 1],
            level=[0, 1, 1, 1, 1],
            outputs=(4,),
        )
        self.assertEqual(plan_use_site_copies(s, PlanOptions()).cuts, ())

    def test_cone_of_three(self):
        # 1, 2, 3 are computed from the pinned input; only 3 is held over the peak.
        s = schedule(
            [[], [0], [1], [2], [3], [4], [5, 3]],
            [4, 4, 4, 4, 20, 20, 1],
            pinned=(0,),
            outputs=(6,),
        )
        plan = plan_use_site_copies(s, PlanOptions())
        self.assertEqual(plan.copies, ((6, (1, 2, 3)),))
        short = plan_use_site_copies(s, PlanOptions(max_cone_nodes=2))
        self.assertEqual(short.cuts, ())

    def test_copies_must_fit_under_the_peak(self):
        # Running 1 again would hold 100 bytes just before the late use.
        s = schedule(
            [[], [0], [1], [2], [3], [4, 2]],
            [4, 100, 10, 20, 20, 1],
            pinned=(0,),
            outputs=(5,),
        )
        self.assertEqual(plan_use_site_copies(s, PlanOptions()).cuts, ())

    def test_peak_never_rises_and_two_peaks(self):
        # Value 1 spans two peaks of equal height; both fall.
        s = schedule(
            [[], [0], [1], [2], [3, 1], [4], [5], [6, 1]],
            [10, 10, 20, 20, 1, 20, 20, 1],
            pinned=(0,),
            outputs=(4, 7),
        )
        plan = plan_use_site_copies(s, PlanOptions())
        self.assertEqual([slot for slot, _ in plan.copies], [4, 7])
        self.assertLess(plan.peak_after_bytes, plan.peak_before_bytes)

    def test_empty_schedule(self):
        plan = plan_use_site_copies(schedule([], []), PlanOptions())
        self.assertEqual((plan.cuts, plan.peak_before_bytes), ((), 0))


if __name__ == "__main__":
    run_tests()
