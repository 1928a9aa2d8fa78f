"""The numbers of ``philox_helpers``, four at a time along one axis of a block.

For offsets that grow by one along ``AXIS`` within each group of four elements that
starts at a multiple of four.  If the groups' offsets start at multiples of four too
(``ALIGNED``) a group has one counter, else it has at most two: Philox runs once or
twice for four elements.
"""

from torch._inductor.runtime.triton_compat import tl, triton

from . import philox_helpers


@triton.jit
def _axis_last(block, AXIS: tl.constexpr):
    RANK: tl.constexpr = len(block.shape)
    if AXIS == RANK - 1:
        return block
    elif RANK == 2:
        return tl.permute(block, (1, 0))
    elif AXIS == 1:
        return tl.permute(block, (0, 2, 1))
    else:
        return tl.permute(block, (1, 2, 0))


@triton.jit
def _axis_in_place(block, AXIS: tl.constexpr):
    RANK: tl.constexpr = len(block.shape)
    if AXIS == RANK - 1:
        return block
    elif RANK == 2:
        return tl.permute(block, (1, 0))
    elif AXIS == 1:
        return tl.permute(block, (0, 2, 1))
    else:
        return tl.permute(block, (2, 0, 1))


@triton.jit
def _first_of_each_quad(block, AXIS: tl.constexpr):
    """Every fourth element along AXIS, which becomes the last axis."""
    block = _axis_last(block, AXIS)
    RANK: tl.constexpr = len(block.shape)
    QUADS: tl.constexpr = block.shape[RANK - 1] // 4
    if RANK == 1:
        quads = tl.reshape(block, (QUADS, 2, 2))
    elif RANK == 2:
        quads = tl.reshape(block, (block.shape[0], QUADS, 2, 2))
    else:
        quads = tl.reshape(block, (block.shape[0], block.shape[1], QUADS, 2, 2))
    even, _ = tl.split(quads)
    first, _ = tl.split(even)
    return first


@triton.jit
def _interleave(v0, v1, v2, v3, AXIS: tl.constexpr):
    """The four values of each quad side by side along AXIS."""
    RANK: tl.constexpr = len(v0.shape)
    SIZE: tl.constexpr = v0.shape[RANK - 1] * 4
    quads = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    if RANK == 1:
        block = tl.reshape(quads, (SIZE,))
    elif RANK == 2:
        block = tl.reshape(quads, (v0.shape[0], SIZE))
    else:
        block = tl.reshape(quads, (v0.shape[0], v0.shape[1], SIZE))
    return _axis_in_place(block, AXIS)


@triton.jit
def _two_counters(seed, offset, AXIS: tl.constexpr, ALIGNED: tl.constexpr):
    """Words of each group's first counter and, if it may need one, of the next."""
    # Only 32-bit halves are split: splitting 64-bit offsets would convert layouts.
    low, high = philox_helpers.counter_words(offset >> 2)
    low = _first_of_each_quad(low, AXIS)
    if offset.dtype.primitive_bitwidth == 64:
        high = _first_of_each_quad(high, AXIS)
    else:
        high = low * 0
    seed = tl.to_tensor(seed)
    if seed.numel != 1:
        seed = _first_of_each_quad(tl.broadcast_to(seed, offset.shape), AXIS)
    w0, w1, w2, w3 = tl.philox(seed, low, high, low * 0, low * 0)
    if ALIGNED:
        return w0, w1, w2, w3, w0, w1, w2, w3
    else:
        low += 1
        high += (low == 0).to(tl.uint32)
        w4, w5, w6, w7 = tl.philox(seed, low, high, low * 0, low * 0)
        return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _four_from(offset, v0, v1, v2, v3, v4, v5, v6, AXIS: tl.constexpr):
    """Values ``start`` to ``start + 3``; start is the first offset's place of four."""
    start = _first_of_each_quad(offset.to(tl.uint32) & 3, AXIS)
    by_two = start >= 2
    v0 = tl.where(by_two, v2, v0)
    v1 = tl.where(by_two, v3, v1)
    v2 = tl.where(by_two, v4, v2)
    v3 = tl.where(by_two, v5, v3)
    v4 = tl.where(by_two, v6, v4)
    by_one = (start & 1) == 1
    v0 = tl.where(by_one, v1, v0)
    v1 = tl.where(by_one, v2, v1)
    v2 = tl.where(by_one, v3, v2)
    v3 = tl.where(by_one, v4, v3)
    return v0, v1, v2, v3


@triton.jit
def rand(seed, offset, AXIS: tl.constexpr, ALIGNED: tl.constexpr):
    """``philox_helpers.rand``, for offsets that come in quads along AXIS."""
    if offset.shape[AXIS] >= 4:
        offset = philox_helpers.unsigned_offset(offset)
        w0, w1, w2, w3, w4, w5, w6, _ = _two_counters(seed, offset, AXIS, ALIGNED)
        if not ALIGNED:
            w0, w1, w2, w3 = _four_from(offset, w0, w1, w2, w3, w4, w5, w6, AXIS)
        u0 = tl.uint_to_uniform_float(w0)
        u1 = tl.uint_to_uniform_float(w1)
        u2 = tl.uint_to_uniform_float(w2)
        u3 = tl.uint_to_uniform_float(w3)
        return _interleave(u0, u1, u2, u3, AXIS)
    else:
        return philox_helpers.rand(seed, offset)


@triton.jit
def _normal_pair(first, second):
    u1 = tl.uint_to_uniform_float(first)
    u2 = tl.uint_to_uniform_float(second)
    return tl.pair_uniform_to_normal(u1, u2)


@triton.jit
def randn(seed, offset, AXIS: tl.constexpr, ALIGNED: tl.constexpr):
    """``philox_helpers.randn``, for offsets that come in quads along AXIS."""
    if offset.shape[AXIS] >= 4:
        offset = philox_helpers.unsigned_offset(offset)
        w0, w1, w2, w3, w4, w5, w6, w7 = _two_counters(seed, offset, AXIS, ALIGNED)
        n0, n1 = _normal_pair(w0, w1)
        n2, n3 = _normal_pair(w2, w3)
        if not ALIGNED:
            n4, n5 = _normal_pair(w4, w5)
            n6, _ = _normal_pair(w6, w7)
            n0, n1, n2, n3 = _four_from(offset, n0, n1, n2, n3, n4, n5, n6, AXIS)
        return _interleave(n0, n1, n2, n3, AXIS)
    else:
        return philox_helpers.randn(seed, offset)
