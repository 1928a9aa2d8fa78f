# Owner(s): ["module: inductor"]
import itertools
import random
import re
import sys
import unittest
from pathlib import Path
from unittest import mock

import sympy
import torch
import torch.nn.functional as F
from torch._inductor import config, select_algorithm
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._sympy.functions import FloorDiv, ModularIndexing
from torch.utils._triton import has_triton_package

import torch_overlay  # overlay only
from torch_overlay._inductor.codegen.quad_axis import in_quad


HAS_TRITON = has_triton_package()
if HAS_TRITON:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from pretend_cuda import body, instructions, kernels, layout, triton_code


def dropout(x):
    return F.dropout(x, 0.5)


def add_transposed(x, y):
    return F.dropout(x, 0.5) + y


def draw_of(source):
    """The call that draws in a kernel, with the line of its offset."""
    lines = [line.strip() for line in body(source).splitlines()]
    (draw,) = (s for s in lines if re.search(r"\brandn?(4x|int64)?\(", s))
    offset = re.search(r"tmp\d+, \(?(tmp\d+)", draw)[1]
    (made,) = (s for s in lines if s.startswith(f"{offset} = "))
    return f"{made}\n{draw}"


def only_kernel(fn, *tensors, **options):
    found = [
        (name, source)
        for name, source in kernels(triton_code(fn, *tensors, **options))
        if "inductor_random" in name
    ]
    (kernel,) = found
    return kernel


AUTOTUNED = {
    "max_autotune": True,
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "TRITON",
}


