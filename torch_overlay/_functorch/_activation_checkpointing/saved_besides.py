"""Values to save besides a planned saved set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .equal_values import may_run_again
from .graph_storage import is_expanded


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .joint_schedule import JointSchedule


def values_read_expanded(s: JointSchedule, saved: Sequence[int]) -> list[int]:
    """Recomputed values that an opaque operator of the backward reads expanded.

    A backend writes such a value out where it is read, once for every repetition: a
    mask of (B, 1, S, S) for every head.  A saved value is read as it is, so these
    should be saved too (pytorch/pytorch#197838).  What depends on a tangent the
    backward alone has: it is never asked for.
    """
    have = OrderedSet([*saved, *s.placeholders, *s.backward])
    found: OrderedSet[int] = OrderedSet()
    for i in s.emitted(s.backward, saved):
        for a in s.inputs[i] if s.heavy[i] else ():
            if a not in have and is_expanded(s.nodes[a]):
                while s.moves[a] and a not in have:
                    a = s.inputs[a][0]
                if a not in have and s.fusible[a]:
                    found.add(a)
    return [*found]


def values_not_to_recompute(
    s: JointSchedule, saved: Sequence[int], planned: Sequence[int]
) -> list[int]:
    """What ``planned`` recomputes, and ``saved`` did not, that must not run again."""
    before = OrderedSet(s.emitted(s.backward, saved))
    found: list[int] = []
    for i in s.emitted(s.backward, planned):
        if i not in before and not may_run_again(s, i):
            found += s.results(i)
    return found
