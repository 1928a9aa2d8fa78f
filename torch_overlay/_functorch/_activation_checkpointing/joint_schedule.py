"""Predicts the peak memory of a saved set from the joint graph.

The peak is the larger one of forward and backward: live storages in the order in which
the partitioner emits the nodes, graph inputs apart.  A pointwise value with one
pointwise reader is taken for computed inside its reader's kernel.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING

import torch
from torch.utils._ordered_set import OrderedSet
from torch.utils.flop_counter import flop_registry

from .graph_storage import graph_storages
from .recompute_safety import recompute_hazard


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo, OpTypes

# Data movement and normalization that the partitioner's own list leaves out.
_LIGHT_BESIDES = OrderedSet(
    "_softmax _log_softmax cat constant_pad_nd cumsum native_layer_norm repeat tril "
    "native_group_norm select_scatter slice_scatter triu".split()
)

_SEVERAL = -2
# Predicted peaks that differ by less than this part count as equal.
NEARLY_EQUAL = 1.005


def _is_heavy(node: fx.Node, types: OpTypes) -> bool:
    """Whether a node is worth saving, or must not or may not run twice."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    packet = getattr(node.target, "overloadpacket", None)
    light = getattr(packet, "__name__", "") in _LIGHT_BESIDES
    return (
        not (light or types.is_recomputable(node))
        or types.is_compute_intensive(node)
        or packet in flop_registry
        or recompute_hazard(node) is not None
    )


