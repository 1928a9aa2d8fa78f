from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay._overrides import overrides


if TYPE_CHECKING:
    from collections.abc import Callable

    Solver = Callable[..., tuple[float, list[int], list[int]]]

_MODULE = "torch._functorch._activation_checkpointing.knapsack"


@overrides(
    f"{_MODULE}:dp_knapsack_sliding_hirschberg",
    feature="knapsack",
    patch="bounded-knapsack",
    issue="pytorch/pytorch#197871",
)
def dp_knapsack_sliding_hirschberg(
    original: Solver, memory: list[float], runtime: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    from .bounded_knapsack import bounded_knapsack

    return bounded_knapsack(memory, runtime, max_memory)


@overrides(
    f"{_MODULE}:dp_knapsack",
    feature="knapsack",
    patch="bounded-knapsack",
    issue="pytorch/pytorch#197871",
)
def dp_knapsack(
    original: Solver, memory: list[float], runtime: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    from .bounded_knapsack import within_budget

    return within_budget(original, memory, runtime, max_memory)


@overrides(
    f"{_MODULE}:greedy_knapsack",
    feature="knapsack",
    patch="bounded-knapsack",
    issue="pytorch/pytorch#197871",
)
def greedy_knapsack(
    original: Solver, memory: list[float], runtimes: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    from .bounded_knapsack import greedy_knapsack

    return greedy_knapsack(memory, runtimes, max_memory)


@overrides(
    f"{_MODULE}:ilp_knapsack",
    feature="knapsack",
    patch="bounded-knapsack",
    issue="pytorch/pytorch#197871",
)
def ilp_knapsack(
    original: Solver, memory: list[float], runtimes: list[float], max_memory: float
) -> tuple[float, list[int], list[int]]:
    from .bounded_knapsack import within_budget

    return within_budget(original, memory, runtimes, max_memory)