@unittest.skipIf(not HAS_TRITON, "needs Triton")
class TestGeneratedCode(TestCase):
    def draw(self, fn, *tensors, **options):
        return draw_of(only_kernel(fn, *tensors, **options)[1])

    def draws(self):
        half = torch.bfloat16
        square = layout(64, 64, dtype=half)
        programs = {
            "1-D": (dropout, [layout(64, 36)], {}),
            "tiled": (add_transposed, [square, layout(64, 64, stride=(1, 64))], {}),
            "persistent": (lambda x: dropout(x.softmax(-1)), [layout(64, 128)], {}),
            "looped": (lambda x: dropout(x).sum(-1), [layout(64, 65536)], {}),
            "template": (
                lambda x, y: dropout(x @ y),
                [layout(256, 512, dtype=half), layout(512, 256, dtype=half)],
                AUTOTUNED,
            ),
        }
        return "\n".join(
            f"{name}\n{self.draw(fn, *tensors, **options)}"
            for name, (fn, tensors, options) in programs.items()
        )

    @torch_overlay.applied("rand4x")  # overlay only
    def test_quads(self):
        self.assertExpectedInline(
            self.draws(),
            """\
1-D
tmp1 = (x0).to(tl.int32)
tmp2 = philox_quads.rand(tmp0, tmp1, 0, True)
tiled
tmp1 = (x1 + 64*y0).to(tl.int32)
tmp2 = philox_quads.rand(tmp0, tmp1, 1, True)
persistent
tmp12 = (r0_1 + 128*x0).to(tl.int32)
tmp13 = philox_quads.rand(tmp11, tmp12, 1, True)
looped
tmp1 = (r0_1 + 8192*x0).to(tl.int32)
tmp2 = philox_quads.rand(tmp0, tmp1, 1, True)
template
tmp3 = (tl.broadcast_to(xindex, [BLOCK_M, BLOCK_N])).to(tl.int32)
tmp4 = philox_helpers.rand(tmp2, tmp3)""",
        )

    # overlay only: begin
    @torch_overlay.applied("rand4x=words")
    def test_words(self):
        self.assertExpectedInline(
            self.draws(),
            """\
1-D
tmp1 = (x0).to(tl.int32)
tmp2 = philox_helpers.rand(tmp0, tmp1)
tiled
tmp1 = (x1 + 64*y0).to(tl.int32)
tmp2 = philox_helpers.rand(tmp0, tmp1)
persistent
tmp12 = (r0_1 + 128*x0).to(tl.int32)
tmp13 = philox_helpers.rand(tmp11, tmp12)
looped
tmp1 = (r0_1 + 8192*x0).to(tl.int32)
tmp2 = philox_helpers.rand(tmp0, tmp1)
template
tmp3 = (tl.broadcast_to(xindex, [BLOCK_M, BLOCK_N])).to(tl.int32)
tmp4 = philox_helpers.rand(tmp2, tmp3)""",
        )

    @unittest.skipIf(hasattr(config, "use_rand4x"), "draws numbers one by one")
    def test_plain_torch(self):
        self.assertExpectedInline(
            self.draws(),
            """\
1-D
tmp1 = (x0).to(tl.int32)
tmp2 = triton_helpers.rand4x(tmp0, (tmp1).to(tl.uint32), XBLOCK)
tiled
tmp1 = (x1 + 64*y0).to(tl.int32)
tmp2 = tl.rand(tmp0, (tmp1).to(tl.uint32))
persistent
tmp12 = (r0_1 + 128*x0).to(tl.int32)
tmp13 = tl.rand(tmp11, (tmp12).to(tl.uint32))
looped
tmp1 = (r0_1 + 8192*x0).to(tl.int32)
tmp2 = tl.rand(tmp0, (tmp1).to(tl.uint32))
template
tmp3 = (tl.broadcast_to(xindex, [BLOCK_M, BLOCK_N])).to(tl.int32)
tmp4 = tl.rand(tmp2, (tmp3).to(tl.uint32))""",
        )

    # overlay only: end

    @torch_overlay.applied("rand4x")  # overlay only
    def test_whole_kernel(self):
        source = only_kernel(dropout, layout(64, 36))[1]
        self.assertExpectedInline(
            body(source),
            """\
@triton.jit
def triton_poi_fused_inductor_random_inductor_seed_0(in_out_ptr0, in_ptr0, in_ptr1, load_seed_offset, xnumel, XBLOCK : tl.constexpr):
    xnumel = 2304
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex
    tmp6 = tl.load(in_ptr1 + (x0), xmask)
    tmp0 = tl.load(in_ptr0 + load_seed_offset)
    tmp1 = (x0).to(tl.int32)
    tmp2 = philox_quads.rand(tmp0, tmp1, 0, True)
    tmp3 = tl.full([1], 0.5, tl.float32)
    tmp4 = tmp2 > tmp3
    tmp5 = tmp4.to(tl.float32)
    tmp7 = tmp5 * tmp6
    tmp8 = tl.full([1], 2.0, tl.float32)
    tmp9 = tmp7 * tmp8
    tl.store(in_out_ptr0 + (x0), tmp9, xmask)""",  # noqa: E501
        )

    @torch_overlay.applied("rand4x")  # overlay only
    def test_large_draw_keeps_64_bit_offsets(self):
        large = layout(65536, 65537, dtype=torch.bfloat16)
        self.assertIn(".to(tl.int64)", self.draw(dropout, large))
        normal = self.draw(lambda x: x + torch.randn_like(x), large)
        self.assertIn(".to(tl.int64)", normal)

    @torch_overlay.applied("rand4x")  # overlay only
    def test_integers(self):
        def fn(x):
            return x + torch.randint(0, 9, (64, 36), device=x.device)

        (kernel,) = kernels(triton_code(fn, layout(64, 36)))
        self.assertRegex(body(kernel[1]), r"philox_helpers.randint64\(tmp\d+, tmp\d+,")

    @torch_overlay.applied("rand4x")  # overlay only
    def test_dynamic_sizes(self):
        draw = self.draw(dropout, layout(128, 96), dynamic=True)
        self.assertIn("philox_quads.rand(tmp0, tmp1, 0, True)", draw)

    @torch_overlay.applied("rand4x")  # overlay only
    def test_axis_that_does_not_come_in_quads(self):
        for like in (layout(63, 47, stride=(1, 63)), layout(64, 48, stride=(1, 64))):
            draw = self.draw(
                lambda x: x + torch.rand(x.shape, device=x.device),
                like,
                **{"triton.max_tiles": 1},
            )
            self.assertIn("philox_helpers.rand(", draw)

    @torch_overlay.applied("rand4x")  # overlay only
    def test_cooperative_reduction_and_split_scan(self):
        options = {"triton.force_cooperative_reductions": True}
        draw = self.draw(lambda x: dropout(x).sum(-1), layout(4, 65536), **options)
        self.assertIn("philox_helpers.rand(", draw)

    @torch_overlay.applied("rand4x")  # overlay only
    def test_aligned_with_eager_is_left_alone(self):
        for fn in (dropout, lambda x: x + torch.randn_like(x)):
            code = triton_code(fn, layout(64, 36), align_random_eager=True)
            for _, source in kernels(code):
                for helper in ("philox_helpers.rand", "philox_quads.rand"):
                    self.assertNotIn(helper, body(source))

    @torch_overlay.applied("rand4x")  # overlay only
    def test_fallback_is_left_alone(self):
        code = triton_code(dropout, layout(64, 36), fallback_random=True)
        self.assertNotIn("rand(tmp", code)
        self.assertIn("aten.", code)


