"""Which storages the nodes of an FX graph touch, and how many bytes each has.

Aliases are found from the fake storages in ``meta["val"]`` and from the alias
annotations of operator schemas, never from a list of view names.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._ordered_set import OrderedSet


UNBACKED_SIZE_HINT = 4096


@dataclass(frozen=True)
class GraphStorages:
    """Storage table of one graph.

    Attributes:
        size_bytes: bytes of each storage, indexed by storage id.  Symbolic sizes use
            their hint.
        of_node: storage ids of a node's value in order; a tuple-producing node lists
            the storages of all its tensors, a node without tensors lists none.
        mutated: ids of storages that some node of the graph writes in place.
        opaque: ids of storages that belong to tensors whose storage cannot be read
            (sparse tensors, for example).
    """

    size_bytes: tuple[int, ...]
    of_node: dict[fx.Node, tuple[int, ...]]
    mutated: OrderedSet[int]
    opaque: OrderedSet[int]


def tensors_of(value: object) -> list[torch.Tensor]:
    """All tensors of a node's value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def _hint(size: int | torch.SymInt) -> int:
    if type(size) is int:
        return size
    return int(optimization_hint(size, fallback=UNBACKED_SIZE_HINT))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; symbolic sizes use their hint."""
    return _hint(tensor.numel()) * tensor.dtype.itemsize


def is_expanded(node: fx.Node) -> bool:
    """Whether a value repeats storage (stride 0), like a mask expanded over heads.

    A backend that computes such a value where an opaque kernel reads it writes it out
    at expanded size, so a copy could cost more than it frees.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    for stride, size in zip(value.stride(), value.shape, strict=True):
        if isinstance(stride, int) and stride == 0 and size != 1:
            return True
    return False


class _UnionFind:
    def __init__(self) -> None:
        self.parent: list[int] = []

    def new(self) -> int:
        self.parent.append(len(self.parent))
        return len(self.parent) - 1

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def union(self, a: int, b: int) -> None:
        if a == b:
            return
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[max(a, b)] = min(a, b)


@functools.cache
def _annotated(target: object, written: bool) -> tuple[tuple[int, str], ...]:
    """Places and names of arguments that a result may alias, or that are written."""
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    schema = target._schema
    if not written and all(r.alias_info is None for r in schema.returns):
        return ()
    return tuple(
        (i, a.name)
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and (a.alias_info.is_write or not written)
    )


@functools.cache
def _is_functional(target: object) -> bool:
    """Whether an operator's schema says that it neither aliases nor writes."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and not _annotated(target, written=False)
        and not _annotated(target, written=True)
    )


def _annotated_arguments(node: fx.Node, written: bool) -> list[fx.Node]:
    places = _annotated(node.target, written)
    if not places:
        return []
    args = node.args
    values = [args[i] if i < len(args) else node.kwargs.get(name) for i, name in places]
    if all([isinstance(v, fx.Node) for v in values]):
        return values
    return [v for v in pytree.tree_leaves(values) if isinstance(v, fx.Node)]


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Arguments whose storage ``node`` writes in place, by its schema.

    A call without a schema that mutates (``auto_functionalized`` lowered in place, a
    Triton kernel wrapper) is not seen here; such nodes are never recomputed and their
    tensor arguments count as written.
    """
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _annotated_arguments(node, written=True)
    if isinstance(target, torch._ops.HigherOrderOperator):
        name = target.name()
        if "triton_kernel_wrapper_mutation" in name or name == "auto_functionalized":
            return list(node.all_input_nodes)
    return []


def graph_storages(graph: fx.Graph) -> GraphStorages:
    """Collect the storages of ``graph``.  Reads only; needs ``meta["val"]``."""
    groups = _UnionFind()
    by_fake: dict[int, int] = {}
    ids: dict[fx.Node, tuple[int, ...]] = {}
    keep_alive: list[object] = []
    sizes: list[int] = []
    opaque: list[int] = []
    written: list[int] = []

    for node in graph.nodes:
        mine: list[int] = []
        for tensor in tensors_of(node.meta.get("val")):
            try:
                fake = tensor.untyped_storage()
                key: int | None = fake._cdata
                size = _hint(fake.nbytes())
                keep_alive.append(fake)
            except (NotImplementedError, RuntimeError):
                key, size = None, tensor_bytes(tensor)
            known = by_fake.get(key) if key is not None else None
            if known is None:
                known = groups.new()
                sizes.append(size)
                if key is not None:
                    by_fake[key] = known
                else:
                    opaque.append(known)
            sizes[known] = max(sizes[known], size)
            mine.append(known)
        ids[node] = tuple(mine)
        if node.op != "call_function" or _is_functional(node.target):
            continue
        if node.target is operator.getitem:
            source, index = node.args
            parts = source.meta.get("val")
            if isinstance(parts, (tuple, list)) and isinstance(index, int):
                before = len(tensors_of(parts[:index]))
                theirs_from = ids[source][before:]
                for own, theirs in zip(ids[node], theirs_from, strict=False):
                    groups.union(own, theirs)
        for source in _annotated_arguments(node, written=False):
            for own in ids[node]:
                for theirs in ids[source]:
                    groups.union(own, theirs)
        for source in written_arguments(node):
            written.extend(ids[source])

    roots: dict[int, int] = {}
    table: list[int] = []
    dense: list[int] = []
    for i, size in enumerate(sizes):
        root = groups.find(i)
        if root not in roots:
            roots[root] = len(table)
            table.append(0)
        dense.append(roots[root])
        table[dense[i]] = max(table[dense[i]], size)

    of_node = {
        n: (dense[v[0]],)
        if len(v) == 1
        else tuple(dict.fromkeys(map(dense.__getitem__, v)))
        for n, v in ids.items()
    }
    return GraphStorages(
        size_bytes=tuple(table),
        of_node=of_node,
        mutated=OrderedSet(dense[i] for i in written),
        opaque=OrderedSet(dense[i] for i in opaque),
    )
