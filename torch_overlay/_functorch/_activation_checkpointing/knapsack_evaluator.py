from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._overrides import overrides


if TYPE_CHECKING:
    from collections.abc import Callable

    import networkx as nx


def recompute(node: str, node_graph: nx.DiGraph[str], present: set[str]) -> list[str]:
    """``node`` and the ancestors that it needs, nearest first; all become present."""
    present.add(node)
    needed = [node]
    for name in needed:
        for source in node_graph.predecessors(name):
            if source not in present:
                present.add(source)
                needed.append(source)
    return needed


@overrides(
    "torch._functorch._activation_checkpointing.knapsack_evaluator:"
    "KnapsackEvaluator._get_backward_memory_from_topologically_sorted_graph",
    feature="knapsack",
    patch="evaluator-saved-nodes",
    issue="pytorch/pytorch#196914",
)
def _get_backward_memory_from_topologically_sorted_graph(
    original: Callable[..., list[tuple[float, str]]],
    self: Any,
    node_graph: nx.DiGraph[str],
    node_memories: dict[str, float],
    saved_nodes_set: set[str],
    peak_memory_after_forward_pass: float,
) -> list[tuple[float, str]]:
    """Memory after each step of the backward; a saved node is never recomputed."""
    import networkx as nx

    # The graph is built from sets: its own order differs between processes (#196512).
    in_order = self._graph_info_provider.graph_nodes_in_order
    place = {name: i for i, name in enumerate(in_order)}
    order = list(nx.lexicographical_topological_sort(node_graph, key=place.__getitem__))
    present = set(saved_nodes_set)
    steps = [(peak_memory_after_forward_pass, "After the forward")]

    def step(change: float, what: str) -> None:
        steps.append((steps[-1][0] + change, what))

    for node in reversed(order):
        if node not in present:
            for needed in recompute(node, node_graph, present):
                step(node_memories[needed], f"Recompute {needed} for {node}")
        step(-node_memories[node], f"Drop {node}")
    return steps
