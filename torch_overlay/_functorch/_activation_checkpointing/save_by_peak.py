"""Saves what keeps the predicted peak within a limit at the least recompute work.

Tier: memory.  An activation-memory budget below 1 or a target in bytes gives the limit;
values are exact copies of what plain torch computes, so gradients do not change.
Backwards that must not be touched otherwise: ``rng`` decides before this what may not
run twice, and use-site rematerialization may follow (pytorch/pytorch#197838).
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import torch
from torch._functorch import config
from torch._logging import trace_structured, warning_once
from torch.utils._ordered_set import OrderedSet

from .joint_schedule import joint_schedule
from .region_inputs import inputs_of_a_region
from .roofline import roofline_of
from .saved_set import must_save, SavedSetPlan, SavedSetSearch


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo

    from .joint_schedule import JointSchedule


log = logging.getLogger(__name__)

# Marks the nodes of a joint graph whose saved set was planned; both graphs keep it.
PLANNED_MARK = "saved_set_was_planned"

# Marks a joint graph whose backend generates kernels, in its module's ``meta``.
GENERATED_MARK = "kernels_are_generated"

_UNITS = {
    "B": 1,
    **{f"{p}B": 10 ** (3 * k) for k, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 2 ** (10 * k) for k, p in enumerate("KMGT", 1)},
}


def target_bytes(target: object, device_bytes: int | None) -> int | None:
    """What ``config.activation_memory_peak_target`` means, in bytes; None for None.

    Args:
        target: None, bytes, a string such as "24GB" or "22.5GiB", or a part of the
            device's memory, "80%".
        device_bytes: memory of the device, None where there is none.

    Raises:
        RuntimeError: anything else, or a part of a device that is not there.
    """
    if target is None:
        return None
    found = None
    if isinstance(target, int) and not isinstance(target, bool):
        found = target
    elif isinstance(target, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|%)\s*", target)
        if match and match[2] == "%" and float(match[1]) <= 100:
            if device_bytes is None:
                raise RuntimeError(
                    "torch._functorch.config.activation_memory_peak_target is "
                    f"{target!r}, a part of a device's memory, but the program runs on "
                    "no accelerator; give bytes, as in '24GB'"
                )
            found = int(device_bytes * float(match[1]) / 100)
        elif match and match[2] in _UNITS:
            found = int(float(match[1]) * _UNITS[match[2]])
    if found is None or found <= 0:
        raise RuntimeError(
            f"torch._functorch.config.activation_memory_peak_target is {target!r}; "
            "accepted are None, a positive number of bytes, a string with a unit such "
            "as '24GB' or '22.5GiB', and a part of the device's memory such as '80%'"
        )
    return found


def _accelerator(graph: fx.Graph) -> torch.device | None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return value.device
    return None


def limit_of_target(graph: fx.Graph) -> int | None:
    """Bytes that the two graphs may take beside what is resident when compiling."""
    target = config.activation_memory_peak_target
    if target is None:
        return None
    device = _accelerator(graph)
    there = device is not None and torch.cuda.is_available()
    total = torch.cuda.get_device_properties(device).total_memory if there else None
    found = target_bytes(target, total)
    if found is None or not there:
        return found
    return found - torch.cuda.memory_allocated(device)


def limit_of_budget(lowest_bytes: int, highest_bytes: int, budget: float) -> int:
    """The peak that a budget means: from the lowest (0) to plain torch's (1)."""
    room = max(highest_bytes - lowest_bytes, 0)
    return lowest_bytes + int(max(budget, 0.0) * room)


