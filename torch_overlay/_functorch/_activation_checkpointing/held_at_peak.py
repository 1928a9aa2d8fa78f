"""Saves what the backward would make again before its peak and hold there.

The last layer's values are such ones where a budget saves few: the backward needs them
first.  Saved, they take the same memory at the peak, and what they are made from none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .equal_values import may_run_again
from .joint_schedule import NEARLY_EQUAL


if TYPE_CHECKING:
    from .joint_schedule import JointSchedule

# Values that are added at most, one after the other.
_MAX_VALUES = 8


def _held_at_peak(
    s: JointSchedule, planned: list[int], live: list[int]
) -> list[tuple[int, int]]:
    """Bytes and node of what the backward runs again before its peak and reads after.

    Only heavy nodes, and none where the peak is in the forward.
    """
    order = s.makers(s.emitted(s.backward, planned))
    peak = live.index(max(live)) - (len(live) - len(order))
    if peak < 0:
        return []
    last = {v: k for k, i in enumerate(order) for a in s.inputs[i] for v in s.values[a]}
    own = OrderedSet(s.backward)
    return [
        (s.size_bytes[s.values[i][0]], i)
        for i in order[:peak]
        if s.heavy[i]
        and i not in own
        and s.may_save(i)
        and may_run_again(s, i)
        and last.get(s.values[i][0], -1) >= peak
    ]


def save_held_at_peak(s: JointSchedule, planned: list[int]) -> list[int]:
    """``planned`` and values held at its peak, as long as each lowers it."""
    live = s.live_bytes(planned, whole=False)
    for _ in range(_MAX_VALUES):
        held = _held_at_peak(s, planned, live)
        if not held:
            break
        plan = [*planned, max(held)[1]]
        lower = s.live_bytes(plan, whole=False)
        # An equal peak is not enough: a saved value is alive for longer.
        if max(lower) * NEARLY_EQUAL > max(live):
            break
        planned, live = plan, lower
    return planned
