"""Finds a block axis along which a kernel's random offsets come in quads.

Offsets come in quads along an axis if they grow by one within each group of four: the
offset of element 4k + j is j + rest(k).  They are aligned if rest(k) is a multiple of
four.  Whatever cannot be proved from the index expression counts as no: the draw then
selects words one by one, with the same values.
"""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING

import sympy
from torch._inductor import config
from torch._inductor.codegen.simd import IterationRangesRoot
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv, Identity, ModularIndexing

from .philox_draw import uses_philox_helpers


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._inductor.codegen.common import CSEVariable
    from torch._inductor.codegen.triton import TritonKernel


class InQuad(NamedTuple):
    """An expression at element 4k + j, 0 <= j < 4, as ``slope * j + rest(k)``.

    ``residue`` is ``rest`` modulo 4, or None if that is not known.
    """

    slope: int
    residue: int | None


_QUAD = InQuad(1, 0)


def _residue_sum(parts: list[int | None]) -> int | None:
    return None if None in parts else sum(p or 0 for p in parts) % 4


def _of_sum(parts: list[InQuad]) -> InQuad:
    return InQuad(sum(p.slope for p in parts), _residue_sum([p.residue for p in parts]))


def _of_product(parts: list[InQuad], constants: list[int | None]) -> InQuad | None:
    """Product of factors; one that changes along the axis may only meet integers."""
    changing = [i for i, p in enumerate(parts) if p.slope]
    others = [c for i, c in enumerate(constants) if i not in changing]
    slope = 0
    if changing:
        if len(changing) > 1 or None in others:
            return None
        slope = parts[changing[0]].slope
        for factor in others:
            slope *= factor or 0
    residue: int | None = 1
    for part in parts:
        if part.residue == 0 or residue == 0:
            residue = 0
        elif part.residue is None or residue is None:
            residue = None
        else:
            residue = residue * part.residue % 4
    return InQuad(slope, residue)


def in_quad(
    expr: sympy.Expr, axis: sympy.Symbol, is_quadruple: Callable[[sympy.Expr], bool]
) -> InQuad | None:
    """``expr`` along ``axis``, or None if it has no such form.

    Args:
        is_quadruple: whether an expression is known to be a multiple of 4 everywhere.
    """
    if isinstance(expr, sympy.Integer):
        return InQuad(0, int(expr) % 4)
    if expr == axis:
        return _QUAD
    if not expr.has(axis) and is_quadruple(expr):
        return InQuad(0, 0)
    if isinstance(expr, (sympy.Add, sympy.Mul)):
        parts = [in_quad(a, axis, is_quadruple) for a in expr.args]
        known = [p for p in parts if p is not None]
        if len(known) < len(parts):
            return None
        if isinstance(expr, sympy.Add):
            return _of_sum(known)
        integers = [int(a) if a.is_Integer else None for a in expr.args]
        return _of_product(known, integers)
    if isinstance(expr, Identity):
        return in_quad(expr.args[0], axis, is_quadruple)
    if not expr.has(axis):
        return InQuad(0, None)
    if isinstance(expr, FloorDiv):
        base, divisor = expr.args
        modulus = None
    elif isinstance(expr, ModularIndexing):
        base, divisor, modulus = expr.args
    else:
        return None
    if divisor.has(axis) or (modulus is not None and modulus.has(axis)):
        return None
    form = in_quad(base, axis, is_quadruple)
    if form is not None and form.slope == 0:
        return InQuad(0, None)
    if form != _QUAD:
        return None
    if is_quadruple(divisor):
        return InQuad(0, None)
    if divisor == 1 and modulus is not None and is_quadruple(modulus):
        return _QUAD
    return None


def quad_axis(kernel: TritonKernel, offset: sympy.Expr) -> tuple[int, bool] | None:
    """Block axis along which ``offset`` comes in quads, and whether they are aligned.

    None if no axis is proved to.  Blocks start at multiples of their size, a power of
    two, along the plain axes of a pointwise or reduction kernel; other kernels are
    refused.
    """
    from torch._inductor.codegen.triton import TritonKernel

    if type(kernel) is not TritonKernel:
        return None
    if kernel.is_native_matmul or kernel.cooperative_reduction:
        return None
    sizes = V.graph.sizevars
    loops = {tree.symbol() for tree in kernel.range_trees}
    loops.update(kernel.range_tree_nodes)

    def is_quadruple(expr: sympy.Expr) -> bool:
        if expr.free_symbols & loops:
            return False
        return sizes.statically_known_multiple_of(expr, 4)

    offset = sizes.remove_precomputed_replacements(offset)
    unaligned = None
    for tree in kernel.active_range_trees():
        plain = type(tree) is IterationRangesRoot and tree.tensor_dim is not None
        if not plain or (kernel.mix_order_reduction and tree.prefix == "x"):
            continue
        root = tree.symbol()
        in_root = {
            symbol: sizes.remove_precomputed_replacements(entry.expr)
            for symbol, entry in kernel.range_tree_nodes.items()
            if entry.root is tree and symbol != root
        }
        form = in_quad(offset.xreplace(in_root), root, is_quadruple)
        if form == _QUAD:
            return tree.tensor_dim, True
        if form is not None and form.slope == 1:
            unaligned = tree.tensor_dim, False
    return unaligned


def quad_draw(kind: str, seed: CSEVariable, offset: CSEVariable) -> str | None:
    """Code of a draw by ``philox_quads``, or None where offsets come in no quads."""
    expr = getattr(offset, "index_expr", None)
    if config.rand_draw != "quads" or expr is None or not uses_philox_helpers():
        return None
    found = quad_axis(V.kernel, V.kernel.prepare_indexing(expr))
    if found is None:
        return None
    axis, aligned = found
    return f"philox_quads.{kind}({seed}, {offset}, {axis}, {aligned})"