class _Planner:
    """One joint graph's plan: the search, and what plain torch would do."""

    def __init__(
        self,
        graph: fx.Graph,
        info: NodeInfo,
        dropped: Sequence[fx.Node],
        plain: Sequence[fx.Node],
        fastest: Sequence[fx.Node],
    ) -> None:
        module = graph.owning_module
        generated = module is not None and GENERATED_MARK in module.meta
        self.schedule = s = joint_schedule(graph, info, OrderedSet(dropped), generated)
        self.plain = [s.number[n] for n in plain]
        self.fastest = [s.number[n] for n in fastest]
        self.inputs = [s.number[n] for n in info.inputs]
        self.must = must_save(s, self.inputs, self.plain)
        self.search = SavedSetSearch(
            s, self.must, [self.plain, self.fastest], roofline_of(_accelerator(graph))
        )

    def _plan(
        self, nodes: Sequence[int], limit: int, lowest: int, highest: int
    ) -> SavedSetPlan:
        s, search = self.schedule, self.search
        look = search.look_at(s.values_of(nodes))
        inputs, must = OrderedSet(self.inputs), OrderedSet(self.must)
        cuts = OrderedSet(i for c in search.cuts for i in search.items[c].nodes)
        return SavedSetPlan(
            saved=tuple(nodes),
            reasons=tuple(
                "input"
                if i in inputs
                else "must save"
                if i in must
                else "cut"
                if i in cuts
                else "work"
                for i in nodes
            ),
            limit_bytes=limit,
            peak_bytes=look.heights[0],
            lowest_bytes=min(lowest, look.heights[0]),
            highest_bytes=highest,
            work=look.work,
            looks=search.looks,
        )

    def whole(self, budget: float, target: int | None) -> SavedSetPlan:
        """Least work with the program's peak within the limit."""
        search, values_of = self.search, self.schedule.values_of
        fastest = search.look_at(values_of(self.fastest))
        plain = search.look_at(values_of(self.plain))
        highest = fastest.heights[0]
        found = search.look(search.lowest()).heights[0]
        lowest = min(found, plain.heights[0], highest)
        limit = target
        if limit is None:
            limit = limit_of_budget(lowest, highest, budget)
        if highest <= limit:
            return self._plan(self.fastest, limit, lowest, highest)
        kept = search.plan(limit)
        # Never worse than what plain torch would save.
        _, nodes = min(
            (search.look(kept).score(limit), search.nodes(kept)),
            (plain.score(limit), self.plain),
            (fastest.score(limit), self.fastest),
            key=lambda choice: choice[0],
        )
        return self._plan(nodes, limit, lowest, highest)

    def region(self) -> SavedSetPlan:
        """Least work with no more bytes saved, and no higher peak, than plain torch.

        What a region saves is held while the rest of the program runs.
        """
        s, search = self.schedule, self.search
        plain = search.look_at(s.values_of(self.plain))
        room = _read_bytes(s, self.plain)
        kept: tuple[int, ...] = ()
        order, low, high = search.order, 0, len(search.order)
        while low < high:
            middle = (low + high) // 2
            if _read_bytes(s, search.nodes(order[middle:])) <= room:
                high = middle
            else:
                low = middle + 1
        kept = tuple(order[low:])
        look = search.look(kept)
        better = (look.work, look.heights[0]) < (plain.work, plain.heights[0])
        fits = look.heights[0] <= plain.heights[0]
        fits = fits and _read_bytes(s, search.nodes(kept)) <= room
        nodes = search.nodes(kept) if better and fits else self.plain
        return self._plan(nodes, plain.heights[0], plain.heights[0], plain.heights[0])


def _read_bytes(s: JointSchedule, nodes: Sequence[int]) -> int:
    """Bytes that a saved set keeps alive; what the backward does not read is not."""
    saved = s.values_of(nodes)
    read = OrderedSet(v for i in s.emitted(s.backward, saved) for v in s.operands[i])
    return s.saved_bytes([v for v in saved if v in read or v in s.gradients])


def plan_saved_set(
    choose: Callable[[float], list[fx.Node]],
    joint_graph: fx.Graph,
    node_info: NodeInfo,
    memory_budget: float,
    target: int | None = None,
) -> tuple[JointSchedule, SavedSetPlan]:
    """Plan what the forward saves, see :func:`save_by_peak`.

    Args:
        choose: what plain torch saves at a budget.
        target: bytes, None for the limit that the budget means.
    """
    plain = choose(memory_budget)
    fastest = plain if memory_budget >= 1 else choose(1)
    dropped = inputs_of_a_region(joint_graph, node_info)
    planner = _Planner(joint_graph, node_info, dropped, plain, fastest)
    if dropped and target is None:
        return planner.schedule, planner.region()
    return planner.schedule, planner.whole(memory_budget, target)


def is_on() -> bool:
    """Whether saved sets are planned."""
    return config.save_by_peak or config.activation_memory_budget_solver == "peak"


def save_by_peak(
    choose: Callable[..., list[fx.Node]],
    joint_graph: fx.Graph,
    node_info: NodeInfo,
    memory_budget: float,
) -> list[fx.Node]:
    """The values to save for a budget or a target; plain torch's at budget 1.

    Args:
        choose: ``choose_saved_values_set``.
        joint_graph: the classified joint graph.
        node_info: the partitioner's classification.
        memory_budget: 0 to 1.

    Raises:
        RuntimeError: ``config.activation_memory_peak_target`` is not understood.
    """
    plain: dict[str, object] = {"save_by_peak": False}
    if config.activation_memory_budget_solver == "peak":
        plain["activation_memory_budget_solver"] = "dp"

    def choose_plain(budget: float) -> list[fx.Node]:
        with config.patch(plain):
            return choose(joint_graph, node_info, budget)

    target = limit_of_target(joint_graph)
    if target is None and memory_budget >= 1:
        return choose_plain(memory_budget)
    schedule, plan = plan_saved_set(
        choose_plain, joint_graph, node_info, memory_budget, target
    )
    if target is not None and plan.peak_bytes > target:
        warning_once(
            log,
            "activation_memory_peak_target leaves %d bytes for a graph's activations "
            "and gradients; the lowest predicted peak is %d bytes, which is used",
            target,
            plan.peak_bytes,
        )
    log.info("%s", plan)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "saved_set_plan", "encoding": "string"},
        payload_fn=lambda: describe(schedule, plan),
    )
    for node in joint_graph.nodes:
        node.meta[PLANNED_MARK] = True
    return [schedule.nodes[i] for i in plan.saved]


def describe(s: JointSchedule, plan: SavedSetPlan) -> str:
    """A plan with the name, bytes and reason of each saved node."""
    lines = [str(plan)]
    for i, reason in zip(plan.saved, plan.reasons, strict=True):
        size = sum(s.size_bytes[v] for v in s.values[i])
        lines.append(f"  {s.nodes[i].name}: {size} bytes, {reason}")
    return "\n".join(lines)
