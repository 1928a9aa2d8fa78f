# Owner(s): ["module: functorch"]

import itertools
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.checkpoint import checkpoint

import torch_overlay  # overlay only
from torch_overlay._functorch._activation_checkpointing import narrow_cuts
from torch_overlay._functorch._activation_checkpointing.graph_storage import (
    graph_storages,
)
from torch_overlay._functorch._activation_checkpointing.joint_schedule import (
    JointSchedule,
)


BUDGETS = (0, 0.05, 0.2, 0.8)


class Block(nn.Module):
    def __init__(self, size, inner):
        super().__init__()
        self.norm = nn.RMSNorm(size)
        self.gate = nn.Linear(size, inner, bias=False)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x):
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


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


class WithDropout(nn.Module):
    def __init__(self, layers, size):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(layer(F.layer_norm(x, x.shape[-1:])), 0.3)
        return x


def stack(layers=6, size=32, inner=64):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(size, inner) for _ in range(layers)))


def live_peak_bytes(graph):
    """Peak of a backward's live storages, parameters not counted."""
    storages = graph_storages(graph)
    nodes = list(graph.nodes)
    last, first = {}, {}
    for k, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last.update(dict.fromkeys(storages.of_node[source], k))
    for k, node in enumerate(nodes):
        if not node.name.startswith("primals"):
            for v in storages.of_node[node]:
                first.setdefault(v, 0 if node.op == "placeholder" else k)
    steps = [0] * (len(nodes) + 1)
    for v, k in first.items():
        steps[k] += storages.size_bytes[v]
        steps[max(last.get(v, k), k) + 1] -= storages.size_bytes[v]
    return max(itertools.accumulate(steps))


def settings(budget, save):
    return functorch_config.patch(
        activation_memory_budget=budget, save_narrow_cuts=save
    )


def partitioned(model, *inputs, budget, save=True):
    """Forward and backward that the partitioner makes of a model, and its schedule."""
    found = []

    def partition(joint, joint_inputs, **kwargs):
        graphs = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
        found.append(graphs)
        return graphs

    def compiler(gm, inputs):
        return make_boxed_func(gm.forward)

    def read(graph, info):
        found.append(JointSchedule(graph, info))
        return found[-1]

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition
    )
    with (
        settings(budget, save),
        mock.patch.object(narrow_cuts, "JointSchedule", read),
    ):
        torch.compile(model, backend=backend)(*inputs).sum().backward()
    return (*found[-1], found[0])


def gradients(model, *inputs, budget, save=True, backend="aot_eager"):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model.zero_grad()
    with settings(budget, save):
        torch.compile(model, backend=backend)(*inputs).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def matmuls(schedule):
    return [
        i
        for i in schedule.forward
        if schedule.nodes[i].target is torch.ops.aten.mm.default
    ]


def cuts_of(schedule):
    places = narrow_cuts.narrowest_places(schedule)
    return [place for place in places if len(place) == 1]


def all_cuts(schedule):
    return [*schedule.placeholders, *(i for cut in cuts_of(schedule) for i in cut)]


class TestNarrowCuts(TestCase):
    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_peak_at_small_budgets(self):
        model, x = stack(12, 64, 256), torch.randn(2, 64, 64)

        def peak(budget, save):
            graph = partitioned(model, x, budget=budget, save=save)[1].graph
            return live_peak_bytes(graph)

        whole = peak(1.0, False)
        for budget in (0, 0.02):
            self.assertLess(peak(budget, True), 0.7 * whole)
            self.assertGreater(peak(budget, False), whole)

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_cuts_of_a_residual_stream(self):
        _, _, schedule = partitioned(stack(5), torch.randn(2, 16, 32), budget=0)
        cuts = narrow_cuts.narrowest_places(schedule)
        adds = [
            i
            for i in schedule.forward
            if schedule.nodes[i].target is torch.ops.aten.add.Tensor
            and schedule.nodes[i].meta["val"].numel() == 2 * 16 * 32
        ]
        self.assertEqual(len(adds), 5)
        # The first add is made from an input and the product before it.
        for add in adds[1:4]:
            self.assertIn((add,), cuts)

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_no_narrow_place(self):
        model, x = Skips(6, 32), torch.randn(64, 32)
        _, backward, schedule = partitioned(model, x, budget=0.1)
        places = narrow_cuts.narrowest_places(schedule)
        self.assertLess(sum(len(p) == 1 for p in places), 3)
        _, stock, _ = partitioned(model, x, budget=0.1, save=False)
        self.assertLessEqual(
            live_peak_bytes(backward.graph), live_peak_bytes(stock.graph)
        )

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_gradients_are_bitwise_those_of_budget_one(self):
        torch.manual_seed(0)
        for model, x in (
            (stack(), torch.randn(2, 16, 32)),
            (Skips(5, 16), torch.randn(8, 16)),
            (WithDropout(5, 32), torch.randn(16, 32)),
        ):
            right = gradients(model, x, budget=1.0, save=False)
            for budget in BUDGETS:
                found = gradients(model, x, budget=budget)
                self.assertTrue(all(map(torch.equal, found, right)), str(budget))

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_budget_one_and_off_change_nothing(self):
        model, x = stack(), torch.randn(2, 16, 32)
        for budget, save in ((1.0, True), (0.2, False)):
            with mock.patch.object(narrow_cuts, "plan_saved_cuts") as plan:
                gradients(model, x, budget=budget, save=save)
            plan.assert_not_called()

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_checkpointed_values_are_no_cuts(self):
        model, x = stack(5), torch.randn(2, 16, 32, requires_grad=True)

        def run(x):
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        _, _, schedule = partitioned(run, x, budget=0.1)
        for place in narrow_cuts.narrowest_places(schedule):
            for i in place:
                self.assertIsNone(schedule.nodes[i].meta.get("recompute"))

    @torch_overlay.applied("rng", "boundaries")  # overlay only
    def test_dynamic_sizes(self):
        model = stack()
        with settings(0.05, True):
            torch._dynamo.reset()
            run = torch.compile(model, backend="aot_eager", dynamic=True)
            for rows in (2, 3):
                x = torch.randn(rows, 16, 32)
                model.zero_grad()
                run(x).sum().backward()
                found = [p.grad.clone() for p in model.parameters()]
                model.zero_grad()
                model(x).sum().backward()
                for got, want in zip(found, model.parameters(), strict=True):
                    self.assertEqual(got, want.grad)


if __name__ == "__main__":
    run_tests()
