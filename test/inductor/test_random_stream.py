# Owner(s): ["module: inductor"]
"""Values of Triton random draws, against Philox in NumPy; no GPU is needed.

Everything here runs in Triton's interpreter, which has to be chosen before Triton is
imported: without ``TRITON_INTERPRET=1`` the one test runs this file again with it.
"""

import os
import random
import subprocess
import sys
import unittest
from pathlib import Path

import numpy as np
import torch
from torch._inductor import config
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._triton import has_triton_package

import torch_overlay  # overlay only


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CASES = 700
if INTERPRETED:
    import triton
    import triton.language as tl

    from torch_overlay._inductor.runtime import philox_helpers, philox_quads

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from pretend_cuda import interpreted, layout, triton_code


def philox(seed, counter):
    """The four uint32 words of Philox4x32-10 for uint64 counters."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    key = np.array([seed % 2**32, seed % 2**64 >> 32], np.uint64)
    step = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
    zero = np.zeros_like(counter)
    c0, c1, c2, c3 = counter & mask, counter >> half, zero, zero
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (b >> half) ^ c1 ^ key[0], b & mask
        c2, c3 = (a >> half) ^ c3 ^ key[1], a & mask
        key = (key + step) & mask
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def uniform(words):
    """Triton's float32 in [0, 1) of a uint32 word."""
    signed = np.ascontiguousarray(words).view(np.int32)
    signed = np.where(signed < 0, -signed - 1, signed)
    return signed.astype(np.float32) * np.float32(4.6566127342e-10)


def picked(words, offsets):
    index = (offsets & np.uint64(3)).astype(np.int64)
    return np.take_along_axis(words, index[None], 0)[0]


def rand(seed, offsets):
    return uniform(picked(philox(seed, offsets >> np.uint64(2)), offsets))


def randn(seed, offsets):
    u = uniform(philox(seed, offsets >> np.uint64(2)))
    numbers = []
    for radius, angle in ((u[0], u[1]), (u[2], u[3])):
        radius = np.maximum(np.float32(1.0e-7), radius)
        radius = np.sqrt(np.float32(-2.0) * np.log(radius))
        turn = np.float32(6.283185307179586) * angle
        numbers += [radius * np.cos(turn), radius * np.sin(turn)]
    return picked(np.stack(numbers), offsets)


def randint64(seed, offsets, low, high):
    words = philox(seed, offsets).astype(np.uint64)
    drawn = words[0] | (words[1] << np.uint64(32))
    return (drawn % np.uint64(high - low)).astype(np.int64) + low


