"""Random numbers of generated kernels, as functions of a seed and a logical offset.

Word ``offset % 4`` of Philox4x32-10 with the seed as key and ``offset // 4`` as counter
(Salmon et al., SC11), whatever the kernel's shape, block size or order of elements.
Neighbours share a counter, and where a thread holds four of them the compiler shares
the call.  See pytorch/pytorch#198333.
"""

from torch._inductor.runtime.triton_compat import tl, triton


@triton.jit
def unsigned_offset(offset):
    if offset.dtype.primitive_bitwidth == 64:
        return offset.to(tl.uint64, bitcast=True)
    else:
        return offset.to(tl.uint32)


@triton.jit
def counter_words(counter):
    """Low and high half of a counter; the high half is 0 for 32-bit offsets."""
    low = counter.to(tl.uint32)
    if counter.dtype.primitive_bitwidth == 64:
        return low, (counter >> 32).to(tl.uint32)
    else:
        return low, low * 0


@triton.jit
def _four_words(seed, offset):
    low, high = counter_words(offset >> 2)
    return tl.philox(seed, low, high, low * 0, low * 0)


@triton.jit
def rand(seed, offset):
    """Uniform float32 in [0, 1)."""
    offset = unsigned_offset(tl.to_tensor(offset))
    w0, w1, w2, w3 = _four_words(seed, offset)
    word = offset.to(tl.uint32) & 3
    front = tl.where(word == 0, w0, w1)
    back = tl.where(word == 2, w2, w3)
    return tl.uint_to_uniform_float(tl.where(word < 2, front, back))


@triton.jit
def randn(seed, offset):
    """Standard normal float32: words (0, 1) and (2, 3) make two numbers each."""
    offset = unsigned_offset(tl.to_tensor(offset))
    w0, w1, w2, w3 = _four_words(seed, offset)
    word = offset.to(tl.uint32) & 3
    radius = tl.uint_to_uniform_float(tl.where(word < 2, w0, w2))
    angle = tl.uint_to_uniform_float(tl.where(word < 2, w1, w3))
    first, second = tl.pair_uniform_to_normal(radius, angle)
    return tl.where((word & 1) == 0, first, second)


@triton.jit
def randint64(seed, offset, low, high):
    """int64 in [low, high) from words 0 and 1 of counter ``offset``."""
    w0, w1, _, _ = tl.randint4x(seed, unsigned_offset(tl.to_tensor(offset)))
    drawn = w0.to(tl.uint64) | (w1.to(tl.uint64) << 32)
    return (drawn % (high - low).to(tl.uint64)).to(tl.int64) + low
