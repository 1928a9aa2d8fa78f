# Owner(s): ["module: functorch"]

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_utils import run_tests, TestCase


sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_narrow_cuts import (
    all_cuts,
    cuts_of,
    gradients,
    partitioned,
    stack,
    WithDropout,
)

import torch_overlay  # overlay only
from torch_overlay._functorch._activation_checkpointing.recompute_cost import (
    node_flops,
)
from torch_overlay._functorch._activation_checkpointing.traded_cuts import trade_cuts


class Layer(nn.Module):
    """Attention and a product, each added to its input."""

    def __init__(self, size):
        super().__init__()
        self.norm = nn.RMSNorm(size)
        self.out = nn.Linear(size, size, bias=False)
        self.last = nn.Linear(size, size, bias=False)

    def forward(self, x):
        n = self.norm(x).unsqueeze(1)
        x = x + self.out(F.scaled_dot_product_attention(n, n, n).squeeze(1))
        return x + self.last(self.norm(x).sin())


class Words(nn.Module):
    """A residual stream that begins with one gather."""

    def __init__(self, layers, size):
        super().__init__()
        self.words = nn.Embedding(16, size)
        self.layers = nn.Sequential(*(Layer(size) for _ in range(layers)))

    def forward(self, words):
        return self.layers(self.words(words))


def words_model(layers=4, size=32, length=1024):
    torch.manual_seed(0)
    return Words(layers, size), torch.randint(16, (2, length))


def read_bytes(schedule, saved):
    order = schedule.emitted(schedule.backward, saved)
    read = {a for i in order for a in schedule.inputs[i]}
    kept = schedule.storages(i for i in saved if i in read) - schedule.resident
    return sum(schedule.size_bytes[v] for v in kept)


def named(schedule, word):
    return [i for i in schedule.forward if word in str(schedule.nodes[i].target)]


class TestTradedCuts(TestCase):
    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_embedding_makes_room_for_attention(self):
        _, _, schedule = partitioned(*words_model(), budget=0)
        planned = all_cuts(schedule)
        (words,) = named(schedule, "embedding")
        self.assertIn(words, planned)
        traded = trade_cuts(schedule, planned, cuts_of(schedule))
        self.assertNotIn(words, traded)

        def attentions(saved):
            again = schedule.emitted(schedule.backward, saved)
            return len([i for i in named(schedule, "attention") if i in again])

        self.assertLess(attentions(traded), attentions(planned))
        self.assertLessEqual(
            read_bytes(schedule, traded), 1.1 * read_bytes(schedule, planned)
        )
        self.assertLessEqual(
            schedule.peak_bytes(traded), 1.005 * schedule.peak_bytes(planned)
        )

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_partitioner_trades(self):
        _, backward, schedule = partitioned(*words_model(), budget=0)
        (words,) = named(schedule, "embedding")
        name = schedule.nodes[words].name
        given = [n.name for n in backward.graph.find_nodes(op="placeholder")]
        self.assertNotIn(name, given)
        self.assertIn(name, [n.name for n in backward.graph.nodes])

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_a_value_that_takes_no_memory_yet_is_no_cheap_source(self):
        _, _, schedule = partitioned(*words_model(), budget=0)
        products = named(schedule, "mm.default")
        planned = [*all_cuts(schedule), *products[1::2]]  # those behind cuts
        before = read_bytes(schedule, planned)
        traded = trade_cuts(schedule, planned, cuts_of(schedule))
        self.assertNotEqual(sorted(traded), sorted(planned))
        self.assertLessEqual(read_bytes(schedule, traded), 1.1 * before)

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_what_must_not_run_again_stays(self):
        _, _, schedule = partitioned(*words_model(), budget=0)
        policy = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
        (words,) = named(schedule, "embedding")
        schedule.nodes[words].meta["recompute"] = policy
        planned = all_cuts(schedule) + [words]
        self.assertIn(words, trade_cuts(schedule, planned, [(words,)]))

        model, x = WithDropout(4, 32), torch.randn(16, 32)
        _, _, schedule = partitioned(model, x, budget=0)
        cuts = cuts_of(schedule)
        planned = all_cuts(schedule)
        self.assertEqual(trade_cuts(schedule, planned, cuts), planned)

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_nothing_to_trade(self):
        _, _, schedule = partitioned(stack(4), torch.randn(2, 16, 32), budget=0)
        planned = all_cuts(schedule)
        self.assertEqual(trade_cuts(schedule, planned, cuts_of(schedule)), planned)
        self.assertEqual(trade_cuts(schedule, [], []), [])

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_less_work_and_the_same_gradients(self):
        model, words = words_model()
        right = gradients(model, words, budget=1.0, save=False)
        for budget in (0, 0.05, 0.3):
            found = gradients(model, words, budget=budget)
            self.assertTrue(all(map(torch.equal, found, right)), str(budget))
        _, _, schedule = partitioned(model, words, budget=0)
        planned = all_cuts(schedule)
        traded = trade_cuts(schedule, planned, cuts_of(schedule))

        def flops(saved):
            order = schedule.emitted(schedule.backward, saved)
            return sum(node_flops(schedule.nodes[i]) for i in order)

        self.assertLess(flops(traded), flops(planned))


if __name__ == "__main__":
    run_tests()
