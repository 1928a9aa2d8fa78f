# Owner(s): ["module: functorch"]

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_utils import run_tests, TestCase


sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_narrow_cuts import (
    Block,
    cuts_of,
    gradients,
    matmuls,
    partitioned,
    stack,
    WithDropout,
)

import torch_overlay  # overlay only
from torch_overlay._functorch._activation_checkpointing import narrow_cuts
from torch_overlay._functorch._activation_checkpointing.equal_values import (
    equal_values,
    latest_of_equal_values,
)
from torch_overlay._functorch._activation_checkpointing.saved_besides import (
    values_not_to_recompute,
    values_read_expanded,
)
from torch_overlay._functorch._activation_checkpointing.wide_places import (
    plan_wide_places,
)


class Masked(nn.Module):
    """Products with a mask of one head, expanded over all."""

    def __init__(self, heads, size):
        super().__init__()
        self.heads, self.size = heads, size
        self.weight = nn.Parameter(torch.randn(size, size))

    def forward(self, x, bias):
        mask = (bias * 2 + 1).sin().unsqueeze(0).expand(self.heads, -1, -1)
        return torch.baddbmm(mask, x @ self.weight, x).sin()


class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.RMSNorm(size)
        self.out = nn.Linear(size, size, bias=False)

    def forward(self, x):
        n = self.norm(x).unsqueeze(1)
        return x + self.out(F.scaled_dot_product_attention(n, n, n).squeeze(1))


class Lengths(nn.Module):
    """A product over as many rows as each further input has."""

    def __init__(self, size):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(size, size))
        self.outer = nn.Parameter(torch.randn(size, size))

    def forward(self, x, *inputs):
        for rows in inputs:
            places = torch.arange(rows.shape[0], dtype=x.dtype).cos()[:, None]
            product = (places * x.sum(0)) @ self.inner
            x = (x + product.sin().sum(0)) @ self.outer
        return x


class UpAndDown(nn.Module):
    """Results of the way down are kept for the way up."""

    def __init__(self, levels, size):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(size, size) for _ in range(levels))
        self.up = nn.ModuleList(nn.Linear(2 * size, size) for _ in range(levels))

    def forward(self, x):
        kept = []
        for layer in self.down:
            kept.append(x)
            x = layer(x).sin()
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], -1)).sin()
        return x


