# Owner(s): ["module: functorch"]

import itertools
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_utils import run_tests, TestCase

import torch_overlay  # overlay only
from torch_overlay._functorch._activation_checkpointing import save_by_peak
from torch_overlay._functorch._activation_checkpointing.graph_storage import (
    graph_storages,
)
from torch_overlay._functorch._activation_checkpointing.save_by_peak import (
    limit_of_budget,
    target_bytes,
)


sys.path.insert(0, str(Path(__file__).resolve().parent))
from joint_graphs import partitioned


class Block(nn.Module):
    def __init__(self, size, inner, p=0.0):
        super().__init__()
        self.norm = nn.RMSNorm(size)
        self.gate = nn.Linear(size, inner, bias=False)
        self.up = nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)
        self.p = p

    def forward(self, x):
        n = self.norm(x)
        y = self.down(F.silu(self.gate(n)) * self.up(n))
        return x + (F.dropout(y, self.p) if self.p else y)


def stack(layers=6, size=32, inner=64, p=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(size, inner, p) for _ in range(layers)))


class WithLoss(nn.Module):
    """A stack and its loss over a vocabulary."""

    def __init__(self, layers=4, size=32, vocabulary=512, dtype=torch.float32):
        super().__init__()
        self.layers = stack(layers, size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.to(dtype)

    def forward(self, x):
        logits = self.head(self.layers(x)).float()
        rows = torch.arange(len(x)) % logits.shape[-1]
        return F.cross_entropy(logits, rows)


class Normalized(nn.Module):
    """Some results of an operator may be saved and others run again."""

    def __init__(self, layers=3, size=32):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(layers))
        self.mixes = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))

    def forward(self, x):
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            y = norm(x)
            x = x + nn.functional.gelu(mix(y)) * y.sigmoid()
        return x


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = stack(3), stack(3)

    def forward(self, x):
        return (self.first(x) * self.second(x.flip(0))).sum(-1)


def settings(budget=1.0, target=None, on=True):
    return functorch_config.patch(
        activation_memory_budget=budget,
        activation_memory_peak_target=target,
        save_by_peak=on,
    )


def plans_of(program, *inputs, **kwargs):
    """Plans that compiling a program leads to, and what was warned of and logged."""
    plans, plain = [], save_by_peak.plan_saved_set

    def plan(*args, **kwargs):
        schedule, plan = plain(*args, **kwargs)
        plans.append(plan)
        return schedule, plan

    with (
        settings(**kwargs),
        mock.patch.object(save_by_peak, "plan_saved_set", plan),
    ):
        graphs = partitioned(program, *inputs)
    return plans, graphs


def live_peaks(forward, backward):
    """Peaks of both graphs' live storages, without those of the program's inputs."""
    storages = graph_storages(forward)
    nodes = forward.find_nodes(op="placeholder")
    given = {v for n in nodes for v in storages.of_node[n]}
    held = {n.name for n in forward.nodes if given & set(storages.of_node[n])}
    return [live_peak_bytes(graph, held) for graph in (forward, backward)]


def live_peak_bytes(graph, held):
    storages = graph_storages(graph)
    nodes = list(graph.nodes)
    last, first = {}, {}
    for k, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last.update(dict.fromkeys(storages.of_node[source], k))
        for v in storages.of_node[node]:
            first.setdefault(v, 0 if node.op == "placeholder" else k)
    steps = [0] * (len(nodes) + 1)
    resident = {
        v
        for n in nodes
        if n.op == "placeholder" and n.name in held
        for v in storages.of_node[n]
    }
    for v, k in first.items():
        if v not in resident:
            steps[k] += storages.size_bytes[v]
            steps[max(last.get(v, k), k) + 1] -= storages.size_bytes[v]
    return max(itertools.accumulate(steps))


def gradients(model, x, backend="aot_eager", **kwargs):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model.zero_grad()
    with settings(**kwargs):
        result = torch.compile(model, backend=backend)(x)
        (result.float().square().sum() if result.dim() else result).backward()
    return [p.grad.clone() for p in model.parameters()]


