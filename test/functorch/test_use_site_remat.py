# Owner(s): ["module: aotdispatch"]
import dataclasses
import operator
import os
import subprocess
import sys
import textwrap

import torch
import torch._functorch.config as functorch_config
import torch.fx as fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.checkpoint import checkpoint

import torch_overlay  # overlay only
from torch_overlay._functorch._activation_checkpointing.graph_storage import (
    graph_storages,
)
from torch_overlay._functorch._activation_checkpointing.remat_planner import (
    plan_use_site_copies,
    PlanOptions,
)
from torch_overlay._functorch._activation_checkpointing.use_site_remat import (
    analyze_use_site_remat,
    apply_use_site_remat,
    live_peak_bytes,
    print_plan,
    use_site_remat,
)


MIB = 2**20


def mib(*shape):
    """A float32 tensor; 512 x 512 is 1 MiB."""
    return torch.randn(*(shape or (512, 512)))


def traced(fn, *args):
    """Trace to aten; arguments named ``primals*`` count as parameters."""
    return make_fx(fn, tracing_mode="fake")(*args)


def normalized(gm):
    """The graph as text, one call a line, for expect tests."""
    lines = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            lines.append(f"{node.name} = {node.op}")
        elif node.op == "output":
            lines.append(f"return {node.args[0]}")
        else:
            target = node.target
            name = target.__name__ if target is operator.getitem else str(target)
            args = ", ".join(
                [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
            )
            lines.append(f"{node.name} = {name}({args})")
    return "\n".join(lines)


def big_detour(x):
    """Work whose peak is 8 MiB above its input, reduced to a scalar."""
    return x.repeat(4, 1).exp().sum()


class RematCase(TestCase):
    def plan(self, gm, mode="light"):
        analysis = analyze_use_site_remat(gm.graph)
        level = 2 if mode == "all" else 1
        options = PlanOptions(max_level=level)
        return analysis, plan_use_site_copies(analysis.schedule, options)

    def refused(self, gm):
        """Graph and plan of a graph that the pass must leave alone, as text."""
        before = normalized(gm)
        for mode in ("light", "all"):
            self.assertIs(use_site_remat(gm, mode), gm)
            self.assertEqual(normalized(gm), before)
        return f"{before}\n{print_plan(*self.plan(gm, 'all'))}"


class TestRewrite(RematCase):
    def test_value_used_early_and_late(self):
        def f(primals):
            held = primals.sin()
            return big_detour(held), held * primals

        gm = traced(f, mib())
        peak = live_peak_bytes(gm.graph)
        use_site_remat(gm, "light")
        self.assertExpectedInline(
            normalized(gm),
            """\
primals_1 = placeholder
sin = aten.sin.default(primals_1)
repeat = aten.repeat.default(sin, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
sin_remat = aten.sin.default(primals_1)
mul = aten.mul.Tensor(sin_remat, primals_1)
return (sum_1, mul)""",
        )
        # held, repeat and exp; without held afterwards
        self.assertEqual(peak, (1 + 4 + 4) * MIB)
        self.assertEqual(live_peak_bytes(gm.graph), (4 + 4) * MIB)

    def test_cone_of_three(self):
        def f(primals):
            held = primals.sin().cos().exp()
            return big_detour(held), held * primals

        gm = traced(f, mib())
        use_site_remat(gm, "light")
        self.assertExpectedInline(
            normalized(gm),
            """\
primals_1 = placeholder
sin = aten.sin.default(primals_1)
cos = aten.cos.default(sin)
exp = aten.exp.default(cos)
repeat = aten.repeat.default(exp, [4, 1])
exp_1 = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp_1)
sin_remat = aten.sin.default(primals_1)
cos_remat = aten.cos.default(sin_remat)
exp_remat = aten.exp.default(cos_remat)
mul = aten.mul.Tensor(exp_remat, primals_1)
return (sum_1, mul)""",
        )

    def test_tuple_producing_op(self):
        def f(primals):
            out, mean, rstd = torch.ops.aten.native_layer_norm.default(
                primals, [512], None, None, 1e-5
            )
            return big_detour(out), out * primals, mean + rstd

        gm = traced(f, mib())
        use_site_remat(gm, "light")
        self.assertExpectedInline(
            normalized(gm),
            """\
primals_1 = placeholder
native_layer_norm = aten.native_layer_norm.default(primals_1, [512], None, None, 1e-05)
getitem = getitem(native_layer_norm, 0)
getitem_1 = getitem(native_layer_norm, 1)
getitem_2 = getitem(native_layer_norm, 2)
repeat = aten.repeat.default(getitem, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
native_layer_norm_remat = aten.native_layer_norm.default(primals_1, [512], None, None, 1e-05)
getitem_remat = getitem(native_layer_norm_remat, 0)
mul = aten.mul.Tensor(getitem_remat, primals_1)
add = aten.add.Tensor(getitem_1, getitem_2)
return (sum_1, mul, add)""",  # noqa: E501
        )

    def test_view_chain(self):
        def f(primals):
            held = primals.sin()
            view = held.t().unsqueeze(0).expand(1, 512, 512)
            early = big_detour(view[0])
            return early, view * primals, held.view(-1) + 1

        gm = traced(f, mib())
        use_site_remat(gm, "light")
        self.assertExpectedInline(
            normalized(gm),
            """\
primals_1 = placeholder
sin = aten.sin.default(primals_1)
t = aten.t.default(sin)
unsqueeze = aten.unsqueeze.default(t, 0)
expand = aten.expand.default(unsqueeze, [1, 512, 512])
select = aten.select.int(expand, 0, 0)
repeat = aten.repeat.default(select, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
sin_remat = aten.sin.default(primals_1)
t_remat = aten.t.default(sin_remat)
unsqueeze_remat = aten.unsqueeze.default(t_remat, 0)
expand_remat = aten.expand.default(unsqueeze_remat, [1, 512, 512])
mul = aten.mul.Tensor(expand_remat, primals_1)
view_remat = aten.view.default(sin_remat, [-1])
add = aten.add.Tensor(view_remat, 1)
return (sum_1, mul, add)""",
        )

    def test_heavy_only_in_all(self):
        def f(primals, primals_w):
            held = primals @ primals_w
            early = held
            for _ in range(12):
                early = early @ primals_w
            return big_detour(early), held * primals

        args = (mib(), mib())
        gm = traced(f, *args)
        before = normalized(gm)
        use_site_remat(gm, "light")
        self.assertEqual(normalized(gm), before)
        use_site_remat(gm, "all")
        copy = "mm_remat = aten.mm.default(primals_1, primals_w_1)"
        self.assertIn(copy, normalized(gm))

    def test_copies_have_storage_of_their_own(self):
        def f(primals):
            held = primals.sin()
            return big_detour(held), held.t() * primals

        gm = traced(f, mib())
        use_site_remat(gm, "light")
        storages = graph_storages(gm.graph)
        by_name = {n.name: storages.of_node[n] for n in gm.graph.nodes}
        self.assertNotEqual(by_name["sin"], by_name["sin_remat"])
        self.assertEqual(by_name["sin_remat"], by_name["t_remat"])
        copy = next(n for n in gm.graph.nodes if n.name == "t_remat")
        original = copy.meta["val"]
        self.assertEqual(original.stride(), (1, 512))

    def test_result_is_the_same(self):
        def f(primals):
            a = primals.sin()
            b = (a * 2).cos()
            early = big_detour(a) + big_detour(b)
            return early, a * b, b + primals

        x = mib()
        gm = traced(f, x)
        use_site_remat(gm, "light")
        self.assertIn("remat", normalized(gm))
        for got, want in zip(gm(x), f(x), strict=True):
            self.assertTrue(torch.equal(got, want))

    def test_second_run_changes_nothing(self):
        def f(primals):
            held = primals.sin()
            return big_detour(held), held * primals

        gm = use_site_remat(traced(f, mib()), "light")
        once = normalized(gm)
        self.assertEqual(normalized(use_site_remat(gm, "light")), once)

    def test_no_plan_gives_the_same_graph(self):
        gm = traced(lambda primals: primals.sin() * 2, mib())
        code = gm.code
        for mode in ("off", "light", "all"):
            self.assertIs(use_site_remat(gm, mode), gm)
        self.assertEqual(gm.code, code)

    def test_unknown_mode(self):
        gm = traced(lambda x: x.sin(), mib())
        message = "use_site_remat is 'on'; it must be one of 'off', 'light', 'all'"
        with self.assertRaisesRegex(ValueError, message):
            use_site_remat(gm, "on")

    def test_peak_above_the_plan_is_reported(self):
        def f(primals):
            held = primals.sin()
            return big_detour(held), held * primals

        gm = traced(f, mib())
        analysis, plan = self.plan(gm)
        bad = dataclasses.replace(plan, peak_before_bytes=1)
        with self.assertLogs(use_site_remat.__module__, "WARNING") as logs:
            apply_use_site_remat(gm, analysis, bad)
        self.assertIn("raised the predicted peak", logs.output[0])

    def test_symbolic_sizes_are_not_guarded_again(self):
        def f(primals):
            held = primals.sin()
            half = held[:, held.shape[0] // 2 :]
            return big_detour(held), half * 2, held.view(held.shape[0] // 2, 2, -1) + 1

        gm = make_fx(f, tracing_mode="symbolic")(mib(64, 128))
        env = next(iter(gm.graph.nodes)).meta["val"].fake_mode.shape_env
        guards = list(map(str, env.guards))
        use_site_remat(gm, "light")
        self.assertIn("sin_remat", normalized(gm))
        self.assertEqual(list(map(str, env.guards)), guards)


class TestRefusals(RematCase):
    def test_random(self):
        def f(primals):
            held = torch.rand_like(primals)
            return big_detour(held), held * primals

        self.assertExpectedInline(
            self.refused(traced(f, mib())),
            """\
primals_1 = placeholder
rand_like = aten.rand_like.default(primals_1, pin_memory=False)
repeat = aten.repeat.default(rand_like, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
mul = aten.mul.Tensor(rand_like, primals_1)
return (sum_1, mul)
peak 9437184 -> 9437184 bytes, 0 cuts
refused 1: draws random numbers""",
        )

    def test_attention_counts_as_random_only_with_dropout(self):
        q = torch.randn(1, 1, 64, 16)
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        for p in (0.0, 0.1):
            gm = traced(lambda q: op(q, q, q, p)[0], q)
            analysis = analyze_use_site_remat(gm.graph)
            refused = [n.name for n, w in analysis.refusals.items() if "random" in w]
            self.assertEqual(
                bool(refused),
                p > 0 and torch.Tag.nondeterministic_seeded in op.default.tags,
            )

    def test_mutating_op_and_mutated_storage(self):
        def f(primals):
            held = primals.sin()
            early = big_detour(held)
            held.add_(1)
            return early, held * primals

        gm = traced(f, mib())
        self.assertExpectedInline(
            self.refused(gm),
            """\
primals_1 = placeholder
sin = aten.sin.default(primals_1)
repeat = aten.repeat.default(sin, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
add_ = aten.add_.Tensor(sin, 1)
mul = aten.mul.Tensor(add_, primals_1)
return (sum_1, mul)
peak 9437184 -> 9437184 bytes, 0 cuts
refused 1: mutates an argument
refused 3: touches storage that the graph writes""",
        )

    def test_reads_storage_mutated_later(self):
        def f(primals):
            held = primals.sin()
            early = big_detour(held)
            primals.add_(1)
            return early, held * 2

        gm = traced(f, mib())
        self.assertExpectedInline(
            self.refused(gm),
            """\
primals_1 = placeholder
sin = aten.sin.default(primals_1)
repeat = aten.repeat.default(sin, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
add_ = aten.add_.Tensor(primals_1, 1)
mul = aten.mul.Tensor(sin, 2)
return (sum_1, mul)
peak 9437184 -> 9437184 bytes, 0 cuts
refused 1: mutates an argument
refused 1: touches storage that the graph writes""",
        )

    def test_storage_mutated_through_a_view(self):
        def f(primals):
            held = primals.sin()
            early = big_detour(held)
            held.view(-1)[:4].zero_()
            return early, held * primals

        gm = traced(f, mib())
        self.assertExpectedInline(
            self.refused(gm),
            """\
primals_1 = placeholder
sin = aten.sin.default(primals_1)
repeat = aten.repeat.default(sin, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
view = aten.view.default(sin, [-1])
slice_1 = aten.slice.Tensor(view, 0, 0, 4)
zero_ = aten.zero_.default(slice_1)
mul = aten.mul.Tensor(sin, primals_1)
return (sum_1, mul)
peak 9437184 -> 9437184 bytes, 0 cuts
refused 1: mutates an argument
refused 5: touches storage that the graph writes""",
        )

    def test_checkpoint_decision(self):
        def f(primals):
            held = primals.sin()
            return big_detour(held), held * primals

        gm = traced(f, mib())
        (sin,) = [n for n in gm.graph.nodes if n.name == "sin"]
        sin.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.PREFER_SAVE
        self.assertExpectedInline(
            self.refused(gm),
            """\
primals_1 = placeholder
sin = aten.sin.default(primals_1)
repeat = aten.repeat.default(sin, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
mul = aten.mul.Tensor(sin, primals_1)
return (sum_1, mul)
peak 9437184 -> 9437184 bytes, 0 cuts
refused 1: carries a user's checkpoint decision""",
        )

    def test_unknown_custom_op(self):
        with torch.library._scoped_library("use_site_test", "FRAGMENT") as lib:
            lib.define("twice(Tensor x) -> Tensor")
            lib.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

            def f(primals):
                held = torch.ops.use_site_test.twice(primals)
                return big_detour(held), held * primals

            gm = traced(f, mib())
            self.assertExpectedInline(
                self.refused(gm),
                """\
primals_1 = placeholder
twice = use_site_test.twice.default(primals_1)
repeat = aten.repeat.default(twice, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
mul = aten.mul.Tensor(twice, primals_1)
return (sum_1, mul)
peak 9437184 -> 9437184 bytes, 0 cuts
refused 1: is a custom operator, which may draw random numbers inside""",
            )

    def test_collective(self):
        def f(primals):
            held = primals.sin()
            return big_detour(held), held * primals

        gm = traced(f, mib())
        (sin,) = [n for n in gm.graph.nodes if n.name == "sin"]
        sin.target = torch.ops._c10d_functional.all_reduce.default
        sin.args = (*sin.args, "sum", "0")
        self.assertExpectedInline(
            self.refused(gm),
            """\
primals_1 = placeholder
sin = _c10d_functional.all_reduce.default(primals_1, sum, 0)
repeat = aten.repeat.default(sin, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
mul = aten.mul.Tensor(sin, primals_1)
return (sum_1, mul)
peak 9437184 -> 9437184 bytes, 0 cuts
refused 1: is a collective""",
        )

    def test_higher_order_op(self):
        def f(primals):
            branches = (lambda x: (x.sin(),), lambda x: (x.cos(),))
            held = torch.cond(primals.sum() > 0, *branches, (primals,))[0]
            return big_detour(held), held * primals

        gm = traced(f, mib())
        self.assertExpectedInline(
            self.refused(gm),
            """\
primals_1 = placeholder
sum_1 = aten.sum.default(primals_1)
gt = aten.gt.Scalar(sum_1, 0)
true_graph_0 = get_attr
false_graph_0 = get_attr
cond = cond(gt, true_graph_0, false_graph_0, (primals_1,))
getitem = getitem(cond, 0)
repeat = aten.repeat.default(getitem, [4, 1])
exp = aten.exp.default(repeat)
sum_2 = aten.sum.default(exp)
mul = aten.mul.Tensor(getitem, primals_1)
return (sum_2, mul)
peak 9437184 -> 9437184 bytes, 0 cuts
refused 1: is a higher-order operator""",
        )

    def test_conjugate_view(self):
        def f(primals):
            held = (primals * 2j).conj()
            return big_detour(held.abs()), held * primals

        self.assertExpectedInline(
            self.refused(traced(f, mib())),
            """\
primals_1 = placeholder
mul = aten.mul.Tensor(primals_1, 2j)
_conj = aten._conj.default(mul)
clone = aten.clone.default(_conj)
abs_1 = aten.abs.default(clone)
repeat = aten.repeat.default(abs_1, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
clone_1 = aten.clone.default(_conj)
mul_1 = aten.mul.Tensor(clone_1, primals_1)
return (sum_1, mul_1)
peak 10485760 -> 10485760 bytes, 0 cuts
refused 1: is a conjugate or negative view""",
        )

    def test_result_on_storage_of_two_arguments(self):
        graph = fx.Graph()
        x, y = graph.placeholder("primals_1"), graph.placeholder("primals_2")
        both = graph.call_function(torch.ops.aten.broadcast_tensors.default, ([x, y],))
        first = graph.call_function(operator.getitem, (both, 0))
        graph.output((first,))
        x.meta["val"], y.meta["val"] = mib(), mib()
        both.meta["val"] = [x.meta["val"], y.meta["val"]]
        first.meta["val"] = x.meta["val"]
        schedule = analyze_use_site_remat(graph).schedule
        self.assertEqual(schedule.cuttable, (False, False))

    def test_output_is_kept(self):
        def f(primals):
            held = primals.sin()
            return big_detour(held), held

        gm = traced(f, mib())
        self.assertExpectedInline(
            self.refused(gm),
            """\
primals_1 = placeholder
sin = aten.sin.default(primals_1)
repeat = aten.repeat.default(sin, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
return (sum_1, sin)
peak 9437184 -> 9437184 bytes, 0 cuts""",
        )

    def test_dead_leaf(self):
        # x is not a parameter: it dies after sin, and its life is not prolonged.
        def f(x, primals):
            held = x.sin()
            return big_detour(held), held * primals

        gm = traced(f, mib(), mib())
        self.assertExpectedInline(
            self.refused(gm),
            """\
x_1 = placeholder
primals_1 = placeholder
sin = aten.sin.default(x_1)
repeat = aten.repeat.default(sin, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
mul = aten.mul.Tensor(sin, primals_1)
return (sum_1, mul)
peak 9437184 -> 9437184 bytes, 0 cuts""",
        )

    def test_mask_expanded_for_an_opaque_kernel(self):
        # Attention would have the copied mask written out at its expanded size.
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

        def f(primals, primals_q):
            mask = primals.sin().view(1, 1, 512, 512)
            early = big_detour(mask.view(512, 512))
            expanded = mask.expand(1, 8, 512, 512)
            out = op(primals_q, primals_q, primals_q, attn_mask=expanded)[0]
            return early, out

        gm = traced(f, mib(), torch.randn(1, 8, 512, 16))
        self.assertExpectedInline(
            self.refused(gm),
            """\
primals_1 = placeholder
primals_q_1 = placeholder
sin = aten.sin.default(primals_1)
view = aten.view.default(sin, [1, 1, 512, 512])
view_1 = aten.view.default(view, [512, 512])
repeat = aten.repeat.default(view_1, [4, 1])
exp = aten.exp.default(repeat)
sum_1 = aten.sum.default(exp)
expand = aten.expand.default(view, [1, 8, 512, 512])
_scaled_dot_product_flash_attention_for_cpu = aten._scaled_dot_product_flash_attention_for_cpu.default(primals_q_1, primals_q_1, primals_q_1, attn_mask=expand)
getitem = getitem(_scaled_dot_product_flash_attention_for_cpu, 0)
getitem_1 = getitem(_scaled_dot_product_flash_attention_for_cpu, 1)
return (sum_1, getitem)
peak 9437184 -> 9437184 bytes, 0 cuts""",  # noqa: E501
        )


class Block(torch.nn.Module):
    """``x + down(silu(gate(n)) * up(n))``; n is the RMS norm of x."""

    def __init__(self, width=64, inter=256):
        super().__init__()
        self.norm = torch.nn.RMSNorm(width)
        self.gate = torch.nn.Linear(width, inter, bias=False)
        self.up = torch.nn.Linear(width, inter, bias=False)
        self.down = torch.nn.Linear(inter, width, bias=False)

    def forward(self, x):
        n = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(n)) * self.up(n))


class TestPartitioned(TestCase):
    """Through AOTAutograd, switched by the config key."""

    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.model = torch.nn.Sequential(*[Block() for _ in range(6)])
        self.x = torch.randn(2, 64, 64)

    @torch_overlay.applied("remat=off")  # overlay only
    def run_once(self, fn=None, x=None, backend=None, dynamic=None, mode="off"):
        """Gradients, backward peaks and graphs of one compiled step under budget 0."""
        with functorch_config.patch(use_site_remat=mode):
            return self.step(fn, x, backend, dynamic)

    def step(self, fn=None, x=None, backend=None, dynamic=None):
        peaks, graphs = [], []

        def nop(gm, inputs):
            from functorch.compile import make_boxed_func

            return make_boxed_func(gm.forward)

        def backward(gm, inputs):
            peaks.append(live_peak_bytes(gm.graph))
            graphs.append(normalized(gm))
            return nop(gm, inputs)

        backend = backend or aot_autograd(
            fw_compiler=nop,
            bw_compiler=backward,
            partition_fn=min_cut_rematerialization_partition,
        )
        torch._dynamo.reset()
        self.model.zero_grad()
        x = (self.x if x is None else x).clone().requires_grad_()
        with functorch_config.patch(activation_memory_budget=0.0):
            fn = torch.compile(fn or self.model, backend=backend, dynamic=dynamic)
            fn(x).square().sum().backward()
        grads = [x.grad, *(p.grad for p in self.model.parameters())]
        return [g.clone() for g in grads], peaks, graphs

    def assertBitwise(self, got, want):
        for g, w in zip(got, want, strict=True):
            self.assertTrue(torch.equal(g, w))

    def test_peak_falls_and_gradients_stay(self):
        grads, peaks, _ = self.run_once()
        found = [peaks[0]]
        for mode in ("light", "all"):
            again, after, graphs = self.run_once(mode=mode)
            self.assertBitwise(again, grads)
            self.assertIn("_remat", graphs[0])
            found.append(after[0])
        self.assertLess(found[1], 0.8 * found[0])
        self.assertLess(found[2], found[1])

    # overlay only: begin
    def test_off_is_plain(self):
        self.assertEqual(self.run_once()[2], self.step()[2])

    # overlay only: end
    def test_saved_set_is_unchanged(self):
        def saved(text):
            return [n for n in text.splitlines() if n.endswith("= placeholder")]

        _, _, plain = self.run_once()
        again = self.run_once(mode="all")[2]
        self.assertEqual(saved(again[0]), saved(plain[0]))

    def test_inductor_and_aot_eager(self):
        for backend in ("aot_eager", "inductor"):
            grads = self.run_once(backend=backend)[0]
            again = self.run_once(backend=backend, mode="all")[0]
            if backend == "aot_eager":
                self.assertBitwise(again, grads)
            else:
                self.assertEqual(again, grads, atol=1e-6, rtol=1e-5)

    def test_dynamic_shapes(self):
        for batch in (3, 5):
            x = torch.randn(batch, 64, 64)
            grads = self.run_once(x=x, dynamic=True)[0]
            again, _, graphs = self.run_once(x=x, dynamic=True, mode="all")
            self.assertIn("_remat", graphs[0])
            self.assertBitwise(again, grads)

    def test_graph_break_gives_two_graphs(self):
        def f(x):
            half = self.model[:3](x)
            torch._dynamo.graph_break()
            return self.model[3:](half)

        grads = self.run_once(f)[0]
        again, _, graphs = self.run_once(f, mode="all")
        self.assertEqual(len(graphs), 2)
        self.assertTrue(all("_remat" in g for g in graphs))
        self.assertBitwise(again, grads)

    def test_checkpointed_regions_are_left_alone(self):
        def f(x):
            for block in self.model:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        grads, _, plain = self.run_once(f)
        again, _, graphs = self.run_once(f, mode="all")
        self.assertBitwise(again, grads)
        self.assertEqual(graphs, plain)

    def test_dropout_is_never_drawn_again(self):
        def f(x):
            for block in self.model:
                x = torch.nn.functional.dropout(block(x), 0.5)
            return x

        def draws(graph):
            return graph.count("native_dropout.default(")

        torch.manual_seed(1)
        _, _, plain = self.run_once(f)
        torch.manual_seed(1)
        _, _, graphs = self.run_once(f, mode="all")
        self.assertIn("_remat", graphs[0])
        self.assertEqual(draws(graphs[0]), draws(plain[0]))

    def test_refused_config_value(self):
        with self.assertRaisesRegex(Exception, "must be one of 'off'"):
            self.run_once(mode="on")


class TestDeterminism(TestCase):
    PROGRAM = """
        import torch
        import torch._functorch.config
        import torch_overlay  # overlay only
        from torch_overlay._functorch._activation_checkpointing import use_site_remat

        p = use_site_remat
        torch_overlay.apply("remat")  # overlay only
        torch._functorch.config.use_site_remat = "all"
        plain = p.apply_use_site_remat

        def show(gm, analysis, plan, recompile=True):
            print(p.print_plan(analysis, plan))
            return plain(gm, analysis, plan, recompile)

        p.apply_use_site_remat = show
        torch._functorch.config.activation_memory_budget = 0.0
        weights = [torch.randn(64, 64, requires_grad=True) for _ in range(6)]

        @torch.compile(backend="aot_eager")
        def f(x):
            for w in weights:
                n = torch.nn.functional.rms_norm(x, (64,))
                x = x + torch.nn.functional.silu(n @ w) * n
            return x.square().sum()

        f(torch.randn(64, 64)).backward()
    """

    def test_two_hash_seeds_give_the_same_plan(self):
        plans = []
        for seed in ("1", "2"):
            done = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(self.PROGRAM)],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            plans.append(done.stdout)
        self.assertRegex(plans[0], r"[1-9]\d* cuts")
        self.assertEqual(plans[0], plans[1])


