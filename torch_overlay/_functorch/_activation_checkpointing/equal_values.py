"""Which of the equal values of repeated layers to save.

A knapsack does not tell the layers of a stack apart: their values have the same size
and take the same work to make again.  The backward reads the last layer's first, so
what is saved there is freed first, and the layers that are recomputed whole come when
less is alive.  Saving as many values as before, the latest ones, lowers the peak and
recomputes as much (pytorch/pytorch#197838).
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import TYPE_CHECKING

import torch.fx as fx
from torch.utils._ordered_set import OrderedSet

from .graph_storage import tensors_of
from .recompute_safety import recompute_hazard


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .joint_schedule import JointSchedule


def equal_values(
    s: JointSchedule, boundaries: Iterable[int], nodes: Sequence[int]
) -> list[int]:
    """A number per node; nodes with the same play the same part between boundaries.

    They compute the same from boundaries and inputs of the same layout, and ``nodes``
    up to the next boundaries use them in the same way.
    """
    numbers: dict[object, int] = {}
    leaves = dict.fromkeys([*boundaries, *s.placeholders])
    made = [-1] * len(s.nodes)
    wanted = dict.fromkeys(nodes)
    for i, node in enumerate(s.nodes):
        if node.op == "call_function" and i not in wanted:
            continue
        if i in leaves:
            value = node.meta.get("val")
            layouts = [(t.shape, t.stride(), t.dtype) for t in tensors_of(value)]
            key: object = repr(layouts or value)
        else:
            arguments = fx.map_arg(
                (node.args, node.kwargs), lambda a: f"%{made[s.number[a]]}"
            )
            sizes = node.meta.get("unbacked_bindings")
            key = (node.target, repr((arguments, sizes)))
        made[i] = numbers.setdefault(key, len(numbers))
    used: dict[int, list[tuple[int, int]]] = {i: [] for i in nodes}
    found = list(made)
    for i in reversed(nodes):
        found[i] = numbers.setdefault((made[i], tuple(sorted(used[i]))), len(numbers))
        for k, a in enumerate(s.inputs[i]):
            if a in used and a not in leaves:
                used[a].append((k, made[i] if i in leaves else found[i]))
    for i in nodes:
        if s.nodes[i].target is operator.getitem:  # goes with the other results
            key = (made[i], found[s.inputs[i][0]])
            found[i] = numbers.setdefault(key, len(numbers))
    return found


def may_run_again(s: JointSchedule, i: int) -> bool:
    """Whether neither a rule nor a user's policy speaks against recomputing a node."""
    while s.nodes[i].target is operator.getitem:
        (i,) = s.inputs[i]
    node = s.nodes[i]
    return not node.meta.get("recompute") and recompute_hazard(node) is None


def latest_of_equal_values(
    s: JointSchedule, saved: Sequence[int], cuts: Iterable[tuple[int, ...]]
) -> list[int]:
    """``saved`` with as many values of every kind, from the latest layers.

    Inputs, values that must not be recomputed and those that a user's policy decides
    on stay as they are, and only values that the backward may need take a place.
    """
    needed = OrderedSet(s.emitted(s.backward, ()))
    # With what only the backward needs of the forward, like a log-sum-exp.
    nodes = sorted(OrderedSet([*s.forward, *needed]) - OrderedSet(s.backward))
    numbers = equal_values(s, (i for cut in cuts for i in cut), nodes)
    equals: dict[int, list[int]] = {numbers[i]: [] for i in saved}
    for i in nodes:
        kind = numbers[i]
        if kind in equals and i in needed and s.may_save(i) and may_run_again(s, i):
            equals[kind].append(i)
    free = [i for i in saved if i in equals[numbers[i]]]
    counts = Counter(numbers[i] for i in free)
    stay = OrderedSet(saved) - OrderedSet(free)
    return [*stay, *(i for kind, k in counts.items() for i in equals[kind][-k:])]
