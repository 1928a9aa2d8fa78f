# Owner(s): ["module: functorch"]

import itertools
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.checkpoint import checkpoint

from torch_overlay._functorch._activation_checkpointing.joint_schedule import (
    joint_schedule,
)
from torch_overlay._functorch._activation_checkpointing.roofline import (
    Roofline,
    roofline_of,
)
from torch_overlay._functorch._activation_checkpointing.saved_set import (
    must_save,
    narrowest_places,
    SavedSetSearch,
)


sys.path.insert(0, str(Path(__file__).resolve().parent))
from joint_graphs import calls, joint_graphs, schedule_of


aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, size, inner):
        super().__init__()
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(F.layer_norm(x, x.shape[-1:]))))


class Skips(nn.Module):
    """Every layer reads the results of all before it: nowhere narrow."""

    def __init__(self, layers, size):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(size * (k + 1), size) for k in range(layers)
        )

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, -1)).relu())
        return found[-1]


def stack(layers, size=32, inner=64):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(size, inner) for _ in range(layers)))


def inputs_of(s):
    return [i for i, n in enumerate(s.nodes) if n.name.startswith("primals")]


def search_of(s, plains=()):
    return SavedSetSearch(s, must_save(s, inputs_of(s), []), plains)


class TestRoofline(TestCase):
    def properties(self, **changed):
        found = dict(
            major=9,
            minor=0,
            clock_rate=1_980_000,
            multi_processor_count=132,
            memory_clock_rate=3_201_000,
            memory_bus_width=6144,
        )
        return mock.Mock(**{**found, **changed})

    def roofline(self, **changed):
        there = mock.patch.object(torch.cuda, "is_available", lambda: True)
        properties = mock.patch.object(
            torch.cuda, "get_device_properties", lambda d: self.properties(**changed)
        )
        with there, properties:
            return roofline_of(torch.device("cuda", 0))

    def test_rates_of_a_device(self):
        """An H200: 4.9 TB/s, 1070 TFLOP/s at its highest clock, 67 in float32."""
        found = self.roofline()
        self.assertEqual(found.bytes_per_second, 2 * 3.201e9 * 6144 / 8)
        self.assertEqual(found.flops_per_second(torch.bfloat16), 132 * 1.98e9 * 4096)
        matmul = torch.backends.cuda.matmul
        plain = matmul.fp32_precision
        for precision, rate in (("ieee", 132 * 1.98e9 * 256), ("tf32", found.half / 2)):
            try:
                matmul.fp32_precision = precision
                self.assertEqual(found.flops_per_second(torch.float32), rate)
            finally:
                matmul.fp32_precision = plain

    def test_what_is_not_known(self):
        for changed in ({"major": 7}, {"clock_rate": 0}, {"memory_clock_rate": 0}):
            self.assertEqual(self.roofline(**changed), Roofline())
        self.assertEqual(roofline_of(None), Roofline())

    def test_the_longer_of_the_two(self):
        def program(x, w):
            return torch.tanh(x @ w) @ w.t()

        for rows in (1, 4096):
            x = torch.randn(rows, 256, requires_grad=True)
            s = schedule_of(program, x, torch.randn(256, 256))
            product = s.nodes[calls(s, aten.mm)[0]]
            roofline = Roofline(bytes_per_second=1e3, half=1e6, single=1e5)
            flops, moved = 2 * rows * 256**2, 4 * (2 * rows * 256 + 256**2)
            self.assertEqual(roofline.seconds(product), max(flops / 1e5, moved / 1e3))


