# Owner(s): ["module: functorch"]

import dataclasses
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.fx as fx
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._ordered_set import OrderedSet

from torch_overlay._functorch._activation_checkpointing import joint_peak
from torch_overlay._functorch._activation_checkpointing.joint_peak import (
    live_bytes,
    live_bytes_of_both,
    MAX_FUSION_DISTANCE,
    MOST_OPERATIONS,
    MOST_READS_REUSED,
    peak_bytes,
)
from torch_overlay._functorch._activation_checkpointing.joint_schedule import (
    _scratch_bytes,
    joint_schedule,
    OPAQUE,
    POINTWISE,
    REDUCTION,
    SCATTER,
)


sys.path.insert(0, str(Path(__file__).resolve().parent))
from joint_graphs import calls, schedule_of


aten = torch.ops.aten
MIB = 1 << 20  # bytes of 512 x 512 float32 numbers


def square(**kwargs):
    return torch.randn(512, 512, **kwargs)


def in_mib(found):
    return [b / MIB for b in found]


class TestJointPeak(TestCase):
    """Live bytes worked out by hand; every value has a MiB unless it says otherwise."""

    def setUp(self):
        super().setUp()
        self.x = square(requires_grad=True)

    def kinds_of(self, schedule, packet):
        nodes = [
            i
            for i, n in enumerate(schedule.nodes)
            if getattr(n.target, "overloadpacket", None) is packet
        ]
        self.assertTrue(nodes)
        return {schedule.kinds[i] for i in nodes}

    def test_opaque_operators(self):
        s = schedule_of(lambda x: (x @ x) @ x, self.x)
        products = calls(s, aten.mm)
        self.assertTrue(all(s.heavy[i] for i in products))
        forward, backward = live_bytes_of_both(s, ())
        # The square, then both products.
        self.assertEqual(in_mib(forward), [1, 2])
        # The square again and the tangent; with its transpose's product; the square's
        # gradient in its place; two more gradients of x; their sums in place.
        self.assertEqual(in_mib(backward), [2, 3, 3, 3, 4, 3, 3])
        square_is_saved = s.values_of(products[:1])
        _, backward = live_bytes_of_both(s, square_is_saved)
        self.assertEqual(in_mib(backward), [3, 3, 3, 4, 3, 3])
        self.assertEqual(peak_bytes(s, square_is_saved), 4 * MIB)
        # What the backward does not read is not saved.
        self.assertEqual(
            live_bytes_of_both(s, s.values_of(products)),
            live_bytes_of_both(s, square_is_saved),
        )

    def test_pointwise_values_are_computed_in_their_reader(self):
        s = schedule_of(lambda x: ((x @ x).sin().cos().exp() * 2) @ x, self.x)
        forward, _ = live_bytes_of_both(s, ())
        # The last pointwise result takes over the product's storage.
        self.assertEqual(in_mib(forward), [1, 1, 1, 1, 1, 2])

    def test_a_value_that_much_is_computed_from_is_written(self):
        def deep(x, count):
            y = x @ x
            for _ in range(count):
                y = y.sin()
            return (y + 1) @ x

        def kernels(count):
            s = schedule_of(lambda x: deep(x, count), self.x)
            sines = calls(s, aten.sin)
            found = joint_peak._Kernels(s, s.forward, s.results)
            return [i for i in sines if found.makes[s.forward.index(i)]]

        self.assertEqual(kernels(MOST_OPERATIONS), [])
        self.assertEqual(len(kernels(MOST_OPERATIONS + 1)), 1)

    def test_a_value_with_many_sources_and_readers_is_written(self):
        others = [square() for _ in range(MOST_READS_REUSED + 1)]

        def program(x, *rest):
            y = x
            for r in rest:
                y = y + r
            return torch.sin(y) @ x + torch.cos(y) @ x

        for count, written in [
            (MOST_READS_REUSED - 1, False),
            (MOST_READS_REUSED, True),
        ]:
            s = schedule_of(program, self.x, *others[:count])
            found = joint_peak._Kernels(s, s.forward, s.results)
            last = [i for i in calls(s, aten.add) if i < calls(s, aten.sin)[0]][-1]
            self.assertEqual(bool(found.makes[s.forward.index(last)]), written)

    def test_saved_values_and_inputs_are_not_taken_over(self):
        s = schedule_of(lambda x, w: (x @ w).tanh() @ w, self.x, square())
        (result,) = calls(s, aten.tanh)
        # The tangent is taken over by no one, nor is the saved result of tanh: with the
        # gradient of tanh there are the tangent's product, the saved one and a third.
        _, backward = live_bytes_of_both(s, s.values_of([result]))
        self.assertEqual(in_mib(backward), [3, 2, 2])
        # Computed again it is taken over.
        _, again = live_bytes_of_both(s, ())
        self.assertEqual(in_mib(again), [2, 2, 2, 2, 2])

    def test_a_smaller_result_takes_nothing_over(self):
        s = schedule_of(lambda x, w: (x @ w).exp().sum(0) @ w, self.x, square())
        (product,) = s.values_of(calls(s, aten.mm)[:1])
        self.assertEqual(self.kinds_of(s, aten.sum), {REDUCTION})
        (total,) = calls(s, aten.sum)
        heights = dict(zip(s.forward, live_bytes_of_both(s, ())[0], strict=True))
        # The sum's own result is smaller, so the product's storage is not its place.
        small = s.size_bytes[s.makes[total][0]]
        self.assertEqual(heights[total], s.size_bytes[product] + small)

    def test_scatter_writes_in_place(self):
        def program(x, w):
            rows = torch.arange(512).flip(0)
            return (x @ w)[rows] @ w

        s = schedule_of(program, self.x, square())
        self.assertEqual(self.kinds_of(s, aten.index_put), {SCATTER})
        _, backward = live_bytes_of_both(s, ())
        # The product's gradient, the zeros that it is added to, the input's gradient.
        self.assertEqual(max(in_mib(backward)), 2)

    def test_expanded_operand_is_written_out(self):
        def program(x, w, mask):
            wide = (mask * 2).expand(512, 512)
            return torch.ops.aten.mm(x, wide) @ w

        s = schedule_of(program, self.x, square(), torch.randn(512, 1))
        first = calls(s, aten.mm)[0]
        forward = dict(zip(s.forward, live_bytes_of_both(s, ())[0], strict=True))
        column = 512 * 4
        self.assertEqual(forward[first], 2 * MIB + column)

    def test_kernels_that_read_one_value_become_one(self):
        def program(distance):
            graph = fx.Graph()
            wide = graph.placeholder("wide")
            wide.meta["val"] = torch.empty(512, 512)
            first = graph.call_function(aten.sin.default, (wide,))
            chain = graph.call_function(aten.mm.default, (wide, wide))
            for _ in range(distance - 2):
                chain = graph.call_function(aten.mm.default, (chain, chain))
            last = graph.call_function(aten.cos.default, (wide,))
            product = graph.call_function(aten.mm.default, (first, last))
            graph.output((graph.call_function(aten.mm.default, (product, chain)),))
            for node in graph.nodes:
                node.meta.setdefault("val", torch.empty(512, 512))
            return graph

        def schedule(graph):
            calls = [n for n in graph.nodes if n.op == "call_function"]
            info = mock.Mock(inputs=list(graph.find_nodes(op="placeholder")))
            info.is_required_fw = lambda n: n in calls or n.op == "placeholder"
            info.is_required_bw = lambda n: False
            return joint_schedule(graph, info)

        def places(distance):
            s = schedule(program(distance))
            s = dataclasses.replace(s, held=OrderedSet())
            return joint_peak._Kernels(s, s.forward, s.results).made_with_later()

        far = MAX_FUSION_DISTANCE
        self.assertEqual(places(far), {0: far})
        self.assertEqual(places(far + 1), {})

    def test_kinds(self):
        def program(x):
            y = x.view(4, 128, 512)
            return y.softmax(-1).sum() + (x @ x).sigmoid().amax()

        s = schedule_of(program, self.x)
        self.assertEqual(self.kinds_of(s, aten.mm), {OPAQUE})
        self.assertEqual(self.kinds_of(s, aten.sigmoid), {POINTWISE})
        self.assertEqual(self.kinds_of(s, aten._softmax), {REDUCTION})
        self.assertEqual(self.kinds_of(s, aten.amax), {REDUCTION})

    def test_scratch_of_attention(self):
        graph = fx.Graph()
        operands = [graph.placeholder(f"a{i}") for i in range(2)]
        for node in operands:
            node.meta["val"] = torch.empty(2, 3, 100, 80, device="meta")
        target = aten._scaled_dot_product_efficient_attention_backward.default
        node = graph.call_function(target, tuple(operands))
        blocks = 2 * 3 * 2 * 2  # batch, heads, blocks of queries, blocks of the size
        wanted = 4 * 2 * 3 * 100 + blocks * (4 * 64 * 64 + 16)
        self.assertEqual(_scratch_bytes(node), wanted)
        self.assertEqual(_scratch_bytes(operands[0]), 0)

    def test_a_forward_below_its_bound_is_left_out(self):
        s = schedule_of(lambda x: (x @ x) @ x, self.x)
        whole = live_bytes_of_both(s, ())
        self.assertEqual(
            live_bytes_of_both(s, (), forward_bound=max(whole[0])), ([], whole[1])
        )
        self.assertEqual(live_bytes_of_both(s, (), forward_bound=9 * MIB), whole)

    def test_a_saved_result_of_what_runs_again(self):
        """It is made once more, beside the saved one, and dropped."""

        def program(x, w):
            least, places = (x @ w).sort(dim=-1)
            return (least.sin() * places.cos()).sum()

        s = schedule_of(program, self.x, square(requires_grad=True))
        (mm,), (sort,) = calls(s, aten.mm), calls(s, aten.sort)
        product, (least, places) = s.makes[mm][0], s.makes[sort]
        start, end = [product, places], s.makes[mm]
        sizes = [s.size_bytes[v] for v in (product, least, places)]
        self.assertEqual(
            live_bytes(s, [sort], start, end), [sum(sizes) + s.size_bytes[places]]
        )
        self.assertEqual(live_bytes(s, [sort], [product], end), [sum(sizes)])

    def test_nothing_to_run(self):
        s = schedule_of(lambda x: (x @ x) @ x, self.x)
        self.assertEqual(live_bytes(s, (), s.arguments, s.arguments), [MIB])


if __name__ == "__main__":
    run_tests()
