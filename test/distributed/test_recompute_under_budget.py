# Owner(s): ["oncall: distributed"]
import os
import tempfile

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal.common_utils import run_tests, TestCase

import torch_overlay  # overlay only


BUDGETS = (0, 0.01, 0.5)


def partitioned(fn, budget, x):
    """Names saved for the backward, and the collectives that the backward runs."""
    found = []

    def keep(gm, _):
        found.append(gm)
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
    )
    with functorch_config.patch(activation_memory_budget=budget):
        out = torch.compile(fn, backend=backend, fullgraph=True)(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
    saved = [n.name for n in found[1].graph.nodes if n.op == "placeholder"]
    collectives = [
        n.target._schema.name.split("::")[1]
        for n in found[1].graph.nodes
        if getattr(n.target, "namespace", None) == "_c10d_functional"
    ]
    return saved, collectives, grad


def gathered(x):
    y = funcol.all_gather_tensor_autograd(x.sin(), 0, dist.group.WORLD)
    return F.dropout(y.cos(), 0.5).sin()


def run_rank(rank, world_size, folder):
    torch_overlay.apply("rng")  # overlay only
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        found = []
        for budget in (*BUDGETS, 1.0):
            torch.manual_seed(rank)
            x = torch.arange(64.0).view(8, 8).add(rank).requires_grad_()
            found.append(partitioned(gathered, budget, x))
        torch.save(found, os.path.join(folder, f"rank{rank}"))
    finally:
        dist.destroy_process_group()


class TestRecomputeUnderBudget(TestCase):
    def ranks(self, world_size):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(
                run_rank, (world_size, folder), nprocs=world_size
            )
            return [
                torch.load(os.path.join(folder, f"rank{rank}"))
                for rank in range(world_size)
            ]

    def test_collectives_run_once(self):
        for world_size in (1, 2):
            ranks = self.ranks(world_size)
            for i in range(len(BUDGETS)):
                names, collectives, _ = ranks[0][i]
                self.assertEqual(collectives, ["reduce_scatter_tensor", "wait_tensor"])
                for found in ranks:
                    self.assertEqual(found[i][:2], (names, collectives))
            for found in ranks:
                for _, _, grad in found[:-1]:
                    self.assertEqual(grad, found[-1][2])


if __name__ == "__main__":
    run_tests()
