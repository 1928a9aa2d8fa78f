from __future__ import annotations

from typing import TYPE_CHECKING

from torch_overlay._overrides import overrides


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.fx as fx
    from torch._functorch._aot_autograd.descriptors import AOTOutput
    from torch._functorch.partitioners import NodeInfo
    from torch.utils._ordered_set import OrderedSet


@overrides(
    "torch._functorch.partitioners:reordering_to_mimic_autograd_engine",
    feature="remat",
    patch="use-site-remat",
    issue="pytorch/pytorch#197838",
)
def reordering_to_mimic_autograd_engine(
    original: Callable[[fx.GraphModule], fx.GraphModule], gm: fx.GraphModule
) -> fx.GraphModule:
    from torch._functorch import config

    from ._activation_checkpointing import use_site_remat

    mode = getattr(config, "use_site_remat", "off")
    # Both partitioners call raise_getitems next, which recompiles the graph.
    return use_site_remat.use_site_remat(original(gm), mode, recompile=False)


@overrides(
    "torch._functorch.partitioners:choose_saved_values_set",
    feature="rng",
    patch="rng-under-budget",
    issue="pytorch/pytorch#190758",
)
def choose_saved_values_set(
    original: Callable[..., list[fx.Node]],
    joint_graph: fx.Graph,
    node_info: NodeInfo,
    memory_budget: float = 1,
) -> list[fx.Node]:
    from ._activation_checkpointing import saved_set_guard

    saved_set_guard.mark_values_to_save(joint_graph, node_info)
    saved = original(joint_graph, node_info, memory_budget)
    return saved_set_guard.complete_saved_values(joint_graph, node_info, saved)


@overrides(
    "torch._functorch.partitioners:choose_saved_values_set",
    feature="peak",
    patch="save-by-peak",
    issue="pytorch/pytorch#197838",
)
def choose_saved_values_set_by_peak(
    original: Callable[..., list[fx.Node]],
    joint_graph: fx.Graph,
    node_info: NodeInfo,
    memory_budget: float = 1,
) -> list[fx.Node]:
    from ._activation_checkpointing import save_by_peak

    if not save_by_peak.is_on():
        return original(joint_graph, node_info, memory_budget)
    return save_by_peak.save_by_peak(original, joint_graph, node_info, memory_budget)


@overrides(
    "torch._functorch.partitioners:_extract_graph_with_inputs_outputs",
    feature="rng",
    patch="rng-under-budget",
    issue="pytorch/pytorch#172730",
)
def _extract_graph_with_inputs_outputs(
    original: Callable[..., fx.Graph],
    joint_graph: fx.Graph,
    inputs: list[fx.Node],
    outputs: list[fx.Node],
    outputs_descs: list[AOTOutput],
    subgraph: str | None = None,
    ignore_must_be_in_fw_bw: bool = False,
) -> fx.Graph:
    from ._activation_checkpointing import rng_replay

    graph = original(
        joint_graph, inputs, outputs, outputs_descs, subgraph, ignore_must_be_in_fw_bw
    )
    rng_replay.drop_dead_draws(graph, subgraph)
    return graph


@overrides(
    "torch._functorch.partitioners:_extract_fwd_bwd_modules",
    feature="rng",
    patch="rng-under-budget",
    issue="pytorch/pytorch#190758",
)
def _extract_fwd_bwd_modules(
    original: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    joint_module: fx.GraphModule,
    saved_values: list[fx.Node],
    saved_sym_nodes: list[fx.Node],
    saved_opaque_nodes: list[fx.Node] | None = None,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_nodes: OrderedSet[fx.Node] | None = None,
    ignore_must_be_in_fw_bw: bool = False,
    omit_aot_autograd_runtime: bool = False,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    from ._activation_checkpointing import rng_replay

    fw_module, bw_module = original(
        joint_module,
        saved_values,
        saved_sym_nodes,
        saved_opaque_nodes,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=static_lifetime_input_nodes,
        ignore_must_be_in_fw_bw=ignore_must_be_in_fw_bw,
        omit_aot_autograd_runtime=omit_aot_autograd_runtime,
    )
    if omit_aot_autograd_runtime:
        return fw_module, bw_module
    # The original leaves in saved_sym_nodes what is really saved.
    return rng_replay.replay_recomputed_random_ops(
        joint_module, fw_module, bw_module, len(saved_sym_nodes)
    )
