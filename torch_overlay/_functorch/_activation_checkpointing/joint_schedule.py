"""A classified joint graph as numbers, for choosing what the forward saves.

What the partitioner knows of a joint graph, and what a backend will make of its
operators, in tuples that a search can walk many times.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.utils._ordered_set import OrderedSet
from torch.utils.flop_counter import flop_registry

from .graph_storage import graph_storages, GraphStorages, is_expanded, tensor_bytes
from .recompute_safety import recompute_hazard


if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import torch.fx as fx
    from torch._functorch.partitioners import NodeInfo, OpTypes

# What a backend makes of an operator.  A view renames storage, as does what takes a
# tuple apart.  A pointwise result may be computed inside its readers' kernels; what a
# reduction or a scatter reads may be computed inside theirs, its result may not.  An
# opaque operator reads and writes memory.
INPUT, VIEW, POINTWISE, REDUCTION, SCATTER, OPAQUE = range(6)

# Inductor generates code for these, though neither the partitioner's list nor a tag of
# the operator says so.
_POINTWISE_BESIDES = OrderedSet(
    "_unsafe_index _unsafe_masked_index avg_pool2d cat constant_pad_nd embedding flip "
    "index_select inductor_lookup_seed repeat roll "
    "select_scatter slice_scatter tril upsample_nearest2d".split()
)
_REDUCTION_BESIDES = OrderedSet(
    "_log_softmax _softmax cumsum inductor_randint inductor_random native_group_norm "
    "native_layer_norm prepare_softmax_online sum var".split()
)
_SCATTER = OrderedSet(
    "_unsafe_index_put _unsafe_masked_index_put_accumulate index_put scatter "
    "scatter_add scatter_reduce".split()
)


def _kind_of(node: fx.Node, types: OpTypes) -> int:
    target = node.target
    if target is operator.getitem:
        return VIEW
    packet = getattr(target, "overloadpacket", None)
    if types.is_compute_intensive(node) or packet in flop_registry:
        return OPAQUE
    name, tags = getattr(packet, "__name__", ""), getattr(target, "tags", ())
    if torch.Tag.reduction in tags or name in _REDUCTION_BESIDES:
        return REDUCTION
    if name in _SCATTER:
        return SCATTER
    pointwise = torch.Tag.pointwise in tags or name in _POINTWISE_BESIDES
    return POINTWISE if pointwise or types.is_fusible(node) else OPAQUE


def _scratch_bytes(node: fx.Node) -> int:
    """What a kernel allocates for itself: memory-efficient attention's backward.

    A float32 sum for each query, and for each 64 x 64 block of the query's gradient the
    block in float32 and four words (the workspace in the kernel's source).
    """
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not torch.ops.aten._scaled_dot_product_efficient_attention_backward:
        return 0
    query = node.args[1].meta["val"]  # pyrefly: ignore [missing-attribute]
    batch, heads, queries, size = (int(n) for n in query.shape)
    blocks = batch * heads * -(-queries // 64) * -(-size // 64)
    return 4 * batch * heads * queries + blocks * (4 * 64 * 64 + 4 * 4)


@dataclass(frozen=True, eq=False)
class JointSchedule:
    """A classified joint graph.  Node ``i`` is ``nodes[i]``, a value is a storage.

    Attributes:
        generated: whether a backend generates kernels; else each operator is one.
        nodes: the graph's nodes without its output, in order.
        number: place of each node in ``nodes``.
        kinds: what a backend makes of each node, ``INPUT`` to ``OPAQUE``.
        heavy: whether a node's results are worth saving by themselves: it is opaque, or
            a rule speaks against running it again.
        inputs: nodes that each node reads.
        users: nodes that read each node.
        values: values of each node's result.
        makes: values that each node is the first to have.
        maker: the node that makes each value.
        operands: values that each node reads; a view's are left out.
        size_bytes: bytes of each value.
        layout: equal for values that a kernel may use in each other's place: those of
            one size, dtype and device.  -1 for what is never used so.
        repeated: whether some node shows a value with repeated storage (stride 0).
        written_out: by node and operand, bytes of the operand written out in full.
        turned: by node, operands that it reads in another order than it writes.
        scratch: bytes that each node's kernel allocates for itself.
        held: values that the caller keeps alive: parameters and other graph inputs.
        fixed: values that are written in place or cannot be read.
        forward: calls that the forward's results need, in order, without views.
        backward: calls that depend on a tangent, in order, without views.
        arguments: values of graph inputs, tangents included.
        results: values that the forward returns.
        gradients: values that the backward returns.
    """

    generated: bool
    nodes: tuple[fx.Node, ...]
    number: dict[fx.Node, int]
    kinds: tuple[int, ...]
    heavy: tuple[bool, ...]
    inputs: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    maker: tuple[int, ...]
    operands: tuple[tuple[int, ...], ...]
    size_bytes: tuple[int, ...]
    layout: tuple[int, ...]
    repeated: bytes
    written_out: dict[tuple[int, int], int]
    turned: dict[int, list[int]]
    scratch: tuple[int, ...]
    held: OrderedSet[int]
    fixed: OrderedSet[int]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    arguments: OrderedSet[int]
    results: OrderedSet[int]
    gradients: OrderedSet[int]

    @cached_property
    def is_held(self) -> bytes:
        """For each value, whether the caller keeps it alive."""
        return bytes(v in self.held for v in range(len(self.size_bytes)))

    def values_of(self, nodes: Iterable[int]) -> OrderedSet[int]:
        return OrderedSet(v for i in nodes for v in self.values[i])

    def makers_of(self, values: Iterable[int]) -> list[int]:
        """Calls that make values, each once."""
        makers = dict.fromkeys(self.maker[v] for v in values)
        return [i for i in makers if self.kinds[i] != INPUT]

    def saved_bytes(self, values: Collection[int]) -> int:
        """Bytes that a saved set keeps alive."""
        return sum(self.size_bytes[v] for v in values if not self.is_held[v])

    def may_save(self, i: int) -> bool:
        """Whether a node makes a tensor that no user's policy decides on."""
        meta = self.nodes[i].meta
        plain = isinstance(meta.get("val"), torch.Tensor) and not meta.get("recompute")
        return plain and self.fixed.isdisjoint(self.values[i])

    def may_run_again(self, i: int) -> bool:
        """Whether neither a rule nor a user's policy speaks against a recompute."""
        while self.nodes[i].target is operator.getitem:
            (i,) = self.inputs[i]
        node = self.nodes[i]
        return not node.meta.get("recompute") and recompute_hazard(node) is None

    def parts(self, i: int) -> tuple[int, ...]:
        """The nodes that take a node's results apart, or the node itself."""
        parts = (k for k in self.users[i] if self.nodes[k].target is operator.getitem)
        return tuple(parts) or (i,)

    def emitted(self, wanted: Iterable[int], saved: Iterable[int]) -> list[int]:
        """``wanted`` in order, each after what makes its operands that are not saved.

        This is the order in which the partitioner emits a backward, without views.
        """
        operands, maker = self.operands, self.maker
        have, done = bytearray(len(self.size_bytes)), bytearray(len(self.nodes))
        for v in self.arguments:
            have[v] = 1
        for v in saved:
            have[v] = 1
        order: list[int] = []
        for node in wanted:
            if done[node]:
                continue
            done[node] = 1
            found = [node]
            for i in found:
                for v in operands[i]:
                    if not have[v]:
                        have[v] = 1
                        source = maker[v]
                        if not done[source]:
                            done[source] = 1
                            found.append(source)
            if len(found) > 1:
                found.sort()
            order += found
        return order


def _kinds(
    nodes: Sequence[fx.Node], storages: GraphStorages
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Kinds of nodes, and values that each is the first to have."""
    # The partitioner imports this module.
    from torch._functorch.partitioners import get_default_op_list

    types = get_default_op_list()
    by_target: dict[object, int] = {}
    kinds, makes = [], []
    seen = bytearray(len(storages.size_bytes))
    for node in nodes:
        own = storages.of_node[node]
        made = tuple(v for v in own if not seen[v])
        for v in made:
            seen[v] = 1
        makes.append(made)
        if node.op != "call_function":
            kinds.append(INPUT)
            continue
        kind = by_target.get(node.target)
        if kind is None:
            kind = by_target[node.target] = _kind_of(node, types)
        if not made:
            # Also sizes, which take no memory, and writes, which make no value.
            kind = VIEW
        elif kind == VIEW:
            kind = OPAQUE
        elif kind == POINTWISE and len(made) != 1:
            kind = REDUCTION
        kinds.append(kind)
    return kinds, makes


def _layouts(nodes: Sequence[fx.Node], storages: GraphStorages) -> tuple[int, ...]:
    known: dict[object, int] = {}
    found = [-1] * len(storages.size_bytes)
    for node in nodes:
        values, value = storages.of_node[node], node.meta.get("val")
        if (
            len(values) == 1
            and isinstance(value, torch.Tensor)
            and found[values[0]] < 0
        ):
            key = (storages.size_bytes[values[0]], value.dtype, value.device)
            found[values[0]] = known.setdefault(key, len(known))
    return tuple(found)


def _is_turned(source: fx.Node, node: fx.Node) -> bool:
    read, written = source.meta.get("val"), node.meta.get("val")
    if not isinstance(read, torch.Tensor) or not isinstance(written, torch.Tensor):
        return False
    if read.dim() != written.dim():
        return not (read.is_contiguous() and written.is_contiguous())
    return read.stride() != written.stride() and read.shape == written.shape


def joint_schedule(
    graph: fx.Graph,
    info: NodeInfo,
    dropped: Collection[fx.Node] = (),
    generated: bool = True,
) -> JointSchedule:
    """Read a classified joint graph.

    Args:
        graph: the joint graph, with ``meta["val"]``.
        info: what the partitioner knows of it.
        dropped: graph inputs that the caller does not keep alive.
        generated: whether a backend generates kernels, as Inductor does.
    """
    storages = graph_storages(graph)
    nodes = tuple(n for n in graph.nodes if n.op != "output")
    number = {n: i for i, n in enumerate(nodes)}
    values = tuple(storages.of_node[n] for n in nodes)
    kinds, makes = _kinds(nodes, storages)
    maker = [0] * len(storages.size_bytes)
    for i, made in enumerate(makes):
        for v in made:
            maker[v] = i
    inputs = tuple(tuple(number[a] for a in n.all_input_nodes) for n in nodes)
    operands: list[tuple[int, ...]] = []
    written_out: dict[tuple[int, int], int] = {}
    repeated = bytearray(len(maker))
    turned: dict[int, list[int]] = {}
    for i, kind in enumerate(kinds):
        if kind in (INPUT, VIEW):
            operands.append(())
            continue
        operands.append(tuple(dict.fromkeys(v for a in inputs[i] for v in values[a])))
        for a in inputs[i]:
            if kind == POINTWISE and _is_turned(nodes[a], nodes[i]):
                turned.setdefault(i, []).extend(values[a])
            if is_expanded(nodes[a]) and len(values[a]) == 1:
                written_out[i, values[a][0]] = tensor_bytes(nodes[a].meta["val"])
                repeated[values[a][0]] = 1
    returned = [number[n] for n in graph.output_node().all_input_nodes]
    calls = [i for i, k in enumerate(kinds) if k not in (INPUT, VIEW)]
    kept_inputs = [n for n in info.inputs if n not in dropped]

    def values_of(places: Iterable[int]) -> OrderedSet[int]:
        return OrderedSet(v for i in places for v in values[i])

    return JointSchedule(
        generated=generated,
        nodes=nodes,
        number=number,
        kinds=tuple(kinds),
        heavy=tuple(
            kind == OPAQUE
            or (kind not in (INPUT, VIEW) and recompute_hazard(n) is not None)
            for kind, n in zip(kinds, nodes, strict=True)
        ),
        inputs=inputs,
        # The graph's output is a user without a number.
        users=tuple(
            tuple(number[u] for u in n.users if u.op != "output") for n in nodes
        ),
        values=values,
        makes=tuple(makes),
        maker=tuple(maker),
        operands=tuple(operands),
        size_bytes=storages.size_bytes,
        layout=_layouts(nodes, storages),
        repeated=bytes(repeated),
        written_out=written_out,
        turned=turned,
        scratch=tuple(map(_scratch_bytes, nodes)),
        held=values_of(number[n] for n in kept_inputs),
        fixed=storages.mutated | storages.opaque,
        forward=tuple(i for i in calls if info.is_required_fw(nodes[i])),
        backward=tuple(i for i in calls if info.is_required_bw(nodes[i])),
        arguments=values_of(i for i, k in enumerate(kinds) if k == INPUT),
        results=values_of(i for i in returned if info.is_required_fw(nodes[i])),
        gradients=values_of(i for i in returned if info.is_required_bw(nodes[i])),
    )
