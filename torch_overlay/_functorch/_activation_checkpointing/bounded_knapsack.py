"""0-1 knapsack solvers that keep to their budget.

Items are saved values: memory as a ratio of the budget's base, runtime of their
recompute in any unit.  Solvers return ``(runtime, saved, recomputed)``: the runtime
that saving avoids, and the two index lists in ascending order.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Solution = tuple[float, list[int], list[int]]

# Units of a ratio of 1.  A weight is rounded up by less than one of them.
SCALE = 10000
# Float noise of a weight that is meant to be a whole number of units, and of sums.
_NOISE = 1e-6
_SUM_NOISE = 1e-9
# Cells of a decision table; larger problems are split.
_TABLE_CELLS = 1 << 20


def check_instance(
    memory: Sequence[float], runtimes: Sequence[float], max_memory: float
) -> None:
    """Refuse what is no knapsack instance.

    Raises:
        ValueError: lists of different lengths, or a number that is negative or not
            finite; the message names it.
    """
    if len(memory) != len(runtimes):
        raise ValueError(
            f"{len(memory)} memories, {len(runtimes)} runtimes: every item needs both"
        )
    if not 0 <= max_memory < math.inf:
        raise ValueError(
            f"the memory budget is {max_memory}; a finite number from 0 on is accepted"
        )
    for what, numbers in (("memory", memory), ("runtime", runtimes)):
        # A nan or an infinite number makes the sum one.
        if not numbers or (min(numbers) >= 0 and sum(numbers) < math.inf):
            continue
        for i, number in enumerate(numbers):
            if not 0 <= number < math.inf:
                raise ValueError(
                    f"the {what} of item {i} is {number}; finite numbers from 0 on are "
                    "accepted"
                )


def _profile(
    items: Sequence[tuple[int, float]],
    capacity: int,
    decisions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Best runtime for every capacity from 0 to ``capacity`` units.

    ``decisions[i, c]`` becomes whether item i is taken with capacity c, if given.
    """
    best = torch.zeros(capacity + 1, dtype=torch.float64)
    for i, (weight, runtime) in enumerate(items):
        if weight <= capacity:
            taken = best[: capacity + 1 - weight] + runtime
            if decisions is not None:
                torch.gt(taken, best[weight:], out=decisions[i, weight:])
            torch.maximum(best[weight:], taken, out=best[weight:])
    return best


def _by_table(items: Sequence[tuple[int, float]], capacity: int) -> list[int]:
    """Places of the items of a best choice, from a table of decisions."""
    decisions = torch.zeros(len(items), capacity + 1, dtype=torch.bool)
    _profile(items, capacity, decisions)
    chosen = []
    for i in range(len(items) - 1, -1, -1):
        if decisions[i, capacity]:
            chosen.append(i)
            capacity -= items[i][0]
    return chosen


def solve_units(
    weights: Sequence[int], runtimes: Sequence[float], capacity: int
) -> list[int]:
    """Indices of a best choice of items within ``capacity``, in ascending order.

    Memory is linear in the capacity (Hirschberg, 1975, pytorch/pytorch#197871): a
    problem that is too large for a table is split in two where the best runtimes of
    its halves add up to the most.
    """
    chosen = [i for i, w in enumerate(weights) if w == 0 and runtimes[i] > 0]
    useful = [i for i, w in enumerate(weights) if 0 < w <= capacity and runtimes[i] > 0]
    stack = [(0, len(useful), capacity)]
    while stack:
        start, end, room = stack.pop()
        segment = useful[start:end]
        total = sum(weights[i] for i in segment)
        if total <= room:
            chosen += segment
            continue
        items = [(weights[i], runtimes[i]) for i in segment]
        if len(items) == 1:
            continue
        if len(items) * (room + 1) <= _TABLE_CELLS:
            chosen += [segment[i] for i in _by_table(items, room)]
            continue
        middle = len(items) // 2
        both = _profile(items[:middle], room) + _profile(items[middle:], room).flip(0)
        first = int(torch.argmax(both))
        stack.append((start + middle, end, room - first))
        stack.append((start, start + middle, first))
    return sorted(chosen)


