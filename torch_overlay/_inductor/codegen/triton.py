from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay._overrides import overrides


if TYPE_CHECKING:
    from collections.abc import Callable

    import sympy
    import torch
    from torch._inductor.codegen.common import CSEVariable


def _draw(
    kind: str, original: Callable[..., str], seed: CSEVariable, offset: CSEVariable
) -> str:
    from .philox_draw import philox_draw
    from .quad_axis import quad_draw

    draw = quad_draw(kind, seed, offset) or philox_draw(kind, seed, offset)
    return draw or original(seed, offset)


@overrides(
    "torch._inductor.codegen.triton:TritonOverrides.rand",
    feature="rand4x",
    patch="one-random-stream",
    issue="pytorch/pytorch#198333",
)
def rand(original: Callable[..., str], seed: CSEVariable, offset: CSEVariable) -> str:
    return _draw("rand", original, seed, offset)


@overrides(
    "torch._inductor.codegen.triton:TritonOverrides.randn",
    feature="rand4x",
    patch="one-random-stream",
    issue="pytorch/pytorch#198333",
)
def randn(original: Callable[..., str], seed: CSEVariable, offset: CSEVariable) -> str:
    return _draw("randn", original, seed, offset)


@overrides(
    "torch._inductor.codegen.triton:TritonOverrides.randint64",
    feature="rand4x",
    patch="one-random-stream",
    issue="pytorch/pytorch#198333",
)
def randint64(
    original: Callable[..., str],
    seed: CSEVariable,
    offset: CSEVariable,
    low: CSEVariable,
    high: CSEVariable,
) -> str:
    from .philox_draw import philox_draw

    return philox_draw("randint64", seed, offset, low, high) or original(
        seed, offset, low, high
    )


@overrides(
    "torch._inductor.codegen.triton:TritonKernelOverrides.index_expr",
    feature="rand4x",
    patch="random-quads",
    issue="pytorch/pytorch#198333",
)
def index_expr(
    original: Callable[..., CSEVariable],
    cls: type,
    expr: sympy.Expr,
    dtype: torch.dtype,
) -> CSEVariable:
    var = original(cls, expr, dtype)
    var.index_expr = expr  # pyrefly: ignore [missing-attribute]
    return var


@overrides(
    "torch._inductor.codegen.triton:TritonKernel.gen_common_triton_imports",
    feature="rand4x",
    patch="one-random-stream",
    issue="pytorch/pytorch#198333",
)
def gen_common_triton_imports(original: Callable[..., str], cls: type) -> str:
    # Kernels import the helpers themselves: compile workers do not have the overlay on.
    helpers = "from torch_overlay._inductor.runtime import philox_helpers, philox_quads"
    return f"{original(cls)}{helpers}\n"