@unittest.skipIf(not has_triton_package(), "needs Triton")
@unittest.skipIf(INTERPRETED, "is what runs the others")
class TestInTheInterpreter(TestCase):
    def test_this_file(self):
        env = {**os.environ, "TRITON_INTERPRET": "1", "CI": ""}
        done = subprocess.run(
            [sys.executable, __file__],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.assertEqual(done.returncode, 0, done.stdout[-4000:])
        self.assertRegex(done.stdout, r"Ran [1-9]\d* tests")


if INTERPRETED:

    @triton.jit
    def draw_kernel(
        out,
        seed_pointer,
        base,
        stride0,
        stride1,
        stride2,
        AXIS: tl.constexpr,
        ALIGNED: tl.constexpr,
        NORMAL: tl.constexpr,
        SIZE0: tl.constexpr,
        SIZE1: tl.constexpr,
        SIZE2: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        """One block of offsets base + i * stride0 + ...; sizes of 0 are no axis."""
        seed = tl.load(seed_pointer)
        i0 = tl.arange(0, SIZE0)
        if SIZE2:
            i0 = i0[:, None, None]
            i1 = tl.arange(0, SIZE1)[None, :, None]
            i2 = tl.arange(0, SIZE2)[None, None, :]
            place = (i0 * SIZE1 + i1) * SIZE2 + i2
            offset = i0 * stride0 + i1 * stride1 + i2 * stride2
        elif SIZE1:
            i0 = i0[:, None]
            i1 = tl.arange(0, SIZE1)[None, :]
            place = i0 * SIZE1 + i1
            offset = i0 * stride0 + i1 * stride1
        else:
            place = i0
            offset = i0 * stride0
        if WIDE:
            offset = offset.to(tl.int64) + base
        else:
            offset = (offset + base).to(tl.int32)
        if AXIS is None:
            if NORMAL:
                value = philox_helpers.randn(seed, offset)
            else:
                value = philox_helpers.rand(seed, offset)
        elif NORMAL:
            value = philox_quads.randn(seed, offset, AXIS, ALIGNED)
        else:
            value = philox_quads.rand(seed, offset, AXIS, ALIGNED)
        tl.store(out + place, value)

    @triton.jit
    def randint_kernel(out, seed_pointer, base, SIZE: tl.constexpr):
        place = tl.arange(0, SIZE)
        seed = tl.load(seed_pointer)
        low = tl.full([SIZE], -5, tl.int64)
        high = tl.full([SIZE], 100, tl.int64)
        drawn = philox_helpers.randint64(seed, place.to(tl.int64) + base, low, high)
        tl.store(out + place, drawn)

    class TestHelpers(TestCase):
        def run_case(self, rng, quads):
            rank = rng.randint(1, 3)
            blocks = (1, 2, 4, 8, 64, 1024) if rank == 1 else (1, 2, 4, 8, 16)
            sizes = [rng.choice(blocks) for _ in range(rank)]
            strides = [rng.choice((0, 1, 2, 3, 4, 7, 64, 4097)) for _ in range(rank)]
            base = rng.choice((0, 2, 2**31, 2**32, 2**33, 2**40)) + rng.randint(-9, 9)
            base = max(base, 0)
            axis, aligned = None, rng.random() < 0.5
            if quads:
                axis = rng.randrange(rank)
                if aligned:
                    strides = [s * 4 for s in strides]
                    base -= base % 4
                strides[axis] = 1
            if sum(s * (n - 1) for s, n in zip(strides, sizes, strict=True)) == 0:
                strides[0] = 1 if axis in (None, 0) else 4
            wide = base > 2**31 - 2**24 or rng.random() < 0.3
            normal = rng.random() < 0.4
            seed = rng.choice((rng.randrange(-(2**63), 2**63), rng.randrange(9)))
            out = torch.empty(sizes)
            full = [*sizes, 0, 0][:3]
            draw_kernel[(1,)](
                out,
                torch.tensor([seed]),
                base,
                *[*strides, 0, 0][:3],
                AXIS=axis,
                ALIGNED=aligned,
                NORMAL=normal,
                SIZE0=full[0],
                SIZE1=full[1],
                SIZE2=full[2],
                WIDE=wide,
            )
            grids = np.meshgrid(*map(np.arange, sizes), indexing="ij")
            offsets = sum(g * s for g, s in zip(grids, strides, strict=True)) + base
            offsets = offsets.astype(np.uint64)
            right = (randn if normal else rand)(seed, offsets)
            told = f"{sizes} {strides} {base} {axis} {aligned} {normal} {wide} {seed}"
            self.assertTrue(np.array_equal(out.numpy(), right), told)

        def test_any_offsets(self):
            rng = random.Random(0)
            for _ in range(2 * CASES):
                self.run_case(rng, quads=False)

        def test_quads(self):
            rng = random.Random(1)
            for _ in range(CASES):
                self.run_case(rng, quads=True)

        def test_integers(self):
            for base in (0, 2**32 - 8, 2**40):
                out = torch.empty(64, dtype=torch.int64)
                randint_kernel[(1,)](out, torch.tensor([7]), base, SIZE=64)
                offsets = np.arange(base, base + 64, dtype=np.uint64)
                right = randint64(7, offsets, -5, 100)
                self.assertTrue(np.array_equal(out.numpy(), right))

        def test_known_answer(self):
            words = philox(0, np.zeros(1, np.uint64))[:, 0]
            known = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
            self.assertEqual(words.tolist(), known)

        def test_distribution(self):
            n = 2**20
            u = rand(12345, np.arange(2**32 - n // 2, 2**32 + n // 2, dtype=np.uint64))
            u = u.astype(np.float64)
            self.assertLess(abs(u.mean() - 0.5), 4 / np.sqrt(12 * n))
            counts = np.bincount((u * 64).astype(int), minlength=64)
            chi2 = ((counts - n / 64) ** 2 / (n / 64)).sum()
            self.assertLess(abs(chi2 - 63), 5 * np.sqrt(2 * 63))
            for lag in (1, 2, 3, 4, 8, 64):
                correlation = np.corrcoef(u[:-lag], u[lag:])[0, 1]
                self.assertLess(abs(correlation), 5 / np.sqrt(n))


if INTERPRETED:

    def drawn(*shape, normal=False):
        """A function of x that adds a draw of a shape; x is zero."""
        call = torch.randn if normal else torch.rand
        return lambda x: x + call(shape, device=x.device)

    def tiled(*shape, normal=False):
        """A program that adds a draw and a turned tensor: a tiled kernel."""
        fn = drawn(*shape, normal=normal)
        turned = layout(*shape, stride=(1, shape[0]))
        return (lambda x, y: fn(x) + y), (layout(*shape), turned), shape, None, {}

    # Name -> (function of zeros, their layout, shape of the draw, what it makes of the
    # drawn numbers, Inductor options)
    PROGRAMS = {
        "contiguous": (drawn(16, 36), layout(16, 36), (16, 36), None, {}),
        "odd": (drawn(33, 7), layout(33, 7), (33, 7), None, {}),
        "tiled": tiled(16, 12),
        "tiled, odd": tiled(15, 11),
        "tiled, normal": tiled(16, 12, normal=True),
        "transposed": (
            drawn(16, 12),
            layout(16, 12, stride=(1, 16)),
            (16, 12),
            None,
            {},
        ),
        "transposed, odd": (
            drawn(15, 11),
            layout(15, 11, stride=(1, 15)),
            (15, 11),
            None,
            {},
        ),
        "strided in 1-D": (
            drawn(16, 12),
            layout(16, 12, stride=(1, 16)),
            (16, 12),
            None,
            {"triton.max_tiles": 1},
        ),
        "permuted": (
            drawn(4, 12, 8),
            layout(4, 12, 8, stride=(12, 1, 48)),
            (4, 12, 8),
            None,
            {},
        ),
        "permuted in 1-D": (
            drawn(4, 12, 8),
            layout(4, 12, 8, stride=(12, 1, 48)),
            (4, 12, 8),
            None,
            {"triton.max_tiles": 1},
        ),
        "permuted in 3-D": (
            drawn(4, 12, 8),
            layout(4, 12, 8, stride=(12, 1, 48)),
            (4, 12, 8),
            None,
            {"triton.max_tiles": 3, "triton.prefer_nd_tiling": True},
        ),
        "persistent reduction": (
            lambda x: (x + torch.rand(16, 64, device=x.device)).amax(-1),
            layout(16, 64),
            (16, 64),
            lambda r: r.max(-1),
            {},
        ),
        "looped reduction": (
            lambda x: (x + torch.rand(2, 600, device=x.device)).amax(-1),
            layout(2, 600),
            (2, 600),
            lambda r: r.max(-1),
            {"triton.persistent_reductions": False},
        ),
        "looped reduction, odd": (
            lambda x: (x + torch.rand(2, 515, device=x.device)).amax(-1),
            layout(2, 515),
            (2, 515),
            lambda r: r.max(-1),
            {"triton.persistent_reductions": False},
        ),
        "reduction of the outer axis": (
            lambda x: (x + torch.rand(64, 16, device=x.device)).amax(0),
            layout(64, 16),
            (64, 16),
            lambda r: r.max(0),
            {},
        ),
        "normal": (drawn(16, 36, normal=True), layout(16, 36), (16, 36), None, {}),
        "normal, transposed": (
            drawn(16, 12, normal=True),
            layout(16, 12, stride=(1, 16)),
            (16, 12),
            None,
            {},
        ),
        "broadcast": (
            drawn(16, 1),
            layout(16, 12),
            (16, 1),
            lambda r: np.broadcast_to(r, (16, 12)),
            {},
        ),
        "scalar": (
            drawn(),
            layout(64),
            (),
            lambda r: np.broadcast_to(r, (64,)),
            {},
        ),
    }
    BLOCKS = (
        {"XBLOCK": 4, "YBLOCK": 4, "ZBLOCK": 2, "R0_BLOCK": 16},
        {"XBLOCK": 32, "YBLOCK": 2, "ZBLOCK": 4, "R0_BLOCK": 256},
    )

    class TestKernels(TestCase):
        def assertCanonical(self, name, expected=True, blocks=BLOCKS):
            _, like, _, _, options = PROGRAMS[name]
            likes = like if isinstance(like, tuple) else (like,)
            code = triton_code(PROGRAMS[name][0], *likes, **options)
            for sizes in blocks:
                out, right = self.values(name, code, likes, sizes)
                equal = np.array_equal(out, right)
                self.assertEqual(equal, expected, f"{name} {sizes}")

        def values(self, name, code, likes, blocks):
            """What the generated kernel makes of zeros, and what is right."""
            _, _, shape, made, _ = PROGRAMS[name]
            zeros = [torch.empty_strided(t.shape, t.stride()).zero_() for t in likes]
            torch.manual_seed(1)
            (out,) = interpreted(code, **blocks)(zeros)
            torch.manual_seed(1)
            bounds = torch.iinfo(torch.int64)
            seed = torch.empty(1, dtype=torch.int64)
            torch.ops.aten.randint.low_out(bounds.min, bounds.max, [1], out=seed)
            offsets = np.arange(np.prod(shape, dtype=int), dtype=np.uint64)
            value = (randn if "normal" in name else rand)(int(seed), offsets)
            value = value.reshape(shape)
            return out.numpy(), made(value) if made else value

        @torch_overlay.applied("rand4x")  # overlay only
        def test_quads(self):
            for name in PROGRAMS:
                self.assertCanonical(name)

        # overlay only: begin
        @torch_overlay.applied("rand4x=words")
        def test_words(self):
            for name in PROGRAMS:
                self.assertCanonical(name, blocks=BLOCKS[:1])

        def test_plain_torch_differs(self):
            for name in ("tiled", "persistent reduction", "strided in 1-D"):
                self.assertCanonical(name, False, BLOCKS[1:])
            # What was right stays: releases with the 4x path on, in 1-D.
            four = not hasattr(config, "use_rand4x")
            self.assertCanonical("normal", four, BLOCKS[1:])

        # overlay only: end


if __name__ == "__main__":
    run_tests()