class TestSavedSet(TestCase):
    def test_places_of_a_residual_stream(self):
        s = schedule_of(stack(5), torch.randn(64, 32))
        adds = calls(s, aten.add)[-5:]
        # The first is as large as the product before it, the last is returned.
        for add in adds[1:4]:
            self.assertIn(s.values[add], narrowest_places(s))

    def test_what_lives_all_along_makes_no_place_wide(self):
        layers = stack(6)

        def program(x, y):
            first = layers[0](x)
            for layer in layers[1:]:
                x = layer(x) + first
            return x + y

        s = schedule_of(program, torch.randn(64, 32), torch.randn(64, 32))
        self.assertGreaterEqual(sum(len(p) == 1 for p in narrowest_places(s)), 4)

    def test_no_place_is_narrow(self):
        s = schedule_of(Skips(9, 32), torch.randn(64, 32))
        # What lives over more than half of the forward is left out.
        self.assertEqual([len(p) for p in narrowest_places(s)][4:8], [2, 3, 4, 5])

    def test_results_of_one_operator_are_one_candidate(self):
        def program(x, w):
            values, places = (x @ w).topk(16)
            return (values * places).exp() @ w[:16]

        x = torch.randn(64, 32, requires_grad=True)
        search = search_of(schedule_of(program, x, torch.randn(32, 32)))
        (topk,) = calls(search.s, aten.topk)
        parts = set(search.s.parts(topk))
        self.assertEqual(len(parts), 2)
        together = [i for i in search.items if parts & set(i.nodes)]
        self.assertEqual([set(i.nodes) for i in together], [parts])

    def test_a_user_decides(self):
        model, x = stack(4), torch.randn(64, 32, requires_grad=True)

        def run(x):
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        search = search_of(schedule_of(run, x))
        for item in search.items:
            for i in item.nodes:
                self.assertIsNone(search.s.nodes[i].meta.get("recompute"))

    def test_what_must_not_run_twice_is_saved(self):
        def program(x, w):
            return (F.dropout(x @ w, 0.5).tanh() @ w).relu()

        x = torch.randn(64, 32, requires_grad=True)
        s = schedule_of(program, x, torch.randn(32, 32))
        must = must_save(s, inputs_of(s), [])
        drawn = {
            part
            for i, n in enumerate(s.nodes)
            if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
            for part in s.parts(i)
        }
        self.assertTrue(drawn)
        again = s.emitted(s.backward, s.values_of(must))
        self.assertFalse(drawn & set(again))

    def test_a_plan_keeps_to_its_limit_and_falls_in_order(self):
        search = search_of(schedule_of(stack(12), torch.randn(1024, 32)))
        lowest = search.look(search.lowest()).heights[0]
        everything = search.look(tuple(range(len(search.items))))
        highest = everything.heights[0]
        self.assertLess(2 * lowest, highest)
        works, peaks = [], []
        for part in (1, 0.8, 0.6, 0.4, 0.2, 0.1, 0):
            limit = lowest + int(part * (highest - lowest))
            look = search.look(search.plan(limit))
            self.assertLessEqual(look.heights[0], limit)
            works.append(look.work)
            peaks.append(look.heights[0])
        self.assertLessEqual(works[0], everything.work)
        self.assertEqual(works, sorted(works))
        self.assertEqual(peaks, sorted(peaks, reverse=True))

    def test_against_every_plan(self):
        """Least work within each limit, and the lowest peak, of all subsets."""

        def wide(x, w):
            for _ in range(2):
                x = x + torch.tanh(F.layer_norm(x, x.shape[-1:]) @ w) @ w.t()
            return x.exp().sum(-1)

        def uneven(x, w):
            a = torch.tanh(x @ w)
            b = torch.tanh(a @ w.t()[:, :8])
            return torch.tanh(b @ w[:8]) @ a.t()

        x = torch.randn(64, 32, requires_grad=True)
        w = torch.randn(32, 128, requires_grad=True)
        for program in (wide, uneven):
            search = search_of(schedule_of(program, x, w))
            items = range(len(search.items))
            self.assertGreater(len(items), 3)
            self.assertLess(len(items), 12)
            every = [
                search.look(kept)
                for size in range(len(items) + 1)
                for kept in itertools.combinations(items, size)
            ]
            lowest = min(look.heights[0] for look in every)
            self.assertEqual(search.look(search.lowest()).heights[0], lowest)
            for limit in sorted({look.heights[0] for look in every}):
                least = min(k.work for k in every if k.heights[0] <= limit)
                found = search.look(search.plan(limit))
                self.assertLessEqual(found.heights[0], limit)
                self.assertLessEqual(found.work, least, f"{program} at {limit}")

    def test_plain_choices_are_candidates(self):
        model, x = stack(3), torch.randn(64, 32)
        ((graph, info),) = joint_graphs(model, x)
        s = joint_schedule(graph, info)
        norms = [i for i in s.forward if s.nodes[i].name.startswith("tanh")]
        known = {i for item in search_of(s).items for i in item.nodes}
        self.assertFalse(known & set(norms))
        known = {i for item in search_of(s, [norms]).items for i in item.nodes}
        self.assertTrue(set(norms) <= known)

    def test_nothing_to_choose(self):
        x = torch.randn(8, requires_grad=True)
        search = search_of(schedule_of(lambda x: x.sin().sum(), x))
        self.assertEqual(search.nodes(search.plan(0)), search.must)


if __name__ == "__main__":
    run_tests()