class JointSchedule:
    """A classified joint graph as numbers: node ``i`` is ``nodes[i]``.

    Per node: ``inputs``, the nodes that it reads; ``values``, the storages of its
    result; ``moves``, whether it only renames storage; ``fusible`` and ``heavy``.
    ``forward`` and ``backward`` list what each graph must run, ``forward_outputs`` and
    ``backward_outputs`` what it returns.  Storages in ``resident`` are graph inputs,
    those in ``fixed`` are written in place or cannot be read.
    """

    def __init__(self, graph: fx.Graph, info: NodeInfo) -> None:
        # The partitioner imports this module.
        from torch._functorch.partitioners import get_default_op_list

        types = get_default_op_list()
        storages = graph_storages(graph)
        self.size_bytes = storages.size_bytes
        self.fixed = storages.mutated | storages.opaque
        self.nodes = nodes = [n for n in graph.nodes if n.op != "output"]
        self.number = number = {n: i for i, n in enumerate(nodes)}
        self.inputs = [[number[a] for a in n.all_input_nodes] for n in nodes]
        self.values = [storages.of_node[n] for n in nodes]
        self.fusible = [types.is_fusible(n) for n in nodes]
        self.moves, self.heavy = [], []
        self._reads = [[v for a in ins for v in self.values[a]] for ins in self.inputs]
        self._one = [
            v[0] if f and len(v) == 1 else -1
            for f, v in zip(self.fusible, self.values, strict=True)
        ]
        seen = bytearray(len(self.size_bytes))
        for node, values in zip(nodes, self.values, strict=True):
            moves = node.op == "call_function" and all(map(seen.__getitem__, values))
            self.moves.append(moves)
            self.heavy.append(not moves and _is_heavy(node, types))
            for v in values:
                seen[v] = 1
        results = [number[n] for n in graph.output_node().all_input_nodes]
        self.forward_outputs = [i for i in results if info.is_required_fw(nodes[i])]
        self.backward_outputs = [i for i in results if info.is_required_bw(nodes[i])]
        calls = [i for i, n in enumerate(nodes) if n.op == "call_function"]
        self.forward = [i for i in calls if info.is_required_fw(nodes[i])]
        self.backward = [i for i in calls if info.is_required_bw(nodes[i])]
        self.placeholders = [i for i, n in enumerate(nodes) if n.op == "placeholder"]
        self.resident = self.storages(number[n] for n in info.inputs)
        self._always = self.emitted(self.forward_outputs, ())

    def storages(self, nodes: Iterable[int]) -> OrderedSet[int]:
        return OrderedSet(v for i in nodes for v in self.values[i])

    def may_save(self, i: int) -> bool:
        """Whether a node makes a tensor that no user's policy decides on."""
        meta = self.nodes[i].meta
        plain = isinstance(meta.get("val"), torch.Tensor) and not meta.get("recompute")
        return plain and self.fixed.isdisjoint(self.values[i])

    def emitted(self, wanted: Iterable[int], given: Iterable[int]) -> list[int]:
        """``wanted`` in order, each after those of its arguments that are not given."""
        done = bytearray(len(self.nodes))
        for i in (*self.placeholders, *given):
            done[i] = 1
        order: list[int] = []
        for node in wanted:
            found = [] if done[node] else [node]
            done[node] = 1
            for i in found:
                for a in self.inputs[i]:
                    if not done[a]:
                        done[a] = 1
                        found.append(a)
            order += sorted(found)
        return order

    def results(self, i: int) -> list[int]:
        """The nodes that take a node's results apart, or the node itself."""
        readers = [self.number[n] for n in self.nodes[i].users]
        parts = [k for k in readers if self.nodes[k].target is operator.getitem]
        return parts or [i]

    def used(self, saved: Iterable[int], backward: Iterable[int]) -> list[int]:
        """Those of ``saved`` that an emitted backward reads or returns."""
        read = bytearray(len(self.nodes))
        for i in itertools.chain(
            self.backward_outputs, *map(self.inputs.__getitem__, backward)
        ):
            read[i] = 1
        return [i for i in saved if read[i]]

    def makers(self, order: Iterable[int]) -> list[int]:
        """Those nodes of ``order`` that do not only rename storage."""
        return [i for i in order if not self.moves[i]]

    def peak_bytes(self, saved: Iterable[int]) -> int:
        """Predicted peak with these nodes saved; what no node reads is left out."""
        return max(self.live_bytes(saved))

    def live_bytes(self, saved: Iterable[int]) -> list[int]:
        """Live bytes where the forward and then the backward make values, in order.

        Of what is ``emitted`` those nodes count that do not only rename storage.
        """
        backward = self.emitted(self.backward, saved)
        used = self.used(saved, backward)
        forward = sorted([*self._always, *self.emitted(used, self._always)])
        kept = self.storages(used)
        results = self.storages(self.forward_outputs) | kept
        start = kept | self.storages(self.placeholders)
        gradients = self.storages(self.backward_outputs)
        return [
            *self._live_bytes(self.makers(forward), OrderedSet(), results),
            *self._live_bytes(self.makers(backward), start, gradients),
        ]

    def _live_bytes(
        self, order: Sequence[int], start: OrderedSet[int], end: OrderedSet[int]
    ) -> Iterable[int]:
        """Per node of ``order``; ``start`` and ``end`` live before and after it."""
        one, reads = self._one, self._reads
        count, sizes = len(order), self.size_bytes
        last, reader = [-1] * len(sizes), [-1] * len(sizes)
        for v in end:
            last[v], reader[v] = count, _SEVERAL
        placed = bytearray(len(sizes))
        for v in self.resident:
            placed[v] = 1
        runs_at = list(range(count))
        for k in range(count - 1, -1, -1):
            i = order[k]
            at, result = k, one[i]
            if result >= 0:
                only = reader[result]
                if only >= 0 and self.fusible[order[only]]:
                    placed[result] = 1
                    runs_at[k] = at = runs_at[only]
            for v in reads[i]:
                if reader[v] != k:
                    reader[v] = k if reader[v] == -1 else _SEVERAL
                if last[v] < at:
                    last[v] = at
        steps = [0] * (count + 2)
        for k, made in enumerate([start, *(self.values[i] for i in order)], -1):
            for v in made:
                if not placed[v]:
                    placed[v] = 1
                    steps[max(k, 0)] += sizes[v]
                    steps[max(last[v], k, 0) + 1] -= sizes[v]
        return itertools.accumulate(steps[: max(count, 1)])
