# Owner(s): ["module: aotdispatch"]

from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch.fx as fx
from torch._inductor import inductor_prims
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._ordered_set import OrderedSet

from torch_overlay._functorch._activation_checkpointing.recompute_safety import (
    COLLECTIVE,
    RANDOM,
    recompute_hazard,
)
from torch_overlay._functorch._activation_checkpointing.rng_replay import (
    NO_STATE,
    random_devices,
    replay_refusal,
    state_bytes,
)


aten = torch.ops.aten


def traced(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args)


def last_call(gm):
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    return [n for n in calls if n.target is not torch.ops.aten.detach.default][-1]


def call(target, *args, value=None, **kwargs):
    """A node of its own graph whose arguments are constants."""
    node = fx.Graph().call_function(target, args, kwargs)
    node.meta["val"] = value
    return node


def only_random(gm):
    (node,) = (
        n
        for n in gm.graph.nodes
        if n.op == "call_function" and recompute_hazard(n) == RANDOM
    )
    return node


class TestHazards(TestCase):
    def setUp(self):
        super().setUp()
        self.x = torch.randn(8, 8)

    def hazard(self, fn, *args, allowed=()):
        return recompute_hazard(last_call(traced(fn, *(args or (self.x,)))), allowed)

    def test_random_operators(self):
        for fn in (
            torch.rand_like,
            torch.bernoulli,
            torch.poisson,
            lambda x: torch.randint(1, 9, x.shape),
            lambda x: torch.randperm(8),
            lambda x: torch.normal(x, 1.0),
            lambda x: torch.multinomial(x.sigmoid(), 2),
            lambda x: aten.exponential.default(x),
            lambda x: torch.ops.prims.inductor_seeds.default(2, torch.device("cpu")),
        ):
            self.assertEqual(self.hazard(fn), RANDOM)
        for fn in (torch.sin, lambda x: x @ x, torch.zeros_like, torch.softmax):
            args = (self.x, -1) if fn is torch.softmax else (self.x,)
            self.assertIsNone(self.hazard(fn, *args))

    def test_inductors_random_is_a_function_of_its_seed(self):
        def fn(x):
            seeds = inductor_prims.seeds(1, torch.device("cpu"))
            return inductor_prims.random(
                [8, 8], inductor_prims.lookup_seed(seeds, 0), "rand"
            )

        self.assertIsNone(self.hazard(fn))

    def test_attention_only_with_dropout(self):
        op = aten._scaled_dot_product_flash_attention.default
        self.assertIsNone(recompute_hazard(call(op, 1, 1, 1)))
        self.assertIsNone(recompute_hazard(call(op, 1, 1, 1, 0.0)))
        self.assertIsNone(recompute_hazard(call(op, 1, 1, 1, dropout_p=0.0)))
        self.assertEqual(recompute_hazard(call(op, 1, 1, 1, 0.1)), RANDOM)
        self.assertEqual(recompute_hazard(call(op, 1, 1, 1, dropout_p=0.1)), RANDOM)
        p = fx.Graph().placeholder("p")
        node = p.graph.call_function(op, (1, 1, 1, p))
        self.assertEqual(recompute_hazard(node), RANDOM)

    def test_collectives(self):
        ops = torch.ops._c10d_functional
        node = call(ops.all_gather_into_tensor.default, self.x, 2, "0")
        self.assertEqual(recompute_hazard(node), COLLECTIVE)
        node = call(ops.wait_tensor.default, self.x)
        self.assertEqual(recompute_hazard(node), COLLECTIVE)

    def test_mutation_and_unbacked_sizes(self):
        node = call(aten.add_.Tensor, self.x, 1)
        self.assertEqual(recompute_hazard(node), "mutates an argument")
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            gm = make_fx(torch.nonzero, tracing_mode="symbolic")(self.x)
        self.assertIn("binds a size", recompute_hazard(last_call(gm)))

    def test_custom_operators(self):
        with torch.library._scoped_library("recompute_safety", "FRAGMENT"):

            @torch.library.custom_op("recompute_safety::twice", mutates_args=())
            def twice(x: torch.Tensor) -> torch.Tensor:
                return x * 2

            twice.register_fake(torch.empty_like)
            self.assertIn("is a custom operator", self.hazard(twice))
            for name in ("recompute_safety::twice", "recompute_safety::twice.default"):
                self.assertIsNone(self.hazard(twice, allowed=[name]))
            allowed = ["recompute_safety::twic", "twice"]
            self.assertIsNotNone(self.hazard(twice, allowed=allowed))

    def test_higher_order_operators(self):
        def branch_on(true_fn):
            return lambda x: torch.cond(x.sum() > 0, true_fn, torch.cos, (x,))

        def cond_of(true_fn):
            gm = traced(branch_on(true_fn), self.x)
            ops = torch.ops.higher_order
            (node,) = gm.graph.find_nodes(op="call_function", target=ops.cond)
            return recompute_hazard(node)

        self.assertIsNone(cond_of(torch.sin))
        self.assertEqual(cond_of(torch.rand_like), f"{RANDOM} (in cond)")

        ops = torch.ops.higher_order
        save_state = torch._prims.rng_prims.run_and_save_rng_state
        node = call(save_state, aten.rand_like.default, self.x)
        self.assertEqual(recompute_hazard(node), RANDOM)
        node = call(ops.with_effects, None, aten.sin.default, self.x)
        self.assertEqual(recompute_hazard(node), "has effects")
        node = call(ops.auto_functionalized, aten.uniform_.default, self=self.x)
        self.assertEqual(recompute_hazard(node), RANDOM)
        node = call(ops.auto_functionalized, aten.sin_.default, self=self.x)
        self.assertIsNone(recompute_hazard(node))
        node = call(ops.triton_kernel_wrapper_functional, kernel_idx=0)
        self.assertIsNone(recompute_hazard(node))
        node = call(ops.flat_apply)
        self.assertIn("unknown behaviour", recompute_hazard(node))