def _solution(saved: Sequence[int], runtimes: Sequence[float]) -> Solution:
    kept = set(saved)
    rest = [i for i in range(len(runtimes)) if i not in kept]
    return math.fsum(runtimes[i] for i in saved), sorted(saved), rest


def bounded_knapsack(
    memory: Sequence[float], runtimes: Sequence[float], max_memory: float
) -> Solution:
    """A best choice in whole units, within the budget in memory linear in it.

    Weights are rounded up to 1/SCALE and the capacity down, so that what is saved never
    exceeds ``max_memory``; n items may leave up to n / SCALE of it unused, which is
    filled with what still fits.

    Raises:
        ValueError: see :func:`check_instance`.
    """
    check_instance(memory, runtimes, max_memory)
    weights = [math.ceil(m * SCALE - _NOISE) for m in memory]
    saved = solve_units(weights, runtimes, math.floor(max_memory * SCALE + _NOISE))
    if not _fits(saved, memory, max_memory):
        saved = _trimmed(saved, memory, runtimes, max_memory)
    return _filled(saved, memory, runtimes, max_memory)


def _fits(saved: Sequence[int], memory: Sequence[float], max_memory: float) -> bool:
    total = math.fsum(memory[i] for i in saved)
    return total <= max_memory * (1 + _SUM_NOISE)


def _trimmed(
    saved: list[int],
    memory: Sequence[float],
    runtimes: Sequence[float],
    max_memory: float,
) -> list[int]:
    """``saved`` without the least useful items that do not fit."""
    order = sorted(saved, key=lambda i: (runtimes[i] / (memory[i] or 1e-30), -i))
    while not _fits(order, memory, max_memory):
        del order[0]
    return order


def _filled(
    saved: list[int],
    memory: Sequence[float],
    runtimes: Sequence[float],
    max_memory: float,
) -> Solution:
    kept, saved = set(saved), list(saved)
    total = math.fsum(memory[i] for i in saved)
    left = [i for i in range(len(memory)) if i not in kept and runtimes[i] > 0]
    for i in sorted(left, key=lambda i: (-runtimes[i], i)):
        if total + memory[i] <= max_memory:
            total += memory[i]
            saved.append(i)
    return _solution(saved, runtimes)


def within_budget(
    solver: Callable[..., Solution],
    memory: Sequence[float],
    runtimes: Sequence[float],
    max_memory: float,
) -> Solution:
    """``solver``'s solution, or :func:`bounded_knapsack`'s if that exceeds the budget.

    Raises:
        ValueError: see :func:`check_instance`.
    """
    check_instance(memory, runtimes, max_memory)
    found = solver(memory, runtimes, max_memory)
    if _fits(found[1], memory, max_memory):
        return found
    return bounded_knapsack(memory, runtimes, max_memory)


def greedy_knapsack(
    memory: Sequence[float], runtimes: Sequence[float], max_memory: float
) -> Solution:
    """Takes items by runtime for each unit of memory while they fit.

    Items without memory come first; ties are taken in order.  Index lists are in the
    order in which items were looked at.

    Raises:
        ValueError: see :func:`check_instance`.
    """
    check_instance(memory, runtimes, max_memory)
    try:
        density = list(map(operator.truediv, runtimes, memory))
    except ZeroDivisionError:
        pairs = zip(memory, runtimes, strict=True)
        density = [r / m if m else math.inf for m, r in pairs]
    total = 0.0
    saved: list[int] = []
    recomputed: list[int] = []
    save, recompute = saved.append, recomputed.append
    for i in sorted(range(len(density)), key=density.__getitem__, reverse=True):
        with_it = total + memory[i]
        if with_it <= max_memory:
            total = with_it
            save(i)
        else:
            recompute(i)
    return sum(map(runtimes.__getitem__, saved)), saved, recomputed
