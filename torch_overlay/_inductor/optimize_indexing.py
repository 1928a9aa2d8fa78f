from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._overrides import overrides


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx


@overrides(
    "torch._inductor.optimize_indexing:_ValueUseAnalysis.rule_for_node",
    feature="rand4x",
    patch="one-random-stream",
    issue="pytorch/pytorch#198333",
)
def rule_for_node(original: Callable[..., Any], self: Any, node: fx.Node) -> Any:
    from torch._inductor.optimize_indexing import _ValueUseRule

    if node.op == "call_method" and node.target in ("rand", "randn", "randint64"):
        # The offset follows the kernel's index dtype instead of int32.
        _, seed, offset, *others = node.args
        return _ValueUseRule(value_inputs=(seed, *others), indexing_inputs=(offset,))
    return original(self, node)
