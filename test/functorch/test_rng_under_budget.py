# Owner(s): ["module: aotdispatch"]
import contextlib
import functools
import itertools
import unittest
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.fx as fx
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.effects import _register_effectful_op, EffectType
from torch._inductor.codegen.triton import TritonOverrides
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomKnapsackSolver
from torch._inductor.utils import run_fw_bw_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

import torch_overlay  # overlay only
from torch_overlay._functorch._activation_checkpointing import (
    rng_replay,
    saved_set_guard,
)
from torch_overlay._functorch._activation_checkpointing.recompute_safety import (
    draws_random_numbers,
)


BACKENDS = ("aot_eager", "inductor")
BUDGETS = (0, 0.005, 0.1, 0.5, 0.9, 1.0)


def compiled(fn, backend="aot_eager", budget=1.0, dynamic=None, **config):
    """``fn`` compiled under a budget; the config holds while it is called too."""
    torch._dynamo.reset()
    run = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)

    @functools.wraps(fn)
    def call(*args):
        inductor = {k: config[k] for k in config if not hasattr(functorch_config, k)}
        functorch = {k: v for k, v in config.items() if k not in inductor}
        with (
            functorch_config.patch(activation_memory_budget=budget, **functorch),
            inductor_config.patch(inductor),
        ):
            return run(*args)

    return call


def wrong_masks(dropout, backend, budget, x=None, **config):
    """Elements whose gradient does not fit the forward's mask; 0 is right."""
    x = (torch.randn(64, 64) + 3 if x is None else x).requires_grad_()
    out = compiled(dropout, backend, budget, **config)(x)
    out.sum().backward()
    return int(((out != 0) != (x.grad != 0)).sum())


def wrong_noise(noise, backend, budget, **config):
    """Elements of ``x * noise`` whose gradient is not the forward's noise."""
    x = (torch.rand(64, 64) + 0.5).requires_grad_()
    out = compiled(lambda x: x * noise(x), backend, budget, **config)(x)
    out.sum().backward()
    return int((~torch.isclose(x.grad, (out / x).detach())).sum())


def dropout(x, p=0.5):
    return F.dropout(x.sin(), p)


def checkpointed(x):
    return checkpoint(dropout, x, use_reentrant=False)


NOISES = {
    "native_dropout": lambda x: torch.native_dropout(torch.ones_like(x), 0.5, True)[0],
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(1, 9, x.shape),
    "uniform_": lambda x: torch.empty_like(x).uniform_(1, 2),
    "normal": lambda x: torch.normal(torch.zeros_like(x), 1.0),
    "randperm": lambda x: torch.randperm(4096).reshape(64, 64) + 1,
    "dropout1d": lambda x: F.dropout1d(torch.ones(64, 64, 64), 0.5)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(torch.ones_like(x), 0.5, True),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 3.0)),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "multinomial": lambda x: torch.multinomial(torch.ones(64, 64), 64, True) + 1,
}


def graphs(fn, budget, *args, **config):
    """Forward and backward graph that the partitioner hands to a backend."""
    found = []

    def keep(gm, _):
        found.append(gm)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled(fn, backend, budget, **config)(*args).sum().backward()
    return found


