"""Trades saved cuts for values that take more work to make again.

A narrow cut can be cheap to make again once its neighbours are saved: an embedding is
one gather, and a sum behind attention takes one matmul from attention's saved result.
Where a value of the same size takes more work, it is the better one to save.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .equal_values import may_run_again
from .joint_schedule import NEARLY_EQUAL
from .recompute_cost import recompute_cost


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .joint_schedule import JointSchedule

# A trade must save at least this many times the work that it adds, for bytes that are
# at most so many times those of the cut.
_WORK, _BYTES = 8, 1.1


class _Work:
    """Work of running nodes once; nodes of one kind and shape are looked at once."""

    def __init__(self, s: JointSchedule) -> None:
        self.s = s
        self.known: dict[str, float] = {}

    def __call__(self, nodes: Iterable[int]) -> float:
        total = 0.0
        for i in nodes:
            if not self.s.moves[i]:
                node = self.s.nodes[i]
                values = [n.meta.get("val") for n in node.all_input_nodes]
                key = f"{node.target} {[getattr(v, 'shape', v) for v in values]}"
                if key not in self.known:
                    self.known[key] = recompute_cost(node)
                total += self.known[key]
        return total


def _bytes(s: JointSchedule, nodes: Iterable[int]) -> int:
    return sum(s.size_bytes[v] for v in s.storages(nodes))


def _values(
    s: JointSchedule, again: OrderedSet[int], largest: float, work: _Work
) -> list[tuple[float, int, list[int]]]:
    """Work, node and results of heavy nodes that the backward runs again.

    The costliest come first and the latest of those, which the backward frees early.
    """
    found = []
    for i in again:
        if s.heavy[i] and may_run_again(s, i):
            results = [k for k in s.results(i) if k in again]
            if all(map(s.may_save, results)) and 0 < _bytes(s, results) <= largest:
                found.append((work([i]), i, results))
    return sorted(found, reverse=True)


def _prices(
    s: JointSchedule, cuts: Iterable[int], have: OrderedSet[int], work: _Work
) -> list[tuple[float, int, OrderedSet[int]]]:
    """Work and nodes that giving up a cut adds, of those that may be given up."""
    found = []
    for cut in cuts:
        nodes, chain = OrderedSet([cut]), [cut]
        for i in chain:
            new = [a for a in s.inputs[i] if a not in have and a not in nodes]
            nodes.update(new)
            chain += new
        if all(may_run_again(s, i) for i in nodes):
            found.append((work(nodes), cut, nodes))
    return sorted(found, key=operator.itemgetter(0, 1))


def trade_cuts(
    s: JointSchedule, planned: list[int], cuts: Iterable[Sequence[int]]
) -> list[int]:
    """``planned`` with cheap cuts given up for costly values of about their size.

    The predicted peak stays where it is.  Nothing that may not run twice is given up.
    """
    order = s.emitted(s.backward, planned)
    again = OrderedSet(order) - OrderedSet(s.backward)
    read = OrderedSet(s.used(planned, order))
    # What is planned and not read takes no memory as long as that stays so.
    kept = OrderedSet(planned) & (read | OrderedSet(s.placeholders))
    have = OrderedSet([*kept, *s.placeholders, *again])
    left = read & OrderedSet(i for cut in cuts for i in cut)
    work = _Work(s)
    prices = _prices(s, left, have, work)
    room = {i: _bytes(s, [i]) * _BYTES for i in left}
    highest = 0.0
    for saves, _, results in _values(s, again, max(room.values(), default=0), work):
        size = _bytes(s, results)
        fit = [p for p in prices if p[0] * _WORK <= saves and size <= room[p[1]]]
        if not fit:
            continue
        _, cut, nodes = fit[0]
        highest = highest or s.peak_bytes(planned) * NEARLY_EQUAL
        plan = [*(i for i in kept if i != cut), *results]
        if s.peak_bytes(plan) > highest:
            break
        planned, kept = plan, OrderedSet(plan)
        have.update(nodes)
        left.discard(cut)
        prices = _prices(s, left, have, work)
    return planned
