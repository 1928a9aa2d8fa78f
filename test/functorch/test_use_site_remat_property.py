# Owner(s): ["module: aotdispatch"]
"""Random differentiable programs: gradients are bitwise those without the pass."""

import os

import hypothesis
import torch
import torch._functorch.config as functorch_config
from functorch.compile import aot_function, make_boxed_func
from hypothesis import strategies as st
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing._internal.common_utils import run_tests, TestCase

import torch_overlay
from torch_overlay._functorch._activation_checkpointing import use_site_remat as pass_
from torch_overlay._functorch._activation_checkpointing.use_site_rewrite import (
    COPY_MARK,
)


EXAMPLES = int(os.environ.get("TORCH_OVERLAY_EXAMPLES", "150"))
SIZE = 16


def unary(op):
    return lambda values, pick: [op(values[pick])]


def first_square(values, pick):
    return values[pick], values[(pick + 1) % len(values)]


def matmul(values, pick):
    a, b = first_square(values, pick)
    return [a @ b / SIZE]


def add(values, pick):
    a, b = first_square(values, pick)
    return [a + b]


def multiply(values, pick):
    a, b = first_square(values, pick)
    return [a * b.tanh()]


def split(values, pick):
    top, bottom = values[pick].chunk(2)
    return [torch.cat([bottom, top])]


def layer_norm(values, pick):
    return [torch.nn.functional.layer_norm(values[pick], (SIZE,))]


def max_with_indices(values, pick):
    best, _ = values[pick].max(dim=1, keepdim=True)
    return [values[pick] - best]


def two_results(values, pick):
    a = values[pick]
    return [a.sin(), a.cos()]


def in_place(values, pick):
    a = values[pick].clone()
    a.mul_(0.5).add_(1)
    return [a]


def dropout(values, pick):
    return [torch.nn.functional.dropout(values[pick], 0.3)]


OPS = {
    "matmul": matmul,
    "add": add,
    "multiply": multiply,
    "sin": unary(torch.sin),
    "exp": unary(lambda a: torch.exp(a.clamp(-2, 2))),
    "sigmoid": unary(torch.sigmoid),
    "transpose": unary(lambda a: a.t()),
    "view": unary(lambda a: a.reshape(-1).view(SIZE, SIZE)),
    "expand": unary(lambda a: a[:1].expand(SIZE, SIZE)),
    "strided": unary(lambda a: a[:, ::2].repeat(1, 2)),
    "detach": unary(lambda a: a + a.detach()),
    "softmax": unary(lambda a: a.softmax(-1)),
    "mean": unary(lambda a: a - a.mean(dim=0)),
    "std": unary(lambda a: a / (a.var(dim=1, keepdim=True) + 1)),
    "split": split,
    "layer_norm": layer_norm,
    "max": max_with_indices,
    "two": two_results,
    "in_place": in_place,
    "dropout": dropout,
}

programs = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 7)), min_size=4, max_size=24
)


def program(steps):
    """A function of two square matrices; later steps read earlier results."""

    def f(x, w):
        values = [x, w]
        for name, pick in steps:
            made = OPS[name](values, pick % len(values))
            values = [*made, *values][:8]
        return sum(v.square().sum() for v in values)

    return f


class TestRandomPrograms(TestCase):
    def gradients(self, steps, budget):
        peaks = []
        plain = pass_.use_site_remat

        def forward(gm, inputs):
            return make_boxed_func(gm.forward)

        def watched(gm, mode, **options):
            before = pass_.live_peak_bytes(gm.graph)
            result = plain(gm, mode, **options)
            peaks.append((before, pass_.live_peak_bytes(result.graph)))
            copied = [n for n in gm.graph.nodes if n.meta.get(COPY_MARK)]
            for node in copied:
                self.assertNotIn("dropout", str(node.target))
                self.assertNotIn("rand", str(node.target))
            self.copies += len(copied)
            return result

        torch.manual_seed(0)
        x, w = (torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(2))
        pass_.use_site_remat = watched
        try:
            with functorch_config.patch(activation_memory_budget=budget):
                compiled = aot_function(
                    program(steps),
                    fw_compiler=forward,
                    bw_compiler=forward,
                    partition_fn=min_cut_rematerialization_partition,
                )
                torch.manual_seed(1)
                compiled(x, w).backward()
        finally:
            pass_.use_site_remat = plain
        return [x.grad, w.grad], peaks

    def check(self, mode):
        self.copies = 0
        programs_run = 0

        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(programs, st.sampled_from([0.0, 0.1, 0.5, 1.0]))
        def run(steps, budget):
            nonlocal programs_run
            programs_run += 1
            want, _ = self.gradients(steps, budget)
            with torch_overlay.applied(f"remat={mode}"):
                got, peaks = self.gradients(steps, budget)
            for g, w in zip(got, want, strict=True):
                self.assertEqual(g is None, w is None)
                if g is not None:
                    self.assertEqual(g, w, rtol=0, atol=0)
            for before, after in peaks:
                self.assertLessEqual(after, before)

        run()
        self.assertGreaterEqual(programs_run, EXAMPLES)
        # The programs are not too tame for the pass: it did change many of them.
        self.assertGreater(self.copies, EXAMPLES // 4)

    def test_light(self):
        self.check("light")

    def test_all(self):
        self.check("all")


if __name__ == "__main__":
    run_tests()