class TestEqualValues(TestCase):
    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_parts_of_layers(self):
        _, _, schedule = partitioned(stack(4), torch.randn(2, 16, 32), budget=0)
        cuts = [i for cut in cuts_of(schedule) for i in cut]
        numbers = equal_values(schedule, cuts, schedule.forward)
        products = [numbers[i] for i in matmuls(schedule)]
        # gate, up and down of the last two of four layers.
        self.assertEqual(products[6:9], products[9:12])
        self.assertEqual(len(set(products[6:9])), 3)

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_symbolic_sizes_are_told_apart(self):
        for symbolic, kinds in ((False, 1), (True, 5)):
            inputs = [torch.zeros(24) for _ in range(5)]
            for x in inputs if symbolic else ():
                torch._dynamo.mark_dynamic(x, 0)
            x = torch.randn(16, 16, requires_grad=True)
            _, _, schedule = partitioned(Lengths(16), x, *inputs, budget=0)
            products = matmuls(schedule)
            numbers = equal_values(schedule, products[1::2], schedule.forward)
            self.assertEqual(len({numbers[i] for i in products[::2]}), kinds)

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_as_many_from_the_latest_layers(self):
        _, _, schedule = partitioned(stack(4), torch.randn(2, 16, 32), budget=0)
        cuts = cuts_of(schedule)
        gates, ups = matmuls(schedule)[::3], matmuls(schedule)[1::3]
        saved = [gates[2], ups[2]]
        found = latest_of_equal_values(schedule, saved, cuts)
        self.assertEqual(sorted(found), sorted([gates[3], ups[3]]))
        inputs = schedule.placeholders
        self.assertEqual(latest_of_equal_values(schedule, inputs, cuts), inputs)

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_results_of_one_operator_stay_together(self):
        model = nn.Sequential(*(Attention(32) for _ in range(5)))
        _, _, schedule = partitioned(model, torch.randn(2, 16, 32), budget=0)
        needed = schedule.emitted(schedule.backward, ())
        results = [
            [schedule.number[n] for n in node.users if schedule.number[n] in needed]
            for i, node in enumerate(schedule.nodes)
            if "attention" in str(node.target) and i not in schedule.backward
        ]
        self.assertEqual([len(parts) for parts in results], [2, 2, 2, 2, 2])
        # The result, which the forward reads, and the log-sum-exp, which it does not.
        # The first layer is not like the others: its input has no gradient.
        for layers, latest in (((2, 3), (3, 4)), ((0, 2), (0, 4))):
            saved = [k for layer in layers for k in results[layer]]
            found = latest_of_equal_values(schedule, saved, cuts_of(schedule))
            wanted = [k for layer in latest for k in results[layer]]
            self.assertEqual(sorted(found), sorted(wanted))

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_policies_stay(self):
        _, _, schedule = partitioned(stack(4), torch.randn(2, 16, 32), budget=0)
        gates = matmuls(schedule)[::3]
        policy = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
        schedule.nodes[gates[0]].meta["recompute"] = policy
        found = latest_of_equal_values(schedule, gates[:1], cuts_of(schedule))
        self.assertEqual(found, gates[:1])

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_random_values_are_not_recomputed_anew(self):
        model, x = WithDropout(4, 32), torch.randn(16, 32)
        _, _, schedule = partitioned(model, x, budget=0.5)
        draws = [
            i
            for i in schedule.forward
            if torch.Tag.nondeterministic_seeded
            in getattr(schedule.nodes[i].target, "tags", ())
        ]
        self.assertEqual(len(draws), 4)
        found = values_not_to_recompute(schedule, schedule.forward, [])
        again = schedule.emitted(schedule.backward, found)
        self.assertEqual([i for i in draws if i in again], [])

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_gradients(self):
        for model, x in (
            (UpAndDown(5, 32), torch.randn(16, 32)),
            (WithDropout(5, 32), torch.randn(16, 32)),
            (nn.Sequential(Block(32, 64), UpAndDown(3, 32)), torch.randn(16, 32)),
        ):
            right = gradients(model, x, budget=1.0, save=False)
            for budget in (0, 0.1, 0.3, 0.6):
                found = gradients(model, x, budget=budget)
                self.assertTrue(all(map(torch.equal, found, right)), str(budget))


class TestSavedBesides(TestCase):
    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_expanded_mask_is_saved(self):
        model, x, bias = Masked(4, 16), torch.randn(4, 16, 16), torch.randn(16, 16)
        _, _, schedule = partitioned(model, x, bias, budget=0)
        sines = [n for n in schedule.nodes if n.target is torch.ops.aten.sin.default]
        mask = sines[0]
        self.assertEqual(mask.meta["val"].shape, (16, 16))
        self.assertEqual(values_read_expanded(schedule, []), [schedule.number[mask]])
        self.assertEqual(values_read_expanded(schedule, [schedule.number[mask]]), [])


class TestWidePlaces(TestCase):
    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_values_kept_for_the_way_up(self):
        model, x = UpAndDown(5, 64), torch.randn(256, 64)
        _, _, schedule = partitioned(model, x, budget=0)
        places = narrow_cuts.narrowest_places(schedule)
        self.assertGreater(max(map(len, places)), 2)
        planned = plan_wide_places(schedule, [], [], places)
        self.assertLess(schedule.peak_bytes(planned), 0.9 * schedule.peak_bytes([]))

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_nothing_to_do_where_cuts_are_narrow(self):
        _, _, schedule = partitioned(stack(8), torch.randn(2, 16, 32), budget=0)
        places = narrow_cuts.narrowest_places(schedule)
        planned = [1, 2]
        self.assertIs(plan_wide_places(schedule, [], planned, places), planned)


if __name__ == "__main__":
    run_tests()
