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
    from collections.abc import Collection, Iterable, Sequence

    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo, OpTypes

# Data movement and normalization that the partitioner's own list leaves out.
_LIGHT_BESIDES = OrderedSet(
    "_softmax _log_softmax cat constant_pad_nd cumsum native_layer_norm repeat tril "
    "native_group_norm select_scatter slice_scatter triu".split()
)

_NONE, _SEVERAL = -1, -2
# Predicted peaks that differ by less than this part count as equal.
NEARLY_EQUAL = 1.005


def _is_costly(node: fx.Node, types: OpTypes) -> bool:
    """Whether an operator's results are worth saving."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    packet = getattr(node.target, "overloadpacket", None)
    light = getattr(packet, "__name__", "") in _LIGHT_BESIDES
    return (
        not (light or types.is_recomputable(node))
        or types.is_compute_intensive(node)
        or packet in flop_registry
    )


def _unmarked(items: Sequence[int], marks: bytearray) -> Sequence[int]:
    """``items`` without the marked ones, the same object if there is none."""
    for i in items:
        if marks[i]:
            return [i for i in items if not marks[i]]
    return items


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
        self.inputs = [[*map(number.__getitem__, n.all_input_nodes)] for n in nodes]
        self.values = [storages.of_node[n] for n in nodes]
        self.fusible, self.moves, self.heavy = [], [], []
        # Storages that a node is the first to have, and a pointwise node's only one.
        self._makes: list[Sequence[int]] = []
        self._only: list[int] = []
        seen = bytearray(len(self.size_bytes))
        operators: dict[object, tuple[bool, bool]] = {}
        for node, values in zip(nodes, self.values, strict=True):
            known = operators.get(node.target)
            if known is None:
                known = types.is_fusible(node), _is_costly(node, types)
                operators[node.target] = known
            makes = _unmarked(values, seen)
            moves = node.op == "call_function" and not makes
            heavy = not moves and (known[1] or recompute_hazard(node) is not None)
            self.fusible.append(known[0])
            self.moves.append(moves)
            self.heavy.append(heavy)
            self._makes.append(makes)
            single = known[0] and len(makes) == len(values) == 1
            self._only.append(makes[0] if single else -1)
            for v in makes:
                seen[v] = 1
        results = [number[n] for n in graph.output_node().all_input_nodes]
        self.forward_outputs = [i for i in results if info.is_required_fw(nodes[i])]
        self.backward_outputs = [i for i in results if info.is_required_bw(nodes[i])]
        calls = [i for i, n in enumerate(nodes) if n.op == "call_function"]
        self.forward = [i for i in calls if info.is_required_fw(nodes[i])]
        self.backward = [i for i in calls if info.is_required_bw(nodes[i])]
        self.placeholders = [i for i, n in enumerate(nodes) if n.op == "placeholder"]
        self._at_start = bytearray(len(nodes))
        for i in self.placeholders:
            self._at_start[i] = 1
        self._needs = [_unmarked(ins, self._at_start) for ins in self.inputs]
        self.resident = self.storages(number[n] for n in info.inputs)
        self._bytes = list(self.size_bytes)
        for v in self.resident:
            self._bytes[v] = 0
        self._reads: list[Sequence[int]] = [()] * len(nodes)
        for i in self.makers(calls):
            read = [self.values[a] for a in self.inputs[i]]
            self._reads[i] = (
                read[0] if len(read) == 1 else [*dict.fromkeys(itertools.chain(*read))]
            )
        self._always = self.emitted(self.forward_outputs, ())
        order, end = sorted(self._always), self.storages(self.forward_outputs)
        self._forward_peak = max(self._live_bytes(self.makers(order), (), end))

    def storages(self, nodes: Iterable[int]) -> OrderedSet[int]:
        return OrderedSet(v for i in nodes for v in self.values[i])

    def may_save(self, i: int) -> bool:
        """Whether a node makes a tensor that no user's policy decides on."""
        meta = self.nodes[i].meta
        plain = isinstance(meta.get("val"), torch.Tensor) and not meta.get("recompute")
        return plain and self.fixed.isdisjoint(self.values[i])

    def emitted(self, wanted: Iterable[int], given: Iterable[int]) -> list[int]:
        """``wanted`` in order, each after those of its arguments that are not given."""
        done, needs = bytearray(self._at_start), self._needs
        for i in given:
            done[i] = 1
        order: list[int] = []
        for node in wanted:
            if done[node]:
                continue
            done[node] = 1
            for a in needs[node]:
                if not done[a]:
                    break
            else:
                order.append(node)
                continue
            found = [node]
            for i in found:
                for a in needs[i]:
                    if not done[a]:
                        done[a] = 1
                        found.append(a)
            found.sort()
            order += found
        return order

    def results(self, i: int) -> list[int]:
        """The nodes that take a node's results apart, or the node itself."""
        # The graph's output is a user without a number.
        readers = [self.number[n] for n in self.nodes[i].users if n.op != "output"]
        parts = [k for k in readers if self.nodes[k].target is operator.getitem]
        return parts or [i]

    def used(self, saved: Iterable[int], backward: Iterable[int]) -> list[int]:
        """Those of ``saved`` that an emitted backward reads or returns."""
        inputs = itertools.chain.from_iterable(map(self.inputs.__getitem__, backward))
        read = dict.fromkeys(itertools.chain(self.backward_outputs, inputs))
        return [i for i in saved if i in read]

    def makers(self, order: Iterable[int]) -> list[int]:
        """Those nodes of ``order`` that do not only rename storage."""
        return [i for i in order if not self.moves[i]]

    def peak_bytes(self, saved: Iterable[int]) -> int:
        """Predicted peak with these nodes saved; what no node reads is left out."""
        return max(self.live_bytes(saved, whole=False))

    def live_bytes(self, saved: Iterable[int], whole: bool = True) -> list[int]:
        """Live bytes where the forward and then the backward make values, in order.

        Of what is ``emitted`` those nodes count that do not only rename storage.  A
        forward that is surely lower than the backward is left out if not ``whole``.
        """
        emitted = self.emitted(self.backward, saved)
        used = self.used(saved, emitted)
        kept = self.storages(used)
        start = self.storages(self.placeholders) | kept
        gradients = self.storages(self.backward_outputs)
        backward = [*self._live_bytes(self.makers(emitted), start, gradients)]
        besides = self.makers(self.emitted(used, self._always))
        # A value that is kept adds no more than its bytes to the forward.
        most = self._forward_peak + sum(self._bytes[v] for v in kept)
        if most < max(backward) and not besides and not whole:
            return backward
        results = self.storages(self.forward_outputs) | kept
        order = sorted([*self._always, *besides])
        return [*self._live_bytes(self.makers(order), (), results), *backward]

    def _live_bytes(
        self, order: Sequence[int], start: Collection[int], end: Collection[int]
    ) -> Iterable[int]:
        """Per node of ``order``; ``start`` and ``end`` live before and after it."""
        only, fusible = self._only, self.fusible
        makes, reads = self._makes, self._reads
        count, sizes = len(order), list(self._bytes)
        # Where each value is read last, and where alone if it can be made there.
        last, reader = [-1] * len(sizes), [_NONE] * len(sizes)
        for v in end:
            last[v], reader[v] = count, _SEVERAL
        for v in start:
            sizes[v] = 0
        steps = [0] * (count + 2)
        for k in range(count - 1, -1, -1):
            i = order[k]
            at, result = k, only[i]
            if result >= 0 and reader[result] >= 0:
                at = reader[result]
            else:
                for v in makes[i]:
                    steps[k] += sizes[v]
                    steps[1 + (last[v] if last[v] > k else k)] -= sizes[v]
            mark = at if fusible[i] else _SEVERAL
            for v in reads[i]:
                reader[v] = mark if reader[v] == _NONE else _SEVERAL
                if last[v] < at:
                    last[v] = at
        for v in start:
            steps[0] += self._bytes[v]
            steps[max(last[v], 0) + 1] -= self._bytes[v]
        return itertools.accumulate(steps[: max(count, 1)])
