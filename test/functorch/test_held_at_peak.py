# Owner(s): ["module: functorch"]

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_utils import run_tests, TestCase


sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_narrow_cuts import all_cuts, gradients, matmuls, partitioned, WithDropout

import torch_overlay  # overlay only
from torch_overlay._functorch._activation_checkpointing.held_at_peak import (
    save_held_at_peak,
)


class Inner(nn.Module):
    """A product of the normalized input, four times as large, and back."""

    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 4 * size, bias=False)
        self.down = nn.Linear(4 * size, size, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


def layers():
    torch.manual_seed(0)
    model = nn.Sequential(*(Inner(32) for _ in range(8)), nn.LayerNorm(32))
    return model, torch.randn(8, 256, 32)


class TestHeldAtPeak(TestCase):
    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_last_layer_is_not_made_again(self):
        _, _, schedule = partitioned(*layers(), budget=0)
        planned = all_cuts(schedule)
        found = save_held_at_peak(schedule, planned)
        added = found[len(planned) :]
        self.assertEqual(found[: len(planned)], planned)
        self.assertEqual(added, [matmuls(schedule)[14]])
        self.assertLess(schedule.peak_bytes(found), schedule.peak_bytes(planned))

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_partitioner_saves_it(self):
        _, backward, schedule = partitioned(*layers(), budget=0)
        given = [n.name for n in backward.graph.find_nodes(op="placeholder")]
        self.assertIn(schedule.nodes[matmuls(schedule)[14]].name, given)
        _, backward, _ = partitioned(*layers(), budget=0, save=False)
        given = [n.name for n in backward.graph.find_nodes(op="placeholder")]
        self.assertNotIn(schedule.nodes[matmuls(schedule)[14]].name, given)

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_policies_stay(self):
        _, _, schedule = partitioned(*layers(), budget=0)
        policy = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
        for node in schedule.nodes:
            node.meta["recompute"] = policy
        planned = all_cuts(schedule)
        self.assertEqual(save_held_at_peak(schedule, planned), planned)

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_nothing_is_made_again(self):
        _, _, schedule = partitioned(*layers(), budget=0)
        planned = [*schedule.placeholders, *schedule.forward]
        self.assertEqual(save_held_at_peak(schedule, planned), planned)

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_gradients(self):
        for model, x in (
            layers(),
            (WithDropout(5, 32), torch.randn(16, 32)),
        ):
            right = gradients(model, x, budget=1.0, save=False)
            for budget in (0, 0.1, 0.4):
                found = gradients(model, x, budget=budget)
                self.assertTrue(all(map(torch.equal, found, right)), str(budget))


if __name__ == "__main__":
    run_tests()
