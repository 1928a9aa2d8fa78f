# Owner(s): ["module: functorch"]
import itertools

from torch._functorch._activation_checkpointing.graph_info_provider import (
    GraphInfoProvider,
)
from torch._functorch._activation_checkpointing.knapsack_evaluator import (
    KnapsackEvaluator,
)
from torch.testing._internal.common_utils import run_tests, TestCase

import torch_overlay  # overlay only


class TestEvaluatorSavedNodes(TestCase):
    @torch_overlay.applied("knapsack")  # overlay only
    def test_peak_of_a_chain(self):
        names = [f"node{i}" for i in range(1, 6)]
        chain = KnapsackEvaluator(
            GraphInfoProvider(
                names,
                list(itertools.pairwise(names)),
                names,
                all_node_runtimes=dict.fromkeys(names, 1.0),
                all_node_memories=dict.fromkeys(names, 0.2),
            )
        )
        for saved, right in (
            ((), 1.0),
            ((1,), 1.0),
            ((2,), 0.8),
            ((3,), 0.6),
            ((4,), 0.6),
            ((5,), 0.8),
            ((2, 4), 0.6),
            ((1, 3, 5), 0.6),
        ):
            indices = [i - 1 for i in saved]
            rest = [i for i in range(5) if i not in indices]
            found = chain.evaluate_knapsack_output(indices, rest, True)
            self.assertEqual(found["peak_memory"], right)


if __name__ == "__main__":
    run_tests()