class TestTarget(TestCase):
    def test_what_is_accepted(self):
        for target, wanted in [
            (None, None),
            (17, 17),
            ("24GB", 24 * 10**9),
            ("22.5GiB", 22.5 * 2**30),
            (" 3 MB ", 3 * 10**6),
            ("7B", 7),
            ("80%", 800),
        ]:
            self.assertEqual(target_bytes(target, 1000), wanted)

    def test_what_is_not(self):
        accepted = "accepted are None, a positive number of bytes, a string with a unit"
        for target in (0, -1, True, 1.5, "24", "24 gigabytes", "0MB", "140%", [1]):
            with self.assertRaisesRegex(RuntimeError, accepted):
                target_bytes(target, 1000)
        with self.assertRaisesRegex(RuntimeError, "runs on no accelerator"):
            target_bytes("80%", None)

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_a_bad_target_names_the_key(self):
        torch._dynamo.reset()
        with (
            settings(target="much"),
            self.assertRaisesRegex(RuntimeError, "activation_memory_peak_target is"),
        ):
            partitioned(stack(1), torch.randn(4, 32))

    def test_limit_of_budget(self):
        self.assertEqual(limit_of_budget(100, 300, 0.5), 200)
        self.assertEqual(limit_of_budget(100, 300, 0), 100)
        self.assertEqual(limit_of_budget(300, 100, 0.5), 300)


