"""Which helper a Triton kernel draws random numbers with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._inductor import config
from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from torch._inductor.codegen.common import CSEVariable


def uses_philox_helpers() -> bool:
    """Whether the kernel in hand draws from the stream of ``philox_helpers``."""
    if config.align_random_eager or config.fallback_random:
        return False
    return V.graph.get_current_device_or_throw().type == "cuda"


def philox_draw(kind: str, *arguments: CSEVariable | str | int) -> str | None:
    """Code of a draw by ``philox_helpers``, or None where another stream is due.

    Args:
        kind: "rand", "randn" or "randint64".
        arguments: seed, logical offset, and what else the helper takes.
    """
    if not uses_philox_helpers():
        return None
    return f"philox_helpers.{kind}({', '.join(map(str, arguments))})"