@unittest.skipIf(not HAS_TRITON, "needs Triton")
class TestInstructions(TestCase):
    """A call of Philox is 20 wide multiplies; four neighbours share one."""

    SHARED, ALONE = 7, 16

    def wide_multiplies(self, num_warps, elements, fn, *tensors, **blocks):
        """Wide multiplies for each element that a thread handles."""
        name, source = only_kernel(fn, *tensors)
        found = instructions(name, source, num_warps, **blocks)
        wide = sum(o.startswith(("IMAD.WIDE", "IMAD.HI")) for o in found)
        return wide * 32 * num_warps / elements

    def counts(self):
        half = torch.bfloat16
        square = layout(4096, 4096, dtype=half)
        crossed = layout(4096, 4096, stride=(1, 4096), dtype=half)
        return {
            "1-D": self.wide_multiplies(4, 1024, dropout, square, XBLOCK=1024),
            "tiled": self.wide_multiplies(
                4, 2048, add_transposed, square, crossed, XBLOCK=64, YBLOCK=32
            ),
            "looped": self.wide_multiplies(
                8,
                2048,
                lambda x: dropout(x).sum(-1),
                layout(512, 65536, dtype=half),
                XBLOCK=1,
                R0_BLOCK=2048,
            ),
        }

    @torch_overlay.applied("rand4x")  # overlay only
    def test_quads_share_a_call(self):
        for name, count in self.counts().items():
            self.assertLess(count, self.SHARED, name)

    # overlay only: begin
    @torch_overlay.applied("rand4x=words")
    def test_compiler_shares_calls_of_words(self):
        counts = self.counts()
        self.assertLess(counts["1-D"], self.SHARED)
        self.assertLess(counts["looped"], self.SHARED)

    def test_plain_torch_calls_for_each_element(self):
        counts = self.counts()
        self.assertGreaterEqual(counts["tiled"], self.ALONE)
        self.assertGreaterEqual(counts["looped"], self.ALONE)

    # overlay only: end


