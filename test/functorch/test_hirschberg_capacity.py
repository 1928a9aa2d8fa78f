# Owner(s): ["module: functorch"]
import random

from torch._functorch._activation_checkpointing import knapsack
from torch.testing._internal.common_utils import run_tests, TestCase

import torch_overlay  # overlay only


UNIT = 1e-4


class TestHirschbergCapacity(TestCase):
    @torch_overlay.applied("knapsack")  # overlay only
    def test_within_capacity_and_as_good_as_dp(self):
        rng = random.Random(0)
        for _ in range(300):
            count = rng.randint(2, 8)
            weights = [rng.randint(1, 10) for _ in range(count)]
            runtimes = [float(rng.randint(1, 9)) for _ in range(count)]
            capacity = rng.randint(1, 20)
            args = ([w * UNIT for w in weights], runtimes, capacity * UNIT)
            best, _, _ = knapsack.dp_knapsack(*args)
            found, saved, rest = knapsack.dp_knapsack_sliding_hirschberg(*args)
            self.assertLessEqual(sum(weights[i] for i in saved), capacity)
            self.assertEqual(found, best)
            self.assertEqual(sorted(saved + rest), list(range(count)))


if __name__ == "__main__":
    run_tests()
