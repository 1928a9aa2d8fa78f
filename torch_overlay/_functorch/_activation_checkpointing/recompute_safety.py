"""What the compiler must not run a second time on its own initiative.

One rule for every place where a recompute is decided: the partitioner's budgets and
its aggressive options, checkpointed regions under a budget, and copies made in the
backward.  It speaks of single nodes; which storages are written later is added by
``saved_set_guard``, and what a user asked to recompute is the user's decision.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true


if TYPE_CHECKING:
    from collections.abc import Collection


RANDOM = "draws random numbers"
COLLECTIVE = "is a collective"
_UNBACKED = "binds a size that only its run tells"

_COLLECTIVE_NAMESPACES = (
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "c10d",
    "c10d_functional",
    "fsdp",
    "symm_mem",
)
_KNOWN_NAMESPACES = (
    "aten",
    "inductor",
    "inductor_prims",
    "mkldnn",
    "onednn",
    "prim",
    "prims",
    "profiler",
    "quantized",
    "quantized_decomposed",
    "rngprims",
    "streams",
)
_RANDOM_HIGHER_ORDER = (
    "graphsafe_run_with_rng_state",
    "run_and_save_rng_state",
    "run_dtensor_rng_op",
    "run_with_rng_state",
)
# Higher-order operators without a body that are functions of their arguments.
_PURE_HIGHER_ORDER = ("control_deps", "out_dtype", "triton_kernel_wrapper_functional")
_WRAPPERS_OF_MUTATION = ("auto_functionalized", "auto_functionalized_v2")


def argument_of(node: fx.Node, name: str) -> object:
    """Value of an operator's argument: given, else its default, else None."""
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == name:
            if i < len(node.args):
                return node.args[i]
            return node.kwargs.get(name, argument.default_value)
    return None


def is_tagged_random(target: object) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_in_backward(node: fx.Node) -> bool:
    """Whether tracing put a joint graph's node into the backward."""
    tag = node.meta.get("partitioner_tag")
    return tag in ("is_backward", "must_be_in_backward")


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a call draws from a generator.

    Operators with the tag ``nondeterministic_seeded`` do; attention only where its
    dropout is not known to be zero.  Philox draws are functions of their seed and
    offset arguments.
    """
    target = node.target
    if not is_tagged_random(target) or getattr(target, "namespace", "") == "rngprims":
        return False
    dropout = argument_of(node, "dropout_p")
    if isinstance(dropout, fx.Node):
        dropout = dropout.meta.get("val")
    if dropout is None:
        return True
    return not statically_known_true(dropout == 0.0)


def is_collective(target: object) -> bool:
    return getattr(target, "namespace", None) in _COLLECTIVE_NAMESPACES


def _qualified_names(target: torch._ops.OpOverload) -> tuple[str, str]:
    """``namespace::name`` and ``namespace::name.overload``."""
    name = target._schema.name
    return name, f"{name}.{target._overloadname}"


def _custom_operator_hazard(
    target: torch._ops.OpOverload, allowed: Collection[str]
) -> str | None:
    if target.namespace in _KNOWN_NAMESPACES:
        return None
    if any(name in allowed for name in _qualified_names(target)):
        return None
    return "is a custom operator, which may draw random numbers inside"


def _bodies(node: fx.Node) -> list[fx.GraphModule]:
    owner = node.graph.owning_module
    found = []
    for source in node.all_input_nodes:
        if source.op == "get_attr" and owner is not None:
            body = operator.attrgetter(str(source.target))(owner)
            if isinstance(body, fx.GraphModule):
                found.append(body)
    return found


def _higher_order_hazard(node: fx.Node, allowed: Collection[str]) -> str | None:
    name = node.target.name()  # pyrefly: ignore [missing-attribute]
    if name in _RANDOM_HIGHER_ORDER:
        return RANDOM
    if name == "with_effects":
        return "has effects"
    if name in _WRAPPERS_OF_MUTATION:
        inner = node.args[0]
        if is_tagged_random(inner):
            return RANDOM
        if isinstance(inner, torch._ops.OpOverload):
            return _custom_operator_hazard(inner, allowed)
        return None
    bodies = _bodies(node)
    for body in bodies:
        for inner_node in body.graph.nodes:
            why = recompute_hazard(inner_node, allowed)
            if why is not None:
                return f"{why} (in {name})"
    if bodies or name in _PURE_HIGHER_ORDER:
        return None
    return "is a higher-order operator of unknown behaviour"


@functools.cache
def _is_function_of_arguments(target: object) -> bool:
    """Whether an operator's name, tags and schema alone speak against a hazard."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in _KNOWN_NAMESPACES
        and not is_tagged_random(target)
        and not target._schema.is_mutable
    )


def recompute_hazard(
    node: fx.Node, allowed_custom_ops: Collection[str] = ()
) -> str | None:
    """Why running ``node`` again could change results, or None.

    Args:
        allowed_custom_ops: custom operators that are known to be functions of their
            arguments, as ``namespace::name`` or ``namespace::name.overload``.
    """
    target = node.target
    if node.op != "call_function":
        return None
    if _is_function_of_arguments(target):
        return _UNBACKED if node.meta.get("unbacked_bindings") else None
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _higher_order_hazard(node, allowed_custom_ops)
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if draws_random_numbers(node):
        return RANDOM
    if is_collective(target):
        return COLLECTIVE
    if target._schema.is_mutable:
        return "mutates an argument"
    if node.meta.get("unbacked_bindings"):
        return _UNBACKED
    return _custom_operator_hazard(target, allowed_custom_ops)


@functools.cache
def seed_operators() -> frozenset[object]:
    """Inductor's operators that make seeds; a seed is 8 bytes."""
    from torch._inductor import inductor_prims

    names = ("seed", "seeds", "rand_eager_offset", "rand_eager_offsets")
    return frozenset(
        getattr(inductor_prims, name) for name in names if hasattr(inductor_prims, name)
    )