@unittest.skipIf(
    not torch.cuda.is_available(),
    "needs CUDA; on the CPU: TestGeneratedCode and test_random_stream.py",
)
class TestCuda(TestCase):
    def compiled(self, fn, *args, **options):
        torch._dynamo.reset()
        with config.patch({"force_disable_caches": True, **options}):
            torch.manual_seed(0)
            return torch.compile(fn, fullgraph=True)(*args)

    @torch_overlay.applied("rand4x")  # overlay only
    def test_kernels_of_all_kinds_draw_the_same(self):
        def drawn(x):
            return x + torch.rand(x.shape, device=x.device)

        def normal(x):
            return x + torch.randn(x.shape, device=x.device)

        for fn, shape in itertools.product((drawn, normal), ((512, 384), (511, 383))):
            x = torch.zeros(shape, device="cuda")
            turned = torch.zeros(shape[::-1], device="cuda").t()
            right = self.compiled(fn, x)
            self.assertEqual(self.compiled(fn, turned), right, rtol=0, atol=0)
            tiled = self.compiled(lambda x, y: fn(x) + y, x, turned)
            self.assertEqual(tiled, right, rtol=0, atol=0)
            options = {"triton.max_tiles": 1}
            strided = self.compiled(fn, turned, **options)
            self.assertEqual(strided, right, rtol=0, atol=0)
            for persistent in (False, True):
                options = {"triton.persistent_reductions": persistent}
                found = self.compiled(lambda x: fn(x).amax(-1), x, **options)
                self.assertEqual(found, right.amax(-1), rtol=0, atol=0)
            options = {"triton.force_cooperative_reductions": True}
            found = self.compiled(lambda x: fn(x).amax(-1), x, **options)
            self.assertEqual(found, right.amax(-1), rtol=0, atol=0)

    @torch_overlay.applied("rand4x")  # overlay only
    def test_combo_and_block_pointer_kernels(self):
        def drawn(x):
            return x + torch.rand(x.shape, device=x.device)

        for shape in ((512, 384), (511, 383)):
            x = torch.zeros(shape, device="cuda")
            turned = torch.zeros(shape[::-1], device="cuda").t()
            right = self.compiled(drawn, x)
            options = {"combo_kernels": True, "benchmark_combo_kernel": False}
            pair = self.compiled(lambda x, y: (drawn(x), y.sin()), x, turned, **options)
            self.assertEqual(pair[0], right, rtol=0, atol=0)
            options = {"triton.use_block_ptr": True}
            tiled = self.compiled(lambda x, y: drawn(x) + y, x, turned, **options)
            self.assertEqual(tiled, right, rtol=0, atol=0)

    @torch_overlay.applied("rand4x")  # overlay only
    def test_template_epilogue(self):
        def fn(x, y):
            return (x @ y) * (torch.rand(384, 1024, device=x.device) > 0.5)

        def mask(x):
            return x + (torch.rand(384, 1024, device=x.device) > 0.5)

        x = torch.rand(384, 512, device="cuda") + 1
        y = torch.rand(512, 1024, device="cuda") + 1
        verify = {"atol": 1e-2, "rtol": 1e-2}
        with mock.patch.object(select_algorithm, "VERIFY", verify):
            found = self.compiled(fn, x, y, **AUTOTUNED)
        right = self.compiled(mask, torch.zeros(384, 1024, device="cuda"))
        self.assertEqual(found != 0, right != 0)

    @unittest.skipIf(
        torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 40 * 10**9,
        "needs 40 GB; on the CPU: test_large_draw_keeps_64_bit_offsets and the bases "
        "beyond 2**32 of test_random_stream.py",
    )
    @torch_overlay.applied("rand4x")  # overlay only
    def test_more_than_two_to_the_32(self):
        n, sample = 2**32 + 2**22, 2**22
        for call in (torch.rand, torch.randn):
            found = self.compiled(lambda x, c=call: x + c(n, device="cuda"), self.zero)
            same = (found[:sample] == found[-sample:]).float().mean().item()
            self.assertLess(same, 1e-4)
            del found

    zero = torch.zeros((), device="cuda") if torch.cuda.is_available() else None


class TestInQuad(TestCase):
    """``in_quad`` claims nothing that evaluation does not bear out."""

    AXIS, OTHER, SIZE = sympy.symbols("axis other size", integer=True, nonnegative=True)

    def leaves(self):
        numbers = [sympy.Integer(n) for n in (0, 1, 2, 3, 4, 8, 12, 64)]
        return [self.AXIS, self.AXIS, self.OTHER, 4 * self.SIZE, *numbers]

    def expressions(self, rng, depth):
        if depth == 0:
            return rng.choice(self.leaves())
        left = self.expressions(rng, depth - 1)
        right = self.expressions(rng, rng.randrange(depth))
        divisor = sympy.Integer(rng.choice((1, 1, 2, 4, 8, 12)))
        modulus = rng.choice((sympy.Integer(4), sympy.Integer(6), 4 * self.SIZE))
        return rng.choice(
            (
                lambda: left + right,
                lambda: left + right,
                lambda: left * right,
                lambda: FloorDiv(left, divisor),
                lambda: ModularIndexing(left, divisor, modulus),
            )
        )()

    def is_quadruple(self, expr):
        if expr.has(self.AXIS) or expr.has(self.OTHER):
            return False
        return expr.subs(self.SIZE, 1) % 4 == 0 and (expr / 4).is_polynomial(self.SIZE)

    def test_random_expressions(self):
        rng = random.Random(0)
        claims = 0
        for _ in range(1500):
            expr = sympy.sympify(self.expressions(rng, rng.randint(1, 3)))
            form = in_quad(expr, self.AXIS, self.is_quadruple)
            if form is None:
                continue
            for quad, other, size in itertools.product((0, 3, 8), (0, 5), (1, 3)):
                at = [
                    int(
                        expr.subs(
                            {
                                self.AXIS: 4 * quad + j,
                                self.OTHER: other,
                                self.SIZE: size,
                            }
                        )
                    )
                    for j in range(4)
                ]
                steps = [b - a for a, b in itertools.pairwise(at)]
                self.assertEqual(steps, [form.slope] * 3, str(expr))
                if form.residue is not None:
                    self.assertEqual(at[0] % 4, form.residue, str(expr))
            claims += form.slope == 1 and form.residue == 0
        self.assertGreater(claims, 50)


if __name__ == "__main__":
    run_tests()