class TestStorages(TestCase):
    def test_views_share_and_copies_do_not(self):
        def f(a):
            b = a.sin()
            c = b.view(-1)
            d = c[3:].clone()
            e, g = b.split(256)
            return d, e + 1, g

        gm = traced(f, mib())
        storages = graph_storages(gm.graph)
        of = {n.name: storages.of_node[n] for n in gm.graph.nodes}
        self.assertEqual(of["view"], of["sin"])
        self.assertEqual(of["getitem"], of["sin"])
        self.assertEqual(of["getitem_1"], of["sin"])
        self.assertNotEqual(of["clone"], of["sin"])
        self.assertEqual(storages.size_bytes[of["sin"][0]], MIB)

    def test_alias_by_schema_when_values_do_not_share(self):
        graph = fx.Graph()
        x = graph.placeholder("x")
        view = graph.call_function(torch.ops.aten.view.default, (x, [-1]))
        graph.output((view,))
        x.meta["val"], view.meta["val"] = mib(), mib(512 * 512)
        storages = graph_storages(graph)
        self.assertEqual(storages.of_node[x], storages.of_node[view])

    def test_tuple_of_storages(self):
        gm = traced(lambda a: torch.var_mean(a, dim=0), mib())
        storages = graph_storages(gm.graph)
        of = {n.name: storages.of_node[n] for n in gm.graph.nodes}
        self.assertEqual(of["var_mean"], of["getitem"] + of["getitem_1"])

    def test_sparse_is_opaque(self):
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output((x,))
        x.meta["val"] = torch.eye(4).to_sparse()
        storages = graph_storages(graph)
        self.assertEqual(list(storages.opaque), list(storages.of_node[x]))


if __name__ == "__main__":
    run_tests()
