"""Insert use-site copies into a graph and redirect the uses that follow them."""

from __future__ import annotations

import contextlib
import copy
import operator
from typing import TYPE_CHECKING

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._ordered_set import OrderedSet

from .graph_storage import tensors_of


if TYPE_CHECKING:
    from collections.abc import Callable

    from .remat_planner import Plan
    from .use_site_remat import RematAnalysis


# Set in the meta of every copy, for backends that move or merge nodes.
COPY_MARK = "use_site_copy"


def _fake_like(tensor: FakeTensor, source: torch.Tensor | None) -> FakeTensor:
    """A fake tensor laid out like ``tensor``, on ``source``'s storage or its own."""
    mode, device = tensor.fake_mode, tensor.fake_device
    size, stride = tensor.size(), tensor.stride()
    env = mode.shape_env
    # Checks on symbolic sizes hold for the original; they must not guard again.
    no_guards = env.suppress_guards() if env is not None else contextlib.nullcontext()
    with unset_fake_temporarily(), no_guards:
        if source is None:
            made = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
        else:
            made = torch.empty(0, dtype=tensor.dtype, device="meta").set_(
                source.untyped_storage(), tensor.storage_offset(), size, stride
            )
    return mode.fake_tensor_converter.from_meta_and_device(mode, made, device)


def _copied_value(value: object, source: object) -> object:
    """``meta["val"]`` of a copy: the layout of ``value`` on storage of its own.

    ``source`` is the value of the copied argument if the node is a view, else None.
    """
    tensors = tensors_of(source)

    def like(tensor: object) -> object:
        if type(tensor) is not FakeTensor:
            return tensor
        return _fake_like(tensor, tensors[0] if tensors else None)

    if isinstance(value, torch.Tensor):
        return like(value)
    return pytree.tree_map(like, value)


def is_tensor_like(node: fx.Node) -> bool:
    """Whether a node's value is a tensor or a tuple of them, not a size."""
    return isinstance(node.meta["val"], (torch.Tensor, tuple, list))


class UseSiteRewriter:
    """Inserts the copies of one plan and redirects the uses that follow them."""

    def __init__(self, gm: fx.GraphModule, analysis: RematAnalysis, plan: Plan) -> None:
        self.graph = gm.graph
        self.analysis = analysis
        self.copied_before: dict[int, dict[fx.Node, fx.Node]] = {}
        self.starts: dict[int, list[int]] = {}
        for cut in plan.cuts:
            self.starts.setdefault(cut.value, []).append(cut.slot)
        for slots in self.starts.values():
            slots.sort()
        self.plan = plan
        self.num_copies = 0
        # Copies are made from the arguments that nodes had before any redirection.
        self.arguments = {n: (n.args, n.kwargs) for n in analysis.nodes}

    def copy(self, node: fx.Node, arg: Callable[[fx.Node], fx.Node]) -> fx.Node:
        args, kwargs = self.arguments[node]
        made = self.graph.create_node(
            node.op,
            node.target,
            fx.node.map_arg(args, arg),
            fx.node.map_arg(kwargs, arg),
            name=f"{node.name}_remat",
            type_expr=node.type,
        )
        made.meta = {
            k: copy.copy(v) if isinstance(v, (dict, list)) else v
            for k, v in node.meta.items()
        }
        made.meta[COPY_MARK] = True
        self.num_copies += 1
        return made

    def at_slot(self, node: fx.Node, slot: int, inside: bool) -> fx.Node:
        """The node to read instead of ``node`` in ``slot``.

        ``inside`` is True for the copies that run just before the slot's own node.
        """
        schedule = self.analysis.schedule
        values = self.analysis.storages.of_node[node]
        if len(values) != 1:
            return node
        value = values[0]
        start = None
        producer = self.analysis.nodes[schedule.producer[value]]
        if inside and producer in self.copied_before[slot]:
            start = slot
        else:
            for s in self.starts.get(value, ()):
                if s < slot or (s == slot and not inside):
                    start = s
        return node if start is None else self.member(node, start)

    def member(self, node: fx.Node, start: int) -> fx.Node:
        made = self.copied_before[start]
        if node not in made:
            view = self.copy(node, lambda n: self._source(n, start))
            (source,) = [n for n in view.all_input_nodes if is_tensor_like(n)]
            if node.target is operator.getitem:
                view.meta["val"] = source.meta["val"][node.args[1]]
            else:
                view.meta["val"] = _copied_value(node.meta["val"], source.meta["val"])
            made[node] = view
        return made[node]

    def _source(self, node: fx.Node, start: int) -> fx.Node:
        if not self.analysis.storages.of_node[node]:
            return node
        return self.member(node, start)

    def run(self) -> None:
        nodes = self.analysis.nodes
        copies = dict(self.plan.copies)
        detached: OrderedSet[fx.Node] = OrderedSet()
        for slot, node in enumerate(nodes):
            with self.graph.inserting_before(node):
                if slot in copies:
                    self.copied_before[slot] = {}
                    for i in copies[slot]:
                        again = self.copy(
                            nodes[i], lambda n: self.at_slot(n, slot, inside=True)
                        )
                        again.meta["val"] = _copied_value(nodes[i].meta["val"], None)
                        self.copied_before[slot][nodes[i]] = again
                if self.analysis.views[slot]:
                    continue
                for source in node.all_input_nodes:
                    instead = self.at_slot(source, slot, inside=False)
                    if instead is not source:
                        node.replace_input_with(source, instead)
                        detached.add(source)
        for node in reversed(nodes):
            if node in detached and not node.users:
                detached.update(node.all_input_nodes)
                self.graph.erase_node(node)
