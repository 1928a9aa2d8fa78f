"""Use-site rematerialization of a partitioned backward graph.  Tier: ``remat``.

The partitioner emits a recomputed value once, at its first backward use, and holds it
until its last.  This pass gives values that are live across the backward's memory peak
a second copy just before the use that follows the peak, so that nothing is held between
the two.  It runs on the emitted backward, after partitioning and before the backend:

1. ``analyze_use_site_remat``: read the graph into a :class:`Schedule` of plain numbers;
2. ``plan_use_site_copies``: choose the cuts (see ``remat_planner``);
3. ``apply_use_site_remat``: insert the copies, redirect later uses, check the result.

Peak memory is the sum of live storages at a node: saved values and tangents from the
start of the backward to their last use, results from their node to their last use,
gradients to the end.  Parameters are not counted.  The saved set never changes and the
copies run the same operators on the same values, so results do not change.

Never copied: random operators, collectives, operators that mutate, have effects or are
unknown, anything touching storage that the graph writes, outputs, and nodes on which a
user's checkpoint policy has decided.  Nothing that reorders the backward may run after
this pass, or the copies are moved away from their uses.

The method follows XLA's HloRematerialization and pytorch/pytorch#197838.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch._logging import trace_structured
from torch.utils._ordered_set import OrderedSet

from .graph_storage import graph_storages, GraphStorages, is_expanded
from .liveness import LiveBytes
from .recompute_cost import recompute_cost
from .recompute_rules import (
    CHEAP,
    HEAVY,
    is_heavy,
    is_static,
    is_view,
    NEVER,
    refusal,
)
from .remat_planner import plan_use_site_copies, PlanOptions, Schedule
from .use_site_rewrite import UseSiteRewriter


if TYPE_CHECKING:
    import torch.fx as fx

    from .remat_planner import Plan


log = logging.getLogger(__name__)

MODES = ("off", "light", "all")


@dataclass(frozen=True)
class RematAnalysis:
    """What the planner may know of a graph, and why nodes are left alone.

    Attributes:
        schedule: the graph as numbers; node ``i`` is ``nodes[i]``.
        nodes: the graph's nodes in order.
        storages: which storages each node touches.
        views: per node, whether it only renames storage.
        refusals: per node that must not run twice, the reason.
    """

    schedule: Schedule
    nodes: tuple[fx.Node, ...]
    storages: GraphStorages
    views: tuple[bool, ...]
    refusals: dict[fx.Node, str]


@dataclass(frozen=True)
class RematResult:
    """Outcome of :func:`apply_use_site_remat`; the later peak is what was found."""

    gm: fx.GraphModule
    num_copies: int
    peak_before_bytes: int
    peak_after_bytes: int


@dataclass(frozen=True)
class _Lifetimes:
    """Per storage: which node allocates it, who reads it, whether it is static."""

    views: list[bool]
    producer: list[int]
    uses: list[OrderedSet[int]]
    static: list[bool]

    def first_slot(self, nodes: tuple[fx.Node, ...]) -> tuple[int, ...]:
        return tuple(0 if nodes[p].op == "placeholder" else p for p in self.producer)


def _lifetimes(nodes: tuple[fx.Node, ...], storages: GraphStorages) -> _Lifetimes:
    count = len(storages.size_bytes)
    views = [is_view(n, storages) for n in nodes]
    producer, static = [-1] * count, [False] * count
    uses: list[OrderedSet[int]] = [OrderedSet() for _ in range(count)]
    for i, node in enumerate(nodes):
        for v in storages.of_node[node]:
            if producer[v] < 0:
                producer[v] = i
                static[v] = is_static(node)
        if not views[i]:
            for n in node.all_input_nodes:
                for v in storages.of_node[n]:
                    uses[v].add(i)
    return _Lifetimes(views, producer, uses, static)


def analyze_use_site_remat(graph: fx.Graph) -> RematAnalysis:
    """Read a backward graph into a :class:`Schedule`; nothing is changed."""
    nodes = tuple(graph.nodes)
    slot_of = {n: i for i, n in enumerate(nodes)}
    storages = graph_storages(graph)
    lives = _lifetimes(nodes, storages)
    refusals: dict[fx.Node, str] = {}
    level, cost = [], []
    allocates: list[list[int]] = [[] for _ in nodes]
    cuttable = [True] * len(storages.size_bytes)
    for v, p in enumerate(lives.producer):
        allocates[p].append(v)

    for i, node in enumerate(nodes):
        why = refusal(node, storages, lives.views[i])
        if why is not None:
            refusals[node] = why
            for v in storages.of_node[node]:
                cuttable[v] = False
        level.append(NEVER if why is not None else HEAVY if is_heavy(node) else CHEAP)
        # The cost of nodes that never run twice still counts as work of the schedule.
        real = node.op == "call_function" and not lives.views[i]
        cost.append(recompute_cost(node) if real else 0.0)
        if not lives.views[i]:
            # Results on storage of several arguments cannot be followed by a copy.
            for v in storages.of_node[node]:
                cuttable[v] = cuttable[v] and lives.producer[v] == i
        for n in node.all_input_nodes:
            if node.op == "output" or (level[i] != CHEAP and is_expanded(n)):
                for v in storages.of_node[n]:
                    cuttable[v] = False

    schedule = Schedule(
        inputs=tuple(tuple(slot_of[a] for a in n.all_input_nodes) for n in nodes),
        values=tuple(storages.of_node[n] for n in nodes),
        allocates=tuple(map(tuple, allocates)),
        level=tuple(level),
        cost=tuple(cost),
        size_bytes=storages.size_bytes,
        first_slot=lives.first_slot(nodes),
        uses=tuple(tuple(sorted(u)) for u in lives.uses),
        producer=tuple(lives.producer),
        cuttable=tuple(cuttable),
        pinned=tuple(lives.static),
    )
    return RematAnalysis(schedule, nodes, storages, tuple(lives.views), refusals)


def live_peak_bytes(graph: fx.Graph) -> int:
    """Peak of the live storages of ``graph``, parameters not counted, in bytes."""
    nodes = tuple(graph.nodes)
    storages = graph_storages(graph)
    lives = _lifetimes(nodes, storages)
    return LiveBytes.from_ranges(
        len(nodes),
        [
            (first, max([first, *lives.uses[v]]), storages.size_bytes[v])
            for v, first in enumerate(lives.first_slot(nodes))
            if not lives.static[v]
        ],
    ).peak


def apply_use_site_remat(
    gm: fx.GraphModule, analysis: RematAnalysis, plan: Plan, recompile: bool = True
) -> RematResult:
    """Rewrite ``gm`` in place by ``plan``; a plan without cuts leaves it untouched.

    ``recompile=False`` is for a caller that recompiles ``gm`` anyway.

    A result that peaks higher than before, which would be a fault of the analysis, is
    logged as a warning; it computes the same.
    """
    if not plan.cuts:
        return RematResult(gm, 0, plan.peak_before_bytes, plan.peak_before_bytes)
    rewriter = UseSiteRewriter(gm, analysis, plan)
    rewriter.run()
    gm.graph.lint()
    if recompile:
        gm.recompile()
    peak = live_peak_bytes(gm.graph)
    if peak > plan.peak_before_bytes:
        log.warning(
            "use-site rematerialization raised the predicted peak of a backward from "
            "%d to %d bytes (planned: %d). Please report it; "
            "torch._functorch.config.use_site_remat = 'off' turns the pass off.",
            plan.peak_before_bytes,
            peak,
            plan.peak_after_bytes,
        )
    return RematResult(gm, rewriter.num_copies, plan.peak_before_bytes, peak)


def use_site_remat(
    gm: fx.GraphModule, mode: str, recompile: bool = True
) -> fx.GraphModule:
    """Lower the peak of the backward ``gm`` by use-site copies; see the module's text.

    Args:
        gm: an emitted backward graph with ``meta["val"]`` on its nodes.
        mode: "off" does nothing; "light" copies cheap operators only; "all" also copies
            matmuls, convolutions and attention without dropout.
        recompile: False if the caller recompiles ``gm`` anyway.

    Returns:
        ``gm`` itself, rewritten if that lowers the predicted peak.

    Raises:
        ValueError: ``mode`` is none of these.
    """
    if mode not in MODES:
        raise ValueError(
            f"torch._functorch.config.use_site_remat is {mode!r}; it must be one of "
            + ", ".join(repr(m) for m in MODES)
        )
    if mode == "off":
        return gm
    analysis = analyze_use_site_remat(gm.graph)
    level = HEAVY if mode == "all" else CHEAP
    plan = plan_use_site_copies(analysis.schedule, PlanOptions(max_level=level))
    result = apply_use_site_remat(gm, analysis, plan, recompile)
    log.info(
        "use_site_remat=%s: %d cuts, %d copies, predicted peak %d -> %d bytes",
        mode,
        len(plan.cuts),
        result.num_copies,
        result.peak_before_bytes,
        result.peak_after_bytes,
    )
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "use_site_remat_plan", "encoding": "string"},
        payload_fn=lambda: print_plan(analysis, plan),
    )
    return result.gm


def print_plan(analysis: RematAnalysis, plan: Plan) -> str:
    """The plan as text: one line a cut, then what the pass left alone and why."""
    nodes, sizes = analysis.nodes, analysis.schedule.size_bytes
    lines = [
        f"peak {plan.peak_before_bytes} -> {plan.peak_after_bytes} bytes, "
        f"{len(plan.cuts)} cuts"
    ]
    for cut in plan.cuts:
        name = nodes[analysis.schedule.producer[cut.value]].name
        cone = ", ".join(nodes[i].name for i in cut.cone)
        lines.append(
            f"{name} ({sizes[cut.value]} bytes) before {nodes[cut.slot].name}: {cone}"
        )
    counts = Counter(
        why for why in analysis.refusals.values() if not why.startswith("is a graph")
    )
    lines += [f"refused {n}: {why}" for why, n in sorted(counts.items())]
    return "\n".join(lines)