class TestRandomUnderBudget(TestCase):
    @torch_overlay.applied("rng")  # overlay only
    def test_masks_agree(self):
        for backend, budget in itertools.product(BACKENDS, BUDGETS):
            self.assertEqual(wrong_masks(dropout, backend, budget), 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_masks_agree_with_fallback_random(self):
        for budget, graphsafe in itertools.product(BUDGETS, (False, True)):
            wrong = wrong_masks(
                dropout,
                "inductor",
                budget,
                fallback_random=True,
                graphsafe_rng_functionalization=graphsafe,
            )
            self.assertEqual(wrong, 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_every_random_operator(self):
        for (name, noise), budget in itertools.product(NOISES.items(), (0, 0.5, 0.9)):
            with self.subTest(name=name, budget=budget):
                self.assertEqual(wrong_noise(noise, "aot_eager", budget), 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_every_random_operator_inductor(self):
        for name, noise in NOISES.items():
            with self.subTest(name=name):
                self.assertEqual(wrong_noise(noise, "inductor", 0), 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_checkpointed_regions(self):
        cells = itertools.product(
            (checkpointed, dropout), (False, True), (0, 0.5, 1.0), BACKENDS
        )
        for fn, fallback, budget, backend in cells:
            wrong = wrong_masks(fn, backend, budget, fallback_random=fallback)
            self.assertEqual(wrong, 0)

    def draws_of(self, budget, backend):
        torch.manual_seed(0)
        x = torch.randn(64, 64, requires_grad=True)
        torch.manual_seed(0)
        compiled(dropout, backend, budget)(x).sum().backward()
        return torch.rand(1).item()

    @torch_overlay.applied("rng")  # overlay only
    def test_global_generator_moves_in_the_forward_only(self):
        for backend in BACKENDS:
            right = self.draws_of(1.0, backend)
            for budget in (0, 0.5):
                self.assertEqual(self.draws_of(budget, backend), right)

    @torch_overlay.applied("rng")  # overlay only
    def test_two_forwards_before_their_backwards(self):
        for backend, budget in itertools.product(BACKENDS, (0, 0.5)):
            run = compiled(dropout, backend, budget)
            inputs = [(torch.randn(64, 64) + 3).requires_grad_() for _ in range(2)]
            outputs = [run(x) for x in inputs]
            for x, out in reversed(list(zip(inputs, outputs, strict=True))):
                out.sum().backward()
                self.assertEqual(out != 0, x.grad != 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_retain_graph(self):
        for backend, budget in itertools.product(BACKENDS, (0, 0.5)):
            x = (torch.randn(64, 64) + 3).requires_grad_()
            run = compiled(dropout, backend, budget, donated_buffer=False)
            out = run(x).sum()
            (first,) = torch.autograd.grad(out, x, retain_graph=True)
            (second,) = torch.autograd.grad(out, x)
            self.assertEqual(first, second)

    @torch_overlay.applied("rng")  # overlay only
    def test_noise_that_the_backward_does_not_need(self):
        def noisy(x):
            return checkpoint(lambda x: x + torch.rand_like(x), x, use_reentrant=False)

        for backend, budget in itertools.product(BACKENDS, (0, 0.5, 1.0)):
            x = torch.randn(64, 64, requires_grad=True)
            torch.manual_seed(0)
            compiled(noisy, backend, budget)(x).sum().backward()
            after = torch.rand(1)
            self.assertEqual(x.grad, torch.ones(64, 64))
            torch.manual_seed(0)
            with torch.no_grad():
                compiled(noisy, backend, budget)(x)
            self.assertEqual(after, torch.rand(1))


class TestOtherRecompute(TestCase):
    """What else must not run twice, or must run once in the right place."""

    def gradients(self, fn, backend, budget, *args, **config):
        inputs = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        torch.manual_seed(0)
        compiled(fn, backend, budget, **config)(*inputs).sum().backward()
        return [i.grad for i in inputs if i.requires_grad]

    @torch_overlay.applied("rng")  # overlay only
    def test_attention(self):
        q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))

        def attention(p, q, k, v):
            return F.scaled_dot_product_attention(q.sin(), k, v, dropout_p=p).sin()

        for p in (0.0, 0.1):
            fn = functools.partial(attention, p)
            right = self.gradients(fn, "aot_eager", 1.0, q, k, v)
            for budget in (0, 0.5):
                found = self.gradients(fn, "aot_eager", budget, q, k, v)
                self.assertEqual(found, right)
                forward, _ = graphs(fn, budget, q, k, v)
                self.assertEqual("rng_state" in forward.code, p > 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_lora_under_a_checkpoint(self):
        class Lora(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
                self.down = torch.nn.Linear(32, 4, bias=False)
                self.up = torch.nn.Linear(4, 32, bias=False)

            def forward(self, x):
                return self.frozen(x) + self.up(self.down(F.dropout(x, 0.1)))

        model = Lora()

        def fn(x):
            return checkpoint(model, x, use_reentrant=False)

        for dynamic, budget in itertools.product((True, False), (0, 0.5, 1.0)):
            run = compiled(fn, "aot_eager", budget, dynamic)
            for batch in (4, 7):
                x = torch.randn(batch, 32, requires_grad=True)
                model.zero_grad()
                torch.manual_seed(0)
                run(x).sum().backward()
                found = [p.grad for p in model.parameters()] + [x.grad]
                x.grad = None
                model.zero_grad()
                torch.manual_seed(0)
                fn(x).sum().backward()
                right = [p.grad for p in model.parameters()] + [x.grad]
                self.assertEqual(found, right)

    @torch_overlay.applied("rng")  # overlay only
    def test_must_save_of_tuples(self):
        def must_save(op, *args):
            def policy(context, called, *args, **kwargs):
                if called == op:
                    return CheckpointPolicy.MUST_SAVE
                return CheckpointPolicy.PREFER_RECOMPUTE

            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(*args, use_reentrant=False, context_fn=contexts)

        def dropped(x):
            return must_save(torch.ops.aten.native_dropout.default, dropout, x)

        def normalized(x):
            norm = functools.partial(F.layer_norm, normalized_shape=(64,))
            return must_save(
                torch.ops.aten.native_layer_norm.default,
                lambda x: norm(x.sin()).cos(),
                x,
            )

        x = torch.randn(64, 64, requires_grad=True)
        for budget in (0, 0.01, 0.5, 1.0):
            self.assertEqual(wrong_masks(dropped, "aot_eager", budget), 0)
            _, backward = graphs(dropped, budget, x)
            self.assertNotIn("native_dropout.default", backward.code)
            _, backward = graphs(normalized, budget, x)
            self.assertNotIn("native_layer_norm.default", backward.code)
            found = self.gradients(normalized, "aot_eager", budget, x)
            self.assertEqual(found, torch.autograd.grad(normalized(x).sum(), x))

    @torch_overlay.applied("rng")  # overlay only
    def test_read_before_a_write(self):
        def in_graph(x, buf):
            y = x * (buf * 2)
            buf.add_(1)
            return y

        def view_in_graph(x, buf):
            y = x * (buf.view(-1) * 2).view(64, 64)
            buf.add_(1)
            return y

        def in_epilogue(t):
            t.mul_(2)
            return F.interpolate(t, scale_factor=2, mode="bilinear").sin()

        for backend, budget in itertools.product(BACKENDS, (0, 0.5, 1.0)):
            for fn in (in_graph, view_in_graph):
                x = torch.ones(64, 64, requires_grad=True)
                compiled(fn, backend, budget)(x, torch.ones(64, 64)).sum().backward()
                self.assertEqual(x.grad, torch.full((64, 64), 2.0))
            a = torch.randn(1, 2, 4, 4, requires_grad=True)
            run = compiled(in_epilogue, backend, budget)
            (found,) = torch.autograd.grad(run(a * 1).sum(), a)
            (right,) = torch.autograd.grad(in_epilogue(a * 1).sum(), a)
            self.assertEqual(found, right)

    @torch_overlay.applied("rng")  # overlay only
    def test_effectful_operator_runs_once(self):
        calls = []
        with torch.library._scoped_library("rng_under_budget", "FRAGMENT"):

            @torch.library.custom_op("rng_under_budget::tell", mutates_args=())
            def tell(x: torch.Tensor) -> torch.Tensor:
                calls.append(x.shape)
                return x.clone()

            tell.register_fake(torch.empty_like)
            op = torch.ops.rng_under_budget.tell.default
            with contextlib.ExitStack() as stack:
                handle = _register_effectful_op(op, EffectType.ORDERED)
                stack.callback(handle.destroy)
                for budget in (0, 0.5, 1.0):
                    calls.clear()
                    x = torch.randn(64, 64, requires_grad=True)
                    run = compiled(lambda x: x * tell(x.detach()).sin(), budget=budget)
                    (grad,) = torch.autograd.grad(run(x).sum(), x)
                    self.assertEqual(len(calls), 1)
                    self.assertEqual(grad, x.detach().sin())

    @torch_overlay.applied("rng")  # overlay only
    def test_symbolic_sizes(self):
        def ones_where_nonzero(x, w):
            y = (x.nonzero() * w).sin()
            return torch.ones_like(y) * y

        def stack(x, w):
            for _ in range(3):
                x = F.dropout(F.gelu(x @ w), 0.1)
            return x

        w = torch.randn(64, 64, requires_grad=True)
        for backend, budget in itertools.product(BACKENDS, (0, 0.1, 0.5)):
            x = torch.randn(64, 2) > 0
            one = torch.ones(2, dtype=torch.double, requires_grad=True)
            with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
                run = compiled(ones_where_nonzero, backend, budget)
                (found,) = torch.autograd.grad(run(x, one).sum(), one)
            (right,) = torch.autograd.grad(ones_where_nonzero(x, one).sum(), one)
            self.assertEqual(found, right)
            with torch._dynamo.config.patch(recompile_limit=1):
                run = compiled(stack, backend, budget, dynamic=True)
                for batch in (5, 9, 17):
                    x = torch.randn(batch, 64)
                    out = run(x, w)
                    (found,) = torch.autograd.grad(out.sum(), w)
                    self.assertEqual(found.shape, w.shape)
                    if backend == "aot_eager":
                        torch.manual_seed(batch)
                        (found,) = torch.autograd.grad(run(x, w).sum(), w)
                        torch.manual_seed(batch)
                        (right,) = torch.autograd.grad(stack(x, w).sum(), w)
                        self.assertEqual(found, right)


class TestRandomDoors(TestCase):
    """Every way by which the compiler may come to recompute a random operator."""

    @torch_overlay.applied("rng")  # overlay only
    def test_budget_from_an_annotation(self):
        def annotated(x):
            with torch.autograd.graph.region_activation_memory_budget(0.0):
                return dropout(x)

        self.assertEqual(wrong_masks(annotated, "aot_eager", 1.0), 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_aggressive_options_at_the_default_budget(self):
        for name in ("rand_like", "randint", "alpha_dropout", "poisson"):
            for backend in BACKENDS:
                wrong = wrong_noise(
                    NOISES[name], backend, 1.0, aggressive_recomputation=True
                )
                self.assertEqual(wrong, 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_custom_solver(self):
        def recompute_all(memory, graph, budget, node_info, candidates):
            return [], list(range(len(candidates)))

        class Solver(CustomKnapsackSolver):
            def __call__(self, *args):
                return recompute_all(*args)

            def uuid(self):
                return "recompute all"

        for backend in BACKENDS:
            wrong = wrong_masks(
                dropout, backend, 0.5, activation_memory_budget_solver=Solver()
            )
            self.assertEqual(wrong, 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_nested_graph(self):
        @torch.compiler.nested_compile_region
        def block(x):
            return dropout(x)

        def nested(x):
            return block(block(x) + 3).sin()

        x = torch.randn(64, 64, requires_grad=True)
        for backend in BACKENDS:
            found = []
            for budget in (1.0, 0, 0.5):
                torch.manual_seed(0)
                out = compiled(nested, backend, budget)(x)
                found.append(torch.autograd.grad(out.sum(), x))
            self.assertEqual(found[1:], found[:1] * 2)

    @torch_overlay.applied("rng")  # overlay only
    def test_random_branch(self):
        def branches(x):
            noise = torch.cond(
                x.sum() > 0, torch.rand_like, torch.randn_like, (x.detach(),)
            )
            return noise.sin()

        for budget in (0, 0.5, 1.0):
            self.assertEqual(wrong_noise(branches, "aot_eager", budget), 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_random_operator_of_the_backward(self):
        class NoisyGradient(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return grad * torch.rand(64, 64)

        for backend, budget in itertools.product(BACKENDS, (0, 0.5, 1.0)):
            x = torch.randn(64, 64, requires_grad=True)
            out = compiled(NoisyGradient.apply, backend, budget)(x)
            torch.manual_seed(1)
            (first,) = torch.autograd.grad(out.sum(), x)
            torch.manual_seed(2)
            out = compiled(NoisyGradient.apply, backend, budget)(x)
            torch.manual_seed(1)
            (second,) = torch.autograd.grad(out.sum(), x)
            # The forward neither draws for the backward nor pins its numbers.
            self.assertEqual(first, second)


class TestPolicies(TestCase):
    def setUp(self):
        super().setUp()
        self.x = torch.randn(64, 64, requires_grad=True)

    def assertNothingDrawn(self, graph):
        for node in graph.graph.nodes:
            drawn = node.op == "call_function" and draws_random_numbers(node)
            self.assertFalse(drawn, str(node))

    @torch_overlay.applied("rng=save")  # overlay only
    def test_save(self):
        for budget in (0, 0.1, 0.5):
            self.assertEqual(self.wrong(budget), 0)
            forward, backward = self.graphs(budget)
            self.assertNothingDrawn(backward)
            self.assertNotIn("rng_state", forward.code)

    def wrong(self, budget):
        return wrong_masks(dropout, "aot_eager", budget, rng_recompute="save")

    def graphs(self, budget, fn=dropout):
        return graphs(fn, budget, self.x, rng_recompute="save")

    @torch_overlay.applied("rng")  # overlay only
    def test_unknown_policy(self):
        with self.assertRaisesRegex(Exception, "'keep'; accepted are 'replay', 'save'"):
            graphs(dropout, 0, self.x, rng_recompute="keep")

    @torch_overlay.applied("rng")  # overlay only
    def test_device_without_a_state(self):
        with (
            mock.patch.dict(rng_replay.STATE_BYTES, clear=True),
            self.assertLogs(saved_set_guard.log, "WARNING") as logged,
        ):
            saved_set_guard.warning_once.cache_clear()
            for budget in (0, 0.5):
                self.assertEqual(wrong_masks(dropout, "aot_eager", budget), 0)
                forward, backward = graphs(dropout, budget, self.x)
                self.assertNothingDrawn(backward)
                self.assertNotIn("rng_state", forward.code)
        self.assertEqual(len(logged.output), 1)
        self.assertIn("state cannot be read and set", logged.output[0])

    @torch_overlay.applied("rng")  # overlay only
    def test_custom_operator(self):
        with torch.library._scoped_library("rng_under_budget", "FRAGMENT"):

            @torch.library.custom_op("rng_under_budget::noise", mutates_args=())
            def noise(x: torch.Tensor) -> torch.Tensor:
                return torch.rand_like(x)

            noise.register_fake(torch.empty_like)
            for budget in (0, 0.5):
                wrong = wrong_noise(lambda x: noise(x.detach()), "aot_eager", budget)
                self.assertEqual(wrong, 0)

            def fn(x):
                return x * noise(x.detach()).sin()

            _, backward = graphs(fn, 0, self.x)
            self.assertNotIn("ops.rng_under_budget", backward.code)
            allowed = ["rng_under_budget::noise"]
            _, backward = graphs(fn, 0, self.x, recomputable_custom_ops=allowed)
            self.assertIn("ops.rng_under_budget", backward.code)

    @torch_overlay.applied("rng")  # overlay only
    def test_one_seed_call(self):
        def three(x):
            for _ in range(3):
                x = F.dropout(x.sin(), 0.5)
            return x

        for budget in (0, 0.1, 0.5, 1.0):
            torch._dynamo.reset()
            run = compiled(three, "inductor", budget, force_disable_caches=True)
            _, (forward, backward) = run_fw_bw_and_get_code(lambda: run(self.x))
            self.assertEqual(forward.count("randint.low_out("), 1)
            self.assertEqual(backward.count("randint.low_out("), 0)


def lines_of(gm):
    """The graph as text, one call a line; nodes are named by their place."""
    names, found = {}, []
    for i, node in enumerate(gm.graph.nodes):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), names.get)
        names[node] = node.name if node.op == "placeholder" else f"v{i}"
        args = [str(a) for a in args]
        args += [f"{k}={v}" for k, v in kwargs.items() if k != "pin_memory"]
        if node.op == "placeholder":
            found.append(f"{node.name} = placeholder")
        elif node.op == "output":
            found.append(f"return {args[0]}")
        else:
            name = getattr(node.target, "__name__", str(node.target))
            found.append(f"{names[node]} = {name}({', '.join(args)})")
    return "\n".join(found)


class TestEmittedGraphs(TestCase):
    def both(self, forward, backward):
        return f"{lines_of(forward)}\n\n{lines_of(backward)}"

    def aot_graphs(self, policy):
        x = torch.randn(64, 64, requires_grad=True)
        return self.both(*graphs(dropout, 0, x, rng_recompute=policy))

    @torch_overlay.applied("rng")  # overlay only
    def test_replay_from_a_saved_state(self):
        self.assertExpectedInline(
            self.aot_graphs("replay"),
            """\
primals_1 = placeholder
v1 = sin.default(primals_1)
v2 = run_and_save_rng_state(aten.native_dropout.default, v1, 0.5, True)
v3 = getitem(v2, 0)
v4 = getitem(v2, 1)
v5 = getitem(v4, 0)
return ('v5', 'primals_1', 'v3')

primals_1 = placeholder
rng_state_output_0 = placeholder
tangents_1 = placeholder
v3 = sin.default(primals_1)
v4 = run_with_rng_state(rng_state_output_0, aten.native_dropout.default, v3, 0.5, True)
v5 = getitem(v4, 1)
v6 = native_dropout_backward.default(tangents_1, v5, 2.0)
v7 = cos.default(primals_1)
v8 = mul.Tensor(v6, v7)
return ('v8',)""",
        )

    @torch_overlay.applied("rng")  # overlay only
    def test_save(self):
        self.assertExpectedInline(
            self.aot_graphs("save"),
            """\
primals_1 = placeholder
v1 = sin.default(primals_1)
v2 = native_dropout.default(v1, 0.5, True)
v3 = getitem(v2, 0)
v4 = getitem(v2, 1)
return ('v3', 'primals_1', 'v4')

primals_1 = placeholder
getitem_1 = placeholder
tangents_1 = placeholder
v3 = native_dropout_backward.default(tangents_1, getitem_1, 2.0)
v4 = cos.default(primals_1)
v5 = mul.Tensor(v3, v4)
return ('v5',)""",
        )

    @torch_overlay.applied("rng")  # overlay only
    def test_replay_from_a_graph_safe_state(self):
        aten = torch.ops.aten

        def joint(primals_1, tangents_1):
            dropped, mask = aten.native_dropout(primals_1.sin(), 0.5, True)
            grad = aten.native_dropout_backward(tangents_1 * dropped.cos(), mask, 2.0)
            return dropped.sin(), grad * primals_1.cos()

        def generator(device):
            return mock.Mock(clone_state=torch.Generator)

        with FakeTensorMode() as fake:
            inputs = [torch.empty(64, 64, device="cuda") for _ in range(2)]
            gm = make_fx(joint, tracing_mode="fake")(*inputs)
        with (
            torch._guards.tracing(torch._guards.TracingContext(fake)),
            functorch_config.patch(activation_memory_budget=0),
            mock.patch.object(partitioners, "get_default_generator", generator),
        ):
            halves = min_cut_rematerialization_partition(gm, None, num_fwd_outputs=1)
        self.assertExpectedInline(
            self.both(*halves),
            """\
primals_1_1 = placeholder
fwd_rng_state_0 = placeholder
v2 = sin.default(primals_1_1)
v3 = graphsafe_run_with_rng_state(aten.native_dropout.default, v2, 0.5, True, rng_state=fwd_rng_state_0)
v4 = getitem(v3, 0)
v5 = sin.default(v4)
return ('v5', 'primals_1_1')

primals_1_1 = placeholder
tangents_1_1 = placeholder
bwd_rng_state_0 = placeholder
v3 = sin.default(primals_1_1)
v4 = graphsafe_run_with_rng_state(aten.native_dropout.default, v3, 0.5, True, rng_state=bwd_rng_state_0)
v5 = getitem(v4, 0)
v6 = getitem(v4, 1)
v7 = cos.default(v5)
v8 = mul.Tensor(tangents_1_1, v7)
v9 = native_dropout_backward.default(v8, v6, 2.0)
v10 = cos.default(primals_1_1)
v11 = mul.Tensor(v9, v10)
return ('v11',)""",  # noqa: E501
        )

    def inductor_graphs(self, policy):
        found = []

        def keep(gm, _, **kwargs):
            found.append(gm)
            return make_boxed_func(gm.forward)

        def backend(gm, inputs):
            return compile_fx(gm, inputs, inner_compile=keep)

        def two_dropouts(x):
            return dropout(dropout(x))

        x = torch.randn(64, 64, requires_grad=True)
        compiled(two_dropouts, backend, 0, rng_recompute=policy)(x).sum().backward()
        return self.both(*found)

    @torch_overlay.applied("rng")  # overlay only
    def test_seeds_are_saved_under_inductor(self):
        replayed = self.inductor_graphs("replay")
        self.assertEqual(replayed, self.inductor_graphs("save"))
        self.assertExpectedInline(
            replayed,
            """\
primals_1 = placeholder
v1 = sin.default(primals_1)
v2 = inductor_seeds.default(2, cpu)
v3 = inductor_lookup_seed.default(v2, 0)
v4 = inductor_random.default([64, 64], v3, rand)
v5 = gt.Scalar(v4, 0.5)
v6 = mul.Tensor(v5, v1)
v7 = mul.Tensor(v6, 2.0)
v8 = sin.default(v7)
v9 = inductor_lookup_seed.default(v2, 1)
v10 = inductor_random.default([64, 64], v9, rand)
v11 = gt.Scalar(v10, 0.5)
v12 = mul.Tensor(v11, v8)
v13 = mul.Tensor(v12, 2.0)
return ('v13', 'primals_1', 'v2')

primals_1 = placeholder
inductor_seeds_default = placeholder
tangents_1 = placeholder
v3 = inductor_lookup_seed.default(inductor_seeds_default, 1)
v4 = inductor_random.default([64, 64], v3, rand)
v5 = gt.Scalar(v4, 0.5)
v6 = convert_element_type.default(v5, torch.float32)
v7 = mul.Tensor(v6, 2.0)
v8 = mul.Tensor(tangents_1, v7)
v9 = sin.default(primals_1)
v10 = inductor_lookup_seed.default(inductor_seeds_default, 0)
v11 = inductor_random.default([64, 64], v10, rand)
v12 = gt.Scalar(v11, 0.5)
v13 = mul.Tensor(v12, v9)
v14 = mul.Tensor(v13, 2.0)
v15 = cos.default(v14)
v16 = mul.Tensor(v8, v15)
v17 = convert_element_type.default(v12, torch.float32)
v18 = mul.Tensor(v17, 2.0)
v19 = mul.Tensor(v16, v18)
v20 = cos.default(primals_1)
v21 = mul.Tensor(v19, v20)
return ('v21',)""",
        )


@contextlib.contextmanager
def one_draw_a_number():
    """Inductor's path that draws four numbers at once is off; see #198333."""
    with contextlib.ExitStack() as stack:
        if hasattr(inductor_config, "use_rand4x"):
            stack.enter_context(inductor_config.patch(use_rand4x=False))
        elif hasattr(TritonOverrides, "_can_use_4x_random"):
            never = staticmethod(lambda *args: False)
            stack.enter_context(
                mock.patch.object(TritonOverrides, "_can_use_4x_random", never)
            )
        yield


@unittest.skipIf(
    not torch.cuda.is_available(),
    "needs CUDA; on the CPU: TestRandomUnderBudget and the graph-safe expect test",
)
class TestRandomUnderBudgetCuda(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(one_draw_a_number())

    def input(self, device="cuda"):
        return torch.randn(64, 64, device=device) + 3

    @torch_overlay.applied("rng")  # overlay only
    def test_masks_agree(self):
        cells = itertools.product(BACKENDS, (0, 0.1, 0.5, 0.9), (False, True))
        for backend, budget, graphsafe in cells:
            for fallback in (False, True):
                wrong = wrong_masks(
                    dropout,
                    backend,
                    budget,
                    self.input(),
                    graphsafe_rng_functionalization=graphsafe,
                    fallback_random=fallback,
                )
                self.assertEqual(wrong, 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_several_forwards_and_retain_graph(self):
        for backend, budget in itertools.product(BACKENDS, (0, 0.5)):
            run = compiled(dropout, backend, budget, donated_buffer=False)
            for _ in range(3):
                inputs = [self.input().requires_grad_() for _ in range(2)]
                outputs = [run(x) for x in inputs]
                for x, out in reversed(list(zip(inputs, outputs, strict=True))):
                    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
                    (second,) = torch.autograd.grad(out.sum(), x)
                    self.assertEqual(first, second)
                    self.assertEqual(out != 0, first != 0)

    @torch_overlay.applied("rng")  # overlay only
    def test_cuda_graphs(self):
        for budget, noise in itertools.product(
            (0, 0.5), (F.dropout, lambda x: x * torch.poisson(x.detach()))
        ):
            config = {"triton.cudagraphs": True, "fallback_random": True}
            run = compiled(lambda x: noise(x * 2), "inductor", budget, **config)
            for _ in range(5):
                torch.compiler.cudagraph_mark_step_begin()
                x = self.input().abs().requires_grad_()
                out = run(x)
                (grad,) = torch.autograd.grad(out.sum(), x)
                self.assertEqual(grad, (out / x).detach())

    @torch_overlay.applied("rng")  # overlay only
    def test_generator_moves_as_at_budget_one(self):
        def after(budget):
            torch.manual_seed(0)
            x = self.input().requires_grad_()
            compiled(dropout, "inductor", budget)(x).sum().backward()
            return torch.cuda.get_rng_state()

        for budget in (0, 0.5):
            self.assertEqual(after(budget), after(1.0))

    @unittest.skipIf(
        torch.cuda.device_count() < 2,
        "needs two CUDA devices; on the CPU: TestReplay in test_recompute_safety.py",
    )
    @torch_overlay.applied("rng")  # overlay only
    def test_other_devices(self):
        def both(x, y):
            return dropout(x).sum() + dropout(y).sum().to(x.device)

        for backend, budget in itertools.product(BACKENDS, (0, 0.5)):
            for graphsafe in (False, True):
                config = {"graphsafe_rng_functionalization": graphsafe}
                wrong = wrong_masks(
                    dropout, backend, budget, self.input("cuda:1"), **config
                )
                self.assertEqual(wrong, 0)
                inputs = [self.input(f"cuda:{i}").requires_grad_() for i in range(2)]
                found = []
                for tried in (1.0, budget):
                    torch.manual_seed(0)
                    out = compiled(both, backend, tried, **config)(*inputs)
                    found.append(torch.autograd.grad(out, inputs))
                self.assertEqual(found[0], found[1])


if __name__ == "__main__":
    run_tests()