class TestReplay(TestCase):
    def refusal(self, fn, *args):
        gm = traced(fn, *args)
        return replay_refusal(only_random(gm), random_devices(gm.graph))

    def test_what_can_be_replayed(self):
        x = torch.randn(8, 8)
        self.assertIsNone(self.refusal(torch.rand_like, x))
        self.assertIsNone(
            self.refusal(lambda x: torch.native_dropout(x, 0.5, True)[0], x)
        )
        cpu = torch.device("cpu")
        node = call(aten.randperm.default, 8, device=cpu, value=torch.empty(8))
        self.assertIsNone(replay_refusal(node, OrderedSet()))
        self.assertEqual(
            self.refusal(lambda: inductor_prims.seeds(1, torch.device("cpu"))),
            "makes a seed",
        )

    def test_generator_argument(self):
        node = call(
            aten.rand.generator,
            [8],
            generator=torch.Generator(),
            device=torch.device("cpu"),
            value=torch.empty(8),
        )
        self.assertEqual(
            replay_refusal(node, OrderedSet()), "draws from a generator of the user's"
        )

    def test_states(self):
        self.assertEqual(
            state_bytes(call(aten.rand.default, value=torch.empty(8))),
            torch.get_rng_state().nbytes,
        )
        node = call(aten.rand_like.default, value=torch.empty(8, device="meta"))
        self.assertIsNone(state_bytes(node))
        self.assertEqual(replay_refusal(node, OrderedSet()), NO_STATE)
        node = call(aten.rand.default, [8], value=torch.empty(8))
        self.assertEqual(replay_refusal(node, OrderedSet()), "does not name its device")

    def test_several_devices(self):
        with FakeTensorMode():
            inputs = [torch.empty(8, 8, device=f"cuda:{i}") for i in range(2)]
            gm = traced(lambda a, b: (torch.rand_like(a), torch.rand_like(b)), *inputs)
            one = traced(torch.rand_like, inputs[1])
        self.assertIsNone(replay_refusal(only_random(one), random_devices(one.graph)))
        for node in gm.graph.find_nodes(
            op="call_function", target=aten.rand_like.default
        ):
            refused = replay_refusal(node, random_devices(gm.graph))
            self.assertEqual(
                refused, "is one of several devices that draw in this graph"
            )

    def test_state_of_the_current_device_only(self):
        with FakeTensorMode():
            gm = traced(torch.rand_like, torch.empty(8, 8, device="cuda:1"))
        node, devices = only_random(gm), random_devices(gm.graph)
        with functorch_config.patch(graphsafe_rng_functionalization=False):
            for current, refused in ((0, True), (1, False)):
                with mock.patch.object(torch.cuda, "current_device", lambda: current):
                    self.assertEqual(replay_refusal(node, devices) is not None, refused)
        self.assertIsNone(replay_refusal(node, devices))


if __name__ == "__main__":
    run_tests()
