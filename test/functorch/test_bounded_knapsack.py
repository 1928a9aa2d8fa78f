# Owner(s): ["module: functorch"]
import itertools
import math
import random

import torch
import torch._functorch.config as functorch_config
from torch._functorch import partitioners
from torch._functorch._activation_checkpointing import knapsack
from torch.testing._internal.common_utils import run_tests, TestCase

import torch_overlay  # overlay only
from torch_overlay._functorch._activation_checkpointing import bounded_knapsack


UNIT = 1 / bounded_knapsack.SCALE


def instance(rng, most=8):
    count = rng.randint(1, most)
    weights = [rng.choice((0, *range(1, 11))) for _ in range(count)]
    runtimes = [float(rng.randint(0, 9)) for _ in range(count)]
    return weights, runtimes, rng.randint(0, 20)


def best_by_search(weights, runtimes, capacity):
    return max(
        math.fsum(r for r, t in zip(runtimes, taken, strict=True) if t)
        for taken in itertools.product((False, True), repeat=len(weights))
        if sum(w for w, t in zip(weights, taken, strict=True) if t) <= capacity
    )


class TestBoundedKnapsack(TestCase):
    def check(self, weights, runtimes, capacity):
        args = ([w * UNIT for w in weights], runtimes, capacity * UNIT)
        found, saved, rest = bounded_knapsack.bounded_knapsack(*args)
        self.assertTrue(sum(weights[i] for i in saved) <= capacity, str(args))
        self.assertTrue(sorted(saved + rest) == list(range(len(weights))))
        self.assertTrue(found == math.fsum(runtimes[i] for i in saved))
        return found, args

    def test_random_instances_against_dp(self):
        rng = random.Random(0)
        for _ in range(10000):
            found, args = self.check(*instance(rng, 12))
            best, _, _ = knapsack.dp_knapsack(*args)
            self.assertTrue(found >= best, str(args))

    def test_random_instances_against_search(self):
        rng = random.Random(1)
        for _ in range(500):
            case = instance(rng)
            found, args = self.check(*case)
            self.assertTrue(found == best_by_search(*case), str(args))

    def test_split_problems(self):
        rng = random.Random(2)
        weights = [rng.randint(1, 300) for _ in range(400)]
        runtimes = [float(rng.randint(1, 10**6)) for _ in weights]
        capacity = 9000
        self.assertGreater(len(weights) * capacity, bounded_knapsack._TABLE_CELLS)
        found, args = self.check(weights, runtimes, capacity)
        self.assertEqual(found, knapsack.dp_knapsack(*args)[0])

    def test_real_weights_never_exceed_the_budget(self):
        rng = random.Random(3)
        for _ in range(300):
            count = rng.randint(1, 60)
            memory = [rng.random() / count for _ in range(count)]
            runtimes = [rng.random() for _ in range(count)]
            budget = rng.random()
            _, saved, _ = bounded_knapsack.bounded_knapsack(memory, runtimes, budget)
            self.assertTrue(math.fsum(memory[i] for i in saved) <= budget * (1 + 1e-9))

    def test_what_is_no_instance(self):
        for args, told in (
            (([1.0], [1.0, 2.0], 1.0), "1 memories, 2 runtimes"),
            (([math.nan], [1.0], 1.0), "the memory of item 0 is nan"),
            (([1.0, -1.0], [1.0, 1.0], 1.0), "the memory of item 1 is -1.0"),
            (([1.0], [math.inf], 1.0), "the runtime of item 0 is inf"),
            (([1.0], [1.0], math.nan), "the memory budget is nan"),
        ):
            for solver in (
                bounded_knapsack.bounded_knapsack,
                bounded_knapsack.greedy_knapsack,
            ):
                with self.assertRaisesRegex(ValueError, told):
                    solver(*args)


class TestSolversUnderABudget(TestCase):
    """The solvers that config.activation_memory_budget_solver names."""

    def solve(self, solver, memory, runtimes, budget):
        with functorch_config.patch(activation_memory_budget_solver=solver):
            return partitioners._optimize_runtime_with_given_memory(
                None, memory, runtimes, budget, None, []
            )

    SOLVERS = ("dp", "dp_knapsack_sliding_hirschberg", "greedy", "ilp")

    @torch_overlay.applied("knapsack")  # overlay only
    def test_small_items_are_not_free(self):
        memory, runtimes = [4e-5] * 20000, [1.0] * 20000
        for solver in ("dp", "dp_knapsack_sliding_hirschberg", "greedy"):
            _, saved, _ = self.solve(solver, memory, runtimes, 0.001)
            self.assertLessEqual(math.fsum(memory[i] for i in saved), 0.001)
            self.assertGreaterEqual(len(saved), 10)

    @torch_overlay.applied("knapsack")  # overlay only
    def test_three_items_one_fits(self):
        for solver in ("dp", "dp_knapsack_sliding_hirschberg", "greedy"):
            found, saved, _ = self.solve(solver, [UNIT] * 3, [1.0] * 3, UNIT)
            self.assertEqual((found, len(saved)), (1.0, 1))

    @torch_overlay.applied("knapsack")  # overlay only
    def test_items_without_memory(self):
        memory, runtimes = [0.0, 0.6, 0.6], [1.0, 2.0, 3.0]
        for solver in ("dp", "dp_knapsack_sliding_hirschberg", "greedy"):
            found, saved, _ = self.solve(solver, memory, runtimes, 1.0)
            self.assertEqual((found, sorted(saved)), (4.0, [0, 2]))

    @torch_overlay.applied("knapsack")  # overlay only
    def test_budget_that_is_no_number(self):
        def fn(x):
            for _ in range(4):
                x = (x @ x).sin()
            return x

        x = torch.randn(64, 64, requires_grad=True)
        torch._dynamo.reset()
        with functorch_config.patch(activation_memory_budget=math.nan):
            with self.assertRaisesRegex(Exception, "memory budget is nan"):
                torch.compile(fn, backend="aot_eager")(x).sum().backward()


if __name__ == "__main__":
    run_tests()