class TestSaveByPeak(TestCase):
    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_peak_falls_with_the_budget(self):
        """The miniature of #197838: 16 blocks, whose peak rose below budget 0.1."""
        model, x = stack(16, 64, 256), torch.randn(2, 64, 64)

        def peak(budget, on):
            graphs = plans_of(model, x, budget=budget, on=on)[1]
            return max(live_peaks(*(g.graph for g in graphs)))

        found = [peak(b, True) for b in (0, 0.05, 0.1, 0.2, 0.5, 1)]
        self.assertEqual(found, sorted(found))
        self.assertLess(2 * found[0], found[-1])
        self.assertGreater(peak(0, False), found[-1])

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_a_plan_keeps_to_its_limit(self):
        for model in (stack(8, 32, 128), WithLoss(), TwoTowers()):
            x = torch.randn(512, 32)
            (low,), _ = plans_of(model, x, budget=0)
            self.assertEqual(low.limit_bytes, low.lowest_bytes)
            works = [low.work]
            for part in (0.2, 0.4, 0.6, 0.8, 1):
                room = low.highest_bytes - low.lowest_bytes
                limit = low.lowest_bytes + int(part * room)
                (plan,), _ = plans_of(model, x, target=limit)
                self.assertEqual(plan.limit_bytes, limit)
                self.assertLessEqual(plan.peak_bytes, limit)
                works.append(plan.work)
            self.assertEqual(works, sorted(works, reverse=True))
            self.assertLess(works[-1], works[0])

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_gradients_are_bitwise_those_of_budget_one(self):
        for model in (
            stack(4),
            stack(4, p=0.3),
            WithLoss(2),
            WithLoss(2, dtype=torch.bfloat16),
            TwoTowers(),
        ):
            x = torch.randn(16, 32).to(next(model.parameters()).dtype)
            right = gradients(model, x, on=False)
            for kwargs in (
                {"budget": 0},
                {"budget": 0.3},
                {"target": 1},
                {"target": "60KB"},
            ):
                found = gradients(model, x, **kwargs)
                self.assertTrue(all(map(torch.equal, found, right)), str(kwargs))

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_budget_one_is_plain(self):
        model, x = stack(), torch.randn(2, 16, 32)
        for kwargs in ({"budget": 1}, {"budget": 0.2, "on": False}):
            plans, found = plans_of(model, x, **kwargs)
            self.assertEqual(plans, [])
            _, plain = plans_of(model, x, budget=kwargs["budget"], on=False)
            self.assertEqual(
                [str(g.graph) for g in found], [str(g.graph) for g in plain]
            )

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_as_a_solver(self):
        model, x = stack(), torch.randn(64, 32)
        right = gradients(model, x, on=False)
        key = {"activation_memory_budget_solver": "peak"}
        with functorch_config.patch(key):
            plans, _ = plans_of(model, x, budget=0.2, on=False)
            found = gradients(model, x, budget=0.2, on=False)
        self.assertEqual(plans, plans_of(model, x, budget=0.2)[0])
        self.assertTrue(all(map(torch.equal, found, right)))

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_a_target_that_is_too_low(self):
        model, x = stack(), torch.randn(64, 32)
        torch._logging.warning_once.cache_clear()
        with self.assertLogs(save_by_peak.log, "WARNING") as found:
            (plan,), _ = plans_of(model, x, target="1KB")
        (message,) = found.output
        self.assertIn(
            f"leaves 1000 bytes for a graph's activations and gradients; the lowest "
            f"predicted peak is {plan.peak_bytes} bytes, which is used",
            message,
        )
        self.assertEqual(plan.peak_bytes, plan.lowest_bytes)

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_regions_save_no_more_than_plain_torch(self):
        """Blocks compiled one by one: what each saves is held while others run."""
        blocks, x = stack(6), torch.randn(512, 32)

        def saved_bytes(budget, on):
            held = {}

            def pack(t):
                storage = t.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
                return t

            torch._dynamo.reset()
            compiled = [torch.compile(b, backend="aot_eager") for b in blocks]
            with (
                settings(budget, on=on),
                torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            ):
                y = x * torch.ones(1, requires_grad=True)
                for block in compiled:
                    y = block(y)
                total = sum(held.values())
                y.sum().backward()
            return total

        for budget in (0, 0.2, 0.5):
            self.assertLessEqual(saved_bytes(budget, True), saved_bytes(budget, False))

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_never_more_work_at_the_same_peak(self):
        """Three products side by side, the cheaper one first."""

        def program(pairs):
            return sum((x @ w).cos().sum() for x, w in pairs)

        pairs = [
            [torch.randn(s, requires_grad=True) for s in ((128, k), (k, 128))]
            for k in (16, 64, 256)
        ]

        def peak_and_work(graphs):
            forward, backward = (g.graph for g in graphs)
            nodes = backward.find_nodes(
                op="call_function", target=torch.ops.aten.mm.default
            )
            work = sum(n.args[0].meta["val"].shape[1] for n in nodes)
            return max(live_peaks(forward, backward)), work

        for budget in (0.1, 0.5, 0.7, 0.9, 0.99):
            (plan,), ours = plans_of(program, pairs, budget=budget)
            peak, work = peak_and_work(ours)
            _, plain = plans_of(program, pairs, budget=budget, on=False)
            other, least = peak_and_work(plain)
            self.assertLessEqual(peak, max(other, plan.limit_bytes))
            if peak >= other:
                self.assertLessEqual(work, least)

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_dynamic_sizes(self):
        model = stack(4)
        with settings(0.1):
            torch._dynamo.reset()
            run = torch.compile(model, backend="aot_eager", dynamic=True)
            for rows in (8, 24):
                x = torch.randn(rows, 32)
                model.zero_grad()
                run(x).square().sum().backward()
                found = [p.grad.clone() for p in model.parameters()]
                model.zero_grad()
                model(x).square().sum().backward()
                right = [p.grad for p in model.parameters()]
                self.assertEqual(found, right)

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_text_of_a_plan(self):
        model, x = stack(3), torch.randn(512, 32)
        (plan,), _ = plans_of(model, x, budget=0.2)
        self.assertExpectedInline(
            str(plan),
            """\
saved: 13 input, 4 cut, 10 work
predicted peak 1193984 bytes, limit 1236684, lowest 1083520, at budget 1 1849344
recompute work 0.0008358 ms, 116 plans looked at""",
        )

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_model_is_exact_where_operators_are_kernels(self):
        """Predicted peaks are those of the graphs' live storages, to the byte."""
        for model in (stack(4), WithLoss(), TwoTowers(), Normalized()):
            x = torch.randn(256, 32)
            for budget in (0, 0.2, 0.5, 0.8):
                (plan,), graphs = plans_of(model, x, budget=budget)
                peaks = live_peaks(*(g.graph for g in graphs))
                self.assertEqual(plan.peak_bytes, max(peaks), f"{model} at {budget}")

    @torch_overlay.applied("rng", "peak")  # overlay only
    def test_inductor_generates_kernels(self):
        model, x = stack(3), torch.randn(64, 32)
        seen, plain = [], save_by_peak.joint_schedule

        def schedule(*args):
            seen.append(plain(*args))
            return seen[-1]

        with (
            mock.patch.object(save_by_peak, "joint_schedule", schedule),
            torch._inductor.config.patch(force_disable_caches=True),
        ):
            for backend in ("inductor", "aot_eager"):
                found = gradients(model, x, backend, budget=0.1)
                self.assertEqual(found, gradients(model, x, backend, on=False))
        self.assertEqual([s.generated for s in seen], [True, False])

    def test_processes_agree(self):
        """Two hash seeds lead to one plan."""
        program = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "import torch\n"
            "import torch_overlay; torch_overlay.apply('rng', 'peak')  # overlay only\n"
            "import test_save_by_peak as t\n"
            "for model in (t.stack(5), t.WithLoss(), t.TwoTowers()):\n"
            "    x = torch.randn(256, 32)\n"
            "    for budget in (0, .3, .7):\n"
            "        (plan,), _ = t.plans_of(model, x, budget=budget)\n"
            "        print(repr(plan))\n"
        )
        folder = str(Path(__file__).resolve().parent)
        running = [
            subprocess.Popen(
                [sys.executable, "-c", program, folder],
                env={"PYTHONHASHSEED": seed, "PATH": ""},
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in ("1", "2")
        ]
        first, second = (process.communicate()[0] for process in running)
        self.assertEqual(len(first.splitlines()), 9)
        self.assertEqual(first, second)


if __name__ == "__main__":
    run_tests()
